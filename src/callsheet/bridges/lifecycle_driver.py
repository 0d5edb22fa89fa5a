"""The narrator: tells the whole lifecycle, in its order, for a loop that says only some of it.

A host says where its loop is: "a forward begins", "the optimizer has stepped". The narrator knows the lifecycle's tree: what has to be
open is opened, what stands before is told, and what is left open inside is ended. So whatever a host leaves out, callbacks hear events in
the lifecycle's order; what had to be made up for that is remembered in `synthesized`, for the host to judge.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence

from callsheet.context import Context
from callsheet.lifecycle import FIELDS, SPANS, names_in
from callsheet.spans import Span, Spans

logger = logging.getLogger("callsheet")


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
_BACKWARD, _BEHIND = 1, (2, 3)

Act = Callable[[], None]


def _raise(error: Exception) -> None:
    raise error


class Part:
    """One span as a narrator sees it: what is always so of it, and how it is now. The step's path asks this at every edge."""

    __slots__ = (
        *("act_at_end", "before_start", "closes", "done", "index", "is_open", "has_no_listeners", "is_repeated", "name"),
        *("needed", "parent", "sequence", "span"),
    )

    def __init__(self, span: Span, before: Mapping[str, Act]) -> None:
        self.name = name = span.name
        self.span = span
        self.before_start = before.get(SPANS[name].start_event)
        self.act_at_end = before.get(SPANS[name].end_event)
        self.closes = SPANS[name].end_event if SPANS[name].end_event in _CLOSING else None
        self.is_repeated = name in _REPEATED
        self.parent: Part | None = None
        self.sequence: list[Part] = []
        self.needed = 0  # how many of them have to be told before its end
        self.index = -1  # in the parent's sequence, where it has one
        self.is_open = self.has_no_listeners = False
        self.done = 0  # how many of its sequence have been told


class LifecycleDriver:
    """Where a loop is in the lifecycle; see the module.

    Args:
        spans: those of the run's context.
        before: by event, what is to be done just before it is told, such as setting the fields whose window opens there.
        step_passes: what is to be done instead where a step ends and nobody has heard or hears anything of it: no field has to be told,
            and those that were set all the same have to be shut.
        is_recorded: whether anybody reads what steps leave behind, such as records; it may change where the call sheet does.
        is_loss_needed: whether anybody will be told the last step's loss all the same, of a checkpoint; it may change there too.
    """

    def __init__(
        self,
        spans: Spans,
        before: Mapping[str, Act],
        step_passes: Act | None = None,
        is_recorded: Callable[[], bool] = lambda: True,
        is_loss_needed: Callable[[], bool] = lambda: True,
    ) -> None:
        self._ctx: Context = spans.ctx
        self._spans = spans
        self.parts: Mapping[str, Part] = {name: Part(getattr(spans, name), before) for name in SPANS}
        """Every span, by its name."""
        parts = self.parts
        for name, parent in PARENT.items():
            parts[name].parent = parts[parent]
        for name, sequence in SEQUENCE.items():
            parts[name].sequence, parts[name].needed = [parts[each] for each in sequence], len(sequence)
            for index, each in enumerate(sequence):
                parts[each].index = index
        self._groups = [[parts[name] for name in names] for names in _STEP_GROUPS]
        self._step, self._step_passes = parts["train_step"], step_passes
        self._epoch, self._fetch = parts["epoch"], parts["fetch"]
        self._is_recorded, self._is_loss_needed = is_recorded, is_loss_needed
        self._heard_at = -1  # which call sheet it was that was last looked at
        self._open = [parts["run"]]  # the innermost last; the run's own edges are told by its lifetime
        parts["run"].is_open = True
        self.has_listeners = False
        """Whether anybody hears anything of a step, by the last `listen`."""
        self.is_read = True
        """Whether anybody does, or reads what steps leave behind: else they need only be counted."""
        self.is_loss_read = True
        """Whether anybody does, or is told the last step's loss of a checkpoint: else no host need find it."""
        self._said: set[str] = set()
        self.give_up: Callable[[Exception], None] = _raise
        """Hooks in the model, the optimizer and `backward` call this with an error of their own. It raises what the user has to know of."""
        self.is_barred: Callable[[str], bool] = lambda name: False
        """Whether a span directly under the run may not begin now; then neither does what stands in it."""
        self.synthesized: set[str] = set()
        """Spans that the host has not spoken of, and that were told as empty because something stands behind them."""

    def say_once(self, message: str) -> None:
        """Log a warning about what the loop does, unless this run has logged it before."""
        if message not in self._said:
            self._said.add(message)
            logger.warning("%s", message)

    def is_open(self, name: str) -> bool:
        """Whether the loop is inside such a span. Where a step asks, its own `part.is_open` is the shorter way."""
        return self.parts[name].is_open

    def listen(self) -> bool:
        """Before a step: of its parts, leave out what nobody hears, events and places both; what stands before their edges is done.

        Whether that is other parts than in the step before: only then need a host ask what is heard, and put up its hooks.
        """
        if self._heard_at == self._spans.links:
            return False
        is_news, self._heard_at = self._heard_at < 0, self._spans.links
        quiet = [all(part.span.starts is None and part.span.ends is None for part in group) for group in self._groups]
        quiet[_BACKWARD] &= "outputs" not in self._ctx.kept  # which somebody reads later
        for behind in _BEHIND:  # these end it, where somebody hears it
            quiet[behind] &= quiet[_BACKWARD]
        step = self._step
        has_listeners = not all(quiet) or step.span.starts is not None or step.span.ends is not None
        is_read = has_listeners or self._is_recorded()
        now = has_listeners, is_read, is_read or self._is_loss_needed()
        is_news |= now != (self.has_listeners, self.is_read, self.is_loss_read)
        self.has_listeners, self.is_read, self.is_loss_read = now
        for group, has_no_listeners in zip(self._groups, quiet, strict=True):
            if group[0].has_no_listeners is not has_no_listeners:
                is_news = True
                for part in group:
                    part.has_no_listeners = has_no_listeners
        if is_news:
            step.needed = max((at for at, part in enumerate(step.sequence, 1) if not part.has_no_listeners), default=0)
        return is_news

    def listens_to(self, name: str) -> bool:
        """Whether anybody hears this part of the step, or another that is left out with it."""
        return not self.parts[name].has_no_listeners

    def start(self, name: str) -> None:
        """The loop enters a span: whatever has to be open around it or told before it is. Nothing where it is open, unless it can stand
        several times in a row: then the next begins."""
        part = self.parts[name]
        if part.has_no_listeners:
            if part.before_start is not None:
                part.before_start()
            return
        if part.is_open and not part.is_repeated:
            return
        parent = part.parent
        if (parent is None or parent is self._open[0]) and self.is_barred(name):
            return
        if parent is not None:
            if not parent.is_open:
                self.start(parent.name)
                if not parent.is_open:
                    return  # it is over: a forward, say, behind the optimizer's step
            while self._open[-1] is not parent:
                self._pop()
            if (index := part.index) >= 0:
                if index != parent.done:
                    if index < parent.done and not part.is_repeated:
                        return  # told already: a second forward, say, of one microbatch
                    self._make_up(parent, index)
                parent.done = index + 1
            elif part is self._step:
                if not parent.done and not self._fetch.has_no_listeners:
                    self.synthesized.add("fetch")
                    self.tell("fetch")
                parent.done = 0
            elif part is self._fetch:
                parent.done = 1  # of an epoch: its next step has a batch
        if part.before_start is not None:
            part.before_start()
        self._open.append(part)
        part.is_open, part.done = True, 0
        if part.span.starts is not None:
            part.span.__enter__()

    def end(self, name: str) -> None:
        """The loop leaves a span, and with it what is open inside; nothing where it is not open."""
        part = self.parts[name]
        if part.has_no_listeners:
            if part.act_at_end is not None:
                part.act_at_end()
        elif part.is_open:
            while self._open[-1] is not part:
                self._pop()
            self._pop()

    def start_step(self) -> None:
        """`start("train_step")`, by a short way where nobody hears that and the epoch has come to it."""
        step, epoch = self._step, self._epoch
        if step.span.starts is not None or self._open[-1] is not epoch or not (epoch.done or self._fetch.has_no_listeners):
            self.start("train_step")
            return
        epoch.done = 0
        if step.before_start is not None:
            step.before_start()
        self._open.append(step)
        step.is_open, step.done = True, 0

    def end_step(self) -> None:
        """`end("train_step")`, by a short way where nobody hears anything of it."""
        step, passes = self._step, self._step_passes
        if passes is None or self._open[-1] is not step or step.needed or step.span.ends is not None or self._ctx.kept:
            self.end("train_step")
        else:
            passes()
            self._open.pop()
            step.is_open = False

    def tell(self, name: str) -> None:
        """The loop has been in a span, or is passing it by: both of its edges."""
        part = self.parts[name]
        if part.has_no_listeners:
            if part.before_start is not None:
                part.before_start()
            if part.act_at_end is not None:
                part.act_at_end()
        else:
            self.start(name)
            self.end(name)

    @property
    def opened(self) -> Sequence[Part]:
        """The open spans, the innermost last: always the same list."""
        return self._open

    @property
    def innermost(self) -> str:
        """The name of the innermost open span."""
        return self._open[-1].name

    def forget(self) -> None:
        """The loop was left by an exception: nothing is open any more, and no end is told."""
        while len(self._open) > 1:
            self._open.pop().is_open = False

    def _pop(self) -> None:
        part = self._open[-1]
        if part.done < part.needed:
            self._make_up(part, part.needed)
        if part.act_at_end is not None:
            part.act_at_end()
        self._open.pop()
        part.is_open = False
        if part.span.ends is not None:
            part.span.__exit__(None, None, None)
        if part.closes is not None:
            self._ctx.close(part.closes)

    def _make_up(self, parent: Part, until: int) -> None:
        """What comes in the innermost span before that part in its sequence, and was not told; of what is left out, what stands before
        its edges is done: fields that are read behind it are set there."""
        for part in parent.sequence[parent.done : until]:
            if not part.has_no_listeners:
                self.synthesized.add(part.name)
            self.tell(part.name)
            parent.done = part.index + 1
