// The sections of a run's page other than its charts and timeline.

function header() {
  const { run } = data;
  const total = isNumber(run.started) ? (isNumber(run.ended) ? run.ended : data.generated) - run.started : null;
  const facts = [
    plural(run.steps, "step"), isNumber(run.epochs) && run.epochs > 0 && plural(run.epochs, "epoch"),
    isNumber(run.seconds) && `${duration(run.seconds)} of training`,
    isNumber(total) && total > 0 && `${duration(total)} in total`,
    isNumber(run.started) && `began ${dateTime(run.started)}`, isNumber(run.ended) && `ended ${dateTime(run.ended)}`,
    run.device && `on ${run.device}`, run.ranks && plural(Number(run.ranks), "rank"), run.starts > 1 && `${run.starts} starts`, run.host && `host ${run.host}`,
    ...run.versions.map(([name, value]) => `${name} ${value}`),
  ];
  return el("div", {},
    el("div", { class: "name" }, el("h1", {}, displayName(run.name)), pill(run.outcome, { id: "outcome" })),
    run.reason ? el("p", { class: "about", id: "reason" }, run.reason) : null,
    run.note || run.tags.length ? el("p", { class: "about", id: "note" }, [...run.tags.map((tag) => `#${tag}`), run.note].filter(Boolean).join(" ")) : null,
    el("div", { class: "facts" }, facts.filter(Boolean).map((fact) => el("span", {}, fact))));
}

function tiles() {
  const shown = { count, bytes }, text = (tile) => (tile.value === null ? "not finite" : (shown[tile.kind] ?? number)(tile.value));
  return data.tiles.map((tile) => el("div", { class: "tile" },
    el("div", { class: "label" }, tile.label), el("div", { class: "value" }, text(tile)),
    el("div", { class: "detail" }, tile.detail, tile.last === null ? null : `; last record ${(shown[tile.kind] ?? number)(tile.last)}`)));
}

function problemsList() {
  if (!data.problems.length) return el("p", { class: "no-problems" }, "✓ Nothing failed, nothing was dropped, and every value is finite.");
  const words = { error: "Error", warning: "Warning", note: "Note" };
  return el("ul", { class: "problems" }, data.problems.map((problem) => el("li", { class: `problem ${problem.level}` },
    el("div", { class: "title" }, el("span", { class: "hidden-text" }, `${words[problem.level]}: `), problem.title), problem.detail ? el("div", { class: "detail" }, problem.detail) : null)));
}

function costsSection() {
  const { costs } = data;
  const most = Math.max(...costs.rows.map((row) => row.of_step + row.of_run), 1e-9);
  const column = (title, value, cell, about) => ({ title, value, cell, about, numeric: true });
  const bar = (row) => el("span", { class: "bar", "aria-hidden": "true" }, el("i", { style: { width: `${Math.min(100, (100 * (row.of_step + row.of_run)) / most)}%` } }));
  const share = (value) => (value ? percent(value) : "");
  const columns = [
    { title: "callback", value: (row) => row.callback, cell: (row, isInner) => (isInner ? el("span", { class: "mono" }, row.event) : el("span", { class: "whole-line" }, displayName(row.callback))) },
    column("calls", (row) => row.calls, (row) => number(row.calls), "how many were timed"),
    column("total", (row) => row.seconds, (row) => duration(row.seconds), "of those that were timed"),
    column("mean", (row) => row.seconds / row.calls, (row) => duration(row.seconds / row.calls)),
    column("worst", (row) => row.worst, (row) => duration(row.worst)),
    column("a step", (row) => row.per_step, (row) => (row.per_step ? duration(row.per_step) : ""), "seconds of every step, by events that fire at every step"),
    column("of the step", (row) => row.of_step, (row) => share(row.of_step), "share of a step's time, by events that fire at every step"),
    column("of the run", (row) => row.of_run, (row) => share(row.of_run), "share of the whole run's time, by all other events"),
    column("share", (row) => row.of_step + row.of_run, (row, isInner) => (isInner ? "" : bar(row))),
  ];
  const sum = (name) => costs.rows.reduce((total, row) => total + row[name], 0);
  const foot = ["all", number(sum("calls")), duration(sum("seconds")), "", "", duration(sum("per_step")), percent(sum("of_step")), percent(sum("of_run")), ""]
    .map((text, index) => el("td", { class: index ? "numeric" : null, "data-title": columns[index].title }, text || null));
  const timed = costs.window_steps ? `${plural(costs.window_steps, "step")} of ${number(costs.steps)} were timed, ${duration(costs.window_seconds / costs.window_steps)} each. ` : "";
  return [
    el("p", { class: "about" }, `${timed}The shares "of the step" are those of events that fire at every step. The shares "of the run" are those of all other events, such as records, evaluations and checkpoints; all of these are timed.`
      + `${costs.processes > 1 ? ` Summed over ${costs.processes} processes.` : ""}${costs.mode === "sampled" || !costs.mode ? "" : ` Mode: ${costs.mode}.`}`),
    el("div", { class: "card" }, table("costs", columns, costs.rows, { sort: [8, true], key: (row) => row.callback, inner: (row) => row.events, foot, caption: "What each callback cost" })),
  ];
}

function evaluationsSection() {
  const { columns: names, rows, lowest, rows_left_out: rowsLeftOut, columns_left_out: columnsLeftOut } = data.evaluations;
  const best = names.map((name, index) => (name.split("/").at(-1).includes("loss") ? lowest[index] : null));
  const columns = [
    { title: "step", value: (row) => row.step, cell: (row) => number(row.step), numeric: true },
    ...names.map((name, index) => ({ title: name, numeric: true, value: (row) => row.values[index],
      cell: (row) => (isNumber(row.values[index]) && row.values[index] === best[index] ? el("b", { title: "the lowest" }, metric(name, row.values[index])) : metric(name, row.values[index])) })),
    { title: "time", value: (row) => row.time, cell: (row) => dateTime(row.time), numeric: true },
  ];
  const left = [rowsLeftOut && plural(rowsLeftOut, "earlier evaluation"), columnsLeftOut && plural(columnsLeftOut, "other result")].filter(Boolean);
  return [
    left.length ? el("p", { class: "about" }, `${left.join(" and ")} did not fit into this table.`) : null,
    el("div", { class: "card" }, table("evaluations", columns, rows, { tall: true, sort: [0, true], caption: "Results of evaluations" })),
  ];
}

function resultsSection() {
  const { unit, rows, samples, step } = data.results;
  const columns = [
    { title: "result", value: ([name]) => name, cell: ([name]) => displayName(name) },
    { title: "value", value: ([, value]) => value, cell: ([, value]) => number(value), numeric: true },
  ];
  const found = [el("p", { class: "about" }, `At step ${number(step)}${unit ? `, in ${unit}` : ""}.`)];
  if (rows.length) found.push(el("div", { class: "card" }, table("results", columns, rows, { caption: "Results" })));
  if (samples.length) found.push(collapsible("samples", { class: "card fold-card" }, `Samples (${samples.length})`, samples.length <= 4, () => el("pre", { tabindex: 0 }, samples.join("\n\n"))));
  return found;
}

function checkpointsSection() {
  const column = (title, value, cell) => ({ title, value, cell, numeric: true });
  const state = (row) => [row.is_gone && "deleted since", row.is_undone && "undone by a resume", !row.is_finite && "not finite"].filter(Boolean).join(", ");
  const columns = [
    { title: "checkpoint", value: (row) => row.name, cell: (row) => el("span", { class: "mono", title: row.path }, displayName(row.name)) },
    column("step", (row) => row.step, (row) => number(row.step)),
    { title: "kind", value: (row) => row.kind, cell: (row) => [row.kind, state(row) && el("span", { class: "below" }, state(row))] },
    column("size", (row) => row.size, (row) => bytes(row.size)),
    column("train/loss", (row) => row.train_loss, (row) => number(row.train_loss)),
    { title: "evaluation losses", value: (row) => row.val_losses[0]?.[1], cell: (row) => row.val_losses.map(([name, value]) => el("div", {}, `${name} ${number(value)}`)) },
    { title: "best by", value: (row) => row.best, cell: (row) => row.best },
    { title: "requested by", value: (row) => row.requested_by, cell: (row) => el("span", { class: "below wrap" }, row.requested_by) },
    column("time", (row) => row.time, (row) => dateTime(row.time)),
  ];
  const left = data.checkpoints_left_out;
  const about = left ? el("p", { class: "about" }, `${plural(left, "earlier checkpoint")} did not fit into this table.`) : null;
  return [about, el("div", { class: "card" }, table("checkpoints", columns, data.checkpoints, { tall: true, sort: [8, true], rowClass: (row) => (row.is_gone || row.is_undone ? "faded" : null), caption: "Checkpoints" }))];
}

function imagesSection() {
  const left = data.images_left_out ? [el("p", { class: "about" }, `${plural(data.images_left_out, "image")} are not in this page, because it would be too large or they are not PNG files of this run.`)] : [];
  const cards = Object.entries(data.images).map(([name, logged]) => {
    const key = `image/${name}`;
    const pictures = el("div", { class: "pictures" });
    const label = el("span", { class: "soft" });
    const last = logged.length - 1;
    const range = el("input", { type: "range", min: 0, max: last, value: view.picked.get(key) ?? last, "aria-label": `Step of ${name}`, disabled: last === 0, on: { input: () => { view.picked.set(key, Number(range.value)); show(); } } });
    function show() {
      const shownStep = logged[Math.min(Number(range.value), last)];
      label.textContent = `step ${number(shownStep.step)}`;
      range.setAttribute("aria-valuetext", label.textContent);
      const sources = shownStep.files.map(imageSource).filter(Boolean);
      pictures.replaceChildren(...sources.map((source, index) => el("img", { src: source, alt: `${name}, step ${shownStep.step}, image ${index + 1}`, on: { load: (event) => enlarge(event.target) } })));
      if (!sources.length) pictures.replaceChildren(el("span", { class: "soft" }, "not in this page"));
    }
    show();
    return el("div", { class: "card" }, el("h3", {}, displayName(name)), el("div", { class: "slider" }, range, label), pictures);
  });
  return [...left, ...cards];
}

function tablesSection() {
  return Object.entries(data.tables).map(([name, logged]) => {
    const key = `table/${name}`;
    const shown = el("div");
    const show = (index) => {
      const found = logged[index] ?? logged[0];
      const width = Math.max(found.columns.length, ...found.rows.map((row) => row.length));
      const columns = Array.from({ length: width }, (_, at) => ({
        title: found.columns[at] ?? "", numeric: found.rows.every((row) => typeof row[at] === "number"), value: (row) => row[at],
        cell: (row) => (typeof row[at] === "number" ? number(row[at]) : el("div", { class: "cell" }, row[at] ?? "")),
      }));
      shown.replaceChildren(table(`logged-${name}`, columns, found.rows, { caption: name }));
      if (found.in_all > found.rows.length) shown.append(el("p", { class: "soft small" }, `${number(found.rows.length)} of ${number(found.in_all)} rows`));
    };
    const select = el("select", { "aria-label": `Step of the table ${name}`, on: { change: () => { view.picked.set(key, logged[Number(select.value)].step); show(Number(select.value)); } } },
      logged.map((each, index) => el("option", { value: index }, `step ${number(each.step)}`)));
    const chosen = Math.max(0, logged.findIndex((each) => each.step === view.picked.get(key)));
    select.value = String(chosen);
    show(chosen);
    return el("div", { class: "card" }, el("div", { class: "tools" }, el("h3", {}, displayName(name)), logged.length > 1 ? select : el("span", { class: "soft" }, `step ${number(logged[0].step)}`)), shown);
  });
}

function settingsSection() {
  const columns = [
    { title: "name", value: ([name]) => name, cell: ([name]) => el("span", { class: "mono" }, name) },
    { title: "value", value: ([, value]) => value, cell: ([, value]) => el("div", { class: "cell mono" }, value) },
  ];
  const found = data.settings.map(([title, rows]) =>
    collapsible(`settings-${title}`, { class: "card fold-card" }, `${title} (${rows.length})`, false, () => table(`settings-${title}`, columns, rows, { caption: title })));
  if (data.config) found.push(collapsible("config", { class: "card fold-card" }, "config.yaml", false, () => el("pre", { tabindex: 0 }, data.config)));
  return found;
}

const callSheetSection = () => el("div", { class: "card" }, el("pre", { tabindex: 0 }, data.call_sheet));

function eventsSection() {
  const columns = [
    { title: "step", value: (row) => row.step, cell: (row) => number(row.step), numeric: true },
    { title: "event", value: (row) => row.event, cell: (row) => [el("b", {}, row.event.replaceAll("_", " ")), row.text && el("span", { class: "below wrap" }, row.text)] },
    { title: "time", value: (row) => row.time, cell: (row) => dateTime(row.time), numeric: true },
  ];
  const left = data.events_in_all > data.events.length ? [el("p", { class: "about" }, `The last ${number(data.events.length)} of ${number(data.events_in_all)}.`)] : [];
  return [...left, el("div", { class: "card" }, table("events", columns, data.events, { sort: [2, true], tall: true, caption: "What happened" }))];
}

function logsSection() {
  return Object.entries(data.logs).map(([name, text]) => collapsible(`log/${name}`, { class: "card fold-card" }, name, false, () => {
    const shown = el("pre", { tabindex: 0 }, text);
    requestAnimationFrame(() => { shown.scrollTop = shown.scrollHeight; });
    return shown;
  }));
}
