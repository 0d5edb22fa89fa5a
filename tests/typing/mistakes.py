"""Mistakes that a type checker finds: each line that ends in `# error` has one, and no other line has; see `test_typing.py`."""

from __future__ import annotations

from callsheet import Callback, CallbackManager, Context, at, every
from callsheet.callbacks import EarlyStopper


class Wrong(Callback):
    phase = "mesure"  # error
    lane = "thread"  # error
    on_error = "ignore"  # error

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
        print(ctx.stepp)  # error

    @every(1.5)  # error
    def on_log(self, ctx: Context) -> None:
        print(ctx.record.valeus)  # error


def show(ctx: Context) -> None:
    print(ctx.step)


manager = CallbackManager(costs="some")  # error
manager.add(show)  # error
manager.register("on_log", show, phase="late")  # error
EarlyStopper(monitor=3)  # error
EarlyStopper(monitr="loss")  # error
