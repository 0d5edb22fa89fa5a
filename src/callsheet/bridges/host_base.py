"""What all hosts share: how a run begins, fails and ends, and the guard around their methods."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from callsheet.bridges.giving_up import give_up, is_for_user
from callsheet.bridges.hosted_run import HostedRun
from callsheet.bridges.support_check import SupportCheck
from callsheet.core.run_state import Outcome

logger = logging.getLogger("callsheet")

Observed = TypeVar("Observed", bound=Callable[..., Any])


class HostBase:
    """The base class of hosts: how a run begins and ends, and what an error of a callback or of the host itself does."""

    _strict: bool
    """Whether a callback that needs what this host does not support is an error. False: a warning is logged."""
    _is_checked = False
    """Whether the current run's first step was checked for events that were not fired."""
    _run: Any = None
    """The current run, or None."""
    _has_given_up = False
    """Whether the latest run ended because of a fault of the host, so that the rest of the training is not observed."""
    _ends: Callable[[], object] = staticmethod(lambda: None)
    """Removes the run's hooks, and ends the run as failed if it has not ended."""
    _resume_path: str | None = None
    """The checkpoint that the host loads when a run begins, or None."""

    def _forget_earlier_run(self) -> None:
        """Before a run begins: end an earlier one whose training was left by an exception that the framework did not report."""
        if self._run is not None:
            self._release()
        self._has_given_up = self._is_checked = False

    def _begin_run(
        self,
        run: HostedRun,
        hooks: list[Any],
        not_fired: tuple[str, ...],
        *,
        end: Callable[[HostedRun, list[Any]], object] | None = None,
        **options: Any,
    ) -> None:
        """Begin a run that has been set up. Its hooks are removed, and it ends, at the latest when the host is garbage-collected.

        Args:
            run: the run.
            hooks: what observes the loop; each has `remove()`. Hooks that are appended later are removed too.
            not_fired: the events that this host never fires.
            end: removes the hooks and ends the run. None: `end_run`.
            options: of `HostedRun.begin`.
        """
        run.fails_by(self._leave)
        run.signals.__enter__()
        self._ends = weakref.finalize(self, end or end_run, run, hooks)
        self._support(run).before_run(not_fired, run.control)
        run.begin(**options)

    def _check_first_step(self, run: HostedRun) -> None:
        """After the run's first step: reject, or warn of, events that have listeners and were not fired."""
        if not self._is_checked:
            self._is_checked = True
            self._support(run).after_first_step(run.driver)

    def _support(self, run: HostedRun) -> SupportCheck:
        """Return the check of what the callbacks need; see `_strict`."""
        return SupportCheck(run.manager, run.host, strict=self._strict)

    def _finish(self) -> None:
        """End the run, if there is one: its training is over."""
        if self._run is not None:
            self._run.finish()
            self._release()

    def _fail(self, error: BaseException) -> None:
        """End the run, if there is one, because of an error that has ended training."""
        if self._run is not None:
            self._run.fail(error)
            self._release()

    def _leave(self, error: BaseException) -> None:
        """End the run because of an error. Raise the error if the user has to know of it; else training continues without the host."""
        run = self._run
        is_loaded = self._resume_path is None or self._has_given_up or (run is not None and run.lifetime.has_started)
        try:
            if is_for_user(error) or not is_loaded:
                if run is not None:
                    run.fail(error)
                raise error
            assert isinstance(error, Exception)
            if run is not None:
                give_up(run, error)
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
        """Remove the hooks of the current run, and forget the run."""
        self._ends()
        self._run = None


def end_run(run: HostedRun, hooks: list[Any]) -> None:
    """Remove the hooks, the last one first, and end the run as failed if it has not ended.

    This also runs when the program ends or the host is garbage-collected: then an exception that the framework does not report has ended
    training.
    """
    for hook in reversed(hooks):
        hook.remove()
    run.signals.__exit__(None, None, None)
    run.lifetime.end(Outcome.INTERRUPTED if run.lifetime.outcome is Outcome.INTERRUPTED else Outcome.FAILED)


def observing(method: Observed) -> Observed:
    """Decorate a method of a host so that an error ends the run; see `GivesUp._leave`. The methods of a step catch errors themselves."""

    @functools.wraps(method)
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except BaseException as error:
            self._leave(error)

    return called  # type: ignore[return-value]  # it has the same signature
