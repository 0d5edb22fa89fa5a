"""Reads YAML files strictly: mistakes that PyYAML accepts, such as a key that is given twice, are errors."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

from callsheet.errors import ConfigError, check_characters
from callsheet.report.lines import is_shallow

_TOO_DEEP_MESSAGE = ": its lists and mappings are nested too deeply; give at most 60 levels"


def read_yaml(path: Path) -> Any:
    """Return the content of a YAML file.

    Raises:
        ConfigError: the file cannot be read, is not UTF-8, is not YAML, is nested too deeply, or gives a key twice; the message
            has the file and the line.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: the byte {content[error.start]:#04x} is not UTF-8; save the file as UTF-8") from None
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if node is not None:
            _check_nodes(node, path)
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}{_syntax_error(error, text)}") from None
    except ConfigError:
        raise
    except ValueError as error:  # PyYAML raises ValueError for an invalid value, such as a date with a month 13
        raise ConfigError(f"{path}: a value cannot be read: {error}; put it in quotes if it is a text") from None
    except RecursionError:
        raise ConfigError(f"{path}{_TOO_DEEP_MESSAGE}") from None
    if not is_shallow(value):
        raise ConfigError(f"{path}{_TOO_DEEP_MESSAGE}")
    return value


def parse_yaml(value: Any) -> Any:
    """Parse a text as YAML. Return the value unchanged if it is not a text, not YAML, or nested too deeply."""
    try:
        content = yaml.safe_load(value) if isinstance(value, str) else value
    except (yaml.YAMLError, ValueError, RecursionError):
        return value
    return content if is_shallow(content) else value


def reject_unreadable(value: Any, place: str) -> None:
    """Check a value from the command line or the environment.

    Raises:
        ConfigError: the value is YAML that is nested too deeply, or has half of a surrogate pair.
    """
    check_characters(str(value), place)
    content = value
    try:
        content = yaml.safe_load(value) if isinstance(value, str) else value
        is_read = is_shallow(content)
    except (yaml.YAMLError, ValueError):
        return  # the value is plain text, or a later check rejects it with a message that names the key
    except RecursionError:
        is_read = False
    if not is_read:
        raise ConfigError(f"{place}{_TOO_DEEP_MESSAGE}")
    check_characters(json.dumps(content, ensure_ascii=False, skipkeys=True, default=str), place)


def _syntax_error(error: yaml.YAMLError, text: str) -> str:
    """Return the YAML error as a message on one line: `:LINE: this is not YAML: WHAT`."""
    if isinstance(error, yaml.MarkedYAMLError) and (mark := error.problem_mark or error.context_mark) is not None:
        began = error.context_mark
        since = f" (line {began.line + 1})" if began is not None and began.line != mark.line else ""
        what = ", ".join(filter(None, [error.problem, error.context and f"{error.context}{since}"]))
        return f":{mark.line + 1}: this is not YAML: {' '.join(what.split())}"
    if isinstance(error, yaml.reader.ReaderError):
        line = text.count("\n", 0, error.position) + 1
        return f":{line}: this is not YAML: the character {error.character:#04x} is not allowed"
    return f": this is not YAML: {' '.join(str(error).split())}"


def line_of(path: Path, key: str) -> int:
    """Return the number of the line with a key such as `callbacks[1].keep` in a YAML file.

    If the key is not in the file, return the line of the value that would contain it, or 0 if that is missing too.

    The words `init_args` may be left out of the key.
    """
    node, line = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader), 0
    for word in re.findall(r"[^.\[\]]+", key):
        if isinstance(node, yaml.SequenceNode):
            if not (word.isdigit() and int(word) < len(node.value)):
                break
            node = node.value[int(word)]
            line = node.start_mark.line + 1
            continue
        found = _entry(node, word) or _entry((_entry(node, "init_args") or (None, None))[1], word)
        if found is None:
            break
        line, node = found[0].start_mark.line + 1, found[1]
    return line


def _entry(node: yaml.Node | None, word: str) -> tuple[yaml.Node, yaml.Node] | None:
    """Return the nodes of the key `word` and of its value in a YAML mapping; None if the mapping does not have the key."""
    pairs = node.value if isinstance(node, yaml.MappingNode) else []
    return next(((key, value) for key, value in pairs if key.value == word), None)


def _check_nodes(node: yaml.Node, path: Path) -> None:
    """Check what PyYAML accepts, although it is a mistake.

    Raises:
        ConfigError: a mapping has the same key twice, or a text has half of a surrogate pair.
    """
    waiting, seen = [(node, "")], set()
    while waiting:
        each, prefix = waiting.pop()
        if id(each) in seen:  # an alias (`*name`) of a node that was checked before
            continue
        seen.add(id(each))
        if isinstance(each, yaml.ScalarNode):
            check_characters(each.value, f"{path}:{each.start_mark.line + 1}")
        if isinstance(each, yaml.SequenceNode):
            waiting += [(item, f"{prefix}[{number}]") for number, item in enumerate(each.value)]
        elif isinstance(each, yaml.MappingNode):
            lines: dict[str, int] = {}
            for key, value in each.value:
                line = key.start_mark.line + 1
                called = f"{prefix}.{key.value}" if prefix else str(key.value)
                if isinstance(key, yaml.ScalarNode):
                    if key.value in lines:
                        raise ConfigError(
                            f"{path}:{line}: the key {called!r} is given twice, first in line {lines[key.value]}; leave one of them"
                        )
                    lines[key.value] = line
                waiting.append((value, called))
