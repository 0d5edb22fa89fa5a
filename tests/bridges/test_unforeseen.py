"""A framework that does not do what its host expects: events stay in order, weights stay what they were, and training goes on."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from callsheet import Callback, Context, FieldNotTold
from callsheet.bridges.hosted_run import HostedRun
from callsheet.callbacks import EMA, History, NaNMonitor
from callsheet.lifecycle import FIELDS, is_available
from callsheet.testing import Recorder, check_events

STEP = (
    "train_step",
    "fetch",
    "forward_backward",
    "microbatch",
    "forward",
    "loss",
    "backward",
    "clip_gradients",
    "optimizer_step",
)
OUTER = ("train", "round", "epoch")
JUDGED = ("eval_all", "eval", "eval_step", "eval_forward", "test", "test_step", "predict_step")
WORDS = (
    *((word, name) for word in ("start", "end", "tell") for name in STEP * 2 + OUTER),
    *((word, name) for word in ("judge", "judged") for name in JUDGED),
    *(
        ("host", what)
        for what in ("step", "step", "epoch", "evaluate", "dataset", "evaluated", "told evaluation", "train", "train")
    ),
)


class ReadsAll(Callback):
    """Reads every field that should be available, at every event."""

    def __init__(self) -> None:
        self.read = 0

    def on_event(self, ctx: Context) -> None:
        assert ctx.event is not None
        for name in FIELDS:
            if is_available(name, ctx.event):
                getattr(ctx, name)
                self.read += 1


class Loop:
    """A run whose framework says anything at any time; `weights` are what training has made of the model."""

    def __init__(self, folder: Path, callbacks: list[Callback]) -> None:
        self.model = nn.Linear(3, 1)
        self.weights = self.model.weight.detach().clone()
        self.run = HostedRun(
            callbacks,
            model=self.model,
            optimizer=torch.optim.SGD(self.model.parameters(), lr=0.1),
            run_name="small",
            runs_folder=folder,
            log_interval="2ba",
        )

    def train(self) -> None:
        """What a loop does at the least: it enters a step and changes the weights."""
        self.run.narrator.start("forward")
        for weights in (self.weights, self.model.weight.data):
            weights += 0.125

    def say(self, word: str, name: str) -> None:
        run = self.run
        if word in ("start", "end", "tell"):
            getattr(run.narrator, word)(name)
        elif word in ("judge", "judged"):
            (run.eval_narrator.start if word == "judge" else run.eval_narrator.end)(name)
        else:
            acts: dict[str, Any] = {
                "step": run.end_step,
                "epoch": lambda: run.end_epoch(is_whole=True),
                "evaluate": lambda: run.begin_evaluation("validation"),
                "dataset": lambda: run.end_dataset("validation", {"loss": 1.0}),
                "evaluated": run.end_evaluation,
                "told evaluation": lambda: run.tell_evaluation({"validation": {"loss": 2.0}}),
                "train": self.train,
            }
            acts[name]()


@pytest.mark.parametrize("seed", range(40))
def test_events_that_a_framework_adds_leaves_out_and_reorders(seed: int, tmp_path: Path) -> None:
    drawn = random.Random(seed)
    words = drawn.choices(WORDS, k=60)
    recorder, reads = Recorder(), ReadsAll()
    loop = Loop(tmp_path, [EMA(half_life=2, at_end=False), NaNMonitor(), History(), recorder, reads])
    run = loop.run
    run.begin()
    for word, name in words:
        loop.say(word, name)
        loop.run.narrator.listen()
    run.finish()
    check_events(recorder.events)
    assert recorder.events[-1] == "on_run_end"
    assert torch.equal(loop.model.weight, loop.weights)
    assert [part.name for narrator in (run.narrator, run.eval_narrator) for part in narrator.opened] == ["run", "run"]
    assert reads.read


def test_a_field_that_the_host_has_not_provided_is_no_error_of_the_callback_s(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Reads(Callback):
        def __init__(self) -> None:
            self.after = 0

        def on_loss_end(self, ctx: Context) -> None:
            _ = ctx.loss
            self.after += 1

    class Later(Reads):
        def on_loss_end(self, ctx: Context) -> None:
            self.after += 1

    reads, later = Reads(), Later()
    loop = Loop(tmp_path, [reads, later])
    loop.run.begin()
    for _ in range(3):
        loop.train()
        loop.run.end_step()
    loop.run.finish()
    assert (reads.after, later.after) == (0, 3)
    said = [record.message for record in caplog.records if "reads ctx.loss at on_loss_end" in record.message]
    assert len(said) == 1
    assert "training goes on" in said[0]


def test_a_field_outside_its_window_is_the_callback_s_own_error(tmp_path: Path) -> None:
    class Reads(Callback):
        def on_train_step_start(self, ctx: Context) -> None:
            _ = ctx.loss

    loop = Loop(tmp_path, [Reads()])
    loop.run.begin()
    with pytest.raises(FieldNotTold, match=r"ctx\.loss is not told at on_train_step_start"):
        loop.train()
    loop.run.fail(ZeroDivisionError())


def test_an_evaluation_that_is_not_ended_is_ended_before_the_weights_are_trained(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder()
    loop = Loop(tmp_path, [EMA(half_life=1, at_end=False), recorder])
    run = loop.run
    run.begin()
    for _ in range(3):
        loop.train()
        run.end_step()
        run.begin_evaluation("validation")
        assert not torch.equal(loop.model.weight, loop.weights)  # the average
    loop.train()
    assert torch.equal(loop.model.weight, loop.weights)
    run.finish()
    check_events(recorder.events)
    assert recorder.events.count("on_eval_all_end") == 3
    assert sum("was not reported" in record.message for record in caplog.records) == 1
