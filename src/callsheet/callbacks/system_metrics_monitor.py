"""Logs metrics of the machine: processors, memory, disk, network and GPUs."""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Callable
from typing import Any

import psutil
import torch

from callsheet.core.callback import Callback, label_of
from callsheet.core.context import Context
from callsheet.errors import ConfigError

logger = logging.getLogger("callsheet")


class SystemMetricsMonitor(Callback):
    """Add metrics of the machines to every metrics record. Each value is the maximum over the ranks.

    Of the machine: `system/cpu_percent` (100 if all cores are busy), `system/load` (runnable processes per core, over a minute),
    `system/memory_used` in bytes, `system/memory_percent`, `system/disk_used_percent` (of the disk of the run's folder), and, in
    bytes per second since the last measurement, `system/disk_read_per_second`, `system/disk_written_per_second`,
    `system/network_received_per_second`, `system/network_sent_per_second`. Of the process: `system/process_cpu_percent` (100 for
    each busy core), `system/process_threads`. Of the rank's GPU, if the package `nvidia-ml-py` is installed:
    `system/gpu_percent`, `system/gpu_memory_used` in bytes (by all processes), `system/gpu_temperature` in degrees Celsius,
    `system/gpu_power` in watts. Values that a system does not provide are left out. If the monitor has a `name`, the name
    replaces `system`.

    It measures only when a metrics record is made. Because a measurement takes about a millisecond, a record that is made less
    than `seconds` after the last measurement repeats that measurement's values. Percentages and rates cover the time between two
    measurements.

    Args:
        seconds: the shortest time from one measurement to the next; 0 measures at every record.

    Raises:
        ConfigError: `seconds` is below 0.
    """

    collective = True

    transport_ignore = ("_process",)

    def __init__(self, *, seconds: float = 5.0) -> None:
        if not seconds >= 0:
            raise ConfigError(f"seconds={seconds}: give 0 or more")
        self._seconds = seconds
        self._seen: dict[str, float] = {}
        self._process = psutil.Process()
        self._counters: dict[str, int] = {}
        self._counted_at = 0.0
        self._gpu: tuple[Any, Any] | None = None  # the module `pynvml` (GPU metrics) and its handle of this rank's GPU

    def on_train_start(self, ctx: Context) -> None:
        """Read the disk and network counters, so that the first metrics record can have rates."""
        psutil.cpu_percent()
        self._process.cpu_percent()
        self._seen, self._counters, self._counted_at = {}, _counters(), time.monotonic()
        if self._gpu is None and ctx.run.device.startswith("cuda"):
            self._gpu = self._open_nvml(ctx.run.device)

    def on_log(self, ctx: Context) -> None:
        if self._counted_at and (not self._seen or time.monotonic() - self._counted_at >= self._seconds):
            self._seen = {f"{self.name or 'system'}/{name}": value for name, value in self._measure(ctx).items()}
        there = ctx.gather(self._seen)  # every rank must call `gather`, even if it has no values
        highest: dict[str, float] = {}
        for rank in there:
            for name, value in rank.items():
                highest[name] = max(value, highest.get(name, value))
        ctx.log(highest, across="same")

    def on_run_end(self, ctx: Context) -> None:
        """Shut down NVML, the library for GPU metrics."""
        (nvml, _), self._gpu = self._gpu or (None, None), None
        if nvml is not None:
            nvml.nvmlShutdown()

    def _measure(self, ctx: Context) -> dict[str, float]:
        memory = psutil.virtual_memory()
        found = {
            "cpu_percent": psutil.cpu_percent(),
            "load": psutil.getloadavg()[0] / (psutil.cpu_count() or 1),
            "memory_used": float(memory.total - memory.available),
            "memory_percent": memory.percent,
            "process_cpu_percent": self._process.cpu_percent(),
            "process_threads": float(self._process.num_threads()),
        }
        place = ctx.run.folder.absolute() if ctx.run.folder is not None else None
        while place is not None and not place.exists() and place != place.parent:
            place = place.parent
        if place is not None:
            found["disk_used_percent"] = psutil.disk_usage(str(place)).percent
        before, then = self._counters, self._counted_at
        self._counters, self._counted_at = _counters(), time.monotonic()
        seconds = self._counted_at - then
        for name, count in self._counters.items():
            if name in before and seconds > 0:
                found[f"{name}_per_second"] = max(0, count - before[name]) / seconds
        return found | self._look_at_gpu()

    def _look_at_gpu(self) -> dict[str, float]:
        if self._gpu is None:
            return {}
        nvml, handle = self._gpu
        asked: dict[str, Callable[[], float]] = {
            "gpu_percent": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
            "gpu_memory_used": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used,
            "gpu_temperature": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            "gpu_power": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,  # NVML returns milliwatts
        }
        found = {}
        for name, ask in asked.items():
            try:
                found[name] = float(ask())
            except nvml.NVMLError:  # a virtual GPU or a slice of a GPU does not provide all values
                continue
        return found

    def _open_nvml(self, device: str) -> tuple[Any, Any] | None:
        try:
            nvml = importlib.import_module("pynvml")
            nvml.nvmlInit()
            # The UUID is needed because CUDA's device numbers depend on CUDA_VISIBLE_DEVICES.
            return nvml, nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        except ImportError:
            logger.warning("%s: GPU metrics are not logged: pip install 'callsheet[nvidia]'", label_of(self))
        except Exception as error:  # an NVML error, or a GPU of another vendor, which has no UUID
            logger.warning("%s: GPU metrics are not logged: %s: %s", label_of(self), type(error).__name__, error)
        return None


def _counters() -> dict[str, int]:
    """Return the bytes that disks and network have read, written, received and sent since the machine started."""
    found: dict[str, int] = {}
    if (disk := psutil.disk_io_counters()) is not None:
        found |= {"disk_read": disk.read_bytes, "disk_written": disk.write_bytes}
    if (network := psutil.net_io_counters()) is not None:
        found |= {"network_received": network.bytes_recv, "network_sent": network.bytes_sent}
    return found
