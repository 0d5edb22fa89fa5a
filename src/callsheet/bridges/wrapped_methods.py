"""Wrappers around methods of one object of a framework: how a host knows what the framework does when it has no event for it."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any


class WrappedMethods:
    """Puts functions around methods of one object of a framework, such as a trainer, and takes them away again.

    The wrappers are attributes of the object, so that they are called before a subclass's method, too. They do not
    keep the object alive.
    """

    def __init__(self, owner: Any) -> None:
        self._owner: weakref.ref[Any] = weakref.ref(owner)
        self._wrapped: dict[str, Any] = {}

    def wrap(self, name: str, around: Callable[..., Any], put: Callable[[Any, str, Any], Any] = setattr) -> None:
        """Call `around(method, *args, **kwargs)` in the place of the method, whose `method` is the one that was there.

        `put` sets the attribute: `copies.replace` for a wrapper that is never removed, so that no copy of the object calls it.
        """
        owner = self._owner()
        bound, own = getattr(owner, name), vars(owner).get(name)
        reference, method = self._owner, getattr(type(owner), name)

        @functools.wraps(bound)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            there = own if own is not None else functools.partial(method, reference())
            return around(there, *args, **kwargs) if name in self._wrapped else there(*args, **kwargs)

        del wrapper.__wrapped__  # the owner would refer to itself
        wrapper.__signature__ = inspect.signature(bound)  # type: ignore[attr-defined]
        put(owner, name, wrapper)
        self._wrapped[name] = (wrapper, own)

    def remove(self) -> None:
        """Leave the object as it was. A wrapper that somebody has wrapped since stays until that is taken away, and does nothing."""
        owner, wrapped = self._owner(), dict(self._wrapped)
        self._wrapped.clear()
        for name, (wrapper, own) in wrapped.items():
            wrapper.earlier = own
            if owner is not None and vars(owner).get(name) is wrapper:
                while hasattr(own, "earlier"):  # another host's, which was taken away before
                    own = own.earlier
                if own is None:
                    delattr(owner, name)
                else:
                    setattr(owner, name, own)
