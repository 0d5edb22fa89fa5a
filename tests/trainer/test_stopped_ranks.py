"""A rank that is suspended with SIGSTOP keeps its connections open, so every wait of the other ranks needs a timeout."""

from __future__ import annotations

import os
import signal
import socket
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

from callsheet import Callback, Context, Trainer, attach
from callsheet.callbacks import CheckpointSaver
from callsheet.core.ranks import read_ranks
from callsheet.errors import DistributedError
from callsheet.recipes.existing_run import of_rank_zero
from callsheet.run.store import attempt_store
from callsheet.testing.ranks import RankProcesses

from .restarts import free_port

pytestmark = pytest.mark.test_all


TIMEOUT = 4.0
MARGIN = 4.0
"""Seconds that a busy machine may take besides."""


def stop_here(folder: Path) -> None:
    (folder / "stopped").write_text(str(time.time()))
    os.kill(os.getpid(), signal.SIGSTOP)


class Stops(Callback):
    """Suspends the process of one rank at a step's event."""

    def __init__(self, rank: int, event: str, folder: Path) -> None:
        self.rank, self.event, self.folder = rank, event, folder

    def on_event(self, ctx: Context) -> None:
        if (ctx.event, ctx.run.rank, ctx.step) == (self.event, self.rank, 6):
            stop_here(self.folder)


@dataclass(frozen=True)
class Case:
    """The number of ranks, the rank that is suspended, the event, and which process hosts the store."""

    ranks: int
    stopped: int
    keeper: str
    event: str = "on_backward_start"
    in_background: bool = False

    def __str__(self) -> str:
        background = ", saved in the background" if self.in_background else ""
        return f"rank {self.stopped} of {self.ranks} at {self.event}, the store kept by {self.keeper}{background}"


CASES = [
    Case(2, 0, "rank 0"),
    Case(4, 2, "the launcher"),
    *(
        pytest.param(case, marks=pytest.mark.slow)
        for case in (
            Case(4, 0, "rank 0"),
            Case(4, 3, "rank 0"),
            Case(2, 1, "rank 0"),
            Case(2, 0, "the launcher"),
            Case(4, 0, "rank 0", "on_checkpoint_save_start"),
            Case(4, 1, "the launcher", "on_checkpoint_save_start"),
            Case(4, 0, "rank 0", "on_train_step_end", in_background=True),
            Case(2, 1, "the launcher", "on_train_step_end", in_background=True),
        )
    ),
]


def meet_at(port: int) -> None:
    """Let rank 0 host the store, as without a launcher."""
    os.environ["MASTER_PORT"] = str(port)
    del os.environ["TORCHELASTIC_USE_AGENT_STORE"]


def train(case: Case, folder: Path, port: int) -> tuple[str, float]:
    """Train, and return the error and the time at which it was raised."""
    if case.keeper == "rank 0":
        meet_at(port)
    data = [(torch.randn(4, 3), torch.randn(4, 1)) for _ in range(100)]
    try:
        with Trainer(
            nn.Linear(3, 1),
            nn.functional.mse_loss,
            data,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            callbacks=[CheckpointSaver(save_interval="2ba", keep=2), Stops(case.stopped, case.event, folder)],
            runs_folder=folder,
            run_name="run",
            save_in_background=case.in_background,
            timeout_seconds=TIMEOUT,
        ) as trainer:
            trainer.fit()
    except DistributedError as error:
        return str(error), time.time()
    return "", time.time()


def survivors(case_ranks: int, stopped: int, ranks: RankProcesses, folder: Path) -> tuple[list[str], float, float]:
    """Return the errors of the other ranks, the seconds until the last one was raised, and until its process had ended."""
    others = [rank for rank in range(case_ranks) if rank != stopped]
    for rank in others:
        ranks.processes[rank].join(60)
    ended = time.time()
    ends = [end for end in ranks.wait(1.0) if end.rank in others]
    assert not any(end.error for end in ends), "\n".join(end.error for end in ends)
    assert [end.exitcode for end in ends] == [0] * len(others)
    stopped_at = float((folder / "stopped").read_text())
    return [end.value[0] for end in ends], max(end.value[1] for end in ends) - stopped_at, ended - stopped_at


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_other_ranks_end_in_time_and_name_the_suspended_one(case: Case, tmp_path: Path) -> None:
    with RankProcesses(train, case.ranks, case, tmp_path, free_port()) as ranks:
        messages, seconds, ended = survivors(case.ranks, case.stopped, ranks, tmp_path)
    print(f"{case}: {seconds:.1f} s, process ended after {ended:.1f} s; {messages[0][:120]}")
    expected = (
        f"rank {case.stopped} on machine {socket.gethostname()} did not answer within {TIMEOUT:g} s at step 6: dead or suspended"
    )
    assert [message[: len(expected)] for message in messages] == [expected] * (case.ranks - 1)
    assert seconds < TIMEOUT + MARGIN
    assert ended < TIMEOUT + MARGIN + 2.0


def attached(folder: Path, port: int) -> tuple[str, float]:
    """Train in a hand-written loop, whose ranks communicate only through callsheet's agreements."""
    meet_at(port)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stops = Stops(0, "on_train_step_end", folder)
    try:
        with attach(model=model, optimizer=optimizer, callbacks=[stops], runs_folder=folder, timeout_seconds=TIMEOUT) as run:
            for _ in run.epochs(1):
                for inputs in run.steps([torch.randn(4, 3)] * 2000):
                    model(inputs).sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
    except DistributedError as error:
        return str(error), time.time()
    return "", time.time()


def test_the_ranks_of_a_hand_written_loop_end_in_time_and_name_the_suspended_one(tmp_path: Path) -> None:
    with RankProcesses(attached, 2, tmp_path, free_port()) as ranks:
        (message,), seconds, _ = survivors(2, 0, ranks, tmp_path)
    assert f"rank 0 on machine {socket.gethostname()} did not answer within {TIMEOUT:g} s at step " in message
    assert seconds < TIMEOUT + MARGIN


# --- before process groups exist ---


def meet(stopped: int, where: str, folder: Path, port: int) -> tuple[str, float]:
    meet_at(port)
    ranks = read_ranks()
    try:
        if where == "after":  # the ranks have met; rank 0 decides next
            attempt_store(ranks, TIMEOUT)
        if ranks.rank == stopped:
            stop_here(folder)
        of_rank_zero(ranks, lambda: stop_here(folder) if where == "deciding" and ranks.rank == 0 else 1, timeout=TIMEOUT)
    except DistributedError as error:
        return str(error), time.time()
    return "", time.time()


@pytest.mark.parametrize(
    ("stopped", "where", "expected"),
    [
        (1, "before", "rank 1 of 3 did not join the others within 4 s: not started, dead or suspended"),
        (0, "deciding", "rank 0"),
    ],
)
def test_ranks_that_wait_for_a_rank_to_join_time_out(stopped: int, where: str, expected: str, tmp_path: Path) -> None:
    with RankProcesses(meet, 3, -1 if where == "deciding" else stopped, where, tmp_path, free_port()) as ranks:
        messages, seconds, _ = survivors(3, stopped, ranks, tmp_path)
    assert all(expected in message for message in messages), messages
    assert seconds < TIMEOUT + MARGIN
