"""Reads the optimizer, losses and length of training from a torchtnt unit, and wraps its methods that fetch batches."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torchtnt.framework.state import State
from torchtnt.utils.progress import estimated_steps_in_loop

from callsheet.errors import NotSupported
from callsheet.run.copies import replace


class Fetches:
    """Replaces a unit's methods that fetch batches, because torchtnt calls no callback before a fetch, and passes no batch to callbacks.

    Args:
        methods: the names of the unit's methods, each with the bound method that is called instead. The bound method receives
            the unit's own method as its first argument. If its object no longer exists, the unit's own method is called.
    """

    def __init__(self, unit: Any, methods: Mapping[str, Callable[..., Any]]) -> None:
        names = [name for name in methods if hasattr(unit, name)]
        self._restores = [replace(unit, name, _replacement(methods[name], getattr(unit, name))) for name in names]

    def remove(self) -> None:
        """Restore the unit's own methods."""
        while self._restores:
            self._restores.pop()()


def _replacement(instead: Any, fetch: Callable[..., Any]) -> Callable[..., Any]:
    reference, method = weakref.ref(instead.__self__), instead.__func__

    def fetched(*args: Any) -> Any:
        owner = reference()
        return fetch(*args) if owner is None else method(owner, fetch, *args)

    return fetched


def one_of_unit(tracked: Mapping[str, Any], name: str) -> Any:
    """Return the only object in `tracked`, or None if `tracked` is empty. Of several objects, return the one named `name`.

    Raises:
        NotSupported: `tracked` has several objects, and none is named `name`.
    """
    if len(tracked) <= 1:
        return next(iter(tracked.values()), None)
    if name in tracked:
        return tracked[name]
    raise NotSupported(
        f"the torchtnt unit tracks {', '.join(tracked)}, and the host cannot know which one is trained; name that one {name!r}"
    )


def duration_of(state: State, accumulate: int) -> str | None:
    """Return how long the loop will train, in epochs or steps; None if that is not known."""
    train = state.train_state
    if train is None or not (train.max_steps or train.max_epochs):
        return None
    if not train.max_steps:
        return f"{train.max_epochs}ep"
    steps = estimated_steps_in_loop(
        train.dataloader, max_steps=train.max_steps, max_steps_per_epoch=train.max_steps_per_epoch, epochs=train.max_epochs
    )
    return f"{steps or train.max_steps}ba" if accumulate == 1 else None


def losses_in(output: Any) -> dict[str, Tensor]:
    """Return the losses in the return value of an `eval_step`: a scalar, AutoUnit's pair of loss and outputs, or scalars by name."""
    if isinstance(output, tuple) and output:
        output = output[0]
    named = output if isinstance(output, Mapping) else {"loss": output}
    return {name: value.detach() for name, value in named.items() if isinstance(value, Tensor) and value.numel() == 1}


class MeanLosses:
    """Computes the mean of each loss over the samples of an evaluation."""

    def __init__(self) -> None:
        self._sums: dict[str, Any] = {}
        self.samples = 0
        """The number of samples in all batches so far."""

    def add(self, output: Any, samples: int) -> None:
        """Add the losses that an `eval_step` has returned. `samples` is the number of samples in the step's batch."""
        self.samples += samples
        for name, loss in losses_in(output).items():
            self._sums[name] = self._sums.get(name, 0.0) + loss * samples

    def means(self) -> dict[str, float]:
        """Return the mean of each loss over all samples so far, by the loss's name."""
        return {name: float(total) / self.samples for name, total in self._sums.items()}
