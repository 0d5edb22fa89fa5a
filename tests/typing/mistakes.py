"""Mistakes that a type checker finds: each line that ends in `# error` has one, and no other line has; see `test_typing.py`."""

from __future__ import annotations

from typing import Any

from torch import nn

from callsheet import Background, Callback, CallbackManager, Context, Trainer, at, attach, every
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
from callsheet.loggers import ConsoleLogger, FileLogger, OpenTelemetryLogger, WandBLogger
from callsheet.trainer import Parallel, SupervisedTask


class Wrong(Callback):
    phase = "mesure"  # error
    lane = "thread"  # error
    on_error = "ignore"  # error
    ranks = "first"  # error
    requests = ("pause",)  # error

    def on_log(self, ctx: Context, extra: int) -> None:  # error
        print(extra)


class Typos(Callback):
    @at("early")  # error
    def on_train_end(self, ctx: Context) -> None:
        ctx.log({"a": 1.0}, over="average")  # error
        ctx.log({"a": 1.0}, across="min")  # error
        ctx.lgo({"a": 1.0})  # error
        ctx.control.stop()  # error
        ctx.control.pause("now")  # error
        ctx.control.save("now", kind="last")  # error
        print(ctx.stepp)  # error
        print(ctx.loss.itm())  # error
        print(ctx.grad_norm.item())  # error
        print(ctx.loss_dict["loss"].itm())  # error
        ctx.log({"a": 1.0}, weight="heavy")  # error

    @every(1.5)  # error
    def on_log(self, ctx: Context) -> None:
        print(ctx.record.valeus)  # error


def show(ctx: Context) -> None:
    print(ctx.step)


manager = CallbackManager(costs="some")  # error
manager.add(show)  # error
manager.register("on_log", show, phase="late")  # error
manager.register("on_log", show, ranks="one")  # error
EarlyStopper(monitor=3)  # error
EarlyStopper(monitr="loss")  # error
EarlyStopper(monitor="validation/loss", mode="lowest")  # error
CheckpointSaver(monitor="validation/loss", mode="lowest")  # error
ThresholdStopper(monitor="train/loss", threshold=0.1, mode="lowest")  # error
ThresholdStopper(monitor="train/loss", threshold=0.1, records="last")  # error
ExportForInferenceCallback(save_format="torchscript")  # error
HangDetector(action="stop")  # error
ImageVisualizer(mode="boxes")  # error
LossSpikeDetector(action="raise")  # error
MLPerfCallback(mode="mean")  # error
MLPerfCallback(status="laptop")  # error
MLPerfCallback(division="ajar")  # error
MemorySnapshot(stacks="c++")  # error
MemorySnapshot(ranks="first")  # error
NaNMonitor(action="stop")  # error
Notify(on="success")  # error
Notify(on=["end", "success"])  # error
OOMObserver(stacks="c++")  # error
RuntimeEstimator(time_unit="weeks")  # error
SpeedMonitor(precision="int8")  # error
ConsoleLogger(stream="stdin")  # error
FileLogger(capture="all")  # error
OpenTelemetryLogger(steps="some")  # error
WandBLogger(mode="local")  # error
Background(Callback(), overflow="drop_newest")  # error
Parallel("tensor")  # error


def train(model: nn.Module, optimizer: Any) -> None:
    Trainer(model, precision="fp8")  # error
    Trainer(model, parallel="tensor")  # error
    Trainer(model, log_ranks="first")  # error
    Trainer(model, scheduler="cosine")  # error
    Trainer(model, metrics={"accuracy": max})  # error
    SupervisedTask(nn.functional.mse_loss, {"accuracy": max})  # error
    attach(model=model, optimizer=optimizer, scheduler="cosine")  # error
    attach(model=model, optimizer=optimizer, scaler=2.0)  # error
    with attach(model=model, optimizer=optimizer) as run:
        run.log({"a": 1.0}, over="average")  # error
        run.log({"a": 1.0}, across="min")  # error
        run.log({"a": 1.0}, weight="heavy")  # error
