"""What firing an event costs without listeners and with 1 to 20 of them, compared with torchtnt's handler in the same run.

The event is one that every step fires. Handlers of other events, such as `on_log`, are timed at every call, which adds two reads
of the clock.

python benchmarks/dispatch.py [--turns 20]
"""

from __future__ import annotations

import argparse
import contextlib
from typing import Any

from torchtnt.framework._callback_handler import CallbackHandler
from torchtnt.framework.callback import Callback as TorchtntCallback

from callsheet import Callback, CallbackManager, Context, RunInfo
from timing import fastest, in_turns, machine, timed

TIMES = 20_000


class OnBackwardEnd(Callback):
    def on_backward_end(self, ctx: Context) -> None:
        pass


class OnForwardEnd(Callback):
    def on_forward_end(self, ctx: Context) -> None:
        pass


class OnStepEnd(TorchtntCallback):  # type: ignore[misc]  # mypy does not follow torchtnt
    def on_train_step_end(self, state: Any, unit: Any) -> None:
        pass


class Flag:
    __slots__ = ("is_up",)

    def __init__(self) -> None:
        self.is_up = False


def subjects(listeners: int) -> dict[str, Any]:
    """Return a turn for each way to fire an event, and for the plain code that it is compared with."""
    ctx = Context(RunInfo("benchmark"))
    manager = CallbackManager([OnBackwardEnd() for _ in range(listeners)])
    manager.add([OnForwardEnd() for _ in range(listeners)])
    spans, has_listeners, flag, null = manager.spans(ctx), manager.has_listeners, Flag(), contextlib.nullcontext()
    theirs = CallbackHandler([OnStepEnd() for _ in range(listeners)])
    bound = tuple(callback.on_backward_end for callback in manager.callbacks[:listeners])

    def nothing(times: int) -> None:
        for _ in range(times):
            pass

    def floor(times: int) -> None:
        for _ in range(times):
            for handler in bound:
                handler(ctx)

    def fire(times: int) -> None:
        for _ in range(times):
            manager.fire("on_backward_end", ctx)

    def torchtnt(times: int) -> None:
        for _ in range(times):
            theirs.on_train_step_end(None, None)

    def span(times: int) -> None:
        for _ in range(times):
            with spans.forward:
                pass

    def an_if(times: int) -> None:
        for _ in range(times):
            if flag.is_up:
                pass

    def has_listeners_if(times: int) -> None:
        for _ in range(times):
            if has_listeners.on_preempt:
                pass

    def null_with(times: int) -> None:
        for _ in range(times):
            with null:
                pass

    def idle_span(times: int) -> None:
        for _ in range(times):
            with spans.optimizer_step:
                pass

    names = {
        "nothing": nothing,
        "floor": floor,
        "fire": fire,
        "torchtnt": torchtnt,
        "span": span,
        "if": an_if,
        "has_listeners": has_listeners_if,
        "nullcontext": null_with,
        "idle span": idle_span,
    }
    return {name: timed(function, TIMES) for name, function in names.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=20)
    turns = parser.parse_args().turns
    print(f"{machine()}; the best of {turns} rounds of {TIMES:,} calls, minus the cost of an empty loop\n")
    print("| | figure | target |\n| --- | --- | --- |")
    for listeners in (1, 2, 3, 5, 8, 20):
        figures = in_turns(subjects(listeners), turns)
        cost = {name: fastest(figures, name) - fastest(figures, "nothing") for name in figures}
        if listeners == 1:
            print(
                f"| an event without listeners: `if has_listeners.on_x`, relative to `if` with a plain attribute | {cost['has_listeners'] / cost['if']:.2f} x | 1.1 x |"
            )
            print(
                f"| a span without listeners, relative to `contextlib.nullcontext` | {cost['idle span'] / cost['nullcontext']:.2f} x | 1.2 x |"
            )
        print(
            f"| {listeners} listeners: `fire`, relative to torchtnt's handler | {cost['fire'] / cost['torchtnt']:.2f} x | 1 x |"
        )
        for name, target in (("fire", 60), ("span", 150)):
            over = cost[name] - 1.3 * cost["floor"]
            print(
                f"| {listeners} listeners: `{name}`, minus 1.3 times a plain `for` loop over bound methods | {over:+.0f} ns | +{target} ns |"
            )


if __name__ == "__main__":
    main()
