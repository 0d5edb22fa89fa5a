"""Encodes callbacks, functions and values as bytes, and decodes them.

The data are JSON, tensors and, only if allowed, pickles for everything else.

A value that JSON lacks is written as an object with one key, which starts with `@`:

    {"@callback": {...}}       a class's path, the constructor's arguments, settings that were set on the instance, and the state
    {"@import": path}          a class or function, by its import path
    {"@dataclass": [path, {field: value}]}   {"@enum": [path, name]}   {"@partial": state}
    {"@path": text}            {"@set": [...]}   {"@frozenset": [...]}   {"@dtype": name}   {"@device": name}
    {"@dict": [[key, value], ...]}           a dict with a key that starts with `@`
    {"@same": n}               the nth container or callback of the document again: shared objects stay shared
    {"@pickle": n}             the nth object that was pickled with cloudpickle
"""

from __future__ import annotations

import dataclasses
import functools
import io
import pickle
import sys
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from types import FunctionType
from typing import Any

import safetensors.torch
import torch

from callsheet.checkpoint import plain
from callsheet.checkpoint.tensors import check_storable
from callsheet.core.callback import Callback, label_of
from callsheet.core.optional import load
from callsheet.core.spec import CallbackSpec, init_args_of
from callsheet.errors import CallsheetError, CheckpointError, NotACallbackError
from callsheet.transport.fingerprint import IGNORE_ATTRIBUTE, differences, fingerprint
from callsheet.transport.names import MAIN_MODULE, find, main_script, path_of
from callsheet.transport.rejections import explain_rejection
from callsheet.transport.sealed import MAX_CONTENT_BYTES, TransportError

CALLBACK_SETTINGS = (*(name for name in Callback.__annotations__ if not name.startswith("_")), IGNORE_ATTRIBUTE)
"""The settings of a callback: class attributes that an instance may override."""

# The maximum depth of nesting in a value: one less than in the checkpoint format, because `encode` puts the value into a document. An
# object that is written as `{"@dataclass": [path, {...}]}` or in a similar form takes two or three levels of that format.
_MAX_DEPTH = 99
_LENGTH_BYTES = 8  # each encoded part begins with the part's length, as a number of this many bytes


def encode(value: object, *, allow_pickle: bool, what: str = "the value") -> bytes:
    """Return `value` encoded as bytes: JSON, tensors in the safetensors format and, if allowed, pickles.

    Args:
        value: what is encoded.
        allow_pickle: whether to pickle what is not data.
        what: what `value` is, for the error message if it is too large.

    Raises:
        TransportError: something in `value` cannot be encoded; the message says what, where, and what to do. Or the bytes are more
            than `MAX_CONTENT_BYTES`.
    """
    encoder = Encoder(allow_pickle)
    encoded = encoder.encode(value, "")
    pickled = encoder.pickle()
    document = {"value": encoded, "script": main_script() if encoder.needs_script else ""}
    try:
        text, tensors = plain.flatten(document)
    except CheckpointError as error:
        raise TransportError(str(error)) from None
    # Check the size before the tensors are copied, because copies of very large ones might exceed the memory.
    _check_size(sum(tensor.nbytes for tensor in tensors.values()), what)
    parts = (plain.dump(text), safetensors.torch.save({name: _own_copy(tensor) for name, tensor in tensors.items()}), pickled)
    content = b"".join(len(part).to_bytes(_LENGTH_BYTES, "little") + part for part in parts)
    _check_size(len(content), what)
    return content


def decode(content: bytes, *, on_script: Callable[[str], object] = lambda script: None) -> Any:
    """Return the value that was passed to `encode`.

    This imports modules, calls constructors and unpickles, so use it only for content with a valid signature.

    If the content refers to a script, `on_script` is called with its path before any object is made.
    """
    parts = []
    while content:
        end = _LENGTH_BYTES + int.from_bytes(content[:_LENGTH_BYTES], "little")
        parts.append(content[_LENGTH_BYTES:end])
        content = content[end:]
    text, tensors, pickled = parts
    document = plain.unflatten(plain.parse(text, "the payload"), safetensors.torch.load(tensors))
    if script := document["script"]:
        on_script(script)
    pickles = _Unpickler(io.BytesIO(pickled), script).load() if pickled else []
    return Decoder(script, pickles).decode(document["value"])


class Encoder:
    """Encodes one value and everything in it as plain data, tensors and pickles."""

    def __init__(self, allow_pickle: bool) -> None:
        self.needs_script = False
        self._allow_pickle = allow_pickle
        self._pickled: list[tuple[Any, str]] = []
        self._numbers: dict[int, int] = {}
        self._kept: list[Any] = []  # after an object is freed, its id may be used again, so keep the objects alive
        self._callbacks: set[int] = set()
        self._depth = 0

    def encode(self, value: Any, at: str) -> Any:
        """Return `value` as plain data. `at` says where `value` is inside the outermost value, for error messages."""
        kind = type(value)
        if value is None or kind in (bool, int, float, str, bytes):
            return value
        if id(value) in self._numbers:
            return {"@same": self._numbers[id(value)]}
        _check_depth(self._depth, at)
        self._depth += 1
        encoded = self._composite(value, at)
        self._depth -= 1
        return encoded

    def _composite(self, value: Any, at: str) -> Any:
        kind = type(value)
        if isinstance(value, Callback):
            return self._callback(value, at)
        if kind in (list, set) or (kind is dict and all(map(_is_key, value))) or self._is_simple(value):
            self._number(value)
            return self._container(value, at)
        if kind is tuple:
            return tuple(self.encode(item, f"{at}[{i}]") for i, item in enumerate(value))
        if kind.__bases__ == (tuple,) and hasattr(kind, "_fields") and (path := self._path(kind)):
            items = [self.encode(item, f"{at}.{name}") for name, item in zip(kind._fields, value, strict=True)]
            return {"@namedtuple": [path, items]}
        if kind is frozenset:
            return {"@frozenset": [self.encode(item, at) for item in value]}
        if kind is type(Path()):
            return {"@path": str(value)}
        if isinstance(value, Enum) and value.name in kind.__members__ and (path := self._path(kind)):
            return {"@enum": [path, value.name]}
        if kind is functools.partial:
            self._number(value)
            state = value.__reduce__()[2]  # the function, its arguments, and the partial's attributes
            return {"@partial": [self.encode(part, at) for part in state]}
        if isinstance(value, torch.dtype | torch.device):
            return {f"@{kind.__name__}": str(value).removeprefix("torch.")}
        if kind is torch.Tensor and _is_plain(value):
            return value
        if _is_numpy(value):
            self._number(value)
            return value
        if path := self._path(value):
            return {"@import": path}
        return self._pickle(value, at)

    def pickle(self) -> bytes:
        """Pickle all objects that plain data cannot express, in one pickle that keeps their references to each other. Return the bytes.

        The result is empty if there is nothing to pickle.
        """
        if not self._pickled:
            return b""
        cloudpickle = load("cloudpickle", extra="train", wanted_by="allow_pickle=True")
        file = io.BytesIO()
        try:
            _pickler(cloudpickle, file, self._reject_callback, self._note_script).dump([value for value, _ in self._pickled])
        except TransportError:
            raise
        except Exception as error:
            raise TransportError(self._unpicklable(cloudpickle, error)) from None
        return file.getvalue()

    def _container(self, value: Any, at: str) -> Any:
        if isinstance(value, list):
            return [self.encode(item, f"{at}[{i}]") for i, item in enumerate(value)]
        if isinstance(value, set):
            return {"@set": [self.encode(item, at) for item in value]}
        if isinstance(value, dict):
            items = {key: self.encode(item, f"{at}[{key!r}]" if at else str(key)) for key, item in value.items()}
            return {"@dict": [list(pair) for pair in items.items()]} if any(str(key).startswith("@") for key in items) else items
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {
            "@dataclass": [self._path(type(value)), {name: self.encode(item, f"{at}.{name}") for name, item in fields.items()}]
        }

    def _callback(self, callback: Callback, at: str) -> Any:
        """Return the data from which a callback can be rebuilt: its constructor's arguments, its settings, and its current state."""
        self._number(callback)
        self._callbacks.add(id(callback))
        label = label_of(callback)
        at = f"{at} ({label})" if at else label
        try:
            spec = CallbackSpec.of(callback)
        except (CallsheetError, TypeError) as error:
            raise TransportError(f"{at}: {error}") from None
        given = init_args_of(callback)
        kind = type(callback)
        path = self._path(kind)
        return {
            "@callback": {
                "class_path": path or self._pickle(kind, at),
                "init_args": {name: self.encode(given[name], f"{at}: its argument {name}") for name in spec.init_args},
                "words": {
                    word: self.encode(vars(callback)[word], f"{at}: its {word}")
                    for word in CALLBACK_SETTINGS
                    if word in vars(callback)
                },
                "state": self.encode(_on_cpu(spec.state, f"{at}: its state"), f"{at}: its state"),
            }
        }

    def _is_simple(self, value: Any) -> bool:
        """Return whether the value is a dataclass instance that can be rebuilt from its fields and its class's import path."""
        kind: Any = type(value)
        if not dataclasses.is_dataclass(kind) or kind.__new__ is not object.__new__ or not self._path(kind):
            return False
        names = {field.name for field in dataclasses.fields(value)}
        return getattr(value, "__dict__", {}).keys() <= names and all(hasattr(value, name) for name in names)

    def _number(self, value: Any) -> None:
        self._numbers[id(value)] = len(self._numbers)
        self._kept.append(value)

    def _path(self, thing: Any) -> str:
        path = path_of(thing)
        self.needs_script |= path.startswith(f"{MAIN_MODULE}.")
        return path

    def _note_script(self) -> None:
        self.needs_script = True

    def _pickle(self, value: Any, at: str) -> Any:
        what, hint, may_pickle = explain_rejection(value)
        if not (self._allow_pickle and may_pickle):
            raise TransportError(f"{at}: {'' if isinstance(value, type) else 'it is '}{what}; {hint}")
        self._pickled.append((value, at))
        return {"@pickle": len(self._pickled) - 1}

    def _reject_callback(self, value: object) -> None:
        if id(value) in self._callbacks:
            assert isinstance(value, Callback)
            raise TransportError(
                f"a function that is pickled refers to the callback {label_of(value)}, which is sent as well: the receiver would get two copies; "
                "give it the callback as an argument, or leave the callback out of the list"
            )

    def _unpicklable(self, cloudpickle: Any, error: Exception) -> str:
        for value, at in self._pickled:  # pickle the values one by one, so that the error can name the one that fails
            try:
                cloudpickle.dumps(value)
            except Exception as own:
                return f"{at}: cloudpickle cannot send it: {own}; {explain_rejection(value)[1]}"
        return f"cloudpickle cannot send it: {error}"


class Decoder:
    """Decodes one value that `Encoder` has encoded, and everything inside the value."""

    def __init__(self, script: str, pickles: list[Any]) -> None:
        self._script = script
        self._pickles = pickles
        self._numbered: list[Any] = []

    def decode(self, value: Any) -> Any:
        """Return the object from which `Encoder.encode` has made the plain data `value`."""
        if isinstance(value, list):
            items = self._assign_number([])
            items.extend(self.decode(item) for item in value)
            return items
        if isinstance(value, tuple):
            return tuple(self.decode(item) for item in value)
        if isinstance(value, dict):
            tag = next(iter(value), None)
            if isinstance(tag, str) and tag.startswith("@"):
                return self._decode_tagged(tag, value[tag])
            mapping = self._assign_number({})
            mapping.update((key, self.decode(item)) for key, item in value.items())
            return mapping
        if _is_numpy(value):
            return self._assign_number(value)
        return value

    def _decode_tagged(self, tag: str, content: Any) -> Any:
        match tag:
            case "@same":
                if self._numbered[content] is _UNFINISHED:
                    raise TransportError("an object that is sent contains itself as an argument")
                return self._numbered[content]
            case "@pickle":
                return self._pickles[content]
            case "@import":
                return find(content, self._script)
            case "@callback":
                place = len(self._numbered)  # number the callback before its arguments, as the encoder does
                self._numbered.append(_UNFINISHED)
                self._numbered[place] = self._callback(**content)
                return self._numbered[place]
            case "@dataclass":
                path, fields = content
                # Do not call the constructor, because a constructor may store other values than its arguments.
                made = self._assign_number(object.__new__(find(path, self._script)))
                for name, item in fields.items():
                    object.__setattr__(made, name, self.decode(item))
                return made
            case "@namedtuple":
                path, items = content
                return tuple.__new__(find(path, self._script), map(self.decode, items))
            case "@enum":
                return find(content[0], self._script)[content[1]]
            case "@partial":
                partial: Any = self._assign_number(functools.partial(int))
                partial.__setstate__(tuple(self.decode(part) for part in content))
                return partial
            case "@path":
                return Path(content)
            case "@set":
                members = self._assign_number(set())
                members.update(self.decode(item) for item in content)
                return members
            case "@frozenset":
                return frozenset(self.decode(item) for item in content)
            case "@dtype":
                return getattr(torch, content)
            case "@device":
                return torch.device(content)
            case "@dict":
                mapping = self._assign_number({})
                mapping.update((key, self.decode(item)) for key, item in content)
                return mapping
        raise TransportError(f"the payload has a {tag}, which this version of callsheet does not know")

    def _callback(self, class_path: Any, init_args: Mapping[str, Any], words: Mapping[str, Any], state: Any) -> Callback:
        kind = find(class_path, self._script) if isinstance(class_path, str) else self.decode(class_path)
        if not (isinstance(kind, type) and issubclass(kind, Callback)):
            raise NotACallbackError(f"{class_path} is not a subclass of callsheet.Callback")
        callback = kind(**{name: self.decode(item) for name, item in init_args.items()})
        for word, value in words.items():
            setattr(callback, word, self.decode(value))
        state = self.decode(state)
        if differences(fingerprint({"state": dict(callback.state_dict())}), fingerprint({"state": state})):
            # Many callbacks treat `load_state_dict` as a resume, so call it only if the new callback does not have this state yet.
            callback.load_state_dict(state)
        return callback

    def _assign_number(self, value: Any) -> Any:
        self._numbered.append(value)
        return value


_UNFINISHED = object()


def _check_size(size: int, what: str) -> None:
    if size > MAX_CONTENT_BYTES:
        raise TransportError(
            f"{what}: {size} bytes, more than the limit of {MAX_CONTENT_BYTES}; save large data to a file, and send the file's path instead"
        )


def _check_depth(depth: int, at: str) -> None:
    if depth >= _MAX_DEPTH:
        raise TransportError(f"{at}: nested deeper than {_MAX_DEPTH} levels; flatten it")


def _on_cpu(value: Any, at: str, depth: int = 0) -> Any:
    """Return a state with all tensors in host memory, as in a checkpoint."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if type(value) is dict:
        _check_depth(depth, at)
        return {key: _on_cpu(item, f"{at}[{key!r}]", depth + 1) for key, item in value.items()}
    if type(value) in (list, tuple):
        _check_depth(depth, at)
        return type(value)(_on_cpu(item, f"{at}[{i}]", depth + 1) for i, item in enumerate(value))
    return value


def _is_plain(tensor: torch.Tensor) -> bool:
    try:
        check_storable("it", tensor)
    except CheckpointError:
        return False
    return tensor.device.type == "cpu" and not tensor.requires_grad


def _is_numpy(value: Any) -> bool:
    numpy = sys.modules.get("numpy")  # if NumPy is not imported, the value cannot be an array
    is_one = numpy is not None and (type(value) is numpy.ndarray or isinstance(value, numpy.generic))
    return is_one and value.dtype.kind in "biufcmM"


def _is_key(key: object) -> bool:
    return all(map(_is_key, key)) if type(key) is tuple else key is None or type(key) in (bool, int, float, str, bytes)


def _own_copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().clone()


def _pickler(cloudpickle: Any, file: io.BytesIO, reject: Callable[[object], None], note_script: Callable[[], None]) -> Any:
    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no type annotations
        """Pickles a class or function of the script as its import path, so that the receiver imports it instead of making a copy."""

        def persistent_id(self, obj: Any) -> Any:
            reject(obj)
            if isinstance(obj, io.IOBase) and not isinstance(obj, io.StringIO | io.BytesIO):
                raise TransportError(
                    "a function that is pickled holds an open file, which stays in this process; let it open the path instead"
                )
            path = path_of(obj) if isinstance(obj, type | FunctionType) and obj.__module__ == MAIN_MODULE else ""
            if path.startswith(f"{MAIN_MODULE}."):
                note_script()
            return path or None

    return Pickler(file)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, script: str) -> None:
        super().__init__(file)
        self._script = script

    def persistent_load(self, pid: Any) -> Any:
        return find(pid, self._script)
