"""The built-in callbacks, one in each file."""

from typing import TYPE_CHECKING

from callsheet.core.on_demand import attributes

if TYPE_CHECKING:
    from callsheet.callbacks.activation_monitor import ActivationMonitor
    from callsheet.callbacks.checkpoint_saver import CheckpointSaver
    from callsheet.callbacks.disk_space_guard import DiskSpaceGuard
    from callsheet.callbacks.early_stopper import EarlyStopper
    from callsheet.callbacks.ema import EMA
    from callsheet.callbacks.export_for_inference import ExportForInferenceCallback
    from callsheet.callbacks.free_outputs import FreeOutputs
    from callsheet.callbacks.freeze_unfreeze import FreezeUnfreeze
    from callsheet.callbacks.garbage_collection import GarbageCollection
    from callsheet.callbacks.generate import Generate
    from callsheet.callbacks.gradient_accumulation_scheduler import GradientAccumulationScheduler
    from callsheet.callbacks.hang_detector import HangDetector
    from callsheet.callbacks.heartbeat import Heartbeat
    from callsheet.callbacks.history import History
    from callsheet.callbacks.image_visualizer import ImageVisualizer
    from callsheet.callbacks.lambda_ import Lambda
    from callsheet.callbacks.load_checkpoint import LoadCheckpoint
    from callsheet.callbacks.loss_spike_detector import LossSpikeDetector
    from callsheet.callbacks.lr_monitor import LRMonitor
    from callsheet.callbacks.memory_monitor import MemoryMonitor
    from callsheet.callbacks.memory_snapshot import MemorySnapshot
    from callsheet.callbacks.mlperf import MLPerfCallback
    from callsheet.callbacks.model_summary import ModelSummary
    from callsheet.callbacks.nan_monitor import NaNMonitor
    from callsheet.callbacks.notify import Notify
    from callsheet.callbacks.oom_observer import OOMObserver
    from callsheet.callbacks.optimizer_monitor import OptimizerMonitor
    from callsheet.callbacks.runtime_estimator import RuntimeEstimator
    from callsheet.callbacks.save_on_trigger import SaveOnTrigger
    from callsheet.callbacks.slow_rank_detector import SlowRankDetector
    from callsheet.callbacks.speed_monitor import SpeedMonitor
    from callsheet.callbacks.system_metrics_monitor import SystemMetricsMonitor
    from callsheet.callbacks.threshold_stopper import ThresholdStopper
    from callsheet.callbacks.time_limit import TimeLimit
    from callsheet.callbacks.torch_profiler import TorchProfiler

__all__ = [
    "EMA",
    "ActivationMonitor",
    "CheckpointSaver",
    "DiskSpaceGuard",
    "EarlyStopper",
    "ExportForInferenceCallback",
    "FreeOutputs",
    "FreezeUnfreeze",
    "GarbageCollection",
    "Generate",
    "GradientAccumulationScheduler",
    "HangDetector",
    "Heartbeat",
    "History",
    "ImageVisualizer",
    "LRMonitor",
    "Lambda",
    "LoadCheckpoint",
    "LossSpikeDetector",
    "MLPerfCallback",
    "MemoryMonitor",
    "MemorySnapshot",
    "ModelSummary",
    "NaNMonitor",
    "Notify",
    "OOMObserver",
    "OptimizerMonitor",
    "RuntimeEstimator",
    "SaveOnTrigger",
    "SlowRankDetector",
    "SpeedMonitor",
    "SystemMetricsMonitor",
    "ThresholdStopper",
    "TimeLimit",
    "TorchProfiler",
]

__getattr__ = attributes(  # import each callback's module when the callback is first used, because importing torch is slow
    __name__,
    {
        "ActivationMonitor": "callsheet.callbacks.activation_monitor",
        "CheckpointSaver": "callsheet.callbacks.checkpoint_saver",
        "DiskSpaceGuard": "callsheet.callbacks.disk_space_guard",
        "EMA": "callsheet.callbacks.ema",
        "EarlyStopper": "callsheet.callbacks.early_stopper",
        "ExportForInferenceCallback": "callsheet.callbacks.export_for_inference",
        "FreeOutputs": "callsheet.callbacks.free_outputs",
        "FreezeUnfreeze": "callsheet.callbacks.freeze_unfreeze",
        "GarbageCollection": "callsheet.callbacks.garbage_collection",
        "Generate": "callsheet.callbacks.generate",
        "GradientAccumulationScheduler": "callsheet.callbacks.gradient_accumulation_scheduler",
        "HangDetector": "callsheet.callbacks.hang_detector",
        "Heartbeat": "callsheet.callbacks.heartbeat",
        "History": "callsheet.callbacks.history",
        "ImageVisualizer": "callsheet.callbacks.image_visualizer",
        "LRMonitor": "callsheet.callbacks.lr_monitor",
        "Lambda": "callsheet.callbacks.lambda_",
        "LoadCheckpoint": "callsheet.callbacks.load_checkpoint",
        "LossSpikeDetector": "callsheet.callbacks.loss_spike_detector",
        "MLPerfCallback": "callsheet.callbacks.mlperf",
        "MemoryMonitor": "callsheet.callbacks.memory_monitor",
        "MemorySnapshot": "callsheet.callbacks.memory_snapshot",
        "ModelSummary": "callsheet.callbacks.model_summary",
        "NaNMonitor": "callsheet.callbacks.nan_monitor",
        "Notify": "callsheet.callbacks.notify",
        "OOMObserver": "callsheet.callbacks.oom_observer",
        "OptimizerMonitor": "callsheet.callbacks.optimizer_monitor",
        "RuntimeEstimator": "callsheet.callbacks.runtime_estimator",
        "SaveOnTrigger": "callsheet.callbacks.save_on_trigger",
        "SlowRankDetector": "callsheet.callbacks.slow_rank_detector",
        "SpeedMonitor": "callsheet.callbacks.speed_monitor",
        "SystemMetricsMonitor": "callsheet.callbacks.system_metrics_monitor",
        "ThresholdStopper": "callsheet.callbacks.threshold_stopper",
        "TimeLimit": "callsheet.callbacks.time_limit",
        "TorchProfiler": "callsheet.callbacks.torch_profiler",
    },
)


def __dir__() -> list[str]:
    return __all__
