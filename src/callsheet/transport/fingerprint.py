"""Makes fingerprints, which describe callbacks as data. Two processes use them to compare callbacks attribute by attribute.

Values are compared by their content and by which objects they share. An object of an unknown type is described
by what pickle would store of it (`__reduce_ex__`), but is not pickled. An object that cannot be inspected, such as a lock, a
thread or a socket, is described by its type only.
"""

from __future__ import annotations

import copyreg
import functools
import hashlib
import inspect
import io
import json
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from callsheet.core.callback import Callback
from callsheet.transport.names import name_of, path_of
from callsheet.transport.sealed import TransportError

Node = list[Any]
"""The description of one object: `[type, text]`, `[type, {name: node}]`, or `["same", path]` for an object that occurred before.
"""

IGNORE = "transport_ignore"
"""The class attribute that names those instance attributes which may differ between processes."""

_DEEPEST = 100  # the maximum depth of nesting, because each level takes several calls on Python's limited stack
_LONG = 1000  # a list with more items than this number is described by a digest instead of item by item
_SHORT = 40  # a text of this many bytes or more is described by a digest
_UNSEEN = "cannot be inspected"


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
        self._met: dict[object, str] = {}
        self._kept: list[Any] = []  # after an object is freed, its id may be used again, so keep the objects alive
        self._depth = 0

    def node_of(self, value: Any, path: str) -> Node:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise TransportError(f"{path}: nested deeper than {_DEEPEST} levels, too deep to compare; flatten it")
        try:
            return self._plain(value) or (not _is_value(value) and self._met_before(id(value), path)) or self._object(value, path)
        finally:
            self._depth -= 1

    def _plain(self, value: Any) -> Node | None:
        kind = type(value)
        if value is None or kind in (bool, int, complex):
            return [kind.__name__, repr(value)]
        if kind is float:
            return ["float", value.hex()]
        if kind in (str, bytes):
            raw = value.encode(errors="surrogatepass") if kind is str else value
            return [kind.__name__, repr(value) if len(raw) < _SHORT else hashlib.sha256(raw).hexdigest()]
        if isinstance(value, type | ModuleType | torch.dtype | torch.device):
            return [
                "class" if isinstance(value, type) else kind.__name__,
                name_of(value) if isinstance(value, type) else str(getattr(value, "__name__", value)),
            ]
        return None

    def _met_before(self, key: object, path: str) -> Node | None:
        if key in self._met:
            return ["same", self._met[key]]
        self._met[key] = path
        return None

    def _object(self, value: Any, path: str) -> Node:
        self._kept.append(value)
        kind = type(value)
        if isinstance(value, Callback):
            return self._callback(value, path)
        if kind in (list, tuple):
            nodes = [self.node_of(item, f"{path}[{i}]") for i, item in enumerate(value)]
            if len(nodes) > _LONG and all(isinstance(node[1], str) for node in nodes):
                return [f"{kind.__name__} of {len(nodes)}", hashlib.sha256(json.dumps(nodes).encode()).hexdigest()]
            return [kind.__name__, {f"[{i}]": node for i, node in enumerate(nodes)}]
        if kind in (set, frozenset):
            members = sorted((self.node_of(item, path) for item in value), key=json.dumps)
            return [kind.__name__, {f"[{i}]": member for i, member in enumerate(members)}]
        if kind is dict:
            return ["dict", self._pairs(value.items(), path)]
        if kind is functools.partial and not vars(value):
            inside = {"function": value.func, "arguments": value.args, "keywords": value.keywords}
            return [kind.__name__, {name: self.node_of(item, f"{path}'s {name}") for name, item in inside.items()}]
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if isinstance(value, FunctionType):
            return self._function(value, path)
        if isinstance(value, MethodType):
            return ["method", {"": self.node_of(value.__self__, path), value.__name__: [value.__name__, ""]}]
        if isinstance(value, BuiltinFunctionType):
            owner = getattr(value, "__self__", None)
            return ["function", {value.__qualname__: self.node_of(None if isinstance(owner, ModuleType) else owner, path)}]
        if isinstance(value, threading.Thread) or (
            isinstance(value, io.IOBase) and not isinstance(value, io.StringIO | io.BytesIO)
        ):
            return [name_of(kind), ""]
        return self._reduced(value, path)

    def _callback(self, callback: Callback, path: str) -> Node:
        ignored = {"_arguments", IGNORE, *getattr(callback, IGNORE, ())}
        slots = {name for kind in type(callback).__mro__ for name in getattr(kind, "__slots__", ()) if hasattr(callback, name)}
        names = sorted((vars(callback).keys() | slots) - ignored)
        parts = {f".{name}": self.node_of(getattr(callback, name), f"{path}.{name}") for name in names}
        arguments = {f"({name})": self.node_of(value, f"{path}({name})") for name, value in arguments_of(callback).items()}
        own = {
            f" {kind.__name__}.{name}": self.node_of(value, f"{path} {kind.__name__}.{name}")
            for kind in type(callback).__mro__
            for name, value in sorted(_class_values(kind))
            if name not in ignored
        }
        return [f"{name_of(type(callback))}", parts | arguments | own]

    def _pairs(self, pairs: Iterable[tuple[Any, Any]], path: str) -> dict[str, Node]:
        return {
            f"[{key!r}]" if isinstance(key, str | int) else f"[{json.dumps(self.node_of(key, path))}]": self.node_of(
                item, f"{path}[{key!r}]"
            )
            for key, item in pairs
        }

    def _tensor(self, tensor: torch.Tensor, path: str) -> Node:
        gradient = "with" if tensor.requires_grad else "without"
        facts = f"{name_of(type(tensor))} {tensor.dtype} {list(tensor.shape)} {tensor.device} {gradient} gradient"
        try:
            with torch.no_grad():
                host = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
            content = hashlib.sha256(host.flatten().view(torch.uint8).numpy().tobytes()).hexdigest()
            storage = tensor.untyped_storage().data_ptr()
        except (RuntimeError, TypeError, NotImplementedError):
            # The data cannot be read: this is a meta or sparse tensor, or a tensor of a subclass that keeps its data elsewhere.
            return [facts, "" if tensor.is_meta else _UNSEEN]
        shared = self._met_before(("storage", storage), path) if tensor.numel() else None
        return [facts, {"content": [facts, content], "memory": shared or ["own", ""]}]

    def _function(self, function: FunctionType, path: str) -> Node:
        if found := path_of(function):
            return ["function", found]
        # Leave out an empty closure cell, because it has no value yet.
        cells = [cell.cell_contents for cell in function.__closure__ or () if cell != CellType()]
        inside = {
            "code": ["code", _code(function.__code__)],
            "defaults": self.node_of([function.__defaults__, function.__kwdefaults__], f"{path}'s defaults"),
            "closure": self.node_of(cells, f"{path}'s closure"),
        }
        return ["function", inside]

    def _reduced(self, value: Any, path: str) -> Node:
        kind = type(value)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                reduced = copyreg.dispatch_table[kind](value) if kind in copyreg.dispatch_table else value.__reduce_ex__(4)
        except Exception:  # the value cannot be pickled
            return [name_of(kind), _UNSEEN if isinstance(value, Iterator) else ""]
        if isinstance(reduced, str):
            return [name_of(kind), reduced]
        make, args, state, items, pairs = (*reduced, None, None, None, None)[:5]
        self._kept.append(reduced)
        parts = {"how it is made": self.node_of(make, path), "arguments": self.node_of(list(args), path)}
        if isinstance(state, dict):
            parts |= {f".{name}": self.node_of(item, f"{path}.{name}") for name, item in state.items()}
        elif state is not None:
            parts["state"] = self.node_of(state, path)
        if items is not None:
            parts |= {f"[{i}]": self.node_of(item, f"{path}[{i}]") for i, item in enumerate(items)}
        if pairs is not None:
            parts |= self._pairs(pairs, path)
        return [name_of(kind), parts]


def arguments_of(callback: Callback) -> dict[str, Any]:
    """Return the arguments with which the callback was constructed, by name."""
    args, kwargs = callback._arguments
    signature = inspect.signature(type(callback).__init__)
    found: dict[str, Any] = {}
    for name, value in list(signature.bind(callback, *args, **kwargs).arguments.items())[1:]:
        found.update(value if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD else {name: value})
    return found


def _is_value(value: Any) -> bool:
    """Return whether equal objects of this type are interchangeable, so it does not matter whether two places share one object."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return False
    equal, hashed = (getattr(kind, name) for name in ("__eq__", "__hash__"))
    is_equal_by_value = equal is not object.__eq__ and hashed not in (None, object.__hash__)
    return is_equal_by_value or kind is functools.partial or kind is tuple


def _class_values(kind: type) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of the attributes of a user's class, for comparison. For a method, yield its qualified name.

    The attributes are compared because they may have changed since the class was imported.
    """
    if kind is Callback or kind.__module__.split(".")[0] == "callsheet" or not issubclass(kind, Callback):
        return
    for name, value in vars(kind).items():
        if isinstance(value, FunctionType):
            yield name, name_of(value)
        elif not name.startswith(("__", "_abc_")) and not hasattr(type(value), "__get__"):
            yield name, value


def _code(code: CodeType) -> str:
    """Return a digest of a function's code that does not depend on its file or line."""
    consts = [
        _code(const) if isinstance(const, CodeType) else repr(sorted(map(repr, const)) if isinstance(const, frozenset) else const)
        for const in code.co_consts
    ]
    names = [code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars]
    return hashlib.sha256(repr([code.co_code, consts, names]).encode()).hexdigest()


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
                yield f"{_joined(path, name)}: {'missing there' if name in here[1] else 'missing here'}"
            else:
                yield from _compare(here[1][name], there[1][name], _joined(path, name))
    elif _UNSEEN in (here[1], there[1]):
        yield f"{path}: {_with_article(here[0])}, which cannot be inspected"
    elif here[1] != there[1]:
        yield f"{path}: {_with_article(here[0])} with another value there"


def _joined(path: str, name: str) -> str:
    return path + (name if name[:1] in ".[( " else f": {name}")


def _with_article(kind: str) -> str:
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}" if kind != "NoneType" else "None"
