"""AutoModel's callback interface, as the bridge and `callsheet.compat.automodel` need it: nothing of NeMo AutoModel is imported."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

HOOKS = ("on_train_start", "on_train_batch_end", "on_validation_end", "on_save_checkpoint", "on_exception", "on_train_end")
"""All that a recipe tells; each is called as `hook(recipe, **kwargs)`."""


class Callback:
    """The base of AutoModel's callbacks: six hooks that do nothing."""

    def on_train_start(self, recipe: Any, **kwargs: Any) -> None:
        """All is made, and training begins."""

    def on_train_batch_end(self, recipe: Any, **kwargs: Any) -> None:
        """A step is over, the learning rate's included; `train_log_data` is its `MetricsSample`."""

    def on_validation_end(self, recipe: Any, **kwargs: Any) -> None:
        """All validation sets have been evaluated; `val_results` are their `MetricsSample` by name."""

    def on_save_checkpoint(self, recipe: Any, **kwargs: Any) -> None:
        """A checkpoint has been saved; `checkpoint_info` is a dictionary about it."""

    def on_exception(self, recipe: Any, **kwargs: Any) -> None:
        """Training fails; `exception` is why."""

    def on_train_end(self, recipe: Any, **kwargs: Any) -> None:
        """Training has ended as it should."""


class CallbackRunner:
    """Tells a list of callbacks, one after the other; what one raises comes out, and the rest is not told."""

    def __init__(self, callbacks: Sequence[Any] | None = None) -> None:
        self.callbacks = callbacks or []

    def on_train_start(self, recipe: Any, **kwargs: Any) -> None:
        """See `Callback`."""
        for callback in self.callbacks:
            callback.on_train_start(recipe, **kwargs)

    def on_train_batch_end(self, recipe: Any, **kwargs: Any) -> None:
        """See `Callback`."""
        for callback in self.callbacks:
            callback.on_train_batch_end(recipe, **kwargs)

    def on_validation_end(self, recipe: Any, **kwargs: Any) -> None:
        """See `Callback`."""
        for callback in self.callbacks:
            callback.on_validation_end(recipe, **kwargs)

    def on_save_checkpoint(self, recipe: Any, **kwargs: Any) -> None:
        """See `Callback`."""
        for callback in self.callbacks:
            callback.on_save_checkpoint(recipe, **kwargs)

    def on_exception(self, recipe: Any, **kwargs: Any) -> None:
        """See `Callback`."""
        for callback in self.callbacks:
            callback.on_exception(recipe, **kwargs)

    def on_train_end(self, recipe: Any, **kwargs: Any) -> None:
        """See `Callback`."""
        for callback in self.callbacks:
            callback.on_train_end(recipe, **kwargs)


def rank_zero_only(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A hook that runs on the first rank alone, by `recipe.dist_env.is_main`; where a recipe has no `dist_env`, everywhere."""

    @functools.wraps(hook)
    def gated(self: Any, recipe: Any, **kwargs: Any) -> Any:
        if hasattr(recipe, "dist_env") and not recipe.dist_env.is_main:
            return None
        return hook(self, recipe, **kwargs)

    return gated


@dataclass
class MetricsSample:
    """What was measured at a step; `timestamp` is when this was made, in UTC, whatever is given."""

    step: int
    epoch: int
    metrics: dict[str, Any] = field(default_factory=dict)
    timestamp: str | None = None

    def __post_init__(self) -> None:
        self.timestamp = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")

    def to_dict(self) -> dict[str, Any]:
        """One flat dictionary, the metrics beside step, epoch and timestamp."""
        return {"step": self.step, "epoch": self.epoch, "timestamp": self.timestamp} | self.metrics
