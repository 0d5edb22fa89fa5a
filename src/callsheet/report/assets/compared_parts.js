// The sections of a comparison other than its charts.

const LONG_TEXT = 60; // a longer setting is collapsed to so many characters
const LONG_NAME = 48; // a longer name is cut to so many characters

/** The name of a run or group. A long name is cut, and its tooltip shows it in full. */
const nameOf = (text) => el("span", { title: text }, text.length > LONG_NAME ? `${text.slice(0, LONG_NAME - 1)}…` : displayName(text));

/** The name of a run; in a live page, a link to the run's own page. */
function linkTo(run) {
  const name = nameOf(runs[run].name);
  return pageData.live ? el("a", { href: `run/${run}/`, target: "_blank", rel: "noopener", title: `${runs[run].name}: the live page of this run, in a new tab` }, name) : name;
}

const runName = (run, ...more) => el("span", { class: "run-name" }, swatch(runs[run].group), linkTo(run), more);
const runHead = (run) => () => [swatch(runs[run].group), " ", nameOf(runs[run].name)];
const groupHead = (group) => () => [swatch(group), " ", nameOf(groups[group])];
const numeric = (title, value, cell, more = {}) => ({ title, value, cell, numeric: true, ...more });
const unitName = () => (isGrouped() ? "group" : "run");
const sum = (values) => values.reduce((total, value) => total + (value ?? 0), 0);

function header() {
  const facts = [isGrouped() && `${plural(groups.length, "group")} by ${data.group_by}`,  ["baseline: ", nameOf(groups[0])]];
  return el("div", {},
    el("div", { class: "name" }, el("h1", {}, `${plural(runs.length, "run")} compared`)),
    el("div", { class: "facts" }, facts.filter(Boolean).map((fact) => el("span", {}, fact))));
}

// --- the runs, which are also the legend of the page ---

/** A checkbox that shows or hides a group or one run. In a live page, the name of a run is a link. */
function runCheckbox({ members, name, group, run }) {
  const isLink = run !== undefined && pageData.live;
  const input = el("input", { type: "checkbox", "data-runs": members.join(" "), "aria-label": isLink ? name : null, on: { change: () => showRuns(members, input.checked) } });
  updateCheckbox(input, members);
  if (!isLink) return el("label", { class: "run-name" }, input, swatch(group), nameOf(name));
  return el("span", { class: "run-name" }, el("label", {}, input, swatch(group)), linkTo(run));
}

function updateCheckbox(input, members) {
  const shown = members.filter(isShown).length;
  input.checked = shown > 0;
  input.indeterminate = shown > 0 && shown < members.length;
}

/** The outcome of a run. A run whose folder is gone cannot be running. */
const outcomeOf = (run) => (runs[run].outcome === "running" && isGone(run) ? "gone" : runs[run].outcome);

function problemsOf(members) {
  const counts = { error: 0, warning: 0, note: 0 };
  for (const { level, runs: where } of data.problems) counts[level] += where.filter(([run]) => members.includes(run)).length;
  return Object.entries(counts).filter(([level, all]) => all && level !== "note").map(([level, all]) => plural(all, level)).join(", ") || "none";
}

function runsSection() {
  const notesOf = (run) => [...runs[run].tags.map((tag) => `#${tag}`), runs[run].note].filter(Boolean).join(" ");
  const single = (run) => ({ name: runs[run].name, group: runs[run].group, members: [run], run });
  const rows = isGrouped() ? groups.map((name, group) => ({ name, group, members: membersOf[group] })) : runs.map((_, run) => single(run));
  const each = (row, field) => row.members.map((run) => runs[run][field]);
  const ends = (values, show) => (values.length && Math.min(...values) !== Math.max(...values) ? `${show(Math.min(...values))} to ${show(Math.max(...values))}` : show(values[0]));
  const range = (title, field, show, about) => numeric(title, (row) => each(row, field).filter(isNumber)[0], (row) => ends(each(row, field).filter(isNumber), show), { about });
  const firstOf = (times) => Math.min(...times.filter(isNumber), Infinity);
  const total = (title, field) => numeric(title, (row) => sum(each(row, field)), (row) => number(sum(each(row, field))));
  const columns = [
    { title: unitName(), value: (row) => row.name, cell: (row) => [runCheckbox(row), row.group === 0 && row.members.length === membersOf[0].length && el("span", { class: "below indented" }, "the baseline")] },
    { title: "outcome", value: (row) => row.members.map(outcomeOf).join(" "), cell: (row) => [
      [...new Set(row.members.map(outcomeOf))].map((outcome) => el("div", { class: "whole-line" }, pill(outcome), row.members.length > 1 && el("span", { class: "soft" }, ` ${row.members.filter((run) => outcomeOf(run) === outcome).length} of ${row.members.length}`))),
      row.members.some(isGone) && el("span", { class: "below" }, row.members.length > 1 ? `${plural(row.members.filter(isGone).length, "folder")} gone` : "its folder is gone"),
      row.members.length === 1 && each(row, "reason")[0] && el("span", { class: "below wrap" }, each(row, "reason")[0]),
      row.members.length === 1 && notesOf(row.members[0]) && el("span", { class: "below wrap" }, notesOf(row.members[0]))] },
    range("steps", "steps", (value) => number(value)), range("training", "seconds", duration, "time of training"),
    numeric("began", (row) => firstOf(each(row, "started")), (row) => dateTime(firstOf(each(row, "started")))), total("restarts", "restarts"), total("evaluations", "evaluations"), total("checkpoints", "checkpoints"),
    { title: "problems", value: (row) => problemsOf(row.members), cell: (row) => problemsOf(row.members) },
  ];
  const all = runs.map((_, run) => run);
  const looks = data.looks_for?.length ? ` Runs that begin later in ${data.looks_for.join(", ")} are added at the end.` : "";
  const button = (text, shown) => el("button", { type: "button", on: { click: () => showRuns(all, shown) } }, text);
  return [
    el("p", { class: "about" }, `Colors and dashes are the same in the whole page. A ${unitName()} that is not checked is hidden in charts and tables; differences still refer to the baseline.${looks}`),
    data.notice && el("p", { class: "about" }, data.notice),
    el("div", { class: "tools" }, button("Show all", true), button("Hide all", false)),
    el("div", { class: "card" }, table("runs", columns, rows, { tall: true, inner: (row) => (row.run === undefined ? row.members.map(single) : []), key: (row) => row.name, caption: "The runs" })),
  ];
}

// --- results ---

const OTHER_HEADLINES = ["train/loss", "step_seconds", "tokens_per_second", "samples_per_second", "memory_bytes"];
const MAX_HEADLINES = 6;

/** The most important metrics: those of evaluations first, then the training loss, speed and memory. */
function headlineMetrics() {
  const known = new Set(data.values.map((row) => row.metric));
  const evaluated = data.evaluations.filter(({ better }) => better).map(({ name }) => name).slice(0, 3);
  const found = [...new Set([...evaluated, ...OTHER_HEADLINES])].filter((name) => known.has(name));
  return found.filter((name) => name !== "samples_per_second" || !found.includes("tokens_per_second")).slice(0, MAX_HEADLINES);
}

/** "better" or "worse" than the baseline, "may be noise", or an empty string if that is unknown. */
function verdict({ better, difference, is_noise: isNoise }) {
  if (!difference || !better || isNoise !== false) return isNoise ? "may be noise" : "";
  return (difference < 0) === (better === "lower") ? "better" : "worse";
}

function resultsSection() {
  const shown = shownGroups();
  const found = new Map(headlineMetrics().map((name) => [name, new Map()]));
  for (const row of data.values) if (found.has(row.metric) && shown.includes(row.group)) found.get(row.metric).set(row.group, row);
  const column = ([name, rows]) => {
    const values = [...rows.values()].filter(({ mean }) => isNumber(mean));
    const isLower = values[0]?.better === "lower";
    const best = values.length > 1 ? values.reduce((first, row) => ((isLower ? row.mean < first.mean : row.mean > first.mean) ? row : first)) : null;
    return numeric(name, (group) => rows.get(group)?.mean, (group) => {
      const row = rows.get(group);
      if (!row) return "";
      const value = valueOf(row);
      const words = [signed(row.relative, percent), verdict(row)].filter(Boolean).join(", ");
      return [el("span", { class: "whole-line" }, row === best ? el("b", { title: `the best of the ${unitName()}s shown` }, value) : value), words && el("span", { class: `below mark ${{ better: "faster", worse: "slower" }[verdict(row)] ?? ""}` }, words)];
    }, { about: isLower ? "lower is better" : "higher is better" });
  };
  const columns = [{ title: unitName(), value: (group) => groups[group], cell: (group) => el("span", { class: "run-name" }, swatch(group), nameOf(groups[group])) }, ...[...found].map(column)];
  const steps = shown.flatMap((group) => membersOf[group].map((run) => runs[run].steps));
  const uneven = Math.min(...steps) < Math.max(...steps) ? `The numbers of steps differ (${number(Math.min(...steps))} to ${number(Math.max(...steps))}), so the last values are of different steps. ` : "";
  return [
    el("p", { class: "about" }, `${uneven}The last value of each metric, and the mean of a speed${isGrouped() ? "; the mean of a group's runs with their standard deviation" : ""}. Bold is the best. Below: the difference from ${displayName(groups[0])}.`),
    el("div", { class: "card side" }, table("results", columns, shown, { tall: true, key: (group) => groups[group], caption: "Results" })),
  ];
}

// --- differences ---

/** The index from which long texts with the same beginning are shown: a word or two before the first difference, or 0. */
function differenceStart(texts) {
  const given = texts.filter(Boolean);
  if (given.length < 2) return 0;
  let same = 0;
  while (same < given[0].length && given.every((text) => text[same] === given[0][same])) same += 1;
  const word = given[0].lastIndexOf(" ", Math.max(0, same - 1));
  return same > LONG_TEXT / 2 ? Math.max(0, given[0].lastIndexOf(" ", Math.max(0, word - 1)) + 1) : 0;
}

/** A text. A long text is collapsed, and the collapsed text begins at the character `from`. */
function collapsedText(text, key, from = 0) {
  if (text === "") return el("span", { class: "soft" }, "–");
  if (text.length <= LONG_TEXT) return text;
  const shown = `${from > 0 ? "…" : ""}${text.slice(from, from + LONG_TEXT)}${text.length > from + LONG_TEXT ? "…" : ""}`;
  return collapsible(key, { class: "long" }, shown, false, () => el("div", { class: "cell" }, text));
}

function differencesSection() {
  const titles = { settings: "Settings", callbacks: "Callbacks", packages: "Packages", code: "Code", hardware: "Hardware" };
  const shown = shownRuns();
  const left = data.differences_left_out ? ` ${plural(data.differences_left_out, "setting")} did not fit into this page.` : "";
  return [el("p", { class: "about" }, `Only settings that differ. Bold is what differs from ${displayName(runs[0].name)}.${left}`),
    ...Object.entries(data.differences).map(([group, settings]) => {
      const rows = Object.entries(settings);
      const columns = [
        { title: "setting", value: ([name]) => name, cell: ([name]) => el("span", { class: "mono" }, name) },
        ...shown.map((run) => ({ title: runs[run].name, head: runHead(run), value: ([, values]) => values[run],
          cell: ([name, values]) => { const text = collapsedText(values[run], `differs/${group}/${name}/${run}`, differenceStart(values)); return values[run] === values[0] ? text : el("b", {}, text); } })),
      ];
      return el("div", { class: "card side" }, el("h3", {}, titles[group] ?? group), table(`differences-${group}`, columns, rows, { caption: `What differs: ${group}` }));
    })];
}

// --- values ---

function noiseText(row) {
  if (row.difference === 0) return "equal";
  if (row.is_noise === null) return row.difference === null ? "" : "unknown";
  return `${row.is_noise ? "may be noise" : "more than noise"}${isNumber(row.p) ? `, p\u00a0${row.p < 0.0001 ? "<\u00a00.0001" : `=\u00a0${Number(row.p.toPrecision(2))}`}` : ""}`;
}

const signed = (value, show) => (isNumber(value) ? `${value > 0 ? "+" : value < 0 ? "−" : ""}${show(Math.abs(value))}` : "");

function showValue(name, value) {
  return name.endsWith("_seconds") && !name.includes("/") ? duration(value) : metric(name, value);
}

/** The value of a row. With several runs: mean ± standard deviation, with two digits of the deviation and the mean to the same precision. */
function valueOf({ metric: name, mean, deviation }) {
  if (!isNumber(mean)) return "not finite";
  if (!isNumber(deviation)) return showValue(name, mean);
  const places = deviation > 0 ? Math.max(0, 1 - Math.floor(Math.log10(deviation))) : 0;
  const isPlain = showValue(name, mean) === number(mean) && deviation > 0 && Math.abs(mean) < 100000 && places <= 12;
  const [shown, spread] = isPlain ? [mean.toFixed(places), deviation.toFixed(places)] : [showValue(name, mean), showValue(name, deviation)];
  return [shown, el("span", { class: "soft" }, ` ± ${spread}`)];
}

function valuesSection() {
  const shown = new Set(shownGroups());
  const list = el("div");
  const isNarrow = matchMedia("(max-width: 640px)").matches; // show the group below the metric, so that the value fits on the screen
  const nameIn = (row) => el("span", { class: "run-name" }, swatch(row.group), nameOf(groups[row.group]));
  const columns = [
    { title: "metric", value: (row) => row.metric, cell: (row) => [el("span", { class: "metric" }, row.metric), isNarrow && el("span", { class: "below" }, nameIn(row))] },
    ...(isNarrow ? [] : [{ title: unitName(), value: (row) => groups[row.group], cell: nameIn }]),
    numeric("value", (row) => row.mean, valueOf, { about: "the last value, or the mean of a speed or a time; of a group the mean over its runs, and their standard deviation" }),
    ...(isGrouped() ? [numeric("runs", (row) => row.runs, (row) => number(row.runs))] : []),
    numeric("best", (row) => row.best, (row) => row.best !== null && [showValue(row.metric, row.best), row.best_step !== null && el("span", { class: "below" }, `at step ${number(row.best_step)}`), row.runs > 1 && el("span", { class: "below" }, "mean ", valueOf({ metric: row.metric, mean: row.best_mean, deviation: row.best_deviation }))], { about: "the lowest or the highest; empty where the metric's name does not show which is better" }),
    numeric("difference", (row) => row.difference, (row) => signed(row.difference, (value) => showValue(row.metric, value)), { about: "from the baseline" }),
    numeric("in %", (row) => row.relative, (row) => signed(row.relative, percent), { about: "of the baseline's value" }),
    { title: "noise?", value: (row) => row.p ?? (row.difference === null ? null : 2), cell: noiseText, about: "Welch's t-test over the runs, or within single runs for speeds and times" },
  ];
  const show = () => {
    const words = (view.valueSearch ?? "").toLowerCase().split(/\s+/).filter(Boolean);
    const rows = data.values.filter((row) => shown.has(row.group) && words.every((word) => row.metric.toLowerCase().includes(word)));
    list.replaceChildren(table("values", columns, rows, { tall: true, caption: "Values" }));
  };
  show();
  const search = el("input", { type: "search", id: "value-search", placeholder: "Search metrics", "aria-label": "Search the values of metrics", value: view.valueSearch ?? "", on: { input: () => { view.valueSearch = search.value; show(); } } });
  const left = data.values_left_out ? ` ${number(data.values_left_out)} rows did not fit into this page; callsheet compare --csv writes all.` : "";
  return [el("p", { class: "about" }, `Differences are from ${displayName(groups[0])}, the baseline.${left}`), el("div", { class: "tools" }, el("span", { class: "search" }, search)), el("div", { class: "card" }, list)];
}

// --- anatomy of a step ---

function changeText({ change, mark }) {
  if (mark === "noise") return `${change > 0 ? "+" : "-"}${percent(Math.abs(change))}, may be noise`;
  return `${mark === "slower" ? "▲" : "▼"} ${change >= 1 ? `slower, ${number(1 + change, 2)} times as long` : `${percent(Math.abs(change))} ${mark}`}`;
}

function anatomySection() {
  const shown = shownGroups();
  const cell = (found) => !found ? el("span", { class: "soft" }, "not timed") : [
    el("span", { class: "whole-line" }, milliseconds(found.seconds), isNumber(found.share) && el("span", { class: "soft" }, `, ${percent(found.share)}`)),
    isNumber(found.share) && el("span", { class: "bar", "aria-hidden": "true" }, el("i", { style: { width: `${Math.min(100, 100 * found.share)}%` } })),
    found.mark && el("span", { class: `below mark ${found.mark}` }, changeText(found)),
  ];
  const steps = (group) => el("span", { class: "below soft" }, plural(data.timed_steps[group], "timed step"));
  const columns = [
    { title: "part of a step", value: (row) => row.name, cell: (row) => [el("span", { class: "whole-line" }, row.name), row.kind === "callback" && el("span", { class: "below" }, "callback")] },
    ...shown.map((group) => numeric(groups[group], (row) => row.cells[group]?.seconds, (row) => cell(row.cells[group]), { head: () => [...groupHead(group)(), steps(group)] })),
  ];
  return [
    el("p", { class: "about" }, "Milliseconds per step, of a span the median of the timed steps, of a callback and of the whole step (step_seconds) the mean of all steps; and share of fetch + train_step, the step without what happens between steps. Spans nest, and the time of a callback may be within a span or between steps, so the shares do not add up. "
      + "A mark shows a change by more than 5 % of the baseline and 0.5 % of a step that is not noise."),
    el("div", { class: "card side" }, table("anatomy", columns, data.anatomy, { caption: "The anatomy of a step" })),
  ];
}

// --- problems, evaluations, checkpoints ---

function problemsSection() {
  const shown = data.problems.map((problem) => ({ ...problem, runs: problem.runs.filter(([run]) => isShown(run)) })).filter((problem) => problem.runs.length);
  if (!shown.length) return el("p", { class: "no-problems" }, "✓ No problems in these runs.");
  const words = { error: "Error", warning: "Warning", note: "Note" };
  const serious = shown.filter(({ level }) => level !== "note"), notes = shown.filter(({ level }) => level === "note");
  const list = (problems) => el("ul", { class: "problems" }, problems.map(({ level, title, runs: where }) => el("li", { class: `problem ${level}` },
    el("div", { class: "title" }, el("span", { class: "soft" }, `${words[level]}: `), title),
    el("div", { class: "where" }, where.map(([run, detail]) => (detail
      ? collapsible(`problem/${title}/${run}`, {}, el("span", { class: "run-name" }, swatch(runs[run].group), nameOf(runs[run].name)), false, () => el("div", { class: "detail" }, detail))
      : runName(run)))))));
  return [
    serious.length ? list(serious) : el("p", { class: "no-problems" }, "✓ No errors and no warnings in these runs."),
    notes.length ? collapsible("notes", { class: "fold-card more" }, plural(notes.length, "note"), false, () => list(notes)) : "",
  ];
}

function evaluationsSection() {
  const body = el("div");
  const show = (index) => {
    const { name, better, runs: found } = data.evaluations[index];
    const shown = found.filter(([run]) => isShown(run));
    const rows = new Map();
    for (const [run, pairs] of shown) for (const [step, value] of pairs) { if (!rows.has(step)) rows.set(step, new Map()); rows.get(step).set(run, value); }
    const best = new Map(shown.map(([run, pairs]) => [run, pairs.reduce((least, [, value]) => (value === null ? least : least === null || (better === "lower" ? value < least : value > least) ? value : least), null)]));
    const columns = [
      numeric("step", ([step]) => step, ([step]) => number(step)),
      ...shown.map(([run]) => numeric(runs[run].name, ([, values]) => values.get(run), ([, values]) => {
        const value = values.get(run);
        if (value === undefined) return "";
        if (value === null) return "not finite";
        return better && isNumber(value) && value === best.get(run) ? el("b", { title: `the best of ${runs[run].name}` }, metric(name, value)) : metric(name, value);
      }, { head: runHead(run) })),
    ];
    body.replaceChildren(table("evaluations", columns, [...rows], { tall: true, sort: [0, true], caption: `Evaluations: ${name}` }));
  };
  const chosen = Math.max(0, data.evaluations.findIndex(({ name }) => name === view.picked.get("evaluation")));
  const select = el("select", { "aria-label": "Metric of the evaluations", on: { change: () => { view.picked.set("evaluation", data.evaluations[Number(select.value)].name); show(Number(select.value)); } } },
    data.evaluations.map(({ name }, index) => el("option", { value: index }, name)));
  select.value = String(chosen);
  show(chosen);
  return [el("p", { class: "about" }, "Bold is the best of each run."), el("div", { class: "tools" }, el("label", {}, "Metric", select)), el("div", { class: "card side" }, body)];
}

function checkpointsSection() {
  const rows = shownRuns().map((run) => ({ run, ...data.checkpoints[run] })).filter((row) => row.count);
  const columns = [
    { title: "run", value: (row) => runs[row.run]?.name, cell: (row, isInner) => (isInner ? el("span", { class: "mono", title: row.path }, displayName(row.name)) : runName(row.run)) },
    numeric("checkpoints", (row) => row.count, (row, isInner) => (isInner ? row.kind : number(row.count))),
    numeric("last step", (row) => row.last_step, (row, isInner) => number(isInner ? row.step : row.last_step)),
    numeric("best at step", (row) => row.best_step, (row, isInner) => (isInner ? row.best : isNumber(row.best_step) ? number(row.best_step) : "")),
    numeric("size", (row) => row.size, (row) => (isNumber(row.size) ? bytes(row.size) : "")),
    numeric("time to write", (row) => row.save_seconds, (row, isInner) => (!isInner && isNumber(row.save_seconds) ? duration(row.save_seconds) : ""), { about: "the mean of those in the timed windows" }),
    { title: "evaluation losses", value: (row) => row.latest?.at(-1)?.val_losses[0]?.[1], cell: (row, isInner) => (isInner ? row : row.latest.at(-1)).val_losses.map(([name, value]) => el("div", { class: "whole-line" }, `${name} ${value === null ? "not finite" : number(value)}`)) },
  ];
  return el("div", { class: "card" }, table("checkpoints", columns, rows, { tall: true, inner: (row) => [...row.latest].reverse(), key: (row) => runs[row.run]?.name, caption: "Checkpoints" }));
}

// --- tables and images: the runs side by side at a step ---

/** A card with a slider for the step. Below it, for each run, the last entry logged until that step. */
function byStep(kind, name, logged, make) {
  const key = `${kind}/${name}`;
  const shown = logged.filter(({ run }) => isShown(run));
  if (!shown.length) return null;
  const steps = [...new Set(shown.flatMap(({ entries }) => entries.map(({ step }) => step)))].sort((a, b) => a - b);
  const body = el("div", { class: "beside" }), label = el("span", { class: "soft" });
  const picked = view.picked.has(key) ? steps.findLastIndex((step) => step <= view.picked.get(key)) : -1;
  const range = el("input", { type: "range", min: 0, max: steps.length - 1, value: picked < 0 ? steps.length - 1 : picked, disabled: steps.length === 1, "aria-label": `Step of ${name}`, on: { input: () => { view.picked.set(key, steps[Number(range.value)]); show(); } } });
  function show() {
    const step = steps[Number(range.value)];
    label.textContent = `step ${number(step)}`;
    range.setAttribute("aria-valuetext", label.textContent);
    body.replaceChildren(...shown.map(({ run, entries }) => {
      const entry = entries.findLast((each) => each.step <= step);
      return el("div", { class: "one" },
        runName(run, entry && entry.step !== step && el("span", { class: "soft" }, `at step ${number(entry.step)}`)),
        entry ? make(run, entry) : el("p", { class: "soft" }, "nothing was logged until this step"));
    }));
  }
  show();
  return el("div", { class: "card" }, el("h3", {}, displayName(name)), el("div", { class: "slider" }, range, label), body);
}

function tablesSection() {
  return Object.entries(data.tables).map(([name, logged]) => byStep("table", name, logged, (run, entry) => {
    const width = Math.max(entry.columns.length, ...entry.rows.map((row) => row.length));
    const columns = Array.from({ length: width }, (_, at) => ({
      title: entry.columns[at] ?? "", numeric: entry.rows.every((row) => typeof row[at] === "number"), value: (row) => row[at],
      cell: (row) => (typeof row[at] === "number" ? number(row[at]) : el("div", { class: "cell" }, row[at] ?? "")),
    }));
    const found = [table(`logged-${name}`, columns, entry.rows, { caption: `${name}, ${runs[run].name}` })];
    if (entry.in_all > entry.rows.length) found.push(el("p", { class: "soft small" }, `${number(entry.rows.length)} of ${number(entry.in_all)} rows`));
    return found;
  })).filter(Boolean);
}

function imagesSection() {
  const left = data.images_left_out ? [el("p", { class: "about" }, `${plural(data.images_left_out, "image")} are not in this page, because it would be too large or they are not PNG files of a run.`)] : [];
  return [...left, ...Object.entries(data.images).map(([name, logged]) => byStep("image", name, logged, (run, entry) => {
    const sources = entry.files.map(imageSource).filter(Boolean);
    if (!sources.length) return el("p", { class: "soft" }, "not in this page");
    return el("div", { class: "pictures" }, sources.map((source, index) => el("img", { src: source, alt: `${name}, ${runs[run].name}, step ${entry.step}, image ${index + 1}`, on: { load: (event) => enlarge(event.target) } })));
  })).filter(Boolean)];
}
