"""The fake loop fires the events of a real one, and carries out requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from callsheet import Callback, Context, NonFiniteError
from callsheet.callbacks import (
    EMA,
    CheckpointSaver,
    EarlyStopper,
    History,
    LossSpikeDetector,
    NaNMonitor,
    OptimizerMonitor,
    ThresholdStopper,
)
from callsheet.core.lifecycle import EVENTS
from callsheet.errors import ConfigError
from callsheet.testing import FakeLoop, Recorder, check_events

NEVER = {"on_exception", "on_preempt", "on_checkpoint_published", "on_checkpoint_save_start", "on_checkpoint_save_end"}


class RequestsAtStep(Callback):
    """Makes a request at a step."""

    def __init__(self, what: str, step: int) -> None:
        self.what, self.step = what, step

    def on_train_step_end(self, ctx: Context) -> None:
        if ctx.step == self.step:
            getattr(ctx.control, self.what)("asked", replicated=True)


def test_the_fake_loop_fires_every_event(tmp_path: Path) -> None:
    recorder = Recorder()
    validation = {"one": [3.0], "other": [2.0]}
    loop = FakeLoop(recorder, [1.0] * 6, steps_per_epoch=3, validation=validation, test_loss=1.0, predictions=2, folder=tmp_path)
    assert loop.run().outcome == "finished"
    check_events(recorder.events)
    assert set(recorder.events) == set(EVENTS) - NEVER
    assert recorder.events.count("on_eval_end") == 4
    assert recorder.events.count("on_predict_step_end") == 2


@settings(max_examples=30, deadline=None)
@given(
    losses=st.lists(st.floats(0.1, 9.0), min_size=1, max_size=9),
    steps_per_epoch=st.integers(1, 10),
    microbatches=st.integers(1, 3),
    eval_every=st.none() | st.integers(1, 5),
    requested=st.sampled_from(["stop", "save", "evaluate"]),
    at=st.integers(1, 9),
)
def test_the_events_of_any_fake_loop_follow_the_grammar(
    losses: list[float], steps_per_epoch: int, microbatches: int, eval_every: int | None, requested: str, at: int
) -> None:
    recorder = Recorder()
    loop = FakeLoop(
        [recorder, RequestsAtStep(requested, at)],
        losses,
        steps_per_epoch=steps_per_epoch,
        microbatches=microbatches,
        eval_every=eval_every,
        validation={"validation": [1.0]},
    ).run()
    check_events(recorder.events)
    assert loop.steps == (min(at, len(losses)) if requested == "stop" else len(losses))
    assert loop.outcome == ("stopped" if requested == "stop" and at <= len(losses) else "finished")
    assert list(loop.saved) == ([at] if requested == "save" and at <= len(losses) else [])


def test_the_losses_and_gradients_are_the_given_ones(tmp_path: Path) -> None:
    history, losses = History(), [4.0, 3.0, 2.5, 2.0]
    FakeLoop(
        [history, OptimizerMonitor(batch_log_interval=1)],
        losses,
        steps_per_epoch=2,
        microbatches=2,
        validation={"validation": [5.0, 4.0]},
        test_loss=3.5,
        folder=tmp_path,
    ).run()
    assert history["train/loss"] == losses
    assert history["validation/loss"] == [5.0, 4.0]
    assert history["test/loss"] == [3.5]
    assert history["l2_norm/grad/global"] == pytest.approx([loss * 3**0.5 for loss in losses])  # two weights and a bias


def test_each_step_subtracts_the_gradients_from_the_parameters(tmp_path: Path) -> None:
    loop = FakeLoop([], [1.0, 2.0], folder=tmp_path).run()
    assert torch.allclose(next(loop.model.parameters()), torch.full((1, 2), -0.3))


def test_callbacks_that_stop_a_run_work_in_the_fake_loop(tmp_path: Path) -> None:
    losses = [1.0] * 12
    validation = {"validation": [2.0, 1.0, 3.0, 4.0, 5.0, 6.0]}
    stopper = EarlyStopper(monitor="validation/loss", patience="2ep")
    stopped = FakeLoop(stopper, losses, steps_per_epoch=2, validation=validation, folder=tmp_path).run()
    assert (stopped.outcome, stopped.steps) == ("stopped", 8)
    assert "validation/loss" in stopped.stopped_because
    below = FakeLoop(ThresholdStopper(monitor="train/loss", threshold=0.5), [2.0, 1.0, 0.4, 0.3, 0.2], folder=tmp_path).run()
    assert below.steps < 5
    with pytest.raises(NonFiniteError):
        FakeLoop(NaNMonitor(), [1.0, float("nan"), 1.0, 1.0], folder=tmp_path).run()


def test_a_resumed_loop_continues(tmp_path: Path) -> None:
    losses = [9.0, 8.0, 7.0, 6.0, 5.0, 4.0]

    def made(**options: Any) -> tuple[FakeLoop, History, EMA]:
        history, average = History(), EMA(half_life=2)
        callbacks = [history, average, LossSpikeDetector(window=4), CheckpointSaver(save_interval="2ba")]
        return FakeLoop(callbacks, losses, steps_per_epoch=3, folder=tmp_path, **options), history, average

    whole, history, average = made()
    whole.run()
    assert list(whole.saved)[:2] == [2, 4]
    again, later, other = made(resume=whole.saved[4])
    assert again.run().steps == 6
    assert later["train/loss"] == history["train/loss"]
    assert torch.equal(next(again.model.parameters()), next(whole.model.parameters()))
    for name, tensor in average.state_dict()["average"].items():
        assert torch.equal(tensor, other.state_dict()["average"][name])


def test_a_failure_is_reported_and_raised(tmp_path: Path) -> None:
    recorder, error = Recorder(), RuntimeError("the model broke")
    loop = FakeLoop(recorder, [1.0, 1.0], raises={2: error}, folder=tmp_path)
    with pytest.raises(RuntimeError, match="the model broke"):
        loop.run()
    check_events(recorder.events)
    assert recorder.events[-2:] == ["on_exception", "on_run_end"]
    assert loop.outcome == "failed"


def test_missing_losses_are_rejected() -> None:
    with pytest.raises(ConfigError, match="losses="):
        FakeLoop([], [])
    with pytest.raises(ConfigError, match="'one'"):
        FakeLoop([], [1.0], validation={"one": []})
