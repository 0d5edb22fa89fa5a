// Chart cards. A chart is drawn when it scrolls into view, and zooming one chart zooms all. Each page defines what its charts contain, with
// the functions traces, visibleLines, maxValueOf, shapes, legendButtons, summary, noteFor, csvOf, axisTitle, hoverTitle, axisRange, pageTitle,
// isMain and hoverMode.

const drawn = new Map(); // the element that Plotly draws in -> its chart
const visible = new WeakSet(); // chart elements that are in view
const stale = new WeakSet(); // chart elements that show old data
const CHARTS_AT_ONCE = 24; // the number of charts of a family that are shown at first, and that each press of the family's button adds
const FEW_POINTS = 30; // a curve with at most so many points is drawn with markers and is not smoothed

const chartObserver = new IntersectionObserver((entries) => {
  for (const { isIntersecting, target } of entries) {
    if (isIntersecting) visible.add(target); else visible.delete(target);
    if (isIntersecting && target.chart && (!drawn.has(target) || stale.has(target))) drawChart(target);
  }
}, { rootMargin: "300px" });

/** Escapes markup, because Plotly interprets some tags in texts. */
const plotlyText = (text) => displayName(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");

/** The unit for times up to `longest` seconds: its length in seconds, and its name. */
const timeUnitFor = (longest) => (longest > 10800 ? [3600, "hours"] : longest > 180 ? [60, "minutes"] : [1, "seconds"]);

/** The value at a step, interpolated linearly between the recorded steps; before the first recorded step, between (0, 0) and that step. */
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
 * A centered moving average, applied twice. An average of only past values would lag behind a falling loss, and be above curves that
 * are not smoothed. The window shrinks towards the ends for the same reason. Nulls, which are gaps in the curve, stay nulls.
 */
function smoothed(values, radius) {
  const centered = (from, half) => {
    const sums = [0];
    for (const value of from) sums.push(sums.at(-1) + value);
    return from.map((_, at) => {
      const side = Math.min(half, at, from.length - 1 - at);
      return (sums[at + side + 1] - sums[at - side]) / (2 * side + 1);
    });
  };
  const half = Math.ceil(radius / 2);
  const means = centered(centered(values.filter((value) => value !== null), half), radius - half);
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
    yaxis: { ...axis, type: isLog(chart) ? "log" : "linear", fixedrange: true, nticks: 6, ticksuffix: scaleOf(chart)[1] && ` ${scaleOf(chart)[1]}`, ...yAxisOptions(chart) },
    yaxis2: { overlaying: "y", range: [0, 1], visible: false, fixedrange: true },
    shapes: shapes(chart),
  };
}

const isBytes = (chart) => (chart.family === "memory" && chart.title === "memory") || chart.curves.every(({ name }) => isBytesName(name));
const isBytesName = (name) => /(^|[/_])(bytes|resident|allocated|reserved)$/.test(name);
const isRate = (name) => name.endsWith("_per_second");

/** Formats a value of a metric by the metric's name. */
const metric = (name, value, inBytes = isBytesName(name)) => (inBytes ? bytes(value) : isRate(name) ? count(value) : number(value));

/** Formats the last value of a curve, or the mean of the last values of several. In `y`, values that are not finite are null. */
function lastOf(name, curves, inBytes) {
  const lasts = curves.filter(({ y }) => y.length).map(({ y }) => y.at(-1));
  if (lasts.includes(null)) return "not finite";
  return metric(name, lasts.length ? lasts.reduce((sum, value) => sum + value, 0) / lasts.length : null, inBytes);
}

/** The horizontal range of all charts that are not zoomed: the whole run, with room for the outermost points. */
function wholeRange() {
  const [from, to] = axisRange();
  if (!isNumber(from) || !isNumber(to)) return [0, 1];
  const room = (to - from) * 0.02 || 0.5;
  return [from - room, to + room];
}

/** The divisor of a chart's values, and the unit of the result. */
function scaleOf(chart) {
  if (!isBytes(chart)) return [1, ""];
  const most = maxValueOf(chart);
  return most >= 2 ** 30 ? [2 ** 30, "GiB"] : [2 ** 20, "MiB"];
}

/** The vertical range that fits the visible part of the curves, and the format of its ticks. */
function yAxisOptions(chart) {
  const [from, to] = view.range ?? [-Infinity, Infinity];
  let least = Infinity, greatest = -Infinity;
  for (const { x, y } of visibleLines(chart)) {
    const include = (value) => { least = Math.min(least, value); greatest = Math.max(greatest, value); };
    y.forEach((value, index) => {
      if (value === null || (isLog(chart) && value <= 0)) return;
      if (x[index] >= from && x[index] <= to) include(value);
      const before = y[index - 1];
      if (before === undefined || before === null || (isLog(chart) && before <= 0)) return;
      // Include the values of lines where they cross an end of the range.
      for (const end of [from, to]) if (x[index - 1] < end && end < x[index]) include(before + (value - before) * (end - x[index - 1]) / (x[index] - x[index - 1]));
    });
  }
  if (least > greatest) return { autorange: true };
  if (!isLog(chart)) {
    const size = Math.max(Math.abs(least), Math.abs(greatest)), space = paddingFor(least, greatest);
    return { autorange: false, range: [least - space, greatest + space], tickformat: "", exponentformat: size < 1 ? "e" : "SI" };
  }
  [least, greatest] = [Math.log10(least), Math.log10(greatest)];
  const room = paddingFor(least, greatest);
  const decades = greatest - least + 2 * room;
  return { autorange: false, range: [least - room, greatest + room], tickformat: ".3~g", ...(decades < 0.9 ? { dtick: "D1" } : decades < 4 ? { dtick: "D2" } : {}) };
}

const paddingFor = (least, greatest) => (greatest - least) * 0.06 || Math.abs(greatest) * 0.05 || 0.5;

function drawChart(element) {
  const { chart } = element;
  const isFirstDrawing = !drawn.has(element);
  drawn.set(element, chart);
  stale.delete(element);
  element.drawing = Plotly.react(element, traces(chart, element.clientWidth - 50), layout(chart), { displayModeBar: false, responsive: true, doubleClick: false, showTips: false });
  if (!isFirstDrawing) return;
  element.on("plotly_relayout", (change) => {
    const from = change["xaxis.range[0]"] ?? change["xaxis.range"]?.[0], to = change["xaxis.range[1]"] ?? change["xaxis.range"]?.[1];
    if (isNumber(from) && isNumber(to) && (from !== view.range?.[0] || to !== view.range?.[1])) zoom([from, to]);
  });
  element.on("plotly_doubleclick", () => zoom(null));
}

/** Redraws the charts. After an update of the data, charts that are out of view are redrawn when they scroll into view. */
function redraw(isUpdate = false) {
  for (const element of drawn.keys()) {
    if (element.isConnected) {
      if (isUpdate && !visible.has(element)) stale.add(element); else drawChart(element);
    } else {
      drawn.delete(element);
      element.drawing.finally(() => Plotly.purge(element)); // purging during a drawing would make the drawing fail
    }
  }
  for (const element of document.querySelectorAll(".chart")) element.updateText();
}

/** One end (0 or 1) of the zoomed range, rounded for its input field. */
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
  const element = el("div", { class: "chart", role: "img" });
  element.chart = chart;
  element.updateText = () => { // the legend, the description and the note depend on the data
    const focused = [...legend.children].indexOf(document.activeElement);
    legend.replaceChildren(...legendButtons(chart));
    legend.children[focused]?.focus();
    element.setAttribute("aria-label", summary(chart));
    note.textContent = noteFor(chart);
    note.hidden = !note.textContent;
  };
  element.updateText();
  chartObserver.observe(element);
  return el("div", { class: `chart-card${size}${view.largeCharts.has(keyOf(chart)) ? " large" : ""}` }, el("div", { class: "head" }, el("h3", {}, displayName(chart.title)), legend), element, el("div", { class: "under" }, note, chartTools(chart, element)));
}

/** The buttons of one chart. */
function chartTools(chart, element) {
  const button = (text, about, click, more = {}) => el("button", { type: "button", class: "plain", title: about, "aria-label": `${about}: ${chart.title}`, ...more, on: { click } }, text);
  const log = button("log", "Logarithmic scale", () => {
    if (!view.logCharts.delete(keyOf(chart))) view.logCharts.add(keyOf(chart));
    redraw();
  });
  const large = button("enlarge", "The whole width", () => {
    if (!view.largeCharts.delete(keyOf(chart))) view.largeCharts.add(keyOf(chart));
    large.setAttribute("aria-pressed", String(view.largeCharts.has(keyOf(chart))));
    element.closest(".chart-card").classList.toggle("large");
    Plotly.Plots.resize(element);
  }, { "aria-pressed": String(view.largeCharts.has(keyOf(chart))) });
  const updateText = element.updateText;
  element.updateText = () => { updateText(); log.setAttribute("aria-pressed", String(isLog(chart))); };
  element.updateText();
  return el("span", { class: "chart-tools" }, large, log, button("CSV", "Download the values as CSV", () => saveCsv(chart)), button("PNG", "Download the chart as an image", () => savePng(chart)));
}

/** A file name made from the names of the run and the chart, without characters that are unsafe in file names. */
const fileName = (chart, extension) => `${[pageTitle(), chart.family, chart.title].filter(Boolean).join("-").replace(/[^A-Za-z0-9_-]+/g, "-").replace(/^-+|-+$/g, "").slice(0, 100) || "chart"}.${extension}`;

function saveAs(name, href) {
  const link = el("a", { href, download: name, hidden: true });
  document.body.append(link);
  link.click();
  link.remove();
}

/** Quotes a text for CSV. A text that begins with = + - or @ gets an apostrophe in front, because a spreadsheet would evaluate it as a formula. */
const csvText = (text) => `"${(/^[\s]*[=+\-@\t\r\n]/.test(text) ? `'${text}` : text).replaceAll('"', '""')}"`;

function saveCsv(chart) {
  const url = URL.createObjectURL(new Blob([csvOf(chart)], { type: "text/csv" }));
  saveAs(fileName(chart, "csv"), url);
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

async function savePng(chart) {
  const width = 1000, height = 520, shown = layout(chart);
  const withLegend = traces(chart, width).map((trace) => ({ ...trace, showlegend: trace.meta === "curve" || trace.meta === "smoothed" }));
  const more = { width, height, showlegend: true, legend: { orientation: "h", y: -0.16, traceorder: "normal" }, title: { text: plotlyText(chart.title), font: { size: 15, color: color("ink") } }, margin: { l: 60, r: 20, t: 46, b: 50 }, paper_bgcolor: color("card"), plot_bgcolor: color("card") };
  saveAs(fileName(chart, "png"), await Plotly.toImage({ data: withLegend, layout: { ...shown, ...more } }, { format: "png", width, height, scale: 2 }));
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
  function add(added) {
    for (const chart of found.slice(shown, shown + added)) {
      grid.append(chartCard({ ...chart, family: family.name }, isMain(chart, family) ? (found.length > 1 ? " wide" : " full") : ""));
    }
    shown = Math.min(shown + added, found.length);
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
  const heading = [displayName(family.name), el("span", { class: "count" }, plural(found.length, "chart"))];
  return collapsible(view.search ? `${key}?${view.search}` : key, { class: "family" }, heading, open, () => familyCards(family, key));
}

/** The controls of all charts. rebuild: applies the search; axes: the choices for the horizontal axis; more: further controls. */
function curvesTools(rebuild, axes, more) {
  const search = el("input", { type: "search", id: "search", placeholder: "Search metrics", "aria-label": "Search metrics", value: view.search, on: { input: (event) => { view.search = event.target.value; rebuild(); } } });
  const shownSmooth = el("span", { class: "mono" }, view.smooth.toFixed(2));
  const zoomToInputs = () => {
    const [from, to] = [document.querySelector("input.from").value, document.querySelector("input.to").value];
    const ends = axisRange();
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
    el("label", {}, "From", el("input", { type: "number", class: "from", step: "any", value: shownEnd(0), on: { change: zoomToInputs } })),
    el("label", {}, "to", el("input", { type: "number", class: "to", step: "any", value: shownEnd(1), on: { change: zoomToInputs } })),
    el("button", { type: "button", class: "whole", disabled: !view.range, on: { click: () => zoom(null) } }, "Whole run"));
}

/** All charts, grouped by family, with their controls. */
function chartsOf(families, axes, more) {
  const list = el("div");
  const rebuild = () => {
    list.replaceChildren(...families.map(familyElement).filter(Boolean));
    if (!list.hasChildNodes()) list.append(el("p", { class: "soft" }, "No metric has all these words in its name."));
    redraw();
  };
  rebuild();
  return [curvesTools(rebuild, axes, more), list];
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => redraw());
