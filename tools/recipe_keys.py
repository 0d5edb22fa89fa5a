"""Make the tables of the recipes' keys from the recipes' parsers and the docstrings of their configurations."""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import MISSING, dataclass, fields
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml
from docstring_parser import parse
from jsonargparse import ArgumentParser

from callsheet.cli.key_types import parts_of
from callsheet.cli.recipe import recipe_class, recipe_parser
from callsheet.cli.shipped import RECIPES, recipe_path
from callsheet.recipes.data.rows import Rows
from callsheet.recipes.finetune import FinetuneConfig
from callsheet.recipes.job import JobConfig
from callsheet.recipes.models.language_model import LanguageModel

SHARED = {LanguageModel: ("model", "language-models"), Rows: ("dataset", "datasets")}
"""Classes whose keys occur below several keys: the name of such a value, and the section of the page that explains the keys."""

_PYTHON = {"None": None, "True": True, "False": False}
"""The words of the docstrings that are written in another way in YAML."""

OF_ALL = ("recipe", *(field.name for field in fields(JobConfig)), "callbacks", "loggers")


def item_of(kind: Any, container: type) -> Any:
    """Return the item type of `kind`, such as int for `list[int]` or `list[int] | None`. Return None for other types."""
    if get_origin(kind) is container:
        return get_args(kind)[-1]
    is_union = get_origin(kind) in (Union, types.UnionType)
    return next(filter(None, (item_of(part, container) for part in get_args(kind) if is_union)), None)


@dataclass(frozen=True)
class Key:
    """A key of a recipe file, as its table shows it."""

    name: str
    kind: str
    default: str
    meaning: str

    def row(self) -> str:
        meaning = re.sub(r"\b(None|True|False)\b", lambda word: _yaml(_PYTHON[word[0]]), self.meaning).replace("|", "\\|")
        return f"| {' | '.join((f'`{self.name}`', self.kind, self.default, meaning.removesuffix('.')))} |"


def table(keys: Iterable[Key]) -> list[str]:
    return ["| key | type | default | meaning |", "| --- | --- | --- | --- |", *(key.row() for key in keys)]


def keys_of_all() -> list[str]:
    """Return the table of the keys that all recipes have."""
    parsers = {name: _parser(name) for name in RECIPES}
    return table(
        Key(
            name,
            _in_words(_action(parsers["pretrain"], name)._typehint),
            _defaults(parsers, name),
            _help(parsers["pretrain"], name),
        )
        for name in OF_ALL
    )


def keys_of_recipe(recipe: str) -> list[str]:
    """Return the table of the keys that a recipe has in addition to those of all recipes, or `distill` in addition to `finetune`."""
    config = recipe_class(recipe_path(recipe)).Config
    base = FinetuneConfig if issubclass(config, FinetuneConfig) and config is not FinetuneConfig else JobConfig
    inherited = {field.name for field in fields(base)}
    lines = table(keys_of(config, [field.name for field in fields(config) if field.name not in inherited]))
    names = config.may_change - base.may_change
    return [*lines, "", f"You can change these keys when you resume a run: {_listed(names, config)}."] if names else lines


def keys_of(config: type, names: Iterable[str] | None = None, prefix: str = "") -> Iterator[Key]:
    """Yield the keys for the fields of a configuration class, and the keys below them.

    Raises:
        SystemExit: the class's docstring does not describe a field.
    """
    parser = ArgumentParser()
    parser.add_class_arguments(config, None, as_group=False, fail_untyped=False)
    kinds = get_type_hints(config)
    needed = {field.name for field in fields(config) if field.default is MISSING and field.default_factory is MISSING}
    for name in names if names is not None else [field.name for field in fields(config)]:
        kind, key = kinds[name], f"{prefix}{name}"
        meaning = _described(config, name)
        parts = parts_of(kind)
        action = _action(parser, name)
        is_optional = parts is not None and parts is not kind and not item_of(kind, dict)
        default = "required" if name in needed else "" if parts is kind else _yaml(action.default)
        if parts in SHARED:
            called, section = SHARED[parts]
            what = f"mapping from names to {called}s" if item_of(kind, dict) else called
            yield Key(key, f"[{what}](#{section})" + (" or null" if is_optional else ""), default, meaning)
        elif parts is not None:
            yield Key(key, "the keys below" + (", or null" if is_optional else ""), default, meaning)
            yield from keys_of(parts, prefix=f"{key}.")
        else:
            yield Key(key, _in_words(kind), default, meaning)


def _in_words(kind: Any) -> str:
    """Return a description of the type in words, such as `int or null`."""
    origin, parts = get_origin(kind), get_args(kind)
    if kind is None or kind is type(None):
        return "null"
    if origin in (Union, types.UnionType):
        words = [_in_words(part) for part in parts]
        return " or ".join([*(word for word in words if word != "null"), *(word for word in words if word == "null")])
    if origin is Literal:
        return "one of " + ", ".join(map(str, parts))
    if origin is Callable:
        return f"class of {_in_words(parts[1])}"
    if origin is dict:
        return f"mapping from {_in_words(parts[0])} to {_in_words(parts[1])}"
    if origin is not None and parts:
        name = getattr(origin, "__name__", str(origin))
        return f"{name} of {' and '.join(_in_words(part) for part in parts if part is not Ellipsis)}"
    return str(getattr(kind, "__name__", kind)).removeprefix("typing.")


def may_change() -> list[str]:
    """Return a line with the keys of all recipes that may change when a run is resumed."""
    return [f"{_listed(JobConfig.may_change, JobConfig)}."]


def _listed(names: Collection[str], config: type) -> str:
    """Return the names of keys, in the order of the tables."""
    ordered = dict.fromkeys((*OF_ALL, *(field.name for field in fields(config))))
    return ", ".join(f"`{name}`" for name in ordered if name in names)


def _described(config: type, name: str) -> str:
    """Return the description of a field in the docstring of the class, or of the nearest base class that has one."""
    for kind in config.__mro__:
        for param in parse(inspect.cleandoc(kind.__dict__.get("__doc__") or "")).params:
            if param.arg_name == name and param.description:
                return " ".join(param.description.split())
    raise SystemExit(f"{config.__module__}.{config.__qualname__}: its docstring does not describe {name!r}; add it below Args")


def _parser(recipe: str) -> ArgumentParser:
    path = recipe_path(recipe)
    return recipe_parser(recipe_class(path), path, command="train", title=recipe)


def _action(parser: ArgumentParser, name: str) -> Any:
    return next(action for action in parser._actions if action.dest == name)


def _help(parser: ArgumentParser, name: str) -> str:
    return " ".join(_action(parser, name).help.split())


def _defaults(parsers: dict[str, ArgumentParser], name: str) -> str:
    """Return the default of a key that all recipes have, with the recipes' names if they have different ones."""
    if name == "recipe":
        return "required"
    found: dict[str, list[str]] = {}
    for recipe, parser in parsers.items():
        found.setdefault(_yaml(_action(parser, name).default), []).append(recipe)
    if len(found) == 1:
        return next(iter(found))
    if all(value == _yaml(recipe) for value, (recipe, *_) in found.items()):
        return "the recipe's name"
    return ", ".join(f"{value} ({', '.join(recipes)})" for value, recipes in found.items())


def _yaml(value: Any) -> str:
    """Return a default as it would be written in a recipe file."""
    text = yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("...\n").strip()
    return f"`{text}`"
