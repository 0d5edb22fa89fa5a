"""Reads values of a recipe's keys from environment variables.

Only plain values are allowed, because a variable must not decide which code is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import is_dataclass
from types import UnionType
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin, get_type_hints

from callsheet.cli.key_types import names_code, parts_of, typed_keys
from callsheet.core.ranks import read_ranks
from callsheet.errors import ConfigError, did_you_mean
from callsheet.recipes.yaml_file import parse_yaml
from callsheet.transport.payload import KEY_VARIABLE, PAYLOAD_VARIABLE

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

VARIABLE_PREFIX = "CALLSHEET_"

_FILE_KEYS = ("recipe", "config")
"""Keys that name a file. Such a file may name code to import."""


def variable(key: str) -> str:
    """Return the name of the environment variable for a key: `CALLSHEET_MODEL__HIDDEN_SIZE` for `model.hidden_size`."""
    return VARIABLE_PREFIX + key.replace(".", "__").upper()


def arguments(parser: ArgumentParser, variables: Mapping[str, str]) -> dict[str, str]:
    """Return the values that environment variables give for keys of the recipe's parser.

    Print a warning for a variable whose name is close to that of a key.

    Raises:
        ConfigError: a variable would decide which code is imported.
    """
    types = typed_keys(parser)
    rejected = [key for key, kind in types.items() if names_code(kind)] + list(_FILE_KEYS)
    keys = {variable(key): key for key in types if key not in rejected}
    found: dict[str, str] = {}
    for name, value in sorted(_ours(variables)):
        if key := next((key for key in rejected if name == variable(key) or name.startswith(f"{variable(key)}__")), None):
            raise ConfigError(
                f"{name}: {key!r} is not taken from the environment, since it decides what code is imported; "
                f"unset the variable, and give it in the recipe file or as --{key}"
            )
        if _holds_a_class(value) and any(name == each or name.startswith(f"{each}__") for each in keys):
            raise ConfigError(
                f"{name}: a class_path is not taken from the environment, since it decides what code is imported; unset the variable"
            )
        if name in keys:
            _check_plain(types[keys[name]], value, name)
            found[keys[name]] = value
        elif inside := next((key for each, key in keys.items() if name.startswith(f"{each}__") and parts_of(types[key])), None):
            part = _parts(name.removeprefix(f"{variable(inside)}__"))
            content: Any = value
            for word in reversed(part.split(".")):
                content = {word: content}
            _check_plain(types[inside], content, name)
            found[f"{inside}.{part}"] = value
        elif (near := _near(name, keys)) and read_ranks().local_rank == 0:
            print(f"callsheet: the environment variable {name} is not a key of this recipe{near}", file=sys.stderr)
    return found


def _holds_a_class(value: Any) -> bool:
    """Return whether a value contains a `class_path`.

    The value may also be text that is YAML itself, because jsonargparse reads such text too.
    """
    if isinstance(value, dict):
        return "class_path" in value or any(map(_holds_a_class, value.values()))
    if isinstance(value, list):
        return any(map(_holds_a_class, value))
    inside = parse_yaml(value) if isinstance(value, str) else None
    return isinstance(inside, (dict, list)) and _holds_a_class(inside)


def _check_plain(kind: Any, value: Any, variable: str) -> None:
    """Check that jsonargparse imports nothing for a value: in the place of a dataclass, it takes a text for an import path.

    Only the fields of a dataclass are allowed, because such a text may also be below `init_args` or `dict_kwargs`.

    Raises:
        ConfigError: there is a text in the place of a dataclass, or a key that is not a field.
    """
    value = parse_yaml(value)
    if is_dataclass(kind):
        fields = get_type_hints(kind)
        if isinstance(value, str):
            raise ConfigError(
                f"{variable}: {value!r} is a text where a mapping is needed, with keys such as {next(iter(fields))}"
            )
        for name, part in value.items() if isinstance(value, Mapping) else ():
            if name not in fields:
                raise ConfigError(f"{variable}: there is no key {name!r} here{did_you_mean(str(name), fields)}")
            _check_plain(fields[name], part, variable)
    elif get_origin(kind) in (Union, UnionType):
        for part in get_args(kind):
            _check_plain(part, value, variable)
    else:
        items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
        for part in get_args(kind):
            for item in items:
                _check_plain(part, item, variable)


def _parts(variable: str) -> str:
    return variable.replace("__", ".").lower()


def _near(name: str, keys: Collection[str]) -> str:
    near = did_you_mean(name.removeprefix(VARIABLE_PREFIX), [key.removeprefix(VARIABLE_PREFIX) for key in keys])
    return near.replace("mean '", f"mean '{VARIABLE_PREFIX}")


def _ours(variables: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    return (
        (name, value)
        for name, value in variables.items()
        if name.startswith(VARIABLE_PREFIX) and name not in (KEY_VARIABLE, PAYLOAD_VARIABLE)
    )
