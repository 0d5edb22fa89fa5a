"""`callsheet bridges`: print which callback works in which framework's training loop."""

from __future__ import annotations

from callsheet.bridges.matrix import about, frameworks, overview
from callsheet.errors import ConfigError, did_you_mean


def bridges(name: str | None = None) -> str:
    """Return a table that says which callback works in which framework's loop, or the details of one framework.

    Raises:
        ConfigError: no such bridge.
    """
    if name is None:
        return overview()
    if name not in frameworks():
        raise ConfigError(f"there is no bridge {name!r}{did_you_mean(name, frameworks())} (one of {', '.join(frameworks())})")
    return about(name)
