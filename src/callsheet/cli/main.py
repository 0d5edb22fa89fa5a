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
from callsheet.errors import CallsheetError, ConfigError, NotACallbackError, RegistrationError, UnknownEventError

_EPILOG = """\
examples:
  callsheet exec train.py --lr 0.1        run your own script unchanged, with speed, memory, NaN watch and a report
  callsheet show pretrain                 what would happen: the call sheet and the settings
  callsheet train pretrain                train; the same command again continues the run
  callsheet runs                          the runs in runs/, newest first
  callsheet mark stdlib-lm --tag baseline tag a run, note something about it, or archive it
  callsheet import lightning_logs         runs of other tools, as runs here
  callsheet compare --last 3              what differs between runs, and where the time went
  callsheet watch stdlib-lm               a run in the browser while it continues
  callsheet report stdlib-lm              the same page as one file, to keep or to send
  callsheet evaluate stdlib-lm            what the trained model scores
  callsheet export stdlib-lm model        the trained model as a Hugging Face folder

callsheet COMMAND --help explains a command.
"""

_RECIPE_FIRST = ("train", "show")
"""Commands whose first argument is a recipe; all further arguments are its keys."""

_TAKE_KEYS = ("evaluate", "predict", "export")
"""Commands that have arguments of their own, which may be followed by values for keys of the recipe."""

_OF_RECIPES = ("torch", "yaml", "jsonargparse", "transformers")
"""Modules that are needed to read any recipe."""

_A_RUN = "a run's folder, or its name in runs/"
_A_RUN_OR_RECIPE = f"{_A_RUN}, or a recipe file"
_RUNS = f"{_A_RUN}, a folder of runs, or a pattern such as 'lr-*'"
_KEYS_MAY_FOLLOW = "\n\nKeys of the recipe may follow, such as --device cpu or --eval_batch_size 64."

AddsCommand = Callable[..., argparse.ArgumentParser]
"""Adds a command, given its name, its function, what it does and an example. Returns the parser for its arguments."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command of the command line, and return its exit status.

    The status is 0 for success, 1 if the run failed, 2 for wrong arguments, and 130 on Ctrl-C.
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    if words[:1] == ["exec"]:  # errors of the script are not handled below, because they are not callsheet's
        return _exec(argparse.Namespace(), words[1:])
    parser = _parser()
    given, rest = parser.parse_known_args(arguments)
    is_of_recipe = given.command in _RECIPE_FIRST
    strays = rest
    if is_of_recipe:
        strays = []
    elif given.command in _TAKE_KEYS:
        strays = _without_a_key(rest)
    if strays:
        given.parser.error(f"unknown arguments: {' '.join(strays)}")
    try:
        if is_of_recipe and given.recipe is None:
            return _recipe_missing(given.command, rest)
        run: Callable[[argparse.Namespace, list[str]], int] = given.run
        if given.command in (*_RECIPE_FIRST, *_TAKE_KEYS):
            need(*_OF_RECIPES, extra="hf", wanted_by=f"callsheet {given.command}")
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
    return parser


def _add_train_and_show(command: AddsCommand) -> None:
    # These commands have no `--help` of their own: after the name of a recipe, `--help` is that of the recipe.
    train = command("train", _train, "run a recipe", add_help=False)
    show = command("show", _show, "print the call sheet and the settings of a recipe, before anything runs", add_help=False)
    for added in (train, show):
        added.add_argument("recipe", nargs="?", help="a recipe file, or the name of a shipped one")


def _add_exec(command: AddsCommand) -> None:
    command("exec", _exec, "run a training script unchanged, and observe its loop with callbacks", add_help=False)


def _add_events(command: AddsCommand) -> None:
    command("events", _events, "print the lifecycle: every event and its place", "  callsheet events | less")


def _add_bridges(command: AddsCommand) -> None:
    bridges = command(
        "bridges",
        _bridges,
        "print which callback works in which training loop, as the tests found it",
        "  callsheet bridges\n  callsheet bridges lightning",
    )
    bridges.add_argument("name", nargs="?", metavar="NAME", help="a framework: its limits, and its own callbacks as guests here")


def _add_recipes(command: AddsCommand) -> None:
    recipes = command(
        "recipes",
        _recipes,
        "list the shipped recipes, or copy the file of one",
        "  callsheet recipes\n  callsheet recipes --copy pretrain --to mine.yaml",
    )
    recipes.add_argument("--copy", metavar="NAME", help="write the recipe's file here, to start from")
    recipes.add_argument("--to", metavar="FILE", help="where to write it (NAME.yaml)")


def _add_evaluate(command: AddsCommand) -> None:
    evaluate = command(
        "evaluate",
        _evaluate,
        "print what a run's model scores on all validation datasets and the test data; the run stays as it is",
        "  callsheet evaluate stdlib-lm\n  callsheet evaluate runs/big --checkpoint ep0-ba500 --out scores.json"
        + _KEYS_MAY_FOLLOW,
    )
    evaluate.add_argument("a_run", metavar="RUN", help=_A_RUN_OR_RECIPE)
    evaluate.add_argument("--out", metavar="FILE", help="write the scores there as JSON, too")
    _add_checkpoint(evaluate)


def _add_predict(command: AddsCommand) -> None:
    predict = command(
        "predict",
        _predict,
        "write the predictions of a run's model for rows of data, as JSON lines",
        "  callsheet predict runs/topics --input new.jsonl --out answers.jsonl\n\n"
        "FILE has the first answer on its first line, and so on. It is there when all answers are, in the place of an earlier one: a command\n"
        "that was interrupted leaves none, and starts again." + _KEYS_MAY_FOLLOW,
    )
    predict.add_argument("a_run", metavar="RUN", help=_A_RUN_OR_RECIPE)
    predict.add_argument("--input", metavar="ROWS", required=True, help="JSON lines, a Parquet file, or a folder of them")
    predict.add_argument("--out", metavar="FILE", help="where to write the answers; to standard output, as they come, without it")
    _add_checkpoint(predict)


def _add_export(command: AddsCommand) -> None:
    export = command(
        "export",
        _export,
        "write a run's model and its tokenizer or processor as a folder that from_pretrained loads",
        "  callsheet export stdlib-lm exported\n\nWhat is written are the checkpoint's weights: where the run has an EMA, the average."
        + _KEYS_MAY_FOLLOW,
    )
    export.add_argument("a_run", metavar="RUN", help=_A_RUN_OR_RECIPE)
    export.add_argument("folder", metavar="FOLDER", help="a new one")
    _add_checkpoint(export)


def _add_checkpoint(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--checkpoint", metavar="PATH", help="a checkpoint's folder, or its name among the run's (the newest good one)"
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
        "The columns are name, outcome, steps, duration, loss, last, lowest, highest, started, device, tags, note, archived, reason and\n"
        "checkpoint; each metric (its last value), lowest(METRIC) and highest(METRIC); and each setting.",
    )
    runs.add_argument("folder", nargs="?", default="runs", help="the folder that contains the runs (runs)")
    runs.add_argument(
        "--where",
        action="append",
        default=[],
        metavar="CONDITION",
        help="only runs that fulfil it: a column, < <= > >= = != or ~ (contains), and a value; may be repeated",
    )
    runs.add_argument("--columns", default="", metavar="A,B,...", help="the columns to show, separated by commas")
    runs.add_argument("--sort", default="started", metavar="COLUMN", help="the column to sort by (started)")
    runs.add_argument("--reverse", action="store_true", help="the other way round")
    runs.add_argument(
        "--metric",
        default="validation/loss",
        metavar="NAME",
        help="whose last, lowest and highest value is shown (validation/loss)",
    )
    runs.add_argument("--archived", action="store_true", help="list archived runs too")
    runs.add_argument("--json", action="store_true", help="as JSON, with everything that is known")


def _add_mark(command: AddsCommand) -> None:
    mark = command(
        "mark",
        _mark,
        "tag runs, note something about them, or archive them, so that lists leave them out",
        "  callsheet mark lr-1 lr-2 --tag baseline --note 'before the new tokenizer'\n  callsheet mark 'old-*' --archive\n"
        "  callsheet mark lr-1",
    )
    mark.add_argument("runs", nargs="+", metavar="RUN", help=_RUNS)
    mark.add_argument("--folder", default="runs", metavar="FOLDER", help="where names and patterns look for runs (runs)")
    mark.add_argument("--tag", action="append", default=[], metavar="TAG", help="add this tag; may be repeated")
    mark.add_argument("--untag", action="append", default=[], metavar="TAG", help="remove this tag; may be repeated")
    mark.add_argument("--note", metavar="TEXT", help="replace the note; an empty text removes it")
    archive = mark.add_mutually_exclusive_group()
    archive.add_argument("--archive", dest="is_archived", action="store_const", const=True, help="leave the runs out of lists")
    archive.add_argument("--unarchive", dest="is_archived", action="store_const", const=False, help="list them again")


def _add_delete(command: AddsCommand) -> None:
    delete = command(
        "delete",
        _delete,
        "delete runs with their checkpoints, after asking",
        "  callsheet delete lr-3\n  callsheet delete 'old-*' --yes\n\nCheckpoints that are kept outside the run's folder stay.",
    )
    delete.add_argument("runs", nargs="+", metavar="RUN", help=_RUNS)
    delete.add_argument("--folder", default="runs", metavar="FOLDER", help="where names and patterns look for runs (runs)")
    delete.add_argument("--yes", action="store_true", help="do not ask")


def _add_import(command: AddsCommand) -> None:
    imports = command(
        "import",
        _import,
        "write runs of TensorBoard, W&B, MLflow, Trackio, Lightning or the Hugging Face Trainer as runs' folders here",
        "  callsheet import lightning_logs\n  callsheet import wandb mlruns --to runs\n"
        "  callsheet import logs/baseline --from tensorboard --name baseline --rename Loss/train=train/loss\n\n"
        "Importing a run again replaces its folder. A folder that was not made by an import is never changed.",
    )
    imports.add_argument("sources", nargs="+", metavar="SOURCE", help="a file or a folder of another tool")
    imports.add_argument("--to", default="runs", metavar="FOLDER", help="the folder of runs (runs)")
    imports.add_argument(
        "--from",
        dest="kind",
        metavar="KIND",
        help="tensorboard, wandb, mlflow, trackio, lightning or huggingface (what is found there)",
    )
    imports.add_argument("--name", metavar="NAME", help="the name of the run's folder, for a single run (that in the source)")
    imports.add_argument(
        "--rename",
        action="append",
        default=[],
        metavar="OLD=NEW",
        help="a new name for a metric, or, if both end with /, for its prefix; may be repeated",
    )


def _add_report(command: AddsCommand) -> None:
    report = command(
        "report",
        _report,
        "write one self-contained HTML page of a run, and a trace for Perfetto beside it",
        "  callsheet report stdlib-lm\n  callsheet report /data/runs/big --out big.html",
    )
    report.add_argument("a_run", metavar="RUN", help=_A_RUN)
    report.add_argument("-o", "--out", metavar="FILE", help="where to write the page (report.html in the run's folder)")


def _add_compare(command: AddsCommand) -> None:
    compare = command(
        "compare",
        _compare,
        "print what differs between runs, their values with spread, and where the time of a step goes; or fail if they differ too much",
        "  callsheet compare lr-1 lr-2\n  callsheet compare 'lr-*' --group-by seed -o compare.html\n  callsheet compare --last 3 --csv\n"
        "  callsheet compare main candidate --fail-if 'step_seconds > +5%' --fail-if 'validation/loss > +0.01'\n\n"
        "The first run, or the first group, is the baseline. --fail-if takes the last value of a metric, best(METRIC) the best one; a difference\n"
        "fails only if its 95 % confidence interval is beyond the limit. The exit status is then 1.",
    )
    compare.add_argument("runs", nargs="*", metavar="RUN", help=_RUNS)
    compare.add_argument("--folder", default="runs", metavar="FOLDER", help="where names and --last look for runs (runs)")
    compare.add_argument("--last", type=int, metavar="N", help="the newest N runs, of those named if any is")
    compare.add_argument(
        "--group-by", metavar="KEY", help="seed: runs that differ in seeds alone are one group; or the key of a setting"
    )
    compare.add_argument(
        "--metric", action="append", default=[], metavar="NAME", help="print only the values of this metric; may be repeated"
    )
    compare.add_argument("--fail-if", action="append", default=[], metavar="CONDITION", help="may be repeated; see below")
    form = compare.add_mutually_exclusive_group()
    form.add_argument("-o", "--out", metavar="FILE", help="as one self-contained HTML page with curves, written to this file")
    form.add_argument("--json", action="store_true", help="as JSON, with everything that is known")
    for name, what in (
        ("csv", "the values as CSV"),
        ("markdown", "the tables as Markdown"),
        ("latex", "the tables as LaTeX (booktabs)"),
    ):
        form.add_argument(f"--{name}", dest="form", action="store_const", const=name, help=what)


def _add_watch(command: AddsCommand) -> None:
    watch = command(
        "watch",
        _watch,
        "show a run in the browser while it trains, with buttons to save, evaluate or stop; or compare several runs while they train",
        "  callsheet watch stdlib-lm\n  callsheet watch 'lr-*' --group-by seed\n  callsheet watch runs/big --port 8080 --no-browser\n\n"
        "The server listens on 127.0.0.1 only, and the address that it prints contains a token. From another machine:\n"
        "  ssh -t -L 8080:127.0.0.1:8080 trainer.example callsheet watch runs/big --port 8080 --no-browser",
    )
    watch.add_argument(
        "runs", nargs="*", metavar="RUN", help=f"{_RUNS}. A run that does not exist yet is shown as soon as it begins"
    )
    watch.add_argument("--folder", default="runs", metavar="FOLDER", help="where names and --last look for runs (runs)")
    watch.add_argument("--last", type=int, metavar="N", help="the newest N runs, and those that begin later")
    watch.add_argument("--group-by", metavar="KEY", help="seed, or the key of a setting: runs with the same value are one group")
    watch.add_argument("--port", type=int, default=0, help="the port; 0, the default, means any free port")
    watch.add_argument("--no-browser", action="store_true", help="do not open a browser; only print the address")


def _recipe_missing(command: str, rest: list[str]) -> int:
    from callsheet.cli.shipped import RECIPES

    does = {"train": "runs a recipe", "show": "prints the call sheet and the settings of a recipe, before anything runs"}[command]
    print(
        f"usage: callsheet {command} RECIPE [--KEY VALUE ...]\n\n"
        f"{does[0].upper()}{does[1:]}. RECIPE is a YAML file, or the name of a shipped one: {', '.join(RECIPES)}.\n"
        f"callsheet {command} RECIPE --help explains its keys; --print_config shows them with their values.\n\n"
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
        given.parser.error("--to goes with --copy NAME")
    return _printed(copy(given.copy, given.to) if given.copy is not None else recipes())


def _without_a_key(rest: list[str]) -> list[str]:
    """Return the command line's arguments that are neither a `--key` nor the value of such a key."""
    strays, wants_value = [], False
    for word in rest:
        if not word.startswith("--") and not wants_value:
            strays.append(word)
        wants_value = word.startswith("--") and "=" not in word
    return strays


def _split(columns: str) -> list[str]:
    """Return the names in a list that is separated by commas, except for commas inside parentheses."""
    return re.split(r",(?![^(]*\))", columns)


def _which_rank() -> str:
    """Return a text such as ` (rank 1)` for messages if there are several ranks, otherwise an empty string."""
    ranks = read_ranks()
    return f" (rank {ranks.rank})" if ranks.world_size > 1 else ""


def _printed(text: str) -> int:
    if text and read_ranks().rank == 0:
        with suppress(BrokenPipeError):  # raised if the reader has ended, as in `callsheet events | head`
            print(text, flush=True)
    return 0
