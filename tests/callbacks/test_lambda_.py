from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from callsheet import Callback, CallbackManager, Context, Trainer, every, rank_zero_only
from callsheet.callbacks.lambda_ import Lambda
from callsheet.core.spec import CallbackSpec
from callsheet.errors import ConfigError, RegistrationError, UnknownEventError
from callsheet.testing import run_ranks

DATA = [(torch.ones(2, 2), torch.ones(2, 1))] * 4
recorded: list[Any] = []


def record_step(ctx: Context) -> None:
    recorded.append(ctx.step)


@every("2ba")
def every_other(ctx: Context) -> None:
    recorded.append(ctx.step)


@rank_zero_only
def on_zero(ctx: Context) -> None:
    recorded.append(ctx.run.rank)


@pytest.fixture(autouse=True)
def _forget_recorded_steps() -> None:
    recorded.clear()


def fit(folder: Path, *callbacks: Callback) -> Trainer:
    with Trainer(
        nn.Linear(2, 1),
        nn.functional.mse_loss,
        DATA,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        callbacks=CallbackManager(callbacks, checking=True),
        runs_folder=folder,
        device="cpu",
    ) as trained:
        trained.fit()
    return trained


def test_calls_each_function_at_its_event(tmp_path: Path) -> None:
    names: list[str] = []

    def note(ctx: Context) -> None:
        names.append(str(ctx.event))

    fit(tmp_path, Lambda(on_train_start=note, on_train_end=note, on_optimizer_step_end=lambda ctx: note(ctx)))
    assert names == ["on_train_start", *["on_optimizer_step_end"] * 4, "on_train_end"]


def test_settings_on_a_function_apply(tmp_path: Path) -> None:
    fit(tmp_path, Lambda(on_train_step_end=every_other))
    assert recorded == [2, 4]


def test_on_event_is_called_at_all_events(tmp_path: Path) -> None:
    names: list[str] = []
    fit(tmp_path, Lambda(on_event=lambda ctx: names.append(str(ctx.event))))
    assert names[0] == "on_run_start"
    assert names[-1] == "on_run_end"


def test_its_phase_decides_the_order(tmp_path: Path) -> None:
    order: list[str] = []
    late = Lambda(phase="report", name="late", on_train_end=lambda ctx: order.append("late"))
    early = Lambda(phase="change", on_train_end=lambda ctx: order.append("early"))
    fit(tmp_path, late, Lambda(on_train_end=lambda ctx: order.append("between")), early)
    assert order == ["early", "between", "late"]


def test_it_can_stop_training(tmp_path: Path) -> None:
    stop = Lambda(phase="decide", on_train_step_end=lambda ctx: ctx.control.stop("enough") if ctx.step == 2 else None)
    trained = fit(tmp_path, stop)
    assert (trained.state.timestamp.batch, trained.run.outcome) == (2, "stopped")


def test_a_function_may_be_named_by_its_path(tmp_path: Path) -> None:
    spec = CallbackSpec.of(Lambda(on_train_step_end=f"{__name__}.record_step", phase="report"))
    assert spec.to_dict()["init_args"] == {"on_train_step_end": f"{__name__}.record_step", "phase": "report"}
    fit(tmp_path, spec.build())
    assert sys.modules[__name__].recorded == [1, 2, 3, 4]


def test_an_error_names_the_file_and_line_of_the_function(tmp_path: Path) -> None:
    def fails(ctx: Context) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        fit(tmp_path, Lambda(name="ratio", on_train_step_end=fails))
    assert "callback ratio" in caught.value.__notes__[0]


@pytest.mark.parametrize("event", ["on_train_stepend", "train_step_end"])
def test_a_misspelled_event_is_an_error(event: str) -> None:
    functions: dict[str, Any] = {event: record_step}
    with pytest.raises(UnknownEventError, match="did you mean 'on_train_step_end'"):
        Lambda(**functions)


@pytest.mark.parametrize("given", [{}, {"on_log": 3}, {"on_log": dict}, {"on_log": "callsheet.no.such.function"}])
def test_rejects_bad_arguments(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Lambda(**given)


def test_a_function_that_does_not_take_the_context_is_rejected_when_added() -> None:
    with pytest.raises(RegistrationError, match="with the context alone"):
        CallbackManager([Lambda(on_log=lambda ctx, record: None)])  # type: ignore[arg-type,misc]


def on_a_rank(folder: str) -> Any:
    recorded.clear()
    steps: list[int] = []
    gated = Lambda(ranks={1}, on_train_step_end=lambda ctx: steps.append(ctx.step))
    fit(Path(folder), Lambda(on_train_end=on_zero), gated)
    return int(os.environ["RANK"]), recorded, steps


def test_rank_gates_apply_on_two_ranks(tmp_path: Path) -> None:
    assert run_ranks(on_a_rank, 2, str(tmp_path)) == [(0, [0], []), (1, [], [1, 2])]
