// Curves: a card for each chart, drawn when it comes into sight; zooming one zooms all.

const drawn = new Map(); // the element that plotly draws in -> its chart
const CHARTS_AT_ONCE = 24;
const colors = ["c0", "c1", "c2", "c3", "c4", "c6", "c7", "c5"];
const splitColors = { train: "c0", validation: "c1", val: "c1", eval: "c1", test: "c2" };
const axisTitles = { step: "step", tokens: "tokens" };

const inSight = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    if (entry.isIntersecting && entry.target.chart && !drawn.has(entry.target)) drawChart(entry.target);
  }
}, { rootMargin: "300px" });

/** Plotly reads a little markup in names; these have none. */
const plain = (text) => named(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");

// --- the axis that all share ---

function timeUnit() {
  const longest = data.axis.seconds.at(-1) ?? 0;
  return longest > 10800 ? [3600, "hours"] : longest > 180 ? [60, "minutes"] : [1, "seconds"];
}

function axisTitle() {
  return view.axis === "time" ? `training time, ${timeUnit()[1]}` : axisTitles[view.axis];
}

/** Where a step stands on the chosen axis; between the steps that are known, on a straight line. */
function placeOf(step) {
  if (view.axis === "step") return step;
  const values = view.axis === "time" ? data.axis.seconds : data.axis.tokens;
  const unit = view.axis === "time" ? timeUnit()[0] : 1;
  const steps = data.axis.step;
  let low = 0, high = steps.length - 1;
  if (high < 0) return step;
  if (step <= steps[0]) return (values[0] * (steps[0] > 0 ? Math.max(0, step / steps[0]) : 1)) / unit;
  if (step >= steps[high]) return values[high] / unit;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (steps[middle] <= step) low = middle; else high = middle;
  }
  const part = (step - steps[low]) / (steps[high] - steps[low]);
  return (values[low] + part * (values[high] - values[low])) / unit;
}

/** The chosen smoothing for a curve of so many points: it reaches as far along the axis, however sparse they are. */
function weightFor(points) {
  const main = data.families.find((family) => family.name === "") ?? data.families[0];
  const most = Math.max(...main.charts.flatMap((chart) => chart.curves.map(({ name }) => data.curves[name].x.length)));
  return view.smooth ** Math.max(1, most / points);
}

/** An exponential mean that is not drawn to its first value; gaps stay gaps. */
function smoothed(values, weight) {
  let mean = 0, sum = 0;
  return values.map((value) => {
    if (value === null) return null;
    mean = mean * weight + value * (1 - weight);
    sum = sum * weight + (1 - weight);
    return mean / sum;
  });
}

// --- one chart ---

function colorName(chart, place) {
  const { label } = chart.curves[place];
  if (label === "per device") return "c1";
  if (splitColors[label] && chart.curves.length <= 5) return splitColors[label];
  return chart.curves.length === 1 ? "c0" : colors[place % colors.length];
}

const colorOf = (chart, place) => color(colorName(chart, place));

function traces(chart) {
  const found = [];
  const [, unit] = scaleOf(chart);
  chart.curves.forEach((curve, place) => {
    const { x } = data.curves[curve.name];
    const y = valuesOf(chart, curve.name);
    const xs = x.map(placeOf);
    const visible = !view.hidden.has(curve.name);
    const line = { color: colorOf(chart, place), width: 1.7 };
    const mode = x.length === 1 || x.length <= 30 ? "lines+markers" : "lines";
    const shape = { x: xs, type: "scatter", mode, visible, connectgaps: false, name: plain(curve.label), hovertemplate: `%{y:.5~g} ${unit}` };
    if (view.smooth > 0 && x.length > 2) {
      found.push({ ...shape, y, line: { ...line, width: 1 }, mode: "lines", opacity: 0.28, hoverinfo: "skip", hovertemplate: undefined, meta: "raw" });
      found.push({ ...shape, y: smoothed(y, weightFor(x.length)), line, mode: "lines", meta: "smoothed" });
    } else found.push({ ...shape, y, line, marker: { size: x.length === 1 ? 8 : 4.5, color: line.color }, meta: "curve" });
  });
  return [...found, ...markTraces(chart)];
}

/** What is marked along the lower edge: evaluations, checkpoints; along the upper: values that are not finite. */
function markTraces(chart) {
  const marks = [];
  const mark = (steps, texts, symbol, tint, size, y) => steps.length && marks.push({
    x: steps.map(placeOf), y: steps.map(() => y), text: texts, type: "scatter", mode: "markers", yaxis: "y2", showlegend: false, cliponaxis: false,
    marker: { symbol, color: tint, size, line: { width: 1.2, color: tint } }, hovertemplate: "%{text}<extra></extra>", meta: "marks",
  });
  if (view.marks) {
    mark(data.marks.evaluations, data.marks.evaluations.map(() => "evaluation"), "line-ns", color("faint"), 6, 0.016);
    const saved = data.marks.checkpoints;
    mark(saved.map((each) => each.step), saved.map((each) => `checkpoint, ${plain(each.kind)}`), "triangle-up", color("good"), 5, 0.016);
  }
  for (const curve of chart.curves) {
    const odd = view.hidden.has(curve.name) ? [] : data.curves[curve.name].odd_at;
    mark(odd.map(([step]) => step), odd.map(([, what]) => `${plain(curve.label)} is ${plain(what)}`), "x-thin", color("bad"), 8, 0.97);
  }
  return marks;
}

function layout(chart) {
  const soft = color("soft"), grid = color("grid");
  const axis = { gridcolor: grid, zerolinecolor: grid, linecolor: color("line"), tickfont: { color: soft, size: 11 }, automargin: true };
  const resumes = view.marks ? data.marks.resumes : [];
  return {
    margin: { l: 8, r: 10, t: 8, b: 8 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, hovermode: "x unified",
    dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom", uirevision: "kept",
    font: { family: getComputedStyle(document.body).fontFamily, color: soft, size: 12 },
    hoverlabel: { bgcolor: color("card"), bordercolor: color("line"), font: { color: color("ink"), size: 12 }, namelength: 60 },
    xaxis: { ...axis, unifiedhovertitle: { text: `${view.axis === "step" ? "step " : ""}%{x}${view.axis === "time" ? ` ${timeUnit()[1]}` : view.axis === "tokens" ? " tokens" : ""}` }, title: { text: axisTitle(), font: { size: 11, color: color("faint") }, standoff: 4 }, nticks: 7, ...(view.range ? { range: [...view.range], autorange: false } : { autorange: true, rangemode: "normal" }) },
    yaxis: { ...axis, type: view.log ? "log" : "linear", fixedrange: true, nticks: 6, ticksuffix: scaleOf(chart)[1] && ` ${scaleOf(chart)[1]}`, ...heightFor(chart) },
    yaxis2: { overlaying: "y", range: [0, 1], visible: false, fixedrange: true },
    shapes: resumes.map(({ step }) => ({ type: "line", x0: placeOf(step), x1: placeOf(step), y0: 0, y1: 1, yref: "paper", line: { color: color("warn"), width: 1, dash: "dot" } })),
  };
}

const isBytes = (chart) => chart.family === "memory" && chart.title === "memory";

/** By what a chart's values are divided, and the unit that makes. */
function scaleOf(chart) {
  if (!isBytes(chart)) return [1, ""];
  const most = Math.max(...chart.curves.map(({ name }) => Math.max(...data.curves[name].y.map((value) => value ?? 0))));
  return most >= 2 ** 30 ? [2 ** 30, "GiB"] : [2 ** 20, "MiB"];
}

function valuesOf(chart, name) {
  const [scale] = scaleOf(chart);
  return scale === 1 ? data.curves[name].y : data.curves[name].y.map((value) => (value === null ? null : value / scale));
}

/** The height that what is seen of the curves needs, and the ticks on it. */
function heightFor(chart) {
  const [from, to] = view.range ?? [-Infinity, Infinity];
  let least = Infinity, greatest = -Infinity;
  for (const { name } of chart.curves) {
    if (view.hidden.has(name)) continue;
    const { x } = data.curves[name];
    valuesOf(chart, name).forEach((value, place) => {
      if (value === null || (view.log && value <= 0)) return;
      const at = placeOf(x[place]);
      if (at < from || at > to) return;
      least = Math.min(least, value); greatest = Math.max(greatest, value);
    });
  }
  if (least > greatest) return { autorange: true };
  if (!view.log) {
    const size = Math.max(Math.abs(least), Math.abs(greatest)), space = roomFor(least, greatest);
    return { autorange: false, range: [least - space, greatest + space], tickformat: "", exponentformat: size < 1 ? "e" : "SI" };
  }
  [least, greatest] = [Math.log10(least), Math.log10(greatest)];
  const room = roomFor(least, greatest);
  const decades = greatest - least + 2 * room;
  return { autorange: false, range: [least - room, greatest + room], tickformat: ".3~g", ...(decades < 0.9 ? { dtick: "D1" } : decades < 4 ? { dtick: "D2" } : {}) };
}

const roomFor = (least, greatest) => (greatest - least) * 0.06 || Math.abs(greatest) * 0.05 || 0.5;

function drawChart(place) {
  const { chart } = place;
  const isNew = !drawn.has(place);
  drawn.set(place, chart);
  place.drawing = Plotly.react(place, traces(chart), layout(chart), { displayModeBar: false, responsive: true, doubleClick: false, showTips: false });
  if (!isNew) return;
  place.on("plotly_relayout", (change) => {
    const from = change["xaxis.range[0]"] ?? change["xaxis.range"]?.[0], to = change["xaxis.range[1]"] ?? change["xaxis.range"]?.[1];
    if (isNumber(from) && isNumber(to) && (from !== view.range?.[0] || to !== view.range?.[1])) zoom([from, to]);
  });
  place.on("plotly_doubleclick", () => zoom(null));
}

function redraw() {
  for (const place of drawn.keys()) {
    if (place.isConnected) drawChart(place);
    else {
      drawn.delete(place);
      place.drawing.finally(() => Plotly.purge(place)); // while it draws it needs what a purge takes away
    }
  }
  for (const place of document.querySelectorAll(".chart")) place.retell();
}

function zoom(range, isTyped = false) {
  view.range = range;
  const rounded = (value) => (Math.abs(range[1] - range[0]) > 20 ? Math.round(value) : Number(value.toPrecision(4)));
  const tell = (selector, value) => { for (const input of document.querySelectorAll(selector)) input.value = range ? rounded(range[value]) : ""; };
  if (!isTyped) { tell("input.from", 0); tell("input.to", 1); }
  for (const button of document.querySelectorAll("button.whole")) button.disabled = !range;
  redraw();
}

function chartCard(chart, size) {
  const legend = el("span", { class: "legend" }), note = el("p", { class: "note" });
  const place = el("div", { class: "chart", role: "img" });
  place.chart = chart;
  place.retell = () => { // what is said of the curves, which may have grown
    const focused = [...legend.children].indexOf(document.activeElement);
    legend.replaceChildren(...chart.curves.map((curve, at) => legendButton(chart, curve, at)));
    legend.children[focused]?.focus();
    place.setAttribute("aria-label", summary(chart));
    note.textContent = thinnedNote(chart);
    note.hidden = !note.textContent;
  };
  place.retell();
  inSight.observe(place);
  return el("div", { class: `chart-card${size}` }, el("div", { class: "head" }, el("h3", {}, named(chart.title)), legend), place, note);
}

function legendButton(chart, curve, place) {
  const last = data.curves[curve.name].y.findLast((value) => value !== null) ?? null;
  const toggle = () => { if (!view.hidden.delete(curve.name)) view.hidden.add(curve.name); redraw(); };
  return el("button", { type: "button", class: "plain", title: curve.name, "aria-pressed": String(!view.hidden.has(curve.name)), on: { click: toggle } },
    el("i", { style: { background: `var(--${colorName(chart, place)})` } }),
    chart.curves.length > 1 || !chart.title.endsWith(curve.label) ? named(curve.label) : "last", el("b", {}, isBytes(chart) ? bytes(last) : number(last)));
}

function summary(chart) {
  return chart.curves.map(({ name }) => {
    const { y, count: all } = data.curves[name];
    const finite = y.filter((value) => value !== null);
    const ends = finite.length ? `, from ${number(Math.min(...finite))} to ${number(Math.max(...finite))}, last ${number(finite.at(-1))}` : "";
    return `${name}: ${several(all, "value")}${ends}`;
  }).join("; ");
}

function thinnedNote(chart) {
  const thin = chart.curves.find(({ name }) => data.curves[name].count > data.curves[name].x.length);
  if (!thin) return "";
  const { x, count: all } = data.curves[thin.name];
  return `${number(x.length)} of ${number(all)} points are drawn, the extremes among them`;
}

// --- all charts ---

function matches(chart, family) {
  const words = view.search.toLowerCase().split(/\s+/).filter(Boolean);
  const text = `${family.name}/${chart.title} ${chart.curves.map(({ name }) => name).join(" ")}`.toLowerCase();
  return words.every((word) => text.includes(word));
}

function familyCards(family, key) {
  const grid = el("div", { class: "charts" });
  const found = family.charts.filter((chart) => matches(chart, family));
  let shown = 0;
  const more = el("button", { type: "button", class: "more", on: { click: () => add(CHARTS_AT_ONCE) } });
  function add(some) {
    for (const chart of found.slice(shown, shown + some)) {
      const isMain = (family.name === "" && chart.title === "loss") || isMemory(family);
      grid.append(chartCard({ ...chart, family: family.name }, isMain ? (found.length > 1 ? " wide" : " full") : ""));
    }
    shown = Math.min(shown + some, found.length);
    view.shown.set(key, shown);
    more.textContent = `${number(Math.min(CHARTS_AT_ONCE, found.length - shown))} more of ${number(found.length - shown)}`;
    more.hidden = shown >= found.length;
  }
  add(Math.max(CHARTS_AT_ONCE, view.search ? 0 : view.shown.get(key) ?? 0));
  return [grid, more];
}

function familyElement(family) {
  const found = family.charts.filter((chart) => matches(chart, family));
  if (!found.length) return null;
  const key = `family/${family.name}`;
  if (family.name === "") return el("div", { class: "family" }, familyCards(family, key));
  const open = view.search ? found.length <= 60 : family.charts.length <= 8 && family.name !== "time";
  const heading = [named(family.name), el("span", { class: "count" }, several(found.length, "chart"))];
  return folding(view.search ? `${key}?${view.search}` : key, { class: "family" }, heading, open, () => familyCards(family, key));
}

function curvesTools(again) {
  const search = el("input", { type: "search", id: "search", placeholder: "Search metrics", "aria-label": "Search metrics", value: view.search, on: { input: (event) => { view.search = event.target.value; again(); } } });
  const axes = [["step", "Step"], ["time", "Time"], ...(data.axis.tokens.length ? [["tokens", "Tokens"]] : [])];
  const shownSmooth = el("span", { class: "mono" }, view.smooth.toFixed(2));
  const toRange = () => {
    const [from, to] = [document.querySelector("input.from").value, document.querySelector("input.to").value];
    const steps = data.axis.step, ends = [placeOf(steps[0] ?? 0), placeOf(steps.at(-1) ?? 1)];
    const range = [from === "" ? ends[0] : Number(from), to === "" ? ends[1] : Number(to)];
    zoom((from !== "" || to !== "") && range[0] < range[1] ? range : null, true);
  };
  return el("div", { class: "tools" },
    el("span", { class: "search" }, search),
    choice("Horizontal axis", axes, view.axis, (axis) => { view.axis = axis; zoom(null); }),
    el("label", {}, "Smoothing", el("input", { type: "range", id: "smooth", min: 0, max: 0.99, step: 0.01, value: view.smooth, on: { input: (event) => {
      view.smooth = Number(event.target.value); shownSmooth.textContent = view.smooth.toFixed(2); redraw();
    } } }), shownSmooth),
    el("label", {}, el("input", { type: "checkbox", id: "log", checked: view.log, on: { change: (event) => { view.log = event.target.checked; redraw(); } } }), "Logarithmic"),
    el("label", {}, el("input", { type: "checkbox", id: "marks", checked: view.marks, on: { change: (event) => { view.marks = event.target.checked; redraw(); } } }), "Marks"),
    el("label", {}, "From", el("input", { type: "number", class: "from", step: "any", on: { change: toRange } })),
    el("label", {}, "to", el("input", { type: "number", class: "to", step: "any", on: { change: toRange } })),
    el("button", { type: "button", class: "whole", disabled: !view.range, on: { click: () => zoom(null) } }, "Whole run"));
}

function curvesSection(families) {
  const list = el("div");
  const again = () => {
    list.replaceChildren(...families.map(familyElement).filter(Boolean));
    if (!list.hasChildNodes()) list.append(el("p", { class: "soft" }, "No metric has all these words in its name."));
    redraw();
  };
  again();
  const marks = [
    data.marks.evaluations.length ? "ticks are evaluations" : "", data.marks.checkpoints.length ? "triangles are checkpoints" : "",
    data.marks.resumes.length ? "dotted lines are resumes" : "",
  ].filter(Boolean).join(", ");
  return [el("p", { class: "about" }, `Drag across a chart to zoom all of them; double-click for the whole run.${marks ? ` Along the axis ${marks}.` : ""}`), curvesTools(again), list];
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => redraw());
