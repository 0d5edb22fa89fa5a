"""Reads hyperparameters from other tools' files as plain values of limited size. Arbitrary objects are not constructed."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from callsheet.core import optional as extras
from callsheet.report.lines import inside

_MAX_FILE_BYTES = 2**20
_MAX_VALUES, _MAX_DEPTH, _MAX_TEXT_CHARACTERS = 10_000, 16, 10_000


def plain_settings(values: Mapping[Any, Any]) -> dict[str, Any]:
    """Convert settings to values that JSON can express, with at most 10,000 values, 16 levels, and 10,000 characters per text."""
    left = [_MAX_VALUES]
    found = _plain(values, left, 0)
    return found if isinstance(found, dict) else {}


def _plain(value: Any, left: list[int], depth: int) -> Any:
    left[0] -= 1
    if left[0] < 0 or depth > _MAX_DEPTH:
        return "..."
    if isinstance(value, Mapping):
        return {str(name)[:_MAX_TEXT_CHARACTERS]: _plain(each, left, depth + 1) for name, each in value.items() if left[0] > 0}
    if isinstance(value, (list, tuple)):
        return [_plain(each, left, depth + 1) for each in value[: max(0, left[0])]]
    if value is None or isinstance(value, (bool, float)):
        return value
    if isinstance(value, int) and abs(value) < 2**63:
        return value
    try:
        return str(value)[:_MAX_TEXT_CHARACTERS]
    except ValueError:  # the integer has more digits than Python converts to text
        return "..."


def parse_text(text: str) -> Any:
    """Convert texts such as `1e-3`, `True` and `None` to numbers, booleans and None. Return any other text unchanged."""
    if text in (known := {"True": True, "true": True, "False": False, "false": False, "None": None}):
        return known[text]
    for kind in (int, float):
        try:
            return kind(text) if "_" not in text else text
        except ValueError:
            continue
    return text


def yaml_settings(folder: Path, name: str, *, extra: str) -> dict[str, Any]:
    """Return the mapping in a YAML file of `folder`; empty if there is no such file. YAML tags are ignored.

    Raises:
        MissingPackage: PyYAML is not installed.
        ValueError: the file is not a YAML mapping, or is too large.
    """
    path = inside(folder, name)
    if path is None:
        return {}
    if path.stat().st_size > _MAX_FILE_BYTES:
        raise ValueError(f"it is larger than {_MAX_FILE_BYTES} bytes")
    yaml = extras.load("yaml", extra=extra, wanted_by="callsheet import")
    try:
        found = yaml.load(path.read_text(encoding="utf-8", errors="replace"), Loader=_plain_loader())
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"it is not YAML: {str(error).splitlines()[0] if str(error) else type(error).__name__}") from None
    if found is not None and not isinstance(found, dict):
        raise ValueError("it is not a mapping")
    return plain_settings(found or {})


@cache
def _plain_loader() -> Any:
    """Return a safe YAML loader that ignores unknown tags, such as `!!python/tuple`, and reads the plain value."""
    import yaml

    class PlainLoader(yaml.SafeLoader):
        def flatten_mapping(self, node: yaml.MappingNode) -> None:
            """Do not expand merge keys (`<<`), because nested merge keys could expand without limit."""

    def construct(loader: yaml.SafeLoader, suffix: str, node: yaml.Node) -> Any:
        if isinstance(node, yaml.MappingNode):
            return loader.construct_mapping(node, deep=True)
        if isinstance(node, yaml.SequenceNode):
            return loader.construct_sequence(node, deep=True)
        return node.value

    PlainLoader.add_multi_constructor("", construct)
    return PlainLoader
