from __future__ import annotations

import pytest

from callsheet.callbacks.support.peak_flops import PRECISIONS, device_name, peak_flops


@pytest.mark.parametrize(
    ("device", "precision", "teraflops"),
    [
        ("Tesla V100-SXM2-32GB", "fp16", 125.0),
        ("Tesla V100-PCIE-16GB", "fp16", 112.0),
        ("Tesla V100S-PCIE-32GB", "fp16", 130.0),
        ("Tesla V100-SXM2-16GB", "bf16", None),
        ("Tesla T4", "fp16", 65.0),
        ("NVIDIA A10", "bf16", 125.0),
        ("NVIDIA A10G", "bf16", None),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312.0),
        ("NVIDIA A100 80GB PCIe", "tf32", 156.0),
        ("NVIDIA A100-SXM-64GB", "bf16", None),
        ("NVIDIA A40", "bf16", 149.7),
        ("NVIDIA RTX A6000", "bf16", 154.8),
        ("NVIDIA L4", "bf16", 121.0),
        ("NVIDIA L40", "fp8", 362.0),
        ("NVIDIA L40S", "bf16", 362.0),
        ("NVIDIA GeForce RTX 3090", "bf16", 71.0),
        ("NVIDIA GeForce RTX 3090 Ti", "bf16", None),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", None),
        ("NVIDIA GeForce RTX 5090", "bf16", 209.5),
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H100 80GB HBM3", "fp8", 1978.9),
        ("NVIDIA H100 PCIe", "bf16", 756.0),
        ("NVIDIA H100 NVL", "bf16", 835.5),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16", None),
        ("NVIDIA H200", "bf16", 989.4),
        ("NVIDIA H200 NVL", "bf16", 835.5),
        ("NVIDIA GH200 480GB", "bf16", 989.4),
        ("NVIDIA B200", "bf16", 2250.0),
        ("NVIDIA GB200", "bf16", 2500.0),
        ("NVIDIA B300 SXM6 AC", "bf16", 2250.0),
        ("NVIDIA GB300", "fp8", 5000.0),
        ("AMD Instinct MI210", "bf16", 181.0),
        ("AMD Instinct MI250X", "bf16", 191.5),
        ("AMD Instinct MI250X / MI250", "bf16", 191.5),
        ("AMD Instinct MI250", "bf16", 181.05),
        ("AMD Instinct MI300X", "bf16", 1307.4),
        ("AMD Instinct MI300X VF", "fp8", 2614.9),
        ("AMD Instinct MI300A", "bf16", 980.6),
        ("AMD Instinct MI325X", "bf16", 1307.4),
        ("AMD Instinct MI350X", "bf16", 2306.9),
        ("AMD Instinct MI355X", "fp8", 5033.2),
        ("cpu", "fp32", None),
        ("", "", None),
    ],
)
def test_the_peak_is_that_of_the_device_and_the_precision(device: str, precision: str, teraflops: float | None) -> None:
    found = peak_flops(device, precision)
    assert found == (pytest.approx(teraflops * 1e12) if teraflops is not None else None)


def test_a_device_without_tf32_computes_in_fp32() -> None:
    assert peak_flops("Tesla T4", "tf32") == peak_flops("Tesla T4", "fp32") == pytest.approx(8.1e12)


def test_narrower_types_are_never_slower() -> None:
    for device in ("NVIDIA A100-SXM4-80GB", "NVIDIA L40S", "NVIDIA H100 NVL", "NVIDIA GB200", "AMD Instinct MI300A"):
        figures = [figure for precision in PRECISIONS if (figure := peak_flops(device, precision)) is not None]
        assert figures == sorted(figures)


def test_the_name_of_a_device_that_is_not_cuda() -> None:
    assert device_name("cpu") == "cpu"
