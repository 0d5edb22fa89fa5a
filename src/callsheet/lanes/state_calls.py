"""Calls `state_dict` and `load_state_dict` of callbacks in lanes (other threads and processes), with deadlines.

The calls run on their own threads and have a deadline, so that none can hang a run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from callsheet.core.call_sheet import Registration
from callsheet.errors import text_of

T = TypeVar("T")


class StateCalls:
    """Calls `state_dict` or `load_state_dict` of callbacks in lanes, all at the same time, each with a deadline."""

    def __init__(self) -> None:
        self._attempts: dict[Registration, _Attempt] = {}

    def start(
        self, calls: Mapping[Registration, Callable[[], T]], deadline: Callable[[Registration], float]
    ) -> dict[Registration, Callable[[], T]]:
        """Start the calls. Return for each callback a function that waits for the result of its call, or raises the call's error.

        The function raises TimeoutError `deadline` seconds after the start, or at once if an earlier call for the callback has
        still not returned.
        """
        waits: dict[Registration, Callable[[], T]] = {}
        began = time.monotonic()
        for registration, call in calls.items():
            running = self._attempts.get(registration)
            if running is not None and running.is_alive():
                waits[registration] = _still_running
            else:
                self._attempts[registration] = attempt = _Attempt(registration.label, call)
                waits[registration] = partial(_result, attempt, registration, deadline, began)
        return waits


def _result(attempt: _Attempt, registration: Registration, deadline: Callable[[Registration], float], began: float) -> Any:
    return attempt.result(deadline(registration), since=began)


def _still_running() -> Any:
    raise TimeoutError("an earlier call has still not returned")


class _Attempt(threading.Thread):
    """One call on a daemon thread, which does not keep the program alive if the call hangs."""

    def __init__(self, label: str, call: Callable[[], Any]) -> None:
        super().__init__(name=f"callsheet-state-{label}", daemon=True)
        self._call = call
        self._result: Any = None
        self._error: Exception | None = None
        self.start()

    def run(self) -> None:
        """Call the function, and store its result or its error, which the method `result` then returns or raises."""
        try:
            self._result = self._call()
        except Exception as error:  # `result` raises the error on the caller's thread
            self._error = error
        except BaseException as error:  # catches SystemExit too, because the thread must not end without a result
            self._error = RuntimeError(f"{type(error).__name__}: {text_of(error)}")

    def result(self, seconds: float, *, since: float) -> Any:
        """Return the result of the call, or raise the error of the call.

        Wait at most until `seconds` after `since`, then raise TimeoutError.
        """
        self.join(max(0.0, since + seconds - time.monotonic()))
        if self.is_alive():
            raise TimeoutError(f"no answer within {seconds:.3g} s")
        if self._error is not None:
            raise self._error
        return self._result
