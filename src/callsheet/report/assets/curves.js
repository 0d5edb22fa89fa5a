// The charts of one run: its curves, and marks for evaluations, checkpoints, resumes and values that are not finite.

const MARK_WIDTH = 9; // in pixels; marks that are closer together are merged
const colors = ["c0", "c1", "c2", "c3", "c4", "c6", "c7", "c5"];
const splitColors = { train: "c0", validation: "c1", val: "c1", eval: "c1", test: "c2" };
const axisTitles = { step: "step", tokens: "tokens" };

// --- the horizontal axis, which is the same in all charts ---

const timeUnit = () => timeUnitFor(data.axis.seconds.at(-1) ?? 0);

function axisTitle() {
  return view.axis === "time" ? `training time, ${timeUnit()[1]}` : axisTitles[view.axis];
}

const hoverTitle = () => `${view.axis === "step" ? "step " : ""}%{x}${view.axis === "time" ? ` ${timeUnit()[1]}` : view.axis === "tokens" ? " tokens" : ""}`;

/** The first and the last position on the axis. */
const axisRange = () => [axisPosition(data.axis.step[0] ?? 0), axisPosition(data.axis.step.at(-1) ?? 1)];

/** The position of a step on the chosen axis, interpolated linearly between the recorded steps. */
function axisPosition(step) {
  if (view.axis === "step") return step;
  const values = view.axis === "time" ? data.axis.seconds : data.axis.tokens;
  const unit = view.axis === "time" ? timeUnit()[0] : 1;
  return data.axis.step.length ? interpolated(data.axis.step, values, step) / unit : step;
}

/**
 * The number of points on each side of a point that smoothing averages. It is proportional to the number of points of the curve, so that it
 * covers the same stretch of the axis in all curves. Curves with few points are not smoothed.
 */
function smoothingRadius(points) {
  if (view.smooth === 0 || points <= FEW_POINTS) return 0;
  const main = data.families.find((family) => family.name === "") ?? data.families[0];
  const most = Math.max(...main.charts.flatMap((chart) => chart.curves.map(({ name }) => data.curves[name].x.length)));
  return Math.round((view.smooth / (1 - view.smooth)) * Math.min(1, points / most));
}

// --- one chart ---

function colorName(chart, index) {
  const { label } = chart.curves[index];
  if (label === "per device") return "c1";
  if (splitColors[label] && chart.curves.length <= 5) return splitColors[label];
  return chart.curves.length === 1 ? "c0" : colors[index % colors.length];
}

const colorOf = (chart, index) => color(colorName(chart, index));

function traces(chart, width) {
  const found = [];
  const [, unit] = scaleOf(chart);
  chart.curves.forEach((curve, index) => {
    const { x } = data.curves[curve.name];
    const y = valuesOf(chart, curve.name);
    const xs = x.map(axisPosition);
    const visible = !view.hidden.has(curve.name);
    const line = { color: colorOf(chart, index), width: 1.7 };
    const mode = x.length <= FEW_POINTS ? "lines+markers" : "lines";
    const shape = { x: xs, type: "scatter", mode, visible, connectgaps: false, name: plotlyText(curve.label), hovertemplate: `%{y:.5~g} ${unit}` };
    const radius = smoothingRadius(x.length);
    if (radius > 0) {
      found.push({ ...shape, y, line: { ...line, width: 1 }, mode: "lines", opacity: 0.28, hoverinfo: "skip", hovertemplate: undefined, meta: "raw" });
      found.push({ ...shape, y: smoothed(y, radius), line, mode: "lines", meta: "smoothed" });
    } else found.push({ ...shape, y, line, marker: { size: x.length === 1 ? 8 : 4.5, color: line.color }, meta: "curve" });
  });
  return [...found, ...markTraces(chart, width)];
}

/** Merges marks, given as [step, text], that would overlap. A merged mark has the number of its marks and their steps as its text. */
function mergeMarks(marks, noun, width) {
  const [from, to] = view.range ?? axisRange();
  const minDistance = (Math.abs(to - from) * MARK_WIDTH) / Math.max(width, 100);
  const groups = [];
  for (const [step, text] of [...marks].sort(([a], [b]) => a - b)) {
    const group = groups.at(-1);
    if (group && axisPosition(step) - axisPosition(group[0][0]) < minDistance) group.push([step, text]); else groups.push([[step, text]]);
  }
  return groups.map((group) => [group[0][0], group.length === 1 ? group[0][1] : `${plural(group.length, noun)}, steps ${number(group[0][0])} to ${number(group.at(-1)[0])}`]);
}

/** Marks for evaluations and checkpoints along the lower edge, and for values that are not finite along the upper edge. */
function markTraces(chart, width) {
  const marks = [];
  const mark = (points, symbol, tint, size, y) => points.length && marks.push({
    x: points.map(([step]) => axisPosition(step)), y: points.map(() => y), text: points.map(([, text]) => text), type: "scatter", mode: "markers", yaxis: "y2", showlegend: false, cliponaxis: false,
    marker: { symbol, color: tint, size, line: { width: 1.2, color: tint } }, hovertemplate: "%{text}<extra></extra>", meta: "marks",
  });
  if (view.marks) {
    mark(mergeMarks(data.marks.evaluations.map((step) => [step, "evaluation"]), "evaluation", width), "line-ns", color("faint"), 6, 0.016);
    mark(mergeMarks(data.marks.checkpoints.map(({ step, kind }) => [step, `checkpoint, ${plotlyText(kind)}`]), "checkpoint", width), "triangle-up", color("good"), 5, 0.016);
  }
  for (const curve of chart.curves) {
    const odd = view.hidden.has(curve.name) ? [] : data.curves[curve.name].odd_at;
    mark(odd.map(([step, value]) => [step, `${plotlyText(curve.label)} is ${plotlyText(value)}`]), "x-thin", color("bad"), 8, 0.97);
  }
  return marks;
}

/** Dotted vertical lines where the run was resumed. */
const shapes = () => (view.marks ? data.marks.resumes : []).map(({ step }) => ({ type: "line", x0: axisPosition(step), x1: axisPosition(step), y0: 0, y1: 1, yref: "paper", line: { color: color("warn"), width: 1, dash: "dot" } }));

const maxValueOf = (chart) => Math.max(...chart.curves.map(({ name }) => Math.max(...data.curves[name].y.map((value) => value ?? 0))));

function valuesOf(chart, name) {
  const [scale] = scaleOf(chart);
  return scale === 1 ? data.curves[name].y : data.curves[name].y.map((value) => (value === null ? null : value / scale));
}

/** The curves that are not hidden: their positions on the axis and their values. */
const visibleLines = (chart) => chart.curves.filter(({ name }) => !view.hidden.has(name)).map(({ name }) => ({ x: data.curves[name].x.map(axisPosition), y: valuesOf(chart, name) }));

function csvOf(chart) {
  const names = chart.curves.map(({ name }) => name);
  const rows = new Map();
  names.forEach((name, index) => {
    const { x, y, odd_at: odd } = data.curves[name];
    const put = (step, value) => { if (!rows.has(step)) rows.set(step, names.map(() => "")); rows.get(step)[index] = value; };
    for (const [step, value] of odd) put(step, value);
    x.forEach((step, at) => { if (y[at] !== null) put(step, y[at]); });
  });
  const lines = [...rows].sort(([a], [b]) => a - b).map(([step, values]) => [step, ...values].join(","));
  return [["step", ...names].map(csvText).join(","), ...lines, ""].join("\r\n");
}

const legendButtons = (chart) => chart.curves.map((curve, index) => legendButton(chart, curve, index));

function legendButton(chart, curve, index) {
  const toggle = () => { if (!view.hidden.delete(curve.name)) view.hidden.add(curve.name); redraw(); };
  return el("button", { type: "button", class: "plain", title: curve.name, "aria-pressed": String(!view.hidden.has(curve.name)), on: { click: toggle } },
    el("i", { style: { background: `var(--${colorName(chart, index)})` } }),
    displayName(chart.title.endsWith(curve.label) ? curve.name : curve.label), el("b", { title: "the last value" }, lastOf(curve.name, [data.curves[curve.name]], isBytes(chart))));
}

function summary(chart) {
  return chart.curves.map(({ name }) => {
    const curve = data.curves[name], { y, count: all } = curve;
    const finite = y.filter((value) => value !== null), show = (value) => metric(name, value, isBytes(chart));
    const ends = finite.length ? `, from ${show(Math.min(...finite))} to ${show(Math.max(...finite))}, last ${lastOf(name, [curve], isBytes(chart))}` : "";
    return `${name}: ${plural(all, "value")}${ends}`;
  }).join("; ");
}

function noteFor(chart) {
  const thinned = chart.curves.find(({ name }) => data.curves[name].count > data.curves[name].x.length);
  if (!thinned) return "";
  const { x, count: all } = data.curves[thinned.name];
  return `${number(x.length)} of ${number(all)} points are drawn, including the extremes`;
}

function curvesSection(families) {
  const marks = [
    data.marks.evaluations.length ? "ticks are evaluations" : "", data.marks.checkpoints.length ? "triangles are checkpoints" : "",
    data.marks.resumes.length ? "dotted lines are resumes" : "",
  ].filter(Boolean).join(", ");
  const axes = [["step", "Step"], ...(data.axis.seconds.length ? [["time", "Time"]] : []), ...(data.axis.tokens.length ? [["tokens", "Tokens"]] : [])];
  const marksCheckbox = el("label", {}, el("input", { type: "checkbox", id: "marks", checked: view.marks, on: { change: (event) => { view.marks = event.target.checked; redraw(); } } }), "Marks");
  return [el("p", { class: "about" }, `Drag across a chart to zoom all of them; double-click for the whole run.${marks ? ` Along the axis ${marks}.` : ""}`), ...chartsOf(families, axes, marksCheckbox)];
}

const pageTitle = () => data.run.name;

const isMemory = (family) => family.name === "memory";

/** Whether a chart is drawn wider than others. */
const isMain = (chart, family) => (family.name === "" && chart.title === "loss") || isMemory(family);

const hoverMode = () => "x unified";
