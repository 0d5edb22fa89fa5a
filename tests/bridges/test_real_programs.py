"""`tools/built_on.py`, which trains with programs that are built on the frameworks: its results, and what it measures."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]

LOOP = """
import sys
import torch
from job import write

is_watched = "callsheet" in sys.modules
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for inputs in torch.utils.data.DataLoader(torch.randn(24, 4), batch_size=8):
    loss = model(inputs).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
"""
END = "write(losses, model)\n"
OTHER_RESULTS = """
if is_watched:
    losses[1] *= 1.5
    losses.append(0.0)
    torch.nn.init.ones_(model.weight)
"""


@pytest.fixture(scope="module")
def tool() -> Iterator[Any]:
    """Import `tools/built_on.py`."""
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        yield importlib.import_module("built_on")
    finally:
        sys.path.remove(str(ROOT / "tools"))


def measured(tool: Any, folder: Path, script: str) -> Any:
    """Measure a training of this script under `callsheet exec`, in this environment."""
    (folder / "train.py").write_text(script)
    programs = importlib.import_module("built_on_programs")
    command = programs.executed(lambda run: [str(folder / "train.py")])
    way = programs.Way("a loop", "exec", command, acts=False, asks=programs.OF_HAND_WRITTEN_LOOPS)
    program = programs.Program("a loop", ("torch",), {"torch": "2"}, (way,))
    training = tool.Training(program, way, folder / "runs", Path(sys.executable))
    return tool.measured(training, tool.Result("a loop", "a loop", "exec", program.versions))


@pytest.mark.test_all
def test_an_unchanged_training_is_measured_as_the_same(tool: Any, tmp_path: Path) -> None:
    result = measured(tool, tmp_path, LOOP + END)
    assert (result.verdict, result.order, result.steps, result.own_steps, result.weights) == ("trains", "", 3, 3, True)
    assert len(result.losses) == 3
    assert result.losses == result.own_losses
    assert sorted(result.rejected) == ["CheckpointSaver", "EMA"]
    assert "ctx.control.save" in result.rejected["CheckpointSaver"]
    assert tool.summary(result).count("✓") == 4


@pytest.mark.test_all
def test_the_summary_shows_where_a_training_differs_under_callsheet(tool: Any, tmp_path: Path) -> None:
    result = measured(tool, tmp_path, LOOP + OTHER_RESULTS + END)
    assert (result.steps, result.own_steps, result.weights) == (3, 4, False)
    assert "steps 3 of 4, losses 3 of 4, weights ✗" in tool.summary(result)
    longer = replace(result, losses=(1.0, 1.0), own_losses=(1.0, 2.0))
    assert "losses to 5e-01" in tool.summary(longer)


def test_a_program_that_fails_without_callsheet_is_not_measured(tool: Any, tmp_path: Path) -> None:
    with pytest.raises(tool.NotPossibleError, match="No module named 'a_missing_module'"):
        measured(tool, tmp_path, "import a_missing_module\n")


def test_every_way_to_train_has_a_result_with_the_listed_versions(tool: Any) -> None:
    results = tool.read()
    expected = {(way.title, way.attached): program.versions for program in tool.PROGRAMS for way in program.ways}
    assert {key: result.versions for key, result in results.items()} == expected, "make built-on trains with the other programs"


def test_every_recorded_training_is_the_same_with_callsheet(tool: Any) -> None:
    """Training with callsheet gives the same results. A new result that differs must be examined before it is committed."""
    for result in tool.read().values():
        if result.verdict == "trains":
            assert (result.order, result.weights) == ("", True), result.title
            assert result.steps == result.own_steps > 0, result.title
            assert result.losses == pytest.approx(result.own_losses, rel=1e-6), result.title
