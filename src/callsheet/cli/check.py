"""Finds out why jsonargparse rejects the values of a recipe's keys, for an error message of one line.

The messages of jsonargparse are long, because they list all types that were tried. `first_error` therefore checks the values a
second time, one by one, against the types of their keys.
"""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from callsheet.cli import names
from callsheet.cli.cli_values import Part, Source, split
from callsheet.cli.key_types import (
    base_of,
    example_of,
    in_words,
    item_of,
    names_code,
    partial_arguments,
    parts_of,
    typed_keys,
    words_of,
)
from callsheet.core.callback import Callback
from callsheet.core.spec import import_path
from callsheet.errors import ConfigError, did_you_mean
from callsheet.recipes.yaml_file import loaded

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

_Errors = Iterator[tuple[str, str]]
"""Pairs for wrong values: the key of the value, and a message that begins with the key."""


def first_error(parser: ArgumentParser, sources: Iterable[Source]) -> str:
    """Return a message about the first wrong value, with its place, or an empty string if every value has the type of its key."""
    return next(_Check().errors(typed_keys(parser) | {"config": None}, sources), "")


@dataclass(slots=True)
class _Made:
    """A class or function that a recipe file gives as the value of a key, and the names of the arguments that the file passes to it."""

    at: str
    owner: Any
    later: int
    """How many positional arguments the recipe's code passes to the class later, such as the parameters for an optimizer."""
    has: set[str]
    source: Source


class _Check:
    """Checks the values for a recipe's keys from all sources (file, environment, command line), in order."""

    def __init__(self) -> None:
        self._source = Source({})
        self._made: list[_Made] = []

    def errors(self, kinds: Mapping[str, Any], sources: Iterable[Source]) -> Iterator[str]:
        for self._source in sources:
            for at, why in self._group(kinds, self._source.values, ""):
                yield f"{self._source.place(at)}{why}"
        for made in self._made:
            for name, each in list(inspect.signature(made.owner).parameters.items())[made.later :]:
                is_needed = each.default is each.empty and each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
                if is_needed and name not in made.has:
                    where = "" if parts_of(made.owner) else " among its init_args"
                    yield f"{made.source.place(made.at)}{made.at}: {made.owner.__name__} needs {name!r}{where}"

    def _group(self, kinds: Mapping[str, Any], given: Mapping[str, Any], at: str, owner: Any = None) -> _Errors:
        """Check the values for the keys in `kinds`. `owner` is the class that has these keys as arguments, or None."""
        for word, value in (split(str(word), value) for word, value in given.items()):
            name = word.removesuffix("+")
            key = f"{at}.{name}" if at else name
            inner = {each.removeprefix(f"{name}."): kind for each, kind in kinds.items() if each.startswith(f"{name}.")}
            if name in kinds:
                is_item = name != word and not isinstance(loaded(value), list)
                if name == word and not isinstance(value, Part):  # forget the classes that this key's earlier value has named
                    self._made = [made for made in self._made if not f"{made.at}.".startswith((f"{key}.", f"{key}["))]
                yield from self._value(item_of(kinds[name], list) if is_item else kinds[name], value, key, owner)
            elif inner and isinstance(loaded(value), Mapping):
                yield from self._group(inner, loaded(value), key, owner)
            elif inner and not Path(str(value)).is_file():
                yield key, f"{key}: give its keys one by one, such as --{key}.{next(iter(inner))}"
            elif not inner and not _takes_any(owner):
                near = did_you_mean(name, [each.partition(".")[0] for each in kinds] + list(kinds))
                if at and (owner is None or isinstance(given, Part)):
                    near = near.replace("mean '", f"mean '{at}.")
                listed = f" ({'it takes' if owner else 'there are'} {', '.join(kinds) or 'nothing'})" if at else ""
                what = f"{key}: {owner.__name__} does not take {name!r}" if owner else f"there is no key {key!r}"
                yield key, f"{what}{near or listed}"

    def _value(self, kind: Any, value: Any, at: str, owner: Any = None) -> _Errors:
        if kind is None or (owner is not None and isinstance(value, Part)):
            return
        content = loaded(value)
        group = parts_of(kind)
        # Types such as `float | Tensor` accept plain values too, so check an argument as code only if it has a `class_path`.
        is_code = names_code(kind) and not group and (owner is None or (isinstance(content, Mapping) and "class_path" in content))
        if not is_code and not (group and isinstance(content, (Mapping, list))):
            if not fits(kind, value):
                near = did_you_mean(str(value), words_of(kind))
                yield at, f"{at}={value}: {owner.__name__ + ' expects' if owner else 'give'} {in_words(kind)}{near}"
            return
        if content is None:
            return
        if isinstance(content, list) and (item := item_of(kind, list)):
            for number, each in enumerate(content):
                yield from self._value(item, each, f"{at}[{number}]")
        elif group and isinstance(content, Mapping) and (item := item_of(kind, dict)):
            for name, each in (split(*pair) if isinstance(content, Part) else pair for pair in content.items()):
                yield from self._value(item, each, f"{at}.{name}")
        elif group and isinstance(content, Mapping):
            self._add(at, group, 0, {split(word, None)[0] for word in content})
            yield from self._group(_arguments(group, 0), content, at)
        elif group:
            yield at, f"{at}={value}: give {in_words(kind)}"
        elif item_of(kind, list) and not isinstance(content, Part):
            more = f", or --{at}+={content} to add one to those of the file" if self._source.is_command_line else ""
            yield at, f"{at}: {content} is not a list; write [{content}]{more}"
        else:
            yield from self._spec(kind, content, at)

    def _spec(self, kind: Any, spec: Any, at: str) -> _Errors:
        """Check a class's import path and arguments. Arguments without a path belong to the class that this key was given last."""
        base = base_of(kind)
        spec = {"class_path": spec} if isinstance(spec, str) else spec
        if not isinstance(spec, Mapping):
            yield at, f"{at}: {spec!r} is not a class; give a class_path such as {example_of(base)}, with its init_args"
            return
        given = Part(split(*pair) for pair in spec.items()) if isinstance(spec, Part) else spec
        arguments = given.get("init_args") or {}
        if "class_path" in given:
            owner = yield from self._class(given["class_path"], at, base)
            made = self._add(at, owner, partial_arguments(kind), set()) if owner else None
        else:
            arguments = arguments or (given if isinstance(spec, Part) else {})
            made = self._last(at)
            if arguments and made is None:
                first = next(iter(arguments))
                yield at, f"{at}.{first} is given without a class before it; give --{at} {example_of(base)} first"
        if arguments is not given:
            allowed = ["class_path", "init_args", "dict_kwargs", *(["name"] if base and issubclass(base, Callback) else [])]
            yield from self._group(dict.fromkeys(allowed), given, at)
            if "class_path" not in given and "init_args" not in given:
                yield at, f"{at}: there is no class_path; give one such as {example_of(base)}"
        if made is not None:
            made.has |= {split(word, None)[0] for word in arguments}
            yield from self._group(_arguments(made.owner, made.later), arguments, at, made.owner)

    def _class(self, path: str, at: str, base: type | None) -> Generator[tuple[str, str], None, Any]:
        """Check a class's import path: yield what is wrong with it, and return the class or function at this path, or None."""
        found = None
        try:
            found = import_path(path) if "." in path else _subclasses(base).get(path)
        except ConfigError as error:
            yield at, f"{at}: {error}"
        except Exception as error:  # importing a module may raise any error
            yield at, f"{at}: importing {path!r} fails: {type(error).__name__}: {error}"
        if found is None:
            near = did_you_mean(path, _subclasses(base)) or f"; give an import path, such as {example_of(base)}"
            yield at, f"{at}: there is no class {path!r}{near}"
        elif inspect.isclass(found) and base is not None and not issubclass(found, base):
            yield at, f"{at}: {path} is not a subclass of {base.__name__}; give one, such as {example_of(base)}"
        return found if inspect.isclass(found) or inspect.isfunction(found) else None

    def _add(self, at: str, owner: Any, later: int, has: set[str]) -> _Made:
        self._made.append(_Made(at, owner, later, has, self._source))
        return self._made[-1]

    def _last(self, at: str) -> _Made | None:
        """Return the class that was given most recently for the key `at` or for an item of its list, or None if there is none."""
        return next((made for made in reversed(self._made) if re.sub(r"\[\d+\]$", "", made.at) == at), None)


def _arguments(owner: Any, later: int) -> dict[str, Any]:
    """Return the types of the arguments of a class or function by name, including the arguments that a class passes to its bases."""
    parser = probe()
    add = parser.add_class_arguments if inspect.isclass(owner) else parser.add_function_arguments
    add(owner, None, skip={later} if later else None, fail_untyped=False)
    untyped = [
        each.name
        for each in list(inspect.signature(owner).parameters.values())[later:]
        if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
    ]
    typed = typed_keys(parser)
    return typed | {name: None for name in untyped if not any(key.partition(".")[0] == name for key in typed)}


def _takes_any(owner: Any) -> bool:
    return owner is not None and any(each.kind is each.VAR_KEYWORD for each in inspect.signature(owner).parameters.values())


def _subclasses(base: type | None) -> dict[str, type]:
    """Return all subclasses of `base` that have been imported so far, by name."""
    found: dict[str, type] = {}
    kinds: list[type] = base.__subclasses__() if base is not None else []
    for kind in kinds:
        found |= {kind.__name__: kind} | _subclasses(kind)
    return found


def fits(kind: Any, value: Any) -> bool:
    """Return whether jsonargparse accepts the value for the type `kind`."""
    parser = probe()
    parser.add_argument("--value", type=kind)
    try:
        parser.parse_object({"value": names.with_calls(value)}, env=False)
    except argparse.ArgumentError:
        return False
    return True


def probe() -> ArgumentParser:
    """Return a parser without keys that reads values in the same way as a recipe's parser."""
    from jsonargparse import ArgumentParser

    names.register()
    return ArgumentParser(exit_on_error=False, parser_mode=names.FORMAT)
