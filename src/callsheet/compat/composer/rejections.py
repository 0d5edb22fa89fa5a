"""Raises errors for arguments of Composer that callsheet does not support; each error names its argument."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from callsheet.errors import NotSupported


def reject(who: str, given: Mapping[str, tuple[Any, Any, str]]) -> None:
    """Raise NotSupported for the first of the arguments whose value differs from Composer's default.

    For each name, `given` has the value, the default, and what to do instead.

    Raises:
        NotSupported: the message names the argument, and has a hint.
    """
    for name, (value, default, hint) in given.items():
        if value is not default and value != default:
            raise NotSupported(f"{who}({name}={value!r}) is not supported, unlike in Composer: {hint}")
