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


class _Place:
    """One span as a narrator sees it: what is always so of it, and how it is now. The step's path asks this at every edge."""

    __slots__ = (
        *("act_at_end", "act_at_start", "closes", "done", "index", "is_open", "is_quiet", "is_repeated", "name"),
        *("needed", "parent", "sequence", "span"),
    )

    def __init__(self, span: Span, before: Mapping[str, Act]) -> None:
        self.name = name = span.name
        self.span = span
        self.act_at_start = before.get(SPANS[name].start_event)
        self.act_at_end = before.get(SPANS[name].end_event)
        self.closes = SPANS[name].end_event if SPANS[name].end_event in _CLOSING else None
        self.is_repeated = name in _REPEATED
        self.parent: _Place | None = None
        self.sequence: list[_Place] = []
        self.needed = 0  # how many of them have to be told before its end
        self.index: int | None = None  # in the parent's sequence
        self.is_open = self.is_quiet = False
        self.done = 0  # how many of its sequence have been told


class Narrator:
    """Where a loop is in the lifecycle; see the module.

    Args:
        spans: those of the run's context.
        before: by event, what is to be done just before it is told, such as setting the fields whose window opens there.
    """

    def __init__(self, spans: Spans, before: Mapping[str, Act]) -> None:
        self._ctx: Context = spans.ctx
        self._spans = spans
        self._places = places = {name: _Place(getattr(spans, name), before) for name in SPANS}
        for name, parent in PARENT.items():
            places[name].parent = places[parent]
        for name, sequence in SEQUENCE.items():
            places[name].sequence, places[name].needed = [places[each] for each in sequence], len(sequence)
            for index, each in enumerate(sequence):
                places[each].index = index
        self._groups = [[places[name] for name in names] for names in _STEP_GROUPS]
        self._heard_at = -1  # which call sheet it was that was last looked at
        self._open = [places["run"]]  # the innermost last; the run's own edges are told by its lifetime
        places["run"].is_open = True
        self.made_up: set[str] = set()
        """Spans that the host has not spoken of, and that were told as empty because something stands behind them."""

    def is_open(self, name: str) -> bool:
        """Whether the loop is inside such a span."""
        return self._places[name].is_open

    def listen(self) -> bool:
        """Before a step: of its parts, leave out what nobody hears, events and places both; what stands before their edges is done.

        Whether that is other parts than in the step before: only then need a host ask what is heard, and put up its hooks.
        """
        if self._heard_at == self._spans.links:
            return False
        is_news, self._heard_at = self._heard_at < 0, self._spans.links
        for group in self._groups:
            for place in group:
                span = place.span
                if span.starts is not None or span.ends is not None:
                    is_quiet = False
                    break
            else:
                is_quiet = True
            if group[0].is_quiet is not is_quiet:
                is_news = True
                for place in group:
                    place.is_quiet = is_quiet
        if is_news:
            step = self._places["train_step"]
            step.needed = max((at for at, place in enumerate(step.sequence, 1) if not place.is_quiet), default=0)
        return is_news

    def hears(self, name: str) -> bool:
        """Whether anybody hears this part of the step, or another that is left out with it."""
        return not self._places[name].is_quiet

    def start(self, name: str) -> None:
        """The loop enters a span: whatever has to be open around it or told before it is. Nothing where it is open, unless it can stand
        several times in a row: then the next begins."""
        place = self._places[name]
        if place.is_quiet:
            if place.act_at_start is not None:
                place.act_at_start()
            return
        if place.is_open and not place.is_repeated:
            return
        parent = place.parent
        if parent is not None:
            if not parent.is_open:
                self.start(parent.name)
                if not parent.is_open:
                    return  # it is over: a forward, say, behind the optimizer's step
            while self._open[-1] is not parent:
                self._pop()
            if (index := place.index) is not None:
                if index != parent.done:
                    if index < parent.done and not place.is_repeated:
                        return  # told already: a second forward, say, of one microbatch
                    self._make_up(parent, index)
                parent.done = index + 1
        if place.act_at_start is not None:
            place.act_at_start()
        self._open.append(place)
        place.is_open, place.done = True, 0
        if place.span.starts is not None:
            place.span.__enter__()

    def end(self, name: str) -> None:
        """The loop leaves a span, and with it what is open inside; nothing where it is not open."""
        place = self._places[name]
        if place.is_quiet:
            if place.act_at_end is not None:
                place.act_at_end()
        elif place.is_open:
            while self._open[-1] is not place:
                self._pop()
            self._pop()

    def tell(self, name: str) -> None:
        """The loop has been in a span, or is passing it by: both of its edges."""
        place = self._places[name]
        if place.is_quiet:
            if place.act_at_start is not None:
                place.act_at_start()
            if place.act_at_end is not None:
                place.act_at_end()
        else:
            self.start(name)
            self.end(name)

    def forget(self) -> None:
        """The loop was left by an exception: nothing is open any more, and no end is told."""
        while len(self._open) > 1:
            self._open.pop().is_open = False

    def _pop(self) -> None:
        place = self._open[-1]
        if place.done < place.needed:
            self._make_up(place, place.needed)
        if place.act_at_end is not None:
            place.act_at_end()
        self._open.pop()
        place.is_open = False
        if place.span.ends is not None:
            place.span.__exit__(None, None, None)
        if place.closes is not None:
            self._ctx.close(place.closes)

    def _make_up(self, parent: _Place, until: int) -> None:
        """What comes in the innermost span before that place in its sequence, and was not told."""
        for place in parent.sequence[parent.done : until]:
            if not place.is_quiet:
                self.made_up.add(place.name)
                self.start(place.name)
                self._pop()
