"""Precision: the dtype in which forward pass and loss are computed, and loss scaling for fp16."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.optim import Optimizer

from callsheet.core.callback import one_of

PrecisionName = Literal["fp32", "bf16", "fp16"]
PRECISIONS: tuple[PrecisionName, ...] = get_args(PrecisionName)

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """The precision of a step. The weights, their gradients and the optimizer keep the model's dtype.

    `bf16` and `fp16` compute the forward pass and the loss under torch's autocast. With `fp16`, a `torch.amp.GradScaler` also
    multiplies the loss by a scale, which grows while all gradients are finite. A step whose gradients overflow is skipped. Checking
    for an overflow waits for the device.

    Args:
        name: `"fp32"`, `"bf16"` or `"fp16"`.

    Raises:
        ConfigError: the precision is unknown.
    """

    def __init__(self, name: PrecisionName, device: torch.device) -> None:
        self.name = one_of("precision", name, PRECISIONS)
        self.casts = name in _DTYPES
        """Whether the forward pass runs under autocast. Autocast is not needed if a sharded model casts its parameters itself."""
        self._device = device
        self.scaler: Any = torch.amp.GradScaler(device.type) if name == "fp16" else None
        self._stepped = False
        self._hooked: Optimizer | None = None

    @property
    def type(self) -> torch.dtype | None:
        """The dtype in which the forward pass is computed, or None for the model's own dtype."""
        return _DTYPES.get(self.name)

    @property
    def casting(self) -> AbstractContextManager[Any]:
        """The context manager under which the forward pass runs: autocast, or a context manager without effect."""
        return torch.autocast(self._device.type, self.type) if self.casts else _NO_CAST

    @property
    def casting_loss(self) -> AbstractContextManager[Any]:
        """The context manager under which the loss is computed: autocast, or a context manager without effect.

        Autocast is used for a sharded model too, because the outputs have a low precision and losses need a higher one.
        """
        return torch.autocast(self._device.type, self.type) if self.type is not None else _NO_CAST

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the loss multiplied by the loss scale of fp16, for `backward`."""
        return self.scaler.scale(loss) if self.scaler is not None else loss

    def unscale(self, optimizer: Optimizer) -> None:
        """Divide the complete gradients by the loss scale, so that clipping uses the gradients' true values."""
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)

    def step(self, optimizer: Optimizer) -> bool:
        """Step the optimizer, unless gradients overflowed. Return whether the optimizer stepped; all ranks return the same value."""
        if self.scaler is None:
            optimizer.step()
            return True
        # The gradient scaler does not report whether the optimizer stepped, so a hook records each step.
        if self._hooked is not optimizer:
            optimizer.register_step_post_hook(self._note_step)
            self._hooked = optimizer
        self._stepped = False
        self.scaler.step(optimizer)
        self.scaler.update()
        return self._stepped

    def state_dict(self) -> dict[str, Any]:
        """Return the loss scale of fp16, and the number of steps since the scale was last changed."""
        return {"precision": self.name, "scaler": self.scaler.state_dict() if self.scaler is not None else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state that `state_dict` returned. A run that continues in another precision starts with a new loss scale."""
        if self.scaler is not None and state["scaler"] is not None:
            self.scaler.load_state_dict(state["scaler"])

    def _note_step(self, optimizer: Any, *_: Any) -> None:
        # A fused optimizer's `step` runs even after an overflow, and skips the update itself.
        found = getattr(optimizer, "found_inf", None)
        self._stepped = found is None or not found.item()


_NO_CAST = nullcontext()
