"""`launch`: calls a function on several ranks of this machine, from a script or a notebook."""

from __future__ import annotations

import inspect
import math
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, overload
from uuid import uuid4

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch does not declare this export
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.api import LogsDest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from callsheet.core.callback import Callback
from callsheet.errors import ConfigError
from callsheet.launcher.failures import LaunchError, RankFailure, failure_of, report_of
from callsheet.launcher.recipe_job import Launchable, job_of
from callsheet.launcher.worker import PID_FILE_PREFIX, result_name
from callsheet.run.signals import GRACE_SECONDS
from callsheet.transport import payload
from callsheet.transport.data import decode
from callsheet.transport.payload import KEY_VARIABLE, PAYLOAD_VARIABLE, pack
from callsheet.transport.preflight import command
from callsheet.transport.sealed import Key, TransportError, read_private, unseal

_HANDLED_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")


@overload
def launch(
    fn: str | os.PathLike[str] | Launchable,
    *,
    callbacks: Iterable[Callback] = (),
    overrides: Sequence[str] = (),
    nproc_per_node: int = 2,
    nnodes: int = 1,
    allow_pickle: bool = False,
    prefix: bool = False,
    max_restarts: int = 0,
    grace_seconds: float = GRACE_SECONDS,
) -> dict[str, float]: ...
@overload
def launch(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    *,
    callbacks: Iterable[Callback] = (),
    nproc_per_node: int = 2,
    nnodes: int = 1,
    allow_pickle: bool = False,
    prefix: bool = False,
    max_restarts: int = 0,
    grace_seconds: float = GRACE_SECONDS,
) -> list[Any]: ...
def launch(
    fn: Callable[..., Any] | str | os.PathLike[str] | Launchable,
    args: Sequence[Any] = (),
    *,
    callbacks: Iterable[Callback] = (),
    overrides: Sequence[str] = (),
    nproc_per_node: int = 2,
    nnodes: int = 1,
    allow_pickle: bool = False,
    prefix: bool = False,
    max_restarts: int = 0,
    grace_seconds: float = GRACE_SECONDS,
) -> list[Any] | dict[str, float]:
    """Call `fn(*args, callbacks=callbacks)` on each of several ranks of this machine, and return the results by rank.

    Or run a recipe on these ranks, and return its results.

    Torch's elastic launcher starts the ranks, with the environment that torchrun would give them. Before the ranks start, the
    arguments and callbacks are rebuilt once in a fresh interpreter and compared with the originals. A signal to this process,
    including Ctrl-C, is forwarded to the ranks once. They have `grace_seconds` to save and end; after that, the signal has its
    usual effect in this process. No process or file is left behind.

    Args:
        fn: a function at the top level of a module or of the script; with `allow_pickle` also one from a notebook. The callbacks
            are passed to it if it has the parameter `callbacks`. Or a recipe: its file, the name of a shipped one, or a `Recipe`
            that is not set up yet. The recipe is checked in this process, and each rank makes the recipe's callbacks and loggers
            from the resolved configuration.
        args: the arguments of `fn`: plain data, tensors, callbacks, functions and classes with an import path.
        callbacks: callbacks that are rebuilt on each rank; those of a recipe come before them.
        overrides: values that override those of a recipe's file, as on the command line: `["--max_duration", "9ba"]`.
        nproc_per_node: the number of ranks.
        nnodes: must be 1; several machines need a launcher on each.
        allow_pickle: whether to send objects that are not data (lambdas, closures, definitions in a notebook) as signed
            cloudpickle; this includes results.
        prefix: whether to begin each line that a rank prints with `[rank]`.
        max_restarts: how often to restart all ranks after one has failed. The ranks get the same callbacks again, so `fn` must
            resume by itself.
        grace_seconds: the time between a signal that is forwarded to the ranks and SIGKILL.

    Returns:
        For a function: what it returned on each rank, as a list in the order of ranks. For a recipe: its results by name.

    Raises:
        ConfigError: an argument is invalid.
        TransportError: something cannot be sent; the message names it and says what to do.
        LaunchError: a rank failed; the message begins with the traceback of the first one.
        SystemExit: a signal ended the ranks, and its usual effect did not end this process.
        MissingPackage: `allow_pickle` is set, and cloudpickle is not installed.

    Examples:
        ```python
        def train(lr, callbacks):
            with Trainer(..., callbacks=callbacks) as trainer:
                trainer.fit()
            return trainer.ctx.state.timestamp.batch

        if __name__ == "__main__":
            steps = callsheet.launch(train, (0.1,), callbacks=[Plateau(patience=5)], nproc_per_node=4)
            results = callsheet.launch("pretrain", overrides=["--max_duration", "30s"], nproc_per_node=4)
        ```
    """
    _check(nproc_per_node, nnodes, max_restarts, grace_seconds)
    callbacks = list(callbacks)
    is_recipe = isinstance(fn, (str, os.PathLike, Launchable))
    if isinstance(fn, (str, os.PathLike, Launchable)):
        if args:
            raise ConfigError("args: a recipe takes no args; give overrides, such as ['--max_duration', '9ba']")
        fn, args, callbacks = job_of(fn, overrides, callbacks)
    elif overrides:
        raise ConfigError("overrides: they apply to a recipe's file; give a function its args")
    call = {
        "function": fn,
        "arguments": list(args),
        "takes_callbacks": _takes_callbacks(fn, args, callbacks),
        "allow_pickle": allow_pickle,
        "grace_seconds": float(grace_seconds),
    }
    sent = pack(callbacks, allow_pickle=allow_pickle, extra=call)
    stopped: signal.Signals | None = None
    with sent.post() as variables, _preserve_signal_handlers():
        specs = _Specs(Path(variables[PAYLOAD_VARIABLE]).parent, variables, prefix=prefix)
        config = _config(specs, nproc_per_node, max_restarts=max_restarts, grace=grace_seconds)
        python, *arguments = command("callsheet.launcher.worker")
        failed: Mapping[int, ProcessFailure] = {}
        try:
            elastic_launch(config, python)(*arguments)
        except SignalException as error:
            stopped = error.sigval
        except ChildFailedError as error:
            failed = error.failures
        finally:
            _kill_remaining_workers(specs.folder)
        results, failures = _collect_results(
            specs, Key.read(variables[KEY_VARIABLE]), range(0 if stopped else nproc_per_node), failed
        )
    if stopped is not None:
        signal.raise_signal(stopped)  # raise the signal again, for the handler that was set before `launch()`
        raise SystemExit(128 + stopped)
    if failures:
        raise LaunchError(failures, nproc_per_node)
    if is_recipe:
        of_rank_zero: dict[str, float] = results[0]
        return of_rank_zero
    return results


class _Specs(DefaultLogsSpecs):
    """Tells torch's elastic launcher where to write the workers' output, and which environment variables each rank gets."""

    def __init__(self, folder: Path, variables: Mapping[str, str], *, prefix: bool) -> None:
        super().__init__(str(folder / "logs"), tee=Std.ALL if prefix else Std.NONE)
        self.folder = folder
        self.attempt = 0
        self._store: TCPStore | None = None
        self._variables = dict(variables)
        if prefix:
            self._variables["PYTHONUNBUFFERED"] = "1"  # do not buffer the workers' output, so that each line is printed at once

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Set the environment variables of the ranks. torch calls this method before each attempt to start the ranks.

        Each attempt has its own store (`TCPStore`). Torch's launcher would give all attempts the same store, which contains the
        addresses of dead ranks. New ranks would then fail to connect if the function makes a process group itself.
        """
        found = super().reify(envs)
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for environment in envs.values():
            self.attempt = int(environment["TORCHELASTIC_RESTART_COUNT"])
            if len(envs) > 1:
                # If there are several ranks, each uses one thread by default, as with torchrun.
                environment.setdefault("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1"))
            environment.update(self._variables, MASTER_PORT=str(self._store.port))
        return found


def _config(specs: _Specs, ranks: int, *, max_restarts: int, grace: float) -> LaunchConfig:
    # Do not handle a signal that this process ignores, for example under nohup.
    handled = [name for name in _HANDLED_SIGNALS if signal.getsignal(signal.Signals[name]) is not signal.SIG_IGN]
    newer = {"shutdown_timeout": math.ceil(grace), "signals_to_handle": ",".join(handled)}
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid4().hex,
        role="rank",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=max_restarts,
        monitor_interval=0.1,
        logs_specs=specs,
        log_line_prefix_template="[${rank}] ",
        **{name: value for name, value in newer.items() if name in {field.name for field in fields(LaunchConfig)}},  # type: ignore[arg-type]
    )


def _collect_results(
    specs: _Specs, key: Key, ranks: Iterable[int], failed: Mapping[int, ProcessFailure]
) -> tuple[list[Any], list[RankFailure]]:
    """Return the results that the ranks wrote to files, and the failures of the ranks that wrote no result."""
    results, failures = [], []
    for rank in ranks:
        path = specs.folder / result_name(rank, specs.attempt)
        how = failed.get(rank)
        answer: dict[str, Any] = {"rank": rank}
        if path.exists():
            try:
                answer = decode(unseal(key, "result", read_private(path), str(path)))
            except TransportError as error:  # report it together with the failures of the other ranks
                answer["report"] = report_of(error)
        if answer["rank"] == rank and "result" in answer and how is None:
            results.append(answer["result"])
        elif "report" in answer:
            failures.append(failure_of(rank, how.exitcode if how else 1, answer["report"]))
        elif how is not None or not failed:
            failures.append(RankFailure(rank, how.exitcode if how else 0, at=float(how.timestamp) if how else 0.0))
    return results, failures


def _kill_remaining_workers(folder: Path) -> None:
    """Kill workers that torch's launcher has lost track of, because a signal came while the launcher started or ended them."""
    for file in folder.glob(f"{PID_FILE_PREFIX}*"):
        pid = int(file.name.removeprefix(PID_FILE_PREFIX))
        with suppress(ChildProcessError, ProcessLookupError):  # ignore a worker that has ended: its process id may be reused
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                os.killpg(pid, signal.SIGKILL)


@contextmanager
def _preserve_signal_handlers() -> Iterator[None]:
    """At the end of the `with` block, restore the signal handlers that this process had before the block.

    Torch's launcher does not restore the handlers, so its own handlers would stay in a notebook.
    """
    variable = "TORCHELASTIC_SIGNALS_TO_HANDLE"
    is_main, variable_before = threading.current_thread() is threading.main_thread(), os.environ.get(variable)
    earlier = {signal.Signals[name]: signal.getsignal(signal.Signals[name]) for name in _HANDLED_SIGNALS} if is_main else {}
    try:
        yield
    finally:
        for number, handler in earlier.items():
            if handler is not None:  # None means that C code set the handler, so Python cannot restore it
                signal.signal(number, handler)
        if variable_before is None:
            os.environ.pop(variable, None)
        else:
            os.environ[variable] = variable_before


def _check(ranks: int, machines: int, restarts: int, grace: float) -> None:
    for name, number, least in (("nproc_per_node", ranks, 1), ("nnodes", machines, 1), ("max_restarts", restarts, 0)):
        if isinstance(number, bool) or not isinstance(number, int) or number < least:
            raise ConfigError(f"{name}={number!r}: give a whole number, at least {least}")
    if machines > 1:
        raise ConfigError(
            f"nnodes={machines}: launch() starts ranks on this machine only. On several machines, start the script with torchrun on each, "
            "and send callbacks with callsheet.transport, or create them in the script"
        )
    if not isinstance(grace, int | float) or not 0 < grace < math.inf:
        raise ConfigError(f"grace_seconds={grace!r}: give seconds above zero")
    if payload.is_sent:
        raise ConfigError(
            "launch() was called in a process that launch() started, while it imports the script: put the call under "
            "`if __name__ == '__main__'`, not in code that the ranks run"
        )
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise ConfigError(
            "launch() was called in a process that torchrun started; start the script with python, or leave launch() out"
        )


def _takes_callbacks(fn: Callable[..., Any], args: Sequence[Any], callbacks: list[Callback]) -> bool:
    """Return whether `fn` has a parameter `callbacks`. Raise ConfigError if `fn` cannot be called with these arguments."""
    if not callable(fn):
        raise ConfigError(f"launch() needs a function or a recipe, and {fn!r} is neither")
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # a function that is implemented in C may have no signature
        return bool(callbacks)
    takes = any(name == "callbacks" or each.kind is each.VAR_KEYWORD for name, each in signature.parameters.items())
    name = getattr(fn, "__qualname__", repr(fn))
    if callbacks and not takes:
        raise ConfigError(f"{name}{signature} does not take callbacks; add the parameter `callbacks`")
    try:
        signature.bind(*args, **({"callbacks": callbacks} if takes else {}))
    except TypeError as error:
        given = f"{len(args)} argument{'' if len(args) == 1 else 's'}{' and callbacks' if takes else ''}"
        raise ConfigError(f"{name}{signature} cannot be called with {given}: {error}") from None
    return takes
