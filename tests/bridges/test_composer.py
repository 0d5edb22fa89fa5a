"""The bridge to Composer: runs the tests with the real Composer in a separate venv, and tests what does not need Composer."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from callsheet import Trainer
from callsheet.bridges.composer import EVENT_MAP, NOT_FIRED, guest
from callsheet.bridges.composer.names import Callback, Event
from callsheet.core.lifecycle import EVENTS
from callsheet.errors import NotSupported, RegistrationError

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-composer" / ("Scripts" if sys.platform == "win32" else "bin") / "python"

torch.set_num_threads(1)


@pytest.mark.timeout(600)
@pytest.mark.skipif(not PYTHON.exists(), reason="no .venv-composer: python tools/composer_venv.py makes it")
def test_with_the_real_composer() -> None:
    """Run `composer_in_its_own_venv.py`, and the tests of the matrix and of test_alone.py that cover Composer."""
    files = ["tests/bridges/composer_in_its_own_venv.py", "tests/bridges/test_matrix.py", "tests/bridges/test_alone.py"]
    which = [] if os.environ.get("CALLSHEET_MATRIX") else ["-m", "not slow"]
    ran = subprocess.run(
        [
            PYTHON,
            "-m",
            "pytest",
            "-o",
            "addopts=--strict-markers",
            "-p",
            "no:xdist",
            "-p",
            "no:cacheprovider",
            *files,
            "-k",
            "composer",
            *which,
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-20_000:] + ran.stderr[-5_000:]
    assert re.search(r"\d+ passed", ran.stdout), ran.stdout


def test_the_map_names_existing_events() -> None:
    assert set(EVENT_MAP) <= set(EVENTS)
    assert set(NOT_FIRED) <= set(EVENTS)
    assert {theirs for several in EVENT_MAP.values() for theirs in several} == set(Event)


def test_a_guest_needs_no_base_class(tmp_path: Path) -> None:
    class WithoutBaseClass:
        def __init__(self) -> None:
            self.recorded: list[str] = []

        def epoch_end(self, state: object, logger: object) -> None:
            self.recorded.append("epoch_end")

        def close(self, state: object, logger: object) -> None:
            self.recorded.append("close")

    duck = WithoutBaseClass()
    model = nn.Linear(2, 1)
    data = [(torch.randn(4, 2), torch.randn(4, 1))] * 3
    with Trainer(
        model, nn.functional.mse_loss, data, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), callbacks=[guest(duck)],
        runs_folder=tmp_path,
    ) as trainer:  # fmt: skip
        trainer.fit()
    assert duck.recorded == ["epoch_end", "close"]


def test_objects_that_are_not_callbacks_are_rejected() -> None:
    with pytest.raises(RegistrationError, match="not a callback with one of the methods of Composer's"):
        guest(object())
    with pytest.raises(RegistrationError, match="give an instance"):
        guest(Callback)


def test_a_guest_listens_only_to_the_hooks_that_it_overrides() -> None:
    class Listens(Callback):
        def before_loss(self, state: object, logger: object) -> None: ...

    callback = guest(Listens())
    assert "on_loss_start" in vars(callback)
    assert "on_loss_end" not in vars(callback)


def test_an_error_names_the_attribute_that_a_guest_may_not_set(tmp_path: Path) -> None:
    class Writes(Callback):
        def fit_start(self, state: object, logger: object) -> None:
            state.model = None  # type: ignore[attr-defined]

    model = nn.Linear(2, 1)
    trainer = Trainer(
        model, nn.functional.mse_loss, [(torch.randn(4, 2), torch.randn(4, 1))],
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1), callbacks=[guest(Writes())], runs_folder=tmp_path,
    )  # fmt: skip
    with pytest.raises(NotSupported, match="may not write 'model'"):
        trainer.fit()
