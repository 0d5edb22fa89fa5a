"""Ultralytics, which runs in a separate venv (see `tools/ultralytics_venv.py`): a trainer with the jobs' models."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
from packaging.version import Version
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

if "YOLO_CONFIG_DIR" not in os.environ:
    _SETTINGS = tempfile.TemporaryDirectory(prefix="ultralytics-")  # removed when the tests end
    os.environ["YOLO_CONFIG_DIR"] = _SETTINGS.name
os.environ |= {"YOLO_OFFLINE": "true", "YOLO_AUTOINSTALL": "false", "YOLO_VERBOSE": "false"}

import ultralytics  # isort: skip
from ultralytics import settings
from ultralytics.engine.trainer import BaseTrainer
from ultralytics.engine.validator import BaseValidator

from callsheet.bridges.ultralytics import host
from callsheet.bridges.ultralytics.events import HANDLED
from callsheet.testing.small_run import SmallModel

from .job import EMPTY, Convolution, Given, Job, Language, next_token_loss

NAME, VERSION = "Ultralytics", ultralytics.__version__
ARE_LOSSES_NAMED = Version(VERSION) >= Version("8.4.104")

settings.update(dict.fromkeys(("clearml", "comet", "dvc", "mlflow", "raytune", "tensorboard", "wandb"), False))


class UltralyticsModel(nn.Module):
    """A model that returns its loss if it is called with a batch, as Ultralytics' models do. Module names are unchanged."""

    of_outputs: ClassVar[Callable[..., Tensor]]
    criterion = None

    def forward(self, batch: Any, augment: bool = False) -> Any:
        if not isinstance(batch, dict):
            return super().forward(batch)  # the forward of the job's model
        return self.loss(batch, super().forward(batch["img"]))

    def loss(self, batch: Any, outputs: Tensor) -> tuple[Tensor, Any]:
        loss = type(self).of_outputs(outputs, batch["cls"])
        return loss, {"loss": loss.detach()} if ARE_LOSSES_NAMED else loss.detach()


class Points(UltralyticsModel, SmallModel):
    of_outputs = staticmethod(nn.functional.mse_loss)


class Images(UltralyticsModel, Convolution):
    of_outputs = staticmethod(nn.functional.cross_entropy)


class Tokens(UltralyticsModel, Language):
    of_outputs = staticmethod(next_token_loss)


class Rows(Dataset[Any]):
    """Rows as dictionaries with Ultralytics' keys."""

    def __init__(self, data: TensorDataset, times: int = 1) -> None:
        self.data, self.times = data, times

    def __len__(self) -> int:
        return len(self.data) * self.times

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        inputs, targets = self.data[index % len(self.data)]
        return {"img": inputs, "cls": targets}


class Metrics:
    keys: ClassVar[list[str]] = []


class Validator(BaseValidator):  # type: ignore[misc]  # mypy does not read Ultralytics' types
    """Reports only the loss."""

    metrics = Metrics()


class JobTrainer(BaseTrainer):  # type: ignore[misc]
    """Trains the model of a job."""

    job: Job
    steps_an_epoch = 6

    def get_dataset(self) -> dict[str, Any]:
        return {"train": self.job.train, "val": self.job.validation, "nc": 1}

    def setup_model(self) -> None:
        kinds = {SmallModel: Points, Convolution: Images, Language: Tokens}
        self.model = self.job.made_model()
        self.model.__class__ = kinds[type(self.model)]
        torch.manual_seed(3)

    def set_model_attributes(self) -> None: ...

    def get_dataloader(self, dataset_path: Any, batch_size: int = 4, rank: int = 0, mode: str = "train") -> Any:
        return DataLoader(Rows(dataset_path, -(-self.steps_an_epoch // 6) if mode == "train" else 1), batch_size=4)

    def build_optimizer(self, model: nn.Module, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.02)

    def get_validator(self) -> Any:
        return Validator(self.test_loader, self.save_dir, vars(self.args), self.callbacks)

    def final_eval(self) -> None:
        """Validate the averaged weights once more. Ultralytics' own method can load only its own models."""
        self.metrics = self.validator(self)


def does_nothing(*_: Any) -> None: ...


def train(
    job: Job,
    folder: Path,
    callbacks: Given,
    *,
    strict: bool = True,
    epochs: int = 2,
    steps_an_epoch: int = 6,
    evaluate: bool = True,
) -> nn.Module:
    host([])  # raises NotSupported in a release that is rejected, in which this trainer may not run
    kind = type("JobTrainer", (JobTrainer,), {"job": job, "steps_an_epoch": steps_an_epoch})
    given: dict[str, Any] = {
        "model": "small", "data": "job", "task": "detect", "epochs": epochs, "batch": 4, "nbs": 4, "device": "cpu", "amp": False,
        "plots": False, "deterministic": False, "warmup_epochs": 0, "lrf": 1.0, "close_mosaic": 0, "workers": 0, "val": evaluate,
        "project": str(folder / "checkpoints"), "name": "small", "exist_ok": True, "save": evaluate,
    }  # fmt: skip
    trainer = kind(overrides=given)
    if isinstance(callbacks, str):
        assert callbacks == EMPTY
        for event in HANDLED:
            trainer.add_callback(event, does_nothing)
    elif callbacks is not None:
        host(callbacks, log_interval=f"{job.log_every}ba", run_name="small", runs_folder=folder, strict=strict).attach(trainer)
    trainer.train()
    model: nn.Module = trainer.model
    return model
