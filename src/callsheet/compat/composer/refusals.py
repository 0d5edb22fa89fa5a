"""What cannot be given here, said by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from callsheet.errors import NotCarried


def refuse(who: str, given: Mapping[str, tuple[Any, Any, str]]) -> None:
    """Refuse arguments that differ from Composer's own defaults: by name the value, the default, and what to do instead.

    Raises:
        NotCarried: the message names the argument, and the mend.
    """
    for name, (value, default, mend) in given.items():
        if value is not default and value != default:
            raise NotCarried(f"{who}({name}={value!r}) is not carried over from Composer: {mend}")
