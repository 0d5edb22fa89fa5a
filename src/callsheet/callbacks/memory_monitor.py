"""Logs the memory that training uses."""

from __future__ import annotations

import sys

import psutil
import torch

from callsheet.core.callback import Callback
from callsheet.core.context import Context

if sys.platform != "win32":
    import resource

_DEVICE_STATISTICS = {
    "allocated": "allocated_bytes.all.current",
    "peak_allocated": "allocated_bytes.all.peak",
    "active": "active_bytes.all.current",
    "peak_active": "active_bytes.all.peak",
    "reserved": "reserved_bytes.all.current",
    "peak_reserved": "reserved_bytes.all.peak",
    "alloc_retries": "num_alloc_retries",
    "ooms": "num_ooms",
}


class MemoryMonitor(Callback):
    """Add the memory that training uses to every metrics record. Each value is the maximum over the ranks.

    All values are in bytes, except for the counts. On every device it adds `memory/resident` and `memory/peak_resident`, the
    resident memory of the process. On CUDA it also adds `memory/allocated` (by tensors), `memory/active` (including memory that
    streams still use) and `memory/reserved` (by the caching allocator), each with its `memory/peak_...` since the process began,
    and the counts `memory/alloc_retries` (the cache was emptied to find room) and `memory/ooms`. If the monitor has a `name`, the
    name replaces `memory`.

    It reads the allocator's own counters only when a metrics record is made. Nothing waits for the device, and no peak is reset.
    """

    collective = True

    def on_log(self, ctx: Context) -> None:
        # On a CUDA device, `record.memory_bytes` is the device's memory, so ask psutil for the process's resident memory.
        is_on_cuda = ctx.run.device.startswith("cuda")
        here = _resident(float(psutil.Process().memory_info().rss if is_on_cuda else ctx.record.memory_bytes))
        if is_on_cuda:
            stats = torch.cuda.memory_stats(ctx.run.device)
            here |= {name: float(stats.get(key, 0)) for name, key in _DEVICE_STATISTICS.items()}
        there = ctx.gather(here)
        highest = {name: max(rank.get(name, 0.0) for rank in there) for name in here}
        ctx.log({f"{self.name or 'memory'}/{name}": value for name, value in highest.items()}, across="same")


def _resident(now: float) -> dict[str, float]:
    """Return the process's resident memory, now and at its peak, in bytes."""
    if sys.platform == "win32":
        return {"resident": now, "peak_resident": float(psutil.Process().memory_info().peak_wset)}
    unit = 1 if sys.platform == "darwin" else 1024
    peak = float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * unit
    return {"resident": now, "peak_resident": max(peak, now)}
