"""The lifecycle table is consistent, and allows and forbids the right sequences of events."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from callsheet.core.lifecycle import (
    ALWAYS_AVAILABLE,
    ANYWHERE_EVENTS,
    BOUNDARY_ORDER,
    EVENTS,
    FIELDS,
    POINTS,
    SPAN_OF,
    SPANS,
    canonical_order,
    description,
    events_within,
    fields_available,
    names_in,
    tree,
)


def matches(order: str, recorded: str) -> bool:
    """Return whether the names in `recorded`, separated by spaces, are a sequence that `order` allows."""
    pattern = re.sub(r"[a-z_]+", lambda name: f"(?:{name[0]}/)", order).replace(" ", "")
    return re.fullmatch(pattern, "".join(f"{name}/" for name in recorded.split())) is not None


def test_every_span_has_two_events_and_every_point_one() -> None:
    expected = [event for name in SPANS for event in (f"on_{name}_start", f"on_{name}_end")] + list(POINTS)
    assert sorted(EVENTS) == sorted(expected)
    assert len(set(EVENTS)) == len(EVENTS)
    assert set(SPAN_OF) == set(EVENTS) - set(POINTS)


def test_tables_are_keyed_by_name() -> None:
    assert all(name == span.name for name, span in SPANS.items())
    assert all(name == point.name for name, point in POINTS.items())
    assert all(name == field.name for name, field in FIELDS.items())


def test_orders_name_only_spans_and_points() -> None:
    for span in SPANS.values():
        assert set(names_in(span.order)) <= SPANS.keys() | POINTS.keys(), span.name


def test_every_span_and_point_occurs_in_the_order_of_a_span() -> None:
    placed = {name for span in SPANS.values() for name in names_in(span.order)}
    assert SPANS.keys() - placed == {"run"}
    assert POINTS.keys() - placed == ANYWHERE_EVENTS
    assert sorted(ANYWHERE_EVENTS) == ["on_checkpoint_published", "on_exception", "on_preempt"]


def test_no_span_can_occur_inside_itself() -> None:
    def below(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"{name} inside {path}"
        for child in names_in(SPANS[name].order):
            if child in SPANS:
                below(child, (*path, name))

    below("run", ())


def test_the_run_s_events_are_first_and_last() -> None:
    assert EVENTS[0] == "on_run_start"
    assert EVENTS[-1] == "on_run_end"
    assert canonical_order() == EVENTS


@pytest.mark.parametrize("span", SPANS)
def test_children_are_between_their_span_s_start_and_end_in_the_canonical_order(span: str) -> None:
    start, end = EVENTS.index(SPANS[span].start_event), EVENTS.index(SPANS[span].end_event)
    assert start < end
    for child in names_in(SPANS[span].order):
        for event in (child,) if child in POINTS else (SPANS[child].start_event, SPANS[child].end_event):
            assert start < EVENTS.index(event) < end, event


def test_the_canonical_order_of_a_step_and_its_boundary() -> None:
    drawn = [
        "on_fetch_start",
        "on_fetch_end",
        "on_train_step_start",
        "on_forward_backward_start",
        "on_microbatch_start",
        "on_forward_start",
        "on_forward_end",
        "on_loss_start",
        "on_loss_end",
        "on_backward_start",
        "on_backward_end",
        "on_microbatch_end",
        "on_forward_backward_end",
        "on_clip_gradients_start",
        "on_clip_gradients_end",
        "on_optimizer_step_start",
        "on_optimizer_step_end",
        "on_train_step_end",
        "on_log",
        "on_eval_all_start",
        "on_eval_start",
        "on_eval_step_start",
        "on_eval_forward_start",
        "on_eval_forward_end",
        "on_eval_step_end",
        "on_eval_end",
        "on_eval_all_end",
        "on_checkpoint_due",
        "on_checkpoint_save_start",
        "on_checkpoint_save_end",
        "on_epoch_end",
        "on_round_end",
        "on_train_end",
    ]
    start = EVENTS.index(drawn[0])
    assert list(EVENTS[start : start + len(drawn)]) == drawn


@pytest.mark.parametrize(
    "recorded",
    [
        "",
        "on_log",
        "eval_all",
        "on_log eval_all on_log",
        "on_log eval_all on_checkpoint_due checkpoint_save",
        "on_checkpoint_due",
        "on_log on_checkpoint_due checkpoint_save eval_all on_log on_checkpoint_due checkpoint_save",
    ],
)
def test_a_boundary_allows_this_sequence(recorded: str) -> None:
    assert matches(BOUNDARY_ORDER, recorded)


@pytest.mark.parametrize(
    "recorded",
    [
        "checkpoint_save",
        "on_checkpoint_due on_log",
        "eval_all eval_all",
        "on_checkpoint_due on_checkpoint_due",
        "on_log on_log on_log",
        "checkpoint_save on_checkpoint_due",
    ],
)
def test_a_boundary_forbids_this_sequence(recorded: str) -> None:
    assert not matches(BOUNDARY_ORDER, recorded)


def test_every_step_follows_a_fetch_and_an_epoch_may_end_with_a_fetch() -> None:
    order = SPANS["epoch"].order
    assert matches(order, "fetch train_step fetch train_step on_log fetch")
    assert matches(order, "fetch")
    assert not matches(order, "train_step")
    assert matches(order, "fetch fetch train_step fetch train_step")  # gradients accumulated over several batches
    assert not matches(order, "fetch train_step train_step")


def test_a_step_has_at_least_one_microbatch() -> None:
    assert matches(SPANS["forward_backward"].order, "microbatch microbatch")
    assert not matches(SPANS["forward_backward"].order, "")


@given(st.lists(st.sampled_from(["on_log", "eval_all", "on_checkpoint_due", "checkpoint_save"]), max_size=7))
def test_at_a_boundary_a_save_follows_on_checkpoint_due_and_the_record_comes_first(recorded: list[str]) -> None:
    if matches(BOUNDARY_ORDER, " ".join(recorded)):
        assert all(recorded[i - 1] == "on_checkpoint_due" for i, name in enumerate(recorded) if name == "checkpoint_save")
        assert recorded.count("eval_all") <= 1
        if "on_log" in recorded and "eval_all" not in recorded:
            assert recorded[0] == "on_log"


def test_windows_and_writable_events_are_events() -> None:
    for field in FIELDS.values():
        for opens, closes in field.windows:
            assert EVENTS.index(opens) <= EVENTS.index(closes), field.name
        for event in field.writable:
            assert field.name in fields_available(event), f"{field.name} is writable at {event}, where it cannot be read"
        if field.kept_until:
            assert field.kept_until in EVENTS


def test_every_field_has_a_known_kind_of_relation_between_ranks() -> None:
    assert {field.kind for field in FIELDS.values()} <= {"replicated", "local", "reduced", "agreed"}


def test_fields_without_a_window_are_always_available() -> None:
    assert ALWAYS_AVAILABLE == ("event", "run", "state", "step", "epoch", "model", "user_state", "control")
    assert all(not set(fields_available(event)) & set(ALWAYS_AVAILABLE) for event in EVENTS)


@pytest.mark.parametrize(
    ("event", "recorded"),
    [
        ("on_run_start", ()),
        ("on_fetch_start", ("optimizer", "scheduler")),
        ("on_forward_end", ("optimizer", "scheduler", "batch", "microbatch", "outputs")),
        ("on_backward_end", ("optimizer", "scheduler", "batch", "microbatch", "loss")),
        ("on_forward_backward_end", ("optimizer", "scheduler", "batch", "loss")),
        ("on_log", ("optimizer", "scheduler", "record")),
        ("on_test_end", ("optimizer", "scheduler", "eval_losses")),
        ("on_predict_forward_end", ("optimizer", "scheduler", "batch", "outputs")),
        ("on_exception", ("exception", "span")),
        ("on_checkpoint_published", ("checkpoint",)),
        ("on_run_end", ("optimizer", "scheduler")),
    ],
)
def test_fields_available_returns_the_fields_of_an_event(event: str, recorded: tuple[str, ...]) -> None:
    assert fields_available(event) == recorded


def test_the_step_end_has_the_results_of_the_step() -> None:
    expected = {"optimizer", "scheduler", "batch", "loss", "loss_dict", "grad_norm", "learning_rate", "step_skipped"}
    assert set(fields_available("on_train_step_end")) == expected


def test_every_event_has_the_description_of_its_span_or_point() -> None:
    sentences = [description(event) for event in EVENTS]
    assert all(sentence.endswith(".") for sentence in sentences)
    assert description("on_train_start") == SPANS["train"].start
    assert description("on_train_end") == SPANS["train"].end
    assert description("on_log") == POINTS["on_log"].fired


def test_names_in_returns_each_name_once_in_order() -> None:
    assert names_in("(b a | b on_log?)* a+") == ["b", "a", "on_log"]


def test_the_tree_has_a_line_for_each_span_and_point_indented_by_depth() -> None:
    lines = tree().splitlines()
    names = [line.strip() for line in lines[:-1]]
    assert sorted(names) == sorted([*SPANS, *(POINTS.keys() - ANYWHERE_EVENTS)])
    assert lines[0] == "run"
    assert "   train" in lines
    assert "            train_step" in lines  # run, train, round, epoch
    assert lines[-1] == "anywhere: on_checkpoint_published, on_preempt, on_exception"


def test_the_events_within_spans() -> None:
    assert events_within("test") == (
        *(
            "on_test_start",
            "on_test_step_start",
            "on_test_forward_start",
            "on_test_forward_end",
            "on_test_step_end",
            "on_test_end",
        ),
    )
    assert events_within("predict", "eval_step")[:2] == ("on_eval_step_start", "on_eval_forward_start")
    assert set(events_within("run")) <= set(EVENTS)
    assert {"on_train_step_end", "on_log", "on_epoch_start"} <= set(events_within("train"))
