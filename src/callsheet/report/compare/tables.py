"""The tables of a comparison as text, CSV, Markdown and LaTeX."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

from callsheet.report.compare.comparison import Comparison
from callsheet.report.lines import printable

Format = Literal["text", "csv", "markdown", "latex"]
FORMATS: tuple[Format, ...] = get_args(Format)

_MAX_CELL_CHARACTERS = 40
_MAX_RUNS_WITHOUT_HINT = 10
_LATEX_ESCAPES = str.maketrans(
    {
        "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
        "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$",
    }
)  # fmt: skip
_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")

Table = tuple[str, list[str], list[list[str]]]
"""One table: a title, the column headers, and the rows."""
_VALUES_TITLE = "Values"
"""The title of the table of metrics. If the user chooses metrics, this is the only table."""


def format_tables(comparison: Comparison, form: Format, *, metrics: Sequence[str] = ()) -> str:
    """Return the tables of a comparison as text. As CSV, return only the table of values, with a row for each metric and group.

    Args:
        comparison: the comparison.
        form: the format.
        metrics: only the values of these metrics; empty: everything.
    """
    if form == "csv":
        return _csv(comparison, metrics)
    write: Mapping[str, Callable[[Table], str]] = {"text": _text, "markdown": _markdown, "latex": _latex}
    tables = [
        write[form](table)
        for table in _tables(comparison, metrics)
        if table[2] and (not metrics or table[0].startswith(_VALUES_TITLE))
    ]
    if form == "text" and len(comparison.runs) > _MAX_RUNS_WITHOUT_HINT:
        tables.append(f"{len(comparison.runs)} runs are wide as text: -o FILE writes a page, and --group-by joins runs")
    return "\n\n".join(tables)


def _tables(comparison: Comparison, metrics: Sequence[str]) -> list[Table]:
    content = comparison.to_dict()
    names = [run["name"] for run in content["runs"]]
    has_notes = any(map(_notes, content["runs"]))
    runs = [
        [run["name"], *([run["group"]] if comparison.group_by else []), _outcome(run), f"{run['steps']:,}", _number(run["seconds"]),
         str(run["restarts"]), str(run["evaluations"]), str(run["checkpoints"]), *([_notes(run)] if has_notes else [])]
        for run in content["runs"]
    ]  # fmt: skip
    heads = [
        "run", *(["group"] if comparison.group_by else []), "outcome", "steps", "seconds", "restarts", "evaluations", "checkpoints",
        *(["tags and note"] if has_notes else []),
    ]  # fmt: skip
    is_uneven = len({run["steps"] for run in content["runs"]}) > 1
    tables: list[Table] = [
        (f"Runs{'; their numbers of steps differ, so the last values are of different steps' if is_uneven else ''}", heads, runs)
    ]
    for group, rows in content["differences"].items():
        tables.append((f"What differs: {group}", ["name", *names], [[name, *_cells(values)] for name, values in rows.items()]))
    shown = list(metrics) or [name for name in comparison.metrics if not _is_of_one_parameter(name)]
    values = [
        [
            row["metric"],
            row["group"],
            _spread(row),
            "" if row["best"] is None else f"{_number(row['best'])}{_at(row)}{_mean_of_bests(row)}",
            _difference(row),
        ]
        for row in content["values"]
        if row["metric"] in shown
    ]
    left_out = len(comparison.metrics) - len(shown) if not metrics else 0
    note = f"; {left_out:,} of single parameters are left out: --metric NAME shows one, --csv and --json all" if left_out else ""
    tables.append(
        (
            f"{_VALUES_TITLE}{note}",
            ["metric", "group" if comparison.group_by else "run", "value", "best", "against the first"],
            values,
        )
    )
    anatomy = [
        [
            f"{'callback ' if row['kind'] == 'callback' else ''}{row['name']}",
            *(_part(row["groups"].get(name)) for name in comparison.groups),
        ]
        for row in content["anatomy"]
    ]
    if anatomy:
        anatomy.insert(0, ["timed steps", *(f"{content['timed_steps'][name]:,}" for name in comparison.groups)])
    tables.append(
        (
            "Anatomy of a step: milliseconds per step, share of fetch + train_step, change from the first",
            ["part", *comparison.groups],
            anatomy,
        )
    )
    problems = [
        [problem["level"], problem["title"], ", ".join(problem["runs"]) if len(problem["runs"]) < len(names) else "all runs"]
        for problem in content["problems"]
    ]
    tables.append(("Problems", ["level", "problem", "runs"], problems))
    return tables


def _is_of_one_parameter(metric: str) -> bool:
    """Return whether the metric is about one parameter or layer, that is, whether the last part of its name contains a dot."""
    return "/" in metric and "." in metric.rpartition("/")[2]


def _outcome(run: Mapping[str, Any]) -> str:
    return f"{run['outcome']}: {_cell(run['reason'])}" if run["reason"] else str(run["outcome"])


def _notes(run: Mapping[str, Any]) -> str:
    return _cell(" ".join([*(f"#{tag}" for tag in run["tags"]), run["note"]]).strip())


def _spread(row: Mapping[str, Any]) -> str:
    if not math.isfinite(row["mean"]):
        return "not finite"  # the last value of a run was NaN or infinity
    if row["runs"] == 1:
        return _number(row["mean"])
    return f"{_with_deviation(row['mean'], row['deviation'])} ({row['runs']} runs)"


def _with_deviation(mean: float, deviation: float) -> str:
    if not deviation or not math.isfinite(deviation) or abs(mean) >= 100_000:
        return f"{_number(mean)} ± {_number(deviation)}"
    # The deviation gets two significant digits, or no decimals if it is 10 or more. The mean gets the same number of decimals.
    places = max(0, 1 - math.floor(math.log10(deviation)))
    if places > 12:
        return f"{_number(mean)} ± {_number(deviation)}"
    return f"{mean:.{places}f} ± {deviation:.{places}f}"


def _mean_of_bests(row: Mapping[str, Any]) -> str:
    return f", mean {_with_deviation(row['best_mean'], row['best_deviation'])}" if row["runs"] > 1 else ""


def _at(row: Mapping[str, Any]) -> str:
    return f" at step {row['best_step']:,}" if row["best_step"] is not None else ""


def _difference(row: Mapping[str, Any]) -> str:
    if row["difference"] is None or not math.isfinite(row["difference"]):
        return ""
    if row["difference"] == 0:
        return "equal"
    relative = f" ({100 * row['relative']:+.2f} %)" if math.isfinite(row["relative"]) else ""
    sure = {True: ", may be noise", False: ", more than noise", None: ""}[row["is_noise"]]
    p = f", p = {row['p']:.2g}" if math.isfinite(row["p"]) else ""
    return f"{row['difference']:+.4g}{relative}{sure}{p}"


def _part(cell: Mapping[str, Any] | None) -> str:
    if cell is None:
        return "not timed"
    mark = {"": "", "noise": ", may be noise"}.get(cell["mark"], f", {cell['mark']}")
    change = f", {100 * cell['change']:+.0f} %{mark}" if mark else ""
    share = f", {100 * cell['share']:.1f} %" if math.isfinite(cell["share"]) else ""
    return f"{1000 * cell['seconds']:.3g}{share}{change}"


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "-"
    return f"{value:,.0f}" if 100_000 <= abs(value) < 1e15 else f"{value:.5g}"


def _cell(value: str) -> str:
    line = " ".join(value.split())
    return line if len(line) <= _MAX_CELL_CHARACTERS else f"{line[: _MAX_CELL_CHARACTERS - 3]}..."


def _cells(values: Sequence[str]) -> list[str]:
    """Return the values as table cells. If long values begin with the same words, `...` replaces these words except the last."""
    lines = [" ".join(value.split()) for value in values]
    given = [line for line in lines if line]
    same = next((place for place, letters in enumerate(zip(*given, strict=False)) if len(set(letters)) > 1), min(map(len, given)))
    if max(map(len, lines)) <= _MAX_CELL_CHARACTERS or same <= _MAX_CELL_CHARACTERS // 2:
        return list(map(_cell, lines))
    word = given[0].rfind(" ", 0, same)
    begin = given[0].rfind(" ", 0, max(0, word)) + 1
    return [_cell(f"...{line[begin:]}") if line else "" for line in lines]


def _text(table: Table) -> str:
    title, heads, rows = table
    lines = [[printable(cell) for cell in line] for line in (heads, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        [
            title,
            *("  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines),
        ]
    )


def _markdown(table: Table) -> str:
    title, heads, rows = table
    lines = [
        [printable(cell).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;") for cell in line]
        for line in (heads, *rows)
    ]
    body = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([f"### {title}", "", body[0], f"| {' | '.join('---' for _ in heads)} |", *body[1:]])


def _latex(table: Table) -> str:
    title, heads, rows = table
    lines = [" & ".join(printable(cell).translate(_LATEX_ESCAPES) for cell in line) + r" \\" for line in (heads, *rows)]
    return "\n".join(
        [f"% {printable(title)}; needs the package booktabs", rf"\begin{{tabular}}{{{'l' * len(heads)}}}", r"\toprule", lines[0],
         r"\midrule", *lines[1:], r"\bottomrule", r"\end{tabular}"]
    )  # fmt: skip


def _csv(comparison: Comparison, metrics: Sequence[str]) -> str:
    rows = [row for row in comparison.rows() if not metrics or row["metric"] in metrics]
    columns = [
        "metric", "group", "mean", "deviation", "runs", "best", "best_step", "best_mean", "best_deviation", "difference", "relative",
        "margin", "p",
    ]  # fmt: skip
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(columns)
    for row in rows:
        # A mean that is NaN or infinite is a result, so write it as text. In other columns, NaN means an unknown value.
        mean = row["mean"] if math.isfinite(row["mean"]) else str(row["mean"])
        table.writerow([_csv_cell({**row, "mean": mean}[column]) for column in columns])
    return text.getvalue().rstrip("\n")


def _csv_cell(value: Any) -> Any:
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return ""
    # A spreadsheet would evaluate a text that begins like a formula. A quote before the text prevents this.
    is_formula = isinstance(value, str) and value.startswith(_FORMULA_STARTS) and value != "-inf"
    return f"'{value}" if is_formula else value
