"""A callback made of plain functions, each of which handles one event."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from callsheet.core.callback import Callback, Phase
from callsheet.core.context import Context
from callsheet.core.events import as_event
from callsheet.core.ranks import RankGate
from callsheet.core.spec import import_path
from callsheet.errors import ConfigError

Function = Callable[[Context], Any]


class Lambda(Callback):
    """Call functions at events, each with the context: `Lambda(on_log=print_loss, on_train_end=lambda ctx: print("done"))`.

    Decorators such as `@every("100ba")` and `@rank_zero_only` work on functions as on methods. If a function draws random numbers or
    calls collectives, set `draws_random` or `collective` on the instance, as for any callback. Several Lambdas need no names,
    because a Lambda keeps no state. `manager.register(event, function)` does the same for one function.

    Args:
        name: the name under which the Lambda's errors are reported.
        phase: the Lambda's place in the order of each event's handlers; functions that change training need `"change"` or
            `"decide"`.
        ranks: on which ranks the functions are called.
        functions: one function per event; `on_event` is called at all events. A string, as in YAML, is the function's import path.

    Raises:
        UnknownEventError: there is no such event; the message suggests the nearest name.
        ConfigError: no functions were given, an argument is not callable, or there is no function at an import path.
    """

    def __init__(self, *, name: str = "", phase: Phase = "measure", ranks: RankGate = "all", **functions: Function | str) -> None:
        if not functions:
            raise ConfigError("Lambda() calls nothing; give it functions by event, such as on_log=print_loss")
        self.name, self.phase, self.ranks = name, phase, ranks
        for event, given in functions.items():
            if event != "on_event":
                as_event(event)
            function = import_path(given) if isinstance(given, str) else given
            if not callable(function) or isinstance(function, type):
                raise ConfigError(f"Lambda({event}={given!r}) is not a function; give one that takes the context")
            setattr(self, event, function)
