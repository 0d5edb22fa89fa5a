"""Reads a recipe file and the values that override it, and makes the recipe object from them."""

from __future__ import annotations

import argparse
import inspect
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from callsheet import callbacks
from callsheet.cli import environment, names
from callsheet.cli.check import first_error, strict_nulls
from callsheet.cli.cli_values import Source, sources_of
from callsheet.cli.key_types import typed_keys
from callsheet.cli.shipped import RECIPES, recipe_path
from callsheet.core.callback import Callback
from callsheet.core.ranks import read_ranks
from callsheet.core.spec import import_path
from callsheet.errors import CallsheetError, ConfigError, did_you_mean
from callsheet.recipes.yaml_file import read_yaml

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser, Namespace

    from callsheet.recipes.recipe import Recipe


NEW_RUN_HINT = "--resume new sets the run aside and starts a new one; --run_name NAME starts another beside it"
"""How to start a new run on the command line, for messages."""

CONFIG = "config.yaml"
"""The name of the recipe file in a run's folder. The file has the values with which the run was trained."""


_LISTS = ("callbacks", "loggers")
"""The keys whose values are lists of callbacks. They are constructed one by one, so that an error can name the callback."""


@dataclass(frozen=True, slots=True)
class Values:
    """The checked values of a recipe file and its overrides, before objects are made from them.

    `given` has a value for every key. It may be changed before `make` is called.
    """

    path: Path
    kind: type[Recipe[Any]]
    parser: ArgumentParser
    given: Namespace
    sources: tuple[Source, ...]

    def as_yaml(self) -> str:
        """Return all values as YAML text, which is a complete recipe file."""
        text: str = self.parser.dump(self.given, skip_unset=False, with_comments=False)
        return text

    def make(self) -> Prepared:
        """Make the recipe object from the values, with its callbacks and loggers.

        Raises:
            ConfigError: a class rejects a value.
        """
        resolved = self.as_yaml()
        given = self.given.clone()
        lists = {key: [self._construct(spec, f"{key}[{i}]") for i, spec in enumerate(given[key] or [])] for key in _LISTS}
        given.callbacks, given.loggers = [], []
        try:
            made = self.parser.instantiate(given)
            config = self.kind.Config(**{field.name: made[field.name] for field in fields(self.kind.Config)})
        except ValueError as error:
            rejected = _cause_of(error)
            if not isinstance(rejected, ConfigError):
                raise
            key = _first_word(rejected)
            is_key = any(f"{each}.".startswith(f"{key}.") or key.startswith(f"{each}.") for each in typed_keys(self.parser))
            raise ConfigError(f"{self._source_of(key).place(key) if is_key else ''}{rejected}") from error
        job = self.kind(config, **lists, resolved=resolved)
        job.new_run_hint = NEW_RUN_HINT
        return Prepared(self.path, job, resolved)

    def _construct(self, spec: Namespace, key: str) -> Callback:
        """Return the callback or logger that `spec` describes.

        Raises:
            ConfigError: the class rejects an argument; the message begins with the place, such as
                `mine.yaml:7: callbacks[2] (CheckpointSaver): `.
        """
        from jsonargparse import ArgumentParser, Namespace

        parser = ArgumentParser()
        parser.add_argument("--value", type=Callback)
        try:
            callback: Callback = parser.instantiate(Namespace(value=spec)).value  # type: ignore[no-untyped-call]
        except ValueError as error:
            rejected = _cause_of(error)
            if not isinstance(rejected, ValueError):
                raise  # the class has a fault, and does not reject an argument
            own = spec.init_args.callback if spec.class_path == names.NAMED_PATH else spec
            kind = "" if isinstance(rejected, ConfigError) else f"{type(rejected).__name__}: "
            place = self._source_of(key.partition("[")[0]).place(f"{key}.{_first_word(rejected)}")
            raise ConfigError(
                f"{place}{key} ({own.class_path.rpartition('.')[2]}): {kind}{' '.join(str(rejected).split())}"
            ) from error
        return callback

    def _source_of(self, key: str) -> Source:
        """Return the source whose value for a key is used. If no source has a value, return the recipe file."""
        return source_of(self.sources, key)


def source_of(sources: Sequence[Source], key: str) -> Source:
    """Return the source whose value for a key is used. If no source has a value, return the first, which is the recipe file."""
    return next((source for source in reversed(sources) if source.gives(key)), sources[0])


def _cause_of(error: ValueError) -> BaseException:
    """Return the error of a class, which jsonargparse may have wrapped in an error of its own."""
    is_wrapper = isinstance(error.__cause__, ConfigError) or str(error).startswith("Problem with given class_path")
    return error.__cause__ if is_wrapper and error.__cause__ is not None else error


def _first_word(error: BaseException) -> str:
    """Return the word with which a message begins. It is often the name of the argument that is rejected."""
    named = re.match(r"(?:unknown )?([\w.]+)", str(error))
    return named.group(1) if named else ""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A recipe file that was read: the recipe object with its callbacks and loggers, and its whole configuration as YAML."""

    path: Path
    job: Recipe[Any]
    resolved: str


def prepare_recipe(recipe: str, overrides: Sequence[str] = (), *, command: str) -> Prepared:
    """Read a recipe file, apply the overrides, and make the recipe object. No model is made and no data is read.

    Raises:
        ConfigError: there is no such recipe, a key is unknown, a value has a wrong type, or a package is missing; the message has a hint.
    """
    with errors_on_first_rank():
        path = recipe_path(recipe)
        with current_file(path) as file:
            return replace(values_of(file, overrides, command=command, title=recipe).make(), path=path)


@contextmanager
def current_file(path: Path) -> Iterator[Path]:
    """Yield the path of the recipe file, or of a temporary copy with current keys if an earlier version of callsheet wrote the file."""
    from callsheet.recipes.existing_run import with_current_names

    content = read_yaml(path) if path.name == CONFIG else None
    current = with_current_names(content) if isinstance(content, dict) else content
    if current == content:
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="callsheet-run-") as folder:
        copy = Path(folder) / CONFIG
        copy.write_text(yaml.safe_dump(current, allow_unicode=True, sort_keys=False), encoding="utf-8")
        try:
            yield copy
        except ConfigError as error:
            raise ConfigError(str(error).replace(str(copy), str(path))) from error.__cause__


@contextmanager
def errors_on_first_rank() -> Iterator[None]:
    """While the `with` block runs, only the first rank of a machine reports an error. The other ranks exit without a message."""
    try:
        yield
    except CallsheetError:
        if read_ranks().local_rank != 0:
            raise SystemExit(2) from None
        raise


def values_of(
    path: Path, overrides: Sequence[str] = (), *, command: str, variables: Mapping[str, str] | None = None, title: str = ""
) -> Values:
    """Return the values of a recipe file. Environment variables override them, and `overrides` override both.

    Args:
        path: the recipe file.
        overrides: as on the command line, such as `["--max_duration", "3ba"]`.
        command: the command for which the values are read.
        variables: the environment; None is that of this process.
        title: the name of the recipe in messages; by default the file's path.

    Raises:
        ConfigError: a key is unknown, or a value has a wrong type.
    """
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # a recipe may name a class in a module of the current folder
    kind = recipe_class(path)
    parser = recipe_parser(kind, path, command=command, title=title or str(path))
    from_environment = environment.arguments(parser, os.environ if variables is None else variables)
    sources = tuple(sources_of(path, from_environment, overrides))
    try:
        given = parser.parse_args([*(f"--{key}={value}" for key, value in from_environment.items()), *overrides], env=False)
    except Exception as error:  # an `ArgumentError`, or any error raised by importing a class that a value names
        message = first_error(parser, sources)
        if not message and not isinstance(error, argparse.ArgumentError):
            raise
        raise ConfigError(f"{message or ' '.join(str(error).split())} ({parser.prog} --help explains every key)") from None
    if message := _error_in(parser, given, sources):
        raise ConfigError(f"{message} ({parser.prog} --help explains every key)")
    with strict_nulls():
        strict_parser = recipe_parser(kind, path, command=command, title=title or str(path))
        if message := first_error(strict_parser, sources, only_null=True):
            raise ConfigError(f"{message} ({parser.prog} --help explains every key)")
    return Values(path, kind, parser, given, sources)


def _error_in(parser: ArgumentParser, given: Namespace, sources: Sequence[Source]) -> str:
    """Return a message about a value that jsonargparse accepts although the recipe cannot use it, or an empty string."""
    name = sources[0].values["recipe"]
    for source in sources[1:]:
        if source.values.get("recipe", name) != name:
            return f"{source.place('recipe')}recipe: only the recipe file can name it, and it names {name}"
    kinds = typed_keys(parser)
    for source in sources:
        for key, value in source.values.items():  # jsonargparse accepts any key with an empty mapping
            if value == {} and not any(f"{each}.".startswith(f"{key}.") or key.startswith(f"{each}.") for each in kinds):
                return f"{source.place(key)}there is no key {key!r}{did_you_mean(key, kinds)}"
    for key in kinds:
        group = key.rpartition(".")[0]  # such as `model` for `model.path`
        if group and group not in kinds and not hasattr(given.get(group), "__dict__"):
            return f"{source_of(sources, group).place(group)}{group}: give its keys one by one, such as {key}"
    return ""


def recipe_class(path: Path) -> type[Recipe[Any]]:
    """Return the recipe class that the file's key `recipe` names, by the name of a shipped recipe or by the import path of a class.

    Raises:
        ConfigError: the file is not a YAML mapping, or names no recipe.
    """
    content = read_yaml(path)
    name = content.get("recipe") if isinstance(content, dict) else None
    if not isinstance(name, str) or (name not in RECIPES and "." not in name):
        raise ConfigError(
            f"{path}: its key `recipe` must name one of {', '.join(RECIPES)}, or a class as package.module.Class, "
            f"not {name!r}{did_you_mean(str(name), RECIPES)}"
        )
    from callsheet.recipes.recipe import Recipe

    try:
        found = import_path(RECIPES.get(name, name))
    except ConfigError as error:
        raise ConfigError(f"{path}: its key `recipe`: {error}") from None
    except Exception as error:  # importing a module may raise any error
        if name in RECIPES:
            raise  # a package is missing; its error names the command that installs it
        raise ConfigError(
            f"{path}: its key `recipe` names {name}, whose import fails: {type(error).__name__}: {error}"
        ) from error
    if not (isinstance(found, type) and issubclass(found, Recipe)):
        raise ConfigError(f"{path}: its key `recipe` names {name}, which is not a callsheet.recipes.Recipe")
    return found


def recipe_parser(kind: type[Recipe[Any]], path: Path, *, command: str, title: str) -> ArgumentParser:
    """Return a parser that accepts the fields of the recipe's configuration as keys. The values in the recipe file `path` are the defaults."""
    from jsonargparse import ArgumentParser

    from callsheet.cli.key_help import KeyHelp

    for name in callbacks.__all__:
        # Import all callbacks, because jsonargparse finds a class by its bare name only if the class is imported.
        getattr(callbacks, name)
    names.register()
    explains = f"callsheet {command if command == 'show' else 'train'} {title}"  # only `train` and `show` have `--help` for keys
    parser = ArgumentParser(
        prog=explains,
        usage=f"{explains} [--KEY VALUE ...]",
        description=(inspect.getdoc(kind) or "").partition("\n")[0],
        default_config_files=[str(path)],
        parser_mode=names.FORMAT,
        formatter_class=KeyHelp,
        exit_on_error=False,
        allow_abbrev=False,  # a misspelled key is an error, even if it is the beginning of a valid key
    )
    parser.add_argument(
        "--recipe", type=str, help="the name of a shipped recipe, or the import path of your own class; every file needs it"
    )
    parser.add_class_arguments(kind.Config, None, as_group=False)
    parser.add_argument(
        "--callbacks",
        type=list[Callback],
        default=[],
        help="a list of callbacks, each with `class_path`, and optionally with `init_args` and `name`",
    )
    parser.add_argument("--loggers", type=list[Callback], default=[], help="a list of loggers, in the same form as `callbacks`")
    parser.add_argument("--config", action="config", help="a further file, whose values override those of the recipe")
    return parser
