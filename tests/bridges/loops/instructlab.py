"""A small copy of the training loop of InstructLab Training 0.16.2, because the package itself needs GPUs to train.

The copy calls the same hooks in the same order with the same context. It uses the package's own callback manager if the package is
installed (`pip install --no-deps instructlab-training`).
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
import time
import types
from pathlib import Path
from typing import Any

import torch
from torch import nn

from callsheet.bridges.instructlab import host
from callsheet.bridges.instructlab import names as instructlab_names
from callsheet.bridges.instructlab.names import HOOK_NAMES

from .job import EMPTY, Given, Job


def _installed() -> Any:
    """Import the package's module of callbacks, or return None. Releases before 0.16 have none.

    The package's `__init__` is skipped if its requirements are not installed.
    """
    try:
        return importlib.import_module("instructlab.training.callbacks")
    except ImportError:
        pass
    try:
        files = importlib.metadata.files("instructlab-training") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    path = next((Path(str(file.locate())) for file in files if str(file).endswith("training/callbacks.py")), None)
    if path is None:
        return None
    package = types.ModuleType("instructlab.training")
    package.__path__ = [str(path.parent)]
    sys.modules["instructlab.training"] = package
    return importlib.import_module("instructlab.training.callbacks")


REAL = _installed()
"""InstructLab's own interface, or None."""
API: Any = REAL if REAL is not None else instructlab_names

NAME = "InstructLab"
VERSION = importlib.metadata.version("instructlab-training") if REAL is not None else "0.16.2"
HOW = "InstructLab can train only on GPUs, so a copy of its loop in the tests calls its hooks in the same order"


class Loop:
    """Fires a manager's hooks as InstructLab's loop does. Subclasses override what a microbatch, a step and an evaluation do.

    Args:
        save_samples, checkpoint_at_epoch, save_last, validate_every: as in InstructLab.
        samples: the number of samples per step.
    """

    def __init__(
        self, manager: Any, output: Path, *, epochs: int = 2, steps: int = 3, microbatches: int = 1, samples: int = 4,
        validate_every: int = 0, save_samples: int = 0, checkpoint_at_epoch: bool = False, save_last: bool = False,
    ) -> None:  # fmt: skip
        self.manager, self.output, self.epochs, self.steps = manager, output, epochs, steps
        self.microbatches, self.samples, self.validate_every = microbatches, samples, validate_every
        self.save_samples, self.checkpoint_at_epoch, self.save_last = save_samples, checkpoint_at_epoch, save_last
        self.done, self.first_epoch, self.interrupted_at = 0, 0, ("", 0)
        self.not_counted = 0
        """Steps before a resume that `context.step` does not count, as in InstructLab's resume at the start of an epoch."""

    def forward_backward(self) -> float:
        """Process a microbatch, and return its loss."""
        return 1.0 / (1 + self.done)

    def step(self) -> float:
        """Step the optimizer, and return the gradient norm."""
        return 2.0

    def validate(self) -> dict[str, float]:
        """Evaluate, and return the results."""
        return {"val_loss": 0.5 / self.done, "val_num_tokens": 12.0}

    def run(self) -> None:
        """Run all epochs."""
        try:
            self._run()
        finally:
            self.manager.close()

    def _run(self) -> None:
        manager, context = self.manager, self.manager.context
        rank = int(os.environ.get("RANK", "0"))
        context.output_dir, context.model_name_or_path, context.max_epochs = str(self.output), "a/model", self.epochs
        context.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        context.is_local_process_zero = context.is_world_process_zero = rank == 0
        seen, tokens = self.done * self.samples, 0
        context.step, context.total_samples = 1, seen
        manager.fire("on_train_begin")
        for epoch in range(self.first_epoch, self.epochs):
            context.epoch = epoch
            manager.fire("on_epoch_begin")
            for _ in range(self.steps):
                began, context.step, losses = time.time(), self.done - self.not_counted + 1, []
                manager.fire("on_step_begin")
                for _ in range(self.microbatches):
                    manager.fire("on_before_forward")
                    if self.interrupted_at == ("forward", self.done + 1):
                        manager.fire("on_train_end")
                        return
                    losses.append(self.forward_backward())
                    manager.fire("on_after_backward")
                context.loss = sum(losses) / len(losses)
                manager.fire("on_pre_optimizer_step")
                norm = self.step()
                manager.fire("on_optimizer_step")
                if self.interrupted_at == ("optimizer", self.done + 1):
                    manager.fire("on_train_end")
                    return
                self.done += 1
                seen, tokens = seen + self.samples, tokens + 10 * self.samples
                if rank == 0:
                    context.learning_rate, context.grad_norm, context.elapsed_time = 0.02, norm, time.time() - began
                    context.overall_throughput = self.samples / max(context.elapsed_time, 1e-9)
                    context.cuda_mem_allocated = 0.0
                context.total_samples, context.total_tokens = seen, tokens
                context.batch_metrics = {
                    "total_samples": self.samples, "total_length": 10 * self.samples, "num_loss_counted_tokens": 7 * self.samples,
                    "grad_accum_steps": self.microbatches, "num_minibatches": self.microbatches,
                }  # fmt: skip
                manager.fire("on_log")
                if self.validate_every and self.done % self.validate_every == 0:
                    context.val_metrics = self.validate()
                    manager.fire("on_evaluate")
                if self.save_samples and seen % self.save_samples == 0:
                    self._save(seen)
                manager.fire("on_step_end")
            if self.checkpoint_at_epoch:
                self._save(seen)
            manager.fire("on_epoch_end")
        if self.save_last:
            self._save(seen)
        manager.fire("on_train_end")

    def _save(self, seen: int) -> None:
        path = self.output / "hf_format" / f"samples_{seen}"
        path.mkdir(parents=True, exist_ok=True)
        self.manager.fire("on_save", checkpoint_path=str(path))


class Training(Loop):
    """Trains a job."""

    def __init__(self, job: Job, manager: Any, output: Path, *, epochs: int, steps_an_epoch: int, evaluate: bool) -> None:
        super().__init__(manager, output, epochs=epochs, steps=steps_an_epoch, validate_every=steps_an_epoch if evaluate else 0)
        self._job, self.model = job, job.made_model()
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.02)
        self._batches = iter(batch for _ in range(epochs) for batch in job.batches(steps_an_epoch=steps_an_epoch))

    def forward_backward(self) -> float:
        inputs, targets = next(self._batches)
        loss = self._job.loss(self.model(inputs), targets)
        loss.backward()
        return float(loss.detach())

    def step(self) -> float:
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(norm)

    def validate(self) -> dict[str, float]:
        self.model.eval()
        with torch.no_grad():
            losses = [float(self._job.loss(self.model(inputs), targets)) for inputs, targets in self._job.validation_batches()]
        self.model.train()
        return {"val_loss": sum(losses) / len(losses), "val_num_tokens": 12.0}


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
    """See `job.TrainFunction`."""
    torch.manual_seed(3)
    manager = API.CallbackManager()
    if callbacks == EMPTY:
        empty = type("Empty", (API.TrainerCallback,), {hook: lambda self, context: None for hook in HOOK_NAMES})
        manager.add_callback(empty())
    elif callbacks is not None:
        assert not isinstance(callbacks, str)
        manager.add_callback(host(callbacks, strict=strict))
    loop = Training(job, manager, folder, epochs=epochs, steps_an_epoch=steps_an_epoch, evaluate=evaluate)
    loop.run()
    return loop.model
