"""callsheet's callbacks attached to a loop that is written with Lightning's Fabric."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import nn

from callsheet import Callback, Context
from callsheet.bridges.lightning import fabric as attach_fabric
from callsheet.callbacks import CheckpointSaver, History, LRMonitor, OptimizerMonitor
from callsheet.testing import Recorder, check_events

from .loops.job import POINTS


def trained(
    callbacks: Any, folder: Path, *, epochs: int = 2, precision: str = "32-true", devices: int = 1, **options: Any
) -> tuple[nn.Module, list[float], Any]:
    """Train with the loop, with callbacks or, if they are None, without callsheet."""
    fabric = Fabric(accelerator="cpu", devices=devices, precision=precision)
    fabric.launch()
    torch.manual_seed(3)
    model = POINTS.made_model()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.02))
    data = fabric.setup_dataloaders(POINTS.batches())
    losses: list[float] = []

    def step(inputs: Any, targets: Any) -> None:
        optimizer.zero_grad()
        loss = POINTS.loss(model(inputs), targets)
        fabric.backward(loss)
        optimizer.step()
        losses.append(loss.item())
        fabric.log("mine", loss * 2)

    if callbacks is None:
        for _ in range(epochs):
            for batch in data:
                step(*batch)
        return model.module, losses, None
    given = {"run_name": "run", "runs_folder": folder, "log_interval": 2, **options}
    with attach_fabric(fabric, model=model, optimizer=optimizer, callbacks=callbacks, **given) as run:
        for _ in run.epochs(epochs):
            for batch in run.steps(data):
                step(*batch)
    assert "log_dict" not in vars(fabric)
    return model.module, losses, run


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_training_is_unchanged_and_every_event_is_fired(precision: str, tmp_path: Path) -> None:
    recorder, history = Recorder(fields=("loss",)), History()
    alone, losses, _ = trained(None, tmp_path, precision=precision)
    model, _, run = trained([recorder, history, LRMonitor(), OptimizerMonitor()], tmp_path, precision=precision)
    assert same(alone, model)
    check_events(recorder.events)
    assert recorder.events.count("on_train_step_end") == recorder.events.count("on_forward_end") == 12
    pairs = [(losses[at] + losses[at + 1]) / 2 for at in range(0, 12, 2)]
    assert history["train/loss"] == pytest.approx(pairs)
    assert history["fabric/mine"] == pytest.approx([2 * loss for loss in losses[1::2]])
    assert type(run.ctx.model) is type(POINTS.made_model())
    assert run.ctx.run.outcome == "finished"


class Stops(Callback):
    """Requests a stop."""

    def on_train_step_end(self, ctx: Context) -> None:
        if ctx.step == 8:
            ctx.control.stop("enough")


def test_a_resumed_run_has_the_losses_and_weights_of_an_uninterrupted_run(tmp_path: Path) -> None:
    whole, losses, _ = trained(None, tmp_path)
    _, first, run = trained([Stops(), CheckpointSaver(save_interval="8ba")], tmp_path)
    assert run.ctx.run.outcome == "stopped"
    assert len(first) == 8
    model, rest, _ = trained([CheckpointSaver(save_interval="8ba")], tmp_path, resume="auto")
    assert first + rest == losses
    assert same(whole, model)


def test_an_exception_of_a_callback_is_raised_and_reported(tmp_path: Path) -> None:
    class Fails(Callback):
        def on_backward_end(self, ctx: Context) -> None:
            raise ZeroDivisionError

    recorder = Recorder()
    with pytest.raises(ZeroDivisionError):
        trained([Fails(), recorder], tmp_path)
    assert recorder.events[-2:] == ["on_exception", "on_run_end"]
    check_events(recorder.events)
