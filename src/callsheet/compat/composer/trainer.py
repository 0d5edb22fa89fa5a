"""Composer's Trainer, implemented by callsheet's Trainer."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from callsheet import trainer as callsheet_trainer
from callsheet.bridges.composer.guests import ComposerGuest, guest
from callsheet.bridges.composer.names import Callback as ComposerCallback
from callsheet.bridges.composer.run import ComposerRun, Kinds
from callsheet.bridges.composer.state import Logger, State
from callsheet.bridges.composer.time import Time
from callsheet.callbacks import CheckpointSaver, LoadCheckpoint
from callsheet.compat.composer.arguments import interval_of, is_never, microbatch_size_of, one, precision_of, several
from callsheet.compat.composer.data import loader_of
from callsheet.compat.composer.evaluators import evaluators_of
from callsheet.compat.composer.models import (
    ComposerModel,
    EpochScheduler,
    ModelTask,
    StateScheduler,
    StepsSchedulers,
    TrainMetrics,
)
from callsheet.compat.composer.rejections import reject_all, reject_others
from callsheet.compat.composer.submodules import offer
from callsheet.core.callback import Callback
from callsheet.loggers import ConsoleLogger, ProgressBarLogger

logger = logging.getLogger("callsheet")

_EVENTS_AFTER_OUTPUTS = ("before_backward", "after_backward", "after_train_batch", "batch_end")
"""Events of a step at which callbacks may read the outputs, although training does not need them any more."""


class Trainer:
    """Composer's Trainer, with the arguments that callsheet supports.

    The model gets whole batches in `model(batch)` and `model.loss(outputs, batch)`, and also in `eval_forward`, `get_metrics` and
    `update_metric` if it has them. Callbacks and loggers may be those of Composer, of `callsheet.compat.composer`, or of
    callsheet. Composer's events are fired in Composer's order. `state` and `logger` are the objects that callbacks receive.

    Algorithms, and everything else that callsheet does not have, are rejected; see the page "Composer".

    Args:
        model: the model to train, such as a `ComposerModel`.
        train_dataloader: an iterable of batches, or a `DataSpec`; None: the Trainer only evaluates or predicts.
        train_subset_num_batches: how many batches of an epoch are used; -1: all.
        max_duration: how long to train, such as `"2ep"`; a number means epochs. None: one epoch.
        optimizers: an optimizer, alone or in a list; None: SGD with a learning rate of 0.1, as in Composer, with a warning.
        schedulers: schedulers of torch, or functions of the state that return a factor for the learning rate; one or several.
        step_schedulers_every_batch: whether the schedulers are stepped after every batch, and not after every epoch. None: after
            every epoch if one of them is a scheduler of torch, otherwise after every batch.
        eval_dataloader: a dataloader, a `DataSpec`, an `Evaluator`, or a list of these; None: no evaluation.
        eval_interval: how often to evaluate; a number means epochs, and 0 means never during training.
        eval_subset_num_batches: how many batches of an evaluation are used; -1: all.
        callbacks, loggers: one or several.
        run_name: the name of the run; None: a name is generated.
        progress_bar: whether to show a progress bar, unless `log_to_console` is set.
        log_to_console: whether to print metrics as lines to the standard error output.
        console_log_interval: how often these lines are printed.
        load_path: the folder of a checkpoint of callsheet to resume from, if any.
        load_weights_only: whether only the model's weights are loaded from `load_path`, into a new run.
        load_strict_model_weights: with `load_weights_only`, whether the names of all weights must match.
        save_folder: the folder for checkpoints; None: none are saved at an interval.
        save_interval: how often to save; 0 means never.
        save_num_checkpoints_to_keep: how many checkpoints to keep; -1: all.
        autoresume: whether to resume from the newest valid checkpoint of this run, if there is one.
        device: `cpu` or `gpu`; None: a GPU if there is one.
        precision: `fp32`, `amp_bf16` or `amp_fp16`; None: `fp32`.
        device_train_microbatch_size: the number of samples in one forward and backward pass; None: the whole batch.
        seed: the seed of the random numbers; None: no seed is set.
        dist_timeout: how many seconds a rank waits for an answer of the other ranks before the run fails.
        compile_config: arguments of `torch.compile`; None: the model is not compiled.
        others: other arguments of Composer's Trainer, which must have Composer's defaults.

    Raises:
        NotSupported: an argument is not supported; the message names it, and has a hint.
        ConfigError: an argument cannot work.
        TypeError: Composer's Trainer has no such argument.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        train_dataloader: Any = None,
        train_subset_num_batches: int = -1,
        max_duration: Any = None,
        optimizers: Any = None,
        schedulers: Any = None,
        step_schedulers_every_batch: bool | None = None,
        eval_dataloader: Any = None,
        eval_interval: Any = 1,
        eval_subset_num_batches: int = -1,
        callbacks: Any = None,
        loggers: Any = None,
        run_name: str | None = None,
        progress_bar: bool = True,
        log_to_console: bool = False,
        console_log_interval: Any = "1ba",
        load_path: str | None = None,
        load_weights_only: bool = False,
        load_strict_model_weights: bool = True,
        save_folder: str | os.PathLike[str] | None = None,
        save_interval: Any = "1ep",
        save_num_checkpoints_to_keep: int = -1,
        autoresume: bool = False,
        device: Any = None,
        precision: Any = None,
        device_train_microbatch_size: Any = None,
        seed: int | None = None,
        dist_timeout: float = 300.0,
        compile_config: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> None:
        reject_others(others)
        self._of_kind: dict[str, int] = {}
        self._shared = run = ComposerRun(Kinds.of(ComposerCallback()))
        self.state: State = run.state
        self.logger: Logger = run.logger
        if train_dataloader is not None and optimizers is None:
            logger.warning("no optimizers were given: SGD with a learning rate of 0.1, as Composer's default")
        optimizer = one("optimizers", optimizers) or torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = self._scheduler(schedulers, optimizer, step_schedulers_every_batch)
        own: list[Callback] = [
            # Keep Composer's counts of samples and tokens up to date, even if the user gives no Composer callback.
            ComposerGuest(ComposerCallback(), name="composer", phase="change", run=run),
            *([StepsSchedulers(scheduler, run)] if scheduler is not None else []),
            *self._training_metrics(model),
            *map(self._ours, several(callbacks)),
        ]
        if save_folder is not None and not is_never(save_interval):
            keep = None if save_num_checkpoints_to_keep < 0 else save_num_checkpoints_to_keep
            own.append(CheckpointSaver(save_interval=interval_of("save_interval", save_interval), keep=keep))
        if load_path is not None and load_weights_only:
            own.append(LoadCheckpoint(path=load_path, strict=load_strict_model_weights))
        all_loggers = [self._ours(each) for each in several(loggers)]
        if log_to_console:
            all_loggers.append(ConsoleLogger(stream="stderr", interval=interval_of("console_log_interval", console_log_interval)))
        elif progress_bar:
            all_loggers.append(ProgressBarLogger())
        self._task = ModelTask(model)
        self._eval_dataloader = eval_dataloader
        if isinstance(model, ComposerModel):
            model.logger = run.logger
        self._trainer = callsheet_trainer.Trainer(
            model,
            self._task,
            loader_of(train_dataloader, train_subset_num_batches),
            evaluators_of(eval_dataloader, eval_subset_num_batches) or None,
            optimizer=optimizer,
            scheduler=scheduler,
            max_duration=interval_of("max_duration", max_duration) if max_duration is not None else "1ep",
            microbatch_size=microbatch_size_of(device_train_microbatch_size),
            precision=precision_of(precision),
            eval_interval=None if is_never(eval_interval) else interval_of("eval_interval", eval_interval),
            log_interval=1,  # Composer's loggers receive a record of every batch
            compile=dict(compile_config) if compile_config is not None else False,
            callbacks=own,
            loggers=all_loggers,
            progress=False,
            run_name=run_name,
            checkpoints_folder=save_folder,
            resume="auto" if autoresume else load_path if not load_weights_only else None,
            seed=seed,
            device={"gpu": "cuda", None: "auto"}.get(device, device),
            timeout_seconds=dist_timeout,
        )
        run.ctx = self._trainer.ctx

    def fit(self, *, duration: Any = None, **others: Any) -> None:
        """Train until `max_duration`, or for a given duration from the current point.

        Args:
            duration: how long to train from the current point, such as `"100ba"`; a number means epochs. None: until
                `max_duration`.
            others: must be empty.

        Raises:
            NotSupported: any other argument is given; pass it to the Trainer instead.
        """
        reject_all("fit", others)
        longest = None
        if duration is not None:
            time = Time.from_input(duration, "ep")
            longest = str(self.state.timestamp.get(time.unit) + time)
        self._trainer.fit(longest)

    def eval(self, eval_dataloader: Any = None, subset_num_batches: int = -1) -> None:
        """Evaluate the model, and set `state.eval_metrics` to the results.

        Args:
            eval_dataloader: what to evaluate; see the constructor. None: the data of the constructor.
            subset_num_batches: how many batches are used; -1: all.
        """
        if eval_dataloader is None and subset_num_batches >= 0:
            eval_dataloader = self._eval_dataloader
        given = evaluators_of(eval_dataloader, subset_num_batches) if eval_dataloader is not None else None
        self._trainer.evaluate({name: evaluator.dataloader for name, evaluator in given.items()} if given else None)

    def predict(self, dataloader: Any, subset_num_batches: int = -1, *, return_outputs: bool = True) -> list[Any]:
        """Return the model's outputs on the CPU, one item per batch.

        Args:
            dataloader: an iterable of batches, or a `DataSpec`.
            subset_num_batches: how many batches are used; -1: all.
            return_outputs: whether to return the outputs. If not, the list is empty: callbacks receive the outputs.
        """
        self._task.is_predicting = True
        try:
            outputs = self._trainer.predict(loader_of(dataloader, subset_num_batches))
        finally:
            self._task.is_predicting = False
        return [_to_cpu(each) for each in outputs] if return_outputs else []

    def save_checkpoint(self, name: str | None = None) -> str:
        """Write a checkpoint folder, and wait until all of its files are safely stored.

        Args:
            name: the path of the folder; None: a folder among the run's checkpoints.

        Returns:
            The path of the folder.
        """
        return self._trainer.save_checkpoint(name).path

    def close(self) -> None:
        """End the run and close all callbacks."""
        self._trainer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None) -> None:
        self._trainer.__exit__(kind, error, frames)

    def _ours(self, given: Any) -> Callback:
        """Return a callsheet callback unchanged. Wrap a Composer callback in a guest, an adapter through which callsheet calls it."""
        if isinstance(given, Callback):
            return given
        kind = type(given).__name__
        # Number the names, so that several callbacks of one class each keep their own state.
        self._of_kind[kind] = self._of_kind.get(kind, 0) + 1
        name = kind if self._of_kind[kind] == 1 else f"{kind}-{self._of_kind[kind]}"
        wrapped = guest(given, name=name, run=None if Kinds.of(given).is_theirs else self._shared)
        if any(wrapped.listens_to(event) for event in _EVENTS_AFTER_OUTPUTS):
            wrapped.keep_fields = ("outputs",)  # Composer keeps the outputs until the next forward pass
        return wrapped

    def _training_metrics(self, model: Any) -> list[Callback]:
        """Return a list with the callback that updates the model's training metrics, or an empty list if the model has none."""
        metrics = model.get_metrics(is_train=True) if hasattr(model, "get_metrics") else {}
        if not metrics:
            return []
        measuring = TrainMetrics(model, metrics)
        self._shared.train_metrics = measuring.metrics
        return [measuring]

    def _scheduler(self, schedulers: Any, optimizer: Any, every_batch: bool | None) -> EpochScheduler | None:
        given = several(schedulers)
        if not given:
            return None
        if every_batch is None:  # by default, torch's schedulers step after every epoch, and Composer's after every batch
            every_batch = not any(isinstance(each, LRScheduler) for each in given)
        return EpochScheduler(
            optimizer,
            [each if isinstance(each, LRScheduler) else self._make_scheduler(each, optimizer) for each in given],
            every_batch=every_batch,
        )

    def _make_scheduler(self, scheduler: Callable[..., float], optimizer: Any) -> LRScheduler:
        """Make a torch scheduler from a Composer scheduler, which is a function that returns a factor for the learning rates.

        If the function takes a second argument, Composer's scale ratio, it gets 1.0.
        """
        takes_ratio = len(inspect.signature(scheduler).parameters) > 1

        def factor(_: int) -> float:
            if self._shared.ctx is None:
                return 1.0  # the scheduler is being made; `StepsSchedulers` sets the first learning rate when training begins
            return scheduler(self.state, 1.0) if takes_ratio else scheduler(self.state)

        return StateScheduler(optimizer, factor)


def _to_cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.cpu()
    if isinstance(value, Mapping):
        return {name: _to_cpu(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_to_cpu, value))
    return value


offer(__name__, {"trainer": "Trainer"})
