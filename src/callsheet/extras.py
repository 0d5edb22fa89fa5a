"""Optional packages: imported when something uses them, with an error that says how to get them."""

from __future__ import annotations

import importlib
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from callsheet.errors import MissingPackage


def load(module: str, *, extra: str, wanted_by: str) -> Any:
    """The module of an optional package, such as `load("wandb", extra="wandb", wanted_by="WandBLogger")`.

    Raises:
        MissingPackage: it is not installed; the message has the command that installs it. An error inside the package comes out as it is.
    """
    top = module.partition(".")[0]
    drawn = random.getstate()
    try:
        found = importlib.import_module(module)
        if getattr(sys.modules[top], "__file__", None) is not None or not _is_a_mere_folder(sys.modules[top]):
            return found
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != top:
            raise  # the package is there, and misses one of its own
    finally:
        random.setstate(drawn)  # some packages draw from it as they are imported, rich for one: training must not notice
    raise MissingPackage(f"{wanted_by} needs {top}, which is not installed: pip install 'callsheet[{extra}]'")


def _is_a_mere_folder(package: ModuleType) -> bool:
    """Nothing but a folder of that name where the program runs, such as the one that a tracker writes to."""
    return [Path(path).parent for path in package.__path__] == [Path.cwd()]
