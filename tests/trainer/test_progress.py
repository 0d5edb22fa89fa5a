"""The progress bar that the Trainer shows on a terminal."""

from __future__ import annotations

import io
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from callsheet import Background, Callback, CallbackManager, Trainer
from callsheet.bridges.guest_base import Guest
from callsheet.core.ranks import Ranks
from callsheet.loggers import ConsoleLogger, InMemoryLogger, ProgressBarLogger
from callsheet.trainer.arguments import progress_shown


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class MyProgress(Callback):
    pass


class TQDMProgressBar:
    """Has the name of another framework's progress bar."""


class AnyGuest(Guest):
    FRAMEWORK = "another"


@pytest.fixture
def terminal() -> Terminal:
    return Terminal()


def shown(folder: Path, screen: io.StringIO, **options: Any) -> list[Callback]:
    """Return the progress callbacks of a short run whose standard error is `screen`."""
    data = [(torch.ones(2, 2), torch.ones(2, 1))] * 3
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with redirect_stderr(screen):
        with Trainer(model, nn.functional.mse_loss, data, optimizer=optimizer, runs_folder=folder, **options) as trainer:
            trainer.fit()
    return [each for each in trainer.callbacks.callbacks if isinstance(each, ProgressBarLogger)]


def test_on_a_terminal_a_run_shows_its_progress(tmp_path: Path, terminal: Terminal) -> None:
    assert len(shown(tmp_path, terminal)) == 1
    assert "━" in terminal.getvalue()
    assert "step 3" in terminal.getvalue()


def test_without_a_terminal_no_progress_is_shown(tmp_path: Path) -> None:
    assert shown(tmp_path, file := io.StringIO()) == []
    assert file.getvalue() == ""


def test_progress_false_shows_nothing(tmp_path: Path, terminal: Terminal) -> None:
    assert shown(tmp_path, terminal, progress=False) == []
    assert terminal.getvalue() == ""


@pytest.mark.parametrize(
    "own",
    [
        lambda: ProgressBarLogger(bar=False),
        lambda: Background(ProgressBarLogger(bar=False)),
        ConsoleLogger,
        MyProgress,
        lambda: AnyGuest(TQDMProgressBar()),
    ],
)
def test_the_users_own_progress_bar_replaces_the_default_one(tmp_path: Path, terminal: Terminal, own: Any) -> None:
    given = own()
    assert [each for each in shown(tmp_path, terminal, loggers=[given]) if each is not given] == []
    assert "━" not in terminal.getvalue()


def test_a_manager_used_for_several_runs_has_one_progress_bar(tmp_path: Path, terminal: Terminal) -> None:
    manager = CallbackManager([InMemoryLogger()])
    assert len(shown(tmp_path, terminal, callbacks=manager)) == len(shown(tmp_path, terminal, callbacks=manager)) == 1


def test_only_the_first_rank_shows_progress(tmp_path: Path, terminal: Terminal) -> None:
    first, second = (Ranks(rank=rank, world_size=2, local_rank=rank) for rank in (0, 1))
    with redirect_stderr(terminal):
        assert len(progress_shown(True, first, [])) == 1
        assert progress_shown(True, second, []) == []
