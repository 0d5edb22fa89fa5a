"""callsheet's own training loop."""

from callsheet.core.optional import needed_by

with needed_by(__name__):
    from callsheet.trainer.data import SeededDataset
    from callsheet.trainer.evaluation import Evaluator
    from callsheet.trainer.parallel import Parallel
    from callsheet.trainer.tasks import ForwardStepTask, HuggingFaceTask, SupervisedTask, Task
    from callsheet.trainer.trainer import Trainer

__all__ = ["Evaluator", "ForwardStepTask", "HuggingFaceTask", "Parallel", "SeededDataset", "SupervisedTask", "Task", "Trainer"]
