"""Writes results for the MLPerf Training benchmarks."""

from __future__ import annotations

import logging
import math
import os
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from callsheet.callbacks.early_stopper import find_result
from callsheet.callbacks.support.metric_mode import ModeOrAuto, is_lower_better
from callsheet.callbacks.support.mlperf_result import (
    Division,
    ResultFile,
    Status,
    Submission,
    Target,
    accuracy_keys,
    check_hyperparameters,
    find_hyperparameters,
    now_ms,
    samples,
)
from callsheet.core.callback import Callback, label_of, one_of
from callsheet.core.context import Context
from callsheet.errors import ConfigError

logger = logging.getLogger("callsheet")

_CLEAR_CACHE_SECONDS = 300.0  # time limit of the user's command `cache_clear_cmd`, in seconds


class MLPerfCallback(Callback):
    """Write a result that MLPerf's compliance checker accepts. When the target is reached, stop training on all ranks together.

    Rank 0 writes `<root_folder>/results/<system_name>/<benchmark>/result_<index>.txt`. `run_start` is written before the data is
    built. `run_stop` has the status `success` at the evaluation that reaches the target, or `aborted` at the end of a run that
    did not reach it. After the first step, the checker already reads the file as it would be if the target had been reached. So
    an invalid result ends the run at once, and not days later. A resumed run writes no result, because it was not timed from its
    start, but still stops at the target. Evaluations outside training are ignored. Without a benchmark there is nothing to do,
    and a warning says so. To use several of these callbacks, give each its own `name`.

    Args:
        benchmark: one of the rules' benchmarks, such as `"llama31_8b"`.
        target: the value of `monitor` to reach.
        monitor: `<dataset>/<metric>` of the evaluation; it is written as `eval_accuracy`.
        mode: `"min"`: a value at or below `target` reaches the target; `"max"`: a value at or above `target` does. `"auto"` is
            `"min"` if the name contains loss, error or perplexity, otherwise `"max"`.
        submitter: the organization.
        system_name: the name of the platform; if empty, the number of ranks and the device's name.
        status: the status of the platform: `"onprem"`, `"cloud"` or `"research"`.
        division: `"open"` or `"closed"`.
        ruleset: the version of the rules, such as `"6.1.0"`; if empty, the newest in the installed `mlperf-logging`.
        hyperparameters: other values that the rules require, by their names, such as `train_samples`. They override the values found
            automatically: `seed`; `opt_...` and `max_steps`, if the optimizer and `max_duration` have them; `config_filename`, the
            program's name; each `..._parallelism`, which is 1; and, from the first step, `global_batch_size`, `micro_batch_size` and
            `gradient_accumulation_steps`.
        root_folder: None means the folder `mlperf` in the run's folder.
        index: the number of the result; None means the first that is free.
        cache_clear_cmd: a program and its arguments, run by one rank of each machine before `run_start`, without a shell. Without
            a command, the result file says that no cache was cleared.
        stop: whether training ends when the target is reached. The result file is completed then even if training continues.

    Raises:
        MissingPackage: `mlperf-logging` is not installed.
        ConfigError: an argument is invalid, the checker rejects the result, the index is taken, or the command failed.
    """

    phase = "decide"
    collective = True  # every rank makes the same stop requests
    requests = ("stop",)
    required_fields = ("microbatch",)
    writes_to_run_folder = True

    def __init__(
        self,
        *,
        benchmark: str = "",
        target: float | None = None,
        monitor: str = "validation/loss",
        mode: ModeOrAuto = "auto",
        submitter: str = "",
        system_name: str = "",
        status: Status = "onprem",
        division: Division = "open",
        ruleset: str = "",
        hyperparameters: Mapping[str, Any] | None = None,
        root_folder: str | os.PathLike[str] | None = None,
        index: int | None = None,
        cache_clear_cmd: Sequence[str] | None = None,
        stop: bool = True,
    ) -> None:
        if bool(benchmark) != (target is not None) or (target is not None and not math.isfinite(target)):
            raise ConfigError(f"benchmark={benchmark!r}, target={target!r}: give both, and the target as a finite number")
        if not all(monitor.partition("/")):
            raise ConfigError(f"monitor={monitor!r}: write <dataset>/<metric>, such as 'validation/loss'")
        if isinstance(cache_clear_cmd, str) or (cache_clear_cmd is not None and not cache_clear_cmd):
            raise ConfigError(f"cache_clear_cmd={cache_clear_cmd!r}: give a list of the program and its arguments")
        self._submission = Submission(benchmark, submitter, system_name, status, division, ruleset, root_folder, index)
        self._hyperparameters = check_hyperparameters(hyperparameters or {})
        is_min = is_lower_better(mode, monitor)
        # The arguments `benchmark` and `target` are given together, or neither is given (checked above).
        self._target = Target(monitor, target, is_min) if target is not None else None
        self._stops = stop
        self._cache_clear_cmd = list(cache_clear_cmd or ())
        self._forget()

    def _forget(self) -> None:
        self._began_at = now_ms()
        self._result: ResultFile | None = None  # the open result file on rank 0; None on other ranks, or if no result is written
        self._sizes: list[int] | None = None  # samples in each microbatch of the first step; None after that step
        self._has_begun = self._is_in_block = self._is_resumed = False
        self._reached: float | None = None  # the value of the monitored metric that reached the target

    # --- the events of a run ---

    def on_run_start(self, ctx: Context) -> None:
        """Record when the run started. The result file is created later, when it is known whether the run is resumed."""
        self._forget()
        if self._target is None and ctx.run.is_world_process_zero:
            logger.warning("%s has nothing to do: give it a benchmark and a target", label_of(self))

    def on_data_init_start(self, ctx: Context) -> None:
        """Create the result file at this event, because the time that MLPerf measures begins before any data is read."""
        self._has_begun = True
        # Without an optimizer nothing will be trained, so there is no result to write.
        if self._target is None or (ctx.has("optimizer") and ctx.optimizer is None):
            return
        if (step := ctx.state.timestamp.batch) > 0:
            if ctx.run.is_world_process_zero:
                why = f"results are timed from a run's start, and this run was resumed at step {step}"
                logger.warning("%s writes no result: %s", label_of(self), why)
            return
        clears = self._cache_clear_cmd and ctx.run.is_local_process_zero
        # `gather` also makes every rank wait until all machines have cleared their caches.
        problems = ctx.gather(_problem_of(self._cache_clear_cmd) if clears else "")
        if any(problems):
            raise ConfigError(f"cache_clear_cmd={self._cache_clear_cmd!r}: {next(filter(None, problems))}")
        if ctx.run.is_world_process_zero:
            self._open(ctx)
        self._sizes = []

    def on_train_start(self, ctx: Context) -> None:
        """Write the start of the first block (in MLPerf, the training between two evaluations) to the result file.

        Stop again if the run had reached the target before it was resumed.
        """
        if not self._has_begun:  # in another framework's loop, `on_data_init_start` may be missing
            self.on_data_init_start(ctx)
        if self._target is not None and ctx.state.evaluators:
            one_of("dataset of the monitor", self._target.monitor.partition("/")[0], ctx.state.evaluators)
        self._start_block(ctx)
        is_resumed, self._is_resumed = self._is_resumed, False
        if is_resumed and self._target is not None and self._reached is not None:
            self._stop_if_reached(ctx, self._target, self._reached)

    def on_epoch_start(self, ctx: Context) -> None:
        self._write(ctx, "epoch_start")

    def on_microbatch_start(self, ctx: Context) -> None:
        """In the first step, record how many samples each microbatch has."""
        if self._sizes is not None:
            self._sizes.append(samples(ctx.microbatch))

    def on_train_step_end(self, ctx: Context) -> None:
        """After the first step, write the hyperparameters that are known now, and run the compliance checker on the result."""
        if self._sizes is not None:
            sizes, self._sizes = ctx.gather(self._sizes), None
            self._write_all(ctx, find_hyperparameters(ctx, sizes, self._hyperparameters) | self._hyperparameters)
            assert self._target is not None  # `_sizes` is not None here, and is set only if there is a target
            if complaints := ctx.gather(self._complaints_if_reached(ctx, self._target))[0]:
                raise ConfigError(
                    f"MLPerf's checker (rules {self._submission.ruleset}) would reject the result even if {self._target.monitor} reached {self._target.value}; "
                    f"correct {label_of(self)}'s target= or hyperparameters=:\n" + "\n".join(complaints)
                )

    def on_epoch_end(self, ctx: Context) -> None:
        self._write(ctx, "epoch_stop")

    def on_eval_all_start(self, ctx: Context) -> None:
        """Write the end of the block (the training since the last evaluation) and the evaluation's start to the result file."""
        if not ctx.standalone:
            self._stop_block(ctx)
            self._write(ctx, "eval_start")

    def on_eval_all_end(self, ctx: Context) -> None:
        """Write the evaluation's metric to the result file. If the metric reached the target, complete the file and stop training."""
        if ctx.standalone or self._target is None:
            return
        value = find_result(ctx, self._target.monitor)
        if value is not None:
            self._write_all(ctx, self._as_accuracy(value))
        self._write(ctx, "eval_stop")
        if value is not None and self._target.is_reached(value):
            self._reached = value
            self._close(ctx, "success")
            self._stop_if_reached(ctx, self._target, value)
        elif not ctx.state.is_complete and ctx.control.stop_requested is None:
            self._start_block(ctx)

    def on_train_end(self, ctx: Context) -> None:
        self._stop_block(ctx)

    def on_run_end(self, ctx: Context) -> None:
        """If the target was not reached, complete the result file with the status `aborted`."""
        self._close(ctx, "aborted")

    def _stop_if_reached(self, ctx: Context, target: Target, value: float) -> None:
        if self._stops and target.is_reached(value) and not ctx.state.is_complete:
            ctx.control.stop(f"{target.monitor} is {value:g}, which reaches the target {target.value:g}", replicated=True)

    # --- writing the result file ---

    def _open(self, ctx: Context) -> None:
        self._result = self._submission.file(ctx.run, label_of(self))
        self._write(ctx, "init_start", time_ms=self._began_at)
        self._write(ctx, "cache_clear", bool(self._cache_clear_cmd))
        self._write_all(ctx, self._submission.lines(ctx.run))
        self._write(ctx, "init_stop")
        self._write(ctx, "run_start")

    def _complaints_if_reached(self, ctx: Context, target: Target) -> list[str]:
        """Return the checker's complaints about a copy of the result file, completed as if the target were reached now."""
        if self._result is None:
            return []
        rest = {"block_stop": None, "eval_start": None, **self._as_accuracy(target.value), "eval_stop": None, "run_stop": None}
        return self._result.complaints(rest.items(), self._submission.ruleset, **_place(ctx), status="success")

    def _as_accuracy(self, value: float) -> dict[str, Any]:
        return dict.fromkeys(accuracy_keys(self._submission.benchmark), value)

    def _start_block(self, ctx: Context) -> None:
        self._is_in_block = True
        self._write(ctx, "block_start", first_epoch_num=max(1, ctx.epoch))

    def _stop_block(self, ctx: Context) -> None:
        if self._is_in_block:
            self._is_in_block = False
            self._write(ctx, "block_stop", first_epoch_num=max(1, ctx.epoch))

    def _close(self, ctx: Context, status: str) -> None:
        self._stop_block(ctx)
        self._write(ctx, "run_stop", status=status)
        if self._result is not None:
            logger.info("%s: %s, %s", label_of(self), status, self._result.path)
            self._result.close()
            self._result = None

    def _write(self, ctx: Context, key: str, value: Any = None, **more: Any) -> None:
        if self._result is not None and ctx.run.may_write(self._result.path):
            self._result.write(key, value, **_place(ctx), **more)

    def _write_all(self, ctx: Context, values: Mapping[str, Any]) -> None:
        for key, value in values.items():
            self._write(ctx, key, value)

    # --- state for checkpoints ---

    def state_dict(self) -> Mapping[str, Any]:
        """Return the value with which the monitored metric reached the target, or None if it has not reached the target yet."""
        return {"reached": self._reached}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._reached, self._is_resumed = state["reached"], True


def _place(ctx: Context) -> dict[str, int]:
    return {"epoch_num": ctx.epoch, "step_num": ctx.step, "samples_count": ctx.state.timestamp.sample}


def _problem_of(command: list[str]) -> str:
    """Run a command. Return why it failed, or an empty string if it succeeded."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_CLEAR_CACHE_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return f"it ended with {done.returncode}: {(done.stderr or done.stdout).strip()}" if done.returncode else ""
