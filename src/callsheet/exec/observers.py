"""The callbacks that observe a script: the default ones, or those of the file that `--callbacks` names."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from callsheet import callbacks, loggers
from callsheet.core.callback import Callback
from callsheet.core.optional import needed_by
from callsheet.core.spec import CallbackSpec
from callsheet.errors import CallsheetError, ConfigError, did_you_mean

if TYPE_CHECKING:
    from callsheet.exec.log_pace import LogPace

CALLBACKS_VARIABLE = "CALLSHEET_CALLBACKS"
"""The environment variable that may name the file of callbacks. Only `callsheet exec` reads it."""

Observers = Callable[["LogPace"], list[Callback]]
"""A function that makes the callbacks of one run, from the run's log interval. A script with several trainers has several runs."""


def observers_of(file: str | os.PathLike[str] | None) -> Observers:
    """Return the function that makes a run's callbacks: those that the file lists, or the default ones if there is no file.

    A `JSONLLogger` is added if the file has none, because the report needs its files. A callback's errors are isolated (they do not
    end the run), unless the callback calls collectives or has an `on_error` of its own.

    Raises:
        ConfigError: the file cannot be read, or a callback in it cannot be made; the message names the file and the place.
    """
    if file is None:
        return lambda pace: _isolate(_default(pace))
    path, specs = Path(file), _specs(Path(file))

    def make() -> list[Callback]:
        from callsheet.loggers import JSONLLogger

        made = [_build_callback(path, place, spec) for place, spec in enumerate(specs)]
        return _isolate(made if any(isinstance(each, JSONLLogger) for each in made) else [*made, JSONLLogger()])

    make()  # build the observers once now, so that mistakes are reported before the script runs
    return lambda pace: make()


def _isolate(made: list[Callback]) -> list[Callback]:
    for each in made:
        if each.on_error is None and not each.collective:
            each.on_error = "isolate"
    return made


def _default(pace: LogPace) -> list[Callback]:
    from callsheet.exec.default_observers import default_observers  # imported only here, because it needs torch

    return default_observers(pace)


def _specs(path: Path) -> list[Mapping[str, Any]]:
    with needed_by("a file of callbacks"):
        import yaml
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"the file of callbacks {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"the file of callbacks {path} is not YAML: {error}") from None
    if isinstance(content, Mapping):
        content = [*(content.get("callbacks") or []), *(content.get("loggers") or [])]
    if not isinstance(content, list) or not all(isinstance(each, (Mapping, str)) for each in content):
        raise ConfigError(
            f"the file of callbacks {path}: give a list of callbacks, such as `- class_path: SpeedMonitor` with its `init_args`"
        )
    return [{"class_path": each} if isinstance(each, str) else each for each in content]


def _build_callback(path: Path, place: int, spec: Mapping[str, Any]) -> Callback:
    try:
        name = str(spec.get("class_path") or "")
        if "." not in name:
            spec = {**spec, "class_path": _full_path(name)}
        return CallbackSpec.from_dict(spec).build()
    except (CallsheetError, TypeError, ValueError) as error:
        raise ConfigError(f"the file of callbacks {path}: entry {place + 1}: {error}") from None


def _full_path(name: str) -> str:
    """Return the import path of a built-in callback or logger that is given by its bare name."""
    for package in (callbacks, loggers):
        if name in package.__all__:
            return f"{package.__name__}.{name}"
    known = [*callbacks.__all__, *loggers.__all__]
    raise ConfigError(f"there is no built-in callback {name!r}{did_you_mean(name, known)}; write module.Class for your own")
