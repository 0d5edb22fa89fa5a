"""A recipe as something that `launch` can send: a function, plain arguments, and callbacks.

Recipes and the command line stand on higher floors than this one, so they are imported when a recipe is launched, and not before.
"""

from __future__ import annotations

import inspect
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from callsheet.callback import Callback
from callsheet.errors import ConfigError
from callsheet.manager import CallbackManager

Job = tuple[Callable[..., Any], tuple[Any, ...], list[Callback]]
"""The function, its arguments, and the callbacks that it gets."""

_OF_EVERY_RECIPE = ("config", "callbacks", "loggers", "resolved")


@runtime_checkable
class Launchable(Protocol):
    """What `launch` knows of a `callsheet.recipes.Recipe`."""

    config: Any
    callbacks: CallbackManager
    resolved: str

    def setup(self) -> None:
        """Make everything."""

    def run(self) -> dict[str, float]:
        """Train and evaluate; returns the results."""
        ...


def job_of(recipe: str | os.PathLike[str] | Launchable, overrides: Sequence[str], callbacks: Iterable[Callback]) -> Job:
    """What the ranks are to call for a recipe file, or a recipe made in Python.

    Raises:
        ConfigError: no such recipe, a value that does not fit, or a recipe that has begun already.
    """
    if isinstance(recipe, (str, os.PathLike)):
        from callsheet.commands.recipe import prepared

        what = prepared(os.fspath(recipe), overrides, command="launch")
        return run_resolved, (what.resolved, os.fspath(recipe)), list(callbacks)
    if overrides:
        raise ConfigError("overrides: they go over a recipe's file; set the values in the recipe's config")
    if hasattr(recipe, "trainer"):
        raise ConfigError(f"this {type(recipe).__name__} is set up already, in this process; launch() one that is not")
    if recipe.resolved:
        return run_resolved, (recipe.resolved, type(recipe).__name__), list(callbacks)
    arguments = {name: getattr(recipe, name) for name in _own_arguments(type(recipe))}
    return run_made, (type(recipe), recipe.config, arguments), [*recipe.callbacks.callbacks, *callbacks]


def run_resolved(resolved: str, title: str, callbacks: list[Callback]) -> dict[str, float]:
    """On a rank: make the recipe from its resolved configuration, whatever this process's environment says, and run it."""
    from callsheet.commands.recipe import values_of

    with tempfile.TemporaryDirectory(prefix="callsheet-recipe-") as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(resolved, encoding="utf-8")
        job = values_of(path, command="launch", variables={}, title=title).made().job
    job.callbacks.add(callbacks)
    return _run(job)


def run_made(kind: Callable[..., Any], config: Any, arguments: dict[str, Any], callbacks: list[Callback]) -> dict[str, float]:
    """On a rank: make the recipe anew and run it."""
    return _run(kind(config, callbacks, **arguments))


def _run(job: Any) -> dict[str, float]:
    job.setup()
    return dict(job.run())


def _own_arguments(kind: type) -> list[str]:
    """The constructor's arguments beyond those of every recipe; each stands in an attribute of its name."""
    return [name for name in inspect.signature(kind).parameters if name not in _OF_EVERY_RECIPE]
