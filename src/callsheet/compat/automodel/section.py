"""Reads keys from a section of a configuration, and raises an error for keys that were never read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from callsheet.errors import ConfigError, did_you_mean

_MISSING = object()


class Section:
    """One section of a configuration, such as `step_scheduler`, which remembers the keys that were read.

    Args:
        values: the mapping that was given; None is an empty one.
        path: the section's name in messages; empty for the whole configuration.
    """

    def __init__(self, values: Any, path: str = "") -> None:
        if values is None:
            values = {}
        if not isinstance(values, Mapping):
            raise ConfigError(f"{path}: {values!r} should be a mapping of names to values")
        self.path = path
        self._left = {str(name): value for name, value in values.items()}
        self._known: list[str] = []
        self._parts: list[Section] = []

    def take(self, name: str, default: Any = None) -> Any:
        """Return the value of a key, or `default` if the key is missing. The key then counts as read."""
        self._known.append(name)
        return self._left.pop(name, default)

    def number(self, name: str, default: Any = None) -> Any:
        """Return the value of a key, or `default` if the key is missing. Raise ConfigError if the value is neither a number nor None."""
        value = self.take(name, default)
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
            raise ConfigError(f"{self._path_of(name)}: {value!r} should be a number")
        return value

    def first(self, *names: str) -> Any:
        """Return the value of whichever of these equivalent keys is given, or None. Raise ConfigError if several are given."""
        given = [(name, value) for name in names if (value := self.take(name)) is not None]
        if len(given) > 1:
            self.reject(given[1][0], f"{given[0][0]} says the same; give one of them")
        return given[0][1] if given else None

    def ignore(self, *names: str) -> None:
        """Accept these keys, which have no effect in callsheet."""
        for name in names:
            self.take(name)

    def target(self, *allowed: str) -> str:
        """Return the name in `allowed` that the value of `_target_` ends with, or "" if the key is missing. Reject other values."""
        value = self.take("_target_", _MISSING)
        if value is _MISSING:
            return ""
        given = value if isinstance(value, str) else f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', value)}"
        found = next((name for name in allowed if given == name or given.endswith(f".{name}")), None)
        if found is None:
            near = did_you_mean(given.rpartition(".")[2], allowed)
            self.reject("_target_", f"{given} is not supported{near} (one of {', '.join(allowed)})")
        return found

    def part(self, name: str) -> Section:
        """Return the mapping under the key `name` as a `Section`."""
        part = Section(self.take(name), self._path_of(name))
        self._parts.append(part)
        return part

    def has(self, name: str) -> bool:
        """Return whether the key is given and its value is not None."""
        return self._left.get(name) is not None

    def names(self, beginning: str) -> list[str]:
        """Return the keys that begin with `beginning` and have not been read."""
        return [name for name in self._left if name.startswith(beginning)]

    def reject(self, name: str, why: str) -> NoReturn:
        """Raise ConfigError for a key of this section, with the reason `why`."""
        raise ConfigError(f"{self._path_of(name)}: {why}")

    def close(self, hints: Mapping[str, str] | None = None) -> None:
        """Raise ConfigError if keys of this section or its subsections were not read. `hints` maps keys to what to use instead.

        Raises:
            ConfigError: the message names the key, and the nearest known one.
        """
        for name in self._left:
            if hint := (hints or {}).get(name):
                self.reject(name, hint)
            self.reject(name, f"there is no such key{did_you_mean(name, self._known)} (one of {', '.join(_unique(self._known))})")
        for part in self._parts:
            part.close()

    def _path_of(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name


def _unique(names: Iterable[str]) -> list[str]:
    return sorted(set(names))
