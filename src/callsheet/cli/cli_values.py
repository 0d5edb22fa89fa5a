"""The sources of values for a recipe's keys: the file, the environment and the command line, in the order in which they apply."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from callsheet.cli import environment
from callsheet.errors import ConfigError
from callsheet.recipes.yaml_file import line_of, read_yaml, reject_deep


class Part(dict[str, Any]):
    """A value for only a part of a key, given by a dotted key: `--optimizer.lr 1` gives `optimizer` the value `Part(lr="1")`."""


def split(key: str, value: Any) -> tuple[str, Any]:
    """Split a key at its first dot, if it has one: `("optimizer.lr", 1)` becomes `("optimizer", Part(lr=1))`."""
    first, dot, rest = key.partition(".")
    return (first, Part({rest: value})) if dot else (key, value)


@dataclass(frozen=True, slots=True)
class Source:
    """The values for a recipe's keys from one source: a file, an environment variable, or an argument of the command line."""

    values: Mapping[str, Any]
    """The values by key. Keys may be dotted, and may end in `+` if their value is added to a list."""

    path: Path | None = None
    variable: str = ""

    @property
    def is_command_line(self) -> bool:
        """Whether the values come from the command line."""
        return self.path is None and not self.variable

    def gives(self, key: str) -> bool:
        """Return whether this source has a value for `key` or for a key inside it, such as `a.b` for `a`."""
        node: Any = self.values
        while key and isinstance(node, Mapping):
            first, _, key = key.partition(".")
            node = {each.removesuffix("+"): value for each, value in (split(str(word), value) for word, value in node.items())}
            if first not in node:
                return False
            node = node[first]
        return True

    def place(self, key: str) -> str:
        """Return a prefix for messages about a key: `mine.yaml:3: `, `CALLSHEET_SEED: `, or "" for the command line."""
        if self.path is None:
            return f"{self.variable}: " if self.variable else ""
        line = line_of(self.path, key)
        return f"{self.path}:{line}: " if line else f"{self.path}: "


def sources_of(path: Path, variables: Mapping[str, str], overrides: Sequence[str]) -> Iterator[Source]:
    """Yield the sources of values in order: the recipe file, environment variables, arguments of the command line.

    Each source overrides the sources before it.

    Raises:
        ConfigError: a file cannot be read, or is not a YAML mapping.
    """
    yield _file(path)
    for key, value in variables.items():
        reject_deep(value, environment.variable(key))
        yield Source({key: value}, variable=environment.variable(key))
    words = iter(overrides)
    for word in words:
        key, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or key in ("help", "print_config") or key.endswith(".help"):
            continue
        if not equals and (value := next(words, "")) == "":  # skip a key without a value; jsonargparse reports it
            continue
        reject_deep(value, f"--{key}")
        yield _file(Path(value)) if key == "config" else Source({key: value})


def _file(path: Path) -> Source:
    content = read_yaml(path)
    if content is not None and not isinstance(content, Mapping):
        raise ConfigError(f"{path}: {content!r} is not a mapping; give keys and values, such as `seed: 1`")
    return Source(content or {}, path)
