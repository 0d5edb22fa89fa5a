"""A callback made of functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from callsheet.callback import Callback, import_path
from callsheet.context import Context
from callsheet.distributed import RankGate
from callsheet.errors import ConfigError
from callsheet.events import as_event

Function = Callable[[Context], Any]


class Lambda(Callback):
    """Call functions at events, each with the context: `Lambda(on_log=print_loss, on_train_end=lambda ctx: print("done"))`.

    What stands on a function, such as `@every("100ba")` or `@rank_zero_only`, counts as on a method. A function that draws random numbers,
    or calls collectives, needs what any callback does: `draws_random` and `collective`, attributes of the instance. It keeps no state, so
    several stand side by side as they are. `manager.register(event, function)` does the same for one function.

    Args:
        name: under which its errors are told.
        phase: its place in each event's order; what acts on training says `"change"` or `"decide"`.
        ranks: on which ranks the functions are called.
        functions: by event; `on_event` is called at all of them. A string, as in a YAML, is the function's import path.

    Raises:
        UnknownEventError: no such event; the message names the nearest.
        ConfigError: no functions, something that cannot be called, or a path at which there is none.
    """

    def __init__(self, *, name: str = "", phase: str = "measure", ranks: RankGate = "all", **functions: Function | str) -> None:
        if not functions:
            raise ConfigError("Lambda() calls nothing; give it functions by event, such as on_log=print_loss")
        self.name, self.phase, self.ranks = name, phase, ranks
        for event, given in functions.items():
            if event != "on_event":
                as_event(event)
            function = import_path(given) if isinstance(given, str) else given
            if not callable(function) or isinstance(function, type):
                raise ConfigError(f"Lambda({event}={given!r}) is no function of the context")
            setattr(self, event, function)
