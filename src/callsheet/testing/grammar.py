"""Checks a sequence of events against callsheet's lifecycle: the order of the events, and the fields that are available at each.

Every `order` in the lifecycle's table is a regular expression over names. After each name, the checker replaces the expression by
its derivative, the expression for what may follow that name (Brzozowski, "Derivatives of regular expressions", 1964). So the
checker finds a violation at the first wrong event, and can list the events that were possible there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from callsheet.core.events import as_event
from callsheet.core.lifecycle import ALWAYS_AVAILABLE, ANYWHERE_EVENTS, FIELDS, POINTS, SPAN_OF, SPANS
from callsheet.errors import CallsheetError, ConfigError, did_you_mean


class GrammarError(CallsheetError, AssertionError):
    """Raised for a sequence of events that the lifecycle does not allow. The message names the wrong event and the allowed events."""


@dataclass(frozen=True, slots=True)
class Order:
    """A regular expression whose symbols are the names of spans and of single events.

    `kind` is `none` (nothing matches), `empty`, `name`, `then`, `or` or `many`.
    """

    kind: str
    name: str = ""
    parts: tuple[Order, ...] = ()

    @property
    def may_be_empty(self) -> bool:
        """Whether the regular expression matches the empty sequence."""
        if self.kind == "then":
            return all(part.may_be_empty for part in self.parts)
        if self.kind == "or":
            return any(part.may_be_empty for part in self.parts)
        return self.kind in ("empty", "many")

    def after(self, name: str) -> Order:
        """Return the expression that matches the rest of a sequence after the name `name` (the expression's derivative)."""
        if self.kind == "name":
            return EMPTY if self.name == name else NONE
        if self.kind == "or":
            return _either(*(part.after(name) for part in self.parts))
        if self.kind == "many":
            return _then(self.parts[0].after(name), self)
        if self.kind == "then":
            first, rest = self.parts
            remains = _then(first.after(name), rest)
            return _either(remains, rest.after(name)) if first.may_be_empty else remains
        return NONE

    def first(self) -> set[str]:
        """Return the names with which a matching sequence may begin."""
        if self.kind == "name":
            return {self.name}
        if self.kind == "then" and not self.parts[0].may_be_empty:
            return self.parts[0].first()
        return {name for part in self.parts for name in part.first()}


NONE = Order("none")
EMPTY = Order("empty")


def _then(first: Order, rest: Order) -> Order:
    if NONE in (first, rest):
        return NONE
    if EMPTY in (first, rest):
        return rest if first == EMPTY else first
    return Order("then", parts=(first, rest))


def _either(*parts: Order) -> Order:
    flat = [each for part in parts for each in (part.parts if part.kind == "or" else (part,)) if each != NONE]
    unique = tuple(dict.fromkeys(flat))
    return unique[0] if len(unique) == 1 else Order("or", parts=unique) if unique else NONE


@lru_cache
def read_order(text: str) -> Order:
    """Parse a regular expression over names, such as an `order` of the lifecycle's table, into an `Order`.

    Raises:
        ValueError: a bracket is missing, or an operator is misplaced.
    """
    words = re.findall(r"[a-z_]+|[()|?*+]", text)
    if strange := re.sub(r"[a-z_]+|[()|?*+]|\s", "", text):
        raise ValueError(f"{strange[0]!r} means nothing in {text!r}")

    def either() -> Order:
        parts = [sequence()]
        while words[:1] == ["|"]:
            words.pop(0)
            parts.append(sequence())
        return _either(*parts)

    def sequence() -> Order:
        items = []
        while words and words[0] not in "|)":
            items.append(repeated())
        result = EMPTY
        for item in reversed(items):
            result = _then(item, result)
        return result

    def repeated() -> Order:
        word = words.pop(0)
        if word == "(":
            item = either()
            if words[:1] != [")"]:
                raise ValueError(f"a bracket is missing in {text!r}")
            words.pop(0)
        elif word in "?*+":
            raise ValueError(f"{word!r} repeats nothing in {text!r}")
        else:
            item = Order("name", word)
        while words and words[0] in "?*+":
            sign = words.pop(0)
            many = Order("many", parts=(item,))
            item = _either(item, EMPTY) if sign == "?" else many if sign == "*" else _then(item, many)
        return item

    order = either()
    if words:
        raise ValueError(f"a bracket too many in {text!r}")
    return order


class GrammarChecker:
    """Checks events one by one against the lifecycle: which event may come next, and which fields are available.

    Args:
        orders: for some spans, a regular expression that replaces the lifecycle's order, for example because a host fetches batches
            ahead.
        within: the span in which the sequence begins, such as `train` for a loop that fires no events outside it; by default the
            whole run.

    Raises:
        ConfigError: the lifecycle has no span of a given name.

    Examples:
        >>> checker = GrammarChecker()
        >>> checker.check("on_run_start")
        >>> checker.check("on_train_step_start")
        Traceback (most recent call last):
        callsheet.testing.grammar.GrammarError: event 2, on_train_step_start, cannot come inside run ...
    """

    def __init__(self, *, orders: Mapping[str, str] | None = None, within: str = "") -> None:
        for name in (*(orders or {}), *([within] if within else [])):
            if name not in SPANS:
                raise ConfigError(f"the lifecycle has no span {name!r}{did_you_mean(name, SPANS)}")
        self._orders = {name: read_order(span.order) for name, span in SPANS.items()}
        self._orders |= {name: read_order(order) for name, order in (orders or {}).items()}
        self._open: list[tuple[str, Order]] = [(within, self._orders[within])] if within else [("", read_order("run"))]
        self._base = len(self._open)
        # For each available field: the last event at which it is available, and how many spans were open when it became available.
        self._windows: dict[str, tuple[str, int]] = {}
        self._past = ""
        self._failed = False
        self._count = 0

    def check(self, event: str) -> None:
        """Check that the lifecycle allows `event` as the next event.

        Args:
            event: the name of the event that was fired.

        Raises:
            GrammarError: the event cannot come here; the message says which events could.
            UnknownEventError: no such event.
        """
        as_event(event)
        self._count += 1
        depth = len(self._open)
        name = SPAN_OF.get(event, event)
        self._reject_if(not self._open, event, "the span that the sequence began in is over")
        self._reject_if(self._open[-1][0] == "" and event != "on_run_start", event, "no run is open")
        if event == "on_exception":
            self._reject_if(self._failed, event, "a second exception is fired")
            self._failed = True
        elif self._failed:
            self._reject_if(
                event not in ("on_run_end", "on_checkpoint_published"), event, "after on_exception only the run's end is fired"
            )
            if event == "on_run_end":
                self._open = [("", EMPTY)]  # after an exception, open spans end without their end events, so forget them
        elif event in POINTS:
            if event not in ANYWHERE_EVENTS:
                self._advance(event, name)
        elif event == SPANS[name].start_event:
            self._advance(event, name)
            self._open.append((name, self._orders[name]))
        else:
            span, remains = self._open[-1]
            self._reject_if(span != name, event, f"{span or 'no span'} is open, not {name}")
            self._reject_if(not remains.may_be_empty, event, f"{span} still needs {_list_names(remains)}")
            self._open.pop()
        self._follow_windows(event, depth)

    def readable(self) -> frozenset[str]:
        """Return the fields that callbacks may read at the event that was checked last."""
        return frozenset(ALWAYS_AVAILABLE) | self._windows.keys()

    def finish(self) -> None:
        """Check that the sequence of events may end after the event that was checked last.

        Raises:
            GrammarError: spans are still open.
        """
        if len(self._open) > self._base or (self._open[:1] == [("", read_order("run"))]):
            still = " > ".join(name for name, _ in self._open if name) or "the run, which never started"
            raise GrammarError(f"after {self._count} events there is no end of {still}")

    def _advance(self, event: str, name: str) -> None:
        span, remains = self._open[-1]
        after = remains.after(name)
        self._reject_if(after == NONE, event, f"inside {span or 'nothing'} there could come {_list_names(remains)}")
        self._open[-1] = (span, after)

    def _reject_if(self, wrong: bool, event: str, why: str) -> None:
        if wrong:
            path = " > ".join(name for name, _ in self._open if name) or "nothing"
            raise GrammarError(f"event {self._count}, {event}, cannot come inside {path}: {why}")

    def _follow_windows(self, event: str, depth: int) -> None:
        """Update which fields are available at `event`. `depth` is the number of spans that were open before this event.

        A field's window closes at the latest before the end of the span that contains the window's first event. This matters for
        the last fetch of an epoch: no step follows that would close the windows which begin at this fetch.
        """
        ended = event in SPAN_OF and len(self._open) < depth
        for name, (closes, parent) in list(self._windows.items()):
            if (
                closes == self._past
                or (ended and parent == depth and closes != event)
                or (event == "on_run_end" and closes != event)
            ):
                del self._windows[name]
        self._past = event
        for field in FIELDS.values():
            for opens, closes in field.windows:
                if event == opens:
                    self._windows[field.name] = (closes, min(depth, len(self._open)))


def check_events(events: Iterable[str], *, orders: Mapping[str, str] | None = None, within: str = "") -> None:
    """Check that the lifecycle allows a whole sequence of events.

    Args:
        events: the names of the events, in order.
        orders: for some spans, a regular expression that replaces the lifecycle's order, for example because a host fetches batches
            ahead.
        within: the span in which the sequence begins, such as `train` for a loop that fires no events outside it; by default the
            whole run.

    Raises:
        GrammarError: the lifecycle does not allow the sequence.
        ConfigError: the lifecycle has no span of a given name.
    """
    checker = GrammarChecker(orders=orders, within=within)
    for event in events:
        checker.check(event)
    checker.finish()


def _list_names(order: Order) -> str:
    names = sorted(order.first())
    return ("nothing more" if not names else " or ".join(names)) + (", or its end" if order.may_be_empty and names else "")
