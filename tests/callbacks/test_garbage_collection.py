from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from callsheet import Callback, CallbackManager, Context, Trainer
from callsheet.callbacks.garbage_collection import GarbageCollection
from callsheet.errors import ConfigError
from callsheet.testing import run_ranks

pytestmark = pytest.mark.test_all


DATA = [(torch.ones(2, 2), torch.ones(2, 1))] * 12


class RecordsCollections(Callback):
    """Records the event during which each collection ran, and whether automatic collection was enabled at each event."""

    phase = "report"

    def __init__(self) -> None:
        self.collected: list[tuple[str, int, int]] = []
        self.enabled: dict[str, bool] = {}
        self.seconds: dict[int, float] = {}
        self.where = ("", 0)

    def on_event(self, ctx: Context) -> None:
        self.enabled[str(ctx.event)] = gc.isenabled()
        if ctx.has("record") and "gc/seconds" in ctx.record.values:
            self.seconds[ctx.step] = ctx.record.values["gc/seconds"]


class RecordsCurrentEvent(Callback):
    """Is called first, and records the current event for `RecordsCollections`."""

    phase = "change"

    def __init__(self, watch: RecordsCollections) -> None:
        self.watch = watch

    def on_event(self, ctx: Context) -> None:
        self.watch.where = (str(ctx.event), ctx.step)


@pytest.fixture(autouse=True)
def _collection_is_left_as_it_was() -> Iterator[None]:
    was = gc.isenabled()
    gc.enable()
    yield
    assert gc.isenabled()
    (gc.enable if was else gc.disable)()


def watched(folder: Path, *callbacks: Callback, **options: Any) -> RecordsCollections:
    watch = RecordsCollections()

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            watch.collected.append((*watch.where, info["generation"]))

    arguments: dict[str, Any] = {"log_interval": "3ba", "eval_interval": "6ba"}
    gc.callbacks.append(note)
    try:
        with Trainer(
            nn.Linear(2, 1),
            nn.functional.mse_loss,
            DATA,
            DATA[:5],
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            callbacks=CallbackManager([RecordsCurrentEvent(watch), *callbacks, watch], checking=True),
            runs_folder=folder,
            device="cpu",
            **(arguments | options),
        ) as trained:
            trained.fit()
    finally:
        gc.callbacks.remove(note)
    return watch


def in_training(watch: RecordsCollections) -> list[tuple[str, int, int]]:
    start = next(i for i, (event, _, _) in enumerate(watch.collected) if event == "on_train_start")
    return [found for found in watch.collected[start:] if found[0] not in ("on_train_end", "on_run_end")]


@pytest.mark.parametrize("generation", [0, 1, 2])
def test_collects_only_at_its_steps(tmp_path: Path, generation: int) -> None:
    watch = watched(tmp_path, GarbageCollection(interval=4, generation=generation))
    assert in_training(watch) == [
        ("on_train_start", 0, generation),
        ("on_train_step_end", 4, generation),
        ("on_eval_step_end", 6, generation),
        ("on_train_step_end", 8, generation),
        ("on_train_step_end", 12, generation),
        ("on_eval_step_end", 12, generation),
    ]
    assert [event for event in ("on_train_step_end", "on_eval_end", "on_epoch_end") if watch.enabled[event]] == []
    assert watch.enabled["on_run_end"]


def test_the_duration_is_in_the_record(tmp_path: Path) -> None:
    seconds = watched(tmp_path, GarbageCollection(interval=4)).seconds
    assert {6, 9, 12} <= set(seconds)
    assert 3 not in seconds
    assert all(0 < taken < 10 for taken in seconds.values())


def test_nothing_is_collected_in_a_manual_evaluation(tmp_path: Path) -> None:
    collection = GarbageCollection(interval=1)
    with Trainer(nn.Linear(2, 1), nn.functional.mse_loss, callbacks=collection, runs_folder=tmp_path, device="cpu") as trained:
        gc.disable()  # so that Python does not collect either
        try:
            before = gc.get_stats()[2]["collections"]
            trained.evaluate(DATA[:3])
            after = gc.get_stats()[2]["collections"]
        finally:
            gc.enable()
    assert after == before


class Breaks(Callback):
    def __init__(self, event: str) -> None:
        self.event = event

    def on_event(self, ctx: Context) -> None:
        if ctx.event == self.event and ctx.step >= 3:
            raise ZeroDivisionError


@pytest.mark.parametrize("event", ["on_train_step_start", "on_eval_step_end", "on_train_end", "on_run_end"])
def test_automatic_collection_is_enabled_again_after_an_exception(tmp_path: Path, event: str) -> None:
    with pytest.raises(ZeroDivisionError):
        watched(tmp_path, Breaks(event), GarbageCollection(interval=4))
    assert gc.isenabled()


def test_automatic_collection_stays_disabled_if_it_was_before(tmp_path: Path) -> None:
    gc.disable()
    try:
        watched(tmp_path, GarbageCollection(interval=4))
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_two_instances_work_in_one_run(tmp_path: Path) -> None:
    young = GarbageCollection(interval=3, generation=0)
    watch = watched(tmp_path, young, GarbageCollection(interval=6), eval_interval=None)
    steps = [(step, generation) for event, step, generation in in_training(watch) if event == "on_train_step_end"]
    assert steps == [(3, 0), (6, 0), (6, 2), (9, 0), (12, 0), (12, 2)]
    assert gc.isenabled()


@pytest.mark.parametrize("options", [{"interval": 0}, {"generation": 3}, {"generation": -1}])
def test_rejects_bad_arguments(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        GarbageCollection(**options)


def on_a_rank(folder: str) -> Any:
    watch = watched(Path(folder), GarbageCollection(interval=2), run_name="run")
    return [found for found in in_training(watch) if found[0] == "on_train_step_end"], watch.seconds


def test_two_ranks_collect_at_the_same_steps(tmp_path: Path) -> None:
    one, other = run_ranks(on_a_rank, 2, str(tmp_path))
    assert one == other
    assert [step for _, step, _ in one[0]] == [2, 4, 6]
