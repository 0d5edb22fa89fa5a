from __future__ import annotations

import logging
import os
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from callsheet import Callback, CallbackManager, Context, Trainer
from callsheet.callbacks.free_outputs import FreeOutputs
from callsheet.testing import Recorder, check_events, run_ranks

BATCHES = [(torch.randn(4, 3, generator=torch.Generator().manual_seed(i)), torch.ones(4, 1)) for i in range(3)]


class Outputs:
    """Model outputs that a weak reference can observe. Tensors would not do: the graph keeps them alive."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, inputs: torch.Tensor) -> Outputs:
        return Outputs(self.linear(inputs))


class KeepsOutputs(Callback):
    """Declares the outputs until the step's end, and records when they are alive."""

    keep_fields = ("outputs",)

    def __init__(self) -> None:
        self.alive: dict[str, list[bool]] = {}
        self.reads: dict[str, list[bool]] = {}
        self.ref: Any = None

    def on_event(self, ctx: Context) -> None:
        event = str(ctx.event)
        if event in ("on_forward_end", "on_eval_forward_end"):
            self.ref = weakref.ref(ctx.outputs)
        if event in ("on_loss_end", "on_backward_start", "on_train_step_end", "on_eval_step_end"):
            self.alive.setdefault(event, []).append(self.ref() is not None)
            self.reads.setdefault(event, []).append(ctx.outputs is not None)


def fit(folder: Path, *callbacks: Callback, **options: Any) -> list[float]:
    torch.manual_seed(1)
    recorder = Recorder()
    with Trainer(
        Net(),
        lambda outputs, targets: nn.functional.mse_loss(outputs.logits, targets),
        BATCHES,
        BATCHES[:2],
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        callbacks=CallbackManager([*callbacks, recorder], checking=True),
        runs_folder=folder,
        device="cpu",
        **options,
    ) as trained:
        trained.fit()
    check_events(recorder.events)
    return [weight for tensor in trained.model.state_dict().values() for weight in tensor.flatten().tolist()]


@pytest.mark.parametrize("microbatch_size", [None, 2])
def test_releases_the_outputs_after_on_loss_end(tmp_path: Path, microbatch_size: int | None) -> None:
    keeps = KeepsOutputs()
    fit(tmp_path, FreeOutputs(), keeps, microbatch_size=microbatch_size)
    times = 3 if microbatch_size is None else 6
    nothing = {"on_backward_start": [False] * times, "on_train_step_end": [False] * 3}
    everything = {"on_loss_end": [True] * times, "on_eval_step_end": [True] * 2}
    assert keeps.alive == keeps.reads == nothing | everything


def test_without_the_callback_outputs_are_alive_until_the_step_s_end(tmp_path: Path) -> None:
    """This shows that the test above can fail."""
    keeps = KeepsOutputs()
    fit(tmp_path, keeps)
    assert keeps.alive["on_train_step_end"] == [True] * 3


@pytest.mark.parametrize("keeps", [True, False])
def test_warns_once_if_it_has_nothing_to_do(tmp_path: Path, caplog: pytest.LogCaptureFixture, keeps: bool) -> None:
    callbacks: list[Callback] = [FreeOutputs(), *([KeepsOutputs()] if keeps else [])]
    with caplog.at_level(logging.WARNING, "callsheet"):
        for name in ("run", "other"):
            fit(tmp_path, *callbacks, run_name=name)
    assert ["nothing to do" in message for message in caplog.messages] == ([] if keeps else [True])


@pytest.mark.parametrize("keeps", [True, False])
def test_training_is_not_changed(tmp_path: Path, keeps: bool) -> None:
    kept: list[Callback] = [KeepsOutputs()] if keeps else []
    assert fit(tmp_path, *kept, run_name="one") == fit(tmp_path, FreeOutputs(), *kept, run_name="other")


def on_a_rank(folder: str) -> Any:
    assert os.environ["WORLD_SIZE"] == "2"
    keeps = KeepsOutputs()
    return fit(Path(folder), FreeOutputs(), keeps), keeps.alive


def test_two_ranks_release_the_outputs(tmp_path: Path) -> None:
    one, other = run_ranks(on_a_rank, 2, str(tmp_path))
    assert one == other
    assert one[1]["on_train_step_end"] == [False, False]
