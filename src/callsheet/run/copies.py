"""Adds hooks and attributes to the user's objects in such a way that copies of the objects do not contain these additions.

Hosts and callbacks register hooks on the model, and hosts replace some methods of other objects. A copy or pickle of such an
object, as made by `torch.save(model)` or `copy.deepcopy(model)`, must not contain these additions. So callsheet registers a
function for the object's class. `copy` and `pickle` call this function, which removes the additions while the object's state is
read, and then puts them back. The object itself keeps its class, its attributes and the containers of its hooks, because a script
may copy or trace these in its own way.
"""

from __future__ import annotations

import copy
import copyreg
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

_ABSENT: Any = object()
_BEFORE_ATTRIBUTE = "_callsheet_before"
"""The name of the attribute in which a replacing function stores the value that it has replaced (`_ABSENT` if there was none)."""

_reducers: dict[type, Any] = copyreg.dispatch_table
_deepcopiers: dict[type, Any] = copy._deepcopy_dispatch  # type: ignore[attr-defined]

_hooks: set[int] = set()
"""The keys of the added hooks in the dictionaries in which torch stores hooks. torch uses each key once in a process."""


@contextmanager
def without_additions(*things: Any) -> Iterator[None]:
    """While the `with` block runs, remove the hooks and attributes that callsheet has added to the objects."""
    changed = [
        (vars(thing), name, value, without)
        for thing in things
        for name, value in vars(thing).items()
        if (without := _without_addition(name, value)) is not value
    ]
    for attributes, name, _, without in changed:
        _set(attributes, name, without)
    try:
        yield
    finally:
        for attributes, name, value, without in changed:
            if attributes.get(name, _ABSENT) is without:  # restore the value, unless other code has set another one in the block
                attributes[name] = value


def _without_addition(name: str, value: Any) -> Any:
    """Return the attribute's value without the hook or function that callsheet added."""
    if isinstance(value, OrderedDict) and "hooks" in name and not _hooks.isdisjoint(value):
        return type(value)((key, hook) for key, hook in value.items() if key not in _hooks)
    while isinstance(value, FunctionType) and _BEFORE_ATTRIBUTE in vars(value):
        value = vars(value)[_BEFORE_ATTRIBUTE]
    return value


def _set(attributes: dict[str, Any], name: str, value: Any) -> None:
    if value is _ABSENT:
        attributes.pop(name, None)
    else:
        attributes[name] = value


class _Reducer:
    """Replaces `__reduce_ex__` of a class for `copy` and `pickle`, so that they leave out what callsheet has added to an object.

    The reducer is in `copyreg.dispatch_table` as long as an object of the class has additions. If the class defines `__deepcopy__`,
    an entry in the table of `copy.deepcopy` removes the additions while that method runs.
    """

    def __init__(self, kind: type) -> None:
        self._kind = kind
        self._before = _reducers.get(kind)
        self._additions = 0
        _reducers[kind] = self
        if hasattr(kind, "__deepcopy__"):
            _deepcopiers[kind] = _deepcopy

    def __call__(self, thing: Any) -> Any:
        with without_additions(thing):
            # Use protocol 2, the lowest that `copy`, `pickle` and `torch.save` use. Its result is valid in higher protocols too.
            made = self._before(thing) if self._before is not None else thing.__reduce_ex__(2)
            return _copy_attributes(made, vars(thing))

    def begin(self) -> None:
        """Record that a hook or attribute was added to an object of this reducer's class."""
        self._additions += 1

    def end(self) -> None:
        """Record that a hook or attribute was removed. After the last one, remove this reducer from the tables of `copy` and `pickle`."""
        self._additions -= 1
        if self._additions or _reducers.get(self._kind) is not self:
            return
        if self._before is not None:
            _reducers[self._kind] = self._before
        else:
            del _reducers[self._kind]
        _deepcopiers.pop(self._kind, None)


def _deepcopy(thing: Any, memo: dict[int, Any]) -> Any:
    with without_additions(thing):
        return thing.__deepcopy__(memo)


def _copy_attributes(made: Any, attributes: dict[str, Any]) -> Any:
    """Return `made`, a result of `__reduce_ex__`, with a copy of the object's `__dict__`.

    The copy is needed because callsheet puts its additions back into the original `__dict__`.
    """
    if made is attributes:
        return dict(made)
    return tuple(_copy_attributes(each, attributes) for each in made) if type(made) is tuple else made


def _reducer_of(thing: Any) -> _Reducer:
    found = _reducers.get(type(thing))
    return found if isinstance(found, _Reducer) else _Reducer(type(thing))


def add_hook(register: Callable[..., Any], hook: Callable[..., Any]) -> Callable[[], None]:
    """Register a hook that copies of the object will not have. Return a function that removes the hook.

    Args:
        register: a method of a module or an optimizer such as `register_forward_hook`, or a `functools.partial` of one.
    """
    handle = register(hook)
    method: Any = getattr(register, "func", register)
    reducer = _reducer_of(method.__self__)
    reducer.begin()
    _hooks.add(handle.id)

    def remove() -> None:
        handle.remove()
        if handle.id in _hooks:
            _hooks.discard(handle.id)
            reducer.end()

    return remove


def replace(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Set an attribute of an object to a function, but not in copies of the object. Return a function that restores the earlier value."""
    attributes, reducer = vars(owner), _reducer_of(owner)
    reducer.begin()
    setattr(value, _BEFORE_ATTRIBUTE, attributes.get(name, _ABSENT))
    attributes[name] = value

    def restore() -> None:
        before = vars(value).pop(_BEFORE_ATTRIBUTE)
        reducer.end()
        now = attributes.get(name)
        if now is value:
            _set(attributes, name, before)
            return
        # The attribute was set again since. If another library has set it, keep its value, which may still call our function.
        # If callsheet has set a newer function, make that function restore `before` later, and not our function.
        while isinstance(now, FunctionType) and _BEFORE_ATTRIBUTE in vars(now):
            if vars(now)[_BEFORE_ATTRIBUTE] is value:
                setattr(now, _BEFORE_ATTRIBUTE, before)
                return
            now = vars(now)[_BEFORE_ATTRIBUTE]

    return restore
