// The timeline: the spans and callbacks of a window of steps, drawn as nested slices. Only slices that are in view are drawn.

// All in pixels. A slice narrower than MIN_SLICE_WIDTH is left out if another slice already covers it.
const ROW_HEIGHT = 21, TOP = 34, MIN_SLICE_WIDTH = 0.45;
const spanTints = { fetch: "span-fetch", forward: "span-forward", loss: "span-loss", backward: "span-backward", optimizer_step: "span-optimizer" };

/** The window's slices in order of their start, with their depth and with `inner`, the total length of the slices directly inside. */
function nestSlices(shown) {
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

/** The start and the end of each step of a window. A step starts at the fetch of its first batch; fetch slices do not have the step's number yet. */
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
  const chosen = windows.findIndex((each) => each.began === view.window);
  const flame = el("div");
  const title = (each) => `steps ${each.first_step} to ${each.last_step}`;
  const select = el("select", { id: "window", "aria-label": "Window", on: { change: () => choose(Number(select.value)) } },
    windows.map((each, index) => el("option", { value: index }, `${title(each)} (${duration(each.seconds)})`)));
  const previous = el("button", { type: "button", "aria-label": "Earlier window", on: { click: () => choose(Number(select.value) - 1) } }, "‹");
  const next = el("button", { type: "button", "aria-label": "Later window", on: { click: () => choose(Number(select.value) + 1) } }, "›");
  function show(index) {
    select.value = String(index);
    previous.disabled = index === 0;
    next.disabled = index === windows.length - 1;
    flame.replaceChildren(...flameChart(windows[index]));
  }
  function choose(index) {
    Object.assign(view, { window: windows[index].began, from: 0, to: windows[index].seconds * 1e6, highlighted: null });
    show(index);
  }
  if (chosen >= 0) show(chosen);
  else { choose(windows.length - 1); view.window = null; } // the reader has not chosen a window: show the latest, also after updates
  return [
    el("p", { class: "about" }, "From time to time, a few consecutive steps are timed, with all their spans and callbacks. Drag to move, click a slice to highlight all with its name, "
      + "double-click to zoom to it; with the keyboard, arrows move, + and - zoom, 0 shows all. The file trace.json next to this page contains all windows; ui.perfetto.dev opens it."),
    el("div", { class: "tools" }, previous, select, next, data.windows_left_out ? el("span", { class: "soft" }, `${data.windows_left_out} windows between these are only in the trace`) : null),
    flame,
  ];
}

function flameChart(shown) {
  const slices = nestSlices(shown);
  const whole = shown.seconds * 1e6;
  const depth = Math.max(0, ...slices.map((slice) => slice.depth)) + 1;
  const height = TOP + depth * ROW_HEIGHT + 8;
  const picture = svg("svg", { height, tabindex: 0, role: "img", "aria-label": `Timeline of steps ${shown.first_step} to ${shown.last_step}; the table below shows the same times` });
  const bands = stepBands(slices);

  function draw() {
    const width = picture.clientWidth || 1000;
    const scale = width / (view.to - view.from);
    const x = (time) => (time - view.from) * scale;
    const parts = [];
    for (const tick of ticks(view.from, view.to, Math.max(3, Math.floor(width / 110)))) {
      parts.push(svg("line", { x1: x(tick), x2: x(tick), y1: 16, y2: height }), svg("text", { class: "tick", x: x(tick) + 3, y: 12 }, duration(tick / 1e6)));
    }
    let lastLabel = -Infinity; // position of the last label
    for (const { step, begin } of bands) {
      const position = x(begin);
      if (position < -1 || position > width || position - lastLabel < 3) continue;
      parts.push(svg("line", { class: "step", x1: position, x2: position, y1: 16, y2: height }));
      if (position - lastLabel > 62) { parts.push(svg("text", { class: "step-name", x: position + 3, y: 28 }, `step ${step}`)); lastLabel = position; }
    }
    const filled = new Map(); // row -> the pixel up to which slices cover it
    for (const slice of slices) {
      const left = x(slice.begin), right = x(slice.end);
      if (right < 0 || left > width) continue;
      if (right - left < MIN_SLICE_WIDTH && right < (filled.get(slice.depth) ?? -1)) continue;
      const from = Math.max(left, -2), to = Math.min(Math.max(right, left + 1.2), width + 2), y = TOP + slice.depth * ROW_HEIGHT;
      filled.set(slice.depth, to);
      const tint = slice.isCallback ? "callback" : spanTints[slice.name] ?? "span";
      const bar = svg("rect", { class: `slice${view.highlighted === slice.name ? " highlighted" : ""}`, x: from, y, width: to - from, height: ROW_HEIGHT - 2, rx: to - from > 6 ? 2.5 : 0, fill: `var(--${tint})` });
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
    view.highlighted = view.highlighted === name ? null : name;
    for (const bar of picture.querySelectorAll("rect.slice")) bar.classList.toggle("highlighted", bar.slice.name === view.highlighted);
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
    const actions = {
      ArrowLeft: () => move(view.from - by, view.to - by), ArrowRight: () => move(view.from + by, view.to + by),
      "+": () => zoomBy(0.6), "=": () => zoomBy(0.6), "-": () => zoomBy(1 / 0.6), 0: () => move(0, whole),
    };
    if (actions[event.key]) { event.preventDefault(); actions[event.key](); }
  });

  const tipText = (slice) => [
    slice.isCallback ? `${displayName(slice.name)}\nat ${slice.event}` : slice.name,
    `${duration(slice.length / 1e6)} · ${percent(slice.length / whole)} of the window`,
    ...bands.filter((band) => band.begin <= slice.begin && slice.end <= band.end).map((band) => `${percent(slice.length / band.length)} of step ${band.step}`),
  ].join("\n");

  new ResizeObserver(draw).observe(picture);
  const button = (text, label, click) => el("button", { type: "button", "aria-label": label, on: { click } }, text);
  return [
    el("div", { class: "flame" }, picture),
    el("div", { class: "tools" }, button("+", "Zoom in", () => zoomBy(0.6)), button("−", "Zoom out", () => zoomBy(1 / 0.6)), button("All", "Show the whole window", () => move(0, whole)),
      el("span", { class: "keys" },
        [["span-fetch", "fetch"], ["span-forward", "forward"], ["span-loss", "loss"], ["span-backward", "backward"], ["span-optimizer", "optimizer step"], ["span", "other spans"], ["callback", "callbacks"]]
          .map(([tint, text]) => el("span", {}, el("i", { style: { background: `var(--${tint})` } }), text))),
      el("span", { class: "soft" }, `began ${dateTime(shown.began)}${shown.is_whole ? "" : "; it had more events than were recorded"}`)),
    timeTable(slices, whole),
  ];
}

/** Round times between two times, for at most about `most` ticks of a scale. */
function ticks(from, to, most) {
  const rough = (to - from) / most;
  const power = 10 ** Math.floor(Math.log10(rough));
  const distance = [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= rough);
  const found = [];
  for (let tick = Math.ceil(from / distance) * distance; tick <= to; tick += distance) found.push(Number(tick.toPrecision(12)));
  return found;
}

function timeTable(slices, whole) {
  const sums = new Map();
  for (const slice of slices) {
    const key = `${slice.isCallback}/${slice.name}`;
    const sum = sums.get(key) ?? { name: slice.name, isCallback: slice.isCallback, count: 0, total: 0, self: 0, worst: 0 };
    sum.count += 1; sum.total += slice.length; sum.self += Math.max(0, slice.length - slice.inner); sum.worst = Math.max(sum.worst, slice.length);
    sums.set(key, sum);
  }
  const column = (title, value, cell, about) => ({ title, value, cell, about, numeric: true });
  const columns = [
    { title: "name", value: (row) => row.name, cell: (row) => displayName(row.name) },
    { title: "kind", value: (row) => (row.isCallback ? "callback" : "span"), cell: (row) => (row.isCallback ? "callback" : "span") },
    column("times", (row) => row.count, (row) => number(row.count)),
    column("total", (row) => row.total, (row) => duration(row.total / 1e6), "including nested spans and callbacks"),
    column("itself", (row) => row.self, (row) => duration(row.self / 1e6), "excluding nested spans and callbacks"),
    column("worst", (row) => row.worst, (row) => duration(row.worst / 1e6)),
    column("share", (row) => row.self, (row) => percent(row.self / whole), "of the window, excluding nested spans and callbacks"),
  ];
  return collapsible("timeTable", { class: "card fold-card" }, "Where the time of this window went", false,
    () => table("window", columns, [...sums.values()], { sort: [4, true], caption: "Time in this window by span and callback" }));
}
