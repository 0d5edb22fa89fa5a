"""Conditions such as `step_seconds > +5%`, under which `callsheet compare --fail-if` fails."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from callsheet.errors import ConfigError, did_you_mean
from callsheet.report.compare.values import Difference, Value, better, difference

_CONDITION_PATTERN = re.compile(
    r"\s*(?:(best)\(([^()]+)\)|([^\s<>()]+))\s*([<>]=?)\s*([+-]?)(\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+)\s*(%?)\s*"
)

_COMPARISONS = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}


@dataclass(frozen=True, slots=True)
class Condition:
    """A limit for how much a metric may differ from the baseline: `validation/loss > +0.01`, `tokens_per_second < -5%`.

    Args:
        text: the condition as the user wrote it.
        metric: the metric's name.
        of_best: whether the best value is compared, not the last: `best(validation/loss) > +0.01`.
        compare: `>` or `>=` if a difference above the limit fails the condition; `<` or `<=` if one below the limit does.
        limit: the limit; if `is_relative` is set, a fraction of the baseline's value.
        is_relative: whether the limit was given in per cent of the baseline's value.
    """

    text: str
    metric: str
    of_best: bool
    compare: str
    limit: float
    is_relative: bool

    @classmethod
    def parse(cls, text: str) -> Condition:
        """Return the condition that `text` describes. Raise ConfigError if the text is not a condition."""
        match = _CONDITION_PATTERN.fullmatch(text)
        if match is None:
            raise ConfigError(
                f"--fail-if {text!r} is not a condition; write a metric, >, >=, < or <=, and how much it may differ from the baseline, "
                "such as 'step_seconds > +5%', 'validation/loss > +0.01' or 'best(validation/accuracy) < -1%'"
            )
        best, in_best, plain, compare, sign, number, percent = match.groups()
        limit = float(f"{sign}{number}") / (100 if percent else 1)
        return cls(text.strip(), (in_best or plain).strip(), bool(best), compare, limit, bool(percent))


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of checking a condition for one run or group: whether the condition fails, and a line of text with the result."""

    condition: Condition
    fails: bool
    line: str


def judge(
    condition: Condition, baseline: Sequence[Mapping[str, Value]], other: Sequence[Mapping[str, Value]], name: str
) -> Verdict:
    """Check a condition. The condition fails if the whole 95 % confidence interval of the difference from the baseline is beyond the limit.

    The condition also fails if it compares last values, and a last value of the other runs is NaN or infinite.

    Args:
        condition: the condition.
        baseline, other: the values of the runs of each side.
        name: the name of the other run or group, for the text of the verdict.

    Raises:
        ConfigError: a run does not have the metric (the message suggests the closest name), or its values cannot be compared, for
            example because the baseline's value is NaN.
    """
    sides = []
    for side, values in (("the baseline", baseline), (name, other)):
        lacking = next((each for each in values if condition.metric not in each), None)
        if lacking is not None:
            raise ConfigError(
                f"--fail-if {condition.text!r}: {'a run of ' if len(values) > 1 else ''}{side} does not have the metric {condition.metric!r}"
                f"{did_you_mean(condition.metric, lacking) or '; callsheet compare --json lists the metrics'}"
            )
        sides.append([each[condition.metric] for each in values])
    if condition.of_best and better(condition.metric) is not None:
        if any(value.best is None for value in sides[0]):
            raise ConfigError(f"--fail-if {condition.text!r}: {condition.metric} of the baseline was never finite")
        if any(value.best is None for value in sides[1]):
            line = f"FAIL: {name}: {condition.metric} was never finite; limit {condition.text}"
            return Verdict(condition, fails=True, line=line)
    if condition.of_best and any(value.best is None for side in sides for value in side):
        raise ConfigError(
            f"--fail-if {condition.text!r}: the name {condition.metric!r} does not show whether lower or higher is better; write "
            f"{condition.metric} for its last value"
        )
    if not condition.of_best and not all(math.isfinite(value.last) for value in sides[0]):
        raise ConfigError(
            f"--fail-if {condition.text!r}: {condition.metric} of the baseline ended as NaN or infinity, so nothing can be compared with it"
        )
    if not condition.of_best and not all(math.isfinite(value.last) for value in sides[1]):
        line = f"FAIL: {name}: {condition.metric} ended as NaN or infinity, and the baseline's did not; limit {condition.text}"
        return Verdict(condition, fails=True, line=line)
    found = difference(sides[0], sides[1], of_best=condition.of_best)
    if condition.is_relative and found.baseline == 0:
        raise ConfigError(f"--fail-if {condition.text!r}: the baseline's value is 0; give a limit without %")
    amount, scale = (found.relative, abs(found.baseline)) if condition.is_relative else (found.absolute, 1.0)
    margin = 0.0 if math.isnan(found.margin) else found.margin / scale
    nearest = amount - margin if ">" in condition.compare else amount + margin
    rounding = 1e-12 * (max(abs(found.baseline), abs(found.baseline + found.absolute)) / scale + abs(condition.limit))
    if abs(nearest - condition.limit) <= rounding:  # equal to the limit, except for a rounding error
        nearest = condition.limit
    fails = _COMPARISONS[condition.compare](nearest, condition.limit)
    return Verdict(condition, fails, _line(condition, fails, amount, margin, found, name))


def _line(condition: Condition, fails: bool, amount: float, margin: float, found: Difference, name: str) -> str:
    def text(value: float) -> str:
        return f"{100 * value:.3g} %" if condition.is_relative else f"{value:.4g}"

    spread = {
        "seeds": f", 95 % interval ±{text(margin)} over the seeds",
        "one side": f", 95 % interval ±{text(margin)} over the seeds of one side",
        "within": f", 95 % interval ±{text(margin)} within the runs",
        "": ", spread unknown: one run on a side",
    }[found.source]
    metric = f"best({condition.metric})" if condition.of_best else condition.metric
    return f"{'FAIL' if fails else 'ok'}: {name}: {metric} {'+' if amount >= 0 else ''}{text(amount)}{spread}; limit {condition.text}"
