"""The run's process groups, and small collectives with which the ranks exchange values."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import sys
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, distributed

from callsheet.core.ranks import Ranks, initialized_distributed
from callsheet.errors import CallsheetError, DistributedError, HostError, RunLockLostError
from callsheet.run.rank_notes import (
    CUT_OFF,
    FAILED,
    GAVE_UP,
    LEFT,
    LOOK_SECONDS,
    LOST_LOCK,
    TIMED_OUT,
    RankNotes,
    RankPresence,
)
from callsheet.run.reasons import error_line
from callsheet.run.store import attempt_store, keeper_of_store, named_ranks

ANSWER_SECONDS = 5.0
"""The longest time for which a rank tries to find out which rank is at fault, after a failed collective.

The time is at most a quarter of the timeout.
"""
_BROKEN_CONNECTION_TEXTS = ("connection closed", "connection reset", "connection refused", "broken pipe")
"""Parts of torch's error messages that mean that the connection to a rank is broken."""

_SLOTS = 64
"""How many numbers each reduction sends at least. gloo ends the process if ranks send different numbers of bytes."""
_LARGEST_TAG = 1_000_000
"""The square of a tag, summed over thousands of ranks, is still exact in 64 bits."""


class LateAfterSignal(DistributedError):
    """A rank did not answer in time after a preemption signal."""


class HostGaveUp(DistributedError):
    """On another rank, callsheet could not follow the framework's loop and gave up; training continues there without callsheet."""


class LockLostElsewhere(RunLockLostError):
    """Rank 0 has lost the lock of the run's folder, so this rank ends too."""


class Pending:
    """A reduction over the ranks that runs in the background.

    Args:
        payload: the tag of the reduction, its negative and its square, and then the numbers to reduce.
        work: the running reduction; None if there is one rank.
        collective: makes a `with` block that converts errors.
        checks: raises DistributedError if the reduced tag shows that another rank has called something else.
    """

    def __init__(
        self,
        payload: Tensor,
        work: Any,
        collective: Callable[[str], AbstractContextManager[None]],
        checks: Callable[[list[float]], None] = lambda tag: None,
    ) -> None:
        self._payload = payload
        self._work = work
        self._collective = collective
        self._checks = checks

    @property
    def is_done(self) -> bool:
        """Whether `wait` would return at once, because the reduction is complete."""
        # FakeWork, which torch's fake backend for tests returns, never reports that it is completed.
        return self._work is None or bool(self._work.is_completed()) or type(self._work).__name__ == "FakeWork"

    def wait(self, deadline: Callable[[], float] | None = None) -> list[float]:
        """Wait for the result of the reduction and return the result.

        `deadline()` returns the time until which to wait, by `time.monotonic()`. It is called repeatedly while this method waits,
        and each call may return an earlier time.

        Raises:
            LateAfterSignal: the deadline has passed.
            DistributedError: the reduction failed (the message names the missing rank), or another rank has called another collective.
        """
        pause = 0.0001
        while deadline is not None and not self.is_done:
            if time.monotonic() > deadline():
                raise LateAfterSignal("some rank did not answer in time after a preemption signal")
            time.sleep(pause)  # poll, because `work.wait()` would delay Python's signal handlers
            pause = min(2 * pause, 0.005)
        work, self._work = self._work, None
        if work is not None:
            with self._collective("reduction"):
                try:
                    work.wait()
                finally:
                    del work  # as long as the `Work` object exists, it keeps the group's connections open
            self._checks(self._payload[:3].tolist())
        reduced: list[float] = self._payload[3:].tolist()
        return reduced


class ProcessGroups:
    """This rank's connection to the other ranks, through torch.distributed.

    With one rank, every call returns at once and does not use torch.distributed.

    If the program has made a process group, the run uses it and does not destroy it. Otherwise the run makes one (NCCL for CUDA
    tensors, gloo for CPU tensors) and destroys it at its end. Agreement and saving have their own gloo groups, so they never wait
    for a reduction of gradients or for each other. All methods except `rank`, `size`, `publish_failure`, `explain_failure` and
    `close` are collectives: every rank must call them, in the same order. If another rank calls another collective at the same time,
    or the same one in another function, `DistributedError` is raised on the ranks that take part.

    Args:
        ranks: this process's rank and the world size, from the launcher.
        device: the rank's own device, such as `cuda:3`.
        timeout: seconds within which a rank that does not answer is found and named. The groups made here get a shorter timeout,
            which leaves time for finding the rank.

    Raises:
        ConfigError: the environment does not contain the rendezvous address.
        DistributedError: a rank does not join in time.
    """

    def __init__(self, ranks: Ranks, device: torch.device, timeout: float) -> None:
        self.rank = ranks.rank
        self.size = ranks.world_size
        self.timeout = timeout
        self.metadata: Any = None
        """The gloo group over which the ranks exchange small values, such as requests; None if there is one rank."""
        self.saving: Any = None
        """The gloo group over which the ranks save checkpoints; None if there is one rank."""
        self.at_step: Callable[[], int] = lambda: 0
        """A function that returns the current step, for error messages. The Trainer or a host sets this attribute."""
        self._is_ours = False  # whether this object, and not the program, made the default process group
        self._is_fake = False  # whether the groups are of torch's backend for tests, which exchanges nothing
        self._answer_seconds = min(ANSWER_SECONDS, timeout / 4)
        self._presence: RankPresence | None = None
        self._notes = RankNotes("", self.rank, self._answer_seconds)
        self._machines: list[str] = []
        if self.size == 1:
            return
        group_timeout = timedelta(seconds=timeout - self._answer_seconds)
        with _as_distributed_error():
            if initialized_distributed() is None:
                distributed.init_process_group(
                    "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
                    store=attempt_store(ranks, timeout),
                    rank=self.rank,
                    world_size=self.size,
                    timeout=group_timeout,
                    device_id=device if device.type == "cuda" else None,
                )
                self._is_ours = True
            self._is_fake = distributed.get_backend() == "fake"
            backend = "fake" if self._is_fake else "gloo"
            self.metadata = distributed.new_group(backend=backend, timeout=group_timeout)
            self.saving = distributed.new_group(backend=backend, timeout=group_timeout)
        mine = (os.urandom(8).hex(), socket.gethostname())
        each = [mine] * self.size if self._is_fake else self.gather(mine)
        self._machines = [machine for _, machine in each]
        run_id = each[0][0]  # the random id that rank 0 has generated
        self._notes = RankNotes(f"callsheet/{run_id}", self.rank, self._answer_seconds)
        self._presence = RankPresence(self._notes, min(LOOK_SECONDS, self._answer_seconds / 4))

    def sum(self, values: Sequence[float]) -> list[float]:
        """Return the sums over the ranks, element by element. The sums are the same on all ranks, bit by bit."""
        return self._begin(values, distributed.ReduceOp.SUM).wait()

    def max(self, values: Sequence[float]) -> list[float]:
        """Return the maxima over the ranks, element by element. Whole numbers are exact below 2**53."""
        return self._begin(values, distributed.ReduceOp.MAX).wait()

    def sum_and_max(self, sums: Sequence[float], maxima: Sequence[float]) -> tuple[list[float], list[float]]:
        """Return the sums over the ranks of `sums` and the maxima of `maxima`. Both reductions run at the same time."""
        first, second = self._begin(sums, distributed.ReduceOp.SUM), self._begin(maxima, distributed.ReduceOp.MAX)
        return first.wait(), second.wait()

    def begin_max(self, values: Sequence[float]) -> Pending:
        """Start to compute the maxima over the ranks. Return at once; `wait()` of the returned object returns the maxima."""
        return self._begin(values, distributed.ReduceOp.MAX)

    def gather(self, value: Any) -> list[Any]:
        """Return the `value` of every rank, in the order of ranks. The values are sent as pickles."""
        if self.size == 1:
            return [value]
        mine = self._pad(pickle.dumps(value), "gather")
        with self._collective("gather"):
            of_ranks = [torch.empty_like(mine) for _ in range(self.size)]
            distributed.all_gather(of_ranks, mine, group=self.metadata)
        return [pickle.loads(each.numpy().tobytes()) for each in of_ranks]

    def of_rank_zero(self, value: Any) -> Any:
        """Return the `value` of rank 0 on all ranks. The value is sent as a pickle."""
        if self.size == 1:
            return value
        payload = self._pad(pickle.dumps(value) if self.rank == 0 else b"", "broadcast")
        with self._collective("broadcast"):
            distributed.broadcast(payload, src=0, group=self.metadata)
        return pickle.loads(payload.numpy().tobytes())

    def _pad(self, content: bytes, what: str) -> Tensor:
        """Return the bytes as a tensor of the same length on all ranks. A pickle ends itself, so bytes after it are ignored."""
        length = int(self._begin([len(content)], distributed.ReduceOp.MAX, what, depth=3).wait()[0])
        return torch.frombuffer(bytearray(content.ljust(length, b"\0")), dtype=torch.uint8)

    def publish_failure(self, step: int, error: BaseException) -> None:
        """Write to the rendezvous store why this rank ends the run, so that the other ranks can report the reason.

        After a `HostError`, the framework's training continues on this rank. The other ranks' collectives then raise `HostGaveUp`.
        After a `RunLockLostError`, they raise this error too, because no rank may write to the run's folder any more.
        """
        if self.size > 1 and not isinstance(error, DistributedError):
            kind = GAVE_UP if isinstance(error, HostError) else LOST_LOCK if isinstance(error, RunLockLostError) else FAILED
            cause = error.__cause__ if isinstance(error, HostError) and error.__cause__ else error
            self._notes.leave(kind, f"at step {step}: {error_line(cause)}")

    def explain_failure(self, error: BaseException, what: str = "") -> CallsheetError:
        """Return the error to raise after a collective has failed with `error`. Its message names the ranks at fault.

        The error is a `HostGaveUp` if a rank has left the run because its host could not follow the framework's loop, and a
        `LockLostElsewhere` if rank 0 has lost the lock of the run's folder. Otherwise it is a `DistributedError` whose message
        contains `what`, which says which operation failed.
        """
        traceback.clear_frames(error.__traceback__)  # variables in the frames would keep the failed group's connections open
        first = (str(error).splitlines() or [""])[0]
        missing = self._missing(self.at_step(), error)
        if self._notes.has_read_of(GAVE_UP):
            return HostGaveUp(missing)
        if self._notes.has_read_of(LOST_LOCK):
            return LockLostElsewhere(missing)
        return DistributedError(f"{missing}. On rank {self.rank}: {what}{first}")

    def _missing(self, step: int, error: BaseException) -> str:
        """Return a text that says which ranks are at fault, or why this rank cannot find that out.

        In a collective that passes data around a ring of ranks, only the two neighbors of a dead rank notice its death. So this
        rank asks all ranks through the rendezvous store whether they still run. Ranks that wait in a collective answer too. A rank
        that answers is named as the one at fault only if no other rank can be.
        """
        if self._presence is None:
            return "a rank was lost before or after the run, when it cannot be found out which one"
        is_broken = any(sign in str(error).lower() for sign in _BROKEN_CONNECTION_TEXTS)
        self._notes.leave(CUT_OFF if is_broken else TIMED_OUT, str(step))
        try:
            return self._notes.ask(lambda: self._ranks_at_fault(step, is_broken))
        except TimeoutError:
            keeper = self._describe_ranks([0]) if keeper_of_store() == "rank 0" else keeper_of_store()
            return (
                f"{keeper} did not answer within {self.timeout:g} s at step {step}: dead or suspended; it keeps the rendezvous "
                "store, so the other ranks could not be asked"
            )
        except RuntimeError:
            if keeper_of_store() == "rank 0":
                return f"{self._describe_ranks([0])} has ended, and with it the rendezvous store; this rank was at step {step}"
            return f"{keeper_of_store()} has ended; this rank was at step {step}"

    def _ranks_at_fault(self, step: int, is_broken: bool) -> str:
        """Ask the other ranks whether they still run, wait for their answers, and return a text that says which ranks are at fault."""
        notes, ranks = self._notes, range(self.size)
        notes.question()
        deadline = time.monotonic() + 0.8 * self._answer_seconds
        while True:
            note_of = {rank: notes.read(rank) for rank in ranks} | {self.rank: (CUT_OFF if is_broken else TIMED_OUT, str(step))}
            # A rank without a message in the store is late if it answers the question, and silent (dead or hanging) if it does not.
            silent = [rank for rank in ranks if note_of[rank] is None and not notes.has_answered(rank)]
            late = [rank for rank in ranks if note_of[rank] is None and rank not in silent]
            notes_found = {rank: note for rank, note in note_of.items() if note is not None}
            waiting = {rank: at for rank, (kind, at) in notes_found.items() if kind in (TIMED_OUT, CUT_OFF)}
            left = [rank for rank, (kind, _) in notes_found.items() if kind == LEFT]
            found = [
                f"{self._describe_ranks([rank])} failed {why}"
                for rank, (kind, why) in notes_found.items()
                if kind in (FAILED, LOST_LOCK)
            ]
            found += [
                f"{self._describe_ranks([rank])} gave up {why}" for rank, (kind, why) in notes_found.items() if kind == GAVE_UP
            ]
            if time.monotonic() > deadline or (not silent and (found or left or not late)):
                break
            time.sleep(0.05)
        if silent:
            # Mention the waiting time only if a rank timed out, because a broken connection fails at once.
            is_timeout = any(kind == TIMED_OUT for kind, _ in notes_found.values())
            waited = f" within {self.timeout:g} s" if is_timeout else ""
            found.append(f"{self._describe_ranks(silent)} did not answer{waited} at step {step}: dead or suspended")
        if left and not found:
            found.append(
                f"{self._describe_ranks(left)} had already ended the run when this rank was at step {step}: do all ranks call the same methods?"
            )
        if late and not found:
            found.append(
                f"{self._describe_ranks(late)} still runs and does not wait at step {step}: stuck, much slower than the others, or at a later "
                "step because the ranks make different numbers of steps"
            )
        if not found and len(set(waiting.values())) > 1:
            where = ", ".join(f"rank {rank} at step {at}" for rank, at in waiting.items())
            found.append(
                f"the ranks wait for each other in different places: {where}; do all of them make the same requests with replicated=True?"
            )
        elif not found:
            found.append(
                f"every rank answers now, and all are at step {step}: the network may have failed briefly, or a callback called a "
                "collective, or made a request with replicated=True, on some ranks only"
            )
        return "; ".join(found)

    def _describe_ranks(self, ranks: Sequence[int]) -> str:
        return named_ranks(ranks, self._machines)

    def close(self) -> None:
        """Destroy the groups that this object made. This method may be called twice, and is not a collective."""
        if self._presence is not None:
            self._presence.end()
            self._presence = None
        if self.size == 1 or initialized_distributed() is None:
            return
        self._notes.leave(LEFT, "")
        if self._is_ours:
            self._is_ours = False
            distributed.destroy_process_group()
        elif self.metadata is not None:
            for group in (self.metadata, self.saving):
                distributed.destroy_process_group(group)
        self.metadata = self.saving = None

    @contextlib.contextmanager
    def _collective(self, what: str) -> Iterator[None]:
        """While the `with` block runs, convert the error of a failed collective to an error that names the missing rank."""
        try:
            yield
        except RuntimeError as error:
            raise self.explain_failure(error, f"a {what} over the ranks failed: ") from error

    def _begin(self, values: Sequence[float], operation: Any, what: str = "reduction", depth: int = 2) -> Pending:
        """Begin a reduction. The caller, which is named in messages and in the tag, is `depth` calls above this one."""
        if self.size == 1:
            return Pending(torch.tensor([0.0, 0.0, 0.0, *values], dtype=torch.float64), None, self._collective)
        caller = sys._getframe(depth).f_code.co_qualname
        tag = _tag_of(what, caller, operation == distributed.ReduceOp.MAX, len(values))
        sent = [tag, -tag, tag * tag, *values]
        if len(sent) > _SLOTS:  # first find out whether all ranks send as many
            self._reduce(sent[:3], operation, f"{what} in {caller}").wait()
        return self._reduce(sent, operation, f"{what} in {caller}")

    def _reduce(self, sent: list[float], operation: Any, what: str) -> Pending:
        payload = torch.zeros(max(len(sent), _SLOTS), dtype=torch.float64)
        payload[: len(sent)] = torch.tensor(sent, dtype=torch.float64)
        factor = self.size if operation == distributed.ReduceOp.SUM else 1

        def check(tag: list[float]) -> None:
            # With the tag's negative and square, neither the sum nor the maximum of different tags equals that of equal tags.
            if tag != [factor * each for each in sent[:3]]:
                raise DistributedError(
                    f"the ranks call different collectives at the same time: rank {self.rank} a {what} at step {self.at_step()}; does an "
                    "evaluation, a callback or a request with replicated=True run on some ranks only?"
                )

        with self._collective("reduction"):
            work = distributed.all_reduce(payload, op=operation, group=self.metadata, async_op=True)
        return Pending(payload[: len(sent)], work, self._collective, (lambda tag: None) if self._is_fake else check)


@lru_cache(maxsize=1024)
def _tag_of(what: str, caller: str, is_max: bool, length: int) -> float:
    """Return a number for a reduction that is the same on all ranks, and with high probability another one for another reduction."""
    return float(zlib.crc32(f"{what} {caller} {is_max} {length}".encode()) % _LARGEST_TAG + 1)


@contextlib.contextmanager
def _as_distributed_error() -> Iterator[None]:
    """While the `with` block runs, convert an error of torch to `DistributedError`.

    The message names no rank, because the other ranks cannot be asked before there is a group.
    """
    try:
        yield
    except DistributedError:
        raise
    except RuntimeError as error:
        raise DistributedError(
            f"the ranks have met but could not connect: {(str(error).splitlines() or [''])[0]}; has one of them died?"
        ) from error
