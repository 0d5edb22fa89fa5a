"""The bare bridge: runs callbacks in a hand-written training loop, to which only three lines are added."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from callsheet.core.optional import needed_by
from callsheet.run.defaults import LOCK_TIMEOUT_SECONDS, LOG_INTERVAL, TIMEOUT_SECONDS

with needed_by("callsheet.attach"):
    from torch import nn
    from torch.amp import GradScaler
    from torch.optim import Optimizer

from callsheet.bridges.attached_run import AttachedRun
from callsheet.bridges.data_position import DataPosition
from callsheet.bridges.host_parts import Evaluates
from callsheet.bridges.hosted_run import HostedRun
from callsheet.bridges.loop_arguments import check_accumulation, check_model, check_others, torch_optimizer, without_ddp
from callsheet.bridges.versions import check_versions
from callsheet.core.callback import Callback
from callsheet.core.callbacks_argument import manager_of
from callsheet.core.familiar_names import TRAINER_ARGUMENTS
from callsheet.core.manager import CallbackManager
from callsheet.core.time import Time
from callsheet.errors import names_unknown
from callsheet.run.parts import Stateful
from callsheet.run.run_names import check_run_name
from callsheet.run.signals import PreemptSignals, signals_of

_SHARED_ARGUMENTS = ("gradient_accumulation_steps", "max_duration", "log_interval", "loggers", "resume", "callbacks", "scheduler")
"""Arguments of the Trainer that `attach` has too."""

_EVALUATION_ARGUMENTS = ("eval_interval", "eval_dataloader")
"""Arguments of the Trainer about evaluations, which `attach` does not have."""
_EVALUATION_HINT = (
    "the results of each evaluation that the loop makes to run.evaluated({'validation': {'loss': ...}}); evaluate=FUNCTION makes those that "
    "callbacks ask for"
)
"""The part of an error message that says what to use in `attach` instead of the arguments in `_EVALUATION_ARGUMENTS`."""


def _familiar() -> dict[str, str]:
    """Return what to pass to `attach` instead of arguments of the Trainer or of other frameworks, by the argument's name."""
    of_evaluation = {
        name: _EVALUATION_HINT for name, meant in TRAINER_ARGUMENTS.items() if meant.startswith(_EVALUATION_ARGUMENTS)
    }
    shared = {name: meant for name, meant in TRAINER_ARGUMENTS.items() if meant.partition("=")[0] in _SHARED_ARGUMENTS}
    return shared | of_evaluation | dict.fromkeys(_EVALUATION_ARGUMENTS, _EVALUATION_HINT)


@names_unknown(_familiar)
def attach(
    *,
    model: nn.Module,
    optimizer: Optimizer,
    callbacks: CallbackManager | Callback | Iterable[Callback] | None = None,
    loggers: Iterable[Callback] | None = None,
    scheduler: Stateful | None = None,
    gradient_accumulation_steps: int = 1,
    scaler: GradScaler | None = None,
    max_duration: str | Time | None = None,
    log_interval: str | int | Time = LOG_INTERVAL,
    run_name: str | None = None,
    runs_folder: str | os.PathLike[str] = "runs",
    resume: str | os.PathLike[str] | None = None,
    evaluate: Evaluates | None = None,
    config: Mapping[str, Any] | None = None,
    save_in_background: bool = False,
    preempt_signals: PreemptSignals = ("SIGTERM",),
    timeout_seconds: float = TIMEOUT_SECONDS,
    lock_timeout_seconds: float = LOCK_TIMEOUT_SECONDS,
    strict: bool = True,
) -> AttachedRun:
    """Attach callbacks to a hand-written training loop. The loop must then iterate over the `steps` of the returned run.

    Hooks observe the forward pass in the model, the loss in `backward()`, and the step in the optimizer. The gradient norm is not
    observed. The loss of a step is the sum of the losses on which `backward()` was called.

    Args:
        model: the model that the loop calls. With DDP, callbacks see the module inside the wrapper.
        optimizer: the optimizer that the loop steps. In a wrapper such as fastai's OptimWrapper, torch's optimizer inside is observed.
        callbacks: a manager, a callback, or any iterable of callbacks.
        loggers: more callbacks, called after the others in the phase `report`.
        scheduler: the scheduler to save in checkpoints and to show to callbacks. The loop must step the scheduler itself.
        gradient_accumulation_steps: how many batches the loop uses for one optimizer step. All of them are fetched before the step.
        scaler: the `torch.amp.GradScaler` that scales the loss.
        max_duration: how long to train, such as `"2ep"`. `run.steps` ends then. None: until the loop ends.
        log_interval: how often a metrics record is made. A bare number means batches.
        run_name, runs_folder: the run's name, and the folder that contains the run's folder, in which checkpoints are saved.
        resume: `"auto"` for the newest valid checkpoint of this run, if there is one; a path for that checkpoint; None for a new run.
        evaluate: called without arguments when a callback asks for an evaluation. It returns the results by dataset name, such as
            `{"validation": {"loss": 1.2}}`.
        config: the loop's settings, stored with the run.
        save_in_background: whether to write each checkpoint from a copy of the state, in the background, while training continues.
        preempt_signals: the signals that make the run save a checkpoint and end as preempted.
        timeout_seconds: the run fails if a rank does not answer for this long.
        lock_timeout_seconds: how long to wait while another process trains in the run's folder; then `RunInUseError` is raised.
        strict: whether to raise an error if a callback listens to an event that the loop does not fire; else log a warning.

    Returns:
        The run, a context manager. Inside its `with` block, iterate over `run.steps(batches)`. When the block ends, the run ends.

    Raises:
        ConfigError: an argument is invalid.
        NotSupported: raised at the end of the first step; see `strict`.

    Examples:
        >>> import torch
        >>> from callsheet.callbacks import History
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> data = [(torch.randn(4, 2), torch.randn(4, 1))] * 3
        >>> with attach(model=model, optimizer=optimizer, callbacks=[history := History()], log_interval=1) as run:
        ...     for inputs, targets in run.steps(data):
        ...         loss = torch.nn.functional.mse_loss(model(inputs), targets)
        ...         loss.backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        >>> len(history["train/loss"])
        3
    """
    check_accumulation(gradient_accumulation_steps)
    manager = manager_of(callbacks, loggers)
    check_model(model)
    optimizer = torch_optimizer(optimizer)
    check_others(scheduler=scheduler, evaluate=evaluate, config=config)
    check_run_name(run_name, resume)
    check_versions()
    return AttachedRun(
        HostedRun(
            manager,
            model=without_ddp(model),
            optimizer=optimizer,
            scheduler=scheduler,
            run_name=run_name,
            runs_folder=runs_folder,
            config=config,
            max_duration=max_duration,
            log_interval=log_interval,
            evaluates=evaluate,
            signals=("SIGINT", *signals_of(preempt_signals)),
            save_in_background=save_in_background,
            timeout_seconds=timeout_seconds,
            lock_timeout_seconds=lock_timeout_seconds,
        ),
        model,
        optimizer,
        gradient_accumulation_steps=gradient_accumulation_steps,
        scaler=scaler,
        position=DataPosition(),
        resume=os.fspath(resume) if resume is not None else None,
        strict=strict,
    )
