"""callsheet's callbacks in a real transformers Trainer."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer as HuggingFaceTrainer
from transformers import TrainingArguments

from callsheet import Callback, Context, NotCarried
from callsheet.bridges.huggingface import host
from callsheet.callbacks import EMA, EarlyStopper, History, LRMonitor, NaNMonitor, OptimizerMonitor, SpeedMonitor
from callsheet.loggers import JSONLLogger, read_metrics
from callsheet.testing import Recorder, check_events

ROWS = 24


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
        said = self.head(self.dropout(self.body(x))).squeeze(-1)
        return {"loss": (said - labels).square().mean(), "logits": said} if labels is not None else {"logits": said}


def trainer(folder: Path, callbacks: list[Any], **options: Any) -> Any:
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
    evaluated = {"eval_dataset": Points(8)} if given.get("eval_strategy", "no") != "no" else {}
    return HuggingFaceTrainer(Line(), arguments, train_dataset=Points(), callbacks=callbacks, **evaluated)


def weights(of: Any) -> list[torch.Tensor]:
    return [value.clone() for value in of.model.state_dict().values()]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_it_trains_what_it_trained_and_tells_every_event(accumulate: int, tmp_path: Path) -> None:
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


class Asks(Callback):
    """Asks for something at a step."""

    def __init__(self, what: str, step: int) -> None:
        self.what, self.step = what, step

    def on_train_step_end(self, ctx: Context) -> None:
        if ctx.step == self.step:
            getattr(ctx.control, self.what)("asked")


class Fails(Callback):
    """Fails at a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_step_end(self, ctx: Context) -> None:
        if ctx.step == self.step:
            raise ZeroDivisionError


def test_requests_are_the_trainer_s_to_carry_out(tmp_path: Path) -> None:
    recorder = Recorder(fields=("checkpoint",))
    trained = trainer(
        tmp_path, [host([Asks("save", 2), Asks("evaluate", 3), Asks("stop", 7), recorder])], eval_strategy="steps", eval_steps=100
    )
    trained.train()
    assert trained.state.global_step == 7
    assert (tmp_path / "out" / "checkpoint-2" / "callsheet").is_dir()
    told = [(event, info.step, info.kind) for event, info in recorder.values["checkpoint"] if info is not None]
    assert ("on_checkpoint_published", 2, "requested") in told
    assert recorder.events.count("on_eval_all_end") == 1
    check_events(recorder.events)


def test_the_callbacks_states_are_in_its_checkpoints(tmp_path: Path) -> None:
    whole = History()
    unbroken = trainer(tmp_path / "whole", [host([whole])])
    unbroken.train()
    with pytest.raises(ZeroDivisionError):
        trainer(tmp_path, [host([History(), Fails(8)])], save_strategy="steps", save_steps=7).train()
    history, recorder = History(), Recorder()
    again = trainer(tmp_path, [host([history, recorder])])
    again.train(resume_from_checkpoint=True)
    assert recorder.told[-1].batch == again.state.global_step == 12
    assert history["train/loss"] == pytest.approx(whole["train/loss"])
    assert all(torch.equal(a, b) for a, b in zip(weights(again), weights(unbroken), strict=True))
    check_events(recorder.events)


def test_an_early_stop_stops_it(tmp_path: Path) -> None:
    class Worse(Callback):
        phase = "change"

        def on_eval_forward_end(self, ctx: Context) -> None:
            ctx.outputs = {**ctx.outputs, "loss": torch.tensor(float(ctx.step))}

    stopper = EarlyStopper(monitor="validation/loss", patience="1ep")
    trained = trainer(tmp_path, [host([Worse(), stopper])], eval_strategy="epoch", num_train_epochs=9)
    trained.train()
    assert trained.state.epoch < 5


def test_an_average_is_evaluated_and_not_trained_with(tmp_path: Path) -> None:
    seen: list[bool] = []

    class Looks(Callback):
        def on_eval_forward_end(self, ctx: Context) -> None:
            seen.append(torch.equal(ctx.model.head.weight, before["weight"]))

        def on_train_step_end(self, ctx: Context) -> None:
            before["weight"] = ctx.model.head.weight.detach().clone()

    before: dict[str, torch.Tensor] = {}
    averaged = trainer(tmp_path, [host([EMA(half_life=3), Looks()])], eval_strategy="epoch")
    averaged.train()
    plain = trainer(tmp_path, [], eval_strategy="epoch")
    plain.train()
    assert seen == [False, False]
    losses = [[entry["eval_loss"] for entry in each.state.log_history if "eval_loss" in entry] for each in (averaged, plain)]
    assert losses[0] != losses[1]
    assert averaged.state.log_history[0]["loss"] == plain.state.log_history[0]["loss"]


def test_a_logger_writes_into_the_trainer_s_folder(tmp_path: Path) -> None:
    trainer(tmp_path, [host([JSONLLogger()])]).train()
    steps = [record.step for record in read_metrics(tmp_path / "out")]
    assert steps == [2, 4, 6, 8, 10, 12, 12]  # the last holds what the Trainer logged after its last step


def test_what_the_trainer_never_tells_is_refused(tmp_path: Path) -> None:
    class Hears(Callback):
        def on_predict_end(self, ctx: Context) -> None: ...

    with pytest.raises(NotCarried, match="Hears hears on_predict_end, and the Hugging Face Trainer never tells it"):
        trainer(tmp_path, [host([Hears()])]).train()
    trainer(tmp_path, [host([Hears()], strict=False)]).train()


def test_a_run_that_an_exception_left_has_failed(tmp_path: Path) -> None:
    class Ends(Callback):
        phase = "report"
        outcome = ""

        def on_run_end(self, ctx: Context) -> None:
            Ends.outcome = str(ctx.run.outcome)

    trained = trainer(tmp_path, [host([Fails(2), Ends()])])
    with pytest.raises(ZeroDivisionError):
        trained.train()
    assert Ends.outcome == "failed"
    Ends.outcome = ""
    trained = trainer(tmp_path, [host([Ends()])])
    trained.train_dataset.x = trained.train_dataset.x[:, :2]  # the model fails, and the Trainer tells nobody
    with pytest.raises(RuntimeError):
        trained.train()
    assert Ends.outcome == ""
    del trained
    gc.collect()
    assert Ends.outcome == "failed"


def test_train_may_be_called_again(tmp_path: Path) -> None:
    recorder = Recorder()
    trained = trainer(tmp_path, [host([recorder])])
    trained.train()
    trained.train()
    assert recorder.events.count("on_run_start") == recorder.events.count("on_run_end") == 2
    assert not trained.model._forward_hooks
