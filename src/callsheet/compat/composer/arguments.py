"""Converts arguments of Composer's Trainer into arguments of callsheet's Trainer."""

from __future__ import annotations

from typing import Any

from callsheet.bridges.composer.time import Time
from callsheet.errors import NotSupported
from callsheet.trainer.precision import PrecisionName

_PRECISIONS: dict[Any, PrecisionName] = {"fp32": "fp32", "amp_bf16": "bf16", "amp_fp16": "fp16"}


def several(given: Any) -> list[Any]:
    """Return an argument as a list: None as an empty list, a single object as a list of one, and a list or tuple as a list."""
    if given is None:
        return []
    return list(given) if isinstance(given, (list, tuple)) else [given]


def one(what: str, given: Any) -> Any:
    """Return the object that was given for the argument `what`, or None. Raise NotSupported if several objects were given."""
    found = several(given)
    if len(found) > 1:
        raise NotSupported(f"Trainer({what}=...) takes one here, not {len(found)}")
    return found[0] if found else None


def is_never(interval: Any) -> bool:
    """Return whether the interval is 0, such as `0` or `"0ba"`. In Composer, this means never."""
    return not callable(interval) and Time.from_input(interval, "ep").value == 0


def interval_of(what: str, given: Any) -> str:
    """Convert an interval to callsheet's format. In Composer, a whole number means epochs."""
    if callable(given):
        raise NotSupported(f"Trainer({what}={given!r}) takes no function here; ask with ctx.control in a callback of callsheet's")
    return str(Time.from_input(given, "ep"))


def precision_of(given: Any) -> PrecisionName:
    """Return callsheet's name for one of Composer's numeric precisions."""
    name = str(getattr(given, "value", given or "fp32")).lower()
    if name not in _PRECISIONS:
        raise NotSupported(
            f"Trainer(precision={name!r}) is not supported, unlike in Composer: give one of {', '.join(_PRECISIONS)}"
        )
    return _PRECISIONS[name]


def microbatch_size_of(given: Any) -> int | None:
    """Return the number of samples in a microbatch, or None if batches are not split. Reject other values, such as `auto`."""
    if given is None or isinstance(given, int):
        return given
    raise NotSupported(
        f"Trainer(device_train_microbatch_size={given!r}) is not supported, unlike in Composer: give the samples of a microbatch"
    )
