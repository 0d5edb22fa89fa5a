"""The narrator: tells the whole lifecycle, in its order, for a loop that says only some of it.

A host says where its loop is: "a forward begins", "the optimizer has stepped". The narrator knows the lifecycle's tree: what has to be
open is opened, what stands before is told, and what is left open inside is ended. So whatever a host leaves out, callbacks hear events in
the lifecycle's order; what had to be made up for that is remembered in `made_up`, for the host to judge.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from callsheet.context import Context
from callsheet.lifecycle import FIELDS, SPANS, names_in
from callsheet.spans import Span, Spans


def _parents() -> dict[str, str]:
    """The span that each stands in; those that may stand in several are not in it."""
    found: dict[str, set[str]] = {}
    for span in SPANS.values():
        for name in names_in(span.order):
            found.setdefault(name, set()).add(span.name)
    return {name: next(iter(parents)) for name, parents in found.items() if len(parents) == 1 and name in SPANS}


PARENT: Mapping[str, str] = _parents()
"""The span that each span stands in, but for those that may stand in several, such as an evaluation."""

SEQUENCE: Mapping[str, tuple[str, ...]] = {
    span.name: tuple(names_in(span.order)) for span in SPANS.values() if re.fullmatch(r"[a-z_]+\+?( [a-z_]+\+?)*", span.order)
}
"""The spans that must stand in a span, in their order, for those that leave no choice."""

_REPEATED = frozenset(name for span in SPANS.values() for name in re.findall(r"([a-z_]+)\+", span.order))
_CLOSING = frozenset(closes for field in FIELDS.values() for _, closes in field.windows) | {
    field.kept_until for field in FIELDS.values()
}

_STEP_GROUPS = (
    ("fetch",),
    ("forward_backward", "microbatch", "forward", "loss", "backward"),
    ("clip_gradients",),
    ("optimizer_step",),
)
"""What stands in a step or before it, by what can be left out together where nobody hears it."""

Act = Callable[[], None]


class Narrator:
    """Where a loop is in the lifecycle; see the module.

    Args:
        spans: those of the run's context.
        before: by event, what is to be done just before it is told, such as setting the fields whose window opens there.
    """

    def __init__(self, spans: Spans, before: Mapping[str, Act]) -> None:
        self._ctx: Context = spans.ctx
        self._spans: dict[str, Span] = {name: getattr(spans, name) for name in SPANS}
        self._at_start = {name: before.get(span.start_event) for name, span in SPANS.items()}
        self._at_end = {name: before.get(span.end_event) for name, span in SPANS.items()}
        self._groups = [(names, [self._spans[name] for name in names]) for names in _STEP_GROUPS]
        self._quiet: frozenset[str] = frozenset()
        self._open = ["run"]  # the innermost last; the run's own edges are told by its lifetime
        self._done = [0]  # for each of them, how many of its sequence have been told
        self.made_up: set[str] = set()
        """Spans that the host has not spoken of, and that were told as empty because something stands behind them."""

    def is_open(self, name: str) -> bool:
        """Whether the loop is inside such a span."""
        return name in self._open

    def listen(self) -> None:
        """Before a step: of its parts, leave out what nobody hears, events and places both; what stands before their edges is done."""
        quiet: tuple[str, ...] = ()
        for names, spans in self._groups:
            for span in spans:
                if span.starts is not None or span.ends is not None:
                    break
            else:
                quiet += names
        if len(quiet) != len(self._quiet) or not self._quiet.issuperset(quiet):
            self._quiet = frozenset(quiet)

    def hears(self, name: str) -> bool:
        """Whether anybody hears this part of the step, or another that is left out with it."""
        return name not in self._quiet

    def start(self, name: str) -> None:
        """The loop enters a span: whatever has to be open around it or told before it is. Nothing where it is open, unless it can stand
        several times in a row: then the next begins."""
        if name in self._quiet:
            if (act := self._at_start[name]) is not None:
                act()
            return
        if name in self._open and name not in _REPEATED:
            return
        parent = PARENT.get(name)
        if parent is not None:
            if self._open[-1] != parent:
                self._arrive(parent)
            sequence = SEQUENCE.get(parent)
            if sequence is not None:
                place, done = sequence.index(name), self._done[-1]
                if place < done and name not in _REPEATED:
                    return  # told already: a second forward, say, of one microbatch
                for missing in sequence[done:place]:
                    self._make_up(missing)
                self._done[-1] = place + 1
        self._push(name)

    def end(self, name: str) -> None:
        """The loop leaves a span, and with it what is open inside; nothing where it is not open."""
        if name in self._quiet:
            if (act := self._at_end[name]) is not None:
                act()
            return
        if name in self._open:
            while self._open[-1] != name:
                self._pop()
            self._pop()

    def forget(self) -> None:
        """The loop was left by an exception: nothing is open any more, and no end is told."""
        del self._open[1:], self._done[1:]

    def _arrive(self, name: str) -> None:
        """Make `name` the innermost span."""
        if name in self._open:
            while self._open[-1] != name:
                self._pop()
        else:
            self.start(name)

    def _push(self, name: str) -> None:
        if (act := self._at_start[name]) is not None:
            act()
        self._open.append(name)
        self._done.append(0)
        self._spans[name].__enter__()

    def _pop(self) -> None:
        name = self._open[-1]
        sequence = SEQUENCE.get(name)
        if sequence is not None:
            for missing in sequence[self._done[-1] :]:
                self._make_up(missing)
        event = SPANS[name].end_event
        if (act := self._at_end[name]) is not None:
            act()
        self._open.pop()
        self._done.pop()
        self._spans[name].__exit__(None, None, None)
        if event in _CLOSING:
            self._ctx.close(event)

    def _make_up(self, name: str) -> None:
        self._done[-1] += 1
        if name in self._quiet:
            return
        self.made_up.add(name)
        self._push(name)
        self._pop()
