"""A copy of AutoModel's callback interface, which can be used without installing NeMo AutoModel."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

HOOKS = ("on_train_start", "on_train_batch_end", "on_validation_end", "on_save_checkpoint", "on_exception", "on_train_end")
"""All hooks of a recipe; each is called as `hook(recipe, **kwargs)`."""


class Callback:
    """The base class of AutoModel's callbacks: six hooks that do nothing."""

    def on_train_start(self, recipe: Any, **kwargs: Any) -> None:
        """Called when everything is set up and training begins."""

    def on_train_batch_end(self, recipe: Any, **kwargs: Any) -> None:
        """Called after the optimizer and the scheduler have stepped. The argument `train_log_data` is a `MetricsSample`."""

    def on_validation_end(self, recipe: Any, **kwargs: Any) -> None:
        """Called after all validation sets were evaluated. The argument `val_results` maps set names to `MetricsSample`s."""

    def on_save_checkpoint(self, recipe: Any, **kwargs: Any) -> None:
        """Called after a checkpoint was saved. The argument `checkpoint_info` is a dict with the checkpoint's step, path and losses."""

    def on_exception(self, recipe: Any, **kwargs: Any) -> None:
        """Called when training fails. The argument `exception` is the error."""

    def on_train_end(self, recipe: Any, **kwargs: Any) -> None:
        """Called when training has ended without an error."""


class CallbackRunner:
    """Calls the hooks of a list of callbacks, one after the other.

    If one raises an error, the remaining callbacks are not called.

    Args:
        callbacks: the callbacks, called in this order; None: none.
    """

    def __init__(self, callbacks: Sequence[Any] | None = None) -> None:
        self.callbacks = callbacks or []

    def on_train_start(self, recipe: Any, **kwargs: Any) -> None:
        """Call `on_train_start` of every callback, in order."""
        for callback in self.callbacks:
            callback.on_train_start(recipe, **kwargs)

    def on_train_batch_end(self, recipe: Any, **kwargs: Any) -> None:
        """Call `on_train_batch_end` of every callback, in order."""
        for callback in self.callbacks:
            callback.on_train_batch_end(recipe, **kwargs)

    def on_validation_end(self, recipe: Any, **kwargs: Any) -> None:
        """Call `on_validation_end` of every callback, in order."""
        for callback in self.callbacks:
            callback.on_validation_end(recipe, **kwargs)

    def on_save_checkpoint(self, recipe: Any, **kwargs: Any) -> None:
        """Call `on_save_checkpoint` of every callback, in order."""
        for callback in self.callbacks:
            callback.on_save_checkpoint(recipe, **kwargs)

    def on_exception(self, recipe: Any, **kwargs: Any) -> None:
        """Call `on_exception` of every callback, in order."""
        for callback in self.callbacks:
            callback.on_exception(recipe, **kwargs)

    def on_train_end(self, recipe: Any, **kwargs: Any) -> None:
        """Call `on_train_end` of every callback, in order."""
        for callback in self.callbacks:
            callback.on_train_end(recipe, **kwargs)


def rank_zero_only(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a hook so that it runs only on the first rank, according to `recipe.dist_env.is_main`.

    Args:
        hook: a method of a callback, which takes the recipe and keyword arguments.

    Returns:
        A method that returns None on the other ranks. If the recipe has no `dist_env`, the hook runs on all ranks.
    """

    @functools.wraps(hook)
    def gated(self: Any, recipe: Any, **kwargs: Any) -> Any:
        if hasattr(recipe, "dist_env") and not recipe.dist_env.is_main:
            return None
        return hook(self, recipe, **kwargs)

    return gated


@dataclass
class MetricsSample:
    """The metrics of a training step or of a validation.

    Args:
        step: the number of the step, counted from 0.
        epoch: the number of the epoch, counted from 0.
        metrics: the values by name.
        timestamp: the time at which the sample was created, in UTC, such as `2026-01-31T12:00:00.000Z`. A given value is ignored.
    """

    step: int
    epoch: int
    metrics: dict[str, Any] = field(default_factory=dict)
    timestamp: str | None = None

    def __post_init__(self) -> None:
        self.timestamp = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")

    def to_dict(self) -> dict[str, Any]:
        """Return one flat dictionary with step, epoch, timestamp and the metrics."""
        return {"step": self.step, "epoch": self.epoch, "timestamp": self.timestamp} | self.metrics
