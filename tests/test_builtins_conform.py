"""Every built-in passes the conformance checks for callbacks; `built_ins.py` defines how each is made."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import cast

import pytest
import torch

from callsheet import Background, Callback, CallbackManager
from callsheet.loggers import ProgressBarLogger
from callsheet.testing import CONFORMANCE, Check, Subject, find_on_ranks, run_ranks, small_trainer
from callsheet.testing.small_run import Watch, same_weights, weights_of

ON_ONE_RANK = [check for check in CONFORMANCE if check.__name__ != "runs_on_ranks"]

NOT_TRIGGERED = (
    "DiskSpaceGuard",
    "EarlyStopper",
    "HangDetector",
    "LossSpikeDetector",
    "MLPerfCallback",
    "NaNMonitor",
    "SaveOnTrigger",
    "ThresholdStopper",
    "TimeLimit",
)
"""Built-ins that may change or stop training, but have no reason to in these tests."""

IMPORTS_A_PACKAGE = (
    "MLflowLogger",
    "OpenTelemetryLogger",
    "ProgressBarLogger",
    "TensorboardLogger",
    "TrackioLogger",
    "WandBLogger",
)
"""Built-ins that import an optional package at their first use."""

torch.set_num_threads(1)  # more threads would only wait for each other


# --- conformance ---


@pytest.mark.test_all
@pytest.mark.parametrize("check", ON_ONE_RANK)
def test_a_built_in_passes_the_conformance_checks(
    built_in: str, check: Check, subjects: Mapping[str, Subject], tmp_path: Path
) -> None:
    check(subjects[built_in], tmp_path)


@pytest.mark.test_all
@pytest.mark.timeout(900)
def test_all_built_ins_pass_the_conformance_checks_on_two_ranks(subjects: Mapping[str, Subject], tmp_path: Path) -> None:
    """This is a single test because all built-ins share one pair of processes: a second pytest worker would start another pair."""
    # On a busy machine, MLflow needs so long to make its database that the other rank would give up, so make it first.
    make = "import sys, mlflow; mlflow.MlflowClient(sys.argv[1]).search_experiments()"
    uri = cast("partial[Callback]", subjects["MLflowLogger"].make).keywords["tracking_uri"]
    subprocess.run([sys.executable, "-c", make, uri], check=True)
    found = dict(zip(subjects, find_on_ranks(list(subjects.values()), tmp_path), strict=True))
    assert {name: str(error) for name, error in found.items() if error is not None} == {}


def in_lane(subject: Subject) -> Callback:
    return Background(subject.make())


@pytest.mark.parametrize("check", [check for check in ON_ONE_RANK if check.__name__ not in ("constructs", "two_work_in_one_run")])
@pytest.mark.parametrize("name", ["JSONLLogger", "TensorboardLogger"])
def test_a_logger_in_a_lane_passes_the_conformance_checks(
    name: str, check: Check, subjects: Mapping[str, Subject], tmp_path: Path
) -> None:
    """Two checks do not apply to a lane: it wraps another callback, so it has no spec in JSON, and two lanes would share that callback's name."""
    check(Subject(partial(in_lane, subjects[name])), tmp_path)


@pytest.mark.test_all
def test_all_built_ins_together_do_not_change_the_weights(subjects: Mapping[str, Subject], tmp_path: Path) -> None:
    """Left out are built-ins that change training on purpose, and built-ins that need another model."""
    every = [subject.make() for subject in subjects.values() if subject.trainer is small_trainer]
    held = [
        callback for callback in every if callback.phase not in ("change", "decide") or type(callback).__name__ in NOT_TRIGGERED
    ]
    assert len(held) > 30
    weights = []
    for folder, manager in (("with", CallbackManager(held, checking=True)), ("without", CallbackManager())):
        with small_trainer(tmp_path / folder, manager) as trainer:
            trainer.fit()
        assert not manager.cost_report(10).failures
        weights.append(weights_of(trainer))
    assert same_weights(*weights)


def neutral(subject: Subject, folder: Path) -> None:
    """Check neutrality in a process that has imported no optional package."""
    assert not {"mlflow", "opentelemetry", "rich", "tensorboard", "trackio", "wandb"} & sys.modules.keys()
    next(check for check in CONFORMANCE if check.__name__ == "is_neutral")(subject, folder)


@pytest.mark.test_all
@pytest.mark.parametrize("name", IMPORTS_A_PACKAGE)
def test_importing_a_package_at_first_use_does_not_change_the_weights(
    name: str, subjects: Mapping[str, Subject], tmp_path: Path
) -> None:
    subject = Subject(partial(ProgressBarLogger, bar=True)) if name == "ProgressBarLogger" else subjects[name]
    run_ranks(neutral, 1, subject, tmp_path)


@pytest.mark.parametrize("name", NOT_TRIGGERED)
def test_a_built_in_that_has_no_reason_to_act_does_not_change_the_weights(
    name: str, subjects: Mapping[str, Subject], tmp_path: Path
) -> None:
    weights = []
    for folder, held in (("with", [subjects[name].make()]), ("without", [])):
        with small_trainer(tmp_path / folder, CallbackManager(held)) as trainer:
            trainer.fit()
        assert trainer.state.timestamp.batch == 10
        weights.append(weights_of(trainer))
    assert same_weights(*weights)


def test_training_with_ema_has_the_losses_of_training_without_it(subjects: Mapping[str, Subject], tmp_path: Path) -> None:
    losses = []
    for folder, held in (("with", [subjects["EMA"].make()]), ("without", [])):
        watch = Watch()
        manager = CallbackManager(held)
        manager.register("*", watch.record)
        with small_trainer(tmp_path / folder, manager) as trainer:
            trainer.fit()
        losses.append(watch.losses)
    assert losses[0] == losses[1]
