"""`callsheet show`: print the call sheet of a recipe (the table of all handlers) and its settings, without running it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from callsheet.cli.named_run import RUNS_FOLDER, nearest
from callsheet.cli.recipe import Prepared, prepare_recipe
from callsheet.cli.shipped import RECIPES, file_of_run
from callsheet.errors import ConfigError, did_you_mean
from callsheet.report.index import is_run

_UNLISTED_KEYS = frozenset({"recipe", "callbacks", "loggers", "config"})
"""Keys that are not listed as settings. Callbacks and loggers are in the call sheet."""


def show(recipe: str, overrides: list[str]) -> str:
    """Return a recipe's or run's settings and call sheet (the table of all handlers) as text. No model is made, and no data is read.

    Raises:
        ConfigError: there is no such recipe or run, or the recipe is invalid.
    """
    if not recipe.endswith(".py") and not Path(recipe).is_file() and recipe not in RECIPES:
        if (run := file_of_run(recipe)) is None:
            if there := next((folder for folder in (RUNS_FOLDER / recipe, Path(recipe)) if is_run(folder)), None):
                raise ConfigError(
                    f"{there} has no config.yaml, so it is not the run of a recipe; callsheet report {recipe} shows its settings"
                )
            raise ConfigError(
                f"there is no recipe or run {recipe!r}{_near(recipe)} (a YAML file; a recipe: {', '.join(RECIPES)}; a run's folder, or its "
                f"name in {RUNS_FOLDER}/)"
            )
        recipe = str(run)
    what = prepare_recipe(recipe, overrides, command="show")
    settings = yaml.safe_load(what.resolved)
    lines = [str(what.job.callbacks.call_sheet()), "", *_describe(what, overrides), ""]
    width = max(map(len, settings))
    lines += [f"  {name:<{width}}  {_short(value)}" for name, value in settings.items() if name not in _UNLISTED_KEYS]
    lines += ["", *_folder(settings), f"Start it: callsheet train {shlex.join([recipe, *overrides])}"]
    return "\n".join(lines)


def _near(name: str) -> str:
    """Return a hint such as `; did you mean 'x'?` with the recipe and the run whose names are similar, or an empty text."""
    recipe, run = did_you_mean(name, RECIPES), nearest(name)
    return f"{recipe.removesuffix('?')}, or the run{run.removeprefix('; did you mean')}" if recipe and run else recipe or run


def _describe(what: Prepared, overrides: list[str]) -> list[str]:
    about = (type(what.job).__doc__ or type(what.job).__name__).partition("\n")[0]
    return [about, f"From {what.path}{', with ' + shlex.join(overrides) if overrides else ''}:"]


def _folder(settings: Mapping[str, Any]) -> list[str]:
    """Return a line with the path of the run's folder, and whether it exists. Return no line if the settings name no folder."""
    if not {"runs_folder", "run_name"} <= settings.keys():
        return []
    folder = Path(str(settings["runs_folder"]), str(settings["run_name"]))
    there = f"has a run already; resume: {settings.get('resume')}" if folder.exists() else "does not exist yet"
    return [f"Run folder: {folder} ({there})"]


def _short(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_short(each)}" for name, each in value.items())
    return "none" if value is None else str(value)
