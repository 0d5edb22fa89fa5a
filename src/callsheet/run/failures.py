"""Notes that are added to errors which leave the trainer: how much memory was in use, and what to try."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from callsheet.checkpoint.ranks import RankLost
from callsheet.core.optional import load
from callsheet.errors import DistributedError, text_of
from callsheet.run.process_groups import LateAfterSignal

_OUT_OF_MEMORY_TEXTS = ("out of memory", "can't allocate memory", "not enough memory", "status_alloc_failed")
_COLLECTIVE_FAILURE_TEXTS = (
    "gloo",
    "nccl",
    "processgroup",
    "process group",
    "connection closed by peer",
    "connection reset by peer",
    "timed out waiting",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the error says that a device or the host ran out of memory."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in text_of(error).lower() for sign in _OUT_OF_MEMORY_TEXTS)


def is_of_collective(error: BaseException) -> bool:
    """Return whether the error comes from a failed collective operation, of callsheet or of torch.

    torch's backends have no exception class of their own, so the text of the error is checked.

    Return False for a `DistributedError` other than `LateAfterSignal`, because its message already names the rank at fault.
    """
    if isinstance(error, (LateAfterSignal, RankLost)):
        return True
    if not isinstance(error, RuntimeError) or isinstance(error, DistributedError):
        return False
    return type(error).__name__.startswith("Dist") or any(sign in text_of(error).lower() for sign in _COLLECTIVE_FAILURE_TEXTS)


def out_of_memory_note(device: torch.device, hints: Iterable[str]) -> str:
    """Return a note for an out-of-memory error: how much memory is in use, and what to try (`hints`)."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        held = (
            f"{device}: {_gib(torch.cuda.memory_allocated(device))} allocated now, {_gib(torch.cuda.max_memory_allocated(device))} at the "
            f"most, {_gib(torch.cuda.memory_reserved(device))} reserved by torch, {_gib(free)} of {_gib(total)} free"
        )
    else:
        psutil = load("psutil", extra="train", wanted_by="Trainer")
        memory = psutil.virtual_memory()
        held = f"this process holds {_gib(psutil.Process().memory_info().rss)}, and {_gib(memory.available)} of {_gib(memory.total)} are free"
    return f"out of memory; {held}; try {', '.join(hints)}"


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
