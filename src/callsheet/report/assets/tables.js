// Tables that are sorted by a click on a header, with rows that can be expanded.

/**
 * columns: {title, head: () => the header's content, if it is not the title; value: row => the sort key; cell: (row, isInner) => the cell's content;
 *   numeric: aligned to the right, and sorted in descending order at the first click; about: the header's tooltip}
 * options: {caption; tall: scrolls, because it may have many rows; sort: the initial [column, descending]; inner: row => the rows that it expands to;
 *   key: row => a key that identifies it; rowClass: row => its CSS class; foot: the cells of the footer}
 */
function table(id, columns, rows, options = {}) {
  const body = el("tbody");
  const heads = columns.map((column, index) => el("th", { scope: "col", class: column.numeric ? "numeric" : null, title: column.about },
    el("button", { type: "button", class: "plain", on: { click: () => {
      const [sortedBy, descending] = view.sort.get(id) ?? options.sort ?? [-1, false];
      view.sort.set(id, [index, sortedBy === index ? !descending : Boolean(column.numeric)]);
      draw();
    } } }, column.head?.() ?? column.title)));

  function rowElements(row, isInner) {
    const inner = isInner ? [] : options.inner?.(row) ?? [];
    const key = `${id}/${options.key?.(row) ?? ""}`;
    const cells = columns.map((column, index) => {
      const shown = column.cell(row, isInner);
      const fold = index === 0 && inner.length > 0 && el("button", {
        type: "button", class: "plain fold", "aria-expanded": String(view.unfolded.has(key)), "aria-label": "details",
        on: { click: () => { if (!view.unfolded.delete(key)) view.unfolded.add(key); draw(key); } }, "data-key": key,
      }, view.unfolded.has(key) ? "▾" : "▸");
      return el("td", { class: column.numeric ? "numeric" : null, "data-title": column.title }, fold, shown);
    });
    const found = [el("tr", { class: isInner ? "inner" : options.rowClass?.(row) }, cells)];
    if (view.unfolded.has(key)) found.push(...inner.flatMap((each) => rowElements(each, true)));
    return found;
  }

  function draw(focus) {
    const [sortedBy, descending] = view.sort.get(id) ?? options.sort ?? [-1, false];
    let shown = rows;
    if (sortedBy >= 0 && sortedBy < columns.length) {
      const value = columns[sortedBy].value;
      shown = rows.map((row) => [value(row), row]).sort(([a], [b]) => compareValues(a, b, descending)).map(([, row]) => row);
    }
    heads.forEach((head, index) => head.setAttribute("aria-sort", index === sortedBy ? (descending ? "descending" : "ascending") : "none"));
    body.replaceChildren(...shown.flatMap((row) => rowElements(row, false)));
    if (focus) [...body.querySelectorAll("button.fold")].find((button) => button.dataset.key === focus)?.focus();
  }

  draw();
  return el("div", { class: options.tall ? "scroll tall" : "scroll", tabindex: 0, role: "region", "aria-label": options.caption ?? id }, el("table", { id: `table-${id}` },
    el("caption", { class: "hidden-text" }, options.caption ?? id),
    el("thead", {}, el("tr", {}, heads)), body, options.foot && el("tfoot", {}, el("tr", {}, options.foot))));
}

/** Compares two values; missing values come last in both directions. */
function compareValues(a, b, descending) {
  const missing = (value) => value === null || value === undefined || value === "";
  if (missing(a) || missing(b)) return missing(a) - missing(b);
  const order = typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
  return descending ? -order : order;
}
