// The page of a run: its sections in order. Sections without content are left out.

const sections = [
  { id: "problems", title: "Problems", bare: true, has: () => true, dependsOn: () => data.problems, make: problemsList },
  { id: "results", title: "Results", has: () => data.results.rows.length || data.results.samples.length, dependsOn: () => data.results, make: resultsSection },
  { id: "curves", title: "Curves", has: () => data.families.some((family) => !isMemory(family)), dependsOn: () => [data.families.filter((family) => !isMemory(family)), data.axis.tokens.length > 0, data.axis.seconds.length > 0], // `redraw` updates the curves themselves
    make: () => curvesSection(data.families.filter((family) => !isMemory(family))) },
  { id: "timeline", title: "Timeline", has: () => data.windows.length, dependsOn: () => data.windows, make: timelineSection },
  { id: "costs", title: "Costs", has: () => data.costs.rows.length, dependsOn: () => data.costs, make: costsSection },
  { id: "memory", title: "Memory", has: () => data.families.some(isMemory), dependsOn: () => data.families.filter(isMemory),
    make: () => data.families.filter(isMemory).flatMap((family) => familyCards(family, "memory")) },
  { id: "evaluations", title: "Evaluations", has: () => data.evaluations.rows.length, dependsOn: () => data.evaluations, make: evaluationsSection },
  { id: "checkpoints", title: "Checkpoints", has: () => data.checkpoints.length, dependsOn: () => data.checkpoints, make: checkpointsSection },
  { id: "images", title: "Images", has: () => Object.keys(data.images).length, dependsOn: () => data.images, make: imagesSection },
  { id: "tables", title: "Tables", has: () => Object.keys(data.tables).length, dependsOn: () => data.tables, make: tablesSection },
  { id: "events", title: "What happened", has: () => data.events.length, dependsOn: () => data.events, make: eventsSection },
  { id: "logs", title: "Logs", has: () => Object.keys(data.logs).length, dependsOn: () => data.logs, make: logsSection },
  { id: "callsheet", title: "Call sheet", has: () => data.call_sheet, dependsOn: () => data.call_sheet, make: callSheetSection },
  { id: "settings", title: "Settings", has: () => data.config || data.settings.length, dependsOn: () => [data.config, data.settings], make: settingsSection },
];

function render(isUpdate = false) {
  renderSections(sections, { top: [header(), liveControls() ?? ""], tiles: tiles(), missingLabel: "This run has no data for:", source: el("span", { class: "mono" }, data.run.path) });
  updateStatus();
  redraw(isUpdate);
}

render();
startPolling();
