"""`composer.callbacks`: callbacks with Composer's names and options, implemented by callsheet's callbacks.

The metrics that they log have callsheet's names, and are part of the Trainer's records; see the page "Built-ins", "Coming from
Composer".
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from callsheet import callbacks
from callsheet.bridges.composer.time import Time
from callsheet.callbacks import FreeOutputs, LRMonitor, NaNMonitor
from callsheet.callbacks.image_visualizer import Mode
from callsheet.callbacks.runtime_estimator import Unit
from callsheet.callbacks.support import metric_mode
from callsheet.callbacks.support.mlperf_result import Division, Status
from callsheet.compat.composer.rejections import reject
from callsheet.compat.composer.submodules import offer
from callsheet.compat.not_offered import not_offered
from callsheet.errors import ConfigError

__all__ = [
    "ActivationMonitor",
    "CheckpointSaver",
    "EarlyStopper",
    "ExportForInferenceCallback",
    "FreeOutputs",
    "ImageVisualizer",
    "LRMonitor",
    "LoadCheckpoint",
    "MLPerfCallback",
    "MemoryMonitor",
    "MemorySnapshot",
    "NaNMonitor",
    "OOMObserver",
    "OptimizerMonitor",
    "RuntimeEstimator",
    "SpeedMonitor",
    "SystemMetricsMonitor",
    "ThresholdStopper",
]

_UPLOADS_HINT = "files are given to the run's loggers, which upload what they can"
_FILES_HINT = "a file has the run's name for a folder, and step and rank in its own"
_CHECKPOINTS_HINT = "a checkpoint is a folder with a name of its own; see Trainer(save_folder=...)"


_RULESET_OF_BENCHMARK = {"resnet": "4.0.0", "bert": "4.1.0"}
"""For each of Composer's two benchmarks, the last version of the MLPerf rules that includes this benchmark."""


class CheckpointSaver(callbacks.CheckpointSaver):
    """Saves checkpoints at an interval and when training ends. With `num_checkpoints_to_keep=-1`, it keeps all checkpoints."""

    def __init__(
        self,
        folder: str | os.PathLike[str] = "{run_name}/checkpoints",
        filename: str | os.PathLike[str] = "ep{epoch}-ba{batch}-rank{rank}.pt",
        remote_file_name: str | os.PathLike[str] | None = "{run_name}/checkpoints/ep{epoch}-ba{batch}-rank{rank}.pt",
        latest_filename: str | os.PathLike[str] | None = "latest-rank{rank}.pt",
        latest_remote_file_name: str | os.PathLike[str] | None = "{run_name}/checkpoints/latest-rank{rank}.pt",
        save_interval: Any = "1ep",
        *,
        overwrite: bool = False,
        num_checkpoints_to_keep: int = -1,
        weights_only: bool = False,
        ignore_keys: Any = None,
        num_concurrent_uploads: int = 1,
        upload_timeout_in_seconds: int = 3600,
    ) -> None:
        prefix = "{run_name}/checkpoints"
        reject(
            "CheckpointSaver",
            {
                "folder": (str(folder), prefix, "give it to the Trainer, as save_folder"),
                "filename": (str(filename), "ep{epoch}-ba{batch}-rank{rank}.pt", _CHECKPOINTS_HINT),
                "remote_file_name": (
                    str(remote_file_name),
                    f"{prefix}/ep{{epoch}}-ba{{batch}}-rank{{rank}}.pt",
                    _CHECKPOINTS_HINT,
                ),
                "latest_filename": (str(latest_filename), "latest-rank{rank}.pt", _CHECKPOINTS_HINT),
                "latest_remote_file_name": (str(latest_remote_file_name), f"{prefix}/latest-rank{{rank}}.pt", _CHECKPOINTS_HINT),
                "overwrite": (overwrite, False, "give the run a name of its own, or Trainer(autoresume=True)"),
                "weights_only": (weights_only, False, "export the weights; a checkpoint has everything that a resume needs"),
                "ignore_keys": (ignore_keys, None, "leave keys out when loading"),
                "num_concurrent_uploads": (num_concurrent_uploads, 1, _CHECKPOINTS_HINT),
                "upload_timeout_in_seconds": (upload_timeout_in_seconds, 3600, _CHECKPOINTS_HINT),
            },
        )
        if callable(save_interval):
            raise ConfigError(
                "CheckpointSaver(save_interval=...) takes no function here; ask with ctx.control.save(why) in a callback"
            )
        super().__init__(
            save_interval=save_interval if isinstance(save_interval, int) else str(save_interval),
            keep=None if num_checkpoints_to_keep < 0 else num_checkpoints_to_keep,
        )


class SpeedMonitor(callbacks.SpeedMonitor):
    """Logs the throughput, and which fraction of the device's peak FLOP/s is used."""

    def __init__(self, window_size: int = 100, gpu_flops_available: float | None = None, time_unit: str = "hours") -> None:
        reject("SpeedMonitor", {"time_unit": (time_unit, "hours", "a record has its elapsed seconds")})
        super().__init__(window_size=window_size, peak_flops=gpu_flops_available)


class RuntimeEstimator(callbacks.RuntimeEstimator):
    """Logs an estimate of the remaining time of the run."""

    def __init__(self, skip_batches: int = 1, time_unit: Unit = "hours") -> None:
        super().__init__(skip_batches=skip_batches, time_unit=time_unit)


class OptimizerMonitor(callbacks.OptimizerMonitor):
    """Logs norms of the gradients, and the metrics that the optimizer computes itself."""

    def __init__(self, log_optimizer_metrics: bool = True, batch_log_interval: int = 10) -> None:
        super().__init__(log_optimizer_metrics=log_optimizer_metrics, batch_log_interval=batch_log_interval)


class MemoryMonitor(callbacks.MemoryMonitor):
    """Logs how much memory the process and the device use."""

    def __init__(self, memory_keys: Mapping[str, str] | None = None, dist_aggregate_batch_interval: int | None = None) -> None:
        reject(
            "MemoryMonitor",
            {
                "memory_keys": (memory_keys, None, "all are logged, in bytes"),
                "dist_aggregate_batch_interval": (
                    dist_aggregate_batch_interval, None, "each record has the highest value of all ranks"
                ),
            },
        )  # fmt: skip
        super().__init__()


class MemorySnapshot(callbacks.MemorySnapshot):
    """Writes a snapshot of the allocations on the device, once per run."""

    def __init__(
        self,
        skip_batches: int = 1,
        interval: Any = "3ba",
        max_entries: int = 100000,
        folder: str = "{run_name}/torch_traces",
        filename: str = "rank{rank}.{batch}.memory_snapshot",
        remote_file_name: str | None = "{run_name}/torch_memory_traces",
        overwrite: bool = False,
    ) -> None:
        reject(
            "MemorySnapshot",
            {
                "filename": (filename, "rank{rank}.{batch}.memory_snapshot", _FILES_HINT),
                "remote_file_name": (remote_file_name, "{run_name}/torch_memory_traces", _UPLOADS_HINT),
                "overwrite": (overwrite, False, _FILES_HINT),
            },
        )
        super().__init__(
            skip_batches=skip_batches,
            interval=_in_batches("MemorySnapshot", interval),
            max_entries=max_entries,
            folder=None if folder == "{run_name}/torch_traces" else folder,
        )


class OOMObserver(callbacks.OOMObserver):
    """Writes a snapshot of the allocations on the device when the device runs out of memory."""

    def __init__(
        self,
        max_entries: int = 100000,
        folder: str = "{run_name}/torch_traces",
        filename: str = "rank{rank}_oom",
        remote_file_name: str | None = "{run_name}/oom_traces/rank{rank}_oom",
        overwrite: bool = False,
    ) -> None:
        reject(
            "OOMObserver",
            {
                "filename": (filename, "rank{rank}_oom", _FILES_HINT),
                "remote_file_name": (remote_file_name, "{run_name}/oom_traces/rank{rank}_oom", _UPLOADS_HINT),
                "overwrite": (overwrite, False, _FILES_HINT),
            },
        )
        super().__init__(max_entries=max_entries, folder=None if folder == "{run_name}/torch_traces" else folder)


class ImageVisualizer(callbacks.ImageVisualizer):
    """Logs images of the inputs and of segmentations."""

    def __init__(
        self,
        interval: Any = "100ba",
        mode: Mode = "input",
        num_images: int = 8,
        channels_last: bool = False,
        input_key: Any = 0,
        target_key: Any = 1,
    ) -> None:
        super().__init__(
            interval=interval if isinstance(interval, int) else str(interval),
            mode=mode,
            num_images=num_images,
            channels_last=channels_last,
            input_key=input_key,
            target_key=target_key,
        )


class MLPerfCallback(callbacks.MLPerfCallback):
    """Writes the result file that the MLPerf rules require."""

    def __init__(
        self,
        root_folder: str,
        index: int,
        benchmark: str = "resnet",
        target: float = 0.759,
        division: Division = "open",
        metric_name: str = "MulticlassAccuracy",
        metric_label: str = "eval",
        submitter: str = "MosaicML",
        system_name: str | None = None,
        status: Status = "onprem",
        cache_clear_cmd: str | Sequence[str] | None = None,
        host_processors_per_node: int | None = None,
        exit_at_target: bool = False,
    ) -> None:
        reject(
            "MLPerfCallback",
            {"host_processors_per_node": (host_processors_per_node, None, "the description of the system is not written here")},
        )
        super().__init__(
            root_folder=root_folder,
            index=index,
            benchmark=benchmark,
            target=target,
            division=division,
            monitor=f"{metric_label}/{metric_name}",
            submitter=submitter,
            system_name=system_name or "",
            status=status,
            ruleset=_RULESET_OF_BENCHMARK.get(benchmark, ""),
            cache_clear_cmd=cache_clear_cmd.split() if isinstance(cache_clear_cmd, str) else cache_clear_cmd,
            stop=exit_at_target,
        )


class ThresholdStopper(callbacks.ThresholdStopper):
    """Stops training when a metric reaches a value."""

    def __init__(
        self,
        monitor: str,
        dataloader_label: str,
        threshold: float,
        *,
        comp: str | Callable[[Any, Any], Any] | None = None,
        stop_on_batch: bool = False,
    ) -> None:
        super().__init__(
            monitor=f"{dataloader_label}/{monitor}",
            threshold=threshold,
            mode=_mode("ThresholdStopper", comp, monitor),
            records="all" if stop_on_batch else "epoch",
        )


class EarlyStopper(callbacks.EarlyStopper):
    """Stops training when a metric has not improved for longer than `patience`. If `patience` is a whole number, it counts epochs."""

    def __init__(
        self,
        monitor: str,
        dataloader_label: str,
        comp: str | Callable[[Any, Any], Any] | None = None,
        min_delta: float = 0.0,
        patience: Any = 1,
    ) -> None:
        if dataloader_label == "train":
            raise ConfigError(
                f"EarlyStopper({monitor!r}, 'train') can monitor only metrics of evaluations, unlike in Composer: "
                "evaluate on an Evaluator with training data and give its label"
            )
        time = Time.from_input(patience, "ep")
        if time.unit.value not in ("ep", "ba"):
            raise ValueError(f"EarlyStopper(patience={patience!r}): give epochs or batches")
        super().__init__(
            monitor=f"{dataloader_label}/{monitor}",
            mode=_mode("EarlyStopper", comp, monitor),
            min_delta=abs(min_delta),
            patience=str(time + 1),  # Composer stops when the wait exceeds the patience, callsheet when it equals the patience
        )


class ExportForInferenceCallback(callbacks.ExportForInferenceCallback):
    """Exports the model to a file for inference when training ends."""

    def __init__(
        self,
        save_format: Any,
        save_path: str,
        save_object_store: Any = None,
        sample_input: Any = None,
        transforms: Any = None,
        input_names: Sequence[str] | None = None,
        output_names: Sequence[str] | None = None,
    ) -> None:
        kind: Any = str(getattr(save_format, "value", save_format))  # the base class rejects an unknown format
        reject(
            "ExportForInferenceCallback",
            {
                "save_object_store": (save_object_store, None, _UPLOADS_HINT),
                "transforms": (transforms, None, "change the model in a step of its own"),
                "save_format": (
                    kind,
                    kind.replace("torchscript", "torch_export"),
                    "torch moves away from it; use 'torch_export'",
                ),
            },
        )
        super().__init__(
            save_format=kind, save_path=save_path, sample_input=sample_input, input_names=input_names, output_names=output_names
        )


class ActivationMonitor(callbacks.ActivationMonitor):
    """Logs norms and moments of the activations."""

    def __init__(self, interval: Any = "25ba", ignore_module_types: list[str] | None = None, only_log_wandb: bool = True) -> None:
        super().__init__(batch_log_interval=_in_batches("ActivationMonitor", interval), ignore_types=ignore_module_types or ())


class LoadCheckpoint(callbacks.LoadCheckpoint):
    """Starts training with the weights of a checkpoint. The argument `load_weights_only=True` is required."""

    def __init__(
        self,
        load_path: str,
        load_weights_only: bool = False,
        strict_model_weights: bool = True,
        ignore_keys: list[str] | None = None,
        event: Any = "before_load",
    ) -> None:
        named = str(getattr(event, "value", event)).lower()
        reject(
            "LoadCheckpoint",
            {
                "event": (named, "before_load", "it is loaded when the Trainer is made"),
                "load_weights_only": (
                    load_weights_only,
                    True,
                    "to resume with the whole state, give the path to the Trainer as load_path",
                ),
            },
        )
        super().__init__(path=load_path, leave_out=ignore_keys or (), strict=strict_model_weights)


class SystemMetricsMonitor(callbacks.SystemMetricsMonitor):
    """Logs metrics of the machine, such as the use of its processors, memory, disk, network and GPUs."""

    def __init__(self, log_all_data: bool = False) -> None:
        reject("SystemMetricsMonitor", {"log_all_data": (log_all_data, False, "each record has the highest value of all ranks")})
        super().__init__()


def _in_batches(who: str, interval: Any) -> int:
    time = Time.from_input(interval, "ba")
    if time.unit.value != "ba":
        raise ConfigError(f"{who}(interval={interval!r}): give batches, such as '25ba'")
    return int(time.value)


def _mode(who: str, comp: Any, monitor: str) -> metric_mode.Mode:
    """Return `min` if a lower value of the metric is better, else `max`. Composer's argument `comp` decides, or else the metric's name."""
    if comp is None:
        return "min" if metric_mode.is_lower_better("auto", monitor) else "max"
    modes: dict[Any, metric_mode.Mode] = {"less": "min", "lt": "min", torch.less: "min", torch.lt: "min"}
    modes |= {"greater": "max", "gt": "max", torch.greater: "max", torch.gt: "max"}
    known = comp.lower() if isinstance(comp, str) else comp
    if known not in modes:
        raise ConfigError(f"{who}(comp={comp!r}): give 'less' or 'greater'; no other function is supported")
    return modes[known]


offer(
    __name__,
    {
        "activation_monitor": "ActivationMonitor",
        "checkpoint_saver": "CheckpointSaver",
        "early_stopper": "EarlyStopper",
        "export_for_inference": "ExportForInferenceCallback",
        "free_outputs": "FreeOutputs",
        "generate": "Generate",
        "image_visualizer": "ImageVisualizer",
        "load_checkpoint": "LoadCheckpoint",
        "lr_monitor": "LRMonitor",
        "memory_monitor": "MemoryMonitor",
        "memory_snapshot": "MemorySnapshot",
        "mlperf": "MLPerfCallback",
        "nan_monitor": "NaNMonitor",
        "oom_observer": "OOMObserver",
        "optimizer_monitor": "OptimizerMonitor",
        "runtime_estimator": "RuntimeEstimator",
        "speed_monitor": "SpeedMonitor",
        "system_metrics_monitor": "SystemMetricsMonitor",
        "threshold_stopper": "ThresholdStopper",
    },
)


def __getattr__(name: str) -> Any:
    if name == "Generate":
        return not_offered(name, "Composer", "use callsheet.callbacks.Generate", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
