"""Faults for tests of hosts: frameworks that skip, repeat or reorder calls, and hosts that fail at a span of a step.

The tests in the venvs of Composer and Ultralytics use this module too, so it imports no framework.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from callsheet import Callback, Context
from callsheet.bridges.hosted_run import HostedRun
from callsheet.callbacks import EMA, History, NaNMonitor
from callsheet.testing import Recorder, check_events

from .loops.job import POINTS

TRAINED = ("epoch", "fetch", "train_step", "microbatch", "forward", "loss", "backward", "clip_gradients", "optimizer_step")
EVALUATED = ("eval_all", "eval", "eval_step", "eval_forward")
ALWAYS = {"epoch", "train_step", "forward", "optimizer_step", "eval"}
"""One span for each kind of code that fires events in hosts: the loop, a hook of the model, a hook of the optimizer, an evaluation."""


OBSERVERS: list[Any] = [lambda: EMA(half_life=2, at_end=False), NaNMonitor, History]
"""Functions that make the callbacks of a run with random faults, in addition to the one that records its events."""


def seeds(count: int = 12) -> range:
    """Return the seeds of the runs with random faults: `count` of them, or as many as the environment variable CALLSHEET_SEEDS says."""
    return range(int(os.environ.get("CALLSHEET_SEEDS", count)))


def rate_of(seed: int) -> float:
    """Return the share of the calls that are faulty: runs with the lower rate have a few faults, or none."""
    return 0.02 if seed % 2 else 0.15


class RandomFaults:
    """Wraps methods of a host, so that some calls are skipped, made twice, or preceded by a repeated earlier call.

    With `recent`, the repeated call is one of the last `recent` calls. The share of faulty calls is multiplied by `share`.
    """

    def __init__(self, host: Any, names: tuple[str, ...], seed: int, *, recent: int = 0, share: float = 1.0) -> None:
        self.recent = recent
        self.drawn, self.rate = random.Random(seed), rate_of(seed) * share
        self.made: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
        self.odd = 0
        for name in names:
            setattr(host, name, self.around(getattr(host, name)))

    def around(self, method: Any) -> Any:
        def called(*args: Any, **kwargs: Any) -> None:
            self.made.append((method, args, kwargs))
            calls = [self.made[-1]]
            if self.drawn.random() < self.rate:
                self.odd += 1
                calls = self.drawn.choice([[], calls * 2, [self.drawn.choice(self.made[-self.recent :]), *calls]])
            for call, given, named in calls:
                call(*given, **named)

        return called

    def bypassing(self, wrapper: Any) -> Any:
        """Return `wrapper`, which a host puts around a method of the framework, so that some calls reach only the framework's method."""

        def called(original: Any, *args: Any, **kwargs: Any) -> Any:
            if self.drawn.random() < self.rate:
                self.odd += 1
                return original(*args, **kwargs)
            return wrapper(original, *args, **kwargs)

        return called


class FailsInSpan(Callback):
    """Makes the host fail at the start or end of a span after the third step, and records how the run ends. `span` "": it never fails."""

    def __init__(self, span: str, edge: str) -> None:
        self.span, self.edge = span, edge
        self.run: Any = None
        self.faults = 0
        self.ends: list[Any] = []

    def on_event(self, ctx: Context) -> None:
        if ctx.event == "on_train_step_end" and ctx.step == 3 and self.span:
            for driver in (self.run.driver, self.run.eval.driver if isinstance(self.run, HostedRun) else self.run.eval_driver):
                self.break_driver(driver)
        elif ctx.event == "on_exception":
            self.ends.append(type(ctx.exception))
        elif ctx.event == "on_run_end":
            self.ends.append(ctx.run.outcome)

    def break_driver(self, driver: Any) -> None:
        """Let the driver fail whenever it starts or ends the span, also if the loop has reported only a later span."""

        def fail() -> None:
            self.faults += 1
            raise RuntimeError("a fault of the host")

        setattr(driver.spans[self.span], "before_start" if self.edge == "start" else "act_at_end", fail)


class StepRecorder(Recorder):
    """Records every event, what callsheet reports of each step, and how many steps and epochs the run has counted at its end.

    A loop that trains `job` instead of `POINTS` also records the losses with which it really trains.
    """

    counted = (-1, -1)
    inexact = ""

    def __init__(self) -> None:
        super().__init__()
        self.job = replace(POINTS, loss=self._loss)
        self.losses: list[float] = []
        """The training loss of each microbatch, as the loop has computed it."""
        self.steps: list[tuple[int, int, float | None, bool]] = []
        """Each step that callsheet has reported: its number, its epoch, its loss, and whether it was skipped."""
        self.evaluated: list[tuple[int, float]] = []
        """Each loss of an evaluation that callsheet has reported, with the step after which it was evaluated."""
        self.misplaced: list[tuple[int, int]] = []
        """For each evaluation that began with another step than the last of training, before any warning: its step, and the last step."""

    def _loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        loss = POINTS.loss(outputs, targets)
        if loss.requires_grad:
            self.losses.append(loss.item())
        return loss

    def on_event(self, ctx: Context) -> None:
        super().on_event(ctx)
        if ctx.event == "on_train_step_end":
            loss = float(ctx.loss) if ctx.has("loss") else None
            self.steps.append((ctx.step, ctx.epoch, loss, ctx.has("step_skipped") and ctx.step_skipped))
        if ctx.event == "on_eval_all_start" and not ctx.run.inexact_counts:
            last = max((step for step, _, _, was_skipped in self.steps if not was_skipped), default=0)
            self.misplaced += [(ctx.step, last)] if ctx.step != last else []
        if ctx.event == "on_eval_end":
            self.evaluated += [(ctx.step, float(ctx.eval_losses["loss"]))] if "loss" in ctx.eval_losses else []
        if ctx.event == "on_eval_all_end" and ctx.has("eval_results"):
            self.evaluated += [(ctx.step, found["loss"]) for found in ctx.eval_results.values() if "loss" in found]
        if ctx.event == "on_run_end":
            self.counted, self.inexact = (ctx.state.timestamp.batch, ctx.state.timestamp.epoch), ctx.run.inexact_counts


class StepEndRecorder(Callback):
    """Passes only the ends of steps and of the run to a `StepRecorder`, so that hosts use their shortcuts for events without listeners."""

    def __init__(self) -> None:
        self.recorder = StepRecorder()

    def on_train_step_end(self, ctx: Context) -> None:
        self.recorder.on_event(ctx)

    def on_run_end(self, ctx: Context) -> None:
        self.recorder.on_event(ctx)


def assert_training_is_unchanged(recorder: Recorder, plain: nn.Module, observed: nn.Module) -> None:
    """Check that the events are in order, that the weights are those of training without callsheet, and that no hook is left."""
    check_events(recorder.events)
    assert recorder.events[-1] == "on_run_end"
    assert all(torch.equal(one, other) for one, other in zip(plain.parameters(), observed.parameters(), strict=True))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in observed.modules())


def assert_counts_are_right(
    recorder: StepRecorder,
    steps: int,
    epochs: int,
    caplog: pytest.LogCaptureFixture,
    *,
    is_corrected: bool = True,
    drops_steps: bool = False,
) -> None:
    """Check that callsheet's steps and epochs are those that were trained, or that a warning was logged and recorded once.

    Up to the step that the warning names, the steps must be right even then. If `is_corrected`, the counts are equal at the end in any
    case. With `drops_steps`, some steps have events and are not counted.
    """
    logged = [record.message for record in caplog.records if "figures per step or epoch may be wrong" in record.message]
    assert len(logged) == bool(recorder.inexact)
    assert all(recorder.inexact in message for message in logged)
    is_exact = recorder.counted == (steps, epochs)
    assert logged or (is_exact and (drops_steps or recorder.events.count("on_train_step_end") == steps))
    assert is_exact or not is_corrected
    assert "cannot follow" not in caplog.text
    assert not recorder.misplaced
    if recorder.losses:
        until = re.search(r"from step (\d+) on", recorder.inexact)
        assert_steps_are_right(recorder, steps, epochs, int(until[1]) if until else steps + 1)


def assert_steps_are_right(recorder: StepRecorder, steps: int, epochs: int, until: int) -> None:
    """Check that callsheet has reported the steps before step `until` once, in order, in their epochs and with their losses.

    If the fault hides a loss, callsheet reports none.
    """
    microbatches, in_epoch = len(recorder.losses) // steps, steps // epochs if epochs else steps
    reported = [each for each in recorder.steps if each[0] < until]
    assert [step for step, *_ in reported] == list(range(1, len(reported) + 1))
    for step, epoch, loss, was_skipped in reported:
        trained = recorder.losses[(step - 1) * microbatches : step * microbatches]
        assert epoch == (step - 1) // in_epoch + 1
        assert loss is None or loss == pytest.approx(sum(trained) / microbatches, rel=1e-5)
        assert not was_skipped


def assert_steps_equal(recorder: StepRecorder, expected: StepRecorder) -> None:
    """Check that callsheet has reported the steps of a run without faults: all of them, or those before the step that a warning names."""
    found = re.search(r"from step (\d+) on", recorder.inexact)
    until = int(found[1]) if found else expected.counted[0] + 1
    reported, steps = ([each for each in one.steps if each[0] < until] for one in (recorder, expected))
    assert recorder.inexact or len(reported) == len(steps)
    for (step, epoch, loss, was_skipped), right in zip(reported, steps, strict=False):
        assert (step, epoch, was_skipped) == (right[0], right[1], right[3])
        assert loss is None or loss == pytest.approx(right[2], rel=1e-5)


def assert_evaluations_are_right(recorder: StepRecorder, expected: Sequence[tuple[int, float]]) -> None:
    """Check that every loss of an evaluation is one of those that the framework has found (`expected`), in order and after its step.

    From the step on that a warning names, only the losses must be right.
    """
    found = re.search(r"from step (\d+) on", recorder.inexact)
    until, at = int(found[1]) if found else None, 0
    for step, loss in recorder.evaluated:
        at = next(index for index in range(at, len(expected)) if expected[index][1] == pytest.approx(loss, rel=1e-5))
        assert step == expected[at][0] or (until is not None and step >= until)
