"""The host for InstructLab Training: it turns InstructLab's hooks into the events of the lifecycle.

Everything here runs on the thread on which InstructLab calls its callbacks, while training continues. So the model is not available,
requests are not supported, and collectives are not possible.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from callsheet.bridges.host_base import HostBase, observing
from callsheet.bridges.instructlab import NOT_FIRED, NOT_SEEN, names
from callsheet.bridges.instructlab.names import TrainingContext
from callsheet.bridges.instructlab.run import HOST, NOT_GIVEN, HookedRun
from callsheet.core.background import inner
from callsheet.core.callback import Callback, label_of
from callsheet.core.lifecycle import EVENTS, SPANS
from callsheet.core.manager import CallbackManager, normalize_callbacks
from callsheet.core.ranks import read_ranks
from callsheet.core.run_state import Outcome
from callsheet.errors import NotSupported
from callsheet.run.run_guard import checked_lock_timeout
from callsheet.transport.payload import open_payload, pack

logger = logging.getLogger("callsheet")

_WITHOUT_HOOK = frozenset({"loss", "backward"})
"""Spans of a microbatch that InstructLab has no hooks for. The driver synthesizes their events between two hooks."""


def host_of(
    callbacks: CallbackManager | Callback | Iterable[Callback] | None, *, strict: bool, lock_timeout_seconds: float
) -> Any:
    """See `callsheet.bridges.instructlab.host`."""
    try:
        base: type = importlib.import_module("instructlab.training.callbacks").TrainerCallback
    except ImportError:  # InstructLab or one of its requirements is not installed, so no other code uses its base class
        base = names.TrainerCallback
    return _class_over(base)(InstructLabHost(callbacks, strict=strict, lock_timeout_seconds=lock_timeout_seconds))


@functools.cache
def _class_over(TrainerCallback: type) -> Any:  # noqa: N803  # the class below is executed under this name
    """Return the callback class for InstructLab.

    InstructLab sends the source of the class to its ranks, executes it there, and calls the class without arguments. So outside its
    methods the class uses no name except that of its base."""

    class CallsheetCallback(TrainerCallback):  # type: ignore[misc]  # whichever is installed
        """The callback of InstructLab that calls the host."""

        def __init__(self, host=None):  # type: ignore[no-untyped-def]
            if host is None:  # InstructLab creates the callback on a rank
                from callsheet.bridges.instructlab.hosts import InstructLabHost

                host = InstructLabHost.arrived()
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


def _in_a_run(method: Callable[[Any, HookedRun, TrainingContext], None]) -> Callable[[Any, TrainingContext], None]:
    """Call the method with the run, or not at all if there is no run. An error ends the run; see `HostBase._leave`."""

    @observing
    @functools.wraps(method)
    def called(self: InstructLabHost, context: TrainingContext) -> None:
        if self._run is not None:
            self._run.context = context
            method(self, self._run, context)

    return called


class InstructLabHost(HostBase):
    """Turn InstructLab's hooks into the events of the lifecycle. A run lasts from one `on_train_begin` to its `on_train_end`."""

    def __init__(
        self, callbacks: CallbackManager | Callback | Iterable[Callback] | None, *, strict: bool, lock_timeout_seconds: float
    ) -> None:
        self.manager = normalize_callbacks(callbacks) or CallbackManager()
        self._strict = strict
        self._lock_timeout_seconds = checked_lock_timeout(lock_timeout_seconds)
        self._run: HookedRun | None = None
        self._saved: TrainingContext | None = None  # of a checkpoint after an epoch's last step, until the epoch is over
        self._is_between = False  # whether training is between two steps
        self._is_checked = False  # whether the first step was checked for events that were not fired
        self._reject()

    # --- sending the callbacks to the ranks ---

    @contextmanager
    def sent(self) -> Iterator[None]:
        """Send the callbacks' arguments and states to the ranks that are started within this context, by callsheet's transport."""
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
    def arrived(cls) -> InstructLabHost:
        """Create the host on a rank, with the callbacks that were sent."""
        arrived = open_payload(os.environ)
        extra: Any = arrived.extra
        return cls(arrived.callbacks, strict=extra["strict"], lock_timeout_seconds=extra["lock_timeout_seconds"])

    # --- what is not supported ---

    def _reject(self) -> None:
        edges = {"on_run_start", "on_run_end"}
        supported = {
            id(each)
            for event in EVENTS
            if event not in {*edges, *NOT_FIRED, *NOT_SEEN}
            for each in self.manager.list_callbacks(event)
        }
        for event in (*NOT_SEEN, *NOT_FIRED):
            for each in self.manager.list_callbacks(event):
                if not _listens_to_all(each) and (event in NOT_SEEN or id(each) not in supported):
                    self._not_supported(each, f"listens to {event}, which {HOST} does not fire")
        for each in self.manager.callbacks:
            if missing := [name for name in NOT_GIVEN if name in inner(each).required_fields]:
                self._not_supported(each, f"reads ctx.{', ctx.'.join(missing)}, which {HOST} does not provide to callbacks")
            if asks := inner(each).requests:
                self._not_supported(each, f"may call ctx.control.{', ctx.control.'.join(asks)}, but {HOST} supports no requests")
            if each.collective and read_ranks().world_size > 1:
                self._not_supported(each, f"calls collectives, which would interleave with those of {HOST}")

    def _check_supported(self, run: HookedRun) -> None:
        """After the first step, reject listeners of events that no hook has caused, or log a warning; see `strict`."""
        for name in sorted(run.driver.synthesized - _WITHOUT_HOOK, key=list(SPANS).index):
            for event in (SPANS[name].start_event, SPANS[name].end_event):
                for each in self.manager.list_callbacks(event):
                    if not _listens_to_all(each):
                        self._not_supported(each, f"listens to {event}, which {HOST} did not fire in its first step")

    def _not_supported(self, callback: Any, why: str) -> None:
        name = label_of(callback) if isinstance(callback, Callback) else getattr(callback, "__name__", repr(callback))
        message = f"{name} {why}"
        if self._strict:
            raise NotSupported(f"{message}; leave the callback out, or pass strict=False to continue without that")
        logger.warning("%s", message)

    # --- InstructLab's hooks ---

    @observing
    def on_train_begin(self, context: TrainingContext) -> None:
        """Begin a run."""
        self._release()  # in case an exception ended the earlier run
        self._is_checked = self._has_given_up = False
        self._saved = None
        self._run = run = HookedRun(self.manager, context, lock_timeout=self._lock_timeout_seconds)
        self._ends = weakref.finalize(self, _end, run)
        run.begin(context)

    @_in_a_run
    def on_epoch_begin(self, run: HookedRun, context: TrainingContext) -> None:
        """Start the epoch's span."""
        run.go_to(context)
        run.driver.start("epoch")

    @_in_a_run
    def on_step_begin(self, run: HookedRun, context: TrainingContext) -> None:
        """Start the step's span."""
        run.go_to(context)
        self._is_between = False
        run.began, run.loss, run.has_stepped = time.perf_counter(), None, False
        run.listen()
        driver = run.driver
        driver.start_and_end("fetch")
        driver.start_step()

    @_in_a_run
    def on_before_forward(self, run: HookedRun, context: TrainingContext) -> None:
        """Start the spans of a microbatch and its forward."""
        run.driver.start("microbatch")
        run.driver.start("forward")

    @_in_a_run
    def on_after_backward(self, run: HookedRun, context: TrainingContext) -> None:
        """End the microbatch, with its forward, loss and backward."""
        run.driver.end("microbatch")

    @_in_a_run
    def on_pre_optimizer_step(self, run: HookedRun, context: TrainingContext) -> None:
        """Start clipping: all microbatches are done, and the step's loss is known."""
        if context.loss is not None and run.has_listeners():
            run.loss = torch.tensor(context.loss)
        run.driver.start("clip_gradients")

    @_in_a_run
    def on_optimizer_step(self, run: HookedRun, context: TrainingContext) -> None:
        """End clipping, and fire the events of the optimizer's step, which is over."""
        run.driver.end("clip_gradients")
        run.driver.start_and_end("optimizer_step")

    @_in_a_run
    def on_log(self, run: HookedRun, context: TrainingContext) -> None:
        """End the step, whose metrics are known now, and fire its metrics record."""
        run.driver.end_step()
        if not self._is_checked:
            self._is_checked = True
            self._check_supported(run)
        run.fire_record(context)

    @_in_a_run
    def on_evaluate(self, run: HookedRun, context: TrainingContext) -> None:
        """Fire the events of an evaluation, which is over."""
        run.fire_evaluation({name.removeprefix("val_"): float(value) for name, value in context.val_metrics.items()})

    @_in_a_run
    def on_save(self, run: HookedRun, context: TrainingContext) -> None:
        """Add the callbacks' states to a checkpoint that was written.

        A checkpoint after an epoch's last step belongs to the epoch's boundary: its events are fired after the epoch's end.
        """
        if not run.driver.is_open("epoch"):
            run.driver.end("round")
            run.fire_checkpoint(context, "round")
        elif self._is_between:
            self._saved = context
        else:
            run.fire_checkpoint(context, "step")

    @_in_a_run
    def on_step_end(self, run: HookedRun, context: TrainingContext) -> None:
        """Note that what follows is between two steps. The step itself has ended at `on_log`."""
        self._is_between = True

    @_in_a_run
    def on_epoch_end(self, run: HookedRun, context: TrainingContext) -> None:
        """End the epoch, and fire the events of a checkpoint that was written at its end."""
        if run.driver.is_open("epoch"):
            run.driver.end("train_step")  # one whose end was not reported counts in this epoch
            run.state.timestamp = run.state.timestamp.next_epoch()
            run.driver.end("epoch")
        saved, self._saved = self._saved, None
        if saved is not None:
            run.fire_checkpoint(saved, "epoch")

    @_in_a_run
    def on_train_end(self, run: HookedRun, context: TrainingContext) -> None:
        """End the run."""
        run.finish(context)
        self._release()


def _listens_to_all(listener: Any) -> bool:
    """Return whether the listener handles all events in `on_event`, and so needs no particular one."""
    return isinstance(listener, Callback) and type(inner(listener)).on_event is not Callback.on_event


def _end(run: HookedRun) -> None:
    """End the run as failed if it has not ended: the program ends, or the host is garbage-collected after an exception."""
    run.lifetime.end(Outcome.FAILED)
