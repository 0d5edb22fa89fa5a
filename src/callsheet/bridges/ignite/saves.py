"""Requests checkpoints from Ignite's `Checkpoint` handler, and notices the checkpoints that it writes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from ignite.engine import Engine
from ignite.handlers import Checkpoint


class Saves:
    """Makes an Ignite `Checkpoint` handler write checkpoints on request, and finds those that it has written."""

    def __init__(self, handler: Checkpoint) -> None:
        self._handler = handler
        self._files = self._written_files()

    def report(self, engines: Iterable[Engine], saved: Callable[[Engine], None]) -> None:
        """Call `saved` whenever a checkpoint handler that is attached to one of the `engines` has written a checkpoint."""
        from ignite.handlers.checkpoint import (
            CheckpointEvents,
        )  # imported here, because Ignite before 0.5.3 does not have `CheckpointEvents`

        for engine in engines:
            if not engine.has_registered_events(CheckpointEvents.SAVED_CHECKPOINT):
                engine.register_events(*CheckpointEvents)
            engine.add_event_handler(CheckpointEvents.SAVED_CHECKPOINT, saved)

    def save(self, trainer: Engine) -> None:
        """Write a checkpoint that a callback has requested."""
        self._handler(trainer)

    def new(self) -> str | None:
        """Return the path of the checkpoint that was written since the last call of this method, or None."""
        earlier, self._files = self._files, self._written_files()
        new = self._files - earlier
        return str(Path(getattr(self._handler.save_handler, "dirname", ""), new.pop())) if new else None

    def _written_files(self) -> set[str]:
        return {file for _, file in self._handler.state_dict()["_saved"]}
