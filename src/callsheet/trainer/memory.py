"""How much memory the run takes."""

from __future__ import annotations

import psutil
import torch

_PROCESS = psutil.Process()


def memory_bytes(device: torch.device) -> int:
    """The device's peak of allocated memory since the process began; on the CPU the process's resident memory now."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return _PROCESS.memory_info().rss
