"""The host (adapter) with which `callsheet exec` observes a hand-written training loop that does not use callsheet."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from threading import current_thread, get_ident
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from callsheet.bridges.forward_hooks import start_forward
from callsheet.bridges.giving_up import give_up
from callsheet.bridges.lifecycle_driver import DrivenSpan
from callsheet.bridges.support_check import SupportCheck
from callsheet.bridges.torch_hooks import NotCopied, is_traced, not_compiled
from callsheet.core.callback import Callback
from callsheet.core.lifecycle import EVENTS
from callsheet.core.ranks import read_ranks
from callsheet.errors import is_from_signal_handler, text_of
from callsheet.exec.log_pace import FIRST_INTERVAL_STEPS, LogPace
from callsheet.exec.lone_run import LoneRun
from callsheet.exec.loop_batches import NO_DATA, LoopBatches, batch_of
from callsheet.exec.loop_evaluations import LoopEvaluations
from callsheet.exec.loop_hooks import LoopBackwardWatch, LoopForwardHooks, LoopOptimizerHooks

logger = logging.getLogger("callsheet")

HOST = "this script"
"""The name of the observed loop in messages, in place of a framework's name."""
_REGULAR_STEPS = 20
"""After this number of regular steps (one new batch and one model call per loss), the first loss of a step marks its start."""
_UNKNOWN_COUNTS = (0, 0)
"""The numbers of samples and tokens if they are unknown."""
_NEVER_FIRED = tuple(event for event in EVENTS if event.startswith(("on_test", "on_predict", "on_checkpoint_due", "on_preempt")))
"""Events that are never fired, because nothing that a hand-written loop does corresponds to them."""


class BareLoop(NotCopied):
    """Observes one hand-written training loop, whose model and optimizer are known, and fires callsheet's events for the loop.

    A step begins with the first call of the model with gradients enabled, and ends when the optimizer has stepped.
    Calls of the model in evaluation mode without gradients, between two steps, are an evaluation. An epoch ends when the dataloader
    is at its end, or begins again.

    The hook that observes the model's calls makes each call slower. So the hook is removed after `_REGULAR_STEPS` regular steps, if
    no callback listens to the parts of a step. Then a step begins with its first loss. When an evaluation may begin, for example
    because the script calls `eval`, the hook is registered again.

    While the hook is removed, `backward_begins` only stores the numbers of samples and tokens of the step (an *unreported step*),
    and `LoopOptimizerHooks` counts the step when it ends. If anything needs the open step earlier, `_report_step` reports the
    step's start to the lifecycle driver.

    The methods that hooks call raise no errors, except those that the script's signal handlers have raised. After an error of
    callsheet or of a callback, the run ends as failed, all hooks are removed, and the script continues.

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

    # Every step uses many of these attributes. Without slots, an object with more than thirty attributes is slower.
    __slots__ = (
        "__weakref__",
        "_batches",
        "_discarded",
        "_driver",
        "_ends_epoch",
        "_epoch",
        "_evaluation",
        "_fetch",
        "_forward",
        "_hooks",
        "_in_forward",
        "_is_in_microbatch",
        "_is_plain",
        "_is_regular",
        "_microbatch",
        "_of_microbatch",
        "_open_spans",
        "_optimizer_hooks",
        "_parameters",
        "_sees_calls",
        "_sees_forward",
        "_spans",
        "_step",
        "_stops",
        "_support",
        "_thread",
        "_trains_in_eval_mode",
        "_was_called",
        "_with_gradients",
        "are_epochs_reported",
        "evaluations",
        "has_failed",
        "model",
        "no_evaluator",
        "optimizer",
        "run",
        "thread",
        "unreported_counts",
        "watch",
    )

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
        self.model, self.optimizer = model, optimizer
        self._stops = stops
        self._batches = LoopBatches(loader, ranks=read_ranks().world_size)
        self.run = run = LoneRun(
            observers,
            model=unwrapped(model),
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
        spans = run.driver.spans
        self._step = spans["train_step"]
        self.unreported_counts: tuple[int, int] | None = None
        """The numbers of samples and tokens of the open step, if this is an unreported step (see the class); otherwise None.

        Reading the property `step` reports the step's start.
        """
        self._epoch, self._fetch, self._microbatch = (spans[name] for name in ("epoch", "fetch", "microbatch"))
        # Store these objects as attributes, because every step reads them and `run.driver` would be slower.
        self._driver, self._spans, self._open_spans = run.driver, run.spans, run.driver.opened
        self.evaluations = LoopEvaluations(run)
        """Fires the events of the loop's evaluations."""
        self._evaluation = self.evaluations.span
        self._ends_epoch = False  # whether the epoch ends when the open step ends
        self.has_failed = False
        """Whether an error of callsheet or of a callback has ended the observation."""
        self.are_epochs_reported = False
        """Whether a framework calls `end_epoch` for each epoch. If not, an epoch ends when the dataloader is at its end."""
        self.no_evaluator: Callable[[], Any] = lambda: None
        """Called if the optimizer steps during a supposed evaluation, which then turns out to be training. Returns the step's batch."""
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        self._parameters = {id(each) for each in parameters}
        # If no parameter in `_with_gradients` has a gradient, the script has discarded the gradients.
        # With FSDP, `_with_gradients` is empty, because between microbatches FSDP keeps the gradients elsewhere than in `.grad`.
        self._with_gradients = [] if any(hasattr(each, "placements") for each in parameters) else parameters
        # The numbers of samples and tokens of the latest microbatch, and those of the latest microbatch whose loss was discarded.
        self._of_microbatch = self._discarded = _UNKNOWN_COUNTS
        self._was_called = False  # whether the model was called with gradients since the last step ended
        # Some scripts train a model in evaluation mode, for example to freeze the statistics of batch normalization.
        self._trains_in_eval_mode = not model.training
        self._in_forward: Literal["train", "eval", ""] = ""  # the purpose of the running forward pass; empty if none is running
        # Whether the model was called in this step, with gradients enabled, and `backward` was not called since.
        self._is_in_microbatch = False
        self.thread = current_thread()
        """The thread that trains."""
        self._thread: int | None = get_ident()  # only calls in this thread are observed; None when the observation is over
        run.fails_by(self._leave)
        self.watch = LoopBackwardWatch(self, scaler)
        """Observes the losses on which the loop calls `backward`."""
        self.watch.listen(False)
        self._forward = LoopForwardHooks(self, model)
        self._hooks: list[Any] = [self.watch, self._forward]
        # Do not add hooks to a model that was compiled in place, because torch.compile would compile the hooks too.
        self._sees_forward = getattr(model, "_compiled_call_impl", None) is None
        if isinstance(model, torch.jit.ScriptModule):  # torch does not allow hooks on a ScriptModule
            self._sees_forward = False
            logger.warning("%s trains a ScriptModule, so its forward passes and evaluations are not observed", HOST)
        self._sees_calls = (
            self._sees_forward
        )  # whether hooks observe the model's calls now; if not, the first `backward` begins the step
        # True if the model's calls are not observed, and no handler listens to events within a step. Then a step skips most checks.
        self._is_plain = False
        # Whether all steps so far were regular: for each loss, the loop fetched a new batch and called the model once.
        self._is_regular = loader is not None and not self._trains_in_eval_mode

    # --- beginning and end ---

    def begin(self, loss: Tensor | None, batch: Any, *, counts: tuple[int, int], has_closure: bool) -> None:
        """Begin the run within the optimizer's first step, and fire the step's earlier events, such as `on_forward_end`.

        Args:
            loss: the loss of the step, unscaled and detached.
            batch: the latest batch, or None.
            counts: the samples and tokens of the step, or zeros if they are unknown.
            has_closure: whether the optimizer evaluates a closure. If so, forward and backward of this step come later.
        """
        self._guarded(self._begin, loss, batch, counts, has_closure)

    def _begin(self, loss: Tensor | None, batch: Any, counts: tuple[int, int], has_closure: bool) -> None:
        run = self.run
        self._support.before_run(_NEVER_FIRED, run.control)
        run.begin()
        self._install_forward_hooks()
        self.watch.listen(True)
        self._optimizer_hooks = LoopOptimizerHooks(self)
        if has_closure:
            self._is_regular = False
            self._optimizer_hooks.expect_closures()
        self._hooks.append(self._optimizer_hooks)
        run.losses = self.watch.reader
        if batch is not None:
            self._batches.add(batch)
        self._open_step()
        if not has_closure:
            self._begin_microbatch((), {})
            if any(counts):
                run.counted = self._batches.on_all_ranks(counts)
            if run.driver.listens_to("microbatch"):
                run.driver.start("loss")
                if loss is not None:
                    run.ctx.loss = loss
                run.driver.start("backward")
                run.driver.end("backward")
            self._is_in_microbatch = False
            self.watch.total = loss

    def fetched_ahead(self, loader: Any, batch: Any, *, is_same_iteration: bool) -> None:
        """Keep a batch that the script fetched from `loader` before the first step ended: the second step may use this batch.

        `is_same_iteration`: whether this batch comes from the same iteration over the dataloader as the batch of the first step.
        """
        batches = self._batches
        if self._is_over:
            return
        if not batches.come_from(loader):
            batches.add_other(loader, batch)
            return
        if not is_same_iteration:
            batches.begin()
        batches.add(batch)

    def discard(self) -> None:
        """Remove all hooks before the run begins, because a callback cannot work in this loop."""
        self.release()
        self.run.lifetime.end()

    def finish(self, error: BaseException | None) -> None:
        """End the run because the script has ended. `error` is the error that has ended the script, or None."""
        if self._is_over:
            return
        run = self.run
        try:
            self._report_step()
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
            self._leave(fault)
        finally:
            self.release()

    def _leave(self, error: Exception | SystemExit) -> None:
        """End the run because of an error of callsheet or a callback. The script continues.

        Raise the error if the script's own signal handler has raised it while callsheet was running.
        """
        if is_from_signal_handler(error):
            raise error
        if not self._is_over:
            self.has_failed = True
            self.release()
            try:
                give_up(self.run, error, contained=True)
            except Exception as fault:
                logger.error("The run of %s could not be ended in order: %s", HOST, text_of(fault), exc_info=fault)

    def release(self) -> None:
        """Remove all hooks, and fire no more events."""
        self._thread = self.unreported_counts = None
        for hook in self._hooks:
            hook.remove()

    # --- what the hooks report ---

    @property
    def _is_over(self) -> bool:
        return self._thread is None

    @property
    def step(self) -> DrivenSpan:
        """The span `train_step`, which is open during each training step."""
        self._report_step()
        return self._step

    @property
    def steps(self) -> int:
        """The number of training steps that have ended."""
        return self.run.state.timestamp.batch

    def trains(self, parameter: Any) -> bool:
        """Return whether the loop's optimizer updates this parameter."""
        return id(parameter) in self._parameters

    def fetch(self, fetches: Callable[[Any], Any], iterator: Any) -> Any:
        """Fetch the next training batch with `fetches(iterator)`, and fire the events of the span `fetch`. Errors of `fetches` are raised."""
        if get_ident() != self._thread:
            return fetches(iterator)
        if not self._is_plain or self._driver.seen_links != self._spans.links:
            return self._fetch_observed(fetches, iterator)
        try:
            batch = fetches(iterator)
        except StopIteration:
            self.end_iteration()
            raise
        batches = self._batches
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
        self._batches.add(batch)
        if has_begun and not self._is_plain:
            self.run.ctx.batch = batch
            if not self._fetch.has_no_listeners:
                self._guarded(self.run.driver.end, "fetch")
        return batch

    def is_of_training(self, loader: Any) -> bool:
        """Return whether a batch that is fetched from `loader` now is for training, and not for an evaluation or another loop."""
        if get_ident() != self._thread or self.evaluations.dataset or not self._batches.come_from(loader):
            return False
        return torch.is_grad_enabled() and (self.model.training or self._trains_in_eval_mode)

    def other_fetched(self, loader: Any, batch: Any) -> None:
        """Keep a batch that was fetched from a dataloader other than the loop's, because the next training step may use this batch."""
        if get_ident() != self._thread or self.evaluations.dataset or self.step.is_open:
            return
        self._batches.add_other(loader, batch)
        # Set `_is_plain` to False, so that the next step checks whether it uses a batch of another dataloader.
        self._is_plain = False

    def begin_step(self) -> None:
        """Begin a training step, unless one is open."""
        if not self._is_over and not self.step.is_open:
            self._guarded(self._open_step)

    @not_compiled
    def forward_begins(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """The model's forward pre-hook: find out whether this call begins a training step, a microbatch or a batch of an evaluation."""
        # The script may copy this model's attributes, with the hooks, into another model. Ignore calls of that other model.
        if is_traced() or get_ident() != self._thread or model is not self.model:
            return
        try:
            if not self._sees_calls:
                self._sees_calls = True
                self._was_called = self.step.is_open  # this step may have called the model before the hook was registered
            is_training = model.training
            if not torch.is_grad_enabled():
                if not is_training and not self.step.is_open:
                    self._begin_evaluated_batch(batch_of(args, kwargs))
            elif is_training or self._trains_in_eval_mode:
                self._was_called = True
                if not self.step.is_open:
                    self._open_step()
                if not self._is_in_microbatch:
                    self._begin_microbatch(args, kwargs)
                if not self._microbatch.has_no_listeners:
                    self._in_forward = "train"
                    start_forward(self._driver, self.run.ctx)
        except (Exception, SystemExit) as error:
            self._leave(error)

    @not_compiled
    def forward_ends(self, model: nn.Module, inputs: Any, outputs: Any) -> None:
        """The model's forward hook: end the forward pass of a microbatch, or the batch of an evaluation."""
        if is_traced() or get_ident() != self._thread:
            return
        if self._in_forward:
            self._guarded(self._end_forward, outputs)

    def backward_begins(self) -> None:
        """Handle a call of `backward` on a loss. If calls of the model are not observed, this loss may begin a training step.

        If no handler listens to the step, do not report the step's start, but keep its numbers of samples and tokens until it ends.
        """
        try:
            batches = self._batches
            batch = batches.new
            if (
                batch is None
                or not self._is_plain
                or self.unreported_counts is not None
                or self._open_spans[-1] is not self._epoch
                or self._driver.seen_links != self._spans.links
            ):
                self._begin_backward()
            else:
                self.unreported_counts = counts = batches.counts_of(batch)
                batches.new = None
                if not counts[0]:
                    self._be_irregular()
        except (Exception, SystemExit) as error:
            self._leave(error)

    def _begin_backward(self) -> None:
        if not self._sees_calls:
            if not self.step.is_open:
                self._open_step()
            if not self._is_in_microbatch:
                self._begin_microbatch((), {})
        elif not self._is_in_microbatch:  # this loss is of another model, or is the second loss of the same outputs
            self._is_regular = False
            if not self.step.is_open:
                return
        if self._has_lost_gradients():
            self.gradients_are_discarded()
        # An earlier loss of the same outputs was discarded, and its count of samples too. Restore that count for this loss.
        if not self._is_in_microbatch and self._discarded != _UNKNOWN_COUNTS:
            self.run.counted, self._discarded = self._discarded, _UNKNOWN_COUNTS
        self._is_in_microbatch = False

    def _has_lost_gradients(self) -> bool:
        """Return whether the script has discarded the gradients of earlier losses of this step."""
        parameters = self._with_gradients
        return self.watch.total is not None and bool(parameters) and all(each.grad is None for each in parameters)

    def optimizer_begins(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Begin a training step if none is open, because the optimizer's `step` was called with the arguments `args` and `kwargs`."""
        self.begin_step()
        if not self._is_over and (args[1] if len(args) > 1 else kwargs.get("closure")) is not None:
            self._be_irregular()
            self._guarded(self._optimizer_hooks.expect_closures)

    def gradients_are_discarded(self) -> None:
        """Exclude earlier losses and their samples from the step, because the script has discarded the gradients of the losses."""
        if get_ident() != self._thread or self.watch.is_in_closure:
            return
        self._report_step()
        self._be_irregular()
        self.watch.total = None
        if self._is_in_microbatch:
            self.run.counted = self._of_microbatch  # keep the counts of the open microbatch, because its loss is still to come
        else:
            self.run.counted, self._discarded = _UNKNOWN_COUNTS, self._of_microbatch

    def other_optimizer_steps(self) -> None:
        """Handle a step of an optimizer that is not observed. Discard the latest losses if they may belong to that optimizer."""
        if get_ident() != self._thread:
            return
        if not self._sees_calls:
            self.gradients_are_discarded()
        self._be_irregular()

    def watch_calls(self) -> None:
        """If the hooks on the model's calls were removed for speed, register them again, so that no evaluation is missed."""
        if self._sees_forward and not self._sees_calls and get_ident() == self._thread:
            self._guarded(self._install_forward_hooks, True)

    @not_compiled
    def scaler_has_stepped(self, scaler: Any) -> None:
        """If a step is still open after `GradScaler.step`, the scaler has skipped the optimizer's `step`: end the open step as skipped."""
        self.watch._scaler = scaler
        if not self._is_over and self.step.is_open:
            self.run.step_skipped = True  # the scaler did not call the optimizer's `step`, which would have ended the open step
            self._guarded(self.end_step)

    @partial(not_compiled, recursive=False)
    def clip(self, clips: Callable[[], Any]) -> Any:
        """Clip the gradients with `clips()`, fire the events of the span `clip_gradients`, and return the norm before clipping."""
        if self.unreported_counts is not None:  # this is an unreported step (see the class): no handler reads the norm
            return clips()
        is_in_step = self.step.is_open and get_ident() == self._thread
        if is_in_step:
            self._guarded(self.run.driver.start, "clip_gradients")
        norm = clips()
        if is_in_step and not self._is_over:
            self.run.grad_norm = norm
            self._guarded(self.run.driver.end, "clip_gradients")
        return norm

    def loader_begins(self) -> None:
        """If the script starts a new iteration over the dataloader before the previous one was complete, end the open epoch."""
        if self._batches.begin():
            self._guarded(self._end_data)

    def end_epoch(self, values: Mapping[str, float]) -> None:
        """Log `values` and end the open epoch, because a framework has ended its epoch. Do nothing if no epoch is open."""
        if self._epoch.is_open and get_ident() == self._thread:
            self.log(values)
            self._guarded(self._end_epoch)

    def begin_epoch(self) -> None:
        """End the open evaluation, if there is one, because a framework begins a new epoch."""
        if get_ident() == self._thread:
            self._guarded(self._leave_evaluation)

    def evaluated(self, dataset: str, results: Mapping[str, float]) -> None:
        """Record the results of an evaluator of Ignite that has just evaluated the dataset."""
        if get_ident() == self._thread:
            self._guarded(lambda: self.evaluations.end_dataset(dataset, results, is_in_step=self.step.is_open))
            self.watch_calls()

    def log(self, values: Mapping[str, float]) -> None:
        """Log, in callsheet's run, values that the script has logged with a framework such as Accelerate."""
        if get_ident() == self._thread:
            self._guarded(lambda: self.run.ctx.log(values, across="same"))

    def end_step(self) -> None:
        """End the step, because the optimizer has stepped or a loss scaler has skipped the optimizer's step."""
        run, batches = self.run, self._batches
        if self.evaluations.dataset:
            batches.add(self.no_evaluator())
            self._count()
        if self._sees_calls and not self._was_called and self.steps:
            self._use_losses_alone()
        self._was_called = False
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

    # --- handling what the hooks report ---

    @not_compiled
    def _guarded(self, function: Callable[..., None], *args: Any) -> None:
        """Call `function(*args)`. If it raises an error, end the observed run, but not the script.

        `forward_begins` and `backward_begins` run in most steps. They catch errors themselves, to save this function call.
        """
        try:
            function(*args)
        except (Exception, SystemExit) as error:
            self._leave(error)

    def after_step(self, steps: int) -> None:
        """Do the work that is due only after certain steps. `steps` is the number of steps that have ended."""
        run = self.run
        if steps == 1:
            # The loop was recognized only when the optimizer stepped, so the driver synthesized spans of step 1. Forget them.
            run.driver.synthesized.clear()
        elif steps == 2:
            if not self._sees_forward:
                run.driver.synthesized.clear()
            self._support.after_first_step(run.driver)
        elif not steps % FIRST_INTERVAL_STEPS:
            run.keep_pace()
            if not self._is_plain and not run.driver.has_listeners:
                self._install_forward_hooks()
        # If calls of the model are not observed, a loss begins the step. So observe losses even while no step is open.
        # In the first steps, always observe losses, because they show whether the loop is regular.
        self.watch.is_on = not self._sees_calls or steps < _REGULAR_STEPS
        if self.evaluations.delayed:
            self.evaluations.fire_delayed()

    def _use_losses_alone(self) -> None:
        """From now on, let the first loss of each step begin the step, because the script does not call the model itself."""
        self._sees_forward = self._sees_calls = False
        self._forward.remove()
        self.run.driver.synthesized.clear()
        logger.warning(
            "%s does not call %s itself, so its forward passes and evaluations are not observed",
            HOST,
            type(self.run.model).__name__,
        )

    def _begin_fetch(self) -> bool:
        """Fire the start event of the span `fetch`, unless a step is open (then the batch is a further microbatch of that step).

        Return True if no step is open.
        """
        if self._is_in_microbatch:  # the loop fetches a batch before it has computed the loss of the previous batch
            self._be_irregular()
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
            self._leave(error)
        return True

    def _be_irregular(self) -> None:
        """Observe the model's calls from now on, because a step was irregular. A regular step has one new batch and one model call per loss."""
        if self._is_regular:
            self._is_regular = False
            self.watch_calls()

    def _install_forward_hooks(self, sees_calls: bool = False) -> None:
        """Register the model's hooks that are needed now, and remove the others. If `sees_calls`, always observe model calls."""
        if not self._sees_forward or self._is_over:
            return
        self._report_step()  # report an unreported step first, because this method may set `_is_plain` to False
        needs_outputs = self._evaluation.is_open or not self._microbatch.has_no_listeners
        is_predictable = self._is_regular and self.steps >= _REGULAR_STEPS and not self._driver.has_listeners
        needs_calls = sees_calls or needs_outputs or not is_predictable
        self._forward.install(needs_calls=needs_calls, needs_outputs=needs_outputs)
        self._is_plain = not needs_calls and self._stops is None and self._batches.other is None
        if not needs_calls:
            self._sees_calls, self._is_in_microbatch, self.watch.is_on = False, False, True

    def _listen(self) -> None:
        self._install_forward_hooks()
        self._optimizer_hooks.listen(self.run.driver.has_listeners)
        self.watch.listen(self.run.driver.is_loss_read)

    def _report_step(self) -> None:
        """Report the start of the open step to the lifecycle driver, if that was not done when the step began."""
        if (counts := self.unreported_counts) is not None:
            self.unreported_counts = None
            self._guarded(self._driver.start_step)
            self.run.counted = self._of_microbatch = counts

    def _open_step(self) -> None:
        if self._evaluation.is_open:
            self._leave_evaluation()
        if self._batches.other is not None and self._batches.switch():
            self._end_data()
        if self._driver.listen():
            self._listen()
        self._driver.start_step()
        self.run.counted = self._of_microbatch = self._discarded = _UNKNOWN_COUNTS
        self.watch.total, self._is_in_microbatch, self.watch.is_on = None, False, True

    def end_iteration(self) -> None:
        """End the epoch, even if it had only one batch, because the dataloader has no more batches."""
        self._batches.begin()
        self._guarded(self._end_data)

    def _end_data(self) -> None:
        """End the epoch, because the dataloader has ended or restarted. If a framework reports when epochs end, do nothing."""
        if not self.are_epochs_reported:
            self._end_epoch()

    def _end_epoch(self) -> None:
        """End the epoch, if one is open. If a step is open too, end the epoch when the step ends."""
        driver = self.run.driver
        if self._is_over or not self._epoch.is_open:
            return
        self._ends_epoch = self.step.is_open
        if self._ends_epoch:
            self._is_plain = False
            return
        self._leave_evaluation()
        driver.end("fetch")
        self.run.end_epoch(is_whole=True)
        self._stop_if_asked()

    def _begin_microbatch(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Begin a microbatch of the open step, and count its samples. `args` and `kwargs` are the arguments of the model's call."""
        if (args or kwargs) and not self._batches.has_loader:
            self._batches.add(batch_of(args, kwargs))
        self._count()
        self._is_in_microbatch = True
        driver, ctx = self._driver, self.run.ctx
        if not driver.has_listeners:
            return
        if (batch := self._batches.latest) is not None and not ctx.has("batch"):
            ctx.batch = batch
        if not self._microbatch.has_no_listeners:
            if batch is not None:
                ctx.microbatch = batch
            if not self._microbatch.is_open:
                driver.start("microbatch")

    def _count(self) -> None:
        """Count the samples and tokens of a new batch. Without a new batch, count the batch whose loss was discarded last."""
        batches = self._batches
        counts = _UNKNOWN_COUNTS
        if batches.new is not None:
            counts = batches.counts_of(batches.new)
            batches.latest, batches.new = batches.new if self._driver.has_listeners and batches.new is not NO_DATA else None, None
        if counts != _UNKNOWN_COUNTS:
            self._of_microbatch = counts
        else:
            counts = self._discarded
            self._be_irregular()
        run = self.run
        before = run.counted
        if before == _UNKNOWN_COUNTS:
            run.counted = counts
        elif not self.watch.is_in_closure:  # the optimizer may call a closure several times, so count the samples once
            run.counted = before[0] + counts[0], before[1] + counts[1]
        self._discarded = _UNKNOWN_COUNTS

    def _begin_evaluated_batch(self, batch: Any) -> None:
        self._batches.forget_other()
        self._in_forward = "eval"
        is_first = not self._evaluation.is_open
        self.evaluations.begin_batch(batch)
        if is_first:
            self._install_forward_hooks()

    def _end_forward(self, outputs: Any) -> None:
        kind, self._in_forward = self._in_forward, ""
        if kind == "train":
            driver = self.run.driver
            if driver.spans["forward"].is_open:
                self.run.ctx.outputs = outputs
                driver.start("loss")  # starting the span `loss` also ends the span `forward`
        elif kind == "eval":
            self.evaluations.end_batch(outputs)

    def _leave_evaluation(self) -> None:
        if self._evaluation.is_open:
            self.evaluations.end()
            self._stop_if_asked()
            self._install_forward_hooks()

    def _stop_if_asked(self) -> None:
        if self._stops is not None and self.run.control.stop_requested is not None:
            stops, self._stops = self._stops, None
            stops()


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside wrappers such as DistributedDataParallel, DataParallel and the wrapper of `torch.compile`."""
    while True:
        inside = getattr(model, "_orig_mod", None)
        if inside is None and type(model).__name__ in ("DistributedDataParallel", "DataParallel"):
            inside = getattr(model, "module", None)
        if not isinstance(inside, nn.Module):
            return model
        model = inside
