"""The lifetime of a run: its end is fired exactly once, however the run ends."""

import logging
import os
from typing import Any

import pytest

from callsheet import Callback, CallbackManager, Context, Outcome, RunInfo
from callsheet.core.lifecycle import ALWAYS_AVAILABLE, FIELDS
from callsheet.errors import ConfigError, RunEndedError
from callsheet.run.lifetime import Lifetime


class Diary(Callback):
    """Records every event, with the fields that are only available at it."""

    def __init__(self) -> None:
        self.recorded: list[tuple[Any, ...]] = []

    def on_event(self, ctx: Context) -> None:
        if ctx.event == "on_exception":
            self.recorded.append(("on_exception", ctx.exception, ctx.span, ctx.step))
        elif ctx.event == "on_run_end":
            self.recorded.append(("on_run_end", ctx.run.outcome))
        else:
            self.recorded.append((str(ctx.event),))


def begun(*callbacks: Callback) -> tuple[CallbackManager, Context, Lifetime]:
    manager = CallbackManager(callbacks)
    ctx = Context(RunInfo("mine"))
    lifetime = Lifetime(manager, ctx)
    with lifetime:
        lifetime.start()
    return manager, ctx, lifetime


def test_a_run_starts_and_ends() -> None:
    diary = Diary()
    _, ctx, lifetime = begun(diary)
    assert diary.recorded == [("on_run_start",)]
    assert [lifetime.has_ended, ctx.run.outcome] == [False, None]
    lifetime.end()
    assert [lifetime.has_ended, ctx.run.outcome] == [True, Outcome.FINISHED]
    assert diary.recorded == [("on_run_start",), ("on_run_end", Outcome.FINISHED)]


def test_on_run_end_is_fired_once_although_end_is_called_twice() -> None:
    diary = Diary()
    _, ctx, lifetime = begun(diary)
    lifetime.end(Outcome.STOPPED)
    lifetime.end(Outcome.FAILED)
    assert diary.recorded[1:] == [("on_run_end", Outcome.STOPPED)]
    assert ctx.run.outcome is Outcome.STOPPED


def test_a_handler_of_on_run_end_may_call_end_again() -> None:
    diary = Diary()
    manager, _, lifetime = begun(diary)
    manager.register("on_run_end", lambda ctx: lifetime.end())
    lifetime.end()
    assert len(diary.recorded) == 2


def test_a_loop_can_set_its_outcome() -> None:
    diary = Diary()
    _, _, lifetime = begun(diary)
    lifetime.outcome = Outcome.PREEMPTED
    lifetime.end()
    assert diary.recorded[-1] == ("on_run_end", Outcome.PREEMPTED)


def test_leaving_the_with_block_without_an_error_does_not_end_the_run() -> None:
    diary = Diary()
    _, _, lifetime = begun(diary)
    for _ in range(2):
        with lifetime, lifetime:
            pass
    assert diary.recorded == [("on_run_start",)]


@pytest.mark.parametrize(
    ("kind", "outcome"),
    [
        (ValueError, Outcome.FAILED),
        (KeyboardInterrupt, Outcome.INTERRUPTED),
        (SystemExit, Outcome.FAILED),
        (GeneratorExit, Outcome.FAILED),
    ],
)
def test_an_exception_is_reported_ends_the_run_and_is_raised(kind: type[BaseException], outcome: Outcome) -> None:
    diary = Diary()
    manager, ctx, lifetime = begun(diary)
    spans = manager.spans(ctx)
    error = kind("x")
    ctx.step = 4
    with pytest.raises(kind) as caught, lifetime, spans.train, spans.forward:
        raise error
    assert caught.value is error
    assert diary.recorded[-2:] == [("on_exception", error, "forward", 4), ("on_run_end", outcome)]
    assert ctx.run.outcome is outcome
    assert lifetime.has_ended


def test_an_exception_outside_every_span_is_reported_with_the_span_run() -> None:
    diary = Diary()
    manager, ctx, lifetime = begun(diary)
    spans = manager.spans(ctx)
    with pytest.raises(KeyError), spans.eval_all:
        raise KeyError  # this error was handled, so its span must not be reported for the next one
    error = ValueError("x")
    with pytest.raises(ValueError, match="x"), lifetime:
        raise error
    assert diary.recorded[-2] == ("on_exception", error, "run", 0)


def test_in_nested_with_blocks_only_the_outermost_ends_the_run() -> None:
    diary = Diary()
    _, _, lifetime = begun(diary)
    with lifetime:
        with pytest.raises(ValueError, match="x"), lifetime:
            raise ValueError("x")
        assert diary.recorded == [("on_run_start",)]
    assert not lifetime.has_ended


def test_an_outcome_that_the_loop_has_set_does_not_hide_a_failure() -> None:
    diary = Diary()
    _, _, lifetime = begun(diary)
    lifetime.outcome = Outcome.STOPPED
    with pytest.raises(ValueError, match="x"), lifetime:
        raise ValueError("x")
    assert diary.recorded[-1] == ("on_run_end", Outcome.FAILED)


def test_on_exception_is_fired_on_the_context_of_the_open_span_with_its_fields() -> None:
    seen: list[tuple[Context, Any]] = []
    manager, ctx, lifetime = begun()
    manager.register("on_exception", lambda ctx: seen.append((ctx, ctx.batch)))
    evaluation = ctx.sibling()
    spans, others = manager.spans(ctx), manager.spans(evaluation)
    evaluation.batch = "the batch"
    with pytest.raises(ValueError, match="x"), lifetime, spans.eval_all, others.eval_step:
        raise ValueError("x")
    assert seen == [(evaluation, "the batch")]


def test_no_field_with_a_window_is_available_at_on_run_end() -> None:
    windowed = [name for name in FIELDS if name not in ALWAYS_AVAILABLE]
    seen: list[list[str]] = []
    manager, ctx, lifetime = begun()
    manager.register("on_run_end", lambda ctx: seen.append([name for name in windowed if ctx.has(name)]))
    spans = manager.spans(ctx)
    ctx.batch, ctx.outputs = 1, 2
    with pytest.raises(ValueError, match="x"), lifetime, spans.train_step:
        raise ValueError("x")
    assert seen == [[]]
    assert not any(ctx.has(name) for name in windowed)


def test_the_exception_and_the_context_do_not_keep_each_other_alive() -> None:
    manager, ctx, lifetime = begun()
    evaluation = ctx.sibling()
    with pytest.raises(ValueError, match="x") as caught, lifetime, manager.spans(evaluation).eval:
        raise ValueError("x")
    assert vars(caught.value) == {}  # catching or pickling it does not keep the model alive
    assert not evaluation.has("exception")


def test_an_exception_that_ends_nested_runs_is_reported_in_each() -> None:
    inner_diary, outer_diary = Diary(), Diary()
    inner_manager, inner_ctx, inner = begun(inner_diary)
    outer_manager, outer_ctx, outer = begun(outer_diary)
    inner_ctx.step, outer_ctx.step = 3, 8
    error = ValueError("x")
    with pytest.raises(ValueError, match="x"), outer, outer_manager.spans(outer_ctx).round:
        with inner, inner_manager.spans(inner_ctx).backward:
            raise error
    assert inner_diary.recorded[-2] == ("on_exception", error, "backward", 3)
    assert outer_diary.recorded[-2] == ("on_exception", error, "round", 8)


def test_entering_a_run_that_has_ended_is_an_error() -> None:
    _, _, lifetime = begun()
    lifetime.end(Outcome.STOPPED)
    with (
        pytest.raises(
            RunEndedError, match=r"the run 'mine' has ended \(stopped\); make a new trainer, with resume= to continue the run"
        ),
        lifetime,
    ):
        pytest.fail("it continued")


def test_an_error_in_on_run_start_ends_the_run() -> None:
    diary = Diary()
    manager = CallbackManager([diary])
    manager.register("on_run_start", lambda ctx: 1 // 0)
    ctx = Context(RunInfo("mine"))
    lifetime = Lifetime(manager, ctx)
    with pytest.raises(ZeroDivisionError) as caught, lifetime:
        lifetime.start()
    assert diary.recorded == [("on_run_start",), ("on_exception", caught.value, "run", 0), ("on_run_end", Outcome.FAILED)]


def test_an_error_in_compiling_the_call_sheet_is_raised_and_no_event_is_fired() -> None:
    diary = Diary()
    manager = CallbackManager([diary])
    manager.register("on_log", lambda ctx: None, every="0.1dur", name="tenth")
    lifetime = Lifetime(manager, Context(RunInfo("mine")))
    with pytest.raises(ConfigError, match=r"tenth .* has no max_duration"), lifetime:
        lifetime.start()
    assert lifetime.has_ended
    assert diary.recorded == []


def test_an_error_while_the_run_ends_does_not_hide_the_first(caplog: pytest.LogCaptureFixture) -> None:
    diary = Diary()
    manager, _, lifetime = begun(diary)
    manager.register("on_exception", lambda ctx: 1 // 0, phase="change")
    manager.register("on_run_end", lambda ctx: ctx.run.config["missing"], phase="change")
    error = ValueError("the first")
    with caplog.at_level(logging.ERROR, "callsheet"), pytest.raises(ValueError, match="the first") as caught, lifetime:
        raise error
    assert caught.value is error
    assert diary.recorded[1:] == [("on_exception", error, "run", 0), ("on_run_end", Outcome.FAILED)]
    notes = error.__notes__
    assert [note.split(": ")[1] for note in notes] == ["ZeroDivisionError", "KeyError"]
    assert len(caplog.records) == 2
    assert lifetime.has_ended


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_interruption_while_the_run_ends_does_not_hide_the_first(kind: type[BaseException]) -> None:
    def leave(ctx: Context) -> None:
        raise kind

    diary = Diary()
    manager, _, lifetime = begun(diary)
    manager.register("on_exception", leave)
    with pytest.raises(ValueError, match="the first"), lifetime:
        raise ValueError("the first")
    assert diary.recorded[-1] == ("on_run_end", Outcome.FAILED)


def test_all_handlers_of_on_run_end_are_called_and_the_first_error_is_raised() -> None:
    diary = Diary()
    manager = CallbackManager()
    manager.register("on_run_end", lambda ctx: 1 // 0)
    manager.add(diary)
    lifetime = Lifetime(manager, Context(RunInfo("mine")))
    lifetime.start()
    with pytest.raises(ZeroDivisionError), lifetime:
        lifetime.end()
    assert diary.recorded == [("on_run_start",), ("on_run_end", Outcome.FINISHED)]  # on_exception is not fired after the end
    lifetime.end()
    assert len(diary.recorded) == 2


def test_a_callback_that_fails_in_a_span_ends_the_run() -> None:
    diary = Diary()
    manager, ctx, lifetime = begun()
    manager.register("on_train_step_end", lambda ctx: 1 // 0)
    manager.add(diary)
    spans = manager.spans(ctx)
    with pytest.raises(ZeroDivisionError) as caught, lifetime, spans.train, spans.train_step:
        pass
    assert diary.recorded == [
        ("on_train_start",),
        ("on_train_step_start",),
        ("on_exception", caught.value, "train_step", 0),
        ("on_run_end", Outcome.FAILED),
    ]


def test_a_manager_can_be_used_for_another_run_afterwards() -> None:
    diary = Diary()
    manager = CallbackManager([diary])
    for _ in range(2):
        lifetime = Lifetime(manager, Context(RunInfo("mine")))
        lifetime.start()
        lifetime.end()
    assert diary.recorded == [("on_run_start",), ("on_run_end", Outcome.FINISHED)] * 2


def test_a_disabled_callback_is_called_again_in_the_next_run() -> None:
    fails = iter([True] * 3)
    recorded: list[int] = []

    def shaky(ctx: Context) -> None:
        if next(fails, False):
            raise ConnectionError
        recorded.append(1)

    manager = CallbackManager()
    manager.register("on_log", shaky, on_error="isolate")
    for _ in range(2):
        ctx = Context(RunInfo("mine"))
        lifetime = Lifetime(manager, ctx)
        lifetime.start()
        for _ in range(3):
            manager.fire("on_log", ctx)
        lifetime.end()
    assert recorded == [1, 1, 1]


def test_on_run_end_is_not_fired_if_the_run_never_started() -> None:
    diary = Diary()
    lifetime = Lifetime(CallbackManager([diary]), Context(RunInfo("mine")))
    with pytest.raises(ValueError, match="x"), lifetime:
        raise ValueError("x")
    lifetime.end()
    assert diary.recorded == []
    assert lifetime.has_ended


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_does_not_end_its_parents_run() -> None:
    diary = Diary()
    _, _, lifetime = begun(diary)
    child = os.fork()
    if not child:
        lifetime.end()
        os._exit(len(diary.recorded) - 1)  # on_run_start was recorded before the fork
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    lifetime.end()
    assert diary.recorded[-1] == ("on_run_end", Outcome.FINISHED)
