"""Callbacks of transformers do the same in the Hugging Face Trainer and as guests in callsheet's Trainer."""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import (
    DefaultFlowCallback,
    EarlyStoppingCallback,
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
    TrainingArguments,
)
from transformers import Trainer as HuggingFaceTrainer
from transformers.integrations import TensorBoardCallback, TrackioCallback
from transformers.integrations.integration_utils import KubeflowCallback
from transformers.trainer_callback import ExportableState

from callsheet import Callback, Context, Trainer
from callsheet.bridges.huggingface import guest
from callsheet.bridges.matrix import Cell
from callsheet.callbacks import CheckpointSaver, History
from callsheet.errors import ConfigError, NotSupported, RegistrationError
from callsheet.trainer import Task

from .rows import check_or_write_cell

ROWS = 24  # batches of 4 rows: 6 steps per epoch
GIVEN = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(0))
DATA = [{"inputs": row, "labels": row.sum()} for row in GIVEN]
SCRIPT = [5.0, 4.0, 3.0, 3.5, 2.9, 3.2, 3.1, 3.3, 3.0]
"""The evaluation losses after every second step."""


class Line(nn.Module):
    """A model that learns. Its evaluation losses do not depend on the weights: they come from SCRIPT."""

    batches: Tensor

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.body = nn.Linear(4, 1)
        self.register_buffer("batches", torch.tensor(0))

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.body(inputs).squeeze(-1)
        loss = (logits - labels).square().mean()
        if self.training:
            self.batches += 1
        else:
            loss = torch.tensor(SCRIPT[int(self.batches) // 2 - 1])
        return {"loss": loss, "logits": logits}


class OwnLoss(Task):
    """A task whose loss is computed by the model."""

    def forward(self, model: nn.Module, batch: Any) -> Any:
        return model(**batch)

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        loss: Tensor = outputs["loss"]
        return loss


class RecordsCalls(TrainerCallback):  # type: ignore[misc]  # transformers' types are not read
    """Records every call."""

    def __init__(self) -> None:
        self.recorded: list[tuple[Any, ...]] = []

    def note(self, event: str, state: Any, **values: Any) -> None:
        numbers = {name: number for name, number in values.items() if not name.endswith(SPEEDS)}
        self.recorded.append((event, state.global_step, state.epoch, numbers))

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.note("train_begin", state, steps=state.max_steps, epochs=state.num_train_epochs)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.note("epoch_begin", state)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.note("step_begin", state)

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.note("substep_end", state)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.note(
            "pre_optimizer_step", state, weight=model.body.weight[0, 0].item(), gradient=model.body.weight.grad[0, 0].item()
        )

    def on_optimizer_step(
        self, args: Any, state: Any, control: Any, model: Any = None, lr_scheduler: Any = None, **_: Any
    ) -> None:
        self.note("optimizer_step", state, weight=model.body.weight[0, 0].item(), rate=lr_scheduler.get_last_lr()[0])

    def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        self.note("step_end", state, rate=optimizer.param_groups[0]["lr"])

    def on_prediction_step(self, args: Any, state: Any, control: Any, eval_dataloader: Any = None, **_: Any) -> None:
        self.note("prediction_step", state, of=len(eval_dataloader))

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:
        self.note("evaluate", state, best=state.best_metric, best_step=state.best_global_step, **metrics)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        assert {**state.log_history[-1], **logs} == {**logs, "step": state.global_step}
        self.note("log", state, **logs)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.note("save", state, is_best=state.best_model_checkpoint is not None and state.best_global_step == state.global_step)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.note("epoch_end", state)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.note("train_end", state, logged=len(state.log_history))


SPEEDS = ("runtime", "per_second", "total_flos")


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Use one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


FLOW: dict[str, Any] = {"logging_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "no"}


def in_framework(folder: Path, *callbacks: TrainerCallback, epochs: int = 2, accumulate: int = 1, **options: Any) -> Any:
    """Train in the Hugging Face Trainer. The callbacks come after its own `DefaultFlowCallback`."""
    arguments = TrainingArguments(
        output_dir=str(folder / "framework"),
        num_train_epochs=epochs,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        gradient_accumulation_steps=accumulate,
        train_sampling_strategy="sequential",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        **{**FLOW, **options},
    )
    model = Line()
    trainer = HuggingFaceTrainer(model, arguments, train_dataset=DATA, eval_dataset=DATA[:8], optimizers=optimizers(model))
    trainer.remove_callback(PrinterCallback)  # the Trainer adds it because of `disable_tqdm`
    for callback in callbacks:
        trainer.add_callback(callback)
    trainer.train()
    return trainer


def optimizers(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def as_guests(
    folder: Path, *callbacks: Callback, epochs: int = 2, name: str = "guest", fits: bool = True, **options: Any
) -> Trainer:
    """Train in our Trainer with the callbacks as guests."""
    model = Line()
    optimizer, scheduler = optimizers(model)
    given: dict[str, Any] = {"eval_interval": "2ba", "log_interval": "2ba", "clip_grad_norm": 1.0, "seed": 3}
    trainer = Trainer(
        model,
        OwnLoss(),
        DataLoader(DATA, batch_size=4),  # type: ignore[arg-type]  # a list is a dataset
        DataLoader(DATA[:8], batch_size=4),  # type: ignore[arg-type]
        optimizer=optimizer,
        scheduler=scheduler,
        max_duration=f"{epochs}ep",
        run_name=name,
        runs_folder=folder,
        device="cpu",
        callbacks=callbacks,
        **{**given, **options},
    )
    if fits:
        with trainer:
            trainer.fit()
    return trainer


EVALUATED: Any = DataLoader(DATA[:8], batch_size=4)  # type: ignore[arg-type]


def same(ours: Any, theirs: Any) -> None:
    """Assert that both are equal, numbers up to rounding."""
    if isinstance(ours, dict):
        assert list(ours) == list(theirs)
        same(list(ours.values()), list(theirs.values()))
    elif isinstance(ours, (list, tuple)):
        for one, other in zip(ours, theirs, strict=False):
            same(one, other)
        assert len(ours) == len(theirs)
    elif isinstance(ours, float):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-7)
    else:
        assert ours == theirs


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_guest_receives_the_same_calls_as_in_its_framework(accumulate: int, tmp_path: Path) -> None:
    arguments = {**FLOW, "eval_steps": 4, "save_strategy": "steps", "save_steps": 4, "metric_for_best_model": "loss"}
    theirs, ours = RecordsCalls(), RecordsCalls()
    in_framework(tmp_path, theirs, accumulate=accumulate, **arguments)
    as_guests(
        tmp_path,
        guest(DefaultFlowCallback(), args=arguments),
        guest(ours, args=arguments, eval_dataloader=EVALUATED),
        gradient_accumulation_steps=accumulate,
        eval_interval=None,
    )
    same(ours.recorded, theirs.recorded)
    assert {event for event, *_ in ours.recorded} == {
        *("train_begin", "epoch_begin", "step_begin", "pre_optimizer_step", "optimizer_step", "step_end", "prediction_step"),
        *("evaluate", "log", "save", "epoch_end", "train_end"),
        *(["substep_end"] if accumulate > 1 else []),
    }


class SetsAllFlags(TrainerCallback):  # type: ignore[misc]
    """A callback as users write it, which sets all of the Trainer's flags."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        if state.global_step == 3:
            control.should_evaluate = True
        if state.global_step == 4:
            control.should_save = True
        if state.global_step == 8:
            control.should_training_stop = True
        return control


@dataclass
class CallbackResults:
    """The results of a callback: the steps of evaluations, saves and the end, and the callback's own output."""

    events: list[tuple[str, int]]
    shown: Any = None


class TrainerActions(TrainerCallback):  # type: ignore[misc]
    """Records the steps of evaluations, saves and the end in the Hugging Face Trainer."""

    def __init__(self) -> None:
        self.done: list[tuple[str, int]] = []

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.done.append(("evaluate", state.global_step))

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.done.append(("save", state.global_step))

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.done.append(("end", state.global_step))


class CallsheetActions(Callback):
    """Records the same in our Trainer."""

    def __init__(self) -> None:
        self.done: list[tuple[str, int]] = []

    def on_eval_all_end(self, ctx: Context) -> None:
        self.done.append(("evaluate", ctx.step))

    def on_checkpoint_published(self, ctx: Context) -> None:
        self.done.append(("save", ctx.step))

    def on_train_end(self, ctx: Context) -> None:
        self.done.append(("end", ctx.step))


def numbers(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Return only those logged values that are the same in every run, such as losses. Convert text to numbers."""
    return {name: float(value) for name, value in logs.items() if not name.endswith(SPEEDS) and name != "step"}


def printed(foreign: Any, folder: Path, out: str) -> list[dict[str, Any]]:
    return [numbers(ast.literal_eval(line)) for line in out.splitlines() if line.startswith("{")]


def stopped(foreign: EarlyStoppingCallback, folder: Path, out: str) -> Any:
    return foreign.early_stopping_patience_counter, foreign.state()


def scalars(foreign: Any, folder: Path, out: str) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (written,) = folder.rglob("events.out.tfevents.*")
    events = EventAccumulator(str(written)).Reload()
    return {
        name: [(event.step, event.value) for event in events.Scalars(name)]
        for name in events.Tags()["scalars"]
        if not name.endswith(SPEEDS)
    }


class FakeController(ThreadingHTTPServer):
    """A fake Kubeflow controller that records the requests it receives."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(handler) -> None:  # noqa: N805  # `self` is the server
                self.sent.append(json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))["trainerStatus"])
                handler.send_response(200)
                handler.end_headers()

            def log_message(self, *_: Any) -> None: ...

        super().__init__(("127.0.0.1", 0), Handler)


@pytest.fixture
def kubeflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeController]:
    """Set the environment variables with which the Trainer adds its KubeflowCallback. Return the controller."""
    server = FakeController()
    Thread(target=server.serve_forever, daemon=True).start()
    token = tmp_path / "token"
    token.write_text("a token", "utf-8")
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_TOKEN", str(token))
    yield server
    server.shutdown()
    server.server_close()


@dataclass(frozen=True)
class Row:
    """A callback, its tier, the training arguments, and a function that returns its output."""

    make: Callable[[], Any]
    tier: str
    options: dict[str, Any] = field(default_factory=dict)
    shows: Callable[[Any, Path, str], Any] = lambda foreign, folder, out: None
    evaluates: bool = True
    """Whether the run evaluates every second step, and not only when the callback requests it."""
    is_own: bool = False
    """Whether the Hugging Face Trainer adds the callback itself."""


TABLE = {
    "EarlyStoppingCallback": Row(
        lambda: EarlyStoppingCallback(early_stopping_patience=2, early_stopping_threshold=0.05),
        "drives",
        {"metric_for_best_model": "loss", "greater_is_better": False},
        stopped,
    ),
    "DefaultFlowCallback": Row(
        DefaultFlowCallback,
        "drives",
        {"eval_steps": 4, "save_strategy": "steps", "save_steps": 6, "max_steps": 10},
        evaluates=False,
        is_own=True,
    ),
    "a user's own": Row(SetsAllFlags, "drives", {"eval_strategy": "no"}, evaluates=False),
    "ProgressCallback": Row(ProgressCallback, "reads state", {}, printed),
    "PrinterCallback": Row(PrinterCallback, "reads state", {}, printed),
    "TensorBoardCallback": Row(TensorBoardCallback, "reads state", {}, scalars),
}


def both(row: Row, folder: Path, capsys: pytest.CaptureFixture[str], shows: Callable[[], Any] = lambda: None) -> list[Any]:
    """Return the results of the callback in our Trainer and in the Hugging Face Trainer."""
    found = []
    for where in ("here", "framework"):
        foreign, here, there = row.make(), CallsheetActions(), TrainerActions()
        if where == "here":
            hosted = guest(foreign, args={**FLOW, **row.options}, eval_dataloader=EVALUATED)
            as_guests(folder / where, hosted, here, epochs=3, eval_interval="2ba" if row.evaluates else None)
        else:
            in_framework(folder / where, *([] if row.is_own else [foreign]), there, epochs=3, **row.options)
        done = here.done if where == "here" else there.done
        found.append((done, row.shows(foreign, folder / where, capsys.readouterr().out), shows()))
    return found


@pytest.mark.parametrize("name", TABLE)
def test_a_guest_has_the_same_effects_as_in_its_framework(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = TABLE[name]
    ours, theirs = both(row, tmp_path, capsys)
    same(ours, theirs)
    done, shown, _ = ours
    if row.tier == "drives":
        assert done[-1] != ("end", 18)
    else:
        assert shown
    if name != "a user's own":
        check_or_write_cell("huggingface", "guests", name, Cell("works", tier=row.tier.split()[0]))


def test_a_kubeflow_controller_receives_the_same_from_a_guest_as_in_its_framework(
    tmp_path: Path, kubeflow: FakeController, capsys: pytest.CaptureFixture[str]
) -> None:
    def sent() -> list[Any]:
        reports, kubeflow.sent = kubeflow.sent, []
        return [
            (each["progressPercentage"], numbers({part["name"]: part["value"] for part in each["metrics"]})) for each in reports
        ]

    ours, theirs = both(Row(KubeflowCallback, "reads state", is_own=True), tmp_path, capsys, sent)
    same(ours, theirs)
    assert [percent for percent, _ in ours[2]] == [0, 100]
    check_or_write_cell("huggingface", "guests", "KubeflowCallback", Cell("works", tier="reads"))
    assert {"loss", "grad_norm", "learning_rate", "epoch", "eval_loss", "train_loss"} <= ours[2][1][1].keys()


# --- states ---


class Fails(Callback):
    """Raises after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_step_end(self, ctx: Context) -> None:
        if ctx.step == self.step:
            raise ZeroDivisionError


class Counts(TrainerCallback, ExportableState):  # type: ignore[misc]
    """Counts steps, and exports the count in its state."""

    def __init__(self, start: int = 0) -> None:
        self.start, self.steps = start, 0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.steps += 1

    def state(self) -> dict[str, Any]:
        return {"args": {"start": self.start}, "attributes": {"steps": self.steps}}


def test_a_resume_restores_the_states_of_guests(tmp_path: Path) -> None:
    arguments = {**FLOW, "metric_for_best_model": "loss"}

    def made() -> list[Any]:
        return [
            guest(EarlyStoppingCallback(2, 0.05), args=arguments),
            guest(Counts(), args=arguments),
            CheckpointSaver(save_interval="2ba"),
        ]

    uninterrupted, *_ = whole = made()
    as_guests(tmp_path, *whole, epochs=3, name="uninterrupted")
    with pytest.raises(ZeroDivisionError):
        as_guests(tmp_path, *made(), Fails(9), epochs=3, name="broken")
    stopper, counter, _ = again = made()
    counter.foreign.start = 7
    trainer = as_guests(tmp_path, *again, epochs=3, name="broken", resume="auto", fits=False)
    assert trainer.state.timestamp.batch == counter.foreign.steps == 8
    assert stopper.state.best_metric == 3.0
    assert stopper.foreign.early_stopping_patience_counter == 1
    with trainer:
        trainer.fit()
    assert stopper.foreign.state() == uninterrupted.foreign.state()
    assert stopper.state.global_step == uninterrupted.state.global_step == 14
    same(stopper.state.log_history[:-1], uninterrupted.state.log_history[:-1])  # the last entry has the duration
    assert counter.foreign.steps == 14
    assert counter.foreign.start == 7  # the new instance keeps its own constructor arguments


def test_a_guest_receives_the_same_calls_in_a_second_run(tmp_path: Path) -> None:
    recorded = guest(RecordsCalls(), args=FLOW, eval_dataloader=EVALUATED)
    as_guests(tmp_path, recorded, name="one")
    once, recorded.foreign.recorded = recorded.foreign.recorded, []
    assert once
    as_guests(tmp_path, recorded, name="two")
    same(recorded.foreign.recorded, once)


# --- requests ---


class SetsFlags(TrainerCallback):  # type: ignore[misc]
    """Sets flags of its `TrainerControl` each time a certain event is fired."""

    def __init__(self, event: str, *flags: str) -> None:
        def set_them(args: Any, state: Any, control: Any, **_: Any) -> None:
            for flag in flags:
                setattr(control, flag, True)

        setattr(self, event, set_them)


def test_flags_at_events_where_the_framework_ignores_them_request_nothing(tmp_path: Path) -> None:
    flags = ("should_training_stop", "should_save", "should_evaluate", "should_log", "should_epoch_stop")
    for event, left in {"on_init_end": (), "on_train_begin": flags[1:], "on_epoch_begin": flags[1:], "on_train_end": ()}.items():
        done = CallsheetActions()
        as_guests(tmp_path, guest(SetsFlags(event, *(left or flags))), done, name=event, eval_interval=None)
        assert done.done == [("end", 12)], event


def test_a_stop_at_an_evaluation_outside_training_is_ignored(tmp_path: Path) -> None:
    hosted = guest(SetsFlags("on_evaluate", "should_training_stop"))
    trainer: Any = as_guests(tmp_path, hosted, fits=False)
    with trainer:
        trainer.model.batches.fill_(2)
        trainer.evaluate()
        assert [set(entry) for entry in hosted.state.log_history] == [{"eval_loss", "epoch", "step"}]
        trainer.model.batches.zero_()
        trainer.fit()
    assert trainer.state.timestamp.batch == 2  # the first evaluation of training
    assert trainer.run.outcome == "stopped"


def test_the_flow_callback_s_stop_flag_at_the_last_step_is_not_reported_as_a_stop(tmp_path: Path) -> None:
    trainer = as_guests(tmp_path, guest(DefaultFlowCallback(), args={**FLOW, "save_strategy": "no"}))
    assert trainer.state.timestamp.batch == 12
    assert trainer.run.outcome == "finished"


def test_save_strategy_best_saves_after_each_better_evaluation(tmp_path: Path) -> None:
    saved: list[tuple[int, str]] = []

    class RecordsCheckpoints(Callback):
        def on_checkpoint_published(self, ctx: Context) -> None:
            assert ctx.checkpoint is not None
            saved.append((ctx.checkpoint.step, ctx.checkpoint.kind))

    best = guest(
        EarlyStoppingCallback(9), args={"metric_for_best_model": "eval_loss", "save_strategy": "best", "eval_strategy": "steps"}
    )
    as_guests(tmp_path, best, RecordsCheckpoints())
    assert saved == [(2, "best"), (4, "best"), (6, "best"), (10, "best")]
    assert (best.state.best_metric, best.state.best_global_step) == (pytest.approx(2.9), 10)
    assert best.state.best_model_checkpoint.endswith("ep1-ba10")


def test_unsupported_requests_are_rejected(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ends_epoch = SetsFlags("on_step_end", "should_epoch_stop")
    with pytest.raises(NotSupported, match=r"SetsFlags set control\.should_epoch_stop, and an epoch cannot be ended early here"):
        as_guests(tmp_path, guest(ends_epoch), name="one")
    assert as_guests(tmp_path, guest(ends_epoch, strict=False), name="two").state.timestamp.batch == 12
    assert caplog.text.count("SetsFlags set control.should_epoch_stop") == 12
    logs = SetsFlags("on_step_end", "should_log")
    with pytest.raises(NotSupported, match=r"set control\.should_log after step 1, where no record is made"):
        as_guests(tmp_path, guest(logs), name="three")
    as_guests(tmp_path, guest(logs), name="four", log_interval=1)
    as_guests(tmp_path, guest(logs, strict=False), name="five")
    assert caplog.text.count("SetsFlags set control.should_log") == 6


def test_a_guest_that_listens_to_an_event_that_is_never_fired_is_rejected(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(
        NotSupported, match="TrackioCallback listens to on_push_begin of the Hugging Face Trainer, which callsheet does not fire"
    ):
        guest(TrackioCallback(), args={"push_to_hub": True})
    guest(TrackioCallback(), args={"push_to_hub": True}, strict=False)
    assert "TrackioCallback listens to on_push_begin" in caplog.text
    with pytest.raises(RegistrationError, match="not an instance of transformers"):
        guest(History())


class ReadsArguments(TrainerCallback):  # type: ignore[misc]
    """Records some of the arguments that it receives."""

    def __init__(self, *names: str) -> None:
        self.names = names
        self.read: dict[str, Any] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.read = {name: getattr(args, name) for name in self.names}
        self.whole, self.text, self.words = args.to_dict(), json.loads(args.to_json_string()), args.to_sanitized_dict()
        assert not hasattr(args, "fsdp")


def test_training_arguments_of_a_guest_come_from_the_run_and_the_user(tmp_path: Path) -> None:
    reads = ReadsArguments("output_dir", "run_name", "world_size", "should_log", "eval_strategy", "logging_steps", "weight_decay")
    as_guests(tmp_path, guest(reads, args={"weight_decay": 0.5, "run_name": "given"}), config={"seed": 4, "deep": {"more": 1}})
    assert reads.read == {
        "output_dir": str(tmp_path / "guest"),
        "run_name": "given",
        "world_size": 1,
        "should_log": True,
        "eval_strategy": "epoch",
        "logging_steps": 500,
        "weight_decay": 0.5,
    }
    assert reads.whole["deep"] == reads.text["deep"] == {"more": 1}
    assert reads.text["eval_strategy"] == "epoch"
    assert reads.words["deep"] == "{'more': 1}"
    whole: Any = ReadsArguments("weight_decay", "output_dir", "eval_strategy", "run_name")
    whole_arguments = TrainingArguments(output_dir=str(tmp_path / "given"), weight_decay=0.25, report_to=[], use_cpu=True)
    whole.on_train_begin = lambda args, *_, **__: setattr(whole, "read", {name: getattr(args, name) for name in whole.names})
    as_guests(tmp_path, guest(whole, args=whole_arguments), name="whole")
    assert whole.read == {"weight_decay": 0.25, "output_dir": str(tmp_path / "given"), "eval_strategy": "no", "run_name": None}


class ReadsTrackerValues(TrainerCallback):  # type: ignore[misc]
    """Reads what trackers read at the start, as CodeCarbon's and SwanLab's callbacks do."""

    resumed: Any = None

    def on_init_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        assert Path(args.output_dir).is_dir()
        self.rate, self.resumed = args.learning_rate, args.resume_from_checkpoint
        self.rest = (args.weight_decay, args.n_gpu, args.parallel_mode.value, args.local_rank, args.save_total_limit)
        assert {"learning_rate", "resume_from_checkpoint", "report_to"} <= args.to_dict().keys()


def test_values_that_trackers_read_at_the_start_are_available(tmp_path: Path) -> None:
    reads = ReadsTrackerValues()
    trainer = as_guests(tmp_path, guest(reads), CheckpointSaver(save_interval="3ba"))
    assert trainer.optimizer is not None
    first = trainer.optimizer.param_groups[0]
    assert reads.rate == first.get("initial_lr", first["lr"])
    assert [reads.resumed] == [None]
    assert reads.rest == (first["weight_decay"], 0, "not_parallel", 0, None)
    as_guests(tmp_path, guest(reads), CheckpointSaver(save_interval="3ba"), epochs=3, resume="auto")
    assert reads.resumed is not None
    assert Path(reads.resumed).is_dir()
    as_guests(tmp_path, guest(reads, args={"output_dir": str(tmp_path / "given" / "there")}), name="third")


def test_trackio_s_own_callback_writes_the_logged_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    for module in [module for name, module in sys.modules.items() if name.partition(".")[0] == "trackio"]:
        for name, inside in {"TRACKIO_DIR": "", "MEDIA_DIR": "media", "ARTIFACTS_DIR": "artifacts"}.items():
            if isinstance(vars(module).get(name), Path):  # Trackio has set the folder at its import
                monkeypatch.setattr(module, name, tmp_path / "trackio" / inside)
    as_guests(tmp_path, guest(TrackioCallback(), args={"project": "small"}))
    assert trackio.context_vars.current_run.get() is None
    logged = SQLiteStorage.get_logs("small", "guest")
    assert [entry["train/global_step"] for entry in logged if "train/loss" in entry]


def test_unknown_and_unsupported_arguments_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(NotSupported, match="transformers' TrainingArguments has here no 'fsdp': a guest may use"):
        as_guests(tmp_path, guest(ReadsArguments("fsdp")))
    with pytest.raises(ConfigError, match="unknown training argument 'metric_for_best'; did you mean 'metric_for_best_model'"):
        guest(ReadsArguments(), args={"metric_for_best": "loss"})
    with pytest.raises(ConfigError, match="unknown eval_strategy 'step'"):
        guest(ReadsArguments(), args={"eval_strategy": "step"})

    class Writes(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            args.run_name = None

    with pytest.raises(NotSupported, match="a guest may not write 'run_name'"):
        as_guests(tmp_path, guest(Writes()), name="writes")


# --- other loops and other data ---


def test_metrics_of_several_datasets_have_the_datasets_names(tmp_path: Path) -> None:
    received: list[dict[str, float]] = []

    class RecordsMetrics(TrainerCallback):  # type: ignore[misc]
        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:
            received.append(metrics)

    several = {"short": DataLoader(DATA[:4], batch_size=4), "validation": EVALUATED}  # type: ignore[arg-type]
    model = Line()
    optimizer, _ = optimizers(model)
    best = guest(RecordsMetrics(), args={"metric_for_best_model": "short_loss"})
    with Trainer(
        model, OwnLoss(), EVALUATED, several, optimizer=optimizer, callbacks=best, run_name="several", runs_folder=tmp_path
    ) as trainer:
        trainer.fit()
    assert received == [{"eval_short_loss": 5.0, "epoch": 1.0}, {"eval_validation_loss": 5.0, "epoch": 1.0}]
    assert best.state.best_metric == 5.0


def test_trainer_test_and_predict_call_the_hooks_for_predictions(tmp_path: Path) -> None:
    recorded: list[tuple[str, Any]] = []

    class RecordsPredictions(TrainerCallback):  # type: ignore[misc]
        def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            recorded.append(("step", None))

        def on_predict(self, args: Any, state: Any, control: Any, metrics: Any, **_: Any) -> None:
            recorded.append(("predict", metrics))

    trainer: Any = as_guests(tmp_path, guest(RecordsPredictions()), fits=False)
    with trainer:
        trainer.model.batches.fill_(2)
        trainer.test(EVALUATED)
        trainer.predict(EVALUATED)
    assert recorded == [*[("step", None)] * 2, ("predict", {"test_loss": 5.0}), *[("step", None)] * 2, ("predict", {})]
