"""The recipes that come with callsheet, by name. Needs the standard library alone."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from callsheet.errors import ConfigError, did_you_mean

RECIPES = {
    "pretrain": "callsheet.recipes.pretrain.Pretrain",
    "finetune": "callsheet.recipes.finetune.Finetune",
    "finetune_vlm": "callsheet.recipes.finetune_vlm.FinetuneVLM",
    "classify": "callsheet.recipes.classify.Classify",
    "distill": "callsheet.recipes.distill.Distill",
}
"""The recipes by name."""


def recipe_path(recipe: str, *, is_shipped: bool = False) -> Path:
    """Return the file that `recipe` names: itself, or a shipped one. `is_shipped` looks for a shipped one alone.

    Raises:
        ConfigError: there is none.
    """
    path = Path(recipe)
    if path.is_file() and not is_shipped:
        return path
    shipped = (
        Path(str(resources.files("callsheet"))) / "recipes" / f"{recipe}.yaml"
    )  # importing the package `recipes` needs torch
    if recipe in RECIPES and shipped.is_file():
        return shipped
    run = next((folder for folder in (Path("runs", recipe), path) if (folder / "config.yaml").is_file()), None)
    if run is not None:
        raise ConfigError(f"{recipe!r} is a run, not a recipe; callsheet train {run / 'config.yaml'} goes on with it")
    raise ConfigError(
        f"there is no recipe {recipe!r}{did_you_mean(recipe, RECIPES)} (a YAML file, or one of {', '.join(RECIPES)})"
    )
