"""Converts the context's fields to OpenTelemetry attributes, and metric names to names of OpenTelemetry instruments."""

from __future__ import annotations

import re
from typing import Any

from callsheet.core.context import Context


def about(ctx: Context) -> dict[str, Any]:
    """Return the context's fields that are available now, as attributes for a span."""
    facts: dict[str, Any] = {"callsheet.step": ctx.step, "callsheet.epoch": ctx.epoch}
    if ctx.has("eval_name"):
        facts["callsheet.dataset"] = ctx.eval_name
    if ctx.has("eval_results"):
        facts |= {f"{name}/{metric}": value for name, result in ctx.eval_results.items() for metric, value in result.items()}
    if ctx.has("checkpoint") and ctx.checkpoint is not None:
        saved = ctx.checkpoint
        facts |= {"callsheet.checkpoint": saved.path, "callsheet.kind": saved.kind, "callsheet.bytes": saved.size_bytes}
    return facts


def attribute(value: Any) -> Any:
    """Return `value` if it is valid for an OpenTelemetry attribute, otherwise `str(value)`. Integers over 64 bits are not valid."""
    is_known = isinstance(value, (bool, float, str)) or (isinstance(value, int) and -(2**63) <= value < 2**63)
    return value if is_known else str(value)


def instrument(name: str) -> str:
    """Return the metric's name as a valid name of an OpenTelemetry instrument."""
    return re.sub(r"[^A-Za-z0-9_.\-/]", "_", name if name[:1].isalpha() else f"m_{name}")[:255]
