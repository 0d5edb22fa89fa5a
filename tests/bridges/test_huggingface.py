"""callsheet's callbacks in a real transformers Trainer."""

from __future__ import annotations

import copy
import gc
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import EarlyStoppingCallback, TrainerCallback, TrainingArguments
from transformers import Trainer as HuggingFaceTrainer

from callsheet import Callback, Context
from callsheet.bridges.huggingface import GUEST_EVENTS, guest, host
from callsheet.callbacks import EMA, CheckpointSaver, EarlyStopper, History, LRMonitor, NaNMonitor, OptimizerMonitor, SpeedMonitor
from callsheet.core.lifecycle import EVENTS
from callsheet.errors import NotSupported
from callsheet.loggers import JSONLLogger, read_metrics
from callsheet.testing import Recorder, check_events, run_ranks

from .cells import RecordsLoadedSteps

ROWS = 24


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Use one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Points(Dataset[dict[str, torch.Tensor]]):
    def __init__(self, rows: int = ROWS) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(rows, 3, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": self.x[index], "labels": self.x[index].sum()}


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 8)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.head(self.dropout(self.body(x))).squeeze(-1)
        return {"loss": (logits - labels).square().mean(), "logits": logits} if labels is not None else {"logits": logits}


def trainer(folder: Path, callbacks: list[Any], *, evaluates: Any = None, **options: Any) -> Any:
    torch.manual_seed(0)
    given = {
        "num_train_epochs": 2,
        "per_device_train_batch_size": 4,
        "logging_steps": 2,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "learning_rate": 0.01,
        "seed": 3,
        "use_cpu": True,
    } | options
    arguments = TrainingArguments(output_dir=str(folder / "out"), **given)
    evaluated = {"eval_dataset": evaluates or Points(8)} if given.get("eval_strategy", "no") != "no" else {}
    return HuggingFaceTrainer(Line(), arguments, train_dataset=Points(), callbacks=callbacks, **evaluated)


def weights(of: Any) -> list[torch.Tensor]:
    return [value.clone() for value in of.model.state_dict().values()]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_training_is_unchanged_and_every_event_is_fired(accumulate: int, tmp_path: Path) -> None:
    recorder, history = Recorder(fields=("loss", "learning_rate", "batch")), History()
    hosted = host([recorder, history, SpeedMonitor(), OptimizerMonitor(), LRMonitor(), NaNMonitor()])
    options: dict[str, Any] = {
        "gradient_accumulation_steps": accumulate,
        "eval_strategy": "epoch",
        "logging_steps": 1 + accumulate,
    }
    with_them = trainer(tmp_path, [hosted], **options)
    with_them.train()
    without = trainer(tmp_path, [], **options)
    without.train()
    assert all(torch.equal(a, b) for a, b in zip(weights(with_them), weights(without), strict=True))
    check_events(recorder.events)
    steps = 2 * (ROWS // 4 // accumulate)
    assert recorder.events.count("on_train_step_end") == steps
    assert recorder.events.count("on_backward_end") == 2 * ROWS // 4
    assert recorder.events.count("on_eval_all_end") == 2
    assert recorder.events.count("on_eval_forward_end") == 2
    assert recorder.events[-1] == "on_run_end"
    logged = [entry["loss"] for entry in without.state.log_history if "loss" in entry]
    assert history["train/loss"][: len(logged)] == pytest.approx(logged, rel=1e-5)
    evaluated = [entry["eval_loss"] for entry in without.state.log_history if "eval_loss" in entry]
    assert history["validation/loss"] == pytest.approx(evaluated)
    assert set(recorder.values["batch"][0][1]) == {"x", "labels"}


def test_keep_of_a_saver_has_no_effect_on_the_trainer_s_checkpoints(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A message says once that only the Trainer deletes its checkpoints."""
    saver = CheckpointSaver(save_interval=2, keep=1)
    trainer(tmp_path, [host([saver])], num_train_epochs=3).train()
    assert len(list((tmp_path / "out").glob("checkpoint-*"))) > 2
    (warning,) = [record.getMessage() for record in caplog.records if "CheckpointSaver" in record.getMessage()]
    assert re.match(
        r"CheckpointSaver: keep=1 has no effect, because .*checkpoint-2 was written by the training framework", warning
    )
    caplog.clear()
    trainer(tmp_path / "2", [host([CheckpointSaver(save_interval=2, keep=None)])]).train()
    assert "CheckpointSaver" not in caplog.text


def test_the_map_of_a_guest_contains_every_event_of_transformers() -> None:
    theirs = {name for name in vars(TrainerCallback) if name.startswith("on_")}
    assert set(GUEST_EVENTS) < set(EVENTS)
    assert {event for events in GUEST_EVENTS.values() for event in events} == theirs - {"on_push_begin"}


class RequestsAtStep(Callback):
    """Makes a request at the end of a step."""

    def __init__(self, what: str, step: int) -> None:
        self.what, self.step = what, step

    def on_train_step_end(self, ctx: Context) -> None:
        if ctx.step == self.step:
            getattr(ctx.control, self.what)("asked")


class Fails(Callback):
    """Raises at a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_step_end(self, ctx: Context) -> None:
        if ctx.step == self.step:
            raise ZeroDivisionError


def test_the_trainer_carries_out_requests(tmp_path: Path) -> None:
    recorder = Recorder(fields=("checkpoint",))
    trained = trainer(
        tmp_path,
        [host([RequestsAtStep("save", 2), RequestsAtStep("evaluate", 3), RequestsAtStep("stop", 7), recorder])],
        eval_strategy="steps",
        eval_steps=100,
    )
    trained.train()
    assert trained.state.global_step == 7
    assert (tmp_path / "out" / "checkpoint-2" / "callsheet").is_dir()
    recorded = [(event, info.step, info.kind) for event, info in recorder.values["checkpoint"] if info is not None]
    assert ("on_checkpoint_published", 2, "requested") in recorded
    assert recorder.events.count("on_eval_all_end") == 1
    check_events(recorder.events)


@pytest.mark.parametrize("averages", [False, True])
def test_a_resume_from_the_trainer_s_checkpoint_restores_the_callback_states(averages: bool, tmp_path: Path) -> None:
    def more() -> list[Callback]:
        return [EMA(half_life=3)] if averages else []

    whole = History()
    uninterrupted = trainer(tmp_path / "whole", [host([whole, *more()])])
    uninterrupted.train()
    with pytest.raises(ZeroDivisionError):
        trainer(tmp_path, [host([History(), Fails(8), *more()])], save_strategy="steps", save_steps=7).train()
    history, recorder, loads = History(), Recorder(), RecordsLoadedSteps()
    again = trainer(tmp_path, [host([history, recorder, loads, *more()])])
    again.train(resume_from_checkpoint=True)
    assert loads.steps == [7]
    assert recorder.recorded[-1].batch == again.state.global_step == 12
    assert history["train/loss"] == pytest.approx(whole["train/loss"])
    assert all(torch.equal(a, b) for a, b in zip(weights(again), weights(uninterrupted), strict=True))
    check_events(recorder.events)


def test_an_early_stop_ends_training(tmp_path: Path) -> None:
    class RaisesEvalLoss(Callback):
        phase = "change"

        def on_eval_forward_end(self, ctx: Context) -> None:
            ctx.outputs = {**ctx.outputs, "loss": torch.tensor(float(ctx.step))}

    stopper = EarlyStopper(monitor="validation/loss", patience="1ep")
    trained = trainer(tmp_path, [host([RaisesEvalLoss(), stopper])], eval_strategy="epoch", num_train_epochs=9)
    trained.train()
    assert trained.state.epoch < 5


def test_averaged_weights_are_used_for_evaluation_only(tmp_path: Path) -> None:
    seen: list[bool] = []

    class ComparesWeights(Callback):
        def on_eval_forward_end(self, ctx: Context) -> None:
            seen.append(torch.equal(ctx.model.head.weight, before["weight"]))

        def on_train_step_end(self, ctx: Context) -> None:
            before["weight"] = ctx.model.head.weight.detach().clone()

    before: dict[str, torch.Tensor] = {}
    averaged = trainer(tmp_path, [host([EMA(half_life=3), ComparesWeights()])], eval_strategy="epoch")
    averaged.train()
    plain = trainer(tmp_path, [], eval_strategy="epoch")
    plain.train()
    assert seen == [False, False]
    losses = [[entry["eval_loss"] for entry in each.state.log_history if "eval_loss" in entry] for each in (averaged, plain)]
    assert losses[0] != losses[1]
    assert averaged.state.log_history[0]["loss"] == plain.state.log_history[0]["loss"]


def test_a_logger_writes_into_the_trainer_s_folder(tmp_path: Path) -> None:
    trainer(tmp_path, [host([JSONLLogger()])]).train()
    records = read_metrics(tmp_path / "out")
    # The last two entries are logged after the last step and at the end of training.
    assert [record.step for record in records] == [
        2,
        4,
        6,
        8,
        10,
        12,
        12,
        12,
    ]
    assert "train/grad_norm" in records[-2].values
    assert "huggingface/train_runtime" in records[-1].values


@pytest.mark.parametrize("listens_to_outputs", [False, True])
def test_a_call_of_a_copy_of_the_model_fires_no_events(listens_to_outputs: bool, tmp_path: Path) -> None:
    called: list[int] = []

    class Copies(Callback):
        def on_train_step_end(self, ctx: Context) -> None:
            copied = copy.deepcopy(ctx.model)
            for is_training in (True, False):
                with torch.enable_grad():
                    copied.train(is_training)(**ctx.batch)
            called.append(ctx.step)

    recorder = Recorder()
    trainer(tmp_path, [host([Copies(), recorder] if listens_to_outputs else [Copies()])]).train()
    assert called == [*range(1, 13)]
    assert recorder.events.count("on_forward_end") == (12 if listens_to_outputs else 0)


def test_events_that_the_trainer_never_fires_are_rejected(tmp_path: Path) -> None:
    class Listens(Callback):
        def on_predict_end(self, ctx: Context) -> None: ...

    with pytest.raises(NotSupported, match="Listens listens to on_predict_end, which the Hugging Face Trainer does not fire"):
        trainer(tmp_path, [host([Listens()])]).train()
    trainer(tmp_path, [host([Listens()], strict=False)]).train()


class RecordsOutcomes(Callback):
    """Records the error and how the run ends."""

    phase = "report"

    def __init__(self) -> None:
        self.found: list[Any] = []

    def on_exception(self, ctx: Context) -> None:
        self.found.append(ctx.exception)

    def on_run_end(self, ctx: Context) -> None:
        self.found.append(str(ctx.run.outcome))


def test_an_error_that_leaves_train_ends_the_run_at_once(tmp_path: Path) -> None:
    ends = RecordsOutcomes()
    trained = trainer(tmp_path, [host([Fails(2), ends])])
    with pytest.raises(ZeroDivisionError) as by_callback:
        trained.train()
    assert ends.found == [by_callback.value, "failed"]
    ends = RecordsOutcomes()
    trained = trainer(tmp_path, [host([ends])])
    trained.train()
    rows = trained.train_dataset.x
    trained.train_dataset.x = rows[:, :2]  # the model fails
    with pytest.raises(RuntimeError, match="shapes") as by_model:
        trained.train()
    assert ends.found == ["finished", by_model.value, "failed"]
    assert not getattr(by_model.value, "__notes__", [])
    assert by_model.value.__cause__ is None
    assert not {"training_step", "evaluate"} & set(vars(trained))
    assert not trained.model._forward_pre_hooks
    trained.train_dataset.x = rows
    trained.train()
    assert ends.found[3:] == ["finished"]


def test_a_keyboard_interrupt_that_leaves_train_interrupts_the_run(tmp_path: Path) -> None:
    class Interrupts(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 2:
                raise KeyboardInterrupt

    ends = RecordsOutcomes()
    with pytest.raises(KeyboardInterrupt) as interrupted:
        trainer(tmp_path, [host([ends]), Interrupts()]).train()
    assert ends.found == [interrupted.value, "interrupted"]


def test_an_error_before_training_begins_is_reported_to_no_run(tmp_path: Path) -> None:
    ends = RecordsOutcomes()
    trained = trainer(tmp_path, [host([ends])])
    with pytest.raises(ValueError, match="checkpoint"):
        trained.train(resume_from_checkpoint=True)
    assert not ends.found


def test_a_copy_of_the_trainer_trains_its_own_model(tmp_path: Path) -> None:
    trained = trainer(tmp_path, [host([NaNMonitor()])])
    before = weights(trained)
    assert "_inner_training_loop" in vars(trained)
    copied = copy.copy(trained)
    assert "_inner_training_loop" not in vars(copied)
    deep = copy.deepcopy(trained)
    assert "_inner_training_loop" not in vars(deep)
    deep.train()
    assert all(torch.equal(one, other) for one, other in zip(before, weights(trained), strict=True))
    assert not all(torch.equal(one, other) for one, other in zip(before, weights(deep), strict=True))


def test_an_error_fails_the_run_of_a_host_added_with_add_callback_once_it_is_deleted(tmp_path: Path) -> None:
    ends = RecordsOutcomes()
    trained = trainer(tmp_path, [])
    trained.add_callback(host([ends]))
    trained.train_dataset.x = trained.train_dataset.x[:, :2]
    with pytest.raises(RuntimeError, match="shapes"):
        trained.train()
    assert not ends.found
    del trained
    gc.collect()
    assert ends.found == ["failed"]


def test_train_can_be_called_again(tmp_path: Path) -> None:
    recorder = Recorder()
    trained = trainer(tmp_path, [host([recorder])])
    trained.train()
    trained.train()
    assert recorder.events.count("on_run_start") == recorder.events.count("on_run_end") == 2
    assert not trained.model._forward_hooks


def test_an_evaluation_of_several_datasets_is_one_evaluation(tmp_path: Path) -> None:
    recorder, history = Recorder(fields=("eval_name", "standalone")), History()
    trained = trainer(
        tmp_path,
        [host([recorder, history])],
        evaluates={"short": Points(4), "validation": Points(8)},
        eval_strategy="steps",
        eval_steps=3,
        save_strategy="steps",
        save_steps=3,
    )
    trained.train()
    check_events(recorder.events)
    logged = trained.state.log_history
    assert recorder.events.count("on_eval_all_end") == 4
    for name in ("short", "validation"):
        found = [entry[f"eval_{name}_loss"] for entry in logged if f"eval_{name}_loss" in entry]
        assert [results[name] for _, results in history.evaluations] == [{"loss": loss} for loss in found]
        assert history[f"{name}/loss"] == pytest.approx(found)
    begun = [name for event, name in recorder.values["eval_name"] if event == "on_eval_start"]
    assert begun == ["short", "validation"] * 4
    assert not any(standalone for _, standalone in recorder.values["standalone"])


def test_a_stop_at_an_evaluation_of_several_datasets_ends_training_there(tmp_path: Path) -> None:
    class Stops(Callback):
        def on_eval_all_end(self, ctx: Context) -> None:
            ctx.control.stop("seen")

    trained = trainer(
        tmp_path,
        [host([Stops()])],
        evaluates={"short": Points(4), "long": Points(8)},
        eval_strategy="steps",
        eval_steps=3,
    )
    trained.train()
    assert trained.state.global_step == 3


def test_eval_on_start_is_reported_and_evaluations_after_training_are_not(tmp_path: Path) -> None:
    recorder = Recorder(fields=("eval_results",))
    trained = trainer(tmp_path, [host([recorder])], eval_strategy="epoch", eval_on_start=True)
    trained.train()
    check_events(recorder.events)
    assert recorder.events.index("on_eval_all_end") < recorder.events.index("on_train_start")
    evaluated = [entry["eval_loss"] for entry in trained.state.log_history if "eval_loss" in entry]
    assert [found["validation"] for _, found in recorder.values["eval_results"]] == [{"loss": loss} for loss in evaluated]
    recorded = len(recorder.events)
    trained.evaluate()
    trained.predict(Points(4))
    assert len(recorder.events) == recorded


def test_other_values_that_the_trainer_logs_are_in_the_records(tmp_path: Path) -> None:
    history = History()

    class Logs(TrainerCallback):  # type: ignore[misc]  # transformers' types are not read
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            trained.log({"mine": float(state.global_step)})

    trained = trainer(tmp_path, [host([history]), Logs()], eval_strategy="epoch")
    trained.train()
    assert history["huggingface/mine"] == [1.0, 3.0, 5.0, 7.0, 9.0, 11.0]  # the last value before each record
    assert all(seconds > 0 for seconds in history["huggingface/eval_runtime"])
    norms = [entry["grad_norm"] for entry in trained.state.log_history if "grad_norm" in entry]
    assert history["train/grad_norm"] == pytest.approx(norms)


def test_logging_steps_of_the_command_line_as_a_float_logs_every_step(tmp_path: Path) -> None:
    """The argument `--logging_steps 1` becomes the float 1.0, which the Trainer does not convert to an integer."""
    history = History()
    trained = trainer(tmp_path, [host([history])], logging_steps=1.0, max_steps=4)
    trained.train()
    assert isinstance(trained.state.logging_steps, float)
    assert [step for step, values in history.records if "train/loss" in values] == [1, 2, 3, 4]


def test_a_guest_in_a_host_of_its_own_framework_stops_at_the_same_step(tmp_path: Path) -> None:
    arguments = {"metric_for_best_model": "loss", "eval_strategy": "steps", "eval_steps": 2}
    options: dict[str, Any] = {"learning_rate": 1e-12, "lr_scheduler_type": "constant", "num_train_epochs": 4}
    steps: list[int] = []
    for callback in (EarlyStoppingCallback(2, 0.1), host([stopper := guest(EarlyStoppingCallback(2, 0.1), args=arguments)])):
        trained = trainer(tmp_path / str(len(steps)), [callback], **arguments, **options)
        trained.train()
        steps.append(trained.state.global_step)
    assert steps == [6, 6]
    assert (stopper.state.global_step, stopper.state.max_steps, stopper.state.epoch) == (6, 24, 1.0)


# --- several ranks ---


class OneRankStops(Callback):
    """Requests a stop on rank 1 only."""

    def on_train_step_end(self, ctx: Context) -> None:
        if ctx.step == 4 and ctx.run.rank == 1:
            ctx.control.stop("one asks")


class SetsStopFlag(TrainerCallback):  # type: ignore[misc]
    """Sets the Trainer's stop flag on rank 0 only, or on all ranks."""

    def __init__(self, is_replicated: bool) -> None:
        self.is_replicated = is_replicated

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 1 and (self.is_replicated or state.is_world_process_zero):
            control.should_training_stop = True


def train_all_cases_on_rank(folder: str) -> dict[str, Any]:
    """Run all cases in one pair of processes, because importing transformers takes the most time."""
    from .test_huggingface_guest import as_guests

    found: dict[str, Any] = {}
    options: dict[str, Any] = {"ddp_backend": "gloo", "per_device_train_batch_size": 2, "eval_strategy": "epoch"}
    recorder, history = Recorder(), History()
    logger = JSONLLogger()
    trained = trainer(Path(folder, "one"), [host([recorder, history, logger])], save_strategy="epoch", **options)
    trained.train()
    check_events(recorder.events)
    found["kind"] = type(trained.model_wrapped).__name__
    found["events"] = recorder.events
    found["records"] = [
        (step, {name: value for name, value in values.items() if not name.startswith("huggingface/")})
        for step, values in history.records
    ]
    plain = trainer(Path(folder, "two"), [], **options)
    plain.train()
    found["neutral"] = all(torch.equal(a, b) for a, b in zip(weights(trained), weights(plain), strict=True))
    found["logged"] = [entry["loss"] for entry in plain.state.log_history if "loss" in entry]
    again = History()
    resumed = trainer(Path(folder, "one"), [host([again])], save_strategy="epoch", **options)
    resumed.train(resume_from_checkpoint=str(Path(folder, "one", "out", "checkpoint-6")))
    found["resumed"] = again["train/loss"] == history["train/loss"] and resumed.state.global_step == 12
    recorder = Recorder()
    stopped = trainer(Path(folder, "three"), [host([recorder, OneRankStops()])], ddp_backend="gloo", num_train_epochs=20)
    stopped.train()
    check_events(recorder.events)
    found["stopped"] = stopped.state.global_step
    found["guests"] = [
        as_guests(
            Path(folder),
            guest(SetsStopFlag(is_replicated), replicated=is_replicated),
            epochs=300,
            eval_interval=None,
            name=f"guest-{is_replicated}",
        ).state.timestamp.batch
        for is_replicated in (True, False)
    ]
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("ranks")
    return folder, run_ranks(train_all_cases_on_rank, 2, str(folder))


def test_ranks_train_unchanged_and_fire_the_same_events(ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, (one, other) = ranks
    assert one["kind"] == "DistributedDataParallel"
    assert one["neutral"]
    assert other["neutral"]
    assert one["events"] == other["events"]
    assert one["events"].count("on_train_step_end") == 12
    assert one["records"] == other["records"]
    losses = [values["train/loss"] for _, values in one["records"] if "train/loss" in values]
    assert losses == pytest.approx(one["logged"], rel=1e-5)
    samples = [values["time/sample"] for _, values in one["records"]]
    assert samples[-1] == 2 * ROWS
    written = [record.step for record in read_metrics(folder / "one" / "out")]
    assert written == [step for step, _ in one["records"]]  # only one rank writes


def test_ranks_resume_together(ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    _, (one, other) = ranks
    assert one["resumed"]
    assert other["resumed"]


def test_ranks_stop_together(ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    _, (one, other) = ranks
    assert 4 <= one["stopped"] == other["stopped"] < 60
    assert one["guests"] == other["guests"]
    at_once, agreed = one["guests"]
    assert at_once == 1
    assert 1 < agreed <= 3  # the ranks agree at the epoch's end at the latest
