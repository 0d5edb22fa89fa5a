"""Optional packages: imported when something uses them, with an error that says how to install them."""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import Any

from callsheet.errors import MissingPackage

_EXTRAS = {
    "train": (
        "torch",
        "torchdata",
        "torchmetrics",
        "safetensors",
        "fsspec",
        "rich",
        "jsonargparse",
        "yaml",
        "psutil",
        "numpy",
        "PIL",
        "cloudpickle",
        "jinja2",
    ),
    "hf": ("transformers", "tokenizers", "datasets", "pyarrow", "peft", "huggingface_hub"),
    "digits": ("sklearn",),
    "report": ("plotly", "scipy"),
    "opentelemetry": ("opentelemetry",),
}
"""For each extra of this package, as in `pip install 'callsheet[train]'`, the modules that it installs.

A module that only one class needs is not listed here, because that class passes the name of the extra to `load`.
"""

_INSTALLED_BY = {module: f"'callsheet[{extra}]'" for extra, modules in _EXTRAS.items() for module in modules} | {
    "accelerate": "accelerate",  # this entry and those below are frameworks for which callsheet has a bridge
    "ignite": "pytorch-ignite",
    "keras": "keras",
    "lightning": "lightning",
    "pytorch_lightning": "lightning",
    "torchtnt": "torchtnt",
    "composer": "mosaicml",
    "ultralytics": "ultralytics",
    "axolotl": "axolotl",  # this entry and those below are packages that callsheet's plugins need
    "pydantic": "pydantic",
    "swift": "ms-swift",
}
"""For each optional module, the name to pass to `pip install`."""

_asked_for: ContextVar[str] = ContextVar("asked_for", default="")


def load(module: str, *, extra: str, wanted_by: str) -> Any:
    """Import the module of an optional package, as in `load("wandb", extra="wandb", wanted_by="WandBLogger")`.

    Raises:
        MissingPackage: the package is not installed; the message has the command that installs it. An error that the package
            itself raises is raised unchanged.
    """
    top = module.partition(".")[0]
    drawn = random.getstate()
    try:
        found = importlib.import_module(module)
        if getattr(sys.modules[top], "__file__", None) is not None or not _is_only_a_folder(sys.modules[top]):
            return found
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != top:
            raise  # the package is installed, but another module that it imports is missing
    finally:
        random.setstate(drawn)  # rich, for example, draws random numbers when it is imported, which must not change training
    raise _missing(top, f"'callsheet[{extra}]'", wanted_by)


def need(*modules: str, extra: str, wanted_by: str) -> None:
    """Raise MissingPackage if one of these modules is not installed. The modules are not imported."""
    import importlib.util

    for module in modules:
        if module not in sys.modules and importlib.util.find_spec(module) is None:
            raise _missing(module, f"'callsheet[{extra}]'", wanted_by)


@contextmanager
def needed_by(name: str) -> Iterator[None]:
    """If an optional package cannot be imported within the `with` block, raise MissingPackage with `name` in its message.

    In nested blocks the outermost `name` is used. An import error of a module that callsheet does not use itself is raised
    unchanged.
    """
    name = _asked_for.get() or name
    before = _asked_for.set(name)
    try:
        yield
    except ModuleNotFoundError as error:
        top = (error.name or "").partition(".")[0]
        if top not in _INSTALLED_BY:
            raise
        raise _missing(top, _INSTALLED_BY[top], name) from None
    finally:
        _asked_for.reset(before)


def _missing(module: str, installed_by: str, wanted_by: str) -> MissingPackage:
    return MissingPackage(f"{wanted_by} needs {module}, which is not installed: pip install {installed_by}", name=module)


def _is_only_a_folder(package: ModuleType) -> bool:
    """Return whether the imported `package` is in fact only a folder of this name in the working directory.

    Such a folder may be one in which an experiment tracker stores its files.
    """
    return [Path(path).parent for path in package.__path__] == [Path.cwd()]
