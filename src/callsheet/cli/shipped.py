"""The recipes that come with callsheet, by name. This module needs only the standard library."""

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
"""The import path of each recipe's class, by the recipe's name."""


def recipe_path(recipe: str, *, is_shipped: bool = False) -> Path:
    """Return the path of a recipe file. `recipe` is the name of a shipped recipe or, unless `is_shipped` is True, a path.

    Raises:
        ConfigError: there is no such file.
    """
    path = Path(recipe)
    if path.suffix == ".py":
        raise ConfigError(f"{recipe} is a Python script, not a recipe; run a training script with: callsheet exec {recipe}")
    if path.is_file() and not is_shipped:
        return path
    # Find the files without importing the package `recipes`, which needs torch.
    shipped = Path(str(resources.files("callsheet"))) / "recipes" / f"{recipe}.yaml"
    if recipe in RECIPES and shipped.is_file():
        return shipped
    if (run := file_of_run(recipe)) is not None:
        raise ConfigError(f"{recipe!r} is a run, not a recipe; callsheet train {run} resumes it")
    raise ConfigError(
        f"there is no recipe {recipe!r}{did_you_mean(recipe, RECIPES)} (a YAML file, or one of {', '.join(RECIPES)})"
    )


def file_of_run(run: str) -> Path | None:
    """Return the recipe file of a run, given by its folder or its name in `runs/`; None if the run has no such file."""
    files = [folder / "config.yaml" for folder in (Path("runs", run), Path(run))]
    return next((file for file in files if file.is_file()), None)
