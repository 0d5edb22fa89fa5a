"""Trainers that are built on the Hugging Face Trainer train the same with callsheet's callbacks as without them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import TrainerCallback

from callsheet import Callback, Context
from callsheet.bridges.huggingface import STATE, host
from callsheet.bridges.matrix import CHECKS, Cell, frameworks
from callsheet.callbacks import EMA, History
from callsheet.exec.default_observers import default_observers
from callsheet.exec.log_pace import LogPace
from callsheet.testing import Recorder, check_events

from .rows import check_or_write_trainer_cell

pytest.importorskip("trl")
pytest.importorskip("sentence_transformers")
pytest.importorskip("setfit")

from .built_on import BUILT_ON, STEPS, Built, inner, module  # the trainers import optional packages

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:'pin_memory' argument"),
]


class RecordsSteps(TrainerCallback):  # type: ignore[misc]  # transformers' types are not read
    """Records the steps at which the Trainer evaluates and writes a checkpoint."""

    def __init__(self) -> None:
        self.evaluated: list[int] = []
        self.written: list[int] = []

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.evaluated.append(state.global_step)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.written.append(state.global_step)


class Losses(Callback):
    """Records the loss of each microbatch at the start of its backward."""

    phase = "report"

    def __init__(self) -> None:
        self.found: list[Tensor] = []

    def on_backward_start(self, ctx: Context) -> None:
        self.found.append(ctx.loss.detach().clone())


class RequestsAtStep(Callback):
    """Makes a request at the end of a step."""

    def __init__(self, what: str, step: int) -> None:
        self.what, self.step = what, step

    def on_train_step_end(self, ctx: Context) -> None:
        if ctx.step == self.step:
            getattr(ctx.control, self.what)("asked")


class EvaluatedWeights(Callback):
    """Records for each evaluation step whether the weights differ from those after the last training step."""

    def __init__(self) -> None:
        self.trained: list[Tensor] = []
        self.are_changed: list[bool] = []

    def on_train_step_end(self, ctx: Context) -> None:
        self.trained = weights(ctx.model)

    def on_eval_step_end(self, ctx: Context) -> None:
        self.are_changed.append(not same(self.trained, weights(ctx.model)))


def weights(model: torch.nn.Module) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in model.state_dict().values()]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def logged(trainer: Any) -> list[dict[str, float]]:
    """Return what the Trainer has logged about training, without times."""
    entries = [
        {name: value for name, value in entry.items() if not name.endswith(("runtime", "per_second", "time"))}
        for entry in inner(trainer).state.log_history
    ]
    return [entry for entry in entries if "grad_norm" in entry]


class Plain:
    """The results of training without callsheet."""

    def __init__(self, built: Built, folder: Path) -> None:
        self.losses: list[Tensor] = []
        self.notes = RecordsSteps()
        trainer = built.make(folder, [self.notes], **SAVES)
        with recording_backward(self.losses):
            trainer.train()
        self.weights, self.logs, self.step = weights(module(trainer)), logged(trainer), inner(trainer).state.global_step


@contextmanager
def recording_backward(losses: list[Tensor]) -> Iterator[None]:
    """Record the tensors on which `backward` is called, except in calls from within another `backward`."""
    backward: Callable[..., None] = Tensor.backward
    depth = 0

    def recorded(self: Tensor, *args: Any, **kwargs: Any) -> None:
        nonlocal depth
        if not depth:
            losses.append(self.detach().clone())
        depth += 1
        try:
            backward(self, *args, **kwargs)
        finally:
            depth -= 1

    Tensor.backward = recorded  # type: ignore[method-assign]
    try:
        yield
    finally:
        Tensor.backward = backward  # type: ignore[method-assign]


SAVES = {"save_strategy": "steps", "save_steps": 3}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Plain]:
    return cache(lambda name: Plain(BUILT_ON[name], tmp_path_factory.mktemp("plain")))


def parameter(name: str, *, averages: bool = False) -> Any:
    """Return a parameter whose id names the packages too, so that `make versions` can select the tests of a package.

    `averages` is whether the test evaluates an average of the weights.
    """
    built = BUILT_ON[name]
    changes = pytest.mark.skipif(not built.evaluates, reason="an evaluation of other weights changes the model")
    return pytest.param(name, id=f"{name} of {' and '.join(built.packages)}", marks=changes if averages else ())


built_on = pytest.mark.parametrize("name", [parameter(name) for name in BUILT_ON])


@built_on
def test_observers_do_not_change_training(name: str, plain: Callable[[str], Plain], tmp_path: Path) -> None:
    built, alone = BUILT_ON[name], plain(name)
    recorder, history, losses, notes = Recorder(), History(), Losses(), RecordsSteps()
    received: list[Tensor] = []
    trainer = built.make(tmp_path, [host([*default_observers(LogPace(1)), recorder, history, losses]), notes], **SAVES)
    with recording_backward(received):
        trainer.train()
    assert same(weights(module(trainer)), alone.weights)
    assert logged(trainer) == alone.logs
    assert same(received, alone.losses)
    assert same(losses.found, received)
    microbatches = 2 if built.accumulates else 1
    a_step = [received[i : i + microbatches] for i in range(0, len(received), microbatches)]
    assert history["train/loss"] == [float(sum(each)) for each in a_step]
    check_events(recorder.events)
    assert recorder.events.count("on_train_step_end") == len(a_step) == alone.step == STEPS
    assert recorder.events.count("on_microbatch_end") == len(received)
    assert notes.evaluated == alone.notes.evaluated == [2, 4, 6]
    assert recorder.events.count("on_eval_all_end") == 3
    assert len(history["validation/loss"]) == 3
    assert not [name for _, results in history.evaluations for name in results["validation"] if name.endswith("runtime")]
    assert notes.written == alone.notes.written == [3, 6]
    assert recorder.events.count("on_checkpoint_published") == 2
    check_or_write_trainer_cell(name, built.library, "observers", Cell("works"))


@built_on
def test_a_callback_stops_it_and_no_evaluation_is_added(name: str, tmp_path: Path) -> None:
    recorder = Recorder()
    trainer = BUILT_ON[name].make(tmp_path, [host([RequestsAtStep("stop", 2), recorder])], eval_strategy="no", eval_steps=None)
    trainer.train()
    assert inner(trainer).state.global_step == 2
    check_events(recorder.events)
    assert recorder.events.count("on_train_step_end") == 2
    assert not [event for event in recorder.events if event.startswith("on_eval")]
    check_or_write_trainer_cell(name, BUILT_ON[name].library, "stop", Cell("works"))


@pytest.mark.parametrize("name", [parameter(name, averages=True) for name in BUILT_ON])
def test_an_average_is_evaluated_and_a_callback_saves(name: str, plain: Callable[[str], Plain], tmp_path: Path) -> None:
    evaluated_weights, notes, recorder = EvaluatedWeights(), RecordsSteps(), Recorder()
    ours = [EMA(half_life=2, at_end=False), RequestsAtStep("save", 2), evaluated_weights, recorder]
    trainer = BUILT_ON[name].make(tmp_path, [host(ours), notes])
    trainer.train()
    assert evaluated_weights.are_changed
    assert all(evaluated_weights.are_changed)
    assert same(weights(module(trainer)), plain(name).weights)
    check_events(recorder.events)
    check_or_write_trainer_cell(name, BUILT_ON[name].library, "EMA", Cell("works"))
    assert notes.written[0] == 2
    assert (tmp_path / "checkpoint-2" / STATE).is_dir()
    check_or_write_trainer_cell(name, BUILT_ON[name].library, "save", Cell("works"))


@pytest.mark.parametrize("name", [parameter(name, averages=True) for name, built in BUILT_ON.items() if built.resumes])
def test_it_resumes_as_without_callbacks(name: str, tmp_path: Path) -> None:
    built, whole, history, recorder = BUILT_ON[name], History(), History(), Recorder()
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    built.make(ours, [host([whole, EMA(half_life=2, at_end=False)])], **SAVES).train()
    checkpoint = str(ours / "checkpoint-3")
    plain = built.make(theirs, [])
    plain.train(resume_from_checkpoint=checkpoint)
    resumed = built.make(ours, [host([history, recorder, EMA(half_life=2, at_end=False)])])
    resumed.train(resume_from_checkpoint=checkpoint)
    assert same(weights(module(resumed)), weights(module(plain)))
    check_events(recorder.events)
    assert recorder.events.count("on_train_step_end") == STEPS - 3
    assert recorder.recorded[-1].batch == STEPS
    assert history["train/loss"][:3] == whole["train/loss"][:3]
    assert len(history["train/loss"]) == len(whole["train/loss"])
    check_or_write_trainer_cell(name, built.library, "resume", Cell("works"))


def test_trainers_marked_as_not_resumable_cannot_resume() -> None:
    """The method `train` of these trainers has no argument with which a run could be resumed."""
    import setfit

    assert [name for name, built in BUILT_ON.items() if not built.resumes] == ["setfit.Trainer"]
    assert "resume_from_checkpoint" not in inspect.signature(setfit.Trainer.train).parameters
    check_or_write_trainer_cell(
        "setfit.Trainer", BUILT_ON["setfit.Trainer"].library, "resume", Cell("rejected", "SetFit does not resume")
    )


def test_the_matrix_has_a_row_and_the_version_of_each_trainer() -> None:
    found = {name: row.library for name, row in frameworks()["huggingface"].derived.items()}
    assert found == {name: built.library for name, built in BUILT_ON.items()}, "make matrix writes the versions"
    assert all(sorted(row.checks) == sorted(CHECKS) for row in frameworks()["huggingface"].derived.values())
