"""When no step comes any more: who stands where, and what to do."""

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
from typing import Any

from callsheet.callback import Callback, label_of, one_of
from callsheet.context import Context, TrainState
from callsheet.distributed import initialised_distributed
from callsheet.errors import ConfigError, HangError

logger = logging.getLogger("callsheet")

ACTIONS = ("warn", "raise", "kill")
_SIGNAL = signal.SIGRTMAX - 3 if sys.platform == "linux" else None  # nobody else's; it wakes the training thread
_LEARNED = 3  # looks that saw steps, before they are believed
_PATIENCE = 10.0  # seconds for writing, and as many for logging, before something is done all the same
_OTHERS_LOOK = 2.0  # seconds, in which every rank has looked, and has written where it stands


class HangDetector(Callback):
    """When no step comes for much longer than one takes, write down where every thread of every rank stands, and act.

    A thread of its own looks at when the last step ended, every second at most, and learns how long steps take; that goes on
    across a resume. The steps themselves do nothing for it. After `factor` times the learned step time, and `min_seconds` at least,
    each rank writes `hangs/rank<rank>-step<step>.txt` in the run's folder, the stacks of all its threads, and, where torch
    records its collectives (`TORCH_FR_BUFFER_SIZE` above 0), `hangs/rank<rank>-step<step>-collectives.json`, which torch's
    `torchfrtrace` reads. It is logged as an error. Then:

    - `warn` logs again, if it goes on after all, for how long it stood.
    - `raise` raises `HangError` in the training thread. What waits inside a collective or a kernel does not hear it.
    - `kill` ends the process, without any clean-up, with `exit_code`: a launcher starts it again.

    `raise` and `kill` give the other ranks two seconds to write as well, since the end of one may take them out of where they hang;
    and do nothing where a step was made in that time.

    Steps of evaluation, and saves, are life too; they, the steps before there is something learned, and the first after the
    start, an epoch's start, an evaluation or a save may take `pause_seconds`. Where C code holds Python's interpreter lock for
    ever, nothing can look.

    Args:
        factor: see above, like the others.
        min_seconds: see above.
        pause_seconds: see above.
        action: `warn`, `raise` or `kill`.
        exit_code: of a killed process.
        folder: where to write, if not to the run's folder.

    Raises:
        ConfigError: an argument that cannot work, or a run without a folder where none was given.
    """

    def __init__(
        self,
        *,
        factor: float = 10.0,
        min_seconds: float = 60.0,
        pause_seconds: float = 1800.0,
        action: str = "warn",
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
        self._learned: deque[float] = deque(maxlen=50)  # seconds a step, one a look
        self._rank = 0
        self._state = TrainState()  # the run's, whose timestamp counts the steps
        self._beat = 0.0  # the last sign of life: between steps, or the look that saw a step
        self._hung_after = 0  # the last step before a hang
        self._pausing_until = 0  # the step from which on there is no excuse
        self._is_over: threading.Event | None = None
        self._previous: Any = None  # the signal's handler

    def on_run_start(self, ctx: Context) -> None:
        """There must be somewhere to write to."""
        if self._given_folder is None and ctx.run.folder is None:
            raise ConfigError("the run has no folder to write stacks to; give HangDetector a folder=")
        self._folder = self._given_folder or Path(ctx.run.folder or "", "hangs")

    def on_checkpoint_load_end(self, ctx: Context) -> None:
        """A new run has new steps."""
        if ctx.checkpoint is None:
            self._learned.clear()

    def on_train_start(self, ctx: Context) -> None:
        """Begin to look."""
        self._end()
        self._rank, self._state, self._pausing_until = ctx.run.rank, ctx.state, ctx.state.timestamp.batch + 1
        self._beat = time.monotonic()
        thread = threading.current_thread()
        if self._action == "raise" and _SIGNAL is not None and thread is threading.main_thread():
            self._previous = signal.signal(_SIGNAL, self._raise)
        self._is_over = threading.Event()
        watch = threading.Thread(target=self._watch, args=(self._is_over, thread), name="callsheet-hangs", daemon=True)
        watch.start()

    def on_eval_step_end(self, ctx: Context) -> None:
        """A sign of life, of something that takes its own time."""
        self._beat = time.monotonic()
        self._pausing_until = ctx.state.timestamp.batch + 1

    on_epoch_start = on_eval_all_start = on_eval_all_end = on_eval_step_end
    on_checkpoint_save_start = on_checkpoint_save_end = on_eval_step_end

    def on_train_end(self, ctx: Context) -> None:
        """Nothing is waited for any more."""
        self._end()

    on_exception = on_run_end = on_train_end

    def state_dict(self) -> Mapping[str, Any]:
        """How long steps take."""
        return {"learned": list(self._learned)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self._learned.clear()
        self._learned.extend(state["learned"])

    def _end(self) -> None:
        if self._is_over is not None:
            self._is_over.set()
            self._is_over = None
        if self._previous is not None and _SIGNAL is not None:
            signal.signal(_SIGNAL, self._previous)
            self._previous = None

    # --- on the thread ---

    def _watch(self, is_over: threading.Event, trained: threading.Thread) -> None:
        pause = min(1.0, self._min_seconds / 10)
        looked, steps, beat = time.monotonic(), self._state.timestamp.batch, self._beat
        told: float | None = None  # the last sign of life before the hang that was told of
        while not is_over.wait(pause):
            now, seen_steps = time.monotonic(), self._state.timestamp.batch
            if now - looked > 5 * pause + 1:  # the whole process stood still, or the machine slept
                self._beat = now
            elif seen_steps > steps:
                if steps >= self._pausing_until:
                    self._learned.append((now - beat) / (seen_steps - steps))
                self._beat = now
            looked, steps, beat = now, seen_steps, self._beat
            if told is not None and beat != told:
                _within(_PATIENCE, logger.warning, "%s: rank %d goes on, after %.3g s", label_of(self), self._rank, beat - told)
                told = None
            if told is None and now - beat > self._limit():
                told = beat
                self._hangs(now - beat, trained, is_over)

    def _limit(self) -> float:
        if self._state.timestamp.batch < self._pausing_until or len(self._learned) < _LEARNED:
            return self._pause_seconds
        return max(self._min_seconds, self._factor * statistics.median(self._learned))

    def _hangs(self, silent: float, trained: threading.Thread, is_over: threading.Event) -> None:
        self._hung_after = self._state.timestamp.batch
        step = self._hung_after + 1
        path = self._folder / f"rank{self._rank}-step{step}.txt"
        what = f"rank {self._rank} has had no sign of life for {silent:.3g} s, around step {step}"
        written = ["cannot be written: the disk does not answer"]

        def write() -> None:
            try:
                self._write(path, what)
                written.append(f"is in {path}")
            except Exception as error:  # a full disk must not keep us from acting
                written.append(f"cannot be written: {error}")

        def tell() -> None:
            logger.error("%s: %s; where its threads stand %s", label_of(self), what, written[-1])

        _within(_PATIENCE, write)
        _within(_PATIENCE, tell)
        if self._action == "warn":
            return
        is_over.wait(_OTHERS_LOOK)
        if self._state.timestamp.batch != self._hung_after:  # it went on after all
            return
        if self._action == "kill":
            _within(_PATIENCE, logging.shutdown)
            os._exit(self._exit_code)
        if trained.ident is not None and not is_over.is_set():
            if self._previous is not None and _SIGNAL is not None:
                signal.pthread_kill(trained.ident, _SIGNAL)  # which also ends a sleep or a read
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
            faulthandler.dump_traceback(file, all_threads=True)  # the first hundred of them
        if initialised_distributed() is not None:
            collectives = sys.modules["torch"]._C._distributed_c10d
            dump = getattr(collectives, "_dump_fr_trace_json", None) or getattr(collectives, "_dump_nccl_trace_json", None)
            trace = dump() if dump is not None else b""
            if b'"entries"' in trace:
                path.with_name(f"{path.stem}-collectives.json").write_bytes(trace)

    def _raise(self, number: int, frame: object) -> None:
        silent = time.monotonic() - self._beat
        if silent >= self._min_seconds and self._state.timestamp.batch == self._hung_after:  # else it went on in this very moment
            raise HangError(
                f"no step for {silent:.3g} s, around step {self._hung_after + 1} on rank {self._rank}; "
                f"where its threads stood is in {self._folder}"
            )


def _within(seconds: float, what: Callable[..., object], *arguments: object) -> None:
    """Do it on a thread of its own, and wait for so long at most: what hangs may hold a log handler's lock, or be the disk."""
    thread = threading.Thread(target=what, args=arguments, name="callsheet-hangs-word", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the process may have no more threads; acting comes first
        return
    thread.join(seconds)
