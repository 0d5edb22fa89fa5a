"""The Ignite bridge: callsheet's callbacks attached to an Engine, and Ignite's handlers as callbacks of callsheet."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from callsheet.core.optional import needed_by

with needed_by(__name__):
    from ignite.engine import Engine
    from torch import nn
    from torch.optim import Optimizer

from callsheet.bridges.bare import check_model, torch_optimizer
from callsheet.bridges.ignite.engine import GuestEngine
from callsheet.bridges.ignite.guests import IgniteGuest, guest
from callsheet.bridges.ignite.hosts import IgniteHost
from callsheet.bridges.ignite.moments import FIRED_AT, FIRED_AT_EVALUATION, NOT_FIRED
from callsheet.core.callback import Callback
from callsheet.core.manager import CallbackManager
from callsheet.core.time import Time
from callsheet.errors import ConfigError
from callsheet.run.run_lock import LOCK_TIMEOUT_SECONDS

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
    """Return the callbacks as one Ignite handler: `host([...], model=model, optimizer=optimizer).attach(trainer)`.

    A run is one `trainer.run()`. Steps and epochs come from the engine's events, the forward from the model, the loss from `backward`, the
    optimizer's step from the optimizer. If a callback asks for a stop, the host calls `trainer.terminate()`. A run of an evaluator during
    the trainer's run is an evaluation, with the evaluator's metrics as its results.

    Args:
        callbacks: a manager, a callback, or any iterable of callbacks.
        model: the model that the trainer's process function calls. With DDP, callbacks see the module inside the wrapper.
        optimizer: the optimizer that it steps.
        scheduler: the scheduler, for callbacks to read.
        gradient_accumulation_steps: how many iterations the trainer uses for one optimizer step.
        scaler: the `torch.amp.GradScaler` that scales the loss.
        evaluators: evaluators by dataset name, such as `{"validation": evaluator}`. Evaluators that run one after the other are one
            evaluation, which ends with the last of them, or when the trainer continues.
        evaluate: runs the evaluators; called without arguments when a callback asks for an evaluation.
        log_interval: how often a metrics record is made. A bare number means batches.
        run_name, runs_folder: the run's name, and the folder that contains the run's folder.
        config: the program's settings, stored with the run.
        preempt_signals: the signals that make the run save a checkpoint and end as preempted. They need a checkpoint handler, see
            `IgniteHost.attach`.
        timeout_seconds: a rank that does not answer for so long fails the run.
        lock_timeout_seconds: how long to wait if another process trains in the run's folder. Then `RunInUseError` is raised.
        strict: whether to raise an error if a callback listens to an event that is not fired; else log a warning.

    Raises:
        ConfigError: an argument is invalid.
        NotSupported: when training begins, or after the first step; see `strict`.
    """
    if (
        isinstance(gradient_accumulation_steps, bool)
        or not isinstance(gradient_accumulation_steps, int)
        or gradient_accumulation_steps < 1
    ):
        raise ConfigError(f"gradient_accumulation_steps={gradient_accumulation_steps!r}: give a whole number above 0")
    if evaluate is not None and not evaluators:
        raise ConfigError("evaluate= runs evaluators; give them with evaluators=, so that callbacks get their results")
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
