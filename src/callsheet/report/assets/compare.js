// The page of a comparison: its sections in order. When a run is shown or hidden, the sections that contain the run are rendered again.

const hidden = () => [...view.hidden];
const names = () => runs.map(({ name, group }) => [name, groups[group]]);

/** Wraps a function that makes a section: if all runs are hidden, the section only says so. */
const ifRunsShown = (make) => () => (shownGroups().length ? make() : el("p", { class: "about" }, "All runs are hidden."));

const sections = [
  { id: "runs", title: "Runs", has: () => true, dependsOn: () => [runs, groups, data.problems, data.are_there, data.notice], make: runsSection },
  { id: "results", title: "Results", has: () => headlineMetrics().length, dependsOn: () => [hidden(), names(), data.values], make: ifRunsShown(resultsSection) },
  { id: "differences", title: "What differs", has: () => Object.keys(data.differences).length, dependsOn: () => [hidden(), names(), data.differences], make: ifRunsShown(differencesSection) },
  { id: "curves", title: "Curves", has: () => data.families.length, dependsOn: () => [data.families, axesOfRuns(), isGrouped(), data.metrics_left_out], make: curvesSection }, // `redraw` updates the curves themselves
  { id: "values", title: "Values", has: () => data.values.length, dependsOn: () => [hidden(), names(), data.values], make: ifRunsShown(valuesSection) },
  { id: "anatomy", title: "Anatomy of a step", has: () => data.anatomy.length, dependsOn: () => [hidden(), names(), data.anatomy], make: ifRunsShown(anatomySection) },
  { id: "problems", title: "Problems", has: () => true, dependsOn: () => [hidden(), names(), data.problems], make: ifRunsShown(problemsSection) },
  { id: "evaluations", title: "Evaluations", has: () => data.evaluations.length, dependsOn: () => [hidden(), names(), data.evaluations], make: ifRunsShown(evaluationsSection) },
  { id: "checkpoints", title: "Checkpoints", has: () => data.checkpoints.some((each) => each.count), dependsOn: () => [hidden(), names(), data.checkpoints], make: ifRunsShown(checkpointsSection) },
  { id: "tables", title: "Tables", has: () => Object.keys(data.tables).length, dependsOn: () => [hidden(), names(), data.tables], make: ifRunsShown(tablesSection) },
  { id: "images", title: "Images", has: () => Object.keys(data.images).length, dependsOn: () => [hidden(), names(), data.images], make: ifRunsShown(imagesSection) },
];

/** Returns whether a run is running, and a text about the status of all runs. */
function liveStatus() {
  const running = runs.filter((_, run) => outcomeOf(run) === "running").length;
  return [running > 0, running ? `live, ${number(running)} of ${plural(runs.length, "run")} running` : "no run is running"];
}

function render(isUpdate = false) {
  readRuns();
  document.title = `${plural(runs.length, "run")} compared - callsheet`;
  const top = [header(), pageData.live && el("div", { class: "live" }, statusIndicator())].filter(Boolean);
  renderSections(sections, { top, tiles: [], missingLabel: "These runs have no data for:", source: plural(runs.length, "run") });
  updateStatus();
  redraw(isUpdate);
}

/** Shows or hides runs everywhere on the page. */
function showRuns(members, shown) {
  for (const run of members) if (shown) view.hidden.delete(run); else view.hidden.add(run);
  for (const input of document.querySelectorAll("input[data-runs]")) updateCheckbox(input, input.dataset.runs.split(" ").map(Number));
  render();
}

render();
startPolling();
