"""Recipes on two ranks: started by torchrun, and by `callsheet.launch`."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

import callsheet
from callsheet.callbacks import LRMonitor
from callsheet.errors import ConfigError
from callsheet.loggers import read_metrics
from callsheet.recipes import PretrainConfig
from callsheet.recipes.data.byte_files import ByteFiles
from callsheet.recipes.models.language_model import LanguageModel
from forked import python  # type: ignore[import-not-found]  # pytest has its folder on the path

from .sample import PretrainWithPredictions, contents

TESTS = Path(__file__).parent.parent


def torchrun(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [python(), "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "callsheet", *arguments]
    environment = os.environ | {"PYTHONPATH": str(TESTS), "CALLSHEET_DATA__VALIDATION_WINDOWS": "6"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=280)


@pytest.mark.test_all
def test_with_torchrun_only_one_rank_prints(recipe_folder: Path) -> None:
    done = torchrun("train", "tiny.yaml", "--parallel", "ddp")
    assert done.returncode == 0, done.stderr
    for once in (
        "the whole call sheet: callsheet show",
        "Starting the run 'tiny'",
        "nats per token",
        "Its report: runs/tiny/report.html",
    ):
        assert done.stdout.count(once) == 1, done.stdout
    assert "on cpu of 2 ranks" in done.stdout
    assert Path("runs/tiny/report.html").is_file()
    assert read_metrics("runs/tiny")[-1].step == 6
    assert yaml.safe_load(Path("runs/tiny/config.yaml").read_text())["data"]["validation_windows"] == 6


@pytest.mark.slow
def test_with_torchrun_an_error_in_the_recipe_is_printed_once(recipe_folder: Path) -> None:
    done = torchrun("train", "tiny.yaml", "--batch_sizee", "3")
    assert done.returncode != 0
    assert done.stderr.count("did you mean 'batch_size'?") == 1
    assert not Path("runs").exists()


@pytest.mark.slow
def test_with_torchrun_a_later_error_names_its_rank(recipe_folder: Path) -> None:
    done = torchrun("train", "tiny.yaml", "--data.folder", "nowhere")
    assert done.returncode != 0
    assert "callsheet (rank 0): data.folder: there is no folder nowhere" in done.stderr
    assert 'Traceback (most recent call last):\n  File "' not in done.stderr.partition("torch/distributed")[0]


@pytest.mark.slow
def test_with_torchrun_a_run_of_one_process_is_opened_in_shards(trained: Path) -> None:
    """The checkpoint is from the middle of an epoch and has an average. Scores, predictions and export equal the run's."""
    Path("rows.jsonl").write_text('{"text": "abc"}\n{"text": "abcdef"}\n')
    before = contents(Path("runs"))
    sharded = ["--parallel", "fsdp", "--data.validation_windows", "4"]
    evaluated = torchrun("evaluate", "averaged", "--out", "scores.json", "--callbacks", "[]", *sharded)
    assert evaluated.returncode == 0, evaluated.stderr
    assert evaluated.stdout.count("step 6") == 1
    found = json.loads(Path("scores.json").read_text())["results"]["validation"]["loss"]
    losses = [record.values["validation/loss"] for record in read_metrics("runs/averaged") if "validation/loss" in record.values]
    assert found == pytest.approx(losses[-1], rel=1e-4)
    exported = torchrun("export", "averaged", "out", *sharded)
    assert exported.returncode == 0, exported.stderr
    ours, expected = (load_file(f"{folder}/model.safetensors") for folder in ("out", "runs/averaged/export"))
    assert all(ours[name].equal(expected[name]) for name in expected)
    assert contents(Path("runs")) == before


@pytest.mark.slow
def test_an_average_in_other_shards_is_rejected_with_a_hint(trained: Path) -> None:
    rejected = torchrun("evaluate", "averaged", "--parallel", "fsdp", "--data.validation_windows", "4")
    assert rejected.returncode != 0
    assert "--callbacks '[]' evaluates the weights of the checkpoint without it" in rejected.stderr


# --- launch ---


@pytest.mark.slow
def test_a_recipe_file_is_launched(recipe_folder: Path) -> None:
    results = callsheet.launch(
        "tiny.yaml", overrides=["--batch_size", "1", "--callbacks+=commands.sample.WritesEvents"], callbacks=[LRMonitor()]
    )
    config = yaml.safe_load(Path("runs/tiny/config.yaml").read_text())
    assert config["batch_size"] == 1
    last = [record.values for record in read_metrics("runs/tiny") if "validation/loss" in record.values][-1]
    assert results["validation/loss"] == last["validation/loss"]
    assert any("lr/AdamW/0" in record.values for record in read_metrics("runs/tiny"))
    assert Path("events.txt").read_text().count("on_train_start") == 2


@pytest.mark.slow
def test_a_recipe_that_is_built_in_python_is_launched(recipe_folder: Path) -> None:
    config = PretrainConfig(
        run_name="python",
        max_duration="3ba",
        threads=1,
        batch_size=2,
        prompts=[],
        data=ByteFiles("texts", sequence_length=16, validation_windows=4, validation_percent=20, test_percent=20),
        model=LanguageModel(hidden_size=16, layers=1, heads=2, intermediate_size=16),
    )
    results = callsheet.launch(PretrainWithPredictions(config, callbacks=[LRMonitor()]))
    assert {"validation/loss", "unigram"} <= results.keys()


def test_errors_in_a_recipe_are_found_before_ranks_start(recipe_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("something was started")

    monkeypatch.setattr(subprocess, "Popen", fail)
    with pytest.raises(ConfigError, match=r"there is no key 'batch_sizee'; did you mean 'batch_size'\?"):
        callsheet.launch("tiny.yaml", overrides=["--batch_sizee", "3"])
    with pytest.raises(ConfigError, match="there is no recipe 'pretran'; did you mean 'pretrain'"):
        callsheet.launch("pretran")
    with pytest.raises(ConfigError, match="batch_size=0"):
        callsheet.launch(Path("tiny.yaml"), overrides=["--batch_size", "0"])
    with pytest.raises(ConfigError, match="set the values in the recipe's config"):
        callsheet.launch(PretrainWithPredictions(), overrides=["--batch_size", "1"])
    with pytest.raises(ConfigError, match="give a function its args"):
        callsheet.launch(fail, overrides=["--batch_size", "1"])  # type: ignore[call-overload]  # the mistake that is tested
