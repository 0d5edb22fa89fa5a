"""Faults for tests of hosts: frameworks that skip, repeat or reorder calls, and hosts that fail at a span of a step."""

from __future__ import annotations

import random
from typing import Any

import pytest

from callsheet import Callback, Context
from callsheet.bridges.hosted_run import HostedRun
from callsheet.testing import Recorder

TRAINED = ("epoch", "fetch", "train_step", "microbatch", "forward", "loss", "backward", "clip_gradients", "optimizer_step")
EVALUATED = ("eval_all", "eval", "eval_step", "eval_forward")
ALWAYS = {"epoch", "train_step", "forward", "optimizer_step", "eval"}
"""One span for each place from which hosts fire events: the loop, a hook of the model, a hook of the optimizer, an evaluation."""


class RandomFaults:
    """Wraps methods of a host, so that some calls are skipped, made twice, or preceded by a repeated earlier call."""

    def __init__(self, host: Any, names: tuple[str, ...], seed: int) -> None:
        self.drawn = random.Random(seed)
        self.made: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
        self.odd = 0
        for name in names:
            setattr(host, name, self.around(getattr(host, name)))

    def around(self, method: Any) -> Any:
        def called(*args: Any, **kwargs: Any) -> None:
            self.made.append((method, args, kwargs))
            calls = [self.made[-1]]
            if self.drawn.random() < 0.15:
                self.odd += 1
                calls = self.drawn.choice([[], calls * 2, [self.drawn.choice(self.made), *calls]])
            for call, given, named in calls:
                call(*given, **named)

        return called


class FailsInSpan(Callback):
    """Makes the host fail at the start or end of a span after the third step, and records how the run ends."""

    def __init__(self, span: str, edge: str) -> None:
        self.span, self.edge = span, edge
        self.run: Any = None
        self.faults = 0
        self.ends: list[Any] = []

    def on_event(self, ctx: Context) -> None:
        if ctx.event == "on_train_step_end" and ctx.step == 3:
            for driver in (self.run.driver, self.run.eval.driver if isinstance(self.run, HostedRun) else self.run.eval_driver):
                self.break_driver(driver)
        elif ctx.event == "on_exception":
            self.ends.append(type(ctx.exception))
        elif ctx.event == "on_run_end":
            self.ends.append(ctx.run.outcome)

    def break_driver(self, driver: Any) -> None:
        method = getattr(driver, self.edge)

        def called(name: str) -> None:
            if name == self.span:
                self.faults += 1
                raise RuntimeError("a fault of the host")
            method(name)

        setattr(driver, self.edge, called)
        if self.span == "train_step":  # hosts also call `start_step` and `end_step`, the faster methods for this span
            name = f"{self.edge}_step"
            setattr(driver, name, lambda: called("train_step"))


class Watched(Recorder):
    """Records every event, and how many steps and epochs the run has counted at its end."""

    counted = (-1, -1)
    inexact = ""

    def on_event(self, ctx: Context) -> None:
        super().on_event(ctx)
        if ctx.event == "on_run_end":
            self.counted, self.inexact = (ctx.state.timestamp.batch, ctx.state.timestamp.epoch), ctx.run.inexact_counts


def counts_held(
    recorder: Watched,
    steps: int,
    epochs: int,
    caplog: pytest.LogCaptureFixture,
    *,
    is_corrected: bool = True,
    drops_steps: bool = False,
) -> None:
    """Check that callsheet's counts equal the framework's, or that the difference was logged and recorded once.

    If `is_corrected`, the counts are equal at the end even then. With `drops_steps`, some steps have events and are not counted.
    """
    logged = [record.message for record in caplog.records if "has counted" in record.message]
    assert len(logged) == bool(recorder.inexact)
    assert all(recorder.inexact in message for message in logged)
    is_exact = recorder.counted == (steps, epochs)
    assert logged or (is_exact and (drops_steps or recorder.events.count("on_train_step_end") == steps))
    assert is_exact or not is_corrected
    assert "cannot follow" not in caplog.text
