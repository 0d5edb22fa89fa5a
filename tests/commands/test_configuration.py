"""A recipe's values come from the file, the environment and the command line; errors name bad values and their source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from callsheet import Callback
from callsheet.cli.main import main
from callsheet.cli.names import with_calls, with_names
from callsheet.cli.recipe import Prepared, prepared
from callsheet.errors import ConfigError

SHOWN = ["show", "tiny.yaml"]


class Adjustable(Callback):
    """Stores its arguments."""

    def __init__(self, *, inner: Callback | None = None, count: int = 1, name: str = "") -> None:
        self.inner, self.count = inner, count
        if name:
            self.name = name


def resolved(*overrides: str, recipe: str = "tiny.yaml") -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(prepared(recipe, overrides, command="show").resolved)
    return found


# --- the environment ---


def test_the_environment_overrides_the_file_and_the_command_line_overrides_both(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CALLSHEET_MODEL__HIDDEN_SIZE", "32")
    monkeypatch.setenv("CALLSHEET_BATCH_SIZE", "8")
    monkeypatch.setenv("CALLSHEET_PROMPTS", '["a", "b"]')
    monkeypatch.setenv("CALLSHEET_EVAL_INTERVAL", "null")
    found = resolved("--batch_size", "4")
    assert found["model"]["hidden_size"] == 32
    assert found["model"]["layers"] == 1
    assert found["batch_size"] == 4
    assert found["prompts"] == ["a", "b"]
    assert found["eval_interval"] is None
    Path("more.yaml").write_text("batch_size: 5\nmodel: {hidden_size: 64}\n")
    assert resolved("--config", "more.yaml")["model"]["hidden_size"] == 64


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("CALLBACKS", '[{"class_path": "callsheet.callbacks.EMA"}]'),
        ("LOGGERS", "[]"),
        ("OPTIMIZER", "torch.optim.SGD"),
        ("OPTIMIZER__LR", "0.1"),
        ("SCHEDULER", "null"),
        ("CONFIG", "more.yaml"),
        ("RECIPE", "commands.sample.Asked"),
    ],
)
def test_nothing_that_is_imported_comes_from_the_environment(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, value: str
) -> None:
    monkeypatch.setenv(f"CALLSHEET_{name}", value)
    assert main(SHOWN) == 2
    key = name.partition("__")[0].lower()
    assert f"CALLSHEET_{name}: {key!r} is not taken from the environment, since it decides what code" in capsys.readouterr().err


@pytest.mark.parametrize(
    "value",
    [
        '{"model_type": "llama", "x": {"class_path": "os.getcwd"}}',
        '{"model_type": "llama", "x": [{"class\\u005fpath": "os.getcwd"}]}',
        '{"model_type": "llama", "x": "{class_path: os.getcwd}"}',
        '{"model_type": "llama", "x": "{\\"class\\\\u005fpath\\": \\"os.getcwd\\"}"}',
    ],
)
def test_code_is_not_imported_from_inside_a_plain_value(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], value: str
) -> None:
    monkeypatch.setenv("CALLSHEET_MODEL__CONFIG", value)
    assert main(SHOWN) == 2
    assert "CALLSHEET_MODEL__CONFIG: a class_path is not taken from the environment" in capsys.readouterr().err
    monkeypatch.setenv("CALLSHEET_MODEL__CONFIG", '{"model_type": "llama", "x": [{"path": "os.getcwd"}]}')
    assert resolved()["model"]["config"]["x"] == [{"path": "os.getcwd"}]


def test_jsonargparse_does_not_read_the_environment_itself(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JSONARGPARSE_DEFAULT_ENV", "true")
    monkeypatch.setenv("CALLSHEET SHOW TINY_BATCH_SIZE", "99")
    assert resolved()["batch_size"] == 2


def test_a_wrong_value_and_a_near_name_are_reported(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CALLSHEET_BATCHSIZE", "8")
    monkeypatch.setenv("CALLSHEET_QQQ", "8")
    assert main(SHOWN) == 0
    assert capsys.readouterr().err == (
        "callsheet: the environment variable CALLSHEET_BATCHSIZE is not a key of this recipe; did you mean 'CALLSHEET_BATCH_SIZE'?\n"
    )
    monkeypatch.setenv("CALLSHEET_BATCH_SIZE", "many")
    assert main(SHOWN) == 2
    assert "\ncallsheet: CALLSHEET_BATCH_SIZE: batch_size=many: give int (" in capsys.readouterr().err


def test_parts_of_a_value_that_is_none_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CALLSHEET_LORA__R", "4")
    assert resolved("--lora.alpha", "9", recipe="finetune")["lora"]["r"] == 4
    monkeypatch.setenv("CALLSHEET_LORA__R", "x")
    with pytest.raises(ConfigError, match=r"^CALLSHEET_LORA__R: lora\.r=x: give int \(callsheet"):
        resolved(recipe="finetune")
    monkeypatch.setenv("CALLSHEET_LORA__R", "4")
    with pytest.raises(ConfigError, match=r"^lora.r=y: give int \(callsheet"):
        resolved("--lora.r", "y", recipe="finetune")


# --- names ---

TWO = """
callbacks:
  - class_path: callsheet.callbacks.SpeedMonitor
  - class_path: callsheet.callbacks.SpeedMonitor
    name: throughput/long
    init_args: {window_size: 500}
loggers:
  - {class_path: callsheet.loggers.JSONLLogger, name: lines}
"""


def labels(what: Prepared) -> list[tuple[str, str]]:
    return [(type(callback).__name__, callback.name) for callback in what.job.callbacks.callbacks]


def test_two_callbacks_of_one_class_by_their_names(place: Path) -> None:
    Path("two.yaml").write_text(TWO)
    what = prepared("tiny.yaml", ["--config", "two.yaml"], command="show")
    assert labels(what) == [
        ("SpeedMonitor", ""),
        ("SpeedMonitor", "throughput/long"),
        ("NaNMonitor", ""),
        ("JSONLLogger", "lines"),
    ]
    second = yaml.safe_load(what.resolved)["callbacks"][1]
    assert (second["class_path"], second["name"]) == ("callsheet.callbacks.SpeedMonitor", "throughput/long")
    assert second["init_args"]["window_size"] == 500
    Path("again.yaml").write_text(what.resolved)
    assert labels(prepared("again.yaml", command="show")) == labels(what)


def test_a_name_on_the_command_line(place: Path) -> None:
    spec = '{"class_path": "callsheet.callbacks.LRMonitor", "name": "rates"}'
    appended = prepared("tiny.yaml", [f"--callbacks+={spec}", "--callbacks+=callsheet.callbacks.LRMonitor"], command="show")
    assert labels(appended)[1:3] == [("LRMonitor", "rates"), ("LRMonitor", "")]
    assert labels(prepared("tiny.yaml", ["--callbacks", f"[{spec}]"], command="show"))[:1] == [("LRMonitor", "rates")]


def test_a_callback_inside_another_and_one_that_takes_its_name_itself(place: Path) -> None:
    spec = """[{"class_path": "commands.test_configuration.Adjustable", "name": "outer", "init_args": {"name": "own", "inner":
        {"class_path": "callsheet.callbacks.LRMonitor", "name": "inner"}}}]"""
    what = prepared("tiny.yaml", ["--callbacks", spec], command="show")
    (outer,) = (callback for callback in what.job.callbacks.callbacks if isinstance(callback, Adjustable))
    assert outer.inner is not None
    assert (outer.name, outer.inner.name) == ("outer", "inner")


def test_names_in_other_places_are_left_alone() -> None:
    content = {"data": {"name": "wiki"}, "optimizer": {"class_path": "a.B", "init_args": {"name": "x"}}, "list": [{"name": "y"}]}
    assert with_calls(content) == content
    named = {"callbacks": [{"class_path": "a.B", "name": "one", "init_args": {"c": 1}}]}
    assert with_names(with_calls(named)) == named


# --- values that do not fit ---


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--optimizer.lrr", "1"], "optimizer.lrr: AdamW does not take 'lrr'; did you mean 'optimizer.lr'?"),
        (["--optimizer.init_args.lrr=1"], "optimizer.lrr: AdamW does not take 'lrr'; did you mean 'optimizer.lr'?"),
        (["--optimizer.lr", "x"], "optimizer.lr=x: AdamW expects float or Tensor"),
        (["--optimizer.qqq", "x"], "optimizer.qqq: AdamW does not take 'qqq' (it takes lr, betas, eps, weight_decay,"),
        (["--optimizer", "torch.optim.Adamm"], "optimizer: torch.optim has no 'Adamm'; did you mean 'Adam'?"),
        (["--optimizer", "Adamm"], "optimizer: there is no class 'Adamm'; did you mean 'Adam'?"),
        (
            ["--optimizer", '{"class_pth": "torch.optim.SGD"}'],
            "optimizer.class_pth: AdamW does not take 'class_pth'; did you mean 'optimizer.class_path'?",
        ),
        (["--optimizer", "3"], "optimizer: 3 does not name a class; give a class_path such as torch.optim.AdamW"),
        (["--optimizer", "callsheet.callbacks.EMA"], "optimizer: callsheet.callbacks.EMA is not a subclass of Optimizer"),
        (
            ["--optimizer", '{"class_path": "torch.optim.SGD", "name": "x"}'],
            "there is no key 'optimizer.name' (there are class_path, init_args",
        ),
        (
            ["--scheduler.step_size", "3"],
            "scheduler: step_size does not name a class; give a class_path such as package.module.Class",
        ),
        (["--scheduler", "torch.optim.lr_scheduler.StepLR"], "scheduler: StepLR needs 'step_size' among its init_args"),
        (
            ["--callbacks+=callsheet.callbacks.LRMonitr"],
            "callbacks[1]: callsheet.callbacks has no 'LRMonitr'; did you mean 'LRMonitor'?",
        ),
        (["--callbacks+=nowhere.Some"], "callbacks[1]: cannot import 'nowhere.Some': there is no module 'nowhere'"),
        (
            ["--callbacks+=callsheet.callbacks.CheckpointSaver", "--callbacks.keep", "x"],
            "callbacks[1].keep=x: CheckpointSaver expects int or null",
        ),
        (["--callbacks+=callsheet.callbacks.LoadCheckpoint"], "callbacks[1]: LoadCheckpoint needs 'path' among its init_args"),
        (["--batch_size"], "argument --batch_size: expected one argument"),
        (["--batch_size", "many"], "batch_size=many: give int"),
        (["--eval_batch_size", "x"], "eval_batch_size=x: give int or null"),
        (["--data.validation_windows=x"], "data.validation_windows=x: give int"),
        (["--prompts", "3"], "prompts=3: give list of str"),
        (["--model", "3"], "model: give its keys one by one, such as --model.path"),
        (["--model.hiden_size", "8"], "there is no key 'model.hiden_size'; did you mean 'model.hidden_size'?"),
        (
            ["--config", "wrong.yaml"],
            "wrong.yaml:1: callbacks[1].save_intervall: CheckpointSaver does not take 'save_intervall'; did you mean",
        ),
    ],
)
def test_a_value_that_does_not_fit_is_reported_in_one_line(
    place: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    Path("wrong.yaml").write_text(
        "callbacks: [callsheet.callbacks.LRMonitor, {class_path: callsheet.callbacks.CheckpointSaver, init_args: {save_intervall: 3}}]"
    )
    assert main([*SHOWN, *arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"callsheet: {said}")
    assert err.endswith("(callsheet show tiny.yaml --help explains every key)\n")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            "optimizer: {class_path: torch.optim.SGD, init_args: {lrr: 1}}",
            "optimizer.lrr: SGD does not take 'lrr'; did you mean 'optimizer.lr'?",
        ),
        (
            "callbacks: [{class_pth: callsheet.callbacks.EMA}]",
            "callbacks[0]: class_pth does not name a class; give a class_path such as callsheet.callbacks.SpeedMonitor",
        ),
        (
            "callbacks: [{class_path: callsheet.callbacks.EMA, nme: x}]",
            "there is no key 'callbacks[0].nme'; did you mean 'callbacks[0].name'?",
        ),
        (
            "callbacks: [{class_path: callsheet.callbacks.EMA, init_args: {decay: x}}]",
            "callbacks[0].decay=x: EMA expects float or null",
        ),
        ("callbacks: [callsheet.callbacks.EMAs]", "callbacks[0]: callsheet.callbacks has no 'EMAs'; did you mean 'EMA'?"),
        (
            "loggers: [{class_path: callsheet.loggers.JSONLogger}]",
            "loggers[0]: callsheet.loggers has no 'JSONLogger'; did you mean",
        ),
        ("max_durtion: 3ba", "there is no key 'max_durtion'; did you mean 'max_duration'?"),
        ("batch_size: many", "batch_size=many: give int"),
    ],
)
def test_a_wrong_value_in_a_file_names_the_file_and_the_line(
    place: Path, capsys: pytest.CaptureFixture[str], content: str, said: str
) -> None:
    Path("wrong.yaml").write_text(f"recipe: pretrain\n{content}\n")
    assert main(["show", "wrong.yaml"]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"callsheet: wrong.yaml:2: {said}")
    assert err.count("\n") == 1
    Path("wrong.yaml").write_text(f"\n\n{content}\n")
    assert main(["show", "pretrain", "--config", "wrong.yaml"]) == 2
    assert capsys.readouterr().err.startswith(f"callsheet: wrong.yaml:3: {said}")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--batch_sze", "4"], "there is no key 'batch_sze'; did you mean 'batch_size'?"),
        (["--batch_size", "many"], "batch_size=many: give int"),
        (["--config", "other.yaml", "--seed", "2"], "other.yaml:2: there is no key 'sed'; did you mean 'seed'?"),
    ],
)
def test_errors_do_not_name_the_variable_of_a_similar_or_overridden_key(
    place: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    monkeypatch.setenv("CALLSHEET_BATCH_SIZE", "8")
    monkeypatch.setenv("CALLSHEET_SEED", "1")
    Path("other.yaml").write_text("batch_size: 3\nsed: 2\n")
    with pytest.raises(ConfigError) as rejected:
        prepared("pretrain", arguments, command="show")
    assert str(rejected.value).startswith(said)
    assert "CALLSHEET_" not in str(rejected.value)


def test_an_error_of_a_class_names_the_source_of_the_value(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("other.yaml").write_text("seed: 1\neval_interval: 3 epochs\n")
    with pytest.raises(ConfigError, match=r"^other\.yaml:2: eval_interval='3 epochs': unknown unit"):
        prepared("pretrain", ["--config", "other.yaml"], command="show")
    monkeypatch.setenv("CALLSHEET_EVAL_INTERVAL", "4 epochs")
    with pytest.raises(ConfigError, match=r"^CALLSHEET_EVAL_INTERVAL: eval_interval='4 epochs': unknown unit"):
        prepared("pretrain", command="show")
    with pytest.raises(ConfigError, match=r"^eval_interval='5 epochs': unknown unit"):
        prepared("pretrain", ["--eval_interval", "5 epochs"], command="show")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--config", "list.yaml"], "list.yaml: [3] is not a mapping; give keys and values"),
        (["--lora.rr", "3"], "there is no key 'lora.rr'; did you mean 'lora.r'?"),
        (["--lora", "x"], "lora=x: give Lora or null"),
        (["--train.pathh", "x"], "there is no key 'train.pathh'; did you mean 'train.path'?"),
        (["--train.path", "x", "--train.limit", "y"], "train.limit=y: give int or null"),
        (['--validation={"a": {"pth": "x"}}'], "there is no key 'validation.a.pth'; did you mean 'validation.a.path'?"),
        (['--validation={"a": {"split": "x"}}'], "validation.a: Rows needs 'path'"),
        (["--config", "wrong.yaml"], "wrong.yaml:1: there is no key 'validation.a.pathh'; did you mean 'validation.a.path'?"),
    ],
)
def test_an_error_in_a_part_of_a_value_names_its_source(place: Path, arguments: list[str], said: str) -> None:
    Path("wrong.yaml").write_text("validation: {a: {pathh: x.jsonl}}")
    Path("list.yaml").write_text("- 3")
    with pytest.raises(ConfigError) as rejected:
        prepared("finetune", arguments, command="show")
    assert str(rejected.value).startswith(said)
    assert "\n" not in str(rejected.value)


def test_a_missing_argument_is_reported_only_if_no_later_source_gives_it(place: Path) -> None:
    Path("loads.yaml").write_text("seed: 1\ncallbacks: [callsheet.callbacks.LoadCheckpoint]\n")
    step = ["--scheduler", "torch.optim.lr_scheduler.StepLR", "--scheduler.step_size"]
    for arguments, said in (
        (
            ["--config", "loads.yaml", "--callbacks+=callsheet.callbacks.LRMonitor"],
            "loads.yaml:2: callbacks[0]: LoadCheckpoint needs 'path' among its init_args",
        ),
        ([*step, "x"], "scheduler.step_size=x: StepLR expects int"),
        ([*step, "3", "--sed", "3"], "there is no key 'sed'; did you mean 'seed'?"),
    ):
        with pytest.raises(ConfigError) as rejected:
            prepared("tiny.yaml", arguments, command="show")
        assert str(rejected.value).startswith(said)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("pretran", "did you mean 'pretrain'?"),
        ("commands.sample.Loud", "is not a callsheet.recipes.Recipe"),
        ("a.b", "cannot import 'a.b'"),
    ],
)
def test_a_recipe_that_does_not_exist(place: Path, capsys: pytest.CaptureFixture[str], name: str, said: str) -> None:
    Path("wrong.yaml").write_text(f"recipe: {name}\n")
    assert main(["show", "wrong.yaml"]) == 2
    assert said in capsys.readouterr().err


# --- printing values ---


def test_print_config_is_a_recipe_file(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("two.yaml").write_text(TWO)
    with pytest.raises(SystemExit) as stopped:
        main(["train", "tiny.yaml", "--config", "two.yaml", "--batch_size", "4", "--print_config"])
    assert stopped.value.code == 0
    printed = capsys.readouterr().out
    Path("printed.yaml").write_text(printed)
    assert resolved(recipe="printed.yaml") == resolved("--config", "two.yaml", "--batch_size", "4")


def test_help_lists_classes_by_name_and_how_to_see_more(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "tiny.yaml", "--help"])
    printed = " ".join(capsys.readouterr().out.split())
    assert "(default: AdamW; --optimizer.help CLASS explains the arguments of a class)" in printed
    assert "(default: CheckpointSaver; --callbacks.help CLASS explains the arguments of a class)" in printed
    assert "known subclasses" not in printed
    assert "Namespace(" not in printed
    with pytest.raises(SystemExit):
        main(["train", "tiny.yaml", "--callbacks.help", "callsheet.callbacks.EMA"])
    assert "the number of steps after which a step" in capsys.readouterr().out
