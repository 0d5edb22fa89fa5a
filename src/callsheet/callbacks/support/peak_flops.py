"""The peak FLOP/s of accelerators."""

from __future__ import annotations

import re
from functools import cache
from typing import Literal, get_args

import torch

PeakPrecision = Literal["fp32", "tf32", "bf16", "fp16", "fp8"]
PRECISIONS: tuple[PeakPrecision, ...] = get_args(PeakPrecision)

_H100_SXM_TERAFLOPS = {"fp32": 66.9, "tf32": 494.7, "bf16": 989.4, "fp16": 989.4, "fp8": 1978.9}
_HOPPER_NVL_TERAFLOPS = {"fp32": 60.0, "tf32": 417.5, "bf16": 835.5, "fp16": 835.5, "fp8": 1670.5}
_BLACKWELL_TERAFLOPS = {"fp32": 75.0, "tf32": 1125.0, "bf16": 2250.0, "fp16": 2250.0, "fp8": 4500.0}
_MI300X_TERAFLOPS = {"fp32": 163.4, "tf32": 653.7, "bf16": 1307.4, "fp16": 1307.4, "fp8": 2614.9}

_TERAFLOPS_OF_DEVICE: tuple[tuple[str, dict[str, float]], ...] = (
    (r"\bV100S-", {"fp32": 16.4, "fp16": 130.0}),
    (r"\bV100-SXM[23]\b", {"fp32": 15.7, "fp16": 125.0}),
    (r"\bV100-PCIE\b", {"fp32": 14.0, "fp16": 112.0}),
    (r"\bT4\b", {"fp32": 8.1, "fp16": 65.0}),
    (r"\bA10\b", {"fp32": 31.2, "tf32": 62.5, "bf16": 125.0, "fp16": 125.0}),
    (r"\bA30\b", {"fp32": 10.3, "tf32": 82.0, "bf16": 165.0, "fp16": 165.0}),
    (r"\bA40\b", {"fp32": 37.4, "tf32": 74.8, "bf16": 149.7, "fp16": 149.7}),
    (r"\bA100\b(?!.*64GB)", {"fp32": 19.5, "tf32": 156.0, "bf16": 312.0, "fp16": 312.0}),  # not the faster 64 GB version
    (r"\bRTX A6000\b", {"fp32": 38.7, "tf32": 77.4, "bf16": 154.8, "fp16": 154.8}),
    (r"\bRTX 3090$", {"fp32": 35.6, "tf32": 35.6, "bf16": 71.0, "fp16": 71.0}),
    (r"\bRTX 4090$", {"fp32": 82.6, "tf32": 82.6, "bf16": 165.2, "fp16": 165.2, "fp8": 330.3}),
    (r"\bRTX 5090$", {"fp32": 104.8, "tf32": 104.8, "bf16": 209.5, "fp16": 209.5, "fp8": 419.0}),
    (r"\bL4\b", {"fp32": 30.3, "tf32": 60.0, "bf16": 121.0, "fp16": 121.0, "fp8": 242.5}),
    (r"\bL40\b", {"fp32": 90.5, "tf32": 90.5, "bf16": 181.0, "fp16": 181.0, "fp8": 362.0}),
    (r"\bL40S\b", {"fp32": 91.6, "tf32": 183.0, "bf16": 362.0, "fp16": 362.0, "fp8": 733.0}),
    (r"\bH20\b", {"fp32": 44.0, "tf32": 74.0, "bf16": 148.0, "fp16": 148.0, "fp8": 296.0}),
    (r"\bH100 NVL\b", _HOPPER_NVL_TERAFLOPS),
    (r"\bH100\b.*(PCIe|HBM2e)", {"fp32": 51.2, "tf32": 378.0, "bf16": 756.0, "fp16": 756.0, "fp8": 1513.0}),
    (r"\bH100\b.*(HBM3|SXM)", _H100_SXM_TERAFLOPS),
    (r"\bH200 NVL\b", _HOPPER_NVL_TERAFLOPS),
    (r"\bG?H200\b", _H100_SXM_TERAFLOPS),
    (r"\bB100\b", {"bf16": 1750.0, "fp16": 1750.0, "fp8": 3500.0}),
    (r"\bB[23]00\b", _BLACKWELL_TERAFLOPS),
    (r"\bGB200\b", {"fp32": 80.0, "tf32": 1250.0, "bf16": 2500.0, "fp16": 2500.0, "fp8": 5000.0}),
    (r"\bGB300\b", {"tf32": 1250.0, "bf16": 2500.0, "fp16": 2500.0, "fp8": 5000.0}),
    (r"\bMI100\b", {"fp32": 46.1, "bf16": 92.3, "fp16": 184.6}),
    (r"\bMI210\b", {"fp32": 45.3, "bf16": 181.0, "fp16": 181.0}),
    (r"\bMI250X\b", {"fp32": 47.85, "bf16": 191.5, "fp16": 191.5}),  # values for one torch device; a card has two
    (r"\bMI250\b", {"fp32": 45.25, "bf16": 181.05, "fp16": 181.05}),  # values for one torch device; a card has two
    (r"\bMI300A\b", {"fp32": 122.6, "tf32": 490.3, "bf16": 980.6, "fp16": 980.6, "fp8": 1961.2}),
    (r"\bMI300X\b", _MI300X_TERAFLOPS),
    (r"\bMI325X\b", _MI300X_TERAFLOPS),  # MI325X is an MI300X with more memory
    (r"\bMI350X\b", {"fp32": 144.2, "bf16": 2306.9, "fp16": 2306.9, "fp8": 4613.7}),
    (r"\bMI355X\b", {"fp32": 157.3, "bf16": 2516.6, "fp16": 2516.6, "fp8": 5033.2}),
)
"""The peak TFLOP/s in each precision, for patterns of device names. The first pattern that matches a device's name is used."""


@cache
def peak_flops(device: str, precision: str) -> float | None:
    """Return the vendor's peak FLOP/s of one device for dense matrix products; None if the device is not in the table.

    The figures come from NVIDIA's and AMD's data sheets and architecture papers. If a source has only a figure for sparse
    matrices, half of that figure is used. For GeForce, the figures are those of 16-bit and 8-bit products accumulated in 32 bits,
    as in training; for AMD Instinct, those of the matrix units, also in `fp32`. For a driver that calls a card "MI250X / MI250"
    the larger figure is used. For slices of a device (MIG), the result is None. AMD's partitions have the same name as the whole
    device, so they get the figure of the whole device.

    Args:
        device: the name that `torch.cuda.get_device_name` returns.
        precision: the precision of the factors, one of `PRECISIONS`; for a device without `tf32`, `fp32` is used instead.
    """
    if "MIG" in device:
        return None
    for pattern, teraflops in _TERAFLOPS_OF_DEVICE:
        if re.search(pattern, device, re.IGNORECASE):
            figure = teraflops.get(precision) or (teraflops.get("fp32") if precision == "tf32" else None)
            return figure * 1e12 if figure is not None else None
    return None


def device_name(device: str) -> str:
    """Return the name of the GPU at a torch device such as `"cuda:0"`: `"NVIDIA H100"`, for example. Return another device unchanged."""
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else device
