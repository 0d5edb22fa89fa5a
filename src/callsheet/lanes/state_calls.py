"""Calls of `state_dict` and `load_state_dict` that do not hang or fail because of an isolated callback."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from callsheet.core.background import inner
from callsheet.core.call_sheet import Registration
from callsheet.core.callback import Callback
from callsheet.errors import text_of

T = TypeVar("T")


class StateCalls:
    """Calls methods of callbacks: inline ones in this thread, those in lanes on their own threads, with a deadline."""

    def __init__(self) -> None:
        self._attempts: dict[Registration, _Attempt] = {}

    def results(
        self,
        calls: Mapping[Registration, Callable[[], T]],
        deadline: Callable[[Registration], float],
        failed: Callable[[Registration, Exception], None],
    ) -> dict[Registration, T]:
        """Return what the calls return, without those that failed. Calls of callbacks in lanes run at the same time.

        Args:
            calls: by callback.
            deadline: seconds that a callback in a lane has.
            failed: receives the error of a callback in a lane, or of an isolated one; `TimeoutError` past the deadline.

        Raises:
            Exception: what an inline callback that is not isolated raised.
        """
        attempts: dict[Registration, _Attempt] = {}
        for member, call in calls.items():
            if _lane(member) != "inline":
                running = self._attempts.get(member)
                if running is None or not running.is_alive():
                    attempts[member] = self._attempts[member] = _Attempt(member.label, call)
        began = time.monotonic()
        results: dict[Registration, T] = {}
        for member, call in calls.items():
            try:
                if member in attempts:
                    results[member] = attempts[member].result(deadline(member), since=began)
                elif _lane(member) == "inline":
                    results[member] = call()
                else:
                    raise TimeoutError("an earlier call has still not returned")
            except Exception as error:
                if _lane(member) == "inline" and getattr(member.thing, "on_error", "") != "isolate":
                    raise
                failed(member, error)
        return results


class _Attempt(threading.Thread):
    """One call on a daemon thread."""

    def __init__(self, label: str, call: Callable[[], Any]) -> None:
        super().__init__(name=f"callsheet-state-{label}", daemon=True)
        self._call = call
        self._result: Any = None
        self._error: Exception | None = None
        self.start()

    def run(self) -> None:
        """Call the function and keep its result or error."""
        try:
            self._result = self._call()
        except Exception as error:
            self._error = error
        except BaseException as error:  # SystemExit too, which must not end the thread without a result
            self._error = RuntimeError(f"{type(error).__name__}: {text_of(error)}")

    def result(self, seconds: float, *, since: float) -> Any:
        """Return the result, waiting until `seconds` after `since`. Raises what the call raised, or TimeoutError."""
        self.join(max(0.0, since + seconds - time.monotonic()))
        if self.is_alive():
            raise TimeoutError(f"no answer within {seconds:.3g} s")
        if self._error is not None:
            raise self._error
        return self._result


def _lane(member: Registration) -> str:
    return member.thing.lane if isinstance(member.thing, Callback) else "inline"


def keeps_state(callback: Callback) -> bool:
    """Return whether the callback's class has a `state_dict` of its own."""
    return type(inner(callback)).state_dict is not Callback.state_dict
