"""What a torchtnt unit has that a host must know, and the place where it is asked for its batches."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torchtnt.framework.state import State
from torchtnt.utils.progress import estimated_steps_in_loop

from callsheet.bridges.copies import replace
from callsheet.errors import NotSupported


class Fetches:
    """Stands where torchtnt asks a unit for its next batch, which it tells no callback.

    Args:
        methods: by the name of the unit's method, what is called instead while it lives, with the unit's own method before its arguments.
    """

    def __init__(self, unit: Any, methods: Mapping[str, Callable[..., Any]]) -> None:
        names = [name for name in methods if hasattr(unit, name)]
        self._restores = [replace(unit, name, _standing_in(methods[name], getattr(unit, name))) for name in names]

    def remove(self) -> None:
        """Leave the unit as it was."""
        while self._restores:
            self._restores.pop()()


def _standing_in(instead: Any, fetch: Callable[..., Any]) -> Callable[..., Any]:
    owner, method = weakref.ref(instead.__self__), instead.__func__

    def fetched(*args: Any) -> Any:
        lives = owner()
        return fetch(*args) if lives is None else method(lives, fetch, *args)

    return fetched


def one_of_unit(tracked: Mapping[str, Any], name: str) -> Any:
    """The only one that the unit tracks, or that of AutoUnit's name."""
    if len(tracked) <= 1:
        return next(iter(tracked.values()), None)
    if name in tracked:
        return tracked[name]
    raise NotSupported(
        f"the torchtnt unit tracks {', '.join(tracked)}, and which of them is trained nobody says; call that one {name!r}"
    )


def duration_of(state: State, accumulate: int) -> str | None:
    """How long the loop will train, where that is known in our epochs or steps."""
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
    """The losses in what an `eval_step` returns: a scalar, AutoUnit's pair of loss and outputs, or scalars by name."""
    if isinstance(output, tuple) and output:
        output = output[0]
    named = output if isinstance(output, Mapping) else {"loss": output}
    return {name: value.detach() for name, value in named.items() if isinstance(value, Tensor) and value.numel() == 1}
