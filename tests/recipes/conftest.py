"""What several tests of recipes look at."""

from __future__ import annotations

import pytest

from callsheet.recipes import Pretrain
from callsheet.testing import Recorder

from .tiny import tiny_pretrain


@pytest.fixture(scope="session")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Pretrain, Recorder]:
    """The recipe with a recorder, run to its end."""
    recorder = Recorder()
    recipe = Pretrain(tiny_pretrain(tmp_path_factory.mktemp("pretrained")), callbacks=[recorder])
    recipe.setup()
    recipe.run()
    return recipe, recorder
