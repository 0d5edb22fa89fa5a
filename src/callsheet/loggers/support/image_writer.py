"""Writes PNG images to files on a background thread (a lane)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from callsheet.core.lane_options import LaneOptions
from callsheet.lanes.capture import copy_value
from callsheet.lanes.queue import Lane, close, drain
from callsheet.loggers.support.file_names import replace_file

_LANE_OPTIONS = LaneOptions(queue=64, deadline=60.0)  # the queue is short, since queued images take memory


class ImageWriter:
    """Writes images as PNG files into a folder, on a background thread.

    A thread is enough, because encoding releases the interpreter lock.

    While `may_write` returns False, images are dropped.

    Raises:
        OSError, ConfigError: raised once, by the next `write` or `flush` after writing a batch of images has failed.
    """

    def __init__(self, label: str, folder: Path, *, may_write: Callable[[], bool] = lambda: True) -> None:
        self._folder = folder
        self._may_write = may_write
        self._failure: Exception | None = None
        self._lane = Lane(f"{label}'s images", self._write_images, _LANE_OPTIONS)

    def write(self, files: Sequence[str], images: Sequence[Any], then: Callable[[], object]) -> None:
        """Queue copies of `images`. The background thread writes them to `files` (paths in the folder), and then calls the function `then`."""
        here = [image.detach().cpu() if hasattr(image, "detach") else image for image in images]
        self._lane.put((list(files), copy_value(here, {}), then))
        self._report_failure()

    def flush(self) -> None:
        """Wait up to a minute until all queued images are written."""
        left = drain([self._lane], _LANE_OPTIONS.deadline)
        self._report_failure()
        for undelivered in left:
            raise OSError(f"images are not written yet, {undelivered}; the disk is slow, or stuck")

    def close(self) -> None:
        """Write the queued images, and end the background thread."""
        try:
            self.flush()
        finally:
            close([self._lane])

    def _write_images(self, batch: tuple[list[str], list[Any], Callable[[], object]]) -> None:
        from callsheet.loggers.support.pixels import png  # imported here because `pixels` needs numpy

        files, images, then = batch
        try:
            for file, image in zip(files, images, strict=True):
                if not self._may_write():
                    return
                replace_file(self._folder / file, png(image))
            then()
        except Exception as error:  # the next `write` or `flush` raises the error
            self._failure = error

    def _report_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
