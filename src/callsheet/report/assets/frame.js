// The frame of a page: its head, the links to its parts, and the parts, of which those that changed are made again.

const outcomes = {
  finished: "good", stopped: "warn", preempted: "warn", interrupted: "warn", gone: "warn", failed: "bad", lost: "bad", running: "going",
};

const pill = (outcome, more = {}) => el("span", { class: `pill ${outcomes[outcome] ?? ""}`, ...more }, outcome);

const page = document.getElementById("page");
const head = el("header", { class: "top" }), figures = el("div", { class: "tiles" }), links = el("ul"), main = el("main", { id: "main" }), foot = el("footer");
const shownParts = new Map(); // id -> [the section's element, what it was made from]
page.append(head, figures, el("nav", { "aria-label": "Parts of the page" }, links), main, foot);

function markCurrent() {
  const sections = [...main.children];
  const current = sections.findLast((section) => section.getBoundingClientRect().top < innerHeight * 0.3) ?? sections[0];
  for (const link of links.querySelectorAll("a")) {
    if (link.hash === `#${current?.id}`) link.setAttribute("aria-current", "true"); else link.removeAttribute("aria-current");
  }
}

const passing = new IntersectionObserver(markCurrent, { threshold: [0, 0.1, 0.25, 0.5, 1], rootMargin: "0px 0px -60% 0px" });

/** Returns a function that gives a section, which is made again, the focus and the scrolling of this one. */
function stateOf(section) {
  const scrolled = [...section.querySelectorAll(".scroll")].map(({ scrollLeft, scrollTop }) => [scrollLeft, scrollTop]);
  const focused = section.contains(document.activeElement) ? document.activeElement : null;
  const alike = (element) => [...element.querySelectorAll(focused.tagName)];
  const place = focused ? alike(section).indexOf(focused) : -1;
  const marked = focused && [focused.selectionStart, focused.selectionEnd];
  return (made) => {
    [...made.querySelectorAll(".scroll")].forEach((element, at) => { [element.scrollLeft, element.scrollTop] = scrolled[at] ?? [0, 0]; });
    const element = focused && alike(made)[place];
    element?.focus({ preventScroll: true });
    if (element && isNumber(marked[0])) element.setSelectionRange(...marked);
  };
}

/**
 * parts: {id, title, has, from: what it is made from, make, bare: without a heading}
 * top, tiles: elements; about: what the foot says before the names of missing parts; from: what the page was made from.
 */
function renderParts(parts, { top, tiles, about, from }) {
  const focused = document.activeElement?.id;
  head.replaceChildren(...top);
  figures.replaceChildren(...tiles);
  figures.hidden = !tiles.length;
  const here = parts.filter((part) => part.has());
  for (const [id, [section]] of shownParts) if (!here.some((part) => part.id === id)) { section.remove(); shownParts.delete(id); }
  here.forEach((part, place) => {
    const source = JSON.stringify(part.from());
    const [old, oldSource] = shownParts.get(part.id) ?? [];
    if (source === oldSource) return;
    const made = el("section", { id: part.id, "aria-label": part.title }, part.bare ? null : el("h2", {}, part.title), [part.make()].flat());
    if (old) { const restore = stateOf(old); passing.unobserve(old); old.replaceWith(made); restore(made); } else main.insertBefore(made, main.children[place] ?? null);
    passing.observe(made);
    shownParts.set(part.id, [made, source]);
  });
  links.replaceChildren(...here.map((part) => el("li", {}, el("a", { href: `#${part.id}` }, part.title))));
  markCurrent();
  const missing = parts.filter((part) => !part.has()).map((part) => part.title.toLowerCase());
  foot.replaceChildren(...[
    missing.length ? el("p", {}, `${about} ${missing.join(", ")}.`) : null,
    el("p", {}, "Made by callsheet ", pageData.live ? "" : `on ${moment(data.generated)} `, "from ", from, ". Times are those of this browser's time zone."),
  ].filter(Boolean));
  if (focused && document.activeElement?.id !== focused) document.getElementById(focused)?.focus({ preventScroll: true }); // in the head
}

/** Small images, such as digits, are shown larger, pixel by pixel. */
function enlarge(image) {
  const factor = Math.min(8, Math.floor(224 / Math.max(image.naturalWidth, image.naturalHeight)));
  if (factor >= 2) { image.classList.add("tiny"); image.style.width = `${image.naturalWidth * factor}px`; }
}

function imageSource(file) {
  if (!pageData.live) return Object.hasOwn(pageData.pixels, file) ? pageData.pixels[file] : null;
  const [, run, path] = /^(?:(\d+)\/)?(images\/.*)$/s.exec(file) ?? []; // of several runs, a file begins with the run's number
  if (!path) return null;
  return `${run ? `run/${run}/` : ""}${path.split("/").map(encodeURIComponent).join("/")}`;
}
