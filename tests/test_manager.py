"""The manager: which handlers are called, changes while an event is fired, and what a resume restores."""

import logging
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from callsheet import Callback, CallbackManager, Context, Event, RunInfo, normalize_callbacks, rank_zero_only, should_fire
from callsheet.core.callback import label_of
from callsheet.core.lifecycle import EVENTS
from callsheet.core.ranks import Ranks
from callsheet.errors import ConfigError, NotACallbackError, RegistrationError, RequestRejected, UnknownEventError


def context(ranks: Ranks | None = None) -> Context:
    return Context(RunInfo("test", ranks=ranks or Ranks()))


class Notes(Callback):
    """Records its events."""

    def __init__(self, recorded: list[str], mark: str = "") -> None:
        self.recorded = recorded
        self.mark = mark

    def on_train_step_end(self, ctx: Context) -> None:
        self.recorded.append(f"{self.mark}end")

    def on_log(self, ctx: Context) -> None:
        self.recorded.append(f"{self.mark}log")


class OtherNotes(Notes):
    pass


class Keeps(Callback):
    def __init__(self, value: int = 0) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.value = state["value"]


class DoesNothing(Callback):
    def on_log(self, ctx: Context) -> None: ...


# --- firing events ---


def test_fire_calls_in_the_order_of_addition_with_the_context() -> None:
    recorded: list[str] = []
    manager = CallbackManager([Notes(recorded, "a "), Notes(recorded, "b ")])
    ctx = context()
    seen: list[Context] = []
    manager.register("on_log", seen.append)
    manager.fire("on_log", ctx)
    manager.fire(Event.TRAIN_STEP_END, ctx)
    assert recorded == ["a log", "b log", "a end", "b end"]
    assert seen == [ctx]


def test_fire_rejects_an_unknown_event() -> None:
    with pytest.raises(UnknownEventError, match=r"unknown event 'on_lgo'; did you mean 'on_log'\?"):
        CallbackManager().fire("on_lgo", context())


def test_ctx_event_is_set_while_an_event_is_fired_and_none_afterwards() -> None:
    ctx = context()
    seen: list[Any] = []
    manager = CallbackManager()
    manager.register("on_log", lambda ctx: seen.append(ctx.event))
    manager.fire("on_log", ctx)
    assert seen == [Event.LOG]
    assert seen[0] is Event.LOG
    assert ctx.event is None


def test_after_a_nested_event_ctx_event_is_the_outer_one() -> None:
    ctx = context()
    seen: list[Any] = []
    manager = CallbackManager()

    @manager.register("on_log")
    def outer(ctx: Context) -> None:
        manager.fire("on_preempt", ctx)
        seen.append(ctx.event)

    manager.register("on_preempt", lambda ctx: seen.append(ctx.event))
    manager.register("on_log", lambda ctx: seen.append(ctx.event))
    manager.fire("on_log", ctx)
    assert seen == [Event.PREEMPT, Event.LOG, Event.LOG]
    assert ctx.event is None


def test_after_a_nested_event_that_failed_ctx_event_is_the_outer_one() -> None:
    ctx = context()
    seen: list[Any] = []
    manager = CallbackManager()

    @manager.register("on_log")
    def outer(ctx: Context) -> None:
        with pytest.raises(ZeroDivisionError):
            manager.fire("on_preempt", ctx)
        seen.append(ctx.event)

    manager.register("on_preempt", lambda ctx: 1 // 0)
    manager.fire("on_log", ctx)
    assert seen == [Event.LOG]
    manager.remove(outer)
    with pytest.raises(ZeroDivisionError):
        manager.fire("on_preempt", ctx)
    assert ctx.event is None


def test_callbacks_added_or_removed_during_an_event_take_effect_at_the_next_event() -> None:
    recorded: list[str] = []
    manager = CallbackManager()
    ctx = context()
    leaving, coming = Notes(recorded, "leaving "), Notes(recorded, "coming ")

    @manager.register("on_log")
    def change(ctx: Context) -> None:
        if leaving in manager.callbacks:
            manager.remove(leaving)
            manager.add(coming)

    manager.add(leaving)
    manager.fire("on_log", ctx)
    assert recorded == ["leaving log"]
    manager.fire("on_log", ctx)
    assert recorded == ["leaving log", "coming log"]


def test_a_handler_may_remove_itself() -> None:
    manager = CallbackManager()
    recorded: list[str] = []

    @manager.register("on_log")
    def once(ctx: Context) -> None:
        recorded.append("once")
        manager.remove(once)

    manager.register("on_log", lambda ctx: recorded.append("always"))
    manager.fire("on_log", context())
    manager.fire("on_log", context())
    assert recorded == ["once", "always", "always"]


def test_a_handler_registered_by_an_outer_handler_is_called_for_the_nested_event() -> None:
    manager = CallbackManager()
    recorded: list[str] = []

    @manager.register("on_log")
    def outer(ctx: Context) -> None:
        manager.register("on_preempt", lambda ctx: recorded.append("nested"))
        manager.fire("on_preempt", ctx)

    manager.fire("on_log", context())
    assert recorded == ["nested"]


def test_a_function_registered_for_star_is_called_for_every_event() -> None:
    manager = CallbackManager()
    ctx = context()
    seen: list[Any] = []
    manager.register("*", lambda ctx: seen.append(ctx.event))
    for event in EVENTS:
        manager.fire(event, ctx)
    assert seen == list(EVENTS)


def test_on_event_is_called_for_every_event() -> None:
    class All(Callback):
        def on_event(self, ctx: Context) -> None:
            seen.append(ctx.event)

    ctx = context()
    seen: list[Any] = []
    manager = CallbackManager([All()])
    for event in EVENTS:
        manager.fire(event, ctx)
    assert seen == list(EVENTS)


# --- adding, registering, removing ---


def test_several_callbacks_are_added_together_or_not_at_all() -> None:
    manager = CallbackManager()
    with pytest.raises(NotACallbackError):
        manager.add([DoesNothing(), 3])  # type: ignore[list-item]
    assert manager.callbacks == []
    assert not manager.has_callbacks("on_log")

    def two() -> Iterator[Callback]:
        yield Notes([])
        yield DoesNothing()

    manager.add(two())
    assert [label_of(callback) for callback in manager.callbacks] == ["Notes", "DoesNothing"]


def test_adding_an_instance_twice_is_rejected() -> None:
    does_nothing = DoesNothing()
    with pytest.raises(
        RegistrationError, match=r"DoesNothing \(test_manager\.py:\d+\) is on the call sheet already; add each instance once"
    ):
        CallbackManager([does_nothing, does_nothing])
    manager = CallbackManager([does_nothing])
    with pytest.raises(RegistrationError, match="add each instance once"):
        manager.add(does_nothing)
    manager.add(DoesNothing())
    assert len(manager.list_callbacks("on_log")) == 2


def test_register_returns_the_function_and_works_as_a_decorator() -> None:
    manager = CallbackManager()

    def plain(ctx: Context) -> None: ...

    assert manager.register("on_log", plain) is plain

    @manager.register("on_train_end", name="last", phase="report")
    def decorated(ctx: Context) -> None: ...

    assert manager.list_callbacks("on_log") == [plain]
    assert manager.list_callbacks("on_train_end") == [decorated]
    assert manager.call_sheet().rows()[1][:3] == ("on_train_end", "report", "last")


def test_handlers_are_listed_in_the_order_of_registration_and_addition() -> None:
    manager = CallbackManager()
    one, two = DoesNothing(), DoesNothing()

    def between(ctx: Context) -> None: ...

    manager.add(one)
    manager.register("on_log", between)
    manager.add(two)
    assert manager.list_callbacks("on_log") == [one, between, two]
    assert manager.callbacks == [one, two]


def test_remove_takes_an_instance_a_class_or_a_function() -> None:
    recorded: list[str] = []
    first, second, other, does_nothing = Notes(recorded), Notes(recorded), OtherNotes(recorded), DoesNothing()
    manager = CallbackManager([first, second, other, does_nothing])

    @manager.register("*")
    def function(ctx: Context) -> None: ...

    assert manager.remove(first) == 1
    assert manager.callbacks == [second, other, does_nothing]
    assert manager.remove(Notes) == 2  # also instances of subclasses
    assert manager.callbacks == [does_nothing]
    assert manager.list_callbacks("on_train_step_end") == [function]
    assert manager.remove(function) == 1
    assert manager.remove(DoesNothing) == 1
    assert manager.call_sheet().rows() == []
    assert not manager.has_callbacks("on_log")
    manager.fire("on_log", context())
    assert recorded == []


def test_a_bound_method_can_be_removed() -> None:
    recorded: list[Any] = []
    manager = CallbackManager()
    manager.register("on_log", recorded.append)
    assert manager.remove(recorded.append) == 1


def test_a_gated_function_can_be_removed() -> None:
    manager = CallbackManager()

    @manager.register("on_log")
    @rank_zero_only
    def gated(ctx: Context) -> None: ...

    assert manager.remove(gated) == 1
    assert not manager.has_callbacks("on_log")


def test_removing_an_unknown_callback_lists_the_known_ones() -> None:
    with pytest.raises(RegistrationError, match="is not on the call sheet, which holds nothing"):
        CallbackManager().remove(DoesNothing)
    with pytest.raises(RegistrationError, match="is not on the call sheet, which holds Notes, Keeps"):
        CallbackManager([Notes([]), Keeps()]).remove(DoesNothing)


def test_remove_compares_instances_by_identity() -> None:
    @dataclass
    class Pair(Callback):
        size: int

        def on_log(self, ctx: Context) -> None: ...

    one, other = Pair(1), Pair(1)
    manager = CallbackManager([one, other])
    assert manager.remove(other) == 1
    assert len(manager.callbacks) == 1
    assert manager.callbacks[0] is one


def test_returned_lists_are_copies() -> None:
    manager = CallbackManager([DoesNothing()])
    manager.list_callbacks("on_log").clear()
    manager.callbacks.clear()
    assert len(manager.callbacks) == 1
    assert manager.has_callbacks("on_log")


def test_events_has_all_events_and_queries_reject_unknown_ones() -> None:
    manager = CallbackManager()
    assert manager.events == frozenset(EVENTS)
    for ask in (manager.has_callbacks, manager.list_callbacks, lambda event: should_fire(manager, event)):
        with pytest.raises(UnknownEventError, match="unknown event 'on_lgo'"):
            ask("on_lgo")


# --- lanes ---


class InBackground(Callback):
    lane = "background"

    def __init__(self) -> None:
        self.received: list[int] = []

    def on_log(self, ctx: Context) -> None:
        self.received.append(ctx.step)


def test_a_callback_in_a_lane_receives_all_events() -> None:
    in_lane, ctx = InBackground(), context()
    manager = CallbackManager([in_lane])
    manager.open(ctx)
    for ctx.step in (1, 2, 3):
        manager.fire("on_log", ctx)
    manager.close()
    assert in_lane.received == [1, 2, 3]


def test_a_callback_in_a_lane_receives_no_events_on_other_ranks() -> None:
    in_lane, ctx = InBackground(), context(Ranks(rank=0, world_size=2))
    in_lane.ranks = {1}
    manager = CallbackManager([in_lane])
    manager.open(ctx)
    assert not manager.has_callbacks("on_log")
    manager.fire("on_log", ctx)
    manager.close()
    assert in_lane.received == []


def test_a_callback_that_is_rejected_during_a_run_is_not_added() -> None:
    manager = CallbackManager()
    ctx = context()
    manager.open(ctx)
    with pytest.raises(ConfigError, match="has no max_duration"):
        manager.register("on_log", lambda ctx: None, every="0.1dur")
    assert manager.call_sheet().rows() == []
    manager.fire("on_log", ctx)


def test_after_a_rejected_run_gates_use_the_rank_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)

    def tenth(ctx: Context) -> None: ...

    manager = CallbackManager()
    manager.register("on_log", tenth, every="0.1dur")
    with pytest.raises(ConfigError, match="this run has no max_duration"):
        manager.open(context(Ranks(rank=1, world_size=2)))
    manager.register("on_train_end", lambda ctx: None, ranks="zero")
    manager.remove(tenth)
    assert manager.has_callbacks("on_train_end")  # by this process's own rank, not by that of the rejected run


# --- ranks ---


def gated_manager(recorded: list[str]) -> CallbackManager:
    manager = CallbackManager()
    for gate in ("zero", "local_zero", "all", {1, 3}):
        manager.register("on_log", lambda ctx, gate=gate: recorded.append(str(gate)), ranks=gate)

    @manager.register("on_log")
    @rank_zero_only
    def decorated(ctx: Context) -> None:
        recorded.append("decorated")

    return manager


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        (Ranks(0, 0, 0, 4), ["zero", "local_zero", "all", "decorated"]),
        (Ranks(1, 1, 0, 4), ["all", "{1, 3}"]),
        (Ranks(2, 0, 1, 4), ["local_zero", "all"]),
        (Ranks(3, 1, 1, 4), ["all", "{1, 3}"]),
    ],
)
def test_gates_are_read_from_the_run(ranks: Ranks, expected: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "7")  # the run's rank overrides the environment, also inside a decorator
    monkeypatch.setenv("LOCAL_RANK", "7")
    recorded: list[str] = []
    manager = gated_manager(recorded)
    ctx = context(ranks)
    manager.open(ctx)
    manager.fire("on_log", ctx)
    assert recorded == expected


def test_without_a_run_gates_are_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[str] = []
    manager = gated_manager(recorded)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    manager.fire("on_log", context())
    assert recorded == ["local_zero", "all", "{1, 3}"]


def test_has_listeners_is_for_this_rank_and_the_call_sheet_for_all_ranks() -> None:
    manager = CallbackManager()
    manager.register("on_log", lambda ctx: None, ranks="zero")
    manager.open(context(Ranks(rank=1, world_size=2)))
    assert not manager.has_callbacks("on_log")
    assert not manager.has_listeners.on_log
    assert len(manager.list_callbacks("on_log")) == 1
    assert len(manager.call_sheet().rows()) == 1


def test_after_a_run_is_closed_gates_use_the_rank_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    manager = CallbackManager()
    manager.register("on_log", lambda ctx: None, ranks="zero")
    manager.open(context(Ranks(rank=1, world_size=2)))
    manager.close()
    manager.close()
    assert manager.has_callbacks("on_log")


def test_gather_and_replicated_requests_are_rejected_only_in_gated_handlers() -> None:
    manager = CallbackManager()
    ctx = context()
    rejected: list[str] = []

    def try_both(ctx: Context) -> None:
        for name, ask in (("gather", lambda: ctx.gather(1)), ("stop", lambda: ctx.control.stop("x", replicated=True))):
            try:
                ask()
            except RequestRejected:
                rejected.append(name)

    @manager.register("on_train_end")
    @rank_zero_only
    def decorated(ctx: Context) -> None:
        try_both(ctx)

    manager.register("on_log", try_both, ranks="zero")
    manager.register("on_preempt", try_both)
    manager.fire("on_log", ctx)
    assert rejected == ["gather", "stop"]
    manager.fire("on_train_end", ctx)
    assert rejected == ["gather", "stop"] * 2
    manager.fire("on_preempt", ctx)
    assert len(rejected) == 4
    assert ctx.control.stop_requested is not None


def test_gather_works_again_after_a_gated_handler_failed() -> None:
    manager = CallbackManager()
    ctx = context()
    manager.register("on_log", lambda ctx: 1 // 0, ranks="zero")
    with pytest.raises(ZeroDivisionError):
        manager.fire("on_log", ctx)
    assert ctx.gather(1) == [1]


def test_after_a_nested_gated_handler_the_outer_one_is_still_gated() -> None:
    manager = CallbackManager()
    rejected: list[bool] = []

    def outer(ctx: Context) -> None:
        manager.fire("on_preempt", ctx)
        try:
            ctx.gather(1)
        except RequestRejected:
            rejected.append(True)

    manager.register("on_log", outer, ranks="zero")
    manager.register("on_preempt", lambda ctx: None, ranks="zero")
    manager.fire("on_log", context())
    assert rejected == [True]


# --- state ---


def test_the_run_and_the_manager_share_user_state() -> None:
    manager = CallbackManager()
    ctx = context()
    manager.user_state["a"] = 1
    manager.open(ctx)
    assert ctx.user_state is manager.user_state
    manager.register("on_log", lambda ctx: ctx.user_state.update(b=2))
    manager.fire("on_log", ctx)
    assert manager.state_dict()["user_state"] == {"a": 1, "b": 2}
    other = CallbackManager()
    other.user_state["c"] = 3
    held = other.user_state
    other.load_state_dict(manager.state_dict())
    assert held == {"a": 1, "b": 2, "c": 3}
    assert other.user_state is held


def test_states_are_saved_and_loaded_by_the_callback_s_name() -> None:
    first, second, does_nothing = Keeps(1), Keeps(2), DoesNothing()
    second.name = "second"
    manager = CallbackManager([first, does_nothing, second])
    state = manager.state_dict()
    assert state == {"callbacks": {"Keeps": {"value": 1}, "second": {"value": 2}}, "user_state": {}}

    fresh_second, fresh_first = Keeps(), Keeps()
    fresh_second.name = "second"
    CallbackManager([fresh_second, fresh_first]).load_state_dict(state)
    assert (fresh_first.value, fresh_second.value) == (1, 2)


def test_unclaimed_state_is_logged_and_a_callback_without_saved_state_is_unchanged(caplog: pytest.LogCaptureFixture) -> None:
    keeps = Keeps(5)
    manager = CallbackManager([keeps])
    with caplog.at_level(logging.WARNING, "callsheet"):
        manager.load_state_dict({"callbacks": {"gone": {"x": 1}, "also": {}}})
    assert keeps.value == 5
    assert [record.getMessage() for record in caplog.records] == [
        "the checkpoint holds the state of callbacks that are not here: also, gone"
    ]
    caplog.clear()
    manager.load_state_dict({})
    manager.load_state_dict({"callbacks": {"Keeps": {"value": 8}}})
    assert caplog.records == []
    assert keeps.value == 8


def test_two_states_under_one_name_are_rejected_with_a_hint() -> None:
    message = r"two callbacks would keep their state under the name 'Keeps' \(test_manager\.py:\d+ and test_manager\.py:\d+\); "
    with pytest.raises(
        RegistrationError, match=message + r"give one of them another before adding it: callback\.name = '\.\.\.'"
    ):
        CallbackManager([Keeps(), Keeps()])
    manager = CallbackManager([Keeps()])
    with pytest.raises(RegistrationError, match="under the name 'Keeps'"):
        manager.add(Keeps())
    renamed = Keeps()
    renamed.name = "other"
    manager.add(renamed)
    manager.add([DoesNothing(), DoesNothing()])  # callbacks without a state may have the same name
    assert len(manager.callbacks) == 4


def test_a_callback_without_a_state_may_have_the_name_of_one_with_a_state() -> None:
    does_nothing = DoesNothing()
    does_nothing.name = "Keeps"
    assert CallbackManager([Keeps(7), does_nothing]).state_dict()["callbacks"] == {"Keeps": {"value": 7}}


def test_two_states_under_one_name_after_a_renaming_are_rejected_when_saved() -> None:
    first, second = Keeps(1), Keeps(2)
    second.name = "second"
    manager = CallbackManager([first, second])
    second.name = ""
    with pytest.raises(RegistrationError, match="under the name 'Keeps'"):
        manager.state_dict()


def test_a_saved_state_does_not_change_with_user_state() -> None:
    manager = CallbackManager()
    manager.user_state["a"] = 1
    state = manager.state_dict()
    manager.user_state["a"] = 2
    assert state["user_state"] == {"a": 1}


# --- loggers ---


class Tables(Callback):
    def __init__(self, recorded: list[str], *fails: bool) -> None:
        self.recorded = recorded
        self.fails = iter(fails)

    def log_table(self, ctx: Context, name: str) -> None:
        if next(self.fails, False):
            raise ConnectionError("the tracker is down")
        self.recorded.append(name)


def test_loggers_that_have_the_method_are_notified_although_one_of_them_fails(caplog: pytest.LogCaptureFixture) -> None:
    recorded: list[str] = []
    away = Tables(recorded)
    away.ranks = {1}
    manager = CallbackManager([Tables(recorded, True), DoesNothing(), Tables(recorded), away])
    ctx = context()
    manager.open(ctx)
    manager.notify_loggers("log_table", ctx, name="t")
    assert recorded == ["t"]
    assert caplog.records[0].getMessage().startswith("Callback Tables (test_manager.py:")
    assert "failed at log_table, step 0, rank 0; training continues: ConnectionError: the tracker is down" in caplog.text
    manager.notify_loggers("log_table", ctx, name="u")
    assert recorded == ["t", "u", "u"]


def test_a_logger_that_fails_three_times_in_a_row_is_disabled(caplog: pytest.LogCaptureFixture) -> None:
    recorded: list[str] = []
    manager = CallbackManager([Tables(recorded, *[True] * 3)])
    for i in range(5):
        manager.notify_loggers("log_table", context(), name=str(i))
    assert recorded == []
    assert "Callback Tables is switched off after 3 failures in a row" in caplog.text


def test_a_logger_that_fails_at_every_second_call_is_not_disabled() -> None:
    recorded: list[str] = []
    manager = CallbackManager([Tables(recorded, *[True, False] * 4)])
    for i in range(10):
        manager.notify_loggers("log_table", context(), name=str(i))
    assert recorded == ["1", "3", "5", "7", "8", "9"]


def test_a_gated_logger_may_not_gather(caplog: pytest.LogCaptureFixture) -> None:
    class Gathers(Callback):
        ranks = "zero"

        def log_table(self, ctx: Context, name: str) -> None:
            gathered.append(ctx.gather(1))

    gathered: list[Any] = []
    ctx = context()
    CallbackManager([Gathers()]).notify_loggers("log_table", ctx, name="t")
    assert gathered == []
    assert "RequestRejected: ctx.gather() in a handler that runs on some ranks only" in caplog.text
    assert not ctx.control.in_gate


# --- flags, helpers ---


def received(manager: CallbackManager) -> list[str]:
    return [event for event in EVENTS if getattr(manager.has_listeners, event)]


def test_has_listeners_follows_changes_of_the_call_sheet() -> None:
    manager = CallbackManager()
    spans = manager.spans(context())
    assert received(manager) == []
    function = manager.register("on_log", lambda ctx: None)
    assert received(manager) == ["on_log"]
    manager.remove(function)
    assert received(manager) == []
    assert spans is not None


def test_has_listeners_follows_changes_of_the_call_sheet_in_a_loop_without_spans() -> None:
    manager = CallbackManager()
    manager.open(context())
    manager.register("on_log", lambda ctx: None)
    assert manager.has_listeners.on_log


def test_the_context_knows_the_kept_fields_when_the_run_opens() -> None:
    keeping = DoesNothing()
    keeping.keep_fields = ("outputs",)
    ctx = context()
    CallbackManager([Keeps(), keeping]).open(ctx)
    assert ctx.kept == {"outputs"}


def test_the_context_knows_the_kept_fields_of_a_callback_added_during_the_run() -> None:
    manager = CallbackManager()
    ctx = context()
    manager.open(ctx)
    spans = manager.spans(ctx)
    keeping = DoesNothing()
    keeping.keep_fields = ("outputs",)
    manager.add(keeping)
    assert ctx.kept == {"outputs"}
    assert spans.ctx is ctx


def test_normalize_callbacks_returns_a_manager_for_every_accepted_argument() -> None:
    does_nothing, notes = DoesNothing(), Notes([])
    assert normalize_callbacks(None) is None
    manager = CallbackManager()
    assert normalize_callbacks(manager) is manager
    for given, expected in (
        (does_nothing, [does_nothing]),
        ([does_nothing, notes], [does_nothing, notes]),
        (iter((notes,)), [notes]),
        ([], []),
    ):
        made = normalize_callbacks(given)
        assert made is not None
        assert made.callbacks == expected
    for wrong in (DoesNothing, 3, "DoesNothing", lambda ctx: None):
        with pytest.raises(NotACallbackError):
            normalize_callbacks(wrong)  # type: ignore[arg-type]


def test_should_fire_is_true_if_a_callback_listens_to_the_event() -> None:
    assert not should_fire(None, "on_log")
    assert not should_fire(CallbackManager(), "on_log")
    manager = CallbackManager([DoesNothing()])
    assert should_fire(manager, "on_log")
    assert should_fire(manager, Event.LOG)
    assert not should_fire(manager, "on_run_end")


def test_a_manager_can_be_used_for_one_run_after_another() -> None:
    recorded: list[str] = []
    manager = CallbackManager([Notes(recorded)])
    for _ in range(2):
        ctx = context()
        manager.open(ctx)
        with manager.spans(ctx).train_step:
            pass
        manager.close()
    assert recorded == ["end", "end"]


def test_the_package_fires_events_without_torch() -> None:
    code = (
        "import sys, callsheet as c\n"
        "m = c.CallbackManager()\n"
        "m.register('on_log', lambda ctx: print(ctx.event, ctx.gather(1)))\n"
        "x = c.Context(c.RunInfo('r')); m.open(x); m.fire('on_log', x)\n"
        "print('torch' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.stdout == "on_log [1]\nFalse\n", ran.stderr


def test_opening_a_second_run_before_the_first_is_closed_is_rejected() -> None:
    manager = CallbackManager()
    first, second = Context(RunInfo("first")), Context(RunInfo("second"))
    manager.open(first)
    with pytest.raises(RequestRejected, match="serves the run 'first'; close that first"):
        manager.open(second)
    manager.close()
    manager.open(second)
    assert second.user_state is manager.user_state


# --- muting ---


class Listens(Callback):
    def __init__(self) -> None:
        self.recorded: list[str] = []

    def on_train_step_start(self, ctx: Context) -> None:
        self.recorded.append("start")
        if len(self.recorded) == 2:
            ctx.mute(self, "on_train_step_start", "on_train_step_end")

    def on_train_step_end(self, ctx: Context) -> None:
        self.recorded.append("end")

    def on_log(self, ctx: Context) -> None:
        self.recorded.append("log")
        ctx.unmute(self, "on_train_step_end")


def test_a_muted_handler_is_not_called_until_it_is_unmuted_or_the_run_ends() -> None:
    listens_to = Listens()
    manager, ctx = CallbackManager([listens_to]), Context(RunInfo("test"))
    manager.open(ctx)
    spans = manager.spans(ctx)

    def step() -> None:
        with spans.train_step:
            pass

    step()
    listens_to.recorded.clear()
    listens_to.recorded.append("one")
    step()  # mutes within its start: its end is not fired
    assert listens_to.recorded == ["one", "start"]
    assert not manager.has_listeners.on_train_step_start
    step()
    assert listens_to.recorded == ["one", "start"]
    manager.fire("on_log", ctx)
    step()
    assert listens_to.recorded == ["one", "start", "log", "end"]
    manager.close()
    manager.open(Context(RunInfo("another")))
    assert manager.has_listeners.on_train_step_start


class Pauses(Callback):
    """Mutes itself except at every hundredth step."""

    def __init__(self) -> None:
        self.recorded: list[int] = []

    def on_train_step_start(self, ctx: Context) -> None:
        self.recorded.append(ctx.step)
        if ahead := -ctx.step % 100:
            ctx.mute(self, "on_train_step_start", until=ctx.step + ahead)


def test_a_handler_muted_until_a_step_is_called_from_the_start_of_that_step() -> None:
    pauses = Pauses()
    manager, ctx = CallbackManager([pauses]), Context(RunInfo("test"))
    manager.open(ctx)
    spans = manager.spans(ctx)
    manager.between_steps(0)
    next_step, boundaries = manager.next_step, 0
    for ctx.step in range(1, 305):
        with spans.train_step:
            pass
        if ctx.step >= next_step or ctx.control.pending:
            boundaries += 1
            ctx.control.done("stop")  # after this, `pending` is true only if the schedule has changed
            assert ctx.control.pending is ctx.control.is_rescheduled
            ctx.control.is_rescheduled = False
            ctx.control.look_again()
            manager.between_steps(ctx.step)
            next_step = manager.next_step
    assert pauses.recorded == [1, 100, 101, 200, 201, 300, 301]
    assert boundaries < 30  # the loop rarely had to call the manager between steps
    manager.close()


def test_a_mute_has_no_effect_if_the_loop_reports_no_ends_of_steps_or_the_pause_is_short() -> None:
    pauses = Pauses()
    manager, ctx = CallbackManager([pauses]), Context(RunInfo("test"))
    manager.open(ctx)
    for ctx.step in range(1, 6):
        manager.fire("on_train_step_start", ctx)
    assert pauses.recorded == [1, 2, 3, 4, 5]
    manager.between_steps(5)
    for ctx.step in range(95, 100):
        manager.fire("on_train_step_start", ctx)
    assert pauses.recorded[5:] == [95, 96, 97, 98, 99]


@pytest.mark.parametrize("ahead", [1, 1000])
def test_an_unknown_event_is_not_muted(ahead: int) -> None:
    pauses = Pauses()
    manager, ctx = CallbackManager([pauses]), Context(RunInfo("test"))
    manager.open(ctx)
    with pytest.raises(UnknownEventError, match="on_train_step_stat"):
        ctx.mute(pauses, "on_train_step_stat", until=ahead)


def test_a_handler_that_unmuted_itself_stays_unmuted_at_the_end_of_the_pause() -> None:
    pauses = Pauses()
    manager, ctx = CallbackManager([pauses]), Context(RunInfo("test"))
    manager.open(ctx)
    manager.between_steps(0)
    ctx.step = 1
    manager.fire("on_train_step_start", ctx)
    recorded = [manager.has_callbacks("on_train_step_start")]
    ctx.unmute(pauses, "on_train_step_start")
    recorded.append(manager.has_callbacks("on_train_step_start"))
    manager.between_steps(99)
    assert [*recorded, manager.has_callbacks("on_train_step_start")] == [False, True, True]


def test_the_last_mute_or_unmute_of_an_event_applies() -> None:
    pauses = Pauses()
    manager, ctx = CallbackManager([pauses]), Context(RunInfo("test"))
    manager.open(ctx)
    manager.between_steps(0)
    ctx.mute(pauses, "on_train_step_start", until=40)
    ctx.mute(pauses, "on_train_step_start")  # without a limit
    manager.between_steps(39)
    recorded = [manager.has_callbacks("on_train_step_start")]
    ctx.mute(pauses, "on_train_step_start", until=100)  # it is muted without a limit already, which stays
    manager.between_steps(99)
    recorded.append(manager.has_callbacks("on_train_step_start"))
    ctx.unmute(pauses, "on_train_step_start")
    ctx.mute(pauses, "on_train_step_start", until=100)
    ctx.mute(pauses, "on_train_step_start", until=300)
    manager.between_steps(99)
    recorded.append(manager.has_callbacks("on_train_step_start"))
    manager.between_steps(299)
    recorded.append(manager.has_callbacks("on_train_step_start"))
    assert recorded == [False, False, False, True]
    manager.close()
    ctx.mute(pauses, "on_train_step_start")
    assert not manager.has_callbacks("on_train_step_start")


def test_muting_rejects_callbacks_that_were_not_added_and_unknown_events() -> None:
    listens_to = Listens()
    manager, ctx = CallbackManager([listens_to]), Context(RunInfo("test"))
    manager.open(ctx)
    with pytest.raises(RegistrationError, match="Listens is not on the call sheet"):
        ctx.mute(Listens(), "on_log")
    with pytest.raises(UnknownEventError, match="on_train_step_end"):
        ctx.mute(listens_to, "on_train_step_ends")
    assert manager.has_listeners.on_log


def test_mute_works_on_a_sibling_context_and_does_nothing_without_a_manager() -> None:
    listens_to = Listens()
    manager, ctx = CallbackManager([listens_to]), Context(RunInfo("test"))
    ctx.mute(listens_to, "on_log")
    manager.open(ctx)
    assert manager.has_listeners.on_log
    ctx.sibling().mute(listens_to, "on_log")
    assert not manager.has_listeners.on_log


def test_muting_from_a_lane_is_rejected() -> None:
    class Mutes(Callback):
        lane = "background"

        def on_log(self, ctx: Context) -> None:
            ctx.mute(self, "on_log")

    manager, ctx = CallbackManager([Mutes()]), Context(RunInfo("test"))
    manager.open(ctx)
    manager.fire("on_log", ctx)
    manager.drain(ctx)
    [failed] = manager.cost_report(1).failures
    manager.close()
    assert "RequestRejected: a callback in a lane cannot mute or unmute an event" in failed.last
