"""Code in Composer's style runs with only its imports changed."""

from __future__ import annotations

import copy
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanSquaredError

from callsheet import Callback as OurCallback
from callsheet import Context
from callsheet.bridges.composer.names import COMPOSER_EVENTS
from callsheet.compat.composer import (
    Callback,
    ComposerModel,
    Evaluator,
    Event,
    Logger,
    LoggerDestination,
    State,
    Time,
    Timestamp,
    TimeUnit,
    Trainer,
)
from callsheet.compat.composer import callbacks as composer_callbacks
from callsheet.compat.composer import loggers as composer_loggers
from callsheet.compat.composer.callbacks import (
    CheckpointSaver,
    EarlyStopper,
    ExportForInferenceCallback,
    ImageVisualizer,
    LoadCheckpoint,
    LRMonitor,
    MemoryMonitor,
    MemorySnapshot,
    MLPerfCallback,
    NaNMonitor,
    OOMObserver,
    OptimizerMonitor,
    RuntimeEstimator,
    SpeedMonitor,
    ThresholdStopper,
)
from callsheet.compat.composer.loggers import ConsoleLogger, FileLogger, InMemoryLogger, ProgressBarLogger
from callsheet.errors import ConfigError, NotSupported

torch.set_num_threads(1)


class LinearModel(ComposerModel):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(4, 1)

    def forward(self, batch: Any) -> Tensor:
        outputs: Tensor = self.net(batch[0])
        return outputs

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return nn.functional.mse_loss(outputs, batch[1])

    def get_metrics(self, is_train: bool = False) -> dict[str, Any]:
        return {} if is_train else {"MeanSquaredError": MeanSquaredError()}

    def update_metric(self, batch: Any, outputs: Tensor, metric: Any) -> None:
        metric.update(outputs, batch[1])


def data(rows: int = 8) -> DataLoader[tuple[Tensor, ...]]:
    inputs = torch.randn(rows, 4, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4)


@pytest.fixture(autouse=True)
def _new_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def trained(*, closes: bool = True, **given: Any) -> Trainer:
    options: dict[str, Any] = {"model": LinearModel(), "train_dataloader": data(), "max_duration": "1ep", "progress_bar": False}
    if "optimizers" not in given:
        model = given.get("model") or options["model"]
        given["optimizers"] = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Trainer(**(options | given))
    trainer.fit()
    if closes:
        trainer.close()
    return trainer


class Records(Callback):
    """Records every event with the progress of training."""

    def __init__(self) -> None:
        self.recorded: list[str] = []
        self.progress: list[tuple[int, int, int]] = []

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        self.recorded.append(event.value)
        self.progress.append((state.timestamp.epoch.value, state.timestamp.batch.value, state.timestamp.sample.value))

    def close(self, state: State, logger: Logger) -> None:
        self.recorded.append("close")

    def post_close(self) -> None:
        self.recorded.append("post_close")


MICROBATCH = ["before_forward", "after_forward", "before_loss", "after_loss", "before_backward", "after_backward"]
BATCH = [
    *("before_dataloader", "after_dataloader", "batch_start", "before_train_batch"),
    *MICROBATCH,
    *MICROBATCH,
    *("after_train_batch", "batch_end", "batch_checkpoint"),
]
EVALUATED = ["eval_batch_start", "eval_before_forward", "eval_after_forward", "eval_batch_end"]


def test_events_are_fired_in_composer_s_order() -> None:
    """One epoch of two batches of two microbatches, evaluated at its end. The expected order was recorded from Composer."""
    records = Records()
    trained(callbacks=[records], eval_dataloader=data(), device_train_microbatch_size=2)
    assert records.recorded == [
        *("init", "before_load", "after_load", "fit_start", "iteration_start", "epoch_start"),
        *BATCH,
        *BATCH,
        *("before_dataloader", "epoch_end", "eval_before_all", "eval_start"),
        *EVALUATED,
        *EVALUATED,
        *("eval_end", "eval_after_all", "epoch_checkpoint", "fit_end", "close", "post_close"),
    ]
    by_event = dict(zip(records.recorded, records.progress, strict=False))
    assert by_event["after_train_batch"] == (0, 1, 4)
    assert by_event["batch_end"] == (0, 2, 8)
    assert by_event["epoch_end"] == (1, 2, 8)


def test_each_of_composer_s_forty_events_is_mapped_and_has_a_method() -> None:
    assert len(Event) == 40
    assert {theirs for several in COMPOSER_EVENTS.values() for theirs in several} == set(Event)
    assert all(callable(getattr(Callback(), event.value)) for event in Event)
    assert Event("EPOCH_START") is Event.EPOCH_START
    assert Event("epoch_start") == "epoch_start"


def test_the_first_example_of_composer_s_page_runs() -> None:
    model, train_dataloader = LinearModel(), data()
    trainer = Trainer(
        model=model,
        train_dataloader=train_dataloader,
        eval_dataloader=None,
        max_duration="1ep",
        callbacks=[SpeedMonitor(window_size=100), LRMonitor()],
        loggers=[memory := InMemoryLogger()],
    )
    trainer.fit()
    trainer.close()
    assert memory.data["lr-SGD/group0"][0][1] == 0.1
    assert [stamp.batch.value for stamp, _ in memory.data["loss/train/total"]] == [1, 2]


def test_the_custom_callbacks_of_composer_s_page_are_called(capsys: pytest.CaptureFixture[str]) -> None:
    class PrintsEpoch(Callback):
        def epoch_start(self, state: State, logger: Logger) -> None:
            print(f"{state.timestamp.epoch} done so far")

    trained(callbacks=[PrintsEpoch()], max_duration="2ep")
    assert capsys.readouterr().out.splitlines() == ["0ep done so far", "1ep done so far"]

    class CatchAll(Callback):
        def run_event(self, event: Event, state: State, logger: Logger) -> None:
            if event == Event.EPOCH_START:
                print(f"{state.timestamp.epoch} done so far")

        def epoch_end(self, state: State, logger: Logger) -> None:
            raise AssertionError("run_event is called instead")

    trained(callbacks=CatchAll(), max_duration="2ep")
    assert capsys.readouterr().out.splitlines() == ["0ep done so far", "1ep done so far"]


def test_close_is_called_on_all_callbacks_before_post_close_even_after_an_error(caplog: pytest.LogCaptureFixture) -> None:
    recorded: list[str] = []

    class RecordsClosing(Callback):
        def __init__(self, name: str) -> None:
            self.name = name

        def close(self, state: State, logger: Logger) -> None:
            recorded.append(f"{self.name} closed at {state.timestamp.batch}")
            if self.name == "b":
                raise OSError("disk")

        def post_close(self) -> None:
            recorded.append(f"{self.name} post-closed")

    class Fails(Callback):
        def batch_end(self, state: State, logger: Logger) -> None:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        trained(callbacks=[RecordsClosing("a"), RecordsClosing("b"), RecordsClosing("c"), Fails()])
    assert recorded == ["a closed at 1ba", "b closed at 1ba", "c closed at 1ba", "a post-closed", "c post-closed"]
    assert "RecordsClosing-2.close() failed" in caplog.text


def test_a_callback_can_read_the_state_and_stop_training() -> None:
    seen: dict[str, Any] = {}

    class Reads(Callback):
        def after_loss(self, state: State, logger: Logger) -> None:
            seen["loss"] = state.loss.item()
            seen["rows"] = state.batch_get_item(0).shape[0]
            assert state.outputs.shape == (4, 1)

        def batch_end(self, state: State, logger: Logger) -> None:
            logger.log_metrics({"mine/loss": seen["loss"]})
            seen["elapsed"] = float(state.get_elapsed_duration())
            if state.timestamp.batch == 3:
                state.stop_training()

        def fit_end(self, state: State, logger: Logger) -> None:
            seen["max_duration"] = str(state.max_duration)
            assert state.loss.item() == seen["loss"]  # the last loss is kept

    class Recorded(LoggerDestination):
        def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
            if "mine/loss" in metrics:
                seen.setdefault("steps", []).append(step)

    records = Records()
    trainer = trained(callbacks=[Reads(), records], loggers=Recorded(), max_duration="4ep")
    assert trainer.state.timestamp.batch == Time(3, TimeUnit.BATCH)
    assert (seen["rows"], seen["elapsed"], seen["max_duration"], seen["steps"]) == (4, 0.25, "3ba", [1, 2, 3])
    assert records.recorded.count("epoch_end") == 1  # the second epoch is incomplete
    assert records.recorded[-3:] == ["fit_end", "close", "post_close"]


def test_an_unsupported_attribute_of_state_is_rejected_by_name() -> None:
    class ReadsUnsupportedAttribute(Callback):
        def fit_start(self, state: Any, logger: Logger) -> None:
            assert not hasattr(state, "fsdp_config")
            state.fsdp_config  # noqa: B018

    with pytest.raises(NotSupported, match="Composer's State has here no 'fsdp_config'"):
        trained(callbacks=[ReadsUnsupportedAttribute()])


class Counts(Callback):
    """Counts batches, and saves the count in checkpoints."""

    def __init__(self, batches: int = 0) -> None:
        self.batches = batches
        self.samples = 0

    def batch_end(self, state: State, logger: Logger) -> None:
        self.batches += 1
        self.samples = state.timestamp.sample.value

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batches = state["batches"]


def test_each_callback_is_resumed_with_its_own_state(tmp_path: Path) -> None:
    given: dict[str, Any] = {"save_folder": tmp_path / "saved", "save_interval": "1ep", "run_name": "again", "seed": 1}
    trained(callbacks=[Counts(), Counts(10)], max_duration="2ep", **given)
    one, two = Counts(), Counts()
    trainer = trained(callbacks=[one, two], max_duration="3ep", autoresume=True, **given)
    assert (one.batches, two.batches, one.samples) == (6, 16, 24)  # Composer would load the second state into both
    assert trainer.state.timestamp == "6ba"


def test_labeled_evaluators_manual_evaluation_and_prediction() -> None:
    evaluators = [Evaluator(label="near", dataloader=data(), eval_interval="1ba"), Evaluator(label="far", dataloader=data())]
    records = Records()
    trainer = trained(eval_dataloader=evaluators, callbacks=[records])
    assert records.recorded.count("eval_end") == 3
    metrics = trainer.state.eval_metrics
    assert metrics["near"]["MeanSquaredError"].compute() == metrics["far"]["MeanSquaredError"].compute()
    again = Trainer(model=LinearModel(), callbacks=[records := Records()], progress_bar=False)
    again.eval(data())
    assert again.state.eval_metrics["eval"]["MeanSquaredError"].compute() > 0
    assert len(again.predict(data(), subset_num_batches=1)) == 1
    again.close()
    assert records.recorded[3:5] == ["eval_standalone_start", "eval_start"]
    assert "eval_before_all" not in records.recorded
    predicted = ["predict_start", "predict_batch_start", "predict_before_forward", "predict_after_forward", "predict_batch_end"]
    assert records.recorded[-8:] == [*predicted, "predict_end", "close", "post_close"]


def test_training_metrics_are_computed_and_logged() -> None:
    class Measured(LinearModel):
        def get_metrics(self, is_train: bool = False) -> dict[str, Any]:
            return {"MeanSquaredError": MeanSquaredError()}

    memory = InMemoryLogger()
    trainer = trained(model=Measured(), loggers=[memory])
    assert [value for _, value in memory.data["metrics/train/MeanSquaredError"]] == pytest.approx(
        [value for _, value in memory.data["loss/train/total"]]
    )
    assert trainer.state.train_metrics["MeanSquaredError"].compute() == pytest.approx(memory.data["loss/train/total"][-1][1])


def rates(memory: InMemoryLogger) -> list[float]:
    return [value for _, value in memory.data["lr-SGD/group0"]]


def test_a_torch_scheduler_steps_per_epoch() -> None:
    model = LinearModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    memory = InMemoryLogger()
    trained(
        model=model, optimizers=optimizer, schedulers=torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5), max_duration="2ep",
        callbacks=[LRMonitor()], loggers=[memory],
    )  # fmt: skip
    assert rates(memory) == [0.1, 0.1, 0.05, 0.05]


def fourths(state: State) -> float:
    """Return the factor 1/4 before the first batch ends, and 1/16 before the second batch ends."""
    return 0.25 ** (1 + int(state.timestamp.batch))


@pytest.mark.parametrize("resumes", [False, True])
def test_a_function_as_scheduler_receives_the_state_and_sets_the_first_learning_rate(resumes: bool, tmp_path: Path) -> None:
    memory = InMemoryLogger()
    options: dict[str, Any] = {"schedulers": fourths, "callbacks": [LRMonitor()], "run_name": "run", "save_folder": str(tmp_path)}
    options |= {"save_interval": "1ep", "autoresume": True}
    if resumes:
        trained(**options)
        options["callbacks"] = [LRMonitor()]
    trained(**options, loggers=[memory], max_duration="2ep")
    # As in Composer 0.32, the function is called when the timestamp does not count the batch that has just ended.
    expected = [0.1 * 0.25**power for power in (1, 1, 2, 3)]
    assert rates(memory) == pytest.approx(expected[2:] if resumes else expected)


class SchedulesByEpoch:
    """A scheduler of one argument that is neither a function nor a method."""

    def __call__(self, state: State) -> float:
        return 1 / (1 + int(state.timestamp.epoch))


def test_a_function_as_scheduler_that_is_stepped_per_epoch_is_called_before_the_epoch_is_counted() -> None:
    memory = InMemoryLogger()
    options: dict[str, Any] = {"schedulers": SchedulesByEpoch(), "step_schedulers_every_batch": False, "max_duration": "3ep"}
    trained(**options, callbacks=[LRMonitor()], loggers=[memory])
    assert rates(memory) == pytest.approx([0.1, 0.1, 0.1, 0.1, 0.05, 0.05])  # as in Composer 0.32


def test_a_duration_after_a_stop_counts_from_the_stop() -> None:
    class StopsOnce(Callback):
        def __init__(self) -> None:
            self.durations: list[str] = []

        def batch_end(self, state: State, logger: Logger) -> None:
            self.durations.append(str(state.max_duration))
            if state.timestamp.batch == 1:
                state.stop_training()

    stops = StopsOnce()
    with trained(callbacks=[stops], closes=False) as trainer:
        trainer.fit(duration="2ba")
    assert stops.durations == ["1ep", "3ba", "3ba"]


@pytest.mark.parametrize("size", [None, 2])
def test_a_batch_that_is_replaced_in_batch_start_is_trained_on(size: int | None) -> None:
    class Replaces(Callback):
        def batch_start(self, state: State, logger: Logger) -> None:
            state.batch = tuple(2 * each for each in state.batch)

    class ReplacesEarlier(Callback):
        def after_dataloader(self, state: State, logger: Logger) -> None:
            state.batch = tuple(2 * each for each in state.batch)

    models = []
    for callback in (Replaces(), ReplacesEarlier(), None):
        torch.manual_seed(0)
        models.append(LinearModel())
        trained(model=models[-1], callbacks=callback, device_train_microbatch_size=size)
    replaced, earlier, plain = (list(model.parameters()) for model in models)
    assert all(torch.equal(one, other) for one, other in zip(replaced, earlier, strict=True))
    assert not any(torch.equal(one, other) for one, other in zip(replaced, plain, strict=True))


def test_outputs_can_be_read_until_the_end_of_the_batch() -> None:
    class ReadsOutputs(Callback):
        shapes: list[Any] = []

        def batch_end(self, state: State, logger: Logger) -> None:
            self.shapes.append(tuple(state.outputs.shape))

    trained(callbacks=[ReadsOutputs()])
    assert ReadsOutputs.shapes == [(4, 1), (4, 1)]


def test_a_prediction_calls_the_model_and_an_evaluation_can_use_a_part_of_the_data() -> None:
    class Doubles(LinearModel):
        calls = 0

        def eval_forward(self, batch: Any, outputs: Any = None) -> Any:
            self.calls += 1
            return 2 * self(batch)

    model = Doubles()
    with trained(model=model, eval_dataloader=data(), eval_interval="0ba", closes=False) as trainer:
        assert model.calls == 0
        (outputs, *_) = trainer.predict(data())
        assert torch.equal(outputs, model(next(iter(data()))).detach())
        trainer.eval(subset_num_batches=1)
        assert model.calls == 1


def test_a_model_logs_with_the_logger_of_its_trainer() -> None:
    class Logs(LinearModel):
        def loss(self, outputs: Any, batch: Any) -> Any:
            self.logger.log_metrics({"mine/mean": float(outputs.mean())})
            loss = super().loss(outputs, batch)
            return {"part": loss, "other": 0 * loss}

        def get_metrics(self, is_train: bool = False) -> dict[str, Any]:
            return {"MeanSquaredError": MeanSquaredError()}

    memory, model = InMemoryLogger(), Logs()
    trained(model=model, loggers=[memory])
    assert copy.deepcopy(model).logger is None
    assert {"mine/mean", "metrics/train/MeanSquaredError", "loss/train/part", "loss/train/other", "loss/train/total"} <= set(
        memory.data
    )


def test_the_previous_timestamp_at_the_end_of_an_epoch_is_that_before_the_epoch_was_counted() -> None:
    class Reads(Callback):
        counts: tuple[int, ...] = ()

        def epoch_end(self, state: State, logger: Logger) -> None:
            before = state.previous_timestamp
            Reads.counts = before.epoch.value, before.batch.value, before.sample.value, before.batch_in_epoch.value

    trained(callbacks=[Reads()])
    assert Reads.counts == (0, 2, 8, 2)


def test_an_early_stopper_of_training_metrics_is_rejected() -> None:
    with pytest.raises(ConfigError, match="can monitor only metrics of evaluations"):
        EarlyStopper("MeanSquaredError", "train")


def test_a_second_fit_continues() -> None:
    records = Records()
    trainer = Trainer(model=LinearModel(), train_dataloader=data(), callbacks=[records], progress_bar=False, max_duration="1ep")
    trainer.fit()
    trainer.fit(duration="1ep")
    trainer.close()
    assert trainer.state.timestamp.epoch == 2
    assert records.recorded.count("fit_start") == records.recorded.count("fit_end") == 2


def test_callsheet_callbacks_work_together_with_composer_callbacks() -> None:
    class Ours(OurCallback):
        steps = 0

        def on_train_step_end(self, ctx: Context) -> None:
            Ours.steps += 1

    trained(callbacks=[Ours(), Counts()])
    assert Ours.steps == 2


def test_the_built_in_callbacks_accept_composer_s_arguments(tmp_path: Path) -> None:
    given = [
        CheckpointSaver(save_interval="1ep", num_checkpoints_to_keep=2),
        SpeedMonitor(50, gpu_flops_available=1e12),
        RuntimeEstimator(1, "hours"),
        LRMonitor(),
        OptimizerMonitor(log_optimizer_metrics=True, batch_log_interval=1),
        MemoryMonitor(),
        MemorySnapshot(skip_batches=1, interval="3ba"),
        OOMObserver(max_entries=10),
        NaNMonitor(),
        ThresholdStopper("MeanSquaredError", "eval", 1e-9, comp="less"),
        EarlyStopper("MeanSquaredError", "eval", comp="less", patience=3),
    ]
    memory = InMemoryLogger()
    trained(
        callbacks=given, loggers=[memory, FileLogger(), ConsoleLogger(stream="stdout"), ProgressBarLogger()],
        eval_dataloader=data(), max_duration="2ep", save_folder=None,
    )  # fmt: skip
    assert "l2_norm/grad/global" in memory.data
    assert isinstance(ImageVisualizer("1ba", "input", 8, False, 0, 1), OurCallback)
    assert isinstance(MLPerfCallback(str(tmp_path), 0), OurCallback)
    assert isinstance(ExportForInferenceCallback("onnx", str(tmp_path / "m.onnx")), OurCallback)
    assert isinstance(LoadCheckpoint("saved", load_weights_only=True), OurCallback)
    documented = {
        *("CheckpointSaver", "SpeedMonitor", "RuntimeEstimator", "LRMonitor", "OptimizerMonitor", "MemoryMonitor"),
        *("MemorySnapshot", "OOMObserver", "NaNMonitor", "ImageVisualizer", "MLPerfCallback", "ThresholdStopper"),
        *("EarlyStopper", "ExportForInferenceCallback"),
    }
    assert documented <= set(composer_callbacks.__all__)


def test_early_stopper_stops_at_the_same_epoch_as_in_composer() -> None:
    trainer = trained(
        callbacks=[EarlyStopper("MeanSquaredError", "eval", comp="greater", patience=1)],
        eval_dataloader=data(),
        max_duration="9ep",
    )
    assert trainer.state.timestamp.epoch == 3  # the first epoch was the best, and more than `patience` epochs have passed


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: trained(algorithms=[object()]), "algorithms=.* is not supported, unlike"),
        (lambda: trained(save_filename="mine.pt"), "save_filename='mine.pt'"),
        (lambda: trained(device_train_microbatch_size="auto"), "device_train_microbatch_size='auto'"),
        (lambda: trained(eval_interval=lambda state, event: True), "eval_interval"),
        (lambda: trained(precision="amp_fp8"), "amp_fp8"),
        (lambda: CheckpointSaver(weights_only=True), "CheckpointSaver\\(weights_only=True\\)"),
        (lambda: ExportForInferenceCallback("torchscript", "x"), "torch_export"),
        (lambda: Evaluator(label="a", dataloader=data(), metric_names=["x"]), "metric_names"),
        (
            lambda: composer_loggers.SlackLogger("a message"),
            "SlackLogger is not supported, unlike in Composer: callsheet.callbacks.Notify",
        ),
    ],
)
def test_an_unsupported_argument_is_rejected_by_name(make: Any, message: str) -> None:
    with pytest.raises(NotSupported, match=message):
        make()


def test_an_unknown_argument_or_an_invalid_value_is_an_error() -> None:
    with pytest.raises(TypeError, match="no argument 'callback'"):
        trained(callback=[])
    with pytest.raises(ConfigError, match="give 'less' or 'greater'"):
        EarlyStopper("x", "eval", comp=max)


def test_arithmetic_and_comparisons_of_time_and_timestamp() -> None:
    assert Time(3, "ba") == Time.from_timestring("3ba")
    assert Time(3, "ba") == 3
    assert Time(3, "ba") == "3ba"
    assert Time.from_timestring("1h30m") == Time(5400, TimeUnit.SECOND)
    assert Time(1, "ep") + "2ep" == Time(3, TimeUnit.EPOCH)
    assert 5 - Time(2, "ba") == Time(3, "ba")
    assert Time(3, "ba") / Time(4, "ba") == Time(0.75, "dur")
    assert Time(10, "ba") * Time(0.25, "dur") == "2ba"
    assert Time(7, "ba") % 4 == 3
    assert -Time(2, "ba") < 0
    assert str(Time.from_input(2, "EP")) == "2ep"
    with pytest.raises(RuntimeError, match="units differ"):
        assert Time(1, "ba") < Time(1, "ep")
    with pytest.raises(TypeError):
        Time(1.5, "ba")
    with pytest.raises(ValueError, match="not a time"):
        Time.from_timestring("soon")
    stamp = Timestamp(epoch=1).to_next_batch(samples=4).to_next_batch(samples=4, tokens=2).to_next_epoch()
    assert (stamp.epoch.value, stamp.batch.value, stamp.sample.value, stamp.batch_in_epoch.value) == (2, 2, 8, 0)
    assert stamp >= "2ba"
    assert stamp < Time(3, "ba")
    assert stamp != Timestamp()
    assert stamp.to_next_iteration().iteration == 1
    assert stamp.get("tok") == 2
    again = Timestamp()
    again.load_state_dict(stamp.state_dict())
    assert again == stamp


def test_the_package_can_be_imported_without_composer() -> None:
    code = (
        "import sys; sys.modules['composer'] = None; import callsheet.compat.composer.callbacks as names; print(names.__name__)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.stdout == "callsheet.compat.composer.callbacks\n", ran.stderr


def test_the_example_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(Path(__file__).resolve().parents[2] / "examples" / "composer_style.py"), run_name="__main__")
    best = [float(line.rpartition(" ")[2]) for line in capsys.readouterr().out.splitlines() if "best so far" in line]
    assert len(best) == 3
    assert best == sorted(best, reverse=True)
    assert best[-1] < best[0]
