"""Usages from InstructLab Training's page on class-based callbacks, and from the reviews of them, written for callsheet: one test per usage, in the order of the page. See `usages`."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from callsheet import Background, Callback, CallbackManager, CallbackSpec, Context
from callsheet.callbacks import CheckpointSaver, LRMonitor
from callsheet.errors import NotACallbackError, RunEndedError
from callsheet.testing import Recorder

from .usages import Threshold, train


def test_each_hook_of_instructlab_has_an_event_in_the_same_order(tmp_path: Path) -> None:
    hooks = {
        "on_train_begin": "on_train_start",
        "on_epoch_begin": "on_epoch_start",
        "on_step_begin": "on_train_step_start",
        "on_before_forward": "on_forward_start",
        "on_after_backward": "on_backward_end",
        "on_pre_optimizer_step": "on_clip_gradients_start",
        "on_optimizer_step": "on_optimizer_step_end",
        "on_log": "on_log",
        "on_evaluate": "on_eval_all_end",
        "on_save": "on_checkpoint_published",
        "on_step_end": "on_train_step_end",
        "on_epoch_end": "on_epoch_end",
        "on_train_end": "on_train_end",
    }
    saver = CheckpointSaver(save_interval="3ba")
    train([recorder := Recorder(), saver], max_duration="1ep", eval_interval="3ba", runs_folder=tmp_path, run_name="run")
    order = list(hooks.values())
    # callsheet fires `on_train_step_end` before the events of the step's boundary, and InstructLab fires its `on_step_end` after them.
    order.remove("on_train_step_end")
    order.insert(order.index("on_log"), "on_train_step_end")
    first = [event for event in dict.fromkeys(recorder.events) if event in order]
    assert first == order


def test_a_failing_callback_in_the_background_does_not_stop_training(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Callback):
        def on_train_step_end(self, ctx: Context) -> None:
            raise RuntimeError("of the callback alone")

    trainer = train(Background(Failing()))
    assert trainer.run.outcome == "finished"
    assert trainer.run.failures[0].callback == "Failing"
    assert "of the callback alone" in caplog.text


def test_training_does_not_wait_for_a_callback_in_the_background() -> None:
    training_ended = threading.Event()
    order: list[str] = []

    class Slow(Callback):
        lane = "background"

        def on_train_start(self, ctx: Context) -> None:
            training_ended.wait(60)
            order.append("slow")

    manager = CallbackManager([Slow()])
    manager.register("on_train_end", lambda ctx: order.append("trained"))
    manager.register("on_train_end", lambda ctx: training_ended.set())
    train(manager)
    assert order == ["trained", "slow"]


def test_a_lane_delivers_every_event_in_order_before_the_run_ends() -> None:  # InstructLab delivers at most 1 of 50
    class Recorded(Callback):
        lane = "background"

        def __init__(self) -> None:
            self.recorded: list[tuple[str, int]] = []

        async def on_train_step_start(self, ctx: Context) -> None:
            self.recorded.append(("start", ctx.step))

        async def on_train_step_end(self, ctx: Context) -> None:
            self.recorded.append(("end", ctx.step))

        def on_train_end(self, ctx: Context) -> None:
            time.sleep(0.2)  # the end of the run waits for this
            self.recorded.append(("over", ctx.step))

    train(callback := Recorded(), max_duration="25ba", eval_dataloader=None)
    steps = [
        (what, step) for step in range(1, 26) for what in ("start", "end")
    ]  # the step has the same number at its start and end
    assert callback.recorded == [*steps, ("over", 25)]


def test_a_callback_in_a_lane_receives_copies_of_fields() -> None:
    class ModifiesSnapshot(Callback):
        lane = "background"
        snapshot_fields = ("user_state", "eval_results")
        calls = 0

        def on_eval_all_end(self, ctx: Context) -> None:
            ctx.user_state["nested"].append("changed")
            ctx.eval_results["validation"]["loss"] = -1.0
            self.calls += 1

    manager = CallbackManager([callback := ModifiesSnapshot()])
    manager.user_state["nested"] = []
    trainer = train(manager)
    assert callback.calls == 2
    assert manager.user_state["nested"] == []
    assert trainer.eval_results["validation"]["loss"] > 0


def test_callbacks_are_added_and_removed_by_instance_and_by_class() -> None:
    manager = CallbackManager([one := Recorder(), Recorder(), LRMonitor()])
    assert manager.remove(one) == 1
    assert manager.remove(Recorder) == 1
    assert [type(callback) for callback in manager.callbacks] == [LRMonitor]


@pytest.mark.parametrize("thing", ["a string", 42, object(), Recorder])
def test_adding_an_object_that_is_not_a_callback_is_a_type_error(thing: Any) -> None:
    with pytest.raises(NotACallbackError) as caught:
        CallbackManager().add(thing)
    assert isinstance(caught.value, TypeError)


def test_a_closed_run_can_be_closed_again_and_fires_no_events() -> None:
    trainer = train(recorder := Recorder())
    before = list(recorder.events)
    trainer.close()
    trainer.close()
    with pytest.raises(RunEndedError):  # InstructLab's `fire` does nothing
        trainer.fit()
    assert recorder.events == before


def test_a_callback_is_restored_from_json_with_arguments_and_state() -> None:  # InstructLab accepts only objects
    original = Threshold(0.5, words=["a"])
    original.seen = 3
    again = CallbackSpec.from_dict(json.loads(json.dumps(CallbackSpec.of(original).to_dict()))).build()
    assert isinstance(again, Threshold)
    assert (again.threshold, again.words, again.seen) == (0.5, ["a"], 3)


def test_a_record_has_loss_learning_rate_and_sample_count() -> None:
    records: list[dict[str, float]] = []
    manager = CallbackManager()
    manager.register("on_log", lambda ctx: records.append(dict(ctx.record.values)))
    train(manager, max_duration="1ba", eval_dataloader=None)
    assert records[0]["train/learning_rate"] == 0.01
    assert records[0]["train/loss"] > 0
    assert records[0]["time/sample"] == 4  # the total of the run
