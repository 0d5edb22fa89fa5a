from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from callsheet import Callback, Context, Trainer
from callsheet.callbacks.model_summary import ModelSummary
from callsheet.errors import ConfigError
from callsheet.loggers import Logger
from callsheet.testing import run_ranks


class Tables(Logger):
    def __init__(self) -> None:
        self.tables: list[tuple[str, list[str], list[list[Any]]]] = []

    def log_table(self, ctx: Context, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        self.tables.append((name, list(columns), [list(row) for row in rows]))


def made_model() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 1))
    model[0].requires_grad_(False)
    return model


def fit(folder: Path | str, *callbacks: Callback, fits: int = 1, **options: Any) -> tuple[Tables, dict[str, nn.Parameter]]:
    tables = Tables()
    torch.manual_seed(0)
    data = [(torch.randn(6, 3), torch.randn(6, 1))] * 2
    with Trainer(
        made_model(),
        nn.functional.mse_loss,
        data,
        optimizer=lambda parameters: torch.optim.SGD([p for p in parameters if p.requires_grad], lr=0.1),
        callbacks=callbacks,
        loggers=[tables],
        runs_folder=folder,
        device="cpu",
        **options,
    ) as trainer:
        for i in range(fits):
            trainer.fit(f"{i + 1}ep")
    return tables, dict(trainer.model.named_parameters())


ROWS = [
    ["0", "Linear", 16, 0],
    ["1", "Sequential", 20, 20],
    ["1.0", "Linear", 20, 20],
    ["1.1", "ReLU", 0, 0],
    ["2", "Linear", 5, 5],
    ["(model)", "Sequential", 41, 25],
]


def test_lists_every_module_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tables, _ = fit(tmp_path, ModelSummary(), fits=2)
    assert tables.tables == [("model/summary", ["module", "type", "parameters", "trainable"], ROWS)]
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split() == ["0", "Linear", "16", "0"]
    assert lines[-1].split() == ["(model)", "Sequential", "41", "25"]
    assert len([line for line in lines if "(model)" in line]) == 1


def test_the_depth_can_be_set_and_printing_turned_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flat, whole = ModelSummary(depth=1, prints=False), ModelSummary(depth=0, prints=False)
    whole.name = "model/whole"
    tables, _ = fit(tmp_path, flat, whole)
    assert {name: [row[0] for row in rows] for name, _, rows in tables.tables} == {
        "model/summary": ["0", "1", "2", "(model)"],
        "model/whole": ["(model)"],
    }
    assert not capsys.readouterr().out


@pytest.mark.test_all
def test_a_compiled_model_stays_compiled_and_is_not_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    tables, _ = fit(tmp_path, ModelSummary(flops=True), microbatch_size=2, compile={"backend": "aot_eager"})
    ((_, columns, rows),) = tables.tables
    assert columns[-1] == "flops"
    assert {row[4] for row in rows} == {0}
    assert torch._dynamo.utils.counters["frames"]["ok"] > 0
    assert "ModelSummary counts no FLOPs: torch.compile is in use" in caplog.text
    torch._dynamo.utils.counters.clear()


def test_counts_the_operations_of_one_forward(tmp_path: Path) -> None:
    tables, weights = fit(tmp_path, ModelSummary(flops=True), microbatch_size=2)
    ((_, columns, rows),) = tables.tables
    assert columns[-1] == "flops"
    assert {row[0]: row[4] for row in rows} == {"0": 48, "1": 64, "1.0": 64, "1.1": 0, "2": 16, "(model)": 128}
    for name, plain in fit(tmp_path / "plain", microbatch_size=2)[1].items():
        assert torch.equal(weights[name], plain)


def test_counting_ends_also_when_the_forward_fails(tmp_path: Path) -> None:
    class Fails(Callback):
        def on_microbatch_end(self, ctx: Context) -> None:
            ctx.model[2] = nn.Linear(7, 1)

    with pytest.raises(RuntimeError):
        fit(tmp_path, Fails(), ModelSummary(flops=True), microbatch_size=2)
    assert _get_current_dispatch_mode() is None


def on_ranks(folder: str, parallel: str) -> Any:
    return fit(folder, ModelSummary(), parallel=parallel)[0].tables


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_rank_zero_shows_the_whole_model(parallel: str, tmp_path: Path) -> None:
    first, second = run_ranks(on_ranks, 2, str(tmp_path), parallel)
    assert first[0][2] == ROWS
    assert second == []


def test_rejects_bad_arguments() -> None:
    with pytest.raises(ConfigError, match="depth=-1"):
        ModelSummary(depth=-1)
