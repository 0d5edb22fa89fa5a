"""callsheet's own training loop."""

from callsheet.trainer.tasks import HuggingFaceTask, SupervisedTask, Task
from callsheet.trainer.trainer import Trainer

__all__ = ["HuggingFaceTask", "SupervisedTask", "Task", "Trainer"]
