"""Checkpoints written behind the training's back."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, wait
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from callsheet.checkpoint.draft import Draft, Kind, Staging
from callsheet.checkpoint.ranks import RankGroup
from callsheet.checkpoint.seal import Seal
from callsheet.checkpoint.tensors import local_part
from callsheet.checkpoint.write import Check, Writing
from callsheet.disk_thread import disk_thread
from callsheet.errors import CheckpointError


class AsyncWriter:
    """Writes checkpoints in a thread: training waits for a copy of its state in host memory, no longer.

    The copy's buffers are kept for the next one. A process that ends by itself writes to the end first. On Linux the thread has a lower
    priority than training.

    Args:
        group: a gloo group that nothing else uses while a checkpoint is written; None for one process.
    """

    def __init__(self, group: ProcessGroup | None = None) -> None:
        self._ranks = RankGroup(group)
        self._staging = Staging()
        self._thread = disk_thread("callsheet-checkpoint")
        # One thread of torch's for the check of what is written, not a second set of them beside training's.
        threads = torch.get_num_threads()
        self._thread.submit(_use_one_thread).result()
        torch.set_num_threads(threads)  # what was set there also became the default of threads that begin later
        self._written: Future[Seal] | None = None
        self._prepared: Future[None] | None = None
        self._is_told = True

    def prepare(self, tensors: Iterable[Tensor]) -> None:
        """Begin to allocate buffers for these tensors in the thread, so that the first `begin` finds them. Does not wait."""
        kinds = [Kind.of(local_part(tensor)) for tensor in tensors]
        self._prepared = self._thread.submit(self._staging.prepare, kinds)

    def begin(
        self,
        path: str | os.PathLike[str],
        shared: object,
        local: object,
        info: Mapping[str, Any],
        *,
        overwrite: bool = False,
        check_owner: Callable[[], None] | None = None,
        is_good: Check | None = None,
    ) -> None:
        """Copy the state and begin to write it, as `write_checkpoint` does; `result` raises what fails.

        Waits for the checkpoint that is being written, and raises its `CheckpointError` where nobody has asked for its result.
        """
        self._settle()
        if self._prepared is not None:
            wait([self._prepared])  # if it failed, the copy fails as well, and says so
            self._prepared = None
        copied: Future[Draft] = Future()
        try:
            draft = Draft.of(shared, local, info, self._ranks.rank)
            draft.parts = self._staging.copy(draft.parts)
            copied.set_result(draft)
        except Exception as error:  # not raised here: the other ranks have to learn of it
            copied.set_exception(error)
        self._is_told = False
        self._written = self._thread.submit(Writing(path, self._ranks, overwrite, check_owner, is_good).run, copied.result)

    @property
    def is_done(self) -> bool:
        """Whether this rank has nothing left to write; never waits. The others may have."""
        return self._written is None or self._written.done()

    def result(self, timeout: float | None = None) -> Seal:
        """The seal of the checkpoint that was last begun, once it is written.

        Raises `CheckpointError` where it could not be written or none was begun, `TimeoutError` after `timeout` seconds.
        """
        if self._written is None:
            raise CheckpointError("no checkpoint has been begun")
        error = self._written.exception(timeout)
        self._is_told = True
        if error is not None:
            raise error
        return self._written.result()

    def close(self) -> None:
        """Write to the end, and let go of the buffers; raises as `begin` does. May be called twice."""
        try:
            self._settle()
        finally:
            self._thread.shutdown()
            self._staging = Staging()

    def _settle(self) -> None:
        if self._written is not None:
            self._written.exception()
            if not self._is_told:
                self.result()


def _use_one_thread() -> None:
    torch.get_num_threads()  # begins with the default of the process, which would otherwise replace what is set here
    torch.set_num_threads(1)
