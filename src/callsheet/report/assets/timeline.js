// The timeline: a window of steps as slices that nest by their times. Drawn as far as it can be seen.

const ROW = 21, TOP = 34, NARROWEST = 0.45;
const spanTints = { fetch: "span-fetch", forward: "span-forward", loss: "span-loss", backward: "span-backward", optimizer_step: "span-optimizer" };

/** The window's slices as objects with a depth, in the order of their beginnings. */
function nested(shown) {
  const open = [];
  const slices = shown.slices.map(([name, begin, length, step, callback]) => ({
    begin, end: begin + length, length, step, isCallback: callback >= 0,
    name: shown.names[callback >= 0 ? callback : name], event: shown.names[name], depth: 0, inner: 0,
  }));
  for (const slice of slices) {
    while (open.length && open.at(-1).end <= slice.begin + 1e-3) open.pop();
    slice.depth = open.length;
    if (open.length) open.at(-1).inner += slice.length;
    open.push(slice);
  }
  return slices;
}

/** The steps of a window: each from the fetch of its first batch to its end; a fetch does not know yet which step it is for. */
function stepBands(slices) {
  const found = [];
  let begin = null, length = 0;
  for (const slice of slices) {
    if (slice.isCallback || slice.depth > 0 || (slice.name !== "fetch" && slice.name !== "train_step")) continue;
    begin ??= slice.begin;
    length += slice.length;
    if (slice.name === "fetch") continue;
    found.push({ step: slice.step, begin, end: slice.end, length });
    [begin, length] = [null, 0];
  }
  return found;
}

function timelineSection() {
  const windows = data.windows;
  const at = windows.findIndex((each) => each.began === view.window);
  const flame = el("div");
  const title = (each) => `steps ${each.first_step} to ${each.last_step}`;
  const select = el("select", { id: "window", "aria-label": "Window", on: { change: () => choose(Number(select.value)) } },
    windows.map((each, place) => el("option", { value: place }, `${title(each)} (${duration(each.seconds)})`)));
  const previous = el("button", { type: "button", "aria-label": "Earlier window", on: { click: () => choose(Number(select.value) - 1) } }, "‹");
  const next = el("button", { type: "button", "aria-label": "Later window", on: { click: () => choose(Number(select.value) + 1) } }, "›");
  function show(place) {
    select.value = String(place);
    previous.disabled = place === 0;
    next.disabled = place === windows.length - 1;
    flame.replaceChildren(...flameChart(windows[place]));
  }
  function choose(place) {
    Object.assign(view, { window: windows[place].began, from: 0, to: windows[place].seconds * 1e6, same: null });
    show(place);
  }
  if (at >= 0) show(at);
  else { choose(windows.length - 1); view.window = null; } // nobody chose: the latest, also when news come
  return [
    el("p", { class: "about" }, "Now and then a few steps in a row are timed, with every span and every callback in them. Drag to move, click a slice to mark its like, "
      + "double-click to zoom to it; with the keyboard, arrows move, + and - zoom, 0 shows all. The file trace.json beside this page holds all windows; ui.perfetto.dev opens it."),
    el("div", { class: "tools" }, previous, select, next, data.windows_left_out ? el("span", { class: "soft" }, `${data.windows_left_out} windows between these are in the trace alone`) : null),
    flame,
  ];
}

function flameChart(shown) {
  const slices = nested(shown);
  const whole = shown.seconds * 1e6;
  const depth = Math.max(0, ...slices.map((slice) => slice.depth)) + 1;
  const height = TOP + depth * ROW + 8;
  const picture = svg("svg", { height, tabindex: 0, role: "img", "aria-label": `Timeline of steps ${shown.first_step} to ${shown.last_step}; the table below tells the same` });
  const bands = stepBands(slices);

  function draw() {
    const width = picture.clientWidth || 1000;
    const scale = width / (view.to - view.from);
    const x = (moment) => (moment - view.from) * scale;
    const parts = [];
    for (const tick of ticks(view.from, view.to, Math.max(3, Math.floor(width / 110)))) {
      parts.push(svg("line", { x1: x(tick), x2: x(tick), y1: 16, y2: height }), svg("text", { class: "tick", x: x(tick) + 3, y: 12 }, duration(tick / 1e6)));
    }
    let named = -Infinity;
    for (const { step, begin } of bands) {
      const place = x(begin);
      if (place < -1 || place > width || place - named < 3) continue;
      parts.push(svg("line", { class: "step", x1: place, x2: place, y1: 16, y2: height }));
      if (place - named > 62) { parts.push(svg("text", { class: "step-name", x: place + 3, y: 28 }, `step ${step}`)); named = place; }
    }
    const filled = new Map(); // row -> the pixel up to which it is covered
    for (const slice of slices) {
      const left = x(slice.begin), right = x(slice.end);
      if (right < 0 || left > width) continue;
      if (right - left < NARROWEST && right < (filled.get(slice.depth) ?? -1)) continue;
      const from = Math.max(left, -2), to = Math.min(Math.max(right, left + 1.2), width + 2), y = TOP + slice.depth * ROW;
      filled.set(slice.depth, to);
      const tint = slice.isCallback ? "callback" : spanTints[slice.name] ?? "span";
      const bar = svg("rect", { class: `slice${view.same === slice.name ? " same" : ""}`, x: from, y, width: to - from, height: ROW - 2, rx: to - from > 6 ? 2.5 : 0, fill: `var(--${tint})` });
      bar.slice = slice;
      parts.push(bar);
      const room = Math.floor((to - from - 8) / 6.1);
      if (room >= 3) {
        const text = slice.name.length <= room ? slice.name : `${slice.name.slice(0, Math.max(1, room - 1))}…`;
        parts.push(svg("text", { class: slice.isCallback ? "callback-text" : "span-text", x: Math.max(from, 0) + 4, y: y + 13.5 }, text));
      }
    }
    picture.replaceChildren(...parts);
  }

  function move(from, to) {
    const length = Math.min(Math.max(to - from, 0.5), whole);
    view.from = Math.min(Math.max(0, from), whole - length);
    view.to = view.from + length;
    draw();
  }
  const zoomBy = (factor, around = (view.from + view.to) / 2) => move(around - (around - view.from) * factor, around + (view.to - around) * factor);
  const tip = document.getElementById("tip");
  let drag = null;

  picture.addEventListener("pointerdown", (event) => { if (event.button === 0) drag = { x: event.clientX, from: view.from, to: view.to, moved: false }; });
  picture.addEventListener("pointermove", (event) => {
    if (drag && event.buttons) {
      const by = ((event.clientX - drag.x) / picture.clientWidth) * (drag.to - drag.from);
      if (!drag.moved && Math.abs(event.clientX - drag.x) > 3) { drag.moved = true; picture.setPointerCapture(event.pointerId); }
      if (drag.moved) { tip.hidden = true; move(drag.from - by, drag.to - by); }
      return;
    }
    const { slice } = event.target;
    tip.hidden = !slice;
    if (!slice) return;
    tip.textContent = tipText(slice);
    const box = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - box.width - 8))}px`;
    tip.style.top = `${event.clientY + 18 + box.height > innerHeight ? event.clientY - box.height - 10 : event.clientY + 18}px`;
  });
  picture.addEventListener("pointerleave", () => { tip.hidden = true; });
  picture.addEventListener("pointerup", () => { setTimeout(() => { drag = null; }); });
  picture.addEventListener("pointercancel", () => { drag = null; });
  picture.addEventListener("click", (event) => {
    if (drag?.moved) return;
    const name = event.target.slice?.name ?? null;
    view.same = view.same === name ? null : name;
    for (const bar of picture.querySelectorAll("rect.slice")) bar.classList.toggle("same", bar.slice.name === view.same);
  });
  picture.addEventListener("dblclick", (event) => {
    const { slice } = event.target;
    if (slice) move(slice.begin - slice.length * 0.05, slice.end + slice.length * 0.05);
    else move(0, whole);
  });
  picture.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return; // a plain wheel scrolls the page
    event.preventDefault();
    zoomBy(Math.exp(event.deltaY / 300), view.from + ((event.clientX - picture.getBoundingClientRect().left) / picture.clientWidth) * (view.to - view.from));
  }, { passive: false });
  picture.addEventListener("keydown", (event) => {
    const by = (view.to - view.from) / 5;
    const acts = {
      ArrowLeft: () => move(view.from - by, view.to - by), ArrowRight: () => move(view.from + by, view.to + by),
      "+": () => zoomBy(0.6), "=": () => zoomBy(0.6), "-": () => zoomBy(1 / 0.6), 0: () => move(0, whole),
    };
    if (acts[event.key]) { event.preventDefault(); acts[event.key](); }
  });

  const tipText = (slice) => [
    slice.isCallback ? `${named(slice.name)}\nat ${slice.event}` : slice.name,
    `${duration(slice.length / 1e6)} · ${percent(slice.length / whole)} of the window`,
    ...bands.filter((band) => band.begin <= slice.begin && slice.end <= band.end).map((band) => `${percent(slice.length / band.length)} of step ${band.step}`),
  ].join("\n");

  new ResizeObserver(draw).observe(picture);
  const button = (text, label, act) => el("button", { type: "button", "aria-label": label, on: { click: act } }, text);
  return [
    el("div", { class: "flame" }, picture),
    el("div", { class: "tools" }, button("+", "Zoom in", () => zoomBy(0.6)), button("−", "Zoom out", () => zoomBy(1 / 0.6)), button("All", "Show the whole window", () => move(0, whole)),
      el("span", { class: "keys" },
        [["span-fetch", "fetch"], ["span-forward", "forward"], ["span-loss", "loss"], ["span-backward", "backward"], ["span-optimizer", "optimizer step"], ["span", "other spans"], ["callback", "callbacks"]]
          .map(([tint, text]) => el("span", {}, el("i", { style: { background: `var(--${tint})` } }), text))),
      el("span", { class: "soft" }, `began ${moment(shown.began)}${shown.is_whole ? "" : "; it had more events than are kept"}`)),
    whereItWent(slices, whole),
  ];
}

/** Times at which a scale between two times is marked. */
function ticks(from, to, most) {
  const rough = (to - from) / most;
  const power = 10 ** Math.floor(Math.log10(rough));
  const each = [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= rough);
  const found = [];
  for (let tick = Math.ceil(from / each) * each; tick <= to; tick += each) found.push(Number(tick.toPrecision(12)));
  return found;
}

function whereItWent(slices, whole) {
  const sums = new Map();
  for (const slice of slices) {
    const key = `${slice.isCallback}/${slice.name}`;
    const sum = sums.get(key) ?? { name: slice.name, isCallback: slice.isCallback, count: 0, total: 0, self: 0, worst: 0 };
    sum.count += 1; sum.total += slice.length; sum.self += Math.max(0, slice.length - slice.inner); sum.worst = Math.max(sum.worst, slice.length);
    sums.set(key, sum);
  }
  const column = (title, value, cell, about) => ({ title, value, cell, about, numeric: true });
  const columns = [
    { title: "name", value: (row) => row.name, cell: (row) => named(row.name) },
    { title: "what", value: (row) => (row.isCallback ? "callback" : "span"), cell: (row) => (row.isCallback ? "callback" : "span") },
    column("times", (row) => row.count, (row) => number(row.count)),
    column("total", (row) => row.total, (row) => duration(row.total / 1e6), "with what stands inside"),
    column("itself", (row) => row.self, (row) => duration(row.self / 1e6), "without what stands inside"),
    column("worst", (row) => row.worst, (row) => duration(row.worst / 1e6)),
    column("share", (row) => row.self, (row) => percent(row.self / whole), "of the window, by itself"),
  ];
  return folding("whereItWent", { class: "card fold-card" }, "Where the time of this window went", false,
    () => table("window", columns, [...sums.values()], { sort: [4, true], caption: "Time in this window by span and callback" }));
}
