// Tables that are sorted by their heads, with rows that fold out.

/**
 * columns: {title, head: () => what is shown instead, value: row => what it is sorted by, cell: row => what is shown, numeric, first: "descending", about}
 * options: caption; tall: may have many rows, so that it scrolls by itself; sort: [column, descending] at first; inner: row => rows below it; key: row => its name; rowClass; foot: cells
 */
function table(id, columns, rows, options = {}) {
  const body = el("tbody");
  const heads = columns.map((column, place) => el("th", { scope: "col", class: column.numeric ? "numeric" : null, title: column.about },
    el("button", { type: "button", class: "plain", on: { click: () => {
      const [at, falling] = view.sort.get(id) ?? options.sort ?? [-1, false];
      view.sort.set(id, [place, at === place ? !falling : Boolean(column.numeric)]);
      draw();
    } } }, column.head?.() ?? column.title)));

  function line(row, isInner) {
    const inner = isInner ? [] : options.inner?.(row) ?? [];
    const key = `${id}/${options.key?.(row) ?? ""}`;
    const cells = columns.map((column, place) => {
      const shown = column.cell(row, isInner);
      const fold = place === 0 && inner.length > 0 && el("button", {
        type: "button", class: "plain fold", "aria-expanded": String(view.unfolded.has(key)), "aria-label": "its parts",
        on: { click: () => { if (!view.unfolded.delete(key)) view.unfolded.add(key); draw(key); } }, "data-key": key,
      }, view.unfolded.has(key) ? "▾" : "▸");
      return el("td", { class: column.numeric ? "numeric" : null, "data-title": column.title }, fold, shown);
    });
    const found = [el("tr", { class: isInner ? "inner" : options.rowClass?.(row) }, cells)];
    if (view.unfolded.has(key)) found.push(...inner.flatMap((each) => line(each, true)));
    return found;
  }

  function draw(focus) {
    const [at, falling] = view.sort.get(id) ?? options.sort ?? [-1, false];
    let shown = rows;
    if (at >= 0 && at < columns.length) {
      const value = columns[at].value;
      shown = rows.map((row) => [value(row), row]).sort(([a], [b]) => compare(a, b, falling)).map(([, row]) => row);
    }
    heads.forEach((head, place) => head.setAttribute("aria-sort", place === at ? (falling ? "descending" : "ascending") : "none"));
    body.replaceChildren(...shown.flatMap((row) => line(row, false)));
    if (focus) [...body.querySelectorAll("button.fold")].find((button) => button.dataset.key === focus)?.focus();
  }

  draw();
  return el("div", { class: options.tall ? "scroll tall" : "scroll", tabindex: 0, role: "region", "aria-label": options.caption ?? id }, el("table", { id: `table-${id}` },
    el("caption", { class: "hidden-text" }, options.caption ?? id),
    el("thead", {}, el("tr", {}, heads)), body, options.foot && el("tfoot", {}, el("tr", {}, options.foot))));
}

/** What is missing stands last, whichever way. */
function compare(a, b, falling) {
  const missing = (value) => value === null || value === undefined || value === "";
  if (missing(a) || missing(b)) return missing(a) - missing(b);
  const order = typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
  return falling ? -order : order;
}
