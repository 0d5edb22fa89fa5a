from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import callsheet
from callsheet import Callback, Context, Trainer
from callsheet.callbacks import LRMonitor

RATES = [1.0, 0.1, 0.01]


class Rates(Callback):
    """Records the learning rates of every metrics record."""

    phase = "report"

    def __init__(self) -> None:
        self.records: list[dict[str, float]] = []

    def on_log(self, ctx: Context) -> None:
        self.records.append({name: value for name, value in ctx.record.values.items() if name.startswith("lr/")})


def records(folder: Path, groups: list[dict[str, Any]], *, capturable: bool = False) -> list[dict[str, float]]:
    model = nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 1))
    rate = torch.tensor(1.0, dtype=torch.float64) if capturable else 1.0
    parameters = [{**group, "params": layer.parameters()} for group, layer in zip(groups, model, strict=True)]
    optimizer = (
        torch.optim.Adam(parameters, lr=rate, capturable=False, foreach=False)
        if capturable
        else torch.optim.SGD(parameters, lr=rate)
    )
    seen = Rates()
    data = [(torch.ones(2, 2), torch.ones(2, 1))] * len(RATES)
    with Trainer(
        model,
        nn.functional.mse_loss,
        data,
        optimizer=optimizer,
        scheduler=LambdaLR(optimizer, lambda step: RATES[min(step, len(RATES) - 1)]),
        callbacks=[LRMonitor(), seen],
        log_interval=1,
        runs_folder=folder,
        device="cpu",
    ) as trainer:
        trainer.fit()
    return seen.records


def test_logs_the_rate_that_the_step_used(tmp_path: Path) -> None:
    assert records(tmp_path, [{}, {"lr": 0.5}]) == [{"lr/SGD/0": rate, "lr/SGD/1": rate / 2} for rate in RATES]


def test_a_named_group_is_logged_under_its_name(tmp_path: Path) -> None:
    first, *_ = records(tmp_path, [{"name": "body"}, {"name": "head"}])
    assert set(first) == {"lr/SGD/body", "lr/SGD/head"}


def test_a_rate_in_a_tensor_is_the_one_that_the_step_used(tmp_path: Path) -> None:
    assert [record["lr/Adam/0"] for record in records(tmp_path, [{}, {}], capturable=True)] == pytest.approx(RATES)


def test_an_evaluations_record_has_no_rate(tmp_path: Path) -> None:
    seen = Rates()
    data = [(torch.ones(2, 2), torch.ones(2, 1))] * 4

    class Looks(Callback):
        def on_eval_step_end(self, ctx: Context) -> None:
            ctx.log({"looked/step": 1.0})

    with Trainer(
        nn.Linear(2, 1),
        nn.functional.mse_loss,
        data,
        data[:1],
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5),
        callbacks=[LRMonitor(), Looks(), seen],
        log_interval=2,
        eval_interval="2ba",
        runs_folder=tmp_path,
        device="cpu",
    ) as trainer:
        trainer.fit()
    assert seen.records == [{"lr/SGD/0": 0.5}, {}] * 2


class AddsGroup(Callback):
    """Adds a second parameter group after the first step."""

    phase = "change"

    def on_train_step_end(self, ctx: Context) -> None:
        if ctx.step == 1:
            ctx.optimizer.add_param_group({"params": list(ctx.model[1].parameters()), "lr": 0.5})


def test_a_parameter_group_that_is_added_later_is_logged_too(tmp_path: Path) -> None:
    model, seen = nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 1)), Rates()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=1.0)
    data = [(torch.ones(2, 2), torch.ones(2, 1))] * 3
    with Trainer(
        model, nn.functional.mse_loss, data, optimizer=optimizer, callbacks=[LRMonitor(), AddsGroup(), seen], log_interval=1,
        runs_folder=tmp_path, device="cpu",
    ) as trainer:  # fmt: skip
        trainer.fit()
    assert seen.records == [{"lr/SGD/0": 1.0}, {"lr/SGD/0": 1.0, "lr/SGD/1": 0.5}, {"lr/SGD/0": 1.0, "lr/SGD/1": 0.5}]


class WithoutLearningRate(torch.optim.Optimizer):
    """A custom optimizer whose parameter groups have no `lr`."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # without the overloads
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(0.1 * parameter.grad)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("loop", ["Trainer", "attach"])
def test_an_optimizer_without_a_learning_rate_logs_nothing(groups: int, loop: str, tmp_path: Path) -> None:
    model, seen, loss = nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 1)), Rates(), nn.functional.mse_loss
    layers = [model] if groups == 1 else list(model)
    optimizer = WithoutLearningRate([{"params": list(layer.parameters())} for layer in layers], {})
    data = [(torch.ones(2, 2), torch.ones(2, 1))] * 3
    if loop == "Trainer":
        with Trainer(
            model,
            loss,
            data,
            optimizer=optimizer,
            callbacks=[LRMonitor(), seen],
            log_interval=1,
            runs_folder=tmp_path,
            device="cpu",
        ) as trainer:
            trainer.fit()
    else:
        with callsheet.attach(
            model=model, optimizer=optimizer, callbacks=[LRMonitor(), seen], log_interval=1, runs_folder=tmp_path
        ) as run:
            for inputs, targets in run.steps(data):
                optimizer.zero_grad()
                loss(model(inputs), targets).backward()
                optimizer.step()
    assert seen.records == [{}, {}, {}]


class SavesAndFails(Callback):
    """Saves a checkpoint at the last step of the first epoch, and fails before the record of this epoch is made."""

    def on_train_step_end(self, ctx: Context) -> None:
        if ctx.step == 3:
            ctx.control.save("the test requests it")

    def on_epoch_end(self, ctx: Context) -> None:
        raise ZeroDivisionError


@pytest.mark.parametrize("groups", [1, 2])
def test_the_record_that_was_due_at_a_checkpoint_has_the_rates_after_a_resume(groups: int, tmp_path: Path) -> None:
    def trained(*callbacks: Callback, resume: str | None = None) -> list[dict[str, float]]:
        seen = Rates()
        layers = [nn.Linear(2, 2) for _ in range(groups)]
        model = nn.Sequential(*layers)
        optimizer = torch.optim.SGD([{"params": layer.parameters(), "lr": 0.1 / (1 + i)} for i, layer in enumerate(layers)])
        with Trainer(
            model, nn.functional.mse_loss, [(torch.ones(2, 2), torch.ones(2, 2))] * 3, optimizer=optimizer, max_duration="2ep",
            callbacks=[LRMonitor(), seen, *callbacks], log_interval="1ep", run_name="run", runs_folder=tmp_path, resume=resume,
            device="cpu",
        ) as trainer:  # fmt: skip
            trainer.fit()
        return seen.records

    with pytest.raises(ZeroDivisionError):
        trained(SavesAndFails())
    found = trained(resume="auto")
    assert found == [{f"lr/SGD/{i}": 0.1 / (1 + i) for i in range(groups)}] * 2
