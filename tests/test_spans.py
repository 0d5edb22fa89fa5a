"""Spans: the events at their start and end, and what an exception leaves behind."""

import gc
import weakref
from dataclasses import dataclass
from typing import Any

import pytest

from callsheet import Callback, CallbackManager, Context, Event, RunInfo
from callsheet.core.lifecycle import EVENTS, SPANS
from callsheet.core.spans import HasListeners, Span, take_noted_span


def context() -> Context:
    return Context(RunInfo("test"))


def record_events(manager: CallbackManager, *events: str) -> list[str]:
    """Return a list to which each of the events is appended when it is fired."""
    recorded: list[str] = []
    for event in events:
        manager.register(event, lambda ctx: recorded.append(str(ctx.event)))
    return recorded


@pytest.mark.parametrize("name", SPANS)
def test_every_span_fires_its_start_and_end(name: str) -> None:
    manager = CallbackManager()
    ctx = context()
    recorded: list[str] = []
    manager.register("*", lambda ctx: recorded.append(str(ctx.event)))
    span: Span = getattr(manager.spans(ctx), name)
    with span:
        recorded.append("inside")
    assert recorded == [SPANS[name].start_event, "inside", SPANS[name].end_event]
    assert ctx.event is None


def test_a_span_without_listeners_fires_nothing() -> None:
    manager = CallbackManager()
    ctx = context()
    spans = manager.spans(ctx)
    with spans.train_step as entered:
        assert ctx.event is None
    assert entered is None
    assert spans.train_step.starts is None
    assert spans.train_step.ends is None


def test_a_span_fires_on_its_own_context() -> None:
    manager = CallbackManager()
    seen: list[Context] = []
    manager.register("on_eval_start", seen.append)
    train, evaluation = context(), context()
    spans, others = manager.spans(train), manager.spans(evaluation)
    with others.eval:
        pass
    with spans.eval:
        pass
    assert [ctx is evaluation for ctx in seen] == [True, False]
    assert seen[1] is train


def test_a_span_can_be_entered_inside_itself() -> None:
    manager = CallbackManager()
    recorded = record_events(manager, "on_round_start", "on_round_end")
    spans = manager.spans(context())
    with spans.round:
        with spans.round:
            pass
    assert recorded == ["on_round_start", "on_round_start", "on_round_end", "on_round_end"]


def test_a_callback_added_inside_a_span_receives_its_end() -> None:
    manager = CallbackManager()
    spans = manager.spans(context())
    recorded: list[str] = []
    with spans.epoch:
        recorded = record_events(manager, "on_epoch_start", "on_epoch_end")
    assert recorded == ["on_epoch_end"]


def test_a_callback_removed_inside_a_span_does_not_receive_its_end() -> None:
    manager = CallbackManager()
    recorded: list[str] = []
    function = manager.register("on_epoch_end", lambda ctx: recorded.append("end"))
    spans = manager.spans(context())
    with spans.epoch:
        manager.remove(function)
    assert recorded == []


def test_a_callback_added_at_a_spans_start_receives_the_end_and_not_the_start() -> None:
    manager = CallbackManager()

    class Late(Callback):
        def on_epoch_start(self, ctx: Context) -> None:
            recorded.append("start")

        def on_epoch_end(self, ctx: Context) -> None:
            recorded.append("end")

    recorded: list[str] = []
    manager.register("on_epoch_start", lambda ctx: manager.add(Late()))
    spans = manager.spans(context())
    with spans.epoch:
        pass
    assert recorded == ["end"]


def test_a_callback_added_later_receives_events_of_the_spans_of_every_context() -> None:
    manager = CallbackManager()
    train, evaluation = manager.spans(context()), manager.spans(context())
    recorded = record_events(manager, "on_eval_start")
    for spans in (train, evaluation):
        with spans.eval:
            pass
    assert recorded == ["on_eval_start"] * 2


def test_after_a_span_inside_a_handler_ctx_event_is_the_handler_s_event() -> None:
    manager = CallbackManager()
    ctx = context()
    spans = manager.spans(ctx)
    seen: list[Any] = []

    @manager.register("on_epoch_start")
    def nested(ctx: Context) -> None:
        with spans.eval_all:
            seen.append(ctx.event)
        seen.append(ctx.event)

    manager.register("on_eval_all_end", lambda ctx: seen.append(ctx.event))
    with spans.epoch:
        seen.append(ctx.event)
    assert seen == [Event.EPOCH_START, Event.EVAL_ALL_END, Event.EPOCH_START, None]


def test_no_end_events_are_fired_when_an_exception_leaves_spans() -> None:
    manager = CallbackManager()
    spans = manager.spans(context())
    recorded: list[str] = []
    manager.register("*", lambda ctx: recorded.append(str(ctx.event)))
    error = ValueError("x")
    with pytest.raises(ValueError, match="x") as caught, spans.train, spans.epoch:
        raise error
    assert caught.value is error
    assert recorded == ["on_train_start", "on_epoch_start"]


def test_an_exception_has_its_innermost_span_and_context_also_without_listeners() -> None:
    manager = CallbackManager()
    train, evaluation = context(), context()
    spans, others = manager.spans(train), manager.spans(evaluation)
    error = ValueError("x")
    with pytest.raises(ValueError, match="x"), spans.train, spans.epoch, others.eval_step:
        raise error
    assert take_noted_span(error) == ("eval_step", evaluation)
    assert take_noted_span(error) is None


def test_an_exception_that_left_no_span_has_no_span() -> None:
    assert take_noted_span(ValueError("x")) is None


def test_an_exception_raised_from_a_handled_one_has_its_own_span() -> None:
    manager = CallbackManager()
    ctx = context()
    spans = manager.spans(ctx)
    first, second = KeyError("x"), ValueError("x")
    with pytest.raises(KeyError), spans.train, spans.fetch:
        raise first
    with pytest.raises(ValueError, match="x"), spans.train:
        raise second from first
    assert take_noted_span(second) == ("train", ctx)
    assert take_noted_span(first) == ("fetch", ctx)


def test_an_immutable_exception_is_raised_unchanged_and_has_its_span() -> None:
    @dataclass(frozen=True)
    class Frozen(Exception):
        value: int

    manager = CallbackManager()
    ctx = context()
    error = Frozen(1)
    with pytest.raises(Frozen) as caught, manager.spans(ctx).backward:
        raise error
    assert caught.value is error
    assert take_noted_span(error) == ("backward", ctx)


def test_an_error_in_a_handler_has_the_span_of_its_event() -> None:
    for event in ("on_forward_start", "on_forward_end"):
        manager = CallbackManager()
        ctx = context()
        recorded = record_events(manager, "on_train_step_end")
        manager.register(event, lambda ctx: 1 // 0)
        spans = manager.spans(ctx)
        with pytest.raises(ZeroDivisionError) as caught, spans.train_step, spans.forward:
            pass
        assert take_noted_span(caught.value) == ("forward", ctx)
        assert f" at {event}, step 0, rank 0" in caught.value.__notes__[0]
        assert len(caught.value.__notes__) == 1
        assert recorded == []
        assert ctx.event is None


def test_after_an_error_in_a_handler_report_handlers_are_called() -> None:
    manager = CallbackManager()
    recorded: list[str] = []
    manager.register("on_train_step_end", lambda ctx: 1 // 0, phase="decide")
    manager.register("on_train_step_end", lambda ctx: recorded.append("save"), phase="save")
    manager.register("on_train_step_end", lambda ctx: recorded.append("report"), phase="report")
    with pytest.raises(ZeroDivisionError), manager.spans(context()).train_step:
        pass
    assert recorded == ["report"]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_every_kind_of_exception_has_its_span_and_is_raised(kind: type[BaseException]) -> None:
    manager = CallbackManager()
    ctx = context()
    error = kind("x")
    with pytest.raises(kind) as caught, manager.spans(ctx).backward:
        raise error
    assert caught.value is error
    assert take_noted_span(error) == ("backward", ctx)


def test_a_handled_exception_is_not_kept_alive() -> None:
    class Held(Exception):
        pass

    manager = CallbackManager()
    spans = manager.spans(context())

    def step() -> "weakref.ref[Held]":
        try:
            with spans.train_step:
                raise Held
        except Held as error:
            return weakref.ref(error)

    held = step()
    with spans.train_step:  # the loop continues
        pass
    gc.collect()
    assert held() is None


def test_the_contexts_of_a_closed_run_are_not_kept_alive() -> None:
    manager = CallbackManager()
    ctx = context()
    manager.open(ctx)
    manager.spans(ctx)
    manager.spans(evaluation := ctx.sibling())
    kept = [weakref.ref(ctx), weakref.ref(evaluation)]
    del ctx, evaluation
    manager.close()
    gc.collect()
    assert [each() for each in kept] == [None, None]


def test_a_single_span_that_is_kept_fires_to_callbacks_added_later() -> None:
    manager = CallbackManager()
    step = manager.spans(context()).train_step
    gc.collect()
    recorded = record_events(manager, "on_train_step_end")
    with step:
        pass
    assert recorded == ["on_train_step_end"]


def test_the_spans_of_a_closed_run_do_not_fire_to_callbacks_added_later() -> None:
    manager = CallbackManager()
    spans = manager.spans(context())
    manager.close()
    recorded = record_events(manager, "on_train_step_end")
    with spans.train_step:
        pass
    assert recorded == []


def test_spans_have_only_the_names_of_the_lifecycle() -> None:
    spans: Any = CallbackManager().spans(context())
    with pytest.raises(AttributeError):
        _ = spans.train_stepp
    assert all(getattr(spans, name).name == name for name in SPANS)


def test_has_listeners_is_false_for_every_event_without_listeners() -> None:
    received = HasListeners()
    assert not any(getattr(received, event) for event in EVENTS)
    manager = CallbackManager()
    spans = manager.spans(context())
    record_events(manager, "on_log", "on_train_end")
    assert {event for event in EVENTS if getattr(manager.has_listeners, event)} == {"on_log", "on_train_end"}
    assert spans is not None
