"""The grammar checker: the sequences that an order allows, the errors for others, and the readable fields."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from callsheet import Callback, CallsheetError, Context, RunInfo
from callsheet.core.lifecycle import ALWAYS_AVAILABLE, ANYWHERE_EVENTS, EVENTS, FIELDS, POINTS, SPANS, fields_available
from callsheet.core.manager import CallbackManager
from callsheet.errors import ConfigError, UnknownEventError
from callsheet.testing import GrammarChecker, GrammarError, Recorder, check_events
from callsheet.testing.grammar import NONE, read_order


def matches(order: str, names: list[str]) -> bool:
    remains = read_order(order)
    for name in names:
        remains = remains.after(name)
    return remains.may_be_empty


# --- the notation ---

letters = st.sampled_from(["a", "b", "c"])
orders = st.recursive(
    letters,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["?", "*", "+"])).map(lambda parts: f"({parts[0]}){parts[1]}"),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: " ".join(f"({part})" for part in parts)),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: f"({' | '.join(parts)})"),
    ),
    max_leaves=6,
)


@given(order=orders, names=st.lists(letters, max_size=6))
def test_an_order_matches_like_a_regular_expression(order: str, names: list[str]) -> None:
    """The names are letters, so Python's `re` can match the same order."""
    assert matches(order, names) == bool(re.fullmatch(order.replace(" ", ""), "".join(names)))


@given(order=orders, names=st.lists(letters, max_size=4))
def test_possible_events_are_those_that_are_accepted(order: str, names: list[str]) -> None:
    remains = read_order(order)
    for name in names:
        remains = remains.after(name)
    assert remains.first() == {name for name in "abc" if remains.after(name) != NONE}


@pytest.mark.parametrize(
    ("order", "taken", "rejected"),
    [
        ("", [""], ["a"]),
        ("a", ["a"], ["", "a a", "b"]),
        ("a b", ["a b"], ["a", "b", "b a"]),
        ("a | b", ["a", "b"], ["", "a b"]),
        ("a b | c", ["a b", "c"], ["a c", "a b c"]),
        ("a (b | c)", ["a b", "a c"], ["a", "c"]),
        ("a?", ["", "a"], ["a a"]),
        ("a* b", ["b", "a a b"], ["a"]),
        ("a+", ["a", "a a a"], [""]),
        ("(a b)* a?", ["", "a", "a b a b a"], ["b", "a a"]),
        ("(a?)+", ["", "a a"], ["b"]),
        ("first_one second_one?", ["first_one", "first_one second_one"], ["second_one"]),
    ],
)
def test_the_signs_have_the_meaning_in_the_lifecycle_s_table(order: str, taken: list[str], rejected: list[str]) -> None:
    assert [matches(order, names.split()) for names in taken] == [True] * len(taken)
    assert [matches(order, names.split()) for names in rejected] == [False] * len(rejected)


@pytest.mark.parametrize(
    ("order", "message"),
    [("(a b", "bracket is missing"), ("a b)", "bracket too many"), ("*", "repeats nothing"), ("a | + b", "repeats nothing")],
)
def test_a_broken_order_is_rejected(order: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"{message}.*{re.escape(repr(order))}"):
        read_order(order)


@pytest.mark.parametrize("order", ["a, b", "a & b", "Fetch", "fetch2", "a{2}"])
def test_an_unknown_sign_is_rejected(order: str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(order))):
        read_order(order)


# --- sequences ---

SET_UP = ["on_run_start", "on_checkpoint_load_start", "on_checkpoint_load_end", "on_data_init_start", "on_data_init_end"]
MICROBATCH = [
    "on_microbatch_start",
    *[f"on_{span}_{edge}" for span in ("forward", "loss", "backward") for edge in ("start", "end")],
    "on_microbatch_end",
]
STEP = [
    "on_fetch_start",
    "on_fetch_end",
    "on_train_step_start",
    "on_forward_backward_start",
    *MICROBATCH,
    *MICROBATCH,
    "on_forward_backward_end",
    "on_clip_gradients_start",
    "on_clip_gradients_end",
    "on_optimizer_step_start",
    "on_optimizer_step_end",
    "on_train_step_end",
]
EVALUATION = [
    "on_eval_all_start",
    "on_eval_start",
    "on_eval_step_start",
    "on_eval_forward_start",
    "on_eval_forward_end",
    "on_eval_step_end",
    "on_eval_end",
    "on_eval_all_end",
]
SAVE = ["on_checkpoint_due", "on_checkpoint_save_start", "on_checkpoint_save_end", "on_checkpoint_published"]
EXHAUSTED = ["on_fetch_start", "on_fetch_end"]


def trained(*in_epoch: str, after_epoch: tuple[str, ...] = (), after_round: tuple[str, ...] = ()) -> list[str]:
    return [
        *SET_UP,
        "on_train_start",
        "on_round_start",
        "on_epoch_start",
        *in_epoch,
        "on_epoch_end",
        *after_epoch,
        "on_round_end",
        *after_round,
        "on_train_end",
        "on_run_end",
    ]


ACCEPTED: dict[str, list[str]] = {
    "nothing but a run": ["on_run_start", "on_run_end"],
    "set-up alone": [*SET_UP, "on_run_end"],
    "one step": trained(*STEP, *EXHAUSTED),
    "an epoch stopped before its fetch": trained(*STEP),
    "everything at a step's boundary": trained(*STEP, "on_log", *EVALUATION, "on_log", *SAVE, *STEP),
    "saving on both sides of an evaluation": trained(*STEP, "on_log", *SAVE, *EVALUATION, "on_log", *SAVE),
    "everything after an epoch": trained(*STEP, after_epoch=("on_log", *EVALUATION, *SAVE)),
    "everything after a round": trained(*STEP, after_round=("on_log", *EVALUATION, "on_log", *SAVE)),
    "published many steps later": trained(*STEP, *SAVE[:-1], *STEP[:6], "on_checkpoint_published", *STEP[6:]),
    "preempted during a step": trained(*STEP[:7], "on_preempt", *STEP[7:], *SAVE),
    "trained twice": [*trained(*STEP)[:-1], *trained(*STEP)[len(SET_UP) :]],
    "standalone calls": [
        *SET_UP,
        *EVALUATION,
        "on_log",
        *SAVE,
        "on_test_start",
        "on_test_step_start",
        "on_test_forward_start",
        "on_test_forward_end",
        "on_test_step_end",
        "on_test_end",
        "on_predict_start",
        "on_predict_end",
        "on_run_end",
    ],
    "failed in a forward": [*trained(*STEP)[:15], "on_exception", "on_run_end"],
    "failed at the start": ["on_run_start", "on_exception", "on_run_end"],
    "failed after an end": [*SET_UP, "on_exception", "on_run_end"],
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_sequences_that_the_lifecycle_allows_are_accepted(name: str) -> None:
    check_events(ACCEPTED[name])


@pytest.mark.parametrize("name", [name for name in ACCEPTED if "on_exception" not in ACCEPTED[name]])
def test_no_start_or_end_may_be_missing(name: str) -> None:
    """The checker detects each single start or end that is left out."""
    events = ACCEPTED[name]
    for i, event in enumerate(events):
        if event not in POINTS:
            with pytest.raises(GrammarError):
                check_events(events[:i] + events[i + 1 :])


@pytest.mark.parametrize("name", ["one step", "everything at a step's boundary"])
def test_no_start_or_end_may_be_fired_twice(name: str) -> None:
    events = ACCEPTED[name]
    for i, event in enumerate(events):
        if event not in POINTS:
            with pytest.raises(GrammarError):
                check_events([*events[: i + 1], event, *events[i + 1 :]])


def index_after(events: list[str], event: str) -> int:
    return events.index(event) + 1


REJECTED: dict[str, tuple[list[str], str, str, str]] = {
    # the sequence before the rejected event; the event; its place; the events that were possible instead
    "a step without a fetch": (trained()[:8], "on_train_step_start", "run > train > round > epoch", "or fetch or"),
    "loss before forward": (trained(*STEP)[:13], "on_loss_start", "forward_backward > microbatch", "forward"),
    "a step without microbatches": (
        trained(*STEP)[:12],
        "on_forward_backward_end",
        "train_step > forward_backward",
        "microbatch",
    ),
    "the optimizer before clipping": (
        trained(*STEP)[: index_after(trained(*STEP), "on_forward_backward_end")],
        "on_optimizer_step_start",
        "epoch > train_step",
        "clip_gradients",
    ),
    "a record after saving": (
        trained(*STEP, "on_checkpoint_due")[: index_after(trained(*STEP, "on_checkpoint_due"), "on_checkpoint_due")],
        "on_log",
        "round > epoch",
        "checkpoint_save or eval_all or fetch, or its end",
    ),
    "two records": (
        trained(*STEP, "on_log")[: index_after(trained(*STEP, "on_log"), "on_log")],
        "on_log",
        "round > epoch",
        "eval_all or fetch or on_checkpoint_due",
    ),
    "an evaluation of nothing": ([*SET_UP, "on_eval_all_start"], "on_eval_all_end", "run > eval_all", "eval"),
    "data before the checkpoint": (["on_run_start", *SET_UP[3:]], "on_checkpoint_load_start", "run", "train"),
    "anything but a run first": ([], "on_train_start", "nothing", "run"),
    "a second run": (["on_run_start", "on_run_end"], "on_run_start", "nothing", "nothing more"),
    "an epoch without a round": (trained()[:6], "on_epoch_start", "run > train", "round, or its end"),
    "prediction inside training": (trained()[:6], "on_predict_start", "run > train", "round, or its end"),
}


@pytest.mark.parametrize("name", REJECTED)
def test_a_rejection_names_the_event_its_place_and_the_possible_events(name: str) -> None:
    before, event, place, could = REJECTED[name]
    checker = GrammarChecker()
    for noted in before:
        checker.check(noted)
    with pytest.raises(GrammarError) as raised:
        checker.check(event)
    message = str(raised.value)
    assert message.startswith(f"event {len(before) + 1}, {event}, cannot come inside ")
    assert re.search(rf"inside (\w+ > )*{re.escape(place)}: ", message), message
    assert could in message


@pytest.mark.parametrize(
    ("before", "event", "message"),
    [
        (trained()[:8], "on_round_end", "epoch is open, not round"),
        (["on_run_start"], "on_train_end", "run is open, not train"),
        ([], "on_run_end", "no run is open"),
    ],
)
def test_an_end_of_a_span_that_is_not_innermost_is_rejected(before: list[str], event: str, message: str) -> None:
    checker = GrammarChecker()
    for noted in before:
        checker.check(noted)
    with pytest.raises(GrammarError, match=f"event {len(before) + 1}, {event}, .*{message}"):
        checker.check(event)


@pytest.mark.parametrize(
    ("events", "open_spans"),
    [([], "the run, which never started"), (SET_UP, "run"), (trained(*STEP)[:11], "run > train > round > epoch > train_step")],
)
def test_an_unfinished_sequence_is_rejected_with_the_open_spans(events: list[str], open_spans: str) -> None:
    with pytest.raises(GrammarError, match=f"after {len(events)} events there is no end of {open_spans}$"):
        check_events(events)


def test_an_exception_without_the_run_s_end_is_unfinished() -> None:
    with pytest.raises(GrammarError, match="no end of run"):
        check_events(["on_run_start", "on_exception"])


@pytest.mark.parametrize("event", ["on_train_end", "on_epoch_end", "on_log", "on_preempt", "on_train_start"])
def test_after_an_exception_only_the_run_s_end_is_fired(event: str) -> None:
    checker = GrammarChecker()
    for noted in [*trained()[:8], "on_exception"]:
        checker.check(noted)
    with pytest.raises(GrammarError, match=f"{event}.*after on_exception only the run's end"):
        checker.check(event)


def test_a_second_exception_is_rejected() -> None:
    with pytest.raises(GrammarError, match=r"event 3, on_exception, .*a second exception"):
        check_events(["on_run_start", "on_exception", "on_exception", "on_run_end"])


def test_a_rejection_is_an_assertion_error_and_a_callsheet_error() -> None:
    with pytest.raises(AssertionError):
        check_events(["on_train_start"])
    with pytest.raises(CallsheetError):
        check_events(["on_train_start"])


@pytest.mark.parametrize(
    "events",
    [
        ["on_run_start", "on_run_end", "on_run_end"],
        ["on_run_start", "on_exception", "on_run_end", "on_run_end"],
        ["on_run_start", "on_exception", "on_run_end", "on_checkpoint_published"],
        ["on_run_start", "on_run_end", "on_exception"],
        ["on_run_start", "on_run_end", "on_preempt"],
        ["on_checkpoint_published", "on_run_start", "on_run_end"],
        ["on_exception", "on_run_end"],
    ],
    ids=[
        "two ends",
        "two ends after an exception",
        "published after the end",
        "exception after the end",
        "preempted after the end",
        "published before",
        "no start",
    ],
)
def test_nothing_is_fired_outside_the_run(events: list[str]) -> None:
    """`on_run_start` is the first event, and `on_run_end` the last one, exactly once."""
    with pytest.raises(GrammarError, match="no run is open"):
        check_events(events)


def test_an_unknown_event_is_rejected_by_name() -> None:
    with pytest.raises(UnknownEventError, match="'on_train_stepend'; did you mean 'on_train_step_end'"):
        check_events(["on_run_start", "on_train_stepend"])


# --- other grammars ---


def test_orders_of_a_host_that_fetches_ahead() -> None:
    ahead = [*EXHAUSTED, *EXHAUSTED, *STEP[2:], *STEP[2:]]
    order = {"epoch": "(fetch+ train_step*)*"}
    check_events(trained(*ahead), orders=order)
    with pytest.raises(GrammarError, match="on_train_step_start"):
        check_events(trained(*ahead))
    with pytest.raises(GrammarError, match=r"on_log.*epoch: inside epoch there could come fetch or train_step, or its end"):
        check_events(trained(*STEP, "on_log"), orders=order)


def test_other_orders_do_not_change_the_lifecycle_s_order() -> None:
    check_events(trained(), orders={"epoch": ""})
    with pytest.raises(GrammarError):
        check_events(trained(*STEP), orders={"epoch": ""})
    check_events(trained(*STEP))


def test_a_sequence_may_begin_within_a_span() -> None:
    check_events(["on_round_start", "on_epoch_start", *STEP, "on_epoch_end", "on_log", "on_round_end"], within="train")
    check_events(STEP, within="epoch")
    check_events([], within="train")
    with pytest.raises(
        GrammarError,
        match="on_fetch_start, cannot come inside train: inside train there could come eval_all or on_checkpoint_due or on_log or round",
    ):
        check_events(STEP, within="train")
    with pytest.raises(GrammarError, match="no end of epoch > train_step > forward_backward"):
        check_events(STEP[:4], within="epoch")


def test_within_a_span_an_exception_is_followed_by_the_run_s_end() -> None:
    check_events([*STEP[:5], "on_exception", "on_run_end"], within="epoch")


def test_the_end_of_the_enclosing_span_is_accepted_as_the_last_event() -> None:
    check_events([*STEP, "on_epoch_end"], within="epoch")
    for event in ("on_fetch_start", "on_epoch_end", "on_run_start", "on_run_end", "on_checkpoint_published", "on_exception"):
        with pytest.raises(GrammarError, match=f"event {len(STEP) + 2}, {event}, .*the span that the sequence began in is over"):
            check_events([*STEP, "on_epoch_end", event], within="epoch")
    with pytest.raises(GrammarError, match=r"on_train_step_end, .*train_step still needs forward_backward"):
        check_events(["on_train_step_end"], within="train_step")


def test_a_misspelled_span_is_rejected() -> None:
    with pytest.raises(ConfigError, match="'trian'; did you mean 'train'"):
        GrammarChecker(orders={"trian": "round*"})
    with pytest.raises(ConfigError, match="'trian'; did you mean 'train'"):
        GrammarChecker(within="trian")


# --- windows ---


def readable_fields_at(events: list[str]) -> list[tuple[str, frozenset[str]]]:
    checker = GrammarChecker()
    seen = []
    for event in events:
        checker.check(event)
        seen.append((event, checker.readable() - frozenset(ALWAYS_AVAILABLE)))
    return seen


def test_the_fields_of_a_step_are_those_of_the_table() -> None:
    seen = dict(readable_fields_at(trained(*STEP)))
    always = {"optimizer", "scheduler"}
    step = always | {"batch"}
    assert {event: seen[event] - always for event in ("on_run_start", "on_checkpoint_load_start", "on_run_end")} == {
        "on_run_start": frozenset(),
        "on_checkpoint_load_start": frozenset(),
        "on_run_end": frozenset(),
    }
    assert seen["on_run_end"] == always
    assert seen["on_checkpoint_load_end"] == {"checkpoint"}
    assert seen["on_fetch_start"] == always
    assert seen["on_fetch_end"] == seen["on_forward_backward_start"] == step
    assert seen["on_microbatch_start"] == seen["on_forward_start"] == step | {"microbatch"}
    assert seen["on_forward_end"] == seen["on_loss_start"] == step | {"microbatch", "outputs"}
    assert seen["on_loss_end"] == step | {"microbatch", "outputs", "loss"}
    assert seen["on_backward_start"] == seen["on_microbatch_end"] == step | {"microbatch", "loss"}
    assert seen["on_forward_backward_end"] == seen["on_clip_gradients_start"] == step | {"loss"}
    assert seen["on_clip_gradients_end"] == step | {"loss", "grad_norm"}
    assert seen["on_optimizer_step_start"] == step | {"loss", "grad_norm", "learning_rate"}
    assert seen["on_optimizer_step_end"] == step | {"loss", "grad_norm", "learning_rate", "step_skipped"}
    assert seen["on_train_step_end"] == step | {"loss", "grad_norm", "learning_rate", "step_skipped", "loss_dict"}
    assert seen["on_epoch_end"] == seen["on_train_end"] == always


def test_a_second_microbatch_starts_without_fields_of_the_first() -> None:
    starts = [fields for event, fields in readable_fields_at(trained(*STEP)) if event == "on_microbatch_start"]
    assert len(starts) == 2
    assert starts[0] == starts[1] == {"optimizer", "scheduler", "batch", "microbatch"}


def test_a_batch_without_a_step_is_unavailable_after_its_epoch() -> None:
    seen = readable_fields_at(trained(*STEP, *EXHAUSTED))
    assert seen[-5][0] == "on_fetch_end"
    assert "batch" in seen[-5][1]
    assert all("batch" not in fields for _, fields in seen[-4:])


def test_the_fields_of_an_evaluation_and_of_saving() -> None:
    seen = dict(readable_fields_at(trained(*STEP, "on_log", *EVALUATION, "on_log", *SAVE)))
    always = {"optimizer", "scheduler"}
    assert seen["on_log"] == always | {"record"}
    assert seen["on_eval_all_start"] == always | {"standalone"}
    assert seen["on_eval_start"] == always | {"standalone", "eval_name"}
    assert seen["on_eval_step_start"] == always | {"standalone", "eval_name", "batch"}
    assert seen["on_eval_forward_end"] == seen["on_eval_step_end"] == always | {"standalone", "eval_name", "batch", "outputs"}
    assert seen["on_eval_end"] == always | {"standalone", "eval_name", "eval_losses"}
    assert seen["on_eval_all_end"] == always | {"standalone", "eval_results"}
    assert seen["on_checkpoint_due"] == always | {"boundary"}
    assert seen["on_checkpoint_save_start"] == seen["on_checkpoint_save_end"] == always | {"checkpoint"}
    assert seen["on_checkpoint_published"] == always | {"checkpoint"}


def test_after_an_exception_only_it_and_its_span_are_available() -> None:
    seen = readable_fields_at([*trained(*STEP)[:14], "on_exception", "on_run_end"])
    assert seen[-2][1] >= {"exception", "span"}
    assert seen[-1][1] == {"optimizer", "scheduler"}


def test_fields_that_are_always_available_are_readable_at_every_event() -> None:
    checker = GrammarChecker()
    for event in trained(*STEP):
        checker.check(event)
        assert checker.readable() >= frozenset(ALWAYS_AVAILABLE)


@pytest.mark.parametrize("name", ["one step", "everything at a step's boundary", "everything after a round"])
def test_the_checker_s_fields_equal_those_of_the_table(name: str) -> None:
    """`fields_available` uses an event's position in the canonical order, the checker the events that were fired."""
    for event, readable in readable_fields_at(ACCEPTED[name]):
        if event not in ANYWHERE_EVENTS:
            assert readable <= set(fields_available(event)), event


# --- the recorder ---


class Dummy(Callback):
    def on_log(self, ctx: Context) -> None: ...


def test_the_recorder_receives_every_event_in_order_with_the_readable_fields() -> None:
    recorder = Recorder(fields=("record", "step"))
    manager = CallbackManager([recorder, Dummy()])
    ctx = Context(RunInfo("test"))
    for number, event in enumerate(EVENTS):
        ctx.step = number
        if event == "on_log":
            ctx.record = "the record"  # type: ignore[assignment]  # any value will do
        manager.fire(event, ctx)
        ctx.close(event)
    assert recorder.events == list(EVENTS)
    assert [noted.step for noted in recorder.recorded] == list(range(len(EVENTS)))
    assert recorder.values["record"] == [("on_log", "the record")]
    assert recorder.values["step"] == list(zip(EVENTS, range(len(EVENTS)), strict=True))
    assert {noted.event: noted.fields for noted in recorder.recorded if noted.fields} == {"on_log": {"record"}}


def test_the_recorder_is_called_last_and_reads_what_others_wrote() -> None:
    class Writes(Callback):
        def on_loss_end(self, ctx: Context) -> None:
            ctx.outputs = 2.0

    recorder = Recorder(fields=("outputs",))
    manager = CallbackManager([recorder, Writes()])
    ctx = Context(RunInfo("test"))
    ctx.outputs = 1.0
    manager.fire("on_loss_end", ctx)
    assert recorder.values["outputs"] == [("on_loss_end", 2.0)]


def test_the_recorder_rejects_an_unknown_field() -> None:
    with pytest.raises(CallsheetError, match="learning_rat"):
        Recorder(fields=("learning_rat",))


def test_every_order_of_the_table_can_be_read_and_has_known_names() -> None:
    for span in SPANS.values():
        assert read_order(span.order).first() <= SPANS.keys() | POINTS.keys()
    assert set(FIELDS) > set(ALWAYS_AVAILABLE)
