// The page: its parts in their order; those of which a run has nothing are left out. News redraw only the parts that changed.

const parts = [
  { id: "problems", title: "Problems", bare: true, has: () => true, from: () => data.problems, make: problemsList },
  { id: "results", title: "Results", has: () => data.results.rows.length || data.results.samples.length, from: () => data.results, make: resultsSection },
  { id: "curves", title: "Curves", has: () => data.families.some((family) => !isMemory(family)), from: () => [data.families.filter((family) => !isMemory(family)), data.axis.tokens.length > 0, data.axis.seconds.length > 0], // of the curves, `redraw` takes care
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
  { id: "settings", title: "Settings", has: () => data.config || data.settings.length, from: () => [data.config, data.settings], make: settingsSection },
];

function render(isNews = false) {
  renderParts(parts, { top: [header(), liveControls() ?? ""], tiles: tiles(), about: "Of this run there is nothing on:", from: el("span", { class: "mono" }, data.run.path) });
  showLife();
  redraw(isNews);
}

render();
goLive();
