"""`callsheet predict` writes one answer per row, in order, to a file that is complete or does not exist."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from callsheet.cli.main import main
from callsheet.cli.opened import open_run

TEXTS = ["def f(x):", "import os", "class Long:\n    pass"]


def write_rows(texts: list[str], path: str = "rows.jsonl") -> None:
    Path(path).write_text("\n\n".join(json.dumps({"text": text}) for text in texts) + "\n")


def test_each_row_has_its_answer(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(TEXTS)
    assert main(["predict", "tiny", "--input", "rows.jsonl", "--out", "answers.jsonl"]) == 0
    assert capsys.readouterr().out == "3 answers in answers.jsonl\n"
    answers = [json.loads(line) for line in Path("answers.jsonl").read_text().splitlines()]
    assert [answer["length"] for answer in answers] == [len(text) for text in TEXTS]
    assert len({answer["loss"] for answer in answers}) == 3
    assert main(["predict", "tiny", "--input", "rows.jsonl"]) == 0
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == answers


def test_predictions_use_the_average_of_a_run_with_an_ema(trained: Path) -> None:
    """The average is the model that the run evaluated and exported, not the one that was trained."""
    import torch
    from transformers import AutoModelForCausalLM

    write_rows(TEXTS[:1])
    assert main(["predict", "averaged", "--input", "rows.jsonl", "--out", "answers.jsonl"]) == 0
    model = AutoModelForCausalLM.from_pretrained("runs/averaged/export")
    ids = torch.tensor([list(TEXTS[0].encode())])
    assert json.loads(Path("answers.jsonl").read_text())["loss"] == pytest.approx(model(ids, labels=ids).loss.item(), abs=1e-6)


def test_the_opened_model_is_in_evaluation_mode(trained: Path) -> None:
    job = open_run("tiny", [], command="predict")
    with job.trainer:
        assert not any(module.training for module in job.trainer.model.modules())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "a"}\n\n{"txt": "b"}\n', "rows.jsonl:3: there is no column 'text'"),
        ('{"text": "a"}\n{"text": \n', "rows.jsonl:2: this line is not JSON"),
        ("", "rows.jsonl: the file has no rows"),
    ],
)
def test_an_invalid_row_is_rejected_with_its_line(
    trained: Path, capsys: pytest.CaptureFixture[str], content: str, message: str
) -> None:
    Path("rows.jsonl").write_text(content)
    Path("answers.jsonl").write_text("earlier\n")
    assert main(["predict", "tiny", "--input", "rows.jsonl", "--out", "answers.jsonl"]) == 2
    assert message in capsys.readouterr().err
    assert Path("answers.jsonl").read_text() == "earlier\n"
    assert not list(Path().glob(".answers*"))


def test_a_missing_file_and_a_recipe_without_predictions_are_rejected(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "tiny", "--input", "nowhere.jsonl"]) == 2
    assert "there is no file nowhere.jsonl" in capsys.readouterr().err
    write_rows(TEXTS)
    config = Path("runs/tiny/config.yaml")
    config.write_text(config.read_text().replace("commands.sample.PretrainWithPredictions", "pretrain"))
    assert main(["predict", "tiny", "--input", "rows.jsonl"]) == 2
    assert "the recipe Pretrain does not support predictions" in capsys.readouterr().err


def test_a_run_of_an_earlier_version_makes_predictions(run_of_earlier_version: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(TEXTS)
    assert main(["predict", run_of_earlier_version, "--input", "rows.jsonl", "--out", "answers.jsonl"]) == 0
    assert len(Path("answers.jsonl").read_text().splitlines()) == 3
