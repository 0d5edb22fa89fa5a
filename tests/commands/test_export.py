"""`callsheet export` writes the model that the run itself would have exported."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from callsheet.checkpoint import find_checkpoints, read_checkpoint
from callsheet.cli.main import main

from .sample import contents


@pytest.mark.parametrize("run", ["averaged", "shifted"])
def test_the_export_equals_the_run_s_own_export(trained: Path, capsys: pytest.CaptureFixture[str], run: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    before = contents(Path("runs"))
    assert main(["export", run, "out"]) == 0
    assert contents(Path("runs")) == before
    assert capsys.readouterr().out.startswith(f"runs/{run}, step 6: out (")
    ours, expected = (load_file(f"{folder}/model.safetensors") for folder in ("out", f"runs/{run}/export"))
    assert ours.keys() == expected.keys()
    assert all(ours[name].equal(expected[name]) for name in ours)
    AutoModelForCausalLM.from_pretrained("out")
    assert AutoTokenizer.from_pretrained("out")("def").input_ids == list(b"def")


def test_an_earlier_checkpoint_is_exported(trained: Path) -> None:
    assert main(["export", "tiny", "last"]) == 0
    assert main(["export", "tiny", "early", "--checkpoint", "ep0-ba3"]) == 0
    last, early = (load_file(f"{folder}/model.safetensors") for folder in ("last", "early"))
    assert not any(last[name].equal(early[name]) for name in last)
    (checkpoint,) = [each for each in find_checkpoints(Path("runs/tiny/checkpoints")).checkpoints if each.step == 3]
    saved = read_checkpoint(checkpoint.path).shared["model"]
    assert all(early[name].equal(saved[name]) for name in early)


@pytest.mark.parametrize(
    ("folder", "message"), [("texts", "texts is not empty; name a new folder"), ("tiny.yaml", "tiny.yaml is a file")]
)
def test_an_existing_folder_or_file_is_not_overwritten(
    trained: Path, capsys: pytest.CaptureFixture[str], folder: str, message: str
) -> None:
    assert main(["export", "tiny", folder]) == 2
    assert message in capsys.readouterr().err


def test_a_run_of_an_earlier_version_is_exported(run_of_earlier_version: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", run_of_earlier_version, "out"]) == 0
    assert capsys.readouterr().out.startswith("runs/tiny, step 6: out (")
    assert load_file("out/model.safetensors")
