"""Errors that the trainer raises say what to try, and no process group is left behind."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.nn.functional import mse_loss

from callsheet import Callback, Context, Trainer
from callsheet.errors import ConfigError
from callsheet.run.failures import is_of_collective, is_out_of_memory
from callsheet.testing import Recorder
from callsheet.testing.ranks import run_ranks

DATA = [(torch.ones(4, 1), torch.ones(4, 1))] * 4

ALLOCATOR = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes."
)


class Fails(nn.Module):
    """Raises in its forward."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)
        self.error = error

    def gradient_checkpointing_enable(self, **_: Any) -> None: ...

    def forward(self, inputs: Tensor) -> Tensor:
        raise self.error


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


# --- out of memory ---


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError(ALLOCATOR),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        MemoryError(),
    ],
)
def test_out_of_memory_errors_list_memory_use_and_remedies(error: Exception) -> None:
    with pytest.raises(type(error)) as raised, Trainer(Fails(error), mse_loss, DATA, optimizer=sgd) as trainer:
        trainer.fit()
    assert raised.value is error
    (note,) = error.__notes__
    assert note.startswith("out of memory; this process holds ")
    assert "GiB, and " in note
    assert note.endswith("try a microbatch_size, precision='bf16', gradient_checkpointing=True, parallel='fsdp' on several ranks")


@pytest.mark.parametrize(
    ("changes", "tried"),
    [
        ({"precision": "bf16"}, "precision"),
        ({"precision": "fp16"}, "precision"),
        ({"gradient_checkpointing": True}, "gradient_checkpointing"),
    ],
)
def test_remedies_in_use_are_not_proposed(changes: dict[str, Any], tried: str) -> None:
    error = torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(torch.OutOfMemoryError), Trainer(Fails(error), mse_loss, DATA, optimizer=sgd, **changes) as trainer:
        trainer.fit()
    assert len(error.__notes__) == 1
    ways = ("microbatch_size", "precision", "gradient_checkpointing", "fsdp")
    assert [way for way in ways if way in error.__notes__[0]] == [way for way in ways if way != tried]


def test_the_microbatch_size_in_use_is_named() -> None:
    error = torch.OutOfMemoryError("CUDA out of memory")
    with (
        pytest.raises(torch.OutOfMemoryError),
        Trainer(Fails(error), mse_loss, DATA, optimizer=sgd, microbatch_size=2) as trainer,
    ):
        trainer.fit()
    assert "try a microbatch_size below 2, " in error.__notes__[0]


@pytest.mark.parametrize("error", [RuntimeError("shapes do not fit"), ValueError("out of memory"), KeyError("x")])
def test_other_errors_get_no_such_note(error: Exception) -> None:
    with pytest.raises(type(error)), Trainer(Fails(error), mse_loss, DATA, optimizer=sgd) as trainer:
        trainer.fit()
    assert not hasattr(error, "__notes__")
    assert not is_out_of_memory(error)
    assert not is_of_collective(error)


# --- set-up ---


class FailsAt(Callback):
    phase = "change"

    def __init__(self, event: str) -> None:
        self.event = event

    def on_event(self, ctx: Context) -> None:
        if ctx.event == self.event:
            raise LookupError(self.event)


def bad_optimizer(parameters: Any) -> Any:
    raise LookupError("the optimizer's own")


def bad_data() -> Any:
    raise LookupError("the data's own")


@pytest.mark.parametrize(
    ("changes", "span"),
    [
        ({"optimizer": bad_optimizer}, "run"),
        ({"train_dataloader": bad_data}, "data_init"),
        ({"eval_dataloader": bad_data}, "data_init"),
    ],
)
def test_an_error_in_set_up_is_reported_and_ends_the_run(changes: dict[str, Any], span: str) -> None:
    recorder = Recorder(fields=("exception", "span"))
    arguments: dict[str, Any] = {"train_dataloader": DATA, "optimizer": sgd, "callbacks": recorder} | changes
    with pytest.raises(LookupError) as raised:
        Trainer(nn.Linear(1, 1), mse_loss, **arguments)
    assert recorder.events[0] == "on_run_start"
    assert recorder.events[-2:] == ["on_exception", "on_run_end"]
    assert recorder.values == {"exception": [("on_exception", raised.value)], "span": [("on_exception", span)]}


# --- process groups ---


class Ends(Callback):
    def __init__(self) -> None:
        self.recorded: list[str] = []

    def on_exception(self, ctx: Context) -> None:
        self.recorded.append(f"{type(ctx.exception).__name__} in {ctx.span}")

    def on_run_end(self, ctx: Context) -> None:
        self.recorded.append(str(ctx.run.outcome))


def one_after_another(has_group: bool) -> list[Any]:
    """Run three trainers: set-up fails, training fails, nothing fails. Return whether a group exists after each."""
    if has_group:
        distributed.init_process_group("gloo", timeout=timedelta(seconds=20))
    found: list[Any] = []
    for way in ("set-up", "training", "well"):
        ends = Ends()
        callbacks: list[Callback] = [ends]
        if way == "training":
            callbacks.append(FailsAt("on_train_step_end"))
        model = nn.Linear(1, 1)
        try:
            with Trainer(
                model,
                mse_loss,
                DATA,
                optimizer=bad_optimizer if way == "set-up" else sgd,
                callbacks=callbacks,
                timeout_seconds=10,
            ) as trainer:
                trainer.fit()
        except LookupError:
            pass
        found.append((way, ends.recorded, distributed.is_initialized()))
    if has_group:  # the user's group still works
        total = torch.ones(1)
        distributed.all_reduce(total)
        assert total.item() == distributed.get_world_size()
    return found


@pytest.mark.parametrize("has_group", [True, False])
def test_one_trainer_after_another(has_group: bool) -> None:
    """A group that the user made is kept. The trainer destroys a group of its own, and the next trainer makes another."""
    for found in run_ranks(one_after_another, 2, has_group, timeout=60):
        assert found == [
            ("set-up", ["LookupError in run", "failed"], has_group),
            ("training", ["LookupError in train_step", "failed"], has_group),
            ("well", ["finished"], has_group),
        ]


def rejected_on_ranks() -> list[Any]:
    found: list[Any] = []
    for changes in ({"parallel": "single"}, {"precision": "fp8"}, {"log_ranks": "none"}, {"max_duration": "0ep"}):
        with pytest.raises(ConfigError):
            Trainer(nn.Linear(1, 1), mse_loss, DATA, optimizer=sgd, **changes)  # type: ignore[arg-type]
        found.append(distributed.is_initialized())
    return found


def test_a_rejection_leaves_no_group() -> None:
    assert run_ranks(rejected_on_ranks, 2, timeout=60) == [[False] * 4] * 2
