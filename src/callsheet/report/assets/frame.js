// The layout of a page: its header, the links to its sections, and the sections. An update renders only the sections whose data has changed.

const outcomes = {
  finished: "good", stopped: "warn", preempted: "warn", interrupted: "warn", gone: "warn", failed: "bad", lost: "bad", running: "running",
};

const pill = (outcome, more = {}) => el("span", { class: `pill ${outcomes[outcome] ?? ""}`, ...more }, outcome);

const page = document.getElementById("page");
const head = el("header", { class: "top" }), tileRow = el("div", { class: "tiles" }), links = el("ul"), main = el("main", { id: "main" }), foot = el("footer");
const shownSections = new Map(); // id -> [the section's element, the JSON of the data it shows]
page.append(head, tileRow, el("nav", { "aria-label": "Sections of the page" }, links), main, foot);

/** Marks the link to the section that is in view. */
function markCurrent() {
  const sections = [...main.children];
  const current = sections.findLast((section) => section.getBoundingClientRect().top < innerHeight * 0.3) ?? sections[0];
  for (const link of links.querySelectorAll("a")) {
    if (link.hash === `#${current?.id}`) link.setAttribute("aria-current", "true"); else link.removeAttribute("aria-current");
  }
}

const scrollObserver = new IntersectionObserver(markCurrent, { threshold: [0, 0.1, 0.25, 0.5, 1], rootMargin: "0px 0px -60% 0px" });

/** Returns a function that restores the focus and the scroll positions of this section in the element that replaces it. */
function saveState(section) {
  const scrolled = [...section.querySelectorAll(".scroll")].map(({ scrollLeft, scrollTop }) => [scrollLeft, scrollTop]);
  const focused = section.contains(document.activeElement) ? document.activeElement : null;
  const ofSameTag = (element) => [...element.querySelectorAll(focused.tagName)];
  const index = focused ? ofSameTag(section).indexOf(focused) : -1;
  const selection = focused && [focused.selectionStart, focused.selectionEnd];
  return (newSection) => {
    [...newSection.querySelectorAll(".scroll")].forEach((element, scrollIndex) => { [element.scrollLeft, element.scrollTop] = scrolled[scrollIndex] ?? [0, 0]; });
    const element = focused && ofSameTag(newSection)[index];
    element?.focus({ preventScroll: true });
    if (element && isNumber(selection[0])) element.setSelectionRange(...selection);
  };
}

/**
 * sections: {id, title, has: () => whether it has content, dependsOn: () => the data it shows, make: () => its content, bare: without a heading}
 * top: the elements of the header; tiles: elements below it; missingLabel: the text before the titles of sections without content;
 * source: what the page shows, for the footer
 */
function renderSections(sections, { top, tiles, missingLabel, source }) {
  const focused = document.activeElement?.id;
  head.replaceChildren(...top);
  tileRow.replaceChildren(...tiles);
  tileRow.hidden = !tiles.length;
  const shown = sections.filter((section) => section.has());
  for (const [id, [element]] of shownSections) if (!shown.some((section) => section.id === id)) { element.remove(); shownSections.delete(id); }
  shown.forEach((section, index) => {
    const json = JSON.stringify(section.dependsOn());
    const [oldElement, oldJson] = shownSections.get(section.id) ?? [];
    if (json === oldJson) return;
    const element = el("section", { id: section.id, "aria-label": section.title }, section.bare ? null : el("h2", {}, section.title), [section.make()].flat());
    if (oldElement) {
      const restoreState = saveState(oldElement);
      scrollObserver.unobserve(oldElement);
      oldElement.replaceWith(element);
      restoreState(element);
    } else main.insertBefore(element, main.children[index] ?? null);
    scrollObserver.observe(element);
    shownSections.set(section.id, [element, json]);
  });
  links.replaceChildren(...shown.map((section) => el("li", {}, el("a", { href: `#${section.id}` }, section.title))));
  markCurrent();
  const missing = sections.filter((section) => !section.has()).map((section) => section.title.toLowerCase());
  foot.replaceChildren(...[
    missing.length ? el("p", {}, `${missingLabel} ${missing.join(", ")}.`) : null,
    el("p", {}, "Made by callsheet ", pageData.live ? "" : `on ${dateTime(data.generated)} `, "from ", source, ". Times are in this browser's time zone."),
  ].filter(Boolean));
  // The focus may have been in the header, whose elements were replaced.
  if (focused && document.activeElement?.id !== focused) document.getElementById(focused)?.focus({ preventScroll: true });
}

/** Enlarges small images, such as those of digits, by a whole factor. */
function enlarge(image) {
  const factor = Math.min(8, Math.floor(224 / Math.max(image.naturalWidth, image.naturalHeight)));
  if (factor >= 2) { image.classList.add("tiny"); image.style.width = `${image.naturalWidth * factor}px`; }
}

/** The URL of an image: a relative path in a live page, otherwise a data URI; null if there is none. */
function imageSource(file) {
  if (!pageData.live) return Object.hasOwn(pageData.pixels, file) ? pageData.pixels[file] : null;
  const [, run, path] = /^(?:(\d+)\/)?(images\/.*)$/s.exec(file) ?? []; // in a comparison, a file's path begins with the number of its run
  if (!path) return null;
  return `${run ? `run/${run}/` : ""}${path.split("/").map(encodeURIComponent).join("/")}`;
}
