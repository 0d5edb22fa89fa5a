"""Fixtures for all tests: the built-ins, and how each is made for a test.

`built_in` is parametrized over the names of the built-ins. `subjects` maps each name to what the built-in is tested with.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from callsheet import Callback, CallbackManager, Context, Trainer, callbacks, loggers
from callsheet.testing import Subject, small_trainer
from callsheet.testing.scene import MakesTrainer

BUILT_IN: dict[str, type[Callback]] = {
    name: kind
    for module in (callbacks, loggers)
    for name in module.__all__
    if isinstance(kind := getattr(module, name), type) and issubclass(kind, Callback)
}


@pytest.fixture(params=BUILT_IN)
def built_in(request: pytest.FixtureRequest) -> str:
    """Parametrize a test over the names of the built-ins."""
    name: str = request.param
    return name


def look(ctx: Context) -> None:
    """Log a value; `Lambda` calls this handler."""
    ctx.log({"looked/step": ctx.step}, across="same")


class Convolution(nn.Module):
    """A model that maps images to masks of two classes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Conv2d(3, 4, 3, padding=1)
        self.dropout = nn.Dropout(0.3)
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, images: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.dropout(torch.relu(self.body(images))))
        return outputs


class Language(nn.Module):
    """A language model that predicts the next token from the last token alone."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Embedding(257, 8)
        self.dropout = nn.Dropout(0.3)
        self.head = nn.Linear(8, 257)

    def forward(self, ids: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.dropout(self.body(ids)))
        return outputs

    def generate(self, ids: Tensor, *, max_new_tokens: int, do_sample: bool, temperature: float = 1.0) -> Tensor:
        for _ in range(max_new_tokens):
            logits = self(ids)[:, -1] / temperature
            drawn = torch.multinomial(logits.softmax(-1), 1) if do_sample else logits.argmax(-1, keepdim=True)
            ids = torch.cat([ids, drawn], 1)
        return ids


def images(folder: Path, callbacks: CallbackManager, resume: str | None = None) -> Trainer:
    """Return a trainer that trains on images and masks."""
    inputs = torch.rand(24, 3, 6, 8, generator=torch.Generator().manual_seed(7))
    return _trainer(
        Convolution, TensorDataset(inputs, (inputs[:, 0] > 0.5).long()), nn.functional.cross_entropy, folder, callbacks, resume
    )


def language(folder: Path, callbacks: CallbackManager, resume: str | None = None) -> Trainer:
    """Return a trainer that trains on tokens."""
    ids = torch.randint(0, 256, (24, 6), generator=torch.Generator().manual_seed(7))

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs.transpose(1, 2), targets)

    return _trainer(Language, TensorDataset(ids[:, :-1], ids[:, 1:]), loss, folder, callbacks, resume)


def _trainer(
    model: type[nn.Module], data: TensorDataset, loss: Any, folder: Path, callbacks: CallbackManager, resume: str | None
) -> Trainer:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        made = model()
    return Trainer(
        made,
        loss,
        lambda: DataLoader(data, batch_size=4, shuffle=True),
        lambda: DataLoader(data, batch_size=8),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.02),
        max_duration="10ba",
        eval_interval="4ba",
        log_interval="2ba",
        seed=3,
        device="cpu",
        run_name="small",
        runs_folder=folder,
        resume=resume,
        callbacks=callbacks,
    )


class Collects(BaseHTTPRequestHandler):
    """Accepts every POST request."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture(scope="module")
def collector() -> Iterator[str]:
    """Start a server that accepts what the built-ins send, and yield its address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Collects) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def subjects(collector: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Subject]]:
    """Map each built-in callback's name to its subject. A callback that is not listed here is built without arguments."""
    folder = tmp_path_factory.mktemp("subjects")
    with small_trainer(folder, CallbackManager()) as trainer:
        saved = trainer.save_checkpoint().path
    before = dict(os.environ)
    os.environ |= {
        "TRACKIO_DIR": str(folder / "trackio"),
        "WANDB_ERROR_REPORTING": "false",
        "WANDB_SILENT": "true",
        "WEBHOOK": collector,
    }
    benchmark: dict[str, Any] = {
        "benchmark": "llama31_8b",
        "target": 0.0,
        "submitter": "somebody",
        "ruleset": "6.1.0",
        "hyperparameters": {"train_samples": 24, "eval_samples": 12}
        | {f"lowest_numerical_precision_in_{where}": "fp32" for where in ("linear", "attn", "comm")},
    }

    def made(name: str, *varies: str, trainer: MakesTrainer = small_trainer, **options: Any) -> tuple[str, Subject]:
        return name, Subject(partial(BUILT_IN[name], **options), varies=varies, trainer=trainer)

    listed = dict(
        [
            made("ActivationMonitor", batch_log_interval=2),
            made("CheckpointSaver", save_interval="2ba", keep=1, monitor="validation/loss"),
            made("DiskSpaceGuard", "state/largest"),  # a checkpoint holds times, of more digits or fewer
            made("EMA", half_life=3),
            made("EarlyStopper", monitor="validation/loss"),
            made("FreezeUnfreeze", modules="body", until="1ep"),
            made("GarbageCollection", interval=4),
            made("Generate", trainer=language, prompts=["one", "another"], interval="3ba", max_new_tokens=3),
            made("GradientAccumulationScheduler", schedule={1: 1, 2: 2}),
            made("HangDetector", "state/learned*"),
            made("ImageVisualizer", trainer=images, interval="3ba", mode="segmentation"),
            made("Lambda", on_train_step_end=f"{__name__}.look"),
            made("LoadCheckpoint", path=saved, weights="head.*", strict=False),
            made("LossSpikeDetector", window=4),
            made("MLPerfCallback", **benchmark),
            made("MLflowLogger", "state/run_id", tracking_uri=f"sqlite:///{folder / 'mlflow.db'}"),
            made("Notify", url_env="WEBHOOK", every="3ba", when="train/loss < 3"),
            made("OpenTelemetryLogger", "state/run_id", endpoint=collector),
            made("OptimizerMonitor", batch_log_interval=2),
            made("RuntimeEstimator", "state/*"),  # all of it is measured
            made("SlowRankDetector", "slow_rank/*", "state/*"),  # what is slow is measured too
            made("SpeedMonitor", "state/window/*"),  # times
            made("ThresholdStopper", monitor="train/loss", threshold=0.0),
            made("TimeLimit", limit="1h"),
            made("TorchProfiler", skip_first=1, wait=1, active=2),
            made("TrackioLogger", "state/run_id"),
            made("WandBLogger", "state/run_id", mode="offline"),
        ]
    )
    yield {name: listed.get(name) or Subject(kind) for name, kind in BUILT_IN.items()}
    os.environ.clear()
    os.environ.update(before)
