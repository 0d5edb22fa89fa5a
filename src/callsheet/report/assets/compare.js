// The page of a comparison: its parts in their order. Switching a run on or off makes the parts again that show it.

const hidden = () => [...view.hidden];
const names = () => runs.map(({ name, group }) => [name, groups[group]]);

/** What makes a section, unless no run is shown in it. */
const ofShown = (make) => () => (shownGroups().length ? make() : el("p", { class: "about" }, "All runs are switched off."));

const parts = [
  { id: "runs", title: "Runs", has: () => true, from: () => [runs, groups, data.problems, data.are_there, data.notice], make: runsSection },
  { id: "results", title: "Results", has: () => headlines().length, from: () => [hidden(), names(), data.values], make: ofShown(resultsSection) },
  { id: "differences", title: "What differs", has: () => Object.keys(data.differences).length, from: () => [hidden(), names(), data.differences], make: ofShown(differencesSection) },
  { id: "curves", title: "Curves", has: () => data.families.length, from: () => [data.families, axesOfRuns(), isGrouped(), data.metrics_left_out], make: curvesSection }, // of the curves, `redraw` takes care
  { id: "values", title: "Values", has: () => data.values.length, from: () => [hidden(), names(), data.values], make: ofShown(valuesSection) },
  { id: "anatomy", title: "Anatomy of a step", has: () => data.anatomy.length, from: () => [hidden(), names(), data.anatomy], make: ofShown(anatomySection) },
  { id: "problems", title: "Problems", has: () => true, from: () => [hidden(), names(), data.problems], make: ofShown(problemsSection) },
  { id: "evaluations", title: "Evaluations", has: () => data.evaluations.length, from: () => [hidden(), names(), data.evaluations], make: ofShown(evaluationsSection) },
  { id: "checkpoints", title: "Checkpoints", has: () => data.checkpoints.some((each) => each.count), from: () => [hidden(), names(), data.checkpoints], make: ofShown(checkpointsSection) },
  { id: "tables", title: "Tables", has: () => Object.keys(data.tables).length, from: () => [hidden(), names(), data.tables], make: ofShown(tablesSection) },
  { id: "images", title: "Images", has: () => Object.keys(data.images).length, from: () => [hidden(), names(), data.images], make: ofShown(imagesSection) },
];

function lifeOf() {
  const running = runs.filter((_, run) => outcomeOf(run) === "running").length;
  return [running > 0, running ? `live, ${number(running)} of ${several(runs.length, "run")} running` : "no run is running"];
}

function render(isNews = false) {
  takeRuns();
  document.title = `${several(runs.length, "run")} compared - callsheet`;
  const top = [header(), pageData.live && el("div", { class: "live" }, lifeSigns())].filter(Boolean);
  renderParts(parts, { top, tiles: [], about: "Of these runs there is nothing on:", from: several(runs.length, "run") });
  showLife();
  redraw(isNews);
}

/** Switches runs on or off, everywhere on the page. */
function showRuns(members, shown) {
  for (const run of members) if (shown) view.hidden.delete(run); else view.hidden.add(run);
  for (const input of document.querySelectorAll("input[data-runs]")) setCheck(input, input.dataset.runs.split(" ").map(Number));
  render();
}

render();
goLive();
