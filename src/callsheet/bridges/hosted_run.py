"""A run whose loop is somebody else's: context, records, agreement between the ranks, checkpoints and the run's life, around a narrator."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from callsheet.background import inner
from callsheet.bridges.boundary_order import BoundaryOrder
from callsheet.bridges.giving_up import weakly
from callsheet.bridges.host_parts import Evaluates, HostCheckpoints, HostEvaluation
from callsheet.bridges.lifecycle_driver import LifecycleDriver
from callsheet.bridges.reads import reads_of, writes_to_run_folder
from callsheet.callback import Callback, label_of
from callsheet.context import CheckpointInfo, Context, RunInfo, TrainState
from callsheet.control import SAVE_KINDS, Control, Request
from callsheet.distributed import read_ranks
from callsheet.errors import NotSupported, mark_as_users
from callsheet.lifecycle import EVENTS, SPANS
from callsheet.lifetime import Lifetime
from callsheet.log_ranks import LogRanks
from callsheet.manager import CallbackManager, normalize_callbacks
from callsheet.signals import GRACE_SECONDS, SignalWatch
from callsheet.time import Time
from callsheet.trainer.agreement import Agreement
from callsheet.trainer.arguments import check_run_name, duration, log_boundary, new_name
from callsheet.trainer.boundaries import Boundaries
from callsheet.trainer.checkpoints import Checkpoints, Stateful, Typed
from callsheet.trainer.process_groups import ProcessGroups
from callsheet.trainer.records import Records
from callsheet.trainer.run_guard import LOCK_TIMEOUT_SECONDS, RunGuard, checked_lock_timeout


class HostedRun:
    """The run behind a host; see the module. Its `narrator` is told where the loop is.

    Args:
        callbacks: a manager, a callback, or any iterable of callbacks.
        model: what is trained, as callbacks are to see it; of DDP's wrapper the module inside.
        optimizer, scheduler: the loop's.
        host: what the loop is called in messages.
        run_name, runs_folder: of the run and its folder.
        config: the host's settings, plain data.
        max_duration: how long the loop will train, where that is known.
        log_interval: how often a record is made.
        device: of the model; None is that of its first parameter.
        evaluates: has the host evaluate, and gives the results by the dataset's name; None where it cannot be asked.
        able: the requests that the host can carry out, but for an evaluation.
        signals: which ask the run to make way.
        save_in_background: see the Trainer.
        saves: has the host write a checkpoint for these requests; None where checkpoints are written here.
        timeout_seconds: until a rank that does not answer fails the run.
        lock_timeout_seconds: how long to wait if another process trains in the run's folder.
    """

    def __init__(
        self,
        callbacks: CallbackManager | Callback | Iterable[Callback] | None,
        *,
        model: nn.Module,
        optimizer: Any = None,
        scheduler: Any = None,
        host: str = "this loop",
        run_name: str | None = None,
        runs_folder: str | os.PathLike[str] = "runs",
        config: Mapping[str, Any] | None = None,
        max_duration: str | Time | None = None,
        log_interval: str | int | Time = "10ba",
        device: torch.device | str | None = None,
        evaluates: Evaluates | None = None,
        able: Iterable[str] = ("stop", "save"),
        signals: Collection[str] = (),
        save_in_background: bool = False,
        saves: Callable[[tuple[Request, ...]], None] | None = None,
        timeout_seconds: float = 600.0,
        lock_timeout_seconds: float = LOCK_TIMEOUT_SECONDS,
    ) -> None:
        check_run_name(run_name, None)
        checked_lock_timeout(lock_timeout_seconds)
        log_every = log_boundary(log_interval)
        ranks = read_ranks()
        self.host = host
        self.model = model
        self.device = torch.device(device) if device is not None else _device_of(model)
        self.manager = normalize_callbacks(callbacks) or CallbackManager()
        able = {*able, *(["evaluate"] if evaluates is not None else [])}
        self.control = Control(able=able, is_shared=ranks.world_size > 1)
        self.state = TrainState(max_duration=duration(max_duration, 1) if max_duration is not None else None)
        self.signals = SignalWatch(signals)
        self.world = ProcessGroups(ranks, self.device, timeout_seconds)
        name = run_name or self.world.of_rank_zero(new_name())
        info = RunInfo(
            name, config=dict(config or {}), folder=Path(runs_folder) / name, ranks=ranks, device=str(self.device),
            restart_count=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        )  # fmt: skip
        self.records = _Records(self.manager, log_every, self.device, self.world)
        self.agreement = Agreement(self.world, self.control, self.signals)
        self.ctx = ctx = Context(
            info,
            state=self.state,
            model=model,
            control=self.control,
            accumulator=self.records.metrics,
            loggers=self.manager.notify_loggers,
        )
        self.world.at_step = lambda: ctx.step
        self.lifetime = Lifetime(self.manager, ctx)
        self._log_ranks = LogRanks("zero", ranks)
        self.is_busy: Callable[[], bool] = partial(_is_other_and_alive, threading.current_thread())
        """Whether the loop is running, as far as is known; while it is, no other run of this process takes over the folder."""
        self._has_own_name = run_name is not None
        self._writes_checkpoints = saves is None
        self.guard = RunGuard(self.world, info, self.control, timeout=lock_timeout_seconds, is_busy=lambda: self.is_busy())
        for close in (self.guard.end, self.world.close, self._log_ranks.end):  # called in the opposite order
            self.lifetime.at_end(close)
        self._log_ranks.start()
        self.spans = self.manager.spans(ctx)
        self.eval_ctx = ctx.sibling()
        self.eval_spans = self.manager.spans(self.eval_ctx)
        self.checkpoints: Any = (
            HostCheckpoints(ctx, self.spans, saves)
            if saves is not None
            else Checkpoints(
                self.manager, ctx, self.spans, self.world, self.guard, in_background=save_in_background, grace=GRACE_SECONDS
            )
        )
        self.lifetime.at_end(self.checkpoints.close)
        self.agreement.durable = self.checkpoints.durable
        self.evaluation = HostEvaluation(ctx, evaluates, self.fire_evaluation)
        self.boundaries = _Boundaries(
            self.manager, ctx, self.lifetime, self.agreement, self.records, self.evaluation, self.checkpoints, self.guard  # type: ignore[arg-type]
        )  # fmt: skip
        # A checkpoint names the last step's loss: the host's to who is told of it; ours in its file, where anybody can ask for it.
        askers = _OF_CHECKPOINTS if saves is not None else EVENTS
        is_asked_by_signal = saves is None and bool(signals)
        self.driver = LifecycleDriver(
            self.spans,
            {
                "on_train_start": self._train_goes_on,
                "on_round_start": self._train_goes_on,
                "on_epoch_start": self._epoch_begins,
                "on_epoch_end": lambda: self._order.reach(),
                "on_round_end": lambda: self._order.reach(),
                "on_fetch_start": self._train_goes_on,
                "on_train_step_start": self._step_begins,
                "on_forward_backward_end": self._gradients_are_there,
                "on_clip_gradients_end": self._clipped,
                "on_optimizer_step_start": self._optimizer_begins,
                "on_optimizer_step_end": self._optimizer_ends,
                "on_train_step_end": self._step_ends,
            },
            step_passes=self._step_passes,
            is_recorded=lambda: self.records.are_read,
            is_loss_needed=lambda: is_asked_by_signal or any(getattr(self.manager.has_listeners, event) for event in askers),
        )
        self.eval_driver = LifecycleDriver(self.eval_spans, {})
        self.eval_driver.is_barred = self._is_barred
        self._order = BoundaryOrder(host, self.driver, self.eval_driver)
        self.records.may_come = self.boundaries.may_come = self._order.may_come
        ctx.excuse = self.eval_ctx.excuse = self._order.excuse
        self._judging = self.eval_driver.opened
        self._found: dict[str, dict[str, float]] = {}
        self.losses: Callable[[], Tensor | None] = lambda: None
        """The step's mean loss, or None; the host says how it is found."""
        self.other_losses: Mapping[str, Tensor] = {}
        """Beside that, the step's others by name."""
        self.step_skipped = False
        """Whether the optimizer left this step out."""
        self.grad_norm: Any = None
        """The step's, where the host has heard it when `clip_gradients` ends; else clipping is the loop's own, and says nothing."""
        self.counted = (0, 0)
        """The samples and tokens of the step in hand."""
        self.found: dict[str, dict[str, float]] = {}
        """What the evaluation in hand has found so far, by the dataset's name."""
        self.made: list[Mapping[str, Mapping[str, Any]]] = []
        """Results of evaluations that the loop made within the step in hand; they are told when it is over."""
        self.hints: Mapping[str, str] = {}
        """For a request that cannot be carried out here, how it could."""
        self.parts: dict[str, Stateful] = {}
        """What a checkpoint holds of the host, beside model, optimizer, scheduler and the callbacks; this rank's own."""
        self._next_boundary = 0
        self._optimizer, self._scheduler = optimizer, scheduler

    # --- beginning and end ---

    def begin(self, resume: str | None = None, *, data_is_made: bool = True) -> None:
        """Acquire the lock of the run's folder, fire the run's start, load what `resume` names, and fire `on_data_init_start`; with
        `data_is_made` also its end.

        Raises:
            RunInUseError: another process trains in the run's folder.
        """
        try:
            self._begin(resume, data_is_made=data_is_made)
        except Exception as error:
            if resume is not None:
                mark_as_users(error)  # training may not go on as if no resume had been asked for
            raise

    def _begin(self, resume: str | None, *, data_is_made: bool) -> None:
        ctx = self.ctx
        is_writing = self._writes_checkpoints or any(writes_to_run_folder(each) for each in self.manager.callbacks)
        if self._has_own_name and is_writing:
            try:
                self.guard.acquire()
            except BaseException as error:
                self.lifetime.fail(error)  # no event has been fired: this closes what was opened
                raise
        self.lifetime.start()
        shared: dict[str, Stateful] = {"state": self.state, "model": self.model, "tally": self.records.tally}
        for name, part in (("optimizer", self._optimizer), ("scheduler", self._scheduler)):
            if part is not None:
                shared[name] = Typed(part)
        self.checkpoints.shared = shared
        self.checkpoints.local = {"callbacks": self.manager, "records": self.records, **self.parts}
        self.checkpoints.load(resume)
        self.manager.notify_loggers("log_call_sheet", ctx, sheet=str(self.manager.call_sheet()))
        ctx.step, ctx.epoch = self.state.timestamp.batch, self.state.timestamp.epoch
        self.eval_ctx.muting = ctx.muting
        for each in (ctx, self.eval_ctx):
            each.optimizer, each.scheduler = self._optimizer, self._scheduler
            each.user_state = self.manager.user_state
        if is_writing:
            self.guard.begin()
        self.driver.start("data_init")
        if data_is_made:
            self.driver.end("data_init")
        self.manager.between_steps(ctx.step)
        self.boundaries.begin()

    def finish(self) -> None:
        """Training is over: tell its end, carry out what was asked for last, and end the run."""
        self.finish_training()
        self.lifetime.end()

    def finish_training(self) -> None:
        """The same, for a host that may still evaluate or test. What was logged after the last record is told."""
        self.records.tally.stop()
        self.records.tally.settle(self.state)
        self.driver.end("train")
        self.manager.flush_lanes(self.ctx)
        self.records.tell(self.ctx)
        self.boundaries.finish()
        self.boundaries.conclude()

    def fail(self, error: BaseException) -> None:
        """An exception leaves the loop: tell it, and the end."""
        self.driver.forget()
        self.eval_driver.forget()
        self.lifetime.fail(error)
        self.lifetime.end()

    def fails_by(self, leave: Callable[[Exception], None]) -> None:
        """Have the hooks that observe this run call `leave`, a method of the host, with an error of their own. It raises what the user has
        to know of; else the hooks go on in the user's computation. The host is not kept alive."""
        self.driver.give_up = self.eval_driver.give_up = weakly(leave)

    # --- after a step and an epoch ---

    def end_step(self) -> bool:
        """The step in hand is over; whether training is to end."""
        self.driver.end_step()
        ctx, made = self.ctx, self.made
        if made:
            self.made = []
            self.records.tally.settle(self.state)
            self.records.tell(ctx)
            self._tell_all(made)
        if made or ctx.step >= self._next_boundary or self.control.pending or self.signals.received is not None:
            is_over = self.boundaries.reach("step")
            self._next_boundary = self.boundaries.next_step()
            return is_over
        if self.manager.has_listeners.on_checkpoint_due:
            self.boundaries.fire_checkpoint_due("step")
        return False

    def close_epoch(self, *, is_whole: bool) -> None:
        """The epoch in hand is over, or left; its boundary is reached later, behind the evaluation that the host makes of it."""
        for part in ("train_step", "fetch"):  # one that was left in its midst, and one that found the data at its end
            self.driver.end(part)
        self.records.tally.settle(self.state)
        if is_whole:
            self.state.timestamp = self.state.timestamp.next_epoch()
        if self.ctx.has("batch"):
            del self.ctx.batch
        self.driver.end("epoch")

    def end_epoch(self, *, is_whole: bool) -> bool:
        """The epoch in hand is over, or left; whether training is to end."""
        self.close_epoch(is_whole=is_whole)
        return self.boundaries.reach("epoch") if is_whole else True

    def check_supported(self, *, strict: bool, logger: Any, driver: LifecycleDriver | None = None) -> None:
        """After the first step, or the first of the `narrator` of evaluations: refuse, or warn of, events that somebody hears and that
        the host has not told.

        Raises:
            NotSupported: with `strict`; the message names event, callbacks and host.
        """
        synthesized = (driver or self.driver).synthesized
        for name in sorted(synthesized, key=list(SPANS).index):
            for event in (SPANS[name].start_event, SPANS[name].end_event):
                self._not_supported(event, "has not told it in its first step", strict, logger, _CAUSES.get(name, ""))
        synthesized.clear()

    # --- checkpoints of the host's own ---

    def fire_checkpoint(
        self, path: str, write: Callable[[CheckpointInfo], Any], *, is_durable: bool = True, step: int | None = None
    ) -> CheckpointInfo:
        """Tell a checkpoint that the host has just written, of the last step or of `step`; `write` adds to it what is kept here.

        One that is still on its way to the disk is not published; `publish` is for when it is there.
        """
        ctx, checkpoints = self.ctx, self.checkpoints
        requests, checkpoints.requests = checkpoints.requests, ()
        kinds = [request.kind for request in requests]
        ctx.checkpoint = info = CheckpointInfo(
            path,
            self.state.timestamp.batch if step is None else step,
            self.state.timestamp.epoch,
            max(kinds, key=SAVE_KINDS.index, default="periodic"),
            train_loss=self.records.mean_loss(),
            val_losses={name: found["loss"] for name, found in self.evaluation.results.items() if "loss" in found},
            best_metric_key=next((request.metric for request in requests if request.metric), None),
            requested_by=tuple(dict.fromkeys(request.by for request in requests)),
        )
        if not self._order.may_come("S"):
            self._order.warn_of_checkpoint()
            ctx.close("on_checkpoint_published")
            write(info)
            return info
        with self.spans.checkpoint_save:
            write(info)
        ctx.close("on_checkpoint_save_end")
        if is_durable:
            self.publish(info)
        return info

    def publish(self, info: CheckpointInfo) -> None:
        """Tell that a checkpoint of the host is there, whole."""
        ctx = self.ctx
        ctx.checkpoint = info
        self.manager.fire("on_checkpoint_published", ctx)
        ctx.close("on_checkpoint_published")

    def reject(self, never: Collection[str], *, strict: bool, logger: Any) -> None:
        """Refuse, or warn of, callbacks that would hear nothing of this host but the run's start and end, or whose every request it cannot
        carry out, as far as their source shows; log what others will miss.

        Args:
            never: the events that it never tells.

        Raises:
            NotSupported: with `strict`; the message names event, callbacks and host.
        """
        edges = {"on_run_start", "on_run_end"}
        told = {each for event in EVENTS if event not in edges and event not in never for each in self._listeners(event)}
        for event in never:
            if any(each not in told for each in self._listeners(event)):
                self._not_supported(event, "never tells it", strict, logger)
        for each in dict.fromkeys(each for event in never for each in self._listeners(event)):
            if each in told and not self._listens_to_all(each):
                missed = ", ".join(event for event in never if each in self._listeners(event))
                logger.info("%s hears %s besides, which %s never tells", _name_of(each), missed, self.host)
        if self.control.able and _REQUESTS - self.control.able:  # with none at all, nothing is trained that could be asked for
            self._reject_requests(strict=strict, logger=logger)

    def _reject_requests(self, *, strict: bool, logger: Any) -> None:
        for each in self.manager.callbacks:
            asked = _REQUESTS & {read.removeprefix("control.") for read in reads_of(each) if read.startswith("control.")}
            if cannot := sorted(asked - self.control.able):
                missed = ", ".join(f"ctx.control.{request}" for request in cannot)
                if not asked & self.control.able:
                    message = f"{label_of(each)} asks for {missed}, which {self.host} cannot do on request here"
                    if strict:
                        hint = next(
                            (self.hints[request] for request in cannot if request in self.hints), "leave the callback out"
                        )
                        raise NotSupported(f"{message}; {hint}, or pass strict=False to go on until it asks")
                    logger.warning("%s", message)
                else:
                    logger.info("%s may ask for %s, which %s cannot do on request here", label_of(each), missed, self.host)

    def _listeners(self, event: str) -> list[Any]:
        return self.manager.list_callbacks(event)

    def _not_supported(self, event: str, why: str, strict: bool, logger: Any, cause: str = "") -> None:
        listeners = ", ".join(_name_of(each) for each in self.manager.list_callbacks(event) if not self._listens_to_all(each))
        if not listeners:
            return
        message = f"{listeners} hears {event}, and {self.host} {why}{cause}"
        if strict:
            raise NotSupported(f"{message}; leave the callback out, or pass strict=False to go on without that event")
        logger.warning("%s", message)

    def _listens_to_all(self, listener: Any) -> bool:
        """Whether it takes what there is, and asks for no event by its name."""
        if isinstance(listener, Callback):
            return type(inner(listener)).on_event is not Callback.on_event
        return all(listener in self.manager.list_callbacks(event) for event in EVENTS)

    # --- evaluation ---

    def listens_to_outputs(self, kind: str) -> bool:
        """Whether anybody hears, of the steps of an `eval` or `test`, the model's forward, or could read its outputs behind it."""
        forward, step = getattr(self.eval_spans, f"{kind}_forward"), getattr(self.eval_spans, f"{kind}_step")
        return any(edge is not None for edge in (forward.starts, forward.ends, step.ends))

    def begin_evaluations(self, *, standalone: bool = False) -> None:
        """The host begins to evaluate; nothing where it has begun."""
        ctx, driver = self.eval_ctx, self.eval_driver
        if not driver.is_open("eval_all"):
            self.records.tally.stop()
            ctx.step, ctx.epoch, ctx.standalone = self.ctx.step, self.ctx.epoch, standalone
            self.found = {}
            driver.start("eval_all")

    def begin_evaluation(self, name: str, *, standalone: bool = False) -> None:
        """The host begins to evaluate a dataset; of a run's evaluation the first, or the next."""
        self.begin_evaluations(standalone=standalone)
        self.eval_ctx.eval_name = name
        self.eval_driver.start("eval")

    def end_dataset(self, name: str, found: Mapping[str, Any]) -> None:
        """The dataset in hand is evaluated: its losses and metrics by name."""
        ctx = self.eval_ctx
        self.found[name] = values = {metric: float(value) for metric, value in found.items()}
        ctx.eval_name = name
        ctx.eval_losses = {metric: torch.tensor(value) for metric, value in values.items() if "loss" in metric}
        ctx.log({f"{name}/{metric}": value for metric, value in values.items()}, across="same")
        self.eval_driver.end("eval")

    def end_evaluation(self) -> None:
        """All datasets are evaluated."""
        if not self.eval_driver.is_open("eval_all"):
            if self._found and self.driver.is_open("train_step"):
                self.made.append(self._found)  # told when the step is over
            self._found = {}
            self.records.tally.start()
            return
        self.evaluation.results.update(self.found)
        self.eval_ctx.eval_results = self.found
        self.eval_driver.end("eval_all")
        self.records.tally.start()

    def fire_evaluation(self, results: Mapping[str, Mapping[str, Any]], *, standalone: bool = False) -> None:
        """Tell an evaluation that the host has made, after the fact: its results by the dataset's name, then by the metric's."""
        for name, found in results.items():
            self.begin_evaluation(name, standalone=standalone)
            self.end_dataset(name, found)
        if results:
            self.end_evaluation()

    def evaluated(self, results: Mapping[str, Mapping[str, Any]]) -> None:
        """The same between two epochs, or outside training: a record and a checkpoint may follow."""
        self.records.tally.settle(self.state)
        self._tell_all([results])
        self.boundaries.fire_checkpoint_due("epoch")

    def _tell_all(self, made: list[Mapping[str, Mapping[str, Any]]]) -> None:
        for results in made:
            self.fire_evaluation(results, standalone=not self.driver.is_open("train"))
        self.records.tell(self.ctx)

    # --- where the framework does what the host did not foresee ---

    def _is_barred(self, name: str) -> bool:
        """Whether an evaluation, a test or a prediction may not begin where training is now."""
        if len(self._judging) > 1:  # another one, whose end was not reported
            self.leave_evaluation()
        return self._order.is_barred(name)

    def leave_evaluation(self) -> None:
        """The framework goes on, and has not said that the evaluation is over: end it, so that the weights are those that are trained."""
        driver = self.eval_driver
        self.driver.say_once(
            f"{self.host} goes on, and the end of {self._judging[1].name} was not reported. It is ended here; training goes on."
        )
        if driver.is_open("eval"):
            self.end_dataset(self.eval_ctx.eval_name if self.eval_ctx.has("eval_name") else "validation", {})
        if driver.is_open("eval_all"):
            self.end_evaluation()
        for span in ("test", "predict"):
            driver.end(span)

    def _train_goes_on(self) -> None:
        if len(self._judging) > 1:
            self.leave_evaluation()
        self._order.leave()

    # --- what stands before an event ---

    def _epoch_begins(self) -> None:
        self._train_goes_on()
        self.ctx.epoch = self.state.timestamp.epoch + 1
        self.records.tally.start()

    def _step_begins(self) -> None:
        if len(self._judging) > 1:
            self.leave_evaluation()
        self._order.leave()
        self.ctx.step += 1
        self.step_skipped, self.grad_norm = False, None

    def _gradients_are_there(self) -> None:
        loss = self.losses()
        if loss is not None:
            self.ctx.loss = loss

    def _clipped(self) -> None:
        self.ctx.grad_norm = self.grad_norm

    def _optimizer_begins(self) -> None:
        if self._optimizer is not None:
            rate: Any = self._optimizer.param_groups[0]["lr"]
            if isinstance(rate, Tensor):
                rate = rate.clone()  # a scheduler writes over it where it stands
            self.ctx.learning_rate = self.records.learning_rate = rate

    def _optimizer_ends(self) -> None:
        self.ctx.step_skipped = self.step_skipped

    def _step_ends(self) -> None:
        ctx, loss = self.ctx, self._count_step()
        if loss is not None:
            ctx.loss, ctx.loss_dict = loss, {"loss": loss, **self.other_losses}
            self.records.add(ctx.loss_dict, moved=not self.step_skipped)
        ctx.grad_norm, ctx.step_skipped = self.grad_norm, self.step_skipped  # where nobody hears what they come with
        if not ctx.has("learning_rate"):  # skipped, or of an optimizer that nobody listened to when it began
            self._optimizer_begins()

    def _step_passes(self) -> None:
        """It ends, and nobody hears that: nothing of it is left but what it counts for."""
        ctx, loss = self.ctx, self._count_step()
        if self.driver.is_read:
            if loss is not None:
                self.records.add({"loss": loss, **self.other_losses}, moved=not self.step_skipped)
            if self.step_skipped and not ctx.has("learning_rate"):
                self._optimizer_begins()
            ctx.loss, ctx.learning_rate = None, 0.0  # a slot that is empty cannot be emptied
            ctx.grad_norm, ctx.step_skipped = None, False
            del ctx.loss, ctx.learning_rate, ctx.grad_norm, ctx.step_skipped
        elif not self.step_skipped:
            self.records.last_loss = loss
        ctx.batch = None
        del ctx.batch

    def _count_step(self) -> Tensor | None:
        """Count the step and what its batches held; gives its loss, where that is read."""
        self._order.reach()
        state, tally, now = self.state, self.records.tally, self.state.timestamp
        samples, tokens = self.counted
        state.previous_timestamp, state.timestamp = now, now.next_batch()
        tally.samples += samples
        tally.tokens += tokens
        return self.losses() if self.driver.is_loss_read else None


def _is_other_and_alive(thread: threading.Thread) -> bool:
    """Whether a loop that was begun in `thread` may be running beside the caller's. In the caller's own thread it is taken for over: a
    framework whose loop ends with an exception tells nobody."""
    return thread is not threading.current_thread() and thread.is_alive()


class _Records(Records):
    """Records of a host: none is fired where the lifecycle has none, and what was logged is in the next."""

    may_come: Callable[[str], bool]

    def tell(self, ctx: Context) -> None:
        if self.may_come("L"):
            super().tell(ctx)


class _Boundaries(Boundaries):
    """Boundaries of a host: no checkpoint is due where the lifecycle has none, and what was asked for is saved at the next."""

    may_come: Callable[[str], bool]

    def fire_checkpoint_due(self, boundary: str) -> None:
        if self.may_come("D"):
            super().fire_checkpoint_due(boundary)


_OF_CHECKPOINTS = ("on_checkpoint_save_start", "on_checkpoint_save_end", "on_checkpoint_published")

_CAUSES: Mapping[str, str] = {
    "forward": (
        ": a loss went backward before the model was called. Either another model is trained first in the same step, as a GAN's"
        " discriminator is; then give that one as the model. Or the loop calls the model by its parts; then have it call the model itself"
    ),
    "backward": ": backward() was not called on a loss of this step while the step was open",
    "optimizer_step": ": the optimizer that the bridge was given was not stepped",
}
"""What has probably happened where a part of the first step was not told, and what to do."""

_REQUESTS = frozenset({"stop", "save", "evaluate"})


def _name_of(listener: Any) -> str:
    return label_of(listener) if isinstance(listener, Callback) else getattr(listener, "__name__", repr(listener))


def _device_of(model: nn.Module) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
