"""The host (adapter) with which `callsheet exec` observes a hand-written training loop that does not use callsheet."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from threading import get_ident
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from callsheet.bridges.lifecycle_driver import DrivenSpan
from callsheet.bridges.support_check import SupportCheck
from callsheet.bridges.torch_hooks import not_compiled
from callsheet.core.callback import Callback
from callsheet.core.lifecycle import EVENTS
from callsheet.core.ranks import read_ranks
from callsheet.exec.log_pace import FIRST_INTERVAL_STEPS, LogPace
from callsheet.exec.lone_run import LoneRun
from callsheet.exec.loop_batches import LoopBatches, batch_of
from callsheet.exec.loop_calls import LoopCalls
from callsheet.exec.loop_counts import LoopCounts
from callsheet.exec.loop_evaluations import LoopEvaluations
from callsheet.exec.loop_guard import LoopGuard
from callsheet.exec.loop_hooks import LoopBackwardWatch, LoopOptimizerHooks
from callsheet.exec.loop_parameters import LoopParameters
from callsheet.exec.unreported_step import UnreportedStep

HOST = "this script"
"""The name of the observed loop in messages, in place of a framework's name."""
REGULAR_STEPS = 20
"""After this number of regular steps (one new batch and one model call per loss), the first loss of a step marks its start."""
_NEVER_FIRED = tuple(event for event in EVENTS if event.startswith(("on_test", "on_predict", "on_checkpoint_due", "on_preempt")))
"""Events that are never fired, because nothing that a hand-written loop does corresponds to them."""


class BareLoop:
    """Observes one hand-written training loop, whose model and optimizer are known, and fires callsheet's events for the loop.

    A step begins with the first call of the model with gradients enabled, and ends when the optimizer has stepped.
    Calls of the model in evaluation mode without gradients, between two steps, are an evaluation. An epoch ends when the dataloader
    is at its end, or begins again.

    The hook that observes the model's calls makes each call slower. So the hook is removed after `REGULAR_STEPS` regular steps, if
    no callback listens to the parts of a step. Then a step begins with its first loss, and is often an `UnreportedStep`. When an
    evaluation may begin, for example because the script calls `eval`, the hook is registered again.

    The methods that hooks call raise no errors, except those that the script's signal handlers have raised: see `LoopGuard`.

    Args:
        observers: the callbacks.
        model: the module that the loop calls.
        optimizer: the optimizer that steps.
        scaler: the `torch.amp.GradScaler` that scales the loss, or None.
        loader: the dataloader of the batches, or None.
        run_name: the run's name.
        runs_folder: the folder that contains the run's folder.
        pace: how many steps there are from one metrics record to the next.
        config: the script's arguments, which are recorded as settings.
        stops: a function that ends the training if a callback requests a stop. None: the training cannot be ended.
    """

    def __init__(
        self,
        observers: Iterable[Callback],
        *,
        model: nn.Module,
        optimizer: Optimizer,
        scaler: Any,
        loader: Any,
        run_name: str,
        runs_folder: Path,
        pace: LogPace,
        config: Mapping[str, Any],
        stops: Callable[[], None] | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.parameters = LoopParameters(optimizer)
        """The parameters that the optimizer updates."""
        self._stops = stops
        self.run = run = LoneRun(
            observers,
            model=unwrap_model(model),
            optimizer=optimizer,
            host=HOST,
            run_name=run_name,
            runs_folder=runs_folder,
            config=config,
            log_interval=pace.steps,
            able=("stop",) if stops is not None else (),
            saves=lambda requests: None,
            is_alone=True,
        )
        run.records.pace = pace
        self._support = SupportCheck(run.manager, HOST, strict=False)
        # Store these objects as attributes, because every step reads them and `run.driver` would be slower.
        self._driver, self._spans = run.driver, run.spans
        self._step, self._epoch, self._fetch, self._microbatch = (
            run.driver.spans[name] for name in ("train_step", "epoch", "fetch", "microbatch")
        )
        self.guard = guard = LoopGuard(run)
        """Ends the observation if an error occurs."""
        self.batches = LoopBatches(loader, ranks=read_ranks().world_size)
        """The batches of the loop."""
        self._counts = LoopCounts(run, self.batches)
        self.unreported = UnreportedStep(run, self._counts, guard)
        """The open step, if it was not reported to the lifecycle driver. Reading the property `step` reports it."""
        # Whether the model was called in this step, with gradients enabled, and `backward` was not called since.
        self._is_in_microbatch = False
        self._ends_epoch = False  # whether the epoch ends when the open step ends
        self.are_epochs_reported = False
        """Whether a framework calls `end_epoch` for each epoch. If not, an epoch ends when the dataloader is at its end."""
        self.evaluations = LoopEvaluations(run)
        """Fires the events of the loop's evaluations."""
        self.no_evaluator: Callable[[], Any] = lambda: None
        """Called if the optimizer steps during a supposed evaluation, which then turns out to be training. Returns the step's batch."""
        self.watch = LoopBackwardWatch(self, scaler)
        """Observes the losses on which the loop calls `backward`."""
        self.watch.listen(False)
        self._calls = LoopCalls(self, model)
        guard.hooks += [self.unreported, self.watch, self._calls]

    # --- beginning and end ---

    def begin(self, loss: Tensor | None, batch: Any, *, counts: tuple[int, int], has_closure: bool) -> None:
        """Begin the run within the optimizer's first step, and fire the step's earlier events, such as `on_forward_end`.

        Args:
            loss: the loss of the step, unscaled and detached.
            batch: the latest batch, or None.
            counts: the samples and tokens of the step, or zeros if they are unknown.
            has_closure: whether the optimizer evaluates a closure. If so, forward and backward of this step come later.
        """
        self.guard.call(self._begin, loss, batch, counts, has_closure)

    def _begin(self, loss: Tensor | None, batch: Any, counts: tuple[int, int], has_closure: bool) -> None:
        run = self.run
        self._support.before_run(_NEVER_FIRED, run.control)
        run.begin()
        self._install_forward_hooks()
        self.watch.listen(True)
        self._optimizer_hooks = LoopOptimizerHooks(self)
        if has_closure:
            self._calls.are_regular = False
            self._optimizer_hooks.expect_closures()
        self.guard.hooks.append(self._optimizer_hooks)
        run.losses = self.watch.reader
        if batch is not None:
            self.batches.add(batch)
        if has_closure:
            self._open_step()
        else:
            self.begin_microbatch((), {})
            if any(counts):
                run.counted = self.batches.on_all_ranks(counts)
            if run.driver.listens_to("microbatch"):
                run.driver.start("loss")
                if loss is not None:
                    run.ctx.loss = loss
                run.driver.start("backward")
                run.driver.end("backward")
            self._is_in_microbatch = False
            self.watch.total = loss

    def discard(self) -> None:
        """Remove all hooks before the run begins, because a callback cannot work in this loop."""
        self.guard.release()
        self.run.lifetime.end()

    def finish(self, error: BaseException | None) -> None:
        """End the run because the script has ended. `error` is the error that has ended the script, or None."""
        if self.guard.is_over:
            return
        run = self.run
        try:
            self.unreported.report()
            self._leave_evaluation()
            if error is not None:
                run.fail(error)
            else:
                run.drop_step()
                self.evaluations.fire_delayed()
                if run.driver.is_open("epoch"):
                    run.end_epoch(is_whole=True)
                run.finish()
        except Exception as fault:
            self.guard.fail(fault)
        finally:
            self.guard.release()

    # --- batches ---

    def fetch(self, fetches: Callable[[Any], Any], iterator: Any) -> Any:
        """Fetch the next training batch with `fetches(iterator)`, and fire the events of the span `fetch`. Errors of `fetches` are raised."""
        if get_ident() != self.guard.thread_id:
            return fetches(iterator)
        if not self.unreported.is_allowed or self._driver.seen_links != self._spans.links:
            return self._fetch_observed(fetches, iterator)
        try:
            batch = fetches(iterator)
        except StopIteration:
            self.end_iteration()
            raise
        batches = self.batches
        batches.new = batch  # as `batches.add` does, but without a function call, for speed
        batches.fetched += 1
        return batch

    def _fetch_observed(self, fetches: Callable[[Any], Any], iterator: Any) -> Any:
        has_begun = self._begin_fetch()
        try:
            batch = fetches(iterator)
        except StopIteration:
            self.end_iteration()
            raise
        self.batches.add(batch)
        if has_begun and not self.unreported.is_allowed:
            self.run.ctx.batch = batch
            if not self._fetch.has_no_listeners:
                self.guard.call(self.run.driver.end, "fetch")
        return batch

    def _begin_fetch(self) -> bool:
        """Fire the start event of the span `fetch`, unless a step is open (then the batch is a further microbatch of that step).

        Return True if no step is open.
        """
        if self._is_in_microbatch:  # the loop fetches a batch before it has computed the loss of the previous batch
            self.be_irregular()
        if self.step.is_open:
            return False
        try:
            self._leave_evaluation()
            driver = self._driver
            if driver.listen():
                self._listen()
            if not self._fetch.has_no_listeners:
                driver.start("fetch")
        except (Exception, SystemExit) as error:
            self.guard.fail(error)
        return True

    def is_of_training(self, loader: Any) -> bool:
        """Return whether a batch that is fetched from `loader` now is for training, and not for an evaluation or another loop."""
        if get_ident() != self.guard.thread_id or self.evaluations.dataset or not self.batches.come_from(loader):
            return False
        return self._calls.would_train

    def other_fetched(self, loader: Any, batch: Any) -> None:
        """Keep a batch that was fetched from a dataloader other than the loop's, because the next training step may use this batch."""
        if get_ident() != self.guard.thread_id or self.evaluations.dataset or self.step.is_open:
            return
        self.batches.add_other(loader, batch)
        # Report the next step, so that the loop checks whether the step uses a batch of another dataloader.
        self.unreported.is_allowed = False

    def keep_early_batch(self, loader: Any, batch: Any, *, is_same_iteration: bool) -> None:
        """Keep a batch that the script fetched from `loader` before the first step ended: the second step may use this batch.

        `is_same_iteration`: whether this batch comes from the same iteration over the dataloader as the batch of the first step.
        """
        batches = self.batches
        if self.guard.is_over:
            return
        if not batches.come_from(loader):
            batches.add_other(loader, batch)
            return
        if not is_same_iteration:
            batches.begin()
        batches.add(batch)

    # --- steps and microbatches ---

    @property
    def step(self) -> DrivenSpan:
        """The span `train_step`, which is open during each training step."""
        if self.unreported.counts is not None:
            self.unreported.report()
        return self._step

    @property
    def steps(self) -> int:
        """The number of training steps that have ended."""
        return self.run.state.timestamp.batch

    def begin_step(self) -> None:
        """Begin a training step, unless one is open."""
        if not self.guard.is_over and not self.step.is_open:
            self.guard.call(self._open_step)

    def _open_step(self) -> None:
        if self.evaluations.span.is_open:
            self._leave_evaluation()
        if self.batches.other is not None and self.batches.switch():
            self._end_data()
        if self._driver.listen():
            self._listen()
        self._driver.start_step()
        self._counts.begin_step()
        self.watch.total, self._is_in_microbatch, self.watch.is_on = None, False, True

    def begin_microbatch(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Begin a microbatch, unless one is open, and count its samples. If no step is open, begin a step first.

        `args` and `kwargs` are the arguments of the model's call, or empty if the call was not observed.
        """
        if not self.step.is_open:
            self._open_step()
        if self._is_in_microbatch:
            return
        if (args or kwargs) and not self.batches.has_loader:
            self.batches.add(batch_of(args, kwargs))
        self._count_microbatch()
        self._is_in_microbatch = True
        driver, ctx = self._driver, self.run.ctx
        if not driver.has_listeners:
            return
        if (batch := self.batches.latest) is not None and not ctx.has("batch"):
            ctx.batch = batch
        if not self._microbatch.has_no_listeners:
            if batch is not None:
                ctx.microbatch = batch
            if not self._microbatch.is_open:
                driver.start("microbatch")

    def _count_microbatch(self) -> None:
        if not self._counts.add_microbatch(keeps_batch=self._driver.has_listeners, is_in_closure=self.watch.is_in_closure):
            self.be_irregular()

    def begin_backward(self) -> None:
        """Handle a call of `backward` on a loss. If calls of the model are not observed, this loss may begin a training step."""
        if not self._calls.are_observed:
            self.begin_microbatch((), {})
        elif not self._is_in_microbatch:  # this loss is of another model, or is the second loss of the same outputs
            self._calls.are_regular = False
            if not self.step.is_open:
                return
        if self.watch.total is not None and self.parameters.have_lost_gradients():
            self.gradients_are_discarded()
        # An earlier loss of the same outputs was discarded, and its count of samples too. Restore that count for this loss.
        if not self._is_in_microbatch:
            self._counts.restore_discarded()
        self._is_in_microbatch = False

    def gradients_are_discarded(self) -> None:
        """Exclude earlier losses and their samples from the step, because the script has discarded the gradients of the losses."""
        if get_ident() != self.guard.thread_id or self.watch.is_in_closure:
            return
        self.unreported.report()
        self.be_irregular()
        self.watch.total = None
        self._counts.discard(is_in_microbatch=self._is_in_microbatch)

    @partial(not_compiled, recursive=False)
    def clip(self, clips: Callable[[], Any]) -> Any:
        """Clip the gradients with `clips()`, fire the events of the span `clip_gradients`, and return the norm before clipping."""
        if self.unreported.counts is not None:  # no handler listens to the step, so none reads the norm
            return clips()
        is_in_step = self.step.is_open and get_ident() == self.guard.thread_id
        if is_in_step:
            self.guard.call(self.run.driver.start, "clip_gradients")
        norm = clips()
        if is_in_step and not self.guard.is_over:
            self.run.grad_norm = norm
            self.guard.call(self.run.driver.end, "clip_gradients")
        return norm

    def optimizer_begins(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Begin a training step if none is open, because the optimizer's `step` was called with the arguments `args` and `kwargs`."""
        self.begin_step()
        if not self.guard.is_over and (args[1] if len(args) > 1 else kwargs.get("closure")) is not None:
            self.be_irregular()
            self.guard.call(self._optimizer_hooks.expect_closures)

    def other_optimizer_steps(self) -> None:
        """Handle a step of an optimizer that is not observed. Discard the latest losses if they may belong to that optimizer."""
        if get_ident() != self.guard.thread_id:
            return
        if not self._calls.are_observed:
            self.gradients_are_discarded()
        self.be_irregular()

    @not_compiled
    def scaler_has_stepped(self, scaler: Any) -> None:
        """If a step is still open after `GradScaler.step`, the scaler has skipped the optimizer's `step`: end the open step as skipped."""
        self.watch._scaler = scaler
        if not self.guard.is_over and self.step.is_open:
            self.run.step_skipped = True  # the scaler did not call the optimizer's `step`, which would have ended the open step
            self.guard.call(self.end_step)

    def end_step(self) -> None:
        """End the step, because the optimizer has stepped or a loss scaler has skipped the optimizer's step."""
        run, batches = self.run, self.batches
        if self.evaluations.dataset:
            batches.add(self.no_evaluator())
            self._count_microbatch()
        calls = self._calls
        if calls.are_observed and not calls.was_called and self.steps:
            calls.give_up()
            self._driver.synthesized.clear()
        calls.was_called = False
        if not self._driver.has_listeners:
            run.set_learning_rate()
        run.end_step()
        self.watch.total = None
        self.after_step(run.ctx.step)
        batches.latest = None
        if self._ends_epoch:
            self._end_epoch()
        if self._stops is not None:
            self._stop_if_asked()

    def after_step(self, steps: int) -> None:
        """Do the work that is due only after certain steps. `steps` is the number of steps that have ended."""
        run = self.run
        if steps == 1:
            # The loop was recognized only when the optimizer stepped, so the driver synthesized spans of step 1. Forget them.
            run.driver.synthesized.clear()
        elif steps == 2:
            if not self._calls.are_observable:
                run.driver.synthesized.clear()
            self._support.after_first_step(run.driver)
        elif not steps % FIRST_INTERVAL_STEPS:
            run.keep_pace()
            if not self.unreported.is_allowed and not run.driver.has_listeners:
                self._install_forward_hooks()
        # If calls of the model are not observed, a loss begins the step. So observe losses even while no step is open.
        # In the first steps, always observe losses, because they show whether the loop is regular.
        self.watch.is_on = not self._calls.are_observed or steps < REGULAR_STEPS
        if self.evaluations.delayed:
            self.evaluations.fire_delayed()

    # --- which hooks are registered ---

    def be_irregular(self) -> None:
        """Observe the model's calls from now on, because a step was irregular. A regular step has one new batch and one model call per loss."""
        if self._calls.are_regular:
            self._calls.are_regular = False
            self.watch_calls()

    def watch_calls(self) -> None:
        """If the hooks on the model's calls were removed for speed, register them again, so that no evaluation is missed."""
        calls = self._calls
        if calls.are_observable and not calls.are_observed and get_ident() == self.guard.thread_id:
            self.guard.call(self._install_forward_hooks, True)

    def _install_forward_hooks(self, sees_calls: bool = False) -> None:
        """Register the model's hooks that are needed now, and remove the others. If `sees_calls`, always observe model calls."""
        calls = self._calls
        if not calls.are_observable or self.guard.is_over:
            return
        self.unreported.report()  # do this first, because this method may forbid unreported steps
        needs_outputs = self.evaluations.span.is_open or not self._microbatch.has_no_listeners
        is_predictable = calls.are_regular and self.steps >= REGULAR_STEPS and not self._driver.has_listeners
        needs_calls = sees_calls or needs_outputs or not is_predictable
        calls.install(needs_calls=needs_calls, needs_outputs=needs_outputs)
        self.unreported.is_allowed = not needs_calls and self._stops is None and self.batches.other is None
        if not needs_calls:
            self._is_in_microbatch, self.watch.is_on = False, True

    def _listen(self) -> None:
        self._install_forward_hooks()
        self._optimizer_hooks.listen(self.run.driver.has_listeners)
        self.watch.listen(self.run.driver.is_loss_read)

    # --- epochs and evaluations ---

    def loader_begins(self) -> None:
        """If the script starts a new iteration over the dataloader before the previous one was complete, end the open epoch."""
        if self.batches.begin():
            self.guard.call(self._end_data)

    def end_iteration(self) -> None:
        """End the epoch, even if it had only one batch, because the dataloader has no more batches."""
        self.batches.begin()
        self.guard.call(self._end_data)

    def _end_data(self) -> None:
        """End the epoch, because the dataloader has ended or restarted. If a framework reports when epochs end, do nothing."""
        if not self.are_epochs_reported:
            self._end_epoch()

    def begin_epoch(self) -> None:
        """End the open evaluation, if there is one, because a framework begins a new epoch."""
        if get_ident() == self.guard.thread_id:
            self.guard.call(self._leave_evaluation)

    def end_epoch(self, values: Mapping[str, float]) -> None:
        """Log `values` and end the open epoch, because a framework has ended its epoch. Do nothing if no epoch is open."""
        if self._epoch.is_open and get_ident() == self.guard.thread_id:
            self.log(values)
            self.guard.call(self._end_epoch)

    def _end_epoch(self) -> None:
        """End the epoch, if one is open. If a step is open too, end the epoch when the step ends."""
        driver = self.run.driver
        if self.guard.is_over or not self._epoch.is_open:
            return
        self._ends_epoch = self.step.is_open
        if self._ends_epoch:
            self.unreported.is_allowed = False
            return
        self._leave_evaluation()
        driver.end("fetch")
        self.run.end_epoch(is_whole=True)
        self._stop_if_asked()

    def begin_evaluated_batch(self, batch: Any) -> None:
        """Begin a batch of an evaluation, because the model is called. If no evaluation is open, begin one."""
        self.batches.forget_other()
        is_first = not self.evaluations.span.is_open
        self.evaluations.begin_batch(batch)
        if is_first:
            self._install_forward_hooks()

    def record_results(self, dataset: str, results: Mapping[str, float]) -> None:
        """Record the results of an evaluator of Ignite that has just evaluated the dataset."""
        if get_ident() == self.guard.thread_id:
            self.guard.call(lambda: self.evaluations.end_dataset(dataset, results, is_in_step=self.step.is_open))
            self.watch_calls()

    def _leave_evaluation(self) -> None:
        if self.evaluations.span.is_open:
            self.evaluations.end()
            self._stop_if_asked()
            self._install_forward_hooks()

    # --- values and requests ---

    def log(self, values: Mapping[str, float]) -> None:
        """Log, in callsheet's run, values that the script has logged with a framework such as Accelerate."""
        if get_ident() == self.guard.thread_id:
            self.guard.call(lambda: self.run.ctx.log(values, across="same"))

    def _stop_if_asked(self) -> None:
        if self._stops is not None and self.run.control.stop_requested is not None:
            stops, self._stops = self._stops, None
            stops()


def unwrap_model(model: nn.Module) -> nn.Module:
    """Return the module inside wrappers such as DistributedDataParallel, DataParallel and the wrapper of `torch.compile`."""
    while True:
        inside = getattr(model, "_orig_mod", None)
        if inside is None and type(model).__name__ in ("DistributedDataParallel", "DataParallel"):
            inside = getattr(model, "module", None)
        if not isinstance(inside, nn.Module):
            return model
        model = inside
