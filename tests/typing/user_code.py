"""What a user writes. mypy and pyright accept it in their strict modes, against the installed wheel; see `test_typing.py`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import callsheet
from callsheet import (
    Background,
    Callback,
    CallbackManager,
    CallsheetError,
    Context,
    MetricsRecord,
    Outcome,
    Trainer,
    at,
    every,
    rank_zero_only,
)
from callsheet.callbacks import CheckpointSaver, EarlyStopper, SpeedMonitor
from callsheet.errors import ConfigError
from callsheet.loggers import JSONLLogger, Logger
from callsheet.testing import Recorder, check_events


class LossWatch(Callback):
    """A callback with options, an interval and a state."""

    phase = "decide"
    lane = "inline"
    on_error = "isolate"
    requests = ("stop",)

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.worst = 0.0

    @every("10ba", at_end=True)
    def on_train_step_end(self, ctx: Context) -> None:
        loss: float = ctx.loss.item()
        self.worst = max(self.worst, loss)
        ctx.log({"watch/worst": self.worst}, over="last", across="max")
        if loss > self.limit:
            ctx.control.stop(f"the loss is {loss:.3g}")

    @at("report")
    @rank_zero_only
    def on_log(self, ctx: Context) -> None:
        record: MetricsRecord = ctx.record
        print(ctx.run.name, record.step, record.values)

    def state_dict(self) -> Mapping[str, Any]:
        return {"worst": self.worst}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.worst = state["worst"]


class Posts(Callback):
    """A callback with an async handler, which a lane allows."""

    snapshot_fields = ("loss",)

    async def on_train_step_end(self, ctx: Context) -> None:
        print(ctx.step)


class Table(Logger):
    """A logger of the user's own, which overrides what its base class has set."""

    on_error = "raise"

    def on_log(self, ctx: Context) -> None:
        print(ctx.record.values)


def callbacks(folder: Path) -> list[Callback]:
    return [
        LossWatch(limit=10.0),
        Background(Posts(), queue=16, overflow="drop_oldest"),
        CheckpointSaver(save_interval="1ep", keep=2),
        EarlyStopper(monitor="validation/loss", patience="2ep"),
        SpeedMonitor(),
        JSONLLogger(),
        Table(),
    ]


def train(model: Any, optimizer: Any, batches: Iterable[Any], folder: Path) -> Outcome | str | None:
    trainer = Trainer(
        model, optimizer, train_dataloader=batches, callbacks=callbacks(folder), precision="bf16", runs_folder=folder
    )
    try:
        trainer.fit("3ep")
    except CallsheetError as error:
        return str(error)
    return trainer.run.outcome


def by_hand(model: Any, optimizer: Any, batches: Iterable[tuple[Any, Any]]) -> None:
    with callsheet.attach(model=model, optimizer=optimizer, callbacks=[LossWatch(2.0)]) as run:
        for inputs, targets in run.steps(batches):
            loss = ((model(inputs) - targets) ** 2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def functions() -> list[str]:
    manager = CallbackManager(costs="off")

    @manager.register("on_train_step_end", every="100ba", phase="report", on_error="isolate")
    def show(ctx: Context) -> None:
        print(ctx.step)

    manager.register("on_run_end", lambda ctx: None, lane="background")
    recorder = Recorder()
    manager.add(recorder)
    check_events(recorder.events)
    show_again: Any = show
    manager.remove(show_again)
    try:
        manager.add(LossWatch(1.0))
    except ConfigError as error:
        return [str(error)]
    return [callback.name for callback in manager.callbacks]
