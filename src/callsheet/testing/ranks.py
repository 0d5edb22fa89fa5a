"""Runs several ranks on one machine, as real processes over gloo, to test distributed code."""

from __future__ import annotations

import multiprocessing
import os
import queue
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # missing in torch's annotations

_PRELOADED_MODULES = ["torch", "torch.distributed", "torch._dynamo", "callsheet.trainer"]


@dataclass(frozen=True, slots=True)
class RankEnd:
    """How the process of one rank ended.

    Attributes:
        rank: the number of the rank.
        value: what the function returned; None if it raised an error or the process was killed.
        error: the traceback, if the function raised an error; otherwise empty.
        exitcode: the exit code of the process, negative if a signal ended it. None: the process still runs.
    """

    rank: int
    value: Any = None
    error: str = ""
    exitcode: int | None = None


class RanksFailed(AssertionError):
    """Raised if a rank raised an error, was killed, or did not end in time. The message contains the tracebacks."""


class RankProcesses:
    """Starts a function in several processes, each of which is one rank.

    These processes get the environment of the starting process and the variables that torchrun adds.

    The starting process hosts the rendezvous store, so the store remains when a rank ends. Leaving the `with` block kills ranks
    that still run.

    Args:
        function: called in each process. It is imported by its name, so it must be defined at the top of a module. Its result is
            pickled.
        world_size: the number of ranks.
        arguments: the arguments of the function, which are pickled.

    Examples:
        >>> import os
        >>> with RankProcesses(os.getpid, 2) as ranks:
        ...     ends = ranks.wait(60)
        >>> len({end.value for end in ends})
        2
    """

    def __init__(self, function: Callable[..., Any], world_size: int, *arguments: Any) -> None:
        # Fork the ranks from a server process that has already imported torch. It has no threads, so forking it is safe.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED_MODULES)
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._ends = context.Queue()
        self.processes = [
            context.Process(target=_run, args=(function, arguments, _environment(rank, world_size, self._store.port), self._ends))
            for rank in range(world_size)
        ]
        for process in self.processes:
            process.start()

    def kill(self, rank: int) -> None:
        """Kill the process of a rank with SIGKILL.

        Args:
            rank: the number of the rank.
        """
        self.processes[rank].kill()

    def wait(self, timeout: float) -> list[RankEnd]:
        """Wait until all ranks have ended.

        Args:
            timeout: how many seconds to wait at most.

        Returns:
            How each rank ended, in the order of ranks. A rank that still runs has no exit code.
        """
        deadline = time.monotonic() + timeout
        found: dict[int, RankEnd] = {}
        while len(found) < len(self.processes) and time.monotonic() < deadline:
            is_over = all(process.exitcode is not None for process in self.processes)
            try:
                end = self._ends.get(timeout=0.05)
                found[end.rank] = end
            except queue.Empty:
                if is_over:
                    break
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        ends = [found.get(rank, RankEnd(rank)) for rank in range(len(self.processes))]
        return [RankEnd(end.rank, end.value, end.error, self.processes[end.rank].exitcode) for end in ends]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None) -> None:
        for process in self.processes:
            if process.exitcode is None:
                process.kill()
            process.join()


def run_ranks(function: Callable[..., Any], world_size: int, *arguments: Any, timeout: float = 120.0) -> list[Any]:
    """Run a function on several ranks and return the results; see `RankProcesses`.

    Args:
        function: called in the process of each rank; it must be defined at the top of a module.
        world_size: the number of ranks.
        arguments: the arguments of the function, which are pickled.
        timeout: how many seconds to wait before the ranks are killed.

    Returns:
        What the function returned on each rank, in the order of ranks.

    Raises:
        RanksFailed: a rank raised, was killed, or was still running after `timeout` seconds.
    """
    with RankProcesses(function, world_size, *arguments) as ranks:
        ends = ranks.wait(timeout)
    if any(end.error or end.exitcode != 0 for end in ends):
        failures = [
            f"rank {end.rank}: {end.error or f'exit code {end.exitcode}'}" for end in ends if end.error or end.exitcode != 0
        ]
        raise RanksFailed("\n".join(failures))
    return [end.value for end in ends]


def _environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    return {
        **os.environ,  # copy the environment of this process, because the fork server has an older one
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        # With this variable, rank 0 does not start a rendezvous store, but uses the store of the process that started the ranks.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def _run(function: Callable[..., Any], arguments: tuple[Any, ...], environment: dict[str, str], ends: Any) -> None:
    os.environ.clear()
    os.environ.update(environment)
    multiprocessing.set_start_method("fork", force=True)  # let a DataLoader fork its workers, as in an ordinary program
    torch.set_num_threads(1)
    rank = int(environment["RANK"])
    try:
        ends.put(RankEnd(rank, value=function(*arguments)))
    except BaseException:  # catch SystemExit too, because the process that started the ranks reports every error
        ends.put(RankEnd(rank, error=traceback.format_exc()))
        raise SystemExit(1) from None
