"""The Trainer: callsheet's own trainer, which fires the events that callbacks handle."""

from __future__ import annotations

import logging
import os
import signal
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from callsheet.checkpoint import export_huggingface, export_weights
from callsheet.core.callback import Callback
from callsheet.core.callbacks_argument import manager_of
from callsheet.core.control import Control, Request
from callsheet.core.familiar_names import TRAINER_ARGUMENTS
from callsheet.core.manager import CallbackManager
from callsheet.core.randomness import seeded_setup
from callsheet.core.ranks import read_ranks
from callsheet.core.run_state import CheckpointInfo, Outcome, TrainState
from callsheet.core.time import Interval, Time
from callsheet.errors import CallsheetError, ConfigError, RequestRejected, names_unknown
from callsheet.run.defaults import LOCK_TIMEOUT_SECONDS, LOG_INTERVAL, TIMEOUT_SECONDS
from callsheet.run.failures import is_of_collective, is_out_of_memory, out_of_memory_note
from callsheet.run.log_ranks import LogRanks, LogRanksChoice
from callsheet.run.parts import Stateful
from callsheet.run.process_groups import ProcessGroups
from callsheet.run.run import Run, run_info
from callsheet.run.signals import GRACE_SECONDS, PreemptSignals, SignalWatch, signals_of
from callsheet.run.typed_state import Typed
from callsheet.trainer.arguments import (
    agree_on_name_and_seed,
    check_arguments,
    check_cuda_graphs,
    check_optimizer,
    check_scheduler,
    duration,
    enable_gradient_checkpointing,
    log_boundary,
    named_loaders,
    progress_shown,
    resolve_device,
    warn_of_short_schedule,
)
from callsheet.trainer.batches import Loader, TrainBatches
from callsheet.trainer.evaluation import Evaluation, Evaluator, named_evaluators
from callsheet.trainer.loop import TrainLoop
from callsheet.trainer.parallel import Parallel, ParallelKind, ParallelModel
from callsheet.trainer.precision import Precision, PrecisionName
from callsheet.trainer.tasks import Task, resolve_task

if TYPE_CHECKING:
    from torchmetrics import Metric

logger = logging.getLogger("callsheet")

_RECORDED_ARGUMENTS = (
    "microbatch_size", "gradient_accumulation_steps", "clip_grad_norm", "precision", "parallel", "shard_data", "compile",
    "gradient_checkpointing", "eval_interval", "log_interval", "epochs_per_round", "save_in_background", "seed",
)  # fmt: skip
"""The arguments that are recorded with the run's settings."""


class Trainer:
    """Trains a model and fires the lifecycle's events.

    The constructor fires `on_run_start`, restores the checkpoint that `resume` names, and loads the data. `fit`, `evaluate`,
    `test` and `predict` fire their own events. The run ends when `close()` is called, the `with` block ends, the interpreter
    exits, or an exception leaves the trainer.

    Args:
        model: the model to train; it is moved to `device`.
        task: defines forward, loss and metrics: a `callsheet.trainer.Task`, a loss function of (outputs, targets), or None for
            Hugging Face models, which compute their own loss.
        train_dataloader: an iterable of batches, or a function that returns one. The function is called inside the span
            `data_init`. If it returns a new iterator in each call, as a generator function does, it is also called for each epoch.
        eval_dataloader: an iterable of batches or a function that returns one, or a dictionary of several of these by name. Each
            can also be an `Evaluator` with its own interval. A single dataloader is named `validation`.
        optimizer: an optimizer over the model's parameters, or a function that takes the parameters. The function is called when
            the parameters are final, after sharding.
        scheduler: a learning rate scheduler, stepped after every optimizer step, or a function that takes the optimizer.
        max_duration: how long `fit` trains, such as `"2ep"`, `"1000ba"`, `"10m"`; a number without a unit is rejected.
        metrics: torchmetrics by name, computed over each evaluated dataset; allowed only if `task` is a loss function or None.
        microbatch_size: samples per microbatch; gradients are accumulated over a batch's microbatches. None: do not split
            batches.
        gradient_accumulation_steps: how many batches are fetched for one step; an epoch's last step may have fewer. The step's
            loss is the mean over the samples (or the task's weights) of all its batches and all ranks, so a small last batch has
            its proper weight.
        precision: `"fp32"`, the model's own type; `"bf16"` or `"fp16"`, under autocast, the latter with loss scaling.
        parallel: `"auto"`, `"single"`, `"ddp"`, `"fsdp"`, or a `Parallel` with further options. torchrun starts the ranks.
        shard_data: True if the dataloaders yield the same data on every rank; the Trainer then divides the batches among the
            ranks. False if each rank's dataloader already yields only that rank's part. A dataloader's batch size is per rank. The
            data of a dataloader with a `DistributedSampler` is not divided again.
        compile: whether to compile the model's forward pass; a mapping is passed to `torch.compile`. The modes that record CUDA graphs
            (`reduce-overhead`, `max-autotune`) need one microbatch per step.
        gradient_checkpointing: recompute activations in the backward pass, if the model supports it.
        clip_grad_norm: the total gradient norm above which gradients are scaled down. None: the norm is not computed.
        eval_interval: how often to evaluate, such as `"1ep"` or `"500ba"`; an evaluation also runs when training ends. None: only
            when `evaluate()` is called. A number without a unit means batches, here and in every other interval.
        log_interval: how often a metrics record is made. One is also made before each evaluation.
        epochs_per_round: how many epochs make a round; None: all epochs of the run make one round.
        callbacks: a `CallbackManager`, a callback, or any iterable of callbacks.
        loggers: more callbacks, which are called after the other callbacks of phase `report`.
        progress: show progress on a terminal, with a `ProgressBarLogger` on rank 0, unless one of the callbacks already does.
        run_name: the name of the run and of its folder; None: a name made from the time.
        runs_folder: the parent of all run folders. A run's folder is created only when something is written to it, such as a
            checkpoint.
        checkpoints_folder: the folder in which `<run name>/checkpoints` is created; None: checkpoints are written to the run's
            folder. It is a path, or a URL for fsspec such as `s3://bucket/runs`, and must be the same storage on all ranks.
        save_in_background: whether training continues while a checkpoint is written. If so, the state is copied first.
        resume: `"auto"` for this run's newest valid checkpoint, if there is one; a path for exactly that checkpoint; None to
            start a new run. If a callback stopped the run, `"auto"` continues training only if that callback's settings or
            `max_duration` have changed since.
        seed: the seed of all random states. It is set before the optimizer is made; if there are several ranks, each rank then
            sets a different seed, which is derived from it. None: the random states are not seeded.
        device: `"auto"` is the rank's CUDA device if there is one, otherwise the CPU.
        preempt_signals: one or more signals that preempt the run: it saves a checkpoint and ends. The first Ctrl-C does the same
            and then raises KeyboardInterrupt; a second Ctrl-C raises it at once.
        grace_seconds: how long after a preemption signal the launcher kills the process.
        timeout_seconds: how long to wait for a rank that does not answer. After that, an error that names the rank ends the run.
        lock_timeout_seconds: how long to wait if another process trains in this run's folder, before raising `RunInUseError`. A
            Trainer without a `train_dataloader` only evaluates, and locks nothing.
        log_ranks: `"zero"` hides log records below ERROR on all ranks except rank 0 during the run; `"all"` shows them.
        config: the run's configuration as plain data; it is stored with the run.
    Raises:
        ConfigError: an argument is invalid; the message names it and says what to do.
        CheckpointError: the checkpoint that `resume` names is not valid, or does not fit this model.
        RunInUseError: another process trains in the run's folder.

    Examples:
        >>> import torch
        >>> model = torch.nn.Linear(2, 1)
        >>> data = [(torch.randn(4, 2), torch.randn(4, 1))] * 3
        >>> with Trainer(
        ...     model, torch.nn.functional.mse_loss, data, optimizer=lambda params: torch.optim.SGD(params, lr=0.1), max_duration="2ep"
        ... ) as trainer:
        ...     trainer.fit()
        >>> trainer.state.timestamp.batch
        6
    """

    optimizer: Optimizer | None = None
    scheduler: LRScheduler | None = None
    _loop: TrainLoop | None = None  # None if there is no optimizer, so that the trainer can only evaluate, test and predict
    _activity = ""  # the name of the public method that is running

    @names_unknown(lambda: TRAINER_ARGUMENTS)
    def __init__(
        self,
        model: nn.Module,
        task: Task | Callable[[Any, Any], Tensor] | None = None,
        train_dataloader: Loader | None = None,
        eval_dataloader: Loader | Evaluator | Mapping[str, Loader | Evaluator] | None = None,
        *,
        optimizer: Optimizer | Callable[[list[nn.Parameter]], Optimizer] | None = None,
        scheduler: LRScheduler | Callable[[Optimizer], LRScheduler] | None = None,
        max_duration: str | Time = "1ep",
        metrics: Mapping[str, Metric] | None = None,
        microbatch_size: int | None = None,
        gradient_accumulation_steps: int = 1,
        clip_grad_norm: float | None = None,
        precision: PrecisionName = "fp32",
        parallel: ParallelKind | Parallel = "auto",
        shard_data: bool = True,
        compile: bool | Mapping[str, Any] = False,
        gradient_checkpointing: bool = False,
        eval_interval: str | int | Time | None = "1ep",
        log_interval: str | int | Time = LOG_INTERVAL,
        epochs_per_round: int | None = None,
        callbacks: CallbackManager | Callback | Iterable[Callback] | None = None,
        loggers: Iterable[Callback] | None = None,
        progress: bool = True,
        run_name: str | None = None,
        runs_folder: str | os.PathLike[str] = "runs",
        checkpoints_folder: str | os.PathLike[str] | None = None,
        save_in_background: bool = False,
        resume: str | os.PathLike[str] | None = None,
        seed: int | None = None,
        device: str | torch.device = "auto",
        preempt_signals: PreemptSignals = ("SIGTERM",),
        grace_seconds: float = GRACE_SECONDS,
        timeout_seconds: float = TIMEOUT_SECONDS,
        lock_timeout_seconds: float = LOCK_TIMEOUT_SECONDS,
        log_ranks: LogRanksChoice = "zero",
        config: Mapping[str, Any] | None = None,
    ) -> None:
        arguments = dict(locals())
        check_arguments(arguments)
        ranks = read_ranks()
        self.device = resolve_device(device, ranks)
        self.model, self.task = model, resolve_task(task, model, metrics)
        self.epochs_per_round = epochs_per_round
        self._microbatch_size, self._gradient_checkpointing = microbatch_size, gradient_checkpointing
        self._precision = Precision(precision, self.device)
        check_cuda_graphs(compile, self.device, has_microbatches=gradient_accumulation_steps > 1 or microbatch_size is not None)
        parallel = parallel if isinstance(parallel, Parallel) else Parallel(parallel)
        log_every, printing_ranks = log_boundary(log_interval), LogRanks(log_ranks, ranks)
        eval_every = Interval.of("eval_interval", eval_interval) if eval_interval is not None else None
        evaluators = named_evaluators(eval_dataloader)
        self.callbacks = manager_of(callbacks, loggers)
        self.callbacks.add(progress_shown(progress, ranks, self.callbacks.callbacks))
        self.state = TrainState(max_duration=duration(max_duration, epochs_per_round))
        self.control = Control(able={"stop", "save", "evaluate", "set_gradient_accumulation"}, is_shared=ranks.world_size > 1)
        signals = SignalWatch(("SIGINT", *signals_of(preempt_signals)), grace=grace_seconds)

        groups = ProcessGroups(ranks, self.device, timeout_seconds)
        name, data_seed = agree_on_name_and_seed(groups, arguments, evaluators, self.callbacks.callbacks)
        self.run = run_info(name, runs_folder, ranks, self.device, config, checkpoints_folder)
        self._run = run = Run(
            self.callbacks,
            self.run,
            model=model,
            state=self.state,
            control=self.control,
            signals=signals,
            groups=groups,
            log_every=log_every,
            device=self.device,
            log_ranks=printing_ranks,
            lock_timeout=lock_timeout_seconds,
            is_busy=lambda lifetime: lifetime.is_entered,
        )
        self.ctx = run.ctx
        self.ctx.loss_is_new = True
        # End the run when the trainer is garbage-collected, or when the process exits.
        self._end = weakref.finalize(self, run.lifetime.end)
        with run.lifetime, self._doing("set-up"):
            run.start(locks=run_name is not None and train_dataloader is not None and optimizer is not None)
            with seeded_setup(seed, ranks):
                self._parallel = self._prepare_model(parallel, compile)
                self.optimizer = check_optimizer(optimizer, model) if optimizer is not None else None
                self.scheduler = check_scheduler(scheduler, self.optimizer) if scheduler is not None else None
            count_samples = partial(_samples_in, self.task)  # a reference to `self` would keep the trainer alive
            self._batches = TrainBatches(groups, data_seed, shard=shard_data, count_samples=count_samples)
            self._evaluation = Evaluation(
                run, self._parallel.module, self.task, self.device, every=eval_every, precision=self._precision, shard=shard_data
            )
            run.connect(self._evaluation, in_background=save_in_background, grace=grace_seconds)
            if self.optimizer is not None:
                self._loop = TrainLoop(
                    run,
                    self._parallel,
                    self.task,
                    self.optimizer,
                    self.scheduler,
                    self._precision,
                    self._batches,
                    self.device,
                    microbatch_size=microbatch_size,
                    gradient_accumulation_steps=gradient_accumulation_steps,
                    clip_grad_norm=clip_grad_norm,
                    epochs_per_round=epochs_per_round,
                )
            run.load(*self._parts(), resume, {name: arguments[name] for name in _RECORDED_ARGUMENTS})
            self.ctx.optimizer, self.ctx.scheduler = self.optimizer, self.scheduler
            with run.spans.data_init:
                self._load_data(train_dataloader, evaluators)

    def _prepare_model(self, parallel: Parallel, compile: bool | Mapping[str, Any]) -> ParallelModel:
        """Return the model, moved to its device, wrapped, sharded and compiled as requested."""
        for model in (self.model, *self.task.frozen_models):
            model.to(self.device)
        if self._gradient_checkpointing:
            enable_gradient_checkpointing(self.model)
        prepared = ParallelModel(
            self.model, parallel, self._run.groups, self.device, self._precision.type, self.task.frozen_models
        )
        if compile:
            prepared.compile(compile if isinstance(compile, Mapping) else {})
        if prepared.kind == "fsdp":
            self._precision.casts = False
        return prepared

    def _load_data(self, train_dataloader: Loader | None, evaluators: Mapping[str, Evaluator]) -> None:
        if train_dataloader is not None:
            self._batches.load(train_dataloader)
        if self._loop is not None:
            self._loop.set_epoch_length()
        for name, evaluator in evaluators.items():
            self._evaluation.add(name, evaluator)
        self.state.evaluators = tuple(self._evaluation.loaders)
        intervals = {schedule.every and str(schedule.every.every) for schedule in self._evaluation.schedules.values()}
        self.ctx.run.eval_interval = (intervals.pop() or "") if len(intervals) == 1 else ""

    @property
    def signal(self) -> signal.Signals | None:
        """The signal that preempted the run, or None."""
        return self._run.agreement.signal

    @property
    def preempted(self) -> bool:
        """True if a signal other than Ctrl-C preempted the run."""
        return self._run.lifetime.outcome == Outcome.PREEMPTED

    @property
    def earlier_stop(self) -> Request | None:
        """The request by which a callback stopped the run that `resume="auto"` has resumed. None if there is no such request.

        If there is such a request, `fit` takes no further steps. The value is None if no callback stopped the run, and if `fit` may
        continue training because the settings of that callback or the run's duration have changed.
        """
        return self._run.checkpoints.earlier_stop()

    @property
    def eval_results(self) -> dict[str, dict[str, float]]:
        """The losses and metrics of each evaluator from its latest evaluation, by name. Empty before the first evaluation."""
        return self._evaluation.results

    @property
    def is_evaluated(self) -> bool:
        """Whether `fit` of this Trainer has run every evaluator at the current step, so that `eval_results` are up to date."""
        return self._evaluation.is_done_at(self.state.timestamp.batch)

    # --- training ---

    def fit(self, max_duration: str | Time | None = None) -> None:
        """Train until `max_duration` is reached. Another call with a longer duration continues training.

        Return when all checkpoints are completely written. After a preemption signal, save a checkpoint and return early; the
        property `signal` then has the signal.

        Args:
            max_duration: how long to train in total, counted from the start of the run, such as `"2ep"` or `"1000ba"`. None: the
                `max_duration` of the constructor.

        Raises:
            ConfigError: there is no training data, or no optimizer.
            KeyboardInterrupt: Ctrl-C was pressed. It is raised after a checkpoint is saved, or at once if Ctrl-C was pressed twice.
            DistributedError: a rank does not answer; the message names the rank.
            BaseException: any error that the model, the data or a callback raised. The run is ended first.
        """
        longer = duration(max_duration, self.epochs_per_round) if max_duration is not None else None
        with self._run.lifetime, self._doing("fit"):
            if self._loop is None or self._batches.loader is None:
                there = {"a train_dataloader": self._batches.loader is not None, "an optimizer": self._loop is not None}
                missing = [name for name, is_there in there.items() if not is_there]
                raise ConfigError(f"fit() needs {' and '.join(missing)}; pass it to the Trainer")
            if longer is not None:
                self.state.max_duration = longer
            self._warn_of_long_intervals()
            warn_of_short_schedule(self.scheduler, self.state)
            with self._run.signals:
                self._run.begin_training(marks=True)
                self._run.boundaries.begin()
                self._loop.run()
                self._run.boundaries.finish()
            self._run.boundaries.conclude()
            self.control.done("stop")
            if self._run.lifetime.outcome is Outcome.INTERRUPTED:
                raise KeyboardInterrupt

    def _warn_of_long_intervals(self) -> None:
        """Warn of intervals that are longer than the run and therefore take effect only at the run's end.

        Raise no error, because a short trial run, for example of ten steps, should be possible with the intervals of a long run.
        """
        longest = self.state.max_duration
        named = [(f"the interval of {name!r}", schedule.every) for name, schedule in self._evaluation.schedules.items()]
        if str(self._run.records.every.every) != LOG_INTERVAL:  # do not warn of the default, which the user has not chosen
            named.append(("log_interval", self._run.records.every))
        for name, every in named:
            if (
                every is not None
                and longest is not None
                and every.every.unit is longest.unit
                and every.every.value > longest.value
            ):
                logger.warning(
                    "%s, %s, is longer than the run, %s, so it takes effect only at the end; give a shorter interval",
                    name,
                    every.every,
                    longest,
                )

    # --- evaluation, test and prediction ---

    def evaluate(self, dataloader: Loader | Mapping[str, Loader] | None = None) -> dict[str, dict[str, float]]:
        """Evaluate the data of every evaluator, or only the given data.

        Args:
            dataloader: an iterable of batches or a function that returns one, which gets the name `validation`; or a dictionary of
                several of these by name. None: the evaluators of the constructor.

        Returns:
            For each dataset, by its name, the mean losses and the metrics by name. They are the same on all ranks.

        Raises:
            ConfigError: there is nothing to evaluate.
            RequestRejected: training is running; use `ctx.control.evaluate(why)` instead.
        """
        with self._run.lifetime, self._doing("evaluate"):
            given = {
                name: self._evaluation.prepare_loader(loader, f"dataloader {name!r}")
                for name, loader in named_loaders(dataloader).items()
            }
            loaders = given or self._evaluation.loaders
            if not loaders:
                raise ConfigError("evaluate() has no data; pass it a dataloader, or an eval_dataloader to the Trainer")
            return self._run.boundaries.evaluate(loaders, standalone=True)

    def test(self, dataloader: Loader) -> dict[str, float]:
        """Run the model over a test set.

        Args:
            dataloader: an iterable of batches, or a function that returns one.

        Returns:
            The mean losses and the metrics by name. They are the same on all ranks.

        Raises:
            ConfigError: the dataloader cannot be used.
            RequestRejected: training is running.
        """
        with self._run.lifetime, self._doing("test"):
            results = self._evaluation.test(self._evaluation.prepare_loader(dataloader, "dataloader"))
            self._run.records.fire_evaluation(self.ctx, self._evaluation.take())
            return results

    def predict(self, dataloader: Loader) -> list[Any]:
        """Run the model over data, without computing a loss.

        Args:
            dataloader: an iterable of batches, or a function that returns one.

        Returns:
            The model's outputs for this rank's part of the data, one item for each batch, on the device.

        Raises:
            ConfigError: the dataloader cannot be used.
            RequestRejected: training is running.
        """
        with self._run.lifetime, self._doing("predict"):
            return self._evaluation.predict(self._evaluation.prepare_loader(dataloader, "dataloader"))

    # --- checkpoints ---

    def save_checkpoint(self, path: str | os.PathLike[str] | None = None) -> CheckpointInfo:
        """Write a checkpoint, and wait until it is durable. Every rank must call this method.

        Args:
            path: the path or URL of the checkpoint's folder; None: a folder in the run's folder for checkpoints.

        Returns:
            The path, the step and the size of the checkpoint.

        Raises:
            RequestRejected: training is running; use `ctx.control.save(why)` instead.
            CheckpointError: the checkpoint cannot be written, or a callback's state is not plain data.
        """
        with self._run.lifetime, self._doing("save_checkpoint"):
            info = self._run.boundaries.save(path=os.fspath(path) if path is not None else None, waits=True)
            assert info is not None  # `save` returns None only in another framework's loop, which writes the checkpoint later
            return info

    def export(self, path: str | os.PathLike[str], *, processor: Any = None) -> None:
        """Write the model's full (not sharded) weights to `path`. Every rank must call this method.

        A Hugging Face model is written as a folder, any other model as a safetensors file.

        Args:
            path: a folder for a Hugging Face model, which `from_pretrained` loads; otherwise a file.
            processor: the tokenizer or processor to save with a Hugging Face model.
        """
        with self._run.lifetime, self._doing("export"):
            if hasattr(self.model, "save_pretrained"):
                export_huggingface(self.model, path, group=self._run.groups.saving, processor=processor)
            else:
                export_weights(self.model, path, group=self._run.groups.saving, overwrite=True)

    def _parts(self) -> tuple[dict[str, Stateful], dict[str, Stateful]]:
        """Return a checkpoint's parts by name: first those that are the same on all ranks, then those that differ by rank."""
        shared: dict[str, Stateful | None] = {
            "state": self.state,
            "model": self._parallel,
            "optimizer": Typed(self.optimizer, rate_is_fixed=self.scheduler is None) if self.optimizer is not None else None,
            "scheduler": Typed(self.scheduler) if self.scheduler is not None else None,
            "precision": self._precision,
            "evaluation": self._evaluation,
            "tally": self._run.records.tally,
            "loop": self._loop,
        }
        local: dict[str, Stateful] = {
            "callbacks": self._run.callback_states,
            "records": self._run.records,
            "batches": self._batches,
        }
        return {name: part for name, part in shared.items() if part is not None}, local

    # --- ending the run ---

    def close(self) -> None:
        """End the run if it has not ended. This method can be called twice.

        Raises:
            RequestRejected: a callback called this method. A callback can use `ctx.control.stop(why)`, which ends training at the next
                boundary.
        """
        with self._doing("close"):
            self._end()

    # --- the `with` block, and notes on errors ---

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None) -> None:
        lost = None
        if error is not None:
            if not self._run.lifetime.has_ended:
                lost = self._explain(error)
            self._run.lifetime.fail(lost or error)
        self.close()
        if lost is not None:
            raise lost from error

    @contextmanager
    def _doing(self, activity: str) -> Iterator[None]:
        """Mark an activity, such as `fit`, as running while the `with` block runs, so that no second activity starts.

        Raise `RequestRejected` if another activity is running, and add explanations to errors that leave the block.
        """
        if self._activity:
            ask = {
                "evaluate": "ctx.control.evaluate(why)",
                "save_checkpoint": "ctx.control.save(why)",
                "close": "ctx.control.stop(why)",
            }
            hint = f"; use {ask[activity]} instead" if activity in ask else ""
            raise RequestRejected(f"cannot call {activity}() while {self._activity}() is running{hint}")
        self._activity = activity
        try:
            yield
        except BaseException as error:
            if (lost := self._explain(error)) is not None:
                raise lost from error
            raise
        finally:
            self._activity = ""

    def _explain(self, error: BaseException) -> CallsheetError | None:
        """If the error is an out-of-memory error, add a note to it that says what to try.

        If there are several ranks and a collective failed, return an error that names the missing ranks; the caller raises that
        error instead. Otherwise, tell the other ranks why this rank ends, and return None.
        """
        if is_out_of_memory(error):
            error.add_note(out_of_memory_note(self.device, self._memory_hints()))
        if self._run.groups.size > 1 and is_of_collective(error):
            return self._run.groups.explain_failure(error)
        self._run.groups.publish_failure(self.ctx.step, error)
        return None

    def _memory_hints(self) -> list[str]:
        size = self._microbatch_size
        tried = {
            "a microbatch_size" if size is None else f"a microbatch_size below {size}": size != 1,
            "precision='bf16'": self._precision.name == "fp32",
            "gradient_checkpointing=True": not self._gradient_checkpointing,
            "parallel='fsdp' on several ranks": self._parallel.kind != "fsdp",
        }
        return [hint for hint, is_left in tried.items() if is_left]


def _samples_in(task: Task, batch: Any) -> int:
    return task.counts(batch)[0]
