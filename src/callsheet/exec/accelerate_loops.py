"""Reads settings, logged values and batches from training loops that use Accelerate, while `callsheet exec` observes the loops."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from callsheet.exec.observation import Observation


class AccelerateLoops:
    """Finds the `Accelerator` that has prepared an optimizer. All references to accelerators and optimizers are weak."""

    def __init__(self) -> None:
        self._accelerators: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()

    def add(self, optimizer: Any, accelerator: Any) -> None:
        """Store which Accelerator has prepared the optimizer."""
        self._accelerators[optimizer] = weakref.ref(accelerator)

    def settings(self, optimizer: Any) -> dict[str, Any]:
        """Return the settings of the Accelerator that has prepared the optimizer, to store with the run. If none has, return {}."""
        reference = self._accelerators.get(optimizer)
        accelerator = reference() if reference is not None else None
        if accelerator is None:
            return {}
        return {
            "framework": f"Accelerate {sys.modules['accelerate'].__version__}",
            "gradient_accumulation_steps": accelerator.gradient_accumulation_steps,
            "mixed_precision": accelerator.mixed_precision,
        }


def prepare_optimizer(
    observation: Observation, prepare: Callable[..., Any], accelerator: Any, optimizer: Any, *args: Any, **options: Any
) -> Any:
    """Prepare the optimizer with Accelerate, and store which Accelerator has prepared it."""
    prepared = prepare(accelerator, optimizer, *args, **options)
    observation.accelerate.add(getattr(prepared, "optimizer", prepared), accelerator)
    return prepared


def log(observation: Observation, log: Callable[..., Any], accelerator: Any, values: Any, *args: Any, **options: Any) -> Any:
    """Log the values with Accelerate. Then log each number among them in callsheet's run, as `accelerate/<name>`."""
    from callsheet.bridges.accelerate.guests import numbers

    result = log(accelerator, values, *args, **options)
    if observation.loop is not None and (found := numbers(values)):
        observation.loop.log({f"accelerate/{name}": _copy_value(value) for name, value in found.items()})
    return result


def iterate(observation: Observation, iterate: Callable[[Any], Any], loader: Any) -> Any:
    """Iterate over a dataloader of Accelerate, which fetches batches in advance. Observe each batch only when the script receives it."""
    return observation.finder.batches(iterate, loader) if observation.finder is not None else iterate(loader)


def _copy_value(value: Any) -> Any:
    """Return a number as it is. Copy a tensor, because the script may change it. The copy stays on the tensor's device."""
    return value if isinstance(value, (int, float)) else value.detach().reshape(()).clone()
