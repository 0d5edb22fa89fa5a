"""Measures the speed of training in a sliding window of batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

from callsheet.core.time import Timestamp


class _Point(NamedTuple):
    """The batches, samples, tokens, seconds and FLOPs that a run had completed when a metrics record was made.

    FLOPs are None until they are known.
    """

    batch: int
    sample: int
    token: int
    seconds: float
    flops: float | None = None


class SpeedWindow:
    """A sliding window of the last `size` batches, with the run's progress at each metrics record in the window.

    It contains at least two records, even if there are more batches than `size` between them.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._points: deque[_Point] = deque()

    def begin(self, now: Timestamp) -> None:
        """Put the run's present progress into the window if the window is empty."""
        if not self._points:
            self._points.append(_point(now))

    def moves_to(self, now: Timestamp) -> bool:
        """Return whether the run has trained on a batch between the window's last entry and the timestamp `now`."""
        return bool(self._points) and now.batch > self._points[-1].batch

    def tokens_to(self, now: Timestamp) -> int:
        """Return the number of tokens on which all ranks together have trained since the window's last entry."""
        return now.token - self._points[-1].token

    def add(self, now: Timestamp, flops: float | None) -> dict[str, float]:
        """Move the window to `now`. Return the rates per second by name (batches, samples, ...), without rates of zero.

        `flops` are the FLOPs since the window's last entry, or None if they are not known yet.
        """
        points, point = self._points, _point(now)
        if flops is not None and points[-1].flops is None:
            points[-1] = points[-1]._replace(flops=0.0)
        if points[-1].flops is not None:
            point = point._replace(flops=points[-1].flops + (flops or 0.0))
        points.append(point)
        while point.batch - points[1].batch >= self._size:
            points.popleft()
        return self._rates()

    def _rates(self) -> dict[str, float]:
        first, last = self._points[0], self._points[-1]
        counts = {"batches": last.batch - first.batch, "samples": last.sample - first.sample, "tokens": last.token - first.token}
        seconds = last.seconds - first.seconds
        rates = {name: count / seconds for name, count in counts.items() if count and seconds > 0}
        known = next((point for point in self._points if point.flops is not None), last)
        if last.flops is not None and known.flops is not None and last.flops > known.flops and last.seconds > known.seconds:
            rates["flops"] = (last.flops - known.flops) / (last.seconds - known.seconds)
        return rates

    def state_dict(self) -> dict[str, Any]:
        """Return the window's entries as plain data."""
        return {"points": [list(point) for point in self._points]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._points = deque(_Point(*point) for point in state["points"])


def _point(timestamp: Timestamp) -> _Point:
    return _Point(timestamp.batch, timestamp.sample, timestamp.token, timestamp.seconds)
