"""Makes fingerprints, which describe callbacks as data. Two processes use them to compare callbacks attribute by attribute.

Values are compared by their content and by which objects they share. An object of an unknown type is described
by what pickle would store of it (`__reduce_ex__`), but is not pickled. An object that cannot be inspected, such as a lock, a
thread or a socket, is described by its type only.
"""

from __future__ import annotations

import copyreg
import hashlib
import io
import json
import threading
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

import torch

from callsheet.core.callback import Callback
from callsheet.core.spec import init_args_of
from callsheet.transport.names import name_of, path_of
from callsheet.transport.sealed import TransportError

Node = list[Any]
"""The description of one object: `[type, text]`, `[type, {label: node}]`, or `["same", path]` for an object that occurred before.
"""

IGNORE_ATTRIBUTE = "transport_ignore"
"""The class attribute that names those instance attributes which may differ between processes."""

_MAX_DEPTH = 100  # the maximum depth of nesting, because each level takes several calls on Python's limited stack
_MAX_LISTED_ITEMS = 1000  # a container with more items, all of them plain values, is described by a digest
_NOT_INSPECTED = "cannot be inspected"
# Of a function's code, these do not depend on the file and the line, which may differ between processes.
_COMPARED_OF_CODE = ("co_code", "co_consts", "co_names", "co_varnames", "co_freevars", "co_cellvars")


def fingerprint(values: Mapping[str, Any]) -> dict[str, Node]:
    """Return a description of each value and of everything inside it, for comparison with the values in another process."""
    fingerprinter = _Fingerprinter()
    return {name: fingerprinter.node_of(value, name) for name, value in values.items()}


def differences(here: Mapping[str, Node], there: Mapping[str, Node]) -> list[str]:
    """Return the differences between two fingerprints, one line each.

    A line has the path and the kind of difference, but never the values.
    """
    return [line for name in here for line in _compare(here[name], there[name], name)]


class _Fingerprinter:
    def __init__(self) -> None:
        # The objects that occurred, by id or address, each with its path. They are kept alive, because an id may be used again.
        self._met: dict[Hashable, tuple[Any, str]] = {}
        self._depth = 0

    def node_of(self, value: Any, path: str) -> Node:
        kind = type(value)
        if (text := _text_of(value)) is not None:
            return [name_of(kind), text]
        if _has_identity(value) and (met := self._find_or_record(id(value), value, path)):
            return met
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise TransportError(f"{path}: nested deeper than {_MAX_DEPTH} levels, too deep to compare; flatten it")
        if isinstance(value, torch.Tensor):
            node = self._tensor(value, path)
        elif kind in (set, frozenset):
            # Sort the members by their nodes, because the order of a set differs between processes.
            members = sorted((self.node_of(member, path) for member in value), key=json.dumps)
            node = [name_of(kind), {f"[{i}]": member for i, member in enumerate(members)}]
        else:
            inside = self._inside(value, path)
            if not isinstance(inside, str):
                inside = {label: self.node_of(part, _join(path, label)) for label, part in inside.items()}
                if len(inside) > _MAX_LISTED_ITEMS and all(isinstance(part[1], str) for part in inside.values()):
                    inside = f"{len(inside)} items: {hashlib.sha256(json.dumps(inside).encode()).hexdigest()}"
            node = [name_of(kind), inside]
        self._depth -= 1
        return node

    def _find_or_record(self, key: Hashable, value: object, path: str) -> Node | None:
        """Return a node with the earlier path if an object with this key occurred before, else None."""
        if key in self._met:
            return ["same", self._met[key][1]]
        self._met[key] = value, path
        return None

    def _inside(self, value: Any, path: str) -> dict[str, Any] | str:
        """Return the objects inside `value` by label, or a text about `value` if nothing inside it can be compared."""
        if isinstance(value, Callback):
            return _inside_callback(value)
        if type(value) is tuple:  # what pickle stores of a tuple has the tuple itself in it
            return self._label_items(enumerate(value), path)
        if isinstance(value, FunctionType):
            # Leave out an empty closure cell, because it has no value yet.
            cells = [cell.cell_contents for cell in value.__closure__ or () if cell != CellType()]
            return {"code": value.__code__, "defaults": [value.__defaults__, value.__kwdefaults__], "closure": cells}
        if isinstance(value, CodeType):
            return {name: getattr(value, name) for name in _COMPARED_OF_CODE}
        if isinstance(value, threading.Thread):  # its attributes, such as its identifier, differ between processes
            return ""
        return self._reduce(value, path)

    def _label_items(self, items: Iterable[tuple[Any, Any]], path: str) -> dict[str, Any]:
        return {
            f"[{key!r}]" if isinstance(key, str | int) else f"[{json.dumps(self.node_of(key, path))}]": item
            for key, item in items
        }

    def _reduce(self, value: Any, path: str) -> dict[str, Any] | str:
        """Return what pickle would store of an object of an unknown type."""
        kind = type(value)
        try:
            reduced = copyreg.dispatch_table[kind](value) if kind in copyreg.dispatch_table else value.__reduce_ex__(4)
        except Exception:  # the value cannot be pickled
            # An iterator would lose its position. A file is an iterator too, but is ignored: each process opens its own file.
            return _NOT_INSPECTED if isinstance(value, Iterator) and not isinstance(value, io.IOBase) else ""
        if isinstance(reduced, str):
            return reduced
        make, args, state, items, pairs = (*reduced, None, None, None, None)[:5]
        # Leave out the usual way to make an object: from its class, without arguments.
        is_usual = make is copyreg.__newobj__ and args == (kind,)  # type: ignore[attr-defined]  # typeshed does not have it
        made = {} if is_usual else {"how it is made": make, "arguments": args}
        return (
            made
            | _attributes(value, state)
            | self._label_items(enumerate(items or ()), path)
            | self._label_items(pairs or (), path)
        )

    def _tensor(self, tensor: torch.Tensor, path: str) -> Node:
        gradient = "with" if tensor.requires_grad else "without"
        facts = f"{name_of(type(tensor))} {tensor.dtype} {list(tensor.shape)} {tensor.device} {gradient} gradient"
        try:
            host = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
            content = hashlib.sha256(host.flatten().view(torch.uint8).numpy().data).hexdigest()
            storage = tensor.untyped_storage()
        except (RuntimeError, TypeError, NotImplementedError):
            # The data cannot be read: this is a meta or sparse tensor, or a tensor of a subclass that keeps its data elsewhere.
            return [facts, "" if tensor.is_meta else _NOT_INSPECTED]
        # Compare addresses, because `torch.from_numpy` makes a new storage for each tensor over the same memory.
        shared = self._find_or_record(("storage", storage.data_ptr()), storage, path) if tensor.numel() else None
        return [facts, {"content": [facts, content], "memory": shared or ["own", ""]}]


def _text_of(value: Any) -> str | None:
    """Return a text that identifies a plain value, a class, a module or an importable function; otherwise None.

    What an importable function refers to, such as a cache, is not compared, because each process imports the function.
    """
    kind = type(value)
    if value is None or kind in (bool, int, float, complex):
        return repr(value)
    if kind in (str, bytes):
        return hashlib.sha256(value.encode(errors="surrogatepass") if kind is str else value).hexdigest()
    if isinstance(value, ModuleType):
        return value.__name__
    return name_of(value) if isinstance(value, type) else path_of(value) or None


def _has_identity(value: object) -> bool:
    """Return whether it matters if two places share this object or have equal ones.

    It does not matter if the type defines its own hash, because equal objects of this type are interchangeable. A tensor has its
    own hash too: whether tensors share memory is compared separately.
    """
    return type(value).__hash__ in (None, object.__hash__)


def _inside_callback(callback: Callback) -> dict[str, Any]:
    """Return the attributes of a callback, the arguments of its constructor, and the attributes of its classes."""
    inside = _attributes(callback, object.__getstate__(callback))
    # Compare the constructor's arguments by name, because the receiver gives all of them by name.
    inside.pop("._arguments", None)
    inside |= {f"({name})": value for name, value in init_args_of(callback).items()}
    for kind in type(callback).__mro__:
        # Compare class attributes too, because a user may have changed them after the import. Of a method, compare only its name.
        if issubclass(kind, Callback):
            for name, value in sorted(vars(kind).items()):
                is_method = isinstance(value, FunctionType)
                if (is_method or not name.startswith("__")) and name not in _ignored_attributes(callback):
                    inside[f" {kind.__name__}.{name}"] = name_of(value) if is_method else value
    return inside


def _attributes(value: object, state: Any) -> dict[str, Any]:
    """Return the attributes in `state`, the state that pickle would store of `value`; if it has no attributes, the state itself."""
    match state:
        # Python's own state of an object whose class has `__slots__`.
        case (None | dict() as attributes, dict() as slots) if slots.keys().isdisjoint(attributes or ()):
            state = (attributes or {}) | slots
        # Python's own state of a frozen dataclass with slots: the values of its fields.
        case list() if is_dataclass(value) and len(state) == len(fields(value)):
            state = dict(zip((field.name for field in fields(value)), state, strict=True))
    if not isinstance(state, dict):
        return {} if state is None else {"state": state}
    ignored = _ignored_attributes(value)
    # Sort the attributes, because the order in which they were set may differ between processes.
    return {f".{name}": state[name] for name in sorted(state, key=str) if name not in ignored}


def _ignored_attributes(value: object) -> set[str]:
    """Return the names of the attributes that are not compared.

    A callback gives the names in an attribute of its own or of its class. For other objects, only the attribute of the class counts.
    """
    given = getattr(value if isinstance(value, Callback) else type(value), IGNORE_ATTRIBUTE, ())
    # A class of another framework may have an attribute of this name that means something else.
    return set(given) if isinstance(given, (tuple, list, set, frozenset)) else set()


def _compare(here: Node, there: Node, path: str) -> Iterator[str]:
    if "same" in (here[0], there[0]):
        if here != there:
            met, where = (here[1], "here") if here[0] == "same" else (there[1], "there")
            yield f"{path}: {where} it is the same object as {met}, but not {'there' if where == 'here' else 'here'}"
    elif here[0] != there[0]:
        yield f"{path}: {_with_article(here[0])} here, {_with_article(there[0])} there"
    elif isinstance(here[1], dict) and isinstance(there[1], dict):
        for name in here[1] | there[1]:
            if name not in there[1] or name not in here[1]:
                yield f"{_join(path, name)}: {'missing there' if name in here[1] else 'missing here'}"
            else:
                yield from _compare(here[1][name], there[1][name], _join(path, name))
    elif _NOT_INSPECTED in (here[1], there[1]):
        yield f"{path}: {_with_article(here[0])}, which cannot be inspected"
    elif here[1] != there[1]:
        yield f"{path}: {_with_article(here[0])} with another value there"


def _join(path: str, name: str) -> str:
    return path + (name if name[:1] in ".[( " else f": {name}")


def _with_article(kind: str) -> str:
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}" if kind != "NoneType" else "None"
