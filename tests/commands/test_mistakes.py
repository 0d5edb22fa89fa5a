"""Mistakes in a recipe file: the message names the file, the line and what to do."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from callsheet import Callback
from callsheet.cli.main import main
from callsheet.errors import ConfigError, did_you_mean
from callsheet.recipes.existing_run import reject_another_job
from callsheet.recipes.models.language_model import LanguageModel

BASE = "recipe: pretrain\nrun_name: mine\nmax_duration: 4ba\n"
SAVER = "callbacks:\n  - class_path: callsheet.callbacks.LRMonitor\n  - class_path: callsheet.callbacks.CheckpointSaver\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (BASE + "seed: 1\nmax_duration: 9ba\n", "mine.yaml:5: the key 'max_duration' is given twice, first in line 3"),
        (BASE + "model: {layers: 1, layers: 2}\n", "mine.yaml:4: the key 'model.layers' is given twice, first in line 4"),
        (
            BASE + SAVER + '    init_args: {save_interval: "5 epochs"}\n',
            "mine.yaml:7: callbacks[1] (CheckpointSaver): save_interval='5 epochs'",
        ),
        (BASE + "precision: bf17\n", "mine.yaml:4: precision=bf17: give Literal['fp32', 'bf16', 'fp16']; did you mean 'bf16'?"),
        (
            BASE + SAVER + "    init_args:\n      mode: minn\n",
            "mine.yaml:8: callbacks[1].mode: Expected a typing.Literal['min', 'max']. Got value: minn; did you mean 'min'?",
        ),
        (
            BASE + SAVER + "    init_args: [1, 2]\n",
            "mine.yaml:7: callbacks[1].init_args=[1, 2]: give the arguments by name (",
        ),
        (
            "recipe: classify\nclass_weights: balancd\n",
            "mine.yaml:2: class_weights=balancd: give Union[Literal['none', 'balanced'], list[float]]; did you mean 'balanced'?",
        ),
        (
            BASE + "callbacks: SpeedMonitor\n",
            "mine.yaml:4: callbacks: Expected a <class 'list'>. Got value: SpeedMonitor",
        ),
        (BASE + "model:\n", "mine.yaml:4: model: give its keys one by one, such as model.path ("),
        (BASE + "optimizer: adamw\n", "mine.yaml:4: optimizer: Expected a dot import path string: adamw; did you mean 'AdamW'?"),
        (
            "recipe: pretrain\nmax_duration: 3\n",
            "mine.yaml:2: max_duration=3 has no unit: give '3ep' for epochs, or '3ba' for batches",
        ),
        ("recipe: pretrain\nrun_name: caf\udce9\n", "mine.yaml:2: the byte 0xe9 is not UTF-8"),
        ("recipe: pretrain\nrun_name: '1e3'\nseed: q\n", "mine.yaml:3: seed=q: give int"),
        ("recipe: pretrain\nseed: 2020-01-01\n", "mine.yaml:2: seed=2020-01-01: give int"),
        ('recipe: pretrain\nseed: "a\\nb"\n', "mine.yaml:2: seed=a b: give int"),
        ("recipe: pretrain\nmodle: {}\n", "mine.yaml:2: there is no key 'modle'"),
        (
            BASE + "optimizer:\n  init_args:\n    lr: abc\n  class_path: torch.optim.SGD\n",
            "mine.yaml:6: optimizer.lr: Expected a <class 'float'>. Got value: abc",
        ),
    ],
)
@pytest.mark.parametrize("command", ["show", "evaluate"])
def test_the_message_names_the_file_and_the_line(
    command: str, content: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_bytes(content.encode("utf-8", "surrogateescape"))
    assert main([command, "mine.yaml"]) == 2
    err = capsys.readouterr().err
    if command == "show" or "callbacks[1]" not in message:  # an evaluation does not create the saver
        assert err.startswith(f"callsheet: {message}")
    assert err.count("\n") == 1
    assert [each.name for each in tmp_path.iterdir()] == ["mine.yaml"]


NESTED = """recipe: finetune
batch_size: 4
model:
  layers: 1
  dtype: float32
lora: {r: 4}
train: {path: rows.jsonl}
validation:
  books:
    path: books.jsonl
    limit: 8
optimizer:
  class_path: torch.optim.AdamW
  init_args:
    lr: 0.1
    betas: [0.9, 0.95]
callbacks:
  - callsheet.callbacks.LRMonitor
  - class_path: callsheet.callbacks.CheckpointSaver
    name: saver
    init_args:
      keep: 2
      mode: min
loggers: []
"""
"""A recipe file with a value in each kind of place."""


@pytest.mark.parametrize("number", range(2, NESTED.count("\n") + 1))
def test_any_misspelled_key_and_any_wrong_value_is_found_in_its_line(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(NESTED)
    assert main(["show", "mine.yaml"]) == 0
    capsys.readouterr()
    lines = NESTED.splitlines()
    line = lines[number - 1]
    key, value = re.fullmatch(r"[ {-]*(?:(\w+):)? ?(.*)", line).groups()  # type: ignore[union-attr]
    changed = [(line.replace(f"{key}:", f"{key}_:"), f"{key}_")] if key and key != "books" else []  # a dataset may have any name
    if value and key not in ("name", "loggers"):  # any value is a name, and a mapping may describe a logger
        changed.append((line.replace(value, "{u: [-1.5]}"), ""))
    for wrong, name in changed:
        Path("mine.yaml").write_text("\n".join([*lines[: number - 1], wrong, *lines[number:]]))
        assert main(["show", "mine.yaml"]) == 2, wrong
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        assert name in err
        # jsonargparse gives the reason for the whole mapping if one of these keys is wrong. The mapping begins at most one line before.
        where = {number - 1, number} if name in ("class_path_", "name_") else {number}
        assert int(err.split(":")[2]) in where, (wrong, err)


@pytest.mark.parametrize("more", ["", "precision: bf17\n"])
def test_a_module_that_cannot_be_imported_is_named(
    more: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    Path("import_fails.py").write_text("raise RuntimeError('no driver')\n")
    Path("mine.yaml").write_text(BASE + "callbacks: [import_fails.Own]\n" + more)
    assert main(["show", "mine.yaml"]) == 2
    message = "mine.yaml:4: callbacks[0]: RuntimeError: no driver"
    assert capsys.readouterr().err.startswith(f"callsheet: {message}")


def test_texts_that_look_like_numbers_are_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("recipe: pretrain\nrun_name: '1e3'\nprompts: ['1e3', '2020-01-01', 'null', 'yes']\n")
    assert main(["show", "mine.yaml"]) == 0


class RejectsOddCounts(Callback):
    """Rejects an argument with an error of Python."""

    def __init__(self, count: int) -> None:
        with open("constructed", "a") as file:
            file.write("x")
        if count % 2:
            raise ValueError("the count is odd")


def test_what_a_class_rejects_with_a_value_error_is_one_line_and_no_constructor_is_called_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    spec = "  - class_path: commands.test_mistakes.RejectsOddCounts\n    init_args:\n      count: "
    Path("mine.yaml").write_text(f"{BASE}callbacks:\n{spec}4\n    name: other\n{spec}3\n")
    assert main(["show", "mine.yaml"]) == 2
    err = capsys.readouterr().err
    assert err == "callsheet: mine.yaml:9: callbacks[1] (RejectsOddCounts): ValueError: the count is odd\n"
    assert Path("constructed").read_text() == "xx"


def test_an_error_in_a_command_line_value_names_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(BASE)
    assert main(["show", "mine.yaml", "--eval_interval", "5 epochs"]) == 2
    assert capsys.readouterr().err.startswith("callsheet: eval_interval='5 epochs': unknown unit 'epochs'")


@pytest.mark.parametrize("key", ["train.path", "train.split", "test.path", "validation.books.path", "lora.targets"])
def test_null_for_a_part_that_does_not_take_it_is_rejected_by_its_key(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    why = (
        ": the following arguments are required: path" if key.endswith(".path") else ": Expected a <class 'str'>. Got value: None"
    )
    Path("mine.yaml").write_text("recipe: finetune\ntrain: {path: rows.jsonl}\n")
    assert main(["show", "mine.yaml", f"--{key}", "null"]) == 2
    assert capsys.readouterr().err.startswith(f"callsheet: {key}{why}")
    outer, *middle, inner = key.split(".")
    content = ": {".join([outer, *middle, inner]) + ": null" + "}" * (1 + len(middle))
    Path("mine.yaml").write_text(f"recipe: finetune\n{content}\n".replace("{split", "{path: rows.jsonl, split"))
    assert main(["show", "mine.yaml"]) == 2
    at = key.removesuffix(".path")  # the reason is the same without `path: null`
    assert capsys.readouterr().err.startswith(f"callsheet: mine.yaml:2: {at}{why}")


def test_a_resume_with_other_values_names_them_and_what_to_do(tmp_path: Path) -> None:
    config_file = tmp_path / "config.yaml"
    config_file.write_text("batch_size: 8\noptimizer: {class_path: torch.optim.AdamW, init_args: {lr: 0.1}}\n")
    now = "batch_size: 8\noptimizer: {class_path: torch.optim.AdamW, init_args: {lr: 0.2}}\n"
    with pytest.raises(
        ConfigError, match=r"another optimizer \(optimizer\.lr: 0\.1 in the run, 0\.2 now\).*resume='new'.*another run_name"
    ):
        reject_another_job(config_file, now, ())


@pytest.mark.parametrize(
    ("name", "why"), [("./nowhere", "there is no such folder; give a folder"), ("empty", "the folder has no tokenizer; name one")]
)
def test_a_model_path_without_a_tokenizer_is_rejected_with_a_hint(
    name: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    with pytest.raises(ConfigError, match=why) as found:
        LanguageModel(path=name).make_tokenizer()
    assert "Repo id" not in str(found.value)


def test_show_accepts_a_run_and_train_rejects_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run = Path("runs", "mine")
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(BASE)
    for named in ("mine", "runs/mine"):
        assert main(["show", named]) == 0
        assert "From runs/mine/config.yaml" in capsys.readouterr().out
    assert main(["train", "mine"]) == 2
    assert "'mine' is a run, not a recipe; callsheet train runs/mine/config.yaml resumes it" in capsys.readouterr().err
    assert main(["report", "mine"]) == 2
    assert "holds no records of a run: the logger JSONLLogger writes them" in capsys.readouterr().err


NAN = """
recipe: pretrain
run_name: diverges
max_duration: 6ba
batch_size: 2
eval_interval: null
threads: 1
generated_tokens: 2
prompts: []
model: {hidden_size: 16, layers: 1, heads: 2, intermediate_size: 16}
data: {folder: texts, pattern: "*.txt", sequence_length: 16, validation_percent: 20, test_percent: 20}
optimizer: {class_path: torch.optim.SGD, init_args: {lr: 1.0e+30}}
"""


def test_a_loss_that_is_nan_ends_a_recipe_with_a_line_and_a_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("texts").mkdir()
    for number in range(12):
        Path("texts", f"f{number}.txt").write_text("some text to learn from, again and again\n" * 20)
    Path("nan.yaml").write_text(NAN)
    assert main(["train", "nan.yaml"]) == 1
    err = capsys.readouterr().err
    assert "the loss was nan at step" in err
    assert "stop_on_nan=false to train on" in err
    samples = (
        '--callbacks=[{"class_path": "callsheet.callbacks.Generate", "init_args": {"prompts": ["some "], "interval": "2ba"}}]'
    )
    assert main(["train", "nan.yaml", "--stop_on_nan", "false", "--run_name", "on", "--prompts", '["some "]', samples]) == 0
    assert caplog.text.count("Generate generates nothing at step") == 1
    assert caplog.text.count("no samples are generated: the model's outputs are NaN or infinite") == 1
    assert "The run (6 steps, finished: " in capsys.readouterr().out


def test_the_reason_of_a_stop_is_printed_without_a_logger_that_prints_it(
    recipe_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stopper = "{class_path: callsheet.callbacks.ThresholdStopper, init_args: {monitor: train/loss, threshold: 1.0e+9}}"
    assert main(["train", "tiny.yaml", "--loggers", "[]", f"--callbacks=[{stopper}]"]) == 0
    out = capsys.readouterr().out
    assert out.count("stopped by ThresholdStopper: ") == 1
    assert re.search(r"^The run \(\d+ steps, stopped by ThresholdStopper: .*\) is in ", out, re.MULTILINE)
    assert main(["runs"]) == 0
    assert " ended " in capsys.readouterr().out  # no logger has printed the outcome


@pytest.mark.parametrize("number", [".nan", ".inf"])
@pytest.mark.parametrize(
    ("recipe", "key"),
    [
        ("finetune", "temperature"),
        ("pretrain", "temperature"),
        ("pretrain", "timeout_seconds"),
        ("distill", "kd_temperature"),
        ("distill", "mix"),
        ("finetune", "lora.alpha"),
    ],
)
def test_a_number_that_is_not_finite_is_rejected_with_its_line(
    recipe: str, key: str, number: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    outer, _, inner = key.partition(".")
    Path("mine.yaml").write_text(f"recipe: {recipe}\n{outer}: " + (f"{{{inner}: {number}}}\n" if inner else f"{number}\n"))
    assert main(["show", "mine.yaml"]) == 2
    err = capsys.readouterr().err
    assert f"{key}={number.removeprefix('.')}: give " in err
    assert err.count("\n") == 1
    assert err.startswith("callsheet: mine.yaml:2: ")


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ("{class_path: torch.optim.AdamW, init_args: {lr: -1}}", "it cannot be created: ValueError: Invalid learning rate: -1.0"),
        ("torch.optim.LBFGS", "LBFGS needs a closure"),
    ],
)
def test_an_optimizer_that_cannot_be_used_is_rejected_by_its_key(
    optimizer: str, message: str, recipe_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "tiny.yaml", f"--optimizer={optimizer}"]) == 2
    err = capsys.readouterr().err
    assert err.splitlines()[-1].startswith(f"callsheet: optimizer: {message}")
    assert "Traceback" not in err


def test_a_folder_that_is_not_writable_is_rejected_before_training(
    recipe_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("a_file").write_text("")
    assert main(["train", "tiny.yaml", "--runs_folder", "a_file/runs"]) == 2
    err = capsys.readouterr().err
    assert (
        "callsheet: cannot write to the run's folder a_file/runs/tiny (a_file/runs/tiny: Not a directory); make it writable"
        in err
    )
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("name", "hint"), [("lr", "; did you mean 'optimizer.lr'?"), ("loss", "; did you mean 'train/loss'?"), ("zz", "")]
)
def test_a_dotted_name_is_suggested_by_its_last_part(name: str, hint: str) -> None:
    assert did_you_mean(name, ["optimizer.lr", "train/loss", "started"]) == hint
