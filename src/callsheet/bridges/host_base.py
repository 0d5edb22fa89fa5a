"""The base class of hosts, which run callsheet's callbacks in other frameworks: how a run begins, stops, fails and ends."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from callsheet.bridges.giving_up import give_up, is_for_user
from callsheet.bridges.hosted_run import HostedRun
from callsheet.bridges.observed_run import ObservedRun
from callsheet.bridges.support_check import SupportCheck
from callsheet.bridges.versions import check_versions
from callsheet.core.callback import Callback
from callsheet.core.callbacks_argument import manager_of
from callsheet.core.manager import CallbackManager
from callsheet.core.run_state import Outcome
from callsheet.run.run import Run

logger = logging.getLogger("callsheet")

Observed = TypeVar("Observed", bound=Callable[..., Any])

Callbacks = CallbackManager | Callback | Iterable[Callback] | None
"""The callbacks of a host: a manager, a callback, or any iterable of callbacks."""


def _do_nothing() -> None: ...


class HostBase:
    """The base class of hosts. It begins, stops and ends a run in another framework's loop, and handles the host's errors.

    Args:
        callbacks: a manager, a callback, or any iterable of callbacks.
        strict: whether it is an error if a callback needs something that this host does not support. False: a warning is logged.
        run_options: those arguments of `HostedRun` that are the same for all runs of this host.

    Raises:
        NotSupported: the installed version of the framework lacks something that the host needs.
    """

    _PACKAGE: ClassVar[str] = ""
    """The framework's package in `versions.TESTED`, or an empty string if the framework's version is not checked."""
    _INTERNALS: ClassVar[Sequence[str]] = ()
    """The parts of the framework that the host needs and that are not public API, as dotted names."""
    _IS_END_REPORTED: ClassVar[bool] = False
    """Whether the framework reports the end of every run, even after an exception.

    If not, a run ends at the latest when its host is deleted.
    """
    _STOPS_IF_PREEMPTED: ClassVar[bool] = False
    """Whether `_stop_if_asked` also stops the framework's loop if a signal has preempted the run."""
    _is_checked = False
    """Whether the host has checked, after the current run's first step, that all events with listeners were fired."""
    _run: Any = None
    """The current run, or None."""
    _has_given_up = False
    """Whether an error in the host's own code ended the latest run, so that no events are fired in the rest of the training."""
    _hooks: list[Any]
    """The hooks that observe the loop of the current run. Each has a method `remove()`. A host may append to the list."""
    _ends: Callable[[], object] = staticmethod(_do_nothing)
    """A finalizer: it removes the run's hooks, and ends the run as failed if it has not ended."""
    _resume_path: str | None = None
    """The checkpoint that the host loads when a run begins, or None."""

    only_observes: bool = False
    """Whether the host only observes training and must not change anything, as under `callsheet exec`.

    Then even an error of a callback ends only the run and not the training, and nothing is added to the framework's checkpoints.
    """

    def __init__(self, callbacks: Callbacks, *, strict: bool, **run_options: Any) -> None:
        check_versions(self._PACKAGE, self._INTERNALS, "this host")
        super().__init__()
        self.manager = manager_of(callbacks)
        self._strict = strict
        self._run_options: Mapping[str, Any] = run_options

    # --- the run ---

    def _forget_earlier_run(self) -> None:
        """End an earlier run that is still open, because the framework did not report the exception that ended its training."""
        if self._run is not None:
            self._release()
        self._has_given_up = self._is_checked = False

    def _begin_run(
        self,
        run: ObservedRun,
        hooks: list[Any],
        not_fired: tuple[str, ...] = (),
        *,
        end: Callable[[Any, list[Any]], object] | None = None,
        **options: Any,
    ) -> None:
        """Begin `run`. The run's hooks are removed when the run ends, or at the latest when the host is garbage-collected.

        Args:
            run: the run to begin.
            hooks: the hooks that observe the loop; see `_hooks`.
            not_fired: the events that this host never fires.
            end: removes the hooks and ends the run. None: `end_run`.
            options: the arguments of the run's method `begin`.
        """
        run.fails_by(self._leave)
        run.signals.__enter__()
        self._hooks = hooks
        ends = functools.partial(end or end_run, run, hooks)
        self._ends = ends if self._IS_END_REPORTED else weakref.finalize(self, ends)
        self._check_callbacks(run, not_fired)
        run.begin(**options)

    def _check_callbacks(self, run: ObservedRun, not_fired: tuple[str, ...]) -> None:
        """Before the run, raise an error (or log a warning) if a callback cannot work in the framework's loop."""
        self._support(run).before_run(not_fired, run.control)

    def _after_step(self, run: HostedRun, loop: Any = None, *, may_skip_step: bool = False) -> None:
        """Check the first step. If a stop was requested, stop the framework's loop. Called if `HostedRun.end_step` returns True.

        Args:
            run: the current run.
            loop: passed to `_stop`.
            may_skip_step: passed to `_check_first_step`.
        """
        if not self._is_checked:
            self._check_first_step(run, may_skip_step=may_skip_step)
        self._stop_if_asked(run, loop)

    def _check_first_step(self, run: Any, **options: Any) -> None:
        """After the run's first step, raise an error (or log a warning) if an event that has listeners was not fired.

        `options` are those of `SupportCheck.after_first_step`.
        """
        self._is_checked = True
        self._support(run).after_first_step(run.driver, **options)

    def _support(self, run: ObservedRun) -> SupportCheck:
        """Return the object that checks whether the framework supports what the callbacks need; see `SupportCheck`."""
        return SupportCheck(run.manager, run.host, strict=self._strict)

    def _stop_if_asked(self, run: HostedRun, loop: Any = None) -> None:
        """If a callback, or in some hosts a signal, has requested a stop, call `_stop(loop)`, which stops the framework's loop."""
        if run.control.stop_requested is not None or (self._STOPS_IF_PREEMPTED and run.boundaries.is_preempted):
            self._stop(loop)

    def _stop(self, loop: Any) -> None:
        """Make the framework stop its training loop, because a callback has requested a stop."""
        raise NotImplementedError

    def _handle(self, method: Callable[..., None], *args: Any, **given: Any) -> None:
        """If there is a run, call `method`, which handles a framework event, with this run. A subclass may extend `_handle`."""
        if self._run is not None:
            method(self, self._run, *args, **given)

    def _finish(self) -> None:
        """End callsheet's run, if there is one, because the framework's training is over."""
        if self._run is not None:
            self._run.finish()
            self._release()

    def _fail(self, error: BaseException) -> None:
        """If callsheet has a run, end it as failed, because an error has ended the framework's training."""
        if self._run is not None:
            try:
                self._run.fail(error)
            finally:
                self._release()

    def _leave(self, error: BaseException) -> None:
        """End the run because of an error, and detach callsheet from the framework's loop.

        Raise the error if the user must know about it. Otherwise, training continues without the host.

        If a framework does not report exceptions to callbacks, its host passes every `BaseException`: a Ctrl-C must end the run.
        """
        run = self._run
        is_loaded = self._resume_path is None or self._has_given_up or (run is not None and run.lifetime.has_started)
        try:
            is_contained = self.only_observes and isinstance(error, Exception)
            if not is_contained and (is_for_user(error) or not is_loaded):
                if run is not None:
                    run.fail(error)
                raise error
            assert isinstance(error, Exception)
            if run is not None:
                give_up(run, error, contained=is_contained)
            elif not self._has_given_up:
                logger.error(
                    "callsheet cannot begin a run (%s: %s). The callbacks are not called. Training continues. Please report this with the "
                    "traceback",
                    *(type(error).__name__, error),
                    exc_info=error,
                )
            self._has_given_up = True
        finally:
            self._release()

    def _release(self) -> None:
        """Remove the hooks of the current run, end the run if it has not ended, and set `_run` to None."""
        ends, self._ends = self._ends, _do_nothing
        try:
            ends()
        finally:
            self._run = None


def end_run(run: Run, hooks: list[Any]) -> None:
    """Remove the hooks in reverse order, and end the run as failed if it has not ended.

    This function is called, at the latest, when the program ends or the host is garbage-collected. A run that is still open then
    counts as failed, because an exception that the framework did not report must have ended its training.
    """
    for hook in reversed(hooks):
        hook.remove()
    run.signals.__exit__(None, None, None)
    run.lifetime.end(Outcome.INTERRUPTED if run.lifetime.outcome is Outcome.INTERRUPTED else Outcome.FAILED)


def observing(method: Observed) -> Observed:
    """Decorate a method that the framework's loop calls, so that an error in the method ends callsheet's run; see `HostBase._leave`.

    Methods that are called at every step catch errors themselves.
    """

    @functools.wraps(method)
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except BaseException as error:
            self._leave(error)

    return called  # type: ignore[return-value]  # the wrapper has the same signature


def in_a_run(method: Callable[..., None]) -> Callable[..., None]:
    """Decorate a host's handler of a framework event, so that the handler gets the current run as its first argument.

    If there is no run, the handler is not called.

    An error ends the run, as with `observing`. Methods that are called at every step handle errors themselves.
    """

    @functools.wraps(method)
    def called(self: Any, *args: Any, **given: Any) -> None:
        try:
            self._handle(method, *args, **given)
        except BaseException as error:
            self._leave(error)

    # Some frameworks read a method's parameters. Without `__wrapped__`, they read those of `called`, not those of `method`.
    del called.__wrapped__
    return called
