"""Why a recipe's values were refused, in a line: jsonargparse tells all that it has tried, and a person asks which word to mend.

What was given is looked at once more, by itself; only where nothing is found wrong that way, jsonargparse's own words stand.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from callsheet.commands.class_refusals import class_refusals
from callsheet.commands.given import pairs
from callsheet.commands.key_types import in_words, names_code, typed_keys
from callsheet.commands.part_refusals import part_refusals
from callsheet.errors import did_you_mean

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser


def plain_refusal(parser: ArgumentParser, message: str, path: Path, overrides: Sequence[str]) -> str:
    """What is wrong with the values of the file at `path` or with those over them, given what jsonargparse says of it."""
    kinds = typed_keys(parser)
    named = re.search(r'Parser key "([\w.]+)"', message)
    key = named.group(1) if named else ""
    if key in kinds and names_code(kinds[key]):
        return next(class_refusals(key, kinds[key], path, overrides), message)
    if key in kinds and (why := next(part_refusals(key, kinds[key], path, overrides), "")):
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
