"""Muting: stop calling a callback's handlers for an event, for the rest of the run or until a step.

Handlers could check the step themselves, but calling them at every step costs more (`benchmarks/results/shortcuts.md`).
"""

from __future__ import annotations

from math import inf

from callsheet.core.call_sheet import Registration
from callsheet.core.callback import Callback, label_of
from callsheet.core.context import Context
from callsheet.core.dispatch_table import DispatchTable
from callsheet.core.events import as_event
from callsheet.errors import RegistrationError

_MIN_MUTED_STEPS = 20  # muting a handler for fewer steps takes more time than it saves


class Muting:
    """Mutes callbacks of one manager: a muted callback is not called for some events until a given step, or until the run's end."""

    def __init__(self, table: DispatchTable) -> None:
        self._table = table
        # For each callback that is muted until a certain step: this step, the callback, and the muted events.
        self._wakes: list[tuple[int, Registration, frozenset[str]]] = []

    @property
    def next_step(self) -> float:
        """The step after which `unmute_due` must be called next. Infinite if no callback is muted until a certain step."""
        return min((step - 1 for step, _, _ in self._wakes), default=inf)

    def reset(self) -> None:
        """Forget all steps at which muted handlers should be called again."""
        self._wakes = []

    def forget(self, registrations: list[Registration]) -> None:
        """Forget the steps until which handlers of these callbacks were muted, because the callbacks were removed."""
        self._wakes = [wake for wake in self._wakes if wake[1] not in registrations]

    def mute(self, ctx: Context, callback: Callback, events: tuple[str, ...], is_muted: bool, until: int | None) -> None:
        """Mute (`is_muted`) or unmute the callback for these events. With `until`, the callback is muted only until that step.

        Raises:
            UnknownEventError: no such event.
            RegistrationError: the callback is not on the call sheet.
        """
        changed = frozenset(as_event(event).value for event in events)
        # A loop that has not called `between_steps` yet (`has_begun` is False) might never unmute the handlers.
        # Check `until` before the slow search for the registration, because a callback may call `ctx.mute` at every step.
        if until is not None and not (self._table.costs.has_begun and until >= ctx.step + _MIN_MUTED_STEPS):
            return
        registration = next((each for each in self._table.registrations if each.thing is callback), None)
        if registration is None:
            raise RegistrationError(f"{label_of(callback)} is not on the call sheet of this run, so it cannot mute events")
        if until is not None:
            changed -= registration.muted - self._waking(registration)  # a callback that is muted until the run's end stays muted
        self._forget_wakes(registration, changed)
        if until is not None:
            self._wakes.append((until, registration, changed))
            ctx.control.is_rescheduled = ctx.control.pending = True  # makes the loop read `next_step` again
        self._set(registration, registration.muted | changed if is_muted else registration.muted - changed)

    def unmute_due(self, step: int) -> None:
        """Unmute the handlers that must be called again in the next step. The manager calls this after `step`."""
        for wake in [each for each in self._wakes if each[0] <= step + 1]:
            self._wakes.remove(wake)
            _, registration, events = wake
            self._set(registration, registration.muted - events)

    def _waking(self, registration: Registration) -> frozenset[str]:
        """Return the events for which the callback is muted until a certain step, and not until the run's end."""
        return frozenset[str]().union(*(events for _, each, events in self._wakes if each is registration))

    def _forget_wakes(self, registration: Registration, events: frozenset[str]) -> None:
        """Forget the step until which the callback was muted for these events, because `mute` or `unmute` was called again."""
        left = [(step, each, named - events if each is registration else named) for step, each, named in self._wakes]
        self._wakes = [wake for wake in left if wake[2]]

    def _set(self, registration: Registration, muted: frozenset[str]) -> None:
        changed, registration.muted = registration.muted ^ muted, muted
        if changed:
            self._table.recompile(*changed)
