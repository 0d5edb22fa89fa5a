"""callsheet's callbacks in a loop that fires the same events as Megatron Bridge's.

The tests use the package's own interface if it is installed, and callsheet's copy of it.
"""

from __future__ import annotations

import functools
import gc
import math
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from callsheet import Callback, Context
from callsheet import CallbackManager as OwnManager
from callsheet.bridges.megatron_bridge import MegatronBridgeHost, host
from callsheet.bridges.megatron_bridge import names as interface_copy
from callsheet.callbacks import (
    EMA,
    CheckpointSaver,
    EarlyStopper,
    History,
    Lambda,
    LRMonitor,
    NaNMonitor,
    SpeedMonitor,
    ThresholdStopper,
)
from callsheet.core.lifecycle import EVENTS
from callsheet.errors import NotSupported
from callsheet.testing import Recorder, check_events, run_ranks

from .hidden import hide
from .loops.job import POINTS
from .loops.megatron_bridge import Loop, Optimizer, configuration, interface

real = interface()


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(
    params=[interface_copy, real] if real is not None else [interface_copy], ids=lambda names: names.__name__.rpartition(".")[2]
)
def names(request: pytest.FixtureRequest) -> ModuleType:
    return request.param  # type: ignore[no-any-return]


def loop(folder: Path | None, hosted: Any, *, names: ModuleType = interface_copy, scheduler: bool = False, **values: Any) -> Loop:
    given = [hosted] if isinstance(hosted, MegatronBridgeHost) else hosted
    return Loop(configuration(folder, **values), POINTS, given, names=names, scheduler=scheduler)


def weights(trained: Loop) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in trained.model[0].parameters()]


class RequestsAtStep(Callback):
    """Makes a request at an event of a step."""

    def __init__(self, what: str, step: int, event: str = "on_train_step_end") -> None:
        self.what, self.step = what, step
        setattr(self, event, self._request)

    def _request(self, ctx: Context) -> None:
        if ctx.step == self.step:
            getattr(ctx.control, self.what)("asked")


class RecordsOutcomes(Callback):
    """Records how runs end."""

    def __init__(self) -> None:
        self.recorded: list[str] = []

    def on_exception(self, ctx: Context) -> None:
        self.recorded.append(f"{type(ctx.exception).__name__} in {ctx.span}")

    def on_run_end(self, ctx: Context) -> None:
        self.recorded.append(str(ctx.run.outcome))
        self.at = ctx.state.timestamp


@pytest.mark.parametrize("micro", [4, 2])
def test_training_is_unchanged_and_every_event_is_fired(micro: int, names: ModuleType) -> None:
    recorder, history = Recorder(fields=("grad_norm", "learning_rate", "loss_dict", "eval_losses", "batch")), History()
    hosted = host([recorder, history, SpeedMonitor(), LRMonitor(), NaNMonitor()])
    values: dict[str, Any] = {"train__micro_batch_size": micro, "logger__log_interval": 1}
    with_them = loop(None, hosted, names=names, scheduler=True, **values)
    with_them.run()
    without = loop(None, None, names=names, scheduler=True, **values)
    without.run()
    assert all(torch.equal(a, b) for a, b in zip(weights(with_them), weights(without), strict=True))
    check_events(recorder.events)
    counts = {event: recorder.events.count(event) for event in EVENTS}
    microbatches = 4 // micro
    assert counts["on_train_step_end"] == counts["on_fetch_end"] == counts["on_optimizer_step_end"] == 12
    assert counts["on_forward_end"] == counts["on_backward_end"] == counts["on_microbatch_end"] == 12 * microbatches
    assert counts["on_eval_all_end"] == 3  # after steps 6 and 12, and after training
    assert counts["on_eval_step_end"] == counts["on_eval_forward_end"] == 9
    assert counts["on_test_end"] == 1
    assert counts["on_test_step_end"] == 3
    assert recorder.events.index("on_train_end") < recorder.events.index("on_test_start")
    assert recorder.events[-1] == "on_run_end"
    assert history["train/loss"] == pytest.approx(without.losses)
    assert history["validation/loss"] == pytest.approx(without.evaluated[:3])
    assert history["test/loss"] == pytest.approx(without.evaluated[3:])
    assert history["train/load_balancing_loss"] == pytest.approx([2 * loss for loss in without.losses])
    assert history["lr/Optimizer/0"] == pytest.approx([0.02 * 0.9**step for step in range(12)])  # the rate that the step used
    recorded = [value for event, value in recorder.values["grad_norm"] if event == "on_train_step_end"]
    assert len(recorded) == 12
    assert all(isinstance(norm, Tensor) and norm > 0 for norm in recorded)
    assert set(recorder.values["loss_dict"][0][1]) == {"loss", "load_balancing_loss"}


def test_samples_and_tokens_are_counted() -> None:
    ending = RecordsOutcomes()
    loop(None, host([ending]), model__seq_length=7).run()
    assert (ending.at.batch, ending.at.sample, ending.at.token) == (12, 12 * 4, 12 * 4 * 7)


def test_the_recorded_learning_rate_is_the_step_s_without_listeners_to_the_optimizer() -> None:
    trained = loop(None, host([history := History()]), scheduler=True, train__eval_iters=0, logger__log_interval=1)
    trained.run()
    assert history["train/learning_rate"] == pytest.approx([0.02 * 0.9**step for step in range(12)])


def test_the_model_has_hooks_only_while_events_have_listeners() -> None:
    counts: list[int] = []

    class CountsHooks(Callback):
        def on_log(self, ctx: Context) -> None:
            counts.append(len(trained.model[0]._forward_hooks))

    trained = loop(None, host(OwnManager([CountsHooks()], costs="off")))
    trained.run()
    without_listeners = len(counts)
    assert counts == [0] * without_listeners
    assert without_listeners
    trained = loop(None, host([CountsHooks(), Recorder()]))
    trained.run()
    assert counts[without_listeners:][:6] == [1] * 6  # the next line shows that no hook is left after training
    assert not trained.model[0]._forward_hooks
    assert not trained.optimizer.optimizer._optimizer_step_pre_hooks


@pytest.mark.parametrize("event", ["on_backward_end", "on_backward_start", "on_loss_end", "on_microbatch_end", ""])
def test_the_outputs_have_a_backward_hook_only_if_it_has_listeners(event: str) -> None:
    recorded: list[str] = []
    outputs: list[Tensor] = []

    def keep(ctx: Context) -> None:
        outputs.append(ctx.outputs)

    given = Lambda(on_forward_end=keep, on_optimizer_step_end=lambda ctx: recorded.append("on_optimizer_step_end"))
    functions: dict[str, Any] = {event: lambda ctx: recorded.append(event)}
    listeners = [Lambda(**functions)] if event else []
    loop(None, host([given, *listeners]), train__train_iters=2, train__micro_batch_size=2).run()
    assert [bool(each._backward_hooks) for each in outputs] == [bool(event)] * 4
    assert recorded == [*([event] * 2 if event else []), "on_optimizer_step_end"] * 2


def test_a_callback_can_replace_microbatch_and_outputs() -> None:
    class ZeroesMicrobatchAndOutputs(Callback):
        def on_forward_end(self, ctx: Context) -> None:
            ctx.outputs = ctx.outputs * 0

        def on_microbatch_start(self, ctx: Context) -> None:
            seen.append(ctx.microbatch)
            ctx.microbatch = ctx.microbatch * 0

    class RecordsInputs(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, inputs: Tensor) -> Any:
            given.append(inputs.abs().sum().item())
            return self.module(inputs)

    seen: list[Tensor] = []
    given: list[float] = []
    trained = loop(None, host([ZeroesMicrobatchAndOutputs()]), train__eval_iters=0)
    trained.model[0].module = RecordsInputs(trained.model[0].module)
    trained.run()
    assert all(value.abs().sum() > 0 for value in seen)
    assert given == [0.0] * 12
    targets = [target for _, target in POINTS.batches()] * 2
    assert trained.losses == pytest.approx([target.square().mean().item() for target in targets])


def test_a_stop_ends_training_and_a_requested_save_is_written_at_its_step(tmp_path: Path) -> None:
    recorder, ending = Recorder(fields=("checkpoint",)), RecordsOutcomes()
    hosted = host([RequestsAtStep("save", 3), RequestsAtStep("stop", 7), recorder, ending])
    trained = loop(tmp_path / "checkpoints", hosted)
    trained.run()
    assert trained.state.train_state.step == 7
    assert trained.saved == [3, 7]  # Megatron itself saves the last step
    assert trained.cfg.train.train_iters == 12
    assert trained.cfg.checkpoint.save_interval == 1000
    published = [info for event, info in recorder.values["checkpoint"] if event == "on_checkpoint_published"]
    assert [(Path(info.path).name, info.step, info.kind) for info in published] == [
        ("iter_0000003", 3, "requested"),
        ("iter_0000007", 7, "periodic"),
    ]
    assert ending.recorded == ["stopped"]
    check_events(recorder.events)


def test_a_checkpoint_saver_saves_and_an_early_stopper_stops(tmp_path: Path) -> None:
    saver = CheckpointSaver(save_interval="5ba", monitor="validation/loss")
    stopper = EarlyStopper(monitor="validation/loss", min_delta=1e9, patience="6ba")
    hosted = host([saver, stopper, recorder := Recorder()])
    trained = loop(tmp_path / "checkpoints", hosted, train__train_iters=30)
    trained.run()
    assert trained.state.train_state.step < 30
    assert {5, 6} <= set(trained.saved)
    check_events(recorder.events)


def test_a_requested_evaluation_is_reported_as_unsupported(caplog: pytest.LogCaptureFixture) -> None:
    trained = loop(None, host([RequestsAtStep("evaluate", 2), RequestsAtStep("stop", 4)]))
    trained.run()
    assert trained.state.train_state.step == 4
    assert (
        "RequestsAtStep calls ctx.control.evaluate, which Megatron Bridge does not support here; it supports stop." in caplog.text
    )


def test_a_checkpoint_requested_after_training_logs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class RequestsSaveAtTrainEnd(Callback):
        def on_train_end(self, ctx: Context) -> None:
            ctx.control.save("late")

    loop(tmp_path, host([RequestsSaveAtTrainEnd()])).run()
    assert "a checkpoint was requested after training" in caplog.text


@pytest.mark.parametrize("is_async", [False, True])
def test_a_resume_from_a_megatron_checkpoint_restores_the_callback_states(is_async: bool, tmp_path: Path) -> None:
    whole = History()
    values: dict[str, Any] = {"checkpoint__async_save": is_async, "logger__log_interval": 1}
    uninterrupted = loop(tmp_path / "whole", host([whole]), **values)
    uninterrupted.run()

    class Fails(Callback):
        def on_train_step_end(self, ctx: Context) -> None:
            if ctx.step == 8:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        loop(tmp_path / "some", host([History(), Fails()]), checkpoint__save_interval=5, **values).run()
    recorder = Recorder(fields=("checkpoint",))
    again = loop(tmp_path / "some", host([history := History(), recorder]), **values)
    again.run()
    assert history["train/loss"] == pytest.approx(whole["train/loss"])
    assert all(torch.equal(a, b) for a, b in zip(weights(again), weights(uninterrupted), strict=True))
    event, info = recorder.values["checkpoint"][0]
    assert (event, info.step) == ("on_checkpoint_load_end", 5)
    assert recorder.events.count("on_train_step_end") == 7
    assert recorder.recorded[-1].batch == 12
    check_events(recorder.events)


def test_a_resume_without_callback_states_logs_a_warning_and_continues(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loop(tmp_path, None, train__train_iters=4).run()
    again = loop(tmp_path, host([recorder := Recorder()]))
    again.run()
    assert "resumes from step 4, but no state of callbacks was found" in caplog.text
    assert recorder.recorded[-1].batch == 12
    assert recorder.events.count("on_train_step_end") == 8


def test_a_skipped_step_is_reported_as_skipped() -> None:
    recorder = Recorder(fields=("step_skipped",))
    trained = loop(None, host([recorder]), train__eval_iters=0)
    trained.optimizer = Overflows(trained.optimizer.optimizer, {0, 4})
    trained.run()
    recorded = [value for event, value in recorder.values["step_skipped"] if event == "on_train_step_end"]
    assert [step for step, skipped in enumerate(recorded) if skipped] == [0, 4]
    assert recorder.events.count("on_optimizer_step_end") == 12
    check_events(recorder.events)


class Overflows(Optimizer):
    """Skips some steps, as a loss scaler does."""

    def __init__(self, optimizer: torch.optim.Optimizer, steps: set[int]) -> None:
        super().__init__(optimizer, 1.0)
        self.steps, self.made = steps, -1

    def step(self) -> tuple[bool, float | None, None]:
        self.made += 1
        return (False, math.inf, None) if self.made in self.steps else super().step()


def test_skipped_iterations_are_counted() -> None:
    recorder = Recorder(fields=("step",))
    trained = loop(None, host([recorder]))
    trained.cfg.train.iterations_to_skip = [3, 4]
    fire = trained.fire

    def leave_out(event: str, **fields: Any) -> None:
        if event == "on_train_step_start" and trained.state.train_state.step == 3:
            trained.state.train_state.step = 5
        fire(event, **fields)

    trained.fire = leave_out  # type: ignore[method-assign]
    trained.run()
    steps = [step for event, step in recorder.values["step"] if event == "on_train_step_end"]
    assert steps == [1, 2, 3, 6, 7, 8, 9, 10, 11, 12]


def test_a_listener_to_an_event_that_is_never_fired_is_rejected_by_name(caplog: pytest.LogCaptureFixture) -> None:
    class Predicts(Callback):
        def on_predict_end(self, ctx: Context) -> None: ...

    with pytest.raises(NotSupported, match="Predicts listens to on_predict_end, which Megatron Bridge does not fire"):
        loop(None, host([Predicts()])).run()
    loop(None, host([Predicts()], strict=False)).run()
    assert "Predicts listens to on_predict_end" in caplog.text


@pytest.mark.skipif(real is None or "on_checkpoint_save" in real.VALID_EVENTS, reason="a release without checkpoint events")
def test_a_listener_to_checkpoints_is_rejected_in_a_version_without_checkpoint_events() -> None:
    class Uploads(Callback):
        def on_checkpoint_published(self, ctx: Context) -> None: ...

    assert real is not None
    with pytest.raises(NotSupported, match="Uploads listens to on_checkpoint_published"):
        loop(None, host([Uploads()]), names=real).run()


class ListensToForward(Callback):
    """Listens to events that only a hook can report."""

    def on_forward_end(self, ctx: Context) -> None: ...


def test_a_listener_to_forward_passes_is_rejected_with_pipeline_parallelism(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(
        NotSupported, match="ListensToForward listens to on_forward_end, which Megatron Bridge did not fire in its first step"
    ):
        loop(None, host([ListensToForward()]), model__pipeline_model_parallel_size=2).run()
    history = History()
    trained = loop(
        None, host([ListensToForward(), history], strict=False), model__pipeline_model_parallel_size=2, logger__log_interval=1
    )
    trained.run()
    assert "ListensToForward" in caplog.text
    assert history["train/loss"] == pytest.approx(trained.losses)


def test_ctx_model_is_a_list_if_there_are_several_model_chunks() -> None:
    seen: list[Any] = []

    class RecordsModel(Callback):
        def on_train_start(self, ctx: Context) -> None:
            seen.append(ctx.model)

    trained = loop(None, host([RecordsModel()]))
    trained.model.append(nn.Linear(1, 1))  # type: ignore[arg-type]
    trained.run()
    assert seen == [[trained.model[0].module, trained.model[1]]]


def test_an_error_fails_or_interrupts_the_run_and_is_raised(tmp_path: Path) -> None:
    class Fails(Callback):
        def on_optimizer_step_start(self, ctx: Context) -> None:
            raise ZeroDivisionError

    ending = RecordsOutcomes()
    with pytest.raises(ZeroDivisionError):
        loop(None, host([Fails(), ending])).run()
    assert ending.recorded == ["ZeroDivisionError in optimizer_step", "failed"]

    def breaks(trained: Loop, error: BaseException) -> None:
        def step(_: Any) -> Any:
            raise error

        trained.step = step  # type: ignore[method-assign, assignment]
        trained.run()

    for error, recorded in [
        (ValueError(), ["ValueError in train_step", "failed"]),
        (KeyboardInterrupt(), ["KeyboardInterrupt in train_step", "interrupted"]),
        (SystemExit(1), ["SystemExit in train_step", "failed"]),
        (SystemExit(0), ["stopped"]),
    ]:
        ending.recorded.clear()
        with pytest.raises(type(error)), host([ending]) as hosted:
            breaks(loop(None, hosted), error)
        assert ending.recorded == recorded
    ending.recorded.clear()
    with pytest.raises(ValueError, match="alone"):
        breaks(loop(None, host([ending])), ValueError("alone"))
    gc.collect()
    assert ending.recorded == ["failed"]  # recorded when the host was deleted


def test_a_run_that_ends_by_a_signal_is_preempted(tmp_path: Path) -> None:
    hosted = host([ending := RecordsOutcomes()])
    trained = loop(tmp_path, hosted, train__exit_signal_handler=True)
    trained.state.signal_handler._signal_received = True
    with pytest.raises(SystemExit), hosted:
        trained.run()
    assert ending.recorded == ["preempted"]
    assert trained.saved == [1]


def test_a_signal_handler_without_a_known_attribute_logs_a_warning_and_the_run_is_stopped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Handler:
        _signal_received = True

    hide("Handler._signal_received", Handler)
    hosted = host([ending := RecordsOutcomes()])
    trained = loop(tmp_path, hosted, train__exit_signal_handler=True)
    trained.state.signal_handler = Handler()
    with pytest.raises(SystemExit), hosted:
        trained.run()
    assert ending.recorded == ["stopped"]
    assert caplog.text.count("Megatron's signal handler has no _signal_received") == 1


def test_a_host_can_be_used_for_several_runs() -> None:
    ending, recorder = RecordsOutcomes(), Recorder()
    hosted = host([ending, recorder])
    loop(None, hosted).run()
    check_events(recorder.events)
    first = len(recorder.events)
    loop(None, hosted, train__train_iters=3).run()
    check_events(recorder.events[first:])
    assert ending.recorded == ["finished", "finished"]


def test_an_evaluation_without_training_is_a_run(names: ModuleType) -> None:
    recorder = Recorder(fields=("standalone",))
    loop(None, host([recorder]), names=names, train__skip_train=True).run()
    check_events(recorder.events)
    assert recorder.events.count("on_eval_all_end") == recorder.events.count("on_test_end") == 1
    assert recorder.values["standalone"][0][1] is True
    assert "on_train_start" not in recorder.events
    assert recorder.events[-1] == "on_run_end"


def test_the_run_ends_with_training_if_there_is_no_validation() -> None:
    loop(None, host([recorder := Recorder()]), train__eval_iters=0).run()
    assert recorder.events[-2:] == ["on_train_end", "on_run_end"]


def test_data_events_are_fired_if_they_have_listeners() -> None:
    """The host has this hook only if it is needed, because Megatron rejects a training length in epochs if a callback has it."""
    assert not hasattr(host([History()]), "on_data_init_start")
    loop(None, host([recorder := Recorder()])).run()
    order = ["on_checkpoint_load_end", "on_data_init_start", "on_data_init_end", "on_train_start"]
    assert [event for event in recorder.events if event in order] == order


def test_the_host_works_with_megatron_lm_s_context_which_has_no_state(caplog: pytest.LogCaptureFixture) -> None:
    """In Megatron-LM all events share one context, whose fields keep their values. The host passes available fields and rejects unsupported requests."""

    def run(hosted: MegatronBridgeHost) -> None:
        trained = loop(None, None)
        context = SimpleNamespace(
            model=trained.model,
            optimizer=None,
            scheduler=None,
            loss_dict=None,
            grad_norm=None,
            skipped_iter=None,
            total_loss_dict=None,
        )

        def fire(event: str, **fields: Any) -> None:
            vars(context).update(fields)
            recorded = getattr(hosted, event, None)
            if recorded is not None:
                recorded(context)

        trained.fire = fire  # type: ignore[method-assign]
        with hosted:
            trained.run()

    recorder, ending = Recorder(), RecordsOutcomes()
    run(host([recorder, ending]))
    check_events(recorder.events)
    assert recorder.events.count("on_train_step_end") == 12
    assert recorder.events.count("on_test_end") == 1
    assert ending.recorded == ["finished"]
    run(host([RequestsAtStep("stop", 2)]))
    assert "RequestsAtStep calls ctx.control.stop, which Megatron Bridge does not support here" in caplog.text


def train_on_ranks(folder: str) -> tuple[int, int, list[float]]:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()

    class Stops(Callback):
        def on_train_step_end(self, ctx: Context) -> None:
            if rank == 1 and ctx.step == 2:
                ctx.control.stop("one rank's request")

    history, recorder, ending = History(), Recorder(), RecordsOutcomes()
    trained = loop(
        Path(folder), host([Stops(), history, recorder, ending]),
        train__train_iters=5000, train__eval_iters=0, logger__log_interval=10,
    )  # fmt: skip
    if rank:
        trained.save = functools.partial(report_save, trained)  # type: ignore[method-assign]  # rank 0 writes, and the event is fired on all ranks
    trained.run()
    check_events(recorder.events)
    torch.distributed.destroy_process_group()
    return trained.state.train_state.step, int(ending.at.sample), history["train/loss"]


def report_save(trained: Loop) -> None:
    trained.last_saved = trained.state.train_state.step
    trained.fire("on_checkpoint_save", optimizer=trained.optimizer)


def test_two_ranks_stop_together_and_save_one_checkpoint(tmp_path: Path) -> None:
    one, other = run_ranks(train_on_ranks, 2, str(tmp_path))
    assert one[0] == other[0] < 5000
    assert one[1] == other[1] == 4 * one[0]
    assert one[2] == other[2]
    assert (tmp_path / f"iter_{one[0]:07d}" / "callsheet").is_dir()


def test_a_threshold_stopper_stops_training_with_an_ema() -> None:
    ending = RecordsOutcomes()
    trained = loop(
        None, host([EMA(half_life="2ba"), ThresholdStopper(monitor="train/loss", threshold=1e9), ending]), logger__log_interval=1
    )
    trained.run()
    assert ending.recorded == ["stopped"]
    assert trained.state.train_state.step == 1
