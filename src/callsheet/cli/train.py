"""`callsheet train`: set up a recipe, and train."""

from __future__ import annotations

import logging
import shlex
import sys

from callsheet.cli.recipe import prepare_recipe
from callsheet.core.manager import CallbackManager
from callsheet.core.ranks import read_ranks
from callsheet.core.run_state import Outcome, RunInfo
from callsheet.core.working import working
from callsheet.errors import MissingPackage
from callsheet.report import write_report
from callsheet.report.index import is_run


def train(recipe: str, overrides: list[str]) -> int:
    """Print a recipe's callbacks, run the recipe, and print its report. Return the exit status."""
    with working("loading the recipe", is_shown=read_ranks().rank == 0):
        job = prepare_recipe(recipe, overrides, command="train").job
    is_first = job.ranks.rank == 0  # only rank 0 prints and writes the report
    logging.basicConfig(level=logging.INFO if is_first else logging.WARNING, format="%(message)s", stream=sys.stderr)
    if is_first:
        print(_summary(job.callbacks, recipe, overrides), flush=True)
    job.setup()
    if is_first:
        print(job.describe(), flush=True)
    job.run()
    if is_first:
        print(f"\n{job.report()}", flush=True)
        with working("writing the report"):
            reported = _write_report(job.trainer.run)
        print(reported, flush=True)
    if job.trainer.preempted and job.trainer.signal is not None:
        return 128 + job.trainer.signal  # shells report this exit status if a signal has ended a process
    return 1 if job.trainer.run.outcome is Outcome.FAILED else 0


def _summary(callbacks: CallbackManager, recipe: str, overrides: list[str]) -> str:
    """Return the short call sheet, and the command that prints the table of all handlers."""
    show = shlex.join(["callsheet", "show", recipe, *overrides])
    return f"{len(callbacks.callbacks)} callbacks and loggers (the whole call sheet: {show}):\n{callbacks.call_sheet().short()}\n"


def _write_report(run: RunInfo) -> str:
    """Write the run's report if its folder has metrics records. Return the report's path or why there is none, as text."""
    folder = run.folder
    if run.has_lost_folder:
        return "There is no report: another process has taken over the run's folder."
    if folder is None or not is_run(folder):
        return "There is no report: nothing wrote to the run's folder (the logger JSONLLogger would)."
    try:
        return f"Its report: {write_report(folder)}"
    except (MissingPackage, OSError) as error:  # the run itself is complete, so only print the message and do not raise the error
        return f"There is no report: {error}"
