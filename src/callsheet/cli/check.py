"""Explains in one line why the values of a recipe's keys are rejected.

Only jsonargparse decides which values are wrong, but its messages do not say where a value was given. `first_error` therefore searches for
the first value with which jsonargparse gives the same reason as for all values together.
"""

from __future__ import annotations

import re
from argparse import ArgumentError
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from inspect import formatannotation
from typing import TYPE_CHECKING, Any, NamedTuple, get_type_hints

import torch

from callsheet import callbacks, loggers
from callsheet.cli import names
from callsheet.cli.cli_values import Source
from callsheet.cli.key_types import names_code, parts_of, typed_keys
from callsheet.errors import did_you_mean
from callsheet.recipes.yaml_file import parse_yaml

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

_MAX_CHARACTERS = 400

_Result = str | dict[str, Any]
"""What jsonargparse makes of arguments: the reason for which it rejects them, or the values of all keys."""


class _Wrong(NamedTuple):
    """A value that jsonargparse rejects."""

    key: str
    value: Any
    is_known: bool
    """Whether the key exists. If not, jsonargparse gives the same reason for any value."""
    before: _Result
    """The result for all values before this one."""


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


def first_error(parser: ArgumentParser, sources: Sequence[Source], *, only_null: bool = False) -> str:
    """Return a message about the first wrong value, with its place, or an empty string if jsonargparse accepts all values.

    If `only_null` is set, return an empty string for a value other than null, too.
    """
    parser.default_config_files = []  # the recipe file is one of the sources
    reason = _parse(parser, [argument for source in sources for argument in source.arguments()])
    if not isinstance(reason, str):
        return ""
    kinds = typed_keys(parser)
    earlier: list[str] = []

    def parse(source: Source, values: Mapping[str, Any]) -> _Result:
        return _parse(parser, [*earlier, *source.arguments(values)])

    for source in sources:
        if wrong := _first_wrong(source.values, partial(parse, source), reason, kinds):
            if only_null and parse_yaml(wrong.value) is not None:
                return ""
            message = " ".join(_message(wrong, reason, kinds).split())
            return f"{source.place(wrong.key)}{message[:_MAX_CHARACTERS]}{' ...' if len(message) > _MAX_CHARACTERS else ''}"
        earlier += source.arguments()
    return "" if only_null else reason


def _parse(parser: ArgumentParser, arguments: list[str]) -> _Result:
    try:
        values: dict[str, Any] = names.with_names(parser.parse_args(arguments, env=False).as_dict())
    except ArgumentError as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        return " ".join(str(cause).split())
    except Exception as error:  # any error of a module that jsonargparse imports
        return f"{type(error).__name__}: {error}"
    return values


def _first_wrong(
    content: Any, parse: Callable[[Any], _Result], reason: str, kinds: Mapping[str, Any], key: str = ""
) -> _Wrong | None:
    """Return the first value inside `content` with which `parse` gives the reason. Return None if no value inside is the cause."""
    entries: list[tuple[Any, Any]] = []
    if isinstance(content, (list, Mapping)):
        entries = list(enumerate(content) if isinstance(content, list) else content.items())
        entries.sort(key=lambda entry: entry[0] != "class_path")  # without its class, jsonargparse cannot judge an argument

    def parse_first(count: int, *last: Any) -> _Result:
        """Parse the first entries, and one more whose name and value are given as `last`."""
        part = dict(entries[:count]) | ({last[0]: last[1]} if last else {})
        return parse(list(part.values()) if isinstance(content, list) else part)

    if not entries or parse_first(0) == reason:
        return None
    count = bisect_left(range(len(entries)), True, key=lambda count: parse_first(count + 1) == reason)
    if count == len(entries):
        return None
    name, value = entries[count]
    before = parse_first(count)
    if isinstance(before, str) and str(content) in reason:
        return None  # the reason is that `content` is a list or a mapping
    at = f"{key}[{name}]" if isinstance(content, list) else f"{key}.{name}".removeprefix(".").removesuffix("+")
    with_null, with_text = (parse_first(count, name, other) for other in (None, "_"))
    is_known = isinstance(with_null, dict) or with_null != with_text or isinstance(content, list)
    is_known &= any(f"{at.replace('[', '.')}.".startswith(f"{each}.") or each.startswith(f"{at}.") for each in kinds)
    inner = _first_wrong(value, partial(parse_first, count, name), reason, kinds, at) if is_known else None
    return inner or _Wrong(at.replace(".init_args.", "."), value, is_known, before)


def _message(wrong: _Wrong, reason: str, kinds: Mapping[str, Any]) -> str:
    key, value, is_known, before = wrong
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
