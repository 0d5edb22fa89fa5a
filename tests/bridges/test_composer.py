"""The bridge to Composer: runs the tests with the real Composer in a separate venv, and tests what does not need Composer."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from callsheet import Callback as OurCallback
from callsheet import Context, Trainer
from callsheet.bridges.composer import NOT_FIRED, guest
from callsheet.bridges.composer.names import COMPOSER_EVENTS, Callback, Event
from callsheet.callbacks import CheckpointSaver
from callsheet.core.lifecycle import EVENTS
from callsheet.errors import NotSupported, RegistrationError
from callsheet.testing import run_ranks
from callsheet.trainer import Task

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
    assert set(COMPOSER_EVENTS) <= set(EVENTS)
    assert set(NOT_FIRED) <= set(EVENTS)
    assert {theirs for several in COMPOSER_EVENTS.values() for theirs in several} == set(Event)


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


class RecordsSamples(Callback):
    def __init__(self) -> None:
        self.in_training: list[tuple[int, int]] = []
        self.at_epoch_ends: list[tuple[int, int]] = []
        self.in_evaluations: list[int] = []
        self.at_evaluation_ends: list[int] = []

    def batch_end(self, state: Any, logger: object) -> None:
        self.in_training.append((int(state.timestamp.sample), int(state.timestamp.sample_in_epoch)))

    def epoch_end(self, state: Any, logger: object) -> None:
        self.at_epoch_ends.append((int(state.timestamp.sample), int(state.timestamp.token)))

    def eval_batch_end(self, state: Any, logger: object) -> None:
        self.in_evaluations.append(int(state.eval_timestamp.sample))

    def eval_end(self, state: Any, logger: object) -> None:
        self.at_evaluation_ends.append(int(state.eval_timestamp.sample))


class TokenTask(Task):
    def forward(self, model: nn.Module, batch: Any) -> Any:
        return model(batch["input_ids"])

    def loss(self, outputs: Any, batch: Any) -> Any:
        return outputs.square().mean()


def count_samples_on_rank(folder: str, shard_data: bool) -> dict[str, list[Any]]:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    records = RecordsSamples()
    # Three batches of two samples with five tokens each: the second rank has no third batch, and gets a filler.
    batches = [{"input_ids": torch.arange(10).reshape(2, 5)} for _ in range(3)]
    own = batches if shard_data else batches[: 2 - rank]
    trainer = Trainer(
        nn.Embedding(10, 4), TokenTask(), own, own, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1), device="cpu",
        runs_folder=folder, max_duration="2ep", parallel="ddp", shard_data=shard_data, callbacks=[guest(records)],
    )  # fmt: skip
    with trainer:
        trainer.fit()
    return vars(records)


def test_a_guest_s_samples_do_not_include_fillers(tmp_path: Path) -> None:
    expected = {
        "in_training": [(4, 4), (6, 6), (10, 4), (12, 6)],
        "at_epoch_ends": [(6, 30), (12, 60)],
        "in_evaluations": [4, 6] * 2,
        "at_evaluation_ends": [6] * 2,
    }
    assert run_ranks(count_samples_on_rank, 2, str(tmp_path), True) == [expected] * 2


def test_a_guest_s_samples_of_presharded_data_are_exact_at_the_end_of_epochs_and_evaluations(tmp_path: Path) -> None:
    expected = {"at_epoch_ends": [(6, 30), (12, 60)], "at_evaluation_ends": [6] * 2}
    records, others = run_ranks(count_samples_on_rank, 2, str(tmp_path), False)
    assert {name: records[name] for name in expected} == expected
    assert records["in_training"] == sorted(records["in_training"])
    # A callback that acts at an interval must act on all ranks, so the estimates count the second rank's filler as a batch.
    assert others == records


def count_samples_after_a_resume(folder: str) -> list[Any]:
    torch.set_num_threads(1)
    recorded: list[Any] = []
    for resume in (False, True):
        records = RecordsSamples()
        batches = [{"input_ids": torch.arange(10).reshape(2, 5)} for _ in range(8)]
        trainer = Trainer(
            nn.Embedding(10, 4), TokenTask(), batches, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            device="cpu", runs_folder=folder, run_name="resumed", max_duration="1ep", parallel="ddp",
            callbacks=[guest(records), CheckpointSaver(save_interval="1ba"), *([] if resume else [StopsAt(2)])],
            resume="auto" if resume else None,
        )  # fmt: skip
        with trainer:
            trainer.fit()
        recorded += [records.in_training, records.at_epoch_ends]
    return recorded


class StopsAt(OurCallback):
    def __init__(self, step: int) -> None:
        self._step = step

    def on_train_step_end(self, ctx: Context) -> None:
        if ctx.step == self._step:
            ctx.control.stop("enough", resumable=True)


def test_a_guest_s_samples_continue_after_a_resume(tmp_path: Path) -> None:
    # With several ranks, a stop acts one step after its request.
    expected = [[(4, 4), (8, 8), (12, 12)], [], [(16, 16)], [(16, 80)]]
    assert run_ranks(count_samples_after_a_resume, 2, str(tmp_path)) == [expected] * 2
