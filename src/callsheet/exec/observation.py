"""The observation of one script: it recognizes training, runs the callbacks, and writes the reports at the end."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import nn
from torch.optim import Optimizer

from callsheet.core.callback import Callback
from callsheet.core.context import Context
from callsheet.core.ranks import read_ranks
from callsheet.core.run_state import RunInfo
from callsheet.errors import MissingPackage
from callsheet.exec.bare_loop import BareLoop, unwrapped
from callsheet.exec.frameworks import USES_CALLSHEET, Frameworks
from callsheet.exec.loop_finder import LoopFinder
from callsheet.exec.messages import log_failure, warn
from callsheet.exec.observers import observers_of
from callsheet.exec.script import Script
from callsheet.run.reasons import is_secret, one_line
from callsheet.run.run import Run
from callsheet.trainer.arguments import check_run_name, new_name

logger = logging.getLogger("callsheet")


class RunNotes(Callback):
    """Notes the runs that end, for the report. It also marks a run as one of `callsheet exec`.

    Args:
        ended: the list to which each run is added, with the number of its steps.
    """

    ranks = "zero"

    def __init__(self, ended: list[tuple[RunInfo, int]]) -> None:
        self._ended = ended

    def on_run_end(self, ctx: Context) -> None:
        self._ended.append((ctx.run, ctx.state.timestamp.batch))


class Observation:
    """Observes the script that runs within its `with` block.

    Args:
        script: the script.
        callbacks: the file that lists the callbacks; None: the one that the environment variable names, or the default ones.
        run_name: the run's name; None: the script's name and the time. Further runs of the same script get a number.
        runs_folder: the folder that contains the runs' folders.
        log_interval: how many steps there are from one metrics record to the next.

    Raises:
        ConfigError: the file of callbacks or the name cannot be used.
    """

    def __init__(
        self,
        script: Script,
        *,
        callbacks: str | None,
        run_name: str | None,
        runs_folder: str | os.PathLike[str],
        log_interval: int,
    ) -> None:
        check_run_name(run_name, None)
        self._make = observers_of(callbacks, log_interval)
        self.runs_folder = Path(runs_folder).absolute()
        self.log_interval = log_interval
        self.config = _config(script)
        self._name = run_name or f"{script.name}-{new_name().removeprefix('run-')}"
        self._names = 0
        self._ended: list[tuple[RunInfo, int]] = []  # the runs that have ended, with the number of their steps
        self._loop: BareLoop | None = None
        self._depth = 0  # how many trainers of frameworks are training
        self._has_reported = False
        self._finder = LoopFinder(self._begin)
        self._frameworks = Frameworks(self)

    def __enter__(self) -> Self:
        self._finder.install()
        self._frameworks.install()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None) -> None:
        try:
            is_exit = isinstance(error, SystemExit) and error.code in (None, 0)
            if self._loop is not None:
                self._loop.finish(None if is_exit else error)
            self._finder.remove()
            self._frameworks.remove()
            self._report()
        except Exception as fault:
            log_failure(logger, "the observation could not be ended in order", fault)

    def make(self) -> list[Callback]:
        """Return the callbacks for a run. Their errors are isolated, except those of callbacks that call collectives."""
        made = self._make()
        for each in made:
            if each.on_error is None and not each.collective:
                each.on_error = "isolate"
        return [*made, RunNotes(self._ended)]

    def next_name(self) -> str:
        """Return the name of the next run."""
        self._names += 1
        return self._name if self._names == 1 else f"{self._name}-{self._names}"

    def say_once(self, message: str) -> None:
        """Print why the script is not observed."""
        if not self._has_reported and read_ranks().rank == 0:
            self._has_reported = True
            warn(message)

    @contextmanager
    def training(self) -> Iterator[None]:
        """Within this block a framework's trainer trains, so that its loop is not taken for one written by hand."""
        self._depth += 1
        self._finder.is_paused = True
        try:
            yield
        finally:
            self._depth -= 1
            self._finder.is_paused = self._depth > 0

    def is_observed_otherwise(self) -> bool:
        """Return whether the script uses callsheet itself, so that nothing is added."""
        others = (run for run in list(Run.alive) if not any(isinstance(each, RunNotes) for each in run.manager.callbacks))
        if any(not run.lifetime.has_ended for run in others):
            self.say_once(USES_CALLSHEET)
            return True
        return False

    def _begin(self, model: nn.Module | None, optimizer: Optimizer, scaler: Any, loader: Any) -> BareLoop | None:
        """Make the loop that the finder has recognized. Return None if it is not observed."""
        try:
            if read_ranks().rank != 0 or self.is_observed_otherwise():
                return None
            if model is None:
                self.say_once(
                    f"the parameters of {type(optimizer).__name__} belong to no torch.nn.Module, so the loop is not observed; the script "
                    "continues. Put them into a module, or use callsheet.attach"
                )
                return None
            self._loop = loop = BareLoop(
                self.make(),
                model=model,
                optimizer=optimizer,
                scaler=scaler,
                loader=loader,
                run_name=self.next_name(),
                runs_folder=self.runs_folder,
                log_interval=self.log_interval,
                config=self.config,
            )
            warn(f"observing {type(unwrapped(model)).__name__} and {type(optimizer).__name__}, in {loop.run.ctx.run.folder}")
            return loop
        except Exception as error:
            log_failure(logger, "the loop cannot be observed", error)
            self._has_reported = True
            return None

    def _report(self) -> None:
        if read_ranks().rank != 0:
            return
        if not self._ended:
            self.say_once("no training was recognized: no optimizer of torch has stepped in this process")
        for run, steps in self._ended:
            if run.folder is not None and run.folder.is_dir():
                outcome = run.outcome_reason or run.outcome
                warn(f"{run.name}: {steps:,} step{'s' if steps != 1 else ''}, {outcome}; {_page(run.folder)}")


def _page(folder: Path) -> str:
    from callsheet.report.page import write_report

    try:
        return f"report: {_short(write_report(folder))}"
    except MissingPackage:
        return f"files: {_short(folder)}; pip install 'callsheet[report]' for a report"


def _short(path: Path) -> str:
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def _config(script: Script) -> dict[str, Any]:
    """Return the script's arguments as settings by name: `--lr 0.1` is `lr`. Values that look like credentials are replaced."""
    found: dict[str, Any] = {"script": script.target}
    positional: list[str] = []
    name = ""
    for word in script.arguments:
        if word.startswith("-") and not word[1:2].isdigit() and word.strip("-"):
            name, _, value = word.lstrip("-").partition("=")
            found[name] = "..." if value and is_secret(name) else one_line(value) if value else "yes"
            name = "" if value else name
        elif name:
            found[name] = (
                "..." if is_secret(name) else one_line(word) if found[name] == "yes" else f"{found[name]} {one_line(word)}"
            )
        else:
            positional.append(one_line(word))
    return {**found, **({"arguments": positional} if positional else {})}
