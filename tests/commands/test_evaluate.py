"""`callsheet evaluate` computes the run's results from its checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from callsheet.cli.main import main
from callsheet.cli.recipe import prepare_recipe
from callsheet.loggers import read_metrics

from .sample import contents


def last_of(run: Path, metric: str) -> float:
    return [record.values[metric] for record in read_metrics(run) if metric in record.values][-1]


@pytest.mark.parametrize("run", ["tiny", "averaged", "shifted"])
def test_evaluate_computes_the_run_s_results_and_does_not_change_the_run(
    trained: Path, capsys: pytest.CaptureFixture[str], run: str
) -> None:
    folder = Path("runs") / run
    before = contents(Path())
    assert main(["evaluate", run, "--out", "scores.json"]) == 0
    after = contents(Path())
    recorded = json.loads(after.pop("scores.json")[0])
    assert after == before  # and no observer was called
    assert recorded["run"] == f"runs/{run}"
    assert recorded["step"] == 6
    assert recorded["results"] == {name: {"loss": last_of(folder, f"{name}/loss")} for name in ("validation", "test")}
    printed = capsys.readouterr()
    assert printed.err == ""
    head, columns, *rows = printed.out.splitlines()
    assert head == f"runs/{run}, step 6:"
    assert columns.split() == ["loss"]
    assert [row.split()[0] for row in rows] == ["validation", "test"]
    assert float(rows[0].split()[1]) == pytest.approx(recorded["results"]["validation"]["loss"], rel=1e-5)


def test_callbacks_that_change_weights_are_used(trained: Path) -> None:
    assert main(["evaluate", "shifted", "--out", "with.json"]) == 0
    assert main(["evaluate", "shifted", "--callbacks", "[]", "--out", "without.json"]) == 0
    losses = [json.loads(Path(name).read_text())["results"]["validation"]["loss"] for name in ("with.json", "without.json")]
    assert abs(losses[0] - losses[1]) > 1e-3


def test_an_earlier_checkpoint_is_evaluated_by_its_name(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "runs/tiny", "--checkpoint", "ep0-ba3", "--out", "three.json"]) == 0
    assert "runs/tiny, step 3:" in capsys.readouterr().out
    found = json.loads(Path("three.json").read_text())["results"]["validation"]["loss"]
    first = next(record.values["validation/loss"] for record in read_metrics("runs/tiny") if "validation/loss" in record.values)
    assert found == first
    assert main(["evaluate", "tiny", "--checkpoint", "runs/tiny/checkpoints/ep0-ba3"]) == 0


def test_a_renamed_run_can_be_evaluated(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("runs/tiny").rename("kept")
    assert main(["evaluate", "kept"]) == 0
    assert "kept, step 6:" in capsys.readouterr().out
    assert not Path("runs/tiny").exists()


def test_a_run_is_found_by_its_recipe_file_and_evaluated_with_other_values(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", "tiny.yaml", "--eval_batch_size", "1"]) == 0
    assert "runs/tiny, step 6:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tiyn"], "there is no run 'tiyn'; did you mean 'tiny'? (a run's folder, its name in runs/, or a recipe file)"),
        (["texts"], "texts has no config.yaml"),
        (["tiny", "--checkpoint", "ep0-ba5"], "there is no checkpoint 'ep0-ba5'; did you mean 'ep0-ba"),
        (["tiny.yaml", "--run_name", "another"], "runs/another has no checkpoint; train first"),
        (["tiny", "--eval_batchsize", "3"], "did you mean 'eval_batch_size'?"),
        (["tiny", "--out", "texts"], "texts is a folder; name another file with --out"),
    ],
)
def test_missing_runs_and_checkpoints_are_rejected_with_a_hint(
    trained: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["evaluate", *arguments]) in (1, 2)
    assert message in capsys.readouterr().err


def test_a_run_with_only_bad_checkpoints_is_rejected(recipe_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            ["train", "tiny.yaml", "--optimizer.lr", "1e20", "--max_duration", "3ba", "--prompts", "[]", "--stop_on_nan", "false"]
        )
        == 0
    )
    capsys.readouterr()
    assert main(["evaluate", "tiny"]) == 2
    assert "has no good checkpoint: 1 have weights or a loss that are not finite" in capsys.readouterr().err


def test_an_unknown_argument_is_rejected(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["evaluate", "tiny", "more"])
    assert stopped.value.code == 2
    assert "unknown arguments: more" in capsys.readouterr().err


def test_a_run_of_an_earlier_version_is_evaluated(run_of_earlier_version: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(Path("runs"))
    assert main(["evaluate", run_of_earlier_version, "--out", "scores.json"]) == 0
    assert contents(Path("runs")) == before
    recorded = json.loads(Path("scores.json").read_text())
    assert recorded["run"] == "runs/tiny"
    assert recorded["results"]["test"] == {"loss": last_of(Path("runs/tiny"), "test/loss")}


def test_a_mistake_in_the_file_of_an_earlier_version_is_reported_with_its_line(
    run_of_earlier_version: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = Path("runs/tiny/config.yaml")
    config.write_text(f"{config.read_text()}batch_sice: 3\n")
    assert main(["evaluate", run_of_earlier_version]) == 2
    line = len(config.read_text().splitlines())
    assert f"runs/tiny/config.yaml:{line}: there is no key 'batch_sice'; did you mean 'batch_size'?" in capsys.readouterr().err


def test_a_finetuning_of_an_earlier_version_is_read(recipe_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    resolved = prepare_recipe("finetune", command="train").resolved
    before = resolved.replace("gradient_accumulation_steps:", "accumulate:").replace("too_long: reject", "too_long: refuse")
    Path("runs/old").mkdir(parents=True)
    Path("runs/old/config.yaml").write_text(before)
    assert main(["evaluate", "old"]) == 2
    assert "runs/old has no checkpoint; train first" in capsys.readouterr().err
