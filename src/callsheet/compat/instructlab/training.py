"""`run_training` runs the recipe `finetune` on several ranks with InstructLab's arguments.

The other names of `instructlab.training` are here too.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from callsheet.bridges.instructlab.names import TrainerCallback, TrainingContext
from callsheet.compat.instructlab import config
from callsheet.compat.instructlab.arguments import DistributedBackend, LoraOptions, TorchrunArgs, TrainingArgs
from callsheet.core.callback import Callback
from callsheet.errors import ConfigError

__all__ = [
    "DistributedBackend",
    "LoraOptions",
    "TorchrunArgs",
    "TrainerCallback",
    "TrainingArgs",
    "TrainingContext",
    "run_training",
]


def __getattr__(name: str) -> Any:
    if name in config.NOT_OFFERED:
        return getattr(config, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def run_training(torch_args: TorchrunArgs, train_args: TrainingArgs) -> dict[str, float]:
    """Fine-tune a model on several ranks of this machine.

    Callbacks are sent to the ranks with their constructors' arguments, and rebuilt there. A callback that would change on the way
    is rejected before anything starts. The callbacks in this process are never called. A script may call this function at its top
    level: when the ranks import the script for the classes that it defines, the call does nothing.

    Args:
        torch_args: the number of ranks.
        train_args: the model, the data and the training options.

    Returns:
        The last loss on each evaluated dataset, by its name.

    Raises:
        ConfigError: the arguments cannot work.
        TransportError: a callback cannot be sent; the message says why, and has a hint.
        LaunchError: a rank failed; this is a RuntimeError.
    """
    from callsheet.launcher import launch  # imported only here, because it needs torch, which is not needed to define callbacks
    from callsheet.transport import payload

    if payload.is_opening:  # a rank or the preflight check is importing the user's script: do not start training again
        return {}
    train_args.check()
    ranks = torch_args.ranks
    if train_args.effective_batch_size % ranks:
        raise ConfigError(
            f"effective_batch_size={train_args.effective_batch_size} does not divide over {ranks} ranks; give a multiple of it"
        )
    # Import `job` only here, because it imports all recipes, which the preflight check of the callbacks does not need.
    from callsheet.compat.instructlab.job import rows_of

    rows = rows_of(train_args)
    callbacks = [each if isinstance(each, Callback) else _SentCallback.of(each) for each in train_args.callbacks or ()]
    results = launch(
        train_on_rank,
        (replace(train_args, callbacks=None), *rows),
        callbacks=callbacks,
        nproc_per_node=ranks,
        allow_pickle=train_args.allow_pickle,
    )
    found: dict[str, float] = results[0]
    return found


class _SentCallback(Callback):
    """One of InstructLab's callbacks in a form that can be sent to a rank: its class and its constructor's arguments."""

    def __init__(self, kind: type, args: list[Any], kwargs: dict[str, Any]) -> None:
        self.foreign = kind(*args, **kwargs)

    @classmethod
    def of(cls, foreign: Any) -> _SentCallback:
        """Wrap one of InstructLab's callbacks, so that its class, its constructor's arguments and its current state can be sent."""
        args, kwargs = getattr(foreign, "_arguments", ((), {}))
        wrapper = cls.__new__(cls, type(foreign), list(args), dict(kwargs))
        wrapper.foreign, wrapper.name = foreign, type(foreign).__name__
        return wrapper

    def state_dict(self) -> Mapping[str, Any]:
        state: Mapping[str, Any] = self.foreign.state_dict() if hasattr(self.foreign, "state_dict") else {}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state:
            self.foreign.load_state_dict(state)


def train_on_rank(args: TrainingArgs, train: str, validation: str | None, callbacks: list[Callback]) -> dict[str, float]:
    """Run the training on one rank. The function `run_training` starts this function on each rank."""
    from callsheet.compat.instructlab.job import job_of  # imported only here, because `job` imports all recipes

    logging.basicConfig(level=args.log_level, format="%(message)s")
    job = job_of(args, train, validation, [each.foreign if isinstance(each, _SentCallback) else each for each in callbacks])
    job.setup()
    job.run()
    return {name: found["loss"] for name, found in job.evaluated.items()}
