"""Runs callsheet's callbacks in InstructLab Training (as a host), by turning InstructLab's hooks into callsheet's events.

Everything here runs on the thread on which InstructLab calls its callbacks, while training continues. So the model is not available,
requests are not supported, and collectives are not possible.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from callsheet.bridges.host_base import HostBase, in_a_run, observing
from callsheet.bridges.instructlab import names
from callsheet.bridges.instructlab.events import NOT_FIRED, NOT_SEEN
from callsheet.bridges.instructlab.internals import CALLBACKS, PACKAGE, are_callbacks_missing
from callsheet.bridges.instructlab.names import TrainingContext
from callsheet.bridges.instructlab.run import HOST, UNAVAILABLE_FIELDS, HookedRun
from callsheet.bridges.observed_run import ObservedRun
from callsheet.bridges.support_check import SupportCheck
from callsheet.bridges.versions import check_version
from callsheet.core.background import inner
from callsheet.core.callback import Callback
from callsheet.core.lifecycle import EVENTS
from callsheet.core.manager import CallbackManager
from callsheet.core.ranks import read_ranks
from callsheet.errors import NotSupported
from callsheet.run.run_guard import check_lock_timeout
from callsheet.transport.payload import open_payload, pack

logger = logging.getLogger("callsheet")

_SPANS_WITHOUT_HOOK = frozenset({"loss", "backward"})
"""Spans of a microbatch for which InstructLab has no hooks.

The lifecycle driver, which keeps callsheet's events in order, fires the events of these spans between two hooks.
"""

_STEP_HOOKS = frozenset({"on_before_forward", "on_after_backward", "on_pre_optimizer_step", "on_optimizer_step", "on_log"})
"""The hooks that InstructLab calls within a step, after `on_step_begin`."""


def host_of(
    callbacks: CallbackManager | Callback | Iterable[Callback] | None, *, strict: bool, lock_timeout_seconds: float
) -> Any:
    """Return an InstructLab callback that runs callsheet's callbacks; see `callsheet.bridges.instructlab.host`."""
    if are_callbacks_missing():
        check_version(PACKAGE, [CALLBACKS], needed_by="this host")
    try:
        base: type = importlib.import_module(CALLBACKS).TrainerCallback
    except ImportError:  # InstructLab is not installed, so use callsheet's copy of the base class
        base = names.TrainerCallback
    return _class_over(base)(InstructLabHost(callbacks, strict=strict, lock_timeout_seconds=lock_timeout_seconds))


@functools.cache
def _class_over(TrainerCallback: type) -> Any:  # noqa: N803  # the class below is executed under this name
    """Create a subclass of `TrainerCallback` that passes InstructLab's hooks on to `InstructLabHost`.

    InstructLab sends the source of the class to its ranks, executes it there, and calls the class without arguments. So the class
    body, outside the methods, uses no name except that of the base class.
    """

    class CallsheetCallback(TrainerCallback):  # type: ignore[misc]  # the base is InstructLab's class or callsheet's copy
        """An InstructLab callback that passes each hook on to `InstructLabHost`."""

        def __init__(self, host=None):  # type: ignore[no-untyped-def]
            if host is None:  # InstructLab has created this callback in the process of a rank, which has no host yet
                from callsheet.bridges.instructlab.hook_host import InstructLabHost

                host = InstructLabHost.from_environment()
            self.host = host

        def sent(self):  # type: ignore[no-untyped-def]
            return self.host.sent()

        def on_train_begin(self, context):  # type: ignore[no-untyped-def]
            self.host.on_train_begin(context)

        def on_epoch_begin(self, context):  # type: ignore[no-untyped-def]
            self.host.on_epoch_begin(context)

        def on_step_begin(self, context):  # type: ignore[no-untyped-def]
            self.host.on_step_begin(context)

        def on_before_forward(self, context):  # type: ignore[no-untyped-def]
            self.host.on_before_forward(context)

        def on_after_backward(self, context):  # type: ignore[no-untyped-def]
            self.host.on_after_backward(context)

        def on_pre_optimizer_step(self, context):  # type: ignore[no-untyped-def]
            self.host.on_pre_optimizer_step(context)

        def on_optimizer_step(self, context):  # type: ignore[no-untyped-def]
            self.host.on_optimizer_step(context)

        def on_log(self, context):  # type: ignore[no-untyped-def]
            self.host.on_log(context)

        def on_evaluate(self, context):  # type: ignore[no-untyped-def]
            self.host.on_evaluate(context)

        def on_save(self, context):  # type: ignore[no-untyped-def]
            self.host.on_save(context)

        def on_step_end(self, context):  # type: ignore[no-untyped-def]
            self.host.on_step_end(context)

        def on_epoch_end(self, context):  # type: ignore[no-untyped-def]
            self.host.on_epoch_end(context)

        def on_train_end(self, context):  # type: ignore[no-untyped-def]
            self.host.on_train_end(context)

    return CallsheetCallback


class InstructLabHost(HostBase):
    """Turns InstructLab's hooks into callsheet's events. It runs in each rank's process.

    A run lasts from `on_train_begin` to the next `on_train_end`.
    """

    _PACKAGE = PACKAGE

    def __init__(
        self, callbacks: CallbackManager | Callback | Iterable[Callback] | None, *, strict: bool, lock_timeout_seconds: float
    ) -> None:
        super().__init__(callbacks, strict=strict)
        hint = "leave the callback out, or pass strict=False to continue without that"
        self._check = SupportCheck(self.manager, HOST, strict=strict, hint=hint, causes={})
        self._lock_timeout_seconds = check_lock_timeout(lock_timeout_seconds)
        # InstructLab's context at a save after an epoch's last step, until the epoch ends and the events of this save are fired.
        # Otherwise None.
        self._saved: TrainingContext | None = None
        self._is_between = False  # whether training is between two steps
        self._reject()

    # --- sending the callbacks to the ranks ---

    @contextmanager
    def sent(self) -> Iterator[None]:
        """Send the callbacks' arguments and states to all ranks that are started within the `with` block."""
        for event in EVENTS:
            for each in self.manager.list_callbacks(event):
                if not isinstance(each, Callback):
                    raise NotSupported(
                        f"the function {getattr(each, '__name__', each)} cannot be sent to the ranks; make it a method of a Callback"
                    )
        before = dict(os.environ)
        extra = {"strict": self._strict, "lock_timeout_seconds": self._lock_timeout_seconds}
        with pack(self.manager.callbacks, extra=extra).post() as variables:
            os.environ.update(variables)
            try:
                yield
            finally:
                for name in variables:
                    os.environ.pop(name, None)
                    if name in before:
                        os.environ[name] = before[name]

    @classmethod
    def from_environment(cls) -> InstructLabHost:
        """Create the host on a rank, with the callbacks that the launching process has sent to the rank."""
        arrived = open_payload(os.environ)
        extra: Any = arrived.extra
        return cls(arrived.callbacks, strict=extra["strict"], lock_timeout_seconds=extra["lock_timeout_seconds"])

    # --- what is not supported ---

    def _reject(self) -> None:
        is_served = self._check.make_served_predicate((*NOT_FIRED, *NOT_SEEN))
        for event in (*NOT_SEEN, *NOT_FIRED):
            for each in self._check.listeners(event):
                if event in NOT_SEEN or not is_served(each):
                    self._check.reject([each], f"listens to {event}, which {HOST} does not fire")
        for each in self.manager.callbacks:
            if missing := [name for name in UNAVAILABLE_FIELDS if name in inner(each).required_fields]:
                self._check.reject([each], f"reads ctx.{', ctx.'.join(missing)}, which {HOST} does not provide to callbacks")
            if asks := inner(each).requests:
                self._check.reject([each], f"may call ctx.control.{', ctx.control.'.join(asks)}, but {HOST} supports no requests")
            if each.collective and read_ranks().world_size > 1:
                self._check.reject([each], f"calls collectives, which would interleave with those of {HOST}")

    def _support(self, run: ObservedRun) -> SupportCheck:
        return self._check

    def _check_callbacks(self, run: ObservedRun, not_fired: tuple[str, ...]) -> None:
        """Do nothing, because the callbacks were checked when the host was created."""

    # --- InstructLab's hooks ---

    @observing
    def on_train_begin(self, context: TrainingContext) -> None:
        """Begin a run of callsheet's callbacks when InstructLab begins to train."""
        self._forget_earlier_run()
        self._saved = None
        self._run = run = HookedRun(self.manager, context, lock_timeout=self._lock_timeout_seconds)
        self._begin_run(run, [], context=context)

    def _handle(self, method: Callable[..., None], context: TrainingContext) -> None:
        """Call `method`, which handles a hook, unless InstructLab has called the hook too late or twice.

        InstructLab's context has the numbers of the step and the epoch to which the hook belongs, so a hook that is out of order is recognized.
        """
        run = self._run
        if run is None:
            return
        if context.step < run.context.step or context.epoch < run.context.epoch:
            run.counts.doubt()
            return
        run.context = context
        is_in_step = run.driver.is_open("train_step") and run.ctx.step == run.step_of(context)
        if context.hook_name in _STEP_HOOKS and not is_in_step:
            run.counts.doubt()
            if run.step_of(context) <= run.state.timestamp.batch:
                return  # the step has ended already
            self._begin_step(run, context)
        method(self, run, context)

    def _begin_step(self, run: HookedRun, context: TrainingContext) -> None:
        run.go_to(context)
        self._is_between = False
        run.began, run.loss, run.has_stepped = time.perf_counter(), None, False
        run.listen()
        run.driver.start_and_end("fetch")
        run.driver.start_step()

    @in_a_run
    def on_epoch_begin(self, run: HookedRun, context: TrainingContext) -> None:
        """Fire the start of an epoch."""
        run.go_to(context)
        run.driver.start("epoch")

    @in_a_run
    def on_step_begin(self, run: HookedRun, context: TrainingContext) -> None:
        """Fire the start of a step."""
        if run.step_of(context) <= run.ctx.step:
            run.counts.doubt()  # InstructLab has already called this hook for this step, so the counts may be wrong
        else:
            self._begin_step(run, context)

    @in_a_run
    def on_before_forward(self, run: HookedRun, context: TrainingContext) -> None:
        """Fire the start of a microbatch and of its forward pass."""
        if run.driver.is_open("microbatch"):
            run.counts.doubt()  # InstructLab has not reported the end of the last microbatch
        run.driver.start("microbatch")
        run.driver.start("forward")

    @in_a_run
    def on_after_backward(self, run: HookedRun, context: TrainingContext) -> None:
        """End the microbatch, with its forward pass, loss and backward pass."""
        run.driver.end("microbatch")

    @in_a_run
    def on_pre_optimizer_step(self, run: HookedRun, context: TrainingContext) -> None:
        """Fire the start of gradient clipping: all microbatches are done, and the step's loss is known."""
        if run.driver.is_open("microbatch"):
            run.counts.doubt()
        if context.loss is not None and run.has_listeners():
            run.loss = torch.tensor(context.loss)
        run.driver.start("clip_gradients")

    @in_a_run
    def on_optimizer_step(self, run: HookedRun, context: TrainingContext) -> None:
        """Fire the end of gradient clipping, and then the start and end of the optimizer's step, which is already over."""
        run.driver.end("clip_gradients")
        run.driver.start_and_end("optimizer_step")

    @in_a_run
    def on_log(self, run: HookedRun, context: TrainingContext) -> None:
        """End the step and make its metrics record, because the step's metrics are known now."""
        run.driver.end_step()
        if not self._is_checked:
            run.driver.synthesized -= _SPANS_WITHOUT_HOOK
            self._check_first_step(run)
        run.fire_record(context)

    @in_a_run
    def on_evaluate(self, run: HookedRun, context: TrainingContext) -> None:
        """Fire all start and end events of an evaluation after InstructLab has completed the evaluation."""
        run.fire_evaluation({name.removeprefix("val_"): float(value) for name, value in context.val_metrics.items()})

    @in_a_run
    def on_save(self, run: HookedRun, context: TrainingContext) -> None:
        """Add the callbacks' states to a checkpoint that InstructLab has written, and fire the checkpoint's events.

        A checkpoint after an epoch's last step belongs to the epoch's boundary, so its events are fired after the epoch's end.
        """
        if not run.driver.is_open("epoch"):
            if context.epoch + 1 < context.max_epochs:
                run.counts.doubt()  # unexpected: InstructLab saves after an epoch's end only when training is over
                return
            run.driver.end("round")
            run.fire_checkpoint(context, "round")
        elif self._is_between:
            self._saved = context
        else:
            run.fire_checkpoint(context, "step")

    @in_a_run
    def on_step_end(self, run: HookedRun, context: TrainingContext) -> None:
        """Record that training is between two steps. The step's events were already fired at `on_log`."""
        self._is_between = True
        if run.driver.is_open("train_step"):
            run.counts.doubt()  # InstructLab has not called `on_log`
            run.driver.end_step()

    @in_a_run
    def on_epoch_end(self, run: HookedRun, context: TrainingContext) -> None:
        """End the epoch, and fire the events of a checkpoint that was written at the epoch's end."""
        run.end_epoch(context)
        saved, self._saved = self._saved, None
        if saved is not None:
            run.fire_checkpoint(saved, "epoch")

    @in_a_run
    def on_train_end(self, run: HookedRun, context: TrainingContext) -> None:
        """End the run of callsheet's callbacks when InstructLab has ended training."""
        run.finish(context)
        self._release()
