"""Reads the settings of a run as a flat mapping, and finds the settings that differ between runs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from callsheet.report.run_folder import RunFolder
from callsheet.run.reasons import is_secret, without_secrets

_RUN_LOCATION_SETTINGS = ("run_name", "runs_folder", "checkpoints_folder", "resume")
"""Settings that name the run or its folder. They always differ between two runs, so they are not compared."""
_MAX_DEPTH = 20
_MAX_VALUE_CHARACTERS = 300  # longer values are truncated to this many characters

GROUPS = ("settings", "callbacks", "packages", "code", "hardware")
"""The groups of settings, in the order in which they are shown."""


def settings(run: RunFolder) -> dict[str, dict[str, str]]:
    """Return the settings with which the run was started. Each of the groups in `GROUPS` is a dict from dotted name to text.

    Values that look like credentials are masked, because a recipe's `config.yaml` contains all values as the user gave them.
    """
    recorded = {} if run.config else dict(run.settings)  # `config` of a recipe already contains these settings
    given = {**run.hyperparameters, **run.config}
    listed = [
        source.pop(name)
        for source in (given, recorded)
        for name in ("callbacks", "loggers")
        if isinstance(source.get(name), list)
    ]
    # Recorded values were read from the objects that the run used, such as the optimizer.
    # Recorded values replace the values that the user has stated, because stated values are less reliable.
    values = {**dict(_flat(given)), **{key: value for key, value in _flat(recorded) if value}}
    named = {key: value for key, value in values.items() if key.split(".")[-1] not in _RUN_LOCATION_SETTINGS}
    environment = run.environment
    git, hardware = _mapping(environment.get("git")), _mapping(environment.get("hardware"))
    packages = _mapping(environment.get("packages")) or _mapping(run.start_event().get("versions"))
    start = run.start_event()
    return {
        "settings": named,
        "callbacks": {key: value for specs in listed for key, value in _of_classes(specs)},
        "packages": {str(name): _text(version) for name, version in {"python": environment.get("python"), **packages}.items()},
        "code": {
            "commit": _text(git.get("commit")),
            "branch": _text(git.get("branch")),
            "uncommitted changes": _text(git.get("diff")),
            "command": " ".join(map(str, environment.get("command") or [])),
        },
        "hardware": {
            "device": _text(start.get("device")),
            "ranks": _text(start.get("world_size")),
            "host": _text(start.get("host")),
            **dict(_flat(hardware)),
            "platform": _text(environment.get("platform")),
        },
    }


def differences(runs: Sequence[Mapping[str, Mapping[str, str]]]) -> dict[str, dict[str, list[str]]]:
    """Return the settings that differ between the runs: for each group in `GROUPS` that has differences, a dict from a setting's name to its values.

    There is one value for each run. It is empty if the run does not have the setting.

    A run that did not record a group, such as its packages, is left out of the comparison of that group only.

    Args:
        runs: the result of `settings` for each run.
    """
    found: dict[str, dict[str, list[str]]] = {}
    for group in GROUPS:
        names = dict.fromkeys(name for run in runs for name in run[group])
        rows = {name: [run[group].get(name, "") for run in runs] for name in names}
        # A run that recorded settings but no callbacks had no callbacks, so compare its empty list of callbacks too.
        is_recorded = [any(run[group].values()) or (group == "callbacks" and any(run["settings"].values())) for run in runs]
        different = {
            name: values
            for name, values in rows.items()
            if len({value for value, counts in zip(values, is_recorded, strict=True) if counts}) > 1
        }
        if different:
            found[group] = different
    return found


def _of_classes(specs: Sequence[Any]) -> list[tuple[str, str]]:
    """Return callbacks and loggers as settings: `EarlyStopper: yes` for a class, and `EarlyStopper.patience: 3` for an option."""
    found: list[tuple[str, str]] = []
    for spec in specs:
        content = _mapping(spec)
        name = str(content.get("name") or content.get("class_path") or spec).rpartition(".")[2]
        options = _flat(_mapping(content.get("init_args")))
        found += [(name, "yes"), *((f"{name}.{key}", value) for key, value in options)]
    return found


def _flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for name, value in values.items():
        if name == "init_args" and isinstance(value, Mapping) and "class_path" in values:
            found += _flat(value, prefix)  # leave out `init_args`, so that the name reads as on the command line: `optimizer.lr`
        elif isinstance(value, Mapping) and value and prefix.count(".") < _MAX_DEPTH:
            found += _flat(value, f"{prefix}{name}.")
        else:
            found.append((f"{prefix}{name}", _text("..." if value and is_secret(str(name)) else without_secrets(value))))
    return found


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _text(value: Any) -> str:
    if value is None:
        return ""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    if len(text) <= _MAX_VALUE_CHARACTERS:
        return text
    # Truncate a long text. The digest shows whether two texts that begin in the same way are equal.
    digest = hashlib.blake2s(text.encode("utf-8", "surrogatepass"), digest_size=4).hexdigest()
    return f"{text[:_MAX_VALUE_CHARACTERS]} ... ({len(text):,} characters, digest {digest})"
