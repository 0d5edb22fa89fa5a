"""A recipe's values come from the file, the environment and the command line; errors name bad values and their source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from callsheet import Callback
from callsheet.cli.main import main
from callsheet.cli.names import with_calls, with_names
from callsheet.cli.recipe import Prepared, prepare_recipe
from callsheet.errors import ConfigError

SHOWN = ["show", "tiny.yaml"]


class Adjustable(Callback):
    """Stores its arguments."""

    def __init__(self, *, inner: Callback | None = None, count: int = 1, name: str = "") -> None:
        self.inner, self.count = inner, count
        if name:
            self.name = name


def resolved(*overrides: str, recipe: str = "tiny.yaml") -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(prepare_recipe(recipe, overrides, command="show").resolved)
    return found


# --- the environment ---


def test_the_environment_overrides_the_file_and_the_command_line_overrides_both(
    recipe_folder: Path, monkeypatch: pytest.MonkeyPatch
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
        ("RECIPE", "commands.sample.PretrainWithPredictions"),
    ],
)
def test_keys_that_decide_which_code_runs_are_rejected_in_the_environment(
    recipe_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, value: str
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
    recipe_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], value: str
) -> None:
    monkeypatch.setenv("CALLSHEET_MODEL__CONFIG", value)
    assert main(SHOWN) == 2
    assert "CALLSHEET_MODEL__CONFIG: a class_path is not taken from the environment" in capsys.readouterr().err
    monkeypatch.setenv("CALLSHEET_MODEL__CONFIG", '{"model_type": "llama", "x": [{"path": "os.getcwd"}]}')
    assert resolved()["model"]["config"]["x"] == [{"path": "os.getcwd"}]


@pytest.mark.parametrize(
    ("recipe", "name", "value"),
    [
        ("finetune", "TRAIN", "evil.Thing"),
        ("finetune", "TRAIN", '"{path: x, name: {a: b}}"'),
        ("finetune", "VALIDATION", "{x: evil.Thing}"),
        ("finetune", "VALIDATION", "{path: evil.jsonl}"),
        ("finetune", "VALIDATION__X", "evil.Thing"),
        ("finetune", "LORA", "evil.Thing"),
        ("pretrain", "ROWS__TRAIN", "evil.Thing"),
        ("pretrain", "ROWS", "{init_args: {train: evil.Thing}}"),
        ("pretrain", "ROWS", "{dict_kwargs: {train: evil.Thing}}"),
        ("pretrain", "ROWS", '{"init_args.train": evil.Thing}'),
        ("pretrain", "ROWS__INIT_ARGS__TRAIN", "evil.Thing"),
    ],
)
def test_a_text_in_the_place_of_a_mapping_is_not_imported(
    recipe_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    value: str,
    recipe: str,
) -> None:
    """jsonargparse takes a text for a dataclass as an import path."""
    Path("evil.py").write_text("open('imported', 'w')")
    monkeypatch.syspath_prepend(str(recipe_folder))
    monkeypatch.setenv(f"CALLSHEET_{name}", value)
    assert main(["show", recipe]) == 2
    assert capsys.readouterr().err.startswith(f"callsheet: CALLSHEET_{name}: ")
    assert not Path("imported").exists()


def test_jsonargparse_does_not_read_the_environment_itself(recipe_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JSONARGPARSE_DEFAULT_ENV", "true")
    monkeypatch.setenv("CALLSHEET SHOW TINY_BATCH_SIZE", "99")
    assert resolved()["batch_size"] == 2


def test_a_wrong_value_and_a_misspelled_variable_are_reported(
    recipe_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
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


def test_keys_of_a_value_that_is_none_by_default_can_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CALLSHEET_LORA__R", "4")
    assert resolved("--lora.alpha", "9", recipe="finetune")["lora"]["r"] == 4
    monkeypatch.setenv("CALLSHEET_LORA__R", "x")
    with pytest.raises(ConfigError, match=r"^CALLSHEET_LORA__R: lora\.r: Expected a <class 'int'>\. Got value: x \(callsheet"):
        resolved(recipe="finetune")
    monkeypatch.setenv("CALLSHEET_LORA__R", "4")
    with pytest.raises(ConfigError, match=r"^lora\.r: Expected a <class 'int'>\. Got value: y \(callsheet"):
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


def names_of(prepared_recipe: Prepared) -> list[tuple[str, str]]:
    return [(type(callback).__name__, callback.name) for callback in prepared_recipe.job.callbacks.callbacks]


def test_two_callbacks_of_one_class_have_their_names(recipe_folder: Path) -> None:
    Path("two.yaml").write_text(TWO)
    prepared_recipe = prepare_recipe("tiny.yaml", ["--config", "two.yaml"], command="show")
    assert names_of(prepared_recipe) == [
        ("SpeedMonitor", ""),
        ("SpeedMonitor", "throughput/long"),
        ("NaNMonitor", ""),
        ("JSONLLogger", "lines"),
    ]
    second = yaml.safe_load(prepared_recipe.resolved)["callbacks"][1]
    assert (second["class_path"], second["name"]) == ("callsheet.callbacks.SpeedMonitor", "throughput/long")
    assert second["init_args"]["window_size"] == 500
    Path("again.yaml").write_text(prepared_recipe.resolved)
    assert names_of(prepare_recipe("again.yaml", command="show")) == names_of(prepared_recipe)


def test_a_callback_can_be_named_on_the_command_line(recipe_folder: Path) -> None:
    spec = '{"class_path": "callsheet.callbacks.LRMonitor", "name": "rates"}'
    appended = prepare_recipe("tiny.yaml", [f"--callbacks+={spec}", "--callbacks+=callsheet.callbacks.LRMonitor"], command="show")
    assert names_of(appended)[1:3] == [("LRMonitor", "rates"), ("LRMonitor", "")]
    assert names_of(prepare_recipe("tiny.yaml", ["--callbacks", f"[{spec}]"], command="show"))[:1] == [("LRMonitor", "rates")]


def test_a_name_is_set_on_a_nested_callback_and_on_one_with_an_argument_name(recipe_folder: Path) -> None:
    spec = """[{"class_path": "commands.test_configuration.Adjustable", "name": "outer", "init_args": {"name": "own", "inner":
        {"class_path": "callsheet.callbacks.LRMonitor", "name": "inner"}}}]"""
    prepared_recipe = prepare_recipe("tiny.yaml", ["--callbacks", spec], command="show")
    (outer,) = (callback for callback in prepared_recipe.job.callbacks.callbacks if isinstance(callback, Adjustable))
    assert outer.inner is not None
    assert (outer.name, outer.inner.name) == ("outer", "inner")


def test_names_of_other_values_are_not_changed() -> None:
    content = {"data": {"name": "wiki"}, "optimizer": {"class_path": "a.B", "init_args": {"name": "x"}}, "list": [{"name": "y"}]}
    assert with_calls(content) == content
    named = {"callbacks": [{"class_path": "a.B", "name": "one", "init_args": {"c": 1}}]}
    assert with_names(with_calls(named)) == named


# --- invalid values ---


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--optimizer.lrr", "1"], "there is no key 'optimizer.lrr'; did you mean 'optimizer.lr'?"),
        (["--optimizer.init_args.lrr=1"], "there is no key 'optimizer.lrr'; did you mean 'optimizer.lr'?"),
        (["--optimizer.lr", "x"], "optimizer.lr: Expected a <class 'float'>. Got value: x"),
        (
            ["--optimizer.qqq", "x"],
            "there is no key 'optimizer.qqq' (there are class_path, init_args, lr, betas, eps, weight_decay,",
        ),
        (["--optimizer", "torch.optim.Adamm"], "optimizer: module 'torch.optim' has no attribute 'Adamm'; did you mean 'Adam'?"),
        (["--optimizer", "Adamm"], "optimizer: Expected a dot import path string: Adamm; did you mean 'Adam'?"),
        (
            ["--optimizer", '{"class_pth": "torch.optim.SGD"}'],
            "there is no key 'optimizer.class_pth'; did you mean 'optimizer.class_path'?",
        ),
        (["--optimizer", "3"], "optimizer: Expected a dot import path string: 3"),
        (
            ["--optimizer", "callsheet.callbacks.EMA"],
            "optimizer: Expected 'callsheet.callbacks.EMA' to be a subclass of <class 'Optimizer'>.",
        ),
        (
            ["--optimizer", '{"class_path": "torch.optim.SGD", "name": "x"}'],
            "optimizer.name: Import path torch.optim.SGD does not correspond to a subclass of Callback",
        ),
        (
            ["--scheduler.step_size", "3"],
            "there is no key 'scheduler.step_size' (",
        ),
        (["--scheduler", "torch.optim.lr_scheduler.StepLR"], "scheduler: the following arguments are required: step_size"),
        (
            ["--callbacks+=callsheet.callbacks.LRMonitr"],
            "callbacks: module 'callsheet.callbacks' has no attribute 'LRMonitr'; did you mean 'LRMonitor'?",
        ),
        (["--callbacks+=nowhere.Some"], "callbacks: No module named 'nowhere'"),
        (
            ["--callbacks+=callsheet.callbacks.CheckpointSaver", "--callbacks.keep", "x"],
            "callbacks.keep: Expected a <class 'int'>. Got value: x",
        ),
        (["--callbacks+=callsheet.callbacks.LoadCheckpoint"], "callbacks: the following arguments are required: path"),
        (["--callbacks.init_args.keeep", "3"], "there is no key 'callbacks.keeep'; did you mean 'callbacks.keep'?"),
        (["--callbacks.a.b", "3"], "callbacks.a.b: unrecognized arguments: --a.b=3"),
        (["--callbacks[0].x", "3"], "callbacks[0].x: unrecognized arguments"),
        (["--callbacks+={class_path:"], "callbacks: Expected a dot import path string: {class_path:"),
        (["--model.a.b", "3"], "there is no key 'model.a.b'"),
        (["--foo"], "unrecognized arguments: --foo"),
        (["--callbacks[7].window_size", "3"], "callbacks[7].window_size: unrecognized arguments"),
        (["--optimizer.nam", "x"], "there is no key 'optimizer.nam' (there are class_path"),
        (["--seed", "9" * 5000 + "x"], "seed=999"),
        (["--batch_size"], "argument --batch_size: expected one argument"),
        (["--batch_size", "many"], "batch_size=many: give int"),
        (["--eval_batch_size", "x"], "eval_batch_size=x: give int | None"),
        (["--data.validation_windows=x"], "data.validation_windows=x: give int"),
        (["--prompts", "3"], "prompts=3: give list[str]"),
        (["--model", "3"], 'model: Parser key "model": Unable to load config "3"'),
        (["--model.hiden_size", "8"], "there is no key 'model.hiden_size'; did you mean 'model.hidden_size'?"),
        (
            ["--config", "wrong.yaml"],
            "wrong.yaml:1: there is no key 'callbacks[1].save_intervall'; did you mean 'callbacks[1].save_interval'?",
        ),
    ],
)
def test_an_invalid_value_is_reported_in_one_line(
    recipe_folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    Path("wrong.yaml").write_text(
        "callbacks: [callsheet.callbacks.LRMonitor, {class_path: callsheet.callbacks.CheckpointSaver, init_args: {save_intervall: 3}}]"
    )
    assert main([*SHOWN, *arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"callsheet: {message}")
    assert err.endswith("(callsheet show tiny.yaml --help explains every key)\n")
    assert err.count("\n") == 1


@pytest.mark.parametrize(("key", "kind"), [("batch_size", "int"), ("seed", "int"), ("prompts", "list[str]")])
def test_null_in_a_file_is_rejected_for_a_key_that_does_not_take_it(
    key: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(f"recipe: finetune\neval_batch_size: null\n{key}: null\n")
    assert main(["show", "mine.yaml"]) == 2
    assert capsys.readouterr().err.startswith(f"callsheet: mine.yaml:3: {key}=null: give {kind} (")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            "optimizer: {class_path: torch.optim.SGD, init_args: {lrr: 1}}",
            "there is no key 'optimizer.lrr'; did you mean 'optimizer.lr'?",
        ),
        (
            "callbacks: [{class_pth: callsheet.callbacks.EMA}]",
            "there is no key 'callbacks[0].class_pth'; did you mean 'callbacks[0].class_path'?",
        ),
        (
            "callbacks: [{class_path: callsheet.callbacks.EMA, nme: x}]",
            "there is no key 'callbacks[0].nme'; did you mean 'callbacks[0].name'?",
        ),
        (
            "callbacks: [{class_path: callsheet.callbacks.CheckpointSaver, init_args: {mode: null}}]",
            "callbacks[0].mode: Expected a typing.Literal['min', 'max']. Got value: None",
        ),
        (
            "callbacks: [{class_path: callsheet.callbacks.EMA, init_args: {decay: x}}]",
            "callbacks[0].decay: Expected a <class 'float'>. Got value: x",
        ),
        (
            "callbacks: [callsheet.callbacks.EMAs]",
            "callbacks[0]: module 'callsheet.callbacks' has no attribute 'EMAs'; did you mean 'EMA'?",
        ),
        (
            "loggers: [{class_path: callsheet.loggers.JSONLogger}]",
            "loggers[0].class_path: module 'callsheet.loggers' has no attribute 'JSONLogger'; did you mean",
        ),
        (
            "callbacks: [{class_path: callsheet.callbacks.SpeedMonitor, window_size: 3}]",
            "there is no key 'callbacks[0].window_size'; put 'window_size' below init_args",
        ),
        (
            "callbacks: [{class_path: callsheet.callbacks.EMA, init_args: }]",
            "callbacks[0].init_args=None: give the arguments by name",
        ),
        ("callbacks: [{class_path: }]", "callbacks[0].class_path=None: give the import path of a class"),
        ("model: [1]", "model: give its keys one by one, such as model.path"),
        ("max_durtion: 3ba", "there is no key 'max_durtion'; did you mean 'max_duration'?"),
        ("batch_size: many", "batch_size=many: give int"),
    ],
)
def test_a_wrong_value_in_a_file_names_the_file_and_the_line(
    recipe_folder: Path, capsys: pytest.CaptureFixture[str], content: str, message: str
) -> None:
    Path("wrong.yaml").write_text(f"recipe: pretrain\n{content}\n")
    assert main(["show", "wrong.yaml"]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"callsheet: wrong.yaml:2: {message}")
    assert err.count("\n") == 1
    Path("wrong.yaml").write_text(f"\n\n{content}\n")
    assert main(["show", "pretrain", "--config", "wrong.yaml"]) == 2
    assert capsys.readouterr().err.startswith(f"callsheet: wrong.yaml:3: {message}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch_sze", "4"], "there is no key 'batch_sze'; did you mean 'batch_size'?"),
        (["--batch_size", "many"], "batch_size=many: give int"),
        (["--config", "other.yaml", "--seed", "2"], "other.yaml:2: there is no key 'sed'; did you mean 'seed'?"),
    ],
)
def test_errors_do_not_name_the_variable_of_a_similar_or_overridden_key(
    recipe_folder: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.setenv("CALLSHEET_BATCH_SIZE", "8")
    monkeypatch.setenv("CALLSHEET_SEED", "1")
    Path("other.yaml").write_text("batch_size: 3\nsed: 2\n")
    with pytest.raises(ConfigError) as rejected:
        prepare_recipe("pretrain", arguments, command="show")
    assert str(rejected.value).startswith(message)
    assert "CALLSHEET_" not in str(rejected.value)


def test_an_error_of_a_class_names_the_source_of_the_value(recipe_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("other.yaml").write_text("seed: 1\neval_interval: 3 epochs\n")
    with pytest.raises(ConfigError, match=r"^other\.yaml:2: eval_interval='3 epochs': unknown unit"):
        prepare_recipe("pretrain", ["--config", "other.yaml"], command="show")
    monkeypatch.setenv("CALLSHEET_EVAL_INTERVAL", "4 epochs")
    with pytest.raises(ConfigError, match=r"^CALLSHEET_EVAL_INTERVAL: eval_interval='4 epochs': unknown unit"):
        prepare_recipe("pretrain", command="show")
    with pytest.raises(ConfigError, match=r"^eval_interval='5 epochs': unknown unit"):
        prepare_recipe("pretrain", ["--eval_interval", "5 epochs"], command="show")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", "list.yaml"], "list.yaml: [3] is not a mapping; give keys and values"),
        (["--config", "empty.yaml"], "empty.yaml: it is empty; give keys and values"),
        (["--recipe", "classify"], "recipe: only the recipe file can name it"),
        (["--lora.rr", "3"], "there is no key 'lora.rr'; did you mean 'lora.r'?"),
        (["--lora", "x"], "lora=x: give callsheet.recipes.models.lora.Lora | None"),
        (["--train.pathh", "x"], "there is no key 'train.pathh'; did you mean 'train.path'?"),
        (["--train.path", "x", "--train.limit", "y"], "train.limit: Expected a <class 'int'>. Got value: y"),
        (['--validation={"a": {"pth": "x"}}'], "there is no key 'validation.a.pth'; did you mean 'validation.a.path'?"),
        (['--validation={"a": {"split": "x"}}'], "validation.a: the following arguments are required: path"),
        (["--config", "wrong.yaml"], "wrong.yaml:1: there is no key 'validation.a.pathh'; did you mean 'validation.a.path'?"),
    ],
)
def test_an_error_in_a_nested_value_names_its_source(recipe_folder: Path, arguments: list[str], message: str) -> None:
    Path("wrong.yaml").write_text("validation: {a: {pathh: x.jsonl}}")
    Path("list.yaml").write_text("- 3")
    Path("empty.yaml").write_text("# nothing\n")
    with pytest.raises(ConfigError) as rejected:
        prepare_recipe("finetune", arguments, command="show")
    assert str(rejected.value).startswith(message)
    assert "\n" not in str(rejected.value)


def test_a_missing_argument_is_reported_only_if_no_later_source_gives_it(recipe_folder: Path) -> None:
    Path("loads.yaml").write_text("seed: 1\ncallbacks: [callsheet.callbacks.LoadCheckpoint]\n")
    step = ["--scheduler", "torch.optim.lr_scheduler.StepLR", "--scheduler.step_size"]
    for arguments, message in (
        (
            ["--config", "loads.yaml", "--callbacks+=callsheet.callbacks.LRMonitor"],
            "loads.yaml:2: callbacks[0]: the following arguments are required: path",
        ),
        ([*step, "x"], "scheduler.step_size: Expected a <class 'int'>. Got value: x"),
        ([*step, "3", "--sed", "3"], "there is no key 'sed'; did you mean 'seed'?"),
    ):
        with pytest.raises(ConfigError) as rejected:
            prepare_recipe("tiny.yaml", arguments, command="show")
        assert str(rejected.value).startswith(message)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("pretran", "did you mean 'pretrain'?"),
        ("[a]", "its key `recipe` must name one of"),
        ("fails_at_import.Recipe", "names fails_at_import.Recipe, whose import fails: ZeroDivisionError: division by zero"),
        ("commands.sample.WritesEvents", "is not a callsheet.recipes.Recipe"),
        ("a.b", "cannot import 'a.b'"),
    ],
)
def test_a_recipe_that_does_not_exist_is_rejected(
    recipe_folder: Path, capsys: pytest.CaptureFixture[str], name: str, message: str
) -> None:
    Path("fails_at_import.py").write_text("1 / 0")
    Path("wrong.yaml").write_text(f"recipe: {name}\n")
    assert main(["show", "wrong.yaml"]) == 2
    assert message in capsys.readouterr().err


# --- printing values ---


def test_print_config_is_a_recipe_file(recipe_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("two.yaml").write_text(TWO)
    with pytest.raises(SystemExit) as stopped:
        main(["train", "tiny.yaml", "--config", "two.yaml", "--batch_size", "4", "--print_config"])
    assert stopped.value.code == 0
    printed = capsys.readouterr().out
    Path("printed.yaml").write_text(printed)
    assert resolved(recipe="printed.yaml") == resolved("--config", "two.yaml", "--batch_size", "4")


def test_help_lists_classes_by_name_and_how_to_see_more(recipe_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
