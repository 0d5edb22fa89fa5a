"""Usages from Megatron Bridge's page "Callbacks", and from the reference of its module, written for callsheet: one test per usage, in the order of the page. See `usages`."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from callsheet import Callback, CallbackManager, Context, RunInfo, Trainer, normalize_callbacks, should_fire
from callsheet.callbacks import CheckpointSaver
from callsheet.errors import FieldNotAvailable
from callsheet.recipes import Pretrain, pretrain
from callsheet.testing import Recorder

from .tiny import tiny_pretrain
from .usages import DATA, train


def test_a_callback_keeps_its_start_time_in_user_state() -> None:
    lines: list[str] = []

    class MyCallback(Callback):
        def on_train_start(self, ctx: Context) -> None:
            ctx.user_state["start_time"] = time.time()
            lines.append(f"started at step {ctx.step}")

        def on_train_step_end(self, ctx: Context) -> None:
            lines.append(f"step {ctx.step}: {', '.join(ctx.loss_dict)}")

        def on_train_end(self, ctx: Context) -> None:
            assert time.time() >= ctx.user_state["start_time"]
            lines.append("completed")

    train(MyCallback(), max_duration="2ba")
    assert lines == ["started at step 0", "step 1: loss", "step 2: loss", "completed"]  # `ctx.step` is the current step, from 1


def test_a_function_is_registered_for_an_event() -> None:
    steps: list[int] = []
    manager = CallbackManager()

    def log_step(ctx: Context) -> None:
        if ctx.loss_dict:
            steps.append(ctx.step)

    manager.register("on_train_step_end", log_step)
    train(manager)
    assert steps == [1, 2, 3, 4, 5, 6]


class Named(Callback):
    """Records its name after each evaluation."""

    def __init__(self, name: str, recorded: list[str]) -> None:
        self.name, self.recorded = name, recorded

    def on_eval_end(self, ctx: Context) -> None:
        self.recorded.append(self.name)


def test_classes_lists_and_functions_are_called_in_the_order_of_registration() -> None:
    recorded: list[str] = []
    manager = CallbackManager()
    manager.add(Named("one", recorded))
    manager.register("on_eval_end", lambda ctx: recorded.append("function"))
    manager.add([Named("two", recorded), Named("three", recorded)])
    manager.register("on_eval_end", lambda ctx: recorded.append("last"))
    train(manager, max_duration="1ep")
    assert recorded == ["one", "function", "two", "three", "last"]


ALWAYS = {"state", "model", "user_state"}
TRAINING = ALWAYS | {"optimizer", "scheduler"}
LISTED = {
    "on_train_start": TRAINING,
    "on_train_step_start": TRAINING,
    "on_train_step_end": TRAINING | {"loss_dict", "grad_norm", "step_skipped"},
    "on_train_end": TRAINING,
    "on_eval_start": ALWAYS,
    "on_eval_step_start": ALWAYS,
    "on_eval_step_end": ALWAYS,
    "on_eval_end": ALWAYS | {"eval_losses"},
    "on_test_start": ALWAYS,
    "on_test_step_start": ALWAYS,
    "on_test_step_end": ALWAYS,
    "on_test_end": ALWAYS | {"eval_losses"},
}
"""The events that the page lists, with the fields that it lists for them (`skipped_iter` is called `step_skipped`, and `total_loss_dict` is called `eval_losses`)."""


@pytest.fixture(scope="module")
def listed() -> dict[str, set[str]]:
    """Return the fields that could be read at each event when it was first fired."""
    read: dict[str, Any] = {}
    manager = CallbackManager()
    names = {name for fields in LISTED.values() for name in fields}
    for event in LISTED:
        manager.register(event, lambda ctx, event=event: read.setdefault(event, {name for name in names if ctx.has(name)}))
    torch.manual_seed(0)
    with Trainer(
        nn.Linear(2, 1),
        nn.functional.mse_loss,
        DATA,
        DATA,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        clip_grad_norm=1.0,
        callbacks=manager,
        device="cpu",
    ) as trainer:
        trainer.fit()
        trainer.test(DATA)
    return read


@pytest.mark.parametrize("event", LISTED)
def test_an_event_provides_the_listed_fields(event: str, listed: Mapping[str, set[str]]) -> None:
    assert listed[event] >= LISTED[event]


@pytest.mark.parametrize("event", sorted(set(LISTED) - {"on_train_step_end"}))
def test_a_step_s_fields_are_available_only_at_its_end(event: str, listed: Mapping[str, set[str]]) -> None:
    assert not listed[event] & {"loss_dict", "grad_norm", "step_skipped"}


def test_reading_a_field_outside_its_window_is_an_error() -> None:
    manager = CallbackManager()
    manager.register("on_train_start", lambda ctx: ctx.loss_dict)
    with pytest.raises(FieldNotAvailable, match="on_train_step_end"):  # Megatron Bridge returns None
        train(manager)


def test_the_gradient_norm_is_none_unless_gradients_are_clipped() -> None:
    norms: dict[float | None, Any] = {}
    for clip in (None, 1.0):
        manager = CallbackManager()
        manager.register("on_train_step_end", lambda ctx, clip=clip: norms.update({clip: ctx.grad_norm}))
        train(manager, clip_grad_norm=clip)
    assert norms[None] is None
    assert norms[1.0].item() > 0


def test_the_model_is_in_evaluation_mode_only_during_evaluations() -> None:
    modes: dict[str, bool] = {}
    manager = CallbackManager()
    for event in ("on_train_start", "on_eval_start", "on_eval_end", "on_train_end"):
        manager.register(event, lambda ctx, event=event: modes.update({event: ctx.model.training}))
    train(manager)
    assert modes == {"on_train_start": True, "on_eval_start": False, "on_eval_end": False, "on_train_end": True}


def test_user_state_is_shared_by_the_callbacks_and_the_manager() -> None:
    class StepCounter(Callback):
        def on_train_start(self, ctx: Context) -> None:
            ctx.user_state["callback_step_count"] = 0

        def on_train_step_end(self, ctx: Context) -> None:
            ctx.user_state["callback_step_count"] += 1

    seen: list[int] = []
    manager = CallbackManager([StepCounter()])
    manager.register("on_train_end", lambda ctx: seen.append(ctx.user_state["callback_step_count"]))
    train(manager)
    assert seen == [6]
    assert manager.user_state["callback_step_count"] == 6


def test_user_state_is_restored_from_a_checkpoint(tmp_path: Path) -> None:  # Megatron Bridge loses it
    class RecordsStart(Callback):
        def on_train_start(self, ctx: Context) -> None:
            ctx.user_state.setdefault("began_at", ctx.step)

    train([RecordsStart(), CheckpointSaver()], runs_folder=tmp_path, run_name="run", max_duration="1ep")
    manager = CallbackManager([RecordsStart(), CheckpointSaver()])
    train(manager, runs_folder=tmp_path, run_name="run", resume="auto")
    assert manager.user_state["began_at"] == 0


def test_an_exception_in_a_callback_is_raised_and_stops_training() -> None:
    steps: list[int] = []
    manager = CallbackManager()
    manager.register("on_train_step_end", lambda ctx: steps.append(ctx.step))
    manager.register("on_train_step_end", lambda ctx: ctx.loss_dict["missing"] if ctx.step == 2 else None)
    with pytest.raises(KeyError, match="missing") as caught:
        train(manager)
    assert steps == [1, 2]
    assert "on_train_step_end" in "".join(caught.value.__notes__)  # a note names the handler and the event


def test_training_continues_if_a_callback_catches_its_own_exception() -> None:
    failures: list[str] = []

    def safe_callback(ctx: Context) -> None:
        try:
            raise ConnectionError("the service is down")
        except Exception as error:
            failures.append(str(error))

    manager = CallbackManager()
    manager.register("on_train_step_end", safe_callback)
    assert train(manager).state.timestamp.batch == 6
    assert len(failures) == 6


def test_training_continues_after_an_isolated_failure_of_a_callback() -> None:
    manager = CallbackManager()
    manager.register("on_eval_end", lambda ctx: 1 / 0, on_error="isolate")
    assert train(manager).run.outcome == "finished"


def test_a_manager_lists_its_events_and_callbacks() -> None:
    manager = CallbackManager()
    assert not manager.has_callbacks("on_train_start")

    def my_fn(ctx: Context) -> None: ...

    manager.register("on_train_start", my_fn)
    assert manager.has_callbacks("on_train_start")
    assert manager.list_callbacks("on_train_start") == [my_fn]
    manager.list_callbacks("on_train_start").clear()  # a copy
    assert manager.list_callbacks("on_train_start") == [my_fn]
    assert isinstance(manager.events, frozenset)
    assert set(LISTED) <= manager.events


def test_a_callback_listens_only_to_the_events_that_it_overrides() -> None:
    manager = CallbackManager([Named("one", [])])
    assert [event for event in manager.events if manager.has_callbacks(event)] == ["on_eval_end"]


@pytest.mark.parametrize("method", ["register", "list_callbacks", "has_callbacks", "fire"])
def test_an_unknown_event_is_a_value_error(method: str) -> None:
    manager = CallbackManager()
    arguments = {"register": (print,), "fire": (Context(RunInfo("none")),)}.get(method, ())
    # In Megatron Bridge, `has_callbacks` returns False, and `fire` raises KeyError.
    with pytest.raises(ValueError, match="did you mean 'on_train_step_end'"):
        getattr(manager, method)("on_train_step_ended", *arguments)


def test_normalize_callbacks_returns_none_or_a_manager() -> None:
    manager = CallbackManager()
    assert normalize_callbacks(None) is None
    assert normalize_callbacks(manager) is manager
    made = normalize_callbacks([one := Recorder()])
    assert isinstance(made, CallbackManager)
    assert made.callbacks == [one]


def test_should_fire_is_true_only_with_a_manager_and_a_listener() -> None:
    manager = CallbackManager()
    assert not should_fire(None, "on_train_start")
    assert not should_fire(manager, "on_train_start")
    manager.register("on_train_start", print)
    assert should_fire(manager, "on_train_start")


def test_a_run_without_callbacks_registers_none_of_its_own() -> None:
    trainer = train()
    assert trainer.callbacks.callbacks == []
    assert not any(trainer.callbacks.has_callbacks(event) for event in trainer.callbacks.events)


def test_pretrain_accepts_a_forward_step_and_a_manager(tmp_path: Path) -> None:
    shapes: list[torch.Size] = []

    def forward_step(model: nn.Module, batch: Mapping[str, Tensor]) -> Any:
        outputs = model(**batch)
        shapes.append(batch["input_ids"].shape)
        return outputs, lambda outputs: (outputs.loss, {"lm loss": outputs.loss.detach()})

    losses: list[list[str]] = []
    manager = CallbackManager()
    manager.register("on_train_step_end", lambda ctx: losses.append(sorted(ctx.loss_dict)))
    recipe = pretrain(tiny_pretrain(tmp_path), forward_step, callbacks=manager)
    assert losses == [["lm loss", "loss"]] * 4
    assert shapes[0] == (4, 16)
    assert recipe.results["test/loss"] > 0


def test_the_run_has_the_configuration_of_the_recipe(pretrained: tuple[Pretrain, Recorder]) -> None:
    recipe, _ = pretrained
    assert recipe.trainer.run.config["model"]["hidden_size"] == 16


def test_pretrain_validates_during_training_and_tests_after_it(pretrained: tuple[Pretrain, Recorder]) -> None:
    _, recorder = pretrained
    events = [event for event in recorder.events if event in LISTED and "step" not in event]
    evaluation, test = ["on_eval_start", "on_eval_end"], ["on_test_start", "on_test_end"]
    assert events == ["on_train_start", *evaluation, *evaluation, "on_train_end", *test]


def test_a_callback_can_send_metrics_with_a_cluster_id_to_an_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLUSTER_ID", "blue")

    class Client:
        def __init__(self, endpoint: str) -> None:
            self.endpoint, self.sent = endpoint, list[dict[str, Any]]()

    class ProprietaryMetrics(Callback):
        def __init__(self, endpoint: str) -> None:
            self.client = Client(endpoint)

        def on_train_step_end(self, ctx: Context) -> None:
            facts = {"step": ctx.step, "loss": ctx.loss_dict["loss"], "grad_norm": ctx.grad_norm}
            self.client.sent.append({**facts, "cluster_id": os.environ.get("CLUSTER_ID")})

    train(metrics := ProprietaryMetrics("metrics.example.org"), clip_grad_norm=1.0, max_duration="2ba")
    assert [(sent["step"], sent["cluster_id"]) for sent in metrics.client.sent] == [(1, "blue"), (2, "blue")]
