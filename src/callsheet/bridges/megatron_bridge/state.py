"""The objects that Megatron Bridge's callbacks receive as `context.state` in callsheet's loop."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor

from callsheet.bridges.guest_base import Facade, NotOnTheList
from callsheet.bridges.megatron_bridge.names import CallbackContext


class _Moved(Facade):
    """Calls a function whenever a callback sets the attribute that `_WATCHED_ATTRIBUTE` names, because this may end training."""

    _WATCHED_ATTRIBUTE: ClassVar[str]
    __slots__ = ("_on_move",)  # a slot, so that `vars` of the object does not contain `_on_move`

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == self._WATCHED_ATTRIBUTE and (on_move := getattr(self, "_on_move", None)) is not None:
            on_move()

    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__)  # leaves out the slot `_on_move`, because setting an attribute of a copy must not end training


class TrainState(_Moved):
    """The progress of training. As in Megatron Bridge, a callback ends training by setting `step` to `train_iters` or more."""

    REPLACED_OBJECT = "Megatron Bridge's TrainState"
    WRITABLE = frozenset({"step", "do_valid", "do_test"})
    _WATCHED_ATTRIBUTE = "step"

    def __init__(self) -> None:
        self.flops_per_sample = 0.0  # 0 if the number is not known
        self.step = self.consumed_train_samples = self.skipped_train_samples = self.consumed_valid_samples = 0
        self.do_train = self.do_valid = self.do_test = True

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__:
            super().__setattr__(name, value)
        else:
            self.__dict__[name] = value

    @property
    def floating_point_operations_so_far(self) -> float:
        """The number of floating-point operations so far. Reading it raises an error if `flops_per_sample` is not known."""
        if not self.flops_per_sample:
            raise NotOnTheList(f"{self.REPLACED_OBJECT}: the number of floating-point operations per sample is not known")
        return self.consumed_train_samples * self.flops_per_sample


class Timer:
    """Adds up the seconds between `start` and `stop`."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._began: float | None = None

    def start(self, barrier: bool = False) -> None:
        """Start the timer. `barrier` is ignored."""
        self._began = time.perf_counter()

    def stop(self, barrier: bool = False) -> None:
        """Stop the timer. `barrier` is ignored."""
        if self._began is not None:
            self._seconds, self._began = self.active_time(), None

    def active_time(self) -> float:
        """Return the seconds that this timer has measured so far."""
        return self._seconds + (time.perf_counter() - self._began if self._began is not None else 0.0)

    def reset(self) -> None:
        """Set the seconds to 0. A running timer continues."""
        self._seconds = 0.0
        if self._began is not None:
            self._began = time.perf_counter()

    def elapsed(self, reset: bool = True, barrier: bool = False) -> float:
        """Return the seconds that this timer has measured so far, and reset it unless `reset` is False."""
        seconds = self.active_time()
        if reset:
            self.reset()
        return seconds


class Timers:
    """Timers by name: `timers("interval-time").elapsed(reset=False)`. The first call with a name creates its timer."""

    def __init__(self) -> None:
        self._timers: dict[str, Timer] = {}

    def __call__(self, name: str, log_level: int | None = None) -> Timer:
        return self._timers.setdefault(name, Timer())


class Training(_Moved):
    """What callbacks get as `context.state.cfg.train` if the user gave no Megatron configuration: only the length of training."""

    REPLACED_OBJECT = "Megatron Bridge's cfg.train"
    WRITABLE = frozenset({"train_iters"})
    _WATCHED_ATTRIBUTE = "train_iters"

    def __init__(self) -> None:
        self.train_iters: int | None = None


class Config(Facade):
    """What callbacks get as `context.state.cfg` if the user gave no Megatron configuration."""

    REPLACED_OBJECT = "Megatron Bridge's configuration"

    def __init__(self) -> None:
        self.__dict__["train"] = Training()


class GlobalState(Facade):
    """The `context.state` of Megatron Bridge's callbacks. As in Megatron Bridge, callbacks may add attributes to it."""

    REPLACED_OBJECT = "Megatron Bridge's GlobalState"
    FIXED: ClassVar[frozenset[str]] = frozenset(
        {"cfg", "train_state", "timers", "signal_handler", "straggler_timer", "energy_monitor", "nvrx_straggler_manager"}
        | {"fault_tolerance_state", "async_calls_queue", "initialize_async_checkpoint_worker", "reset_for_restart"}
    )
    """The attributes that belong to Megatron Bridge, whether or not this class has them. Callbacks may not set them."""

    def __init__(self, cfg: Any = None) -> None:
        self.__dict__.update(
            cfg=cfg if cfg is not None else Config(),
            train_state=TrainState(),
            timers=Timers(),
            start_time=time.time(),
            tensorboard_logger=None,
            wandb_logger=None,
            mlflow_logger=None,
            comet_logger=None,
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.FIXED:
            super().__setattr__(name, value)  # raises an error, because the attribute may not be set
        self.__dict__[name] = value


def call_when_moved(state: GlobalState, function: Callable[[], object]) -> None:
    """Call `function` whenever a callback sets `train_state.step` or `cfg.train.train_iters`.

    If the user has given the configuration, a change of its `train_iters` is not noticed.
    """
    for each in (state.train_state, state.cfg.train):
        if isinstance(each, _Moved):
            object.__setattr__(each, "_on_move", function)


class StepContext(CallbackContext):
    """The context of `on_train_step_end`. As in Megatron Bridge, `grad_norm` is a number, and reading it waits for the device."""

    @property
    def grad_norm(self) -> float | None:
        """The total norm of the gradients before clipping."""
        norm = self.__dict__["grad_norm"]
        if isinstance(norm, Tensor):
            self.__dict__["grad_norm"] = norm = norm.item()
        return norm  # type: ignore[no-any-return]

    @grad_norm.setter
    def grad_norm(self, norm: Any) -> None:
        """Set the norm, which may be a tensor on the device."""
        self.__dict__["grad_norm"] = norm
