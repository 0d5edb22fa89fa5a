"""Supports the key `name` of callbacks in recipe files, so that a file can contain two callbacks of one class."""

from __future__ import annotations

from typing import Any

import yaml

from callsheet.core.callback import Callback

FORMAT = "callsheet"
"""The name under which jsonargparse knows the format of recipe files: YAML in which a callback may have the key `name`."""

NAMED_PATH = f"{__name__}.named"
"""The import path of the function `named`. A call of this function replaces each callback that has a `name` in a recipe file."""


def named(callback: Callback, name: str) -> Callback:
    """Set the callback's name, and return the callback.

    A name in a file becomes a call of this function, because jsonargparse knows only `class_path` and `init_args`.
    """
    callback.name = name
    return callback


def register() -> None:
    """Register the format of recipe files with jsonargparse. A second call changes nothing."""
    from jsonargparse import get_loader, set_dumper, set_loader

    load = get_loader("yaml")
    set_loader(FORMAT, lambda text: with_calls(load(text)), (yaml.YAMLError,))
    set_dumper(FORMAT, lambda content: yaml.safe_dump(with_names(content), allow_unicode=True, sort_keys=False))


def with_calls(content: Any) -> Any:
    """Return a recipe file's content, in which each callback that has the key `name` is replaced by a call of the function `named`."""
    if isinstance(content, list):
        return [with_calls(each) for each in content]
    if not isinstance(content, dict):
        return content
    spec = {key: with_calls(value) for key, value in content.items()}
    if "class_path" in spec and spec.get("name"):
        name = spec.pop("name")
        return {"class_path": NAMED_PATH, "init_args": {"callback": spec, "name": name}}
    return spec


def with_names(content: Any) -> Any:
    """Return the content, in which each call of `named` is replaced by its callback with the key `name`; reverses `with_calls`."""
    if isinstance(content, list):
        return [with_names(each) for each in content]
    if not isinstance(content, dict):
        return content
    if content.get("class_path") == NAMED_PATH:
        spec = with_names(content["init_args"]["callback"])
        return {"class_path": spec["class_path"], "name": content["init_args"]["name"], **spec}
    return {key: with_names(value) for key, value in content.items()}
