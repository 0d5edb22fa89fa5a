"""Usages from the pages of these systems on distributed training, written for callsheet: one test per usage, in the order of the page. See `usages`."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch.distributed as dist

from callsheet import (
    Callback,
    Context,
    launch,
    rank_zero_only,
)
from callsheet.testing import Recorder

from .usages import Threshold, train

pytestmark = pytest.mark.test_all


class CountsCallsOnThisRank(Callback):
    """Uses each way to run code on some ranks only, and counts how often it ran."""

    def __init__(self) -> None:
        self.recorded: dict[str, int] = {}
        self.records: list[dict[str, float]] = []

    def _count(self, way: str) -> None:
        self.recorded[way] = self.recorded.get(way, 0) + 1

    @rank_zero_only
    def on_eval_all_end(self, ctx: Context) -> None:
        self._count("rank_zero_only")

    def on_train_step_end(self, ctx: Context) -> None:
        self._count("everywhere")
        if ctx.run.is_world_process_zero:
            self._count("is_world_process_zero")
        if ctx.run.is_local_process_zero:
            self._count("is_local_process_zero")
        if dist.get_rank() == 0:
            self._count("get_rank")

    def on_log(self, ctx: Context) -> None:
        self.records.append(
            {name: ctx.record.values[name] for name in ("train/loss", "train/learning_rate") if name in ctx.record.values}
        )
        logging.getLogger("a.user").info("record %d", ctx.record.step)


def on_a_rank(callbacks: list[Callback]) -> dict[str, Any]:
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]  # a handler of the user's own
    logging.getLogger("a.user").addHandler(handler)
    logging.getLogger("a.user").setLevel(logging.INFO)
    counts, recorder = CountsCallsOnThisRank(), Recorder()
    trainer = train([*callbacks, counts, recorder], eval_interval="2ba", max_duration="2ba")
    (threshold,) = (callback for callback in callbacks if isinstance(callback, Threshold))
    return {
        "recorded": counts.recorded,
        "records": counts.records,
        "events": recorder.events,
        "logged": logged,
        "threshold": [threshold.threshold, threshold.words, threshold.seen],
        "loss": trainer.eval_results["validation"]["loss"],
    }


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    threshold = Threshold(0.5, words=["a", "b"])
    threshold.seen = 40
    return launch(on_a_rank, callbacks=[threshold], nproc_per_node=2)


def test_a_rank_zero_only_handler_is_called_only_on_the_first_rank(ranks: list[dict[str, Any]]) -> None:
    assert [rank["recorded"].get("rank_zero_only") for rank in ranks] == [1, None]


@pytest.mark.parametrize("way", ["is_world_process_zero", "is_local_process_zero", "get_rank"])
def test_a_handler_can_check_its_rank(way: str, ranks: list[dict[str, Any]]) -> None:
    assert [rank["recorded"].get(way) for rank in ranks] == [2, None]


def test_callbacks_are_called_on_all_ranks_with_the_same_events(ranks: list[dict[str, Any]]) -> None:
    assert [rank["recorded"]["everywhere"] for rank in ranks] == [2, 2]
    assert ranks[0]["events"] == ranks[1]["events"]
    events = ranks[0]["events"]
    assert (events[0], events[-1]) == ("on_run_start", "on_run_end")


def test_a_record_is_the_same_on_all_ranks(ranks: list[dict[str, Any]]) -> None:  # in other systems, None on some ranks
    assert ranks[0]["records"] == ranks[1]["records"]
    assert ranks[0]["records"][0].keys() == {"train/loss", "train/learning_rate"}
    assert ranks[0]["loss"] == ranks[1]["loss"]


def test_python_s_logging_is_shown_only_on_the_first_rank(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["logged"]
    assert ranks[1]["logged"] == []


def test_callbacks_are_sent_to_the_ranks_with_arguments_and_state(
    ranks: list[dict[str, Any]],
) -> None:  # other systems send neither
    assert [rank["threshold"] for rank in ranks] == [[0.5, ["a", "b"], 42]] * 2
