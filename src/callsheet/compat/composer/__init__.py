"""MosaicML Composer's API, implemented by callsheet: code written for Composer runs on callsheet after its import lines are changed.

`from composer import Callback, State, Logger, Trainer` becomes `from callsheet.compat.composer import ...`. In the same way,
replace `composer` in imports from `composer.callbacks`, `composer.loggers`, `composer.core`, `composer.models` and their
submodules. Composer itself need not be installed. A name without a counterpart in callsheet can be imported, and raises
`NotSupported` when it is used.
"""

from typing import Any

from callsheet.core.optional import needed_by

with needed_by(__name__):
    from callsheet.bridges.composer.names import Callback, Event, LoggerDestination
    from callsheet.bridges.composer.state import Logger, State
    from callsheet.bridges.composer.time import Time, Timestamp, TimeUnit
    from callsheet.compat.composer import core as _core
    from callsheet.compat.composer.data import DataSpec
    from callsheet.compat.composer.evaluators import Evaluator
    from callsheet.compat.composer.models import ComposerModel
    from callsheet.compat.composer.submodules import offer_nothing
    from callsheet.compat.composer.trainer import Trainer

__all__ = [
    "Callback",
    "ComposerModel",
    "DataSpec",
    "Evaluator",
    "Event",
    "Logger",
    "LoggerDestination",
    "State",
    "Time",
    "TimeUnit",
    "Timestamp",
    "Trainer",
]

_OPTIM_HINT = "give an optimizer and a scheduler of torch.optim, or a function of the state as schedulers="
_UTILS_HINT = "use torch.distributed and torch itself; callsheet's own callbacks have ctx.gather(...) and ctx.run"
_ALGORITHMS_HINT = "algorithms are not run; apply them to model and data yourself, or write a callback"
_METRICS_HINT = "use torchmetrics"
_LOSS_HINT = "use torch.nn.functional, such as cross_entropy"
_CHECKPOINT_HINT = "checkpoints are callsheet's; give save_folder, load_path or autoresume to the Trainer"
_DISTRIBUTED_HINT = "use callsheet.Trainer(parallel=...)"
offer_nothing(
    __name__,
    {
        "algorithms": _ALGORITHMS_HINT,
        "functional": _ALGORITHMS_HINT,
        "optim": _OPTIM_HINT,
        "optim.decoupled_weight_decay": _OPTIM_HINT,
        "optim.scheduler": _OPTIM_HINT,
        "utils": _UTILS_HINT,
        "utils.dist": _UTILS_HINT,
        "utils.reproducibility": "give Trainer(seed=...)",
        "utils.object_store": "give paths such as 's3://...' to the Trainer",
        "metrics": _METRICS_HINT,
        "metrics.metrics": _METRICS_HINT,
        "metrics.nlp": _METRICS_HINT,
        "loss": _LOSS_HINT,
        "loss.loss": _LOSS_HINT,
        "checkpoint": _CHECKPOINT_HINT,
        "distributed": _DISTRIBUTED_HINT,
        "devices": "give Trainer(device='cpu') or 'gpu'",
        "profiler": "use callsheet.callbacks.TorchProfiler",
    },
)


def __getattr__(name: str) -> Any:
    if name in ("Algorithm", "Engine"):
        return getattr(_core, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
