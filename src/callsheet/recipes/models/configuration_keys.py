"""Checks the keys of a transformers configuration, because transformers stores unknown keys without a warning."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from callsheet.errors import ConfigError, did_you_mean


def check_made(given: Mapping[str, Any], config: Any, place: str) -> None:
    """Raise ConfigError if a transformers configuration was constructed with keyword arguments that it does not know.

    Raises:
        ConfigError: a key, here or in a part such as `text_config`, is unknown to the configuration.
    """
    known, read = _declared_keys(type(config)), _read(type(config))
    kept = [key for key in given if key not in known and key not in read and key in vars(config)]
    if kept:
        others = {key: value for key, value in given.items() if key not in kept and key != "model_type"}
        without = type(config)(**copy.deepcopy(others))
        _reject((key for key in kept if not hasattr(without, key)), known, config, place)
    for key, value, part in _parts(given, config):
        check_made(value, part, f"{place}.{key}")


def check_changed(given: Mapping[str, Any], config: Any, place: str) -> None:
    """Raise ConfigError if `given`, which overrides values of a transformers configuration, has keys that the configuration lacks.

    Raises:
        ConfigError: a key is unknown to the configuration or to its part.
    """
    _reject((key for key in given if not hasattr(config, key)), _declared_keys(type(config)), config, place)
    for key, value, part in _parts(given, config):
        check_changed(value, part, f"{place}.{key}")


def _parts(given: Mapping[str, Any], config: Any) -> Iterator[tuple[str, Mapping[str, Any], Any]]:
    from transformers import PreTrainedConfig

    for key, value in given.items():
        part = getattr(config, key, None)
        if isinstance(value, Mapping) and isinstance(part, PreTrainedConfig):
            yield key, value, part


def _declared_keys(kind: Any) -> set[str]:
    named = {name for one in kind.__mro__ if one is not object for name in inspect.signature(one.__init__).parameters}
    return (named | set(kind.attribute_map)) - {"self", "args", "kwargs"}


def _read(kind: Any) -> set[Any]:
    """Return all constants in the code of a class's constructors. These constants include the keys that the constructors read from `**kwargs`.

    Constructors use `**kwargs` to accept the names that keys had in older versions.
    """
    from transformers import PreTrainedConfig

    # Leave out transformers' base class, whose code mentions keys that it does not read.
    own = (one for one in kind.__mro__ if one is not PreTrainedConfig)
    functions = [vars(one).get(name) for one in own for name in ("__init__", "__post_init__")]
    return {constant for function in functions if inspect.isfunction(function) for constant in function.__code__.co_consts}


def _reject(keys: Iterable[str], known: set[str], config: Any, place: str) -> None:
    for key in keys:
        raise ConfigError(f"{place}: a configuration of {config.model_type} has no key {key!r}{did_you_mean(key, sorted(known))}")
