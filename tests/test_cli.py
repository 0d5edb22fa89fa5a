"""The command line, as a process of its own where it matters."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from callsheet import Callback, Context, __version__, lifecycle
from callsheet.cli import main

TINY = """
recipe: pretrain
run_name: tiny
max_duration: 6ba
eval_interval: 3ba
log_interval: 2
batch_size: 2
threads: 1
generated_bytes: 4
prompts: ["def "]
model: {hidden_size: 16, layers: 1, heads: 2, intermediate_size: 16}
data: {sequence_length: 16, validation_batches: 2, validation_percent: 20}
callbacks:
  - class_path: callsheet.callbacks.CheckpointSaver
    init_args: {save_interval: 3ba}
loggers:
  - class_path: callsheet.loggers.RunLog
"""


class Misspelt(Callback):
    def on_train_stepend(self, ctx: Context) -> None: ...


def test_a_callback_is_found_in_the_current_folder(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("shouting.py").write_text(
        "from callsheet import Callback\nclass Shout(Callback):\n    def on_run_end(self, ctx):\n        print('LOUD', ctx.run.outcome)\n"
    )
    command = [sys.executable, "-c", "import sys; del sys.path[0]; from callsheet.cli import main; sys.exit(main(sys.argv[1:]))"]
    arguments = ["train", "tiny.yaml", "--data.folder", "texts", "--callbacks", '[{"class_path": "shouting.Shout"}]']
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
    assert "LOUD finished" in done.stdout, done.stderr


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    for number in range(60):
        (tmp_path / "texts" / f"{number}.py").write_text(f"def f{number}(x):\n    return x + {number}\n" * 8)
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    return path


def steps_in(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines() if "values" in line]


def test_a_recipe_trains_and_says_where_everything_lies(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(recipe), "--data.folder", "texts"]) == 0
    out = capsys.readouterr().out
    assert out.index("on_checkpoint_due") < out.index("Starting the run 'tiny'") < out.index("nats a byte")
    for name in ("validation/loss", "unigram", "bigram", "runs/tiny", "ep0-ba6"):
        assert name in out
    assert steps_in(Path("runs/tiny"))[-1] == 6


def test_run_again_it_goes_on_or_starts_anew_as_it_is_told(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["train", str(recipe), "--data.folder", "texts"]
    assert main(arguments) == 0
    capsys.readouterr()
    assert main(arguments) == 0
    assert "complete at step 6; --max_duration 12ba goes on" in capsys.readouterr().out
    assert main([*arguments, "--max_duration", "9ba"]) == 0
    assert "at step 6, 67% of 9ba; going on with it" in capsys.readouterr().out
    assert max(steps_in(Path("runs/tiny"))) == 9
    assert main([*arguments, "--resume", "new"]) == 0
    assert "is now runs/tiny.1; starting anew" in capsys.readouterr().out
    assert max(steps_in(Path("runs/tiny"))) == 6
    assert max(steps_in(Path("runs/tiny.1"))) == 9


def test_the_resolved_configuration_repeats_the_run(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(recipe), "--data.folder", "texts", "--seed", "3"]) == 0
    assert main(["train", "runs/tiny/config.yaml", "--run_name", "again"]) == 0
    first, second = (Path(f"runs/{name}/metrics.jsonl").read_text().splitlines() for name in ("tiny", "again"))
    losses = [[json.loads(line)["values"].get("train/loss") for line in lines if "values" in line] for lines in (first, second)]
    assert losses[0] == losses[1]
    assert any(losses[0])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train", "pretran"], "there is no recipe 'pretran'; did you mean 'pretrain'?"),
        (["train", "tiny.yaml", "--max_durtion", "3ba"], "did you mean 'max_duration'?"),
        (["train", "tiny.yaml", "--optimizer.learning_rte", "1"], "did you mean 'optimizer.learning_rate'?"),
        (["train", "tiny.yaml", "--batch_size", "many"], "batch_size"),
        (["train", "tiny.yaml", "--max_duration", "3parsecs"], "unknown unit 'parsecs'"),
        (["train", "tiny.yaml", "--data.folder", "nowhere"], "there is no folder nowhere"),
        (["train", "tiny.yaml", "--batch_size", "0"], "batch_size=0: give a whole number above 0"),
        (["train", "tiny.yaml", "--model.hiden_size", "8"], "did you mean 'model.hidden_size'?"),
        (["train", "tiny.yaml", "--callbacks", '[{"class_path": "test_cli.Misspelt"}]'], "did you mean 'on_train_step_end'?"),
        (["train", "broken.yaml"], "broken.yaml is not YAML"),
        (["train", "nameless.yaml"], "its key `recipe` must name one of pretrain"),
        (["train", "misspelt.yaml"], "'max_durtion' is not accepted; did you mean 'max_duration'?"),
    ],
)
def test_bad_input_is_named_with_its_mend(
    recipe: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    Path("broken.yaml").write_text("recipe: [")
    Path("nameless.yaml").write_text("max_duration: 3ba")
    Path("misspelt.yaml").write_text(TINY + "max_durtion: 3ba\n")
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert said in err
    assert "Traceback" not in err
    assert not Path("runs/tiny/checkpoints").exists()


def test_a_callback_that_does_not_exist_is_named(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "tiny.yaml", "--callbacks", '[{"class_path": "callsheet.callbacks.LRMonitr"}]']) == 2
    assert "LRMonitr" in capsys.readouterr().err


def test_events_prints_the_lifecycle(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["events"]) == 0
    printed = capsys.readouterr().out
    assert all(span in printed for span in lifecycle.SPANS)


def test_as_a_module_it_says_its_version() -> None:
    done = subprocess.run([sys.executable, "-m", "callsheet", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"callsheet {__version__}"


def test_help_explains_the_keys(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["train", "tiny.yaml", "--help"])
    assert stopped.value.code == 0
    printed = capsys.readouterr().out
    assert "--optimizer.learning_rate" in printed
    assert "after the warm-up" in printed


def test_going_on_with_another_job_is_refused(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["train", "tiny.yaml", "--data.folder", "texts"]
    assert main(arguments) == 0
    before = Path("runs/tiny/config.yaml").read_text()
    assert main([*arguments, "--max_duration", "9ba", "--batch_size", "4", "--optimizer.learning_rate", "0.5"]) == 2
    assert "holds a run with another batch_size, optimizer; --resume new sets it aside" in capsys.readouterr().err
    assert Path("runs/tiny/config.yaml").read_text() == before


def test_a_run_without_a_checkpoint_is_set_aside(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("runs/tiny").mkdir(parents=True)
    Path("runs/tiny/metrics.jsonl").write_text("")
    assert main(["train", "tiny.yaml", "--data.folder", "texts"]) == 0
    assert "which had no checkpoint, is now runs/tiny.1; starting anew" in capsys.readouterr().out
    assert steps_in(Path("runs/tiny"))[-1] == 6


def test_a_set_up_that_fails_leaves_the_run_where_it_was(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["train", "tiny.yaml", "--data.folder", "texts"]
    assert main(arguments) == 0
    before = Path("runs/tiny/config.yaml").read_text()
    with pytest.raises(ValueError, match="learning rate"):
        main([*arguments, "--resume", "new", "--optimizer.learning_rate", "-1", "--loggers", "[]"])
    assert Path("runs/tiny/config.yaml").read_text() == before
    assert not Path("runs/tiny.1").exists()


def test_a_checkpoint_that_is_named_is_resumed_from_also_by_a_new_run(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["train", "tiny.yaml", "--data.folder", "texts"]
    assert main(arguments) == 0
    capsys.readouterr()
    assert main([*arguments, "--run_name", "other", "--resume", "runs/tiny/checkpoints/ep0-ba3"]) == 0
    assert "Found the run 'other' at step 3, 50% of 6ba" in capsys.readouterr().out
    assert steps_in(Path("runs/other"))[0] > 3
    assert main([*arguments, "--run_name", "third", "--resume", "runs/tiny/checkpoints/ep0-ba4"]) == 1
    assert "there is no such checkpoint" in capsys.readouterr().err
