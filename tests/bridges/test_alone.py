"""Hosts skip events without listeners. A callback that listens to one event must still read the same fields as otherwise."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from callsheet import Callback, Context
from callsheet.bridges.backward_watch import BackwardWatch
from callsheet.bridges.hosted_run import HostedRun
from callsheet.core.lifecycle import ALWAYS_AVAILABLE, FIELDS

from .cells import loop_of
from .loops.job import POINTS
from .test_matrix import LOOPS

EVENTS = (
    *("on_fetch_end", "on_train_step_start", "on_forward_start", "on_forward_end", "on_backward_end", "on_forward_backward_end"),
    *(
        "on_clip_gradients_start",
        "on_clip_gradients_end",
        "on_optimizer_step_start",
        "on_optimizer_step_end",
        "on_train_step_end",
    ),
    *("on_log", "on_eval_step_start", "on_eval_forward_end", "on_eval_step_end"),
)

Read = dict[str, list[dict[str, Any]]]
"""For each event, one entry per time it was fired: the available fields, with the values of numbers."""


def recording_callback(read: Read, *names: str) -> Callback:
    """Return a callback that listens to the events `names` and records the available fields in `read`."""

    def recorded(self: Callback, ctx: Context) -> None:
        fields = {name: getattr(ctx, name) for name in FIELDS if name not in ALWAYS_AVAILABLE and ctx.has(name)}
        recorded_values = {
            name: _number(value) for name, value in fields.items() if name not in ("optimizer", "scheduler", "outputs")
        }
        read.setdefault(str(ctx.event), []).append(
            recorded_values | {name: name for name in fields if name not in recorded_values}
        )

    made: Callback = type("RecordsFields", (Callback,), dict.fromkeys(names, recorded))()
    return made


def _number(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return round(float(value), 5)
    return value if isinstance(value, (int, float, bool)) else type(value).__name__


def fields_read_while_training(where: str, folder: Path, *names: str) -> Read:
    read: Read = {}
    loop_of(where).train(POINTS, folder, [recording_callback(read, *names)], strict=False)
    return read


@pytest.mark.parametrize("where", LOOPS)
def test_a_callback_with_one_event_reads_the_same_fields_as_with_other_listeners(where: str, tmp_path: Path) -> None:
    try:
        whole = fields_read_while_training(where, tmp_path / "whole", *EVENTS)
    except ModuleNotFoundError as missing:
        pytest.skip(f"{missing.name} is not installed here")
    assert "on_train_step_end" in whole
    for event in EVENTS:
        assert fields_read_while_training(where, tmp_path / event, event).get(event) == whole.get(event), event


@pytest.mark.parametrize("where", ["bare", "ignite"])
def test_kept_outputs_are_available_without_listeners_to_the_forward(where: str, tmp_path: Path) -> None:
    class KeepsOutputs(Callback):
        keep_fields = ("outputs",)

        def on_train_step_end(self, ctx: Context) -> None:
            seen.append(ctx.outputs.shape)

    seen: list[torch.Size] = []
    loop_of(where).train(POINTS, tmp_path, [KeepsOutputs()])
    assert seen == [torch.Size([4, 1])] * 12


@pytest.mark.parametrize("where", ["automodel", "huggingface"])
def test_a_handler_unmuted_within_an_evaluation_receives_the_outputs(where: str, tmp_path: Path) -> None:
    class HandlesSecondBatch(Callback):
        """Handles the forward of the second batch of each evaluation, and is muted for the others."""

        def __init__(self) -> None:
            self.batches, self.read = 0, list[bool]()

        def on_train_start(self, ctx: Context) -> None:
            ctx.mute(self, "on_eval_forward_end")

        def on_eval_start(self, ctx: Context) -> None:
            self.batches = 0

        def on_eval_step_start(self, ctx: Context) -> None:
            self.batches += 1
            (ctx.unmute if self.batches == 2 else ctx.mute)(self, "on_eval_forward_end")

        def on_eval_forward_end(self, ctx: Context) -> None:
            self.read.append(ctx.has("outputs"))

    loop_of(where).train(POINTS, tmp_path, [second := HandlesSecondBatch()], strict=False)
    assert second.read == [True, True]  # one evaluation in each of two epochs


class Saves(Callback):
    """Requests a checkpoint at the end of each epoch, and records the loss in its metadata."""

    def __init__(self) -> None:
        self.recorded_losses: list[float | None] = []

    def on_epoch_end(self, ctx: Context) -> None:
        ctx.control.save("to see its loss")

    def on_checkpoint_published(self, ctx: Context) -> None:
        assert ctx.checkpoint is not None
        self.recorded_losses.append(ctx.checkpoint.train_loss)


class ReadsLosses(Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_step_end(self, ctx: Context) -> None:
        self.losses.append(ctx.loss.item())


@pytest.mark.parametrize("where", ["bare", "composer", "huggingface", "ignite", "keras", "lightning", "torchtnt"])
def test_a_checkpoint_names_the_last_step_s_loss_without_listeners_to_the_steps(where: str, tmp_path: Path) -> None:
    try:
        with_listener, without_listener, reads_losses = Saves(), Saves(), ReadsLosses()
        loop_of(where).train(POINTS, tmp_path / "with_listener", [with_listener, reads_losses])
        loop_of(where).train(POINTS, tmp_path / "alone", [without_listener])
    except ModuleNotFoundError as missing:
        pytest.skip(f"{missing.name} is not installed here")
    assert (
        without_listener.recorded_losses
        == with_listener.recorded_losses
        == pytest.approx([reads_losses.losses[5], reads_losses.losses[11]])
    )


@pytest.mark.parametrize("where", ["accelerate", "automodel", "bare", "huggingface", "ignite", "keras", "lightning", "torchtnt"])
def test_backward_is_torch_s_own_if_the_loss_is_not_read(where: str, tmp_path: Path) -> None:
    def backwards(*callbacks: Callback) -> set[bool]:
        own, found, kind = torch.Tensor.backward, list[bool](), cast(Any, POINTS.model)

        def forward(self: Any, inputs: torch.Tensor) -> Any:
            if self.training:
                found.append(torch.Tensor.backward is own)
            return kind.forward(self, inputs)

        loop_of(where).train(replace(POINTS, model=type("ChecksBackward", (kind,), {"forward": forward})), tmp_path, callbacks)
        assert torch.Tensor.backward is own
        return set(found)

    class ListensToBackward(Callback):
        def on_backward_end(self, ctx: Context) -> None: ...

    assert backwards() == {True}
    assert backwards(ListensToBackward()) == {False}


@pytest.mark.parametrize("at", ["while our replacement is in place", "after our replacement was removed"])
def test_a_replacement_of_backward_by_other_code_is_kept(at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other code also replaces `Tensor.backward`, in the first epoch. Only the second epoch's steps have listeners."""

    class HandlesSecondEpoch(Callback):
        def on_epoch_start(self, ctx: Context) -> None:
            if ctx.epoch == 1:
                ctx.mute(self, "on_train_step_end")
                if at == "while our replacement is in place":
                    replace_backward()
            else:
                ctx.unmute(self, "on_train_step_end")

        def on_train_step_end(self, ctx: Context) -> None:
            losses.append(ctx.loss.item())

    def replace_backward() -> None:
        before = cast(Any, torch.Tensor.backward)

        def counted(loss: torch.Tensor, *args: Any, **options: Any) -> None:
            calls.append(None)
            before(loss, *args, **options)

        monkeypatch.setattr(torch.Tensor, "backward", counted)

    def forward(self: Any, inputs: torch.Tensor) -> Any:
        if self.training:
            forwards.append(None)
            if len(forwards) == 3 and at == "after our replacement was removed":
                replace_backward()
        return kind.forward(self, inputs)

    calls, losses, forwards, kind = list[None](), list[float](), list[None](), cast(Any, POINTS.model)
    monkeypatch.setattr(torch.Tensor, "backward", torch.Tensor.backward)  # the original, which is restored at the end
    loop_of("ignite").train(
        replace(POINTS, model=type("Replaces", (kind,), {"forward": forward})), tmp_path, [HandlesSecondEpoch()]
    )
    assert (len(calls), len(losses)) == (12 if at == "while our replacement is in place" else 10, 6)
    assert torch.Tensor.backward.__qualname__.endswith("counted")


def test_a_run_nested_in_a_step_of_a_run_without_listeners_records_its_own_losses(tmp_path: Path) -> None:
    def watched(name: str) -> BackwardWatch:
        model = nn.Linear(1, 1)
        run = HostedRun([Callback()], model=model, run_name=name, runs_folder=tmp_path)
        return BackwardWatch(run.driver, run.ctx)

    own = torch.Tensor.backward
    outer, inner = watched("outer"), watched("inner")
    for watch in (outer, inner):
        watch._backward.has_no_listeners = watch.is_on = True
    outer.listen(False)
    outer.listen(True)
    nn.Linear(1, 1)(torch.ones(1)).sum().backward()
    assert (outer.total, inner.total is None) == (None, False)
    for watch in (outer, inner):
        watch.remove()
    assert torch.Tensor.backward is own
