"""Tests of host and guests with the real Composer. `test_composer.py` runs them in the venv that `tools/composer_venv.py` creates."""

from __future__ import annotations

import os
import subprocess
import warnings
from collections.abc import Callable as Function
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from callsheet import Callback, CallbackManager, Context, Trainer
from callsheet.bridges.composer import NOT_FIRED, guest, host
from callsheet.bridges.composer.names import COMPOSER_EVENTS
from callsheet.bridges.composer.names import Event as OurEvent
from callsheet.bridges.matrix import Cell
from callsheet.callbacks import EMA, CheckpointSaver, EarlyStopper, History, LRMonitor, NaNMonitor, OptimizerMonitor, SpeedMonitor
from callsheet.errors import NotSupported
from callsheet.loggers import JSONLLogger, Logger, read_metrics
from callsheet.report import RunFolder
from callsheet.testing import Recorder, check_events, run_ranks
from callsheet.trainer import Task
from forked import python  # type: ignore[import-not-found]  # pytest has its folder on the path

from .faults import (
    OBSERVERS,
    RandomFaults,
    StepEndRecorder,
    StepRecorder,
    assert_counts_are_right,
    assert_evaluations_are_right,
    assert_training_is_unchanged,
    seeds,
)
from .loops.composer import composer, made
from .loops.composer import trained as as_composer_has_it
from .loops.job import IMAGES, POINTS, Job
from .rows import check_or_write_cell
from .subsets import compare_subsets

from callsheet.bridges.composer import trainer_host  # isort: skip  # after the loop, which declares torchvision's operators

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # Composer's warnings about newer versions of torch
]
torch.set_num_threads(1)

real = composer.callbacks


@pytest.fixture(autouse=True)
def _backward_is_not_patched_afterwards() -> None:
    """Replace the fixture in conftest.py by one that does nothing, because Composer's host does not patch torch."""


@pytest.fixture(autouse=True)
def _in_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # Composer writes into the working folder


def weights(trained: Any) -> list[Tensor]:
    return [value.clone() for value in trained.state.model.state_dict().values()]


def fit(*args: Any, **options: Any) -> Any:
    trained = made(*args, **options)
    trained.fit()
    trained.close()
    return trained


def in_memory(trained: Any, name: str) -> list[float]:
    return [float(value) for _, value in trained.logger.destinations[0].data[name]]


class RequestsAtStep(Callback):
    """Makes a request at the end of a step."""

    def __init__(self, what: str, step: int) -> None:
        self.what, self.step = what, step

    def on_train_step_end(self, ctx: Context) -> None:
        if ctx.step == self.step:
            getattr(ctx.control, self.what)("asked")


class Fails(Callback):
    """Raises an error at a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_step_end(self, ctx: Context) -> None:
        if ctx.step == self.step:
            raise ZeroDivisionError


class RecordsOutcomes(Callback):
    """Records how the run ended."""

    def __init__(self) -> None:
        self.outcomes: list[str] = []

    def on_run_end(self, ctx: Context) -> None:
        self.outcomes.append(str(ctx.run.outcome))


# --- the host ---


def test_a_failing_host_disables_itself_and_training_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, ends = fit(POINTS, tmp_path / "plain", None), RecordsOutcomes()
    handled = trainer_host.ComposerHost._batch_end

    def unforeseen(self: trainer_host.ComposerHost, state: Any) -> None:
        if int(state.timestamp.batch) == 3:
            raise TypeError("unforeseen")
        handled(self, state)

    monkeypatch.setattr(trainer_host.ComposerHost, "_batch_end", unforeseen)
    failing = fit(POINTS, tmp_path / "failing", [ends, EMA(half_life=2)])
    assert ends.outcomes == ["failed"]
    assert "callsheet cannot follow Composer's Trainer" in caplog.text
    assert all(torch.equal(one, other) for one, other in zip(weights(plain), weights(failing), strict=True))


def with_faults(faulty: Any, seed: int) -> Any:
    """Let Composer's events reach the host of this Trainer with random faults, and return the Trainer."""
    (hosted,) = [each for each in faulty.state.callbacks if hasattr(each, "manager")]
    run_event, odd_event = hosted.run_event, RandomFaults(hosted, (), seed, recent=30, share=0.1).around(hosted.run_event)

    def called(event: Any, *args: Any) -> None:
        ends = event.value in ("after_load", "fit_start", "fit_end")
        (run_event if ends or hosted._table[event.value] is None else odd_event)(event, *args)

    hosted.run_event = called
    return faulty


MICROBATCHES: dict[str, Any] = {"device_train_microbatch_size": 2}
SAVES: dict[str, Any] = {"save_folder": "saved", "save_interval": "4ba", "save_overwrite": True, "eval_interval": "4ba"}


def faulty_and_plain(seed: int, job: Job, callbacks: list[Callback], tmp_path: Path, options: dict[str, Any]) -> tuple[Any, Any]:
    """Train with callsheet and faults, and without callsheet, and check that nothing of callsheet is left. Return both Trainers."""
    memory = [composer.loggers.InMemoryLogger()]
    faulty = with_faults(made(job, tmp_path / "faulty", callbacks, strict=False, epochs=3, loggers=memory, **options), seed)
    faulty.fit()
    faulty.close()
    plain = fit(POINTS, tmp_path / "plain", None, epochs=3, **options)
    assert all(torch.equal(one, other) for one, other in zip(weights(plain), weights(faulty), strict=True))
    assert faulty.state.timestamp.batch == plain.state.timestamp.batch
    assert len(faulty.logger.destinations) == len(plain.logger.destinations) + 1
    assert not faulty.state.optimizers[0]._optimizer_step_post_hooks
    return faulty, plain


@pytest.mark.usefixtures("counts_may_differ")
@pytest.mark.parametrize("options", [MICROBATCHES, SAVES], ids=["microbatches", "saves"])
@pytest.mark.parametrize("seed", seeds(5))
def test_composer_with_random_faults(
    seed: int, options: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = StepRecorder()
    faulty, plain = faulty_and_plain(seed, recorder.job, [*(make() for make in OBSERVERS), recorder], tmp_path, options)
    assert_training_is_unchanged(recorder, plain.state.model, faulty.state.model)
    assert_counts_are_right(recorder, 18, 3, caplog)
    logged = faulty.logger.destinations[0].data["metrics/eval/loss"]
    evaluated = [(int(at.batch), float(loss)) for at, loss in logged]
    assert_evaluations_are_right(recorder, evaluated)


@pytest.mark.usefixtures("counts_may_differ")
@pytest.mark.parametrize("seed", seeds(5))
def test_composer_without_listeners_with_random_faults(seed: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    step_ends = StepEndRecorder()
    faulty_and_plain(seed, step_ends.recorder.job, [step_ends], tmp_path, MICROBATCHES)
    assert_counts_are_right(step_ends.recorder, 18, 3, caplog)


@pytest.mark.usefixtures("counts_may_differ")
@pytest.mark.parametrize("seed", seeds(5))
def test_composer_with_closures_with_random_faults(seed: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def trained(folder: str, callbacks: list[Callback] | None) -> Any:
        model = as_composer_has_it(POINTS)
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
        trainer = made(POINTS, tmp_path / folder, callbacks, strict=False, epochs=3, model=model, optimizers=optimizer)
        if callbacks is not None:
            with_faults(trainer, seed)
        trainer.fit()
        trainer.close()
        return trainer.state.model

    recorder = StepRecorder()
    assert_training_is_unchanged(recorder, trained("plain", None), trained("faulty", [*(make() for make in OBSERVERS), recorder]))
    assert_counts_are_right(recorder, 18, 3, caplog)


HANDLED = [
    event.value
    for event in OurEvent
    if hasattr(trainer_host.ComposerHost, f"_{event.value}") and not event.is_predict and event != "fit_end"
]
"""The events that the host handles. Without `fit_end`, training does not end, and the run is recorded as failed."""


@pytest.mark.usefixtures("counts_may_differ")
@pytest.mark.parametrize("event", HANDLED)
def test_composer_without_one_of_its_events(event: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Composer's loop no longer fires the event."""
    options = MICROBATCHES | SAVES
    recorder = StepRecorder()
    given = [*(make() for make in OBSERVERS), recorder]
    faulty = made(recorder.job, tmp_path / "faulty", given, strict=False, epochs=3, **options)
    (hosted,) = [each for each in faulty.state.callbacks if hasattr(each, "manager")]
    run_event = hosted.run_event
    hosted.run_event = lambda fired, *args: None if fired.value == event else run_event(fired, *args)
    faulty.fit()
    faulty.close()
    plain = fit(POINTS, tmp_path / "plain", None, epochs=3, **options)
    assert_training_is_unchanged(recorder, plain.state.model, faulty.state.model)
    assert_counts_are_right(recorder, 18, 3, caplog)


@pytest.mark.parametrize("event", ["after_load", "batch_end", "eval_start"])
def test_a_version_of_composer_without_an_event_is_rejected(event: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_host, "Event", [each for each in composer.Event if each.value != event])
    with pytest.raises(NotSupported, match=f"this host needs the events {event}, which mosaicml"):
        host([])


def test_our_copy_of_the_forty_events_has_composer_s_order() -> None:
    assert [event.value for event in OurEvent] == [event.value for event in composer.Event]
    assert {theirs for several in COMPOSER_EVENTS.values() for theirs in several} == {event.value for event in composer.Event}
    for ours, theirs in zip(OurEvent, composer.Event, strict=True):
        assert (ours.is_before_event, ours.is_after_event) == (theirs.is_before_event, theirs.is_after_event), ours


@pytest.mark.parametrize("size", [4, 2])
def test_training_is_unchanged_and_every_event_is_fired(size: int, tmp_path: Path) -> None:
    recorder, history = Recorder(fields=("loss", "learning_rate", "batch")), History()
    given = [recorder, history, SpeedMonitor(), OptimizerMonitor(), LRMonitor(), NaNMonitor()]
    options = {"device_train_microbatch_size": size, "loggers": [composer.loggers.InMemoryLogger()]}
    with_them = fit(POINTS, tmp_path, given, **options)
    options["loggers"] = [composer.loggers.InMemoryLogger()]
    without = fit(POINTS, tmp_path, None, **options)
    assert all(torch.equal(a, b) for a, b in zip(weights(with_them), weights(without), strict=True))
    check_events(recorder.events)
    counted = {event: recorder.events.count(event) for event in recorder.events}
    assert counted["on_train_step_end"] == counted["on_optimizer_step_end"] == 12
    assert counted["on_forward_end"] == counted["on_backward_end"] == counted["on_microbatch_end"] == 12 * 4 // size
    assert counted["on_eval_all_end"] == counted["on_epoch_end"] == 2
    assert counted["on_eval_forward_end"] == 6
    assert counted["on_fetch_end"] == 14  # 12 batches, and once per epoch the end of the data
    assert recorder.events[-1] == "on_run_end"
    losses = in_memory(without, "loss/train/total")
    pairs = [(a + b) / 2 for a, b in zip(losses[::2], losses[1::2], strict=True)]
    assert history["train/loss"] == pytest.approx(pairs, rel=1e-6)
    assert history["eval/loss"] == pytest.approx(in_memory(without, "metrics/eval/loss"))


def test_the_trainer_carries_out_requests(tmp_path: Path) -> None:
    recorder, ends = Recorder(fields=("checkpoint",)), RecordsOutcomes()
    trained = fit(
        POINTS,
        tmp_path,
        [RequestsAtStep("save", 2), RequestsAtStep("evaluate", 3), RequestsAtStep("stop", 7), recorder, ends],
        save_folder=str(tmp_path / "saved"),
        save_interval="1ep",
    )
    assert int(trained.state.timestamp.batch) == 7
    assert ends.outcomes == ["stopped"]
    check_events(recorder.events)
    recorded = [(event, info.step, info.kind) for event, info in recorder.values["checkpoint"] if info is not None]
    assert [(step, kind) for event, step, kind in recorded if event == "on_checkpoint_published"] == [
        (2, "requested"),
        (6, "periodic"),
        (7, "periodic"),
    ]
    assert all(Path(info.path).is_file() for _, info in recorder.values["checkpoint"] if info is not None)
    evaluated = [at for at, event in enumerate(recorder.events) if event == "on_eval_all_end"]
    assert [recorder.events[:at].count("on_train_step_end") for at in evaluated] == [3, 6, 7]


def test_unsupported_requests_are_rejected(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(POINTS, tmp_path, [RequestsAtStep("save", 2)])
    assert (
        "RequestsAtStep calls ctx.control.save, which Composer's Trainer does not support here; it supports evaluate, stop."
        in caplog.text
    )


def test_checkpoints_that_a_saver_requests_are_written(tmp_path: Path) -> None:
    recorder = Recorder(fields=("checkpoint",))
    saver = CheckpointSaver(save_interval="5ba")
    fit(POINTS, tmp_path, [saver, recorder], save_folder=str(tmp_path / "saved"), save_interval="0ba")
    steps = [info.step for event, info in recorder.values["checkpoint"] if event == "on_checkpoint_save_end" and info is not None]
    assert steps == [5, 10, 12]
    check_events(recorder.events)


def test_a_resume_from_a_composer_checkpoint_restores_the_states_of_several_hosts(tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    options: dict[str, Any] = {"save_folder": folder, "save_interval": "7ba", "eval_interval": "2ba"}
    whole, other = History(), History()
    uninterrupted = fit(
        POINTS, tmp_path / "whole", [whole], after=[host([other], log_interval=1)], **options | {"save_folder": None}
    )
    with pytest.raises(ZeroDivisionError):
        fit(POINTS, tmp_path, [History(), Fails(8)], after=[host([History()], log_interval=1)], **options)
    history, second, recorder = History(), History(), Recorder()
    again = fit(POINTS, tmp_path, [history, recorder], after=[host([second], log_interval=1)], autoresume=True, **options)
    assert int(again.state.timestamp.batch) == 12
    assert history["train/loss"] == pytest.approx(whole["train/loss"])
    assert second["train/loss"] == pytest.approx(other["train/loss"])
    assert len(second["train/loss"]) == 12
    assert all(torch.equal(a, b) for a, b in zip(weights(again), weights(uninterrupted), strict=True))
    check_events(recorder.events)
    assert recorder.events.count("on_train_step_end") == 5
    assert recorder.recorded[-1].batch == 12


def test_an_early_stop_ends_training(tmp_path: Path) -> None:
    class RaisesEvalLoss(Callback):
        phase = "change"

        def on_eval_forward_end(self, ctx: Context) -> None:
            ctx.outputs = ctx.outputs + 10.0 * ctx.step

    trained = fit(POINTS, tmp_path, [RaisesEvalLoss(), EarlyStopper(monitor="eval/loss", patience="1ep")], epochs=9)
    assert int(trained.state.timestamp.epoch) < 5


def test_averaged_weights_are_used_for_evaluation_only(tmp_path: Path) -> None:
    averaged, plain = History(), History()
    fit(POINTS, tmp_path, [EMA(half_life=3), averaged])
    fit(POINTS, tmp_path, [plain])
    assert averaged["train/loss"] == plain["train/loss"]
    assert averaged["eval/loss"] != plain["eval/loss"]


def test_values_replaced_by_a_callback_are_used_in_training(tmp_path: Path) -> None:
    class ZeroesBatch(Callback):
        phase = "change"

        def on_fetch_end(self, ctx: Context) -> None:
            if ctx.batch is not None:
                ctx.batch = [ctx.batch[0] * 0, ctx.batch[1] * 0]

    history = History()
    fit(POINTS, tmp_path, [ZeroesBatch(), history], epochs=1)
    plain = History()
    fit(POINTS, tmp_path, [plain], epochs=1)
    assert history["train/loss"][0] < plain["train/loss"][0] / 4


def test_a_logger_writes_our_values_and_composer_s_into_the_run_folder(tmp_path: Path) -> None:
    fit(POINTS, tmp_path, [JSONLLogger()], after=[real.LRMonitor()])
    records = read_metrics(tmp_path / "small")
    assert [record.step for record in records if "train/loss" in record.values] == [2, 4, 6, 8, 10, 12]
    assert records[0].values["composer/lr-AdamW/group0"] == 0.02


def test_standalone_evaluations_and_predictions_fire_events_in_order(tmp_path: Path) -> None:
    class RecordsPosition(Callback):
        def on_predict_start(self, ctx: Context) -> None:
            self.position = ctx.step, ctx.epoch

    recorder, ends, records_position = Recorder(fields=("standalone", "outputs")), RecordsOutcomes(), RecordsPosition()
    trained = made(POINTS, tmp_path, [recorder, ends, records_position], epochs=1)
    trained.eval()
    trained.fit()
    trained.fit(duration="1ep")
    predicted = trained.predict(POINTS.validation_batches())
    trained.close()
    check_events(recorder.events)
    assert recorder.events.count("on_train_end") == 2
    assert recorder.events.count("on_predict_forward_end") == len(predicted) == 3
    assert records_position.position == (12, 2)
    standalone = [value for event, value in recorder.values["standalone"] if event == "on_eval_all_start"]
    assert standalone == [True, False, False]
    assert ends.outcomes == ["finished"]


def test_listeners_to_events_that_composer_never_fires_are_rejected(tmp_path: Path) -> None:
    class Listens(Callback):
        def on_test_end(self, ctx: Context) -> None: ...

    with pytest.raises(NotSupported, match="Listens listens to on_test_end, which Composer's Trainer does not fire"):
        made(POINTS, tmp_path, [Listens()])
    fit(POINTS, tmp_path, [Listens()], strict=False)


def test_an_exception_fails_the_run(tmp_path: Path) -> None:
    ends, recorder = RecordsOutcomes(), Recorder()
    trained = made(POINTS, tmp_path, [Fails(2), ends, recorder])
    with pytest.raises(ZeroDivisionError):
        trained.fit()
    assert ends.outcomes == ["failed"]
    assert recorder.events.count("on_exception") == 1
    trained.close()
    later = RecordsOutcomes()
    trained = made(POINTS, tmp_path, [later], after=[RaisesError()])
    with pytest.raises(ArithmeticError):
        trained.fit()
    assert later.outcomes == []  # Composer does not report other callbacks' errors
    trained.close()
    assert later.outcomes == ["failed"]


# --- several ranks ---


class RequestsOnRank1(RequestsAtStep):
    """Makes a request on rank 1 only."""

    def on_train_step_end(self, ctx: Context) -> None:
        if ctx.run.rank == 1:
            super().on_train_step_end(ctx)


def on_a_rank(folder: str) -> dict[str, Any]:
    """Train on this rank's half of the data under DDP. Rank 1 makes the requests, and both ranks carry them out."""
    rank = int(os.environ["RANK"])
    os.environ["NODE_RANK"] = "0"
    os.chdir(Path(folder, f"{rank}"))
    options: dict[str, Any] = {"max_duration": "4ep"}
    for name, data in (("train_dataloader", POINTS.train), ("eval_dataloader", POINTS.validation)):
        shared: DistributedSampler[Any] = DistributedSampler(data, num_replicas=2, rank=rank, shuffle=False)
        options[name] = DataLoader(data, batch_size=2, sampler=shared)
    saved = {"save_folder": str(Path(folder, "saved")), "save_interval": "1ep", "autoresume": True, "eval_interval": "100ep"}
    plain = fit(POINTS, Path(folder, "plain"), None, loggers=[composer.loggers.InMemoryLogger()], **options)
    recorder, history = Recorder(), History()
    ours = fit(POINTS, Path(folder, "ours"), [recorder, history], **options)
    requests, before, after, ends = Recorder(fields=("checkpoint",)), History(), History(), RecordsOutcomes()
    fit(
        POINTS,
        Path(folder, "requests"),
        [RequestsOnRank1("save", 1), RequestsOnRank1("evaluate", 7), requests, before],
        **saved,
        **options,
    )
    options["max_duration"] = "40ep"
    again = fit(POINTS, Path(folder, "requests"), [RequestsOnRank1("stop", 29), after, ends], **saved, **options)
    published = [info for event, info in requests.values["checkpoint"] if event == "on_checkpoint_published" and info is not None]
    return {
        "kind": type(ours.state.model).__name__,
        "neutral": all(torch.equal(a, b) for a, b in zip(weights(ours), weights(plain), strict=True)),
        "events": recorder.events,
        "losses": history["train/loss"],
        "own": in_memory(plain, "loss/train/total"),
        "evaluated": history["eval/loss"],
        "own evaluated": in_memory(plain, "metrics/eval/loss"),
        "requests": requests.events,
        "saved": [(info.step, info.kind) for info in published],
        "are there": all(Path(info.path).is_file() for info in published),
        "before": before["train/loss"],
        "after": after["train/loss"],
        "stopped": (int(again.state.timestamp.batch), ends.outcomes),
    }


def test_two_ranks_carry_out_the_requests_of_one_rank(tmp_path: Path) -> None:
    for rank in "01":
        (tmp_path / rank).mkdir()
    one, other = run_ranks(on_a_rank, 2, str(tmp_path))
    assert one["are there"]  # the files of checkpoints, which only rank 0 writes
    for name in one.keys() - {"are there"}:
        assert one[name] == other[name], name
    assert one["kind"] == "DistributedDataParallel"
    assert one["neutral"]
    check_events(one["events"])
    check_events(one["requests"])
    pairs = [
        (a + b) / 2 for a, b in zip(one["own"][::2], one["own"][1::2], strict=True)
    ]  # Composer's losses are already reduced over both ranks
    assert one["losses"] == pytest.approx(pairs, rel=1e-6)
    assert one["evaluated"] == pytest.approx(one["own evaluated"])
    assert one["saved"] == [(2, "requested"), (6, "periodic"), (12, "periodic"), (18, "periodic"), (24, "periodic")]
    evaluated = [at for at, event in enumerate(one["requests"]) if event == "on_eval_all_end"]
    requested, at_the_end = [one["requests"][:at].count("on_train_step_end") for at in evaluated]
    assert (
        8 <= requested <= 12
    )  # rank 1 requests it at step 7; the ranks agree a quarter of a second later, or at the epoch's end
    assert at_the_end == 24
    assert one["after"][: len(one["before"])] == one["before"]
    assert one["stopped"] == (30, ["stopped"])


class RaisesError(composer.Callback):  # type: ignore[misc]
    """A Composer callback that raises an error."""

    def batch_end(self, state: Any, logger: Any) -> None:
        raise ArithmeticError


def test_a_host_can_be_used_for_several_runs(tmp_path: Path) -> None:
    recorder = Recorder()
    hosted = host([recorder], runs_folder=tmp_path)
    for _ in range(2):
        trained = fit(POINTS, tmp_path, None, after=[hosted], epochs=1)
        assert not trained.state.optimizers[0]._optimizer_step_post_hooks
    assert recorder.events.count("on_run_start") == recorder.events.count("on_run_end") == 2


# --- guests ---


class NativeTask(Task):
    """A task that computes forward pass and loss as Composer's Trainer does."""

    def forward(self, model: nn.Module, batch: Any) -> Any:
        return model(batch)

    def __init__(self, model: Any) -> None:
        self._model = model

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        loss: Tensor = self._model.loss(outputs, batch)
        return loss


class Logged(Logger):
    """Records all logged numbers, and how many images were logged under which name."""

    def __init__(self) -> None:
        self.logged: list[tuple[str, int]] = []
        self.numbers: dict[str, list[float]] = {}

    def on_log(self, ctx: Context) -> None:
        for name, value in ctx.record.values.items():
            self.numbers.setdefault(name, []).append(value)

    def log_images(self, ctx: Context, name: str, images: Any) -> None:
        self.logged.append((name, len(images)))


class ComposerImages(composer.loggers.LoggerDestination):  # type: ignore[misc]
    """Records how many images were logged under which name in Composer's Trainer."""

    def __init__(self) -> None:
        self.logged: list[tuple[str, int]] = []

    def log_images(self, images: Any, name: str = "Images", *args: Any, **given: Any) -> None:
        self.logged.append((name, len(images)))


class Run:
    """The steps, losses, logged values, outcome and images of a run."""

    def __init__(self, steps: int, losses: list[float], logged: dict[str, list[float]], error: str, images: list[Any]) -> None:
        self.steps, self.losses, self.logged, self.error, self.images = steps, losses, logged, error, images


def in_framework(foreign: Any, job: Job, folder: Path, **options: Any) -> Run:
    memory, pictures, error = composer.loggers.InMemoryLogger(), ComposerImages(), ""
    trained = made(job, folder, None, after=[foreign], loggers=[memory, pictures], epochs=4, **options)
    try:
        trained.fit()
    except RuntimeError as raised:
        error = str(raised)
    trained.close()
    logged = {name: [float(value) for _, value in values] for name, values in memory.data.items()}
    losses = logged.pop("loss/train/total", [])
    return Run(int(trained.state.timestamp.batch), losses, logged, error, pictures.logged)


def as_guest(foreign: Any, job: Job, folder: Path, **options: Any) -> Run:
    pictures, error = Logged(), ""
    torch.manual_seed(3)
    model = as_composer_has_it(job)
    trainer = Trainer(
        model,
        NativeTask(model),
        options.pop("train_dataloader", job.batches()),
        job.validation_batches(),
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.02),
        max_duration="4ep",
        log_interval=1,
        callbacks=[guest(foreign), pictures],
        runs_folder=folder,
        seed=3,
        device="cpu",
        **options,
    )
    try:
        with trainer:
            trainer.fit()
    except RuntimeError as raised:
        error = str(raised)
    losses = pictures.numbers.pop("train/loss", [])
    return Run(trainer.state.timestamp.batch, losses, pictures.numbers, error, pictures.logged)


LINES = replace(POINTS, model=lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
"""A job without random numbers in training, so that the results are the same in another Trainer."""


def broken() -> Any:
    """Return data whose fourth batch is NaN."""
    rows = [(inputs.clone(), targets.clone()) for inputs, targets in map(LINES.train.__getitem__, range(24))]
    rows[14][1].fill_(float("nan"))
    return DataLoader(rows, batch_size=4)  # type: ignore[arg-type]  # a list is a dataset


GUESTS: list[tuple[str, str, Function[[], Any], dict[str, Any]]] = [
    ("drives", "early_stopper", lambda: real.EarlyStopper("loss", "eval", comp="greater", patience=1), {}),
    ("drives", "early_stopper_in_batches", lambda: real.EarlyStopper("loss", "eval", comp="gt", patience="2ba"), {}),
    ("drives", "threshold_stopper", lambda: real.ThresholdStopper("loss", "eval", 1.7), {}),
    ("drives", "nan_monitor", real.NaNMonitor, {"train_dataloader": broken}),
    ("drives", "free_outputs", real.FreeOutputs, {}),
    ("reads", "speed_monitor", lambda: real.SpeedMonitor(window_size=2), {}),
    ("reads", "lr_monitor", real.LRMonitor, {}),
    ("reads", "optimizer_monitor", lambda: real.OptimizerMonitor(batch_log_interval=3), {}),
    ("reads", "runtime_estimator", real.RuntimeEstimator, {}),
    ("reads", "memory_monitor", real.MemoryMonitor, {}),
    ("reads", "activation_monitor", lambda: real.ActivationMonitor(interval="4ba", only_log_wandb=False), {}),
    ("reads", "image_visualizer", lambda: real.ImageVisualizer(interval="5ba", num_images=3), {"job": IMAGES}),
    ("listens", "system_metrics_monitor", real.SystemMetricsMonitor, {}),
]
SAME = {"lr_monitor", "optimizer_monitor", "activation_monitor"}
"""Guests that log no times, so that their numbers can be compared."""


@pytest.mark.parametrize(("tier", "name", "make", "options"), GUESTS, ids=[row[1] for row in GUESTS])
def test_a_guest_has_the_same_effects_as_in_its_framework(
    tier: str, name: str, make: Function[[], Any], options: dict[str, Any], tmp_path: Path
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        job = options.get("job", LINES)
        rest = {key: value() for key, value in options.items() if key != "job"}
        native = in_framework(make(), job, tmp_path / "framework", **rest)
        here = as_guest(make(), job, tmp_path / "here", **rest)
    assert here.losses == pytest.approx(native.losses, rel=1e-6, nan_ok=True)
    assert (here.steps, here.error, here.images) == (native.steps, native.error, native.images)
    theirs = {key: values for key, values in native.logged.items() if not key.startswith(("time/", "metrics/", "trainer/"))}
    if name in ("speed_monitor", "runtime_estimator"):
        theirs |= {
            key: native.logged[key] for key in native.logged if key in ("time/train", "time/val", "time/remaining_estimate")
        }
    assert theirs.keys() <= here.logged.keys()
    for key, values in theirs.items():
        if tier != "listens":  # callsheet records values that are logged at batches of an evaluation only once, at its end
            assert len(here.logged[key]) == len(values), key
        if name in SAME:
            assert here.logged[key] == pytest.approx(values, rel=1e-4, abs=1e-7, nan_ok=True), key
    if tier == "drives":
        assert native.steps < 24 or name == "free_outputs"
    if name == "speed_monitor":
        per_second = [here.logged[f"throughput/{what}_per_sec"] for what in ("batches", "samples")]
        assert [4 * value for value in per_second[0]] == pytest.approx(per_second[1])
    check_or_write_cell("composer", "guests", type(make()).__name__, Cell("works", tier=tier))


def test_guests_work_with_a_plain_model(tmp_path: Path) -> None:
    logged = Logged()
    model = POINTS.made_model()
    with Trainer(
        model, POINTS.loss, POINTS.batches(), optimizer=torch.optim.SGD(model.parameters(), lr=0.01), log_interval=1,
        callbacks=[guest(real.SpeedMonitor(window_size=2)), guest(real.OptimizerMonitor(batch_log_interval=1)), logged],
        runs_folder=tmp_path,
    ) as trainer:  # fmt: skip
        trainer.fit()
    assert len(logged.numbers["throughput/samples_per_sec"]) == 4
    assert {f"l2_norm/grad/{name}" for name, _ in model.named_parameters()} <= logged.numbers.keys()


def test_a_composer_logger_receives_our_records_under_composer_s_names(tmp_path: Path) -> None:
    memory = composer.loggers.InMemoryLogger()
    model = POINTS.made_model()
    with Trainer(
        model, POINTS.loss, POINTS.batches(), POINTS.validation_batches(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01), log_interval=1, max_duration="2ep",
        callbacks=[guest(memory), LRMonitor()], runs_folder=tmp_path,
    ) as trainer:  # fmt: skip
        trainer.fit()
    assert len(memory.data["loss/train/total"]) == 12
    assert memory.data["metrics/eval/loss"][-1][1] == trainer.eval_results["validation"]["loss"]
    assert memory.data["lr-SGD/group0"][0][1] == 0.01
    stamp = memory.data["loss/train/total"][-1][0]
    assert (int(stamp.batch), int(stamp.sample), type(stamp)) == (12, 48, composer.Timestamp)


def test_an_error_names_the_attribute_that_a_guest_may_not_read(tmp_path: Path) -> None:
    class ReadsFsdpConfig(composer.Callback):  # type: ignore[misc]
        def fit_start(self, state: Any, logger: Any) -> None:
            state.fsdp_config  # noqa: B018

    model = POINTS.made_model()
    trainer = Trainer(
        model, POINTS.loss, POINTS.batches(), optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        callbacks=[guest(ReadsFsdpConfig())], runs_folder=tmp_path,
    )  # fmt: skip
    with pytest.raises(NotSupported, match="Composer's State has here no 'fsdp_config'"):
        trainer.fit()


def test_composer_s_events_are_fired_in_composer_s_order(tmp_path: Path) -> None:
    class RecordsEvents(composer.Callback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.recorded: list[tuple[Any, ...]] = []

        def run_event(self, event: Any, state: Any, logger: Any) -> None:
            assert isinstance(event, composer.Event)
            stamp = state.timestamp
            self.recorded.append((event.value, int(stamp.epoch), int(stamp.batch), int(stamp.sample), int(stamp.batch_in_epoch)))

        def close(self, state: Any, logger: Any) -> None:
            self.recorded.append(("close",))

        def post_close(self) -> None:
            self.recorded.append(("post_close",))

    native, here = RecordsEvents(), RecordsEvents()
    fit(POINTS, tmp_path, None, after=[native], device_train_microbatch_size=2)
    model = POINTS.made_model()
    with Trainer(
        model, POINTS.loss, POINTS.batches(), POINTS.validation_batches(), microbatch_size=2, max_duration="2ep",
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01), callbacks=[guest(here)], runs_folder=tmp_path,
    ) as trainer:  # fmt: skip
        trainer.fit()
    assert here.recorded == native.recorded


def test_the_loss_of_the_last_closure_evaluation_is_reported(tmp_path: Path) -> None:
    class RecordsLosses(Callback):
        def __init__(self) -> None:
            self.losses: list[float] = []

        def on_train_step_end(self, ctx: Context) -> None:
            self.losses.append(float(ctx.loss))

    class Losses(composer.Callback):  # type: ignore[misc]  # Composer's types are not read
        def __init__(self) -> None:
            self.by_step: list[list[float]] = []

        def batch_start(self, state: Any, logger: Any) -> None:
            self.by_step.append([])

        def after_loss(self, state: Any, logger: Any) -> None:
            self.by_step[-1].append(float(state.loss))

    def trained(callbacks: Any) -> tuple[Any, Losses]:
        losses, model = Losses(), as_composer_has_it(POINTS)
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
        return fit(POINTS, tmp_path, callbacks, before=[losses], epochs=1, model=model, optimizers=optimizer), losses

    records_losses, recorder = RecordsLosses(), Recorder()
    plain, _ = trained(None)
    observed, losses = trained([records_losses, recorder])
    assert any(len(each) > 1 for each in losses.by_step)
    assert records_losses.losses == [each[-1] for each in losses.by_step]
    check_events(recorder.events)
    assert all(torch.equal(one, other) for one, other in zip(weights(plain), weights(observed), strict=True))


# --- callsheet exec ---

SCRIPT = """
import hashlib, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from bridges.loops.composer import made
from bridges.loops.job import POINTS

trainer = made(POINTS, Path("out"), None, save_folder="saved", save_interval="1ep", save_overwrite=True)
trainer.fit()
if len(sys.argv) > 1:
    trainer.fit(duration="1ep")
trainer.close()
print("weights", hashlib.sha256(b"".join(each.numpy().tobytes() for each in trainer.state.model.state_dict().values())).hexdigest())
print("callbacks", [type(each).__name__ for each in trainer.state.callbacks])
"""


def script(*command: str) -> subprocess.CompletedProcess[str]:
    tests = Path(__file__).resolve().parents[1]
    Path("train.py").write_text(SCRIPT.format(tests=str(tests)))
    paths = os.pathsep.join([str(tests.parent / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    ran = subprocess.run(
        [python(), *command], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths}, timeout=280, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return ran


def test_a_script_is_observed() -> None:
    plain, observed = script("train.py"), script("-m", "callsheet.exec", "--run_name", "a", "train.py")
    assert observed.stdout == plain.stdout
    found = RunFolder.read(Path("runs/a"))
    assert (found.outcome, found.last_step) == ("finished", 12), observed.stderr
    assert {"fetch", "forward", "backward", "optimizer_step"} <= {each.name for window in found.windows for each in window.slices}
    assert len(found.evaluations) == 2
    saved = torch.load(next(Path("saved").glob("ep2*.pt")), weights_only=False)
    assert "callsheet" not in str(saved["state"]["callbacks"])


def test_each_call_of_fit_is_a_run() -> None:
    observed = script("-m", "callsheet.exec", "--run_name", "a", "train.py", "again")
    found = [RunFolder.read(Path(f"runs/{name}")) for name in ("a", "a-2")]
    assert [(run.outcome, run.last_step) for run in found] == [("finished", 12), ("finished", 18)], observed.stderr
    assert "no state of these callbacks" not in observed.stderr


@pytest.mark.parametrize("options", [{}, {"device_train_microbatch_size": 2}, {"eval_interval": "4ba"}])
def test_callbacks_that_listen_to_some_events_receive_the_same_as_one_that_listens_to_all(
    options: dict[str, Any], tmp_path: Path
) -> None:
    def train_once(manager: CallbackManager) -> None:
        fit(LINES, tmp_path, manager, **options)

    compare_subsets(train_once, NOT_FIRED, seeds(20))
