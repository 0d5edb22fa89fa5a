"""Decides what happens if the folder for a new run already contains a run. Rank 0 decides for all ranks."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from callsheet.checkpoint import find_checkpoints
from callsheet.core.ranks import Ranks
from callsheet.errors import ConfigError, DistributedError
from callsheet.recipes.yaml_file import read_yaml
from callsheet.run.resumption import AUTO
from callsheet.run.run_marker import MARKER, is_marked
from callsheet.run.store import attempt_store, keeper_of_store, within

logger = logging.getLogger("callsheet")

_MAX_SHOWN_VALUES, _MAX_VALUE_CHARACTERS = 4, 60
"""The maximum number of values that a message lists, and the maximum number of characters of each value."""

NEW = "new"
"""The value of `resume` with which the folder of an earlier run is renamed, and a new run starts."""

NEW_RUN_HINT = "resume='new' sets the run aside and starts a new one; another run_name starts one beside it"
"""How a program starts a new run, for messages."""


def of_rank_zero(ranks: Ranks, decide: Callable[[], Any], *, timeout: float) -> Any:
    """Call `decide` on rank 0, and return its result on all ranks. The result must be plain data.

    This works before the Trainer has made a process group.

    Raises:
        ConfigError: raised on all ranks if `decide()` raised it on rank 0.
        DistributedError: rank 0 did not decide within `timeout` seconds.
    """
    if ranks.world_size == 1:
        return decide()
    store = attempt_store(ranks, timeout)
    if ranks.rank != 0:
        decided = _receive(store, timeout)
        if "rejected" in decided:
            raise ConfigError(decided["rejected"])
        return decided["value"]
    try:
        value = decide()
    except Exception as error:  # send the error to the other ranks, which wait for the decision
        _send(store, {"rejected": str(error)}, ranks.world_size, timeout)
        raise
    _send(store, {"value": value}, ranks.world_size, timeout)
    return value


def _receive(store: Any, timeout: float) -> Any:
    deadline = time.monotonic() + timeout

    def receive() -> Any:
        while not store.check(["decided"]):
            if time.monotonic() > deadline:
                raise TimeoutError
            time.sleep(0.01)
        decided = json.loads(store.get("decided"))
        store.add("received", 1)
        return decided

    try:
        return within(timeout + 1.0, receive)
    except TimeoutError:
        raise DistributedError(
            f"rank 0 did not decide within {timeout:g} s how the run begins: it is dead, stopped or still busy"
        ) from None
    except RuntimeError as error:
        raise DistributedError(
            f"{keeper_of_store()}, which hosts the store of the ranks' rendezvous, has ended: {error}"
        ) from error


def _send(store: Any, decided: Mapping[str, Any], world_size: int, timeout: float) -> None:
    """Send rank 0's decision to the other ranks, and wait until all have received it.

    Without a launcher, the store with the decision ends with this process, so the process waits until all have read it.
    """
    deadline = time.monotonic() + timeout

    def send() -> None:
        store.set("decided", json.dumps(decided))
        while store.add("received", 0) < world_size - 1 and time.monotonic() < deadline:
            time.sleep(0.01)

    try:
        within(timeout + 1.0, send)
    except TimeoutError:
        raise DistributedError(
            f"{keeper_of_store()}, which hosts the store of the ranks' rendezvous, did not answer within {timeout:g} s"
        ) from None


def resumable(folder: Path, resume: str) -> str | None:
    """Return what to pass to the Trainer as `resume`; None starts a new run.

    If the result is None, the caller must rename `folder`, if it exists, before the new run.
    """
    if resume == NEW:
        return None
    if resume == AUTO and not find_checkpoints(folder / "checkpoints").checkpoints:
        return None  # the run has no complete checkpoint to resume from
    return resume


def reject_another_job(
    path: Path,
    resolved: str,
    may_change: Collection[str],
    hint: str = NEW_RUN_HINT,
    names: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Raise ConfigError if the run would be resumed with another model, other data or another optimizer.

    Args:
        hint: says how to start a new run.
        names: the names of keys in the user's program, where they are others (see `_translate_key`).

    Raises:
        ConfigError: the configuration at `path` cannot be read, or differs from `resolved` in a key that is not in `may_change`.
    """
    if not resolved or not path.exists():
        return
    before, now = with_current_names(_settings_in(path, hint)), yaml.safe_load(resolved)
    changed = sorted(key for key in now if key not in may_change and now[key] != before.get(key))
    if changed:
        values = [each for key in changed for each in _differences(key, before.get(key), now[key], names)]
        shown = "; ".join(values[:_MAX_SHOWN_VALUES]) + (
            f"; and {len(values) - _MAX_SHOWN_VALUES} more" if len(values) > _MAX_SHOWN_VALUES else ""
        )
        raise ConfigError(
            f"{path.parent} holds a run with another {', '.join(_translate_key(key, names) for key in changed)} ({shown}). Give the run's own "
            f"values to resume it; {hint}"
        )


def _settings_in(path: Path, hint: str) -> Mapping[str, Any]:
    """Return the settings with which a run was trained, from its configuration file."""
    way_out = (
        "the file holds the values that the run was trained with: restore it, or delete it to resume the run without comparing them; "
        + hint
    )
    try:
        settings = read_yaml(path)
    except ConfigError as error:
        raise ConfigError(f"{error}; {way_out}") from None
    if not isinstance(settings, Mapping):
        raise ConfigError(f"{path}: {_short(settings)} is not a mapping of keys and values; {way_out}")
    return settings


def with_current_names(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's settings, with the keys and values of callsheet 0.1.0 and earlier replaced by the current ones."""
    current = {("gradient_accumulation_steps" if key == "accumulate" else key): value for key, value in settings.items()}
    if current.get("too_long") == "refuse":
        current["too_long"] = "reject"
    return current


def _translate_key(key: str, names: Mapping[str, str]) -> str:
    """Return the name of a key in the user's program.

    `names` has the names that differ from the keys. A name of a key also applies to the keys inside it: with `{"lora": "peft"}`, the
    name of `lora.alpha` is `peft.alpha`.
    """
    outer, inner = key, ""
    while outer and outer not in names:
        outer, _, last = outer.rpartition(".")
        inner = f".{last}{inner}"
    return f"{names[outer]}{inner}" if outer else key


def _differences(key: str, before: Any, now: Any, names: Mapping[str, str]) -> list[str]:
    """Return the differences of two configurations as texts such as `optimizer.lr: 0.002 in the run, 0.001 now`."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        parts = [part for part in dict.fromkeys([*before, *now]) if before.get(part) != now.get(part)]
        inside = [(key if part in ("init_args", "class_path") else f"{key}.{part}", part) for part in parts]
        return [each for name, part in inside for each in _differences(name, before.get(part), now.get(part), names)]
    return [f"{_translate_key(key, names)}: {_short(before)} in the run, {_short(now)} now"]


def _short(value: Any) -> str:
    text = "nothing" if value is None else str(value)
    return text if len(text) <= _MAX_VALUE_CHARACTERS else f"{text[:_MAX_VALUE_CHARACTERS]}..."


def set_aside(folder: Path) -> Path | None:
    """Rename a run's folder to the first free `<name>.<number>`, so that a new run can use its name. Return the new path.

    Return None if the folder contains neither a run nor anything that was trained for one, such as a teacher. Then the folder
    keeps its name.
    """
    if not is_marked(folder) and not find_checkpoints(folder / "checkpoints").checkpoints and not any(folder.glob(f"*/{MARKER}")):
        return None
    number = 1
    while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    folder.rename(aside)
    logger.info("the run in %s is now %s", folder, aside)
    return aside
