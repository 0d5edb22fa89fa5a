"""The rendezvous store, a key-value store through which the ranks find each other.

Each attempt to run has its own prefix for the keys (torchrun may restart the ranks). Every wait for the store has a time limit.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from itertools import count
from typing import Any, TypeVar

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # torch does not declare these exports

from callsheet.core.ranks import Ranks, initialized_distributed
from callsheet.errors import ConfigError, DistributedError

T = TypeVar("T")

POLL_SECONDS = 0.01
_LINGER_SECONDS = 0.5  # rank 0 waits up to this time, so that the other ranks can read its error message

_meetings = count()  # numbers the stores; all ranks open them in the same order, so that a store has one number on all ranks


def within(seconds: float, act: Callable[[], T]) -> T:
    """Return the result of `act()`, or raise `TimeoutError` if it takes longer than `seconds`.

    Most calls of a store have no timeout, and block forever if the process that keeps the store is suspended. So they run on a
    thread that can be abandoned.
    """
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(act())
        except BaseException as error:  # `answer.result` raises the error on the caller's thread
            answer.set_exception(error)

    threading.Thread(target=run, name="callsheet-store", daemon=True).start()
    return answer.result(seconds)


def keeper_of_store() -> str:
    """Return which process serves the rendezvous store, for error messages: rank 0, or the launcher."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return "rank 0"
    return f"the launcher at {os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"


def attempt_store(ranks: Ranks, timeout: float) -> Any:
    """Return a rendezvous store that all ranks share, and that has no keys yet, even after a restart. This is a collective.

    A launcher keeps its store while it restarts the ranks, so the keys of dead ranks remain: addresses, counters, answers. Adding
    the restart count to the keys would not help, because each machine's launcher has its own count, and does not increase it when
    a machine joins or leaves. So the ranks agree on a new name for each attempt, and use it as a prefix.

    Raises:
        ConfigError: the environment does not contain the store's address.
        DistributedError: some ranks did not join within `timeout` seconds; the message names them.
    """
    distributed = initialized_distributed()
    base: Any = distributed.distributed_c10d._get_default_store() if distributed is not None else None
    deadline = time.monotonic() + timeout
    where = _rendezvous_address() if base is None else None
    number = next(_meetings)

    def meet() -> Any:
        while True:
            try:
                store = _connect(where, ranks, deadline) if where is not None else base
                name = _agree(PrefixStore(f"callsheet/meeting/{number}", store), ranks, deadline, timeout)
                return PrefixStore(f"callsheet/{name}", store)
            except DistributedError:
                raise
            except RuntimeError as error:  # rank 0 has closed the store of an earlier run and opens a new one, so try again
                if base is not None or time.monotonic() > deadline:
                    first = (str(error).splitlines() or [""])[0]
                    raise DistributedError(
                        f"rank {ranks.rank} lost the store that {keeper_of_store()} keeps, while the ranks met: {first}"
                    ) from error
            time.sleep(POLL_SECONDS)

    try:
        return within(timeout + 1.0, meet)
    except TimeoutError:
        raise DistributedError(
            f"{keeper_of_store()}, which keeps the rendezvous store, did not answer within {timeout:g} s: is the process suspended?"
        ) from None


def _rendezvous_address() -> tuple[str, int]:
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise ConfigError(
            f"WORLD_SIZE is {os.environ.get('WORLD_SIZE')}, and the ranks cannot meet: the environment has no {' and no '.join(missing)}; "
            "start the program with torchrun"
        )
    address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    if not port.isdigit() or int(port) >= 2**16:
        raise ConfigError(f"the environment variable MASTER_PORT must be a port number, not {port!r}")
    return address, int(port)


def _connect(where: tuple[str, int], ranks: Ranks, deadline: float) -> Any:
    """Connect to the rendezvous store as `init_method="env://"` does, but without waiting for the other ranks.

    If torch waited here, its error would not name the missing ranks.
    """
    is_keeper = keeper_of_store() == "rank 0" and ranks.rank == 0
    left = timedelta(seconds=max(0.1, deadline - time.monotonic()))
    return TCPStore(*where, ranks.world_size, is_keeper, timeout=left, wait_for_workers=False, multi_tenant=is_keeper)


def _agree(store: Any, ranks: Ranks, deadline: float, timeout: float) -> str:
    """Agree with the other ranks on a new random name, the prefix of the ranks' keys in the store, and return the name.

    Each rank writes a new random word. Rank 0 announces the list of all words. Each rank accepts a list that contains its own
    word, and rank 0 confirms a list that all ranks have accepted. If a list contains the old word of a dead rank, the rank that
    replaces it does not accept the list, and rank 0 announces another list with the new word.
    """
    mine, everyone = os.urandom(8).hex(), range(ranks.world_size)
    announced: list[str] | None = None
    name = ""
    store.set(f"word/{ranks.rank}", mine)
    while True:
        if ranks.rank == 0:
            words = _read(store, "word", everyone)
            if words != announced and None not in words:
                announced = [word for word in words if word is not None]
                store.set("list", json.dumps(announced))
        listed = json.loads(_get_or_none(store, "list") or "[]")
        if len(listed) == ranks.world_size and listed[ranks.rank] == mine:
            if name != (name := hashlib.sha256("".join(listed).encode()).hexdigest()[:16]):
                store.set(f"accepted/{ranks.rank}", name)
            if ranks.rank == 0 and all(each == name for each in _read(store, "accepted", everyone)):
                store.set("confirmed", name)
            if _get_or_none(store, "confirmed") == name:
                return name
        message, words = json.loads(_get_or_none(store, "failed") or '["", []]')
        if mine in words:
            store.set(f"acknowledged/{ranks.rank}", mine)
            raise DistributedError(message)
        if time.monotonic() > deadline:
            raise DistributedError(_report_missing_ranks(store, ranks, name, timeout))
        time.sleep(POLL_SECONDS)


def _report_missing_ranks(store: Any, ranks: Ranks, name: str, timeout: float) -> str:
    """Return a text that says which ranks did not join the other ranks in time.

    Rank 0 also writes the text to the store and waits briefly until the other ranks have read it: if rank 0 serves the store, they
    cannot read anything after rank 0 has ended.
    """
    everyone = range(ranks.world_size)
    words, accepted = _read(store, "word", everyone), _read(store, "accepted", everyone)
    absent = [rank for rank in everyone if (accepted[rank] != name if name else words[rank] is None)]
    absent = absent or [0]  # if all ranks have answered, rank 0 is at fault, because it has not confirmed the list of ranks
    message = f"{named_ranks(absent)} of {ranks.world_size} did not join the others within {timeout:g} s: not started, dead or suspended"
    if ranks.rank == 0:
        store.set("failed", json.dumps([message, words]))
        readers, until = [rank for rank in everyone if rank not in (0, *absent)], time.monotonic() + _LINGER_SECONDS
        while any(word != words[rank] for rank, word in zip(readers, _read(store, "acknowledged", readers), strict=True)):
            if time.monotonic() > until:
                break
            time.sleep(POLL_SECONDS)
    return message


def _read(store: Any, kind: str, ranks: Sequence[int]) -> list[str | None]:
    return [_get_or_none(store, f"{kind}/{rank}") for rank in ranks]


def _get_or_none(store: Any, key: str) -> str | None:
    return store.get(key).decode() if store.check([key]) else None


def named_ranks(ranks: Sequence[int], machines: Sequence[str] = ()) -> str:
    """Return a text such as `rank 3 on machine a`, or `ranks 3 on machine a, 4 on machine b`."""
    each = [f"{rank} on machine {machines[rank]}" if machines else str(rank) for rank in ranks]
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(each)}"
