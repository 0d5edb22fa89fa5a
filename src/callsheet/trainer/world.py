"""The processes that train together: their process groups, and the small reductions with which they agree."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from itertools import count
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # it is there
from torch.distributed.rendezvous import rendezvous

from callsheet.distributed import Ranks, initialised_distributed
from callsheet.errors import ConfigError, DistributedError

_numbers = count()  # of the worlds of this process, the same on all ranks

ANSWER_SECONDS = 5.0
"""How long a rank on which a collective failed waits for the others to say how they fare."""
LOOK_SECONDS = 0.5
"""How often a rank looks whether somebody asks who is there."""

_WAITS = "waits at step "  # the word of a rank on which a collective failed
_HAS_LEFT = "left"


class Pending:
    """A reduction that is under way."""

    def __init__(self, payload: Tensor, work: Any) -> None:
        self._payload = payload
        self._work = work

    @property
    def is_done(self) -> bool:
        """Whether `wait` would return at once; never blocks."""
        return (
            self._work is None or bool(self._work.is_completed()) or type(self._work).__name__ == "FakeWork"
        )  # which never says so

    def wait(self, deadline: Callable[[], float] | None = None) -> list[float]:
        """The result; waits for it, until `deadline()`, a moment of `time.monotonic()` that may come nearer meanwhile.

        Raises:
            DistributedError: it failed, or the deadline has passed.
        """
        pause = 0.0001
        while deadline is not None and not self.is_done:
            if time.monotonic() > deadline():
                raise DistributedError("the ranks did not all answer in time after a signal to make way")
            time.sleep(pause)  # not in the collective: a signal's handler would wait as long
            pause = min(2 * pause, 0.005)
        if self._work is not None:
            with named("reduction"):
                self._work.wait()
        reduced: list[float] = self._payload.tolist()
        return reduced


class World:
    """This rank's way to speak with the others; with one rank everything is answered at once, without torch.distributed.

    Where the program has made a process group, that is taken, and left when the run ends; else one is made here (NCCL for CUDA's
    tensors, gloo for the CPU's) and torn down. Agreements and saving have gloo groups of their own, so that they never wait behind a
    gradient, nor for each other. All methods but `rank`, `size` and `close` are collectives: every rank must reach them, in one order.

    Args:
        ranks: as the launcher says.
        device: of the model; a rank's own, such as `cuda:3`.
        timeout: seconds until a collective that some rank does not reach fails.
    """

    def __init__(self, ranks: Ranks, device: torch.device, timeout: float) -> None:
        self.rank = ranks.rank
        self.size = ranks.world_size
        self.timeout = timeout
        self.words: Any = None
        """The gloo group of agreements; None with one rank."""
        self.saving: Any = None
        """The gloo group of checkpoints; None with one rank."""
        self._is_ours = False
        self._number = next(_numbers)
        self._presence: _Presence | None = None
        if self.size == 1:
            return
        if initialised_distributed() is None:
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            try:
                patience = timedelta(seconds=timeout)
                store, _, _ = next(rendezvous("env://", timeout=patience))
                distributed.init_process_group(
                    backend,
                    store=PrefixStore(f"callsheet/{self._number}", store),  # an earlier group's words are still there
                    rank=self.rank,
                    world_size=self.size,
                    timeout=patience,
                    device_id=device if device.type == "cuda" else None,
                )
            except ValueError as error:  # the environment is half a launcher's
                raise ConfigError(
                    f"WORLD_SIZE is {self.size}, and the ranks cannot meet: {error}; start the program with torchrun"
                ) from error
            self._is_ours = True
        backend = "fake" if distributed.get_backend() == "fake" else "gloo"
        self.words = distributed.new_group(backend=backend, timeout=timedelta(seconds=timeout))
        self.saving = distributed.new_group(backend=backend, timeout=timedelta(seconds=timeout))
        self._presence = _Presence(self._key("who"), self._key("here", self.rank))

    def sum(self, values: Sequence[float]) -> list[float]:
        """The sums over the ranks, the same bits on all of them."""
        return self._begin(values, distributed.ReduceOp.SUM).wait()

    def max(self, values: Sequence[float]) -> list[float]:
        """The maxima over the ranks. Whole numbers are exact below 2**53."""
        return self._begin(values, distributed.ReduceOp.MAX).wait()

    def begin_max(self, values: Sequence[float]) -> Pending:
        """Begin `max` without waiting."""
        return self._begin(values, distributed.ReduceOp.MAX)

    def gather(self, value: Any) -> list[Any]:
        """`value` of every rank, in the order of ranks; it is pickled."""
        values: list[Any] = [value]
        if self.size > 1:
            values = [None] * self.size
            with named("gather"):
                distributed.all_gather_object(values, value, group=self.words)
        return values

    def of_rank_zero(self, value: Any) -> Any:
        """Rank 0's `value`, on all ranks; it is pickled."""
        if self.size == 1:
            return value
        values = [value]
        with named("broadcast"):
            distributed.broadcast_object_list(values, src=0, group=self.words)
        return values[0]

    def say(self, step: int, error: BaseException) -> None:
        """Leave word for the others why this rank goes."""
        if self.size > 1 and not isinstance(error, DistributedError):
            first = (str(error).splitlines() or [""])[0][:300]
            self._post(f"failed at step {step}: {type(error).__name__}: {first}")

    def missing(self, step: int) -> str:
        """After a collective failed: which ranks are to blame, as far as can be known; waits a few seconds for their word.

        Where several wait in a ring, a rank's death fails its neighbours' collectives only. So the others are asked who is there, which
        they answer while they wait: of those that do, one is to blame only where nobody else can be.
        """
        self._post(f"{_WAITS}{step}")
        _set(self._key("who"), "")
        deadline, ranks = time.monotonic() + min(ANSWER_SECONDS, self.timeout), range(self.size)
        while True:
            words = {rank: _get(self._key("gone", rank)) for rank in ranks}
            words[self.rank] = words[self.rank] or f"{_WAITS}{step}"  # also where the store has gone
            silent = [rank for rank in ranks if words[rank] is None and _get(self._key("here", rank)) is None]
            late = [rank for rank in ranks if words[rank] is None and rank not in silent]
            waiting = {rank: word.removeprefix(_WAITS) for rank, word in words.items() if word and word.startswith(_WAITS)}
            told = [f"rank {rank} {word}" for rank, word in words.items() if word and word != _HAS_LEFT and rank not in waiting]
            left = [rank for rank, word in words.items() if word == _HAS_LEFT]
            if time.monotonic() > deadline or (not silent and (told or left or not late)):
                break
            time.sleep(0.05)
        if silent:
            told.append(f"{_ranks(silent)} did not answer: dead or stopped")
        if left and not told:
            told.append(f"{_ranks(left)} had ended the run already: do all ranks call the same methods?")
        if late and not told:
            told.append(f"{_ranks(late)} did not come so far: stuck, or much slower than the others")
        if not told and len(set(waiting.values())) > 1:
            where = ", ".join(f"rank {rank} at step {at}" for rank, at in waiting.items())
            told.append(
                f"the ranks wait for each other in different places: {where}; do all of them ask for the same with replicated=True?"
            )
        elif not told:
            told.append(
                "every rank answers now, and all are at the same step: the network may have failed for a moment, or a callback called a "
                "collective, or asked for something with replicated=True, on some ranks only"
            )
        return f"around step {step}: {'; '.join(told)}"

    def close(self) -> None:
        """Leave the groups; one that was not made here stays. May be called twice; not a collective."""
        if self._presence is not None:
            self._presence.end()
            self._presence = None
        if self.size == 1 or initialised_distributed() is None:
            return
        self._post(_HAS_LEFT)
        if self._is_ours:
            self._is_ours = False
            distributed.destroy_process_group()
        elif self.words is not None:
            for group in (self.words, self.saving):
                distributed.destroy_process_group(group)
        self.words = self.saving = None

    def _begin(self, values: Sequence[float], operation: Any) -> Pending:
        payload = torch.tensor(values, dtype=torch.float64)
        if self.size == 1:
            return Pending(payload, None)
        with named("reduction"):
            return Pending(payload, distributed.all_reduce(payload, op=operation, group=self.words, async_op=True))

    def _post(self, word: str) -> None:
        """The first word stays: it is nearest to the cause."""
        if _get(self._key("gone", self.rank)) is None:
            _set(self._key("gone", self.rank), word)

    def _key(self, what: str, rank: int | str = "") -> str:
        return f"callsheet/{self._number}/{what}/{rank}"


class _Presence:
    """A thread that says that this rank is there, when one on which a collective failed asks: the main thread may wait in it as well."""

    def __init__(self, question: str, answer: str) -> None:
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(question, answer), name="callsheet-presence", daemon=True)
        self._thread.start()

    def _run(self, question: str, answer: str) -> None:
        while not self._is_over.wait(LOOK_SECONDS):
            if _get(question) is not None:
                _set(answer, "")
                return

    def end(self) -> None:
        self._is_over.set()
        self._thread.join(LOOK_SECONDS)  # it may be asking a store that is gone


def _get(key: str) -> str | None:
    """What stands in the store that the ranks met at; None for nothing, and where it is gone."""
    try:
        store = distributed.distributed_c10d._get_default_store()
        word = json.loads(store.get(key)) if store.check([key]) else None
    except (RuntimeError, ValueError):
        return None
    return word if isinstance(word, str) else None


def _set(key: str, word: str) -> None:
    # A store that is gone takes no word, and the first error is the one to tell.
    with contextlib.suppress(RuntimeError, ValueError):
        distributed.distributed_c10d._get_default_store().set(key, json.dumps(word))


def _ranks(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"


@contextlib.contextmanager
def named(what: str) -> Iterator[None]:
    """Make torch's error of a collective one of ours."""
    try:
        yield
    except RuntimeError as error:
        raise DistributedError(f"a {what} over the ranks failed: {error}") from error
