"""The object that an AutoModel callback receives instead of AutoModel's recipe when the callback runs in callsheet's loop.

It has some attributes of a recipe, which come from the context.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from callsheet.bridges.guest_base import Facade
from callsheet.core.context import Context
from callsheet.core.ranks import initialized_distributed
from callsheet.core.time import TimeUnit
from callsheet.errors import NotSupported, did_you_mean

UNLIMITED = 2**63 - 1
"""AutoModel's `max_steps` if the number of steps is not known."""


class DistEnv(Facade):
    """The rank, world size and device of this process."""

    REPLACED_OBJECT = "AutoModel's dist_env"

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx

    @property
    def rank(self) -> int:
        """The rank of this process."""
        return self._ctx.run.rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self._ctx.run.world_size

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self._ctx.run.is_world_process_zero

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return torch.device(self._ctx.run.device)

    @property
    def backend(self) -> str:
        """The backend of the process group; the default for the device if there is no process group."""
        distributed = initialized_distributed()
        if distributed is not None:
            return str(distributed.get_backend())
        return "nccl" if self.device.type == "cuda" else "gloo"


class StepScheduler(Facade):
    """The progress of training as AutoModel counts it: the first step and the first epoch have the number 0.

    After training, `step` is the number of steps. A callback may stop training by setting `sigterm_flag` to True, or `max_steps`
    to `step + 1`.
    """

    REPLACED_OBJECT = "AutoModel's step_scheduler"

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._is_in_training = False  # False during on_train_start and on_train_end, True during AutoModel's other hooks
        self._given_max_steps: int | None = None  # the value that a callback has assigned to `max_steps`

    @property
    def step(self) -> int:
        """The number of the current step, counted from 0."""
        return max(0, self._ctx.step - self._is_in_training)

    @property
    def epoch(self) -> int:
        """The number of the current epoch, counted from 0."""
        return max(0, self._ctx.epoch - 1) if self._is_in_training else self._ctx.state.timestamp.epoch

    @property
    def epoch_len(self) -> int | None:
        """The number of steps in an epoch; None if it is not known."""
        return self._ctx.state.epoch_batches

    @property
    def num_epochs(self) -> int | None:
        """The number of epochs; None if it is not known."""
        longest = self._ctx.state.max_duration
        if longest is not None and longest.unit is TimeUnit.EPOCH:
            return int(longest.value)
        if self.epoch_len is None or self.max_steps == UNLIMITED:
            return None
        return -(-self.max_steps // self.epoch_len)

    @property
    def max_steps(self) -> int:
        """The number of steps after which training ends."""
        if self._given_max_steps is not None:
            return self._given_max_steps
        longest = self._ctx.state.max_duration
        if longest is not None and longest.unit is TimeUnit.BATCH:
            return int(longest.value)
        if longest is not None and longest.unit is TimeUnit.EPOCH and self.epoch_len is not None:
            return int(longest.value) * self.epoch_len
        return UNLIMITED

    @max_steps.setter
    def max_steps(self, steps: int) -> None:
        """Stop training after the current step. Raise NotSupported if `steps` is not reached with the current step."""
        if steps > self.step + 1:
            raise NotSupported(
                f"{self.REPLACED_OBJECT}: max_steps={steps} at step {self.step}: a guest can end training only with the current step, not later"
            )
        self._given_max_steps = steps
        self._stop("max_steps")

    @property
    def is_last_step(self) -> bool:
        """Whether the current step is the last one of training."""
        return self.step + 1 >= self.max_steps

    @property
    def is_last_batch(self) -> bool:
        """Whether the current step is the epoch's last one; False if the epoch's length is not known."""
        return self.epoch_len is not None and self.step % self.epoch_len == self.epoch_len - 1

    @property
    def sigterm_flag(self) -> bool:
        """Whether a stop was requested, by a preemption signal or by a callback."""
        return self._ctx.control.stop_requested is not None

    @sigterm_flag.setter
    def sigterm_flag(self, value: bool) -> None:
        """Stop training after the current step, if `value` is True."""
        if value:
            self._stop("sigterm_flag")

    @property
    def sigterm_received(self) -> bool:
        """The same as `sigterm_flag`."""
        return self.sigterm_flag

    def _stop(self, how: str) -> None:
        self._ctx.control.stop(f"step_scheduler.{how}", resumable=True)


class ConfigNode:
    """A configuration that is read by attributes or by dotted names: `cfg.model.path`, `cfg.get("model.path", None)`.

    Args:
        values: the values by name; a nested mapping becomes a `ConfigNode`.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            self.__dict__[str(name)] = ConfigNode(value) if isinstance(value, Mapping) else value

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value under a dotted name.

        Args:
            name: the name, such as `model.path`.
            default: returned if there is no such value.
        """
        found: Any = self
        for part in name.split("."):
            if not isinstance(found, ConfigNode) or part not in found.__dict__:
                return default
            found = found.__dict__[part]
        return found

    def set_by_dotted(self, name: str, value: Any) -> None:
        """Set the value under a dotted name, such as `model.path`. Create the nested nodes of this name that do not exist yet.

        Args:
            name: the name, such as `model.path`.
            value: the new value; a mapping becomes a `ConfigNode`.
        """
        *path, last = name.split(".")
        node = self
        for part in path:
            if not isinstance(node.__dict__.get(part), ConfigNode):
                node.__dict__[part] = ConfigNode({})
            node = node.__dict__[part]
        node.__dict__[last] = ConfigNode(value) if isinstance(value, Mapping) else value

    def to_dict(self) -> dict[str, Any]:
        """Return the values as a dict; a nested `ConfigNode` becomes a nested dict."""
        return {name: value.to_dict() if isinstance(value, ConfigNode) else value for name, value in self.__dict__.items()}

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the configuration has no {name!r}{did_you_mean(name, self.__dict__)}")

    def __contains__(self, name: str) -> bool:
        missing = object()
        return self.get(name, missing) is not missing

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.to_dict()})"


class RecipeFacade(Facade):
    """Takes the place of AutoModel's recipe for AutoModel's callbacks, with only those attributes that these callbacks may use."""

    REPLACED_OBJECT = "AutoModel's recipe"
    WRITABLE: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._dist_env, self._step_scheduler = DistEnv(ctx), StepScheduler(ctx)
        self._cfg: Any = None

    @property
    def dist_env(self) -> DistEnv:
        """The rank, world size and device of this process."""
        return self._dist_env

    @property
    def step_scheduler(self) -> StepScheduler:
        """The recipe's step scheduler, which counts the steps and epochs."""
        return self._step_scheduler

    @property
    def cfg(self) -> Any:
        """The run's configuration."""
        if self._cfg is None:
            self._cfg = ConfigNode(self._ctx.run.config)
        return self._cfg

    @property
    def model_parts(self) -> list[Any]:
        """The model, in a list."""
        return [self._ctx.model]

    @property
    def model(self) -> Any:
        """The model."""
        return self._ctx.model

    @property
    def optimizer(self) -> list[Any]:
        """The optimizer, in a list."""
        return [self._ctx.optimizer]

    @property
    def lr_scheduler(self) -> list[Any] | None:
        """The learning rate scheduler, in a list; None if there is none."""
        return None if self._ctx.scheduler is None else [self._ctx.scheduler]
