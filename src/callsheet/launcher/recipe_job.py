"""Converts a recipe to a function, its arguments and its callbacks, which `launch` can send to the ranks.

Recipes and the command line are higher layers than this module, so they are imported only when a recipe is launched.
"""

from __future__ import annotations

import inspect
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from callsheet.core.callback import Callback
from callsheet.core.manager import CallbackManager
from callsheet.errors import ConfigError

Job = tuple[Callable[..., Any], tuple[Any, ...], list[Callback]]
"""What each rank calls: a function, its arguments, and its callbacks."""

_COMMON_PARAMETERS = ("config", "callbacks", "loggers", "resolved")


@runtime_checkable
class Launchable(Protocol):
    """The methods of a `callsheet.recipes.Recipe` that `launch` uses."""

    config: Any
    callbacks: CallbackManager
    resolved: str

    def setup(self) -> None:
        """Create the trainer and everything it needs."""

    def run(self) -> dict[str, float]:
        """Train and evaluate, and return the results."""
        ...


def job_of(recipe: str | os.PathLike[str] | Launchable, overrides: Sequence[str], callbacks: Iterable[Callback]) -> Job:
    """Return the function, arguments and callbacks with which the ranks run a recipe.

    The recipe is given as a file or name, or as an object that was made in Python.

    Raises:
        ConfigError: there is no such recipe, a value is invalid, or the recipe is set up already.
    """
    if isinstance(recipe, (str, os.PathLike)):
        from callsheet.cli.recipe import prepare_recipe

        what = prepare_recipe(os.fspath(recipe), overrides, command="launch")
        return run_resolved, (what.resolved, os.fspath(recipe)), list(callbacks)
    if overrides:
        raise ConfigError("overrides: they apply to a recipe's file; set the values in the recipe's config")
    if hasattr(recipe, "trainer"):
        raise ConfigError(f"this {type(recipe).__name__} is already set up in this process; launch() one that is not")
    if recipe.resolved:
        return run_resolved, (recipe.resolved, type(recipe).__name__), list(callbacks)
    arguments = {name: getattr(recipe, name) for name in _own_arguments(type(recipe))}
    return run_made, (type(recipe), recipe.config, arguments), [*recipe.callbacks.callbacks, *callbacks]


def run_resolved(resolved: str, title: str, callbacks: list[Callback]) -> dict[str, float]:
    """On a rank, construct a recipe from its resolved configuration (the text of a YAML file), and run it.

    Environment variables do not override the configuration.
    """
    from callsheet.cli.recipe import values_of

    with tempfile.TemporaryDirectory(prefix="callsheet-recipe-") as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(resolved, encoding="utf-8")
        job = values_of(path, command="launch", variables={}, title=title).make().job
    job.callbacks.add(callbacks)
    return _run(job)


def run_made(kind: Callable[..., Any], config: Any, arguments: dict[str, Any], callbacks: list[Callback]) -> dict[str, float]:
    """On a rank, rebuild and run a recipe that the user made in Python in the launching process."""
    return _run(kind(config, callbacks, **arguments))


def _run(job: Any) -> dict[str, float]:
    job.setup()
    return dict(job.run())


def _own_arguments(kind: type) -> list[str]:
    """Return the names of the constructor arguments that this recipe class has in addition to the arguments of all recipes.

    The values are read from the recipe's attributes of the same names.
    """
    return [name for name in inspect.signature(kind).parameters if name not in _COMMON_PARAMETERS]
