"""The position in an epoch's data in a loop that iterates over its data itself, and how a resumed run returns to the position."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from callsheet.core.randomness import random_state, restore_random_state


def length_of(loader: Any) -> int | None:
    """Return how many batches an epoch has, or None. A `DataLoader` has a length only if its dataset has one."""
    try:
        return len(loader)
    except TypeError:
        return None


class EpochPosition:
    """Counts the batches of the epoch.

    A run that resumes within an epoch restores the random states of the epoch's start and skips `to_skip` batches. It continues with the
    random states of the checkpoint.
    """

    def __init__(self) -> None:
        self.taken = 0
        self.to_skip = 0
        """How many batches were trained on before the resume, and have to be skipped."""
        self._began: dict[str, Any] | None = None
        self._now: dict[str, Any] | None = None

    def begin(self) -> None:
        """Begin an epoch, before its data is made."""
        if self.to_skip and self._began is not None:
            restore_random_state(self._began)
            return
        self.skipped()
        self.taken, self._began = 0, random_state()

    def skipped(self) -> None:
        """Record that all batches to skip were skipped, and restore the random states of the checkpoint."""
        self.to_skip = 0
        if self._now is not None:
            restore_random_state(self._now)
            self._now = None

    def end(self) -> None:
        """End the epoch."""
        self.taken, self._began = 0, None

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and the random states at the epoch's start and now."""
        return {"taken": self.taken, "epoch_began": self._began, "now": random_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next epoch continue at the saved position."""
        self.taken = self.to_skip = state["taken"]
        self._began, self._now = state["epoch_began"], state["now"]
