"""The order of a DataLoader's batches, drawn where the Trainer can repeat and check it."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any

from callsheet.trainer.data.loaders import drop


class Order:
    """Stands in a DataLoader for a sampler or batch sampler, and iterates over it once an epoch.

    A DataLoader with workers calls `iter` of its sampler twice for its first epoch and once for later ones. Here `begin` calls it, once,
    so that a resumed run asks the sampler for the same.

    Args:
        source: the sampler or batch sampler.
        is_checked: keep a checksum of what it gives, so that a resumed run can tell whether it gives the same again.
    """

    def __init__(self, source: Any, *, is_checked: bool) -> None:
        self._source = source
        self._is_checked = is_checked
        self._drawn: Iterator[Any] = iter(())
        self._checksums = array("I")  # after each batch of the epoch

    def begin(self, again: Callable[[], None] | None = None) -> None:
        """Open the sampler for an epoch.

        Args:
            again: after the sampler loaded a state: restores the random states. Some samplers come back to the end of the epoch in which
                their state was read, and give a whole epoch only when they are opened again.
        """
        self._checksums = array("I")
        source = iter(self._source)
        if again is not None:
            first = next(source, None)
            if first is None:
                again()
                source = iter(self._source)
            else:
                source = chain([first], source)
        self._drawn = self._noted(source) if self._is_checked else source

    def skip(self, count: int, epoch: int | None) -> None:
        """Draw `count` batches of indices and load nothing. Raises ConfigError if there are fewer."""
        drop(self._drawn, count, epoch)

    def place(self, taken: int) -> dict[str, Any] | None:
        """Return the checksums from the last batch taken to the last one drawn ahead, for `is_at`."""
        first = max(taken - 1, 0)
        return {"first": first, "checksums": list(self._checksums[first:])} if self._is_checked else None

    def is_at(self, place: Mapping[str, Any] | None) -> bool:
        """Whether the batches drawn in this epoch are those that had been drawn at `place`, as far as both reach."""
        if place is None or not self._is_checked:
            return True
        return all(one == other for one, other in zip(self._checksums[place["first"] :], place["checksums"], strict=False))

    def _noted(self, source: Iterator[Any]) -> Iterator[Any]:
        checksum = 0
        for indices in source:
            checksum = zlib.crc32(repr(indices).encode(), checksum)
            self._checksums.append(checksum)
            yield indices

    def __iter__(self) -> Iterator[Any]:
        return self._drawn

    def __len__(self) -> int:
        return len(self._source)
