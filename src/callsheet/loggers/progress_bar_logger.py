"""Shows the progress of a run on a terminal."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from typing import Any

from callsheet.core.context import Context
from callsheet.core.optional import load
from callsheet.errors import ConfigError
from callsheet.loggers.logger import Logger
from callsheet.loggers.support.figures import clock, outcome, place, results, speeds
from callsheet.loggers.support.silence_watch import SilenceWatch

_REFRESH_SECONDS = 0.25
_LINE_SECONDS = 5.0
_SILENT_SECONDS = 2.0


class ProgressBarLogger(Logger):
    """Show the progress of training on standard error: as a bar on a terminal, otherwise as lines.

    The bar is redrawn at most four times a second. Without a bar, a line is written for a record, at most every five seconds.
    The bar and the lines show the epoch, the step, the loss, the speed and an estimate of the time left. Every evaluation and
    checkpoint, and the outcome, have lines of their own. The bar is removed before an exception is printed; if drawing the bar
    fails, lines are written instead. If no step or batch ends for two seconds, the bar counts the seconds and names the handler
    that is being called, if there is one.

    Args:
        bar: whether to show a bar, which needs rich; `"auto"` shows it if standard error is a terminal and rich is installed.

    Raises:
        ConfigError: `bar` is not True, False or `"auto"`.
    """

    shows_outcome = True

    def __init__(self, *, bar: bool | str = "auto") -> None:
        if bar not in (True, False, "auto"):
            raise ConfigError(f'bar={bar!r}: give True, False or "auto"')
        self._wanted = bar
        self._bar: Any = None  # rich's progress bar; None while no bar is on the screen
        self._shown = -math.inf
        self._status = ""
        self._watch: SilenceWatch | None = None  # shows the running handler if the bar has not changed for a while
        self._began = (0.0, 0.0)  # when this process started to train, and the fraction of the run that was complete then
        self._figures = ""
        self._counted = ("", 0)  # what is being evaluated or tested, and how many of its batches are completed
        self._is_bar_of_evaluation = False

    def on_checkpoint_load_end(self, ctx: Context) -> None:
        """If the run is resumed, print the checkpoint and the step from which it continues."""
        if ctx.checkpoint is not None:
            self._write(f"resumed from {ctx.checkpoint.path}, step {ctx.checkpoint.step}")

    def on_train_start(self, ctx: Context) -> None:
        self._began = (time.perf_counter(), ctx.state.elapsed or 0.0)
        self._shown, self._figures = -math.inf, ""
        if self._wants_bar():
            self._start(ctx.run.name)

    def on_train_step_end(self, ctx: Context) -> None:
        """Update the bar, at most four times a second."""
        if self._bar is not None and time.perf_counter() - self._shown >= _REFRESH_SECONDS:
            self._show(ctx)

    def on_log(self, ctx: Context) -> None:
        """Store the metrics record's loss and speed, which the bar shows. If there is no bar, print them as a line."""
        record = ctx.record
        if "train/loss" not in record.values and not record.samples_per_second:
            return  # this record is about an evaluation, whose results are printed on their own line
        loss = record.values.get("train/loss")
        self._figures = "  ".join([*([f"loss {loss:.4g}"] if loss is not None else []), *speeds(ctx)])
        if time.perf_counter() - self._shown >= (_REFRESH_SECONDS if self._bar is not None else _LINE_SECONDS):
            self._show(ctx)

    def on_eval_all_start(self, ctx: Context) -> None:
        """Begin to count the batches of an evaluation. Show a bar for them if there is no bar for training."""
        self._begin_counting(ctx)

    def on_eval_step_end(self, ctx: Context) -> None:
        self._count(f"evaluating {ctx.eval_name}")

    def on_test_start(self, ctx: Context) -> None:
        self._begin_counting(ctx)

    def on_test_step_end(self, ctx: Context) -> None:
        self._count("testing")

    def on_test_end(self, ctx: Context) -> None:
        self._end_counting()

    def on_eval_all_end(self, ctx: Context) -> None:
        self._end_counting()
        self._write(f"evaluation at step {ctx.step}: {results(ctx)}")

    def on_checkpoint_published(self, ctx: Context) -> None:
        if ctx.checkpoint is not None:
            self._write(f"checkpoint ({ctx.checkpoint.kind}): {ctx.checkpoint.path}")

    def on_train_end(self, ctx: Context) -> None:
        """Show the last step, and remove the bar."""
        if self._bar is not None:
            self._show(ctx)
        self._stop()

    def on_exception(self, ctx: Context) -> None:
        """Remove the bar, so that it does not mix with the traceback."""
        self._stop()

    def on_run_end(self, ctx: Context) -> None:
        self._stop()
        self._write(outcome(ctx))

    def _begin_counting(self, ctx: Context) -> None:
        self._counted, self._shown = ("", 0), time.perf_counter()
        self._is_bar_of_evaluation = self._bar is None and self._wants_bar()
        if self._is_bar_of_evaluation:
            self._start(ctx.run.name, total=None)

    def _count(self, what: str) -> None:
        before, count = self._counted
        count = count + 1 if what == before else 1
        self._counted = what, count
        now = time.perf_counter()
        if now - self._shown >= (_REFRESH_SECONDS if self._bar is not None else _LINE_SECONDS):
            self._shown = now
            text = f"{what}: batch {count}"
            if self._bar is None:
                self._write(text)
            else:
                self._status = text
                self._draw(lambda: self._bar.update(0, status=text, refresh=True))

    def _end_counting(self) -> None:
        if self._is_bar_of_evaluation:
            self._stop()
        self._is_bar_of_evaluation = False

    def _wants_bar(self) -> bool:
        return self._wanted is True or (self._wanted == "auto" and sys.stderr.isatty() and _has_rich())

    def _show(self, ctx: Context) -> None:
        self._shown = time.perf_counter()
        elapsed = ctx.state.elapsed
        since, before = self._began
        left = ""
        if elapsed is not None and before < elapsed <= 1.0:
            left = f"{clock((self._shown - since) * (1.0 - elapsed) / (elapsed - before))} left"
        texts = [text for text in (place(ctx), self._figures, left) if text]
        if self._bar is None:
            self._write("  ".join(texts if elapsed is None else [f"{min(elapsed, 1.0):4.0%}", *texts]))
        else:
            self._status = "  ".join(texts)
            self._draw(lambda: self._bar.update(0, completed=elapsed or 0.0, status=self._status, refresh=True))

    def _write(self, line: str) -> None:
        if self._bar is None:
            print(line, file=sys.stderr, flush=True)
        else:
            self._draw(lambda: self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True))

    def _draw(self, draw: Callable[[], None]) -> None:
        try:
            draw()
        except BaseException:  # remove the bar now, because after the error this callback may be disabled and never called again
            self._stop()
            raise

    def _start(self, name: str, *, total: float | None = 1.0) -> None:
        self._bar = bar = _new_bar(name, total=total)
        self._status = ""
        # Until the bar shows its first step, `SilenceWatch` measures from the time at which the bar appeared.
        began = time.perf_counter()
        self._watch = SilenceWatch(
            lambda: max(self._shown, began),
            lambda text: bar.update(0, status=f"{self._status}  {text}".lstrip(), refresh=True),
            patience=_SILENT_SECONDS,
        )

    def _stop(self) -> None:
        watch, self._watch = self._watch, None
        bar, self._bar = self._bar, None
        if watch is not None:
            watch.stop()
        if bar is not None:
            bar.stop()


def _new_bar(name: str, *, total: float | None = 1.0) -> Any:
    # Use `load`, which restores the random states, because importing rich draws random numbers.
    load("rich.progress", extra="train", wanted_by="ProgressBarLogger")
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TaskProgressColumn(),
        TextColumn("{task.fields[status]}", markup=False),
        console=Console(stderr=True),
        transient=total is None,  # the bar of an evaluation (without a total) disappears when the evaluation ends
        auto_refresh=False,  # not needed, because the handlers of this callback draw the bar
        redirect_stdout=sys.stdout.isatty(),  # on a terminal, show printed text above the bar; leave other output unchanged
    )
    bar.add_task(name, total=total, status="")
    bar.start()
    return bar


def _has_rich() -> bool:
    try:
        load("rich.progress", extra="train", wanted_by="ProgressBarLogger")
    except ImportError:
        return False
    return True
