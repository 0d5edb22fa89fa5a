"""The sources of values for a recipe's keys: the file, the environment and the command line, in the order in which they apply."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from callsheet.cli import environment
from callsheet.errors import ConfigError
from callsheet.recipes.yaml_file import line_of, parse_yaml, read_yaml, reject_unreadable


@dataclass(frozen=True, slots=True)
class Source:
    """The values for a recipe's keys from one source: a file, an environment variable, or an argument of the command line."""

    values: Mapping[str, Any]
    """The values by key. Keys may be dotted, and may end in `+` if their value is added to a list."""

    path: Path | None = None
    variable: str = ""

    def gives(self, key: str) -> bool:
        """Return whether this source has a value for `key` or for a key inside it, such as `a.b` for `a`."""
        node: Any = {}
        merge(node, self.values)
        for word in key.split("."):
            if not isinstance(node, Mapping):
                break
            if word not in node:
                return False
            node = node[word]
        return True

    def place(self, key: str) -> str:
        """Return a prefix for messages about a key: `mine.yaml:3: `, `CALLSHEET_SEED: `, or "" for the command line."""
        if self.path is None:
            return f"{self.variable}: " if self.variable else ""
        line = line_of(self.path, key)
        return f"{self.path}:{line}: " if line else f"{self.path}: "


def merge(tree: dict[str, Any], values: Mapping[Any, Any]) -> None:
    """Add `values` to `tree`, the nested dictionary of a recipe's values so far. Keys have the same meaning as in jsonargparse.

    A key may be dotted: `optimizer.lr` sets an argument of the class that the tree has for `optimizer`. If the tree has a list, its last item is
    changed. The value of a key that ends in `+` is added to a list. The mappings in `values` are not changed.
    """
    for key, value in values.items():
        word, dot, rest = str(key).partition(".")
        name = word.removesuffix("+")
        content, before = {rest: value} if dot else parse_yaml(value), parse_yaml(tree.get(name))
        if name != word:
            tree[name] = [*(before if isinstance(before, list) else []), *(content if isinstance(content, list) else [content])]
        elif isinstance(content, Mapping) and "class_path" not in content:
            tree[name] = (
                [*before[:-1], _update(before[-1], content)] if isinstance(before, list) and before else _update(before, content)
            )
        else:
            tree[name] = value


def _update(before: Any, content: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the value `before`, updated by `content`. If `before` names a class, `content` has arguments for the class."""
    after = {"class_path": before} if isinstance(before, str) else dict(before) if isinstance(before, Mapping) else {}
    is_for_class = "class_path" in after and not any(
        str(key).partition(".")[0] in ("init_args", "dict_kwargs") for key in content
    )
    merge(after, {"init_args": content} if is_for_class else content)
    return after


def sources_of(path: Path, variables: Mapping[str, str], overrides: Sequence[str]) -> Iterator[Source]:
    """Yield the sources of values in order: the recipe file, environment variables, arguments of the command line.

    Each source overrides the sources before it.

    Raises:
        ConfigError: a file cannot be read, or is not a YAML mapping.
    """
    yield _file(path)
    for key, value in variables.items():
        reject_unreadable(value, environment.variable(key))
        yield Source({key: value}, variable=environment.variable(key))
    words = iter(overrides)
    for word in words:
        key, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or key in ("help", "print_config") or key.endswith(".help"):
            continue
        if not equals and (value := next(words, "")) == "":  # skip a key without a value; jsonargparse reports it
            continue
        reject_unreadable(value, f"--{key}")
        yield _file(Path(value)) if key == "config" else Source({key: value})


def _file(path: Path) -> Source:
    content = read_yaml(path)
    if content is not None and not isinstance(content, Mapping):
        raise ConfigError(f"{path}: {content!r} is not a mapping; give keys and values, such as `seed: 1`")
    return Source(content or {}, path)
