"""The argument `mode` of callbacks that monitor a metric: whether lower or higher values are better."""

from __future__ import annotations

from typing import Literal, get_args

from callsheet.core.callback import one_of

Mode = Literal["min", "max"]
MODES: tuple[Mode, ...] = get_args(Mode)

ModeOrAuto = Literal["auto", Mode]
MODES_AND_AUTO: tuple[ModeOrAuto, ...] = get_args(ModeOrAuto)


def sign_of(mode: Mode) -> float:
    """Return 1 or -1. The values of the metric are multiplied by this number, so that lower values are always better.

    Raises:
        ConfigError: the mode is unknown.
    """
    return 1.0 if one_of("mode", mode, MODES) == "min" else -1.0


def is_lower_better(mode: ModeOrAuto, monitor: str) -> bool:
    """Return whether lower values of the metric are better. `auto` decides by the metric's name, as in Composer.

    Raises:
        ConfigError: the mode is unknown.
    """
    known = one_of("mode", mode, MODES_AND_AUTO)
    return any(word in monitor.lower() for word in ("loss", "error", "perplexity")) if known == "auto" else known == "min"
