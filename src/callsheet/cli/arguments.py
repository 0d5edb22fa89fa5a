"""The arguments of the command line `callsheet`, for all commands. Importing this module imports no command."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from callsheet import __version__

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

_RUN_HELP = "the folder of a run, or the name of a run in the folder runs"
_RUN_OR_RECIPE_HELP = f"{_RUN_HELP}, or the recipe file of a run"
_RUNS_HELP = "the name or the folder of a run, a folder that contains runs, or a pattern such as 'lr-*'"
_RUNS_FOLDER_HELP = "the folder that contains the named runs (default: runs)"
_GROUP_BY_HELP = "combine runs with the same value of this setting into one group; seed: runs that differ only in their seeds"
_KEYS_HELP = "\n\nTo override settings of the run, add keys of its recipe, such as --device cpu or --eval_batch_size 64."

AddsCommand = Callable[..., argparse.ArgumentParser]
"""A function that adds a command, given the command's name, description and example, and returns its argument parser."""


def command_line_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line. Of its result, `command` is the name of the command, and `parser` the command's parser."""
    parser = argparse.ArgumentParser(
        prog="callsheet",
        description="Training callbacks for PyTorch: one callback, every training loop.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"callsheet {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, about: str, example: str = "", add_help: bool = True) -> argparse.ArgumentParser:
        added = commands.add_parser(
            name,
            help=about,
            description=f"{about[0].upper()}{about[1:]}.",
            epilog=f"example:\n{example}" if example else None,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            add_help=add_help,
        )
        added.set_defaults(parser=added)
        return added

    for add in (
        _add_train_and_show, _add_exec, _add_events, _add_bridges, _add_recipes, _add_evaluate, _add_predict, _add_export,
        _add_runs, _add_mark, _add_delete, _add_import, _add_report, _add_compare, _add_watch,
    ):  # fmt: skip
        add(command)
    parser.set_defaults(commands=tuple(commands.choices))
    return parser


def _add_train_and_show(command: AddsCommand) -> None:
    # `train` and `show` have no `--help` of their own, because `--help` after a recipe's name shows the recipe's help.
    train = command("train", "run a recipe", add_help=False)
    show = command(
        "show",
        "print the call sheet (which callback is called when) and the settings of a recipe, without training",
        add_help=False,
    )
    for added in (train, show):
        added.add_argument("recipe", nargs="?", help="a recipe file, or the name of a shipped recipe")


def _add_exec(command: AddsCommand) -> None:
    command("exec", "run a training script unchanged, and observe its loop with callbacks", add_help=False)


def _add_events(command: AddsCommand) -> None:
    command("events", "print all events of a run as a tree, in the order in which they occur", "  callsheet events | less")


def _add_bridges(command: AddsCommand) -> None:
    bridges = command(
        "bridges",
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
        "list the shipped recipes, or copy the file of one",
        "  callsheet recipes\n  callsheet recipes --copy pretrain --to mine.yaml",
    )
    recipes.add_argument("--copy", metavar="NAME", help="copy this recipe's file to the current folder, so that you can edit it")
    recipes.add_argument("--to", metavar="FILE", help="with --copy: the file to write (default: NAME.yaml)")


def _add_evaluate(command: AddsCommand) -> None:
    evaluate = command(
        "evaluate",
        "evaluate a run's model on all validation datasets and the test data, without changing the run",
        "  callsheet evaluate stdlib-lm\n  callsheet evaluate runs/big --checkpoint ep0-ba500 --out scores.json" + _KEYS_HELP,
    )
    evaluate.add_argument("a_run", metavar="RUN", help=_RUN_OR_RECIPE_HELP)
    evaluate.add_argument("--out", metavar="FILE", help="also write the results to this file, as JSON")
    _add_checkpoint(evaluate)


def _add_predict(command: AddsCommand) -> None:
    predict = command(
        "predict",
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
        "delete runs with their checkpoints, after a confirmation",
        "  callsheet delete lr-3\n  callsheet delete 'old-*' --yes\n\nCheckpoints outside the run's folder are not deleted.",
    )
    delete.add_argument("runs", nargs="+", metavar="RUN", help=_RUNS_HELP)
    delete.add_argument("--folder", default="runs", metavar="FOLDER", help=_RUNS_FOLDER_HELP)
    delete.add_argument("--yes", action="store_true", help="delete without asking for confirmation")


def _add_import(command: AddsCommand) -> None:
    imports = command(
        "import",
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
        "write the report of a run as one self-contained HTML page, and a trace for Perfetto next to it",
        "  callsheet report stdlib-lm\n  callsheet report /data/runs/big --out big.html",
    )
    report.add_argument("a_run", metavar="RUN", help=_RUN_HELP)
    report.add_argument("-o", "--out", metavar="FILE", help="the file to write (default: report.html in the run's folder)")


def _add_compare(command: AddsCommand) -> None:
    compare = command(
        "compare",
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
