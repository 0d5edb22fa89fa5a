"""The order of a DataLoader's batches. The Trainer iterates over the sampler itself, so that it can repeat and check the order."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any

from callsheet.trainer.data.loaders import drop


class Order:
    """Takes the place of a DataLoader's sampler or batch sampler, and iterates over the original sampler once per epoch.

    A DataLoader with workers calls `iter` of its sampler twice for its first epoch, and once for later epochs. With an `Order`,
    `begin` calls `iter` once per epoch, so that a resumed run draws the same numbers from the sampler.

    Args:
        source: the sampler or batch sampler.
        is_checked: keep checksums of the batches of indices, so that a resumed run can detect whether they are the same again.
    """

    def __init__(self, source: Any, *, is_checked: bool) -> None:
        self._source = source
        self._is_checked = is_checked
        self._drawn: Iterator[Any] = iter(())
        self._checksums = array("I")  # the checksum after each batch of the epoch, in order

    def begin(self, again: Callable[[], None] | None = None) -> None:
        """Begin an epoch by calling `iter` on the sampler.

        Args:
            again: a function that restores the random states; given if the sampler has loaded a state. Some samplers then
                continue at the end of the saved epoch, and yield nothing. If so, `begin` calls `again`, and calls `iter` of the
                sampler a second time, which yields a full epoch.
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
        self._drawn = self._record_checksums(source) if self._is_checked else source

    def skip(self, count: int, epoch: int | None) -> None:
        """Draw and discard `count` batches of indices without loading samples. Raise ConfigError if the epoch has fewer batches."""
        drop(self._drawn, count, epoch)

    def position(self, taken: int) -> dict[str, Any] | None:
        """Return the checksums of the latest batch of indices that was trained on, and of all batches that were drawn later.

        `is_at` uses them to check that a resumed run draws the same batches.
        """
        first = max(taken - 1, 0)
        return {"first": first, "checksums": list(self._checksums[first:])} if self._is_checked else None

    def is_at(self, saved: Mapping[str, Any] | None) -> bool:
        """Return whether this epoch's batches equal the batches from before the resume, according to the checksums in `saved`.

        Only batches that were drawn both before and after the resume are compared.
        """
        if saved is None or not self._is_checked:
            return True
        return all(one == other for one, other in zip(self._checksums[saved["first"] :], saved["checksums"], strict=False))

    def _record_checksums(self, source: Iterator[Any]) -> Iterator[Any]:
        checksum = 0
        for indices in source:
            checksum = zlib.crc32(repr(indices).encode(), checksum)
            self._checksums.append(checksum)
            yield indices

    def __iter__(self) -> Iterator[Any]:
        return self._drawn

    def __len__(self) -> int:
        return len(self._source)
