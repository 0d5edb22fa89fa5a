"""The built-in callbacks, one a file."""

from callsheet.callbacks.checkpoint_saver import CheckpointSaver
from callsheet.callbacks.lr_monitor import LRMonitor
from callsheet.callbacks.nan_monitor import NaNMonitor
from callsheet.callbacks.progress import Progress
from callsheet.callbacks.speed_monitor import SpeedMonitor

__all__ = ["CheckpointSaver", "LRMonitor", "NaNMonitor", "Progress", "SpeedMonitor"]
