"""callsheet's callbacks in torchtnt's loops, and torchtnt's callbacks in ours."""

from __future__ import annotations

import functools
import gc
import importlib
import io
import logging
import os
import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torchtnt.framework.callbacks
from torch import nn
from torchtnt.framework.callback import Callback as TorchTNTCallback
from torchtnt.framework.callbacks import (
    GarbageCollector,
    IterationTimeLogger,
    Lambda,
    LearningRateMonitor,
    ModuleSummary,
    PyTorchProfiler,
    SystemResourcesMonitor,
    TQDMProgressBar,
    TrainProgressMonitor,
)
from torchtnt.framework.callbacks.dcp_saver import DistributedCheckpointSaver
from torchtnt.framework.evaluate import evaluate
from torchtnt.framework.fit import fit
from torchtnt.framework.predict import predict
from torchtnt.framework.train import train
from torchtnt.framework.unit import TrainUnit
from torchtnt.utils.early_stop_checker import EarlyStopChecker
from torchtnt.utils.loggers.in_memory import InMemoryLogger
from tqdm import tqdm  # type: ignore[import-untyped]  # the package has no types

from callsheet import Callback, CallbackManager, Context
from callsheet.bridges.matrix import Cell
from callsheet.bridges.torchtnt import guest, host
from callsheet.bridges.torchtnt.events import NOT_FIRED
from callsheet.callbacks import EMA, CheckpointSaver, History, LRMonitor, NaNMonitor, OptimizerMonitor, SpeedMonitor
from callsheet.errors import CheckpointError, NotSupported
from callsheet.testing import Recorder, check_events, run_ranks

from .cells import RecordsLoadedSteps
from .faults import seeds
from .loops import torchtnt as own_loop
from .loops import trainer as our_loop
from .loops.job import POINTS, Job
from .rows import check_or_write_cell
from .subsets import compare_subsets

LINE = Job(lambda: nn.Linear(4, 1), POINTS.loss, POINTS.train, POINTS.validation)
"""A job without random numbers, so that its losses are the same in every loop."""


pytestmark = pytest.mark.usefixtures("one_thread")


def hosted(folder: Path, *callbacks: Callback, **options: Any) -> Any:
    return host(list(callbacks), run_name="small", runs_folder=folder, **{"log_interval": "2ba", **options})


def trained(
    callbacks: list[Any], *, job: Job = POINTS, unit: Any = None, epochs: int = 2, unit_options: Any = None, **options: Any
) -> Any:
    torch.manual_seed(3)
    unit = unit if unit is not None else own_loop.Unit(job, **(unit_options or {}))
    fit(unit, job.batches(), job.validation_batches(), max_epochs=epochs, callbacks=callbacks, **options)
    return unit


def same(one: Any, other: Any) -> bool:
    values = [each.module.state_dict().values() for each in (one, other)]
    return all(torch.equal(a, b) for a, b in zip(*values, strict=True))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_training_is_unchanged_and_every_event_is_fired(accumulate: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {"unit_options": {"gradient_accumulation_steps": accumulate}}
    recorder, history = Recorder(fields=("loss", "batch", "eval_losses", "learning_rate")), History()
    given = [recorder, history, SpeedMonitor(), OptimizerMonitor(), LRMonitor(), NaNMonitor()]
    with_them = trained([hosted(tmp_path, *given, log_interval="1ba")], **options)
    without = trained([], **options)
    assert same(with_them, without)
    check_events(recorder.events)
    events = recorder.events
    assert events.count("on_train_step_end") == 12 // accumulate
    assert events.count("on_backward_end") == events.count("on_forward_end") == 12
    assert events.count("on_eval_all_end") == 2
    assert events.count("on_eval_forward_end") == 6
    assert events.count("on_optimizer_step_end") == 12 // accumulate
    assert (events[0], events[-1]) == ("on_run_start", "on_run_end")
    sums = [sum(without.losses[i : i + accumulate]) for i in range(0, 12, accumulate)]
    assert history["train/loss"] == pytest.approx(sums, rel=1e-6)
    means = [sum(without.eval_losses[i : i + 3]) / 3 for i in (0, 3)]
    assert history["validation/loss"] == pytest.approx(means, rel=1e-6)
    assert [tuple(part.shape) for part in recorder.values["batch"][0][1]] == [(4, 4), (4, 1)]
    assert {rate for _, rate in recorder.values["learning_rate"]} == {0.02}


def test_no_hooks_are_left_on_the_unit(tmp_path: Path) -> None:
    unit = trained([hosted(tmp_path, Recorder())])
    assert not unit.module._forward_hooks
    assert not unit.module._forward_pre_hooks
    assert not unit.optimizer._optimizer_step_pre_hooks
    assert "get_next_train_batch" not in vars(unit)


class RequestsAtStep(Callback):
    """Makes a request at the end of a step."""

    def __init__(self, what: str, step: int) -> None:
        self.what, self.step = what, step

    def on_train_step_end(self, ctx: Context) -> None:
        if ctx.step == self.step:
            getattr(ctx.control, self.what)("asked")


def test_requests_are_carried_out(tmp_path: Path) -> None:
    recorder = Recorder(fields=("checkpoint",))
    unit = trained(
        [hosted(tmp_path, RequestsAtStep("save", 2), RequestsAtStep("evaluate", 3), RequestsAtStep("stop", 7), recorder)],
        evaluate_every_n_epochs=None,
    )
    assert unit.train_progress.num_steps_completed == 7
    assert recorder.events.count("on_eval_all_end") == 1
    assert recorder.events.count("on_eval_step_end") == 3
    assert [each.step for each in recorder.recorded if each.event == "on_eval_all_end"] == [3]
    assert ("on_checkpoint_published", 2, "requested") in [
        (event, info.step, info.kind) for event, info in recorder.values["checkpoint"] if info is not None
    ]
    check_events(recorder.events)


def test_an_evaluation_within_an_epoch_is_recorded_at_its_step(tmp_path: Path) -> None:
    recorder = Recorder()
    trained([hosted(tmp_path, recorder)], evaluate_every_n_steps=4, evaluate_every_n_epochs=None)
    assert [each.step for each in recorder.recorded if each.event == "on_eval_all_start"] == [4, 8, 12]
    check_events(recorder.events)
    recorder = Recorder()  # an evaluation inside a step of two batches is recorded when the step ends
    trained(
        [hosted(tmp_path / "2", recorder)],
        evaluate_every_n_steps=3, evaluate_every_n_epochs=None, unit_options={"gradient_accumulation_steps": 2},
    )  # fmt: skip
    assert [each.step for each in recorder.recorded if each.event == "on_eval_all_start"] == [2, 3, 5, 6]
    check_events(recorder.events)


@pytest.mark.parametrize("step", [4, 6, 9])
def test_a_resume_from_our_checkpoint_gives_identical_weights_and_losses(step: int, tmp_path: Path) -> None:
    whole, history = History(), History()
    uninterrupted = trained([hosted(tmp_path / "whole", whole)])
    with pytest.raises(ZeroDivisionError):
        trained([hosted(tmp_path, History(), CheckpointSaver(save_interval=f"{step}ba"), Fails(step + 1))])
    recorder = Recorder()
    again = trained([hosted(tmp_path, history, recorder, CheckpointSaver(save_interval="50ba"), resume="auto")])
    assert same(again, uninterrupted)
    assert again.train_progress.num_steps_completed == recorder.recorded[-1].batch == 12
    assert history["train/loss"] == whole["train/loss"]
    check_events(recorder.events)


class EvaluatesAt(Callback):
    """Requests an evaluation at two steps and after every epoch, and sends SIGTERM to its process at one of these events."""

    def __init__(self, signals_at: tuple[str, int] | None = None) -> None:
        self.signals_at = signals_at

    def _request_evaluation(self, ctx: Context, where: str) -> None:
        ctx.control.evaluate("it is time", replicated=True)
        if self.signals_at == (where, ctx.step):
            signal.raise_signal(signal.SIGTERM)

    def on_train_step_end(self, ctx: Context) -> None:
        if ctx.step in (3, 10):
            self._request_evaluation(ctx, "step")

    def on_epoch_end(self, ctx: Context) -> None:
        self._request_evaluation(ctx, "epoch")


@pytest.mark.parametrize(
    "signals_at", [("step", 3), ("epoch", 6), ("step", 10), ("epoch", 12)], ids=lambda at: "-".join(map(str, at))
)
def test_an_evaluation_that_a_signal_prevents_is_made_after_the_resume(signals_at: tuple[str, int], tmp_path: Path) -> None:
    options: dict[str, Any] = {"evaluate_every_n_epochs": None}
    uninterrupted = trained([hosted(tmp_path / "whole", whole := History(), EvaluatesAt())], **options)
    trained([hosted(tmp_path, History(), EvaluatesAt(signals_at), preempt_signals=("SIGTERM",))], **options)
    recorder = Recorder()
    again = trained([hosted(tmp_path, history := History(), EvaluatesAt(), recorder, resume="auto")], **options)
    assert same(again, uninterrupted)
    assert len(whole["validation/loss"]) == 4
    assert history["validation/loss"] == whole["validation/loss"]
    check_events(recorder.events)


def test_the_callbacks_states_are_in_torchtnt_s_checkpoints(tmp_path: Path) -> None:
    whole, average = History(), EMA(half_life=3)
    uninterrupted = trained([hosted(tmp_path / "whole", whole, average)], job=LINE)
    unit = own_loop.Unit(LINE)
    unit.callsheet = hosted(tmp_path, History(), EMA(half_life=3), Fails(8))
    saver = DistributedCheckpointSaver(str(tmp_path / "dcp"), save_every_n_epochs=1)
    with pytest.raises(ZeroDivisionError):
        trained([unit.callsheet, saver], unit=unit, job=LINE)
    history, recorder, loads, again = History(), Recorder(), RecordsLoadedSteps(), own_loop.Unit(LINE)
    again.callsheet = hosted(tmp_path / "again", history, EMA(half_life=3), recorder, loads)
    assert DistributedCheckpointSaver.restore_from_latest(str(tmp_path / "dcp"), again)
    trained([again.callsheet], unit=again, job=LINE)
    assert loads.steps == [6]
    assert same(again, uninterrupted)
    assert history["train/loss"] == whole["train/loss"]
    assert history["validation/loss"][-1] == whole["validation/loss"][-1]
    assert recorder.recorded[-1].batch == 12
    check_events(recorder.events)


def test_states_of_another_step_are_rejected(tmp_path: Path) -> None:
    unit = own_loop.Unit(LINE)
    unit.callsheet = hosted(tmp_path, Fails(5))
    saver = DistributedCheckpointSaver(str(tmp_path / "dcp"), save_every_n_train_steps=3)
    with pytest.raises(ZeroDivisionError):
        trained([saver, unit.callsheet], unit=unit, job=LINE)  # the saver saves before the host counts the step
    again = own_loop.Unit(LINE)
    again.callsheet = hosted(tmp_path / "again", History())
    assert DistributedCheckpointSaver.restore_from_latest(str(tmp_path / "dcp"), again)
    with pytest.raises(CheckpointError, match="are of step 2, but torchtnt resumes from step 3; put the host before"):
        trained([again.callsheet], unit=again, job=LINE)


class Fails(Callback):
    """Raises at a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_step_end(self, ctx: Context) -> None:
        if ctx.step == self.step:
            raise ZeroDivisionError


class RecordsOutcomes(Callback):
    """Records how the run ended, and the exception."""

    def __init__(self) -> None:
        self.recorded: list[str] = []

    def on_exception(self, ctx: Context) -> None:
        self.recorded.append(type(ctx.exception).__name__)

    def on_run_end(self, ctx: Context) -> None:
        self.recorded.append(str(ctx.run.outcome))


def test_on_run_end_has_the_outcome_of_the_run(tmp_path: Path) -> None:
    ends = RecordsOutcomes()
    trained([hosted(tmp_path, ends)], epochs=1)
    trained([hosted(tmp_path / "2", ends, RequestsAtStep("stop", 2))])
    assert ends.recorded == ["finished", "stopped"]
    ends = RecordsOutcomes()
    with pytest.raises(ZeroDivisionError):
        trained([hosted(tmp_path / "3", ends, Fails(2))])
    assert ends.recorded == ["ZeroDivisionError", "failed"]

    class Interrupts(TorchTNTCallback):  # type: ignore[misc]  # torchtnt's types are not read
        def on_train_step_end(self, state: Any, unit: Any) -> None:
            raise KeyboardInterrupt

    ends, given = RecordsOutcomes(), None
    given = [hosted(tmp_path / "4", ends), Interrupts()]
    with pytest.raises(KeyboardInterrupt):
        trained(given)
    assert ends.recorded == []  # torchtnt does not report this error to callbacks
    del given
    gc.collect()
    assert ends.recorded == ["failed"]


class SendsSIGTERM(Callback):
    """Sends SIGTERM to its own process at a step."""

    def on_train_step_end(self, ctx: Context) -> None:
        if ctx.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)


def test_sigterm_saves_a_checkpoint_and_preempts_the_run(tmp_path: Path) -> None:
    ends, recorder = RecordsOutcomes(), Recorder(fields=("checkpoint",))
    unit = trained([hosted(tmp_path, ends, recorder, SendsSIGTERM(), preempt_signals=("SIGTERM",))])
    assert unit.train_progress.num_steps_completed == 3
    assert ends.recorded == ["preempted"]
    assert [info.kind for event, info in recorder.values["checkpoint"] if event == "on_checkpoint_published"] == ["preempt"]
    check_events(recorder.events)


def train_on_rank(folder: str) -> dict[str, Any]:
    """Train on this rank's half of the data. One rank requests a stop."""

    class StopsOnOne(Callback):
        def on_train_step_end(self, ctx: Context) -> None:
            if ctx.step == 4 and ctx.run.rank == 1:
                ctx.control.stop("asked")

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()

    def run(callbacks: list[Any], epochs: int) -> Any:
        torch.manual_seed(3)
        unit = own_loop.Unit(LINE, strategy="ddp")
        train(unit, list(LINE.batches())[rank::2], max_epochs=epochs, callbacks=callbacks)
        return unit

    recorder, history = Recorder(), History()
    ours, plain = run([hosted(Path(folder), recorder, history)], 2), run([], 2)
    stopped = run([hosted(Path(folder) / "2", StopsOnOne())], 20)
    limited = 0
    if hasattr(NEW, "TimeLimitInterrupter"):
        limit = NEW.TimeLimitInterrupter(timedelta(microseconds=1), interval="step", interval_freq=2)
        limited = run([hosted(Path(folder) / "3", guest(limit))], 20).train_progress.num_steps_completed
    torch.distributed.destroy_process_group()
    return {
        "kind": type(ours.module).__name__,
        "neutral": torch.equal(ours.module.module.weight, plain.module.module.weight),
        "events": recorder.events,
        "losses": history["train/loss"],
        "own": ours.losses,
        "stopped": stopped.train_progress.num_steps_completed,
        "limited": limited,
    }


def test_two_ranks_fire_the_same_events_and_stop_together(tmp_path: Path) -> None:
    one, other = run_ranks(train_on_rank, 2, str(tmp_path))
    assert one["kind"] == "DistributedDataParallel"
    assert one["neutral"]
    assert other["neutral"]
    assert one["events"] == other["events"]
    assert one["events"].count("on_backward_end") == 6
    means = [sum((*one["own"][i : i + 2], *other["own"][i : i + 2])) / 4 for i in (0, 2, 4)]
    assert one["losses"] == other["losses"] == pytest.approx(means, rel=1e-6)
    assert 4 <= one["stopped"] == other["stopped"] < 60
    expected = 2 if hasattr(NEW, "TimeLimitInterrupter") else 0
    assert one["limited"] == other["limited"] == expected  # training stops at once, because both ranks request it
    check_events(one["events"])


def test_a_host_can_be_used_for_several_runs(tmp_path: Path) -> None:
    recorder = Recorder()
    bridge = hosted(tmp_path, recorder)
    trained([bridge])
    trained([bridge])
    assert recorder.events.count("on_run_start") == recorder.events.count("on_run_end") == 2
    assert recorder.events.count("on_train_step_end") == 24


def test_evaluate_and_predict_are_separate_runs(tmp_path: Path) -> None:
    recorder = Recorder(fields=("standalone", "outputs", "eval_results"))
    unit = own_loop.Unit(LINE)
    evaluate(unit, LINE.validation_batches(), callbacks=[hosted(tmp_path, recorder)])
    check_events(recorder.events)
    assert recorder.events.count("on_eval_forward_end") == 3
    assert all(value for _, value in recorder.values["standalone"])
    found = dict(recorder.values["eval_results"])["on_eval_all_end"]
    assert found["validation"]["loss"] == pytest.approx(sum(unit.eval_losses) / 3)
    recorder = Recorder(fields=("outputs", "batch"))
    inputs = [batch[0] for batch in LINE.validation_batches()]
    predict(unit, inputs, callbacks=[hosted(tmp_path / "2", recorder)])
    check_events(recorder.events)
    assert recorder.events.count("on_predict_forward_end") == recorder.events.count("on_predict_step_end") == 3
    assert torch.equal(dict(recorder.values["outputs"])["on_predict_step_end"], unit.module(inputs[-1]))


def test_steps_of_a_unit_that_steps_every_third_batch_are_counted(tmp_path: Path) -> None:
    class ByHand(TrainUnit[Any]):  # type: ignore[misc]  # torchtnt's types are not read
        """Steps its optimizer on every third batch."""

        def __init__(self) -> None:
            super().__init__()
            self.net = LINE.made_model()
            self.sgd = torch.optim.SGD(self.net.parameters(), lr=0.1)

        def train_step(self, state: Any, data: Any) -> None:
            (LINE.loss(self.net(data[0]), data[1]) / 3).backward()
            if (self.train_progress.num_steps_completed + 1) % 3 == 0:
                self.sgd.step()
                self.sgd.zero_grad()

    recorder = Recorder()
    train(ByHand(), LINE.batches(), max_epochs=1, callbacks=[hosted(tmp_path, recorder)])
    assert recorder.events.count("on_train_step_end") == 2
    assert recorder.events.count("on_microbatch_end") == 6
    check_events(recorder.events)


def test_unsupported_events_and_units_are_rejected(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Listens(Callback):
        def on_test_end(self, ctx: Context) -> None: ...

    with pytest.raises(NotSupported, match="Listens listens to on_test_end, which torchtnt does not fire"):
        trained([hosted(tmp_path, Listens())])
    trained([hosted(tmp_path, Listens(), strict=False)], epochs=1)
    assert "Listens listens to on_test_end" in caplog.text

    class TwoModels(TrainUnit[Any]):  # type: ignore[misc]  # torchtnt's types are not read
        def __init__(self) -> None:
            super().__init__()
            self.generator, self.judge = nn.Linear(4, 4), nn.Linear(4, 1)

        def train_step(self, state: Any, data: Any) -> None: ...

    with pytest.raises(NotSupported, match="tracks generator, judge"):
        train(TwoModels(), LINE.batches(), max_epochs=1, callbacks=[hosted(tmp_path)])

    class Iterates(own_loop.Unit):
        def train_step(self, state: Any, data: Iterator[Any]) -> Any:
            return super().train_step(state, next(data))

        train_step.__annotations__["data"] = Iterator[Any]  # torchtnt needs the annotation as a type, not as a string

    with pytest.raises(NotSupported, match="takes an iterator"):
        trained([hosted(tmp_path)], unit=Iterates(LINE))


def test_events_that_the_first_step_does_not_fire_are_rejected(tmp_path: Path) -> None:
    class Listens(Callback):
        def on_backward_end(self, ctx: Context) -> None: ...

    class UsesAutogradBackward(own_loop.Unit):
        def train_step(self, state: Any, data: Any) -> Any:
            loss, _ = self.compute_loss(state, data)
            torch.autograd.backward([loss])
            self.optimizer.step()

    with pytest.raises(NotSupported, match=r"Listens listens to on_backward_end, which torchtnt did not fire"):
        trained([hosted(tmp_path, Listens())], unit=UsesAutogradBackward(LINE))


# --- guests ---


NEW: Any = torchtnt.framework.callbacks
"""The module with callbacks that torchtnt has since 0.2.4."""


def _in_its_module(name: str, module: str) -> Any:
    """Return a callback that the package of torchtnt's callbacks does not export."""
    return getattr(importlib.import_module(f"torchtnt.framework.callbacks.{module}"), name)


@dataclass
class Row:
    """A torchtnt callback, and the results to compare between a run in torchtnt and a run as a guest."""

    tier: str
    make: Callable[[Path], Any]
    of: Callable[[Any], Any]
    attributes: dict[str, str] | None = None


def _logged(callback: Any) -> Any:
    """Return the logged names and values by step."""
    (logger,) = callback._loggers if hasattr(callback, "_loggers") else [callback._logger]
    return {step: {name: value for name, value in values.items() if name != "time"} for step, values in logger.log_buffer.items()}


def _names_logged(callback: Any) -> Any:
    """Return only the names that were logged at each step, because the values are times."""
    return {step: sorted(values) for step, values in _logged(callback).items()}


def _bars(callback: Any) -> Any:
    return re.findall(r"Train Epoch \d+: +\d+%|\d+/6 ", callback._file.getvalue())  # the length of an evaluation is unknown here


class _Reports(logging.Handler):
    """Collects the messages of `ProgressReporter`."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _reporter(folder: Path) -> Any:
    callback, handler = _in_its_module("ProgressReporter", "progress_reporter")(), _Reports()
    logger = logging.getLogger("torchtnt.framework.callbacks.progress_reporter")
    logger.setLevel(logging.INFO)
    logger.handlers = [handler]
    callback.handler = handler
    return callback


def _every_hook(folder: Path) -> Any:
    calls: list[str] = []

    def note(name: str) -> Callable[..., None]:
        def recorded(state: Any, unit: Any, *_: Any) -> None:
            counts = [(each.num_epochs_completed, each.num_steps_completed) for each in (unit.train_progress, unit.eval_progress)]
            calls.append(f"{name} {state.entry_point} {state.active_phase} {counts}")

        return recorded

    hooks = [name for name in vars(TorchTNTCallback) if name.startswith("on_")]
    callback = Lambda(**{name: note(name) for name in hooks})
    callback.calls = calls
    return callback


def _summaries(folder: Path) -> Any:
    found: list[Any] = []
    callback = ModuleSummary(process_fn=lambda given: found.extend((each.module_name, each.num_parameters) for each in given))
    callback.found = found
    return callback


def _collector(folder: Path) -> Any:
    callback = GarbageCollector(4)
    callback.full = full = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2 and not gc.isenabled():
            full.append(1)

    callback.note = note
    gc.callbacks.append(note)
    return callback


def _collected(callback: Any) -> Any:
    gc.callbacks.remove(callback.note)
    return len(callback.full), gc.isenabled()


def _saved(callback: Any) -> Any:
    found = {}
    for path in sorted(Path(callback.dirpath).iterdir()):
        unit = own_loop.Unit(LINE)
        DistributedCheckpointSaver.restore(str(path), unit)
        found[path.name] = [unit.module.weight.tolist(), unit.optimizer.state_dict()["state"][0]["exp_avg"].tolist()]
    return found


ROWS = {
    "EarlyStopping": Row(
        "drives",
        lambda folder: NEW.EarlyStopping(
            "loss", EarlyStopChecker("min", 2, min_delta=0.0, threshold_mode="abs"), interval="step"
        ),
        lambda callback: (callback._esc._best_value.item(), callback._esc._patience_count),
        {"loss": "loss"},
    ),
    "TimeLimitInterrupter": Row(
        "drives", lambda folder: NEW.TimeLimitInterrupter(timedelta(microseconds=1)), lambda callback: None
    ),
    "LearningRateMonitor": Row("reads", lambda folder: LearningRateMonitor(InMemoryLogger(), logging_interval="step"), _logged),
    "TrainProgressMonitor": Row("reads", lambda folder: TrainProgressMonitor(InMemoryLogger()), _logged),
    "TQDMProgressBar": Row("reads", lambda folder: TQDMProgressBar(refresh_rate=2, file=io.StringIO()), _bars),
    "ThroughputLogger": Row("reads", lambda folder: NEW.ThroughputLogger(InMemoryLogger(), {"rows": 4}), _names_logged),
    "IterationTimeLogger": Row("reads", lambda folder: IterationTimeLogger(InMemoryLogger()), _names_logged),
    "TimeWaitForBatchLogger": Row(
        "reads",
        lambda folder: _in_its_module("TimeWaitForBatchLogger", "time_wait_for_batch_logger")(InMemoryLogger()),
        _names_logged,
    ),
    "SystemResourcesMonitor": Row("reads", lambda folder: SystemResourcesMonitor(InMemoryLogger()), _names_logged),
    "ProgressReporter": Row("reads", _reporter, lambda callback: callback.handler.lines),
    "ModuleSummary": Row("reads", _summaries, lambda callback: callback.found),
    "DistributedCheckpointSaver": Row(
        "reads", lambda folder: DistributedCheckpointSaver(str(folder / "dcp"), save_every_n_train_steps=4), _saved
    ),
    "GarbageCollector": Row("reads", _collector, _collected),
    "PyTorchProfiler": Row(
        "listens",
        lambda folder: PyTorchProfiler(torch.profiler.profile(schedule=lambda step: torch.profiler.ProfilerAction.NONE)),
        lambda callback: callback.profiler.step_num,
    ),
    "Lambda": Row("listens", _every_hook, lambda callback: callback.calls),
}


SINCE_0_2_4 = ("EarlyStopping", "TimeLimitInterrupter", "ThroughputLogger", "TimeWaitForBatchLogger", "ProgressReporter")


@pytest.mark.parametrize("name", ROWS)
def test_a_guest_decides_and_logs_as_in_its_framework(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = functools.partialmethod(tqdm.__init__, mininterval=0, miniters=1)
    monkeypatch.setattr(tqdm, "__init__", shown)  # redraw at each update, without a minimum interval
    row = ROWS[name]
    if name in SINCE_0_2_4 and not hasattr(NEW, "EarlyStopping"):
        pytest.skip("torchtnt before 0.2.4 does not have it")
    in_framework, here = row.make(tmp_path / "framework"), None
    unit = trained([in_framework], job=LINE, epochs=2)
    found = row.of(in_framework)
    here, recorder = row.make(tmp_path / "here"), Recorder()
    our_loop.train(LINE, tmp_path, [guest(here, attributes=row.attributes), recorder], epochs=2)
    assert row.of(here) == found
    steps = recorder.events.count("on_train_step_end")
    assert steps == unit.train_progress.num_steps_completed
    assert (steps < 12) == (row.tier == "drives")
    check_or_write_cell("torchtnt", "guests", name, Cell("works", tier=row.tier))


def test_a_guest_that_uses_an_unavailable_attribute_is_rejected(tmp_path: Path) -> None:
    def reading(read: Callable[[Any, Any], Any]) -> Any:
        return guest(Lambda(on_train_step_end=lambda state, unit: read(state, unit)))

    for read, message in (
        (lambda state, unit: unit.train_loader, "torchtnt's unit has here no 'train_loader'"),
        (lambda state, unit: state.train_state.step_output, "no 'step_output'"),
        (lambda state, unit: next(iter(state.train_state.dataloader)), "no batches to iterate over"),
    ):
        with pytest.raises(NotSupported, match=message):
            our_loop.train(LINE, tmp_path, [reading(read)], epochs=1)


def test_a_guest_in_a_host_of_torchtnt_receives_the_same_calls(tmp_path: Path) -> None:
    """A guest of a torchtnt callback works in a host, which runs in torchtnt."""
    in_framework, here = _every_hook(tmp_path), _every_hook(tmp_path)
    trained([in_framework], job=LINE)
    trained([hosted(tmp_path, guest(here))], job=LINE)
    assert [line.split()[0] for line in here.calls] == [line.split()[0] for line in in_framework.calls]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_callbacks_that_listen_to_some_events_receive_the_same_as_one_that_listens_to_all(
    accumulate: int, tmp_path: Path
) -> None:
    def train_once(manager: CallbackManager) -> None:
        unit_options = {"gradient_accumulation_steps": accumulate, "clip_grad_norm": 1.0}
        trained([host(manager, run_name="small", runs_folder=tmp_path, log_interval="2ba")], job=LINE, unit_options=unit_options)

    compare_subsets(train_once, NOT_FIRED, seeds(30))
