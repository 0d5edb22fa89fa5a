"""A recipe file, with values over it, as what is to be run."""

from __future__ import annotations

import argparse
import inspect
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from callsheet import callbacks
from callsheet.callback import Callback, import_path
from callsheet.commands import environment, names
from callsheet.commands.cli_values import pairs
from callsheet.commands.rejections import place_of, plain_rejection
from callsheet.commands.shipped import RECIPES, recipe_path
from callsheet.commands.yaml_file import read_yaml
from callsheet.distributed import read_ranks
from callsheet.errors import CallsheetError, ConfigError, did_you_mean

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser, Namespace

    from callsheet.recipes.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Values:
    """What a recipe file says with values over it, checked; nothing of it is made yet.

    `given` has a value for every key, and may be changed before `made()`.
    """

    path: Path
    kind: type[Recipe[Any]]
    parser: ArgumentParser
    given: Namespace
    elsewhere: tuple[str, ...] = ()
    """Keys whose values are not the file's, but the command line's or the environment's."""

    def resolved(self) -> str:
        """All of it as YAML, which is a recipe file again."""
        text: str = self.parser.dump(self.given, skip_unset=False, with_comments=False)
        return text

    def made(self) -> Prepared:
        """The job, with its callbacks and loggers.

        Raises:
            ConfigError: what a value's own class refuses.
        """
        resolved = self.resolved()
        try:
            made = self.parser.instantiate(self.given)
            config = self.kind.Config(**{field.name: made[field.name] for field in fields(self.kind.Config)})
        except ConfigError as error:
            raise ConfigError(f"{place_of(error, self.path, self.parser, self.given, self.elsewhere)}{error}") from error
        job = self.kind(config, callbacks=made.callbacks, loggers=made.loggers, resolved=resolved)
        return Prepared(self.path, job, resolved)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A recipe that could be set up: the file, the job with its callbacks and loggers, and the whole configuration as YAML."""

    path: Path
    job: Recipe[Any]
    resolved: str


def prepared(recipe: str, overrides: Sequence[str] = (), *, command: str) -> Prepared:
    """The recipe with these values over the file's. Nothing is made but the configuration, the callbacks and the loggers.

    Raises:
        ConfigError: no such recipe, an unknown key, a value that does not fit, or a package that is missing; the message has the mend.
    """
    with said_once():
        return values_of(recipe_path(recipe), overrides, command=command, title=recipe).made()


@contextmanager
def said_once() -> Iterator[None]:
    """For what comes out alike on every rank of a machine: an error is left to its first rank to tell; the others end with the same status."""
    try:
        yield
    except CallsheetError:
        if read_ranks().local_rank != 0:
            raise SystemExit(2) from None
        raise


def values_of(
    path: Path, overrides: Sequence[str] = (), *, command: str, variables: Mapping[str, str] | None = None, title: str = ""
) -> Values:
    """The file's values, those of the environment over them, and these over all.

    Args:
        path: the recipe file.
        overrides: as on the command line, such as `["--max_duration", "3ba"]`.
        command: for which it is done.
        variables: the environment; None is that of this process.
        title: what it is called in messages, if not by the file's path.

    Raises:
        ConfigError: an unknown key, a value that does not fit.
    """
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # a recipe may name a callback of the user's own, in a module beside it
    kind = recipe_class(path)
    for key, value in pairs(overrides):
        if key == "config":
            read_yaml(Path(value))  # which says what is wrong with it
    parser = recipe_parser(kind, path, command=command, title=title or str(path))
    told = environment.arguments(parser, os.environ if variables is None else variables)
    return Values(path, kind, parser, parsed_with(parser, path, overrides, told), (*told, *(key for key, _ in pairs(overrides))))


def recipe_class(path: Path) -> type[Recipe[Any]]:
    """The recipe that the file's key `recipe` names: a shipped one by its name, or a class of the user's by its import path.

    Raises:
        ConfigError: the file is no YAML mapping, or names none.
    """
    content = read_yaml(path)
    name = content.get("recipe") if isinstance(content, dict) else None
    if name not in RECIPES and "." not in str(name):
        raise ConfigError(
            f"{path}: its key `recipe` must name one of {', '.join(RECIPES)}, or a class as package.module.Class, "
            f"not {name!r}{did_you_mean(str(name), RECIPES)}"
        )
    from callsheet.recipes.recipe import Recipe

    found = import_path(RECIPES.get(str(name), str(name)))
    if not (isinstance(found, type) and issubclass(found, Recipe)):
        raise ConfigError(f"{path}: its key `recipe` names {name}, which is no callsheet.recipes.Recipe")
    return found


def recipe_parser(kind: type[Recipe[Any]], path: Path, *, command: str, title: str) -> ArgumentParser:
    """A parser whose keys are the fields of the recipe's configuration, with the file's values as defaults."""
    from jsonargparse import ArgumentParser

    from callsheet.commands.key_help import KeyHelp

    for name in callbacks.__all__:
        getattr(callbacks, name)  # jsonargparse finds classes by their names alone where they are imported
    names.register()
    explains = f"callsheet {command if command == 'show' else 'train'} {title}"  # other commands have a --help of their own
    parser = ArgumentParser(
        prog=explains,
        usage=f"{explains} [--KEY VALUE ...]",
        description=(inspect.getdoc(kind) or "").partition("\n")[0],
        default_config_files=[str(path)],
        parser_mode=names.FORMAT,
        formatter_class=KeyHelp,
        exit_on_error=False,
    )
    parser.add_argument("--recipe", type=str, help="which recipe the file is for")
    parser.add_class_arguments(kind.Config, None, as_group=False)
    parser.add_argument(
        "--callbacks",
        type=list[Callback],
        default=[],
        help="callbacks: a list of class_path and init_args, each perhaps with a name",
    )
    parser.add_argument("--loggers", type=list[Callback], default=[], help="loggers: likewise")
    parser.add_argument("--config", action="config", help="a further file, whose values go over those of the recipe")
    return parser


def parsed_with(parser: ArgumentParser, path: Path, overrides: Sequence[str], told: Mapping[str, str]) -> Namespace:
    """The file's values, with those that the environment has `told`, by key, over them, and with `overrides` over all.

    Raises:
        ConfigError: an unknown key, in the file or here, with the nearest that there is; or a value that does not fit its key.
    """
    before = [f"--{key}={value}" for key, value in told.items()]
    try:
        return parser.parse_args([*before, *overrides], env=False)
    except argparse.ArgumentError as error:
        why = plain_rejection(parser, str(error), path, [*before, *overrides])
        told_by = next(
            (environment.variable(key) for key, value in told.items() if f"{key}={value}:" in why or f"'{key}'" in why), ""
        )
        source = f" (the environment variable {told_by})" if told_by else ""
        raise ConfigError(f"{why}{source} ({parser.prog} --help explains every key)") from None
