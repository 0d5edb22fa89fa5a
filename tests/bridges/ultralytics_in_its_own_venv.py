"""Tests with the real Ultralytics. `test_ultralytics.py` runs them in the venv that `tools/ultralytics_venv.py` creates."""

from __future__ import annotations

import gc
import importlib
import os
import subprocess
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from packaging.version import Version
from PIL import Image
from torch import Tensor

from callsheet import Callback, CallbackManager, Context
from callsheet.bridges import versions
from callsheet.bridges.hosted_run import HostedRun
from callsheet.bridges.ultralytics import NOT_FIRED, UltralyticsHost, host
from callsheet.bridges.ultralytics.events import HANDLED
from callsheet.bridges.ultralytics.hosts import results
from callsheet.bridges.ultralytics.internals import HOST
from callsheet.bridges.versions import has
from callsheet.callbacks import EMA, History, LRMonitor, NaNMonitor, OptimizerMonitor, SpeedMonitor
from callsheet.core.lifecycle import EVENTS
from callsheet.errors import ConfigError, HostError, NotSupported
from callsheet.report import RunFolder
from callsheet.testing import Recorder, check_events
from forked import python  # type: ignore[import-not-found]  # pytest has its folder on the path

from .faults import (
    ALWAYS,
    EVALUATED,
    OBSERVERS,
    TRAINED,
    FailsInSpan,
    RandomFaults,
    StepEndRecorder,
    StepRecorder,
    assert_counts_are_right,
    assert_evaluations_are_right,
    assert_steps_equal,
    assert_training_is_unchanged,
    seeds,
)
from .loops import ultralytics as loop
from .loops.job import POINTS

from ultralytics import YOLO, __version__  # isort: skip  # after the loop, which sets its environment
from ultralytics.models.yolo.detect import DetectionTrainer  # isort: skip
from ultralytics.utils.callbacks.base import default_callbacks  # isort: skip

torch.set_num_threads(1)
ROOT = Path(__file__).resolve().parents[2]

MODEL = """\
nc: 2
end2end: True
reg_max: 1
scales: {n: [0.33, 0.125, 64]}
backbone:
  - [-1, 1, Conv, [8, 3, 2]]
  - [-1, 1, Conv, [16, 3, 2]]
  - [-1, 1, Conv, [16, 3, 2]]
head:
  - [[2], 1, Detect, [nc]]
"""
"""A YOLO of eleven thousand parameters that needs no suppression of boxes, for which torchvision has no build here."""

SETTINGS: Mapping[str, Any] = {
    "epochs": 2, "imgsz": 32, "batch": 4, "nbs": 4, "device": "cpu", "plots": False, "amp": False, "workers": 0, "optimizer": "SGD",
    "warmup_epochs": 0, "verbose": False, "name": "small", "exist_ok": True,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _in_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # Ultralytics writes into the working folder


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, twelve training images and four validation images, each with a square in one of two colours."""
    folder = tmp_path_factory.mktemp("squares")
    drawn = np.random.default_rng(0)
    for split, count in (("train", 12), ("val", 4)):
        for kind in ("images", "labels"):
            (folder / kind / split).mkdir(parents=True)
        for number in range(count):
            colour, (x, y) = number % 2, drawn.integers(2, 16, 2)
            image = drawn.integers(0, 60, (32, 32, 3), dtype=np.uint8)
            image[y : y + 14, x : x + 14, colour] = 230
            Image.fromarray(image).save(folder / "images" / split / f"{number}.png")
            (folder / "labels" / split / f"{number}.txt").write_text(
                f"{colour} {(x + 7) / 32} {(y + 7) / 32} {14 / 32} {14 / 32}\n"
            )
    (folder / "data.yaml").write_text(f"path: {folder}\ntrain: images/train\nval: images/val\nnames: [red, green]\n")
    (folder / "small.yaml").write_text(MODEL)
    return folder


class Trained:
    """Trains the small YOLO, and keeps the model, the trainers, the loss of each batch, and the steps and losses of the evaluations."""

    def __init__(
        self, folder: Path, callbacks: Any, *, kind: Any = None, before: Any = None, given: Any = None, **settings: Any
    ) -> None:
        self.model = YOLO(str(folder / "small.yaml"), task="detect")
        self.losses: list[float] = []
        self.evaluated: list[tuple[int, float]] = []
        self.trainers: list[Any] = []
        self.model.add_callback("on_train_start", self.trainers.append)
        if before is not None:
            before(self.model)
        if callbacks is not None:
            self.host = host(callbacks, **{"run_name": "small", "log_interval": 1} | (given or {})).attach(self.model)
        self.model.add_callback("on_train_batch_end", lambda trainer: self.losses.append(float(trainer.loss.detach())))
        self.model.add_callback("on_fit_epoch_end", self._keep_evaluation)
        where = {"data": str(folder / "data.yaml"), "project": str(Path.cwd() / ("plain" if callbacks is None else "observed"))}
        self.model.train(trainer=kind, **{**SETTINGS, **where, **settings})

    def _keep_evaluation(self, trainer: Any) -> None:
        losses = [value for name, value in trainer.metrics.items() if name.startswith("val/")]
        self.evaluated += [(trainer.ema.updates, float(sum(losses)))] if losses else []

    @property
    def trainer(self) -> Any:
        return self.trainers[-1]

    def weights(self) -> list[Tensor]:
        """Return the trained weights, and Ultralytics' averaged weights."""
        return [*self.trainer.model.state_dict().values(), *self.trainer.ema.ema.state_dict().values()]


def assert_same(one: Trained, other: Trained) -> None:
    assert all(torch.equal(a, b) for a, b in zip(one.weights(), other.weights(), strict=True))
    assert one.losses == other.losses
    assert_nothing_is_left(one)


def assert_nothing_is_left(trained: Trained) -> None:
    assert not {"preprocess_batch", "validate", "final_eval"} & set(vars(trained.trainer))
    assert "unscale_" not in vars(trained.trainer.scaler)
    assert "preprocess" not in vars(trained.trainer.validator)
    for module in (*trained.trainer.model.modules(), *trained.trainer.ema.ema.modules()):
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    assert Tensor.backward.__qualname__ == "Tensor.backward"


class Losses(Callback):
    """Records the losses at `on_backward_end`, the losses of steps, and whether they were skipped."""

    def __init__(self) -> None:
        self.backward: list[float] = []
        self.steps: list[tuple[int, float, bool]] = []

    def on_backward_end(self, ctx: Context) -> None:
        self.backward.append(float(ctx.loss.detach()))

    def on_train_step_end(self, ctx: Context) -> None:
        self.steps.append((ctx.step, float(ctx.loss), bool(ctx.step_skipped)))


class RecordsOutcomes(Callback):
    """Records how a run ends."""

    def __init__(self) -> None:
        self.recorded: list[Any] = []

    def on_exception(self, ctx: Context) -> None:
        self.recorded.append(type(ctx.exception))

    def on_run_end(self, ctx: Context) -> None:
        self.recorded += [str(ctx.run.outcome), ctx.run.outcome_reason]


class RequestsAtStep(Callback):
    """Makes a request at the end of a step."""

    def __init__(self, what: str, step: int) -> None:
        self.what, self.step = what, step

    def on_train_step_end(self, ctx: Context) -> None:
        if ctx.step == self.step:
            getattr(ctx.control, self.what)("asked")


# --- events ---


def test_the_host_handles_existing_events_of_ultralytics() -> None:
    assert set(HANDLED) <= set(default_callbacks)


@pytest.mark.parametrize("name", HOST)
def test_the_installed_version_has_what_the_host_needs(name: str) -> None:
    assert has(name), f"this host needs {name}, which ultralytics {__version__} does not have"


@pytest.mark.parametrize("name", ["ultralytics.engine.trainer.BaseTrainer.validate", "ultralytics.engine.trainer.ddp_cleanup"])
def test_a_version_without_what_the_host_needs_is_rejected(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, _, attribute = name.rpartition(".")
    module, _, kind = owner.rpartition(".")
    where = getattr(importlib.import_module(module), kind) if kind[0].isupper() else importlib.import_module(owner)
    monkeypatch.delattr(where, attribute)
    with pytest.raises(NotSupported, match=f"this host needs {name}"):
        host([])


@pytest.mark.parametrize("event", HANDLED)
def test_a_version_without_an_event_is_rejected(event: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(default_callbacks, event)
    with pytest.raises(NotSupported, match=f"this host needs the events {event}, which ultralytics"):
        host([])


def test_a_version_that_is_not_tested_is_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "99.1.0")
    monkeypatch.setattr(versions, "warned", {"torch"})
    host([])
    assert caplog.text.count("ultralytics 99.1.0 is not tested with callsheet") == 1


@pytest.mark.parametrize(
    "settings", [{}, {"nbs": 8}, {"nbs": 12, "warmup_epochs": 1.0, "epochs": 3}, {"optimizer": "MuSGD"}], ids=str
)
def test_training_is_unchanged_and_every_event_is_fired(settings: Any, folder: Path) -> None:
    recorder, losses = Recorder(fields=("loss", "learning_rate", "batch")), Losses()
    given = [
        recorder,
        losses,
        History(),
        SpeedMonitor(),
        OptimizerMonitor(),
        LRMonitor(),
        NaNMonitor(),
        EMA(half_life=2, at_end=False),
    ]
    observed, plain = Trained(folder, given, **settings), Trained(folder, None, **settings)
    assert_same(observed, plain)
    check_events(recorder.events)
    assert {*EVENTS} - {*recorder.events} == {*NOT_FIRED, "on_preempt", "on_exception"}
    assert losses.backward == observed.losses
    counted = {event: recorder.events.count(event) for event in recorder.events}
    epochs = observed.trainer.epochs
    assert counted["on_forward_end"] == counted["on_microbatch_end"] == counted["on_backward_end"] == 3 * epochs
    assert counted["on_epoch_end"] == counted["on_checkpoint_published"] == epochs
    assert counted["on_eval_all_end"] == epochs + 1  # the last one is the evaluation of best.pt
    taken = [step for step, _, is_skipped in losses.steps if not is_skipped]
    assert taken == list(range(1, observed.trainer.ema.updates + 1))


def test_the_loss_of_a_step_that_begins_in_one_epoch_and_ends_in_the_next(folder: Path) -> None:
    losses = Losses()
    trained = Trained(folder, [losses], nbs=8)  # two batches a step, and three batches an epoch
    one, two, three, four, five, six = trained.losses
    # The second entry is the epoch's third batch: its step is left and not counted, and the optimizer steps in the next epoch.
    assert [(step, is_skipped) for step, _, is_skipped in losses.steps] == [(1, False), (2, True), (2, False), (3, False)]
    assert [loss for _, loss, _ in losses.steps] == pytest.approx([one + two, three, three + four, five + six])


def test_results_and_records(folder: Path) -> None:
    history = History()
    trained = Trained(folder, [history])
    assert len(history["train/loss"]) == 6
    assert len(history["train/box_loss"]) == 6
    assert len(history["validation/loss"]) == len(history["validation/fitness"]) == 2
    assert len(history["best/mAP50(B)"]) == 1
    losses = [float(value) for name, value in trained.trainer.label_loss_items(trained.trainer.tloss).items()]
    assert all(value > 0 for value in losses)
    parts = [history[f"validation/{name}"][-1] for name in trained.trainer.loss_names]
    assert history["validation/loss"][-1] == pytest.approx(sum(parts))


def test_results_are_named_without_prefixes_and_with_the_summed_loss() -> None:
    found = results({"metrics/mAP50(B)": 0.5, "val/box_loss": 1.0, "val/cls_loss": 2.0}, 0.25)
    assert found == {"loss": 3.0, "box_loss": 1.0, "cls_loss": 2.0, "mAP50(B)": 0.5, "fitness": 0.25}
    assert results({"metrics/mAP50(B)": 0.5}) == {"mAP50(B)": 0.5}


def test_a_callback_may_replace_the_batch_and_the_loss(folder: Path) -> None:
    class Replaces(Callback):
        def on_fetch_end(self, ctx: Context) -> None:
            ctx.batch = {**ctx.batch, "img": torch.zeros_like(ctx.batch["img"])}

        def on_microbatch_start(self, ctx: Context) -> None:
            assert ctx.microbatch["img"].is_floating_point()
            assert not ctx.microbatch["img"].any()

        def on_loss_end(self, ctx: Context) -> None:
            ctx.loss = ctx.loss * 0

    trained, losses = Trained(folder, [Replaces(), losses := Losses()]), losses
    assert trained.losses[0] > 0
    assert losses.backward == [0.0] * 6


class Scaled(DetectionTrainer):  # type: ignore[misc]  # mypy does not read Ultralytics' types
    """Scales the loss as on a GPU. The first gradients overflow, so that the optimizer's step is skipped."""

    def _setup_train(self, *args: Any, **kwargs: Any) -> None:
        super()._setup_train(*args, **kwargs)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        overflows = [float("inf")]
        next(self.model.parameters()).register_hook(lambda gradient: gradient * (overflows.pop() if overflows else 1.0))


def test_a_loss_scaler(folder: Path) -> None:
    losses, norms = Losses(), History()
    observed, plain = Trained(folder, [losses, norms, OptimizerMonitor()], kind=Scaled), Trained(folder, None, kind=Scaled)
    assert_same(observed, plain)
    assert [is_skipped for _, _, is_skipped in losses.steps] == [True, *[False] * 5]
    assert losses.backward == pytest.approx(observed.losses)  # the unscaled loss


# --- requests ---


def test_a_stop_ends_the_epoch_after_the_step(folder: Path) -> None:
    recorder, ends = Recorder(), RecordsOutcomes()
    trained = Trained(folder, [RequestsAtStep("stop", 2), recorder, ends], epochs=3)
    assert len(trained.losses) == 2
    assert ends.recorded[0] == "stopped"
    check_events(recorder.events)
    assert recorder.events.count("on_checkpoint_published") == 1  # Ultralytics saves at the end of a stopped epoch too


def test_ultralytics_own_early_stop_is_an_outcome(folder: Path) -> None:
    class Worsens(DetectionTrainer):  # type: ignore[misc]
        def validate(self) -> Any:
            metrics, _ = super().validate()
            return metrics, 1.0 / (self.epoch + 1)

    ends = RecordsOutcomes()
    trained = Trained(folder, [ends], kind=Worsens, epochs=9, patience=2)
    assert trained.trainer.epoch == 2
    assert ends.recorded == ["stopped", "stopped by Ultralytics: it stopped after epoch 3 of 9"]


def test_a_requested_save_is_written_after_the_epoch(folder: Path) -> None:
    class Saved(Callback):
        def __init__(self) -> None:
            self.paths: list[tuple[str, int, tuple[str, ...]]] = []

        def on_checkpoint_published(self, ctx: Context) -> None:
            assert ctx.checkpoint is not None
            self.paths.append((Path(ctx.checkpoint.path).name, ctx.checkpoint.step, ctx.checkpoint.requested_by))

    saved, recorder = Saved(), Recorder()
    trained = Trained(folder, [RequestsAtStep("save", 2), saved, recorder], epochs=3, save=False)
    assert saved.paths == [("last.pt", 3, ("RequestsAtStep",)), ("last.pt", 9, ())]  # Ultralytics also saves after the last epoch
    assert (trained.trainer.wdir / "callsheet").is_dir()
    check_events(recorder.events)


def test_an_evaluation_cannot_be_requested(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Evaluates(RequestsAtStep):
        requests = ("evaluate",)

    with pytest.raises(
        NotSupported, match=r"asks for ctx\.control\.evaluate, which Ultralytics does not support here; Ultralytics validates"
    ):
        Trained(folder, [Evaluates("evaluate", 1)])
    Trained(folder, [RequestsAtStep("evaluate", 1)])
    assert "RequestsAtStep calls ctx.control.evaluate, which Ultralytics does not support here" in caplog.text
    assert "training continues; Ultralytics validates after each epoch" in caplog.text


@pytest.mark.parametrize("event", ["on_test_start", "on_predict_step_end"])
def test_a_callback_that_listens_only_to_what_is_never_fired_is_rejected(event: str, folder: Path) -> None:
    listens = type("Listens", (Callback,), {event: lambda self, ctx: None})
    with pytest.raises(NotSupported, match=f"Listens listens to {event}, which Ultralytics does not fire"):
        Trained(folder, [listens()])


def test_a_host_is_attached_once(folder: Path) -> None:
    made = host([]).attach(YOLO(str(folder / "small.yaml"), task="detect"))
    with pytest.raises(ConfigError, match="attached to a model already"):
        made.attach(YOLO(str(folder / "small.yaml"), task="detect"))


# --- runs ---


def test_a_second_training_is_a_run_of_its_own(folder: Path) -> None:
    ends = RecordsOutcomes()
    trained = Trained(folder, [ends], given={"run_name": None})
    trained.model.overrides.setdefault("model", str(folder / "small.yaml"))  # older releases forget the model after a training
    trained.model.train(**{**SETTINGS, "data": str(folder / "data.yaml"), "project": str(Path.cwd() / "again"), "epochs": 1})
    assert ends.recorded == ["finished", "reached max_duration, 2ep", "finished", "reached max_duration, 1ep"]


def test_a_trainer_is_freed_after_its_training(folder: Path) -> None:
    model = YOLO(str(folder / "small.yaml"), task="detect")
    host([History()], run_name="small").attach(model)
    seen: list[weakref.ref[Any]] = []
    model.add_callback("on_train_start", lambda trainer: seen.append(weakref.ref(trainer)))
    model.train(**{**SETTINGS, "data": str(folder / "data.yaml"), "project": str(Path.cwd() / "freed"), "epochs": 1})
    model.trainer = None  # otherwise Ultralytics would keep the trainer until the next training
    gc.collect()
    assert seen[0]() is None


@pytest.mark.skipif(Version(__version__) < Version("8.4.76"), reason="this release does not train on a list of datasets")
def test_training_on_a_list_of_datasets_is_one_run_for_each_dataset(folder: Path) -> None:
    ends = RecordsOutcomes()
    trained = Trained(folder, [ends], given={"run_name": None}, data=[str(folder / "data.yaml")] * 2, epochs=1)
    assert len(trained.trainers) == 2
    assert ends.recorded == ["finished", "reached max_duration, 1ep"] * 2


class Interrupted(Exception):
    pass


class Counts(Callback):
    """Counts the steps, over resumed runs."""

    def __init__(self) -> None:
        self.steps = 0

    def on_train_step_end(self, ctx: Context) -> None:
        self.steps += not ctx.step_skipped

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps = state["steps"]


def test_a_resumed_training_restores_the_callbacks(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    def interrupt(model: Any) -> None:
        def called(trainer: Any) -> None:
            if trainer.epoch == 2:
                raise Interrupted

        model.add_callback("on_train_batch_end", called)

    ends, whole = RecordsOutcomes(), Counts()
    with pytest.raises(Interrupted):
        Trained(folder, [ends, Counts()], epochs=4, nbs=8, before=interrupt)
    assert ends.recorded[:2] == [Interrupted, "failed"]
    last = next(Path.cwd().glob("observed/**/last.pt"))
    counts, recorder, seen = Counts(), Recorder(), Losses()
    resumed = YOLO(str(last))
    host([counts, recorder, seen], run_name="again").attach(resumed)
    resumed.train(resume=True)
    uninterrupted = Trained(folder, [whole], epochs=4, nbs=8)
    check_events(recorder.events)
    assert seen.steps[0][0] == 4  # two epochs of three batches were trained, two batches a step
    assert counts.steps == whole.steps == uninterrupted.trainer.ema.updates
    assert "no callbacks' states" not in caplog.text


def test_a_failing_training_fails_the_run(folder: Path) -> None:
    class Fails(DetectionTrainer):  # type: ignore[misc]
        def optimizer_step(self) -> None:
            raise ZeroDivisionError

    ends, recorder = RecordsOutcomes(), Recorder()
    with pytest.raises(ZeroDivisionError):
        Trained(folder, [ends, recorder], kind=Fails)
    assert ends.recorded[:2] == [ZeroDivisionError, "failed"]
    check_events(recorder.events)
    try:  # training inside an `except` block of another error does not fail
        raise ValueError
    except ValueError:
        Trained(folder, [finished := RecordsOutcomes()])
    assert finished.recorded[0] == "finished"


def test_an_error_of_a_callback_is_raised(folder: Path) -> None:
    class Broken(Callback):
        def on_train_step_end(self, ctx: Context) -> None:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        Trained(folder, [Broken()])
    assert Tensor.backward.__qualname__ == "Tensor.backward"


def test_a_failure_is_recorded_at_once_in_releases_that_do_not_report_it(folder: Path) -> None:
    class WithoutTeardown(DetectionTrainer):  # type: ignore[misc]
        def run_callbacks(self, event: str) -> None:
            if event != "teardown":  # as in versions that do not call callbacks after an error
                super().run_callbacks(event)

        def optimizer_step(self) -> None:
            raise ZeroDivisionError

    ends = RecordsOutcomes()
    model = YOLO(str(folder / "small.yaml"), task="detect")
    host([ends], run_name="small").attach(model)
    settings: Any = {**SETTINGS, "data": str(folder / "data.yaml"), "project": str(Path.cwd() / "left")}
    with pytest.raises(ZeroDivisionError):
        model.train(trainer=WithoutTeardown, **settings)
    assert ends.recorded[:2] == [ZeroDivisionError, "failed"]
    assert Tensor.backward.__qualname__ == "Tensor.backward"
    model.train(**settings)
    assert [each for each in ends.recorded if each in ("failed", "finished")] == ["failed", "finished"]


def test_an_epoch_that_ultralytics_repeats(folder: Path) -> None:
    """A loss that is not finite makes Ultralytics reload last.pt; little memory makes it halve the batches."""

    class Diverges(DetectionTrainer):  # type: ignore[misc]
        calls = 0

        def preprocess_batch(self, batch: Any) -> Any:
            self.calls += 1
            if self.calls == 2:
                raise torch.OutOfMemoryError("CUDA out of memory")
            batch = super().preprocess_batch(batch)
            if self.epoch == 1 and not self.nan_recovery_attempts:
                batch["img"] = batch["img"] * float("nan")
            return batch

    recorder = Recorder()
    given: Any = {"epochs": 3, "kind": Diverges}
    observed, plain = Trained(folder, [recorder], **given), Trained(folder, None, **given)
    check_events(recorder.events)
    for a, b in zip(observed.weights(), plain.weights(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    assert observed.trainer.batch_size == 2
    recovers = Version(__version__) >= Version("8.4.96")  # from a loss that is not finite, also if the fitness stays the same
    assert recorder.events.count("on_epoch_end") == 4 + recovers
    assert recorder.events[-1] == "on_run_end"


def test_the_time_limit_of_ultralytics(folder: Path) -> None:
    recorder = Recorder()
    trained = Trained(folder, [recorder], time=1e-9)
    check_events(recorder.events)
    assert recorder.events.count("on_train_step_end") == 1
    assert trained.trainer.ema.updates == 1


# --- faults ---


@pytest.mark.parametrize("edge", ["start", "end"])
@pytest.mark.parametrize(
    "span", [span if span in ALWAYS else pytest.param(span, marks=pytest.mark.slow) for span in TRAINED + EVALUATED]
)
def test_a_fault_in_a_span_of_a_step(
    span: str, edge: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    breaks, begin = FailsInSpan(span, edge), HostedRun.begin

    def begin_and_keep_run(self: Any, *args: Any, **given: Any) -> None:
        breaks.run = self
        begin(self, *args, **given)

    monkeypatch.setattr(HostedRun, "begin", begin_and_keep_run)
    observed = loop.train(POINTS, tmp_path / "observed", [breaks], strict=False)
    monkeypatch.undo()
    plain = loop.train(POINTS, tmp_path / "plain", None)
    assert all(torch.equal(one, other) for one, other in zip(plain.parameters(), observed.parameters(), strict=True))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in observed.modules())
    assert caplog.text.count("callsheet cannot follow") == bool(breaks.faults)
    assert breaks.ends == ([HostError, "failed"] if breaks.faults else ["finished"])
    assert breaks.faults


BATCHES: dict[str, Any] = {"epochs": 3, "nbs": 4}
ACCUMULATES: dict[str, Any] = {"epochs": 3, "nbs": 8}  # two batches a step, and three an epoch


def with_faults(hosted: UltralyticsHost, seed: int) -> None:
    """Let Ultralytics' callbacks and wrapped methods reach this host with random faults."""
    events = tuple(name for name in HANDLED if name not in ("on_train_start", "teardown"))
    faults: Any = RandomFaults(hosted, events, seed, recent=30)
    for name in ("_preprocess", "_validate", "_final_eval", "_unscale", "_preprocess_to_validate"):
        setattr(hosted, name, faults.bypassing(getattr(hosted, name)))


@pytest.fixture(scope="module", params=[BATCHES, ACCUMULATES], ids=["", "accumulates"])
def trained(request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Train without faults, and without callsheet. Return the settings, what callsheet has recorded, and the plain training."""
    recorder, settings = StepRecorder(), request.param
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("trained"))
        assert_same(Trained(folder, [recorder], **settings), plain := Trained(folder, None, **settings))
    return settings, recorder, plain


@pytest.mark.usefixtures("counts_may_differ")
@pytest.mark.parametrize("seed", seeds(4))
@pytest.mark.parametrize("kind", [StepRecorder, StepEndRecorder])
def test_ultralytics_with_random_faults(
    seed: int, kind: Any, trained: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    attach = UltralyticsHost.attach

    def attached(self: UltralyticsHost, model: Any) -> Any:
        with_faults(self, seed)
        return attach(self, model)

    monkeypatch.setattr(UltralyticsHost, "attach", attached)
    callback = kind()
    settings, expected, plain = trained
    given = [callback, *(make() for make in OBSERVERS if kind is StepRecorder)]
    observed = Trained(folder, given, given={"strict": False}, **settings)
    assert_same(observed, plain)
    assert (observed.trainer.epoch, observed.trainer.stop) == (plain.trainer.epoch, plain.trainer.stop)
    recorder = callback if kind is StepRecorder else callback.recorder
    if kind is StepRecorder:
        assert_training_is_unchanged(recorder, plain.trainer.model, observed.trainer.model)
    assert_counts_are_right(recorder, observed.trainer.ema.updates, 3, caplog, drops_steps=True)
    assert_steps_equal(recorder, expected)
    if kind is StepRecorder:
        assert_evaluations_are_right(recorder, observed.evaluated)


@pytest.mark.usefixtures("counts_may_differ")
@pytest.mark.parametrize("event", HANDLED)
def test_ultralytics_without_one_of_its_events(
    event: str, trained: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Ultralytics' loop no longer calls the host's callback of the event."""
    settings, expected, plain = trained
    recorder = StepRecorder()
    if event == "teardown":  # the host also wraps `train`, so it is called nevertheless
        run_callbacks = DetectionTrainer.run_callbacks
        monkeypatch.setattr(
            DetectionTrainer, "run_callbacks", lambda self, name: None if name == event else run_callbacks(self, name)
        )
    else:
        monkeypatch.setattr(UltralyticsHost, event, lambda self, *_: None)
    observed = Trained(folder, [recorder, *(make() for make in OBSERVERS)], given={"strict": False}, **settings)
    assert_same(observed, plain)
    if event == "on_train_start":  # no run begins
        assert not recorder.events
        return
    assert_training_is_unchanged(recorder, plain.trainer.model, observed.trainer.model)
    assert_counts_are_right(recorder, observed.trainer.ema.updates, 3, caplog, drops_steps=True)
    assert_steps_equal(recorder, expected)
    assert_evaluations_are_right(recorder, observed.evaluated)


# --- DDP workers ---

WORKERS = '''
import os, sys, torch, hashlib
os.environ |= {"YOLO_OFFLINE": "true", "YOLO_AUTOINSTALL": "false"}
import torch.distributed as dist
from torch import nn
from ultralytics import YOLO, settings
from ultralytics.models.yolo.detect import DetectionTrainer
from ultralytics.utils import LOCAL_RANK, RANK
from callsheet import Callback

settings.update(dict.fromkeys(("clearml", "comet", "dvc", "mlflow", "raytune", "tensorboard", "wandb"), False))

class OnCPU(DetectionTrainer):
    """Two ranks without GPUs: the group is gloo, DDP gets no device, and the average is validated instead of best.pt, which each rank loads to its GPU."""
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.world_size, self.ddp = 2, LOCAL_RANK == -1
    def _setup_ddp(self):
        dist.init_process_group("gloo", rank=RANK, world_size=self.world_size)
    def _setup_train(self):
        kind = nn.parallel.DistributedDataParallel
        nn.parallel.DistributedDataParallel = lambda model, device_ids, **given: kind(model, **given)
        try:
            super()._setup_train()
        finally:
            nn.parallel.DistributedDataParallel = kind
    def final_eval(self):
        self.metrics = self.validator(self)

class Notes(Callback):
    def __init__(self, path, stop_at=0):
        self.path, self.stop_at = path, stop_at
    def note(self, ctx, text):
        with open(f"{self.path}-{ctx.run.rank}", "a") as file:
            file.write(f"{ctx.event} {text}\\n")
    def on_run_start(self, ctx):
        self.note(ctx, ctx.run.world_size)
    def on_train_step_end(self, ctx):
        self.note(ctx, f"{ctx.step} {float(ctx.loss)!r}")
        if ctx.step == self.stop_at and ctx.run.rank == 1:
            ctx.control.stop("asked")
    def on_eval_all_end(self, ctx):
        self.note(ctx, [(name, sorted(found.items())) for name, found in ctx.eval_results.items()])
    def on_checkpoint_published(self, ctx):
        self.note(ctx, ctx.checkpoint.step)
    def on_run_end(self, ctx):
        self.note(ctx, ctx.run.outcome)

def show(trainer):
    with open(f"shown-{RANK}", "a") as file:
        print(float(trainer.loss.detach()), file=file)

def train(*hosts, **given):
    model = YOLO("small.yaml", task="detect")
    for each in hosts:
        each.attach(model)
    model.add_callback("on_train_batch_end", show)
    model.train(data=sys.argv[1], epochs=2, imgsz=32, batch=4, nbs=4, device="cpu", plots=False, amp=False, workers=0, optimizer="SGD",
                warmup_epochs=0, verbose=False, project=os.path.abspath("out"), name="small", exist_ok=True, trainer=OnCPU, **given)
    weights = b"".join(each.float().numpy().tobytes() for each in model.model.state_dict().values())
    print("weights", hashlib.sha256(weights).hexdigest(), [name for name in os.environ if "CALLSHEET" in name])
'''


def run(folder: Path, text: str, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a script that begins with `WORKERS`, in the current folder."""
    Path("small.yaml").write_text(MODEL)
    Path("cpu.py").write_text(WORKERS)
    Path("train.py").write_text(text)
    paths = os.pathsep.join([str(ROOT / "src"), str(Path.cwd()), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [python(), *command, "train.py", str(folder / "data.yaml")],
        capture_output=True,
        text=True,
        env=environment,
        timeout=280,
        check=False,
    )


def weights_of(ran: subprocess.CompletedProcess[str]) -> str:
    return next(line for line in ran.stdout.splitlines() if line.startswith("weights "))


ALONE = "from cpu import *\nif __name__ == '__main__':\n    train()\n"

OBSERVED = """
from cpu import *
from callsheet.bridges.ultralytics import host
from callsheet.callbacks import EMA, OptimizerMonitor
from callsheet.loggers import JSONLLogger

class Mine(Notes):
    pass

if __name__ == "__main__":
    train(host([Mine(os.path.abspath("notes")), JSONLLogger(), OptimizerMonitor(), EMA(half_life=2, at_end=False)], run_name="small"))
"""


def notes(rank: int, event: str) -> list[str]:
    lines = [line.partition(" ") for line in Path(f"notes-{rank}").read_text().splitlines()]
    return [text for name, _, text in lines if name == event]


@pytest.fixture(scope="module")
def weights_of_workers(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the weights that two workers train without callsheet."""
    host([])  # raises NotSupported in a release that is rejected, in which the workers' trainer may not run
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("alone"))
        alone = run(folder, ALONE)
    assert alone.returncode == 0, alone.stderr
    return weights_of(alone)


@pytest.fixture
def _no_payload_remains() -> Iterator[None]:
    yield
    home = Path(os.environ["YOLO_CONFIG_DIR"])
    assert not list(home.rglob("_temp_*"))


@pytest.mark.usefixtures("_no_payload_remains")
def test_callbacks_reach_the_workers_of_ultralytics(folder: Path, weights_of_workers: str) -> None:
    observed = run(folder, OBSERVED)
    assert observed.returncode == 0, observed.stderr
    assert weights_of(observed) == weights_of_workers
    assert weights_of(observed).endswith(" []")  # later processes do not have the payload's key in their environment
    for rank in (0, 1):
        assert notes(rank, "on_run_start") == ["2"]
        losses = [float(text.split()[1]) for text in notes(rank, "on_train_step_end")]
        assert len(losses) == 6
        if (shown := Path(f"shown-{rank}")).exists():  # until 8.4.130, Ultralytics lost its own callbacks in the workers
            assert losses == [float(line) for line in shown.read_text().split()]
        assert [text.split("'")[1] for text in notes(rank, "on_eval_all_end")] == ["validation", "validation", "best"]
        assert notes(rank, "on_checkpoint_published") == ["3", "6"]
        assert notes(rank, "on_run_end") == ["finished"]
    assert notes(0, "on_eval_all_end") == notes(1, "on_eval_all_end")
    found = RunFolder.read(Path("runs/small"))
    assert (found.outcome, found.last_step, found.start_event()["world_size"]) == ("finished", 6, 2)


def test_a_stop_of_one_worker_stops_all(folder: Path) -> None:
    ran = run(folder, OBSERVED.replace('os.path.abspath("notes")', 'os.path.abspath("notes"), 2'))
    assert ran.returncode == 0, ran.stderr
    steps = [[text.split()[0] for text in notes(rank, "on_train_step_end")] for rank in (0, 1)]
    assert steps[0] == steps[1]
    assert notes(0, "on_run_end") == notes(1, "on_run_end") == ["stopped"]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({'os.path.abspath("notes")': "lambda: 0"}, "allow_pickle=True"),
        ({'if __name__ == "__main__":': "if True:"}, "put it and the training under `if __name__ == '__main__'`"),
    ],
    ids=["a lambda", "no guard"],
)
def test_what_cannot_be_sent_is_rejected_before_workers_start(changed: dict[str, str], message: str, folder: Path) -> None:
    text = OBSERVED
    for one, other in changed.items():
        text = text.replace(one, other)
    ran = run(folder, text)
    assert ran.returncode == 1
    assert message in ran.stderr
    assert "torch.distributed.run" not in ran.stdout + ran.stderr


def test_the_file_of_the_workers_is_removed_if_their_command_cannot_be_made(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from callsheet.bridges.ultralytics import ddp

    removed: list[str] = []
    engine: Any = importlib.import_module("ultralytics.engine.trainer")
    monkeypatch.setattr(engine, "generate_ddp_command", lambda trainer: (["python", "-m", "elsewhere"], "the file"))
    monkeypatch.setattr(engine, "ddp_cleanup", lambda trainer, file: removed.append(file))
    trainer = Trained(folder, [History()], epochs=1).trainer
    ddp.install()
    before = dict(os.environ)
    with pytest.raises(ValueError, match="the file"):
        engine.generate_ddp_command(trainer)
    assert removed == ["the file"]
    assert dict(os.environ) == before


def test_functions_cannot_be_sent() -> None:
    from callsheet.bridges.ultralytics.ddp import _callbacks_of

    manager = CallbackManager([History()])
    assert _callbacks_of(host(manager)) == manager.callbacks

    @manager.register("on_train_step_end")
    def show(ctx: Context) -> None: ...

    with pytest.raises(NotSupported, match="show: functions cannot be sent to Ultralytics' DDP workers"):
        _callbacks_of(host(manager))


# --- callsheet exec ---


@pytest.mark.parametrize("is_parallel", [False, True], ids=["one process", "workers"])
def test_a_script_is_observed(is_parallel: bool, folder: Path, request: pytest.FixtureRequest) -> None:
    host([])  # raises NotSupported in a release that is rejected, in which the script may not run
    text, expected = ALONE, request.getfixturevalue("weights_of_workers") if is_parallel else None
    if not is_parallel:
        text = text.replace("    train", "    train.__globals__['OnCPU'] = None\n    train")
        expected = weights_of(run(folder, text))
    observed = run(folder, text, "-m", "callsheet.exec", "--run_name", "a", "--log_interval", "2")
    assert observed.returncode == 0, observed.stderr
    assert weights_of(observed) == expected
    assert Path("runs/a").is_dir(), observed.stderr
    found = RunFolder.read(Path("runs/a"))
    ranks = 2 if is_parallel else 1
    assert (found.outcome, found.last_step, found.start_event()["world_size"]) == ("finished", 6, ranks), observed.stderr
    assert {"forward", "backward", "optimizer_step"} <= {each.name for window in found.windows for each in window.slices}
    assert observed.stderr.count("report: ") == 1
    assert "no training was recognized" not in observed.stderr
    assert not list(Path("out").rglob("callsheet"))  # callsheet adds nothing to Ultralytics' checkpoints


@pytest.mark.parametrize(
    "is_parallel", [pytest.param(False, id="one process"), pytest.param(True, id="workers", marks=pytest.mark.slow)]
)
def test_a_script_that_uses_callsheet_runs_as_it_is(is_parallel: bool, folder: Path) -> None:
    text = OBSERVED if is_parallel else OBSERVED.replace("    train(", "    train.__globals__['OnCPU'] = None\n    train(")
    observed = run(folder, text, "-m", "callsheet.exec", "--run_name", "a")
    assert observed.returncode == 0, observed.stderr
    assert observed.stderr.count("this script uses callsheet itself") == 1
    assert not Path("runs/a").exists()
    assert Path("runs/small").exists()
