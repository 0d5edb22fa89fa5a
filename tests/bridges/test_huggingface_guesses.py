"""Actions of a transformers Trainer, its subclasses and users' callbacks that a host could misinterpret."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer as HuggingFaceTrainer
from transformers import TrainerCallback, TrainingArguments

from callsheet import Callback, Context
from callsheet.bridges.huggingface import host
from callsheet.callbacks import EMA, CheckpointSaver, EarlyStopper, History, NaNMonitor, SpeedMonitor
from callsheet.testing import Recorder, check_events

from .test_huggingface import ROWS, Line, Points, trainer, weights

pytestmark = pytest.mark.usefixtures("one_thread")

EVENTS = [name for name in vars(TrainerCallback) if name.startswith("on_")]


class CallsModel(TrainerCallback):  # type: ignore[misc]  # transformers' types are not read
    """A user's callback that calls the model at every event of the Trainer, and then restores the model's mode."""

    def __init__(self) -> None:
        self.calls = 0

    def _call_model(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if model is None:
            return
        self.calls += 1
        was_training = model.training
        model.eval()
        with torch.no_grad():
            model(x=Points(4).x)
        model.train(was_training)


for _event in EVENTS:
    setattr(CallsModel, _event, CallsModel._call_model)


def logged(trained: Any) -> list[dict[str, float]]:
    """Return what the Trainer has logged, without times."""
    return [
        {name: value for name, value in entry.items() if not name.endswith(("runtime", "per_second"))}
        for entry in trained.state.log_history
    ]


OPTIONS: dict[str, Any] = {
    "eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps", "save_steps": 3, "logging_steps": 1,
    "gradient_accumulation_steps": 2,
}  # fmt: skip


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("averages", [False, True])
def test_a_callback_that_calls_the_model_at_every_event_starts_no_evaluation(
    averages: bool, is_first: bool, tmp_path: Path
) -> None:
    caller, recorder, history = CallsModel(), Recorder(fields=("batch",)), History()
    hosted = host([recorder, history, *([EMA(half_life=2, at_end=False)] if averages else [])])
    ours = trainer(tmp_path / "ours", [caller, hosted] if is_first else [hosted, caller], eval_on_start=True, **OPTIONS)
    ours.train()
    plain = trainer(tmp_path / "plain", [CallsModel()], eval_on_start=True, **OPTIONS)
    plain.train()
    assert caller.calls > 40
    assert all(torch.equal(a, b) for a, b in zip(weights(ours), weights(plain), strict=True))
    losses = [[entry["loss"] for entry in logged(each) if "loss" in entry] for each in (ours, plain)]
    assert losses[0] == losses[1]
    check_events(recorder.events)
    assert recorder.events.count("on_eval_all_end") == 3  # before training, and at steps 3 and 6
    assert recorder.events.count("on_eval_forward_end") == 3
    assert all("labels" in batch for event, batch in recorder.values["batch"] if event.startswith("on_eval_forward"))
    if not averages:
        assert logged(ours) == logged(plain)


class Evaluates(TrainerCallback):  # type: ignore[misc]
    """A user's callback that has a reference to the Trainer, and evaluates and predicts at every event."""

    trainer: Any = None

    def __init__(self, method: str) -> None:
        self.method = method
        self.is_in = False

    def _do(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.trainer is None or self.is_in:
            return
        self.is_in, was_training = True, self.trainer.model.training
        kept = copy.copy(control)
        getattr(self.trainer, self.method)(*([Points(4)] if self.method == "predict" else []))
        self.trainer.model.train(was_training)
        vars(control).update(vars(kept))
        self.is_in = False


for _event in EVENTS:
    setattr(Evaluates, _event, Evaluates._do)


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("method", ["evaluate", "predict"])
def test_evaluations_that_a_callback_makes_change_neither_event_order_nor_weights(
    method: str, is_first: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def trained(folder: Path, *hosts: Any) -> Any:
        user = Evaluates(method)
        made = trainer(folder, [user, *hosts] if is_first else [*hosts, user], **OPTIONS)
        user.trainer = made
        made.train()
        return made

    recorder = Recorder()
    with caplog.at_level(logging.WARNING, "callsheet"):
        ours = trained(tmp_path / "ours", host([recorder, EMA(half_life=2, at_end=False), SpeedMonitor(), CheckpointSaver()]))
    plain = trained(tmp_path / "plain")
    assert all(torch.equal(a, b) for a, b in zip(weights(ours), weights(plain), strict=True))
    check_events(recorder.events)
    if method == "predict":
        assert recorder.events.count("on_eval_all_end") == 2
    else:
        assert recorder.events.count("on_eval_all_end") > 2
        recorded = [record.message for record in caplog.records if "is not reported" in record.message]
        assert len(recorded) == len(set(recorded)) > 0


class TwoForwards(HuggingFaceTrainer):  # type: ignore[misc]
    """R-Drop regularization: the model is called twice per batch, and the loss is computed from both outputs."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        one, other = model(**inputs), model(**inputs)
        loss = (one["loss"] + other["loss"]) / 2 + (one["logits"] - other["logits"]).square().mean()
        return (loss, one) if return_outputs else loss


class ForwardInBackward(HuggingFaceTrainer):  # type: ignore[misc]
    """A cached loss: the model is called with gradients only during the loss's backward pass."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        with torch.no_grad():
            logits = model(x=inputs["x"])["logits"]
        if not model.training:
            return (
                ((logits - inputs["labels"]).square().mean(), {"logits": logits})
                if return_outputs
                else (logits - inputs["labels"]).square().mean()
            )
        logits.requires_grad_()
        loss = (logits - inputs["labels"]).square().mean()

        def again(gradient: torch.Tensor) -> None:
            with torch.enable_grad():
                (model(x=inputs["x"])["logits"] * gradient).sum().backward()

        logits.register_hook(again)
        return loss


def train_with_class(kind: type, folder: Path, callbacks: list[Any], **options: Any) -> Any:
    torch.manual_seed(0)
    given: dict[str, Any] = {
        "num_train_epochs": 2, "per_device_train_batch_size": 4, "report_to": [], "disable_tqdm": True, "use_cpu": True,
        "learning_rate": 0.01, **OPTIONS, **options,
    }  # fmt: skip
    arguments = TrainingArguments(str(folder), **given)
    made = kind(Line(), arguments, train_dataset=Points(), eval_dataset=Points(8), callbacks=callbacks)
    made.train()
    return made


class ReadsMicrobatch(Callback):
    """Reads the fields of a microbatch at each of its events."""

    def __init__(self) -> None:
        self.read: list[str] = []

    def _read(self, ctx: Context) -> None:
        self.read.append(f"{sorted(ctx.microbatch)} {sorted(ctx.batch)}")

    on_microbatch_start = on_forward_start = on_loss_start = on_backward_start = on_microbatch_end = _read

    def on_forward_end(self, ctx: Context) -> None:
        self._read(ctx)
        assert ctx.outputs is None or "logits" in ctx.outputs

    def on_loss_end(self, ctx: Context) -> None:
        assert ctx.loss.dim() == 0


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("kind", [TwoForwards, ForwardInBackward])
def test_several_forward_passes_of_a_batch_are_one_microbatch(kind: type, strict: bool, tmp_path: Path) -> None:
    recorder, history, reads = Recorder(fields=("batch",)), History(), ReadsMicrobatch()
    hosted = host([recorder, history, reads, NaNMonitor(), SpeedMonitor()], strict=strict)
    ours = train_with_class(kind, tmp_path / "ours", [hosted])
    plain = train_with_class(kind, tmp_path / "plain", [])
    assert all(torch.equal(a, b) for a, b in zip(weights(ours), weights(plain), strict=True))
    assert logged(ours) == logged(plain)
    check_events(recorder.events)
    assert recorder.events.count("on_microbatch_end") == recorder.events.count("on_forward_end") == 2 * ROWS // 4
    assert recorder.events.count("on_train_step_end") == 6
    assert set(reads.read) == {"['labels', 'x'] ['labels', 'x']"}
    losses = [entry["loss"] for entry in logged(plain) if "loss" in entry]
    assert history["train/loss"][: len(losses)] == pytest.approx(losses, rel=1e-5)
    samples = [values["time/sample"] for _, values in history.records if "time/sample" in values]
    assert samples[-1] == 2 * ROWS  # each sample is counted once


def test_samples_of_several_forward_passes_are_counted_once_without_listeners(tmp_path: Path) -> None:
    history = History()
    train_with_class(TwoForwards, tmp_path, [host(history)])
    assert history.records[-1][1]["time/sample"] == 2 * ROWS


class Counts(TrainerCallback):  # type: ignore[misc]
    """Records the steps at which the Trainer wrote a checkpoint."""

    def __init__(self) -> None:
        self.written: list[int] = []

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.written.append(state.global_step)


class Stops(Callback):
    """Stops at a step."""

    def on_train_step_end(self, ctx: Context) -> None:
        if ctx.step == 3:
            ctx.control.stop("seen")


SAVERS: Mapping[str, tuple[Any, dict[str, Any], list[int]]] = {
    "the saver alone": (lambda: [CheckpointSaver(save_interval="3ba")], {"save_strategy": "no"}, [3, 6]),
    "both": (lambda: [CheckpointSaver(save_interval="3ba")], {}, [3, 6]),
    "the Trainer alone": (list, {}, [3, 6]),
    "the best": (
        lambda: [CheckpointSaver(save_interval=None, monitor="validation/loss")],
        {"save_strategy": "no", "learning_rate": 0.001},
        [3, 6],
    ),
    "the saver, evaluated at the epoch's end": (
        lambda: [CheckpointSaver(save_interval="3ba", monitor="validation/loss")],
        {"save_strategy": "no", "eval_strategy": "epoch"},
        [3, 6],
    ),
    "the last, evaluated at the epoch's end": (
        lambda: [CheckpointSaver(save_interval="2ba", monitor="validation/loss")],
        {"save_strategy": "no", "eval_strategy": "epoch"},
        [2, 3, 4, 6],
    ),
    "before the evaluation": (
        lambda: [CheckpointSaver(save_interval="3ba", before_eval=True, monitor="validation/loss")],
        {"save_strategy": "no"},
        [3, 6],
    ),
    "a stop": (lambda: [CheckpointSaver(save_interval="3ba"), Stops()], {}, [3]),
    "an early stop": (
        lambda: [
            CheckpointSaver(save_interval="2ba"),
            EarlyStopper(monitor="validation/loss", patience=1, min_delta=9.0),
        ],
        {"save_strategy": "no", "eval_steps": 2},
        [2, 4],
    ),
    "what the Trainer finds best": (  # saving the best model resets the save request of step 4, which the host then repeats
        lambda: [CheckpointSaver(save_interval="2ba")],
        {"save_strategy": "best", "metric_for_best_model": "loss", "greater_is_better": True, "eval_steps": 2, "learning_rate": 0.001},
        [2, 5, 6],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SAVERS)
def test_an_evaluation_and_a_save_at_one_step_write_one_checkpoint(name: str, tmp_path: Path) -> None:
    made, options, steps = SAVERS[name]
    recorder, counts = Recorder(fields=("checkpoint",)), Counts()
    train_with_class(HuggingFaceTrainer, tmp_path, [host([recorder, EMA(half_life=2), *made()]), counts], **options)
    check_events(recorder.events)
    assert counts.written == steps
    published = [info.step for event, info in recorder.values["checkpoint"] if event == "on_checkpoint_published"]
    assert sorted(set(published)) == steps
    for step in steps:
        assert (tmp_path / f"checkpoint-{step}" / "callsheet").is_dir()
    for at in (at for at, event in enumerate(recorder.events) if event == "on_checkpoint_save_start"):
        assert recorder.events[at - 1] == "on_checkpoint_due"


def test_the_trained_weights_are_restored_after_a_failed_evaluation(tmp_path: Path) -> None:
    class Fails(TwoForwards):
        def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
            super().prediction_step(*args, **kwargs)
            raise ZeroDivisionError

        def evaluate(self, *args: Any, **kwargs: Any) -> Any:
            try:
                return super().evaluate(*args, **kwargs)
            except ZeroDivisionError:
                return {"eval_loss": 1.0}

    recorder = Recorder(fields=("eval_results",))
    ours = train_with_class(Fails, tmp_path / "ours", [host([recorder, EMA(half_life=2, at_end=False)])])
    plain = train_with_class(Fails, tmp_path / "plain", [])
    assert all(torch.equal(a, b) for a, b in zip(weights(ours), weights(plain), strict=True))
    check_events(recorder.events)
    found = [results for event, results in recorder.values["eval_results"] if event == "on_eval_all_end"]
    assert found == [{"validation": {"loss": 1.0}}] * 4  # the Trainer tries a failed evaluation again at the epoch's end


def test_the_trained_weights_are_restored_if_an_evaluation_ends_train(tmp_path: Path) -> None:
    class Fails(HuggingFaceTrainer):  # type: ignore[misc]
        def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
            super().prediction_step(*args, **kwargs)
            before.extend(weights(self))
            raise ZeroDivisionError

    before: list[torch.Tensor] = []
    seen: list[Any] = []

    class KeepsTrainedWeights(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            seen[:] = [model, [value.clone() for value in model.state_dict().values()]]

    recorder = Recorder()
    with pytest.raises(ZeroDivisionError):
        train_with_class(Fails, tmp_path, [host([recorder, EMA(half_life=2)]), KeepsTrainedWeights()])
    model, trained = seen
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), trained, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(before, trained, strict=True))
    assert recorder.events.count("on_eval_all_end") == 1


def test_no_hooks_and_methods_are_left_on_the_trainer(tmp_path: Path) -> None:
    trained = trainer(tmp_path, [host([Recorder()]), host([History()])])
    before = set(vars(trained))
    trained.train()
    assert not {"evaluate", "prediction_step", "training_step", "compute_loss"} & (set(vars(trained)) - before)
    assert not trained.model._forward_pre_hooks


def test_events_are_in_order_if_a_framework_fires_them_without_a_trainer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Some frameworks fire a TrainerCallback's events without a Trainer."""
    from transformers import TrainerControl, TrainerState

    model, recorder, points = Line(), Recorder(), Points(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hosted = host([recorder, EMA(half_life=1, at_end=False)])
    args, state, control = (
        TrainingArguments(str(tmp_path), use_cpu=True, report_to=[]),
        TrainerState(max_steps=4),
        TrainerControl(),
    )
    state.logging_steps = 1

    def fire(event: str, **more: Any) -> None:
        getattr(hosted, event)(args, state, control, model=model, optimizer=optimizer, **more)

    with caplog.at_level(logging.WARNING, "callsheet"):
        fire("on_train_begin")
        fire("on_epoch_begin")
        for _ in range(4):
            fire("on_step_begin")
            model(points.x, points.x.sum(-1))["loss"].backward()
            fire("on_pre_optimizer_step")
            optimizer.step()
            before = [value.clone() for value in model.state_dict().values()]
            fire("on_optimizer_step")
            state.global_step += 1
            fire("on_step_end")
            model.eval()
            model(x=Points(4).x)
            model.train()
            fire("on_prediction_step")
            fire("on_evaluate", metrics={"eval_loss": 1.0})
            fire("on_evaluate", metrics={"eval_loss": 1.0})
            assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), before, strict=True))
        fire("on_epoch_end")
        fire("on_train_end")
    check_events(recorder.events)
    assert recorder.events.count("on_train_step_end") == 4
    assert recorder.events.count("on_eval_all_end") == 4
    assert len({record.message for record in caplog.records}) == len(caplog.records)
