"""`composer.core.Evaluator`: a dataset on which Composer's Trainer evaluates, and its conversion to callsheet's `Evaluator`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from callsheet import trainer as callsheet_trainer
from callsheet.compat.composer.arguments import interval_of, several
from callsheet.compat.composer.data import is_loader, loader_of
from callsheet.compat.composer.rejections import reject
from callsheet.errors import ConfigError


class Evaluator:
    """One dataset for evaluation, with its own label and interval.

    Args:
        label: the name of the dataset, which is also the first part of its metrics' names.
        dataloader: an iterable of batches, or a `DataSpec`.
        metric_names: must be None: all of the model's metrics are computed.
        subset_num_batches: how many batches are used; None: the Trainer's `eval_subset_num_batches`.
        eval_interval: how often to evaluate; None: the Trainer's `eval_interval`.
        device_eval_microbatch_size: must be None.

    Raises:
        NotSupported: an argument is given that must be None.
    """

    def __init__(
        self,
        *,
        label: str,
        dataloader: Any,
        metric_names: Sequence[str] | None = None,
        subset_num_batches: int | None = None,
        eval_interval: Any = None,
        device_eval_microbatch_size: int | None = None,
    ) -> None:
        reject(
            f"Evaluator {label!r}: Evaluator",
            {
                "metric_names": (metric_names, None, "all of the model's metrics are computed; leave it out"),
                "device_eval_microbatch_size": (device_eval_microbatch_size, None, "give the dataloader smaller batches"),
            },
        )
        self.label, self.dataloader = label, dataloader
        self.subset_num_batches, self.eval_interval = subset_num_batches, eval_interval


def evaluators_of(given: Any, batches: int) -> dict[str, callsheet_trainer.Evaluator]:
    """Convert the Trainer's argument `eval_dataloader` to callsheet's evaluators. Return a dict of them by label.

    Args:
        given: None, a dataloader, an `Evaluator`, or a list of these.
        batches: how many batches are used, unless an `Evaluator` says so itself; -1: all.
    """
    found: dict[str, callsheet_trainer.Evaluator] = {}
    for number, each in enumerate(_as_list(given), 1):
        # Number the labels, to keep every evaluator. Of several evaluators without a label, Composer keeps only the last.
        label = "eval" if number == 1 else f"eval-{number}"
        evaluator = each if isinstance(each, Evaluator) else Evaluator(label=label, dataloader=each)
        if evaluator.label in found:
            raise ConfigError(f"two evaluators are called {evaluator.label!r}; give each an Evaluator(label=...) of its own")
        cut = evaluator.subset_num_batches if evaluator.subset_num_batches is not None else batches
        every = evaluator.eval_interval
        found[evaluator.label] = callsheet_trainer.Evaluator(
            loader_of(evaluator.dataloader, cut), interval_of("eval_interval", every) if every is not None else None
        )
    return found


def _as_list(given: Any) -> list[Any]:
    """Return the argument for evaluation data (None, a dataloader, an Evaluator, or a list of these) as a list.

    A list of batches counts as one dataloader.
    """
    is_list = isinstance(given, (list, tuple)) and len(given) > 0
    are_evaluators = [isinstance(each, Evaluator) for each in given] if is_list else []
    if any(are_evaluators) and not all(are_evaluators):
        kinds = ", ".join(type(each).__name__ for each in given)
        raise ConfigError(
            "Mixing Evaluator with other classes is not allowed, please wrap all other classes with the Evaluator class: "
            f"Evaluator(label=..., dataloader=...). Given: {kinds}"
        )
    return several(given) if is_list and all(map(is_loader, given)) else [] if given is None else [given]
