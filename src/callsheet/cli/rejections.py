"""Say in one line why a recipe's values were rejected: jsonargparse lists everything that it has tried.

The values are checked a second time, one by one. If that finds no error, jsonargparse's message is used.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from callsheet.cli import names
from callsheet.cli.class_rejections import class_rejections
from callsheet.cli.cli_values import pairs, probe
from callsheet.cli.key_types import in_words, is_list, names_code, typed_keys
from callsheet.cli.part_rejections import part_rejections
from callsheet.core.callback import Callback
from callsheet.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser, Namespace


def plain_rejection(parser: ArgumentParser, message: str, path: Path, overrides: Sequence[str]) -> str:
    """Return the error in the values of the file at `path` or in the overrides, given jsonargparse's message."""
    kinds = typed_keys(parser)
    named = re.search(r'Parser key "([\w.]+)"', message)
    key = named.group(1) if named else ""
    if (
        key in kinds
        and is_list(kinds[key])
        and names_code(kinds[key])
        and (found := re.search(r"Expected a <class 'list'>\. Got value: (.*)", message))
    ):
        is_here = any(given == key for given, _ in pairs(overrides))
        more = f", or --{key}+={found.group(1)} to add one to those of the file" if is_here else ""
        return f"{'' if is_here else f'{path}: '}{key}: {found.group(1)} is not a list; write [{found.group(1)}]{more}"
    if key in kinds and names_code(kinds[key]):
        return next(class_rejections(key, kinds[key], path, overrides), message)
    if key in kinds and (why := next(part_rejections(key, kinds[key], path, overrides), "")):
        return why
    if unknown := re.search(r"unrecognized arguments: --([\w.]+)|[Oo]ption '([\w.]+)'", message):
        group = re.search(r"Group '([\w.]+)' does not accept", message)
        word = (f"{group.group(1)}." if group else "") + (unknown.group(1) or unknown.group(2))
        is_here = any(given == word for given, _ in pairs(overrides))
        return f"{'' if is_here else f'{path}: '}there is no key {word!r}{did_you_mean(word, kinds)}"
    if key and (inner := next((each for each in kinds if each.startswith(f"{key}.")), "")):
        return f"{key}: give its keys one by one, such as --{inner}"
    given = re.search(r"(?:Got|Given) value: (.*)\s*\Z", message)
    if key in kinds and given and not names_code(kinds[key]):
        return f"{key}={given.group(1)}: give {in_words(kinds[key])}"
    return message


def place_of(error: ConfigError, path: Path, parser: ArgumentParser, given: Namespace, elsewhere: Collection[str]) -> str:
    """Return the place of the value that a class rejected: `mine.yaml: callbacks[2] (CheckpointSaver): `, or "" if it is not found.

    A value from the command line or the environment has no file.
    """
    kinds = typed_keys(parser)
    for key in (key for key, kind in kinds.items() if is_list(kind) and names_code(kind)):
        for number, spec in enumerate(given.get(key) or []):
            if _rejects(spec, error):
                own = spec.get("init_args", {}).get("callback", spec) if spec.class_path == names.NAMED else spec
                source = "" if key in elsewhere else f"{path}: "
                return f"{source}{key}[{number}] ({own.class_path.rpartition('.')[2]}): "
    named = re.match(r"(?:unknown )?([\w.]+)", str(error))
    key = named.group(1) if named else ""
    is_of_file = any(each == key or each.startswith(f"{key}.") for each in kinds) and key not in elsewhere
    return f"{path}: " if is_of_file else ""


def _rejects(spec: Any, error: ConfigError) -> bool:
    """Return whether making this class raises the same error."""
    from jsonargparse import Namespace

    parser = probe()
    parser.add_argument("--value", type=Callback)
    try:
        parser.instantiate(Namespace(value=spec))  # type: ignore[no-untyped-call]
    except ConfigError as again:
        return str(again) == str(error)
    return False
