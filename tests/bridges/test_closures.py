"""`optimizer.step(closure)`: the closure's backward pass belongs to the step, and of several calls the last loss counts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from ignite.engine import Engine
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchtnt.framework.train import train
from torchtnt.framework.unit import TrainUnit

from callsheet import Callback, Context, attach
from callsheet.bridges import accelerate, ignite, lightning, torchtnt
from callsheet.bridges.lightning import fabric
from callsheet.callbacks import CheckpointSaver, History, NaNMonitor
from callsheet.testing import Recorder, check_events

from .loops.job import POINTS
from .loops.lightning import quiet_trainer

EPOCHS, STEPS = 2, 6
Losses = list[list[float]]
"""For each step, the losses of all evaluations of the closure."""


class ClosureTraining:
    """A model, its optimizer, and the closure of a batch."""

    def __init__(self, kind: str) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.optimizer: Any = (
            torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
            if kind == "SGD"
            else torch.optim.LBFGS(self.model.parameters(), lr=0.1, max_iter=3, line_search_fn="strong_wolfe")
        )
        self.losses: Losses = []

    def closure(
        self, batch: Any, model: Any = None, backward: Callable[[Tensor], None] = lambda loss: loss.backward()
    ) -> Callable[[], Tensor]:
        inputs, targets = batch
        self.losses.append([])

        def evaluated() -> Tensor:
            self.optimizer.zero_grad()
            loss = POINTS.loss((model or self.model)(inputs), targets)
            backward(loss)
            self.losses[-1].append(loss.item())
            return loss

        return evaluated


def by_hand(case: ClosureTraining, callbacks: Any, folder: Path) -> None:
    if callbacks is None:
        for _ in range(EPOCHS):
            for batch in POINTS.batches():
                case.optimizer.step(case.closure(batch))
        return
    options: Any = {"run_name": "small", "runs_folder": folder, "log_interval": 1}
    with attach(model=case.model, optimizer=case.optimizer, callbacks=callbacks, **options) as run:
        for _ in run.epochs(EPOCHS):
            for batch in run.steps(POINTS.batches()):
                case.optimizer.step(closure=case.closure(batch))


def with_accelerate(case: ClosureTraining, callbacks: Any, folder: Path) -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerator: Any = Accelerator(cpu=True)
    model, optimizer, data = accelerator.prepare(case.model, case.optimizer, POINTS.batches())
    options: Any = {"run_name": "small", "runs_folder": folder, "log_interval": 1}
    with accelerate.host(callbacks, accelerator=accelerator, model=model, optimizer=optimizer, **options) as run:
        for _ in run.epochs(EPOCHS):
            for batch in run.steps(data):
                optimizer.step(case.closure(batch, model, accelerator.backward))


def with_fabric(case: ClosureTraining, callbacks: Any, folder: Path) -> None:
    from lightning.fabric import Fabric

    loop = Fabric(accelerator="cpu", devices=1)
    model, optimizer = loop.setup(case.model, case.optimizer)
    options: Any = {"run_name": "small", "runs_folder": folder, "log_interval": 1}
    with fabric(loop, model=model, optimizer=optimizer, callbacks=callbacks, **options) as run:
        for _ in run.epochs(EPOCHS):
            for batch in run.steps(POINTS.batches()):
                optimizer.step(case.closure(batch, model, loop.backward))


def with_ignite(case: ClosureTraining, callbacks: Any, folder: Path) -> None:
    engine = Engine(lambda engine, batch: case.optimizer.step(case.closure(batch)))
    options: Any = {"run_name": "small", "runs_folder": folder, "log_interval": 1}
    ignite.host(callbacks, model=case.model, optimizer=case.optimizer, strict=False, **options).attach(engine)
    engine.run(POINTS.batches(), max_epochs=EPOCHS)


def with_torchtnt(case: ClosureTraining, callbacks: Any, folder: Path) -> None:
    class Unit(TrainUnit[Any]):  # type: ignore[misc]  # torchtnt's types are not read
        def __init__(self) -> None:
            super().__init__()
            self.module, self.optimizer = case.model, case.optimizer

        def train_step(self, state: Any, data: Any) -> None:
            self.optimizer.step(case.closure(data))

    options: Any = {"run_name": "small", "runs_folder": folder, "log_interval": 1}
    train(Unit(), POINTS.batches(), max_epochs=EPOCHS, callbacks=[torchtnt.host(callbacks, **options)])


class Module(LightningModule):  # type: ignore[misc]  # Lightning's types are not read
    def __init__(self, case: ClosureTraining) -> None:
        super().__init__()
        self.case, self.net = case, case.model

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        if len(self.case.losses) == self.trainer.global_step:
            self.case.losses.append([])
        loss = POINTS.loss(self.net(batch[0]), batch[1])
        self.case.losses[-1].append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return self.case.optimizer


class Manual(Module):
    """Manual optimization: the module gives the closure to the optimizer itself."""

    def __init__(self, case: ClosureTraining) -> None:
        super().__init__(case)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.optimizers().step(self.case.closure(batch, self.net, self.manual_backward))


def with_lightning(case: ClosureTraining, callbacks: Any, folder: Path, module: type[Module] = Module) -> None:
    hosted = [] if callbacks is None else [lightning.host(callbacks)]
    quiet_trainer(folder, hosted, max_epochs=EPOCHS, log_every_n_steps=1).fit(module(case), POINTS.batches())


def with_lightning_by_hand(case: ClosureTraining, callbacks: Any, folder: Path) -> None:
    with_lightning(case, callbacks, folder, Manual)


HOSTS = {
    "by hand": by_hand,
    "accelerate": with_accelerate,
    "fabric": with_fabric,
    "ignite": with_ignite,
    "torchtnt": with_torchtnt,
    "lightning": with_lightning,
    "lightning, manual optimization": with_lightning_by_hand,
}


class RecordsLosses(Callback):
    """Records the loss at the end of each step."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_step_end(self, ctx: Context) -> None:
        self.losses.append(float(ctx.loss))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", ["SGD", "LBFGS"])
@pytest.mark.parametrize("where", HOSTS)
def test_the_backward_passes_of_a_closure_are_part_of_its_step(where: str, kind: str, tmp_path: Path) -> None:
    alone, observed = ClosureTraining(kind), ClosureTraining(kind)
    (with_lightning if where == "lightning" else by_hand)(alone, None, tmp_path / "alone")
    recorder, history, records_losses = Recorder(), History(), RecordsLosses()
    HOSTS[where](observed, [recorder, history, records_losses, NaNMonitor()], tmp_path / "observed")
    assert observed.losses == alone.losses
    assert len(observed.losses) == EPOCHS * STEPS
    assert all(torch.equal(one, other) for one, other in zip(alone.model.parameters(), observed.model.parameters(), strict=True))
    last = [each[-1] for each in observed.losses]
    assert records_losses.losses == last
    assert history["train/loss"] == pytest.approx(last)
    check_events(recorder.events)
    step = recorder.events[recorder.events.index("on_train_step_start") : recorder.events.index("on_train_step_end")]
    assert step.index("on_backward_end") < step.index("on_clip_gradients_start") < step.index("on_optimizer_step_start")
    assert step.count("on_forward_start") == step.count("on_optimizer_step_end") == 1
    if kind == "LBFGS":
        assert any(len(each) > 1 for each in observed.losses)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("where", HOSTS)
def test_records_have_the_last_loss_without_listeners_to_steps(where: str, tmp_path: Path) -> None:
    case, history = ClosureTraining("LBFGS"), History()
    HOSTS[where](case, [history], tmp_path)
    assert history["train/loss"] == pytest.approx([each[-1] for each in case.losses])


class RecordsCheckpointLosses(Callback):
    def __init__(self) -> None:
        self.losses: list[Any] = []

    def on_checkpoint_save_end(self, ctx: Context) -> None:
        assert ctx.checkpoint is not None
        self.losses.append(ctx.checkpoint.train_loss)


def test_the_last_loss_is_in_a_checkpoint_without_listeners_to_steps(tmp_path: Path) -> None:
    case, recorded = ClosureTraining("LBFGS"), RecordsCheckpointLosses()
    by_hand(case, [CheckpointSaver(save_interval="2ba"), recorded], tmp_path)
    assert recorded.losses == pytest.approx([each[-1] for each in case.losses][1::2])


@pytest.mark.parametrize("listens", [False, True])
def test_a_loss_that_the_loop_changes_in_place_is_recorded_as_it_was_trained_on(listens: bool, tmp_path: Path) -> None:
    recorded, history = RecordsCheckpointLosses(), History()
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trained = []
    callbacks = [CheckpointSaver(save_interval="1ba"), recorded, *([history] if listens else [])]
    with attach(model=model, optimizer=optimizer, callbacks=callbacks, runs_folder=tmp_path, log_interval="1ba") as run:
        for batch in run.steps([torch.ones(2, 2)] * 3):
            loss = model(batch).square().mean()
            trained.append(float(loss))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            loss.detach().mul_(3)
    assert recorded.losses == pytest.approx(trained)
    if listens:
        assert history["train/loss"] == pytest.approx(trained)
