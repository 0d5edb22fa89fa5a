"""What a host puts into a model, a unit or a module of the user's, and how a copy of it is made without that.

A host registers hooks on the model and replaces some methods of other objects. Whoever copies or pickles such an object meanwhile, as with
`torch.save(model)` or `copy.deepcopy(model)`, gets neither: the object's `__getstate__`, which `copy` and `pickle` look up on the object
itself, leaves out what the host has put there. The object keeps its class, and the containers of its hooks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

_ABSENT: Any = object()


class _Additions:
    """The `__getstate__` of an object to which hosts have added hooks and attributes: its state without them."""

    def __init__(self, owner: Any) -> None:
        self._owner = weakref.ref(owner)
        self.hooks: dict[int, None] = {}
        """The keys of the added hooks, in any of the owner's dictionaries of hooks."""
        self.replaced: dict[str, list[Any]] = {}
        """The added attributes: what was there before, then what has been put in its place, the latest last."""

    def __call__(self) -> Any:
        owner = self._owner()
        getstate: Any = type(owner).__getstate__  # every class has one since Python 3.11
        state = getstate(owner)
        return self._without(state) if isinstance(state, dict) else state

    def copied(self, memo: dict[int, Any]) -> Any:
        """The owner's `__deepcopy__`, where its class has one, which may copy the attributes as they are."""
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
    """Register a hook that no copy of its owner has; returns the function that removes it.

    Args:
        register: a method of a module or an optimizer such as `register_forward_hook`, or a `functools.partial` of one.
    """
    handle = register(hook)
    method: Any = getattr(register, "func", register)
    owner = method.__self__
    if not isinstance(owner, nn.Module):  # an optimizer leaves all hooks out of its copies by itself
        return handle.remove  # type: ignore[no-any-return]
    additions = _additions(owner)
    additions.hooks[handle.id] = None

    def remove() -> None:
        handle.remove()
        additions.hooks.pop(handle.id, None)
        _clean(owner, additions)

    return remove


def replace(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Set an attribute of the object that no copy of it has; returns the function that restores what was there before."""
    attributes, additions = vars(owner), _additions(owner)
    values = additions.replaced.setdefault(name, [attributes.get(name, _ABSENT)])
    values.append(value)
    attributes[name] = value

    def restore() -> None:
        values.remove(value)
        if attributes.get(name) is value:  # else another library has replaced it since, and may call ours
            attributes[name] = values[-1]
            if values[-1] is _ABSENT:
                del attributes[name]
        if len(values) == 1:
            additions.replaced.pop(name, None)
            _clean(owner, additions)

    return restore
