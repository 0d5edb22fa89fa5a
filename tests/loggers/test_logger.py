from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from callsheet import CallbackManager, Context, RunInfo, Trainer
from callsheet.core.manager import CallbackManager as Manager
from callsheet.loggers import Logger


class RecordsCalls(Logger):
    """Records the step and arguments of every call."""

    def __init__(self) -> None:
        self.given: list[tuple[Any, ...]] = []

    def log_hyperparameters(self, ctx: Context, values: Mapping[str, Any]) -> None:
        self.given.append((ctx.step, values))

    def log_table(self, ctx: Context, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        self.given.append((ctx.step, name, columns, rows))

    def log_images(self, ctx: Context, name: str, images: Sequence[Any]) -> None:
        self.given.append((ctx.step, name, images))

    def log_file(self, ctx: Context, name: str, path: Path) -> None:
        self.given.append((ctx.step, name, path))


def log_everything(logger: Logger) -> Manager:
    manager = CallbackManager([logger])
    ctx = Context(RunInfo("run"), loggers=manager.notify_loggers)
    ctx.step = 7
    manager.open(ctx)
    ctx.log_hyperparameters({"lr": 0.1})
    ctx.log_table("t", ("a",), [(1,)])
    ctx.log_images("i", ["image"])
    ctx.log_file("f", "x.txt")
    return manager


def test_a_logger_receives_everything_that_is_logged() -> None:
    keeps = RecordsCalls()
    log_everything(keeps)
    assert keeps.given == [(7, {"lr": 0.1}), (7, "t", ["a"], [[1]]), (7, "i", ["image"]), (7, "f", Path("x.txt"))]


def test_the_base_class_ignores_everything_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    log_everything(Logger())
    assert not caplog.records


def test_other_ranks_do_not_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    keeps, ctx = RecordsCalls(), Context(RunInfo("run"))
    CallbackManager([keeps]).notify_loggers("log_table", ctx, name="t", columns=["a"], rows=[])
    assert keeps.given == []


def test_a_broken_logger_does_not_end_the_run(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Logger):
        def on_log(self, ctx: Context) -> None:
            raise OSError("disk full")

    CallbackManager([Broken()]).fire("on_log", Context(RunInfo("run")))
    assert "disk full" in caplog.text


def test_a_custom_logger_receives_the_run_s_configuration(tmp_path: Path) -> None:
    keeps = RecordsCalls()
    with Trainer(
        torch.nn.Linear(2, 1), torch.nn.functional.mse_loss, [(torch.ones(2, 2), torch.ones(2, 1))], max_duration="1ba",
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1), config={"lr": 0.1}, loggers=[keeps], runs_folder=tmp_path,
        device="cpu",
    ) as trainer:  # fmt: skip
        trainer.fit()
    assert keeps.given == [(0, {"lr": 0.1})]
