"""Observes DeepSpeed in the Hugging Face Trainer.

DeepSpeed's engine clips the gradients and steps the optimizer within the last backward pass of a step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from callsheet.bridges.wrapped_methods import WrappedMethods
from callsheet.errors import NotSupported

logger = logging.getLogger("callsheet")


def engine_of(trainer: Any) -> Any:
    """Return the DeepSpeed engine that the Trainer trains with, or None."""
    wrapped = getattr(getattr(trainer, "accelerator", None), "deepspeed_engine_wrapped", None)
    return getattr(wrapped, "engine", None)


def check_engine(engine: Any, *, strict: bool) -> None:
    """Raise an error if DeepSpeed's settings would give callbacks wrong losses or weights.

    Raises:
        NotSupported: the engine trains in fp16; or it uses ZeRO stage 3. If `strict` is false, stage 3 only causes a warning.
    """
    if engine.fp16_enabled():
        raise NotSupported(
            "DeepSpeed scales the loss of an fp16 training in its own engine, so callbacks would get wrong losses in the Hugging Face "
            "Trainer; train with bf16, or without callsheet"
        )
    if engine.zero_optimization_stage() == 3:
        what = "DeepSpeed ZeRO stage 3 leaves the model without whole weights between its calls, so callbacks cannot read or change them"
        if strict:
            raise NotSupported(
                f"{what}; use stage 1 or 2, or pass strict=False and only callbacks that do not use the weights (not EMA, for example)"
            )
        logger.warning("%s", what)


def watch_step(engine: Any, begins: Callable[[], None]) -> WrappedMethods:
    """Call `begins()` before each step of DeepSpeed's engine, because the Trainer calls its callbacks only after the step."""

    def step(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        begins()
        return method(*args, **kwargs)

    methods = WrappedMethods(engine)
    methods.wrap("step", step)
    return methods
