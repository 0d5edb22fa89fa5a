"""The sources of values for a recipe's keys: the file, the environment and the command line, in the order in which they apply."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from callsheet.cli import environment
from callsheet.errors import ConfigError
from callsheet.recipes.yaml_file import line_of, parse_yaml, read_yaml, reject_unreadable


@dataclass(frozen=True, slots=True)
class Source:
    """The values for a recipe's keys from one source: a file, an environment variable, or an argument of the command line.

    The values are by key. A variable or an argument has one key, which may be dotted, and may end in `+` if its value is added to a list.
    """

    values: Mapping[str, Any]
    path: Path | None = None
    variable: str = ""

    def gives(self, key: str) -> bool:
        """Return whether this source has a value for `key`, for a key inside it, or for a value that contains it."""
        return any(f"{each}.".startswith(f"{key}.") or f"{key}.".startswith(f"{each}.") for each in _keys(self.values))

    def place(self, key: str) -> str:
        """Return a prefix for messages about a key: `mine.yaml:3: `, `CALLSHEET_SEED: `, or "" for the command line."""
        if self.path is None:
            return f"{self.variable}: " if self.variable else ""
        line = line_of(self.path, key)
        return f"{self.path}:{line}: " if line else f"{self.path}: "

    def arguments(self, values: Mapping[str, Any] | None = None) -> list[str]:
        """Return the source as arguments of the command line, with its own values or with a part of them."""
        values = self.values if values is None else values
        return [f"--config={_as_text(values)}"] if self.path else [f"--{key}={_as_text(value)}" for key, value in values.items()]


def _keys(values: Mapping[str, Any], outer: str = "") -> Iterator[str]:
    """Yield the dotted keys of all values."""
    for name, value in values.items():
        key = f"{outer}{name}".removesuffix("+")
        if isinstance(value, Mapping) and value:
            yield from _keys(value, f"{key}.")
        else:
            yield key


class _Quoting(yaml.SafeDumper):
    """Writes all texts in quotes, because jsonargparse reads a text such as `1e3` without quotes as a number."""


_Quoting.add_representer(str, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"'))


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else yaml.dump(value, Dumper=_Quoting, default_flow_style=True, sort_keys=False)


def sources_of(path: Path, variables: Mapping[str, str], overrides: Sequence[str]) -> Iterator[Source]:
    """Yield the sources of values in order: the recipe file, environment variables, arguments of the command line.

    Each source overrides the sources before it.

    Raises:
        ConfigError: a file cannot be read, or is not a YAML mapping.
    """
    yield _file(path)
    for key, value in variables.items():
        yield Source({key: _content(value, environment.variable(key))}, variable=environment.variable(key))
    words = iter(overrides)
    for word in words:
        key, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or key in ("help", "print_config") or key.endswith(".help"):
            continue
        if not equals and (value := next(words, "")) == "":  # skip a key without a value; jsonargparse reports it
            continue
        content = _content(value, f"--{key}")
        yield _file(Path(value)) if key == "config" else Source({key: content})


def _content(value: str, place: str) -> Any:
    """Return the list or mapping that a text contains as YAML, so that its parts can be checked. Return any other text unchanged."""
    reject_unreadable(value, place)
    content = parse_yaml(value)
    return content if isinstance(content, (list, Mapping)) else value


def _file(path: Path) -> Source:
    content = read_yaml(path)
    if not isinstance(content, Mapping):
        what = "it is empty" if content is None else f"{content!r} is not a mapping"
        raise ConfigError(f"{path}: {what}; give keys and values, such as `seed: 1`")
    return Source(content, path)
