"""Usages from NeMo AutoModel's page "Custom Callbacks", written for callsheet: one test per usage, in the order of the page. See `usages`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import callsheet.callbacks
from callsheet import (
    Callback,
    CallbackManager,
    Context,
)
from callsheet.callbacks import CheckpointSaver
from callsheet.recipes import Pretrain
from callsheet.testing import Recorder

from .usages import DATA, train


def test_a_metrics_reporter_receives_steps_validations_and_checkpoints(tmp_path: Path) -> None:
    lines: list[str] = []

    class MetricsReporter(Callback):
        def on_log(self, ctx: Context) -> None:
            if "train/loss" in ctx.record.values:
                lines.append(f"Step {ctx.record.step}: Loss = {ctx.record.values['train/loss']:.4f}")

        def on_eval_all_end(self, ctx: Context) -> None:
            for name, result in ctx.eval_results.items():
                lines.append(f"Validation '{name}': Loss = {result['loss']:.4f}")

        def on_checkpoint_published(self, ctx: Context) -> None:
            assert ctx.checkpoint is not None
            assert Path(ctx.checkpoint.path, "manifest.json").exists()  # it exists when the event is fired
            lines.append(f"Checkpoint saved: {Path(ctx.checkpoint.path).name}")

    train([MetricsReporter(), CheckpointSaver()], runs_folder=tmp_path, run_name="run")
    kinds = [line.split(":")[0].partition(" = ")[0] for line in lines]
    epochs = [["Step 1", "Step 2", "Step 3"], ["Step 4", "Step 5", "Step 6"]]
    assert kinds == [
        *epochs[0],
        "Validation 'validation'",
        "Checkpoint saved",
        *epochs[1],
        "Validation 'validation'",
        "Checkpoint saved",
    ]


def test_callbacks_are_passed_to_the_constructor_of_a_recipe(pretrained: tuple[Pretrain, Recorder]) -> None:
    recipe, recorder = pretrained
    assert recorder.events.count("on_train_step_end") == 4
    assert set(recipe.results) == {"validation/loss", "test/loss", "unigram", "bigram"}


def test_validation_results_can_be_serialized_as_json() -> None:
    posted: list[str] = []
    train(callsheet.callbacks.Lambda(on_eval_all_end=lambda ctx: posted.append(json.dumps(ctx.eval_results))))
    assert [sorted(json.loads(body)["validation"]) for body in posted] == [["loss"], ["loss"]]


def test_the_record_of_a_step_has_step_epoch_metrics_and_time() -> None:
    class Reader(Callback):
        def __init__(self) -> None:
            self.seen: list[tuple[Any, ...]] = []

        def on_log(self, ctx: Context) -> None:
            if "train/loss" in ctx.record.values:
                self.seen.append((ctx.record.step, ctx.epoch, sorted(ctx.record.values), ctx.record.elapsed_seconds > 0))

    train(reader := Reader(), clip_grad_norm=1.0)
    assert [(step, epoch) for step, epoch, *_ in reader.seen] == [(1, 1), (2, 1), (3, 1), (4, 2), (5, 2), (6, 2)]
    for *_, names, has_time in reader.seen:
        assert {"train/loss", "train/grad_norm", "train/learning_rate"} <= set(names)
        assert has_time


def test_results_of_several_validation_sets_are_available_by_name() -> None:
    found: list[dict[str, dict[str, float]]] = []
    names: list[str] = []
    manager = CallbackManager()
    manager.register("on_eval_all_end", lambda ctx: found.append(ctx.eval_results))
    manager.register("on_eval_end", lambda ctx: names.append(ctx.eval_name))
    train(manager, eval_dataloader={"squad": DATA[:1], "hellaswag": DATA[1:]}, max_duration="1ep")
    assert names == ["squad", "hellaswag"]
    assert list(found[0]) == ["squad", "hellaswag"]
    assert found[0]["squad"]["loss"] != found[0]["hellaswag"]["loss"]


def test_checkpoint_information_is_complete(tmp_path: Path) -> None:
    infos = []
    manager = CallbackManager([CheckpointSaver(monitor="squad/loss")])
    manager.register("on_checkpoint_published", lambda ctx: infos.append(ctx.checkpoint))
    sets = {"squad": DATA[:1], "hellaswag": DATA[1:]}
    trainer = train(manager, eval_dataloader=sets, runs_folder=tmp_path, run_name="run", max_duration="1ep")
    (info,) = infos
    assert (info.epoch, info.step, info.best_metric_key) == (1, 3, "squad/loss")
    assert info.train_loss is not None
    assert info.val_losses == {name: trainer.eval_results[name]["loss"] for name in sets}  # the results of all validation sets
    assert Path(info.path).parent == tmp_path / "run" / "checkpoints"
    assert info.size_bytes > 0


def test_custom_metrics_are_in_the_record() -> None:
    recorded: list[tuple[int, float]] = []

    class Domain(Callback):
        def on_train_step_end(self, ctx: Context) -> None:
            ctx.log({"domain/answer": 2.0 * ctx.step}, over="mean", across="same")

    manager = CallbackManager([Domain()])
    manager.register("on_log", lambda ctx: recorded.append((ctx.record.step, ctx.record.values["domain/answer"])))
    train(manager, log_interval="3ba", eval_dataloader=None)
    assert recorded == [(3, 4.0), (6, 10.0)]


def test_no_checkpoint_is_reported_if_none_was_saved() -> None:
    train(recorder := Recorder())
    assert "on_checkpoint_published" not in recorder.events


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()])
def test_on_exception_is_fired_without_calling_a_runner(error: BaseException) -> None:
    recorded: list[tuple[Any, str, int]] = []

    def fail(ctx: Context) -> None:
        if ctx.step == 2:
            raise error

    manager = CallbackManager()
    manager.register("on_backward_end", fail)
    manager.register("on_exception", lambda ctx: recorded.append((ctx.exception, ctx.span, ctx.step)))
    with pytest.raises(type(error)) as caught:
        train(manager)
    assert caught.value is error
    assert recorded == [(error, "backward", 2)]


def test_train_end_is_fired_only_if_training_succeeded() -> None:
    train(recorder := Recorder())
    assert "on_train_end" in recorder.events
    manager = CallbackManager([failed := Recorder()])
    manager.register("on_train_step_end", lambda ctx: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(manager)
    assert "on_train_end" not in failed.events
    assert failed.events[-2:] == ["on_exception", "on_run_end"]  # `on_run_end` is fired however the run ends
