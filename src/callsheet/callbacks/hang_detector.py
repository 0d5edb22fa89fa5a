"""Detects hangs: if no step ends for a long time, writes the stacks of all threads, and warns, raises or ends the process."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import statistics
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from callsheet.core.callback import Callback, label_of, one_of
from callsheet.core.context import Context
from callsheet.core.ranks import initialized_distributed
from callsheet.core.run_state import RunInfo, TrainState
from callsheet.errors import ConfigError, HangError

logger = logging.getLogger("callsheet")

Action = Literal["warn", "raise", "kill"]
ACTIONS: tuple[Action, ...] = get_args(Action)
# The signal that interrupts the training thread. It is a real-time signal that other libraries rarely use.
_INTERRUPT_SIGNAL = signal.SIGRTMAX - 3 if sys.platform == "linux" else None
_MIN_SAMPLES = 3  # how many step times must be measured before they determine the time limit
_ACTION_SECONDS = 10.0  # time limit for writing the stacks, and for logging; then `action` is carried out anyway
_OTHER_RANKS_SECONDS = 2.0  # time for the other ranks to notice the hang too and write their stacks


class HangDetector(Callback):
    """Write the stacks of all threads when no step ends for much longer than usual; then warn, raise or end the process.

    A background thread checks at least once a second whether a step has ended, and learns how long steps take. The learned times
    survive a resume. The thread adds no work to the steps themselves. The limit is `factor` times the learned step time, but at
    least `min_seconds`. If no step ends within the limit, each rank writes the stacks of all its threads to
    `hangs/rank<rank>-step<step>.txt` in the run's folder. If torch records its collectives (`TORCH_FR_BUFFER_SIZE` above 0), each
    rank also writes `hangs/rank<rank>-step<step>-collectives.json`, which torch's `torchfrtrace` reads. Each rank also logs an
    error. What follows depends on `action`:

    - `warn` logs again only if training continues, and then gives the length of the hang.
    - `raise` raises `HangError` in the training thread. It cannot interrupt a collective or a kernel.
    - `kill` ends the process with `exit_code`, without any clean-up, so that a launcher restarts it.

    `raise` and `kill` wait two seconds, so that the other ranks can write their stacks too, because the end of one rank may end
    the hang of the others. They do nothing if a step ended in that time.

    Steps of an evaluation and saves also count as progress. The limit is `pause_seconds` instead during evaluations and saves,
    for the steps before a step time is learned, and for the first step after the start of training, the start of an epoch, an
    evaluation or a save. If C code holds the interpreter lock forever, the detector cannot run.

    Args:
        factor: the limit, as a multiple of the learned step time.
        min_seconds: the shortest limit.
        pause_seconds: the limit during the longer pauses that are listed above.
        action: `warn`, `raise` or `kill`.
        exit_code: the exit code of a killed process.
        folder: where to write instead of the run's folder.

    Raises:
        ConfigError: an argument is invalid, or the run has no folder and none was given.
        HangError: in the training thread, if no step has ended for too long and `action` is `raise`.
    """

    writes_to_run_folder = True

    def __init__(
        self,
        *,
        factor: float = 10.0,
        min_seconds: float = 60.0,
        pause_seconds: float = 1800.0,
        action: Action = "warn",
        exit_code: int = 70,
        folder: str | os.PathLike[str] | None = None,
    ) -> None:
        if not factor > 1 or not 0 < min_seconds <= pause_seconds:
            values = f"factor={factor}, min_seconds={min_seconds}, pause_seconds={pause_seconds}"
            raise ConfigError(f"{values}: give a factor above 1, and 0 < min_seconds <= pause_seconds")
        if not 1 <= exit_code <= 255:
            raise ConfigError(f"exit_code={exit_code}: give 1 to 255")
        self._factor, self._min_seconds, self._pause_seconds = factor, min_seconds, pause_seconds
        self._action = one_of("action", action, ACTIONS)
        self._exit_code = exit_code
        self._given_folder = Path(folder) if folder is not None else None
        self._folder = Path()
        self._run: RunInfo | None = None  # the current run; None before training
        # Recent step times in seconds: for each check that found new steps, the mean time of these steps.
        self._learned: deque[float] = deque(maxlen=50)
        self._rank = 0
        self._state = TrainState()  # the run's state; `timestamp.batch` is the number of completed steps
        # When the run last made progress: when an event between steps was fired, or when the background thread found that a step
        # had ended.
        self._beat = 0.0
        self._hung_after = 0  # the last completed step before the reported hang
        self._pausing_until = 0  # up to this step, the time limit of a step is `pause_seconds`
        self._is_over: threading.Event | None = None
        self._previous: Any = None  # the earlier handler of `_INTERRUPT_SIGNAL`, to restore after training

    def on_run_start(self, ctx: Context) -> None:
        """Raise ConfigError if there is no folder to which the stacks of the threads can be written."""
        if self._given_folder is None and ctx.run.folder is None:
            raise ConfigError("the run has no folder to write stacks to; give HangDetector a folder=")
        self._folder = self._given_folder or Path(ctx.run.folder or "", "hangs")

    def on_checkpoint_load_end(self, ctx: Context) -> None:
        """In a new run, discard the learned step times, because this object may have measured them in an earlier run."""
        if ctx.checkpoint is None:
            self._learned.clear()

    def on_train_start(self, ctx: Context) -> None:
        """Start the background thread that detects hangs."""
        self._end()
        self._run = ctx.run
        self._rank, self._state, self._pausing_until = ctx.run.rank, ctx.state, ctx.state.timestamp.batch + 1
        self._beat = time.monotonic()
        thread = threading.current_thread()
        if self._action == "raise" and _INTERRUPT_SIGNAL is not None and thread is threading.main_thread():
            self._previous = signal.signal(_INTERRUPT_SIGNAL, self._raise)
        self._is_over = threading.Event()
        watch = threading.Thread(target=self._watch, args=(self._is_over, thread), name="callsheet-hangs", daemon=True)
        watch.start()

    def on_eval_step_end(self, ctx: Context) -> None:
        """Record progress outside training steps, such as the end of an evaluation step or of a save."""
        self._beat = time.monotonic()
        self._pausing_until = ctx.state.timestamp.batch + 1

    on_epoch_start = on_eval_all_start = on_eval_all_end = on_eval_step_end
    on_checkpoint_save_start = on_checkpoint_save_end = on_eval_step_end

    def on_train_end(self, ctx: Context) -> None:
        """Stop the background thread that detects hangs."""
        self._end()

    on_exception = on_run_end = on_train_end

    def state_dict(self) -> Mapping[str, Any]:
        return {"learned": list(self._learned)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._learned.clear()
        self._learned.extend(state["learned"])

    def _end(self) -> None:
        if self._is_over is not None:
            self._is_over.set()
            self._is_over = None
        if self._previous is not None and _INTERRUPT_SIGNAL is not None:
            signal.signal(_INTERRUPT_SIGNAL, self._previous)
            self._previous = None

    # --- code that runs in the background thread ---

    def _watch(self, is_over: threading.Event, trained: threading.Thread) -> None:
        pause = min(1.0, self._min_seconds / 10)
        looked, steps, beat = time.monotonic(), self._state.timestamp.batch, self._beat
        reported: float | None = None  # time of the last progress before the logged hang; None if no hang is going on
        while not is_over.wait(pause):
            now, seen_steps = time.monotonic(), self._state.timestamp.batch
            # If this check runs much later than planned, the process or the machine was suspended, so the run does not hang.
            if now - looked > 5 * pause + 1:
                self._beat = now
            elif seen_steps > steps:
                if steps >= self._pausing_until:
                    self._learned.append((now - beat) / (seen_steps - steps))
                self._beat = now
            looked, steps, beat = now, seen_steps, self._beat
            if reported is not None and beat != reported:
                _call_with_timeout(
                    _ACTION_SECONDS,
                    logger.warning,
                    "%s: rank %d continues after %.3g s",
                    label_of(self),
                    self._rank,
                    beat - reported,
                )
                reported = None
            if reported is None and now - beat > self._limit():
                reported = beat
                self._hangs(now - beat, trained, is_over)

    def _limit(self) -> float:
        if self._state.timestamp.batch < self._pausing_until or len(self._learned) < _MIN_SAMPLES:
            return self._pause_seconds
        return max(self._min_seconds, self._factor * statistics.median(self._learned))

    def _hangs(self, silent: float, trained: threading.Thread, is_over: threading.Event) -> None:
        self._hung_after = self._state.timestamp.batch
        step = self._hung_after + 1
        path = self._folder / f"rank{self._rank}-step{step}.txt"
        what = f"rank {self._rank} has made no progress for {silent:.3g} s, around step {step}"
        written = ["cannot be written: the disk does not answer"]

        def write() -> None:
            if self._run is not None and not self._run.may_write(path):
                written.append("is not written: another process has taken over the run's folder")
                return
            try:
                self._write(path, what)
                written.append(f"is in {path}")
            except Exception as error:  # an error such as a full disk must not prevent `action`
                written.append(f"cannot be written: {error}")

        def report() -> None:
            logger.error("%s: %s; a file with the stacks of its threads %s", label_of(self), what, written[-1])

        _call_with_timeout(_ACTION_SECONDS, write)
        _call_with_timeout(_ACTION_SECONDS, report)
        if self._action == "warn":
            return
        is_over.wait(_OTHER_RANKS_SECONDS)
        if self._state.timestamp.batch != self._hung_after:  # a step has ended in the meantime, so the run no longer hangs
            return
        if self._action == "kill":
            _call_with_timeout(_ACTION_SECONDS, logging.shutdown)
            os._exit(self._exit_code)
        if trained.ident is not None and not is_over.is_set():
            if self._previous is not None and _INTERRUPT_SIGNAL is not None:
                # Prefer a signal: unlike the asynchronous exception below, it also interrupts a sleep or a read.
                signal.pthread_kill(trained.ident, _INTERRUPT_SIGNAL)
            else:
                import ctypes

                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(trained.ident), ctypes.py_object(HangError))

    def _write(self, path: Path, what: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {what}\n\n")
            file.write("The main thread, the innermost call last:\n")
            traceback.print_stack(sys._current_frames().get(threading.main_thread().ident or 0), file=file)
            file.write("\nAll threads, the innermost call first:\n")
            file.flush()
            # The list of threads may be incomplete, because faulthandler writes at most 100 threads.
            faulthandler.dump_traceback(file, all_threads=True)
        if initialized_distributed() is not None:
            collectives = sys.modules["torch"]._C._distributed_c10d
            dump = getattr(collectives, "_dump_fr_trace_json", None) or getattr(collectives, "_dump_nccl_trace_json", None)
            trace = dump() if dump is not None else b""
            if b'"entries"' in trace:
                path.with_name(f"{path.stem}-collectives.json").write_bytes(trace)

    def _raise(self, number: int, frame: object) -> None:
        silent = time.monotonic() - self._beat
        # If a step has ended since the hang was detected, the run does not hang, so raise nothing.
        if silent >= self._min_seconds and self._state.timestamp.batch == self._hung_after:
            raise HangError(
                f"no step for {silent:.3g} s, around step {self._hung_after + 1} on rank {self._rank}; "
                f"the stacks of its threads are in {self._folder}"
            )


def _call_with_timeout(seconds: float, what: Callable[..., object], *arguments: object) -> None:
    """Call the function `what` in another thread and wait at most `seconds` for its end.

    If the hanging thread holds the lock of a log handler, or if the disk causes the hang, `what` hangs too.
    """
    thread = threading.Thread(target=what, args=arguments, name="callsheet-hangs-report", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the process cannot start more threads, so `what` is not called
        return
    thread.join(seconds)
