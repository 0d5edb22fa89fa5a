"""The call sheet: its table, phases, intervals, isolation, and the handlers that are called after an error."""

import logging
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from callsheet import Background, Callback, CallbackManager, CallsheetError, Context, Interval, RunInfo, TrainState, at, every
from callsheet.core.call_sheet import CallSheet
from callsheet.core.callback import PHASES
from callsheet.core.ranks import Ranks
from callsheet.core.time import Time, Timestamp
from callsheet.core.wrappers import FAILURES_ALLOWED
from callsheet.errors import ConfigError

DRAWS: dict[str, Callable[[], Any]] = {
    "python": random.random,
    "numpy": lambda: float(np.random.rand()),
    "torch": lambda: float(torch.rand(())),
}


def context(state: TrainState | None = None) -> Context:
    return Context(RunInfo("test", ranks=Ranks()), state=state)


def train(manager: CallbackManager, ctx: Context, steps: int, event: str = "on_train_step_end") -> None:
    """Run this many steps, each of which is completed just before `event` is fired."""
    for _ in range(steps):
        ctx.step += 1
        ctx.state.timestamp = ctx.state.timestamp.next_batch()
        manager.fire(event, ctx)


# --- the table ---


class Monitor(Callback):
    def on_optimizer_step_end(self, ctx: Context) -> None: ...


class Board(Callback):
    phase = "report"
    ranks = "zero"

    @every("10ba", at_end=True)
    def on_train_step_end(self, ctx: Context) -> None: ...

    @at("change")
    def on_train_start(self, ctx: Context) -> None: ...


def test_the_table_shows_which_handlers_are_called_when_and_where() -> None:
    manager = CallbackManager([Board(), Monitor()])
    manager.register("on_train_step_end", lambda ctx: None, name="tick", ranks={3, 1}, every=5)
    manager.register("on_log", lambda ctx: None, name="later", lane="background", ranks="local_zero")
    assert manager.call_sheet().rows() == [
        ("on_train_start", "change", "Board", "0", "inline", ""),
        ("on_optimizer_step_end", "measure", "Monitor", "all", "inline", ""),
        ("on_train_step_end", "measure", "tick", "1,3", "inline", "every 5ba"),
        ("on_train_step_end", "report", "Board", "0", "inline", "every 10ba and at the end"),
        ("on_log", "measure", "later", "local 0", "background", ""),
    ]


def test_the_printed_table_shows_each_event_s_name_once() -> None:
    manager = CallbackManager([Monitor(), Board()])
    manager.register("on_train_step_end", lambda ctx: None, name="tick")
    assert str(manager.call_sheet()).splitlines() == [
        "event                 phase   callback ranks lane   every",
        "on_train_start        change  Board    0     inline",
        "on_optimizer_step_end measure Monitor  all   inline",
        "on_train_step_end     measure tick     all   inline",
        "                      report  Board    0     inline 10ba and at the end",
    ]


def test_an_empty_call_sheet_prints_that_it_is_empty() -> None:
    assert str(CallSheet()).splitlines()[1] == "no handlers"
    assert CallbackManager().call_sheet().rows() == []


class Watcher(Callback):
    @every("1ep")
    def on_event(self, ctx: Context) -> None: ...


class Tracker(Callback):
    def on_train_start(self, ctx: Context) -> None: ...

    def on_checkpoint_save_start(self, ctx: Context) -> None: ...

    @every("10ba")
    def on_checkpoint_save_end(self, ctx: Context) -> None: ...


class Idle(Callback):
    pass


def test_the_short_form_has_one_line_per_callback() -> None:
    manager = CallbackManager([Board(), Background(Watcher()), Tracker(), Idle(), Monitor()])
    manager.register("on_log", lambda ctx: None, name="later", lane="background", ranks={1, 3}, every=5)
    assert manager.call_sheet().short().splitlines() == [
        "callback phase         ranks lane       handles",
        "Board    change/report 0                2 events (1 every 10ba and at the end)",
        "Watcher                      background all events every 1ep",
        "Tracker                                 3 events (1 every 10ba)",
        "Monitor                                 on_optimizer_step_end",
        "later                  1,3   background on_log every 5ba",
        "Idle                                    no events",
    ]


def test_the_short_form_leaves_out_columns_that_are_the_default_everywhere() -> None:
    assert CallbackManager([Monitor()]).call_sheet().short() == "callback handles\nMonitor  on_optimizer_step_end"
    assert CallbackManager().call_sheet().short() == "no callbacks"


@pytest.mark.parametrize(("number", "is_cut"), [(19, False), (20, True), (300, True)])
def test_the_short_form_has_at_most_20_lines_of_80_characters(number: int, is_cut: bool) -> None:
    manager = CallbackManager()
    for i in range(number):
        name = f"a_function_with_a_long_name_{i}"
        manager.register("*", lambda ctx: None, name=name, every="10ba", ranks=set(range(64)), lane="background", phase="report")
    lines = manager.call_sheet().short().splitlines()
    assert len(lines) == 20
    assert max(map(len, lines)) <= 80
    assert (lines[-1] == f"and {number - 18} more callbacks; `callsheet show` prints all") == is_cut


# --- phases ---


def test_handlers_are_ordered_by_phase_and_within_a_phase_by_addition() -> None:
    manager = CallbackManager()
    recorded: list[str] = []
    for turn in ("first", "second"):
        for phase in reversed(PHASES):
            manager.register("on_log", lambda ctx, mark=f"{phase} {turn}": recorded.append(mark), phase=phase)
    manager.fire("on_log", context())
    assert recorded == [f"{phase} {turn}" for phase in PHASES for turn in ("first", "second")]


@given(st.lists(st.sampled_from(PHASES), max_size=12))
def test_the_order_is_a_stable_sort_by_phase(phases: list[Any]) -> None:
    manager = CallbackManager()
    recorded: list[tuple[str, int]] = []
    for number, phase in enumerate(phases):
        manager.register("on_log", lambda ctx, mark=(phase, number): recorded.append(mark), phase=phase)
    manager.fire("on_log", context())
    assert recorded == sorted(((phase, number) for number, phase in enumerate(phases)), key=lambda mark: PHASES.index(mark[0]))
    assert [row[1] for row in manager.call_sheet().rows()] == [phase for phase, _ in recorded]


def test_a_method_s_phase_overrides_the_class_s_and_a_phase_given_to_register_overrides_both() -> None:
    @at("save")
    def saves(ctx: Context) -> None: ...

    manager = CallbackManager([Board()])
    manager.register("on_log", saves)
    manager.register("on_train_end", saves, phase="restore")
    phases = {row[0]: row[1] for row in manager.call_sheet().rows()}
    assert phases == {"on_train_start": "change", "on_train_step_end": "report", "on_log": "save", "on_train_end": "restore"}


# --- intervals ---


def due(
    interval: str | int | Interval, steps: int, *, event: str = "on_train_step_end", state: TrainState | None = None
) -> list[int]:
    """Return the batches at which a function with that interval is called."""
    manager = CallbackManager()
    recorded: list[int] = []
    manager.register(event, lambda ctx: recorded.append(ctx.state.timestamp.batch), every=interval)
    ctx = context(state)
    manager.open(ctx)
    train(manager, ctx, steps, event)
    return recorded


def test_an_interval_in_batches_is_due_at_its_multiples() -> None:
    assert due("100ba", 350) == [100, 200, 300]
    assert due(3, 10) == [3, 6, 9]
    assert due("1ba", 3) == [1, 2, 3]


@given(st.integers(1, 7), st.integers(0, 30), st.integers(0, 20))
def test_a_resumed_run_is_called_at_the_same_steps(interval: int, start: int, steps: int) -> None:
    began = Timestamp(batch=start)
    state = TrainState(timestamp=began, baseline=began)
    expected = [batch for batch in range(start + 1, start + steps + 1) if batch % interval == 0]
    assert due(interval, steps, state=state) == expected


def test_at_end_adds_a_call_when_the_run_is_complete() -> None:
    duration = TrainState(max_duration=Time("25ba"))
    assert due(Interval("10ba", at_end=True), 25, state=duration) == [10, 20, 25]
    assert due(Interval("10ba"), 25, state=TrainState(max_duration=Time("25ba"))) == [10, 20]


def test_at_end_adds_no_second_call_at_the_end_or_beyond_it() -> None:
    assert due(Interval("5ba", at_end=True), 10, state=TrainState(max_duration=Time("10ba"))) == [5, 10]
    assert due(Interval("8ba", at_end=True), 13, state=TrainState(max_duration=Time("10ba"))) == [8, 10]


def test_at_end_has_no_effect_if_the_duration_is_unknown() -> None:
    assert due(Interval("4ba", at_end=True), 9) == [4, 8]


def test_an_interval_that_is_a_fraction_of_the_run_is_due_at_its_multiples() -> None:
    assert due("0.25dur", 8, state=TrainState(max_duration=Time("8ba"))) == [2, 4, 6, 8]


def test_a_fraction_in_a_resumed_run_counts_from_where_it_resumed() -> None:
    began = Timestamp(batch=5)
    state = TrainState(max_duration=Time("8ba"), timestamp=began, baseline=began)
    assert due("0.25dur", 3, state=state) == [6, 8]


class Halves(Callback):
    """Is called at every half of the run, which needs a known duration."""

    def __init__(self, on_error: Any) -> None:
        self.on_error = on_error
        self.recorded: list[int] = []

    @every("0.5dur")
    def on_train_step_end(self, ctx: Context) -> None:
        self.recorded.append(ctx.step)


NO_DURATION = (
    r"^Halves \(test_call_sheet\.py:\d+\) handles on_train_step_end every 0\.5dur, "
    r"but this run has no max_duration; use another unit$"
)


@pytest.mark.parametrize("on_error", ["raise", "isolate"])
def test_a_fraction_of_an_unknown_duration_is_rejected_before_the_run_begins(on_error: str) -> None:
    halves = Halves(on_error)
    manager = CallbackManager([halves])
    with pytest.raises(ConfigError, match=NO_DURATION):
        manager.open(context())
    ctx = context(TrainState(max_duration=Time("4ba")))
    manager.open(ctx)
    train(manager, ctx, 4)
    assert halves.recorded == [2, 4]


@pytest.mark.parametrize("on_error", ["raise", "isolate"])
def test_a_fraction_of_an_unknown_duration_is_rejected_during_a_run_too(on_error: str) -> None:
    manager = CallbackManager()
    ctx = context()
    manager.open(ctx)
    with pytest.raises(ConfigError, match=NO_DURATION):
        manager.add([Monitor(), Halves(on_error)])
    assert manager.callbacks == []
    train(manager, ctx, 2)


def test_a_fraction_of_an_unknown_duration_is_an_error_at_the_event_if_no_run_was_opened() -> None:
    manager = CallbackManager([Halves("isolate")])
    with pytest.raises(ConfigError, match=r"'every 0\.5dur' needs a known max_duration; give the run one"):
        train(manager, context(), 1)


def test_an_interval_is_due_if_a_multiple_was_passed_since_the_previous_call() -> None:
    manager = CallbackManager()
    ctx = context()
    recorded: list[int] = []
    manager.register("on_eval_all_end", lambda ctx: recorded.append(ctx.state.timestamp.batch), every="10ba")
    manager.open(ctx)
    for batch in (4, 9, 13, 17, 19, 22, 45, 46):
        ctx.state.timestamp = Timestamp(batch=batch)
        manager.fire("on_eval_all_end", ctx)
    assert recorded == [13, 22, 45]


def test_an_interval_is_counted_separately_for_each_event_of_a_callback() -> None:
    class Both(Callback):
        @every("2ba")
        def on_event(self, ctx: Context) -> None:
            recorded.append((str(ctx.event), ctx.step))

    recorded: list[tuple[str, int]] = []
    manager = CallbackManager([Both()])
    ctx = context()
    manager.open(ctx)
    for _ in range(4):
        train(manager, ctx, 1)
        manager.fire("on_log", ctx)
    assert recorded == [("on_train_step_end", 2), ("on_log", 2), ("on_train_step_end", 4), ("on_log", 4)]


def test_an_event_fired_twice_at_one_timestamp_is_due_only_once() -> None:
    manager = CallbackManager()
    ctx = context()
    recorded: list[int] = []
    manager.register("on_checkpoint_due", lambda ctx: recorded.append(ctx.state.timestamp.batch), every="5ba")
    manager.open(ctx)
    ctx.state.timestamp = Timestamp(batch=5)
    manager.fire("on_checkpoint_due", ctx)
    manager.fire("on_checkpoint_due", ctx)
    assert recorded == [5]


def test_intervals_of_epochs_and_seconds() -> None:
    manager = CallbackManager()
    ctx = context()
    recorded: list[str] = []
    manager.register("on_log", lambda ctx: recorded.append(f"epoch {ctx.state.timestamp.epoch}"), every="2ep")
    manager.register("on_log", lambda ctx: recorded.append(f"{ctx.state.timestamp.seconds:.0f} s"), every="1m")
    manager.open(ctx)
    for epoch, seconds in ((0, 50.0), (1, 70.0), (2, 100.0), (3, 130.0), (4, 170.0)):
        ctx.state.timestamp = Timestamp(epoch=epoch, seconds=seconds)
        manager.fire("on_log", ctx)
    assert recorded == ["70 s", "epoch 2", "130 s", "epoch 4"]


def test_an_interval_added_during_a_run_counts_from_there() -> None:
    manager = CallbackManager()
    ctx = context()
    manager.open(ctx)
    spans = manager.spans(ctx)
    train(manager, ctx, 95)
    recorded: list[int] = []
    manager.register("on_train_step_end", lambda ctx: recorded.append(ctx.step), every="10ba")
    train(manager, ctx, 20)
    assert recorded == [100, 110]
    assert spans.ctx is ctx


def test_an_interval_added_during_a_run_without_spans_counts_from_there() -> None:
    manager = CallbackManager()
    ctx = context()
    manager.open(ctx)
    train(manager, ctx, 95)
    recorded: list[int] = []
    manager.register("on_train_step_end", lambda ctx: recorded.append(ctx.step), every="10ba")
    train(manager, ctx, 20)
    assert recorded == [100, 110]


@pytest.mark.parametrize(("interval", "expected"), [("1ba", [1, 2, 3, 4, 5]), ("4ba", [4])])
def test_a_second_run_counts_from_zero(interval: str, expected: list[int]) -> None:
    manager = CallbackManager()
    recorded: list[int] = []
    manager.register("on_train_step_end", lambda ctx: recorded.append(ctx.step), every=interval)
    for _ in range(2):
        ctx = context()
        manager.open(ctx)
        train(manager, ctx, 5)
        manager.close()
    assert recorded == expected * 2


def test_a_handler_that_is_not_due_is_not_called() -> None:
    manager = CallbackManager()
    manager.register("on_train_step_end", lambda ctx: 1 // 0, every="3ba")
    ctx = context()
    manager.open(ctx)
    train(manager, ctx, 2)
    with pytest.raises(ZeroDivisionError):
        train(manager, ctx, 1)


# --- isolation ---


class Fails(Callback):
    """Fails a given number of times in a row, or always."""

    on_error = "isolate"

    def __init__(self, recorded: list[int], *fails: bool) -> None:
        self.recorded = recorded
        self.fails = iter(fails)

    def on_train_step_end(self, ctx: Context) -> None:
        if next(self.fails, False):
            raise ConnectionError("no network")
        self.recorded.append(ctx.step)


def test_an_isolated_failure_is_logged_and_training_continues(caplog: pytest.LogCaptureFixture) -> None:
    recorded: list[int] = []
    after: list[int] = []
    manager = CallbackManager([Fails(recorded, False, True)])
    manager.register("on_train_step_end", lambda ctx: after.append(ctx.step))
    ctx = Context(RunInfo("test", ranks=Ranks(rank=2, world_size=4)))
    manager.open(ctx)
    with caplog.at_level(logging.ERROR, "callsheet"):
        train(manager, ctx, 3)
    assert recorded == [1, 3]
    assert after == [1, 2, 3]
    (record,) = caplog.records
    assert "Callback Fails (test_call_sheet.py:" in record.getMessage()
    assert record.getMessage().endswith(
        "failed at on_train_step_end, step 2, rank 2; training continues: ConnectionError: no network"
    )
    assert record.exc_info is not None
    assert ctx.event is None


def test_three_failures_in_a_row_disable_a_callback_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    recorded: list[int] = []
    manager = CallbackManager([Fails(recorded, True, True, False, *[True] * 3)])
    ctx = context()
    manager.open(ctx)
    train(manager, ctx, 5)
    assert recorded == [3]
    assert "switched off" not in caplog.text
    train(manager, ctx, 3)
    assert recorded == [3]  # switched off at the sixth step; it would succeed at the seventh
    assert f"Callback Fails is switched off after {FAILURES_ALLOWED} failures in a row" in caplog.text
    assert len(caplog.records) == 6


def test_no_method_of_a_disabled_callback_is_called() -> None:
    class Two(Fails):
        def on_log(self, ctx: Context) -> None:
            recorded.append(-1)

    recorded: list[int] = []
    manager = CallbackManager([Two(recorded, *[True] * 3)])
    ctx = context()
    train(manager, ctx, 3)
    manager.fire("on_log", ctx)
    manager.register("on_log", lambda ctx: None)  # the table is compiled again
    manager.fire("on_log", ctx)
    assert recorded == []


def test_a_success_of_another_method_resets_the_count_of_failures() -> None:
    class Two(Fails):
        def on_log(self, ctx: Context) -> None: ...

    recorded: list[int] = []
    manager = CallbackManager([Two(recorded, *[True] * 4)])
    ctx = context()
    for _ in range(5):
        train(manager, ctx, 1)
        manager.fire("on_log", ctx)
    assert recorded == [5]


def test_disabling_a_callback_does_not_disable_other_instances_of_its_class() -> None:
    off: list[int] = []
    on: list[int] = []
    manager = CallbackManager([Fails(off, *[True] * 3), Fails(on)])
    train(manager, context(), 4)
    assert (off, on) == ([], [1, 2, 3, 4])


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_isolation_does_not_swallow_system_exit_and_keyboard_interrupt(
    kind: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    def leave(ctx: Context) -> None:
        raise kind

    manager = CallbackManager()
    manager.register("on_log", leave, on_error="isolate")
    for _ in range(4):
        with pytest.raises(kind):
            manager.fire("on_log", context())
    assert caplog.records == []


def test_errors_of_inline_callbacks_are_raised_by_default() -> None:
    manager = CallbackManager()
    manager.register("on_log", lambda ctx: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        manager.fire("on_log", context())


# --- after an error ---


def failing(phase: Any, event: str, *, also: Any = "") -> tuple[list[str], BaseException]:
    """Return the handlers of `event` that are called when the function in `phase` fails, and the error that is raised."""
    manager = CallbackManager()
    recorded: list[str] = []

    def fail(ctx: Context) -> None:
        recorded.append(f"{phase} fails")
        raise ValueError("the first")

    def fail_too(ctx: Context) -> None:
        recorded.append(f"{also} fails")
        raise OSError("the second")

    manager.register(event, fail, phase=phase)
    if also:
        manager.register(event, fail_too, phase=also)
    for name in PHASES:
        manager.register(event, lambda ctx, name=name: recorded.append(name), phase=name)
    ctx = context()
    ctx.step = 7
    with pytest.raises(ValueError, match="the first") as caught:
        manager.fire(event, ctx)
    assert ctx.event is None
    return recorded, caught.value


@pytest.mark.parametrize(
    ("phase", "expected"),
    [
        ("change", ["change fails", "report", "restore"]),
        ("decide", ["change", "measure", "decide fails", "report", "restore"]),
        ("report", ["change", "measure", "decide", "save", "report fails", "report", "restore"]),
        ("restore", ["change", "measure", "decide", "save", "report", "restore fails", "restore"]),
    ],
)
def test_report_and_restore_handlers_are_called_after_an_error(phase: str, expected: list[str]) -> None:
    assert failing(phase, "on_train_step_end")[0] == expected


@pytest.mark.parametrize("event", ["on_run_end", "on_exception"])
def test_all_handlers_of_run_end_and_exception_are_called_after_an_error(event: str) -> None:
    assert failing("change", event)[0] == ["change fails", *PHASES]


def test_a_second_error_is_logged_and_the_first_is_raised(caplog: pytest.LogCaptureFixture) -> None:
    recorded, error = failing("decide", "on_log", also="report")
    assert recorded == ["change", "measure", "decide fails", "report fails", "report", "restore"]
    assert "failed as well at on_log: the second" in caplog.text
    assert isinstance(error, ValueError)


def test_a_note_on_the_error_names_the_callback_the_event_and_the_step() -> None:
    _, error = failing("decide", "on_log")
    (note,) = error.__notes__
    assert note.startswith("raised by callback failing.<locals>.fail (test_call_sheet.py:")
    assert note.endswith(") at on_log, step 7, rank 0")


def test_the_raised_error_is_the_handler_s_own_without_a_context() -> None:
    mine = ValueError("mine")

    def fail(ctx: Context) -> None:
        raise mine

    manager = CallbackManager()
    manager.register("on_log", fail)
    with pytest.raises(ValueError, match="mine") as caught:
        manager.fire("on_log", context())
    assert caught.value is mine
    assert caught.value.__context__ is None


def test_report_and_restore_handlers_are_called_after_an_interruption() -> None:
    def interrupt(ctx: Context) -> None:
        raise KeyboardInterrupt

    manager = CallbackManager()
    recorded: list[str] = []
    manager.register("on_log", interrupt)
    manager.register("on_log", lambda ctx: recorded.append("decide"), phase="decide")
    manager.register("on_log", lambda ctx: recorded.append("restore"), phase="restore")
    with pytest.raises(KeyboardInterrupt):
        manager.fire("on_log", context())
    assert recorded == ["restore"]


def test_a_report_handler_that_is_not_due_is_not_called_after_an_error() -> None:
    manager = CallbackManager()
    recorded: list[str] = []
    manager.register("on_train_step_end", lambda ctx: 1 // 0)
    manager.register("on_train_step_end", lambda ctx: recorded.append("x"), phase="report", every="2ba")
    ctx = context()
    manager.open(ctx)
    with pytest.raises(ZeroDivisionError):
        train(manager, ctx, 1)
    assert recorded == []


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_all_handlers_of_run_end_are_called_although_two_of_them_raise(
    kind: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    def leave(ctx: Context) -> None:
        raise kind("leaving")

    manager = CallbackManager()
    recorded: list[str] = []
    manager.register("on_run_end", lambda ctx: 1 // 0)
    manager.register("on_run_end", leave)
    manager.register("on_run_end", lambda ctx: recorded.append("last"))
    with pytest.raises(ZeroDivisionError):
        manager.fire("on_run_end", context())
    assert recorded == ["last"]
    assert "failed as well at on_run_end: leaving" in caplog.text


# --- randomness ---


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("fails", [False, True])
def test_a_callback_that_draws_random_numbers_leaves_the_random_states_as_they_were(name: str, fails: bool) -> None:
    class DrawsRandom(Callback):
        draws_random = True
        on_error = "isolate"

        def on_log(self, ctx: Context) -> None:
            drawn.append(DRAWS[name]())
            if fails:
                raise ValueError

    drawn: list[float] = []
    manager = CallbackManager([DrawsRandom()], checking=True)
    ctx = context()
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    expected = DRAWS[name]()
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    manager.fire("on_log", ctx)
    assert drawn == [expected]
    assert DRAWS[name]() == expected


@pytest.mark.parametrize("name", DRAWS)
def test_checking_rejects_a_callback_that_draws_random_numbers_without_declaring_it(name: str) -> None:
    class Sneaky(Callback):
        def on_log(self, ctx: Context) -> None:
            DRAWS[name]()

    random.seed(1)
    before = random.getstate(), torch.get_rng_state().tolist(), np.random.get_state()[1].tolist()  # type: ignore[index]
    with pytest.raises(
        CallsheetError,
        match=r"Sneaky \(test_call_sheet\.py:\d+\) drew random numbers at on_log, which changes training; "
        r".* `draws_random = True`",
    ):
        CallbackManager([Sneaky()], checking=True).fire("on_log", context())
    after = random.getstate(), torch.get_rng_state().tolist(), np.random.get_state()[1].tolist()  # type: ignore[index]
    assert before == after
    CallbackManager([Sneaky()]).fire("on_log", context())


@pytest.mark.parametrize("phase", ["change", "restore"])
def test_handlers_in_phases_change_and_restore_may_draw_random_numbers(phase: Any) -> None:
    manager = CallbackManager(checking=True)
    manager.register("on_log", lambda ctx: torch.rand(()), phase=phase)
    manager.register("on_log", lambda ctx: None)
    manager.fire("on_log", context())


def test_checking_also_rejects_an_isolated_handler_that_draws_random_numbers() -> None:
    manager = CallbackManager(checking=True)
    manager.register("on_log", lambda ctx: torch.rand(()), on_error="isolate")
    with pytest.raises(CallsheetError, match="drew random numbers"):
        manager.fire("on_log", context())
    with pytest.raises(CallsheetError, match="drew random numbers"):
        manager.fire("on_log", context())  # the rejection does not count as a failure of the callback
