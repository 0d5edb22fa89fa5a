"""A copy of InstructLab Training's callback interface: base class, context and manager.

The copies can be used whether or not InstructLab is installed.

`callsheet.compat.instructlab` exports them for code that is written for InstructLab. A callback may derive from this base class or from
that of the installed package.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import sys
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field, fields
from typing import Any, Self

from callsheet.core.lane_options import LaneOptions
from callsheet.errors import did_you_mean
from callsheet.lanes.capture import copy_value
from callsheet.lanes.queue import Lane, close, drain
from callsheet.lanes.tasks import finish_tasks

logger = logging.getLogger("callsheet")

HOOK_NAMES: tuple[str, ...] = (
    *("on_train_begin", "on_epoch_begin", "on_step_begin", "on_before_forward", "on_after_backward", "on_pre_optimizer_step"),
    *("on_optimizer_step", "on_log", "on_evaluate", "on_save", "on_step_end", "on_epoch_end", "on_train_end"),
)
"""The names of all hooks, in the order in which a run of one step calls them."""

_KNOWN_HOOKS = frozenset(HOOK_NAMES)
_PATIENCE_SECONDS = 10.0
TASKS_SECONDS = 5.0
"""How long the end of training waits for asyncio tasks that hooks have started, as in InstructLab."""


@dataclass
class TrainingContext:
    """The progress of training. Each call of a hook receives a new copy of this object.

    A value that is not known yet is None. A value stays until it is replaced: at `on_step_begin` the loss is still that of the
    last step.

    Attributes:
        hook_name: the hook that is called.
        step: the number of the step, counted from 1; the same at a step's begin and end.
        epoch: the number of the epoch, counted from 0.
        total_samples: the number of samples so far, over all ranks.
        total_tokens: the number of tokens so far, over all ranks.
        loss: the mean loss of the step.
        learning_rate: the learning rate of the first parameter group.
        grad_norm: the norm of the gradients before they are clipped.
        elapsed_time: how many seconds the step took.
        overall_throughput: samples per second, over all ranks.
        cuda_mem_allocated: the peak of the memory that is allocated on the GPU, in GiB.
        batch_metrics: further values of the step, by name.
        val_metrics: the results of the last evaluation, by name.
        checkpoint_path: the folder of the checkpoint that was written last.
        output_dir: the folder of the run.
        model_name_or_path: the model that is trained.
        max_epochs: how many epochs training lasts; 0 if this is not known.
        world_size: the number of ranks.
        is_local_process_zero: whether this is the first rank of the machine.
        is_world_process_zero: whether this is the first of all ranks.
    """

    hook_name: str = ""
    step: int = 0
    epoch: int = 0
    total_samples: int = 0
    total_tokens: int = 0
    loss: float | None = None
    learning_rate: float | None = None
    grad_norm: float | None = None
    elapsed_time: float | None = None
    overall_throughput: float | None = None
    cuda_mem_allocated: float | None = None
    batch_metrics: dict[str, Any] = field(default_factory=dict)
    val_metrics: dict[str, Any] = field(default_factory=dict)
    checkpoint_path: str | None = None
    output_dir: str = ""
    model_name_or_path: str = ""
    max_epochs: int = 0
    world_size: int = 1
    is_local_process_zero: bool = True
    is_world_process_zero: bool = True


_CONTEXT_FIELDS = frozenset(each.name for each in fields(TrainingContext))


class TrainerCallback:
    """The base class of InstructLab's callbacks: override the hooks that you need. Callbacks observe training and cannot change it.

    A hook may be `async`. Hooks are called on every rank, so check `context.is_world_process_zero` before work that must be done
    only once.

    Examples:
        >>> class Progress(TrainerCallback):
        ...     def on_log(self, context):
        ...         if context.is_world_process_zero:
        ...             print(context.step, context.loss)
    """

    _arguments: tuple[tuple[Any, ...], dict[str, Any]]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Store the constructor's arguments, so that each rank can create the callback."""
        if (args or kwargs) and cls.__init__ is object.__init__:
            raise TypeError(f"{cls.__name__}() takes no arguments")
        self = super().__new__(cls)
        object.__setattr__(self, "_arguments", (args, kwargs))  # works in a frozen dataclass too
        return self

    def on_train_begin(self, context: TrainingContext) -> Any:
        """Called when training begins or resumes."""

    def on_epoch_begin(self, context: TrainingContext) -> Any:
        """Called when an epoch begins."""

    def on_step_begin(self, context: TrainingContext) -> Any:
        """Called when a step begins."""

    def on_before_forward(self, context: TrainingContext) -> Any:
        """Called before the forward pass of each microbatch."""

    def on_after_backward(self, context: TrainingContext) -> Any:
        """Called after the backward pass of each microbatch."""

    def on_pre_optimizer_step(self, context: TrainingContext) -> Any:
        """Called when all gradients are computed, before they are clipped."""

    def on_optimizer_step(self, context: TrainingContext) -> Any:
        """Called after the optimizer has stepped."""

    def on_log(self, context: TrainingContext) -> Any:
        """Called when the step's metrics are known."""

    def on_evaluate(self, context: TrainingContext) -> Any:
        """Called after an evaluation; its results are in `val_metrics`."""

    def on_save(self, context: TrainingContext) -> Any:
        """Called after a checkpoint was written to `checkpoint_path`."""

    def on_step_end(self, context: TrainingContext) -> Any:
        """Called after a step, when the evaluations and saves that were due at its end are done."""

    def on_epoch_end(self, context: TrainingContext) -> Any:
        """Called after an epoch."""

    def on_train_end(self, context: TrainingContext) -> Any:
        """Called after training, however it ended."""


def bases() -> tuple[type, ...]:
    """Return the base classes of InstructLab callbacks: callsheet's copy, and InstructLab's own class if it was imported."""
    theirs = getattr(sys.modules.get("instructlab.training.callbacks"), "TrainerCallback", None)
    return (TrainerCallback,) if theirs is None else (TrainerCallback, theirs)


def listens_to(callback: Any, hook: str) -> bool:
    """Return whether the callback's class overrides the hook. Raise AttributeError if there is no such hook."""
    method = getattr(type(callback), hook)
    return all(method is not getattr(base, hook) for base in bases())


class CallbackManager:
    """Calls the hooks of callbacks on a background thread. `fire` does not wait, and errors of hooks are logged, not raised.

    Every hook that is fired is delivered, to one callback after the other, in order. An `async` hook has finished before the next one is
    called. `fire("on_train_end")` and `close()` wait until all hooks have returned. If a single hook does not return within 10 s, they
    stop waiting, and an error with the undelivered hooks is logged.

    All hooks run in one asyncio event loop, so they may start tasks. `close()` waits up to 5 s for these tasks.

    Attributes:
        context: the progress of training; a change takes effect with the next `fire`.
    """

    def __init__(self) -> None:
        self.context = TrainingContext()
        self._callbacks: list[Any] = []
        self._runner: asyncio.Runner | None = None
        self._is_closed = False
        self._lane = Lane(
            "InstructLab's callbacks", self._run, LaneOptions(deadline=_PATIENCE_SECONDS), finish=self._finish, wake_on_put=True
        )

    def add_callback(self, callback: Any) -> None:
        """Add a callback.

        Args:
            callback: an instance of a TrainerCallback, of InstructLab or of this package.

        Raises:
            TypeError: `callback` is not such an instance.
        """
        check(callback)
        self._callbacks.append(callback)

    def remove_callback(self, callback_or_type: Any) -> None:
        """Remove a callback, or all callbacks of a class. Do nothing if there is none.

        Args:
            callback_or_type: the callback, or a class.
        """
        if isinstance(callback_or_type, type):
            self._callbacks = [each for each in self._callbacks if not isinstance(each, callback_or_type)]
        else:
            self._callbacks = [each for each in self._callbacks if each is not callback_or_type]

    def has_callbacks(self, hook_name: str) -> bool:
        """Return whether a callback overrides a hook.

        Args:
            hook_name: the name of the hook, such as `on_log`.

        Raises:
            AttributeError: there is no such hook.
        """
        getattr(TrainerCallback, hook_name)
        return any(listens_to(callback, hook_name) for callback in self._callbacks)

    def fire(self, hook_name: str, **kwargs: Any) -> None:
        """Call the hook of all callbacks that override it, on the background thread. After `close`, do nothing.

        Args:
            hook_name: the name of the hook, such as `on_log`.
            kwargs: values for fields of the context, for this call only.

        Raises:
            ValueError: there is no such hook; or a callback overrides the hook, and `kwargs` names a field that the context lacks.
        """
        if hook_name not in _KNOWN_HOOKS:
            # The error begins like InstructLab's error, because tests that were written for InstructLab may check its words.
            raise ValueError(f"Unknown hook: '{hook_name}'. Valid hooks: {list(HOOK_NAMES)}{did_you_mean(hook_name, HOOK_NAMES)}")
        if self._is_closed or not (listeners := [each for each in self._callbacks if listens_to(each, hook_name)]):
            return
        if unknown := next((name for name in kwargs if name not in _CONTEXT_FIELDS), None):
            raise ValueError(
                f"Unknown TrainingContext field: '{unknown}'. Valid fields: {sorted(_CONTEXT_FIELDS)}{did_you_mean(unknown, _CONTEXT_FIELDS)}"
            )
        for callback in listeners:
            self._lane.put((getattr(callback, hook_name), seen(self.context, hook_name, **kwargs)))
        if hook_name == "on_train_end":
            self._deliver()

    def close(self) -> None:
        """Wait until all fired hooks were called, and end the background thread. A second call does nothing."""
        if not self._is_closed:
            self._is_closed = True
            if self._deliver() and self._lane.done:
                self._lane.put(None)
                self._deliver()
            close([self._lane])

    def _deliver(self) -> bool:
        """Wait until all fired hooks were called. If no hook ends within `_PATIENCE_SECONDS`, stop waiting and return False."""
        done = self._lane.done
        while (left := drain([self._lane], _PATIENCE_SECONDS)) and self._lane.done > done:
            done = self._lane.done
        for undelivered in left:
            logger.error("stopped waiting for %s", undelivered)
        return not left

    def _run(self, item: tuple[Callable[..., Any], TrainingContext] | None) -> None:
        """Call the hook in `item`. If `item` is None, wait for the tasks that hooks have started."""
        # All hooks run in one event loop, because a network client can be used only in the event loop that created it.
        self._runner = self._runner or asyncio.Runner()
        self._runner.run(call_hook(*item) if item is not None else finish_tasks(TASKS_SECONDS, "InstructLab's callbacks"))

    def _finish(self) -> None:
        if self._runner is not None:
            self._runner.close()


def check(callback: Any) -> None:
    """Raise TypeError if `callback` is not an instance of `TrainerCallback` (either callsheet's copy or InstructLab's own class)."""
    if not isinstance(callback, bases()):
        is_class = isinstance(callback, type)
        hint = (
            f"Pass an instance, not a class: callbacks=[{callback.__name__}()]" if is_class else "Derive it from TrainerCallback"
        )
        raise TypeError(f"Expected a TrainerCallback instance, got {type(callback).__name__}. {hint} (given: {callback!r})")


def seen(context: TrainingContext, hook: str, **changes: Any) -> TrainingContext:
    """Return a copy of the training context for one call of `hook`, with the fields in `changes` replaced."""
    snapshot = copy(context)
    for name, value in changes.items():
        setattr(snapshot, name, value)
    snapshot.hook_name = hook
    snapshot.batch_metrics, snapshot.val_metrics = copy_value(snapshot.batch_metrics, {}), copy_value(snapshot.val_metrics, {})
    return snapshot


async def call_hook(method: Callable[[TrainingContext], Any], context: TrainingContext) -> None:
    """Call a hook in the running event loop, as InstructLab does, and await the result of an `async` hook. Log an error."""
    try:
        result = method(context)
        if inspect.isawaitable(result):
            await result
    except BaseException as error:  # catches SystemExit too, because a hook must not end the program
        log_failure(method, context, error)


def log_failure(method: Callable[..., Any], context: TrainingContext, error: BaseException) -> None:
    """Log an error that a hook has raised."""
    owner = type(getattr(method, "__self__", method)).__name__
    kind = type(error).__name__
    logger.error(
        "InstructLab's callback %s failed at %s, step %d; training continues: %s: %s",
        *(owner, context.hook_name, context.step, kind, error),
        exc_info=error,
    )
