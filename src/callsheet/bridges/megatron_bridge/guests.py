"""Megatron Bridge's callbacks in callsheet's loop, and the state that they are shown."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from callsheet.bridges.foreign import Facade, Guest, NotOnTheList, is_another_s, no_guest
from callsheet.bridges.hosted_run import counts_of
from callsheet.bridges.megatron_bridge.names import VALID_EVENTS, CallbackContext, CallbackManager, normalize_callbacks
from callsheet.checkpoint.plain import flatten
from callsheet.context import Context
from callsheet.errors import CheckpointError, NotCarried
from callsheet.sheet import Handler
from callsheet.time import Time, TimeUnit

MODULE = "megatron.bridge.training.callbacks"

GUEST_EVENTS: Mapping[str, tuple[str, ...]] = {
    **{event: (event,) for event in sorted(VALID_EVENTS - {"on_checkpoint_save"})},
    "on_checkpoint_published": ("on_checkpoint_save",),
}
"""Our event, and the one of Megatron Bridge that is told at it."""

NEVER = ("on_setup_start", "on_log", "on_checkpoint_load")
"""Events of later versions, and of Megatron-LM's own callbacks, that are told nowhere here."""

LM_LOSS = "lm loss"
"""What Megatron calls the loss."""

_WITH_SCHEDULER = frozenset({"on_data_init_start", "on_train_start", "on_train_step_start", "on_train_step_end", "on_train_end"})


class TrainState(Facade):
    """How far training is. A callback may end training as it would at home, by a `step` that is not below `cfg.train.train_iters`."""

    OF = "Megatron Bridge's TrainState"
    WRITABLE = frozenset({"step", "do_valid", "do_test"})

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


class Training(Facade):
    """What is known of the length of training where there is no configuration of Megatron's."""

    OF = "Megatron Bridge's cfg.train"
    WRITABLE = frozenset({"train_iters"})

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


class MegatronBridgeGuest(Guest):
    """See `callsheet.bridges.megatron_bridge.guest`."""

    FRAMEWORK = "Megatron Bridge"
    EVENTS = GUEST_EVENTS
    OWN = {"on_eval_step_end": "_count_validation"}
    NEVER = NEVER

    def __init__(
        self, foreign: Any, *, name: str = "", phase: str = "measure", strict: bool = True, state: GlobalState | None = None
    ) -> None:
        self.manager = _manager(foreign)
        self.state = state if state is not None else GlobalState()
        self._is_live = self.manager is foreign  # more may be registered with it while the run lasts
        self._longest: Time | None = None
        several = foreign if isinstance(foreign, list) else [foreign]
        self._alone: Any = several[0] if len(several) == 1 and not self._is_live else None
        super().__init__(foreign, name=name or type(self._alone or self.manager).__name__, phase=phase, strict=strict)

    def hears(self, theirs: str) -> bool:
        """Whether anything is registered for the event; a manager's owner may register more at any time."""
        if theirs in NEVER:
            if self._is_live:
                return theirs in self.manager.events and self.manager.has_callbacks(theirs)
            several = self.foreign if isinstance(self.foreign, list) else [self.foreign]
            return any(_overrides(each, theirs) for each in several)
        return self._is_live or self.manager.has_callbacks(theirs)

    def handler(self, theirs: str, method: Any) -> Handler:
        """Tells the event with a context of its own, to all that is registered."""
        manager, state, train, train_state = self.manager, self.state, self.state.cfg.train, self.state.train_state.__dict__
        is_step_end = theirs == "on_train_step_end"
        is_result = theirs in ("on_eval_end", "on_test_end")
        has_scheduler = theirs in _WITH_SCHEDULER
        has_optimizer = has_scheduler or theirs == "on_checkpoint_save"
        knows_samples = hasattr(train, "global_batch_size")

        def tell(ctx: Context) -> None:
            if not manager.has_callbacks(theirs):
                return
            progress = ctx.state
            done = progress.timestamp.batch
            train_state["step"] = step = done - 1 if is_step_end else done  # it moves after the step's end
            train_state["consumed_train_samples"] = step * train.global_batch_size if knows_samples else progress.timestamp.sample
            if progress.max_duration is not self._longest:
                self._read_length(progress.max_duration)
            length, model = train.train_iters, ctx.model
            chunks = model if type(model) is list else [model]
            if is_step_end:
                norm = ctx.grad_norm
                made = CallbackContext
                if isinstance(norm, Tensor):
                    if norm.device.type == "cpu":
                        norm = norm.item()
                    else:
                        made = StepContext
                losses = _named(ctx.loss_dict)
                context = made(
                    state, chunks, manager.user_state, ctx.optimizer, ctx.scheduler, losses, norm, bool(ctx.step_skipped)
                )
            else:
                optimizer, scheduler = ctx.optimizer if has_optimizer else None, ctx.scheduler if has_scheduler else None
                context = CallbackContext(state, chunks, manager.user_state, optimizer, scheduler)
                if is_result:
                    context.total_loss_dict = _named(ctx.eval_losses)
            manager.fire(theirs, context)
            if train_state["step"] != step or train.train_iters != length:
                self._drive(ctx, done)

        return tell

    def _drive(self, ctx: Context, done: int) -> None:
        """The callback has moved the step or the length: either ends training, or is nothing that can be done here."""
        step, train_iters = self.state.train_state.step, self.state.cfg.train.train_iters
        if train_iters is not None and max(done, step) < train_iters:
            raise NotCarried(
                f"{self.name} has set train_state.step to {step} and cfg.train.train_iters to {train_iters} after {done} steps: here that "
                "can end training now, and nothing else"
            )
        ctx.control.stop("train_state.step or cfg.train.train_iters was set")

    def _read_length(self, longest: Time | None) -> None:
        self._longest = longest
        if longest is not None and longest.unit is TimeUnit.BATCH and isinstance(self.state.cfg, Config):
            self.state.cfg.train.train_iters = int(longest.value)

    def _count_validation(self, ctx: Context) -> None:
        self.state.train_state.__dict__["consumed_valid_samples"] += counts_of(ctx.batch)[0] * ctx.run.world_size

    def state_dict(self) -> Mapping[str, Any]:
        """What is plain data of `user_state`, the samples that were evaluated on, and the foreign callback's own state where it has any."""
        saved: dict[str, Any] = {"consumed_valid_samples": self.state.train_state.consumed_valid_samples}
        if user_state := {key: value for key, value in self.manager.user_state.items() if _is_plain(key, value)}:
            saved["user_state"] = user_state
        if hasattr(self._alone, "state_dict"):
            saved["callback"] = self._alone.state_dict()
        return saved

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self.state.train_state.__dict__["consumed_valid_samples"] = state["consumed_valid_samples"]
        self.manager.user_state.update(state.get("user_state", {}))
        if "callback" in state:
            self._alone.load_state_dict(state["callback"])


def _manager(foreign: Any) -> Any:
    """What tells them: a manager as it is, of whichever package; callbacks in a new one, of the package that they are of."""
    if hasattr(foreign, "callback_context"):
        raise NotCarried("a manager of Megatron-LM tells its callbacks in a context of its own; give its callbacks, as a list")
    if hasattr(foreign, "fire") and hasattr(foreign, "has_callbacks"):
        return foreign
    for each in foreign if isinstance(foreign, list) else [foreign]:
        if is_another_s(each) or not any(hasattr(each, event) for event in VALID_EVENTS):
            raise no_guest(each, "a callback of Megatron's, a list of them, or a manager")
    package = sys.modules.get(MODULE)
    first = foreign[0] if isinstance(foreign, list) and foreign else foreign
    if package is not None and isinstance(first, package.Callback):
        return package.normalize_callbacks(foreign)
    return normalize_callbacks(foreign) or CallbackManager()


def _overrides(callback: Any, event: str) -> bool:
    """Whether its base has such an event, and it hears that."""
    bases = [kind for kind in type(callback).__mro__ if kind.__name__ == "Callback" and hasattr(kind, event)]
    return bool(bases) and all(getattr(type(callback), event) is not getattr(base, event) for base in bases)


def _named(losses: Mapping[str, Any]) -> dict[str, Any]:
    """Ours under Megatron's name, and only that where the loop says it already."""
    if len(losses) == 1 and "loss" in losses:
        return {LM_LOSS: losses["loss"]}
    others = {name: value for name, value in losses.items() if name != "loss"}
    return others if LM_LOSS in others or "loss" not in losses else {LM_LOSS: losses["loss"], **others}


def _is_plain(key: Any, value: Any) -> bool:
    if not isinstance(key, str):
        return False
    try:
        flatten(value)
    except CheckpointError:
        return False
    return True
