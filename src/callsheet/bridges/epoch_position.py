"""How far an epoch's data has been taken, and how to get there again, in a loop that iterates over its data itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from callsheet.randomness import random_state, restore_random_state


def length_of(loader: Any) -> int | None:
    """Return how many batches an epoch has, or None: a `DataLoader` has a length only if its dataset has one."""
    try:
        return len(loader)
    except TypeError:
        return None


class EpochPosition:
    """Counts the batches of the epoch. A run that is resumed in its midst passes over `to_skip` of them, from the random states in which
    the epoch began, and goes on in those in which the checkpoint was written."""

    def __init__(self) -> None:
        self.taken = 0
        self.to_skip = 0
        """Batches that were trained on before the resume, and come again."""
        self._began: dict[str, Any] | None = None
        self._now: dict[str, Any] | None = None

    def begin(self) -> None:
        """The epoch's data is about to be made."""
        if self.to_skip and self._began is not None:
            restore_random_state(self._began)
            return
        self.skipped()
        self.taken, self._began = 0, random_state()

    def skipped(self) -> None:
        """What comes next has not been trained on."""
        self.to_skip = 0
        if self._now is not None:
            restore_random_state(self._now)
            self._now = None

    def end(self) -> None:
        """The epoch is over."""
        self.taken, self._began = 0, None

    def state_dict(self) -> dict[str, Any]:
        """See the class."""
        return {"taken": self.taken, "epoch_began": self._began, "now": random_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next epoch goes on from there."""
        self.taken = self.to_skip = state["taken"]
        self._began, self._now = state["epoch_began"], state["now"]
