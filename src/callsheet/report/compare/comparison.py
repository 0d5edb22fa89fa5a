"""Compares groups of runs: their settings, their values, and the time of each part of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from callsheet.errors import ConfigError, did_you_mean
from callsheet.report.compare.anatomy import Anatomy, anatomy, anatomy_of
from callsheet.report.compare.settings import differences, settings
from callsheet.report.compare.values import Difference, Value, better, difference, summary, values_of
from callsheet.report.problems import problems
from callsheet.report.run_folder import RunFolder

SEED = "seed"
_MAX_PROBLEMS_PER_RUN = 20
_GROUPS_IN_NAMES = ("settings", "callbacks")
"""The groups of settings by which runs can be grouped."""


@dataclass(frozen=True, slots=True)
class Compared:
    """One run of a comparison: its unique name, its group, and the data that was read from its folder.

    `parts` is the cache of the method `once`.
    """

    name: str
    group: str
    run: RunFolder
    settings: Mapping[str, Mapping[str, str]]
    values: Mapping[str, Value]
    parts: dict[str, tuple[int, Any]] = field(default_factory=dict)

    def once(self, part: str, compute: Callable[[RunFolder], Any], *, limit: int = 0) -> Any:
        """Return `compute(run)` and cache it under the name `part`. If `limit` differs from the last call's, compute it again."""
        if part not in self.parts or self.parts[part][0] != limit:
            self.parts[part] = (limit, compute(self.run))
        return self.parts[part][1]


class Comparison:
    """A comparison of groups of runs. The first group is the baseline.

    Args:
        runs: the data that was read from each run's folder, in the order in which the runs are shown.
        group_by: `seed` makes one group of all runs whose settings are the same but for seeds; the name of a setting makes one group for each
            of its values; None makes each run a group.
        before: an earlier comparison. Its results for a run are reused if the run has not been read again since.

    Raises:
        ConfigError: no run has the setting `group_by`; the message names the closest one.
    """

    def __init__(self, runs: Sequence[RunFolder], *, group_by: str | None = None, before: Comparison | None = None) -> None:
        known = {id(each.run): each for each in before.runs} if before else {}
        found = [known.get(id(run)) or Compared("", "", run, settings(run), values_of(run)) for run in runs]
        names = _unique([run.name for run in runs], [str(run.path) for run in runs])
        given = [each.settings for each in found]
        groups = _groups(names, given, group_by)
        self.group_by = group_by
        self.runs: list[Compared] = [
            replace(each, name=name, group=group) for each, name, group in zip(found, names, groups, strict=True)
        ]
        self.groups = list(dict.fromkeys(groups))
        self.differences = differences(given)

    def members(self, group: str) -> list[Compared]:
        """Return the runs of a group."""
        return [each for each in self.runs if each.group == group]

    @property
    def metrics(self) -> list[str]:
        """The names of the metrics that at least one run has: first losses, then evaluations, then the other metrics by name."""
        names = dict.fromkeys(name for each in self.runs for name in each.values)
        return sorted(
            names, key=lambda name: ("/" not in name, not name.endswith("/loss"), not name.startswith("validation/"), name)
        )

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each metric and group: mean, spread, number of runs, and difference from the baseline."""
        found = []
        for metric in self.metrics:
            baseline = [each.values[metric] for each in self.members(self.groups[0]) if metric in each.values]
            for group in self.groups:
                values = [each.values[metric] for each in self.members(group) if metric in each.values]
                if values:
                    against = difference(baseline, values) if baseline and group != self.groups[0] else None
                    found.append(_row(metric, group, values, against))
        return found

    def timed_steps(self) -> list[int]:
        """Return the number of timed steps of each group."""
        return [sum(each.steps for each in group) for group in self._anatomies()]

    def anatomy(self) -> list[dict[str, Any]]:
        """Return the table of measured times, with a row for the whole step, for each span and for each callback."""
        return anatomy(self._anatomies())

    def _anatomies(self) -> list[list[Anatomy]]:
        return [[each.once("anatomy", anatomy_of) for each in self.members(group)] for group in self.groups]

    def problems(self) -> list[dict[str, Any]]:
        """Return the problems of all runs, the most serious first. Each problem lists its runs as pairs of index and details."""
        found: dict[tuple[str, str], list[tuple[int, str]]] = {}
        for place, each in enumerate(self.runs):
            for problem in each.once("problems", problems)[:_MAX_PROBLEMS_PER_RUN]:
                found.setdefault((problem.level, problem.title), []).append((place, problem.detail))
        order = ("error", "warning", "note")
        return [
            {"level": level, "title": title, "runs": where}
            for (level, title), where in sorted(found.items(), key=lambda item: order.index(item[0][0]))
        ]

    def to_dict(self, metrics: Sequence[str] = ()) -> dict[str, Any]:
        """Return the comparison as plain data, for JSON.

        Args:
            metrics: the metrics whose values are returned; empty: all metrics.
        """
        rows = self.anatomy()
        return {
            "baseline": self.groups[0],
            "group_by": self.group_by,
            "runs": [
                {
                    **run_facts(each),
                    "group": each.group,
                    "settings": each.settings,
                    "values": {
                        name: {"last": value.last, "best": value.best}
                        for name, value in each.values.items()
                        if not metrics or name in metrics
                    },
                }
                for each in self.runs
            ],
            "differences": self.differences,
            "values": [row for row in self.rows() if not metrics or row["metric"] in metrics],
            "timed_steps": dict(zip(self.groups, self.timed_steps(), strict=True)),
            "anatomy": [
                {
                    **{name: row[name] for name in ("kind", "name")},
                    "groups": {group: cell for group, cell in zip(self.groups, row["cells"], strict=True) if cell},
                }
                for row in rows
            ],
            "problems": [
                {**problem, "runs": {self.runs[place].name: detail for place, detail in problem["runs"]}}
                for problem in self.problems()
            ],
        }


def _row(metric: str, group: str, values: list[Value], against: Difference | None) -> dict[str, Any]:
    lasts = summary([value.best if value.samples and value.best is not None else value.last for value in values])
    which = better(metric)
    known = [(value.best, value.best_step) for value in values if value.best is not None]
    best, best_step = (max if which == "higher" else min)(known, default=(None, -1))
    bests = summary([each for each, _ in known]) if known else None
    return {
        "metric": metric,
        "group": group,
        "mean": lasts.mean,
        "deviation": lasts.deviation,
        "runs": lasts.count,
        "best": best,
        "best_step": best_step if best_step >= 0 else None,
        "best_mean": bests.mean if bests else None,
        "best_deviation": bests.deviation if bests else None,
        "better": which,
        "difference": against.absolute if against else None,
        "relative": against.relative if against else None,
        "margin": against.margin if against else None,
        "p": against.p if against else None,
        "spread_of": against.source if against else None,
        "is_noise": against.is_noise if against else None,
    }


def run_facts(each: Compared) -> dict[str, Any]:
    """Return the facts in a run's row of the table of runs, such as its name, outcome, steps, times and tags."""
    run = each.run
    starts = sum(event["event"] == "run_start" for event in run.events)
    return {
        "name": each.name,
        "path": str(run.path),
        "outcome": run.outcome,
        "reason": run.reason,
        "steps": run.last_step,
        "seconds": run.seconds,
        "started": run.started,
        "restarts": max(0, starts - 1),
        "tags": list(run.notes.tags),
        "note": run.notes.note,
        "evaluations": sum(not found["is_undone"] for found in run.evaluations),
        "checkpoints": sum(not found["is_undone"] for found in run.checkpoints),
    }


def _unique(names: list[str], paths: list[str]) -> list[str]:
    """Return a unique name for each run: its name, or its path if another run has the same name."""
    return [path if names.count(name) > 1 else name for name, path in zip(names, paths, strict=True)]


def _groups(names: Sequence[str], given: Sequence[Mapping[str, Mapping[str, str]]], group_by: str | None) -> list[str]:
    if group_by is None:
        return list(names)
    if group_by != SEED:
        known = dict.fromkeys(name for each in given for group in _GROUPS_IN_NAMES for name in each[group])
        if group_by not in known:
            raise ConfigError(f"--group-by {group_by}: no run has this setting{did_you_mean(group_by, known)}")
        return [f"{_last_part(group_by)}={_find_value(each, group_by) or '(none)'}" for each in given]
    silent = [name for name, each in zip(names, given, strict=True) if not any(each[group] for group in _GROUPS_IN_NAMES)]
    if silent and len(names) > 1:
        raise ConfigError(
            f"--group-by seed: {', '.join(silent[:3])} {'has' if len(silent) == 1 else 'have'} recorded no settings, so nothing shows whether "
            "they differ in seeds alone; a JSONLLogger records them, and config={...} of the Trainer and attach adds your own"
        )
    is_seed: Callable[[str], bool] = lambda name: name.rpartition(".")[2].lower() in (SEED, "random_seed", "data_seed")  # noqa: E731
    plain = [
        {group: {name: value for name, value in each[group].items() if not is_seed(name)} for group in each} for each in given
    ]
    different = {
        name: values for group, found in differences(plain).items() if group in _GROUPS_IN_NAMES for name, values in found.items()
    }
    lasts = list(map(_last_part, different))
    shown = {name: last if lasts.count(last) == 1 else name for name, last in zip(different, lasts, strict=True)}
    return [
        ", ".join(f"{shown[name]}={values[place] or '(none)'}" for name, values in different.items()) or "all runs"
        for place in range(len(names))
    ]


def _last_part(setting: str) -> str:
    """Return the last part of a setting's dotted name, such as `lr` for `optimizer.lr`. Group names such as `lr=0.1` use it."""
    return setting.rpartition(".")[2]


def _find_value(each: Mapping[str, Mapping[str, str]], name: str) -> str:
    return next((each[group][name] for group in _GROUPS_IN_NAMES if name in each[group]), "")
