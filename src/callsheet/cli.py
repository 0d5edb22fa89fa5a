"""The command line: `callsheet train`, `callsheet events`."""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import logging
import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from callsheet import __version__, lifecycle
from callsheet.callback import Callback, import_path
from callsheet.context import Outcome
from callsheet.errors import CallsheetError, ConfigError, NotACallbackError, RegistrationError, UnknownEventError, did_you_mean
from callsheet.manager import CallbackManager

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser, Namespace

    from callsheet.trainer import Trainer

RECIPES = {"pretrain": "callsheet.recipes.pretrain.Pretrain"}
"""The recipes by name."""


class Recipe(Protocol):
    """What a recipe's class has: the class of its configuration, and what can be done with it."""

    Config: ClassVar[type[Any]]
    callbacks: CallbackManager
    trainer: Trainer

    def __init__(self, config: Any, callbacks: Any, loggers: Any, *, resolved: str) -> None: ...
    def setup(self) -> None:
        """Make everything, and find out what there is to resume."""

    def found(self) -> str:
        """What was there, and what will be done about it."""

    def run(self) -> Any:
        """Do the job."""

    def report(self) -> str:
        """What came of it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status: 0, 1 when the run failed, 2 when it was asked for wrongly, 130 on Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog="callsheet", description="Training callbacks for PyTorch: one callback, every training loop."
    )
    parser.add_argument("--version", action="version", version=f"callsheet {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    train = commands.add_parser("train", help="run a recipe", add_help=False)
    train.add_argument("recipe", nargs="?", help="a recipe file, or the name of a shipped one")
    commands.add_parser("events", help="print the lifecycle: every event, and where it stands")
    given, rest = parser.parse_known_args(arguments)
    if given.command == "events":
        if rest:
            parser.error(f"unknown arguments: {' '.join(rest)}")
        with suppress(BrokenPipeError):  # `callsheet events | head`
            print(lifecycle.tree(), flush=True)
        return 0
    try:
        return _train(given.recipe, rest)
    except CallsheetError as error:
        print(f"callsheet: {error}", file=sys.stderr)
        return 2 if isinstance(error, (ConfigError, RegistrationError, UnknownEventError, NotACallbackError)) else 1
    except KeyboardInterrupt:
        print("callsheet: interrupted; the same command goes on from the last checkpoint", file=sys.stderr)
        return 130


def _train(recipe: str | None, overrides: list[str]) -> int:
    if recipe is None:
        shipped = ", ".join(RECIPES)
        print(
            f"usage: callsheet train RECIPE [--KEY VALUE ...]\n\nRECIPE is a YAML file, or the name of a shipped one: {shipped}."
        )
        print("callsheet train RECIPE --help explains its keys; --print_config shows them with their values.")
        return 0 if {"-h", "--help"} & set(overrides) else 2
    for package in ("torch", "transformers", "jsonargparse"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"callsheet train needs {package}: pip install 'callsheet[hf]'")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # a recipe may name a callback of the user's own, in a module beside it
    path = recipe_path(recipe)
    kind = recipe_class(path)
    parser = recipe_parser(kind, path)
    parsed = parsed_with(parser, overrides)
    made = parser.instantiate(parsed)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    config = kind.Config(**{field.name: made[field.name] for field in fields(kind.Config)})
    job = kind(
        config,
        callbacks=made.callbacks,
        loggers=made.loggers,
        resolved=parser.dump(parsed, skip_unset=False, with_comments=False),
    )
    return _run(job)


def _run(job: Recipe) -> int:
    """Say what is there, run, and say what came of it."""
    print(f"\n{job.callbacks.call_sheet()}\n", flush=True)
    job.setup()
    print(job.found(), flush=True)
    job.run()
    print(f"\n{job.report()}", flush=True)
    return {Outcome.PREEMPTED: 143, Outcome.FAILED: 1}.get(job.trainer.run.outcome or Outcome.FINISHED, 0)


def recipe_path(recipe: str) -> Path:
    """The file that `recipe` names: itself, or a shipped one.

    Raises:
        ConfigError: there is none.
    """
    path = Path(recipe)
    if path.is_file():
        return path
    shipped = Path(str(resources.files("callsheet.recipes"))) / f"{recipe}.yaml"
    if recipe in RECIPES and shipped.is_file():
        return shipped
    raise ConfigError(
        f"there is no recipe {recipe!r}{did_you_mean(recipe, RECIPES)} (a YAML file, or one of {', '.join(RECIPES)})"
    )


def recipe_class(path: Path) -> type[Recipe]:
    """The recipe that the file's key `recipe` names.

    Raises:
        ConfigError: the file is no YAML mapping, or names none.
    """
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from None
    name = content.get("recipe") if isinstance(content, dict) else None
    if name not in RECIPES:
        raise ConfigError(
            f"{path}: its key `recipe` must name one of {', '.join(RECIPES)}, not {name!r}{did_you_mean(str(name), RECIPES)}"
        )
    found: type[Recipe] = import_path(RECIPES[name])
    return found


def recipe_parser(kind: type[Recipe], path: Path) -> ArgumentParser:
    """A parser whose keys are the fields of the recipe's configuration, with the file's values as defaults."""
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(
        prog=f"callsheet train {path.stem}",
        usage=f"callsheet train {path.stem} [--KEY VALUE ...]",
        description=(inspect.getdoc(kind) or "").partition("\n")[0],
        default_config_files=[str(path)],
        exit_on_error=False,
    )
    parser.add_argument("--recipe", type=str, help="which recipe the file is for")
    parser.add_class_arguments(kind.Config, None, as_group=False)
    parser.add_argument("--callbacks", type=list[Callback], default=[], help="callbacks: a list of class_path and init_args")
    parser.add_argument("--loggers", type=list[Callback], default=[], help="loggers: likewise")
    parser.add_argument("--config", action="config", help="a further file, whose values go over those of the recipe")
    return parser


def parsed_with(parser: ArgumentParser, overrides: list[str]) -> Namespace:
    """The recipe's values with these over them.

    Raises:
        ConfigError: an unknown key, in the file or here, with the nearest that there is; or a value that does not fit its key.
    """
    try:
        return parser.parse_args(overrides)
    except argparse.ArgumentError as error:
        message = str(error)
        keys = [action.dest for action in parser._actions]
        unknown = re.search(r"(?:unrecognized arguments: --|[Oo]ption ')([\w.]+)", message)
        near = did_you_mean(unknown.group(1), keys) if unknown else ""
        raise ConfigError(f"{message}{near} ({parser.prog} --help explains every key)") from None
