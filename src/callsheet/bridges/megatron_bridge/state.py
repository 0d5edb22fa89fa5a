"""What Megatron Bridge's callbacks find at `context.state`, in our loop."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor

from callsheet.bridges.guest_base import Facade, NotOnTheList
from callsheet.bridges.megatron_bridge.names import CallbackContext


class _Moved(Facade):
    """A facade with a number by which a callback may end training: who is to know of that is told when it is written."""

    _MOVES: ClassVar[str]
    __slots__ = ("_tells",)  # not among what a callback finds in `vars`

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == self._MOVES and (tells := getattr(self, "_tells", None)) is not None:
            tells()

    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__)  # a copy tells nobody


class TrainState(_Moved):
    """How far training is. A callback may end training as it would at home, by a `step` that is not below `cfg.train.train_iters`."""

    OF = "Megatron Bridge's TrainState"
    WRITABLE = frozenset({"step", "do_valid", "do_test"})
    _MOVES = "step"

    def __init__(self) -> None:
        self.flops_per_sample = 0.0  # where they are known
        self.step = self.consumed_train_samples = self.skipped_train_samples = self.consumed_valid_samples = 0
        self.do_train = self.do_valid = self.do_test = True

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__:
            super().__setattr__(name, value)
        else:
            self.__dict__[name] = value

    @property
    def floating_point_operations_so_far(self) -> float:
        """Of the steps up to this one; where it is known what a sample takes."""
        if not self.flops_per_sample:
            raise NotOnTheList(f"{self.OF}: it is not known here how many operations a sample takes")
        return self.consumed_train_samples * self.flops_per_sample


class Timer:
    """Seconds between `start` and `stop`, added up."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._began: float | None = None

    def start(self, barrier: bool = False) -> None:
        """Begin; a `barrier` is not waited for."""
        self._began = time.perf_counter()

    def stop(self, barrier: bool = False) -> None:
        """End."""
        if self._began is not None:
            self._seconds, self._began = self.active_time(), None

    def active_time(self) -> float:
        """Seconds until now."""
        return self._seconds + (time.perf_counter() - self._began if self._began is not None else 0.0)

    def reset(self) -> None:
        """Begin at 0 again."""
        self._seconds = 0.0
        if self._began is not None:
            self._began = time.perf_counter()

    def elapsed(self, reset: bool = True, barrier: bool = False) -> float:
        """Seconds until now, or since the last such call."""
        seconds = self.active_time()
        if reset:
            self.reset()
        return seconds


class Timers:
    """Timers by name: `timers("interval-time").elapsed(reset=False)`. There is one for every name that is asked for."""

    def __init__(self) -> None:
        self._timers: dict[str, Timer] = {}

    def __call__(self, name: str, log_level: int | None = None) -> Timer:
        return self._timers.setdefault(name, Timer())


class Training(_Moved):
    """What is known of the length of training where there is no configuration of Megatron's."""

    OF = "Megatron Bridge's cfg.train"
    WRITABLE = frozenset({"train_iters"})
    _MOVES = "train_iters"

    def __init__(self) -> None:
        self.train_iters: int | None = None


class Config(Facade):
    """The configuration, where there is none of Megatron's."""

    OF = "Megatron Bridge's configuration"

    def __init__(self) -> None:
        self.__dict__["train"] = Training()


class GlobalState(Facade):
    """What callbacks find at `context.state`. What they set on it under a name of their own is kept for them, as at home."""

    OF = "Megatron Bridge's GlobalState"
    FIXED: ClassVar[frozenset[str]] = frozenset(
        {"cfg", "train_state", "timers", "signal_handler", "straggler_timer", "energy_monitor", "nvrx_straggler_manager"}
        | {"fault_tolerance_state", "async_calls_queue", "initialize_async_checkpoint_worker", "reset_for_restart"}
    )
    """What belongs to the system, whether or not it is here."""

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
            super().__setattr__(name, value)  # which refuses it
        self.__dict__[name] = value


def tell_when_moved(state: GlobalState, told: Callable[[], object]) -> None:
    """Call `told` whenever a callback writes `train_state.step` or `cfg.train.train_iters`. Of a configuration that is not ours nobody hears."""
    for each in (state.train_state, state.cfg.train):
        if isinstance(each, _Moved):
            object.__setattr__(each, "_tells", told)


class StepContext(CallbackContext):
    """Of a step's end: the norm is a number once it is looked at, which waits for the device, as at home."""

    @property
    def grad_norm(self) -> float | None:
        """The gradients' total norm before clipping."""
        norm = self.__dict__["grad_norm"]
        if isinstance(norm, Tensor):
            self.__dict__["grad_norm"] = norm = norm.item()
        return norm  # type: ignore[no-any-return]

    @grad_norm.setter
    def grad_norm(self, norm: Any) -> None:
        """It may be on the device."""
        self.__dict__["grad_norm"] = norm
