"""The context of callbacks that observe one rank of several, in a loop whose collectives must not be disturbed."""

from __future__ import annotations

from typing import Any

from callsheet.core.context import Context
from callsheet.errors import NotSupported


class LoneContext(Context):
    """A context without collectives, because other ranks do not take part in them or because the loop calls its own."""

    __slots__ = ()

    def gather(self, value: Any) -> list[Any]:
        """Return the value in a list if there is only one rank. Otherwise raise NotSupported."""
        if self.run.world_size > 1:
            raise NotSupported("ctx.gather() is not supported here: it would interleave with the collectives of the training")
        return [value]
