"""What a callback of another framework costs per step as a guest, compared with its own framework's dispatch.

The callbacks do nothing, and handle the hooks of a step that the table names. In the framework: its own dispatcher is called for
ten such callbacks with the arguments that its training loop passes. As a guest: all events of a step are fired during a run with
ten guests, and the time of the same run without guests is subtracted; this includes what the guests share. In both, the calls
follow each other without any training work between them.

    python benchmarks/guests.py [--turns 15] [--frameworks lightning,ignite]
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

os.environ.setdefault("KERAS_BACKEND", "torch")

import torch
from torch import nn

from callsheet import Callback, CallbackManager, Context
from callsheet.testing import FakeLoop
from timing import fastest, in_turns, machine

TESTS = str(Path(__file__).resolve().parent.parent / "tests")
STEPS, GUESTS = 1000, 10
STEP = [
    "on_fetch_start",
    "on_fetch_end",
    *(
        f"on_{name}"
        for name in ("train_step_start", "forward_backward_start", "microbatch_start", "forward_start", "forward_end")
    ),
    *(f"on_{name}" for name in ("loss_start", "loss_end", "backward_start", "backward_end", "microbatch_end")),
    *(f"on_{name}" for name in ("forward_backward_end", "clip_gradients_start", "clip_gradients_end", "optimizer_step_start")),
    *(f"on_{name}" for name in ("optimizer_step_end", "train_step_end")),
]
"""The events of a step, in the order in which they are fired."""


class Framework(NamedTuple):
    """A framework's dispatch of one step, and its callbacks."""

    name: str
    hooks: str
    make_callback: Callable[[], Any]
    """Returns a new callback that does nothing."""
    dispatch: Callable[[list[Any]], Callable[[], Any]]
    """Returns a function that calls these callbacks for one step, as the framework's loop does."""
    guest: Callable[[Any], Any]
    """Makes a guest of a callback."""


class FireSteps(Callback):
    """Fires the events of `STEPS` steps at the end of a run's first step, and measures the time."""

    phase = "report"

    def __init__(self) -> None:
        self.manager: Any = None
        self.microseconds = 0.0
        """The time of one step."""

    def on_train_step_end(self, ctx: Context) -> None:
        if self.microseconds:
            return
        self.microseconds, fire, state, step = 1.0, self.manager.fire, ctx.state, ctx.step
        at_first, before_end, end = state.timestamp, STEP[:-1], STEP[-1]
        began = time.thread_time()
        for _ in range(STEPS):
            ctx.step += 1
            for event in before_end:
                fire(event, ctx)
            state.timestamp = state.timestamp.next_batch()
            fire(end, ctx)
        self.microseconds = (time.thread_time() - began) / STEPS * 1e6
        ctx.step, state.timestamp = step, at_first


def does_nothing(*_: Any, **__: Any) -> None: ...


def doing_nothing(base: type, *hooks: str) -> Callable[[], Any]:
    """Return a class that overrides these hooks with a function that does nothing."""
    return type("DoesNothing", (base,), dict.fromkeys(hooks, does_nothing))


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(2, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def huggingface() -> Framework:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_callback import CallbackHandler

    from callsheet.bridges.huggingface import guest

    hooks = ("on_step_begin", "on_pre_optimizer_step", "on_optimizer_step", "on_step_end")

    def dispatch(callbacks: list[Any]) -> Callable[[], Any]:
        handler = CallbackHandler(callbacks, *model_and_optimizer()[:1], None, model_and_optimizer()[1], None)
        arguments, state, control = (
            TrainingArguments(output_dir=tempfile.mkdtemp(), report_to=[]),
            TrainerState(),
            TrainerControl(),
        )
        methods = [getattr(handler, hook) for hook in hooks]

        def step() -> None:
            for method in methods:
                method(arguments, state, control)

        return step

    return Framework("Transformers", ", ".join(hooks), doing_nothing(TrainerCallback, *hooks), dispatch, guest)


def lightning() -> Framework:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.trainer.call import _call_callback_hooks

    from callsheet.bridges.lightning import guest

    hooks = ("on_train_batch_start", "on_before_optimizer_step", "on_train_batch_end")

    def dispatch(callbacks: list[Any]) -> Callable[[], Any]:
        trainer = Trainer(
            callbacks=callbacks, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            accelerator="cpu",
        )  # fmt: skip
        trainer.strategy._lightning_module = LightningModule()
        optimizer, batch = model_and_optimizer()[1], torch.zeros(4, 2)

        def step() -> None:
            _call_callback_hooks(trainer, "on_train_batch_start", batch, 0)
            _call_callback_hooks(trainer, "on_before_optimizer_step", optimizer)
            _call_callback_hooks(trainer, "on_train_batch_end", None, batch, 0)

        return step

    return Framework("Lightning", ", ".join(hooks), doing_nothing(Callback, *hooks), dispatch, guest)


def ignite() -> Framework:
    from ignite.engine import Engine, Events

    from callsheet.bridges.ignite import guest

    hooks = (Events.ITERATION_STARTED, Events.ITERATION_COMPLETED)

    class DoesNothing:
        def attach(self, engine: Any) -> None:
            for hook in hooks:
                engine.add_event_handler(hook, self)

        def __call__(self, engine: Any) -> None: ...

    def dispatch(callbacks: list[Any]) -> Callable[[], Any]:
        engine = Engine(does_nothing)
        for each in callbacks:
            each.attach(engine)

        def step() -> None:
            for hook in hooks:
                engine._fire_event(hook)

        return step

    return Framework("Ignite", ", ".join(hook.name for hook in hooks), DoesNothing, dispatch, guest)


def torchtnt() -> Framework:
    from torchtnt.framework._callback_handler import CallbackHandler
    from torchtnt.framework.callback import Callback

    from callsheet.bridges.torchtnt import guest

    hooks = ("on_train_step_start", "on_train_step_end")

    def dispatch(callbacks: list[Any]) -> Callable[[], Any]:
        handler, state, unit = CallbackHandler(callbacks), SimpleNamespace(), SimpleNamespace()

        def step() -> None:
            handler.on_train_step_start(state, unit)
            handler.on_train_step_end(state, unit)

        return step

    return Framework("torchtnt", ", ".join(hooks), doing_nothing(Callback, *hooks), dispatch, guest)


def keras() -> Framework:
    from keras.callbacks import Callback, CallbackList

    from callsheet.bridges.keras import guest

    hooks = ("on_train_batch_begin", "on_train_batch_end")

    def dispatch(callbacks: list[Any]) -> Callable[[], Any]:
        several, logs = CallbackList(callbacks), {"loss": 1.0}

        def step() -> None:
            several.on_train_batch_begin(1)
            several.on_train_batch_end(1, logs)

        return step

    return Framework("Keras", ", ".join(hooks), doing_nothing(Callback, *hooks), dispatch, guest)


def composer() -> Framework:
    sys.path.insert(0, TESTS)
    importlib.import_module("bridges.loops.composer")  # it declares operators that torchvision needs
    from composer.core import Callback, Engine, Event, State
    from composer.loggers import Logger

    from callsheet.bridges.composer import guest

    events = (Event.BATCH_START, Event.BEFORE_FORWARD, Event.AFTER_FORWARD, Event.BATCH_END)

    def dispatch(callbacks: list[Any]) -> Callable[[], Any]:
        model = nn.Linear(2, 1)
        state = State(
            model=model, rank_zero_seed=1, run_name="benchmark", device=importlib.import_module("composer.devices").DeviceCPU(),
            callbacks=callbacks, max_duration="1ep",
        )  # fmt: skip
        state.set_dataloader([0], "train")
        engine = Engine(state=state, logger=Logger(state))

        def step() -> None:
            for event in events:
                engine.run_event(event)

        return step

    hooks = [event.value for event in events]
    return Framework("Composer", ", ".join(hooks), doing_nothing(Callback, *hooks), dispatch, guest)


def megatron_bridge() -> Framework:
    sys.path.insert(0, TESTS)
    # Only the module of the callbacks is loaded, because the rest of the package needs a GPU.
    package: Any = importlib.import_module("bridges.loops.megatron_bridge").interface()
    if package is None:
        raise ModuleNotFoundError(name="megatron.bridge")

    from callsheet.bridges.megatron_bridge import guest

    hooks = ("on_train_step_start", "on_train_step_end")

    def dispatch(callbacks: list[Any]) -> Callable[[], Any]:
        manager = package.CallbackManager()
        manager.add(callbacks)
        state, chunks, losses = SimpleNamespace(), [nn.Linear(2, 1)], {"lm loss": torch.tensor(1.0)}
        made = package.CallbackContext

        def step() -> None:
            for hook in hooks:
                if package.should_fire(manager, hook):
                    manager.fire(hook, made(state=state, model=chunks, user_state=manager.user_state, loss_dict=losses))

        return step

    return Framework("Megatron Bridge", ", ".join(hooks), doing_nothing(package.Callback, *hooks), dispatch, guest)


# Composer is first, because its loop declares operators that torchvision needs.
FRAMEWORKS = (
    composer,
    huggingface,
    lightning,
    ignite,
    torchtnt,
    keras,
    megatron_bridge,
)


def in_framework(step: Callable[[], Any]) -> Callable[[], float]:
    """Return a turn that measures the microseconds per step of this function."""

    def turn() -> float:
        began = time.thread_time()
        for _ in range(STEPS):
            step()
        return (time.thread_time() - began) / STEPS * 1e6

    return turn


def in_callsheet(guests: Callable[[], list[Any]], folder: str) -> Callable[[], float]:
    """Return a turn that measures the microseconds per step of a run with these guests. `guests` makes new ones for each run."""

    def turn() -> float:
        fires = FireSteps()
        fires.manager = CallbackManager([*guests(), fires], costs="off")
        FakeLoop(fires.manager, [1.0] * 2, log_interval=2, folder=folder).run()
        return fires.microseconds

    return turn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--frameworks", default="", help="such as lightning,ignite; by default all that are installed")
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    wanted = set(given.frameworks.split(",")) - {""}
    lines, missing = [], []
    for describe in FRAMEWORKS:
        if wanted and describe.__name__ not in wanted:
            continue
        try:
            framework = describe()
        except ModuleNotFoundError as error:
            missing.append(f"{describe.__name__} (no module {error.name})")
            continue
        print(framework.name, file=sys.stderr, flush=True)
        made = [framework.make_callback() for _ in range(GUESTS)]
        with tempfile.TemporaryDirectory() as folder:
            figures = in_turns(
                {
                    "framework": in_framework(framework.dispatch(made)),
                    "none": in_callsheet(list, folder),
                    "guests": in_callsheet(
                        lambda framework=framework: [  # type: ignore[misc]
                            framework.guest(framework.make_callback(), name=str(i)) for i in range(GUESTS)
                        ],
                        folder,
                    ),
                },
                given.turns,
            )
        own = fastest(figures, "framework") / GUESTS
        guest = (fastest(figures, "guests") - fastest(figures, "none")) / GUESTS
        lines.append(f"| {framework.name} | {framework.hooks} | {own:.2f} | {guest:.2f} | {guest / own:.2f} x |")
    print(
        f"{machine()}; the best of {given.turns} rounds of {STEPS} steps, ten callbacks, one thread, processor time of the thread\n"
    )
    print("| callback of | events | µs per step in its framework | µs per step as a guest | ratio |")
    print("| --- | --- | --- | --- | --- |")
    print("\n".join(lines))
    if missing:
        print(f"\nNot installed here: {', '.join(missing)}.")


if __name__ == "__main__":
    main()
