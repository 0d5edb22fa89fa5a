"""Wraps methods of another framework's object, such as its trainer, where the framework has no callback event."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any


class WrappedMethods:
    """Wraps methods of one object of another framework, such as its trainer, until `remove` restores them.

    The wrappers are attributes of the object, whichever class defines the methods. They do not keep the object alive.
    """

    def __init__(self, owner: Any) -> None:
        self._owner: weakref.ref[Any] = weakref.ref(owner)
        self._wrapped: dict[str, Any] = {}

    def wrap(self, name: str, around: Callable[..., Any], put: Callable[[Any, str, Any], Any] = setattr) -> None:
        """Replace the method `name`: its callers then call `around(method, *args, **kwargs)`, where `method` is the original.

        `put` sets the attribute. For a wrapper that is never removed, `put` is `copies.replace`, so that no copy of the object calls
        the wrapper.
        """
        owner = self._owner()
        bound, own = getattr(owner, name), vars(owner).get(name)
        reference, method = self._owner, getattr(type(owner), name)

        @functools.wraps(bound)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            original = own if own is not None else functools.partial(method, reference())
            return around(original, *args, **kwargs) if name in self._wrapped else original(*args, **kwargs)

        del wrapper.__wrapped__  # `__wrapped__` refers to `owner`: a reference cycle, which would delay the deletion of `owner`
        wrapper.__signature__ = inspect.signature(bound)  # type: ignore[attr-defined]
        put(owner, name, wrapper)
        self._wrapped[name] = (wrapper, own)

    def remove(self) -> None:
        """Restore the original methods of the object.

        If another library has since wrapped one of our wrappers, our wrapper stays in place and only calls the original method.
        """
        owner, wrapped = self._owner(), dict(self._wrapped)
        self._wrapped.clear()
        for name, (wrapper, own) in wrapped.items():
            wrapper.earlier = own
            if owner is not None and vars(owner).get(name) is wrapper:
                while hasattr(own, "earlier"):  # skip `own`, a wrapper of another callsheet adapter that was removed before
                    own = own.earlier
                if own is None:
                    delattr(owner, name)
                else:
                    setattr(owner, name, own)
