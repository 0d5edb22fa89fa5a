"""A small copy of NeMo AutoModel's recipe, because the package itself needs a GPU to train.

The callbacks are those of its pull request 875, which is in no release. The copy has the step scheduler, the order of hooks, the
checkpoints and the stops of that pull request. `released_scheduler` returns the step scheduler of the installed release.
"""

from __future__ import annotations

import importlib
import shutil
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from callsheet.bridges.automodel import host
from callsheet.bridges.automodel.names import HOOKS, Callback, CallbackRunner, MetricsSample

from .job import EMPTY, Given, Job

NAME, VERSION = "NeMo AutoModel", "pull request 875"
HOW = "The tests use a small copy of AutoModel's loop, because AutoModel can train only on GPUs"


class StepScheduler:
    """Counts steps from 0, and decides when to validate and to save."""

    def __init__(
        self, dataloader: Any, *, num_epochs: int, max_steps: int | None = None, accumulate: int = 1,
        ckpt_every_steps: int | None = None, val_every_steps: int | None = None,
    ) -> None:  # fmt: skip
        self.dataloader = dataloader
        self.grad_acc_steps = accumulate
        self.num_epochs = num_epochs
        self.step = self.epoch = 0
        self.epoch_len: int | None = -(-len(dataloader) // accumulate) if hasattr(dataloader, "__len__") else None
        if max_steps is None:
            assert self.epoch_len is not None
            max_steps = num_epochs * self.epoch_len
        self.max_steps = max_steps
        self.ckpt_every_steps = ckpt_every_steps or self.epoch_len or self.max_steps // 2
        self.val_every_steps = val_every_steps
        self.sigterm_flag = False
        self._received = False

    def receive(self, *_: Any) -> None:
        """Handle SIGTERM."""
        self._received = True

    def __iter__(self) -> Iterator[list[Any]]:
        if self.step >= self.max_steps:
            return
        group: list[Any] = []
        for batch in self.dataloader:
            group.append(batch)
            if len(group) == self.grad_acc_steps:
                yield group
                self.step, group = self.step + 1, []
                if self.step >= self.max_steps or self.sigterm_flag:
                    return
        if group:
            yield group
            self.step += 1
        self.epoch += 1

    @property
    def epochs(self) -> Iterator[int]:
        for epoch in range(self.epoch, self.num_epochs):
            if self.step >= self.max_steps or self.sigterm_received:
                return
            yield epoch

    @property
    def is_val_step(self) -> bool:
        every = self.val_every_steps
        return ((every is not None and self.step % every == every - 1) or self.is_ckpt_step) and not self.sigterm_flag

    @property
    def is_ckpt_step(self) -> bool:
        is_due = self.step % self.ckpt_every_steps == self.ckpt_every_steps - 1
        return is_due or self.is_last_batch or self.is_last_step or self.sigterm_received

    @property
    def is_last_step(self) -> bool:
        return self.step + 1 >= self.max_steps

    @property
    def is_last_batch(self) -> bool:
        return self.epoch_len is not None and self.step % self.epoch_len == self.epoch_len - 1

    @property
    def sigterm_received(self) -> bool:
        self.sigterm_flag = self.sigterm_flag or self._received
        return self.sigterm_flag


def released_scheduler() -> Any:
    """Return the step scheduler of the installed release, as a class with the arguments of the copy, or None if it is not installed."""
    try:
        released: Any = importlib.import_module("nemo_automodel.components.training.step_scheduler").StepScheduler
    except ModuleNotFoundError:
        return None

    class Released(released):  # type: ignore[misc]  # a class that is found at run time
        def __init__(self, dataloader: Any, *, accumulate: int = 1, **schedule: Any) -> None:
            super().__init__(accumulate, 1, 1, dataloader, **schedule)
            self.sig_handler.release()  # the recipe handles the signal while it trains

        def receive(self, *_: Any) -> None:
            """Record SIGTERM as the release's handler does."""
            self.sig_handler._signal_received = True

    return Released


class Config:
    """A configuration with dotted names, like AutoModel's."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = dict(values)

    def get(self, name: str, default: Any = None) -> Any:
        return self._values.get(name, default)

    def to_dict(self) -> dict[str, Any]:
        return self._values


class Recipe:
    """`setup` creates all parts and resumes from `cfg["checkpoint.restore_from"]`. `run_train_validation_loop` trains."""

    STEP, VALIDATION = "_run_train_optim_step", "_run_validation_epoch"
    """The names of the methods that train a step and that validate."""

    def __init__(
        self, job: Job, folder: Path, callbacks: Sequence[Any], *, sets: Mapping[str, Any] | None = None,
        cfg: Mapping[str, Any] | None = None, saves: bool = True, is_async: bool = False, model_wrap: Any = None, **schedule: Any,
    ) -> None:  # fmt: skip
        self.cfg = Config(cfg or {})
        self.job, self._callbacks, self._schedule = job, callbacks, schedule
        self._sets = {"default": job.validation_batches()} if sets is None else dict(sets)
        self.checkpointer = SimpleNamespace(config=SimpleNamespace(enabled=saves, checkpoint_dir=str(folder), is_async=is_async))
        self._wrap = model_wrap or (lambda model: model)
        self.losses: list[float] = []
        self.evaluated: list[dict[str, float]] = []

    def setup(self) -> None:
        self.callback_runner = CallbackRunner(list(self._callbacks))
        self.dist_env = SimpleNamespace(rank=0, world_size=1, is_main=True, device=torch.device("cpu"), backend="gloo")
        self.model_parts = [self._wrap(self.job.made_model())]
        self.optimizer = [torch.optim.AdamW(self.model_parts[0].parameters(), lr=0.02)]
        self.lr_scheduler: list[Any] | None = None
        schedule = {"dataloader": self.job.batches(), **self._schedule}
        self.step_scheduler = StepScheduler(schedule.pop("dataloader"), **schedule)
        self.val_dataloaders = self._sets
        if (path := self.cfg.get("checkpoint.restore_from")) is not None:
            state = torch.load(Path(path) / "state.pt")
            self.model_parts[0].load_state_dict(state["model"])
            self.optimizer[0].load_state_dict(state["optimizer"])
            self.step_scheduler.step, self.step_scheduler.epoch = state["step"], state["epoch"]

    def run_train_validation_loop(self) -> None:
        earlier = signal.signal(signal.SIGTERM, self.step_scheduler.receive)
        try:
            self._loop()
        finally:
            signal.signal(signal.SIGTERM, earlier)

    def _loop(self) -> None:
        model, scheduler, recorded = self.model_parts[0], self.step_scheduler, self.callback_runner
        model.train()
        recorded.on_train_start(self)
        for epoch in scheduler.epochs:
            scheduler.epoch = epoch
            for batches in scheduler:
                sample = getattr(self, self.STEP)(batches)
                self.losses.append(sample.metrics["loss"])
                recorded.on_train_batch_end(self, train_log_data=sample)
                found: dict[str, MetricsSample] = {}
                if scheduler.is_val_step:
                    found = {name: getattr(self, self.VALIDATION)(loader) for name, loader in self.val_dataloaders.items()}
                    self.evaluated.append({name: each.metrics["val_loss"] for name, each in found.items()})
                    recorded.on_validation_end(self, val_results=found)
                    model.train()
                if scheduler.is_ckpt_step:
                    self._save(epoch, sample, found)
        recorded.on_train_end(self)

    def _run_train_optim_step(self, batches: list[Any]) -> MetricsSample:
        model, (optimizer,) = self.model_parts[0], self.optimizer
        total = torch.zeros(())
        for inputs, targets in batches:
            loss = self.job.loss(model(inputs), targets) / len(batches)
            total = total + loss.detach()
            loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        optimizer.step()
        optimizer.zero_grad()
        for schedule in self.lr_scheduler or ():
            schedule.step()
        rate = optimizer.param_groups[0]["lr"]
        metrics = {"loss": total.item(), "grad_norm": norm.item(), "lr": rate, "mem": 0.0, "tps": 1.0, "num_label_tokens": 4}
        return MetricsSample(self.step_scheduler.step, self.step_scheduler.epoch, metrics)

    @torch.no_grad()
    def _run_validation_epoch(self, loader: Any) -> MetricsSample:
        model = self.model_parts[0]
        model.eval()
        with torch.random.fork_rng(devices=[]):  # random numbers of the evaluation must not change training
            losses = [float(self.job.loss(model(inputs), targets)) for inputs, targets in loader]
        metrics = {"val_loss": sum(losses) / len(losses), "lr": self.optimizer[0].param_groups[0]["lr"], "mem": 0.0}
        return MetricsSample(self.step_scheduler.step, self.step_scheduler.epoch, metrics)

    def _save(self, epoch: int, sample: MetricsSample, found: Mapping[str, MetricsSample]) -> None:
        scheduler, config = self.step_scheduler, self.checkpointer.config
        path = Path(config.checkpoint_dir) / f"epoch_{epoch}_step_{scheduler.step}"
        if config.enabled:
            path.mkdir(parents=True)
            state = {"model": self.model_parts[0].state_dict(), "optimizer": self.optimizer[0].state_dict()}
            torch.save({**state, "step": scheduler.step + 1, "epoch": epoch}, path / "state.pt")
        info = {"epoch": epoch, "step": scheduler.step, "train_loss": sample.metrics["loss"], "checkpoint_path": str(path)}
        losses = {name: each.metrics["val_loss"] for name, each in found.items()}
        self.callback_runner.on_save_checkpoint(
            self, checkpoint_info={**info, "val_losses": losses, "best_metric_key": "default"}
        )


class Nothing(Callback):
    """A callback with the same hooks as the host, which do nothing."""

    def _ignore(self, recipe: Any, **kwargs: Any) -> None: ...


for _hook in HOOKS:
    setattr(Nothing, _hook, Nothing._ignore)


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
    """See `job.TrainFunction`. AutoModel validates whenever it saves, and it always saves at the end of an epoch."""
    torch.manual_seed(3)
    received: list[Any] = []
    if callbacks == EMPTY:
        received = [Nothing()]
    elif callbacks is not None:
        assert not isinstance(callbacks, str)
        received = [host(callbacks, log_interval=f"{job.log_every}ba", strict=strict)]
    recipe = Recipe(
        job,
        folder / "small",
        received,
        dataloader=job.batches(steps_an_epoch=steps_an_epoch),
        num_epochs=epochs,
        sets=None if evaluate else {},
        saves=evaluate,
    )
    recipe.setup()
    recipe.run_train_validation_loop()
    for path in (folder / "small").glob("epoch_*"):
        shutil.rmtree(path)  # delete AutoModel's own checkpoints, so that only the files of callbacks are left
    model: nn.Module = recipe.model_parts[0]
    return model
