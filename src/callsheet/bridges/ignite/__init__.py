"""The Ignite bridge: callsheet's callbacks attached to an Engine, and Ignite's handlers as callbacks here."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from callsheet.extras import needed_by

with needed_by(__name__):
    from ignite.engine import Engine
    from torch import nn
    from torch.optim import Optimizer

from callsheet.bridges.bare import check_model, torch_optimizer
from callsheet.bridges.ignite.engine import GuestEngine
from callsheet.bridges.ignite.guests import IgniteGuest, guest
from callsheet.bridges.ignite.hosts import IgniteHost
from callsheet.bridges.ignite.moments import FIRED_AT, FIRED_AT_EVALUATION, NOT_FIRED
from callsheet.callback import Callback
from callsheet.errors import ConfigError
from callsheet.manager import CallbackManager
from callsheet.run_lock import LOCK_TIMEOUT_SECONDS
from callsheet.time import Time

__all__ = ["FIRED_AT", "FIRED_AT_EVALUATION", "NOT_FIRED", "GuestEngine", "IgniteGuest", "IgniteHost", "guest", "host"]


def host(
    callbacks: CallbackManager | Callback | Iterable[Callback] | None,
    *,
    model: nn.Module,
    optimizer: Optimizer,
    scheduler: Any = None,
    gradient_accumulation_steps: int = 1,
    scaler: Any = None,
    evaluators: Mapping[str, Engine] | None = None,
    evaluate: Callable[[], Any] | None = None,
    log_interval: str | int | Time = "10ba",
    run_name: str | None = None,
    runs_folder: str | os.PathLike[str] = "runs",
    config: Mapping[str, Any] | None = None,
    preempt_signals: Iterable[str] = (),
    timeout_seconds: float = 600.0,
    lock_timeout_seconds: float = LOCK_TIMEOUT_SECONDS,
    strict: bool = True,
) -> IgniteHost:
    """The callbacks as one Ignite handler: `host([...], model=model, optimizer=optimizer).attach(trainer)`.

    A run is one `trainer.run()`. Steps and epochs are told from the engine's events, the forward from the model, the loss from `backward`,
    the optimizer's step from the optimizer. A stop that a callback asks for is `trainer.terminate()`. A run of an evaluator within that of
    the trainer is an evaluation, with the evaluator's metrics as its results.

    Args:
        model: what the trainer's function calls; in DDP's wrapper, callbacks see the module inside.
        optimizer: what it steps.
        scheduler: shown to callbacks.
        gradient_accumulation_steps: how many iterations it takes for one step of the optimizer.
        scaler: the `torch.amp.GradScaler` by which it scales the loss.
        evaluators: by the name of the dataset, such as `{"validation": evaluator}`; those that are run one after the other are one
            evaluation, which is over with the last of them, or when the trainer goes on.
        evaluate: runs them, called without arguments when a callback asks for an evaluation.
        log_interval: how often a record is made; a whole number means batches.
        run_name, runs_folder: of the run and its folder.
        config: the program's settings, for the run's record.
        preempt_signals: which ask the run to save and make way; this needs a checkpoint handler, see `IgniteHost.attach`.
        timeout_seconds: until a rank that does not answer fails the run.
        lock_timeout_seconds: how long to wait if another process trains in the run's folder; then `RunInUseError` is raised.
        strict: whether it is an error that somebody hears an event which is not told; else a warning.

    Raises:
        ConfigError: an argument that cannot work.
        NotSupported: when training begins, or after the first step; see `strict`.
    """
    if (
        isinstance(gradient_accumulation_steps, bool)
        or not isinstance(gradient_accumulation_steps, int)
        or gradient_accumulation_steps < 1
    ):
        raise ConfigError(f"gradient_accumulation_steps={gradient_accumulation_steps!r}: give a whole number above 0")
    if evaluate is not None and not evaluators:
        raise ConfigError("evaluate= runs evaluators; name them with evaluators=, for their results to be told")
    if "train" in (evaluators or {}):
        raise ConfigError("evaluators={'train': ...}: train/loss is the loss of the steps; give that dataset another name")
    check_model(model)
    settings = {
        "optimizer": torch_optimizer(optimizer), "scheduler": scheduler, "run_name": run_name, "runs_folder": runs_folder, "config": config,
        "log_interval": log_interval, "timeout_seconds": timeout_seconds, "signals": tuple(preempt_signals),
        "lock_timeout_seconds": lock_timeout_seconds,
    }  # fmt: skip
    return IgniteHost(
        callbacks, model, settings, gradient_accumulation_steps, scaler, dict(evaluators or {}), evaluate, strict=strict
    )
