"""Observers do not change a run: the weights are equal bit by bit. For built-ins, `test_builtins_conform.py` checks this."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from callsheet import Callback, CallbackManager, CallsheetError, Context, Trainer
from callsheet.core.lifecycle import EVENTS
from callsheet.testing import Recorder

from .small_run import Noisy, SavesAt, run_small, small_trainer

Weights = dict[str, Tensor]


def weights_of(trainer: Trainer) -> Weights:
    with trainer:
        trainer.fit()
    return {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}


def same(one: Weights, other: Weights) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    """Return the weights of a run without callbacks, evaluations and saves."""
    return weights_of(small_trainer(tmp_path_factory.mktemp("bare"), eval_interval=None))


class DoesNothing(Callback):
    """Listens to everything and does nothing."""

    def on_event(self, ctx: Context) -> None: ...


class Reader(Callback):
    """Reads fields, keeps outputs, logs, and stores values."""

    keep_fields = ("outputs",)

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def on_event(self, ctx: Context) -> None:
        for name in ("loss", "grad_norm", "outputs"):
            if ctx.has(name) and getattr(ctx, name) is not None:
                value = getattr(ctx, name)
                self.kept.append(value.detach().clone())
                ctx.log({f"reader/{name}": value.detach().mean()}, over="mean")


class Draws(Callback):
    """Draws random numbers from all generators at the given events."""

    def __init__(self, *events: str) -> None:
        self.draws_at = set(events)
        self.drawn = 0

    def on_event(self, ctx: Context) -> None:
        if str(ctx.event) in self.draws_at:
            random.random()
            numpy.random.rand(3)
            torch.randn(3)
            self.drawn += 1


class DeclaresDraws(Draws):
    draws_random = True


@pytest.mark.parametrize(
    "made", [DoesNothing, Reader, Recorder, lambda: DeclaresDraws(*EVENTS)], ids=["does nothing", "reader", "recorder", "draws"]
)
def test_observers_of_every_event_change_nothing(made: Callable[[], Callback], bare: Weights, tmp_path: Path) -> None:
    callback = made()
    assert same(weights_of(small_trainer(tmp_path, callback, eval_interval=None)), bare)
    if isinstance(callback, Draws):
        assert callback.drawn > 100


def test_all_observers_together_with_evaluation_and_saving_change_nothing(bare: Weights, tmp_path: Path) -> None:
    everything = [DoesNothing(), Reader(), Recorder(), DeclaresDraws(*EVENTS), SavesAt("step", "epoch", "round", "before_eval")]
    assert same(weights_of(small_trainer(tmp_path, *everything, eval_interval="1ba", log_interval="1ba")), bare)


@pytest.mark.parametrize("interval", [None, "1ba", "5ba", "1ep", "0.2dur"])
def test_evaluation_changes_nothing(interval: str | None, bare: Weights, tmp_path: Path) -> None:
    assert same(weights_of(small_trainer(tmp_path, eval_interval=interval)), bare)


def test_evaluation_restores_the_modes_of_all_modules(tmp_path: Path) -> None:
    """A module that the user has set to evaluation mode stays in it."""
    trainer = small_trainer(tmp_path)
    trainer.model.train()
    assert isinstance(trainer.model, nn.Sequential)
    trainer.model[2].eval()
    before = [module.training for module in trainer.model.modules()]
    trainer.evaluate()
    assert [module.training for module in trainer.model.modules()] == before
    trainer.close()


def test_standalone_calls_change_nothing(bare: Weights, tmp_path: Path) -> None:
    data = DataLoader(Noisy(), batch_size=2, shuffle=True)
    with small_trainer(tmp_path, eval_interval=None) as trainer:
        for duration in ("1ep", "2ep", "4ep"):
            trainer.evaluate()
            trainer.test(data)
            trainer.predict(data)
            trainer.fit(duration)
            trainer.save_checkpoint()
    assert same(trainer.model.state_dict(), bare)


def test_the_log_interval_does_not_change_the_weights(bare: Weights, tmp_path: Path) -> None:
    for i, interval in enumerate(["1ba", "3ba", "1ep", "1iter"]):
        assert same(weights_of(small_trainer(tmp_path / str(i), Recorder(), log_interval=interval)), bare)


@pytest.mark.parametrize("event", ["on_train_step_start", "on_microbatch_start", "on_forward_start", "on_epoch_start"])
def test_an_observer_with_undeclared_draws_changes_the_weights(event: str, bare: Weights, tmp_path: Path) -> None:
    """The comparisons above can therefore fail."""
    assert not same(weights_of(small_trainer(tmp_path, Draws(event), eval_interval=None)), bare)


DRAWERS: dict[str, Callable[[], object]] = {
    "python": random.random,
    "numpy": lambda: numpy.random.rand(),
    "torch": lambda: torch.rand(()),
}


@pytest.mark.parametrize("source", DRAWERS)
def test_the_checking_mode_rejects_undeclared_draws(source: str, tmp_path: Path) -> None:
    class Sneaky(Callback):
        def on_log(self, ctx: Context) -> None:
            DRAWERS[source]()

    manager = CallbackManager([Sneaky()], checking=True)
    with pytest.raises(CallsheetError, match=r"Sneaky.*test_neutrality\.py:\d+.*on_log.*draws_random = True"):
        with small_trainer(tmp_path, callbacks=manager) as checked:
            checked.fit()


def test_the_checking_mode_accepts_declared_draws(bare: Weights, tmp_path: Path) -> None:
    manager = CallbackManager([DoesNothing(), Reader(), Recorder(), DeclaresDraws(*EVENTS)], checking=True)
    assert same(weights_of(small_trainer(tmp_path, callbacks=manager, eval_interval=None)), bare)


def test_an_observer_that_fails_and_is_isolated_changes_nothing(
    bare: Weights, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(DeclaresDraws):
        on_error = "isolate"

        def on_event(self, ctx: Context) -> None:
            super().on_event(ctx)
            raise RuntimeError("broken")

    with caplog.at_level(logging.ERROR, "callsheet"):
        assert same(weights_of(small_trainer(tmp_path, Broken(*EVENTS), eval_interval=None)), bare)
    assert "Broken" in caplog.text
    assert "switched off" in caplog.text


def test_saving_does_not_move_the_end_of_training(tmp_path: Path) -> None:
    """A duration in samples ends at the same step with and without checkpoints."""

    class SavesOnce(Callback):
        def on_train_step_end(self, ctx: Context) -> None:
            if ctx.step == 2:
                ctx.control.save("once")

    unsaved = run_small(tmp_path / "unsaved", max_duration="6sp", eval_interval=None)
    saved = run_small(tmp_path / "saved", SavesOnce(), max_duration="6sp", eval_interval=None)
    assert saved["losses"] == unsaved["losses"]


def test_a_function_on_every_event_changes_nothing(bare: Weights, tmp_path: Path) -> None:
    recorded: list[str] = []
    manager = CallbackManager()
    manager.register("*", lambda ctx: recorded.append(str(ctx.event)))
    assert same(weights_of(small_trainer(tmp_path, callbacks=manager, eval_interval=None)), bare)
    assert recorded[0] == "on_run_start"
    assert recorded[-1] == "on_run_end"
    assert recorded.count("on_train_step_end") == 12
