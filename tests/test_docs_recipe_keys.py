"""The page of the recipe keys has every key of every recipe, and a key without a description is an error."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from callsheet.cli.key_types import parts_of
from callsheet.cli.recipe import recipe_class, recipe_parser
from callsheet.cli.shipped import RECIPES, recipe_path
from callsheet.recipes import DistillConfig, JobConfig, LanguageModel, Rows

ROOT = Path(__file__).resolve().parent.parent
SHARED = {LanguageModel: "Language models", Rows: "Datasets"}


def keys_in(section: str) -> set[str]:
    page = (ROOT / "docs" / "reference" / "recipe_keys.md").read_text(encoding="utf-8")
    text = page.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return set(re.findall(r"^\| `([\w.]+)` \|", text, re.MULTILINE))


def with_parts(key: str, kind: Any) -> Iterator[str]:
    """Yield a key, and the keys below it if its value is a configuration class. A mapping from names is the same as one value."""
    yield key
    if parts := parts_of(kind):
        for name, part in get_type_hints(parts).items():
            if name in {field.name for field in fields(parts)}:
                yield from with_parts(f"{key}.{name}", part)


def documented(recipe: str) -> set[str]:
    """Return the keys of a recipe that the page has, with those of the shared sections."""
    config = recipe_class(recipe_path(recipe)).Config
    found = keys_in("Keys of all recipes") | keys_in(recipe) | (keys_in("finetune") if config is DistillConfig else set())
    for name, kind in get_type_hints(config).items():
        for key in [each for each in with_parts(name, kind) if each in found]:
            of = kind
            for word in key.split(".")[1:]:
                of = get_type_hints(parts_of(of) or object)[word]
            if (parts := parts_of(of)) in SHARED:
                found |= {f"{key}.{each}" for each in keys_in(SHARED[parts])}
    return found


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_key_of_the_parser_is_on_the_page(recipe: str) -> None:
    path = recipe_path(recipe)
    config = recipe_class(path).Config
    parser = recipe_parser(recipe_class(path), path, command="train", title=recipe)
    not_keys = ("help", "config", "print_config")
    accepted = {action.dest for action in parser._actions if action.dest not in not_keys and not action.dest.endswith(".help")}
    for name, kind in get_type_hints(config).items():
        if name in accepted:
            accepted |= set(with_parts(name, kind))
    assert documented(recipe) == accepted


def test_a_key_without_a_description_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(kw_only=True)
    class Incomplete(JobConfig):
        """A configuration.

        Args:
            explained: what it means.
        """

        explained: int = 1
        added: int = 2

    monkeypatch.setattr(sys, "path", [str(ROOT / "tools"), *sys.path])
    from recipe_keys import keys_of

    with pytest.raises(SystemExit, match=r"Incomplete: its docstring does not describe 'added'; add it below Args"):
        list(keys_of(Incomplete))
