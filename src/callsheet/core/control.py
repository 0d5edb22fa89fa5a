"""The requests that callbacks make to the training loop, such as to stop or to save a checkpoint.

A request stays until the loop has carried it out; a later callback cannot cancel it. The loop carries requests out at its
boundaries, never in the middle of a step.

On several ranks, a request with `replicated=True` is one that every rank makes; it acts at the next boundary. Any other request
is known only to its own rank until the loop has shared it with all ranks, and acts after that.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple, get_args

from callsheet.core.hooks import Hooks
from callsheet.errors import ConfigError, RequestRejected, did_you_mean

logger = logging.getLogger("callsheet")

RequestName = Literal["stop", "save", "evaluate", "set_gradient_accumulation", "load"]
REQUESTS: tuple[RequestName, ...] = get_args(RequestName)
"""The names of the methods of `Control` with which callbacks make requests."""

SaveKind = Literal["requested", "periodic", "best", "final", "preempt"]
SAVE_KINDS: tuple[SaveKind, ...] = get_args(SaveKind)
"""The kinds of checkpoints, the least important first.

If several kinds are requested at one boundary, only one checkpoint is written, of the kind that comes last in this list.
"""


class Request(NamedTuple):
    """One request of a callback to the training loop, such as to stop or to save a checkpoint.

    `by` is the name that the requester gave, or otherwise the callback's `name` or class. For a function that belongs to no
    callback, it is the function's qualified name. For a stop, `resumable` says whether the same command continues training
    afterwards.
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
    """The methods with which callbacks make requests to the loop: `stop`, `save`, `evaluate`, `set_gradient_accumulation` and `load`.

    An unsupported request raises `RequestRejected` at once. In the loop of a host (of another framework, or with `attach`), it is ignored
    instead, and an error is logged once for each callback, so that training continues.

    Args:
        able: the names of the requests that the loop supports. The attribute `able` may change during the run.
        is_shared: whether there are several ranks. The requests of one rank then wait in `local_requests` until all ranks have agreed
            on them.
        host: the framework whose loop this is; empty for callsheet's own.
    """

    __slots__ = (
        *("_evaluate", "_saves", "_stop", "able", "accumulation", "in_gate", "is_shared", "load_path", "pending"),
        *("_logged", "hints", "host", "is_boundary_requested", "is_rescheduled", "local_requests", "switched_off"),
    )

    def __init__(self, able: Iterable[str] = ("stop", "save", "evaluate"), *, is_shared: bool = False, host: str = "") -> None:
        self.able = set(able)
        self.host = host
        self.hints: Mapping[str, str] = {}  # name of an unsupported request -> what the user can do instead
        self._logged: set[tuple[str, str]] = set()
        self.is_shared = is_shared
        self.local_requests: list[Request] = []
        self._stop: Request | None = None
        self._evaluate: Request | None = None
        self._saves: list[Request] = []
        self.pending = False  # True if there are requests to process; the loop reads this flag at every step
        self.accumulation: int | None = None
        self.load_path: str | None = None
        self.switched_off: list[Request] = []
        """The callbacks that all ranks have agreed to disable, each as a `Request`. The callback manager disables them."""
        self.is_boundary_requested = False  # True if another thread has made a request that the loop has not read yet
        self.is_rescheduled = False  # True if `CallbackManager.next_step` has changed since the loop last read it
        self.in_gate = False  # True while the manager calls a handler that runs on some ranks only

    def stop(self, why: str, *, replicated: bool = False, resumable: bool = False) -> None:
        """Request that training ends after the current step, epoch or round (group of epochs), with the outcome `stopped`.

        Args:
            why: completes the sentence "stopped by <callback>: ...", which becomes `ctx.run.outcome_reason`.
            replicated: whether every rank makes the same request, because it depends only on values that are the same on all ranks.
            resumable: whether a later start with `resume="auto"` continues training. Otherwise the run is complete.

        Raises:
            RequestRejected: `replicated=True` in a handler that does not run on every rank, or the loop does not support the request.
        """
        self._ask(Request("stop", why, _asker(), resumable=resumable), replicated)

    def save(self, why: str, *, kind: SaveKind = "requested", by: str = "", metric: str = "", replicated: bool = False) -> None:
        """Request a checkpoint after the current step, epoch or round (group of epochs).

        Args:
            why: the reason, for messages.
            kind: `requested`, `periodic`, `best`, `final` or `preempt`. It becomes `ctx.checkpoint.kind`.
            by: the requester's name; empty: that of the callback. A requester finds its checkpoint by this name in
                `ctx.checkpoint.requested_by`, also after a resume.
            metric: the metric for which the checkpoint is the best. It becomes `ctx.checkpoint.best_metric_key`.
            replicated: as for `stop`.

        Raises:
            RequestRejected: as for `stop`.
            ConfigError: the kind is unknown.
        """
        self._ask(Request("save", why, by or _asker(), kind, metric), replicated)

    def evaluate(self, why: str, *, replicated: bool = False) -> None:
        """Request that all evaluation datasets are evaluated after the current step, epoch or round (group of epochs).

        Args:
            why: the reason, for messages.
            replicated: as for `stop`.

        Raises:
            RequestRejected: as for `stop`.
        """
        self._ask(Request("evaluate", why, _asker()), replicated)

    def set_gradient_accumulation(self, batches: int) -> None:
        """Accumulate gradients over several batches, beginning with the next step. Every rank must call this method.

        Args:
            batches: the number of batches for one optimizer step.

        Raises:
            ConfigError: the number is below 1.
            RequestRejected: as for `stop`.
        """
        if batches < 1:
            raise ConfigError(f"a step needs at least one batch, not {batches}")
        if self.supports(Request("set_gradient_accumulation", "", _asker())):
            self._reject_in_gate("set_gradient_accumulation")
            self.accumulation = batches

    def load(self, path: str | os.PathLike[str]) -> None:
        """Make the loop load this checkpoint instead of choosing one. A callback should call this at `on_checkpoint_load_start`.

        Args:
            path: the path or URL of the checkpoint's folder.

        Raises:
            RequestRejected: the loop does not support the request.
        """
        if self.supports(Request("load", "", _asker())):
            self.load_path = os.fspath(path)

    @property
    def stop_requested(self) -> Request | None:
        """The first request to stop training; None if there is none."""
        return self._stop

    @property
    def save_requested(self) -> Request | None:
        """The pending save request that decides the kind of the next checkpoint (see `SAVE_KINDS`); None if no save is requested."""
        return max(self._saves, key=lambda request: SAVE_KINDS.index(request.kind), default=None)

    @property
    def save_requests(self) -> tuple[Request, ...]:
        """All pending save requests. The next checkpoint satisfies all of them."""
        return tuple(self._saves)

    @property
    def evaluate_requested(self) -> Request | None:
        """The request for an evaluation that the loop will carry out after the current step, epoch or round; None if there is none."""
        return self._evaluate

    def supports(self, request: Request) -> bool:
        """Return whether the loop supports the request. If not, raise an error or, in another framework's loop, log the error.

        Args:
            request: the request.

        Raises:
            RequestRejected: it is not supported, and the loop is callsheet's own.
            ConfigError: the kind of checkpoint is unknown.
        """
        if request.what not in self.able:
            self._reject(request)
            return False
        if request.what == "save" and request.kind not in SAVE_KINDS:
            raise ConfigError(
                f"unknown kind of checkpoint {request.kind!r}{did_you_mean(request.kind, SAVE_KINDS)} (one of {', '.join(SAVE_KINDS)})"
            )
        return True

    def ask(self, request: Request) -> None:
        """Add a request that only this rank has made. The request takes effect as soon as all ranks know about it.

        Args:
            request: the request.
        """
        if self.is_shared:
            self.local_requests.append(request)
        else:
            self.agree(request)

    def switch_off(self, callback: str, number: int, failures: int) -> None:
        """Request that all ranks disable a callback, because it has failed too often in a row on this rank.

        Called by the manager; see `switched_off`.

        Args:
            callback: the name of the callback.
            number: the number of its registration, which is the same on all ranks.
            failures: how often it has failed in a row.
        """
        self.ask(Request("switch off", f"{failures} failures in a row", callback, kind=str(number)))

    def done(self, what: str) -> None:
        """Remove the pending requests of one kind. The loop calls this method after it has carried out these requests.

        Args:
            what: `save`, `evaluate` or `stop`.

        Raises:
            ConfigError: `what` is not one of these.
        """
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
        """Set `pending` to True if any request is left, otherwise to False. Called by the loop."""
        self.pending = bool(self._saves) or self._evaluate is not None or self._stop is not None
        # Read the two flags only after setting `pending`, because another thread may set a flag at any time.
        if self.is_boundary_requested or self.is_rescheduled:
            self.pending = True

    def take_requests(self) -> list[Request]:
        """Return and remove this rank's requests that the other ranks do not know yet.

        Called by the loop, which sends them to the other ranks.
        """
        taken = self.local_requests[:]
        del self.local_requests[: len(taken)]  # delete in place, because another thread may append to the list at any time
        return taken

    def agree(self, request: Request) -> None:
        """Accept a request that all ranks know about. The loop carries it out after the current step, epoch or round.

        Args:
            request: the request.
        """
        if request.what == "stop":
            self._stop = self._stop or request  # keep the first stop request
        elif request.what == "evaluate":
            self._evaluate = self._evaluate or request
        elif request.what == "switch off":
            self.switched_off.append(request)
        elif request not in self._saves:
            self._saves.append(request)
        self.pending = True

    def _ask(self, request: Request, replicated: bool) -> None:
        if not self.supports(request):
            return
        if replicated:
            self._reject_in_gate(request.what)
            self.agree(request)
        else:
            self.ask(request)

    def _reject(self, request: Request) -> None:
        supported = ", ".join(sorted(self.able)) or "no request"
        if not self.host:
            raise RequestRejected(f"this loop does not support ctx.control.{request.what}; it supports {supported}")
        if (request.by, request.what) not in self._logged:
            self._logged.add((request.by, request.what))
            logger.error(
                "%s calls ctx.control.%s, which %s does not support here; it supports %s. The request is ignored, and training continues; %s",
                request.by,
                request.what,
                self.host,
                supported,
                self.hints.get(request.what, "leave the callback out, or train without that request"),
            )

    def _reject_in_gate(self, what: str) -> None:
        if self.in_gate:
            raise RequestRejected(
                f"control.{what} with replicated=True in a handler that runs on some ranks only: the others would not request it; "
                "leave replicated out"
            )


def _asker() -> str:
    """Return the name of the callback that is making a request or, if a function makes the request, the function's qualified name.

    The name is found in the frames of the call stack: requests are rare, and recording the callback at every event would cost
    more. The search ends at the frame that dispatched the event. Frames further up are not read, because reading `f_locals` of a
    frame keeps that frame's variables, a model for example, alive until the frame's function returns.
    """
    asking = frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename not in _DISPATCH_FILES:
        code = frame.f_code
        first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        # Test for `Hooks`, the base class of `Callback`, because importing `Callback` here would be circular.
        if isinstance(first, Hooks):
            return getattr(first, "name", "") or type(first).__name__
        frame = frame.f_back  # type: ignore[assignment]  # the outermost frame has no caller, which ends the loop
    return asking.f_code.co_qualname


_DISPATCH_FILES = frozenset(
    os.path.join(os.path.dirname(__file__), name) for name in ("manager.py", "spans.py", "call_sheet.py", "wrappers.py")
)
