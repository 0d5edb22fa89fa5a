"""What callbacks may ask of the loop.

A request is sticky: it stays until the loop has carried it out, and no later callback can take it back. The loop looks at its
boundaries, never in the middle of a step.

On many ranks a request made with `replicated=True`, by all of them alike, acts at the next boundary. Any other is a wish of one rank
until the loop has made it known to all, and acts then.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import NamedTuple

from callsheet.errors import ConfigError, RequestRejected, did_you_mean
from callsheet.hooks import Hooks

SAVE_KINDS = ("requested", "periodic", "best", "final", "preempt")
"""Kinds of checkpoints; where several are asked for at one boundary, one is written, of the kind that stands last here."""


class Request(NamedTuple):
    """One request.

    `by` is the name that the asker gave, or else that of the callback that asked: its `name`, or its class. For a function outside a
    callback it is the function's qualified name. `resumable` says of a stop that the same command trains on afterwards.
    """

    what: str
    why: str
    by: str
    kind: str = ""
    metric: str = ""
    resumable: bool = False

    def __str__(self) -> str:
        return f"{self.by}: {self.why}"


class Control:
    """The requests of a run: `stop`, `save`, `evaluate`, and, where the loop can, `set_gradient_accumulation` and `load`.

    `able` names what the loop behind it can carry out now; anything else is refused when it is asked for, not ignored.
    `is_shared` says that there are other ranks, so that requests of one wait in `wishes` until they are agreed.
    """

    __slots__ = (
        *("_evaluate", "_saves", "_stop", "able", "accumulation", "in_gate", "is_shared", "load_path", "pending"),
        *("is_hurried", "is_rescheduled", "switched_off", "local_requests"),
    )

    def __init__(self, able: Iterable[str] = ("stop", "save", "evaluate"), *, is_shared: bool = False) -> None:
        self.able = set(able)
        self.is_shared = is_shared
        self.local_requests: list[Request] = []
        self._stop: Request | None = None
        self._evaluate: Request | None = None
        self._saves: list[Request] = []
        self.pending = False  # whether the loop has anything to look at, for a loop that looks at every step
        self.accumulation: int | None = None
        self.load_path: str | None = None
        self.switched_off: list[Request] = []
        """For the manager: the callbacks that all ranks know to have failed too often."""
        self.is_hurried = False  # a lane has asked for something that the loop has not yet heard of
        self.is_rescheduled = False  # the next step to look at is another one than the loop knows of
        self.in_gate = False  # the manager says here that the handler being told does not run on every rank

    def stop(self, why: str, *, replicated: bool = False, resumable: bool = False) -> None:
        """Ask that training end at the next boundary, outcome `stopped`.

        `why` completes the sentence "stopped by <callback>: ...", which becomes `ctx.run.outcome_reason`. The run is complete then:
        `resume="auto"` trains no further step. With `resumable=True` it does, as for a stop that has nothing to do with training.
        `replicated=True` says that every rank makes the same request, from replicated or reduced fields alone.

        Raises:
            RequestRejected: `replicated=True` in a handler that does not run on every rank, or the loop cannot stop.
        """
        self._ask(Request("stop", why, _asker(), resumable=resumable), replicated)

    def save(self, why: str, *, kind: str = "requested", by: str = "", metric: str = "", replicated: bool = False) -> None:
        """Ask for a checkpoint at the next boundary; `kind` is one of `SAVE_KINDS`. Raises as `stop` does.

        `by` is the name under which the asker will know it, in `ctx.checkpoint.requested_by`, also after a resume; `metric` the one by
        which it is the best, told as `ctx.checkpoint.best_metric_key`.
        """
        self._ask(Request("save", why, by or _asker(), kind, metric), replicated)

    def evaluate(self, why: str, *, replicated: bool = False) -> None:
        """Ask that all evaluators run at the next boundary. Raises as `stop` does."""
        self._ask(Request("evaluate", why, _asker()), replicated)

    def set_gradient_accumulation(self, batches: int) -> None:
        """From the next step on, accumulate gradients over so many fetched batches: on every rank alike. Raises as `stop` does."""
        if batches < 1:
            raise ConfigError(f"a step needs at least one batch, not {batches}")
        self._check("set_gradient_accumulation")
        self._reject_in_gate("set_gradient_accumulation")
        self.accumulation = batches

    def load(self, path: str | os.PathLike[str]) -> None:
        """At `on_checkpoint_load_start`: load this checkpoint instead of the one that was found. Raises as `stop` does."""
        self._check("load")
        self.load_path = os.fspath(path)

    @property
    def stop_requested(self) -> Request | None:
        """Who asked first that training stop, and why."""
        return self._stop

    @property
    def save_requested(self) -> Request | None:
        """The save request that the next boundary will carry out; it stands for all of them."""
        return max(self._saves, key=lambda request: SAVE_KINDS.index(request.kind), default=None)

    @property
    def save_requests(self) -> tuple[Request, ...]:
        """All that the next boundary's checkpoint will answer."""
        return tuple(self._saves)

    @property
    def evaluate_requested(self) -> Request | None:
        """The evaluation request that the next boundary will carry out."""
        return self._evaluate

    def check(self, request: Request) -> None:
        """Raises as `stop` does, and `ConfigError` for an unknown kind of checkpoint, where `ask` could not be carried out."""
        self._check(request.what)
        if request.what == "save" and request.kind not in SAVE_KINDS:
            raise ConfigError(
                f"unknown kind of checkpoint {request.kind!r}{did_you_mean(request.kind, SAVE_KINDS)} (one of {', '.join(SAVE_KINDS)})"
            )

    def ask(self, request: Request) -> None:
        """A request of this rank alone, made elsewhere: it acts as soon as all ranks know of it."""
        if self.is_shared:
            self.local_requests.append(request)
        else:
            self.agree(request)

    def switch_off(self, callback: str, number: int, failures: int) -> None:
        """For the manager: an isolated callback fails too often here; when all ranks know it, it stands in `switched_off`."""
        self.ask(Request("switch off", f"{failures} failures in a row", callback, kind=str(number)))

    def done(self, what: str) -> None:
        """For the loop: the pending requests of this kind, `save`, `evaluate` or `stop`, have been carried out."""
        if what not in ("save", "evaluate", "stop"):
            raise ConfigError(f"there is no request {what!r}{did_you_mean(what, ('save', 'evaluate', 'stop'))}")
        if what == "save":
            self._saves.clear()
        elif what == "evaluate":
            self._evaluate = None
        else:
            self._stop = None
        self.look_again()

    def look_again(self) -> None:
        """For the loop: `pending` is whether anything is left to be carried out."""
        self.pending = bool(self._saves) or self._evaluate is not None or self._stop is not None
        if self.is_hurried or self.is_rescheduled:  # after the line before it: a lane may have said so in between
            self.pending = True

    def take_requests(self) -> list[Request]:
        """For the loop: what this rank has asked for since the last call."""
        taken = self.local_requests[:]
        del self.local_requests[: len(taken)]  # not `= []`: another thread may be asking
        return taken

    def agree(self, request: Request) -> None:
        """For the loop: every rank knows of this request now, and the next boundary acts on it."""
        if request.what == "stop":
            self._stop = self._stop or request  # the first asker is remembered
        elif request.what == "evaluate":
            self._evaluate = self._evaluate or request
        elif request.what == "switch off":
            self.switched_off.append(request)
        elif request not in self._saves:
            self._saves.append(request)
        self.pending = True

    def _ask(self, request: Request, replicated: bool) -> None:
        self.check(request)
        if replicated:
            self._reject_in_gate(request.what)
            self.agree(request)
        else:
            self.ask(request)

    def _check(self, what: str) -> None:
        if what not in self.able:
            raise RequestRejected(
                f"this loop does not support ctx.control.{what}; it supports {', '.join(sorted(self.able)) or 'no request'}"
            )

    def _reject_in_gate(self, what: str) -> None:
        if self.in_gate:
            raise RequestRejected(
                f"control.{what}(replicated=True) in a handler that runs on some ranks only: the others would not ask; leave replicated out"
            )


def _asker() -> str:
    """Return the name of the callback that made the request, or the qualified name of the function that did.

    It is read from the frames of the call, up to the one that dispatched the event: requests are rare, and events are not. No frame beyond
    is read, since `f_locals` would keep what its variables hold until that frame returns: a model, say, that its owner deletes.
    """
    asking = frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename not in _DISPATCH:
        code = frame.f_code
        first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if isinstance(first, Hooks):  # a callback; its class is above this module
            return getattr(first, "name", "") or type(first).__name__
        frame = frame.f_back  # type: ignore[assignment]  # None ends the loop
    return asking.f_code.co_qualname


_DISPATCH = frozenset(os.path.join(os.path.dirname(__file__), name) for name in ("manager.py", "spans.py", "sheet.py"))
