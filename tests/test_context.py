"""The context: windows of fields, what sibling contexts share, and what handlers may not do."""

from collections.abc import Callable
from typing import Any

import pytest

from callsheet import CallbackManager, CallsheetError, CheckpointInfo, Context, MetricsRecord, RunInfo, TrainState
from callsheet.core.events import Event
from callsheet.core.lifecycle import ALWAYS_AVAILABLE, EVENTS, FIELDS
from callsheet.core.ranks import Ranks
from callsheet.core.time import Time, Timestamp
from callsheet.errors import ConfigError, FieldNotAvailable, RequestRejected
from callsheet.run.metrics import MetricLog

WINDOWED = [name for name in FIELDS if name not in ALWAYS_AVAILABLE]


def context() -> Context:
    return Context(RunInfo("test"))


def fires(ctx: Context, event: Event) -> None:
    """Let the context belong to a manager that is firing this event."""
    ctx.dispatcher = CallbackManager()
    ctx.dispatcher.current = event


@pytest.mark.parametrize("name", ALWAYS_AVAILABLE)
def test_fields_of_every_event_are_available_from_the_start(name: str) -> None:
    assert context().has(name)


@pytest.mark.parametrize("name", WINDOWED)
def test_an_unavailable_field_names_its_window(name: str) -> None:
    ctx = context()
    with pytest.raises(FieldNotAvailable) as caught:
        getattr(ctx, name)
    message = str(caught.value)
    assert message.startswith(f"ctx.{name} is not available here; it is available ")
    for window in FIELDS[name].windows:
        assert all(event in message for event in window)
    assert not hasattr(ctx, name)
    assert not ctx.has(name)


def test_the_message_names_the_event_at_which_it_was_read() -> None:
    ctx = context()
    fires(ctx, Event.TRAIN_START)
    with pytest.raises(FieldNotAvailable, match=r"^ctx.record is not available at on_train_start; it is available at on_log$"):
        _ = ctx.record
    with pytest.raises(FieldNotAvailable, match=r"it is available from on_clip_gradients_end to on_train_step_end$"):
        _ = ctx.grad_norm


def test_field_not_available_is_an_attribute_error_and_a_callsheet_error() -> None:
    assert issubclass(FieldNotAvailable, AttributeError)
    assert issubclass(FieldNotAvailable, CallsheetError)
    assert getattr(context(), "batch", "default") == "default"


def test_an_attribute_that_is_not_a_field_names_the_nearest_field() -> None:
    ctx: Any = context()
    with pytest.raises(AttributeError, match=r"the context has no field 'los'; did you mean 'loss'\?") as caught:
        _ = ctx.los
    assert not isinstance(caught.value, FieldNotAvailable)


def test_setting_an_attribute_that_is_not_a_field_is_an_error() -> None:
    ctx: Any = context()
    with pytest.raises(AttributeError):
        ctx.nonsense = 1


def test_a_field_can_be_none() -> None:
    ctx = context()
    ctx.batch = None
    assert ctx.has("batch")
    assert ctx.batch is None


@pytest.mark.parametrize("name", WINDOWED)
def test_every_window_closes_at_its_end(name: str) -> None:
    for _, closes in FIELDS[name].windows:
        ctx = context()
        setattr(ctx, name, 1)
        ctx.close(closes)
        assert not ctx.has(name), closes


def test_closing_a_window_closes_no_other_window() -> None:
    for event in EVENTS:
        ctx = context()
        for name in WINDOWED:
            setattr(ctx, name, 1)
        ctx.close(event)
        closed = {name for name in WINDOWED if not ctx.has(name)}
        assert closed == {
            name
            for name in WINDOWED
            if event in {closes for _, closes in FIELDS[name].windows} or event == FIELDS[name].kept_until
        }


def test_a_window_that_was_never_opened_can_be_closed() -> None:
    ctx = context()
    ctx.close("on_train_step_end")
    assert not ctx.has("batch")


def test_close_all_keeps_the_fields_of_every_event() -> None:
    ctx = context()
    ctx.batch, ctx.outputs, ctx.step = 1, 2, 7
    ctx.close_all()
    assert not ctx.has("batch")
    assert not ctx.has("outputs")
    assert ctx.step == 7
    assert all(ctx.has(name) for name in ALWAYS_AVAILABLE)


def test_a_kept_field_is_available_until_the_end_of_the_step() -> None:
    ctx = context()
    ctx.kept = frozenset({"outputs"})
    ctx.outputs = 1
    ctx.close("on_loss_end")
    assert ctx.outputs == 1
    ctx.close("on_train_step_end")
    assert not ctx.has("outputs")


@pytest.mark.parametrize("name", [name for name in WINDOWED if FIELDS[name].kept_until])
def test_a_kept_field_is_closed_after_the_end_of_its_windows_and_of_the_span_that_keeps_it(name: str) -> None:
    ctx = context()
    ctx.kept = frozenset({name})
    setattr(ctx, name, 1)
    for _, closes in (*FIELDS[name].windows, ("", FIELDS[name].kept_until)):
        ctx.close(closes)
    assert not ctx.has(name)


def test_kept_outputs_do_not_outlive_an_evaluation_step() -> None:
    ctx = context()
    ctx.kept = frozenset({"outputs"})
    for closes in ("on_eval_step_end", "on_test_step_end", "on_predict_step_end"):
        ctx.outputs = 1
        ctx.close(closes)
        assert not ctx.has("outputs"), closes


def test_a_sibling_context_shares_the_run_but_not_the_fields_with_a_window() -> None:
    ctx = context()
    ctx.step, ctx.epoch, ctx.model = 5, 2, object()
    ctx.optimizer, ctx.scheduler = object(), None
    ctx.batch = 1
    other = ctx.sibling()
    for name in ("run", "state", "step", "epoch", "model", "optimizer", "scheduler", "control", "user_state"):
        assert getattr(other, name) is getattr(ctx, name), name
    assert not other.has("batch")
    assert other.event is None
    other.outputs = 3
    assert not ctx.has("outputs")


def test_a_sibling_made_before_the_optimizer_has_no_optimizer() -> None:
    assert not context().sibling().has("optimizer")


def test_a_sibling_logs_to_the_same_metric_log() -> None:
    log = MetricLog()
    ctx = Context(RunInfo("test"), accumulator=log)
    ctx.log({"a/x": 1.0}, over="sum")
    ctx.sibling().log({"a/x": 2.0}, over="sum")
    assert log.take() == {"a/x": 3.0}


def test_a_sibling_can_have_a_metric_log_of_its_own() -> None:
    log, other = MetricLog(), MetricLog()
    ctx = Context(RunInfo("test"), accumulator=log)
    ctx.sibling(other).log({"a/x": 2.0})
    assert (log.take(), other.take()) == ({}, {"a/x": 2.0})


def test_log_passes_its_arguments_to_the_metric_log() -> None:
    log = MetricLog()
    ctx = Context(RunInfo("test"), accumulator=log)
    ctx.log({"a/x": 1.0}, over="mean", weight=3)
    ctx.log({"a/x": 5.0}, over="mean", weight=1)
    assert log.take() == {"a/x": 2.0}


def test_logging_without_a_metric_log_does_nothing() -> None:
    context().log({"a/x": 1.0})  # no loop reads the metric, so it is discarded
    context().log_table("t", ["a"], [[1]])


@pytest.mark.parametrize(
    ("call", "method", "payload"),
    [
        (lambda ctx: ctx.log_hyperparameters({"lr": 1}), "log_hyperparameters", {"values": {"lr": 1}}),
        (
            lambda ctx: ctx.log_table("t", ("a", "b"), [(1, 2)]),
            "log_table",
            {"name": "t", "columns": ["a", "b"], "rows": [[1, 2]]},
        ),
        (lambda ctx: ctx.log_images("i", ("x",)), "log_images", {"name": "i", "images": ["x"]}),
    ],
)
def test_hyperparameters_tables_and_images_are_sent_to_loggers(
    call: Callable[[Context], None], method: str, payload: dict[str, Any]
) -> None:
    recorded: list[tuple[str, Context, dict[str, Any]]] = []

    def line(method: str, ctx: Context, /, **payload: Any) -> None:
        recorded.append((method, ctx, payload))

    ctx = Context(RunInfo("test"), loggers=line)
    call(ctx)
    assert recorded == [(method, ctx, payload)]


def test_a_file_is_sent_to_loggers_as_a_path() -> None:
    recorded: list[Any] = []
    ctx = Context(RunInfo("test"), loggers=lambda method, ctx, /, **payload: recorded.append((method, payload)))
    ctx.log_file("weights", "a/b.bin")
    ((method, payload),) = recorded
    assert method == "log_file"
    assert payload["path"].parts == ("a", "b.bin")


def test_gather_on_a_single_rank_returns_its_value() -> None:
    assert context().gather(3) == [3]


def test_gather_is_rejected_in_a_handler_that_runs_on_some_ranks_only() -> None:
    ctx = context()
    ctx.control.in_gate = True
    with pytest.raises(RequestRejected, match="some ranks only"):
        ctx.gather(3)


def test_the_run_has_the_ranks_of_this_process() -> None:
    run = RunInfo("test", ranks=Ranks(rank=3, local_rank=1, node_rank=1, world_size=4))
    assert (run.rank, run.local_rank, run.node_rank, run.world_size) == (3, 1, 1, 4)
    assert not run.is_world_process_zero
    assert not run.is_local_process_zero
    assert RunInfo("test", ranks=Ranks(rank=2, local_rank=0, node_rank=1, world_size=4)).is_local_process_zero
    assert RunInfo("test").is_world_process_zero


def test_the_state_has_the_elapsed_fraction_and_whether_it_is_complete() -> None:
    state = TrainState(max_duration=Time("10ba"), timestamp=Timestamp(batch=4))
    assert state.elapsed == 0.4
    assert TrainState().elapsed is None
    assert not state.is_complete
    assert not TrainState().is_complete
    assert TrainState(max_duration=Time("4ba"), timestamp=Timestamp(batch=4)).is_complete


def test_by_default_a_checkpoint_was_requested_by_nobody_and_is_finite() -> None:
    info = CheckpointInfo("a", step=1, epoch=0, kind="requested")
    assert (info.requested_by, info.is_finite) == ((), True)


def test_two_contexts_share_no_mutable_objects() -> None:
    one, other = context(), context()
    assert one.user_state is not other.user_state
    assert one.control is not other.control
    assert one.state is not other.state


def test_values_logged_at_on_log_that_are_the_same_on_all_ranks_are_added_to_the_record() -> None:
    log = MetricLog()
    ctx = Context(RunInfo("test"), accumulator=log)
    fires(ctx, Event.LOG)
    ctx.record = MetricsRecord(3, {"train/loss": 1.0})
    earlier = ctx.record
    ctx.log({"speed/steps": 2, ("norm/a", "norm/b"): [3.0, 4.0]}, across="same")
    ctx.log({"later/mean": 5.0})
    assert ctx.record.values == {"train/loss": 1.0, "speed/steps": 2.0, "norm/a": 3.0, "norm/b": 4.0}
    assert earlier.values == {"train/loss": 1.0}  # a kept record has its old values
    assert log.take() == {"later/mean": 5.0}


@pytest.mark.parametrize("value", ["fast", None, [1.0, 2.0]])
def test_a_value_that_is_not_a_number_is_not_added_to_a_record(value: object) -> None:
    ctx = context()
    fires(ctx, Event.LOG)
    ctx.record = MetricsRecord(3, {})
    with pytest.raises(ConfigError, match=r"^speed/steps: .* is not one number a name"):
        ctx.log({"speed/steps": value}, across="same")


@pytest.mark.parametrize(
    ("name", "meant"), [("lr", "learning_rate"), ("logs", "record"), ("global_step", "step"), ("los", "loss")]
)
def test_an_unknown_field_names_the_intended_one(name: str, meant: str) -> None:
    with pytest.raises(AttributeError, match=rf"^the context has no field '{name}'; did you mean '{meant}'\?$"):
        getattr(Context(RunInfo("run")), name)
