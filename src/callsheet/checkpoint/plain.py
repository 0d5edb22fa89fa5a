"""Converts nested plain data with tensors to JSON and a list of tensors, and back. Reading never executes code from the data.

JSON values are stored unchanged. A value that JSON lacks becomes an object with one key, which starts with `$`:

    {"$tensor": name}          a tensor, stored beside the document under its path ("model.layers.0.weight")
    {"$tuple": [...]}          {"$dict": [[key, value], ...]}, {"$counter": [[key, value], ...]}
    {"$float": "inf"}          inf, -inf and nan, which strict JSON lacks
    {"$int": "0x..."}          an integer of more than 64 bits, which other readers would round
    {"$bytes": base64}         bytes
    {"$array": [dtype, shape, base64]}, {"$scalar": [dtype, base64]}    a NumPy array or scalar

A dict with string keys becomes a JSON object. A dict with other keys, or with a key that starts with `$`, becomes a `$dict`.
"""

from __future__ import annotations

import base64
import json
import math
import re
import sys
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from callsheet.checkpoint.tensors import check_storable, local_part
from callsheet.errors import CheckpointError

Json = Any  # None, bool, int, finite float, str, and lists and string-keyed dicts of these
Path = tuple["Path | None", object]  # (path of the enclosing container, key in it); made into text only when needed

_MAX_DEPTH = 100  # the maximum depth of a tree; deeper trees are mistakes, and recursive JSON readers may fail on them
# NumPy dtypes whose bytes are plain values. Objects and records are not among them.
_PLAIN_DTYPE_PATTERN = re.compile(r"[<>|][biufcmM]\d+(\[\w+\])?")


def flatten(tree: object) -> tuple[Json, dict[str, torch.Tensor]]:
    """Split a state into a JSON document and its tensors.

    Tensors that are the same view of the same storage (tied weights) are stored once. The tensors are not copied or moved. An
    OrderedDict is read back as a dict.

    Args:
        tree: the state. It may contain None, bool, int, float, str, bytes, tensors, and NumPy arrays and scalars of numbers and
            times. These values may be in lists, tuples, Counters, and dicts whose keys are plain values or tuples of these.

    Returns:
        The document, which holds a reference in place of each tensor, and the tensors, named by their paths in the tree, such as
        `model.layers.0.weight`.

    Raises:
        CheckpointError: the tree contains anything else, including subclasses of these, or contains itself.
    """
    flattening = _Flattening()
    document = flattening.document(tree, None)
    return document, flattening.tensors


def plain_copy(tree: dict[str, Any]) -> dict[str, Any]:
    """Return a deep copy of a state. Tensors stay on their devices.

    Args:
        tree: the state; see `flatten` for what it may contain.

    Raises:
        CheckpointError: a checkpoint cannot hold the state; the message names the value.
    """
    document, tensors = flatten(tree)
    for name, tensor in tensors.items():
        check_storable(name, local_part(tensor))
    copy: dict[str, Any] = unflatten(document, {name: tensor.detach().clone() for name, tensor in tensors.items()})
    return copy


def dump(document: Json) -> bytes:
    """Return the document as strict JSON."""
    return json.dumps(document, allow_nan=False).encode()


def parse(content: bytes, source: str) -> Json:
    """Return the JSON value in `content`, the bytes of the file `source`. Raise `CheckpointError` if the bytes are not strict JSON."""
    try:
        return json.loads(content, parse_constant=_reject)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{source} is not JSON: {error}; use another checkpoint") from error


def unflatten(document: Json, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return the state from which `flatten` made the document and the tensors. Tied tensors become one tensor again.

    Args:
        document: the JSON document.
        tensors: the tensors by name. They are not copied.

    Raises:
        CheckpointError: the document was not made by `flatten`, or a tensor is missing; the message has the path.
    """
    return _unflatten(document, tensors, "", 0)


class _Flattening:
    """Collects the JSON document and the tensors of a nested state, for one call of `flatten`.

    It holds the tensors found so far, and the containers that enclose the current value.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._names: dict[Hashable, str] = {}
        self._open: set[int] = set()

    def document(self, value: Any, path: Path | None) -> Json:
        kind = type(value)
        if value is None or kind is bool or kind is str:
            return value
        if kind is int:
            return value if -(2**63) <= value < 2**63 else {"$int": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {"$float": repr(value)}
        if kind is bytes:
            return {"$bytes": base64.b64encode(value).decode()}
        if isinstance(value, torch.Tensor):
            return {"$tensor": self._name(value, path)}
        if kind in (list, tuple, dict, OrderedDict, Counter):
            return self._container(value, path)
        numpy = sys.modules.get("numpy")  # if NumPy is not imported, the value cannot be an array
        if numpy and (kind is numpy.ndarray or isinstance(value, numpy.generic)):
            dtype, data = value.dtype.str, base64.b64encode(value.tobytes()).decode()
            if _PLAIN_DTYPE_PATTERN.fullmatch(dtype):
                return {"$array": [dtype, list(value.shape), data]} if kind is numpy.ndarray else {"$scalar": [dtype, data]}
            raise CheckpointError(f"{_at(_text_of(path))}: a NumPy {value.dtype} is not plain data; give its .tolist()")
        raise CheckpointError(
            f"{_at(_text_of(path))}: a {kind} is not plain data; a state may hold None, bool, int, float, str, bytes, tensors, "
            "NumPy arrays, and plain lists, tuples and dicts of them (not subclasses): turn it into one of these"
        )

    def _container(self, value: Any, path: Path | None) -> Json:
        if id(value) in self._open:
            raise CheckpointError(
                f"{_at(_text_of(path))}: the {type(value).__name__} contains itself; leave the inner reference out"
            )
        if len(self._open) == _MAX_DEPTH:
            raise CheckpointError(f"{_at(_text_of(path))}: nested deeper than {_MAX_DEPTH} levels; flatten the state")
        self._open.add(id(value))
        document: Json
        if isinstance(value, list | tuple):
            items = [self.document(item, (path, i)) for i, item in enumerate(value)]
            document = items if isinstance(value, list) else {"$tuple": items}
        elif isinstance(value, Counter) or not all(type(key) is str and not key.startswith("$") for key in value):
            pairs = [[self._key(key, path), self.document(item, (path, key))] for key, item in value.items()]
            document = {"$counter" if isinstance(value, Counter) else "$dict": pairs}
        else:
            document = {key: self.document(item, (path, key)) for key, item in value.items()}
        self._open.remove(id(value))
        return document

    def _key(self, key: object, path: Path | None) -> Json:
        if not _is_key(key):
            raise CheckpointError(
                f"{_at(_text_of(path))}: a key of {type(key)} is not plain data; use strings or integers as keys"
            )
        return self.document(key, path)

    def _name(self, tensor: torch.Tensor, path: Path | None) -> str:
        view = _view(tensor)
        if view not in self._names:
            # Lone surrogates are escaped, since UTF-8 cannot encode them.
            name = text = _text_of(path).encode(errors="backslashreplace").decode() or "tensor"
            nth = 1
            # The name may be taken: both tensors in {"a.b": t, "a": {"b": u}} have the path a.b. `__metadata__` is reserved.
            while name in self.tensors or name == "__metadata__":
                name = f"{text}#{(nth := nth + 1)}"
            self._names[view], self.tensors[name] = name, tensor
        return self._names[view]


def _view(tensor: torch.Tensor) -> Hashable:
    """Return a key for the tensor. If two tensors are the same view of one storage, their keys are equal, and only one is stored."""
    if tensor.layout is not torch.strided or tensor.numel() == 0 or tensor.is_meta:
        return id(tensor)  # a sparse, empty or meta tensor has no meaningful address
    if type(tensor) is DTensor:
        here = tensor.to_local()
        return (_view(here), tensor.device_mesh, tensor.placements, tensor.shape) if here.numel() else id(tensor)
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return id(tensor)  # a subclass may keep its data elsewhere, so `tensor.data_ptr()` has no meaning
    # A conjugate view differs from its original only in a flag. Without the flag, `z` and `z.conj()` would have the same key.
    marks = (tensor.dtype, tensor.is_conj(), tensor.is_neg())
    return (tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), marks)


def _is_key(key: object) -> bool:
    if type(key) is tuple:
        return all(map(_is_key, key))
    return key is None or type(key) in (bool, int, float, str, bytes)


def _unflatten(document: Json, tensors: Mapping[str, torch.Tensor], path: str, depth: int) -> Any:
    def items(documents: Iterable[Json]) -> list[Any]:
        return [_unflatten(item, tensors, _step(path, i), depth + 1) for i, item in enumerate(documents)]

    def mapping(pairs: list[Json]) -> dict[Any, Any]:
        if not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
            raise ValueError("its pairs are not all pairs")
        keys = [_unflatten(key, {}, path, depth + 1) for key, _ in pairs]
        if not all(map(_is_key, keys)):
            raise ValueError("its keys are not all plain")
        values = [_unflatten(item, tensors, _step(path, key), depth + 1) for key, (_, item) in zip(keys, pairs, strict=True)]
        return dict(zip(keys, values, strict=True))

    if depth > 2 * _MAX_DEPTH:  # the limit is doubled, because a tuple or dict may take two levels, as in {"$tuple": [...]}
        raise CheckpointError(f"{_at(path)}: the document is nested too deep; it was not written by callsheet")
    try:
        match document:
            case None | bool() | int() | float() | str():
                return document
            case list():
                return items(document)
            case dict() if not any(isinstance(key, str) and key.startswith("$") for key in document):
                return {key: _unflatten(item, tensors, _step(path, key), depth + 1) for key, item in document.items()}
            case {"$tensor": str(name), **more} if not more and name in tensors:
                return tensors[name]
            case {"$tensor": str(name), **more} if not more:
                raise ValueError(f"there is no tensor {name!r}")
            case {"$tuple": list(inner), **more} if not more:
                return tuple(items(inner))
            case {"$dict": list(pairs), **more} if not more:
                return mapping(pairs)
            case {"$counter": list(pairs), **more} if not more:
                return Counter(mapping(pairs))
            case {"$float": ("inf" | "-inf" | "nan") as name, **more} if not more:
                return float(name)
            case {"$int": str(digits), **more} if not more:
                return int(digits, 16)
            case {"$bytes": str(data), **more} if not more:
                return base64.b64decode(data, validate=True)
            case {"$array": [str(dtype), list(shape), str(data)], **more} if not more:
                return _array(dtype, shape, data)
            case {"$scalar": [str(dtype), str(data)], **more} if not more:
                return _array(dtype, [], data)[()]
            case dict():
                raise ValueError(f"{', '.join(map(repr, document))} is not a tag with valid content")
            case _:
                raise ValueError(f"{type(document)} is not JSON")
    except (ValueError, TypeError, OverflowError, ImportError) as error:
        raise CheckpointError(f"{_at(path)}: malformed state document: {error}; use another checkpoint") from error


def _array(dtype: str, shape: list[Any], data: str) -> Any:
    import numpy

    content = base64.b64decode(data, validate=True)
    if not _PLAIN_DTYPE_PATTERN.fullmatch(dtype) or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(f"no NumPy array of {dtype!r}, {shape}")
    if len(content) != math.prod(shape) * numpy.dtype(dtype).itemsize:
        raise ValueError(f"{len(content)} bytes for an array of {dtype}, {shape}")
    return numpy.ndarray(shape, numpy.dtype(dtype), buffer=content).copy()


def _reject(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _step(path: str, key: object) -> str:
    name = key if isinstance(key, str) else repr(key)
    return f"{path}.{name}" if path else name


def _text_of(path: Path | None) -> str:
    """Return the path as text, such as `model.layers.0.weight`."""
    return _step(_text_of(path[0]), path[1]) if path else ""


def _at(path: str) -> str:
    return path or "the state"
