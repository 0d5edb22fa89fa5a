"""On CUDA, in loops other than the Trainer's: observers add no synchronization and do not change the losses."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import callsheet
from callsheet import Callback, Context
from callsheet.callbacks import ActivationMonitor, History, LRMonitor, NaNMonitor, OptimizerMonitor, SpeedMonitor
from callsheet.trainer import Task

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

STEPS, LOG_EVERY = 40, 10
PER_RECORD = 4
"""How many waits a record may cost: one for each stack of values that is read."""


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count the synchronizations with the device in the block, by the line that waited."""
    places: Counter[str] = Counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield places
        finally:
            torch.cuda.set_sync_debug_mode("default")
    places.update(f"{Path(each.filename).name}:{each.lineno}" for each in caught if "synchronizing CUDA" in str(each.message))


def check_waits(loop: Callable[[bool], list[str]]) -> None:
    """Check that the loop has the same losses when it is observed, and waits no more often than its records need."""
    loop(False)  # load the kernels before both runs
    with counted() as alone:
        expected = loop(False)
    with counted() as observed:
        losses = loop(True)
    assert losses == expected
    assert len(losses) == STEPS
    added = observed - alone
    assert added.total() <= PER_RECORD * STEPS / LOG_EVERY, dict(added)


def monitors() -> list[Callback]:
    return [SpeedMonitor(), LRMonitor(), History()]


def parts() -> tuple[nn.Module, torch.optim.Optimizer, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).cuda()
    data = [(torch.randn(32, 64, device="cuda"), torch.randn(32, 8, device="cuda")) for _ in range(STEPS)]
    return model, torch.optim.AdamW(model.parameters(), lr=0.01), data


def hexes(losses: list[Tensor]) -> list[str]:
    return [float(loss).hex() for loss in torch.stack(losses).cpu()]


@pytest.mark.parametrize("is_scaled", [False, True])
def test_observing_a_hand_written_loop_changes_no_loss_and_adds_no_waits(is_scaled: bool, tmp_path: Path) -> None:
    def loop(is_observed: bool) -> list[str]:
        model, optimizer, data = parts()
        scaler = torch.amp.GradScaler("cuda", enabled=is_scaled)
        losses = []

        def train(batches: Any) -> None:
            for inputs, targets in batches:
                with torch.autocast("cuda", torch.float16, enabled=is_scaled):
                    loss = nn.functional.mse_loss(model(inputs), targets)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                losses.append(loss.detach())

        if not is_observed:
            train(data)
            return hexes(losses)
        watching = monitors()
        with callsheet.attach(
            model=model, optimizer=optimizer, scaler=scaler, callbacks=watching, log_interval=LOG_EVERY, runs_folder=tmp_path
        ) as run:
            train(run.steps(data))
        history = watching[-1]
        assert isinstance(history, History)
        expected = torch.stack(losses).view(-1, LOG_EVERY).mean(1).tolist()
        assert history["train/loss"] == pytest.approx(expected, rel=1e-5)
        return hexes(losses)

    check_waits(loop)


class InTwoParts(nn.Module):
    """A model of which a part is in host memory, as with offloading."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 8).cuda()

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.second(self.first(inputs).relu().cuda())
        return outputs


def test_a_model_and_logged_values_on_two_devices_work(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = InTwoParts()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    history = History()
    watching = [history, OptimizerMonitor(batch_log_interval=LOG_EVERY), ActivationMonitor(), NaNMonitor()]
    with callsheet.attach(
        model=model, optimizer=optimizer, callbacks=watching, log_interval=LOG_EVERY, runs_folder=tmp_path
    ) as run:
        for step, inputs in enumerate(run.steps([torch.randn(32, 64) for _ in range(STEPS)])):
            loss = model(inputs).square().mean()
            if step % 3 == 0:
                loss = loss.cpu()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.log({"own": loss.detach().to("cpu" if step % 2 else "cuda")}, over="mean", weight=torch.ones(()))
    assert len(history["train/loss"]) == STEPS / LOG_EVERY
    assert history["own"] == pytest.approx(history["train/loss"])
    assert all(each > 0 for each in history["l2_norm/grad/global"])


def test_observing_the_hugging_face_trainer_changes_no_loss_and_adds_no_waits(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    from callsheet.bridges.huggingface import host

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
            self.losses: list[Tensor] = []

        def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
            loss = nn.functional.mse_loss(self.net(inputs), labels)
            self.losses.append(loss.detach())
            return {"loss": loss}

    def loop(is_observed: bool) -> list[str]:
        torch.manual_seed(0)
        model = Model()
        rows = [{"inputs": torch.randn(64), "labels": torch.randn(8)} for _ in range(STEPS * 8)]
        arguments = TrainingArguments(
            str(tmp_path),
            max_steps=STEPS,
            per_device_train_batch_size=8,
            logging_steps=LOG_EVERY,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            seed=1,
        )
        Trainer(model, arguments, train_dataset=rows, callbacks=[host(monitors())] if is_observed else []).train()
        return hexes(model.losses)

    check_waits(loop)


def test_observing_lightning_changes_no_loss_and_adds_no_waits(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    from callsheet.bridges.lightning import host

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
            self.losses: list[Tensor] = []

        def training_step(self, batch: Any, _: int) -> Tensor:
            loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
            self.losses.append(loss.detach())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    def loop(is_observed: bool) -> list[str]:
        torch.manual_seed(0)
        module = Module()
        rows = torch.utils.data.TensorDataset(torch.randn(STEPS * 8, 64), torch.randn(STEPS * 8, 8))
        trainer = lightning.Trainer(
            max_epochs=1,
            accelerator="gpu",
            devices=1,
            log_every_n_steps=LOG_EVERY,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
            callbacks=[host(monitors())] if is_observed else [],
        )
        trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=8))
        return hexes(module.losses)

    check_waits(loop)


class RecordsLosses(Callback):
    """Records the loss of each metrics record."""

    phase = "report"

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_log(self, ctx: Context) -> None:
        self.losses.append(ctx.record.values["train/loss"])


class WithLoss(nn.Module):
    """Returns its loss like models of transformers, so that the loss is computed in compiled code."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.mse_loss(self.model(inputs), labels)}


@pytest.mark.parametrize("accumulate", [1, 2])
def test_losses_that_cuda_graphs_overwrite_are_correct_in_attach(accumulate: int, tmp_path: Path) -> None:
    """With `mode="reduce-overhead"`, the next call of the compiled model writes its loss into the memory of the last loss."""
    torch.compiler.reset()
    model, optimizer, data = parts()
    compiled = torch.compile(WithLoss(model), mode="reduce-overhead")
    seen, reads = [], RecordsLosses()
    watching = [reads, NaNMonitor(), *monitors()]
    with callsheet.attach(
        model=model, optimizer=optimizer, callbacks=watching, log_interval=5, runs_folder=tmp_path, strict=False,
        gradient_accumulation_steps=accumulate,
    ) as run:  # fmt: skip
        for parameter in model.parameters():  # the gradients must be outside of the graph's memory too
            parameter.grad = torch.zeros_like(parameter)
        for number, (inputs, labels) in enumerate(run.steps(data), 1):
            loss = compiled(inputs, labels)["loss"]
            loss.backward()
            seen.append(loss.item())
            if number % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
    expected = torch.tensor(seen).view(-1, accumulate).sum(1).view(-1, 5).mean(1).tolist()
    assert reads.losses == pytest.approx(expected, rel=1e-5)


class ModelsOwnLoss(Task):
    def forward(self, model: nn.Module, batch: Any) -> Any:
        return model(*batch)

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        loss: Tensor = outputs["loss"]
        return loss


def test_losses_that_cuda_graphs_overwrite_are_correct_in_the_trainer(tmp_path: Path) -> None:
    torch.compiler.reset()
    found = []
    for compiles in (False, {"mode": "reduce-overhead"}):
        model, _, data = parts()
        reads = RecordsLosses()
        with callsheet.Trainer(
            WithLoss(model),
            ModelsOwnLoss(),
            data,
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
            callbacks=[reads, NaNMonitor(), *monitors()],
            log_interval="5ba",
            compile=compiles,
            runs_folder=tmp_path,
        ) as trainer:
            trainer.fit()
        found.append(reads.losses)
    plain, compiled = found
    assert len(plain) == STEPS / 5
    assert compiled == pytest.approx(plain, rel=1e-4)


SCRIPT = """
import json, sys, warnings

import torch
from torch import nn

caught = warnings.catch_warnings(record=True).__enter__()
warnings.simplefilter("always")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).cuda()
data = [(torch.randn(32, 64, device="cuda"), torch.randn(32, 8, device="cuda")) for _ in range(100)]
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
losses = []
for step, (inputs, targets) in enumerate(data):
    if step == 5:
        torch.cuda.set_sync_debug_mode("warn")
    loss = nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.detach())
torch.cuda.set_sync_debug_mode("default")
waits = [f"{each.filename}:{each.lineno}" for each in caught if "synchronizing CUDA" in str(each.message)]
with open(sys.argv[1], "w") as file:
    json.dump({"losses": [float(each).hex() for each in losses], "waits": waits}, file)
"""


def test_a_script_under_exec_has_the_same_losses_and_few_waits(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    found = []
    for number, start in enumerate(([], ["-m", "callsheet.exec", "--runs_folder", str(tmp_path / "runs")])):
        result = tmp_path / f"{number}.json"
        done = subprocess.run(
            [sys.executable, *start, str(script), str(result)], capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr
        found.append(json.loads(result.read_text()))
    alone, observed = found
    assert observed["losses"] == alone["losses"]
    assert alone["waits"] == []
    assert len(observed["waits"]) <= PER_RECORD * 100 / LOG_EVERY, Counter(observed["waits"])
    assert (next((tmp_path / "runs").iterdir()) / "report.html").exists()


BROKEN = """
import sys

import torch
from torch import nn

import callsheet
from callsheet import Trainer
from callsheet.callbacks import CheckpointSaver, NaNMonitor, SpeedMonitor
from callsheet.loggers import JSONLLogger

model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8))
data = [(torch.randint(0, 8, (4, 3)), torch.randint(0, 8, (4, 3))) for _ in range(20)]
data[12] = (torch.full((4, 3), 99), data[12][1])


def compute_loss(outputs, targets):
    return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.1)


watching = [CheckpointSaver(save_interval="5ba"), SpeedMonitor(), NaNMonitor(), JSONLLogger()]
options = {"callbacks": watching, "save_in_background": True, "run_name": "broken", "runs_folder": sys.argv[1]}
if sys.argv[2] == "trainer":
    with Trainer(model, compute_loss, data, optimizer=adamw, progress=False, **options) as trainer:
        trainer.fit()
else:
    model.cuda()
    optimizer = adamw(model.parameters())
    with callsheet.attach(model=model, optimizer=optimizer, **options) as run:
        for inputs, targets in run.steps(data):
            compute_loss(model(inputs.cuda()), targets.cuda()).backward()
            optimizer.step()
            optimizer.zero_grad()
"""


@pytest.mark.parametrize("loop", ["trainer", "attach"])
def test_a_run_whose_device_became_unusable_ends_with_that_error(loop: str, tmp_path: Path) -> None:
    """After a failed assertion in a kernel, every use of the device fails in this process. The run still ends with that error."""
    script = tmp_path / "broken.py"
    script.write_text(BROKEN)
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "runs"), loop], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1, done.stderr
    assert "device-side assert triggered" in done.stderr
    checkpoints = tmp_path / "runs" / "broken" / "checkpoints"
    assert any((path / "manifest.json").exists() for path in checkpoints.iterdir())
