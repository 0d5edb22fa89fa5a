"""Counts the batches that a loop with an Accelerator has used, for checkpoints that `accelerator.save_state` writes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from accelerate import Accelerator

from callsheet.bridges.data_position import DataPosition
from callsheet.errors import mark_as_users


class AcceleratePosition(DataPosition):
    """Counts the batches of the epoch that were used. It saves no random states, because the accelerator saves and loads them."""

    def __init__(self, accelerator: Accelerator) -> None:
        super().__init__()
        self._accelerator = accelerator
        self._to_skip = 0  # how many batches of the first epoch to skip after a resume
        self._is_resumed = False

    def begin(self, loader: Iterable[Any], epoch: int) -> Iterator[Any]:
        self.is_exhausted = False
        try:
            return iter(self._skip_taken_batches(loader, epoch))
        except Exception as error:
            mark_as_users(error)  # end training instead of only logging the error, because training cannot continue without data
            raise

    def begin_unobserved(self, loader: Iterable[Any], epoch: int) -> Iterator[Any]:
        return self.begin(loader, epoch)

    def _skip_taken_batches(self, loader: Any, epoch: int) -> Iterable[Any]:
        self.taken, self._to_skip = self._to_skip, 0
        # After a resume, the new process's dataloader counts epochs from 0, so set its epoch to the run's epoch.
        if self._is_resumed and hasattr(loader, "set_epoch"):
            loader.set_epoch(epoch)
        # A stateful dataloader needs no skipping, because it continues at its saved position by itself. If it was saved at the
        # end of an epoch, however, it would begin another one.
        if self.taken and self._accelerator.dataloader_config.use_stateful_dataloader:
            return () if hasattr(loader, "__len__") and self.taken >= len(loader) else loader
        if not self.taken:
            return loader  # type: ignore[no-any-return]
        left = self._accelerator.skip_first_batches(loader, self.taken)
        if hasattr(loader, "iteration"):
            # Before Accelerate 1.15, the new dataloader `left` begins at epoch 0 and shuffles as in that epoch. So set its epoch.
            left.iteration = loader.iteration
        return left  # type: ignore[no-any-return]

    def state_dict(self) -> dict[str, Any]:
        return {"taken": self.taken}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._to_skip, self._is_resumed = state["taken"], True
