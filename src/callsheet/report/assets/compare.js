// The page of a comparison: its parts in their order. Switching a run on or off makes the parts again that show it.

const hidden = () => [...view.hidden];

const parts = [
  { id: "runs", title: "Runs", has: () => true, from: () => 0, make: runsSection },
  { id: "differences", title: "What differs", has: () => Object.keys(data.differences).length, from: hidden, make: differencesSection },
  { id: "curves", title: "Curves", has: () => data.families.length, from: () => 0, make: curvesSection }, // of the curves, `redraw` takes care
  { id: "values", title: "Values", has: () => data.values.length, from: hidden, make: valuesSection },
  { id: "anatomy", title: "Anatomy of a step", has: () => data.anatomy.length, from: hidden, make: anatomySection },
  { id: "problems", title: "Problems", has: () => true, from: hidden, make: problemsSection },
  { id: "evaluations", title: "Evaluations", has: () => data.evaluations.length, from: hidden, make: evaluationsSection },
  { id: "checkpoints", title: "Checkpoints", has: () => data.checkpoints.some((each) => each.count), from: hidden, make: checkpointsSection },
  { id: "tables", title: "Tables", has: () => Object.keys(data.tables).length, from: hidden, make: tablesSection },
  { id: "images", title: "Images", has: () => Object.keys(data.images).length, from: hidden, make: imagesSection },
];

function render() {
  renderParts(parts, { top: [header()], tiles: [], about: "Of these runs there is nothing on:", from: several(runs.length, "run") });
  redraw();
}

/** Switches runs on or off, everywhere on the page. */
function showRuns(members, shown) {
  for (const run of members) if (shown) view.hidden.delete(run); else view.hidden.add(run);
  for (const input of document.querySelectorAll("input[data-runs]")) setCheck(input, input.dataset.runs.split(" ").map(Number));
  render();
}

render();
