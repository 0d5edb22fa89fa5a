"""The command line, as a process of its own where it matters."""

import io
import json
import os
import re
import shutil
import subprocess
import sys
from datetime import date
from pathlib import Path

import pytest

from callsheet import Callback, Context, __version__
from callsheet.cli.arguments import command_line_parser
from callsheet.cli.main import _COMMANDS, main
from callsheet.core import lifecycle
from callsheet.loggers import read_metrics
from callsheet.report import RunFolder
from callsheet.report.notes import Notes
from callsheet.run.run_lock import RunLock
from callsheet.run.run_marker import mark_run
from forked import python  # type: ignore[import-not-found]  # pytest has its folder on the path

TINY = """
recipe: pretrain
run_name: tiny
max_duration: 6ba
eval_interval: 3ba
log_interval: 2
batch_size: 2
threads: 1
generated_tokens: 4
prompts: ["def "]
model: {hidden_size: 16, layers: 1, heads: 2, intermediate_size: 16}
data: {sequence_length: 16, validation_windows: 4, validation_percent: 20, test_percent: 20}
optimizer: {class_path: torch.optim.AdamW, init_args: {lr: 2.0e-3}}
callbacks:
  - class_path: callsheet.callbacks.CheckpointSaver
    init_args: {save_interval: 3ba}
loggers:
  - class_path: callsheet.loggers.JSONLLogger
"""


class Misspelt(Callback):
    def on_train_stepend(self, ctx: Context) -> None: ...


@pytest.mark.test_all
def test_a_callback_is_found_in_the_current_folder(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("shouting.py").write_text(
        "from callsheet import Callback\nclass Shout(Callback):\n    def on_run_end(self, ctx):\n        print('LOUD', ctx.run.outcome)\n"
    )
    command = [
        python(),
        "-c",
        "import sys; del sys.path[0]; from callsheet.cli.main import main; sys.exit(main(sys.argv[1:]))",
    ]
    arguments = ["train", "tiny.yaml", "--data.folder", "texts", "--callbacks", '[{"class_path": "shouting.Shout"}]']
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
    assert "LOUD finished" in done.stdout, done.stderr


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_recipe(tmp_path)


def write_recipe(folder: Path) -> Path:
    (folder / "texts").mkdir()
    for number in range(60):
        (folder / "texts" / f"{number}.py").write_text(f"def f{number}(x):\n    return x + {number}\n" * 8)
    path = folder / "tiny.yaml"
    path.write_text(TINY)
    return path


def steps_in(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines() if "values" in line]


def test_train_runs_a_recipe_and_prints_the_paths_of_its_results(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(recipe), "--data.folder", "texts"]) == 0
    out = capsys.readouterr().out
    assert (
        out.index("callbacks and loggers (the whole call sheet: callsheet show")
        < out.index("Starting the run 'tiny'")
        < out.index("nats per token")
    )
    assert "\ncallback " in out.partition("Starting the run")[0]
    for name in ("validation/loss", "unigram", "bigram", "runs/tiny", "ep0-ba6"):
        assert name in out
    assert out.rstrip().splitlines()[-1] == "Its report: runs/tiny/report.html"
    assert Path("runs/tiny/report.html").stat().st_size > 1_000_000
    assert steps_in(Path("runs/tiny"))[-1] == 6


def test_without_loggers_train_writes_no_report(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe.write_text(TINY.partition("loggers:")[0] + "loggers: []\n")
    assert main(["train", str(recipe), "--data.folder", "texts", "--run_name", "silent", "--callbacks", "[]"]) == 0
    assert "report" in capsys.readouterr().out.rstrip().splitlines()[-1]


def test_a_repeated_command_continues_the_run_or_starts_a_new_one_as_requested(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["train", str(recipe), "--data.folder", "texts"]
    assert main(arguments) == 0
    capsys.readouterr()
    assert main(arguments) == 0
    assert "complete at step 6; --max_duration 12ba continues it" in capsys.readouterr().out
    assert main([*arguments, "--max_duration", "9ba"]) == 0
    assert "at step 6, 67% of 9ba; resuming it" in capsys.readouterr().out
    assert max(steps_in(Path("runs/tiny"))) == 9
    assert main([*arguments, "--resume", "new"]) == 0
    assert "is now runs/tiny.1; starting a new one" in capsys.readouterr().out
    assert max(steps_in(Path("runs/tiny"))) == 6
    assert max(steps_in(Path("runs/tiny.1"))) == 9


def test_training_from_the_saved_configuration_gives_the_same_losses(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(recipe), "--data.folder", "texts", "--seed", "3"]) == 0
    assert main(["train", "runs/tiny/config.yaml", "--run_name", "again"]) == 0
    first, second = (Path(f"runs/{name}/metrics.jsonl").read_text().splitlines() for name in ("tiny", "again"))
    losses = [[json.loads(line)["values"].get("train/loss") for line in lines if "values" in line] for lines in (first, second)]
    assert losses[0] == losses[1]
    assert any(losses[0])


def test_each_command_has_arguments_and_a_function() -> None:
    assert set(command_line_parser().get_default("commands")) == set(_COMMANDS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "pretran"], "there is no recipe 'pretran'; did you mean 'pretrain'?"),
        (["train", "train.py"], "train.py is a Python script, not a recipe; run a training script with: callsheet exec train.py"),
        (["train", "tiny.yaml", "--max_durtion", "3ba"], "did you mean 'max_duration'?"),
        (["train", "tiny.yaml", "--max_dur", "3ba"], "did you mean 'max_duration'?"),
        (["train", "tiny.yaml", "--optimizer.lrr", "1"], "did you mean 'optimizer.lr'?"),
        (["train", "tiny.yaml", "--batch_size", "many"], "batch_size"),
        (["train", "tiny.yaml", "--max_duration", "3parsecs"], "unknown unit 'parsecs'"),
        (["train", "tiny.yaml", "--data.folder", "nowhere"], "there is no folder nowhere"),
        (["train", "tiny.yaml", "--batch_size", "0"], "batch_size=0: give a whole number above 0"),
        (["train", "tiny.yaml", "--workers", "-1"], "workers=-1: give 0 or more processes"),
        (["train", "tiny.yaml", "--model.heads", "0"], "model.heads=0: give a whole number above 0"),
        (["train", "distill", "--teacher.heads", "0"], "callsheet: teacher.heads=0: give a whole number above 0"),
        (["train", "distill", "--teacher.hidden_size", "30"], "callsheet: teacher.hidden_size=30 does not divide into 4 heads"),
        (["train", "tiny.yaml", "--model.hiden_size", "8"], "did you mean 'model.hidden_size'?"),
        (["train", "tiny.yaml", "--callbacks", '[{"class_path": "test_cli.Misspelt"}]'], "did you mean 'on_train_step_end'?"),
        (["train", "broken.yaml"], "broken.yaml:1: this is not YAML"),
        (["train", "nameless.yaml"], "its key `recipe` must name one of "),
        (["train", "misspelled.yaml"], "misspelled.yaml:19: there is no key 'max_durtion'; did you mean 'max_duration'?"),
    ],
)
def test_bad_input_is_named_with_a_hint(
    recipe: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    Path("broken.yaml").write_text("recipe: [")
    Path("nameless.yaml").write_text("max_duration: 3ba")
    Path("misspelled.yaml").write_text(TINY + "max_durtion: 3ba\n")
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert message in err
    assert "Traceback" not in err
    assert not Path("runs/tiny/checkpoints").exists()


def test_a_callback_that_does_not_exist_is_named(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "tiny.yaml", "--callbacks", '[{"class_path": "callsheet.callbacks.LRMonitr"}]']) == 2
    assert "LRMonitr" in capsys.readouterr().err


def test_events_prints_the_lifecycle(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["events"]) == 0
    printed = capsys.readouterr().out
    assert all(span in printed for span in lifecycle.SPANS)


def test_run_as_a_module_it_prints_its_version() -> None:
    done = subprocess.run([sys.executable, "-m", "callsheet", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"callsheet {__version__}"


def test_help_explains_the_keys(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["train", "tiny.yaml", "--help"])
    assert stopped.value.code == 0
    printed = capsys.readouterr().out
    assert "--model.hidden_size" in printed
    assert "width of the residual stream" in printed


def test_resuming_with_other_settings_is_rejected(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["train", "tiny.yaml", "--data.folder", "texts"]
    assert main(arguments) == 0
    before = Path("runs/tiny/config.yaml").read_text()
    assert main([*arguments, "--max_duration", "9ba", "--batch_size", "4", "--optimizer.lr", "0.5"]) == 2
    error = capsys.readouterr().err
    assert "holds a run with another batch_size, optimizer (" in error
    assert "--resume new sets the run aside and starts a new one; --run_name NAME" in error
    assert Path("runs/tiny/config.yaml").read_text() == before


def test_a_folder_of_a_run_without_a_checkpoint_is_renamed(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("runs/tiny").mkdir(parents=True)
    Path("runs/tiny/metrics.jsonl").write_text("")
    mark_run(Path("runs/tiny"), "tiny")  # the file that marks a run whose training has begun
    assert main(["train", "tiny.yaml", "--data.folder", "texts"]) == 0
    assert "which had no checkpoint, is now runs/tiny.1; starting a new one" in capsys.readouterr().out
    assert steps_in(Path("runs/tiny"))[-1] == 6


def test_a_failed_set_up_does_not_change_the_earlier_run(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["train", "tiny.yaml", "--data.folder", "texts"]
    assert main(arguments) == 0
    before = Path("runs/tiny/config.yaml").read_text()
    capsys.readouterr()
    assert main([*arguments, "--resume", "new", "--optimizer.lr", "-1", "--loggers", "[]"]) == 2
    assert "optimizer: it cannot be created: ValueError: Invalid learning rate: -1" in capsys.readouterr().err
    assert Path("runs/tiny/config.yaml").read_text() == before
    assert not Path("runs/tiny.1").exists()


def test_a_new_run_can_resume_from_a_checkpoint_of_another_run(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["train", "tiny.yaml", "--data.folder", "texts"]
    assert main(arguments) == 0
    capsys.readouterr()
    assert main([*arguments, "--run_name", "other", "--resume", "runs/tiny/checkpoints/ep0-ba3"]) == 0
    assert "Found the run 'other' at step 3, 50% of 6ba" in capsys.readouterr().out
    assert steps_in(Path("runs/other"))[0] > 3
    assert main([*arguments, "--run_name", "third", "--resume", "runs/tiny/checkpoints/ep0-ba4"]) == 1
    assert "there is no such checkpoint" in capsys.readouterr().err


# --- show ---


def test_show_prints_the_call_sheet_and_creates_no_file(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(Path().rglob("*"))
    arguments = ["tiny.yaml", "--data.folder", "nowhere", "--max_duration", "9ba", "--callbacks+=callsheet.callbacks.LRMonitor"]
    assert main(["show", *arguments]) == 0
    printed = capsys.readouterr().out
    assert sorted(Path().rglob("*")) == before
    heads, *rows = (line.split() for line in printed.partition("\n\n")[0].splitlines())
    assert heads == ["event", "phase", "callback", "ranks", "lane", "every"]
    assert ["on_checkpoint_due", "save", "CheckpointSaver", "all", "inline"] in rows
    assert ["on_log", "measure", "LRMonitor", "all", "inline"] in rows
    words = " ".join(printed.split())
    for setting in ("max_duration 9ba", "hidden_size 16", "Run folder: runs/tiny (does not exist yet)"):
        assert setting in words
    assert printed.endswith(f"Start it: callsheet train {' '.join(arguments)}\n")


def test_show_prints_the_call_sheet_that_train_writes(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "tiny.yaml", "--data.folder", "texts"]) == 0
    assert main(["show", "tiny.yaml", "--data.folder", "texts"]) == 0
    printed = capsys.readouterr().out
    sheet = Path("runs/tiny/call_sheet.txt").read_text()
    assert printed.count(sheet) == 1
    assert "Run folder: runs/tiny (has a run already; resume: auto)" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pretran"], "there is no recipe or run 'pretran'; did you mean 'pretrain'?"),
        (["tiny.yaml", "--max_durtion", "3ba"], "did you mean 'max_duration'? (callsheet show tiny.yaml --help"),
        (["tiny.yaml", "--batch_size", "0"], "batch_size=0"),
        (["tiny.yaml", "--callbacks", '[{"class_path": "test_cli.Misspelt"}]'], "did you mean 'on_train_step_end'?"),
    ],
)
def test_show_rejects_what_train_rejects(
    recipe: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["show", *arguments]) == 2
    assert message in capsys.readouterr().err


# --- runs, report ---


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe and three runs of it."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_recipe(folder)
        for name, steps in (("short", "3ba"), ("long", "9ba"), ("middle", "6ba")):
            assert main(["train", "tiny.yaml", "--data.folder", "texts", "--run_name", name, "--max_duration", steps]) == 0
    return folder


@pytest.fixture
def three_runs(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("report.html", "trace.json"))
    monkeypatch.chdir(tmp_path)
    return Path("runs")


def names_in(table: str) -> list[str]:
    return [line.split()[0] for line in table.splitlines()[1:]]


def test_runs_lists_the_runs_newest_first(three_runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs"]) == 0
    captured = capsys.readouterr()
    heads, *lines = captured.out.splitlines()
    assert heads.split() == [
        "name",
        "outcome",
        "steps",
        "duration",
        "train/loss",
        "validation/loss",
        "lowest",
        "highest",
        "started",
        "device",
        "reason",
    ]
    assert [line.split()[:3] for line in lines] == [
        ["middle", "finished", "6"],
        ["long", "finished", "9"],
        ["short", "finished", "3"],
    ]
    results = {name: read_metrics(three_runs / name) for name in ("short", "long", "middle")}
    for line in lines:
        name, _, _, _, train_loss, last, lowest, highest, _, _, device, *reason = line.split()
        losses = [record.values["validation/loss"] for record in results[name] if "validation/loss" in record.values]
        trained = [record.values["train/loss"] for record in results[name] if "train/loss" in record.values]
        recorded = [f"{value:.4g}" for value in (trained[-1], losses[-1], min(losses), max(losses))]
        assert [train_loss, last, lowest, highest, device] == [*recorded, "cpu"]
        assert reason[:2] == ["reached", "max_duration,"]
    assert captured.err == ""


def test_runs_are_sorted_by_the_given_column(three_runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def order(*arguments: str) -> list[str]:
        assert main(["runs", *arguments]) == 0
        return names_in(capsys.readouterr().out)

    assert order("--sort", "steps") == ["long", "middle", "short"]
    assert order("--sort", "steps", "--reverse") == ["short", "middle", "long"]
    assert order("--sort", "name") == ["long", "middle", "short"]
    assert order("--reverse") == ["short", "long", "middle"]
    (three_runs / "bare").mkdir()
    (three_runs / "bare" / "events.jsonl").touch()
    assert order("--sort", "lowest")[-1] == order("--sort", "lowest", "--reverse")[-1] == "bare"


def test_runs_as_json_has_all_metrics(three_runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (three_runs / "bare").mkdir()
    (three_runs / "bare" / "events.jsonl").touch()
    assert main(["runs", "--json", "--sort", "name"]) == 0
    bare, first, *others = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert (first["name"], first["folder"], first["steps"], len(others)) == ("long", "runs/long", 9, 2)
    assert first["metrics"]["time/batch"] == {
        "last": 9,
        "last_step": 9,
        "lowest": 2,
        "lowest_step": 2,
        "highest": 9,
        "highest_step": 9,
    }
    assert (bare["name"], bare["started"], bare["metrics"]) == ("bare", None, {})


def test_runs_can_be_sorted_by_another_metric(three_runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "--metric", "time/batch", "--sort", "highest"]) == 0
    printed = capsys.readouterr().out
    assert names_in(printed) == ["long", "middle", "short"]
    assert printed.splitlines()[1].split()[5:8] == ["9", "2", "9"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["runs", "nowhere"], "there is no folder nowhere; give the folder that contains the runs' folders"),
        (
            ["runs", "--sort", "step"],
            "there is no column 'step', and no run in runs has such a metric or setting; did you mean 'steps'?",
        ),
        (
            ["runs", "--metric", "validation/los"],
            "there is no column 'validation/los', and no run in runs has such a metric or setting; did you mean 'validation/loss'?",
        ),
        (["report", "midle"], "there is no run 'midle'; did you mean 'middle'? (a run's folder, or its name in runs/)"),
        (["report", "runs/midle"], "there is no run 'runs/midle'; did you mean 'middle'?"),
        (["report", "runs"], "runs holds no run; there are runs in it, such as runs/long"),
        (["watch", "texts/"], "texts holds no run"),
        (["watch", "middle", "--port", "65536"], "cannot listen on port 65536"),
    ],
)
def test_a_folder_column_or_run_that_does_not_exist_is_named(
    three_runs: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_runs_are_filtered(three_runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def listed(*conditions: str) -> list[str]:
        assert main(["runs", "--sort", "name", *(word for condition in conditions for word in ("--where", condition))]) == 0
        return names_in(capsys.readouterr().out)

    assert listed("steps > 3") == ["long", "middle"]
    assert listed("steps>=6", "steps<9") == ["middle"]
    assert listed("name ~ ON") == ["long"]
    assert listed("name != long") == ["middle", "short"]
    assert listed("max_duration = 3ba") == ["short"]
    assert listed("time/batch > 6") == ["long"]
    assert listed("highest(time/batch) <= 6", "outcome = finished") == ["middle", "short"]
    assert listed("started > 2020-01-01") == ["long", "middle", "short"]
    assert listed("started > 2999-01-01") == []
    assert listed("note = x") == listed("checkpoint = x") == []
    assert listed("duration < 1h", "duration > 0.001s") == ["long", "middle", "short"]
    assert listed("optimizer.lr = 0.002") == ["long", "middle", "short"]
    assert listed("optimizer.lr = auto") == []
    assert listed("optimizer.lr != auto") == ["long", "middle", "short"]
    assert listed(f"started ~ {date.today():%Y-}") == ["long", "middle", "short"]
    with open(three_runs / "long" / "metrics.jsonl", "a") as file:
        file.write('{"step": 9, "values": {"test/a": 0.25, "test/b": "NaN"}}\n')
    assert listed("test/a ~ a") == []  # the other runs have no value, so they do not contain "nan"
    assert (listed("test/a ~ .25"), listed("test/b ~ NaN")) == (["long"], ["long"])


def test_runs_have_the_requested_columns(three_runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "--columns", "name, max_duration,last(time/batch),steps", "--sort", "max_duration"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        ["name", "max_duration", "last(time/batch)", "steps"],
        ["short", "3ba", "3", "3"],
        ["middle", "6ba", "6", "6"],
        ["long", "9ba", "9", "9"],
    ]


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        ("steps", "--where 'steps' is no condition; give NAME, one of < <= > >= = != ~, and a value"),
        ("steps > many", "--where steps > 'many': give a number"),
        ("started < soon", "--where started < 'soon': give a date or time, such as 2026-11-30"),
        ("name < z", "--where name < 'z': give a number"),
        ("duration > long", "--where duration > 'long': give a number"),
        ("nonsense = 1", "there is no column 'nonsense'"),
    ],
)
def test_an_invalid_condition_is_rejected(
    three_runs: Path, capsys: pytest.CaptureFixture[str], condition: str, message: str
) -> None:
    assert main(["runs", "--where", condition]) == 2
    assert message in capsys.readouterr().err


def test_runs_can_be_tagged_annotated_and_archived(three_runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mark", "short", "runs/long", "--tag", "base", "--tag", "v2", "--note", "two\nlines \x1b[31m"]) == 0
    assert capsys.readouterr().out == "runs/short: tags base v2; two?lines ?[31m\nruns/long: tags base v2; two?lines ?[31m\n"
    assert main(["mark", "short", "--untag", "base"]) == 0
    assert main(["runs", "--where", "tags = base"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert names_in("\n".join(printed[1:])) == ["long"]
    assert "tags" in printed[1]
    assert main(["mark", "lo*", "--archive"]) == 0
    capsys.readouterr()
    assert main(["runs", "--sort", "name"]) == 0
    captured = capsys.readouterr()
    assert names_in(captured.out) == ["middle", "short"]
    assert captured.err == "callsheet: 1 archived run is not listed; --archived lists them\n"
    assert main(["runs", "--archived", "--json", "--sort", "name"]) == 0
    first, *_ = json.loads(capsys.readouterr().out)
    assert (first["name"], first["is_archived"], first["tags"], first["note"]) == (
        "long",
        True,
        ["base", "v2"],
        "two\nlines \x1b[31m",
    )
    assert main(["mark", "long", "--unarchive", "--note", ""]) == 0
    assert capsys.readouterr().out == "runs/long: tags base v2\n"
    assert main(["mark", "long", "short"]) == 0
    assert capsys.readouterr().out == "runs/long: tags base v2\nruns/short: tags v2; two?lines ?[31m\n"
    assert main(["mark", "long", "--tag", "two words"]) == 2
    assert "the tag 'two words' is not possible" in capsys.readouterr().err


def test_marking_a_lost_run_does_not_make_it_a_running_one(three_runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The notes are not written by the run, so they do not count as its last write."""
    folder = three_runs / "silent"
    folder.mkdir()
    (folder / "events.jsonl").write_text('{"event": "run_start", "time": 1.0}\n')
    os.utime(folder / "events.jsonl", (1.0, 1.0))
    assert RunFolder.read(folder).outcome == "lost"
    assert main(["mark", "silent", "--tag", "seen"]) == 0
    assert RunFolder.read(folder).outcome == "lost"
    assert RunFolder.read(folder).last_write == 1.0


@pytest.mark.parametrize(
    "content", [b"", b"[1]", b'{"tags": 3, "note": [], "is_archived": 1}', b'{"tags": ["a b", 1]}', b"[" * 9999, b"\xff"]
)
def test_an_invalid_file_of_notes_is_treated_as_empty(three_runs: Path, content: bytes) -> None:
    (three_runs / "long" / "notes.json").write_bytes(content)
    assert RunFolder.read(three_runs / "long").notes == Notes()
    assert main(["runs"]) == main(["mark", "long", "--tag", "a"]) == 0
    assert RunFolder.read(three_runs / "long").notes == Notes(("a",))


def test_a_run_is_deleted_after_it_was_confirmed(
    three_runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["delete", "short", "long"]) == 2
    assert "Confirm it with --yes. Nothing was deleted" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", Terminal("no\n"))
    assert main(["delete", "short"]) == 2
    assert {path.name for path in three_runs.iterdir() if not path.name.startswith(".")} == {"long", "middle", "short"}
    monkeypatch.setattr("sys.stdin", Terminal("y\n"))
    assert main(["delete", "short"]) == 0
    assert capsys.readouterr().out == "deleted runs/short\n"
    assert main(["delete", "m*", "--yes"]) == 0
    assert {path.name for path in three_runs.iterdir() if not path.name.startswith(".")} == {"long"}
    assert not list(three_runs.glob(".*deleted*"))


def test_a_run_that_is_named_twice_is_deleted_once(
    three_runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["delete", "runs/../runs/short", "short", "--yes"]) == 0
    assert capsys.readouterr().out == "deleted runs/../runs/short\n"
    folder = three_runs.absolute() / "long"
    monkeypatch.chdir(folder)
    assert main(["delete", ".", "--yes"]) == 0
    assert not folder.exists()


def test_archived_runs_can_be_marked_and_deleted_by_a_pattern(three_runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mark", "*", "--archive"]) == main(["mark", "*", "--unarchive"]) == main(["mark", "m*", "--archive"]) == 0
    capsys.readouterr()
    assert main(["runs", "--where", "archived = yes"]) == 0
    assert names_in(capsys.readouterr().out) == ["middle"]
    assert main(["delete", "runs", "--yes"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_the_folder_of_a_run_is_rejected_as_a_folder_of_runs(three_runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "runs/long"]) == 2
    assert "runs/long is a run itself; give the folder that contains the runs' folders" in capsys.readouterr().err
    assert not (three_runs / "long" / ".index.sqlite").exists()


def test_a_folder_whose_name_is_not_text_is_left_out(
    three_runs: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(three_runs / "long", os.fsdecode(os.fsencode(three_runs) + b"/b\xffd"))
    assert main(["runs"]) == 0
    assert len(names_in(capsys.readouterr().out)) == 3
    assert "its name is not valid UTF-8" in caplog.text


def test_a_run_that_is_training_or_is_a_link_is_not_deleted(three_runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (three_runs / "linked").symlink_to("long")
    assert main(["delete", "short", "linked", "--yes"]) == 2
    assert "runs/linked is a link" in capsys.readouterr().err
    lock = RunLock(three_runs / "middle")
    lock.acquire(1.0)
    try:
        assert main(["delete", "short", "middle", "--yes"]) == 2
    finally:
        lock.release()
    assert re.search(
        r"runs/middle is being trained by process \d+ .*; end it first. Nothing was deleted", capsys.readouterr().err
    )
    assert (three_runs / "short").is_dir()


class Terminal(io.StringIO):
    """Standard input of an interactive terminal."""

    def isatty(self) -> bool:
        return True


def test_control_characters_in_a_run_s_name_are_not_printed(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path("runs/\x1b[31mred")
    folder.mkdir(parents=True)
    (folder / "events.jsonl").write_text('{"event": "run_start", "device": "\\u001b]0;title"}\n')
    assert main(["runs"]) == 0
    printed = capsys.readouterr().out
    assert "?[31mred" in printed
    assert "\x1b" not in printed


def test_an_empty_folder_of_runs_has_no_runs_to_list(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("runs").mkdir()
    assert main(["runs"]) == 0
    assert capsys.readouterr().out == "there is no run in runs\n"


@pytest.mark.parametrize("run", ["middle", "runs/middle", "runs/middle/"])
def test_report_writes_the_page_and_prints_its_path(three_runs: Path, capsys: pytest.CaptureFixture[str], run: str) -> None:
    assert main(["report", run]) == 0
    printed = capsys.readouterr().out
    page = Path("runs/middle/report.html")
    assert printed == f"{page} ({page.stat().st_size / 1e6:.1f} MB)\n"
    assert "validation/loss" in page.read_text()
    assert (page.parent / "trace.json").is_file()


def test_report_writes_to_the_given_path(three_runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "short", "--out", "out.html"]) == 0
    assert capsys.readouterr().out.startswith("out.html (")
    assert Path("out.html").is_file()
    assert not Path("runs/short/report.html").exists()
    assert main(["report", "short", "--out", "tiny.yaml/out.html"]) == 1
    assert "the page of runs/short cannot be written" in capsys.readouterr().err


# --- help ---


@pytest.mark.parametrize(
    "command", ["train", "show", "events", "runs", "import", "report", "watch", "evaluate", "predict", "export", "recipes"]
)
def test_the_help_of_every_command_has_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main([command, "--help"])
    except SystemExit as stopped:
        status = int(stopped.code or 0)
    printed = capsys.readouterr().out
    assert status == 0
    assert printed.startswith(f"usage: callsheet {command}")
    assert f"\n  callsheet {command}" in printed


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    printed = capsys.readouterr().out
    for command in ("train", "show", "events", "runs", "import", "report", "watch", "evaluate", "predict", "export", "recipes"):
        assert f"    {command} " in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian", "pretrain"], "callsheet: error: there is no command 'trian'; did you mean 'train'?"),
        (["train.py"], "callsheet: error: there is no command 'train.py'; run a training script with: callsheet exec train.py"),
        (["runs", "--jsn"], "callsheet runs: error: unknown arguments: --jsn; did you mean '--json'?"),
        (["exec", "--runname", "x", "train.py"], "unknown arguments: --runname x; did you mean '--run_name'?"),
    ],
)
def test_a_mistyped_command_or_option_is_named_with_the_right_one(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["runs", "--jsn"], ["report", "tiny", "more"], ["events", "x"]])
def test_unknown_arguments_are_named(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert f"callsheet {arguments[0]}: error: unknown arguments: {arguments[-1]}" in capsys.readouterr().err


def test_a_closed_pipe_is_not_an_error() -> None:
    done = subprocess.run(
        f"{sys.executable} -m callsheet events | head -n 1", shell=True, capture_output=True, text=True, check=True
    )
    assert (len(done.stdout.splitlines()), done.stderr) == (1, "")
