"""The command line `callsheet`: its arguments, and the functions that run its commands."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress

from callsheet import __version__
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

_EPILOG = """\
examples:
  callsheet exec train.py --lr 0.1         run your own training script unchanged, with metrics and a report
  callsheet show pretrain                  print which callbacks a recipe calls, and its settings, without training
  callsheet train pretrain                 train a recipe; the same command again resumes an interrupted run
  callsheet runs                           list the runs in the folder runs, newest first
  callsheet mark stdlib-lm --tag baseline  add a tag to a run
  callsheet import lightning_logs          import runs that another tool has logged
  callsheet compare --last 3               compare the settings, metrics and step times of the newest three runs
  callsheet watch stdlib-lm                show a run in the browser while it trains
  callsheet report stdlib-lm               write the report of a run to one HTML file
  callsheet evaluate stdlib-lm             evaluate the trained model of a run
  callsheet export stdlib-lm model         write the trained model to a folder that from_pretrained loads

callsheet COMMAND --help explains a command.
"""

_RECIPE_FIRST_COMMANDS = ("train", "show")
"""Commands whose first argument is a recipe; all further arguments are keys of this recipe and their values."""

_KEY_TAKING_COMMANDS = ("evaluate", "predict", "export")
"""Commands whose own arguments may be followed by values for keys of the recipe."""

_RECIPE_MODULES = ("torch", "yaml", "jsonargparse", "transformers")
"""Modules that are needed to read any recipe."""

_RUN_HELP = "the folder of a run, or the name of a run in the folder runs"
_RUN_OR_RECIPE_HELP = f"{_RUN_HELP}, or the recipe file of a run"
_RUNS_HELP = "the name or the folder of a run, a folder that contains runs, or a pattern such as 'lr-*'"
_RUNS_FOLDER_HELP = "the folder that contains the named runs (default: runs)"
_GROUP_BY_HELP = "combine runs with the same value of this setting into one group; seed: runs that differ only in their seeds"
_KEYS_HELP = "\n\nTo override settings of the run, add keys of its recipe, such as --device cpu or --eval_batch_size 64."

AddsCommand = Callable[..., argparse.ArgumentParser]
"""A function that adds a command, given the command's name, function, description and example, and returns its argument parser."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command of the command line, and return its exit status.

    The status is 0 for success, 1 if the run failed, 2 for wrong arguments, and 130 on Ctrl-C.
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    if words[:1] == ["exec"]:  # return here, because errors of the user's script must not be handled as errors of callsheet
        return _exec(argparse.Namespace(), words[1:])
    parser = _parser()
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
        run: Callable[[argparse.Namespace, list[str]], int] = given.run
        if given.command in (*_RECIPE_FIRST_COMMANDS, *_KEY_TAKING_COMMANDS):
            need(*_RECIPE_MODULES, extra="hf", wanted_by=f"callsheet {given.command}")
        with needed_by(f"callsheet {given.command}"):
            return run(given, rest)
    except CallsheetError as error:
        print(f"callsheet{_which_rank()}: {error}", file=sys.stderr)
        return 2 if isinstance(error, (ConfigError, RegistrationError, UnknownEventError, NotACallbackError)) else 1
    except KeyboardInterrupt:
        again = "; the same command continues from the last checkpoint" if given.command == "train" else ""
        print(f"callsheet: interrupted{again}", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="callsheet",
        description="Training callbacks for PyTorch: one callback, every training loop.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"callsheet {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(
        name: str, run: Callable[[argparse.Namespace, list[str]], int], about: str, example: str = "", add_help: bool = True
    ) -> argparse.ArgumentParser:
        added = commands.add_parser(
            name,
            help=about,
            description=f"{about[0].upper()}{about[1:]}.",
            epilog=f"example:\n{example}" if example else None,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            add_help=add_help,
        )
        added.set_defaults(run=run, parser=added)
        return added

    for add in (
        _add_train_and_show, _add_exec, _add_events, _add_bridges, _add_recipes, _add_evaluate, _add_predict, _add_export,
        _add_runs, _add_mark, _add_delete, _add_import, _add_report, _add_compare, _add_watch,
    ):  # fmt: skip
        add(command)
    parser.set_defaults(commands=tuple(commands.choices))
    return parser


def _no_command(name: str, commands: Sequence[str]) -> str:
    if name.endswith(".py"):
        return f"there is no command {name!r}; run a training script with: callsheet exec {name}"
    return f"there is no command {name!r}{did_you_mean(name, commands)} (one of {', '.join(commands)})"


def _add_train_and_show(command: AddsCommand) -> None:
    # `train` and `show` have no `--help` of their own, because `--help` after a recipe's name shows the recipe's help.
    train = command("train", _train, "run a recipe", add_help=False)
    show = command(
        "show",
        _show,
        "print the call sheet (which callback is called when) and the settings of a recipe, without training",
        add_help=False,
    )
    for added in (train, show):
        added.add_argument("recipe", nargs="?", help="a recipe file, or the name of a shipped recipe")


def _add_exec(command: AddsCommand) -> None:
    command("exec", _exec, "run a training script unchanged, and observe its loop with callbacks", add_help=False)


def _add_events(command: AddsCommand) -> None:
    command(
        "events", _events, "print all events of a run as a tree, in the order in which they occur", "  callsheet events | less"
    )


def _add_bridges(command: AddsCommand) -> None:
    bridges = command(
        "bridges",
        _bridges,
        "print which callbacks work in which framework's training loop, as a table of test results",
        "  callsheet bridges\n  callsheet bridges lightning",
    )
    bridges.add_argument(
        "name",
        nargs="?",
        metavar="NAME",
        help="a framework: print its limits, and which of its own callbacks callsheet's Trainer can call",
    )


def _add_recipes(command: AddsCommand) -> None:
    recipes = command(
        "recipes",
        _recipes,
        "list the shipped recipes, or copy the file of one",
        "  callsheet recipes\n  callsheet recipes --copy pretrain --to mine.yaml",
    )
    recipes.add_argument("--copy", metavar="NAME", help="copy this recipe's file to the current folder, so that you can edit it")
    recipes.add_argument("--to", metavar="FILE", help="with --copy: the file to write (default: NAME.yaml)")


def _add_evaluate(command: AddsCommand) -> None:
    evaluate = command(
        "evaluate",
        _evaluate,
        "evaluate a run's model on all validation datasets and the test data, without changing the run",
        "  callsheet evaluate stdlib-lm\n  callsheet evaluate runs/big --checkpoint ep0-ba500 --out scores.json" + _KEYS_HELP,
    )
    evaluate.add_argument("a_run", metavar="RUN", help=_RUN_OR_RECIPE_HELP)
    evaluate.add_argument("--out", metavar="FILE", help="also write the results to this file, as JSON")
    _add_checkpoint(evaluate)


def _add_predict(command: AddsCommand) -> None:
    predict = command(
        "predict",
        _predict,
        "write the answer of a run's model for each row of data, as JSON lines",
        "  callsheet predict runs/topics --input new.jsonl --out answers.jsonl\n\n"
        "The answers are in the order of the rows. FILE is written only when all answers are complete. Until then, an existing FILE is not\n"
        "changed. An interrupted command writes no FILE; if you repeat the command, it starts from the first row." + _KEYS_HELP,
    )
    predict.add_argument("a_run", metavar="RUN", help=_RUN_OR_RECIPE_HELP)
    predict.add_argument(
        "--input", metavar="ROWS", required=True, help="a file of JSON lines, a Parquet file, or a folder of such files"
    )
    predict.add_argument("--out", metavar="FILE", help="the file to write (default: print each answer as soon as it is ready)")
    _add_checkpoint(predict)


def _add_export(command: AddsCommand) -> None:
    export = command(
        "export",
        _export,
        "write a run's model and its tokenizer or processor to a folder that from_pretrained loads",
        "  callsheet export stdlib-lm exported\n\nIf the run has the callback EMA, the averaged weights are written."
        + _KEYS_HELP,
    )
    export.add_argument("a_run", metavar="RUN", help=_RUN_OR_RECIPE_HELP)
    export.add_argument("folder", metavar="FOLDER", help="the folder to create")
    _add_checkpoint(export)


def _add_checkpoint(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--checkpoint",
        metavar="PATH",
        help="the folder or the name of a checkpoint of the run (default: the newest valid checkpoint)",
    )


def _add_runs(command: AddsCommand) -> None:
    runs = command(
        "runs",
        _runs,
        "list the runs in a folder, newest first",
        "  callsheet runs\n  callsheet runs --where 'validation/loss < 2' --where 'tags = baseline'\n"
        "  callsheet runs --sort lowest --metric validation/accuracy --reverse\n"
        "  callsheet runs --columns name,optimizer.lr,'lowest(validation/loss)',tags,note\n"
        "  callsheet runs /data/runs --json | jq '.[0]'\n\n"
        "COLUMN is one of name, outcome, steps, duration, loss, last, lowest, highest, started, device, tags, note, archived, reason and\n"
        "checkpoint; the name of a metric (its last value), lowest(METRIC) or highest(METRIC); or a setting, such as optimizer.lr.\n"
        "CONDITION is COLUMN, an operator and a value. The operators are <, <=, >, >=, =, != and ~ (contains).",
    )
    runs.add_argument("folder", nargs="?", default="runs", help="the folder that contains the runs (default: runs)")
    runs.add_argument(
        "--where",
        action="append",
        default=[],
        metavar="CONDITION",
        help="list only runs that fulfill this condition; may be repeated",
    )
    runs.add_argument("--columns", default="", metavar="COLUMN,...", help="the columns to print, separated by commas")
    runs.add_argument("--sort", default="started", metavar="COLUMN", help="the column to sort by (default: started)")
    runs.add_argument("--reverse", action="store_true", help="reverse the order")
    runs.add_argument(
        "--metric",
        default="validation/loss",
        metavar="NAME",
        help="the metric of the columns last, lowest and highest (default: validation/loss)",
    )
    runs.add_argument("--archived", action="store_true", help="also list archived runs")
    runs.add_argument("--json", action="store_true", help="print JSON, with all settings and metrics of each run")


def _add_mark(command: AddsCommand) -> None:
    mark = command(
        "mark",
        _mark,
        "add tags or a note to runs, or archive runs to hide them from lists",
        "  callsheet mark lr-1 lr-2 --tag baseline --note 'before the new tokenizer'\n  callsheet mark 'old-*' --archive\n"
        "  callsheet mark lr-1",
    )
    mark.add_argument("runs", nargs="+", metavar="RUN", help=_RUNS_HELP)
    mark.add_argument("--folder", default="runs", metavar="FOLDER", help=_RUNS_FOLDER_HELP)
    mark.add_argument("--tag", action="append", default=[], metavar="TAG", help="add this tag; may be repeated")
    mark.add_argument("--untag", action="append", default=[], metavar="TAG", help="remove this tag; may be repeated")
    mark.add_argument("--note", metavar="TEXT", help="set the note, in place of an earlier note; an empty text removes the note")
    archive = mark.add_mutually_exclusive_group()
    archive.add_argument("--archive", dest="is_archived", action="store_const", const=True, help="hide the runs from lists")
    archive.add_argument(
        "--unarchive", dest="is_archived", action="store_const", const=False, help="show archived runs in lists again"
    )


def _add_delete(command: AddsCommand) -> None:
    delete = command(
        "delete",
        _delete,
        "delete runs with their checkpoints, after a confirmation",
        "  callsheet delete lr-3\n  callsheet delete 'old-*' --yes\n\nCheckpoints outside the run's folder are not deleted.",
    )
    delete.add_argument("runs", nargs="+", metavar="RUN", help=_RUNS_HELP)
    delete.add_argument("--folder", default="runs", metavar="FOLDER", help=_RUNS_FOLDER_HELP)
    delete.add_argument("--yes", action="store_true", help="delete without asking for confirmation")


def _add_import(command: AddsCommand) -> None:
    imports = command(
        "import",
        _import,
        "import runs of TensorBoard, W&B, MLflow, Trackio, Lightning or the Hugging Face Trainer",
        "  callsheet import lightning_logs\n  callsheet import wandb mlruns --to runs\n"
        "  callsheet import logs/baseline --from tensorboard --name baseline --rename Loss/train=train/loss\n\n"
        "If you import a run again, the new import replaces its folder. Folders that were not created by an import are never changed.",
    )
    imports.add_argument("sources", nargs="+", metavar="SOURCE", help="a file or folder that another tool has written")
    imports.add_argument(
        "--to", default="runs", metavar="FOLDER", help="the folder to which the imported runs are added (default: runs)"
    )
    imports.add_argument(
        "--from",
        dest="kind",
        metavar="KIND",
        help="tensorboard, wandb, mlflow, trackio, lightning or huggingface (default: detected from the files)",
    )
    imports.add_argument(
        "--name", metavar="NAME", help="the new name of the run, if a single run is imported (default: its name in the source)"
    )
    imports.add_argument(
        "--rename",
        action="append",
        default=[],
        metavar="OLD=NEW",
        help="rename the metric OLD to NEW; if OLD ends with /, rename all metrics that begin with OLD; may be repeated",
    )


def _add_report(command: AddsCommand) -> None:
    report = command(
        "report",
        _report,
        "write the report of a run as one self-contained HTML page, and a trace for Perfetto next to it",
        "  callsheet report stdlib-lm\n  callsheet report /data/runs/big --out big.html",
    )
    report.add_argument("a_run", metavar="RUN", help=_RUN_HELP)
    report.add_argument("-o", "--out", metavar="FILE", help="the file to write (default: report.html in the run's folder)")


def _add_compare(command: AddsCommand) -> None:
    compare = command(
        "compare",
        _compare,
        "compare the settings, metrics and step times of runs",
        "  callsheet compare lr-1 lr-2\n  callsheet compare 'lr-*' --group-by seed -o compare.html\n  callsheet compare --last 3 --csv\n"
        "  callsheet compare main candidate --fail-if 'step_seconds > +5%' --fail-if 'validation/loss > +0.01'\n\n"
        "The first run, or the first group, is the baseline, with which the other runs are compared.\n\n"
        "CONDITION is a metric, one of >, >=, < and <=, and the limit of its difference from the baseline. METRIC means the last value of the\n"
        "metric, and best(METRIC) its best value. If the noise is known, the whole 95 % confidence interval must be beyond the limit.",
    )
    compare.add_argument("runs", nargs="*", metavar="RUN", help=_RUNS_HELP)
    compare.add_argument("--folder", default="runs", metavar="FOLDER", help=_RUNS_FOLDER_HELP)
    compare.add_argument(
        "--last",
        type=int,
        metavar="N",
        help="compare only the newest N of the named runs; without names, of all runs in the folder",
    )
    compare.add_argument("--group-by", metavar="KEY", help=_GROUP_BY_HELP)
    compare.add_argument(
        "--metric", action="append", default=[], metavar="NAME", help="print only the values of this metric; may be repeated"
    )
    compare.add_argument(
        "--fail-if",
        action="append",
        default=[],
        metavar="CONDITION",
        help="exit with status 1 if this condition is met; may be repeated",
    )
    form = compare.add_mutually_exclusive_group()
    form.add_argument(
        "-o", "--out", metavar="FILE", help="write the comparison to this file, as one self-contained HTML page with curves"
    )
    form.add_argument("--json", action="store_true", help="print the whole comparison as JSON")
    for name, what in (
        ("csv", "print the values as CSV"),
        ("markdown", "print the tables as Markdown"),
        ("latex", "print the tables as LaTeX (booktabs)"),
    ):
        form.add_argument(f"--{name}", dest="form", action="store_const", const=name, help=what)


def _add_watch(command: AddsCommand) -> None:
    watch = command(
        "watch",
        _watch,
        "show one or several runs in the browser while they train",
        "  callsheet watch stdlib-lm\n  callsheet watch 'lr-*' --group-by seed\n  callsheet watch runs/big --port 8080 --no-browser\n\n"
        "The page of one run has buttons to save a checkpoint, to evaluate and to stop. The server listens on 127.0.0.1 only. The address\n"
        "that it prints contains a secret token. To watch a run from another machine, forward a port with ssh:\n"
        "  ssh -t -L 8080:127.0.0.1:8080 trainer.example callsheet watch runs/big --port 8080 --no-browser",
    )
    watch.add_argument(
        "runs", nargs="*", metavar="RUN", help=f"{_RUNS_HELP}. A run that does not exist yet is shown as soon as it begins"
    )
    watch.add_argument("--folder", default="runs", metavar="FOLDER", help=_RUNS_FOLDER_HELP)
    watch.add_argument("--last", type=int, metavar="N", help="show the newest N runs, and all runs that begin later")
    watch.add_argument("--group-by", metavar="KEY", help=_GROUP_BY_HELP)
    watch.add_argument("--port", type=int, default=0, help="the port of the server (default: any free port)")
    watch.add_argument("--no-browser", action="store_true", help="print the address, but do not open a browser")


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

    return _printed(show(given.recipe, overrides))


def _exec(_: argparse.Namespace, words: list[str]) -> int:
    from callsheet.exec.command import main as execute

    execute(words)
    return 0


def _events(given: argparse.Namespace, _: list[str]) -> int:
    return _printed(lifecycle.tree())


def _bridges(given: argparse.Namespace, _: list[str]) -> int:
    from callsheet.cli.bridges import bridges

    return _printed(bridges(given.name))


def _runs(given: argparse.Namespace, _: list[str]) -> int:
    from callsheet.cli.runs import runs

    text = runs(
        given.folder, where=given.where, columns=_split(given.columns), sort=given.sort, is_reversed=given.reverse, metric=given.metric,
        shows_archived=given.archived, as_json=given.json,
    )  # fmt: skip
    return _printed(text)


def _mark(given: argparse.Namespace, _: list[str]) -> int:
    from callsheet.cli.mark import mark

    text = mark(
        given.runs, folder=given.folder, add=given.tag, remove=given.untag, note=given.note, is_archived=given.is_archived
    )
    return _printed(text)


def _delete(given: argparse.Namespace, _: list[str]) -> int:
    from callsheet.cli.mark import delete

    for line in delete(given.runs, folder=given.folder, is_confirmed=given.yes):
        _printed(line)
    return 0


def _import(given: argparse.Namespace, _: list[str]) -> int:
    from callsheet.cli.import_runs import import_runs

    import_runs(given.sources, to=given.to, kind=given.kind, name=given.name, rename=given.rename)
    return 0


def _report(given: argparse.Namespace, _: list[str]) -> int:
    from callsheet.cli.report import report

    return _printed(report(given.a_run, out=given.out))


def _compare(given: argparse.Namespace, _: list[str]) -> int:
    from callsheet.cli.compare import compare

    text, fails = compare(
        given.runs, folder=given.folder, last=given.last, group_by=given.group_by, metrics=given.metric, fail_if=given.fail_if,
        form=given.form, out=given.out, as_json=given.json,
    )  # fmt: skip
    _printed(text)
    return int(fails)


def _watch(given: argparse.Namespace, _: list[str]) -> int:
    from callsheet.cli.watch import watch

    return watch(
        given.runs, folder=given.folder, last=given.last, group_by=given.group_by, port=given.port, opens_browser=not given.no_browser
    )  # fmt: skip


def _evaluate(given: argparse.Namespace, overrides: list[str]) -> int:
    from callsheet.cli.evaluate import evaluate

    return _printed(evaluate(given.a_run, overrides, checkpoint=given.checkpoint, out=given.out))


def _predict(given: argparse.Namespace, overrides: list[str]) -> int:
    from callsheet.cli.predict import predict

    return _printed(predict(given.a_run, overrides, rows=given.input, checkpoint=given.checkpoint, out=given.out))


def _export(given: argparse.Namespace, overrides: list[str]) -> int:
    from callsheet.cli.export import export

    return _printed(export(given.a_run, overrides, folder=given.folder, checkpoint=given.checkpoint))


def _recipes(given: argparse.Namespace, _: list[str]) -> int:
    from callsheet.cli.recipes import copy, recipes

    if given.copy is None and given.to is not None:
        given.parser.error("--to needs --copy NAME")
    return _printed(copy(given.copy, given.to) if given.copy is not None else recipes())


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


def _printed(text: str) -> int:
    if text and read_ranks().rank == 0:
        with suppress(BrokenPipeError):  # raised if the reader has ended, like `head` in `callsheet events | head`
            print(text, flush=True)
    return 0
