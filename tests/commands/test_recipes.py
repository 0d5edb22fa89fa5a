"""`callsheet recipes` lists the recipes of the package and copies one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from callsheet.cli.main import main
from callsheet.cli.recipe import prepare_recipe, recipe_class, recipe_parser
from callsheet.cli.shipped import RECIPES, recipe_path
from callsheet.errors import ConfigError


def test_each_recipe_is_listed_with_a_description(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    recorded = dict(line.split(maxsplit=1) for line in lines[: lines.index("")])
    assert sorted(recorded) == sorted(RECIPES)
    assert all(len(about.split()) > 4 for about in recorded.values())


@pytest.mark.parametrize(("to", "path"), [([], "pretrain.yaml"), (["--to", "deep/mine.yaml"], "deep/mine.yaml")])
def test_a_copy_is_the_same_recipe_and_is_not_overwritten(
    recipe_folder: Path, capsys: pytest.CaptureFixture[str], to: list[str], path: str
) -> None:
    assert main(["recipes", "--copy", "pretrain", *to]) == 0
    assert capsys.readouterr().out == f"{path}; run it: callsheet train {path}\n"
    assert yaml.safe_load(Path(path).read_text()) == yaml.safe_load(recipe_path("pretrain", is_shipped=True).read_text())
    Path(path).write_text("mine")
    assert main(["recipes", "--copy", "pretrain", *to]) == 2
    assert f"{path} exists already; name another file with --to" in capsys.readouterr().err
    assert Path(path).read_text() == "mine"


def test_a_misspelled_name_and_a_missing_option_are_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "--copy", "pretran"]) == 2
    assert "there is no recipe 'pretran'; did you mean 'pretrain'?" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["recipes", "--to", "x.yaml"])
    assert "--to needs --copy" in capsys.readouterr().err


KEYS_WITH_NAMED_VALUES = [
    *((recipe, "too_long") for recipe in ("finetune", "finetune_vlm", "classify", "distill")),
    ("classify", "class_weights"),
    *(("pretrain", key) for key in ("resume", "max_duration", "precision", "parallel", "model.dtype")),
]


@pytest.mark.parametrize(("recipe", "key"), KEYS_WITH_NAMED_VALUES)
def test_each_value_that_the_help_of_a_key_names_is_valid(recipe: str, key: str) -> None:
    path = recipe_path(recipe, is_shipped=True)
    parser = recipe_parser(recipe_class(path), path, command="train", title=recipe)
    (help_text,) = (action.help for action in parser._actions if action.dest == key)
    values = re.findall("`([^`]+)`", str(help_text))
    assert len(values) > 1
    for value in values:
        prepare_recipe(recipe, [f"--{key}={value}"], command="train")


@pytest.mark.parametrize("recipe", ["finetune", "finetune_vlm", "classify", "distill"])
def test_the_value_refuse_of_earlier_versions_is_rejected(recipe: str) -> None:
    with pytest.raises(ConfigError, match="too_long"):
        prepare_recipe(recipe, ["--too_long=refuse"], command="train")
