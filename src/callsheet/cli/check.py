"""Finds out why jsonargparse rejects the values of a recipe's keys, for an error message of one line.

The messages of jsonargparse are long, because they list all types that were tried. `first_error` therefore searches for the
smallest part of the values that jsonargparse rejects.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_args, get_type_hints

from callsheet.cli import names
from callsheet.cli.cli_values import Source, merge
from callsheet.cli.key_types import class_of, example_of, in_words, item_of, names_code, parts_of, typed_keys, words_of
from callsheet.core.callback import Callback
from callsheet.core.spec import import_path
from callsheet.errors import ConfigError, did_you_mean
from callsheet.recipes.yaml_file import parse_yaml

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser, Namespace


class _Error(NamedTuple):
    """What is wrong with the value of a key."""

    key: str
    message: str
    is_missing: bool = False
    """Whether an argument is missing. A later source may give it."""


def has_wrong_null(parser: ArgumentParser, given: Namespace) -> bool:
    """Return whether a parsed value is None although its type does not allow None. jsonargparse does not check this in a file."""
    return any(_has_wrong_null(kind, given.get(key)) for key, kind in typed_keys(parser).items())


def _has_wrong_null(kind: Any, value: Any) -> bool:
    """Return whether a parsed value, or a part of it, is None although its type does not allow it."""
    if value is None:
        return not _takes_none(kind)
    if isinstance(value, list) and (item := item_of(kind, list)):
        return any(_has_wrong_null(item, each) for each in value)
    if isinstance(value, dict) and (item := item_of(kind, dict)):
        return any(_has_wrong_null(item, each) for each in value.values())
    if (parts := parts_of(kind)) and hasattr(value, "__dict__"):
        kinds = get_type_hints(parts)
        return any(_has_wrong_null(kinds[name], each) for name, each in vars(value).items() if name in kinds)
    return False


def first_error(parser: ArgumentParser, sources: Iterable[Source]) -> str:
    """Return a message about the first wrong value, with its place, or an empty string if no wrong value is found."""
    kinds = typed_keys(parser) | {"config": None}
    values: dict[str, Any] = {}
    places: dict[_Error, str] = {}
    errors: list[_Error] = []
    for source in sources:
        merge(values, {key: _read(key, value, kinds) for key, value in source.values.items()})
        errors = sorted(_in_keys(kinds, values), key=lambda error: error.is_missing)
        places |= {error: source.place(error.key) for error in errors if error not in places}
        if errors and not errors[0].is_missing:
            break
    return f"{places[errors[0]]}{errors[0].message}" if errors else ""


def _read(key: str, value: Any, kinds: Mapping[str, Any]) -> Any:
    """Return the value of a key as jsonargparse reads it. For a key inside a value, such as `train.path`, `null` means None."""
    return None if key not in kinds and parse_yaml(value) is None else value


def _in_keys(kinds: Mapping[str, Any], values: Mapping[Any, Any], at: str = "", owner: Any = None) -> Iterator[_Error]:
    """Yield the errors in the values for the keys in `kinds`. `owner` is the class that has these keys as arguments, or None."""
    for name, value in values.items():
        key = f"{at}.{name}" if at else str(name)
        inner = {each.removeprefix(f"{name}."): kind for each, kind in kinds.items() if each.startswith(f"{name}.")}
        if name in kinds:
            yield from _in_value(kinds[name], value, key, owner)
        elif inner and isinstance(content := parse_yaml(value), Mapping):
            yield from _in_keys(inner, content, key, owner)
        elif inner and not Path(str(value)).is_file():
            yield _Error(key, f"{key}: give its keys one by one, such as --{key}.{next(iter(inner))}")
        elif not inner and not _takes_any(owner):
            known = [each.partition(".")[0] for each in kinds] + list(kinds)
            near = did_you_mean(str(name), [*known, "class_path"] if owner else known)
            near = near.replace("mean '", f"mean '{at}.") if at else near
            listed = f" ({'it takes' if owner else 'there are'} {', '.join(kinds) or 'nothing'})" if at else ""
            what = f"{key}: {owner.__name__} does not take {name!r}" if owner else f"there is no key {key!r}"
            yield _Error(key, f"{what}{near or listed}")


def _in_value(kind: Any, value: Any, at: str, owner: Any = None) -> Iterator[_Error]:
    """Yield the errors in a value of the type `kind`. `owner` is the class that has the value as an argument, or None."""
    if kind is None or _fits(kind, value):
        return
    content, item, parts = parse_yaml(value), item_of(kind, list), parts_of(kind)
    is_mapping = isinstance(content, Mapping)
    if isinstance(content, list) and item:
        for number, each in enumerate(content):
            yield from _in_value(item, each, f"{at}[{number}]", owner)
    elif is_mapping and (each_kind := item_of(kind, dict)):
        for name, each in content.items():
            yield from _in_value(each_kind, each, f"{at}.{name}", owner)
    elif is_mapping and parts:
        yield from _in_arguments(parts, content, at)
    # An argument of a class, with a type such as `float | Tensor`, may be a plain number. So it names a class only if it has a
    # `class_path`.
    elif names_code(kind) and not item and not parts and (owner is None or (is_mapping and "class_path" in content)):
        yield from _in_spec(kind, content, at)
    else:
        what = f"{at}={'null' if value is None else value}: {owner.__name__ + ' expects' if owner else 'give'} {in_words(kind)}"
        words = words_of(kind)
        more = (
            f", such as [{content}], or --{at}+={content} to add one"
            if item and owner is None and not words and value is not None
            else ""
        )
        yield _Error(at, f"{what}{more}{did_you_mean(str(value), words)}")


def _in_spec(kind: Any, content: Any, at: str) -> Iterator[_Error]:
    """Yield the errors in a value that names a class: in the import path, and in the arguments for the class."""
    base, later = class_of(kind)
    spec: Any = {"class_path": content} if isinstance(content, str) else content
    if not isinstance(spec, Mapping) or not isinstance(spec.get("class_path"), str):
        given = ", ".join(map(str, spec)) if spec and isinstance(spec, Mapping) else repr(spec)
        yield _Error(at, f"{at}: {given} does not name a class; give a class_path such as {example_of(base)}")
        return
    allowed = ["class_path", "init_args", "dict_kwargs", *(["name"] if base and issubclass(base, Callback) else [])]
    yield from _in_keys(dict.fromkeys(allowed), spec, at)
    try:
        owner = _class_at(spec["class_path"], base)
    except ConfigError as error:
        yield _Error(at, f"{at}: {error}")
    else:
        arguments = spec.get("init_args") or {}
        if isinstance(arguments, Mapping):
            yield from _in_arguments(owner, arguments, at, later)
        else:
            yield _Error(f"{at}.init_args", f"{at}.init_args={arguments}: give the arguments of {owner.__name__} by name")


def _class_at(path: str, base: type | None) -> Any:
    """Return the class or function at an import path. Raise `ConfigError` if there is none, or if it is not a subclass of `base`."""
    try:
        found = import_path(path) if "." in path else _subclasses(base).get(path)
    except ConfigError:
        raise
    except Exception as error:  # importing a module may raise any error
        raise ConfigError(f"importing {path!r} fails: {type(error).__name__}: {error}") from None
    if found is None:
        near = did_you_mean(path, _subclasses(base)) or f"; give an import path, such as {example_of(base)}"
        raise ConfigError(f"there is no class {path!r}{near}")
    if not inspect.isfunction(found) and not (inspect.isclass(found) and issubclass(found, base or object)):
        raise ConfigError(f"{path} is not a subclass of {(base or object).__name__}; give one, such as {example_of(base)}")
    return found


def _in_arguments(owner: Any, given: Mapping[Any, Any], at: str, later: int = 0) -> Iterator[_Error]:
    """Yield the errors in the arguments of a class or function. The recipe's code passes the first `later` arguments itself."""
    parser = probe()
    add = parser.add_class_arguments if inspect.isclass(owner) else parser.add_function_arguments
    add(owner, None, skip={later} if later else None, fail_untyped=False)
    kinds = typed_keys(parser)
    is_class = not parts_of(owner)
    yield from _in_keys(kinds, given, at, owner if is_class else None)
    for each in list(inspect.signature(owner).parameters.values())[later:]:
        is_needed = each.default is each.empty and each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
        if is_needed and each.name not in given:
            where = " among its init_args" if is_class else ""
            yield _Error(at, f"{at}: {owner.__name__} needs {each.name!r}{where}", is_missing=True)


def _takes_any(owner: Any) -> bool:
    return owner is not None and any(each.kind is each.VAR_KEYWORD for each in inspect.signature(owner).parameters.values())


def _subclasses(base: type | None) -> dict[str, type]:
    """Return all subclasses of `base` that have been imported so far, by name."""
    found: dict[str, type] = {}
    kinds: list[type] = base.__subclasses__() if base is not None else []
    for kind in kinds:
        found |= {kind.__name__: kind} | _subclasses(kind)
    return found


def _fits(kind: Any, value: Any) -> bool:
    """Return whether jsonargparse accepts the value for the type `kind`. It accepts None for every type, so check None here."""
    if value is None:
        return _takes_none(kind)
    parser = probe()
    parser.add_argument("--value", type=kind)
    try:
        parsed = parser.parse_object({"value": names.with_calls(value)}, env=False)
    except Exception:  # an `ArgumentError`, or any error of a module that jsonargparse imports
        return False
    return not _has_wrong_null(kind, parsed.value)


def _takes_none(kind: Any) -> bool:
    return kind in (None, Any, object, type(None)) or type(None) in get_args(kind)


def probe() -> ArgumentParser:
    """Return a parser without keys that reads values in the same way as a recipe's parser."""
    from jsonargparse import ArgumentParser

    names.register()
    return ArgumentParser(exit_on_error=False, parser_mode=names.FORMAT)
