"""Adds hooks and attributes to the user's objects, and leaves them out of copies of the objects.

Hosts and callbacks register hooks on the model, and hosts replace some methods of other objects. A copy or pickle of such an
object, as made by `torch.save(model)` or `copy.deepcopy(model)`, must not contain these. So the object gets a `__getstate__` of
its own, which leaves out what was added; `copy` and `pickle` call it. The object keeps its class and the containers of its hooks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

_ABSENT: Any = object()


class _Additions:
    """Provides the `__getstate__` of an object to which callsheet has added hooks and attributes.

    This `__getstate__` returns the object's state without the additions, so that copies and pickles do not have them.
    """

    def __init__(self, owner: Any) -> None:
        self._owner = weakref.ref(owner)
        self.hooks: dict[int, None] = {}
        """The keys of the added hooks, in the dictionaries in which the object stores its hooks."""
        self.replaced: dict[str, list[Any]] = {}
        """For each replaced attribute, by name: its original value, and after it the values that replaced it, the latest last."""

    def __call__(self) -> Any:
        owner = self._owner()
        getstate: Any = type(owner).__getstate__  # not the instance's `__getstate__`, which is this object
        state = getstate(owner)
        return self._without(state) if isinstance(state, dict) else state

    def copied(self, memo: dict[int, Any]) -> Any:
        """Copy the object with the `__deepcopy__` of its class, without the added attributes.

        The attributes are removed before the copy and put back after it, because that method might copy them too.
        """
        owner: Any = self._owner()
        attributes, own = vars(owner), dict(vars(owner))
        without = self._without(own)
        try:
            attributes.clear()
            attributes.update(without)
            return type(owner).__deepcopy__(owner, memo)
        finally:
            attributes.clear()
            attributes.update(own)

    def _without(self, state: Mapping[str, Any]) -> dict[str, Any]:
        state = {name: value for name, value in state.items() if name not in _OURS}
        for name, (before, *_) in self.replaced.items():
            if before is not _ABSENT:
                state[name] = before
            else:
                state.pop(name, None)
        for name, hooks in state.items():
            if "hooks" in name and isinstance(hooks, dict) and self.hooks.keys() & hooks.keys():
                state[name] = type(hooks)((key, hook) for key, hook in hooks.items() if key not in self.hooks)
        return state


_OURS = ("__getstate__", "__deepcopy__")


def _additions(owner: Any) -> _Additions:
    attributes = vars(owner)
    found = attributes.get("__getstate__")
    if not isinstance(found, _Additions) or found._owner() is not owner:
        attributes["__getstate__"] = found = _Additions(owner)
        if hasattr(type(owner), "__deepcopy__"):
            attributes["__deepcopy__"] = found.copied
    return found


def _clean(owner: Any, additions: _Additions) -> None:
    if not additions.hooks and not additions.replaced:
        for name in _OURS:
            vars(owner).pop(name, None)


def add_hook(register: Callable[..., Any], hook: Callable[..., Any]) -> Callable[[], None]:
    """Register a hook that is left out of copies of the object. Return the function that removes the hook.

    Args:
        register: a method of a module or an optimizer such as `register_forward_hook`, or a `functools.partial` of one.
    """
    handle = register(hook)
    method: Any = getattr(register, "func", register)
    owner = method.__self__
    if not isinstance(owner, nn.Module):  # nothing else is needed, because an optimizer leaves its hooks out of copies
        return handle.remove  # type: ignore[no-any-return]
    additions = _additions(owner)
    additions.hooks[handle.id] = None

    def remove() -> None:
        handle.remove()
        additions.hooks.pop(handle.id, None)
        _clean(owner, additions)

    return remove


def replace(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Set an attribute that is left out of copies of the object. Return the function that restores the earlier value."""
    attributes, additions = vars(owner), _additions(owner)
    values = additions.replaced.setdefault(name, [attributes.get(name, _ABSENT)])
    values.append(value)
    attributes[name] = value

    def restore() -> None:
        values.remove(value)
        # If the attribute has another value, another library has replaced it and may still call ours, so leave it in place.
        if attributes.get(name) is value:
            attributes[name] = values[-1]
            if values[-1] is _ABSENT:
                del attributes[name]
        if len(values) == 1:
            additions.replaced.pop(name, None)
            _clean(owner, additions)

    return restore
