"""Checks whether callbacks need something that another framework's loop does not support.

Before a run it checks what callbacks declare, and after the first step which events were fired.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from callsheet.bridges.lifecycle_driver import LifecycleDriver
from callsheet.core.background import inner
from callsheet.core.callback import Callback, label_of
from callsheet.core.control import Control
from callsheet.core.lifecycle import EVENTS, SPANS
from callsheet.core.manager import CallbackManager
from callsheet.errors import NotSupported

logger = logging.getLogger("callsheet")

_ALWAYS_FIRED_EVENTS = frozenset({"on_run_start", "on_run_end"})
"""Events that every host fires. A callback cannot work in a host that fires none of the other events to which it listens."""

_MISSING_SPAN_CAUSES: Mapping[str, str] = {
    "forward": (
        ": backward() was called before the model was. If the step trains another model first, such as a GAN's discriminator, give that one"
        " as the model. If the loop calls `torch.compile(model)`, give that. If the loop calls submodules of the model, make it call the"
        " model itself"
    ),
    "backward": ": backward() was not called on a loss within this step",
    "optimizer_step": ": the loop did not step the optimizer that the bridge was given",
}
"""For each span that may be missing in the first step, the probable cause and what to do."""


class SupportCheck:
    """Raises an error, or logs a warning, if a callback needs what another framework's loop does not support.

    Args:
        manager: the callbacks.
        host: the name of the host in messages.
        strict: whether to raise an error; otherwise a warning is logged.
        hint: the end of an error message, which says what the user can do.
        causes: for each span that may be missing in the first step, the probable cause and what to do.

    Raises:
        NotSupported: raised by the methods, with `strict`; the message names events or requests, callbacks and host.
    """

    def __init__(
        self,
        manager: CallbackManager,
        host: str,
        *,
        strict: bool,
        hint: str = "leave the callback out, or pass strict=False to train without that event",
        causes: Mapping[str, str] = _MISSING_SPAN_CAUSES,
    ) -> None:
        self._manager = manager
        self._host = host
        self.strict = strict
        """Whether unsupported needs of callbacks raise an error. Otherwise, a warning is logged."""
        self._hint = hint
        self._causes = causes

    def before_run(self, never: Collection[str], control: Control) -> None:
        """Before a run, raise an error (or log a warning) if a callback cannot work in the framework's loop.

        A callback cannot work in two cases: it listens to no event that the host fires except the run's start and end, or the
        host supports none of the requests that it declares (`Callback.requests`). For other callbacks, log which of their events
        and requests are unsupported.

        Args:
            never: the events that the host never fires.
            control: the run's control, which knows the requests that the host supports.
        """
        is_served = self.make_served_predicate(never)
        for event in never:
            if not all(map(is_served, self._manager.list_callbacks(event))):
                self._reject_listeners(event, "does not fire")
        for each in {_key(each): each for event in never for each in self._manager.list_callbacks(event)}.values():
            if is_served(each) and not self._listens_to_all(each):
                missed = ", ".join(event for event in never if each in self._manager.list_callbacks(event))
                logger.info("%s also listens to %s, which %s does not fire", _name_of(each), missed, self._host)
        if control.able:  # `able` is empty if the run does not train
            self._reject_requests(control)

    def after_first_step(self, driver: LifecycleDriver, *, may_skip_step: bool = False, without_step: str = "") -> None:
        """Raise an error (or log a warning) if an event that has listeners was not fired in the first step.

        Args:
            driver: the driver of training, or that of evaluations.
            may_skip_step: whether it is no error if the optimizer has not stepped. For example, a loss scaler skips the first steps while
                its scale is too large.
            without_step: the message of the error to raise because the optimizer has not stepped. Empty: no such error.
        """
        if may_skip_step:
            driver.synthesized -= {"clip_gradients", "optimizer_step"}
        elif without_step and self.strict:
            raise NotSupported(without_step)
        for span, event in events_of(driver.synthesized):
            self._reject_listeners(event, "did not fire in its first step", self._causes.get(span, ""))
        driver.synthesized.clear()

    def make_served_predicate(self, never: Collection[str]) -> Callable[[Any], bool]:
        """Return a function that tells whether a listener listens to any fired event other than the run's start and end."""
        fired = (event for event in EVENTS if event not in _ALWAYS_FIRED_EVENTS and event not in never)
        served = {_key(each) for event in fired for each in self._manager.list_callbacks(event)}
        return lambda listener: _key(listener) in served

    def listeners(self, event: str) -> list[Any]:
        """Return the callbacks and functions that listen to this event.

        Callbacks and functions that listen to all events are left out, because they do not depend on a single event.
        """
        return [each for each in self._manager.list_callbacks(event) if not self._listens_to_all(each)]

    def reject(self, listeners: Iterable[Any], why: str, hint: str | None = None) -> None:
        """Raise an error with the listeners' names and the reason `why`. If `strict` is False, log a warning instead."""
        message = f"{', '.join(map(_name_of, listeners))} {why}"
        if self.strict:
            raise NotSupported(f"{message}; {hint or self._hint}")
        logger.warning("%s", message)

    def _reject_listeners(self, event: str, why: str, cause: str = "") -> None:
        if listeners := self.listeners(event):
            self.reject(listeners, f"listens to {event}, which {self._host} {why}{cause}")

    def _reject_requests(self, control: Control) -> None:
        for each in self._manager.callbacks:
            asked = set(inner(each).requests)
            if cannot := sorted(asked - control.able):
                missed = ", ".join(f"ctx.control.{request}" for request in cannot)
                if asked & control.able:
                    logger.info("%s may ask for %s, which %s does not support here", label_of(each), missed, self._host)
                else:
                    hint = next(
                        (control.hints[request] for request in cannot if request in control.hints), "leave the callback out"
                    )
                    self.reject(
                        [each],
                        f"asks for {missed}, which {self._host} does not support here",
                        f"{hint}, or pass strict=False to log an error only if it asks",
                    )

    def _listens_to_all(self, listener: Any) -> bool:
        """Return whether the listener listens to all events, and so does not depend on any single event."""
        if isinstance(listener, Callback):
            return type(inner(listener)).on_event is not Callback.on_event
        return all(listener in self._manager.list_callbacks(event) for event in EVENTS)


def events_of(spans: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield `(span, event)` for the start and the end event of each of the `spans`, in the order of the lifecycle."""
    for span in sorted(spans, key=list(SPANS).index):
        yield span, SPANS[span].start_event
        yield span, SPANS[span].end_event


def _key(listener: Any) -> Any:
    """Return a key that identifies a callback or function.

    Callbacks need not be hashable; a dataclass, for example, is not.
    """
    return id(listener) if isinstance(listener, Callback) else listener


def _name_of(listener: Any) -> str:
    return label_of(listener) if isinstance(listener, Callback) else getattr(listener, "__name__", repr(listener))
