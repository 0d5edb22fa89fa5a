"""The results of a public script: its variants are compared, and what callsheet observed is compared with what was recorded."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

_TIMES = (
    r"\d+([:_-])\d\d\1\d\d([.,]\d+)?",
    r"\d+(\.\d+)?(e-?\d+)? ?(ms|s|sec|secs|seconds|minutes|it/s|s/it)\b",
    r"(?i)(\b|_)(time|took|elapsed|SPS|ms/batch|seconds|images/sec|dt|tok/sec|per_second|runtime)\b[^\w\n]*\d+(\.\d+)?(e-?\d+)?",
    r"0x[0-9a-f]{6,}",
)
"""Patterns of times, rates and addresses, which differ in every run."""


def normalized(text: str, patterns: Sequence[str]) -> list[str]:
    """Return the lines of standard output without times and rates. A carriage return ends a line."""
    for pattern in (*patterns, *_TIMES):
        text = re.sub(pattern, "#", text)
    return [line.rstrip() for line in re.split(r"[\r\n]+", text)]


def weights_of(variant: Mapping[str, Any]) -> list[Any]:
    return [record["weights"] for record in variant["processes"]]


def _random_states(variant: Mapping[str, Any]) -> list[str]:
    return sorted(record["random_state"] for record in variant["processes"])


def _output(variant: Mapping[str, Any]) -> Any:
    return variant["stdout"]


_READ: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    "weights": weights_of,
    "random_state": _random_states,
    "stdout": _output,
}


def compared(alone: Mapping[str, Any], observed: Mapping[str, Any], again: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return whether the observed run did the same as the run alone. A second run alone, `again`, shows what varies."""

    def same(key: str) -> str:
        of = _READ[key]
        if of(alone) == of(observed):
            return "equal" if of(alone) else "none"
        return "varies" if again is not None and of(again) != of(alone) else "DIFFERENT"

    seconds = [sum(each["seconds_of_steps"] for each in variant["processes"]) for variant in (alone, observed)]
    return {
        "status": [alone["status"], observed["status"]],
        "weights": same("weights"),
        "stdout": same("stdout"),
        "random_state": same("random_state"),
        "more_errors": observed["errors"] - alone["errors"],
        "seconds": [alone["seconds"], observed["seconds"]],
        "seconds_of_steps": seconds,
    }


def observation_of(output: Path, observed: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `callsheet exec` recognized and recorded, compared with the record of the process that it observed."""
    from callsheet.report import RunFolder

    lines = (output / "stderr.txt").read_text(errors="replace").splitlines()
    said = [message for line in lines if (message := line.partition("callsheet: ")[2])]  # a progress bar may come first
    said += [line for line in lines if line.startswith("callsheet exec: ") or " does not call " in line]
    runs = [RunFolder.read(path) for path in sorted((output / "runs").iterdir())] if (output / "runs").is_dir() else []
    ranks = {each["rank"]: each for each in reversed(observed["processes"])}
    losses = _losses_of_ranks([ranks[rank] for rank in sorted(ranks)])
    return {"said": said, "runs": [_described(run, losses, _is_by_hand(said, run)) for run in runs]}


def _is_by_hand(said: Sequence[str], run: Any) -> bool:
    return any(line.startswith("observing ") and line.endswith(f"/{run.name}") for line in said)


def _class_name(setting: Any) -> str:
    path = setting.get("class_path", "") if isinstance(setting, Mapping) else ""
    return str(path).rpartition(".")[2]


_SHORTEST = 1.5e-5
"""The start and end of a part that is not observed are fired one right after the other, in fewer seconds than this."""


def _described(run: Any, losses: Sequence[Sequence[float | None]], is_by_hand: bool) -> dict[str, Any]:
    steps = [0, *sorted({record.step for record in run.records})]
    before = dict(zip(steps[1:], steps, strict=False))
    logged = {
        (before[record.step], record.step): record.values["train/loss"] for record in run.records if "train/loss" in record.values
    }
    slices: dict[int, set[str]] = {}
    for window in run.windows:
        for each in window.slices:
            if each.seconds > _SHORTEST:
                # A batch is fetched before the number of its step is counted.
                slices.setdefault(each.step + (each.name == "fetch"), set()).add(each.name)
    # The first step is recognized only when its optimizer steps.
    timed = {step: names for step, names in slices.items() if step > 1 and "train_step" in names}
    parts = {name: sum(name in names for names in timed.values()) for name in ("fetch", "forward", "backward", "optimizer_step")}
    best = max(
        (
            _matched(logged, expected, skipped)
            for expected in losses
            for skipped in {0, max(0, len(expected) - run.last_step)}  # the observation of a later loop begins after some steps
        ),
        key=lambda match: (match["equal"], -abs(match["steps"] - run.last_step)),
        default={"equal": 0, "compared": 0, "steps": 0, "worst": ""},
    )
    return {
        "is_by_hand": is_by_hand,
        "model": _class_name(run.settings.get("model")),
        "optimizer": _class_name(run.settings.get("optimizer")),
        "outcome": run.outcome,
        "steps": run.last_step,
        "epochs": run.events[-1].get("epoch") if run.events else None,
        "evaluations": len(run.evaluations),
        "timed_steps": len(timed),
        "parts": parts,
        "steps_of_optimizer": best["steps"],
        "losses_logged": len(logged),
        "losses_compared": best["compared"],
        "losses_equal": best["equal"],
        "first_difference": best["worst"],
    }


def _losses_of_ranks(processes: Sequence[Mapping[str, Any]]) -> list[list[float | None]]:
    """Return the losses of the first rank's optimizers, and the means of the losses over the ranks, which a framework may log."""
    of_ranks = [losses_of(process) for process in processes]
    means = [[_mean(of_step) for of_step in zip(*of_optimizer, strict=False)] for of_optimizer in zip(*of_ranks, strict=False)]
    return [*of_ranks[0], *means] if of_ranks else []


def losses_of(process: Mapping[str, Any]) -> list[list[float | None]]:
    """Return the loss of each step by optimizer: the sum of the losses that gave it gradients since its gradients were last discarded.

    If the optimizer evaluates a closure several times, it is the loss of the last evaluation.
    """
    found: list[list[float | None]] = [[] for _ in process["optimizers"]]
    for number, losses in enumerate(found):
        total: float | None = None
        is_stepping = False
        for event, value, which in process["events"]:
            if event == "backward" and number in which:
                total = value if is_stepping or total is None else total + value
            elif event == "zero_grad" and number in which and not is_stepping:
                total = None
            elif event == "step_begins" and which == number:
                is_stepping = True
            elif event == "step_ends" and which == number:
                losses.append(total)
                total, is_stepping = None, False
    return found


def _matched(logged: Mapping[tuple[int, int], float], losses: Sequence[float | None], skipped: int) -> dict[str, Any]:
    """Return how many logged losses equal those that were recorded for one optimizer, without its first `skipped` steps.

    A logged loss has the steps of the records before it and of its own, and is the mean over the steps after the former.
    """
    expected = losses[skipped:]
    pairs = [
        (step, value, _mean(expected[before:step])) for (before, step), value in logged.items() if 1 <= step <= len(expected)
    ]
    wrong = [(step, value, given) for step, value, given in pairs if given is None or not _is_equal(value, given)]
    worst = f"step {wrong[0][0]}: logged {wrong[0][1]:.7g}, recorded {wrong[0][2]}" if wrong else ""
    return {
        "equal": len(pairs) - len(wrong),
        "compared": len(logged),
        "steps": len(expected),
        "worst": worst,
    }


def _mean(losses: Sequence[float | None]) -> float | None:
    given = [each for each in losses if each is not None]
    return sum(given) / len(given) if given else None


def _is_equal(one: float, other: float) -> bool:
    if math.isnan(one) or math.isnan(other):
        return math.isnan(one) and math.isnan(other)
    return math.isclose(one, other, rel_tol=2e-6, abs_tol=1e-9)
