// Functions that create elements and format numbers. Texts from a run are added as text nodes, never as markup.

const pageData = JSON.parse(document.getElementById("page-data").textContent);
let data = pageData.data;

/** The reader's choices, which are kept when the data is updated. */
const view = {
  axis: "step", log: false, marks: true, smooth: 0, search: "", range: null, hidden: new Set(), open: new Map(), shown: new Map(), logCharts: new Set(), largeCharts: new Set(),
  window: null, from: 0, to: 0, highlighted: null, sort: new Map(), unfolded: new Set(), picked: new Map(),
};

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    else if (name === "style") for (const [property, to] of Object.entries(value)) element.style.setProperty(property, to);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

function el(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

function svg(name, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
}

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

function number(value, digits = 5) {
  if (!isNumber(value)) return "–";
  if (Number.isInteger(value) && Math.abs(value) < 1e12) return value.toLocaleString("en-US");
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-4) return value.toExponential(3).replace(/\.?0+e/, "e").replace("e+", "e");
  return size >= 10 ** digits ? Math.round(value).toLocaleString("en-US") : String(Number(value.toPrecision(digits)));
}

function count(value) {
  if (!isNumber(value)) return "–";
  const [by, unit] = value >= 1e9 ? [1e9, " G"] : value >= 1e6 ? [1e6, " M"] : value >= 1e4 ? [1e3, " k"] : [1, ""];
  return number(Number((value / by).toPrecision(4))) + unit;
}

function bytes(value) {
  if (!isNumber(value)) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let index = 0;
  while (value >= 1024 && index < units.length - 1) { value /= 1024; index += 1; }
  return `${index ? Number(value.toPrecision(3)) : value} ${units[index]}`;
}

function duration(seconds) {
  if (!isNumber(seconds)) return "–";
  if (seconds < 0) return `-${duration(-seconds)}`;
  if (seconds === 0) return "0 s";
  if (seconds < 1e-3) return `${Number((seconds * 1e6).toPrecision(3))} µs`;
  if (seconds < 1) return `${Number((seconds * 1e3).toPrecision(3))} ms`;
  if (seconds < 60) return `${Number(seconds.toPrecision(3))} s`;
  const whole = Math.round(seconds);
  const parts = [[Math.floor(whole / 86400), "d"], [Math.floor(whole / 3600) % 24, "h"], [Math.floor(whole / 60) % 60, "min"], [whole % 60, "s"]];
  const first = parts.findIndex(([value]) => value > 0);
  return parts.slice(first, first + 2).filter(([value]) => value > 0).map(([value, unit]) => `${value} ${unit}`).join(" ");
}

const milliseconds = (seconds) => (isNumber(seconds) ? `${Number((seconds * 1e3).toPrecision(3))} ms` : "–");

function percent(share) {
  if (!isNumber(share)) return "–";
  if (share === 0) return "0 %";
  return share < 0.0001 ? "< 0.01 %" : `${Number((share * 100).toPrecision(share < 0.01 ? 2 : 3))} %`;
}

function dateTime(seconds) {
  if (!isNumber(seconds)) return "–";
  const date = new Date(seconds * 1000);
  if (Number.isNaN(date.getTime())) return "–";
  const twoDigits = (value) => String(value).padStart(2, "0");
  return `${date.getFullYear()}-${twoDigits(date.getMonth() + 1)}-${twoDigits(date.getDate())} ${twoDigits(date.getHours())}:${twoDigits(date.getMinutes())}:${twoDigits(date.getSeconds())}`;
}

const plural = (value, noun) => `${number(value)} ${noun}${value === 1 ? "" : "s"}`;
const displayName = (name) => (name === "" ? "(no name)" : name);

/** A row of buttons of which one is pressed. */
function choice(label, options, chosen, choose) {
  const buttons = options.map(([value, text]) =>
    el("button", { type: "button", "aria-pressed": String(value === chosen), on: { click: () => {
      buttons.forEach((button, index) => button.setAttribute("aria-pressed", String(options[index][0] === value)));
      choose(value);
    } } }, text));
  return el("span", { class: "choice", role: "group", "aria-label": label }, buttons);
}

/** A `details` element that remembers by its key whether it is open. `make` creates its content when it is first opened. */
function collapsible(key, attributes, summary, open, make) {
  const body = el("div");
  const element = el("details", { ...attributes, open: view.open.get(key) ?? open }, el("summary", {}, summary), body);
  const build = () => { if (element.open && !body.hasChildNodes()) body.append(...[make()].flat()); };
  element.addEventListener("toggle", () => { view.open.set(key, element.open); build(); });
  build();
  return element;
}
