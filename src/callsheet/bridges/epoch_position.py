"""Counts the batches of an epoch in a loop that iterates over the data itself, so that a resumed run continues at the same batch."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch.utils.data import DataLoader

from callsheet.core.randomness import random_state, restore_random_state
from callsheet.trainer.data.loaders import generators_of

logger = logging.getLogger("callsheet")


def length_of(loader: Any) -> int | None:
    """Return how many batches an epoch of `loader` has, or None if `loader` has no length, as with an iterable dataset."""
    try:
        return len(loader)
    except TypeError:
        return None


def warn_if_not_restored(loader: Any, host: str) -> None:
    """Warn if a dataloader has its own generator or persistent workers, because a resume cannot restore the order of its data."""
    has_workers = isinstance(loader, DataLoader) and loader.num_workers > 0 and loader.persistent_workers
    causes = [*(["persistent workers"] if has_workers else []), *(["a generator of its own"] if generators_of(loader) else [])]
    if causes:
        logger.warning(
            "%s resumes with a dataloader that has %s, whose state its checkpoints do not hold: the order of the data may differ from that "
            "of a run without interruption. Leave %s out, or train with callsheet's Trainer or attach, which restore it",
            host, " and ".join(causes), "it" if len(causes) == 1 else "both",
        )  # fmt: skip


class EpochPosition:
    """Counts the batches of an epoch, and keeps the random states that a resumed run needs to continue in the middle of the epoch.

    A run that resumes within an epoch restores the random states of the epoch's start and skips `to_skip` batches. Then
    it continues with the random states of the checkpoint.
    """

    def __init__(self) -> None:
        self.taken = 0
        self.to_skip = 0
        """How many batches of the epoch to skip, because the run trained on these batches before it was resumed."""
        self._began: dict[str, Any] | None = None
        self._now: dict[str, Any] | None = None

    def begin(self) -> None:
        """Begin an epoch. The host calls this before the framework creates the iterator over the epoch's data."""
        if self.to_skip and self._began is not None:
            restore_random_state(self._began)
            return
        self.end_skipping()
        self.taken, self._began = 0, random_state()

    def end_skipping(self) -> None:
        """Record that there are no more batches to skip. In a resumed run, also restore the random states of the checkpoint."""
        self.to_skip = 0
        if self._now is not None:
            restore_random_state(self._now)
            self._now = None

    @contextmanager
    def at_checkpoint(self) -> Iterator[None]:
        """After a resume, run the `with` block with the random states that the checkpoint contains.

        The block is, for example, an evaluation that a signal prevented. It draws the same random numbers as without the resume.
        """
        if self._now is not None:
            restore_random_state(self._now)
        yield
        if self._now is not None:
            self._now = random_state()

    def end(self) -> None:
        """Reset the position to the first batch, because the epoch has ended."""
        self.taken, self._began = 0, None

    def state_dict(self) -> dict[str, Any]:
        """Return the position, the random states at the epoch's start, and the present random states."""
        return {"taken": self.taken, "epoch_began": self._began, "now": random_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a saved position, from which the next epoch continues."""
        self.taken = self.to_skip = state["taken"]
        self._began, self._now = state["epoch_began"], state["now"]
