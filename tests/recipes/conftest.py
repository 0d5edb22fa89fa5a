"""Fixtures for several tests of recipes."""

from __future__ import annotations

import pytest

from callsheet.recipes import Pretrain
from callsheet.testing import Recorder

from .tiny import tiny_pretrain


@pytest.fixture(scope="session")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Pretrain, Recorder]:
    """Return a finished pretraining recipe, and the recorder of its events."""
    recorder = Recorder()
    recipe = Pretrain(tiny_pretrain(tmp_path_factory.mktemp("pretrained")), callbacks=[recorder])
    recipe.setup()
    recipe.run()
    return recipe, recorder
