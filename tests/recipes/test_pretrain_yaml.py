"""The recipe that the demo trains uses many built-ins, and all its class paths exist."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import resources
from typing import Any

import pytest
import yaml

from callsheet import Callback, callbacks, loggers
from callsheet.core.spec import import_path

RECIPE: dict[str, Any] = yaml.safe_load(resources.files("callsheet.recipes").joinpath("pretrain.yaml").read_text("utf-8"))


def class_paths(tree: Any) -> Iterator[str]:
    """Return all values that the recipe creates, at any depth."""
    if isinstance(tree, dict):
        if "class_path" in tree:
            yield tree["class_path"]
        for value in tree.values():
            yield from class_paths(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from class_paths(value)


def test_the_recipe_uses_at_least_ten_built_in_callbacks() -> None:
    used = {path.rpartition(".")[2] for path in class_paths(RECIPE["callbacks"]) if path.startswith("callsheet.callbacks.")}
    assert used <= set(callbacks.__all__)
    assert len(used) >= 10


def test_the_recipe_writes_the_file_from_which_the_report_is_made() -> None:
    used = {path.rpartition(".")[2] for path in class_paths(RECIPE["loggers"])}
    assert "JSONLLogger" in used
    assert used <= set(loggers.__all__)


@pytest.mark.parametrize("path", sorted(set(class_paths(RECIPE))))
def test_each_class_path_can_be_imported(path: str) -> None:
    assert callable(import_path(path))


@pytest.mark.parametrize("path", sorted(set(class_paths([RECIPE["callbacks"], RECIPE["loggers"]]))))
def test_each_callback_and_logger_is_a_callback_class(path: str) -> None:
    assert issubclass(import_path(path), Callback)
