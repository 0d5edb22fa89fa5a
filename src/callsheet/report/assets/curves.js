// The curves of one run, and the marks along them.

const MARK_WIDTH = 9; // pixels: marks that are closer are drawn as one
const colors = ["c0", "c1", "c2", "c3", "c4", "c6", "c7", "c5"];
const splitColors = { train: "c0", validation: "c1", val: "c1", eval: "c1", test: "c2" };
const axisTitles = { step: "step", tokens: "tokens" };

// --- the axis that all share ---

const timeUnit = () => timeUnitFor(data.axis.seconds.at(-1) ?? 0);

function axisTitle() {
  return view.axis === "time" ? `training time, ${timeUnit()[1]}` : axisTitles[view.axis];
}

const hoverTitle = () => `${view.axis === "step" ? "step " : ""}%{x}${view.axis === "time" ? ` ${timeUnit()[1]}` : view.axis === "tokens" ? " tokens" : ""}`;

/** The first and the last place on the axis. */
const axisEnds = () => [placeOf(data.axis.step[0] ?? 0), placeOf(data.axis.step.at(-1) ?? 1)];

/** Where a step stands on the chosen axis; between the steps that are known, on a straight line. */
function placeOf(step) {
  if (view.axis === "step") return step;
  const values = view.axis === "time" ? data.axis.seconds : data.axis.tokens;
  const unit = view.axis === "time" ? timeUnit()[0] : 1;
  return data.axis.step.length ? interpolated(data.axis.step, values, step) / unit : step;
}

/** How many points to each side are averaged: as far along the axis for every curve, and none where a curve has few points. */
function reachFor(points) {
  if (view.smooth === 0 || points <= FEW_POINTS) return 0;
  const main = data.families.find((family) => family.name === "") ?? data.families[0];
  const most = Math.max(...main.charts.flatMap((chart) => chart.curves.map(({ name }) => data.curves[name].x.length)));
  return Math.round((view.smooth / (1 - view.smooth)) * Math.min(1, points / most));
}

// --- one chart ---

function colorName(chart, place) {
  const { label } = chart.curves[place];
  if (label === "per device") return "c1";
  if (splitColors[label] && chart.curves.length <= 5) return splitColors[label];
  return chart.curves.length === 1 ? "c0" : colors[place % colors.length];
}

const colorOf = (chart, place) => color(colorName(chart, place));

function traces(chart, width) {
  const found = [];
  const [, unit] = scaleOf(chart);
  chart.curves.forEach((curve, place) => {
    const { x } = data.curves[curve.name];
    const y = valuesOf(chart, curve.name);
    const xs = x.map(placeOf);
    const visible = !view.hidden.has(curve.name);
    const line = { color: colorOf(chart, place), width: 1.7 };
    const mode = x.length <= FEW_POINTS ? "lines+markers" : "lines";
    const shape = { x: xs, type: "scatter", mode, visible, connectgaps: false, name: plain(curve.label), hovertemplate: `%{y:.5~g} ${unit}` };
    const reach = reachFor(x.length);
    if (reach > 0) {
      found.push({ ...shape, y, line: { ...line, width: 1 }, mode: "lines", opacity: 0.28, hoverinfo: "skip", hovertemplate: undefined, meta: "raw" });
      found.push({ ...shape, y: smoothed(y, reach), line, mode: "lines", meta: "smoothed" });
    } else found.push({ ...shape, y, line, marker: { size: x.length === 1 ? 8 : 4.5, color: line.color }, meta: "curve" });
  });
  return [...found, ...markTraces(chart, width)];
}

/** Marks of [step, text] that would touch become one that says how many they are. */
function grouped(marks, what, width) {
  const [from, to] = view.range ?? axisEnds();
  const least = (Math.abs(to - from) * MARK_WIDTH) / Math.max(width, 100);
  const groups = [];
  for (const [step, text] of [...marks].sort(([a], [b]) => a - b)) {
    const group = groups.at(-1);
    if (group && placeOf(step) - placeOf(group[0][0]) < least) group.push([step, text]); else groups.push([[step, text]]);
  }
  return groups.map((group) => [group[0][0], group.length === 1 ? group[0][1] : `${several(group.length, what)}, steps ${number(group[0][0])} to ${number(group.at(-1)[0])}`]);
}

/** What is marked along the lower edge: evaluations, checkpoints; along the upper: values that are not finite. */
function markTraces(chart, width) {
  const marks = [];
  const mark = (each, symbol, tint, size, y) => each.length && marks.push({
    x: each.map(([step]) => placeOf(step)), y: each.map(() => y), text: each.map(([, text]) => text), type: "scatter", mode: "markers", yaxis: "y2", showlegend: false, cliponaxis: false,
    marker: { symbol, color: tint, size, line: { width: 1.2, color: tint } }, hovertemplate: "%{text}<extra></extra>", meta: "marks",
  });
  if (view.marks) {
    mark(grouped(data.marks.evaluations.map((step) => [step, "evaluation"]), "evaluation", width), "line-ns", color("faint"), 6, 0.016);
    mark(grouped(data.marks.checkpoints.map(({ step, kind }) => [step, `checkpoint, ${plain(kind)}`]), "checkpoint", width), "triangle-up", color("good"), 5, 0.016);
  }
  for (const curve of chart.curves) {
    const odd = view.hidden.has(curve.name) ? [] : data.curves[curve.name].odd_at;
    mark(odd.map(([step, what]) => [step, `${plain(curve.label)} is ${plain(what)}`]), "x-thin", color("bad"), 8, 0.97);
  }
  return marks;
}

/** Resumes, as dotted lines. */
const shapes = () => (view.marks ? data.marks.resumes : []).map(({ step }) => ({ type: "line", x0: placeOf(step), x1: placeOf(step), y0: 0, y1: 1, yref: "paper", line: { color: color("warn"), width: 1, dash: "dot" } }));

const greatestOf = (chart) => Math.max(...chart.curves.map(({ name }) => Math.max(...data.curves[name].y.map((value) => value ?? 0))));

function valuesOf(chart, name) {
  const [scale] = scaleOf(chart);
  return scale === 1 ? data.curves[name].y : data.curves[name].y.map((value) => (value === null ? null : value / scale));
}

/** The curves that are shown, as places and values. */
const shownLines = (chart) => chart.curves.filter(({ name }) => !view.hidden.has(name)).map(({ name }) => ({ x: data.curves[name].x.map(placeOf), y: valuesOf(chart, name) }));

function csvOf(chart) {
  const names = chart.curves.map(({ name }) => name);
  const rows = new Map();
  names.forEach((name, place) => {
    const { x, y, odd_at: odd } = data.curves[name];
    const put = (step, value) => { if (!rows.has(step)) rows.set(step, names.map(() => "")); rows.get(step)[place] = value; };
    for (const [step, what] of odd) put(step, what);
    x.forEach((step, at) => { if (y[at] !== null) put(step, y[at]); });
  });
  const lines = [...rows].sort(([a], [b]) => a - b).map(([step, values]) => [step, ...values].join(","));
  return [["step", ...names].map(csvText).join(","), ...lines, ""].join("\r\n");
}

const legendButtons = (chart) => chart.curves.map((curve, place) => legendButton(chart, curve, place));

function legendButton(chart, curve, place) {
  const toggle = () => { if (!view.hidden.delete(curve.name)) view.hidden.add(curve.name); redraw(); };
  return el("button", { type: "button", class: "plain", title: curve.name, "aria-pressed": String(!view.hidden.has(curve.name)), on: { click: toggle } },
    el("i", { style: { background: `var(--${colorName(chart, place)})` } }),
    named(chart.title.endsWith(curve.label) ? curve.name : curve.label), el("b", { title: "the last value" }, lastOf(curve.name, [data.curves[curve.name]], isBytes(chart))));
}

function summary(chart) {
  return chart.curves.map(({ name }) => {
    const curve = data.curves[name], { y, count: all } = curve;
    const finite = y.filter((value) => value !== null), show = (value) => metric(name, value, isBytes(chart));
    const ends = finite.length ? `, from ${show(Math.min(...finite))} to ${show(Math.max(...finite))}, last ${lastOf(name, [curve], isBytes(chart))}` : "";
    return `${name}: ${several(all, "value")}${ends}`;
  }).join("; ");
}

function noteOn(chart) {
  const thin = chart.curves.find(({ name }) => data.curves[name].count > data.curves[name].x.length);
  if (!thin) return "";
  const { x, count: all } = data.curves[thin.name];
  return `${number(x.length)} of ${number(all)} points are drawn, the extremes among them`;
}

function curvesSection(families) {
  const marks = [
    data.marks.evaluations.length ? "ticks are evaluations" : "", data.marks.checkpoints.length ? "triangles are checkpoints" : "",
    data.marks.resumes.length ? "dotted lines are resumes" : "",
  ].filter(Boolean).join(", ");
  const axes = [["step", "Step"], ...(data.axis.seconds.length ? [["time", "Time"]] : []), ...(data.axis.tokens.length ? [["tokens", "Tokens"]] : [])];
  const showsMarks = el("label", {}, el("input", { type: "checkbox", id: "marks", checked: view.marks, on: { change: (event) => { view.marks = event.target.checked; redraw(); } } }), "Marks");
  return [el("p", { class: "about" }, `Drag across a chart to zoom all of them; double-click for the whole run.${marks ? ` Along the axis ${marks}.` : ""}`), ...chartsOf(families, axes, showsMarks)];
}

const pageTitle = () => data.run.name;

const isMemory = (family) => family.name === "memory";

/** Whether a chart is drawn larger. */
const isMain = (chart, family) => (family.name === "" && chart.title === "loss") || isMemory(family);

const hoverMode = () => "x unified";
