"""`callsheet compare`: print what differs between runs, write it as a page, or fail if a metric has become worse than a limit."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from callsheet.cli.named_run import runs_named
from callsheet.core.working import working
from callsheet.errors import ConfigError, did_you_mean
from callsheet.loggers.support.json_text import json_text
from callsheet.report.compare.comparison import Comparison
from callsheet.report.compare.gate import Condition, Verdict, judge
from callsheet.report.compare.page import write_comparison
from callsheet.report.compare.tables import Format, format_tables
from callsheet.report.index import runs_in
from callsheet.report.run_folder import RunFolder
from callsheet.report.run_page import plain


def compare(
    given: Sequence[str],
    *,
    folder: str = "runs",
    last: int | None = None,
    group_by: str | None = None,
    metrics: Sequence[str] = (),
    fail_if: Sequence[str] = (),
    form: Format | None = None,
    out: str | None = None,
    as_json: bool = False,
) -> tuple[str, bool]:
    """Compare runs. Return the text to print, and whether a condition of `fail_if` is met.

    With `out`, write an HTML page of the comparison to this file. The text then has the path of the page instead of the tables.

    Raises:
        ConfigError: no such run, fewer than two runs, an unknown metric or setting, or a condition that cannot be read.
    """
    conditions = [Condition.parse(text) for text in fail_if]
    folders = choose_runs(given, folder=Path(folder), last=last)
    with working(f"reading {len(folders)} runs", is_shown=sys.stderr.isatty()):
        comparison = Comparison([_read(each) for each in folders], group_by=group_by)
    if len(comparison.groups) < 2 and fail_if:
        raise ConfigError(f"--fail-if needs two groups, and --group-by {group_by} makes one: {comparison.groups[0]}")
    for metric in metrics:
        if metric not in comparison.metrics:
            raise ConfigError(f"no run has the metric {metric!r}{did_you_mean(metric, comparison.metrics)}")
    paths = [str(_page(comparison, out, metrics))] if out is not None else []
    if conditions:
        verdicts = list(_verdicts(comparison, conditions))
        lines, fails = [*(verdict.line for verdict in verdicts), *paths], any(verdict.fails for verdict in verdicts)
        if not as_json and form is None:
            return "\n".join(lines), fails
        print("\n".join(lines), file=sys.stderr)  # standard output is only for the tables in the requested format
    else:
        fails = False
        if paths:
            return paths[0], False
    if as_json:
        return json_text(plain(comparison.to_dict(metrics)), indent=1), fails
    return format_tables(comparison, form or "text", metrics=metrics), fails


def _read(folder: Path) -> RunFolder:
    try:
        return RunFolder.read(folder)
    except FileNotFoundError:
        raise ConfigError(f"{folder} has just been deleted or renamed") from None


def _page(comparison: Comparison, out: str, metrics: Sequence[str]) -> Path:
    if Path(out).is_dir():
        raise ConfigError(f"--out {out} is a folder; give the name of a file in it, such as {Path(out) / 'compare.html'}")
    if Path(out).exists() and not Path(out).is_file():
        raise ConfigError(f"--out {out} is not a regular file")
    try:
        with working(f"writing {out}", is_shown=sys.stderr.isatty()):
            return write_comparison(comparison, out, metrics)
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be written: {error}") from None


def choose_runs(given: Sequence[str], *, folder: Path, last: int | None, least: int = 2) -> list[Path]:
    """Return the folders of the runs that `given` lists by name, folder or pattern, without duplicates and in the order of `given`.

    With `last`, return only the newest `last` of these runs, and the oldest of them first, because the first run is the baseline.
    Archived runs are returned only if `given` contains their own names or folders.

    Raises:
        ConfigError: there is no such run, or there are fewer runs than `least`.
    """
    found = list(dict.fromkeys(each for word in given for each in runs_named(word, folder)))
    if last is not None:
        found = _newest(found, folder, last)
    if len(found) < least:
        needs = "a comparison needs two runs, and " if least > 1 else ""
        there = f"{len(found)} run" if found else "no run"
        raise ConfigError(f"{needs}there is {there}; give names in {folder}/, folders or patterns such as 'lr-*', or --last 5")
    return found


def _newest(found: list[Path], folder: Path, last: int) -> list[Path]:
    if last < 2:
        raise ConfigError(f"--last {last}: a comparison needs two runs or more")
    places = {each.parent for each in found} or {folder}
    try:
        rows = [
            (row.started if row.started == row.started else 0.0, place / row.name)  # treat an unknown time (NaN) as the oldest
            for place in places
            for row in runs_in(place, metrics=(), settings=()).rows
            if found or not row.is_archived
        ]
    except FileNotFoundError as error:
        raise ConfigError(f"{error}; give --folder") from None
    dated = sorted((started, path) for started, path in rows if not found or path in found)
    return [path for _, path in dated[-last:]]


def _verdicts(comparison: Comparison, conditions: Sequence[Condition]) -> Iterator[Verdict]:
    baseline = [each.values for each in comparison.members(comparison.groups[0])]
    for group in comparison.groups[1:]:
        other = [each.values for each in comparison.members(group)]
        for condition in conditions:
            verdict = judge(condition, baseline, other, group)
            is_of_a_step = not condition.of_best and not baseline[0][condition.metric].samples
            yield replace(verdict, line=f"{verdict.line}{_steps(comparison, group)}") if is_of_a_step else verdict


def _steps(comparison: Comparison, group: str) -> str:
    """Return a text that says how many steps `group` and the baseline have trained, or an empty text if the numbers are equal."""
    first, other = (sorted({each.run.last_step for each in comparison.members(name)}) for name in (comparison.groups[0], group))
    return "" if first == other else f"; after {_format_steps(other)} steps, the baseline after {_format_steps(first)}"


def _format_steps(steps: list[int]) -> str:
    return f"{steps[0]:,}" if len(steps) == 1 else f"{steps[0]:,} to {steps[-1]:,}"
