"""Bad input is rejected immediately, with an error that names it and gives a hint."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ChainedScheduler, ConstantLR, LRScheduler, OneCycleLR, SequentialLR
from torch.utils.data import DataLoader, TensorDataset

from callsheet import Callback, CallsheetError, Context, Outcome, Trainer
from callsheet.callbacks import History, Lambda
from callsheet.core.familiar_names import TRAINER_ARGUMENTS
from callsheet.errors import ConfigError, NotACallbackError, RequestRejected
from callsheet.loggers import JSONLLogger
from callsheet.testing import Recorder, check_events
from callsheet.trainer import Task
from callsheet.trainer.microbatches import split

Batch = tuple[Tensor, Tensor]


def some_data(batches: int = 2) -> list[Batch]:
    return [(torch.ones(3, 2), torch.ones(3, 1))] * batches


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def trainer_of(folder: Path, **changes: Any) -> Trainer:
    arguments: dict[str, Any] = {
        "model": nn.Linear(2, 1),
        "task": mse_loss,
        "train_dataloader": some_data(),
        "optimizer": sgd,
        "runs_folder": folder,
        "run_name": "bad",
    }
    return Trainer(**(arguments | changes))


def stream() -> Iterator[Batch]:
    yield from some_data()


class EmptyIterable:
    """An empty iterable of unknown length."""

    def __iter__(self) -> Iterator[Batch]:
        return iter(())


empty_loader: DataLoader[tuple[Tensor, ...]] = DataLoader(
    TensorDataset(torch.ones(3, 2), torch.ones(3, 1)), batch_size=4, drop_last=True
)
other_model = nn.Linear(2, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "gpt2"}, r"model is str, not a torch\.nn\.Module"),
        ({"model": nn.Linear}, r"model is type, not a torch\.nn\.Module"),
        ({"train_dataloader": empty_loader}, r"train_dataloader has no batches; is the dataset empty, or smaller than a batch"),
        ({"train_dataloader": []}, r"train_dataloader has no batches"),
        ({"train_dataloader": list}, r"train_dataloader has no batches"),
        ({"train_dataloader": stream()}, r"train_dataloader is an iterator.*give a dataloader, a list, or a function"),
        ({"train_dataloader": itertools.repeat(stream()).__next__}, r"train_dataloader is an iterator"),
        ({"train_dataloader": 3}, r"train_dataloader is int, which cannot be iterated over; give a dataloader"),
        ({"eval_dataloader": []}, r"eval_dataloader.* has no batches"),
        ({"eval_dataloader": {"good": some_data(), "poor": stream()}}, r"eval_dataloader 'poor' is an iterator"),
        ({"max_duration": 0}, r"max_duration=0: give more than 0 epochs"),
        ({"max_duration": "-3ba"}, r"max_duration='-3ba': give more than 0"),
        ({"max_duration": "0.5dur"}, r"max_duration='0\.5dur'"),
        ({"max_duration": "3iter"}, r"max_duration='3iter' counts rounds.*epochs_per_round"),
        ({"microbatch_size": 0}, r"microbatch_size=0: give a whole number above 0, or None"),
        ({"microbatch_size": -2}, r"microbatch_size=-2"),
        ({"clip_grad_norm": 0}, r"clip_grad_norm=0: give a number above 0, or None"),
        ({"clip_grad_norm": float("nan")}, r"clip_grad_norm=nan"),
        ({"timeout_seconds": float("inf")}, r"timeout_seconds=inf: give a finite number above 0"),
        ({"epochs_per_round": 0}, r"epochs_per_round=0"),
        ({"log_interval": "10sec"}, r"log_interval='10sec': give batches, epochs or rounds"),
        ({"log_interval": "1m"}, r"log_interval='1m'"),
        ({"log_interval": "0.1dur"}, r"log_interval='0\.1dur'"),
        ({"log_interval": "100sp"}, r"log_interval='100sp'"),
        ({"run_name": "a/b"}, r"run_name='a/b' must be a plain name"),
        ({"run_name": 3}, "run_name=3 must be a plain name"),
        ({"runs_folder": 3}, "^runs_folder=3: give the path of a folder"),
        ({"checkpoints_folder": 3}, "^checkpoints_folder=3: give the path of a folder"),
        ({"run_name": ""}, r"run_name='' must be a plain name"),
        ({"run_name": "é" * 101}, r"run_name='é{40}'\.\.\. is longer than 200 bytes; give a shorter one"),
        ({"run_name": "/tmp"}, r"run_name='/tmp' must be a plain name"),
        ({"run_name": "."}, r"run_name='\.' must be a plain name"),
        ({"optimizer": None, "scheduler": lambda optimizer: None}, r"a scheduler needs an optimizer"),
        ({"optimizer": sgd(list(other_model.parameters()))}, r"the optimizer holds parameters that are not the model's.*lambda"),
        ({"optimizer": "adamw"}, r"optimizer='adamw': give a torch optimizer, or a function of the parameters, such as lambda"),
        ({"optimizer": lambda parameters: "adam"}, r"optimizer is or returned str; give a torch optimizer, or a function"),
        (
            {"optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=-1.0)},
            r"^optimizer: it cannot be created: ValueError: Invalid learning rate: -1\.0; give other arguments",
        ),
        ({"optimizer": torch.optim.LBFGS}, r"^optimizer: LBFGS needs a closure .* give another optimizer"),
        (
            {"scheduler": lambda optimizer: OneCycleLR(optimizer, max_lr=0.1, total_steps=-1)},
            r"^scheduler: it cannot be created: ValueError: Expected positive integer total_steps",
        ),
        ({"task": None}, r"task=None: give a loss function of \(outputs, targets\)"),
        ({"task": nn.MSELoss}, r"task=.*MSELoss.*give a loss function"),
        ({"task": "mse"}, r"task='mse'"),
        ({"preempt_signals": ["SIGWINTER"]}, r"no signal 'SIGWINTER'"),
        ({"preempt_signals": "SIGWINTER"}, r"no signal 'SIGWINTER'"),
    ],
)
def test_the_constructor_rejects_an_invalid_argument(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        trainer_of(tmp_path, **changes)
    assert not any(tmp_path.iterdir())


def test_a_generator_function_is_called_again_for_each_epoch(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, train_dataloader=stream, eval_dataloader=stream, max_duration="2ep")
    trainer.fit()
    assert trainer.state.timestamp.batch == 2 * len(list(stream()))
    assert trainer.state.timestamp.epoch == 2
    assert set(trainer.eval_results) == {"validation"}


def lazy_batches() -> Iterator[Any]:
    for index in torch.randperm(3).tolist():
        yield torch.full((2, 2), float(index)), torch.ones(2, 1)


def eager_batches() -> Iterator[Any]:
    return iter(list(lazy_batches()))


@pytest.mark.parametrize("batches", [lazy_batches, eager_batches])
def test_a_resumed_run_gets_the_batches_of_a_function_that_draws_their_order(
    batches: Callable[[], Iterator[Any]], tmp_path: Path
) -> None:
    def losses(folder: Path, duration: str, resume: str | None = None) -> list[float]:
        history = History()
        torch.manual_seed(0)
        changes = {"train_dataloader": batches, "max_duration": duration, "seed": 1, "run_name": "a", "log_interval": 1}
        with trainer_of(folder, callbacks=[history], resume=resume, **changes) as trainer:
            trainer.fit()
            trainer.save_checkpoint()
        return history["train/loss"]

    whole = losses(tmp_path / "whole", "9ba")
    assert losses(tmp_path / "cut", "4ba") == whole[:4]
    assert losses(tmp_path / "cut", "9ba", resume="auto")[-5:] == whole[4:]


@pytest.mark.parametrize(("max_duration", "steps"), [("5ba", 5), ("3ep", 6)])
def test_a_schedule_that_ends_before_the_run_causes_a_warning_before_the_first_step(
    max_duration: str, steps: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def trainer(total_steps: int, *callbacks: Callback) -> Trainer:
        return trainer_of(
            tmp_path / str(total_steps),
            max_duration=max_duration,
            scheduler=lambda optimizer: OneCycleLR(optimizer, max_lr=0.1, total_steps=total_steps),
            callbacks=callbacks,
        )

    warning = f"OneCycleLR raises an error after 4 steps, and the run takes {steps} (max_duration={max_duration}); give total_steps={steps}"
    with trainer(4) as short, pytest.raises(ValueError, match="Tried to step"):
        short.fit()
    assert warning in caplog.text
    caplog.clear()
    with trainer(4, Lambda(on_train_step_end=lambda ctx: ctx.control.stop("enough") if ctx.step == 3 else None)) as stopped:
        stopped.fit()
    assert warning in caplog.text
    caplog.clear()
    with trainer(steps) as whole:
        whole.fit("1ep")
        whole.fit(max_duration)
        assert whole.state.timestamp.batch == steps
    assert "OneCycleLR" not in caplog.text


def _chained(optimizer: Optimizer, total_steps: int) -> LRScheduler:
    return ChainedScheduler([ConstantLR(optimizer), OneCycleLR(optimizer, 0.1, total_steps)], optimizer)


def _first(optimizer: Optimizer, total_steps: int) -> LRScheduler:
    return SequentialLR(optimizer, [OneCycleLR(optimizer, 0.1, total_steps), ConstantLR(optimizer)], [4])


def _last(optimizer: Optimizer, total_steps: int) -> LRScheduler:
    return SequentialLR(optimizer, [ConstantLR(optimizer), OneCycleLR(optimizer, 0.1, total_steps)], [2])


@pytest.mark.parametrize(("make", "possible", "needed"), [(_chained, 2, 6), (_first, 2, 3), (_last, 4, 4)])
def test_a_short_schedule_within_another_causes_a_warning_before_the_first_step(
    make: Callable[[Optimizer, int], LRScheduler],
    possible: int,
    needed: int,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def trainer(total_steps: int) -> Trainer:
        return trainer_of(
            tmp_path / str(total_steps), max_duration="6ba", scheduler=lambda optimizer: make(optimizer, total_steps)
        )

    with trainer(2) as short, pytest.raises(ValueError, match="Tried to step"):
        short.fit()
    assert short.state.timestamp.batch == possible
    assert (
        f"OneCycleLR raises an error after {possible} steps, and the run takes 6 (max_duration=6ba); give total_steps={needed}"
        in caplog.text
    )
    caplog.clear()
    with trainer(needed) as whole:
        whole.fit("3ba")
        whole.fit("6ba")
    assert "OneCycleLR" not in caplog.text
    assert whole.state.timestamp.batch == 6


@pytest.mark.parametrize("argument", ["log_interval", "eval_interval", "max_duration"])
@pytest.mark.parametrize("value", ["10xx", "ten", 2.5, True])
def test_an_invalid_time_is_rejected_with_its_argument_s_name(argument: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=argument):
        trainer_of(tmp_path, **{argument: value})


@pytest.mark.parametrize("value", [3, "3"])
def test_a_duration_without_a_unit_is_rejected_with_both_spellings(value: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"max_duration={value!r} has no unit: give '3ep' for epochs, or '3ba' for batches"):
        trainer_of(tmp_path, max_duration=value)
    with trainer_of(tmp_path) as trainer, pytest.raises(ConfigError, match="'3ep' for epochs, or '3ba' for batches"):
        trainer.fit(value)


@pytest.mark.parametrize("value", [3.0, "3.0", "3."])
def test_the_hint_for_a_float_without_fraction_is_an_integer(value: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no unit: give '3ep' for epochs, or '3ba' for batches"):
        trainer_of(tmp_path, max_duration=value)
    with pytest.raises(ConfigError, match=r"max_duration=2\.5 has no unit: give whole epochs, such as '3ep', or whole batches"):
        trainer_of(tmp_path, max_duration=2.5)


@pytest.mark.parametrize("value", [4, "4"])
def test_a_bare_number_means_batches_in_every_interval_of_the_trainer(value: Any, tmp_path: Path) -> None:
    evaluated: list[int] = []
    recorded: list[int] = []
    callbacks = [
        Lambda(on_eval_all_end=lambda ctx: evaluated.append(ctx.step)),
        Lambda(on_log=lambda ctx: recorded.append(ctx.step)),
    ]
    options = {
        "max_duration": "8ba",
        "eval_interval": value,
        "log_interval": value,
        "eval_dataloader": some_data(),
        "train_dataloader": some_data(4),
    }
    with trainer_of(tmp_path, callbacks=callbacks, **options) as trainer:
        trainer.fit()
    assert (evaluated, sorted(set(recorded))) == ([4, 8], [4, 8])


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("max_epochs", 3, r"Trainer has no argument 'max_epochs'; give max_duration='3ep', for three epochs"),
        ("logger", [], r"Trainer has no argument 'logger'; give loggers=\[\.\.\.\]"),
        ("max_duratoin", "3ep", r"Trainer has no argument 'max_duratoin'; did you mean 'max_duration'\?"),
        ("zzz", 1, r"Trainer has no argument 'zzz'$"),
    ],
)
def test_an_unknown_argument_is_rejected_with_a_hint(argument: str, value: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message) as found:
        trainer_of(tmp_path, **{argument: value})
    assert isinstance(found.value, TypeError)  # as for any unknown argument in Python


def test_hints_for_other_frameworks_arguments_are_not_arguments_here() -> None:
    takes = set(inspect.signature(Trainer).parameters)
    assert not takes & set(TRAINER_ARGUMENTS)
    for meant in TRAINER_ARGUMENTS.values():  # and the hint names an argument that exists
        assert takes & set(re.findall(r"\w+", meant))


@pytest.mark.parametrize("device", ["cuda", "cuda:7", "xpu", "mps"])
def test_a_missing_device_is_rejected_before_anything_is_created(device: str, tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(ConfigError, match=rf"device='{device}' cannot be used here: .* give 'cpu', or 'auto'"):
        trainer_of(tmp_path, device=device, callbacks=JSONLLogger())
    assert not any(tmp_path.iterdir())


def test_an_unknown_precision_is_rejected_before_anything_is_created(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown precision 'bf17'; did you mean 'bf16'\?"):
        trainer_of(tmp_path, precision="bf17", callbacks=JSONLLogger())
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("argument", ["log_interval", "eval_interval"])
def test_an_interval_of_zero_is_rejected_with_its_argument_s_name(argument: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"{argument}.*more than 0"):
        trainer_of(tmp_path, **{argument: 0})


@pytest.mark.parametrize("argument", ["log_interval", "eval_interval", "max_duration"])
def test_an_unknown_unit_is_rejected_with_the_known_ones(argument: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown unit 'epochs'; did you mean 'ep'\?"):
        trainer_of(tmp_path, **{argument: "10epochs"})


@pytest.mark.parametrize("argument", ["log_interval", "eval_interval"])
def test_an_interval_of_zero_is_rejected(argument: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"more than 0, not '0.*'"):
        trainer_of(tmp_path, **{argument: "0ba"})


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("microbatch_size", "4"),
        ("microbatch_size", 2.5),
        ("microbatch_size", True),
        ("epochs_per_round", 1.5),
        ("clip_grad_norm", "1"),
    ],
)
def test_a_number_of_the_wrong_kind_is_rejected(argument: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=argument):
        trainer_of(tmp_path, **{argument: value})


def test_a_run_cannot_be_named_after_the_folder_above(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="plain name"):
        trainer_of(tmp_path / "runs", run_name="..", resume="auto")


@pytest.mark.parametrize(
    "scheduler",
    [torch.optim.lr_scheduler.ExponentialLR, lambda optimizer: 3, torch.optim.lr_scheduler.ReduceLROnPlateau],
    ids=["class", "number", "plateau"],
)
def test_an_object_that_is_not_a_scheduler_is_rejected(scheduler: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="scheduler"):
        trainer_of(tmp_path, scheduler=scheduler)


def test_a_scheduler_of_another_optimizer_is_rejected(tmp_path: Path) -> None:
    elsewhere = torch.optim.lr_scheduler.StepLR(sgd(list(other_model.parameters())), 1)
    with pytest.raises(ConfigError, match="scheduler"):
        trainer_of(tmp_path, scheduler=elsewhere)


def test_an_unknown_argument_is_python_s_own_error(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="max_epochs"):
        trainer_of(tmp_path, max_epochs=3)


@pytest.mark.parametrize("callbacks", ["Recorder", Recorder, [Recorder], {"recorder": 1}, [print]])
def test_an_object_that_is_not_a_callback_is_rejected(callbacks: Any, tmp_path: Path) -> None:
    with pytest.raises(NotACallbackError):
        trainer_of(tmp_path, callbacks=callbacks)


def test_an_incomplete_launch_environment_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(ConfigError, match=r"WORLD_SIZE is 2.*MASTER_ADDR.*start the program with torchrun"):
        trainer_of(tmp_path)


def test_a_broken_launch_environment_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(ConfigError, match="WORLD_SIZE should be a whole number, not 'two'"):
        trainer_of(tmp_path)


def test_an_error_in_set_up_ends_the_run(tmp_path: Path) -> None:
    recorder = Recorder(fields=("exception", "span"))
    with pytest.raises(ConfigError) as raised:
        trainer_of(tmp_path, train_dataloader=[], callbacks=recorder)
    check_events(recorder.events)
    assert recorder.events[-3:] == ["on_data_init_start", "on_exception", "on_run_end"]
    assert recorder.values == {"exception": [("on_exception", raised.value)], "span": [("on_exception", "data_init")]}


# --- what fit and similar methods reject ---


@pytest.mark.parametrize("missing", ["optimizer", "train_dataloader"])
def test_fit_without_its_parts_is_rejected(missing: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"fit\(\) needs (an optimizer|a train_dataloader); pass it to the Trainer"):
        trainer_of(tmp_path, **{missing: None}).fit()


@pytest.mark.parametrize(
    ("duration", "message"), [("0ba", "max_duration='0ba'"), ("3 ages", "unknown unit 'ages'"), ("", "is no time")]
)
def test_fit_rejects_an_invalid_duration(duration: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        trainer_of(tmp_path).fit(duration)


def test_fit_rejects_rounds_of_unknown_length(tmp_path: Path) -> None:
    class Guard(Callback):
        def on_epoch_start(self, ctx: Context) -> None:
            assert ctx.epoch < 5, "training would never end"

    with pytest.raises(ConfigError, match="epochs_per_round"):
        trainer_of(tmp_path, callbacks=Guard()).fit("2iter")


def test_an_epoch_without_batches_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"epoch 1 had no batches; is the dataset empty, or was an iterator used up\?"):
        trainer_of(tmp_path, train_dataloader=EmptyIterable()).fit()


def test_evaluate_without_data_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"evaluate\(\) has no data; pass it a dataloader, or an eval_dataloader to the Trainer"
    ):
        trainer_of(tmp_path).evaluate()


@pytest.mark.parametrize("method", ["evaluate", "test", "predict"])
def test_evaluate_test_and_predict_reject_an_iterator_and_empty_data(method: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"dataloader.* is an iterator"):
        getattr(trainer_of(tmp_path), method)(stream())
    with pytest.raises(ConfigError, match=r"dataloader.* has no batches"):
        getattr(trainer_of(tmp_path), method)([])


CALLS: dict[str, tuple[Callable[[Trainer], object], str]] = {
    "fit": (lambda trainer: trainer.fit(), ""),
    "evaluate": (lambda trainer: trainer.evaluate(some_data()), r"; use ctx\.control\.evaluate\(why\) instead"),
    "test": (lambda trainer: trainer.test(some_data()), ""),
    "predict": (lambda trainer: trainer.predict(some_data()), ""),
    "save_checkpoint": (lambda trainer: trainer.save_checkpoint(), r"; use ctx\.control\.save\(why\) instead"),
}


class Calls(Callback):
    """Calls the trainer at an event, which is not allowed."""

    def __init__(self, event: str, call: Callable[[Trainer], object], *, catches: bool) -> None:
        self.event = event
        self.call = call
        self.catches = catches
        self.trainer: Trainer | None = None
        self.rejections: list[RequestRejected] = []

    def on_event(self, ctx: Context) -> None:
        if ctx.event == self.event and self.trainer is not None and not self.rejections:
            try:
                self.call(self.trainer)
            except RequestRejected as rejection:
                self.rejections.append(rejection)
                if not self.catches:
                    raise


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("event", ["on_train_step_end", "on_eval_end", "on_train_end"])
def test_calling_the_trainer_from_a_callback_of_training_is_rejected(name: str, event: str, tmp_path: Path) -> None:
    call, hint = CALLS[name]
    calls, recorder = Calls(event, call, catches=False), Recorder()
    trainer = trainer_of(tmp_path, callbacks=[calls, recorder], eval_dataloader=some_data())
    calls.trainer = trainer
    with pytest.raises(RequestRejected, match=rf"^cannot call {name}\(\) while fit\(\) is running{hint}(\n|$)") as raised:
        trainer.fit()
    assert [raised.value] == calls.rejections
    check_events(recorder.events)
    assert trainer.run.outcome is Outcome.FAILED


@pytest.mark.parametrize("name", CALLS)
def test_a_rejected_call_whose_error_is_caught_does_not_disturb_training(name: str, tmp_path: Path) -> None:
    calls, recorder = Calls("on_train_step_end", CALLS[name][0], catches=True), Recorder()
    torch.manual_seed(0)
    with trainer_of(tmp_path, callbacks=[calls, recorder]) as trainer:
        calls.trainer = trainer
        trainer.fit()
    torch.manual_seed(0)
    with trainer_of(tmp_path) as undisturbed:
        undisturbed.fit()
    assert len(calls.rejections) == 1
    check_events(recorder.events)
    assert trainer.run.outcome is Outcome.FINISHED
    assert trainer.state.timestamp.batch == 2
    assert torch.equal(trainer.model.state_dict()["weight"], undisturbed.model.state_dict()["weight"])


@pytest.mark.parametrize("name", ["evaluate", "test", "predict", "fit", "save_checkpoint"])
@pytest.mark.parametrize("outer", ["evaluate", "test", "predict"])
def test_calling_the_trainer_from_a_callback_of_an_evaluation_is_rejected(name: str, outer: str, tmp_path: Path) -> None:
    event = {"evaluate": "on_eval_step_end", "test": "on_test_step_end", "predict": "on_predict_step_end"}[outer]
    call, hint = CALLS[name]
    calls, recorder = Calls(event, call, catches=True), Recorder()
    with trainer_of(tmp_path, callbacks=[calls, recorder]) as trainer:
        calls.trainer = trainer
        with torch.enable_grad():
            if event == "on_eval_step_end":
                trainer.evaluate(some_data())
            else:
                getattr(trainer, outer)(some_data())
    check_events(recorder.events)
    [rejection] = calls.rejections
    assert re.fullmatch(rf"cannot call {name}\(\) while {outer}\(\) is running{hint}", str(rejection))


# --- losses and batches ---


class ReturnsLoss(Task):
    """Computes the loss with the given function."""

    def __init__(self, loss: Callable[[Tensor], Any]) -> None:
        self.made = loss

    def forward(self, model: nn.Module, batch: Any) -> Any:
        return model(batch[0])

    def loss(self, outputs: Any, batch: Any) -> Any:
        return self.made(outputs)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        pytest.param(
            lambda outputs: outputs, r"loss has the shape \(3, 1\), but must be a scalar tensor; take its mean", id="shape"
        ),
        pytest.param(lambda outputs: outputs.sum().item(), r"loss is -?\d+.*must be a scalar tensor", id="float"),
        pytest.param(lambda outputs: None, r"loss is None", id="none"),
        pytest.param(lambda outputs: {"ce": outputs.mean()}, r"loss is None.*losses: ce", id="no loss of that name"),
        pytest.param(lambda outputs: {"loss": outputs}, r"shape \(3, 1\).*losses: loss", id="shape in a dict"),
        pytest.param(lambda outputs: (outputs.mean(),), r"must be a scalar tensor", id="tuple"),
    ],
)
def test_a_loss_that_cannot_be_trained_on_is_rejected(loss: Callable[[Tensor], Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        trainer_of(tmp_path, task=ReturnsLoss(loss)).fit()


def test_a_plain_function_whose_loss_has_no_mean_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"shape \(3, 1\)"):
        trainer_of(tmp_path, task=nn.MSELoss(reduction="none")).fit()


def test_a_batch_of_parts_of_different_lengths_cannot_be_split() -> None:
    with pytest.raises(ConfigError, match="different"):
        split((torch.ones(5, 2), torch.ones(6, 1)), 3)


def test_the_different_lengths_are_named() -> None:
    with pytest.raises(ConfigError, match=r"the batch cannot be split: it has parts of different lengths: \[2, 6\]"):
        split((torch.ones(2, 2), torch.ones(6, 1)), 3)


@pytest.mark.parametrize(
    ("batch", "found"),
    [
        (object(), "is object, which has no length"),
        (3, "is int, which has no length"),
        ({"epoch": 3}, "is dict, which has no length"),
        ([], "is empty"),
        ((torch.ones(0, 2), torch.ones(0, 1)), "is empty"),
    ],
)
def test_a_batch_that_cannot_be_split_is_rejected(batch: Any, found: str) -> None:
    with pytest.raises(ConfigError, match=f"the batch cannot be split: it {found}; give .*, or microbatch_size=None"):
        split(batch, 2)


def test_a_part_without_a_length_goes_into_every_microbatch() -> None:
    first, second = split({"ids": torch.arange(3), "names": ["a", "b", "c"], "epoch": 3}, 2)
    assert (first["ids"].tolist(), first["names"], first["epoch"]) == ([0, 1], ["a", "b"], 3)
    assert (second["ids"].tolist(), second["names"], second["epoch"]) == ([2], ["c"], 3)


def test_a_scalar_tensor_in_a_batch_is_rejected_as_what_it_is() -> None:
    with pytest.raises(ConfigError, match="split"):
        split((torch.ones(4), torch.tensor(3.0)), 2)


def test_every_rejection_is_a_callsheet_error_and_a_built_in_one(tmp_path: Path) -> None:
    """A caller can catch `CallsheetError` for all, or the built-in type of each error."""
    with pytest.raises(CallsheetError):
        trainer_of(tmp_path, microbatch_size=0)
    with pytest.raises(ValueError, match=re.escape("microbatch_size=0")):
        trainer_of(tmp_path, microbatch_size=0)


def test_intervals_longer_than_the_run_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The evaluation and the metrics record still come at the end of training."""
    recorder = Recorder()
    with (
        caplog.at_level("WARNING", "callsheet"),
        trainer_of(
            tmp_path,
            eval_dataloader=some_data(),
            max_duration="3ba",
            log_interval="20ba",
            eval_interval="500ba",
            callbacks=[recorder],
        ) as trainer,
    ):
        trainer.fit()
    noted = [record.getMessage() for record in caplog.records]
    assert len(noted) == 2
    assert "the interval of 'validation', 500ba, is longer than the run, 3ba" in noted[0]
    assert "log_interval, 20ba, is longer" in noted[1]
    assert recorder.events.count("on_eval_end") == 1
    assert "on_log" in recorder.events


@pytest.mark.parametrize("index", [0, 1, -1])
def test_a_batch_that_is_none_is_rejected(index: int, tmp_path: Path) -> None:
    data: list[Any] = some_data() * 2
    data[index] = None
    with pytest.raises(ConfigError, match=r"returned None for a batch of epoch 1"):
        trainer_of(tmp_path, train_dataloader=data).fit()


@pytest.mark.parametrize(
    ("batch", "described"),
    [
        ({"image": torch.ones(3, 2), "label": torch.ones(3, 1)}, r"dict with 'image', 'label'"),
        ([torch.ones(3, 2)], "list of 1"),
        (7, "int"),
    ],
)
def test_a_batch_that_is_no_pair_is_explained_with_a_loss_function(batch: Any, described: str, tmp_path: Path) -> None:
    message = (
        rf"the loss function mse_loss needs batches of \(inputs, targets\), but this batch is a {described}: .*ForwardStepTask"
    )
    with pytest.raises(ConfigError, match=message):
        with trainer_of(tmp_path, train_dataloader=[batch]) as trainer:
            trainer.fit()


def test_an_error_inside_the_model_is_not_reported_as_a_bad_batch(tmp_path: Path) -> None:
    class Fails(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            raise KeyError(0)

    with pytest.raises(KeyError):
        with trainer_of(tmp_path, model=Fails(2, 1)) as trainer:
            trainer.fit()


def test_a_bad_duration_of_fit_does_not_end_the_run(tmp_path: Path) -> None:
    with trainer_of(tmp_path) as trainer:
        with pytest.raises(ConfigError, match="'3ba'"):
            trainer.fit(3)  # type: ignore[arg-type]
        trainer.fit("3ba")
        assert trainer.state.timestamp.batch == 3
