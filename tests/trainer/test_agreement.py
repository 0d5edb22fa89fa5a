"""A request of one rank acts on all ranks at the same step, and errors name the missing rank."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from callsheet import Callback, Context, Trainer
from callsheet.core.control import Control
from callsheet.core.ranks import read_ranks
from callsheet.errors import DistributedError
from callsheet.run.agreement import Agreement
from callsheet.run.process_groups import ProcessGroups
from callsheet.run.signals import SignalWatch
from callsheet.testing.ranks import RankProcesses, run_ranks

HERE = socket.gethostname()


class Rank:
    """An agreement on this rank, with the objects it depends on."""

    def __init__(self, *, timeout: float = 30.0, grace: float = 3.0) -> None:
        ranks = read_ranks()
        self.number = ranks.rank
        self.groups = ProcessGroups(ranks, torch.device("cpu"), timeout)
        self.control = Control(is_shared=ranks.world_size > 1)
        self.signals = SignalWatch(["SIGTERM"], grace=grace)
        self.agreement = Agreement(self.groups, self.control, self.signals)


def error_of(act: Callable[[], Any]) -> str:
    try:
        act()
    except DistributedError as error:
        return str(error)
    return ""


# --- steps ---


def at_unequal_steps() -> tuple[str, str]:
    first, second = Rank(), Rank()
    at_once = error_of(lambda: first.agreement.agree(5 + first.number % 2))

    def steps() -> None:
        for step in range(1, 40):
            second.agreement.look(step)
            if step == 10 and second.number == 1:
                second.agreement.look_in_evaluation(step)
        second.agreement.agree(39)

    return at_once, error_of(steps)


def test_unequal_steps_fail_on_all_ranks_and_are_named() -> None:
    found = run_ranks(at_unequal_steps, 3)
    assert len(set(found)) == 1
    at_once, in_evaluation = found[0]
    assert at_once == (
        "the ranks are not at the same step: rank 0 at 5, rank 1 at 6, rank 2 at 5; do all of them get the same number of batches?"
    )
    assert "rank 0 at 39, rank 1 at 40, rank 2 at 39" in in_evaluation  # rank 1 called look_in_evaluation() once


# --- requests and signals ---


def request_on_one_rank(from_a_thread: bool) -> list[tuple[str, int]]:
    rank = Rank()
    seen: dict[str, int] = {}
    for step in range(1, 300):
        time.sleep(0.004 if rank.number == 0 else 0.001)
        if step == 20 and rank.number == 1:
            if from_a_thread:
                threading.Timer(0.02, rank.control.stop, ["enough"]).start()
            else:
                rank.control.stop("enough")
        if step == 20 and rank.number == 2:
            rank.control.save("now")
            rank.signals.received = signal.SIGTERM
        rank.agreement.look(step)
        for name, is_there in (
            ("stop", rank.control.stop_requested),
            ("save", rank.control.save_requested),
            ("signal", rank.agreement.signal),
        ):
            if is_there:
                seen.setdefault(name, step)
    rank.agreement.agree(299)
    return sorted(seen.items())


@pytest.mark.parametrize("from_a_thread", [False, True])
def test_a_request_of_one_rank_acts_on_all_at_the_same_step(from_a_thread: bool) -> None:
    first, *others = run_ranks(request_on_one_rank, 3, from_a_thread)
    assert all(seen == first for seen in others)
    acted = dict(first)
    assert set(acted) == {"save", "signal", "stop"}
    assert 20 < acted["save"] == acted["signal"] <= acted["stop"]


def request_before_the_last_agreement() -> tuple[str, bool]:
    rank = Rank()
    if rank.number == 1:
        rank.control.stop("at the very end")
    rank.agreement.agree(3)
    request = rank.control.stop_requested
    return (request.why if request else ""), rank.control.pending


def test_the_last_agreement_distributes_pending_requests() -> None:
    assert run_ranks(request_before_the_last_agreement, 2) == [("at the very end", True)] * 2


def test_requests_and_signals_act_immediately_on_a_single_rank() -> None:
    rank = Rank()
    rank.control.stop("now")
    rank.signals.received = signal.SIGTERM
    assert rank.control.stop_requested is not None
    assert rank.agreement.signal is signal.SIGTERM
    assert rank.agreement.next_step == sys.maxsize
    rank.agreement.durable = lambda: 3
    rank.agreement.look(1)
    assert rank.agreement.published == 3


# --- how often ---


def agreement_steps() -> tuple[list[int], list[int]]:
    """Return the steps at which an agreement was due: with 10 ms a step on rank 0, and with 10 ms a step on rank 1."""
    rank = Rank()
    found = []
    for slow in (0, 1):
        due: list[int] = []
        for step in range(1, 100):
            if rank.number == slow:
                time.sleep(0.01)
            if step >= rank.agreement.next_step:
                due.append(step)
            rank.agreement.look(step)
        rank.agreement.agree(99)
        rank.agreement = Agreement(rank.groups, rank.control, rank.signals)
        found.append(due)
    return found[0], found[1]


@pytest.mark.test_all
def test_ranks_agree_every_quarter_second_of_rank_0_s_steps() -> None:
    first, second = run_ranks(agreement_steps, 2)
    assert first == second
    by_slow_rank_zero, _ = first
    gaps = [later - earlier for earlier, later in pairwise(by_slow_rank_zero)]
    assert gaps[0] == 1
    assert max(gaps) <= 26
    assert max(gaps) >= 10  # 25 on an idle machine


def change_of_pace() -> tuple[int, int]:
    """Return the number of steps to the next agreement, before and after `change_pace` announced slower steps."""
    rank = Rank()
    for step in range(1, 5000):
        rank.agreement.look(step)
    before = rank.agreement.next_step - 4999
    rank.agreement.agree(4999)
    for step in range(5000, 9000):
        rank.agreement.look(step)
    rank.agreement.change_pace()
    return before, rank.agreement.next_step - 8999


def test_ranks_agree_at_every_step_after_a_change_of_pace() -> None:
    (before, after), *others = run_ranks(change_of_pace, 2)
    assert before > 1
    assert after == 1
    assert others == [(before, after)]


# --- after a signal ---


def wait_after_a_signal() -> tuple[float, str]:
    rank = Rank(grace=3.0)
    if rank.number == 1:
        time.sleep(6)
        return 0.0, ""
    with rank.signals:
        os.kill(os.getpid(), signal.SIGTERM)
        began = time.monotonic()
        error = error_of(lambda: rank.agreement.agree(1))
        return time.monotonic() - began, error


@pytest.mark.test_all
def test_after_a_signal_a_rank_is_waited_for_no_longer_than_a_third_of_the_grace() -> None:
    (seconds, error), _ = run_ranks(wait_after_a_signal, 2)
    assert 0.9 < seconds < 5
    assert "did not answer in time after a preemption signal" in error


def continue_after_a_signal() -> str:
    """Agree a second time after a pause that is longer than a third of the grace; one rank arrives 0.2 s after the other."""
    rank = Rank(grace=1.5)
    with rank.signals:
        if rank.number == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        rank.agreement.agree(1)
        time.sleep(0.7 if rank.number == 0 else 0.9)
        return error_of(lambda: rank.agreement.agree(2))


def test_the_third_of_the_grace_is_counted_from_the_start_of_the_wait() -> None:
    assert run_ranks(continue_after_a_signal, 2) == ["", ""]


# --- the missing rank ---


def lose_one(how: str) -> str:
    rank = Rank(timeout=8.0)
    rank.groups.sum([1.0])
    if rank.number == 1:
        if how == "raises":
            rank.groups.publish_failure(7, ValueError("no such token"))
        elif how == "raises an error of several lines":
            rank.groups.publish_failure(7, ValueError("\nno such\ntoken"))
        elif how == "is interrupted":
            rank.groups.publish_failure(7, KeyboardInterrupt())
        elif how == "is late":
            time.sleep(10)
        elif how == "is dead":
            os.kill(os.getpid(), signal.SIGKILL)
        rank.groups.close()
        return ""
    rank.groups.at_step = lambda: 8
    return error_of(lambda: rank.groups.sum([1.0])).partition(". On rank ")[0]


def missing(how: str) -> set[str]:
    with RankProcesses(lose_one, 4, how) as ranks:
        return {end.value for end in ranks.wait(60) if end.rank != 1}


@pytest.mark.test_all
@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("raises", f"rank 1 on machine {HERE} failed at step 7: ValueError: no such token"),
        ("raises an error of several lines", f"rank 1 on machine {HERE} failed at step 7: ValueError: no such token"),
        ("is interrupted", f"rank 1 on machine {HERE} failed at step 7: KeyboardInterrupt"),
        (
            "leaves",
            f"rank 1 on machine {HERE} had already ended the run when this rank was at step 8: do all ranks call the same methods?",
        ),
        (
            "is late",
            f"rank 1 on machine {HERE} still runs and does not wait at step 8: stuck, much slower than the others, or at a later step because the ranks make different numbers of steps",
        ),
        ("is dead", f"rank 1 on machine {HERE} did not answer at step 8: dead or suspended"),
    ],
)
def test_only_the_missing_rank_is_named_by_all(how: str, expected: str) -> None:
    assert missing(how) == {expected}


# --- in the Trainer ---


class EvaluatesAtTheEnd(Callback):
    """Requests an evaluation at the end of training, and sends SIGTERM during it."""

    def __init__(self) -> None:
        self.preempted = 0

    def on_train_end(self, ctx: Context) -> None:
        ctx.control.evaluate("to be sure")

    def on_eval_step_start(self, ctx: Context) -> None:
        if not self.preempted:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_preempt(self, ctx: Context) -> None:
        self.preempted += 1


class LogsAtEpochsEnd(Callback):
    """Logs a metric at every epoch's end, on the last rank only."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_epoch_end(self, ctx: Context) -> None:
        if ctx.run.rank == ctx.run.world_size - 1:
            ctx.log({"epoch/seen": ctx.epoch})

    def on_log(self, ctx: Context) -> None:
        if "epoch/seen" in ctx.record.values:
            self.seen.append(ctx.record.values["epoch/seen"])


def trained(folder: Path, *callbacks: Callback, **changes: Any) -> Trainer:
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    data = [(torch.randn(4, 2), torch.randn(4, 1))] * 4
    with Trainer(
        torch.nn.Linear(2, 1),
        torch.nn.functional.mse_loss,
        data,
        data,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        callbacks=callbacks,
        runs_folder=folder,
        run_name="run",
        **changes,
    ) as trainer:
        trainer.fit()
    return trainer


def interrupted_at_the_end(folder: Path) -> tuple[str, int, list[str]]:
    callback = EvaluatesAtTheEnd()
    trainer = trained(folder, callback, eval_interval=None)
    return str(trainer.run.outcome), callback.preempted, [path.name for path in (folder / "run" / "checkpoints").glob("ep*")]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_signal_in_the_last_evaluation_is_a_preemption(tmp_path: Path, ranks: int) -> None:
    for outcome, recorded, checkpoints in run_ranks(interrupted_at_the_end, ranks, tmp_path):
        assert (outcome, recorded, len(checkpoints)) == ("preempted", 1, 1)


def seen_at_epochs_ends(folder: Path) -> list[float]:
    callback = LogsAtEpochsEnd()
    trained(folder, callback, max_duration="2ep", log_interval="1ba", eval_interval=None)
    return callback.seen


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_one_rank_logs_after_the_last_record_is_recorded(tmp_path: Path, ranks: int) -> None:
    assert run_ranks(seen_at_epochs_ends, ranks, tmp_path) == [[1.0, 2.0]] * ranks


def evaluate_on_one_rank() -> str:
    data = [(torch.randn(4, 2), torch.randn(4, 1))] * 4
    try:
        with Trainer(torch.nn.Linear(2, 1), torch.nn.functional.mse_loss, None, data, timeout_seconds=8) as trainer:
            trainer.evaluate()
            if trainer.run.rank == 0:
                trainer.evaluate()
    except DistributedError as error:
        return str(error)
    return ""


def test_a_method_that_one_rank_calls_alone_fails_and_names_the_rank_that_ended() -> None:
    first, other = run_ranks(evaluate_on_one_rank, 2)
    assert f"rank 1 on machine {HERE} had already ended the run" in first
    assert other == ""


class DiesInASave(Callback):
    def on_checkpoint_due(self, ctx: Context) -> None:
        if ctx.step == 2:
            ctx.control.save("to die in it", replicated=True)

    def on_checkpoint_save_start(self, ctx: Context) -> None:
        if ctx.run.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def die_in_a_save(folder: Path, in_background: bool) -> str:
    try:
        trained(folder, DiesInASave(), save_in_background=in_background, timeout_seconds=8)
    except DistributedError as error:
        return str(error)
    return ""


@pytest.mark.test_all
@pytest.mark.parametrize("in_background", [False, True])
def test_a_rank_that_dies_in_a_save_is_named(tmp_path: Path, in_background: bool) -> None:
    with RankProcesses(die_in_a_save, 3, tmp_path, in_background) as ranks:
        messages = {end.rank: end.value for end in ranks.wait(60) if end.rank != 1}
    expected = f"rank 1 on machine {HERE} did not answer at step 2: dead or suspended. On rank "
    assert {rank: message[: len(expected)] for rank, message in messages.items()} == {0: expected, 2: expected}
