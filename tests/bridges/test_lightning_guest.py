"""Lightning's callbacks do the same in Lightning's Trainer and as guests in callsheet's Trainer."""

from __future__ import annotations

import io
import json
import logging
import math
import warnings
from collections.abc import Callable as Function
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from datetime import timedelta
from inspect import signature
from pathlib import Path
from typing import Any

import lightning.pytorch.callbacks.timer as timer_module
import pytest
import pytorch_lightning
import torch
from lightning.fabric.utilities.spike import TrainingSpikeException
from lightning.pytorch import callbacks as lightning_callbacks
from lightning.pytorch.callbacks.spike import SpikeDetection
from lightning.pytorch.loggers.logger import Logger
from torch import nn

from callsheet import Callback, CallbackManager
from callsheet.bridges.lightning import guest
from callsheet.bridges.matrix import Cell
from callsheet.callbacks import CheckpointSaver, History
from callsheet.errors import NotACallbackError, NotSupported, RegistrationError
from callsheet.trainer import Trainer

from .loops.job import POINTS
from .loops.lightning import Module, quiet_trainer
from .rows import check_or_write_cell

torch.set_num_threads(1)
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

EPOCHS = 3


@pytest.fixture(autouse=True)
def _ignore_lightning_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning|pytorch_lightning")
        yield


class Collects(Logger):  # type: ignore[misc]  # Lightning's types are not read
    """A logger for Lightning's Trainer."""

    name, version = "lightning", ""

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[dict[str, float]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.logged.append(metrics)

    def log_hyperparams(self, *_: Any, **__: Any) -> None: ...


def scheduled(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 5))


class NativeModule(Module):
    """A module with a scheduler and without dropout, because frameworks draw different random numbers between batches."""

    def __init__(self) -> None:
        super().__init__(POINTS)
        self.dropout.p = 0.0

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduled(optimizer), "interval": "step"}}


@dataclass
class TrainingResult:
    """The results of a training, in Lightning's Trainer or in ours."""

    foreign: Any
    steps: int
    model: nn.Module
    logged: dict[str, list[float]]
    error: str = ""


def made_model() -> Any:
    model: Any = POINTS.made_model()
    model.dropout.p = 0.0
    return model


def in_framework(foreign: Any, folder: Path) -> TrainingResult:
    torch.manual_seed(3)
    collects = Collects()
    trainer = quiet_trainer(
        folder,
        [foreign],
        max_epochs=EPOCHS,
        logger=collects,
        num_sanity_val_steps=0,
        enable_progress_bar=isinstance(foreign, lightning_callbacks.ProgressBar),
        enable_model_summary=isinstance(foreign, lightning_callbacks.ModelSummary),
        enable_checkpointing=isinstance(foreign, lightning_callbacks.Checkpoint),
    )
    torch.manual_seed(3)
    module, error = NativeModule(), ""
    try:
        trainer.fit(module, POINTS.batches(), POINTS.validation_batches())
    except TrainingSpikeException as spike:
        error = str(spike)
    logged: dict[str, list[float]] = {}
    for metrics in collects.logged:
        for name, value in metrics.items():
            logged.setdefault(f"lightning/{name}", []).append(float(value))
    return TrainingResult(foreign, trainer.global_step, module, logged, error)


def in_ours(foreign: Any, folder: Path, *others: Callback, resume: str | None = None, phase: Any = "measure") -> TrainingResult:
    history, model, error = History(), made_model(), ""
    torch.manual_seed(3)
    trainer = Trainer(
        model,
        POINTS.loss,
        POINTS.batches(),
        POINTS.validation_batches(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.02),
        scheduler=scheduled,
        max_duration=f"{EPOCHS}ep",
        log_interval="2ba",
        device="cpu",
        run_name="small",
        runs_folder=folder,
        resume=resume,
        callbacks=[guest(foreign, log_every_n_steps=2, phase=phase), history, *others],
    )
    try:
        with trainer:
            trainer.fit()
    except TrainingSpikeException as spike:
        error = str(spike)
    names = {name for _, values in history.records for name in values if name.startswith("lightning/")}
    return TrainingResult(foreign, trainer.state.timestamp.batch, model, {name: history[name] for name in sorted(names)}, error)


def written(ended: TrainingResult) -> str:
    stream: io.StringIO = ended.foreign.stream
    return stream.getvalue()


class Summary(lightning_callbacks.ModelSummary):  # type: ignore[misc]  # Lightning's types are not read
    """Records the summary instead of printing it."""

    stream: io.StringIO

    def summarize(self, summary_data: Any, total_parameters: int, *rest: Any, **_: Any) -> None:
        self.stream = io.StringIO()
        self.stream.write(f"{summary_data} {total_parameters}")


class Bar(lightning_callbacks.TQDMProgressBar):  # type: ignore[misc]  # Lightning's types are not read
    """Records the final values of its bars."""

    def __init__(self) -> None:
        super().__init__()
        self.stream = io.StringIO()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        bar = self.train_progress_bar
        self.stream.write(f"{bar.desc}{bar.n}/{bar.total} ")
        super().on_train_epoch_end(trainer, pl_module)


class Hooks:
    """A LambdaCallback that records each call, with the batch's number and the Trainer's counts."""

    names = (
        *("setup", "on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_before_backward"),
        *(
            "on_after_backward",
            "on_before_optimizer_step",
            "on_train_batch_end",
            "on_validation_start",
            "on_validation_epoch_start",
        ),
        *("on_validation_batch_start", "on_validation_batch_end", "on_validation_epoch_end", "on_validation_end"),
        *("on_train_epoch_end", "on_train_end", "on_fit_end", "teardown"),
    )

    def __init__(self) -> None:
        self.received: list[tuple[Any, ...]] = []

    def make(self) -> Any:
        foreign = lightning_callbacks.LambdaCallback(**{name: self._records(name) for name in self.names})
        foreign.received = self.received
        return foreign

    def _records(self, name: str) -> Function[..., None]:
        def received(trainer: Any, module: Any, *args: Any, **_: Any) -> None:
            number = [arg for arg in args if isinstance(arg, int)]
            stage = str(getattr(trainer.state.stage, "value", ""))
            self.received.append((name, trainer.current_epoch, trainer.global_step, stage, *number))

        return received


class Clock:
    """A clock for the Timer that advances by one second at each reading."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        self.now += 1.0
        return self.now


def scores(ended: TrainingResult) -> Any:
    state = ended.foreign.state_dict()
    return [state["wait_count"], state["stopped_epoch"], float(state["best_score"]), state.get("stopping_reason")]


def files(ended: TrainingResult) -> Any:
    foreign = ended.foreign
    best = [(Path(path).name, float(score)) for path, score in foreign.best_k_models.items()]
    saved = sorted(path.name for path in Path(foreign.dirpath).iterdir())
    weights = torch.load(foreign.best_model_path, weights_only=True)["state_dict"]
    numbers = [float(value.double().sum()) for name, value in sorted(weights.items())]
    return saved, [name for name, _ in best], [score for _, score in best] + numbers


def keys(*suffixes: str) -> Function[[TrainingResult], Any]:
    """Compare only the names of logged values, because the values depend on the machine."""

    def found(ended: TrainingResult) -> Any:
        return sorted({name for name in ended.logged if name.endswith(suffixes)})

    return found


SAME_RESULTS: dict[str, tuple[str, Function[[], Any], Function[[TrainingResult], Any]]] = {
    "EarlyStopping": ("drives", lambda: lightning_callbacks.EarlyStopping("val_loss", min_delta=0.4, patience=1), scores),
    "EarlyStopping during training": (
        "drives",
        lambda: lightning_callbacks.EarlyStopping("val_loss", stopping_threshold=2.2),
        scores,
    ),
    "ModelCheckpoint": (
        "drives",
        lambda: lightning_callbacks.ModelCheckpoint(monitor="val_loss", save_top_k=2, save_last=True, filename="{epoch}-{step}"),
        files,
    ),
    "ModelCheckpoint by steps": (
        "drives",
        lambda: lightning_callbacks.ModelCheckpoint(every_n_train_steps=4, save_top_k=-1, filename="{step}"),
        lambda ended: sorted(path.name for path in Path(ended.foreign.dirpath).iterdir()),
    ),
    "Timer": (
        "drives",
        lambda: lightning_callbacks.Timer(duration=timedelta(seconds=10)),
        lambda ended: ended.foreign.time_elapsed(),
    ),
    "GradientAccumulationScheduler": (
        "drives",
        lambda: lightning_callbacks.GradientAccumulationScheduler({1: 2, 2: 3}),
        lambda ended: ended.steps,
    ),
    "EMAWeightAveraging": (
        "drives",
        lambda: lightning_callbacks.EMAWeightAveraging(decay=0.5),
        lambda ended: ended.foreign.state_dict(),
    ),
    "SpikeDetection": (
        "drives",
        lambda: SpikeDetection(warmup=2, rtol=0.5, exclude_batches_path="spikes/skip.json"),
        lambda ended: (ended.error, ended.foreign.bad_batches),
    ),
    "LearningRateMonitor": ("reads", lambda: lightning_callbacks.LearningRateMonitor(), lambda ended: ended.foreign.lrs),
    "TQDMProgressBar": ("reads", Bar, written),
    "ModelSummary": ("reads", Summary, written),
    "DeviceStatsMonitor": ("reads", lambda: lightning_callbacks.DeviceStatsMonitor(), keys("cpu_percent", "cpu_vm_percent")),
    "ThroughputMonitor": (
        "reads",
        lambda: lightning_callbacks.ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]), window_size=3),
        keys("samples", "batches_per_sec"),
    ),
    "LambdaCallback": ("listens", lambda: Hooks().make(), lambda ended: ended.foreign.received),
}
"""For each name: the tier, a factory, and the results to compare besides the steps, the weights and the logged values."""


needs_averaging = pytest.mark.skipif(
    not hasattr(lightning_callbacks, "EMAWeightAveraging"), reason="Lightning before 2.6 does not have it"
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=needs_averaging) if name == "EMAWeightAveraging" else name for name in SAME_RESULTS]
)
def test_a_guest_has_the_same_effects_as_in_its_framework(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier, make, compared = SAME_RESULTS[name]
    monkeypatch.chdir(tmp_path)
    ends: list[TrainingResult] = []
    with redirect_stdout(io.StringIO()):
        for train, folder in ((in_framework, tmp_path / "framework"), (in_ours, tmp_path / "ours")):
            monkeypatch.setattr(timer_module, "time", Clock())
            ends.append(train(make(), folder))
    native, ours = ends
    assert ours.steps == native.steps
    assert (ours.steps < EPOCHS * 6) == (
        name in ("EarlyStopping", "Timer", "SpikeDetection") or "during" in name or "Grad" in name
    )
    assert _rounded(compared(ours)) == _rounded(compared(native))
    for mine, other in zip(ours.model.state_dict().values(), native.model.state_dict().values(), strict=True):
        assert torch.allclose(mine.double(), other.double(), atol=1e-5)
    if tier == "reads" and name == "LearningRateMonitor":
        assert ours.logged["lightning/lr-AdamW"] == pytest.approx(native.logged["lightning/lr-AdamW"])
    check_or_write_cell("lightning", "guests", name, Cell("works", tier=tier))


def _rounded(value: Any) -> Any:
    """Round the numbers, because a different order of summation changes the last digits."""
    if isinstance(value, float):
        return round(value, 4) if math.isfinite(value) else value
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, (list, tuple)) else value


class RaisesInStep15(Callback):
    """Raises in the fifteenth step."""

    def on_train_step_start(self, ctx: Any) -> None:
        if ctx.step == 15:
            raise ZeroDivisionError


@pytest.mark.parametrize(
    "make",
    [
        lambda: lightning_callbacks.EarlyStopping("val_loss", min_delta=0.1, patience=2),
        lambda: lightning_callbacks.ModelCheckpoint(monitor="val_loss", save_top_k=2, filename="{epoch}"),
        pytest.param(lambda: lightning_callbacks.EMAWeightAveraging(decay=0.5), marks=needs_averaging),
    ],
    ids=["EarlyStopping", "ModelCheckpoint", "EMAWeightAveraging"],
)
def test_a_resume_restores_the_state_of_a_guest(make: Function[[], Any], tmp_path: Path) -> None:
    whole = in_ours(make(), tmp_path / "whole", phase="change")
    saver = CheckpointSaver(save_interval="1ep")
    with pytest.raises(ZeroDivisionError):
        in_ours(make(), tmp_path, saver, RaisesInStep15(), phase="change")
    again = in_ours(make(), tmp_path, CheckpointSaver(save_interval="1ep"), resume="auto", phase="change")
    assert again.steps == whole.steps
    for mine, other in zip(again.model.state_dict().values(), whole.model.state_dict().values(), strict=True):
        assert torch.equal(mine, other)
    one, other = (json.dumps(_plain(each.foreign.state_dict())) for each in (again, whole))
    assert one.replace(str(tmp_path), "") == other.replace(str(tmp_path / "whole"), "")


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item()
    return {name: _plain(each) for name, each in value.items()} if isinstance(value, dict) else value


def test_lightning_loads_a_checkpoint_that_its_checkpoint_callback_wrote_as_a_guest(tmp_path: Path) -> None:
    ended = in_ours(lightning_callbacks.ModelCheckpoint(filename="{epoch}"), tmp_path)
    torch.manual_seed(0)
    module = NativeModule()
    validate = quiet_trainer(tmp_path, []).validate
    options = {"weights_only": True} if "weights_only" in signature(validate).parameters else {}  # Lightning 2.6 and later
    validate(module, POINTS.validation_batches(), ckpt_path=ended.foreign.best_model_path, verbose=False, **options)
    for mine, other in zip(ended.model.state_dict().values(), module.state_dict().values(), strict=True):
        assert torch.equal(mine, other)


def test_values_that_a_guest_logs_are_in_the_records_and_in_callback_metrics(tmp_path: Path) -> None:
    class Logs(lightning_callbacks.Callback):  # type: ignore[misc]  # Lightning's types are not read
        seen: list[float] = []

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
            pl_module.log("twice", outputs["loss"] * 2, prog_bar=True)
            self.seen.append(float(trainer.callback_metrics["train_loss"]) * 2)
            assert trainer.callback_metrics["twice"] == outputs["loss"] * 2
            assert trainer.progress_bar_metrics["twice"] == pytest.approx(self.seen[-1])

    ended = in_ours(Logs(), tmp_path)
    assert ended.logged["lightning/twice"] == pytest.approx(Logs.seen[1::2])


def test_batch_and_dataloader_numbers_equal_lightning_s_with_accumulation_and_two_datasets(tmp_path: Path) -> None:
    hooks = Hooks()
    with Trainer(
        POINTS.made_model(),
        POINTS.loss,
        POINTS.batches(),
        {"near": POINTS.validation_batches(), "far": POINTS.validation_batches()},
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.02),
        max_duration="1ep",
        gradient_accumulation_steps=4,
        microbatch_size=2,
        device="cpu",
        runs_folder=tmp_path,
        callbacks=[guest(hooks.make())],
    ) as trainer:
        trainer.fit()
        recorded = len(hooks.received)
        trainer.evaluate()
    batches = [(name, steps, number) for name, _, steps, _, *number in hooks.received if name.startswith("on_train_batch")]
    starts, ends = batches[::2], batches[1::2]
    assert starts == [("on_train_batch_start", int(number > 3), [number]) for number in range(6)]
    assert ends == [("on_train_batch_end", [0, 0, 0, 1, 1, 2][number], [number]) for number in range(6)]
    validation_batches = [number for name, _, _, _, *number in hooks.received[:recorded] if name == "on_validation_batch_end"]
    assert validation_batches == [[0, 0], [1, 0], [2, 0], [0, 1], [1, 1], [2, 1]]
    apart = [name for name, *_ in hooks.received[recorded:] if "batch" not in name]
    assert apart == [
        *("setup", "on_validation_start", "on_validation_epoch_start", "on_validation_epoch_end", "on_validation_end", "teardown")
    ]


def test_an_error_names_the_attribute_that_a_guest_may_not_use(tmp_path: Path) -> None:
    class CallsFit(lightning_callbacks.Callback):  # type: ignore[misc]  # Lightning's types are not read
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            assert not hasattr(pl_module, "flops_per_batch")
            trainer.fit(None)

    with pytest.raises(NotSupported, match="Lightning's Trainer has here no 'fit'"):
        in_ours(CallsFit(), tmp_path)

    class Writes(lightning_callbacks.Callback):  # type: ignore[misc]  # Lightning's types are not read
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            trainer.limit_val_batches = 3

    with pytest.raises(NotSupported, match="may not write 'limit_val_batches'"):
        in_ours(Writes(), tmp_path)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: lightning_callbacks.StochasticWeightAveraging(1e-2), "StochasticWeightAveraging lengthens training"),
        (lambda: lightning_callbacks.BatchSizeFinder(), "BatchSizeFinder runs trial trainings"),
        (lambda: lightning_callbacks.LearningRateFinder(), "LearningRateFinder runs trial trainings"),
        (lambda: lightning_callbacks.BackboneFinetuning(), "BackboneFinetuning freezes the model"),
        (lambda: lightning_callbacks.ModelPruning("l1_unstructured", amount=0.5), "ModelPruning prunes"),
        (
            lambda: lightning_callbacks.LambdaCallback(on_before_zero_grad=print),
            "LambdaCallback listens to on_before_zero_grad of Lightning",
        ),
    ],
)
def test_unsupported_callbacks_are_rejected_by_name(make: Any, why: str, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(NotSupported, match=why):
        guest(make())
    guest(make(), strict=False)
    assert why in caplog.text


@needs_averaging
def test_callbacks_of_both_lightning_packages_are_accepted(tmp_path: Path) -> None:
    with pytest.raises(RegistrationError, match=r"not an instance of Callback of lightning\.pytorch or pytorch_lightning"):
        guest(object())
    foreign = pytorch_lightning.callbacks.EMAWeightAveraging(decay=0.5)
    with redirect_stdout(io.StringIO()):
        ended = in_ours(foreign, tmp_path)
        other = in_ours(lightning_callbacks.EMAWeightAveraging(decay=0.5), tmp_path / "other")
    for mine, others in zip(ended.model.state_dict().values(), other.model.state_dict().values(), strict=True):
        assert torch.equal(mine, others)


def test_a_guest_without_batch_hooks_has_no_handlers_for_steps() -> None:
    stops = guest(lightning_callbacks.EarlyStopping("val_loss"))
    assert not {"on_microbatch_start", "on_microbatch_end", "on_train_step_end"} & vars(stops).keys()


def test_an_error_says_how_to_wrap_a_callback() -> None:
    with pytest.raises(NotACallbackError, match=r"wrap it: callsheet\.bridges\.lightning\.guest"):
        CallbackManager([lightning_callbacks.EarlyStopping("val_loss")])  # type: ignore[list-item, unused-ignore]


@pytest.mark.parametrize(("interval", "evaluations"), [("1ep", 4), ("2ep", 2), ("2ba", 12)])
def test_early_stopping_and_checkpoints_follow_the_interval_of_evaluations(
    interval: str, evaluations: int, tmp_path: Path
) -> None:
    class CountsChecks(lightning_callbacks.EarlyStopping):  # type: ignore[misc]  # Lightning's types are not read
        checks = 0

        def _run_early_stopping_check(self, trainer: Any) -> None:
            CountsChecks.checks += 1
            super()._run_early_stopping_check(trainer)

    class RecordsStages(lightning_callbacks.Callback):  # type: ignore[misc]  # Lightning's types are not read
        stages: set[tuple[bool, bool]] = set()

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            self.stages.add((trainer.training, trainer.validating))

    checkpoints = lightning_callbacks.ModelCheckpoint(
        monitor="val_loss", save_top_k=-1, filename="{step}", dirpath=tmp_path / "saved"
    )
    theirs = [CountsChecks("val_loss", patience=100), checkpoints, RecordsStages()]
    with Trainer(
        POINTS.made_model(), POINTS.loss, POINTS.batches(), POINTS.validation_batches(), device="cpu", runs_folder=tmp_path,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05), max_duration="4ep", eval_interval=interval,
        callbacks=[guest(each) for each in theirs],
    ) as trainer:  # fmt: skip
        trainer.fit()
    steps = trainer.state.timestamp.batch
    assert steps == 24
    assert CountsChecks.checks == evaluations
    assert RecordsStages.stages == {(True, False)}
    found = {int(path.stem.removeprefix("step=")) for path in (tmp_path / "saved").iterdir()}
    assert found == set(range(steps // evaluations, steps + 1, steps // evaluations))


def test_hooks_of_evaluations_run_without_gradients(tmp_path: Path) -> None:
    """A hook that calls the model then keeps no graph in memory."""

    class Checks(lightning_callbacks.Callback):  # type: ignore[misc]  # Lightning's types are not read
        def __init__(self) -> None:
            self.with_gradients: dict[str, bool] = {}

        def check(self, hook: str) -> None:
            self.with_gradients[hook] = torch.is_grad_enabled()

        def on_train_batch_end(self, *_: Any) -> None:
            self.check("train batch")

        def on_validation_start(self, *_: Any) -> None:
            self.check("validation")

        def on_validation_batch_end(self, *_: Any) -> None:
            self.check("validation batch")

        def on_validation_epoch_end(self, *_: Any) -> None:
            self.check("validation epoch")

        def on_train_epoch_end(self, *_: Any) -> None:
            self.check("train epoch")

    theirs, ours = Checks(), Checks()
    in_framework(theirs, tmp_path / "theirs")
    in_ours(ours, tmp_path / "ours")
    assert ours.with_gradients == theirs.with_gradients
    assert ours.with_gradients["validation batch"] is False
    assert ours.with_gradients["train batch"] is True
