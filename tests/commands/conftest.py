"""A small recipe, and runs of it that are trained once for all tests of commands that open a run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from callsheet.cli.main import main

RECIPE = """
recipe: commands.sample.PretrainWithPredictions
run_name: tiny
max_duration: 6ba
eval_interval: 3ba
log_interval: 2
batch_size: 2
threads: 1
generated_tokens: 4
prompts: ["def "]
model: {hidden_size: 16, layers: 1, heads: 2, intermediate_size: 16}
data: {folder: texts, sequence_length: 16, validation_windows: 4, validation_percent: 20, test_percent: 20}
optimizer: {class_path: torch.optim.AdamW, init_args: {lr: 2.0e-2}}
callbacks:
  - class_path: callsheet.callbacks.CheckpointSaver
    init_args: {save_interval: 3ba}
loggers:
  - class_path: callsheet.loggers.JSONLLogger
"""

TRACED = """
export: true
callbacks:
  - class_path: callsheet.callbacks.CheckpointSaver
    init_args: {save_interval: 3ba}
  - class_path: commands.sample.WritesEvents
"""


def write_sample(folder: Path) -> None:
    (folder / "texts").mkdir()
    for number in range(60):
        (folder / "texts" / f"{number}.py").write_text(f"def f{number}(x):\n    return x + {number}\n" * 8)
    (folder / "tiny.yaml").write_text(RECIPE)
    (folder / "traced.yaml").write_text(TRACED)


@pytest.fixture
def recipe_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a folder with the recipe and change to it."""
    monkeypatch.chdir(tmp_path)
    write_sample(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def trained_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train three runs: `tiny`; `averaged` with an EMA; `shifted` with a callback that changes the weights in evaluations."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_sample(folder)
        assert main(["train", "tiny.yaml"]) == 0
        traced = ["train", "tiny.yaml", "--config", "traced.yaml"]
        average = '--callbacks+={"class_path": "callsheet.callbacks.EMA", "init_args": {"half_life": 2}}'
        assert main([*traced, average, "--run_name", "averaged"]) == 0
        assert main([*traced, "--callbacks+=commands.sample.DoublesWeights", "--run_name", "shifted"]) == 0
    return folder


@pytest.fixture
def trained(trained_once: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    """Copy the runs to a new folder and change to it."""
    shutil.copytree(trained_once, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    return tmp_path


@pytest.fixture
def run_of_earlier_version(trained: Path) -> str:
    """Return the name of a run whose `config.yaml` has the keys of version 0.1.0."""
    config = trained / "runs" / "tiny" / "config.yaml"
    before = config.read_text()
    config.write_text(before.replace("\ngradient_accumulation_steps:", "\naccumulate:"))
    assert config.read_text() != before
    return "tiny"
