"""Observes one script: recognizes its training, runs the callbacks, and writes the reports at the end.

This module does not import torch before the script does, because the script may first set environment variables that torch reads.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, Self

from callsheet.core.callback import Callback
from callsheet.core.context import Context
from callsheet.core.ranks import read_ranks
from callsheet.core.run_state import RunInfo
from callsheet.errors import CallsheetError, MissingPackage, NotSupported, text_of
from callsheet.exec import messages
from callsheet.exec.accelerate_loops import AccelerateLoops
from callsheet.exec.frameworks import Frameworks
from callsheet.exec.ignite_engines import IgniteEngines
from callsheet.exec.import_watch import ImportWatch
from callsheet.exec.messages import log_failure, warn
from callsheet.exec.observers import observers_of
from callsheet.exec.script import Script, is_from_script
from callsheet.run.reasons import is_secret, one_line
from callsheet.run.run_names import check_run_name, new_name

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from callsheet.exec.bare_loop import BareLoop
    from callsheet.exec.log_pace import LogPace
    from callsheet.exec.loop_finder import LoopFinder


class RunNotes(Callback):
    """Adds each run to a list when the run ends, for the reports. Only runs that `callsheet exec` has made have this callback.

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
        callbacks: the file that lists the callbacks; None: the default ones.
        run_name: the run's name; None: the script's name and the time. Further runs of the same script get a number.
        runs_folder: the folder that contains the runs' folders.
        log_interval: how many steps there are from one metrics record to the next. None: see `LogPace`.

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
        log_interval: int | None,
    ) -> None:
        check_run_name(run_name, None)
        self._callbacks = callbacks
        self._make = observers_of(callbacks)
        self.runs_folder = Path(runs_folder).absolute()
        self.log_interval = log_interval
        self.config = _config(script)
        self._name = run_name or f"{script.name}-{new_name().removeprefix('run-')}"
        self._names = 0
        self._ended: list[tuple[RunInfo, int]] = []  # the runs that have ended, with the number of their steps
        self.loop: BareLoop | None = None
        """The hand-written training loop that was recognized last, or None."""
        self.finder: LoopFinder | None = None
        """The object that recognizes loops. None until the script imports torch."""
        self.engines = IgniteEngines(self)
        self.accelerate = AccelerateLoops()
        self._depth = 0  # number of framework trainers that are training now
        self._has_reported = False
        self._has_trained = False  # whether a trainer of a framework has trained
        self._frameworks = Frameworks(self)
        self._imports = ImportWatch({"torch": self._install, **self._frameworks.actions})
        self._is_in_fork = False  # True in a process that the script has forked
        os.register_at_fork(after_in_child=partial(_leave_to_parent, weakref.ref(self)))

    def __enter__(self) -> Self:
        messages.begin()
        self._imports.install()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None) -> None:
        if self._trains_in_thread():
            atexit.register(self._end, error)  # at exit, Python first waits for the thread that trains, and then calls `_end`
        else:
            self._end(error)

    def _trains_in_thread(self) -> bool:
        """Return whether another thread may still train, although the script has reached its last line."""
        if self.loop is not None:
            thread = self.loop.guard.thread
            return thread is not threading.current_thread() and thread.is_alive()
        return any(not each.daemon and each is not threading.current_thread() for each in threading.enumerate())

    def _end(self, error: BaseException | None) -> None:
        """End the observation, and write the reports."""
        if self._is_in_fork:
            return
        try:
            is_exit = isinstance(error, SystemExit) and error.code in (None, 0)
            self._finish_loop(None if is_exit else error)
            self._imports.remove()
            self._frameworks.remove()
            self.engines.remove()
            if self.finder is not None:
                self.finder.remove()
            self._report(has_begun=error is None or is_from_script(error))
        except Exception as fault:
            log_failure("the observation could not be ended in order", fault)

    def leave_to_parent(self) -> None:
        """Stop observing in a process that the script has forked. The parent process is still observed."""
        self._is_in_fork = True
        if self.loop is not None:
            self.loop.guard.release()
        if self.finder is not None:
            self.finder.stop()

    def make(self, pace: LogPace) -> list[Callback]:
        """Return the callbacks for a run whose log interval is `pace`."""
        return [*self._make(pace), RunNotes(self._ended)]

    def next_name(self) -> str:
        """Return the name of the next run. Skip names whose folder exists, so that no earlier run is overwritten."""
        wanted = self._make_name()
        name = wanted
        while (self.runs_folder / name).exists():
            name = self._make_name()
        if name != wanted:
            warn(f"{self.runs_folder / wanted} exists, so this run is called {name}")
        return name

    def options(self) -> list[str]:
        """Return the options with which `callsheet exec` observes the worker processes that the script starts.

        Ultralytics starts worker processes to train on several GPUs.
        """
        given = {
            "callbacks": self._callbacks,
            "run_name": self.next_name(),
            "runs_folder": self.runs_folder,
            "log_interval": self.log_interval,
        }
        return [word for name, value in given.items() if value is not None for word in (f"--{name}", str(value))]

    def _make_name(self) -> str:
        self._names += 1
        return self._name if self._names == 1 else f"{self._name}-{self._names}"

    def say_once(self, message: str) -> None:
        """Print the reason why the script is not observed, unless a reason was printed before."""
        if not self._has_reported and read_ranks().rank == 0:
            self._has_reported = True
            warn(message)

    @contextmanager
    def training(self) -> Iterator[None]:
        """Pause the recognition of loops while the `with` block runs. In the block, a framework's trainer runs its own loop."""
        self._finish_loop(None)
        self._has_trained = True
        self._depth += 1
        self._pause()
        try:
            yield
        finally:
            self._depth -= 1
            self._pause()

    def is_observed_otherwise(self, callbacks: Iterable[Any] = ()) -> bool:
        """Return whether the script uses callsheet itself. If so, `callsheet exec` adds no callbacks.

        Args:
            callbacks: the callbacks that the script has given to its trainer.
        """
        from callsheet.bridges.host_base import HostBase
        from callsheet.run.run import Run

        others = (run for run in list(Run.alive) if not any(isinstance(each, RunNotes) for each in run.manager.callbacks))
        if any(isinstance(each, HostBase) for each in callbacks) or any(not run.lifetime.has_ended for run in others):
            self.say_once("this script uses callsheet itself, so it runs as it is")
            return True
        return False

    def _install(self, torch: ModuleType) -> None:
        """Begin to recognize training loops, because torch has been imported."""
        try:
            from callsheet.exec.loop_finder import LoopFinder

            self.finder = LoopFinder(self)
            self._pause()
            self.finder.install()
        except Exception as error:
            log_failure("loops cannot be observed", error)

    def _pause(self) -> None:
        if self.finder is not None:
            self.finder.is_paused = self._depth > 0

    def _finish_loop(self, error: BaseException | None) -> None:
        if self.loop is not None:
            self.loop.finish(error)

    def begin_loop(self, model: nn.Module, optimizer: Optimizer, scaler: Any, loader: Any) -> BareLoop | None:
        """End the run of the previous loop, and return a `BareLoop` for the loop that was recognized now.

        Return None if this process is not observed, or if a callback needs something that this loop does not support.
        """
        from callsheet.exec.bare_loop import BareLoop, unwrap_model
        from callsheet.exec.log_pace import LogPace
        from callsheet.exec.lone_run import check_observers

        if read_ranks().rank != 0 or self.is_observed_otherwise():
            return None
        self._finish_loop(None)
        known = {**self.accelerate.settings(optimizer), **self.engines.begin()}
        pace = LogPace(self.log_interval)
        loop = BareLoop(
            self.make(pace),
            model=model,
            optimizer=optimizer,
            scaler=scaler,
            loader=loader,
            run_name=self.next_name(),
            runs_folder=self.runs_folder,
            pace=pace,
            config={**known, **self.config},
            # A stop is supported only if there is one rank. With several, the other ranks would wait for the rank that has stopped.
            stops=self.engines.stop if self.engines.is_training and read_ranks().world_size == 1 else None,
        )
        try:
            check_observers(loop.run)
        except NotSupported as error:
            loop.discard()
            self.say_once(f"{error}. The script continues without callbacks")
            return None
        self.loop = loop
        loop.are_epochs_reported, loop.no_evaluator = self.engines.is_training, self.engines.switch
        warn(f"observing {type(unwrap_model(model)).__name__} and {type(optimizer).__name__}, in {loop.run.ctx.run.folder}")
        return loop

    def _report(self, *, has_begun: bool) -> None:
        """Print a summary of each run, or that no training was recognized, unless the script could not be started (`has_begun`)."""
        if read_ranks().rank != 0:
            return
        if has_begun and not self._ended and not self._has_trained:
            reason = (
                "no optimizer of torch has stepped in this process; use callsheet.attach if it trains in another way"
                if "torch" in sys.modules
                else "it did not import torch"
            )
            self.say_once(f"no training was recognized: {reason}")
        for run, steps in self._ended:
            if run.folder is not None and run.folder.is_dir():
                outcome = run.outcome_reason or run.outcome
                counted = f"{steps:,} step{'s' if steps != 1 else ''}"
                warn(f"{run.name}: {', '.join([counted, *_figures(run.folder)])}, {outcome}; {_page(run.folder)}")


def _leave_to_parent(reference: weakref.ref[Observation]) -> None:
    if (observation := reference()) is not None:
        observation.leave_to_parent()


def _figures(folder: Path) -> list[str]:
    """Return texts with the mean time of a step, the mean rate of samples and the last loss. Values that the run has not recorded are left out."""
    from callsheet.loggers.support.figures import short
    from callsheet.loggers.support.jsonl_reader import read_metrics

    found = []
    records = [record for record in read_metrics(folder) if "time/batch" in record.values]
    if records and records[-1].elapsed_seconds > 0 and records[-1].step:
        last = records[-1]
        seconds, samples = last.elapsed_seconds / last.step, last.values.get("time/sample", 0) / last.elapsed_seconds
        found.append(f"{seconds:.3g} s a step" if seconds >= 1 else f"{1000 * seconds:.3g} ms a step")
        found += [f"{short(samples)} samples/s"] if samples else []
    losses = [record.values["train/loss"] for record in records if "train/loss" in record.values]
    return found + ([f"train/loss {losses[-1]:.4g}"] if losses else [])


def _page(folder: Path) -> str:
    from callsheet.report.run_page import write_report

    try:
        return f"report: {_short(write_report(folder))}"
    except MissingPackage:
        return f"files: {_short(folder)}; pip install 'callsheet[report]' for a report"
    except (OSError, CallsheetError) as error:
        return f"files: {_short(folder)}; the report could not be written: {one_line(text_of(error))}"


def _short(path: Path) -> str:
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def _config(script: Script) -> dict[str, Any]:
    """Return the script's arguments as a dict: `--lr 0.1` becomes `{"lr": "0.1"}`. Values with a secret's name become `...`."""
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
