"""Facades: objects that represent Lightning's Trainer and its parts when Lightning's callbacks run in callsheet's loop."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from callsheet.bridges.guest_base import Facade
from callsheet.core.context import Context
from callsheet.core.time import Time, TimeUnit
from callsheet.errors import NotSupported

if TYPE_CHECKING:
    from callsheet.bridges.lightning.guests import LightningGuest
    from callsheet.bridges.lightning.module import ModuleFacade


class OfGuest(Facade):
    """The base class of this module's facades: objects that take the place of Lightning's, with values from callsheet's context."""

    def __init__(self, guest: LightningGuest) -> None:
        self._guest = guest

    @property
    def _ctx(self) -> Context:
        ctx: Context = self._guest.ctx
        return ctx


class LoggerFacade(OfGuest):
    """Takes the place of the Trainer's loggers: adds what a Lightning callback logs to callsheet's next record, as `lightning/<name>`."""

    REPLACED_OBJECT = "Lightning's Logger"
    group_separator = "/"
    name = "lightning"
    version = ""

    @property
    def save_dir(self) -> str:
        """The run's folder."""
        return str(self._ctx.run.folder)

    log_dir = root_dir = save_dir

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log numbers by name. `step` has no effect, because a metrics record has the step at which it is made."""
        self._ctx.log({f"lightning/{name}": value for name, value in metrics.items()})

    def log_hyperparams(self, params: Any, *_: Any, **__: Any) -> None:
        """Pass the hyperparameters to callsheet's loggers."""
        self._ctx.log_hyperparameters(dict(params))

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        """Do nothing, because callsheet's loggers handle only callsheet's checkpoints."""

    def save(self) -> None:
        """Do nothing, because callsheet's loggers write by themselves."""

    def finalize(self, status: str) -> None:
        """Do nothing, because callsheet's loggers end with the run."""


class StrategyFacade(OfGuest):
    """Takes the place of `trainer.strategy` when a Lightning callback runs in callsheet's loop. It provides collectives."""

    REPLACED_OBJECT = "Lightning's Strategy"

    @property
    def root_device(self) -> torch.device:
        """The model's device."""
        return torch.device(self._ctx.run.device)

    @property
    def is_global_zero(self) -> bool:
        """Whether this is the process of rank 0."""
        return self._ctx.run.is_world_process_zero

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether `decision` is true on all ranks; with `all=False`, whether it is true on any rank.

        All ranks must call this method, and also `broadcast`, `barrier` and `reduce`.
        """
        votes = [bool(vote) for vote in self._ctx.gather(bool(decision))]
        return min(votes) if all else max(votes)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the `obj` that rank `src` has passed."""
        return self._ctx.gather(obj)[src]

    def barrier(self, name: str | None = None) -> None:
        """Wait until all ranks have called this method."""
        self._ctx.gather(None)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: str = "mean") -> Tensor:
        """Return the mean of the ranks' tensors, or their sum if `reduce_op` is `"sum"`."""
        stacked = torch.stack([torch.as_tensor(each, device=self.root_device) for each in self._ctx.gather(tensor)])
        return stacked.sum(0) if str(reduce_op).lower() == "sum" else stacked.float().mean(0)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Delete a file that `TrainerFacade.save_checkpoint` has written."""
        if self.is_global_zero:
            self._guest.checkpoint_io.remove_checkpoint(filepath)


class AcceleratorFacade(OfGuest):
    """Takes the place of `trainer.accelerator` when a Lightning callback runs in callsheet's loop. It provides device statistics."""

    REPLACED_OBJECT = "Lightning's Accelerator"

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        """Return the device's statistics from Lightning's own accelerator."""
        accelerators = self._guest.package.accelerators
        kind = accelerators.CUDAAccelerator if torch.device(device).type == "cuda" else accelerators.CPUAccelerator
        stats: dict[str, Any] = kind().get_device_stats(device)
        return stats


class ConnectorFacade(OfGuest):
    """Takes the place of the Trainer's logger connector, which says whether Lightning's own callbacks should log now."""

    REPLACED_OBJECT = "Lightning's logger connector"

    @property
    def should_update_logs(self) -> bool:
        """Whether Lightning's own callbacks should log at this batch.

        This is True after every `log_every_n_steps` steps or evaluation batches, and when a stop is requested.
        """
        guest, trainer = self._guest, self._guest.trainer
        number = guest.eval_batches if trainer.evaluating or trainer.predicting else guest.steps_before + 1
        return bool(trainer.log_every_n_steps) and (number % trainer.log_every_n_steps == 0 or trainer.should_stop)

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Pass the metrics to the logger."""
        self._guest.logger.log_metrics(metrics, step)


class _ProgressFacade(OfGuest):
    """A single object that represents Lightning's fit loop, epoch loop and progress counters."""

    REPLACED_OBJECT = "Lightning's loop"

    @property
    def epoch_loop(self) -> _ProgressFacade:
        """This object itself, which takes the place of the fit loop and also of the epoch loop."""
        return self

    batch_progress = total = current = val_loop = epoch_loop

    @property
    def _has_run(self) -> bool:
        return self._guest.has_evaluated

    @property
    def is_last_batch(self) -> bool:
        """Whether the current batch is the last of the epoch. False if the length is not known."""
        return self._ctx.state.epoch_batches == self._ctx.state.timestamp.batch_in_epoch

    @property
    def ready(self) -> int:
        """The number of batches of the current evaluation that have begun."""
        return self._guest.eval_batches

    @property
    def batch_idx(self) -> int:
        """The index of the batch in the epoch."""
        return self._guest.batch_idx

    @property
    def total_batch_idx(self) -> int:
        """The index of the batch among all batches that this process has trained on."""
        return self._guest.total_batch_idx

    @property
    def _batches_that_stepped(self) -> int:
        return self._guest.steps_before

    def _should_accumulate(self) -> bool:
        return not self._guest.is_step_over

    def _should_check_val_epoch(self) -> bool:
        return bool(self._ctx.state.evaluators)


class TrainerFacade(OfGuest):
    """Takes the place of Lightning's Trainer in callsheet's loop. It has the attributes that Lightning callbacks may use.

    Some attributes have fixed values, such as those of the sanity check, which callsheet's loop does not have.
    """

    REPLACED_OBJECT = "Lightning's Trainer"

    sanity_checking = False
    fast_dev_run = False
    barebones = False
    num_sanity_val_steps = 0
    num_sanity_val_batches: list[float] = []
    limit_train_batches = limit_val_batches = limit_test_batches = limit_predict_batches = 1.0
    min_epochs = min_steps = ckpt_path = datamodule = None
    precision = "32-true"

    def __init__(self, guest: LightningGuest, log_every_n_steps: int) -> None:
        super().__init__(guest)
        self._log_every_n_steps = log_every_n_steps
        self._state = guest.package.trainer.states.TrainerState()
        self._strategy = StrategyFacade(guest)
        self._accelerator = AcceleratorFacade(guest)
        self._connector = ConnectorFacade(guest)
        self._progress = _ProgressFacade(guest)
        self._accumulates = 1

    @property
    def log_every_n_steps(self) -> int:
        """The number of steps between two logs, as given to `guest`."""
        return self._log_every_n_steps

    # --- progress ---

    @property
    def state(self) -> Any:
        """The Trainer's state, an object of Lightning's own class with the attributes `fn`, `stage` and `status`."""
        return self._state

    def _set_state(self, fn: str, stage: str) -> None:
        states = self._guest.package.trainer.states
        self._state.fn, self._state.stage = states.TrainerFn(fn), states.RunningStage(stage)

    @property
    def training(self) -> bool:
        """Whether training is running."""
        return bool(self._state.stage == "train")

    @property
    def validating(self) -> bool:
        """Whether an evaluation on validation data is running."""
        return bool(self._state.stage == "validate")

    @property
    def testing(self) -> bool:
        """Whether a test is running."""
        return bool(self._state.stage == "test")

    @property
    def predicting(self) -> bool:
        """Whether a prediction is running."""
        return bool(self._state.stage == "predict")

    @property
    def evaluating(self) -> bool:
        """Whether an evaluation or a test is running."""
        return self.validating or self.testing

    @property
    def current_epoch(self) -> int:
        """The index of the current epoch. After the last epoch, the number of epochs."""
        return self._guest.epoch

    @property
    def global_step(self) -> int:
        """The number of optimizer steps so far."""
        return self._ctx.state.timestamp.batch

    @property
    def max_epochs(self) -> int:
        """The length of training in epochs; -1 if the user has not set it in epochs."""
        return self._longest(TimeUnit.EPOCH)

    @property
    def max_steps(self) -> int:
        """The length of training in optimizer steps; -1 if the user has not set it in steps."""
        return self._longest(TimeUnit.BATCH)

    def _longest(self, unit: TimeUnit) -> int:
        longest = self._ctx.state.max_duration
        return int(longest.value) if longest is not None and longest.unit is unit else -1

    @property
    def num_training_batches(self) -> int | float:
        """The number of batches in an epoch, or infinity if it is not known."""
        steps = self._ctx.state.epoch_batches
        return math.inf if steps is None else steps * self._accumulates

    @property
    def num_val_batches(self) -> list[float]:
        """A list with infinity for each evaluation dataset, because the numbers of their batches are not known."""
        return [math.inf] * len(self._ctx.state.evaluators)

    @property
    def num_test_batches(self) -> list[float]:
        """A list with infinity, because the number of test batches is not known."""
        return [math.inf]

    num_predict_batches = num_test_batches

    @property
    def estimated_stepping_batches(self) -> int | float:
        """The number of optimizer steps of the whole training, or infinity if it is not known."""
        steps, epochs = self._ctx.state.epoch_batches, self.max_epochs
        return self.max_steps if self.max_steps >= 0 else math.inf if steps is None or epochs < 0 else steps * epochs

    @property
    def _eval_interval(self) -> Time | None:
        interval = self._ctx.run.eval_interval
        return Time.parse(interval) if interval else None

    @property
    def val_check_interval(self) -> int | float:
        """How often an evaluation is made: the number of steps, or 1.0 if evaluations are made at the ends of epochs."""
        interval = self._eval_interval
        if interval is None or interval.unit is TimeUnit.EPOCH:
            return 1.0
        # For other units, return 0.5, which means evaluations within an epoch.
        return int(interval.value) if interval.unit is TimeUnit.BATCH else 0.5

    @property
    def check_val_every_n_epoch(self) -> int | None:
        """The number of epochs between two evaluations; None if evaluations are not made at the ends of epochs."""
        interval = self._eval_interval
        if interval is None:
            return 1
        return int(interval.value) if interval.unit is TimeUnit.EPOCH else None

    @property
    def enable_validation(self) -> bool:
        """Whether there are evaluation datasets."""
        return bool(self._ctx.state.evaluators)

    @property
    def is_last_batch(self) -> bool:
        """Whether the current batch is the last of the epoch. False if the length is not known."""
        return self._progress.is_last_batch

    @property
    def fit_loop(self) -> _ProgressFacade:
        """The object that takes the place of Lightning's fit loop, and has the progress of training."""
        return self._progress

    _evaluation_loop = predict_loop = val_loop = fit_loop

    # --- ranks and folders ---

    @property
    def is_global_zero(self) -> bool:
        """Whether this is the process of rank 0."""
        return self._ctx.run.is_world_process_zero

    @property
    def global_rank(self) -> int:
        """The rank of this process."""
        return self._ctx.run.rank

    @property
    def local_rank(self) -> int:
        """The rank of this process on its node."""
        return self._ctx.run.local_rank

    @property
    def node_rank(self) -> int:
        """The rank of this node."""
        return self._ctx.run.node_rank

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return self._ctx.run.world_size

    num_devices = world_size

    @property
    def default_root_dir(self) -> str:
        """The run's folder."""
        return str(self._ctx.run.folder)

    log_dir = default_root_dir

    # --- the Trainer's parts ---

    @property
    def callbacks(self) -> list[Any]:
        """A list with only the Lightning callback that runs in callsheet's loop."""
        return [self._guest.foreign]

    @property
    def progress_bar_callback(self) -> Any:
        """The Lightning callback that runs in callsheet's loop, if it is a progress bar."""
        foreign = self._guest.foreign
        return foreign if isinstance(foreign, self._guest.package.callbacks.ProgressBar) else None

    @property
    def loggers(self) -> list[LoggerFacade]:
        """A list with a single logger, which represents all of callsheet's loggers."""
        return [self._guest.logger]

    @property
    def logger(self) -> LoggerFacade:
        """A single logger, which represents all of callsheet's loggers."""
        return self._guest.logger

    @property
    def strategy(self) -> StrategyFacade:
        """The object that takes the place of Lightning's strategy."""
        return self._strategy

    @property
    def accelerator(self) -> AcceleratorFacade:
        """The object that represents Lightning's accelerator."""
        return self._accelerator

    @property
    def precision_plugin(self) -> Any:
        """Lightning's default precision plugin, for 32-bit training."""
        return self._guest.package.plugins.precision.Precision()

    @property
    def _logger_connector(self) -> ConnectorFacade:
        return self._connector

    @property
    def lightning_module(self) -> ModuleFacade:
        """The model, as an object that takes the place of the LightningModule."""
        return self._guest.module

    model = lightning_module

    @property
    def optimizers(self) -> list[Any]:
        """A list with the optimizer; empty if there is none."""
        return [self._ctx.optimizer] if self._ctx.has("optimizer") and self._ctx.optimizer is not None else []

    @property
    def lr_scheduler_configs(self) -> list[Any]:
        """A list with Lightning's configuration of a scheduler that steps after each training step; empty if there is none."""
        scheduler = self._ctx.scheduler if self._ctx.has("scheduler") else None
        kind = self._guest.package.utilities.types.LRSchedulerConfig
        return [] if scheduler is None else [kind(scheduler, interval="step")]

    @property
    def callback_metrics(self) -> dict[str, Tensor]:
        """The latest metrics, each under callsheet's name and Lightning's name, such as `validation/loss` and `val_loss`."""
        return self._guest.metrics()

    logged_metrics = callback_metrics

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """The metrics that the callback has logged with `prog_bar=True`."""
        return self._guest.progress

    # --- requests ---

    @property
    def should_stop(self) -> bool:
        """Whether a stop was requested.

        Setting the property to True requests a stop. A request cannot be withdrawn.
        """
        return self._ctx.control.stop_requested is not None

    @should_stop.setter
    def should_stop(self, value: Any) -> None:
        """Request a stop of callsheet's loop, if `value` is true."""
        if value and not self.should_stop:
            self._ctx.control.stop(f"{type(self._guest.foreign).__name__} has set trainer.should_stop")

    @property
    def accumulate_grad_batches(self) -> int:
        """The number of batches per step that a callback has set, or 1. A new value takes effect at the next step."""
        return self._accumulates

    @accumulate_grad_batches.setter
    def accumulate_grad_batches(self, value: int) -> None:
        """Request this number of batches per step, from the next step on."""
        if value != self._accumulates:
            self._ctx.control.set_gradient_accumulation(value)
            self._accumulates = value

    def save_checkpoint(self, filepath: Any, weights_only: bool | None = None, storage_options: Any = None) -> None:
        """Write a checkpoint in Lightning's format, on rank 0 only; see `LightningGuest.checkpoint`."""
        if any(type(parameter).__name__ == "DTensor" for parameter in self._ctx.model.parameters()):
            raise NotSupported(
                "the model is sharded, so that no rank can write it into one file; save it with callsheet's CheckpointSaver"
            )
        if self.is_global_zero:
            self._guest.checkpoint_io.save_checkpoint(self._guest.checkpoint(weights_only=bool(weights_only)), filepath)
        self._strategy.barrier()

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print the arguments, on rank 0 only."""
        if self.is_global_zero:
            print(*args, **kwargs)
