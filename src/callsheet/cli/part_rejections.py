"""Find the errors in the values of a key that has parts, such as `lora` or `validation`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from callsheet.cli.cli_values import fits, probe, values_of_key
from callsheet.cli.key_types import holds_several, in_words, parts_of, typed_keys
from callsheet.errors import did_you_mean


def part_rejections(key: str, kind: Any, path: Path, overrides: Sequence[str]) -> Iterator[str]:
    """Yield the errors in the file, in further files and on the command line, in the order in which they apply."""
    owner = parts_of(kind)
    if owner is None:
        return
    parser = probe()
    parser.add_class_arguments(owner, None)
    kinds = typed_keys(parser)
    for part, source, value in values_of_key(key, path, overrides):
        if part:
            name, _, last = part.rpartition(".")
            at = f"{key}.{name}" if name else key
            yield from _wrong(kinds, {last: value}, at, is_text=True)
        elif holds_several(kind) and isinstance(value, Mapping):
            for name, each in value.items():
                if isinstance(each, Mapping):
                    yield from (source + why for why in _wrong(kinds, each, f"{key}.{name}"))
                    yield from (source + why for why in _missing(owner, each, f"{key}.{name}"))
        elif isinstance(value, Mapping):
            yield from (source + why for why in _wrong(kinds, value, key))


def _wrong(kinds: Mapping[str, Any], given: Mapping[str, Any], at: str, *, is_text: bool = False) -> Iterator[str]:
    for word, value in given.items():
        if word not in kinds:
            near = did_you_mean(str(word), kinds).replace("mean '", f"mean '{at}.")
            rest = near or f" (there are {', '.join(kinds)})"
            yield f"there is no key '{at}.{word}'{rest}"
        elif not fits(kinds[word], value, is_text=is_text):
            yield f"{at}.{word}={value}: give {in_words(kinds[word])}"


def _missing(owner: type, given: Mapping[str, Any], at: str) -> Iterator[str]:
    for field in fields(owner):
        if field.default is MISSING and field.default_factory is MISSING and field.name not in given:
            yield f"{at} needs {field.name!r}"
