// The page: its parts in their order; those of which a run has nothing are left out. News redraw only the parts that changed.

const isMemory = (family) => family.name === "memory";

const parts = [
  { id: "problems", title: "Problems", has: () => true, from: () => data.problems, make: problemsList },
  { id: "results", title: "Results", has: () => data.results.rows.length || data.results.samples.length, from: () => data.results, make: resultsSection },
  { id: "curves", title: "Curves", has: () => data.families.some((family) => !isMemory(family)), from: () => [data.families.filter((family) => !isMemory(family)), data.axis.tokens.length > 0], // of the curves, `redraw` takes care
    make: () => curvesSection(data.families.filter((family) => !isMemory(family))) },
  { id: "timeline", title: "Timeline", has: () => data.windows.length, from: () => data.windows, make: timelineSection },
  { id: "costs", title: "Costs", has: () => data.costs.rows.length, from: () => data.costs, make: costsSection },
  { id: "memory", title: "Memory", has: () => data.families.some(isMemory), from: () => data.families.filter(isMemory),
    make: () => data.families.filter(isMemory).flatMap((family) => familyCards(family, "memory")) },
  { id: "evaluations", title: "Evaluations", has: () => data.evaluations.rows.length, from: () => data.evaluations, make: evaluationsSection },
  { id: "checkpoints", title: "Checkpoints", has: () => data.checkpoints.length, from: () => data.checkpoints, make: checkpointsSection },
  { id: "images", title: "Images", has: () => Object.keys(data.images).length, from: () => data.images, make: imagesSection },
  { id: "tables", title: "Tables", has: () => Object.keys(data.tables).length, from: () => data.tables, make: tablesSection },
  { id: "events", title: "What happened", has: () => data.events.length, from: () => data.events, make: eventsSection },
  { id: "logs", title: "Logs", has: () => Object.keys(data.logs).length, from: () => data.logs, make: logsSection },
  { id: "callsheet", title: "Call sheet", has: () => data.call_sheet, from: () => data.call_sheet, make: callSheetSection },
  { id: "settings", title: "Settings", has: () => data.config || data.hyperparameters.length, from: () => [data.config, data.hyperparameters], make: settingsSection },
];

const page = document.getElementById("page");
const head = el("header", { class: "top" }), figures = el("div", { class: "tiles" }), links = el("ul"), main = el("main"), foot = el("footer");
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

function render() {
  const focused = document.activeElement?.id;
  head.replaceChildren(header(), liveControls() ?? "");
  figures.replaceChildren(...tiles());
  figures.hidden = !data.tiles.length;
  const here = parts.filter((part) => part.has());
  for (const [id, [section]] of shownParts) if (!here.some((part) => part.id === id)) { section.remove(); shownParts.delete(id); }
  here.forEach((part, place) => {
    const from = JSON.stringify(part.from());
    const [old, oldFrom] = shownParts.get(part.id) ?? [];
    if (from === oldFrom) return;
    const made = el("section", { id: part.id, "aria-label": part.title }, part.id === "problems" ? null : el("h2", {}, part.title), [part.make()].flat());
    if (old) { passing.unobserve(old); old.replaceWith(made); } else main.insertBefore(made, main.children[place] ?? null);
    passing.observe(made);
    shownParts.set(part.id, [made, from]);
  });
  links.replaceChildren(...here.map((part) => el("li", {}, el("a", { href: `#${part.id}` }, part.title))));
  markCurrent();
  const missing = parts.filter((part) => !part.has()).map((part) => part.title.toLowerCase());
  foot.replaceChildren(...[
    missing.length ? el("p", {}, `Of this run there is nothing on: ${missing.join(", ")}.`) : null,
    el("p", {}, "Made by callsheet ", pageData.live === null ? `on ${moment(data.generated)} ` : "", "from ", el("span", { class: "mono" }, data.run.path), ". Times are those of this browser's time zone."),
  ].filter(Boolean));
  showLife();
  redraw();
  if (focused) document.getElementById(focused)?.focus({ preventScroll: true });
}

render();
if (pageData.live !== null) setTimeout(poll, 1000 * pageData.live.seconds);
