"""The lifecycle driver: it fires all events of the lifecycle in order, for a loop that reports only some of them.

A host reports where its loop is: "a forward begins", "the optimizer has stepped". The driver knows the tree of spans. When a
host reports a span, the driver opens the spans that contain it, fires the events of the spans that come before it, and ends the
spans that must be over by then. So events are fired in lifecycle order, whatever the host leaves out. The spans that the driver
fired although the host did not report them are in `synthesized`, which the host checks.

`start_step`, `end_step`, `step_passes`, `is_read`, `is_loss_read`, `is_passed` and the usual case of `start_and_end` only save time;
see `benchmarks/results/shortcuts.md`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from callsheet.core.context import Context
from callsheet.core.lifecycle import FIELDS, SPANS, names_in
from callsheet.core.spans import Span, Spans

logger = logging.getLogger("callsheet")


def _parents() -> dict[str, str]:
    """Return, for each span, its parent (the span around it). Spans that can have several parents are left out."""
    found: dict[str, set[str]] = {}
    for span in SPANS.values():
        for name in names_in(span.order):
            found.setdefault(name, set()).add(span.name)
    return {name: next(iter(parents)) for name, parents in found.items() if len(parents) == 1 and name in SPANS}


PARENT: Mapping[str, str] = _parents()
"""The parent of each span. Spans that may have several parents, such as an evaluation, are left out."""

SEQUENCE: Mapping[str, tuple[str, ...]] = {
    span.name: tuple(names_in(span.order)) for span in SPANS.values() if re.fullmatch(r"[a-z_]+\+?( [a-z_]+\+?)*", span.order)
}
"""For each span whose inner spans have a fixed order, the names of these inner spans in that order."""

_REPEATED_SPANS = frozenset(name for span in SPANS.values() for name in re.findall(r"([a-z_]+)\+", span.order))
_CLOSING_EVENTS = frozenset(closes for field in FIELDS.values() for _, closes in field.windows) | {
    field.kept_until for field in FIELDS.values()
}

_STEP_GROUPS = (
    ("fetch",),
    ("forward_backward", "microbatch", "forward", "loss", "backward"),
    ("clip_gradients",),
    ("optimizer_step",),
)
"""Groups of the spans in a step, including the fetch. If no span in a group has listeners, the driver leaves out the whole group."""
_BACKWARD_GROUP, _GROUPS_AFTER_BACKWARD = 1, (2, 3)
"""Indices into `_STEP_GROUPS`: the group that contains `backward`, and the two groups after this one."""

_WITHOUT_FUNCTION = frozenset({"on_forward_backward_start", "on_loss_start", "on_loss_end", "on_backward_start"})
"""Events for which `before` must not have a function: if they have no listeners, the driver need not start or end their spans."""

Act = Callable[[], None]


def _raise(error: Exception) -> None:
    raise error


class DrivenSpan:
    """The driver's data about one span, such as the span's place in the lifecycle and whether the span is open now.

    All the data is in one object, because each event of a step reads the data, and attributes are faster than dictionaries.
    """

    __slots__ = (
        *("act_at_end", "before_start", "closes", "done", "index", "is_open", "has_no_listeners", "is_passed", "is_repeated"),
        *("name", "needed", "parent", "sequence", "span"),
    )

    def __init__(self, span: Span, before: Mapping[str, Act]) -> None:
        self.name = name = span.name
        self.span = span
        self.before_start = before.get(SPANS[name].start_event)
        self.act_at_end = before.get(SPANS[name].end_event)
        self.closes = SPANS[name].end_event if SPANS[name].end_event in _CLOSING_EVENTS else None
        self.is_repeated = name in _REPEATED_SPANS
        self.parent: DrivenSpan | None = None
        self.sequence: list[DrivenSpan] = []
        # How many spans at the beginning of `sequence` must have started and ended, with their events, before this span ends.
        self.needed = 0
        self.index = -1  # the position of this span in its parent's `sequence`; -1 if the sequence does not contain it
        self.is_open = self.has_no_listeners = False
        self.is_passed = False  # whether the span is over as soon as it starts: it has no listeners, but its group has
        self.done = 0  # the events of the first `done` spans of `sequence` have been fired


class LifecycleDriver:
    """Tracks how far another framework's loop has come in a run, and fires callsheet's events in lifecycle order.

    Args:
        spans: the spans of the run's context.
        before: for each event, a function that is called just before the event is fired, for example to set the fields that become
            available at this event. The events in `_WITHOUT_FUNCTION` cannot have one.
        step_passes: the function that is called, instead of the function in `before`, at the end of a step without any listener. It
            need not set any field, but must close fields that were set.
        is_recorded: returns whether anything except a handler reads the results of steps, such as metrics records. The result may
            change whenever the call sheet does.
        is_loss_needed: returns whether anything besides handlers and records reads the last step's loss, such as a checkpoint. The
            result may change whenever the call sheet does.
    """

    def __init__(
        self,
        spans: Spans,
        before: Mapping[str, Act],
        step_passes: Act | None = None,
        is_recorded: Callable[[], bool] = lambda: True,
        is_loss_needed: Callable[[], bool] = lambda: True,
    ) -> None:
        if rejected := _WITHOUT_FUNCTION & before.keys():
            raise ValueError(f"`before` must not have a function for {', '.join(sorted(rejected))}")
        self._ctx: Context = spans.ctx
        self._run_spans = spans
        self.spans: Mapping[str, DrivenSpan] = {name: DrivenSpan(getattr(spans, name), before) for name in SPANS}
        """Every span, by its name."""
        driven = self.spans
        for name, parent in PARENT.items():
            driven[name].parent = driven[parent]
        for name, sequence in SEQUENCE.items():
            driven[name].sequence, driven[name].needed = [driven[each] for each in sequence], len(sequence)
            for index, each in enumerate(sequence):
                driven[each].index = index
        self._groups = [[driven[name] for name in names] for names in _STEP_GROUPS]
        self._step, self._step_passes = driven["train_step"], step_passes
        self._epoch, self._fetch = driven["epoch"], driven["fetch"]
        self._forward_backward, self._loss, self._backward = (driven[name] for name in ("forward_backward", "loss", "backward"))
        self._is_recorded, self._is_loss_needed = is_recorded, is_loss_needed
        self.seen_links = -1
        """The version of the table of handlers (`Spans.links`) at the last `listen`."""
        self._open = [driven["run"]]  # the open spans, innermost last; `run`, which `Lifetime` starts and ends, is always first
        driven["run"].is_open = True
        self.has_listeners = False
        """Whether any event of a step had a listener at the last `listen`."""
        self.is_read = True
        """Whether a handler or a metrics record reads the results of steps. Otherwise, steps are only counted."""
        self.is_loss_read = True
        """Whether a handler, a metrics record or a checkpoint reads the last step's loss.

        Otherwise, the host need not compute the loss.
        """
        self._is_early = False  # whether `forward_backward` was started with the step, and the host has not reported it
        self._keeps_fields = False  # whether any callback had fields in `keep_fields` at the last `listen`
        self._warned: set[str] = set()
        self.give_up: Callable[[Exception], None] = _raise
        """A function that the hooks in the model, the optimizer and `backward` call with an error that occurred in the hook.

        The function raises errors that the user must know about.
        """
        self.is_barred: Callable[[str], bool] = lambda name: False
        """A function that returns whether a top-level span, such as an evaluation, must not begin now.

        If so, the spans inside that span must not begin either.
        """
        self.synthesized: set[str] = set()
        """Names of spans that the host did not report, but whose events the driver fired because the host reported a later span."""

    def warn_once(self, message: str) -> None:
        """Log the warning `message`, unless this run has already logged the same warning."""
        if message not in self._warned:
            self._warned.add(message)
            logger.warning("%s", message)

    def is_open(self, name: str) -> bool:
        """Return whether the span has started and has not ended.

        Code that runs in each step reads `spans[name].is_open`, which is faster.
        """
        return self.spans[name].is_open

    @property
    def awaits_backward(self) -> bool:
        """Whether the forward pass of the current microbatch has ended, and its backward pass has not begun."""
        microbatch = self.spans["microbatch"]
        return microbatch.is_open and microbatch.done == self._loss.index + 1

    def listen(self) -> bool:
        """Before a step, find out which of the step's spans (such as `forward`) have no listeners and can be left out.

        The functions in the constructor's argument `before` are called even for these spans.

        Return whether the result has changed since the previous step. Only then must a host install or remove hooks.
        """
        if self.seen_links == self._run_spans.links:
            return False
        has_changed, self.seen_links = self.seen_links < 0, self._run_spans.links
        lack_listeners = [
            all(driven.span.starts is None and driven.span.ends is None for driven in group) for group in self._groups
        ]
        self._keeps_fields = bool(self._ctx.kept)
        # If a handler of a later event reads the outputs of the forward pass, treat the forward pass as having listeners.
        lack_listeners[_BACKWARD_GROUP] &= "outputs" not in self._ctx.kept
        # The start of a later span ends the backward pass. So if the backward pass has listeners, later spans must be reported too.
        for later in _GROUPS_AFTER_BACKWARD:
            lack_listeners[later] &= lack_listeners[_BACKWARD_GROUP]
        step = self._step
        has_listeners = not all(lack_listeners) or step.span.starts is not None or step.span.ends is not None
        is_read = has_listeners or self._is_recorded()
        now = has_listeners, is_read, is_read or self._is_loss_needed()
        has_changed |= now != (self.has_listeners, self.is_read, self.is_loss_read)
        self.has_listeners, self.is_read, self.is_loss_read = now
        for group, has_no_listeners in zip(self._groups, lack_listeners, strict=True):
            if group[0].has_no_listeners is not has_no_listeners:
                has_changed = True
                for driven in group:
                    driven.has_no_listeners = has_no_listeners
        loss = self._loss
        loss.is_passed = loss.span.starts is None and loss.span.ends is None
        # The end of `loss` makes fields unavailable. If `loss` is never open, the start of `backward` does so.
        self._backward.before_start = partial(self._ctx.close, loss.closes) if loss.is_passed and loss.closes else None
        if has_changed:
            step.needed = max((at for at, driven in enumerate(step.sequence, 1) if not driven.has_no_listeners), default=0)
        return has_changed

    def listens_to(self, name: str) -> bool:
        """Return whether the host must observe the step's span `name`. All spans of a group in `_STEP_GROUPS` are treated alike."""
        return not self.spans[name].has_no_listeners

    def start(self, name: str) -> None:
        """Start a span. First start the spans that enclose it, and start and end the earlier spans that the loop has not reported.

        If the span is already open, do nothing. But if the span can be repeated, as a microbatch can, end it and start the next one.
        """
        driven = self.spans[name]
        if driven.has_no_listeners:
            if driven.before_start is not None:
                driven.before_start()
            return
        index, parent = driven.index, driven.parent
        if parent is not None and parent.done == index and parent.is_open:
            # The usual case: the parent is open, and this span is the next one in the parent's sequence.
            while self._open[-1] is not parent:
                self._pop()
            parent.done = index + 1
        elif not self._approach(driven):
            return
        if driven.before_start is not None:
            driven.before_start()
        if driven.is_passed:
            return
        self._open.append(driven)
        driven.is_open, driven.done = True, 0
        span = driven.span
        if span.starts is not None:
            span.fire(span.starts)

    def _approach(self, driven: DrivenSpan) -> bool:
        """Before a span starts, start the spans that contain it, and fire the events of the earlier spans in the same parent.

        Return False if the span cannot start now.
        """
        if driven.is_open and not driven.is_repeated:
            if driven is self._forward_backward:
                self._is_early = False
            return False
        parent = driven.parent
        if (parent is None or parent is self._open[0]) and self.is_barred(driven.name):
            return False
        if parent is None:
            return True
        if not parent.is_open:
            self.start(parent.name)
            if not parent.is_open:
                return False  # the parent cannot start now: a forward pass after `optimizer.step`, for example, is in no training step
        while self._open[-1] is not parent:
            self._pop()
        if (index := driven.index) >= 0:
            if index != parent.done:
                if index < parent.done and not driven.is_repeated:
                    return False  # a span is fired only once, even if, for example, a microbatch has two forward passes
                self._synthesize(parent, index)
            parent.done = index + 1
        elif driven is self._step:
            if not parent.done and not self._fetch.has_no_listeners:
                self.synthesized.add("fetch")
                self.start_and_end("fetch")
            parent.done = 0
        elif driven is self._fetch:
            parent.done = 1  # the data was fetched, so the next step needs no synthesized fetch
        return True

    def end(self, name: str) -> None:
        """End a span, after ending the spans that are open inside this span. If the span is not open, do nothing."""
        driven = self.spans[name]
        if driven.has_no_listeners:
            if driven.act_at_end is not None:
                driven.act_at_end()
        elif driven.is_open:
            while self._open[-1] is not driven:
                self._pop()
            self._pop()

    def start_step(self) -> None:
        """Do the same as `start("train_step")`, but faster if the epoch is open and the batch was fetched."""
        step, epoch = self._step, self._epoch
        if self._open[-1] is not epoch or not (epoch.done or self._fetch.has_no_listeners):
            self.start("train_step")
            return
        epoch.done = 0
        if step.before_start is not None:
            step.before_start()
        self._open.append(step)
        step.is_open, step.done = True, 0
        span = step.span
        if span.starts is not None:
            span.fire(span.starts)
        inner = self._forward_backward
        if not inner.has_no_listeners and inner.span.starts is None:
            # No handler is called when this span starts, and starting it now is faster than with the first microbatch.
            self._open.append(inner)
            inner.is_open, inner.done, step.done = True, 0, 1
            self._is_early = True

    def end_step(self) -> None:
        """Do the same as `end("train_step")`, but faster if no event of the step has listeners.

        If nothing read the step's loss when the step began, and a listener was added since then, the listener is called from the next
        step on, because this step has no loss.
        """
        step, passes = self._step, self._step_passes
        is_read = step.needed or self._keeps_fields or (self.is_loss_read and (step.span.ends is not None or self._ctx.kept))
        if self._open[-1] is not step:
            self.end("train_step")
        elif passes is None or is_read:
            self._pop()
        else:
            passes()
            self._open.pop()
            step.is_open = False

    def start_and_end(self, name: str) -> None:
        """Start a span and end it at once, because the loop is already past it or does nothing in it."""
        driven = self.spans[name]
        parent, span = driven.parent, driven.span
        if parent is not None and parent.done == driven.index and parent.is_open and not driven.sequence:
            # The usual case: the span is the next one in its parent, and contains no other spans.
            while self._open[-1] is not parent:
                self._pop()
            if span.starts is span.ends is None:  # do the same as below, but faster
                parent.done = driven.index + 1
                for act in (driven.before_start, driven.act_at_end):
                    if act is not None:
                        act()
                if driven.closes is not None:
                    self._ctx.close(driven.closes)
                return
        self.start(name)
        self.end(name)

    @property
    def opened(self) -> Sequence[DrivenSpan]:
        """The open spans, innermost last. This is always the same list object, so a caller may keep a reference to the list."""
        return self._open

    @property
    def innermost(self) -> str:
        """The name of the innermost open span."""
        return self._open[-1].name

    def forget(self) -> None:
        """Mark all spans except `run` as ended without firing their end events, because an exception has ended the loop."""
        while len(self._open) > 1:
            self._open.pop().is_open = False

    def _pop(self) -> None:
        driven = self._open[-1]
        if driven.done < driven.needed:
            self._synthesize(driven, driven.needed)
        if driven.act_at_end is not None:
            driven.act_at_end()
        self._open.pop()
        driven.is_open = False
        span = driven.span
        if span.ends is not None:
            span.fire(span.ends)
        if driven.closes is not None:
            self._ctx.close(driven.closes)

    def _synthesize(self, parent: DrivenSpan, until: int) -> None:
        """Fire the start and end of each span in `parent` that comes before position `until` and that the loop did not report.

        For spans without listeners, only call the functions in `before`, because these functions set fields that are read later.
        """
        if self._is_early and parent is self._forward_backward and not parent.done:
            self.synthesized.add(parent.name)  # the host has reported neither this span nor a microbatch
        for driven in parent.sequence[parent.done : until]:
            if not driven.has_no_listeners:
                self.synthesized.add(driven.name)
            self.start_and_end(driven.name)
            parent.done = driven.index + 1
