"""Converts any value to JSON text that every JSON reader accepts."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


def json_text(value: Any, indent: int | None = None) -> str:
    """Return `value` as JSON. NaN and infinite numbers become the strings `"NaN"`, `"Infinity"` and `"-Infinity"`, which `float()` reads.

    Values that JSON does not have become their `str()`.
    """
    try:
        return json.dumps(value, allow_nan=False, indent=indent)
    except (TypeError, ValueError):  # the value has types that JSON lacks: convert them, which is slower
        return json.dumps(_plain(value), allow_nan=False, indent=indent)


def _plain(value: Any) -> Any:
    """Convert `value` to types that JSON has: dicts, lists, strings, numbers, booleans and None."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(each) for each in value]
    if hasattr(value, "tolist"):  # `value` is a tensor or a numpy array
        values = value.tolist()
        return str(value) if type(values) is type(value) else _plain(values)
    return str(value)
