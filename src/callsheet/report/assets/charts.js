// Charts: a card for each, drawn when it comes into sight; zooming one zooms all. The script of the page says what is in them:
// traces, shownLines, greatestOf, shapes, legendButtons, summary, noteOn, csvOf, axisTitle, hoverTitle, axisEnds, pageTitle, isMain, hoverMode.

const drawn = new Map(); // the element that plotly draws in -> its chart
const visible = new WeakSet(), late = new WeakSet(); // of these elements, those in sight, and those that show old data
const CHARTS_AT_ONCE = 24;
const FEW_POINTS = 30; // a curve of so few is drawn with its points, and never smoothed

const inSight = new IntersectionObserver((entries) => {
  for (const { isIntersecting, target } of entries) {
    if (isIntersecting) visible.add(target); else visible.delete(target);
    if (isIntersecting && target.chart && (!drawn.has(target) || late.has(target))) drawChart(target);
  }
}, { rootMargin: "300px" });

/** Plotly reads a little markup in names; these have none. */
const plain = (text) => named(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");

/** The unit of times up to `longest` seconds, and its name. */
const timeUnitFor = (longest) => (longest > 10800 ? [3600, "hours"] : longest > 180 ? [60, "minutes"] : [1, "seconds"]);

/** The value at a step, on a straight line between the steps that are known; before the first, on one from zero. */
function interpolated(steps, values, step) {
  let low = 0, high = steps.length - 1;
  if (step <= steps[0]) return values[0] * (steps[0] > 0 ? Math.max(0, step / steps[0]) : 1);
  if (step >= steps[high]) return values[high];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (steps[middle] <= step) low = middle; else high = middle;
  }
  const part = (step - steps[low]) / (steps[high] - steps[low]);
  return values[low] + part * (values[high] - values[low]);
}

/**
 * A mean over as many values before a point as after it, twice. A window that only looks back would lag behind a falling loss, and lift it
 * above the curves that are not smoothed; towards the ends the window shrinks for the same reason. Gaps stay gaps.
 */
function smoothed(values, reach) {
  const centered = (from, half) => {
    const sums = [0];
    for (const value of from) sums.push(sums.at(-1) + value);
    return from.map((_, at) => {
      const side = Math.min(half, at, from.length - 1 - at);
      return (sums[at + side + 1] - sums[at - side]) / (2 * side + 1);
    });
  };
  const half = Math.ceil(reach / 2);
  const means = centered(centered(values.filter((value) => value !== null), half), reach - half);
  let next = 0;
  return values.map((value) => (value === null ? null : means[next++]));
}

// --- one chart ---

const keyOf = (chart) => `${chart.family}/${chart.title}`;
const isLog = (chart) => view.log !== view.logCharts.has(keyOf(chart));

function layout(chart) {
  const soft = color("soft"), grid = color("grid");
  const axis = { gridcolor: grid, zerolinecolor: grid, linecolor: color("line"), tickfont: { color: soft, size: 11 }, automargin: true };
  return {
    margin: { l: 8, r: 10, t: 8, b: 8 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, hovermode: hoverMode(chart), hoverdistance: 24,
    dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom", uirevision: "kept",
    font: { family: getComputedStyle(document.body).fontFamily, color: soft, size: 12 },
    hoverlabel: { bgcolor: color("card"), bordercolor: color("line"), font: { color: color("ink"), size: 12 }, namelength: 60 },
    xaxis: { ...axis, unifiedhovertitle: { text: hoverTitle() }, title: { text: axisTitle(), font: { size: 11, color: color("faint") }, standoff: 4 }, nticks: 7, range: view.range ? [...view.range] : wholeRange(), autorange: false },
    yaxis: { ...axis, type: isLog(chart) ? "log" : "linear", fixedrange: true, nticks: 6, ticksuffix: scaleOf(chart)[1] && ` ${scaleOf(chart)[1]}`, ...heightFor(chart) },
    yaxis2: { overlaying: "y", range: [0, 1], visible: false, fixedrange: true },
    shapes: shapes(chart),
  };
}

const isBytes = (chart) => (chart.family === "memory" && chart.title === "memory") || chart.curves.every(({ name }) => isBytesName(name));
const isBytesName = (name) => /(^|[/_])(bytes|resident|allocated|reserved)$/.test(name);
const isRate = (name) => name.endsWith("_per_second");

/** A value of a metric, formatted as everywhere in the page. */
const metric = (name, value, inBytes = isBytesName(name)) => (inBytes ? bytes(value) : isRate(name) ? count(value) : number(value));

/** The last value of a curve, or the mean of several curves' last values. The values `y` of a curve are null where they are not finite. */
function lastOf(name, curves, inBytes) {
  const lasts = curves.filter(({ y }) => y.length).map(({ y }) => y.at(-1));
  if (lasts.includes(null)) return "not finite"; // NaN or infinite
  return metric(name, lasts.length ? lasts.reduce((sum, value) => sum + value, 0) / lasts.length : null, inBytes);
}

/** The horizontal range of all charts, unless the reader has zoomed: that of the run, with room for the outermost points. */
function wholeRange() {
  const [from, to] = axisEnds();
  if (!isNumber(from) || !isNumber(to)) return [0, 1];
  const room = (to - from) * 0.02 || 0.5;
  return [from - room, to + room];
}

/** By what a chart's values are divided, and the unit that makes. */
function scaleOf(chart) {
  if (!isBytes(chart)) return [1, ""];
  const most = greatestOf(chart);
  return most >= 2 ** 30 ? [2 ** 30, "GiB"] : [2 ** 20, "MiB"];
}

/** The height that what is seen of the curves needs, and the ticks on it. */
function heightFor(chart) {
  const [from, to] = view.range ?? [-Infinity, Infinity];
  let least = Infinity, greatest = -Infinity;
  for (const { x, y } of shownLines(chart)) {
    const see = (value) => { least = Math.min(least, value); greatest = Math.max(greatest, value); };
    y.forEach((value, place) => {
      if (value === null || (isLog(chart) && value <= 0)) return;
      if (x[place] >= from && x[place] <= to) see(value);
      const before = y[place - 1];
      if (before === undefined || before === null || (isLog(chart) && before <= 0)) return;
      // A line that crosses an end of the range is seen up to there.
      for (const end of [from, to]) if (x[place - 1] < end && end < x[place]) see(before + (value - before) * (end - x[place - 1]) / (x[place] - x[place - 1]));
    });
  }
  if (least > greatest) return { autorange: true };
  if (!isLog(chart)) {
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
  late.delete(place);
  place.drawing = Plotly.react(place, traces(chart, place.clientWidth - 50), layout(chart), { displayModeBar: false, responsive: true, doubleClick: false, showTips: false });
  if (!isNew) return;
  place.on("plotly_relayout", (change) => {
    const from = change["xaxis.range[0]"] ?? change["xaxis.range"]?.[0], to = change["xaxis.range[1]"] ?? change["xaxis.range"]?.[1];
    if (isNumber(from) && isNumber(to) && (from !== view.range?.[0] || to !== view.range?.[1])) zoom([from, to]);
  });
  place.on("plotly_doubleclick", () => zoom(null));
}

/** Draws the charts again. With news, those out of sight are drawn when they come into it. */
function redraw(isNews = false) {
  for (const place of drawn.keys()) {
    if (place.isConnected) {
      if (isNews && !visible.has(place)) late.add(place); else drawChart(place);
    } else {
      drawn.delete(place);
      place.drawing.finally(() => Plotly.purge(place)); // while it draws it needs what a purge takes away
    }
  }
  for (const place of document.querySelectorAll(".chart")) place.retell();
}

/** An end of the range, as its field shows it. */
function shownEnd(end) {
  if (!view.range) return "";
  return Math.abs(view.range[1] - view.range[0]) > 20 ? Math.round(view.range[end]) : Number(view.range[end].toPrecision(4));
}

function zoom(range, isTyped = false) {
  view.range = range;
  const show = (selector, end) => { for (const input of document.querySelectorAll(selector)) input.value = shownEnd(end); };
  if (!isTyped) { show("input.from", 0); show("input.to", 1); }
  for (const button of document.querySelectorAll("button.whole")) button.disabled = !range;
  redraw();
}

function chartCard(chart, size) {
  const legend = el("span", { class: "legend" }), note = el("p", { class: "note" });
  const place = el("div", { class: "chart", role: "img" });
  place.chart = chart;
  place.retell = () => { // what is said of the curves, which may have grown
    const focused = [...legend.children].indexOf(document.activeElement);
    legend.replaceChildren(...legendButtons(chart));
    legend.children[focused]?.focus();
    place.setAttribute("aria-label", summary(chart));
    note.textContent = noteOn(chart);
    note.hidden = !note.textContent;
  };
  place.retell();
  inSight.observe(place);
  return el("div", { class: `chart-card${size}${view.largeCharts.has(keyOf(chart)) ? " large" : ""}` }, el("div", { class: "head" }, el("h3", {}, named(chart.title)), legend), place, el("div", { class: "under" }, note, chartTools(chart, place)));
}

/** What can be done with one chart. */
function chartTools(chart, place) {
  const button = (text, about, click, more = {}) => el("button", { type: "button", class: "plain", title: about, "aria-label": `${about}: ${chart.title}`, ...more, on: { click } }, text);
  const log = button("log", "Logarithmic scale", () => {
    if (!view.logCharts.delete(keyOf(chart))) view.logCharts.add(keyOf(chart));
    redraw();
  });
  const large = button("enlarge", "The whole width", () => {
    if (!view.largeCharts.delete(keyOf(chart))) view.largeCharts.add(keyOf(chart));
    large.setAttribute("aria-pressed", String(view.largeCharts.has(keyOf(chart))));
    place.closest(".chart-card").classList.toggle("large");
    Plotly.Plots.resize(place);
  }, { "aria-pressed": String(view.largeCharts.has(keyOf(chart))) });
  const retell = place.retell;
  place.retell = () => { retell(); log.setAttribute("aria-pressed", String(isLog(chart))); };
  place.retell();
  return el("span", { class: "chart-tools" }, large, log, button("CSV", "Download the values as CSV", () => saveCsv(chart)), button("PNG", "Download the chart as an image", () => savePng(chart)));
}

/** A name that is safe as a file's, whatever a run calls its metrics. */
const fileName = (chart, end) => `${[pageTitle(), chart.family, chart.title].filter(Boolean).join("-").replace(/[^A-Za-z0-9_-]+/g, "-").replace(/^-+|-+$/g, "").slice(0, 100) || "chart"}.${end}`;

function saveAs(name, href) {
  const link = el("a", { href, download: name, hidden: true });
  document.body.append(link);
  link.click();
  link.remove();
}

/** A cell of text. A spreadsheet would take one that begins with = + - or @ for a formula, so that it gets an apostrophe before it. */
const csvText = (text) => `"${(/^[\s]*[=+\-@\t\r\n]/.test(text) ? `'${text}` : text).replaceAll('"', '""')}"`;

function saveCsv(chart) {
  const url = URL.createObjectURL(new Blob([csvOf(chart)], { type: "text/csv" }));
  saveAs(fileName(chart, "csv"), url);
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

async function savePng(chart) {
  const width = 1000, height = 520, shown = layout(chart);
  const named = traces(chart, width).map((trace) => ({ ...trace, showlegend: trace.meta === "curve" || trace.meta === "smoothed" }));
  const more = { width, height, showlegend: true, legend: { orientation: "h", y: -0.16, traceorder: "normal" }, title: { text: plain(chart.title), font: { size: 15, color: color("ink") } }, margin: { l: 60, r: 20, t: 46, b: 50 }, paper_bgcolor: color("card"), plot_bgcolor: color("card") };
  saveAs(fileName(chart, "png"), await Plotly.toImage({ data: named, layout: { ...shown, ...more } }, { format: "png", width, height, scale: 2 }));
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
      grid.append(chartCard({ ...chart, family: family.name }, isMain(chart, family) ? (found.length > 1 ? " wide" : " full") : ""));
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

/** What can be done with all charts. axes: the choices of the horizontal axis; more: further controls. */
function curvesTools(again, axes, more) {
  const search = el("input", { type: "search", id: "search", placeholder: "Search metrics", "aria-label": "Search metrics", value: view.search, on: { input: (event) => { view.search = event.target.value; again(); } } });
  const shownSmooth = el("span", { class: "mono" }, view.smooth.toFixed(2));
  const toRange = () => {
    const [from, to] = [document.querySelector("input.from").value, document.querySelector("input.to").value];
    const ends = axisEnds();
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
    more,
    el("label", {}, "From", el("input", { type: "number", class: "from", step: "any", value: shownEnd(0), on: { change: toRange } })),
    el("label", {}, "to", el("input", { type: "number", class: "to", step: "any", value: shownEnd(1), on: { change: toRange } })),
    el("button", { type: "button", class: "whole", disabled: !view.range, on: { click: () => zoom(null) } }, "Whole run"));
}

/** All charts, by family, with a search. */
function chartsOf(families, axes, more) {
  const list = el("div");
  const again = () => {
    list.replaceChildren(...families.map(familyElement).filter(Boolean));
    if (!list.hasChildNodes()) list.append(el("p", { class: "soft" }, "No metric has all these words in its name."));
    redraw();
  };
  again();
  return [curvesTools(again, axes, more), list];
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => redraw());
