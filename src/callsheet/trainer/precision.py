"""Precision: in which type forward and loss are computed, and how fp16's gradients are kept from vanishing."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from callsheet.callback import one_of

PRECISIONS = ("fp32", "bf16", "fp16")

_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """The arithmetic of a step. The weights, their gradients and the optimizer stay in the type that the model has.

    `bf16` and `fp16` compute forward and loss under torch's autocast. `fp16` multiplies the loss by a scale that grows while it can,
    and leaves out steps whose gradients overflowed (`torch.amp.GradScaler`); its question whether they did waits for the device.

    Args:
        name: `"fp32"`, `"bf16"` or `"fp16"`.
    Raises:
        ConfigError: an unknown precision.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self.name = one_of("precision", name, PRECISIONS)
        self.casts = name in _TYPES
        """Whether autocast is needed; not where a sharded model casts its parameters itself."""
        self._device = device
        self.scaler: Any = torch.amp.GradScaler(device.type) if name == "fp16" else None
        self._stepped = False
        self._hooked: Optimizer | None = None

    @property
    def type(self) -> torch.dtype | None:
        """What forward computes in, or None for the model's own type."""
        return _TYPES.get(self.name)

    @property
    def casting(self) -> AbstractContextManager[Any]:
        """The context in which forward is computed."""
        return torch.autocast(self._device.type, self.type) if self.casts else _AS_IT_IS

    @property
    def casting_loss(self) -> AbstractContextManager[Any]:
        """The same for the loss: of a sharded model too, whose outputs are in that type, and losses need more digits."""
        return torch.autocast(self._device.type, self.type) if self.type is not None else _AS_IT_IS

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss to go backward from."""
        return self.scaler.scale(loss) if self.scaler is not None else loss

    def unscale(self, optimizer: Optimizer) -> None:
        """Take the scale out of the gradients, once they are complete: clipping must see them as they are."""
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)

    def step(self, optimizer: Optimizer) -> bool:
        """Step the optimizer, or leave it where it is because gradients overflowed; whether it moved, the same on all ranks."""
        if self.scaler is None:
            optimizer.step()
            return True
        if self._hooked is not optimizer:  # the scaler does not tell whether it stepped
            optimizer.register_step_post_hook(self._note_step)
            self._hooked = optimizer
        self._stepped = False
        self.scaler.step(optimizer)
        self.scaler.update()
        return self._stepped

    def state_dict(self) -> dict[str, Any]:
        """The scale and how long it has held."""
        return {"precision": self.name, "scaler": self.scaler.state_dict() if self.scaler is not None else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave; a run may go on in another precision, with a new scale."""
        if self.scaler is not None and state["scaler"] is not None:
            self.scaler.load_state_dict(state["scaler"])

    def _note_step(self, optimizer: Any, *_: Any) -> None:
        found = getattr(optimizer, "found_inf", None)  # fused optimizers are stepped in any case, and look for themselves
        self._stepped = found is None or not found.item()


_AS_IT_IS = nullcontext()
