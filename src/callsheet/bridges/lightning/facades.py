"""What Lightning's callbacks are given as guests, in the place of the Trainer and of what hangs on it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from callsheet.bridges.guest_base import Facade
from callsheet.context import Context
from callsheet.errors import NotSupported
from callsheet.time import TimeUnit

if TYPE_CHECKING:
    from callsheet.bridges.lightning.guests import LightningGuest
    from callsheet.bridges.lightning.module import ModuleFacade


class OfGuest(Facade):
    """One that looks things up in the guest's context."""

    def __init__(self, guest: LightningGuest) -> None:
        self._guest = guest

    @property
    def _ctx(self) -> Context:
        ctx: Context = self._guest.ctx
        return ctx


class LoggerFacade(OfGuest):
    """A logger, of which there is one: what is given to it goes into the next record, as `lightning/<name>`."""

    OF = "Lightning's Logger"
    group_separator = "/"
    name = "lightning"
    version = ""

    @property
    def save_dir(self) -> str:
        """The run's folder."""
        return str(self._ctx.run.folder)

    log_dir = root_dir = save_dir

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Numbers by name; the step is the record's."""
        self._ctx.log({f"lightning/{name}": value for name, value in metrics.items()})

    def log_hyperparams(self, params: Any, *_: Any, **__: Any) -> None:
        """The settings, for our loggers."""
        self._ctx.log_hyperparameters(dict(params))

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        """Our loggers hear of our checkpoints alone."""

    def save(self) -> None:
        """Our loggers write by themselves."""

    def finalize(self, status: str) -> None:
        """They also end by themselves."""


class StrategyFacade(OfGuest):
    """How the ranks agree."""

    OF = "Lightning's Strategy"

    @property
    def root_device(self) -> torch.device:
        """The model's."""
        return torch.device(self._ctx.run.device)

    @property
    def is_global_zero(self) -> bool:
        """This is the first process of all."""
        return self._ctx.run.is_world_process_zero

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all ranks say yes, or any: a collective, as the other methods are."""
        votes = [bool(vote) for vote in self._ctx.gather(bool(decision))]
        return min(votes) if all else max(votes)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """What the rank `src` says."""
        return self._ctx.gather(obj)[src]

    def barrier(self, name: str | None = None) -> None:
        """All ranks have come here."""
        self._ctx.gather(None)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: str = "mean") -> Tensor:
        """The ranks' mean, or their sum."""
        stacked = torch.stack([torch.as_tensor(each, device=self.root_device) for each in self._ctx.gather(tensor)])
        return stacked.sum(0) if str(reduce_op).lower() == "sum" else stacked.float().mean(0)

    def remove_checkpoint(self, filepath: Any) -> None:
        """A file that `save_checkpoint` has written goes again."""
        if self.is_global_zero:
            self._guest.checkpoint_io.remove_checkpoint(filepath)


class AcceleratorFacade(OfGuest):
    """The device."""

    OF = "Lightning's Accelerator"

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        """What Lightning's own accelerator says of it."""
        accelerators = self._guest.package.accelerators
        kind = accelerators.CUDAAccelerator if torch.device(device).type == "cuda" else accelerators.CPUAccelerator
        stats: dict[str, Any] = kind().get_device_stats(device)
        return stats


class ConnectorFacade(OfGuest):
    """What Lightning's own callbacks ask: whether it is time to log."""

    OF = "Lightning's logger connector"

    @property
    def should_update_logs(self) -> bool:
        """At the step, or the batch of an evaluation, that ends `log_every_n_steps` of them; and when a stop is asked for."""
        guest, trainer = self._guest, self._guest.trainer
        number = guest.judged if trainer.evaluating or trainer.predicting else guest.steps_before + 1
        return bool(trainer.log_every_n_steps) and (number % trainer.log_every_n_steps == 0 or trainer.should_stop)

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """To the logger."""
        self._guest.logger.log_metrics(metrics, step)


class _ProgressFacade(OfGuest):
    """How far the loop is; also the loop itself, and its parts."""

    OF = "Lightning's loop"

    @property
    def epoch_loop(self) -> _ProgressFacade:
        """The same."""
        return self

    batch_progress = total = current = epoch_loop

    @property
    def is_last_batch(self) -> bool:
        """Whether the batch in hand is the epoch's last, where the length is known."""
        return self._ctx.state.epoch_batches == self._ctx.state.timestamp.batch_in_epoch

    @property
    def ready(self) -> int:
        """How many batches the evaluation in hand has begun."""
        return self._guest.judged

    @property
    def batch_idx(self) -> int:
        """The batch's number in the epoch, from 0."""
        return self._guest.batch_idx

    @property
    def total_batch_idx(self) -> int:
        """The batch's number in training, from 0, counted by this process."""
        return self._guest.total_batch_idx

    @property
    def _batches_that_stepped(self) -> int:
        return self._guest.steps_before

    def _should_accumulate(self) -> bool:
        return not self._guest.is_step_over

    def _should_check_val_epoch(self) -> bool:
        return bool(self._ctx.state.evaluators)


class TrainerFacade(OfGuest):
    """Lightning's Trainer, of one process that trains as ours does: no sanity check, no limits, evaluation once an epoch."""

    OF = "Lightning's Trainer"

    sanity_checking = False
    fast_dev_run = False
    barebones = False
    num_sanity_val_steps = 0
    num_sanity_val_batches: list[float] = []
    limit_train_batches = limit_val_batches = limit_test_batches = limit_predict_batches = 1.0
    val_check_interval = 1.0
    check_val_every_n_epoch = 1
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
        """As the guest was told."""
        return self._log_every_n_steps

    # --- where it is ---

    @property
    def state(self) -> Any:
        """What it does: `fn`, `stage` and `status`."""
        return self._state

    def _does(self, fn: str, stage: str) -> None:
        states = self._guest.package.trainer.states
        self._state.fn, self._state.stage = states.TrainerFn(fn), states.RunningStage(stage)

    @property
    def training(self) -> bool:
        """It trains."""
        return bool(self._state.stage == "train")

    @property
    def validating(self) -> bool:
        """It evaluates."""
        return bool(self._state.stage == "validate")

    @property
    def testing(self) -> bool:
        """It tests."""
        return bool(self._state.stage == "test")

    @property
    def predicting(self) -> bool:
        """It predicts."""
        return bool(self._state.stage == "predict")

    @property
    def evaluating(self) -> bool:
        """It evaluates or tests."""
        return self.validating or self.testing

    @property
    def current_epoch(self) -> int:
        """The epoch in hand, from 0; behind the last one how many there were."""
        return self._guest.epoch

    @property
    def global_step(self) -> int:
        """How many optimizer steps are done."""
        return self._ctx.state.timestamp.batch

    @property
    def max_epochs(self) -> int:
        """-1 where the duration is not in epochs."""
        return self._longest(TimeUnit.EPOCH)

    @property
    def max_steps(self) -> int:
        """-1 where the duration is not in steps."""
        return self._longest(TimeUnit.BATCH)

    def _longest(self, unit: TimeUnit) -> int:
        longest = self._ctx.state.max_duration
        return int(longest.value) if longest is not None and longest.unit is unit else -1

    @property
    def num_training_batches(self) -> int | float:
        """Of an epoch, or infinity."""
        steps = self._ctx.state.epoch_batches
        return math.inf if steps is None else steps * self._accumulates

    @property
    def num_val_batches(self) -> list[float]:
        """One for each evaluator; how many it has is not known."""
        return [math.inf] * len(self._ctx.state.evaluators)

    @property
    def num_test_batches(self) -> list[float]:
        """Not known."""
        return [math.inf]

    num_predict_batches = num_test_batches

    @property
    def estimated_stepping_batches(self) -> int | float:
        """How many optimizer steps training will take, or infinity."""
        steps, epochs = self._ctx.state.epoch_batches, self.max_epochs
        return self.max_steps if self.max_steps >= 0 else math.inf if steps is None or epochs < 0 else steps * epochs

    @property
    def enable_validation(self) -> bool:
        """There is something to evaluate."""
        return bool(self._ctx.state.evaluators)

    @property
    def is_last_batch(self) -> bool:
        """Whether the batch in hand is the epoch's last, where the length is known."""
        return self._progress.is_last_batch

    @property
    def fit_loop(self) -> _ProgressFacade:
        """How far it is."""
        return self._progress

    _evaluation_loop = predict_loop = val_loop = fit_loop

    # --- ranks and folders ---

    @property
    def is_global_zero(self) -> bool:
        """This is the first process of all."""
        return self._ctx.run.is_world_process_zero

    @property
    def global_rank(self) -> int:
        """This process among all."""
        return self._ctx.run.rank

    @property
    def local_rank(self) -> int:
        """This process among those of its machine."""
        return self._ctx.run.local_rank

    @property
    def node_rank(self) -> int:
        """This machine among all."""
        return self._ctx.run.node_rank

    @property
    def world_size(self) -> int:
        """How many processes train together."""
        return self._ctx.run.world_size

    num_devices = world_size

    @property
    def default_root_dir(self) -> str:
        """The run's folder."""
        return str(self._ctx.run.folder)

    log_dir = default_root_dir

    # --- what it has ---

    @property
    def callbacks(self) -> list[Any]:
        """The guest's own."""
        return [self._guest.foreign]

    @property
    def progress_bar_callback(self) -> Any:
        """The guest itself, if it is one."""
        foreign = self._guest.foreign
        return foreign if isinstance(foreign, self._guest.package.callbacks.ProgressBar) else None

    @property
    def loggers(self) -> list[LoggerFacade]:
        """One, that stands for ours."""
        return [self._guest.logger]

    @property
    def logger(self) -> LoggerFacade:
        """That one."""
        return self._guest.logger

    @property
    def strategy(self) -> StrategyFacade:
        """How the ranks agree."""
        return self._strategy

    @property
    def accelerator(self) -> AcceleratorFacade:
        """The device."""
        return self._accelerator

    @property
    def precision_plugin(self) -> Any:
        """Lightning's plainest."""
        return self._guest.package.plugins.precision.Precision()

    @property
    def _logger_connector(self) -> ConnectorFacade:
        return self._connector

    @property
    def lightning_module(self) -> ModuleFacade:
        """The model."""
        return self._guest.module

    model = lightning_module

    @property
    def optimizers(self) -> list[Any]:
        """One, or none."""
        return [self._ctx.optimizer] if self._ctx.has("optimizer") and self._ctx.optimizer is not None else []

    @property
    def lr_scheduler_configs(self) -> list[Any]:
        """The scheduler, which is stepped after each optimizer step."""
        scheduler = self._ctx.scheduler if self._ctx.has("scheduler") else None
        kind = self._guest.package.utilities.types.LRSchedulerConfig
        return [] if scheduler is None else [kind(scheduler, interval="step")]

    @property
    def callback_metrics(self) -> dict[str, Tensor]:
        """The latest numbers, by our names and in Lightning's manner: `validation/loss` and `val_loss`, `train/loss` and `train_loss`."""
        return self._guest.metrics()

    logged_metrics = callback_metrics

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """What the callback has logged for the progress bar."""
        return self._guest.progress

    # --- what may be asked of it ---

    @property
    def should_stop(self) -> bool:
        """Somebody has asked for a stop; setting it asks for one, and nothing takes it back."""
        return self._ctx.control.stop_requested is not None

    @should_stop.setter
    def should_stop(self, value: Any) -> None:
        """Ask for a stop."""
        if value and not self.should_stop:
            self._ctx.control.stop(f"{type(self._guest.foreign).__name__} has set trainer.should_stop")

    @property
    def accumulate_grad_batches(self) -> int:
        """What was set here, or 1; setting it acts from the next step on."""
        return self._accumulates

    @accumulate_grad_batches.setter
    def accumulate_grad_batches(self, value: int) -> None:
        """Ask for so many."""
        if value != self._accumulates:
            self._ctx.control.set_gradient_accumulation(value)
            self._accumulates = value

    def save_checkpoint(self, filepath: Any, weights_only: bool | None = None, storage_options: Any = None) -> None:
        """Write a file in Lightning's manner, on the first rank, beside our checkpoints; see `LightningGuest.checkpoint`."""
        if any(type(parameter).__name__ == "DTensor" for parameter in self._ctx.model.parameters()):
            raise NotSupported(
                "the model is sharded, and no rank can write it into one file; let callsheet's CheckpointSaver save it"
            )
        if self.is_global_zero:
            self._guest.checkpoint_io.save_checkpoint(self._guest.checkpoint(weights_only=bool(weights_only)), filepath)
        self._strategy.barrier()

    def print(self, *args: Any, **kwargs: Any) -> None:
        """On the first rank."""
        if self.is_global_zero:
            print(*args, **kwargs)
