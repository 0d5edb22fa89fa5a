"""Writes checkpoints in the background while training continues."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, wait
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from callsheet.checkpoint.disk_thread import disk_thread
from callsheet.checkpoint.draft import Draft, Kind, Staging
from callsheet.checkpoint.ranks import RankGroup
from callsheet.checkpoint.seal import Seal
from callsheet.checkpoint.tensors import local_part
from callsheet.checkpoint.write import Check, Writing
from callsheet.errors import CheckpointError


class AsyncWriter:
    """Writes checkpoints on a thread. Training waits only until its state has been copied to host memory.

    The buffers of the copy are reused for the next checkpoint. At a normal exit, the process first finishes writing. On Linux,
    the thread has a lower priority than training.

    Args:
        group: a gloo process group that nothing else uses while a checkpoint is written; None for a single process.
    """

    def __init__(self, group: ProcessGroup | None = None) -> None:
        self._ranks = RankGroup(group)
        self._staging = Staging()
        self._thread = disk_thread("callsheet-checkpoint")
        # Torch must use only this one thread to check the written data. Otherwise it would start a second pool of threads.
        threads = torch.get_num_threads()
        self._thread.submit(_use_one_thread).result()
        torch.set_num_threads(threads)  # restore the default for new threads, which `_use_one_thread` has changed too
        self._written: Future[Seal] | None = None
        self._prepared: Future[None] | None = None
        self._is_reported = True

    def prepare(self, tensors: Iterable[Tensor]) -> None:
        """Start to allocate buffers in the background, so that `begin` is faster. Return at once.

        Args:
            tensors: tensors of the sizes and dtypes that `begin` will copy. For a DTensor, a buffer of this rank's shard is
                allocated.
        """
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
        """Copy the state, and start to write the copy in the background. If copying or writing fails, `result` raises the error.

        The arguments are those of `write_checkpoint`.

        If a checkpoint is still being written, wait for it.

        Raises:
            CheckpointError: the previous checkpoint could not be written, and `result` has not raised this error yet.
        """
        self._finish_write()
        if self._prepared is not None:
            # Ignore an error of `prepare`: if a buffer could not be allocated, `copy` allocates it below, or raises the error.
            wait([self._prepared])
            self._prepared = None
        copied: Future[Draft] = Future()
        try:
            draft = Draft.of(shared, local, info, self._ranks.rank)
            draft.parts = self._staging.copy(draft.parts)
            copied.set_result(draft)
        except Exception as error:  # keep the error, so that `result` raises it on all ranks
            copied.set_exception(error)
        self._is_reported = False
        self._written = self._thread.submit(Writing(path, self._ranks, overwrite, check_owner, is_good).run, copied.result)

    @property
    def is_done(self) -> bool:
        """Return at once whether this rank has finished writing. Other ranks may still be writing."""
        return self._written is None or self._written.done()

    def result(self, timeout: float | None = None) -> Seal:
        """Wait until the most recently started checkpoint is written, and return its `Seal`, the proof that it is complete.

        Args:
            timeout: how many seconds to wait at most; None: without a limit.

        Returns:
            The checkpoint's seal (the content of its manifest).

        Raises:
            CheckpointError: the checkpoint could not be written, or none was begun.
            TimeoutError: `timeout` has passed. The checkpoint is still being written.
        """
        if self._written is None:
            raise CheckpointError("no checkpoint has been begun")
        error = self._written.exception(timeout)
        self._is_reported = True
        if error is not None:
            raise error
        return self._written.result()

    def close(self) -> None:
        """Finish writing, release the buffers and end the thread. A second call does nothing.

        Raises:
            CheckpointError: the last checkpoint could not be written, and `result` has not raised this error yet.
        """
        try:
            self._finish_write()
        finally:
            self._thread.shutdown()
            self._staging = Staging()

    def _finish_write(self) -> None:
        if self._written is not None:
            self._written.exception()
            if not self._is_reported:
                self.result()


def _use_one_thread() -> None:
    # `get_num_threads` makes torch apply its default number of threads now, so that torch does not overwrite the 1 later.
    torch.get_num_threads()
    torch.set_num_threads(1)
