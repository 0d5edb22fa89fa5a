"""Converts a recipe's configuration to plain data, which is recorded with the run, and to a YAML recipe file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml


def settings_of(config: Any) -> Any:
    """Convert the configuration to plain data: numbers, texts, lists and dictionaries.

    A class or function becomes its name. A `partial` becomes the name of its function, and the arguments.
    """
    if is_dataclass(config) and not isinstance(config, type):
        return {field.name: settings_of(getattr(config, field.name)) for field in fields(config)}
    if isinstance(config, Mapping):
        return {str(name): settings_of(value) for name, value in config.items()}
    if isinstance(config, (list, tuple)):
        return [settings_of(value) for value in config]
    if isinstance(config, partial):
        return {"class_path": settings_of(config.func), "init_args": settings_of(config.keywords)}
    if config is None or isinstance(config, (bool, int, float, str)):
        return config
    if isinstance(config, Path):
        return str(config)
    return f"{getattr(config, '__module__', '?')}.{getattr(config, '__qualname__', type(config).__qualname__)}"


def as_file(recipe: type, config: Any) -> str:
    """Return a configuration object as the text of a recipe file (YAML).

    With this file, the run can be opened again, and its settings can be compared with those of a job that resumes the run.

    Functions that cannot be imported by name, such as lambdas, are left out.
    """
    settings = settings_of(config)
    plain = {name: value for name, value in settings.items() if "<" not in _class_path(value)}
    return yaml.safe_dump({"recipe": f"{recipe.__module__}.{recipe.__qualname__}", **plain}, sort_keys=False)


def _class_path(value: Any) -> str:
    path = value.get("class_path", "") if isinstance(value, dict) else value
    return path if isinstance(path, str) else ""
