"""The command `callsheet exec`: runs a training script unchanged, and writes a report of its training."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from callsheet.core.optional import need
from callsheet.errors import CallsheetError, unknown_arguments
from callsheet.exec.observation import Observation
from callsheet.exec.observers import CALLBACKS_VARIABLE
from callsheet.exec.script import Script, hide_our_frames

_DESCRIPTION = """\
Run a training script unchanged, and observe its training loop with callbacks.

The script runs as if Python had started it: same arguments, output, exit code and signals. Its weights are the same as without
callsheet. If the script trains with the trainer of a framework that callsheet supports, callsheet observes this trainer. Otherwise
it observes the first optimizer that steps, and the model that this optimizer updates. When the script has ended, callsheet writes a
report to the run's folder."""

_EPILOG = """\
examples:
  callsheet exec train.py --epochs 3
  callsheet exec --run_name baseline -m package.train --lr 0.1
  callsheet exec --callbacks callbacks.yaml train.py
  torchrun --nproc_per_node 2 -m callsheet.exec train.py

FILE of --callbacks is a YAML list, as in a recipe:
  - class_path: SpeedMonitor
  - class_path: my_package.MyCallback
    init_args: {interval: 10}
The classes in FILE are imported, which executes the code of their modules. Instead of --callbacks FILE, you can set the
environment variable CALLSHEET_CALLBACKS to the path of FILE."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run and observe the script that the arguments name. Raise the script's errors, or SystemExit(2) if the arguments are wrong."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = _parser()
    options, script = _split(parser, given)
    try:
        need("torch", extra="train", wanted_by="callsheet exec")
        observation = Observation(
            script,
            callbacks=options.callbacks or os.environ.get(CALLBACKS_VARIABLE) or None,
            run_name=options.run_name,
            runs_folder=options.runs_folder,
            log_interval=options.log_interval,
        )
    except CallsheetError as error:
        print(f"callsheet exec: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    try:
        with observation:
            script.run()
    except BaseException as error:
        if not isinstance(error, SystemExit):
            hide_our_frames(error)
        raise


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="callsheet exec",
        usage="callsheet exec [OPTIONS] SCRIPT ARGS...\n       callsheet exec [OPTIONS] -m MODULE ARGS...",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--callbacks", metavar="FILE", help="a YAML file that lists the callbacks to use instead of the default ones"
    )
    parser.add_argument("--run_name", metavar="NAME", help="the run's name (default: the script's name and the time)")
    parser.add_argument(
        "--runs_folder", metavar="FOLDER", default="runs", help="the folder in which the run's folder is created (default: runs)"
    )
    parser.add_argument(
        "--log_interval",
        metavar="STEPS",
        type=_positive,
        help="the number of steps from one metrics record to the next (default: 10, or more if the steps of a hand-written loop are short)",
    )
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _split(parser: argparse.ArgumentParser, given: list[str]) -> tuple[argparse.Namespace, Script]:
    """Separate the options of `callsheet exec`, which come first, from the script and its arguments.

    All options of `callsheet exec` take a value.
    """
    place = 0
    while place < len(given) and given[place].startswith("-") and given[place] not in ("-m", "-h", "--help"):
        place += 1 if "=" in given[place] else 2
    own, rest = given[:place], given[place:]
    if rest[:1] in (["-h"], ["--help"]):
        parser.print_help()
        raise SystemExit(0)
    options, strays = parser.parse_known_args(own)
    if strays:
        parser.error(unknown_arguments(strays, parser._option_string_actions))
    is_module = rest[:1] == ["-m"]
    rest = rest[is_module:]
    if not rest:
        parser.error("give the name of a module after -m" if is_module else "give a script, or -m and the name of a module")
    try:
        return options, Script(rest[0], tuple(rest[1:]), is_module)
    except CallsheetError as error:
        parser.error(str(error))
