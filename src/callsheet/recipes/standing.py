"""What stands already where a run is to lie, and what becomes of it; decided on rank 0, for all ranks."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import yaml
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # it is there
from torch.distributed.rendezvous import rendezvous

from callsheet.checkpoint import find_checkpoints
from callsheet.distributed import Ranks, initialised_distributed
from callsheet.errors import ConfigError
from callsheet.trainer.checkpoints import AUTO

logger = logging.getLogger("callsheet")

NEW = "new"
"""The value of `resume` that sets an earlier run aside."""

_meetings = count()  # of this process, the same on all ranks


def of_rank_zero(ranks: Ranks, decide: Callable[[], Any], *, timeout: float) -> Any:
    """What `decide()` gives on rank 0, plain data, on all ranks; before there is a Trainer, and its process group.

    Raises:
        ConfigError: on all ranks, where rank 0 could not decide.
    """
    if ranks.world_size == 1:
        return decide()
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = PrefixStore(f"callsheet/recipe/{attempt}/{next(_meetings)}", _store(timeout))
    if ranks.rank != 0:
        decided = json.loads(store.get("decided"))
        store.add("heard", 1)
        if "refused" in decided:
            raise ConfigError(decided["refused"])
        return decided["value"]
    try:
        value = decide()
    except Exception as error:
        _tell(store, {"refused": str(error)}, ranks.world_size, timeout)
        raise
    _tell(store, {"value": value}, ranks.world_size, timeout)
    return value


def _tell(store: Any, decided: Mapping[str, Any], world_size: int, timeout: float) -> None:
    """Say it, and wait until all have heard: where no launcher keeps the store, it is gone with the last word here."""
    store.set("decided", json.dumps(decided))
    deadline = time.monotonic() + timeout
    while store.add("heard", 0) < world_size - 1 and time.monotonic() < deadline:
        time.sleep(0.01)


def _store(timeout: float) -> Any:
    distributed = initialised_distributed()
    if distributed is not None:
        return distributed.distributed_c10d._get_default_store()
    try:
        return next(rendezvous("env://", timeout=timedelta(seconds=timeout)))[0]
    except ValueError as error:  # the environment is half a launcher's
        raise ConfigError(f"the ranks cannot meet: {error}; start the program with torchrun") from error


def resumable(folder: Path, resume: str) -> str | None:
    """What the Trainer is to resume; None where the run begins anew, and what is there has to make room."""
    if resume == NEW:
        return None
    if resume == AUTO and not find_checkpoints(folder / "checkpoints").checkpoints:
        return None  # there is nothing to go on from, or only half a record of it
    return resume


def refuse_another_job(path: Path, resolved: str, may_change: Collection[str]) -> None:
    """Going on with a run means going on with its model, data and optimizer: half of one job and half of another is neither.

    Raises:
        ConfigError: the configuration at `path` differs from `resolved` in a key that is not among those that may change.
    """
    if not resolved or not path.exists():
        return
    before, now = yaml.safe_load(path.read_text()), yaml.safe_load(resolved)
    changed = sorted(key for key in now if key not in may_change and now[key] != before.get(key))
    if changed:
        raise ConfigError(
            f"{path.parent} holds a run with another {', '.join(changed)}; --resume new sets it aside and starts anew, "
            "--run_name starts beside it"
        )


def set_aside(folder: Path) -> Path | None:
    """Rename a run's folder to the first free `<name>.<number>`, so that a new run can have its name; None where there is none."""
    if not folder.exists():
        return None
    number = 1
    while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    folder.rename(aside)
    logger.info("the run in %s is now %s", folder, aside)
    return aside
