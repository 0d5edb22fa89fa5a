"""The Trainer: a loop written with the lifecycle's spans."""

from __future__ import annotations

import logging
import os
import secrets
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from callsheet.callback import Callback
from callsheet.context import CheckpointInfo, Context, Outcome, RunInfo, TrainState
from callsheet.control import Control, Request
from callsheet.distributed import read_ranks
from callsheet.errors import ConfigError, RequestRefused
from callsheet.events import Event
from callsheet.lifetime import Lifetime
from callsheet.manager import CallbackManager, normalize_callbacks
from callsheet.randomness import seed_all
from callsheet.signals import GRACE_SECONDS, SignalWatch
from callsheet.time import Time, TimeUnit
from callsheet.trainer.arguments import checked_optimizer, checked_scheduler, duration, interval, named_loaders, positive
from callsheet.trainer.batches import Loader, TrainBatches, made, to_device
from callsheet.trainer.checkpoints import AUTO, Checkpoints, Stateful, Typed
from callsheet.trainer.evaluation import Evaluation
from callsheet.trainer.microbatches import added, microbatches, trained_on
from callsheet.trainer.records import Records
from callsheet.trainer.tasks import Task, resolve_task

logger = logging.getLogger("callsheet")


class Trainer:
    """Trains a model, and tells everything it does.

    The constructor tells `on_run_start`, restores what `resume` names, and makes the data; `fit`, `evaluate`, `test` and `predict` tell
    their own events; `close()`, leaving the `with` block, the interpreter's end, or an exception that leaves the trainer ends the run.

    Args:
        model: what is trained; it is moved to `device`.
        task: what forward and loss are: a `callsheet.trainer.Task`, a loss function of (outputs, targets), or None for Hugging Face
            models, which compute their own loss.
        train_dataloader: an iterable of batches, or a function that makes one, called inside `data_init`.
        eval_dataloader: likewise, or a dictionary of several by name; one alone is called `validation`.
        optimizer: over the model's parameters, or a function of them, called once the model has its final ones.
        scheduler: of the learning rate, stepped after every optimizer step; or a function of the optimizer.
        max_duration: how long `fit` trains, such as `"2ep"`, `"1000ba"`, `"10m"`; a whole number means epochs.
        microbatch_size: samples a microbatch; gradients are accumulated over a batch's microbatches. None: the batch as it is.
        clip_grad_norm: the total gradient norm above which gradients are scaled down. None: the norm is not computed.
        eval_interval: how often to evaluate, such as `"1ep"` or `"500ba"`, and when training ends; None: only `evaluate()`.
        log_interval: how often a record is made of what was logged; a whole number means batches. One is also made before each evaluation.
        epochs_per_round: how many epochs make a round; None: all of them.
        callbacks: a `CallbackManager`, a callback, or any iterable of callbacks.
        loggers: more callbacks, told after the others in the phase `report`.
        run_name: of the run and its folder; made from the time where it is None.
        runs_folder: where the folders of runs stand. Nothing is written unless something asks for it, such as a checkpoint.
        resume: `"auto"` for the newest good checkpoint of this run, or none; a path for just that one; None to start anew.
        seed: of all random states, set before the factories are called; None leaves them as they are.
        device: `"auto"` is CUDA where there is one, else the CPU.
        preempt_signals: signals that ask the run to save and make way.
        grace_seconds: how long after such a signal the process will be killed.
        config: what the run was configured with, for the run's record: plain data.

    Raises:
        ConfigError: an argument that cannot work; the message names it and the mend.
        CheckpointError: `resume` names a checkpoint that does not hold, or is not of this model.

    Example:
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

    def __init__(
        self,
        model: nn.Module,
        task: Task | Callable[[Any, Any], Tensor] | None = None,
        train_dataloader: Loader | None = None,
        eval_dataloader: Loader | Mapping[str, Loader] | None = None,
        *,
        optimizer: Optimizer | Callable[[list[nn.Parameter]], Optimizer] | None = None,
        scheduler: Any = None,
        max_duration: str | int | Time = "1ep",
        microbatch_size: int | None = None,
        clip_grad_norm: float | None = None,
        eval_interval: str | int | Time | None = "1ep",
        log_interval: str | int | Time = "10ba",
        epochs_per_round: int | None = None,
        callbacks: CallbackManager | Callback | Iterable[Callback] | None = None,
        loggers: Iterable[Callback] | None = None,
        run_name: str | None = None,
        runs_folder: str | os.PathLike[str] = "runs",
        resume: str | os.PathLike[str] | None = None,
        seed: int | None = None,
        device: str | torch.device = "auto",
        preempt_signals: Iterable[str | int] = ("SIGTERM",),
        grace_seconds: float = GRACE_SECONDS,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        ranks = read_ranks()
        if ranks.world_size > 1:
            raise ConfigError(
                f"this version trains in one process, and was launched as one of {ranks.world_size}; start it without a launcher"
            )
        if not isinstance(model, nn.Module):
            raise ConfigError(f"model is {type(model).__name__}, not a torch.nn.Module")
        self.device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
        self.model = model
        self.task = resolve_task(task, model)
        self.optimizer: Optimizer | None = None
        self.scheduler: Any = None
        self.microbatch_size = positive("microbatch_size", microbatch_size, int)
        self.clip_grad_norm = positive("clip_grad_norm", clip_grad_norm, float)
        self.epochs_per_round = positive("epochs_per_round", epochs_per_round, int)
        self.callbacks = normalize_callbacks(callbacks) or CallbackManager()
        self.callbacks.add(loggers or ())
        self.state = TrainState(max_duration=duration(max_duration, self.epochs_per_round))
        self.control = Control(able={"stop", "save", "evaluate"})
        self.run = RunInfo(
            run_name if run_name is not None else f"run-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}",
            config=dict(config or {}),
            ranks=ranks,
            restart_count=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
            device=str(self.device),
        )
        if Path(self.run.name).name != self.run.name or self.run.name in ("", ".."):
            raise ConfigError(f"run_name={run_name!r} must be a plain name: it is also the name of the run's folder")
        if resume == AUTO and run_name is None:
            raise ConfigError("resume='auto' needs a run_name: under a new name there is never anything to resume")
        self.run.folder = Path(runs_folder) / self.run.name

        log_every = interval("log_interval", log_interval, TimeUnit.BATCH)
        if log_every.every.unit not in (TimeUnit.BATCH, TimeUnit.EPOCH, TimeUnit.ROUND):
            raise ConfigError(
                f"log_interval={log_interval!r}: give batches, epochs or rounds; the other units are only counted up at log boundaries"
            )
        eval_every = interval("eval_interval", eval_interval, TimeUnit.EPOCH) if eval_interval is not None else None
        self._records = Records(self.callbacks, log_every, self.device)
        self._batches = TrainBatches()
        self._last_loss: Tensor | None = None
        self.eval_results: dict[str, dict[str, float]] = {}
        """Of the last evaluation, by dataset; empty until there has been one."""
        self._activity = ""  # which of its methods has the thread
        self._signals = SignalWatch(preempt_signals, grace=grace_seconds)
        self.ctx = Context(
            self.run,
            state=self.state,
            model=model,
            control=self.control,
            accumulator=self._records.metrics,
            loggers=self.callbacks.tell_loggers,
        )
        self._lifetime = Lifetime(self.callbacks, self.ctx)
        self._end = weakref.finalize(self, self._lifetime.end)  # also when the trainer is collected, and at exit
        with self._lifetime:
            self._lifetime.start()
            if seed is not None:
                seed_all(seed)
            self.model.to(self.device)
            self.optimizer = checked_optimizer(optimizer, model) if optimizer is not None else None
            self.scheduler = checked_scheduler(scheduler, self.optimizer) if scheduler is not None else None
            self._spans = self.callbacks.spans(self.ctx)
            self._heard = self.callbacks.heard
            self._evaluation = Evaluation(self.callbacks, self.ctx, self.model, self.task, self.device, eval_every)
            self._checkpoints = Checkpoints(self.callbacks, self.ctx, self._spans, self._parts())
            self._checkpoints.load(resume)
            self.ctx.step, self.ctx.epoch = self.state.timestamp.batch, self.state.timestamp.epoch
            self.ctx.optimizer, self.ctx.scheduler = self.optimizer, self.scheduler
            with self._spans.data_init:
                if train_dataloader is not None:
                    self._batches.loader = made(train_dataloader, "train_dataloader")
                self.state.epoch_batches = self._batches.length
                self._evaluation.loaders = named_loaders(eval_dataloader, "eval_dataloader")

    @property
    def preempted(self) -> bool:
        """A signal asked the run to make way."""
        return self._lifetime.outcome == Outcome.PREEMPTED

    # --- training ---

    def fit(self, max_duration: str | int | Time | None = None) -> None:
        """Train until `max_duration`, the constructor's where it is None; called again with a longer one, training goes on.

        Raises:
            ConfigError: there is no training data, or no optimizer.
            BaseException: what the model, the data or a callback raised, after the run has been ended.
        """
        with self._lifetime, self._doing("fit"):
            optimizer, batches = self.optimizer, self._batches
            if optimizer is None or batches.loader is None:
                missing = [
                    name for name, there in (("a train_dataloader", batches.loader), ("an optimizer", optimizer)) if there is None
                ]
                raise ConfigError(f"fit() needs {' and '.join(missing)}; give the Trainer one")
            if max_duration is not None:
                self.state.max_duration = duration(max_duration, self.epochs_per_round)
            ctx, spans, state = self.ctx, self._spans, self.state
            self.model.train()
            try:
                with self._signals:
                    with spans.train:
                        is_over = self._is_over()
                        while not is_over:
                            with spans.round:
                                while not is_over and not self._round_is_full():
                                    ctx.epoch = state.timestamp.epoch + 1
                                    with spans.epoch:
                                        is_whole = self._train_epoch(optimizer, batches)
                                        self._records.tally.settle(state)
                                        if is_whole:
                                            batches.end_epoch()
                                            state.timestamp = state.timestamp.next_epoch()
                                    is_over = self._boundary("epoch") if is_whole else True
                                is_full = self._round_is_full()
                                if is_full:
                                    state.timestamp = state.timestamp.next_round()
                            if is_full:
                                is_over = self._boundary("round") or is_over
                        self._records.tally.settle(state)
            finally:
                self._records.tally.stop()
            self._carry_out_rest()
            if not self.preempted:
                self._lifetime.outcome = Outcome.STOPPED if self.control.stop_requested is not None else Outcome.FINISHED
            self.control.done("stop")

    def _train_epoch(self, optimizer: Optimizer, batches: TrainBatches) -> bool:
        """The epoch in hand, or the rest of it, until the data or the training is over; whether the data is."""
        ctx, spans, model, task = self.ctx, self._spans, self.model, self.task
        state, records, control, signals = self.state, self._records, self.control, self._signals
        size = self.microbatch_size
        on_cpu = self.device.type == "cpu"
        epoch = batches.epoch(ctx.epoch, state.timestamp.batch_in_epoch)
        is_overdue = self._evaluation.is_due(ctx, is_over=False)  # a crash left it undone: the first step is a boundary
        next_boundary = ctx.step + 1 if is_overdue else self._next_boundary()
        records.tally.start()
        while True:
            with spans.fetch:
                ctx.batch = batch = next(epoch, None)
                if batch is not None and not on_cpu:
                    ctx.batch = to_device(batch, self.device)
            if batch is None:
                del ctx.batch
                if not state.timestamp.batch_in_epoch:
                    raise ConfigError(f"epoch {ctx.epoch} had no batches; is the dataset empty, or was an iterator used up?")
                return True
            ctx.step += 1
            with spans.train_step:
                with spans.forward_backward:
                    means: dict[str, Tensor] = {}
                    parts = ((ctx.batch, None),) if size is None else microbatches(ctx.batch, size, task)
                    for ctx.microbatch, share in parts:
                        with spans.microbatch:
                            with spans.forward:
                                ctx.outputs = task.forward(model, ctx.microbatch)
                            with spans.loss:
                                losses = task.loss(ctx.outputs, ctx.microbatch)
                                ctx.loss = losses if type(losses) is Tensor and not losses.dim() else trained_on(losses)
                            if "outputs" not in ctx.kept:
                                del ctx.outputs
                            with spans.backward:
                                (ctx.loss if share is None else ctx.loss * share).backward()
                            if share is None and type(losses) is Tensor:
                                means = {"loss": ctx.loss.detach()}
                            else:
                                means = added(means, ctx.loss, losses, share)
                        del ctx.microbatch, ctx.loss
                    ctx.loss = loss = means["loss"]
                    del losses  # and with it the graph
                with spans.clip_gradients:
                    ctx.grad_norm = None
                    if self.clip_grad_norm is not None:
                        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
                        ctx.grad_norm = nn.utils.clip_grad_norm_(parameters, self.clip_grad_norm)
                        records.metrics.log({"train/grad_norm": ctx.grad_norm}, over="mean", across="same")
                rate: Any = optimizer.param_groups[0]["lr"]
                if isinstance(rate, Tensor):
                    rate = rate.clone()  # the scheduler writes over it where it stands
                ctx.learning_rate = records.learning_rate = rate
                with spans.optimizer_step:
                    optimizer.step()
                    ctx.step_skipped = False
                if self.scheduler is not None:
                    self.scheduler.step()
                records.add(means, *task.counts(ctx.batch))
                state.previous_timestamp, state.timestamp = state.timestamp, state.timestamp.next_batch()
                ctx.loss_dict = means
            del ctx.batch, ctx.loss, ctx.loss_dict, ctx.grad_norm, ctx.learning_rate, ctx.step_skipped
            if "outputs" in ctx.kept:
                del ctx.outputs
            self._last_loss = loss
            optimizer.zero_grad()
            if ctx.step >= next_boundary or control.pending or signals.received is not None:
                if self._boundary("step"):
                    return state.timestamp.batch_in_epoch == batches.length
                next_boundary = self._next_boundary()
            elif self._heard.on_checkpoint_due:
                self._tell_checkpoint_due("step")

    def _next_boundary(self) -> int:
        """The next step after which something can be due; the other units only move at log boundaries and the ends of epochs."""
        step, longest = self.state.timestamp.batch, self.state.max_duration
        steps = [int(longest.value)] if longest is not None and longest.unit is TimeUnit.BATCH else []
        for due in (self._records.every, self._evaluation.every):
            if due is not None and due.every.unit is TimeUnit.DURATION:
                return step + 1
            if due is not None and due.every.unit is TimeUnit.BATCH:
                steps.append(int((due.index(self.state.timestamp) + 1) * due.every.value))
        return min(steps, default=sys.maxsize)

    def _boundary(self, boundary: str) -> bool:
        """After a step, an epoch or a round: tell the record, evaluate and save where they are due; whether training is over."""
        ctx, records = self.ctx, self._records
        self._make_way()
        logs = records.are_due(ctx)
        if logs or boundary != "step" or self._is_over() or self._evaluates():
            records.tally.settle(self.state)
        if logs or self._is_over() or self._evaluates():  # settling may have reached the end
            records.tell(ctx)
            self._make_way()
        if self._evaluates():
            self._tell_checkpoint_due("before_eval")
            with self._training_stopped():
                self._evaluate(self._evaluation.loaders, standalone=False)
            self._evaluation.done(ctx)
            self._make_way()
        is_over = self._is_over()
        self._tell_checkpoint_due(boundary)
        return is_over  # a stop that was asked for since acts at the next boundary, where what it calls for is due

    def _evaluates(self) -> bool:
        return not self.preempted and self._evaluation.is_due(self.ctx, self._is_over())

    def _make_way(self) -> None:
        """If a signal came: tell it, once, and ask for a checkpoint."""
        if self._signals.received is not None and not self.preempted:
            self._lifetime.outcome = Outcome.PREEMPTED
            self.callbacks.fire(Event.PREEMPT, self.ctx)
            if (request := self.control.save_requested) is None or request.kind != "preempt":  # in a callback's name
                self.control.save(f"signal {self._signals.received.name}", kind="preempt")

    def _carry_out_rest(self) -> None:
        """What was asked for after the last boundary, such as saving at `on_train_end`; and the evaluation that a crash left undone."""
        self._make_way()
        if self._evaluates():
            self._evaluate(self._evaluation.loaders, standalone=False)
            self._evaluation.done(self.ctx)
        if self.control.save_requested is not None:
            self._save_as_asked()

    def _is_over(self) -> bool:
        return self.state.is_complete or self.control.stop_requested is not None or self._signals.received is not None

    def _round_is_full(self) -> bool:
        return self.epochs_per_round is not None and self.state.timestamp.epoch_in_round >= self.epochs_per_round

    # --- evaluating ---

    def evaluate(self, dataloader: Loader | Mapping[str, Loader] | None = None) -> dict[str, dict[str, float]]:
        """The losses of every evaluator, or of `dataloader`, by the dataset's name.

        Raises:
            ConfigError: there is nothing to evaluate.
            RequestRefused: while training runs: `ctx.control.evaluate(why)` asks for it.
        """
        with self._lifetime, self._doing("evaluate"):
            loaders = named_loaders(dataloader, "dataloader") or self._evaluation.loaders
            if not loaders:
                raise ConfigError("evaluate() has no data; give it a dataloader, or the Trainer an eval_dataloader")
            return self._evaluate(loaders, standalone=True)

    def test(self, dataloader: Loader) -> dict[str, float]:
        """The mean losses over a test set. Raises as `evaluate` does."""
        with self._lifetime, self._doing("test"):
            results = self._evaluation.test(made(dataloader, "dataloader"))
            self._records.tell_evaluation(self.ctx, self._evaluation.take())
            return results

    def predict(self, dataloader: Loader) -> list[Any]:
        """The model's outputs, one item a batch, on the device. Raises as `evaluate` does."""
        with self._lifetime, self._doing("predict"):
            return self._evaluation.predict(made(dataloader, "dataloader"))

    def _evaluate(self, loaders: Mapping[str, Iterable[Any]], *, standalone: bool) -> dict[str, dict[str, float]]:
        self.eval_results = results = self._evaluation.evaluate(loaders, standalone=standalone)
        self._records.tell_evaluation(self.ctx, self._evaluation.take())
        return results

    # --- checkpoints ---

    def save_checkpoint(self, path: str | os.PathLike[str] | None = None) -> CheckpointInfo:
        """Write a checkpoint, to the run's folder where `path` is None.

        Raises:
            RequestRefused: while training runs: `ctx.control.save(why)` asks for it.
            CheckpointError: it cannot be written, or a callback's state is not plain data.
        """
        with self._lifetime, self._doing("save_checkpoint"):
            return self._save(path=path)

    def _tell_checkpoint_due(self, boundary: str) -> None:
        if self._heard.on_checkpoint_due:
            self.ctx.boundary = boundary
            self.callbacks.fire(Event.CHECKPOINT_DUE, self.ctx)
            self.ctx.close("on_checkpoint_due")
        if self.control.save_requested is not None:
            with self._training_stopped():
                self._save_as_asked()

    def _save_as_asked(self) -> None:
        requests = self.control.save_requests
        self.control.done("save")
        self._save(requests)

    def _save(self, requests: tuple[Request, ...] = (), path: str | os.PathLike[str] | None = None) -> CheckpointInfo:
        val_losses = {name: result["loss"] for name, result in self.eval_results.items() if "loss" in result}
        return self._checkpoints.save(requests, path, train_loss=self._last_loss, val_losses=val_losses)

    def _parts(self) -> dict[str, Stateful]:
        """What a checkpoint holds, by name."""
        parts: dict[str, Stateful | None] = {
            "state": self.state,
            "model": self.model,
            "optimizer": Typed(self.optimizer) if self.optimizer is not None else None,
            "scheduler": Typed(self.scheduler) if self.scheduler is not None else None,
            "callbacks": self.callbacks,
            "records": self._records,
            "evaluation": self._evaluation,
            "batches": self._batches,
        }
        return {name: part for name, part in parts.items() if part is not None}

    # --- the end ---

    def close(self) -> None:
        """End the run, if it has not ended; may be called twice.

        Raises:
            RequestRefused: from a callback: `ctx.control.stop(why)` ends training in order.
        """
        with self._doing("close"):
            self._end()

    # --- set-up and small change ---

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None) -> None:
        if error is not None:
            self._lifetime.fail(error)
        self.close()

    @contextmanager
    def _doing(self, activity: str) -> Iterator[None]:
        """One thing at a time: in the midst of one, the others have nothing whole to work on."""
        if self._activity:
            ask = {
                "evaluate": "ctx.control.evaluate(why)",
                "save_checkpoint": "ctx.control.save(why)",
                "close": "ctx.control.stop(why)",
            }
            mend = f"; ask the loop for it: {ask[activity]}" if activity in ask else ""
            raise RequestRefused(f"{activity}() inside {self._activity}() would come in the midst of it{mend}")
        self._activity = activity
        try:
            yield
        finally:
            self._activity = ""

    @contextmanager
    def _training_stopped(self) -> Iterator[None]:
        """The clock of training stands still."""
        self._records.tally.stop()
        yield
        self._records.tally.start()
