// The charts of a comparison: one for each metric, with a line for each run, or with the mean and spread of each group.

let runs, groups, membersOf; // set from `data`; runs and groups keep their indices when the data is updated
const COLORS = 7; // the number of colors of runs in page.css; further groups repeat them with other dashes
const DASHES = ["solid", "dash", "dot", "dashdot", "10px,3px", "10px,3px,2px,3px,2px,3px", "2px,5px", "14px,4px,4px,4px"];
const SVG_DASHES = { solid: null, dash: "6 3", dot: "2 2", dashdot: "6 2 2 2" };
const FEW_LINES = 8; // with more lines, a chart has no legend and shows no raw curves behind the smoothed ones
const MANY_LINES = 12; // with more lines, the pointer shows the value of one line, not of all
const GRID_POINTS = 500; // the largest number of positions at which the runs of a group are averaged
view.spread = "range";

function readRuns() {
  ({ runs, groups } = data);
  membersOf = groups.map((_, group) => runs.map((_, run) => run).filter((run) => runs[run].group === group));
}

const isGrouped = () => data.group_by !== null;
const isGone = (run) => data.are_there?.[run] === false; // whether the run's folder is gone; known only in a live page

const colorName = (group) => `r${group % COLORS}`;
const dashOf = (group) => DASHES[group % DASHES.length]; // dashes distinguish the lines in print without colors

/** A sample of a group's line, as the charts draw it. */
function swatch(group) {
  const dash = dashOf(group);
  return svg("svg", { class: "swatch", width: 26, height: 8, viewBox: "0 0 26 8", "aria-hidden": "true" },
    svg("line", { x1: 0, x2: 26, y1: 4, y2: 4, "stroke-dasharray": dash in SVG_DASHES ? SVG_DASHES[dash] : dash.replaceAll("px", "").replaceAll(",", " "), style: { stroke: `var(--${colorName(group)})` } }));
}

const isShown = (run) => !view.hidden.has(run);
const shownRuns = () => runs.map((_, run) => run).filter(isShown);
const shownGroups = () => groups.map((_, group) => group).filter((group) => membersOf[group].some(isShown));

// --- the horizontal axis, which is the same in all charts ---

const axisNames = { step: "step", seconds: "training time", wall: "time since the start", tokens: "tokens", samples: "samples" };
const isTime = () => view.axis === "seconds" || view.axis === "wall";
const timeUnit = () => timeUnitFor(Math.max(0, ...data.axes.map((axis) => axis[view.axis].at(-1) ?? 0)));
const axisTitle = () => (isTime() ? `${axisNames[view.axis]}, ${timeUnit()[1]}` : axisNames[view.axis]);
const hoverTitle = () => (view.axis === "step" ? "step %{x}" : `%{x} ${isTime() ? timeUnit()[1] : view.axis}`);
const hasAxis = (run) => data.axes[run][view.axis].length > 0;

function axisRange() {
  const unit = isTime() ? timeUnit()[0] : 1;
  const ends = data.axes.map((axis) => axis[view.axis]).filter((values) => values.length);
  return ends.length ? [Math.min(...ends.map((values) => values[0])) / unit, Math.max(...ends.map((values) => values.at(-1))) / unit] : [0, 1];
}

/** The positions of a curve's points on the chosen axis. */
function axisPositions({ run, x }) {
  if (view.axis === "step") return x;
  const { step } = data.axes[run], values = data.axes[run][view.axis], unit = isTime() ? timeUnit()[0] : 1;
  return x.map((each) => interpolated(step, values, each) / unit);
}

// --- one chart ---

const curvesIn = (chart) => data.curves[chart.title].filter(({ run }) => isShown(run) && hasAxis(run));

function valuesOf(chart, curve) {
  const [scale] = scaleOf(chart);
  return scale === 1 ? curve.y : curve.y.map((value) => (value === null ? null : value / scale));
}

const visibleLines = (chart) => curvesIn(chart).map((curve) => ({ ...curve, x: axisPositions(curve), y: valuesOf(chart, curve) }));
const maxValueOf = (chart) => data.curves[chart.title].reduce((most, { y }) => y.reduce((found, value) => Math.max(found, value ?? 0), most), 0);
const shapes = () => [];
const isMain = (chart, family) => family.name === "" && chart.title.endsWith("loss") && family.charts.length < 3;
const pageTitle = () => "comparison";
const hoverMode = (chart) => (isMeans() ? shownGroups().length : curvesIn(chart).length) > MANY_LINES ? "closest" : "x unified";
const isMeans = () => isGrouped() && view.spread !== "runs";

/**
 * The number of points on each side of a point that smoothing averages. It is proportional to the number of points of the curve, so that it
 * covers the same stretch of the axis in all curves. Curves with few points are not smoothed.
 */
function smoothingRadius(chart, points) {
  if (view.smooth === 0 || points <= FEW_POINTS) return 0;
  const most = Math.max(...data.curves[chart.title].map(({ x }) => x.length));
  return Math.round((view.smooth / (1 - view.smooth)) * (points / most));
}

function traces(chart) {
  const lines = visibleLines(chart).map((line) => ({ ...line, raw: line.y, radius: smoothingRadius(chart, line.x.length) }));
  for (const line of lines) if (line.radius > 0) line.y = smoothed(line.raw, line.radius);
  const [, unit] = scaleOf(chart);
  // The hover box of several runs has one position as its title. If the runs have different positions, each value is followed by its position.
  const isAlike = lines.every(({ x }) => x.length === lines[0].x.length && x.every((value, index) => value === lines[0].x[index]));
  const at = hoverMode(chart) === "closest" ? `${hoverTitle()}: ` : "", where = at || isAlike ? "" : ` (${hoverTitle()})`;
  const styled = (group) => ({ color: color(colorName(group)), width: 1.9, dash: dashOf(group) });
  if (isMeans()) return shownGroups().flatMap((group) => meanTraces(chart, group, lines.filter(({ run }) => runs[run].group === group), styled(group), `${at}%{y:.5~g} ${unit}`));
  return lines.flatMap(({ run, x, y, raw, radius }) => {
    const line = styled(runs[run].group);
    const shape = { x, type: "scatter", connectgaps: false, name: plotlyText(runs[run].name), hovertemplate: `${at}%{y:.5~g} ${unit}${where}` };
    if (radius > 0 && lines.length <= FEW_LINES) {
      return [{ ...shape, y: raw, line: { ...line, dash: "solid", width: 1 }, mode: "lines", opacity: 0.22, hoverinfo: "skip", hovertemplate: undefined, meta: "raw" }, { ...shape, y, line, mode: "lines", meta: "smoothed" }];
    }
    return [{ ...shape, y, line, mode: x.length <= FEW_POINTS && radius === 0 ? "lines+markers" : "lines", marker: { size: x.length === 1 ? 8 : 4.5, color: line.color }, meta: radius > 0 ? "smoothed" : "curve" }];
  });
}

/** The mean and the spread of a group at common positions, over the runs that have values there. Each run is interpolated linearly. */
function meansOf(lines) {
  const finite = lines.map(({ x, y }) => {
    const indices = x.map((_, index) => index).filter((index) => y[index] !== null);
    return { x: indices.map((index) => x[index]), y: indices.map((index) => y[index]) };
  }).filter(({ x }) => x.length);
  return gridOf(finite).map((at) => {
    const values = finite.filter(({ x }) => x[0] <= at && at <= x.at(-1)).map(({ x, y }) => interpolated(x, y, at));
    const mean = values.reduce((sum, value) => sum + value, 0) / values.length;
    const deviation = values.length > 1 ? Math.sqrt(values.reduce((sum, value) => sum + (value - mean) ** 2, 0) / (values.length - 1)) : 0;
    const [low, high] = view.spread === "range" ? [Math.min(...values), Math.max(...values)] : [mean - deviation, mean + deviation];
    return { at, mean, low, high, count: values.length };
  });
}

/** The positions of all points. If there are too many, only those of the lowest and the highest point in each of many equal parts, and the ends. */
function gridOf(lines) {
  const ascending = (positions) => [...new Set(positions)].sort((a, b) => a - b);
  const all = ascending(lines.flatMap(({ x }) => x));
  if (all.length <= GRID_POINTS) return all;
  const points = lines.flatMap(({ x, y }) => x.map((at, index) => ({ at, value: y[index] }))).sort((a, b) => a.at - b.at);
  const grid = [all[0], all.at(-1)], size = Math.ceil(points.length / (GRID_POINTS / 2 - 1));
  for (let first = 0; first < points.length; first += size) {
    const part = points.slice(first, first + size);
    grid.push(part.reduce((low, point) => (point.value < low.value ? point : low)).at, part.reduce((high, point) => (point.value > high.value ? point : high)).at);
  }
  return ascending(grid);
}

function meanTraces(chart, group, lines, line, hovertemplate) {
  const means = meansOf(lines);
  if (!means.length) return [];
  const x = means.map(({ at }) => at), [, unit] = scaleOf(chart);
  const edge = { x, type: "scatter", mode: "lines", line: { width: 0, color: line.color }, hoverinfo: "skip", showlegend: false, name: plotlyText(groups[group]) };
  const texts = means.map(({ low, high, count: all }) => ` (${number(low, 4)} to ${number(high, 4)}${unit && ` ${unit}`}, ${plural(all, "run")})`);
  return [
    { ...edge, y: means.map(({ low }) => low), meta: "low" },
    { ...edge, y: means.map(({ high }) => high), fill: "tonexty", fillcolor: `${line.color}33`, meta: "high" },
    { x, y: means.map(({ mean }) => mean), text: texts, type: "scatter", mode: means.length <= FEW_POINTS ? "lines+markers" : "lines", line, marker: { size: means.length === 1 ? 8 : 4.5, color: line.color }, name: plotlyText(groups[group]), hovertemplate: `${hovertemplate}%{text}`, meta: lines.some(({ radius }) => radius > 0) ? "smoothed" : "curve" },
  ];
}

/** The legend of a chart: the line of each group and its last value. Empty if there are many groups. */
function legendButtons(chart) {
  const found = groups.map((name, group) => [name, group, data.curves[chart.title].filter(({ run }) => runs[run].group === group)]).filter(([, , curves]) => curves.length);
  if (found.length > FEW_LINES) return [];
  return found.map(([name, group, curves]) => {
    const shown = curves.some(({ run }) => isShown(run));
    const averaged = curves.filter(({ run }) => isShown(run) || !shown);
    return el("button", { type: "button", class: "plain", title: name, "aria-pressed": String(shown), on: { click: () => showRuns(membersOf[group], !shown) } },
      swatch(group), el("span", { class: "short" }, displayName(name)), el("b", { title: curves.length > 1 ? "the mean of the last values" : "the last value" }, lastOf(chart.title, averaged, isBytes(chart))));
  });
}

function summary(chart) {
  const lines = curvesIn(chart);
  const texts = lines.slice(0, FEW_LINES).map((curve) => `${runs[curve.run].name}: last ${lastOf(chart.title, [curve], isBytes(chart))}`);
  return `${chart.title}: ${plural(lines.length, "run")}. ${texts.join("; ")}`;
}

function noteFor(chart) {
  const curves = data.curves[chart.title].filter(({ run }) => isShown(run));
  const without = curves.filter(({ run }) => !hasAxis(run)).length;
  const odd = curves.filter((curve) => curve.odd > 0).length;
  const thinned = curves.find(({ x, count: all }) => all > x.length);
  return [
    without && `${plural(without, "run")} without ${axisNames[view.axis]} not drawn`, odd && `NaN or infinite values in ${plural(odd, "run")}`,
    thinned && `${number(thinned.x.length)} of ${number(thinned.count)} points of a run are drawn, including the extremes`,
  ].filter(Boolean).join("; ");
}

function csvOf(chart) {
  const rows = data.curves[chart.title].filter(({ run }) => isShown(run)).flatMap(({ run, x, y }) =>
    x.map((step, index) => (y[index] === null ? null : [csvText(runs[run].name), csvText(groups[runs[run].group]), step, y[index]].join(","))).filter(Boolean));
  return [["run", "group", "step", chart.title].map(csvText).join(","), ...rows, ""].join("\r\n");
}

/** The axes that at least one run has, each with its title. */
function axesOfRuns() {
  const titles = { step: "Step", seconds: "Training time", wall: "Wall time", tokens: "Tokens", samples: "Samples" };
  return Object.entries(titles).filter(([name]) => data.axes.some((axis) => axis[name].length));
}

function curvesSection() {
  const spreads = [["range", "Min to max"], ["deviation", "± deviation"], ["runs", "Single runs"]];
  const more = isGrouped() ? el("span", { class: "soft" }, "Spread ", choice("Spread", spreads, view.spread, (spread) => { view.spread = spread; redraw(); })) : null;
  const left = data.metrics_left_out ? ` ${plural(data.metrics_left_out, "metric")} did not fit into this page; choose metrics with callsheet compare --metric.` : "";
  const means = isGrouped() ? " A line is the mean of a group's runs, the band around it their spread." : "";
  return [el("p", { class: "about" }, `Drag across a chart to zoom all of them; double-click for the whole run.${means}${left}`), ...chartsOf(data.families, axesOfRuns(), more)];
}

addEventListener("beforeprint", () => { for (const element of document.querySelectorAll(".chart")) if (element.clientWidth) drawChart(element); });
