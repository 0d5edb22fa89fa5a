"""Each conformance check detects its kind of bug, and accepts a correct callback."""

from __future__ import annotations

import gc
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest import SkipTest

import pytest
import torch

from callsheet import Callback, CallbackManager, Context, Trainer
from callsheet.errors import ConfigError
from callsheet.loggers import Logger
from callsheet.testing import (
    CONFORMANCE,
    Check,
    ConformanceError,
    Subject,
    check_callback,
    check_on_ranks,
    find_on_ranks,
    small_trainer,
)

CHECKS: dict[str, Check] = {check.__name__: check for check in CONFORMANCE}
logger = logging.getLogger(__name__)


def finds(check: str, what: Callable[[], Callback] | Subject, folder: Path) -> str:
    """Return the problem that the check found. The message must name the callback and the check, and have a hint."""
    with pytest.raises(ConformanceError) as caught:
        CHECKS[check](what, folder)
    error = caught.value
    assert error.check == check
    assert str(error) == f"{error.callback} does not pass {check}: {error.found}; {error.hint}"
    return f"{error.callback}: {error.found}"


class CorrectCallback(Callback):
    """A callback without bugs: it counts steps, logs the count and keeps it in its state."""

    def __init__(self, *, factor: float = 1.0) -> None:
        self.factor = factor
        self.count = 0

    def on_checkpoint_load_start(self, ctx: Context) -> None:
        self.count = 0

    def on_train_step_end(self, ctx: Context) -> None:
        self.count += 1
        ctx.log({"sound/count": self.factor * self.count, "sound/loss": ctx.loss.detach()}, over="last", across="mean")

    def state_dict(self) -> Mapping[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.count = state["count"]


# --- the public functions ---


@pytest.mark.test_all
def test_a_correct_callback_passes_all_checks(tmp_path: Path) -> None:
    check_callback(partial(CorrectCallback, factor=2.0), tmp_path)


@pytest.mark.test_all
def test_a_lambda_is_sent_to_other_processes_with_cloudpickle(tmp_path: Path) -> None:
    pytest.importorskip("cloudpickle")
    CHECKS["runs_on_ranks"](lambda: CorrectCallback(factor=2.0), tmp_path)


@pytest.mark.test_all
def test_without_cloudpickle_a_lambda_skips_only_the_check_on_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(SkipTest, match=r"runs_on_ranks: not checked on several ranks: CorrectCallback .*pip install cloudpickle"):
        check_callback(lambda: CorrectCallback(), tmp_path / "sound")
    with pytest.raises(ConformanceError, match="Draws does not pass is_neutral"):
        check_callback(lambda: Draws(), tmp_path / "draws")


def test_the_checks_have_names_for_pytest() -> None:
    assert list(CHECKS)[:2] == ["constructs", "registers"]
    assert len(CHECKS) == len(CONFORMANCE) == 11


def test_the_checks_do_not_change_random_states_and_threads_of_the_test(tmp_path: Path) -> None:
    torch.manual_seed(1)
    random.seed(1)
    expected = torch.rand(2).tolist(), random.random(), torch.get_num_threads()
    torch.manual_seed(1)
    random.seed(1)
    gc.unfreeze()
    CHECKS["is_neutral"](CorrectCallback, tmp_path)
    assert (torch.rand(2).tolist(), random.random(), torch.get_num_threads()) == expected
    assert gc.get_freeze_count() == 0
    gc.freeze()  # as for the other tests


def test_an_object_that_is_not_a_callback_is_reported(tmp_path: Path) -> None:
    assert "NotACallbackError" in finds("constructs", lambda: object(), tmp_path)  # type: ignore[arg-type,return-value]


def test_a_factory_that_raises_is_reported_by_its_name(tmp_path: Path) -> None:
    def broken() -> Callback:
        raise RuntimeError("no")

    assert "broken: RuntimeError: no" in finds("registers", broken, tmp_path)


# --- constructs ---


class AcceptsPositional(Callback):
    def __init__(self, threshold: float = 3.0) -> None:
        self.threshold = threshold


class Functional(Callback):
    def __init__(self, *, function: Callable[[float], float]) -> None:
        self.function = function


class IntKeys(Callback):
    def __init__(self, *, schedule: Mapping[int, int]) -> None:
        if not all(isinstance(key, int) for key in schedule):
            raise ConfigError("whole numbers")


class WithInstanceNumber(Callback):
    made = 0

    def __init__(self) -> None:
        WithInstanceNumber.made += 1
        self.number = self.made

    def state_dict(self) -> Mapping[str, Any]:
        return {"number": self.number}


ONE = CorrectCallback()


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (AcceptsPositional, "AcceptsPositional: its options threshold can be given by position"),
        (partial(Functional, function=abs), "its options cannot be written as JSON"),
        (partial(IntKeys, schedule={1: 2}), "ConfigError: whole numbers"),
        (WithInstanceNumber, "rebuilt from its spec it has another state: state/number is 1 in one, 3 in the other"),
        (lambda: ONE, "the same object twice"),
    ],
)
def test_constructs(make: Callable[[], Callback], found: str, tmp_path: Path) -> None:
    WithInstanceNumber.made = 0
    assert found in finds("constructs", make, tmp_path)


# --- registers, two_work_in_one_run ---


class Misspelt(Callback):
    def on_train_stepend(self, ctx: Context) -> None: ...


class OneName(CorrectCallback):
    @property
    def name(self) -> str:  # type: ignore[override]
        return "always the same"


@pytest.mark.parametrize(("make", "found"), [(Misspelt, "did you mean 'on_train_step_end'"), (OneName, "property 'name'")])
def test_registers(make: Callable[[], Callback], found: str, tmp_path: Path) -> None:
    assert found in finds("registers", make, tmp_path)


class OnlyOnePerProcess(Callback):
    """Rejects a second instance in the process."""

    running: list[Callback] = []
    names_both = False

    def on_run_start(self, ctx: Context) -> None:
        if self.running:
            first = self.running[0]
            raise ConfigError(f"{first.name} is there before {self.name}" if self.names_both else "there is one already")
        self.running.append(self)

    def on_run_end(self, ctx: Context) -> None:
        self.running.clear()


class OnlyOnePerProcessWithNames(OnlyOnePerProcess):
    names_both = True


def test_two_work_in_one_run(tmp_path: Path) -> None:
    assert "there is one already" in finds("two_work_in_one_run", OnlyOnePerProcess, tmp_path)
    CHECKS["two_work_in_one_run"](OnlyOnePerProcessWithNames, tmp_path)


# --- fits_twice, closes_twice ---


class Stale(CorrectCallback):
    """Does not reset its count in a new run."""

    def on_checkpoint_load_start(self, ctx: Context) -> None: ...


class OnceOnly(Callback):
    has_trained = False

    def on_train_start(self, ctx: Context) -> None:
        assert not self.has_trained, "once is enough"
        self.has_trained = True


class WarnsAtEveryRecord(Callback):
    def on_log(self, ctx: Context) -> None:
        logger.warning("there is nothing to do")


class NoPredictions(Callback):
    def on_predict_end(self, ctx: Context) -> None:
        raise RuntimeError("predictions are not supported")


class DownLogger(Logger):
    """A logger whose errors are isolated."""

    def log_table(self, ctx: Context, name: str, columns: Any, rows: Any) -> None:
        raise OSError("down")


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (Stale, r"a used callback in a new run, and a new one: at step 2 sound/count is 12.0 in one, 2.0 in the other"),
        (OnceOnly, "AssertionError: once is enough"),
        (WarnsAtEveryRecord, "in a run of 10 steps it logs 8 times: there is nothing to do"),
        (NoPredictions, "predictions are not supported"),
        (DownLogger, "it failed, and was isolated: OSError: down (at log_table, step 7, rank 0)"),
    ],
)
def test_fits_twice(make: Callable[[], Callback], found: str, tmp_path: Path) -> None:
    assert found in finds("fits_twice", make, tmp_path)


class ExpectsTraining(Callback):
    def on_train_start(self, ctx: Context) -> None:
        self.began = time.monotonic()

    def on_run_end(self, ctx: Context) -> None:
        print(time.monotonic() - self.began)


def test_closes_twice(tmp_path: Path) -> None:
    assert "has no attribute 'began'" in finds("closes_twice", ExpectsTraining, tmp_path)


# --- lets_errors_out, is_preemptive ---


class FailsOnException(Callback):
    def on_exception(self, ctx: Context) -> None:
        ctx.log({"x/loss": ctx.loss})


def test_lets_errors_out(tmp_path: Path) -> None:
    assert "after an exception at on_run_start: while the run was ending, another error was raised" in finds(
        "lets_errors_out", FailsOnException, tmp_path
    )


class ClearsStopRequest(Callback):
    phase = "decide"

    def on_train_step_end(self, ctx: Context) -> None:
        ctx.control.done("stop")


class FailsOnPreempt(Callback):
    def on_preempt(self, ctx: Context) -> None:
        raise RuntimeError("not now")


@pytest.mark.parametrize(
    ("make", "found"),
    [(ClearsStopRequest, "training continues after a stop was requested"), (FailsOnPreempt, "RuntimeError: not now")],
)
def test_is_preemptive(make: Callable[[], Callback], found: str, tmp_path: Path) -> None:
    assert found in finds("is_preemptive", make, tmp_path)


def test_outside_the_main_thread_the_check_of_preemption_is_skipped(tmp_path: Path) -> None:
    raised: list[BaseException] = []

    def check() -> None:
        try:
            CHECKS["is_preemptive"](CorrectCallback, tmp_path)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=check)
    thread.start()
    thread.join()
    assert [type(error) for error in raised] == [SkipTest]
    assert "signals reach only the main thread" in str(raised[0])


# --- resumes ---


class Forgets(CorrectCallback):
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class ForgetsQuietly(CorrectCallback):
    """Logs the same after a resume, but has another state."""

    def on_train_step_end(self, ctx: Context) -> None:
        self.count += 1

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class NotPlain(CorrectCallback):
    def state_dict(self) -> Mapping[str, Any]:
        return {"myself": object()}


class Demanding(CorrectCallback):
    """Cannot be added to a run that started without it."""

    is_restored = False

    def on_train_start(self, ctx: Context) -> None:
        assert self.is_restored or not ctx.step, "where is my state?"

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.is_restored = True


class DeletesCheckpoints(Callback):
    def on_eval_all_end(self, ctx: Context) -> None:
        if ctx.step == 4:
            shutil.rmtree(ctx.run.checkpoints)


class StopsImmediately(Callback):
    phase = "decide"

    def on_train_step_end(self, ctx: Context) -> None:
        if ctx.step == 1:
            ctx.control.stop("enough", replicated=True)


class WithRandomRunId(CorrectCallback):
    """Has a value in its state that differs for each instance."""

    def __init__(self) -> None:
        super().__init__()
        self.run_id = os.urandom(8).hex()

    def state_dict(self) -> Mapping[str, Any]:
        return {**super().state_dict(), "run_id": self.run_id}


class ChangesWeightsAtStart(Callback):
    """Changes the weights at every start of training, also after a resume."""

    phase = "change"

    def on_train_start(self, ctx: Context) -> None:
        with torch.no_grad():
            ctx.model.head.bias.add_(1.0)


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (Forgets, "resumed, and uninterrupted: at step 4 sound/count is 1.0 in one, 4.0 in the other"),
        (ForgetsQuietly, "resumed, and uninterrupted: state/count is 7 in one, 10 in the other"),
        (NotPlain, "CheckpointError"),
        (Demanding, "where is my state?"),
        (DeletesCheckpoints, "the checkpoint that another callback requested is gone"),
        (StopsImmediately, "the run ended before its checkpoint at step 3"),
        (WithRandomRunId, "state/run_id is"),
        (ChangesWeightsAtStart, "resumed, and uninterrupted: the losses of the steps differ"),
    ],
)
def test_resumes(make: Callable[[], Callback], found: str, tmp_path: Path) -> None:
    assert found in finds("resumes", make, tmp_path)


def test_state_that_varies_can_be_excluded(tmp_path: Path) -> None:
    CHECKS["resumes"](Subject(WithRandomRunId, varies=("state/run_id",)), tmp_path)


# --- is_neutral ---


class Draws(Callback):
    def on_forward_start(self, ctx: Context) -> None:
        torch.rand(1)


class RunsModel(Callback):
    """Runs the model in training mode, which changes batch norm statistics."""

    draws_random = True

    def on_train_step_end(self, ctx: Context) -> None:
        ctx.model(ctx.batch[0])


class ChangesBias(Callback):
    def on_train_step_end(self, ctx: Context) -> None:
        if ctx.step == 9:
            with torch.no_grad():
                ctx.model.head.bias.add_(1e-6)


class DeclaredChangesBias(ChangesBias):
    phase = "change"


class Stops(Callback):
    def on_train_step_end(self, ctx: Context) -> None:
        if ctx.step == 10:
            ctx.control.stop("enough", replicated=True)


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (Draws, "drew random numbers at on_forward_start"),
        # The statistics of batch normalization do not change the step in training.
        (RunsModel, "the weights differ from a run without the callback"),
        (ChangesBias, "differ from a run without the callback"),
        (Stops, "the run's outcome, and what comes of it, differ from a run without the callback"),
    ],
)
def test_is_neutral(make: Callable[[], Callback], found: str, tmp_path: Path) -> None:
    assert found in finds("is_neutral", make, tmp_path)


def test_a_callback_in_phase_change_does_not_have_to_be_neutral(tmp_path: Path) -> None:
    CHECKS["is_neutral"](DeclaredChangesBias, tmp_path)


def random_trainer(folder: Path, callbacks: CallbackManager, resume: str | None = None) -> Trainer:
    trainer = small_trainer(folder, callbacks, resume)
    with torch.no_grad():
        trainer.model.head.bias.fill_(random.SystemRandom().random())  # type: ignore[union-attr,operator]
    return trainer


def test_a_trainer_that_differs_between_runs_is_reported_as_such(tmp_path: Path) -> None:
    assert "two runs of the given trainer differ" in finds(
        "is_neutral", Subject(CorrectCallback, trainer=random_trainer), tmp_path
    )


# --- leaves_nothing ---


class LeavesSomething(Callback):
    """Does not clean up a resource of the given kind."""

    kept: list[Any] = []

    def __init__(self, *, what: str) -> None:
        self.what = what

    def on_train_start(self, ctx: Context) -> None:
        match self.what:
            case "thread":
                is_over = threading.Event()
                thread = threading.Thread(target=is_over.wait, name="left", daemon=True)
                thread.start()
                self.kept.append(is_over.set)
            case "process":
                process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
                self.kept.append(lambda: process.communicate(b"\n"))
            case "file":
                assert ctx.run.folder is not None
                ctx.run.folder.mkdir(parents=True, exist_ok=True)
                file = open(ctx.run.folder / "left.txt", "w")  # noqa: SIM115
                self.kept.append(file.close)
            case "signal":
                earlier = signal.signal(signal.SIGUSR1, lambda number, frame: None)
                self.kept.append(lambda: signal.signal(signal.SIGUSR1, earlier))
            case "stdout":
                stdout, sys.stdout = sys.stdout, open(os.devnull, "w")  # noqa: SIM115
                self.kept.append(lambda: setattr(sys, "stdout", stdout))
            case "hook":
                ctx.model.head.register_forward_hook(lambda *_: None)
            case "method":
                ctx.model.head.forward = ctx.model.head.forward
            case "frozen":
                ctx.model.body.bias.requires_grad_(False)
            case "optimizer":
                ctx.optimizer.register_step_post_hook(lambda *_: None)
            case "collection":
                gc.disable()
                self.kept.append(gc.enable)
            case "variable":
                os.environ["LEFT"] = str(time.monotonic_ns())
                self.kept.append(lambda: os.environ.pop("LEFT", None))
            case "handler":
                handler = logging.NullHandler()
                logging.getLogger().addHandler(handler)
                self.kept.append(lambda: logging.getLogger().removeHandler(handler))
            case "model":
                self.kept.append(ctx.model.named_modules)


class LeavesOnFailure(Callback):
    """Cleans up at the end of training only, not after an exception."""

    def on_train_start(self, ctx: Context) -> None:
        self.hook = ctx.model.register_forward_hook(lambda *_: None)

    def on_train_end(self, ctx: Context) -> None:
        self.hook.remove()


@pytest.mark.test_all
@pytest.mark.parametrize(
    ("what", "found"),
    [
        ("thread", "the thread 'left'"),
        ("process", "the process"),
        ("file", "left.txt"),
        ("signal", f"the handler of signal {signal.SIGUSR1.value} is"),
        ("stdout", "sys.stdout is"),
        ("hook", "the hooks of module 'head': {'_forward_hooks': 1}"),
        ("method", "the attributes of module 'head'"),
        ("frozen", "the mode of parameter 'body.bias': 'frozen', not 'trained'"),
        ("optimizer", "the hooks of the optimizer"),
        ("collection", "garbage collection is (False,"),
        ("variable", "the variable LEFT of the environment"),
        ("handler", "the root logger is"),
        ("model", "the model, which something that outlives"),
    ],
)
def test_leaves_nothing(what: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("callsheet.testing.leftovers.PATIENCE_SECONDS", 0.2)
    LeavesSomething.kept.clear()
    try:
        assert found in finds("leaves_nothing", partial(LeavesSomething, what=what), tmp_path)
    finally:
        for undo in reversed(LeavesSomething.kept):
            undo()
        LeavesSomething.kept.clear()


def test_leaves_nothing_when_a_run_fails(tmp_path: Path) -> None:
    found = finds("leaves_nothing", LeavesOnFailure, tmp_path)
    assert "after a run that failed these are left: the hooks of the model" in found


# --- runs_on_ranks ---


class LogsItsRank(Callback):
    def on_log(self, ctx: Context) -> None:
        ctx.log({"mine/rank": ctx.run.rank}, across="same")


class FailsOnOne(Callback):
    def on_train_step_end(self, ctx: Context) -> None:
        if ctx.run.rank == 1 and ctx.step == 2:
            raise RuntimeError("only here")


class WaitsForEver(Callback):
    def on_train_step_end(self, ctx: Context) -> None:
        while ctx.run.rank == 1 and ctx.step == 2:
            time.sleep(0.1)


class ChangesBiasOnRanks(Callback):
    """Is neutral only on a single rank."""

    def on_train_step_end(self, ctx: Context) -> None:
        if ctx.run.world_size > 1:
            with torch.no_grad():
                ctx.model.head.bias.add_(1e-3)


class ForgetsOnOthers(CorrectCallback):
    """Counts on all ranks, but restores its state only on the first."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.count = state["count"] if os.environ.get("RANK", "0") == "0" else 0


@pytest.mark.slow
def test_many_callbacks_in_one_set_of_processes_have_separate_results(tmp_path: Path) -> None:
    made: list[Callable[[], Callback]] = [
        CorrectCallback,
        LogsItsRank,
        FailsOnOne,
        CorrectCallback,
        ChangesBiasOnRanks,
        ForgetsOnOthers,
        WaitsForEver,
        CorrectCallback,
    ]
    errors = find_on_ranks(made, tmp_path, timeout=20.0)
    found = [error.found if error is not None else None for error in errors]
    assert found[0] is found[3] is found[7] is None
    assert "rank 0's records, and rank 1's: at step 2 mine/rank is 0.0 in one, 1.0 in the other" in str(found[1])
    assert "RuntimeError: only here" in str(found[2])
    assert "the weights differ from a run without the callback" in str(found[4])
    assert "sound/count" in str(found[5])
    assert "did not finish" in str(found[6])
    assert [error.callback for error in errors if error is not None][-1] == "WaitsForEver"


@pytest.mark.test_all
def test_check_on_ranks_reports_all_that_do_not_pass(tmp_path: Path) -> None:
    with pytest.raises(
        ConformanceError,
        match=r"(?s)LogsItsRank, ChangesBiasOnRanks does not pass runs_on_ranks: LogsItsRank.*ChangesBiasOnRanks",
    ):
        check_on_ranks([LogsItsRank, ChangesBiasOnRanks], tmp_path)
