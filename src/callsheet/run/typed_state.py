"""Saves the state of an optimizer or scheduler with the name of its class, so that another class cannot load it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

logger = logging.getLogger("callsheet")


class Typed:
    """Saves and loads the state of an optimizer or scheduler. Rejects a state that was saved by an object of another class.

    Without this check, the state of another class would be loaded, and an error would appear only later.

    Args:
        part: the optimizer or scheduler.
        rate_is_fixed: whether only the user sets the optimizer's learning rate, and no scheduler changes it.
    """

    def __init__(self, part: Any, *, rate_is_fixed: bool = False) -> None:
        self.part = part
        self._rate_is_fixed = rate_is_fixed

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer or scheduler, and the name of its class."""
        return {"class": type(self.part).__name__, "state": self.part.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state. Warn if loading changes the optimizer's options. Raise ValueError if another class saved the state."""
        if state["class"] != type(self.part).__name__:
            raise ValueError(
                f"the state was saved by a {state['class']}, and this is a {type(self.part).__name__}; give a {state['class']}, or start a "
                "new run with another name or folder"
            )
        given = self._options()
        self.part.load_state_dict(state["state"])
        for name, value in self._options().items():
            if name in given and given[name] != value:
                logger.warning(
                    "%s: %s is %s in the checkpoint, and %s was given. Training continues with the checkpoint's; to change it, set it in "
                    "the optimizer's param_groups after the resume, or start a new run with another name or folder",
                    type(self.part).__name__, name, value, given[name],
                )  # fmt: skip

    def _options(self) -> dict[str, Any]:
        """Return the optimizer's options by name, for each parameter group.

        For the learning rate, return the initial rate. If `initial_lr` is not stored, leave out a rate that a scheduler may change. Also
        leave out the momentum if a scheduler such as `OneCycleLR` changes it.
        """
        found: dict[str, Any] = {}
        for number, group in enumerate(getattr(self.part, "param_groups", ())):
            rate = {"lr": group["initial_lr"]} if "initial_lr" in group else {} if self._rate_is_fixed else {"lr": None}
            scheduled = {"initial_lr", *(("momentum", "betas") if "base_momentum" in group else ())}
            for name, value in {**group, **rate}.items():
                if isinstance(value, (bool, int, float, str, tuple)) and name not in scheduled:
                    found[f"{name} (group {number})" if number else name] = value
        return found
