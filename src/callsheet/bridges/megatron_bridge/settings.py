"""Reads Megatron's settings, changes some of them temporarily, and loads callbacks' states from Megatron's checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from callsheet.bridges.host_states import STATE, read_states
from callsheet.bridges.hosted_run import HostedRun
from callsheet.core.control import Request
from callsheet.core.run_state import CheckpointInfo

logger = logging.getLogger("callsheet")


class Settings:
    """Reads Megatron's configuration and state, and carries out callbacks' requests by changing settings temporarily.

    This class is separate from the host, because the run keeps functions that refer to this object. If they referred to the host,
    the run would keep the host alive.
    """

    def __init__(self, state: Any) -> None:
        self.state = state
        self.is_training = False
        self.loss: Tensor | None = None
        self._before: dict[str, Any] = {}
        self._checkpoint: Any = getattr(getattr(state, "cfg", None), "checkpoint", None)

    def get(self, name: str) -> Any:
        """Return a setting of Megatron, such as `train.train_iters`; None if the setting does not exist."""
        found = getattr(self.state, "cfg", None)
        for part in name.split("."):
            found = getattr(found, part, None)
        return found

    @property
    def step(self) -> int | None:
        """The number of steps that Megatron has counted; None if it is not known."""
        return self.state.train_state.step if self.state is not None else None

    @property
    def save_interval(self) -> int | None:
        """The number of steps between Megatron's checkpoints."""
        interval: int | None = getattr(self._checkpoint, "save_interval", None)
        return interval

    def is_last(self, *phases: str) -> bool:
        """Return whether none of the `phases`, such as `do_test`, will follow in Megatron's run. If unknown, return False."""
        return self.state is not None and not any(getattr(self.state.train_state, phase, False) for phase in phases)

    def plain(self) -> dict[str, Any]:
        """Return Megatron's configuration as plain data."""
        cfg: Any = getattr(self.state, "cfg", None)
        found = _plain(cfg.to_dict() if hasattr(cfg, "to_dict") else getattr(cfg, "__dict__", {}))
        return found if isinstance(found, dict) else {}

    def stop(self, ahead: int) -> None:
        """Make Megatron end training before its next step. `ahead` is the number of steps that Megatron has not counted yet."""
        assert self.step is not None  # a stop can be requested only if Megatron's state, which has the step, is available
        self._set("train.train_iters", self.step + ahead)

    def save_now(self, requests: tuple[Request, ...]) -> None:
        """Make Megatron write a checkpoint after the current step."""
        if self.is_training:
            self._set("checkpoint.save_interval", 1)
        else:
            who = ", ".join(str(request) for request in requests)
            logger.warning("a checkpoint was requested after training, when Megatron writes no more checkpoints: %s", who)

    def restore_interval(self) -> None:
        """Restore the user's interval between checkpoints, if `save_now` has changed it."""
        if "checkpoint.save_interval" in self._before:
            self._put("checkpoint.save_interval", self._before.pop("checkpoint.save_interval"))

    def restore(self) -> None:
        """Restore all settings that `stop` and `save_now` have changed."""
        while self._before:
            self._put(*self._before.popitem())

    def saved_step(self) -> int | None:
        """Return the step of the newest completely written checkpoint, or None. Megatron writes this step to a file."""
        note = Path(self.get("checkpoint.save")) / "latest_checkpointed_iteration.txt"
        word = note.read_text().strip() if note.is_file() else ""
        return int(word) if word.isdigit() else None

    def was_preempted(self) -> bool:
        """Return whether Megatron's signal handler has received a signal."""
        if not self.get("train.exit_signal_handler"):
            return False
        received = getattr(self.state.signal_handler, "_signal_received", None)
        if received is None:
            logger.warning(
                "Megatron's signal handler has no _signal_received, so a run that a signal has ended is not recorded as preempted"
            )
        return bool(received)

    def _set(self, name: str, value: Any) -> None:
        self._before.setdefault(name, self.get(name))
        self._put(name, value)

    def _put(self, name: str, value: Any) -> None:
        section, _, key = name.partition(".")
        setattr(self.get(section), key, value)


def load_states(run: HostedRun, settings: Settings) -> CheckpointInfo | None:
    """Load the callbacks' states from Megatron's checkpoint. Return its `CheckpointInfo`, or None if no states were found."""
    step, load = settings.step or 0, settings.get("checkpoint.load")
    if not step:
        return None
    root = Path(load or ".")
    found = next((path for path in (root / f"iter_{step:07d}", root) if (path / STATE).is_dir()), None)
    if found is None:
        logger.warning("%s resumes from step %d, but no state of callbacks was found in %s", run.host, step, root)
        move(run, step)
        return None
    return read_states(run, found, step)


def move(run: HostedRun, step: int) -> None:
    """Set the run's step to `step`, which Megatron has reached without reporting the steps before it."""
    at = run.state.timestamp
    run.state.timestamp = at._replace(batch=step, batch_in_epoch=at.batch_in_epoch + step - at.batch)
    run.ctx.step = step
    if step >= run.manager.next_step:
        run.manager.between_steps(step)
    if not run.driver.is_open("train"):
        run.state.baseline = run.state.timestamp


def _plain(value: Any, depth: int = 6) -> Any:
    """Return `value` as plain data: an object becomes a dict of its attributes, and any other value becomes a string."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if depth and isinstance(value, Mapping):
        return {str(name): _plain(each, depth - 1) for name, each in value.items() if not str(name).startswith("_")}
    if depth and isinstance(value, (list, tuple)):
        return [_plain(each, depth - 1) for each in value]
    if depth and hasattr(value, "__dict__") and not isinstance(value, type) and not callable(value):
        return _plain(vars(value), depth)
    return str(value)
