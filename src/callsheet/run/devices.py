"""Moves tensors from different devices to one device.

Values of one metric may be on several devices: a model may be split over several GPUs or keep a part in host memory, and values
from a checkpoint are loaded into host memory.
"""

from __future__ import annotations

from typing import Any


def on_one_device(tensors: list[Any]) -> list[Any]:
    """Move the tensors to one device, so that they can be stacked, and return them.

    If they are on several devices, they are copied to the first of these devices that is not the CPU, because a copy to the CPU
    would have to wait for the device.
    """
    devices = dict.fromkeys(tensor.device for tensor in tensors)
    if len(devices) < 2:
        return tensors
    target = next(device for device in devices if device.type != "cpu")
    return [tensor.to(target, non_blocking=True) for tensor in tensors]
