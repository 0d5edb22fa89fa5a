"""The ranks that write or read one checkpoint. An error on one rank is raised on all ranks, with the reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import distributed
from torch.distributed import ProcessGroup

from callsheet.errors import CheckpointError

T = TypeVar("T")
R = TypeVar("R")


class RankLost(CheckpointError):
    """A rank died, or did not answer within the group's timeout. The other ranks may have stopped at different operations."""


@dataclass(frozen=True, slots=True)
class _Failed:
    """What `RankGroup.exchange` sends if ranks have failed: the reason for each failed rank."""

    reasons: dict[int, str]

    def __str__(self) -> str:
        by_reason: dict[str, list[str]] = {}
        for rank, reason in sorted(self.reasons.items()):
            by_reason.setdefault(reason, []).append(str(rank))
        return "; ".join(
            f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(ranks)}: {reason}" for reason, ranks in by_reason.items()
        )


class RankGroup:
    """The ranks that write or read a checkpoint: those of a gloo process group, or this process alone if the group is None.

    Its methods are collectives: every rank must call them, in the same order.
    """

    def __init__(self, group: ProcessGroup | None) -> None:
        self._group = group
        self.rank = 0 if group is None else distributed.get_rank(group)
        self.size = 1 if group is None else distributed.get_world_size(group)

    def exchange(self, act: Callable[[], T], answer: Callable[[list[T]], list[R]]) -> R:
        """Run `act` on all ranks. On rank 0, call `answer` with the list of results. Return this rank's item of the answer.

        `answer` returns a list with one item for each rank.

        Results and answers are sent as pickles.

        Raises `CheckpointError` on all ranks if `act` raises on any rank or `answer` raises on rank 0, and `RankLost` if a rank
        is lost.
        """
        mine, error = _attempt(act)
        gathered = self._gather(_Failed({self.rank: _reason(error)}) if error is not None else mine)
        replies: list[Any] = []
        if self.rank == 0:
            failed = {rank: reason for given in gathered if isinstance(given, _Failed) for rank, reason in given.reasons.items()}
            if not failed:
                found, error = _attempt(lambda: answer(gathered))
                replies, failed = found or [], {0: _reason(error)} if error is not None else {}
            if failed:
                replies = [_Failed(failed)] * self.size
        reply = self._scatter(replies)
        if isinstance(reply, _Failed):
            is_complete = self.size == 1 and isinstance(error, CheckpointError)
            if error is not None and (is_complete or not isinstance(error, Exception)):
                raise error
            raise CheckpointError(str(reply) if self.size > 1 else reply.reasons[0]) from error
        answered: R = reply
        return answered

    def together(self, act: Callable[[], T]) -> T:
        """Run `act` on all ranks. Return this rank's result once all ranks have succeeded."""
        given: list[T] = []
        self.exchange(lambda: given.append(act()), lambda done: done)
        return given[0]

    def all(self, value: bool) -> bool:
        """Return whether `value` is true on all ranks. The ranks find out by one all-reduce."""
        if self._group is None:
            return value
        flag = torch.tensor(int(value))
        try:
            distributed.all_reduce(flag, distributed.ReduceOp.MIN, group=self._group)
        except RuntimeError as error:
            raise self._as_rank_lost(error) from error
        return bool(flag)

    def _gather(self, mine: Any) -> list[Any]:
        if self.size == 1:
            return [mine]
        gathered = [None] * self.size if self.rank == 0 else None
        try:
            distributed.gather_object(mine, gathered, group=self._group, group_dst=0)
        except RuntimeError as error:
            raise self._as_rank_lost(error) from error
        return gathered or []

    def _scatter(self, replies: list[Any]) -> Any:
        if self.size == 1:
            return replies[0]
        reply = [None]
        try:
            distributed.scatter_object_list(reply, replies if self.rank == 0 else None, group=self._group, group_src=0)
        except RuntimeError as error:
            raise self._as_rank_lost(error) from error
        return reply[0]

    def _as_rank_lost(self, error: RuntimeError) -> RankLost:
        first = (str(error).splitlines() or [""])[0]
        return RankLost(f"rank {self.rank} lost the other ranks of the checkpoint; has one of them died? ({first})")


def _attempt(act: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    try:
        return act(), None
    except BaseException as error:  # catches KeyboardInterrupt too, because the other ranks are waiting
        return None, error


def _reason(error: BaseException) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
