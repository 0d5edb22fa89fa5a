"""Describes the failures of ranks, which `launch` raises as a `LaunchError` in the launching process."""

from __future__ import annotations

import linecache
import re
import signal
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from callsheet.errors import CallsheetError, DistributedError, text_of

_FRAME_PATTERN = re.compile(r'^\s*File "(?P<file>.+)", line (?P<line>\d+), in ')


@dataclass(frozen=True, slots=True)
class RankFailure:
    """How one rank failed.

    Attributes:
        rank: the number of the rank.
        exitcode: the exit code of the process, negative if a signal ended it.
        error: the exception of the rank in one line; empty if the process was killed.
        traceback: the whole text of the exception; empty if the process was killed.
        at: when the rank failed, in seconds since 1970; 0 if this is not known.
    """

    rank: int
    exitcode: int
    error: str = ""
    traceback: str = ""
    at: float = 0.0
    is_of_others: bool = False
    """Whether the rank failed because it could not reach other ranks. The cause is then probably a failure of another rank."""

    @property
    def order(self) -> tuple[int, float, int]:
        """The sort key for a launch's failures, which puts the probable cause first.

        The order is: ranks that failed, ranks that could not reach others, ranks that were terminated.

        Each group is sorted by time.
        """
        was_terminated = self.exitcode in (-signal.SIGTERM, -signal.SIGINT) and not self.error
        return (2 if was_terminated else 1 if self.is_of_others else 0, self.at, self.rank)

    def __str__(self) -> str:
        if self.error:
            return self.error
        if self.exitcode < 0:
            try:
                return f"killed by {signal.Signals(-self.exitcode).name}"
            except ValueError:
                return f"killed by signal {-self.exitcode}"
        return f"exited with code {self.exitcode}{'' if self.exitcode else ' without a result'}"


class LaunchError(CallsheetError, RuntimeError):
    """A launch failed on at least one rank.

    The message begins with the rank that failed first; `failures` holds the failures of all ranks, the first one first.

    Args:
        failures: the failures of the ranks, in any order.
        world_size: the number of ranks that were started.
    """

    def __init__(self, failures: Iterable[RankFailure], world_size: int) -> None:
        self.failures = tuple(sorted(failures, key=lambda failure: failure.order))
        first, *others = self.failures
        lines = [f"rank {first.rank} of {world_size} failed first: {first}"]
        lines += [f"\nrank {first.rank}:\n{first.traceback}"] if first.traceback else []
        for failure in others:
            lines.append(f"\nrank {failure.rank}, later: {failure}" + (f"\n{failure.traceback}" if failure.traceback else ""))
        super().__init__("\n".join(lines))


def report_of(error: BaseException) -> dict[str, Any]:
    """Return a description of `error` as plain data. A worker sends the description to the process that called `launch`."""
    # Import `names` only here, because the package `callsheet.transport` imports safetensors.
    from callsheet.transport.names import MAIN_MODULE, name_of, with_script_names

    # Leave out the first frame, which is in callsheet's worker and not in the user's code.
    frames = error.__traceback__.tb_next if error.__traceback__ is not None else None
    kind = name_of(type(error)).removeprefix(f"{MAIN_MODULE}.")
    message = next((line.strip() for line in text_of(error).splitlines() if line.strip()), "")
    return {
        "error": with_script_names(f"{kind}: {message}" if message else kind),
        "traceback": with_script_names("".join(traceback.format_exception(type(error), error, frames))),
        "at": time.time(),
        "is_of_others": any(_is_of_others(each) for each in _chain(error)),
    }


def failure_of(rank: int, exitcode: int, report: dict[str, Any]) -> RankFailure:
    """Return the `RankFailure` for the data that a worker made with `report_of`.

    Source lines of code that was defined in a notebook are added.
    """
    return RankFailure(
        rank, exitcode, report["error"], _with_source(report["traceback"]), float(report["at"]), bool(report["is_of_others"])
    )


def _chain(error: BaseException | None) -> Iterable[BaseException]:
    met = set()
    while error is not None and id(error) not in met:
        met.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _is_of_others(error: BaseException) -> bool:
    from torch.distributed import DistError

    from callsheet.run.process_groups import LockLostElsewhere

    return isinstance(error, DistributedError | DistError | LockLostElsewhere) or "Connection closed by peer" in text_of(error)


def _with_source(text: str) -> str:
    """Add missing source lines to a traceback. A worker cannot read the source of some code, such as code of a notebook."""
    lines = text.splitlines()
    found = []
    for line, after in zip(lines, [*lines[1:], ""], strict=True):
        found.append(line)
        frame = _FRAME_PATTERN.match(line)
        if frame and not after.startswith("    "):
            source = linecache.getline(frame["file"], int(frame["line"])).strip()
            found += [f"    {source}"] if source else []
    return "\n".join(found)
