"""What a user writes. mypy in its strict mode and pyright in its mode `standard` accept it, against the installed wheel; see `test_typing.py`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torchmetrics import MeanMetric

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
from callsheet.callbacks import (
    CheckpointSaver,
    EarlyStopper,
    ExportForInferenceCallback,
    HangDetector,
    ImageVisualizer,
    LossSpikeDetector,
    MemorySnapshot,
    MLPerfCallback,
    NaNMonitor,
    Notify,
    OOMObserver,
    RuntimeEstimator,
    SpeedMonitor,
    ThresholdStopper,
)
from callsheet.errors import ConfigError
from callsheet.loggers import ConsoleLogger, FileLogger, JSONLLogger, Logger, OpenTelemetryLogger, WandBLogger
from callsheet.testing import Recorder, check_events
from callsheet.trainer import Parallel, SupervisedTask


class LossWatch(Callback):
    """A callback with options, an interval and a state."""

    phase = "decide"
    lane = "inline"
    on_error = "isolate"
    requests = ("stop", "save")
    ranks = "all"

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.worst = 0.0

    @every("10ba", at_end=True)
    def on_train_step_end(self, ctx: Context) -> None:
        loss: float = ctx.loss.item()
        self.worst = max(self.worst, loss)
        ctx.log({"watch/worst": self.worst}, over="last", across="max")
        ctx.log({"watch/loss": ctx.loss}, over="mean", weight=ctx.state.timestamp.sample)
        if ctx.grad_norm is not None:
            ctx.log({"watch/norm": ctx.grad_norm, **ctx.loss_dict}, over="mean", weight=ctx.grad_norm)
        if loss > self.limit:
            ctx.control.stop(f"the loss is {loss:.3g}")

    def on_checkpoint_due(self, ctx: Context) -> None:
        ctx.control.save("the loss is low", kind="best", metric="watch/worst")

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
    ranks = {0, 8}

    async def on_train_step_end(self, ctx: Context) -> None:
        print(ctx.step)


class Table(Logger):
    """A user's own logger, which overrides settings of its base class."""

    on_error = "raise"
    ranks = "all"

    def on_log(self, ctx: Context) -> None:
        print(ctx.record.values)


def callbacks(folder: Path, mode: Literal["min", "max"] = "min") -> list[Callback]:
    return [
        LossWatch(limit=10.0),
        Background(Posts(), queue=16, overflow="drop_oldest"),
        CheckpointSaver(save_interval="1ep", keep=2, monitor="validation/loss", mode=mode),
        EarlyStopper(monitor="validation/loss", mode=mode, patience="2ep"),
        ThresholdStopper(monitor="validation/accuracy", threshold=0.9, mode=mode, records="epoch"),
        SpeedMonitor(precision="bf16"),
        JSONLLogger(),
        Table(),
    ]


def words() -> list[Callback]:
    """Pass every argument of a built-in whose type is a `Literal`."""
    return [
        ExportForInferenceCallback(save_format="onnx", dynamic_shapes="all"),
        HangDetector(action="kill"),
        ImageVisualizer(mode="segmentation"),
        LossSpikeDetector(action="save"),
        MLPerfCallback(mode="max", status="cloud", division="closed"),
        MemorySnapshot(stacks="all", ranks="zero"),
        NaNMonitor(action="warn"),
        Notify(on=["failure", "end"]),
        Notify(on="failure"),
        OOMObserver(stacks="python"),
        RuntimeEstimator(time_unit="hours"),
        ConsoleLogger(stream="stderr"),
        FileLogger(capture="fd"),
        OpenTelemetryLogger(steps="all"),
        WandBLogger(mode="offline"),
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


def halved(optimizer: Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 0.5**step)


def on_several_ranks(model: nn.Module, optimizer: Optimizer, batches: Iterable[Any]) -> None:
    task = SupervisedTask(nn.functional.mse_loss, {"mean": MeanMetric()})
    Trainer(model, task, batches, optimizer=optimizer, scheduler=halved(optimizer), parallel="fsdp", log_ranks="all")
    metrics = {"mean": MeanMetric()}
    parallel = Parallel("ddp", options={"static_graph": True})
    with Trainer(
        model, nn.functional.mse_loss, batches, optimizer=optimizer, scheduler=halved, metrics=metrics, parallel=parallel
    ) as trainer:
        trainer.fit()
        if trainer.scheduler is not None:
            print(trainer.scheduler.get_last_lr())


def by_hand(model: nn.Module, optimizer: Optimizer, batches: Iterable[tuple[Any, Any]]) -> None:
    scheduler, scaler = halved(optimizer), torch.amp.GradScaler()
    with callsheet.attach(
        model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler, callbacks=[LossWatch(2.0)]
    ) as run:
        for inputs, targets in run.steps(batches):
            loss = ((model(inputs) - targets) ** 2).mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            optimizer.zero_grad()
            run.log({"mine/error": loss}, over="mean", across="max", weight=len(inputs))


def functions() -> list[str]:
    manager = CallbackManager(costs="off")

    @manager.register("on_train_step_end", every="100ba", phase="report", on_error="isolate")
    def show(ctx: Context) -> None:
        print(ctx.step)

    manager.register("on_run_end", lambda ctx: None, lane="background", ranks="local_zero")
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
