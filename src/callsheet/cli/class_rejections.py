"""Find the errors in the classes given for a key, such as an optimizer or a list of callbacks."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from callsheet.cli.cli_values import fits, probe, values_of_key
from callsheet.cli.key_types import base_of, example_of, in_words, is_list, names_code, partial_arguments, typed_keys
from callsheet.core.spec import import_path
from callsheet.errors import ConfigError, did_you_mean

_SPEC = ("class_path", "init_args", "name", "dict_kwargs")


def class_rejections(key: str, kind: Any, path: Path, overrides: Sequence[str]) -> Iterator[str]:
    """Yield the errors in the file, in further files and on the command line, in the order in which they apply."""
    look = _Look(key, kind)
    for part, source, value in values_of_key(key, path, overrides):
        yield from look.over_part(part.removeprefix("init_args."), value) if part else look.over(value, source)
    yield from look.over_what_is_missing()


class _Look:
    """Checks the values given for one key, and yields the errors in them."""

    def __init__(self, key: str, kind: Any) -> None:
        self._key = key
        self._base = base_of(kind)
        self._is_list = is_list(kind)
        self._later = partial_arguments(kind)
        self._class: Any = None  # the last class named: a dotted key sets one of its arguments
        self._has: set[str] = set()

    def over(self, value: Any, source: str) -> Iterator[str]:
        """Check a value of the key: one specification, or a list."""
        if isinstance(value, list) and self._is_list:
            for number, spec in enumerate(value):
                yield from self._over_spec(spec, f"{source}{self._key}[{number}]", self._base)
        else:
            yield from self._over_spec(value, f"{source}{self._key}", self._base)

    def over_part(self, part: str, value: str) -> Iterator[str]:
        """Check a value of `key.part`."""
        if part == "class_path":
            yield from self._over_spec(value, self._key, self._base)
        elif self._class is None:
            yield f"{self._key}.{part} is given without a class before it; give --{self._key} {example_of(self._base)} first"
        else:
            self._has.add(part.partition(".")[0])
            yield from self._over_argument(self._class, part, value, f"{self._key}.{part}", is_text=True)

    def over_what_is_missing(self) -> Iterator[str]:
        if self._class is not None:
            yield from self._missing(self._class, self._has, self._key)

    def _over_spec(self, spec: Any, at: str, base: type | None) -> Iterator[str]:
        if spec is None:
            return
        spec = {"class_path": spec} if isinstance(spec, str) else spec
        if not isinstance(spec, Mapping):
            yield f"{at}: {spec!r} is not a class; give a class_path such as {example_of(base)}, with its init_args"
            return
        for word in spec:
            if word not in _SPEC and "class_path" in spec:
                yield f"{at}: beside class_path there are init_args and name, not {word!r}{did_you_mean(str(word), _SPEC)}"
        if not isinstance(spec.get("class_path"), str):
            near = next(filter(None, (did_you_mean(str(word), ["class_path"]) for word in spec)), "")
            yield f"{at}: there is no class_path{near}; give one such as {example_of(base)}"
            return
        if "name" in spec and not self._is_list:
            yield f"{at}: only callbacks and loggers have a name"
        found = yield from self._class_at(spec["class_path"], at, base)
        self._class, self._has = found, set(spec.get("init_args") or {})
        if found is None:
            return
        for name, value in (spec.get("init_args") or {}).items():
            yield from self._over_argument(found, name, value, f"{at}.{name}", is_text=False)
        if self._is_list:
            yield from self._missing(found, self._has, at)

    def _class_at(self, path: str, at: str, base: type | None) -> Any:
        """Yield errors, and return the class at `path`, or None if it is missing or a function."""
        try:
            found = import_path(path) if "." in path else _subclasses(base).get(path)
        except ConfigError as error:
            yield f"{at}: {error}"
            return None
        except Exception as error:  # any error of the module itself
            yield f"{at}: importing {path!r} fails: {type(error).__name__}: {error}"
            return None
        if found is None:
            near = did_you_mean(path, _subclasses(base)) or f"; give an import path, such as {example_of(base)}"
            yield f"{at}: there is no class {path!r}{near}"
        elif inspect.isclass(found) and base is not None and not issubclass(found, base):
            yield f"{at}: {path} is not a subclass of {base.__name__}; give one, such as {example_of(base)}"
        return found if inspect.isclass(found) else None

    def _over_argument(self, owner: type, name: str, value: Any, at: str, *, is_text: bool) -> Iterator[str]:
        takes = self._arguments(owner)
        first, _, deeper = name.partition(".")
        if first not in takes:
            if _takes_any(owner):
                return
            near = did_you_mean(first, takes)
            if is_text:
                near = near.replace("mean '", f"mean '{self._key}.")
            rest = near or f" (it takes {', '.join(takes) or 'nothing'})"
            yield f"{at}: {owner.__name__} does not take {first!r}{rest}"
            return
        kind = takes[first]
        if kind is None or deeper:
            return
        if not is_text and isinstance(value, Mapping) and "class_path" in value and names_code(kind):
            owner_before, has_before = self._class, self._has
            yield from self._over_spec(value, at, base_of(kind))
            self._class, self._has = owner_before, has_before
        elif not fits(kind, value, is_text=is_text):
            yield f"{at}={value if is_text else repr(value)}: {owner.__name__} expects {in_words(kind)}"

    def _missing(self, owner: type, has: set[str], at: str) -> Iterator[str]:
        parameters = list(inspect.signature(owner).parameters.values())[self._later :]
        for each in parameters:
            is_wanted = each.default is each.empty and each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
            if is_wanted and each.name not in has:
                yield f"{at}: {owner.__name__} needs {each.name!r} among its init_args"

    def _arguments(self, owner: type) -> dict[str, Any]:
        """Return the constructor's arguments, including those that it passes to its bases, with their types."""
        parser = probe()
        parser.add_class_arguments(owner, None, skip={self._later} if self._later else None, fail_untyped=False)
        takes = dict.fromkeys(key.partition(".")[0] for key in typed_keys(parser))
        for each in list(inspect.signature(owner).parameters.values())[self._later :]:
            if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY):
                takes.setdefault(each.name)
        return takes | typed_keys(parser)


def _takes_any(owner: type) -> bool:
    return any(each.kind is each.VAR_KEYWORD for each in inspect.signature(owner).parameters.values())


def _subclasses(base: type | None) -> dict[str, type]:
    """Return all imported subclasses, by name."""
    found: dict[str, type] = {}
    kinds: list[type] = base.__subclasses__() if base is not None else []
    for kind in kinds:
        found |= {kind.__name__: kind} | _subclasses(kind)
    return found
