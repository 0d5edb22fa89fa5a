"""A small copy of Megatron Bridge's training loop, because Megatron Bridge itself needs GPUs. It fires events in the same order.

`interface` returns the package's own module if the package is installed. A wheel without its dependencies is enough.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from importlib import metadata
from itertools import chain, repeat
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from callsheet.bridges.megatron_bridge import FIRED_AT, host
from callsheet.bridges.megatron_bridge import names as megatron_bridge_names

from .job import EMPTY, Given, Job

MODULE = "megatron.bridge.training.callbacks"


def version() -> str:
    """Return the version of the package, or an empty string if it is not installed."""
    try:
        return metadata.version("megatron-bridge")
    except metadata.PackageNotFoundError:
        return ""


def interface() -> ModuleType | None:
    """Return the package's module of callbacks, or None. The rest of the package needs a GPU."""
    if MODULE in sys.modules:
        return sys.modules[MODULE]
    if not version():
        return None
    file = metadata.distribution("megatron-bridge").locate_file(f"{MODULE.replace('.', '/')}.py")
    spec = importlib.util.spec_from_file_location(MODULE, str(file))
    assert spec is not None
    assert spec.loader is not None
    sys.modules[MODULE] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


NAME, VERSION = "Megatron Bridge", "0.3.1's interface, with the two events that came later"
HOW = "Megatron Bridge can train only on GPUs, so a copy of its loop in the tests fires its events in the same order"


class Optimizer:
    """Like Megatron's optimizer: wraps torch's, clips gradients, and skips the step if the gradient norm is not finite."""

    def __init__(self, optimizer: torch.optim.Optimizer, clip: float | None) -> None:
        self.optimizer = optimizer
        self.clip = clip

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def step(self) -> tuple[bool, float | None, None]:
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        norm = None
        if self.clip is not None:
            norm = float(torch.nn.utils.clip_grad_norm_(parameters, self.clip))
            if not torch.isfinite(torch.tensor(norm)):
                return False, norm, None
        self.optimizer.step()
        return True, norm, None


class Float16Module(nn.Module):
    """A wrapper around a model chunk, as in Megatron's list of models."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, inputs: Tensor) -> Any:
        return self.module(inputs)


def configuration(folder: Path | None = None, **values: Any) -> SimpleNamespace:
    """Return a small configuration. The names in `values` begin with their section, as in `train__train_iters=3`."""
    save = str(folder) if folder is not None else None
    cfg = SimpleNamespace(
        train=SimpleNamespace(
            train_iters=12, eval_interval=6, eval_iters=3, global_batch_size=4, micro_batch_size=4, skip_train=False
        ),
        model=SimpleNamespace(seq_length=1, pipeline_model_parallel_size=1),
        checkpoint=SimpleNamespace(save=save, load=save, save_interval=1000, async_save=False),
        logger=SimpleNamespace(log_interval=2),
    )
    for name, value in values.items():
        section, _, key = name.partition("__")
        setattr(getattr(cfg, section), key, value)
    return cfg


class Loop:
    """Megatron Bridge's `pretrain`, reduced to training, checkpoints and events."""

    def __init__(
        self, cfg: Any, job: Job, callbacks: Any, *, names: ModuleType, scheduler: bool = False, clip: float | None = 1.0
    ) -> None:
        self.cfg, self.job, self.names = cfg, job, names
        self.data, self.validation = (
            list(job.batches()),
            list(job.validation_batches()),
        )  # lists, because iterating over a list draws no random numbers
        torch.manual_seed(3)
        self.manager = names.normalize_callbacks(callbacks)
        train_state = SimpleNamespace(
            step=0, consumed_train_samples=0, do_train=True, do_valid=cfg.train.eval_iters > 0, do_test=cfg.train.eval_iters > 0
        )
        self.state = SimpleNamespace(cfg=cfg, train_state=train_state, signal_handler=SimpleNamespace(_signal_received=False))
        self.model = [Float16Module(job.made_model())]
        inner = torch.optim.AdamW(self.model[0].parameters(), lr=0.02)
        self.optimizer = Optimizer(inner, clip)
        self.scheduler = torch.optim.lr_scheduler.StepLR(inner, 1, gamma=0.9) if scheduler else None
        self.microbatches = cfg.train.global_batch_size // cfg.train.micro_batch_size
        self.losses: list[float] = []
        self.evaluated: list[float] = []
        self.saved: list[int] = []
        self.pending: list[tuple[int, int]] = []  # background saves, with the step at which each is finalized
        self.last_saved = -1

    def fire(self, event: str, **fields: Any) -> None:
        names = self.names
        if event in names.VALID_EVENTS and names.should_fire(self.manager, event):
            self.manager.fire(event, names.CallbackContext(self.state, self.model, self.manager.user_state, **fields))

    def both(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer, "scheduler": self.scheduler}

    def run(self) -> nn.Module:
        cfg, state = self.cfg, self.state.train_state
        self.load()
        self.fire("on_data_init_start", **self.both())
        if not cfg.train.skip_train:
            self.train()
        if state.do_valid:
            self.evaluate("eval")
        if state.do_test:
            self.evaluate("test")
        return self.model[0].module

    def train(self) -> None:
        cfg, state = self.cfg, self.state.train_state
        self.model[0].train()
        batches = self.batches()
        for _ in range(state.step * self.microbatches):
            next(batches)
        self.fire("on_train_start", **self.both())
        while state.step < cfg.train.train_iters:
            self.finalize(blocking=False)
            self.fire("on_train_step_start", **self.both())
            losses, norm, skipped = self.step(batches)
            self.fire("on_train_step_end", **self.both(), loss_dict=losses, grad_norm=norm, skipped_iter=skipped)
            state.step += 1
            state.consumed_train_samples += cfg.train.global_batch_size
            if state.do_valid and cfg.train.eval_interval and state.step % cfg.train.eval_interval == 0:
                self.evaluate("eval")
            if self.state.signal_handler._signal_received:
                self.save()
                raise SystemExit(0)
            if cfg.checkpoint.save and cfg.checkpoint.save_interval and state.step % cfg.checkpoint.save_interval == 0:
                self.save()
        if cfg.checkpoint.save and state.step != self.last_saved:
            self.save()
        self.finalize(blocking=True)
        self.fire("on_train_end", **self.both())

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in repeat(None):
            yield from self.data

    def step(self, batches: Iterator[tuple[Tensor, Tensor]]) -> tuple[dict[str, Tensor], float | None, bool]:
        self.optimizer.optimizer.zero_grad()
        losses = []
        for _ in range(self.microbatches):
            inputs, targets = next(batches)
            loss = self.job.loss(self.model[0](inputs), targets)
            torch.autograd.backward(loss / self.microbatches)
            losses.append(loss.detach())
        succeeded, norm, _ = self.optimizer.step()
        if succeeded and self.scheduler is not None:
            self.scheduler.step()
        mean = torch.stack(losses).mean()
        self.losses.append(mean.item())
        return {"lm loss": mean, "load balancing loss": mean * 2}, norm, not succeeded

    def evaluate(self, kind: str) -> None:
        self.fire(f"on_{kind}_start")
        self.model[0].eval()
        losses = []
        validation = chain.from_iterable(repeat(self.validation))
        with torch.no_grad():
            for _ in range(self.cfg.train.eval_iters):
                self.fire(f"on_{kind}_step_start")
                for _ in range(self.microbatches):
                    inputs, targets = next(validation)
                    losses.append(self.job.loss(self.model[0](inputs), targets))
                self.fire(f"on_{kind}_step_end")
        self.evaluated.append(torch.stack(losses).mean().item())
        self.fire(f"on_{kind}_end", total_loss_dict={"lm loss": torch.stack(losses).mean()})
        self.model[0].train()

    def save(self) -> None:
        """Save at once, or in the background, where the checkpoint is finalized two steps later."""
        self.last_saved = step = self.state.train_state.step
        path = Path(self.cfg.checkpoint.save) / f"iter_{step:07d}"
        path.mkdir(parents=True)
        torch.save([self.model[0].state_dict(), self.optimizer.optimizer.state_dict(), torch.get_rng_state()], path / "state.pt")
        self.pending.append((step, step + 2 if self.cfg.checkpoint.async_save else step))
        if not self.cfg.checkpoint.async_save:
            self.finalize(blocking=True)

    def finalize(self, *, blocking: bool) -> None:
        while self.pending and (blocking or self.state.train_state.step >= self.pending[0][1]):
            step, _ = self.pending.pop(0)
            (Path(self.cfg.checkpoint.save) / "latest_checkpointed_iteration.txt").write_text(str(step))
            self.saved.append(step)
            self.fire("on_checkpoint_save", optimizer=self.optimizer)

    def load(self) -> None:
        note = Path(self.cfg.checkpoint.load or "nowhere") / "latest_checkpointed_iteration.txt"
        if note.is_file():
            self.state.train_state.step = step = int(note.read_text())
            model, optimizer, random = torch.load(note.parent / f"iter_{step:07d}" / "state.pt", weights_only=True)
            self.model[0].load_state_dict(model)
            self.optimizer.optimizer.load_state_dict(optimizer)
            torch.set_rng_state(random)


def empty(names: ModuleType) -> Any:
    """Return a callback of that interface with the hooks of the host, which do nothing."""
    received = set(FIRED_AT) - {"on_data_init_start"}
    return type("Empty", (names.Callback,), {event: (lambda self, context: None) for event in received})()


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
    names = megatron_bridge_names
    given: Any = None
    if callbacks == EMPTY:
        given = [empty(names)]
    elif callbacks is not None:
        given = [host(callbacks, strict=strict)]  # type: ignore[arg-type]  # a string is EMPTY
    cfg = configuration(
        folder / "checkpoints",
        train__train_iters=epochs * steps_an_epoch,
        train__eval_interval=steps_an_epoch if evaluate else None,
        train__eval_iters=3 if evaluate else 0,
        logger__log_interval=job.log_every,
    )
    return Loop(cfg, job, given, names=names).run()
