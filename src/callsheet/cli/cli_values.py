"""Read the values given for a recipe's keys, and check whether a value fits its type."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from callsheet.cli import names

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser


def pairs(overrides: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield keys and values of the command line: `--key value`, `--key=value`, `--key+=value`."""
    words = iter(overrides)
    for word in words:
        if word.startswith("--"):
            key, equals, value = word[2:].partition("=")
            yield key.removesuffix("+"), value if equals else next(words, "")


def values_of_key(key: str, path: Path, overrides: Sequence[str]) -> Iterator[tuple[str, str, Any]]:
    """Yield all values given for a key, in the order in which they apply, as (part of the key or "", source, value).

    The value of a part is text; other values are as YAML reads them.
    """
    yield from _of_file(key, path)
    for given, value in pairs(overrides):
        if given == "config":
            yield from _of_file(key, Path(value))
        elif given == key:
            yield "", "", loaded(value)
        elif given.startswith(f"{key}.") and not given.endswith(".help"):
            yield given.removeprefix(f"{key}."), "", value


def _of_file(key: str, path: Path) -> Iterator[tuple[str, str, Any]]:
    content = loaded(path.read_text(encoding="utf-8")) if path.is_file() else None
    if isinstance(content, dict) and key in content:
        yield "", f"{path}: ", content[key]


def loaded(text: str) -> Any:
    """Return the text read as YAML, or the text itself if it is not YAML."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def fits(kind: Any, value: Any, *, is_text: bool) -> bool:
    """Return whether a value of a file, or of the command line, has this type."""
    parser = probe()
    parser.add_argument("--value", type=kind)
    try:
        if is_text:
            parser.parse_args([f"--value={value}"], env=False)
        else:
            parser.parse_object({"value": names.with_calls(value)}, env=False)
    except argparse.ArgumentError:
        return False
    return True


def probe() -> ArgumentParser:
    """Return an empty parser that reads values as a recipe's parser does."""
    from jsonargparse import ArgumentParser

    return ArgumentParser(exit_on_error=False, parser_mode=names.FORMAT)
