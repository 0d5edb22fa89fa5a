"""Explains in one line why the values of a recipe's keys are rejected.

jsonargparse, the recipe and the classes that it names decide which values are wrong, but their messages do not say where a value was
given. `first_error` therefore searches for the first value with which they give the same reason as for all values together.
"""

from __future__ import annotations

import re
from argparse import ArgumentError
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import formatannotation
from typing import TYPE_CHECKING, Any, get_type_hints

import torch

from callsheet import callbacks, loggers
from callsheet.cli import names
from callsheet.cli.cli_values import Source, key_at, leaves, until
from callsheet.cli.key_types import names_code, parts_of, typed_keys
from callsheet.errors import did_you_mean

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser, Namespace

_MAX_CHARACTERS = 400


@contextmanager
def strict_nulls() -> Iterator[None]:
    """In the `with` block, new parsers reject null for a key whose type does not allow it, also in a file."""
    from jsonargparse import ArgumentParser, set_parsing_settings

    is_strict = ArgumentParser().add_argument("--key").default is not None
    set_parsing_settings(unset_sentinel=True)
    try:
        yield
    finally:
        set_parsing_settings(unset_sentinel=is_strict)


def first_error(parser: ArgumentParser, sources: Sequence[Source], use: Callable[[Namespace], Any], reason: str = "") -> str:
    """Return a message about the first wrong value, with its place, or an empty string if all values are accepted.

    Args:
        parser: the parser of the recipe's keys.
        sources: the values.
        use: is called with parsed values, often several times, and raises an error if it rejects them.
        reason: the reason for which all values are rejected. By default, they are tried once more to get it.
    """
    parser.default_config_files = []  # the recipe file is one of the sources
    given = [source.arguments() for source in sources]

    def parse(number: int, path: Sequence[str | int], *value: Any, use: Callable[[Namespace], Any] = use) -> str | dict[str, Any]:
        """Parse all sources before this one, and the part of this one before `path`, with `value` at the path if it is given.

        Return the values of all keys, or the reason for which the values are rejected.
        """
        part = sources[number].arguments(until(sources[number].values, path, *value)) if path else []
        try:
            parsed = parser.parse_args([argument for arguments in [*given[:number], part] for argument in arguments], env=False)
            use(parsed)
        except Exception as error:  # of jsonargparse, of `use`, or of a module or class that a value names
            return reason_of(error)
        values: dict[str, Any] = names.with_names(parsed.as_dict())
        return values

    rejected = reason or parse(len(sources), ())
    if not isinstance(rejected, str):
        return ""
    places = [(number, path, value) for number, source in enumerate(sources) for path, value in leaves(source.values)]
    index = bisect_left(places, True, key=lambda place: parse(*place) == rejected)
    if index == len(places):
        return rejected
    number, path, _ = places[index]
    value: Any = sources[number].values
    kinds = typed_keys(parser)
    for depth in range(1, len(path) + 1):  # a mapping or list that contains the value may be the cause
        outer = path[:depth]
        key, value = key_at(outer), value[path[depth - 1]]
        is_known = any(f"{key}.".replace("[", ".").startswith(f"{each}.") or each.startswith(f"{key}.") for each in kinds)
        if is_known and type(outer[-1]) is not int:  # for an unknown key, the reason is the same with any value
            is_known = parse(number, outer, None, use=id) != parse(number, outer, "_", use=id)
        is_cause = str(value) in rejected and isinstance(parse(number, path[: depth + 1]), str)
        if not is_known or is_cause or parse(number, outer, type(value)()) == rejected:
            break
    message = _message(key.replace(".init_args.", "."), value, is_known, parse(number, outer), rejected, kinds)
    return f"{sources[number].place(key)}{message[:_MAX_CHARACTERS]}{' ...' if len(message) > _MAX_CHARACTERS else ''}"


def reason_of(error: BaseException) -> str:
    """Return the message of the innermost cause of an error, on one line."""
    if not isinstance(error, (ArgumentError, ValueError, TypeError)):
        return f"{type(error).__name__}: {error}"
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split())


def _message(key: str, value: Any, is_known: bool, before: Any, reason: str, kinds: Mapping[str, Any]) -> str:
    """Return the message about a wrong value. `before` is the result of parsing the values before it."""
    parent, _, name = key.rpartition(".")
    # If arguments are missing before the value, the reason names them.
    missing = before.partition(" required: ")[2].split(", ") if isinstance(before, str) else []
    valid = [*missing, "class_path", "init_args"] if missing else _names_in(before, parent, kinds)
    if name == "init_args" or (name == "class_path" and not isinstance(value, str)):
        return f"{key}={value}: give {'the arguments by name' if name == 'init_args' else 'the import path of a class'}"
    if not is_known and name in valid and name != "name":
        return f"there is no key {key!r}; put {name!r} below init_args"
    if not is_known and name not in valid:
        near = did_you_mean(name, valid).replace("mean '", f"mean '{parent}." if parent else "mean '")
        listed = f" (there are {', '.join(valid)})" if parent and valid and not missing else ""
        return f"there is no key {key!r}{near or listed}"
    if reason.startswith((key, f"unknown {key}", f"{name}=")):
        return reason.replace(f"{name}=", f"{key}=", 1) if reason.startswith(f"{name}=") else reason
    if key in kinds and not names_code(kinds[key]) and not isinstance(value, Mapping):
        reason = f"give {formatannotation(kinds[key])}"
        key = f"{key}={'null' if value is None else value}"
    word = str(value).rpartition(".")[2]
    classes = [*torch.optim.__all__, *callbacks.__all__, *loggers.__all__]
    if word in classes or "did you mean" in reason:
        return f"{key}: {reason}"
    words = [each for each in re.findall(r"'(\w+)'", reason) if each != word]
    return f"{key}: {reason}{did_you_mean(word, words + classes, cutoff=0.7)}"


def _names_in(values: Any, key: str, kinds: Mapping[str, Any]) -> list[str]:
    """Return the names that can be given inside a key. For a class, these are also the names of its arguments."""
    for word in re.findall(r"[^.\[\]]+", key):
        has_item = isinstance(values, list) and word.isdigit() and int(word) < len(values)
        values = values[int(word)] if has_item else _with_arguments(values).get(word)
    if values is None and (parts := parts_of(kinds.get(key))):
        return list(get_type_hints(parts))
    values = _with_arguments(values)
    return list(values | ({"name": None} if "class_path" in values and key.startswith(("callbacks", "loggers")) else {}))


def _with_arguments(values: Any) -> dict[str, Any]:
    """Return a mapping with the arguments of the class that it describes. Of a list, return its last item in this way."""
    if isinstance(values, list) and values:
        values = values[-1]
    return {**values, **(values.get("init_args") or {})} if isinstance(values, Mapping) else {}
