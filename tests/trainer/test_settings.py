"""The settings of a run without `config` are recorded, compared and shown."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from callsheet import Background, Callback, Context, Trainer
from callsheet.bridges.bare import attach
from callsheet.callbacks import CheckpointSaver, EarlyStopper, Notify, SpeedMonitor
from callsheet.cli.main import main
from callsheet.core.time import Time
from callsheet.loggers import InMemoryLogger, JSONLLogger
from callsheet.report import RunFolder
from callsheet.report.compare.comparison import Comparison
from callsheet.report.compare.settings import settings
from callsheet.report.contents import contents
from callsheet.run.settings import plain

DATA = [(torch.ones(4, 2), torch.ones(4, 1))] * 4


class Positional(Callback):
    """Has positional arguments, which have no names in the settings."""

    def __init__(self, *values: int) -> None:
        self.values = values


class Slow(Callback):
    """Runs in a background thread."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds

    def on_log(self, ctx: Context) -> None:
        """Handle `on_log` without doing anything."""


def train(folder: Path, name: str, *callbacks: Callback, rate: float = 0.1, steps: int = 4, **more: Any) -> dict[str, Any]:
    with Trainer(
        nn.Linear(2, 1), nn.functional.mse_loss, DATA, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=rate),
        max_duration=f"{steps}ba", callbacks=callbacks, loggers=[JSONLLogger()], run_name=name, runs_folder=folder, progress=False, **more,
    ) as trainer:  # fmt: skip
        trainer.fit()
    found: dict[str, Any] = json.loads((folder / name / "settings.json").read_text())
    return found


def arguments_of(settings: dict[str, Any], kind: str) -> dict[str, Any]:
    found = next(each for each in settings["callbacks"] if each["class_path"].endswith(f".{kind}"))
    arguments: dict[str, Any] = found.get("init_args", {})
    return arguments


def test_differing_settings_of_two_trainers_are_found(tmp_path: Path) -> None:
    train(tmp_path, "a", EarlyStopper(monitor="validation/loss", patience=2), Background(Slow(0.5)), precision="fp32")
    train(tmp_path, "b", EarlyStopper(monitor="validation/loss", patience=3), Background(Slow(0.7)), rate=0.2, clip_grad_norm=1.0)
    different = Comparison([RunFolder.read(tmp_path / name) for name in "ab"]).differences
    assert different["settings"] == {"optimizer.lr": ["0.1", "0.2"], "clip_grad_norm": ["", "1.0"]}
    assert different["callbacks"] == {"EarlyStopper.patience": ["2", "3"], "Slow.seconds": ["0.5", "0.7"]}
    shown = dict(contents(RunFolder.read(tmp_path / "b"))["settings"])
    assert ("optimizer.lr", "0.2") in shown["Settings"]
    assert ("EarlyStopper.patience", "3") in shown["Callbacks"]


def test_a_default_that_is_given_is_no_difference(tmp_path: Path) -> None:
    train(tmp_path, "a", EarlyStopper(monitor="validation/loss"), SpeedMonitor())
    train(tmp_path, "b", EarlyStopper(monitor="validation/loss", patience=3), SpeedMonitor(window_size=5))
    different = Comparison([RunFolder.read(tmp_path / name) for name in "ab"]).differences
    assert different["callbacks"] == {"SpeedMonitor.window_size": ["100", "5"]}


def test_settings_in_use_override_the_config(tmp_path: Path) -> None:
    train(tmp_path, "a", rate=0.1, config={"optimizer": {"lr": 0.5}, "seed": 7})
    found = settings(RunFolder.read(tmp_path / "a"))["settings"]
    assert (found["optimizer.lr"], found["seed"]) == ("0.1", "7")


def test_options_of_callbacks_are_columns_of_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path, "a", EarlyStopper(monitor="validation/loss", patience=2))
    assert main(["runs", str(tmp_path), "--columns", "name,EarlyStopper.patience", "--where", "EarlyStopper.patience = 2"]) == 0
    assert capsys.readouterr().out.split() == ["name", "EarlyStopper.patience", "a", "2"]


def test_a_resumed_run_keeps_the_settings_with_which_it_was_started(tmp_path: Path) -> None:
    """The checkpoint contains a learning rate that the scheduler has changed."""

    def scheduled(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    first = train(tmp_path, "a", CheckpointSaver(save_interval="2ba"), steps=8, scheduler=scheduled)
    again = train(tmp_path, "a", CheckpointSaver(save_interval="2ba"), steps=8, scheduler=scheduled, resume="auto")
    assert first == again
    assert first["optimizer"]["init_args"]["lr"] == 0.1
    assert first["scheduler"]["class_path"] == "torch.optim.lr_scheduler.StepLR"
    assert first["scheduler"]["init_args"]["gamma"] == 0.5
    assert first["model"]["parameters"] == 3


def test_settings_that_differ_between_parameter_groups_are_recorded_by_group(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    groups: list[dict[str, Any]] = [{"params": [model.weight]}, {"params": [model.bias], "weight_decay": 0.0}]
    with Trainer(
        model, nn.functional.mse_loss, DATA, optimizer=torch.optim.AdamW(groups, lr=0.1, weight_decay=0.01), max_duration="1ba",
        loggers=[JSONLLogger()], run_name="a", runs_folder=tmp_path, progress=False,
    ) as trainer:  # fmt: skip
        trainer.fit()
    found = json.loads((tmp_path / "a" / "settings.json").read_text())["optimizer"]["init_args"]
    assert found["lr"] == 0.1
    assert "weight_decay" not in found
    assert found["group_0"] == {"weight_decay": 0.01}
    assert found["group_1"] == {"weight_decay": 0.0}


def test_the_settings_of_a_hand_written_loop_are_recorded(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    with attach(
        model=model, optimizer=optimizer, callbacks=[EarlyStopper(monitor="validation/loss", patience=9)], loggers=[JSONLLogger()],
        run_name="a", runs_folder=tmp_path,
    ) as run:  # fmt: skip
        for inputs, targets in run.steps(DATA):
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
    found = json.loads((tmp_path / "a" / "settings.json").read_text())
    assert found["optimizer"]["init_args"]["lr"] == 0.25
    assert arguments_of(found, "EarlyStopper")["patience"] == 9


def test_a_loop_that_takes_no_batches_from_the_run_is_warned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    with attach(model=model, optimizer=optimizer, callbacks=[JSONLLogger()], run_name="a", runs_folder=tmp_path):
        for inputs, targets in DATA:
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
    assert "callsheet.attach has observed no step: take the batches from run.steps(dataloader)" in caplog.text


def test_secrets_are_left_out(tmp_path: Path) -> None:
    class Sends(Callback):
        def __init__(self, url: str, options: dict[str, str], api_key: str) -> None:
            self.url, self.options, self.api_key = url, options, api_key

    settings = train(
        tmp_path, "a",
        Sends("https://me:secretword@host/hooks/secretword", {"auth_token": "secretword"}, api_key="secretword"),
        Notify(to="https://hooks.slack.com/services/T0/B0/secretword"),
    )  # fmt: skip
    assert "secretword" not in json.dumps(settings)
    assert arguments_of(settings, "Sends")["api_key"] == "..."


def test_a_part_that_cannot_be_described_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Odd(Callback):
        def __init__(self, value: object) -> None:
            self.value = value

    class Hostile(str):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    settings = train(tmp_path, "a", Odd(Hostile("x")))
    assert "callbacks" not in settings
    assert settings["optimizer"]["init_args"]["lr"] == 0.1
    assert "The run's callbacks cannot be described, and are not recorded with its settings: no text" in caplog.text


@pytest.mark.parametrize(
    ("value", "described"),
    [
        (None, None),
        (Time.parse("3ep"), "3ep"),
        (Path("a/b"), "a/b"),
        (torch.float16, "torch.float16"),
        (torch.device("cpu"), "cpu"),
        (torch.ones(3), "torch.Tensor"),
        (nn.Linear(1, 1), "torch.nn.modules.linear.Linear"),
        (torch.nn.functional.mse_loss, "torch.nn.functional.mse_loss"),
        ({"b", "a"}, ["a", "b"]),
        (
            partial(torch.nn.functional.mse_loss, reduction="sum"),
            {"class_path": "torch.nn.functional.mse_loss", "init_args": {"reduction": "sum"}},
        ),
        ({"password": "x", "token_count": None}, {"password": "...", "token_count": None}),
        (list(range(1000)), list(range(200))),
    ],
)
def test_plain_describes_a_value_as_json(value: object, described: object) -> None:
    assert plain(value) == described
    json.dumps(plain(value))


def test_plain_describes_a_value_that_contains_itself() -> None:
    value: list[Any] = []
    value.append(value)
    json.dumps(plain(value))


def test_the_settings_of_two_runs_of_one_program_are_the_same(tmp_path: Path) -> None:
    """They do not contain the address of an object."""
    functions: list[Callable[[], object]] = [object, lambda: torch.optim.SGD]

    class Holds(Callback):
        def __init__(self, thing: object) -> None:
            self.thing = thing

    one, other = (train(tmp_path, name, Holds(object()), Holds2(functions)) for name in "ab")
    assert one == other


class Holds2(Callback):
    """Holds functions."""

    def __init__(self, functions: object) -> None:
        self.functions = functions


def test_a_callback_with_positional_arguments_has_no_options(tmp_path: Path) -> None:
    assert arguments_of(train(tmp_path, "a", Positional(1, 2)), "Positional") == {}


def test_loggers_without_the_method_are_not_called(tmp_path: Path) -> None:
    train(tmp_path, "a", InMemoryLogger())
