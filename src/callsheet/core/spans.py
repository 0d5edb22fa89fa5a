"""Spans (named parts of a run, such as `epoch`): context managers that fire the start and end event of a span.

With spans, the code of a loop shows the order of the lifecycle.

    with spans.train_step:
        ...

A span whose events have no handlers does nothing, except that it notes its name on an exception that leaves it. Handlers are
looked up when an event is fired, so a callback that is added inside a span is called at the span's end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import TracebackType

from callsheet.core.call_sheet import CompiledEvent, Dispatcher, recover
from callsheet.core.context import Context
from callsheet.core.lifecycle import EVENTS, SPANS


def note_span(error: BaseException, span: str, ctx: Context) -> None:
    """Store on `error` the span (part of the run) in which `error` was raised. If an inner span was stored before, do nothing."""
    error.__dict__.setdefault("_callsheet_span", (span, ctx))  # setattr would fail if the exception is a frozen dataclass


def take_noted_span(error: BaseException) -> tuple[str, Context] | None:
    """Return what `note_span` stored on `error` (the innermost span and the loop's context), and remove it from `error`.

    The removal has three effects: the error does not keep the model alive, it can be pickled, and an outer run can note its
    own span.
    """
    noted: tuple[str, Context] | None = error.__dict__.pop("_callsheet_span", None)
    return noted


class Span:
    """A context manager that fires the start event and the end event of one span."""

    __slots__ = ("_ctx", "_dispatcher", "ends", "name", "starts")

    def __init__(self, name: str, ctx: Context, dispatcher: Dispatcher) -> None:
        self.name = name
        self.starts: CompiledEvent | None = None
        self.ends: CompiledEvent | None = None
        self._ctx = ctx
        self._dispatcher = dispatcher

    def __enter__(self) -> None:
        if self.starts is not None:
            self.fire(self.starts)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None) -> None:
        if error is not None:
            note_span(error, self.name, self._ctx)
        elif self.ends is not None:
            self.fire(self.ends)

    def fire(self, compiled: CompiledEvent) -> None:
        """Call the handlers of one event of the span: of its start (pass `self.starts`) or of its end (pass `self.ends`).

        The code repeats the body of `CallbackManager.fire` to save one call per event.
        """
        first, second, more, event, _ = compiled
        ctx, dispatcher = self._ctx, self._dispatcher
        outer, dispatcher.current = dispatcher.current, event
        handler = first
        try:
            first(ctx)  # type: ignore[misc]  # `link` stores only compiled events that have a handler
            if second is not None:
                handler = second
                second(ctx)
                while more is not None:
                    handler, fourth, fifth, more = more
                    handler(ctx)
                    if fourth is not None:
                        handler = fourth
                        fourth(ctx)
                        if fifth is not None:
                            handler = fifth
                            fifth(ctx)
        except BaseException as error:
            note_span(error, self.name, ctx)
            try:
                recover(compiled, handler, error, ctx)  # type: ignore[arg-type]
            finally:
                dispatcher.current = outer
        dispatcher.current = outer


_EDGES_OF_EVENT: dict[str, tuple[tuple[str, str], ...]] = {}
"""For every start or end event, the name of its span, and the attribute of `Span` that holds the compiled event."""
for _span in SPANS.values():
    for _event, _side in ((_span.start_event, "starts"), (_span.end_event, "ends")):
        _EDGES_OF_EVENT[_event] = (*_EDGES_OF_EVENT.get(_event, ()), (_span.name, _side))


class Spans:
    """A context manager for each span of a run: `with spans.epoch:` fires `on_epoch_start` and `on_epoch_end`."""

    __slots__ = ("_edges", "ctx", "links", *SPANS)

    ctx: Context
    links: int
    # generated: spans
    run: Span
    checkpoint_load: Span
    data_init: Span
    train: Span
    round: Span
    epoch: Span
    fetch: Span
    train_step: Span
    forward_backward: Span
    microbatch: Span
    forward: Span
    loss: Span
    backward: Span
    clip_gradients: Span
    optimizer_step: Span
    eval_all: Span
    eval: Span
    eval_step: Span
    eval_forward: Span
    test: Span
    test_step: Span
    test_forward: Span
    predict: Span
    predict_step: Span
    predict_forward: Span
    checkpoint_save: Span
    # end of generated: spans

    def __init__(self, ctx: Context, dispatcher: Dispatcher) -> None:
        self.ctx = ctx
        ctx.dispatcher = dispatcher
        self.links = 0
        """How many times `link` was called. A loop compares this number with an earlier one to detect that handlers have changed."""
        for name in SPANS:
            setattr(self, name, Span(name, ctx, dispatcher))
        self._edges = {event: [(getattr(self, name), side) for name, side in _EDGES_OF_EVENT.get(event, ())] for event in EVENTS}

    def link(self, table: Mapping[str, CompiledEvent], events: Iterable[str]) -> None:
        """Copy the compiled handlers of each of these events from `table` to the span that fires the event."""
        self.links += 1
        for event in events:
            compiled = table[event]
            handlers = compiled if compiled[0] is not None else None
            for span, side in self._edges[event]:
                setattr(span, side, handlers)


class HasListeners:
    """Boolean attributes named after the events: `has_listeners.on_log` says whether `on_log` has a handler.

    `if has_listeners.on_log:` costs no more than reading a flag.
    """

    __slots__ = EVENTS

    # generated: has-listeners
    on_run_start: bool
    on_checkpoint_load_start: bool
    on_checkpoint_load_end: bool
    on_data_init_start: bool
    on_data_init_end: bool
    on_train_start: bool
    on_round_start: bool
    on_epoch_start: bool
    on_fetch_start: bool
    on_fetch_end: bool
    on_train_step_start: bool
    on_forward_backward_start: bool
    on_microbatch_start: bool
    on_forward_start: bool
    on_forward_end: bool
    on_loss_start: bool
    on_loss_end: bool
    on_backward_start: bool
    on_backward_end: bool
    on_microbatch_end: bool
    on_forward_backward_end: bool
    on_clip_gradients_start: bool
    on_clip_gradients_end: bool
    on_optimizer_step_start: bool
    on_optimizer_step_end: bool
    on_train_step_end: bool
    on_log: bool
    on_eval_all_start: bool
    on_eval_start: bool
    on_eval_step_start: bool
    on_eval_forward_start: bool
    on_eval_forward_end: bool
    on_eval_step_end: bool
    on_eval_end: bool
    on_eval_all_end: bool
    on_checkpoint_due: bool
    on_checkpoint_save_start: bool
    on_checkpoint_save_end: bool
    on_epoch_end: bool
    on_round_end: bool
    on_train_end: bool
    on_test_start: bool
    on_test_step_start: bool
    on_test_forward_start: bool
    on_test_forward_end: bool
    on_test_step_end: bool
    on_test_end: bool
    on_predict_start: bool
    on_predict_step_start: bool
    on_predict_forward_start: bool
    on_predict_forward_end: bool
    on_predict_step_end: bool
    on_predict_end: bool
    on_checkpoint_published: bool
    on_preempt: bool
    on_exception: bool
    on_run_end: bool
    # end of generated: has-listeners

    def __init__(self) -> None:
        for event in EVENTS:
            setattr(self, event, False)

    def link(self, table: Mapping[str, CompiledEvent], events: Iterable[str]) -> None:
        """For each of these events, set the attribute of that name: True if `table` now contains a handler, otherwise False."""
        for event in events:
            setattr(self, event, table[event][0] is not None)
