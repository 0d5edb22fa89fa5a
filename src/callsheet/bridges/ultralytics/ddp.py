"""Sends a host's callbacks to the DDP workers that Ultralytics starts, and reports failed trainings to the host.

With several devices, Ultralytics generates a script that creates a new trainer, and torchrun runs the script in each worker.
This module makes the workers run `ultralytics_worker.py` instead, with the script as its argument, and sends the callbacks in a
signed file.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

from ultralytics.engine import trainer as engine

from callsheet.bridges.host_base import HostBase
from callsheet.core.callback import Callback
from callsheet.core.manager import CallbackManager
from callsheet.errors import NotSupported
from callsheet.transport import pack
from callsheet.transport.preflight import command as command_of

WORKER = "callsheet.bridges.ultralytics_worker"

_sent: dict[str, contextlib.ExitStack] = {}
"""For the path of each generated file, what to undo when the workers that run the file have ended."""


def install() -> None:
    """Replace three functions of Ultralytics: `generate_ddp_command`, `ddp_cleanup` and `BaseTrainer.train`.

    A second call does nothing. The functions stay replaced until the program ends. For trainers without a host, they do the same
    as before.
    """
    if not hasattr(engine.generate_ddp_command, "callsheet_calls"):
        engine.generate_ddp_command = _sending(engine.generate_ddp_command)
        engine.ddp_cleanup = _cleaning(engine.ddp_cleanup)
        engine.BaseTrainer.train = _reporting(engine.BaseTrainer.train)


def host_of(trainer: Any) -> Any:
    """Return the host that is attached to the trainer, or None."""
    owners = (getattr(each, "__self__", None) for functions in trainer.callbacks.values() for each in functions)
    return next((owner for owner in owners if isinstance(owner, HostBase)), None)


def _sending(given: Callable[[Any], tuple[list[str], str]]) -> Callable[[Any], tuple[list[str], str]]:
    def generate_ddp_command(trainer: Any) -> tuple[list[str], str]:
        host = host_of(trainer)
        if host is None:
            return given(trainer)
        payload = pack(_callbacks_of(host), allow_pickle=host.allow_pickle, extra={
            "settings": dict(host._run_options), "strict": host._strict, "only_observes": host.only_observes,
        })  # fmt: skip
        with contextlib.ExitStack() as undo:
            variables = undo.enter_context(payload.post())
            undo.callback(lambda: [os.environ.pop(name, None) for name in variables])
            with _without_host_methods(trainer, host):  # Ultralytics must not pickle the host: the callbacks are sent separately
                command, file = given(trainer)
            # Ultralytics does not know the file's path yet, so callsheet removes the file if an error follows.
            undo.push(functools.partial(_clean_after_error, trainer, file))
            place = command.index(file)
            os.environ.update(variables)  # Ultralytics starts the workers with the environment of this process
            _sent[str(file)] = undo.pop_all()
        return [*command[:place], "--no-python", *command_of(WORKER), *command[place:]], file

    generate_ddp_command.callsheet_calls = given  # type: ignore[attr-defined]
    return generate_ddp_command


def _clean_after_error(trainer: Any, file: str, kind: type[BaseException] | None, *_: Any) -> None:
    if kind is not None:
        engine.ddp_cleanup(trainer, file)


def _cleaning(given: Callable[[Any, str], None]) -> Callable[[Any, str], None]:
    def ddp_cleanup(trainer: Any, file: str) -> None:
        if (undo := _sent.pop(str(file), None)) is not None:
            undo.close()
        given(trainer, file)

    return ddp_cleanup


def _reporting(given: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap Ultralytics' `train`, so that the hosts' `teardown` is called even if training fails, as in Ultralytics since 8.4.177."""

    @functools.wraps(given)
    def train(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return given(trainer, *args, **kwargs)
        finally:
            for each in getattr(trainer, "callbacks", {}).get("teardown", ()):
                if isinstance(getattr(each, "__self__", None), HostBase):
                    each(trainer)

    return train


def _callbacks_of(host: Any) -> list[Callback]:
    """Return the host's callbacks, to send them to the DDP workers.

    Raises:
        NotSupported: the manager has handlers that are functions, which cannot be sent.
    """
    manager: CallbackManager = host.manager
    functions = {each for event in manager.events for each in manager.list_callbacks(event) if not isinstance(each, Callback)}
    if functions:
        names = ", ".join(sorted(getattr(each, "__qualname__", repr(each)) for each in functions))
        raise NotSupported(f"{names}: functions cannot be sent to Ultralytics' DDP workers; make them methods of a callback")
    return manager.callbacks


@contextlib.contextmanager
def _without_host_methods(trainer: Any, host: Any) -> Iterator[None]:
    """While the `with` block runs, remove the host's methods from the trainer's callbacks, so that they are not pickled."""
    kept = {event: list(functions) for event, functions in trainer.callbacks.items()}
    for functions in trainer.callbacks.values():
        functions[:] = [each for each in functions if getattr(each, "__self__", None) is not host]
    try:
        yield
    finally:
        for event, functions in kept.items():
            trainer.callbacks[event][:] = functions
