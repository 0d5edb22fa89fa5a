"""The batches of a training loop that was recognized, and the dataloader that they come from."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

from callsheet.trainer.tasks import counts_of

NO_DATA = ()
"""Stored instead of a fetched batch that is None, because a stored None means that there is no new batch."""


class LoopBatches:
    """Keeps the latest batch of a training loop, and a reference to the loop's dataloader.

    Args:
        loader: the dataloader of the batches. None: the batches are the arguments with which the model is called.
        ranks: the number of ranks. Each has a batch of the same size.
    """

    def __init__(self, loader: Any, *, ranks: int) -> None:
        self._ranks = ranks
        self.counts_of: Callable[[Any], tuple[int, int]] = counts_of
        """Returns the numbers of samples and tokens that all ranks together have in a batch."""
        if ranks > 1:
            self.counts_of = lambda batch: self.on_all_ranks(counts_of(batch))
        self.has_loader = loader is not None
        """Whether the batches come from a dataloader. Otherwise they are the arguments of the model."""
        self._loader = weakref.ref(loader) if loader is not None else None
        self.other: tuple[weakref.ref[Any], Any] | None = None
        """Another dataloader and its latest batch, as long as it is unknown whether they are for training or for an evaluation."""
        self.new: Any = None
        """The batch that was fetched last, or None if it was used in a microbatch."""
        self.latest: Any = None
        """The batch of the latest microbatch in the open step, or None if no callback reads it.

        When the step ends, this attribute becomes None, so that the batch is not in memory longer than the script keeps it.
        """
        self.fetched = 0
        """The number of batches that were fetched since the iteration over the dataloader began."""

    def on_all_ranks(self, counts: tuple[int, int]) -> tuple[int, int]:
        """Return the samples and tokens of all ranks together: `counts`, those of this rank, times the number of ranks."""
        return counts[0] * self._ranks, counts[1] * self._ranks

    def come_from(self, loader: Any) -> bool:
        """Return whether the loop takes its batches from `loader`."""
        return self._loader is not None and self._loader() is loader

    def add_other(self, loader: Any, batch: Any) -> None:
        """Store a batch of a dataloader other than the loop's. It may be for the next training step or for an evaluation."""
        if self._loader is not None:
            self.other = weakref.ref(loader), batch

    def forget_other(self) -> None:
        """Forget the batch that `add_other` has stored, because the batch was not for training."""
        self.other = None

    def switch(self) -> bool:
        """If a step begins without a new batch, use the batch that `add_other` stored, and its dataloader from then on.

        Return whether that ends an epoch; see `begin`.
        """
        other, self.other = self.other, None
        if other is None or self.new is not None:
            return False
        self._loader, batch = other
        is_over = self.begin()
        self.add(batch)
        return is_over

    def add(self, batch: Any) -> None:
        """Store a batch that the loop has fetched, and count it."""
        self.new = batch if batch is not None else NO_DATA
        self.fetched += 1

    def begin(self) -> bool:
        """Reset the count of batches when an iteration over the dataloader begins or ends. Return whether the count was at least two.

        Only such an iteration is an epoch, because a loop may fetch a single batch in each iteration, with `next(iter(loader))`.
        """
        fetched, self.fetched = self.fetched, 0
        return fetched > 1


def batch_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the arguments of a model call as a batch: one positional argument as it is, several as a tuple, keywords as a dict."""
    return args[0] if len(args) == 1 and not kwargs else args or dict(kwargs)
