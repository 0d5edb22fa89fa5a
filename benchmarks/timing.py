"""Timing on a noisy machine: all subjects run in many short turns, so that other work on the machine disturbs them equally."""

from __future__ import annotations

import gc
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence

Turn = Callable[[], float]


def in_turns(subjects: Mapping[str, Turn], turns: int) -> dict[str, list[float]]:
    """Run each subject once per turn, in an order that alternates, and return their figures. Garbage is collected before each."""
    figures: dict[str, list[float]] = {name: [] for name in subjects}
    for turn in range(turns):
        for name, subject in list(subjects.items())[:: -1 if turn % 2 else 1]:
            gc.collect()
            figures[name].append(subject())
        if sys.stderr.isatty():
            print(f"\r{turn + 1} of {turns} turns ", end="" if turn + 1 < turns else "\r", file=sys.stderr, flush=True)
    return figures


def timed(statement: Callable[[int], None], times: int) -> Turn:
    """Return a turn that measures the nanoseconds of one repetition of `statement`, which receives the number of repetitions."""

    def turn() -> float:
        began = time.perf_counter_ns()
        statement(times)
        return (time.perf_counter_ns() - began) / times

    return turn


def difference(figures: Mapping[str, list[float]], subject: str, floor: str) -> float:
    """Return the median over turns of the subject's figure minus the floor's of the same turn."""
    return statistics.median(a - b for a, b in zip(figures[subject], figures[floor], strict=True))


def winsorized_mean(differences: Sequence[float]) -> tuple[float, float]:
    """Return the winsorized mean and its standard error: the extreme twentieth on each side is replaced by the nearest other value."""
    ordered = sorted(differences)
    cut = len(ordered) // 20
    winsorized = [min(max(each, ordered[cut]), ordered[-1 - cut]) for each in ordered]
    return statistics.fmean(winsorized), statistics.stdev(winsorized) / len(winsorized) ** 0.5


def middle_mean(differences: Sequence[float]) -> tuple[float, float]:
    """Return the mean of the middle half and its standard error (Tukey and McLaughlin). The values of the outer quarters do not
    matter, such as minutes in which other work stopped a process."""
    ordered = sorted(differences)
    cut = len(ordered) // 4
    middle = ordered[cut : len(ordered) - cut]
    winsorized = [middle[0]] * cut + middle + [middle[-1]] * cut
    return statistics.fmean(middle), statistics.stdev(winsorized) / (len(middle) / len(winsorized)) / len(winsorized) ** 0.5


def fastest(figures: Mapping[str, list[float]], subject: str) -> float:
    """Return the smallest figure of the subject. Use it for times, because other work on the machine can only increase them."""
    return min(figures[subject])


def machine(device: str = "cpu") -> str:
    """Return the versions of Python and torch, the platform, and the GPU if there is one, for the title of a result."""
    import torch

    name = f", {torch.cuda.get_device_name()}" if device == "cuda" else ""
    return f"Python {platform.python_version()}, torch {torch.__version__}, {platform.system()} {platform.machine()}{name}"
