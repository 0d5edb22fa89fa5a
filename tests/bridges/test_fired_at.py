"""The tables `FIRED_AT`: short trainings show during which events, hooks and methods of a framework a host fires each event."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

import callsheet
from callsheet import Callback, Context
from callsheet.core.lifecycle import EVENTS

from .cells import loop_of
from .loops.job import POINTS

BRIDGES = Path(callsheet.__file__).parent / "bridges"
FRAMEWORKS = sorted(path.parent.name for path in BRIDGES.glob("*/events.py") if "\nFIRED_AT:" in path.read_text())

Table = Mapping[str, set[str]]
"""For each event, hook or method of a framework, the events of callsheet that are fired during it."""

DISPATCHERS = {
    "CallbackHandler.call_event": "event",  # Hugging Face
    "Engine._fire_event": "event_name",  # Ignite
    "_call_callback_hooks": "hook_name",  # Lightning
    "CallbackManager.fire": "event_name",  # Megatron Bridge
    "BaseTrainer.run_callbacks": "event",  # Ultralytics
    "BaseValidator.run_callbacks": "event",
}
"""For each function with which a framework calls its callbacks, the variable that has the name of the event or hook."""

RUN_METHODS = {f"AttachedRun.{name}": f"run.{name}" for name in ("__enter__", "__exit__", "steps", "evaluated")}
"""For each method of `run` that a loop with Accelerate calls, its name in the table."""


def hook_of(frame: FrameType) -> str | None:
    """Return the framework's event, hook or method that a frame runs. None for another function, "" if its callers do not count."""
    name, variables = frame.f_code.co_qualname, frame.f_locals
    if (event := variables.get(DISPATCHERS.get(name, ""))) is not None:  # classes of callsheet have a function of the same name
        return str(getattr(event, "value", event))
    if name in ("CallbackManager._safe_invoke", "call_hook"):  # InstructLab and our copy of its callbacks
        return str(variables["context"].hook_name)
    if name.startswith("CallbackRunner.on_"):  # AutoModel
        return frame.f_code.co_name
    if name == "Engine.run":  # an Ignite evaluator runs in a handler of the trainer
        return ""
    if name in ("Accelerator.backward", "AcceleratedOptimizer.step"):
        return name
    if name == "WrappedMethods.wrap.<locals>.wrapper":
        owner = type(variables["reference"]()).__name__
        return f"{owner}.{variables['name']}" if owner == "Accelerator" else str(variables["name"])
    if name == "Methods.replace.<locals>.called":  # Lightning
        return str(variables["method"].__name__)
    return RUN_METHODS.get(name.replace("AcceleratedRun", "AttachedRun"))


class RecordsHooks(Callback):
    """Records for each event the innermost event, hook or method of the framework that is on the call stack."""

    def __init__(self) -> None:
        self.found: dict[str, set[str]] = {}

    def on_event(self, ctx: Context) -> None:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and (hook := hook_of(frame)) is None:
            frame = frame.f_back
        if frame is not None and hook:
            self.found.setdefault(hook, set()).add(str(ctx.event))


class Requests(Callback):
    """Requests a checkpoint and an evaluation within an epoch."""

    def on_train_step_end(self, ctx: Context) -> None:
        if ctx.step == 2:
            ctx.control.save("asked")
            ctx.control.evaluate("asked")


def failing_loss() -> Callable[[Tensor, Tensor], Tensor]:
    """Return the loss of `POINTS`, which raises an error in the third step."""
    calls = 0

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise ArithmeticError("bad loss")
        return POINTS.loss(outputs, targets)

    return loss


def table(where: str) -> Table:
    """Return the table of a framework."""
    events = import_module(f"callsheet.bridges.{where}.events")
    found = {hook: set(fired) for hook, fired in events.FIRED_AT.items() if fired}
    if where == "ignite":
        for event, fired in events.FIRED_AT_EVALUATION.items():
            found.setdefault(event, set()).update(fired)
        found["saved_checkpoint"] = set(events.CHECKPOINT_EVENTS)
    return found


def train(where: str, folder: Path, recorder: RecordsHooks) -> None:
    """Train in the framework: without requests, with requests, with an error, and with what only this framework has."""
    loop = loop_of(where)
    loop.train(POINTS, folder / "plain", [recorder], strict=False)
    loop.train(POINTS, folder / "requests", [recorder, Requests()], strict=False)
    if where != "instructlab":  # after an error, InstructLab drops the hooks that it has not called yet
        with suppress(ArithmeticError):
            loop.train(replace(POINTS, loss=failing_loss()), folder / "error", [recorder], strict=False)
        # A framework may not report the error. Then the garbage collection of the host ends the run, which must not happen
        # while the next training is inside a hook.
        gc.collect()
    if where in SPECIAL:
        SPECIAL[where](loop, folder / "special", recorder)


def accumulate_with_huggingface(loop: Any, folder: Path, recorder: RecordsHooks) -> None:
    loop.train(POINTS, folder, [recorder], gradient_accumulation_steps=2)


def end_an_epoch_early_with_ignite(loop: Any, folder: Path, recorder: RecordsHooks) -> None:
    model = POINTS.made_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = loop.create_supervised_trainer(model, optimizer, POINTS.loss)
    loop.host([recorder], model=model, optimizer=optimizer, run_name="small", runs_folder=folder).attach(trainer)
    trainer.add_event_handler(loop.Events.ITERATION_COMPLETED(once=2), trainer.terminate_epoch)
    trainer.run(POINTS.batches(), max_epochs=2)


def save_with_instructlab(loop: Any, folder: Path, recorder: RecordsHooks) -> None:
    manager = loop.API.CallbackManager()
    manager.add_callback(loop.host([recorder], strict=False))
    loop.Loop(manager, folder, save_samples=4, checkpoint_at_epoch=True, save_last=True).run()


def evaluate_predict_and_preempt_with_lightning(loop: Any, folder: Path, recorder: RecordsHooks) -> None:
    class Module(loop.Module):  # type: ignore[misc]  # the loop is imported at run time
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.validation_step(batch, batch_idx)

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return self(batch[0])

    class Preempts(loop.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, *_: Any) -> None:
            raise import_module("lightning.pytorch.utilities.exceptions").SIGTERMException

    module, batches = Module(POINTS), POINTS.validation_batches()
    trainer = loop.quiet_trainer(folder, [loop.host([recorder]), Preempts()])
    trainer.test(module, batches, verbose=False)
    trainer.predict(module, batches)
    with suppress(SystemExit):
        trainer.fit(module, batches)


def train_with_pipeline_parallelism_in_megatron_bridge(loop: Any, folder: Path, recorder: RecordsHooks) -> None:
    cfg = loop.configuration(folder / "checkpoints", model__pipeline_model_parallel_size=2)
    loop.Loop(cfg, POINTS, [loop.host([recorder], strict=False)], names=loop.megatron_bridge_names).run()


SPECIAL: Mapping[str, Callable[[Any, Path, RecordsHooks], None]] = {
    "huggingface": accumulate_with_huggingface,
    "ignite": end_an_epoch_early_with_ignite,
    "instructlab": save_with_instructlab,
    "lightning": evaluate_predict_and_preempt_with_lightning,
    "megatron_bridge": train_with_pipeline_parallelism_in_megatron_bridge,
}
"""For some frameworks, a function that trains in a way that the loops in `loops` do not have."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("where", FRAMEWORKS)
def test_the_table_says_where_events_are_fired(where: str, tmp_path: Path) -> None:
    try:
        loop_of(where)
    except ModuleNotFoundError as missing:
        pytest.skip(f"{missing.name} is not installed here")
    recorder = RecordsHooks()
    train(where, tmp_path, recorder)
    assert recorder.found == table(where)


@pytest.mark.parametrize("where", FRAMEWORKS)
def test_the_table_and_the_events_that_are_not_fired_exclude_each_other(where: str) -> None:
    try:
        events = import_module(f"callsheet.bridges.{where}.events")
    except ImportError as missing:
        pytest.skip(str(missing))
    fired = {event for events in table(where).values() for event in events}
    assert fired | set(events.NOT_FIRED) <= set(EVENTS)
    assert not fired & set(events.NOT_FIRED)
