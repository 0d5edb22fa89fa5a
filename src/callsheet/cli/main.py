"""The command line `callsheet`: runs its commands, and reports their errors."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from callsheet.cli.arguments import command_line_parser
from callsheet.core import lifecycle
from callsheet.core.optional import need, needed_by
from callsheet.core.ranks import read_ranks
from callsheet.errors import (
    CallsheetError,
    ConfigError,
    NotACallbackError,
    RegistrationError,
    UnknownEventError,
    did_you_mean,
    unknown_arguments,
)

_RECIPE_FIRST_COMMANDS = ("train", "show")
"""Commands whose first argument is a recipe; all further arguments are keys of this recipe and their values."""

_KEY_TAKING_COMMANDS = ("evaluate", "predict", "export")
"""Commands whose own arguments may be followed by values for keys of the recipe."""

_RECIPE_MODULES = ("torch", "yaml", "jsonargparse", "transformers")
"""Modules that are needed to read any recipe."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command of the command line, and return its exit status.

    The status is 0 for success, 1 if the run failed, 2 for wrong arguments, and 130 on Ctrl-C.
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    if words[:1] == ["exec"]:  # return here, because errors of the user's script must not be handled as errors of callsheet
        return _exec(argparse.Namespace(), words[1:])
    parser = command_line_parser()
    if words and not words[0].startswith("-") and words[0] not in (commands := parser.get_default("commands")):
        parser.error(_no_command(words[0], commands))
    given, rest = parser.parse_known_args(arguments)
    is_of_recipe = given.command in _RECIPE_FIRST_COMMANDS
    strays = rest
    if is_of_recipe:
        strays = []
    elif given.command in _KEY_TAKING_COMMANDS:
        strays = _without_a_key(rest)
    if strays:
        given.parser.error(unknown_arguments(strays, given.parser._option_string_actions))
    try:
        if is_of_recipe and given.recipe is None:
            return _recipe_missing(given.command, rest)
        if given.command in (*_RECIPE_FIRST_COMMANDS, *_KEY_TAKING_COMMANDS):
            need(*_RECIPE_MODULES, extra="hf", wanted_by=f"callsheet {given.command}")
        with needed_by(f"callsheet {given.command}"):
            return _COMMANDS[given.command](given, rest)
    except CallsheetError as error:
        print(f"callsheet{_which_rank()}: {error}", file=sys.stderr)
        return 2 if isinstance(error, (ConfigError, RegistrationError, UnknownEventError, NotACallbackError)) else 1
    except KeyboardInterrupt:
        again = "; the same command continues from the last checkpoint" if given.command == "train" else ""
        print(f"callsheet: interrupted{again}", file=sys.stderr)
        return 130


def _no_command(name: str, commands: Sequence[str]) -> str:
    if name.endswith(".py"):
        return f"there is no command {name!r}; run a training script with: callsheet exec {name}"
    return f"there is no command {name!r}{did_you_mean(name, commands)} (one of {', '.join(commands)})"


def _recipe_missing(command: str, rest: list[str]) -> int:
    from callsheet.cli.shipped import RECIPES

    does = {
        "train": "Run a recipe.",
        "show": "Print the call sheet (which callback is called when) and the settings of a recipe, without training.\n"
        "callsheet show RUN prints the call sheet and the settings of an existing run.",
    }[command]
    print(
        f"usage: callsheet {command} RECIPE [--KEY VALUE ...]\n\n"
        f"{does}\nRECIPE is a YAML file, or the name of a shipped recipe: {', '.join(RECIPES)}.\n"
        f"callsheet {command} RECIPE --help explains the keys of a recipe. --print_config prints all keys with their values.\n\n"
        f"example:\n  callsheet {command} pretrain --max_duration 30s --model.layers 2"
    )
    return 0 if {"-h", "--help"} & set(rest) else 2


def _train(given: argparse.Namespace, overrides: list[str]) -> int:
    from callsheet.core.working import working

    with working("loading the libraries", is_shown=read_ranks().rank == 0):
        from callsheet.cli.train import train

    return train(given.recipe, overrides)


def _show(given: argparse.Namespace, overrides: list[str]) -> int:
    from callsheet.cli.show import show

    return _print(show(given.recipe, overrides))


def _exec(_: argparse.Namespace, words: list[str]) -> int:
    from callsheet.exec.command import main as execute

    execute(words)
    return 0


def _events(given: argparse.Namespace, _: list[str]) -> int:
    return _print(lifecycle.tree())


def _bridges(given: argparse.Namespace, _: list[str]) -> int:
    from callsheet.cli.bridges import bridges

    return _print(bridges(given.name))


def _runs(given: argparse.Namespace, _: list[str]) -> int:
    from callsheet.cli.runs import runs

    text = runs(
        given.folder, where=given.where, columns=_split(given.columns), sort=given.sort, is_reversed=given.reverse, metric=given.metric,
        shows_archived=given.archived, as_json=given.json,
    )  # fmt: skip
    return _print(text)


def _mark(given: argparse.Namespace, _: list[str]) -> int:
    from callsheet.cli.mark import mark

    text = mark(
        given.runs, folder=given.folder, add=given.tag, remove=given.untag, note=given.note, is_archived=given.is_archived
    )
    return _print(text)


def _delete(given: argparse.Namespace, _: list[str]) -> int:
    from callsheet.cli.mark import delete

    for line in delete(given.runs, folder=given.folder, is_confirmed=given.yes):
        _print(line)
    return 0


def _import(given: argparse.Namespace, _: list[str]) -> int:
    from callsheet.cli.import_runs import import_runs

    import_runs(given.sources, to=given.to, kind=given.kind, name=given.name, rename=given.rename)
    return 0


def _report(given: argparse.Namespace, _: list[str]) -> int:
    from callsheet.cli.report import report

    return _print(report(given.a_run, out=given.out))


def _compare(given: argparse.Namespace, _: list[str]) -> int:
    from callsheet.cli.compare import compare

    text, fails = compare(
        given.runs, folder=given.folder, last=given.last, group_by=given.group_by, metrics=given.metric, fail_if=given.fail_if,
        form=given.form, out=given.out, as_json=given.json,
    )  # fmt: skip
    _print(text)
    return int(fails)


def _watch(given: argparse.Namespace, _: list[str]) -> int:
    from callsheet.cli.watch import watch

    return watch(
        given.runs, folder=given.folder, last=given.last, group_by=given.group_by, port=given.port, opens_browser=not given.no_browser
    )  # fmt: skip


def _evaluate(given: argparse.Namespace, overrides: list[str]) -> int:
    from callsheet.cli.evaluate import evaluate

    return _print(evaluate(given.a_run, overrides, checkpoint=given.checkpoint, out=given.out))


def _predict(given: argparse.Namespace, overrides: list[str]) -> int:
    from callsheet.cli.predict import predict

    return _print(predict(given.a_run, overrides, rows=given.input, checkpoint=given.checkpoint, out=given.out))


def _export(given: argparse.Namespace, overrides: list[str]) -> int:
    from callsheet.cli.export import export

    return _print(export(given.a_run, overrides, folder=given.folder, checkpoint=given.checkpoint))


def _recipes(given: argparse.Namespace, _: list[str]) -> int:
    from callsheet.cli.recipes import copy, recipes

    if given.copy is None and given.to is not None:
        given.parser.error("--to needs --copy NAME")
    return _print(copy(given.copy, given.to) if given.copy is not None else recipes())


_COMMANDS: Mapping[str, Callable[[argparse.Namespace, list[str]], int]] = {
    "train": _train,
    "show": _show,
    "exec": _exec,
    "events": _events,
    "bridges": _bridges,
    "runs": _runs,
    "mark": _mark,
    "delete": _delete,
    "import": _import,
    "report": _report,
    "compare": _compare,
    "watch": _watch,
    "evaluate": _evaluate,
    "predict": _predict,
    "export": _export,
    "recipes": _recipes,
}
"""The function that runs each command, given the parsed arguments and the arguments that the parser does not know."""


def _without_a_key(rest: list[str]) -> list[str]:
    """Return the arguments on the command line that are neither a `--key` nor a key's value."""
    strays, wants_value = [], False
    for word in rest:
        if not word.startswith("--") and not wants_value:
            strays.append(word)
        wants_value = word.startswith("--") and "=" not in word
    return strays


def _split(columns: str) -> list[str]:
    """Return the names in a comma-separated list. Commas inside parentheses do not separate names."""
    return re.split(r",(?![^(]*\))", columns)


def _which_rank() -> str:
    """Return a text such as ` (rank 1)` for messages, or an empty string if there is only one rank."""
    ranks = read_ranks()
    return f" (rank {ranks.rank})" if ranks.world_size > 1 else ""


def _print(text: str) -> int:
    if text and read_ranks().rank == 0:
        with suppress(BrokenPipeError):  # raised if the reader has ended, like `head` in `callsheet events | head`
            print(text, flush=True)
    return 0
