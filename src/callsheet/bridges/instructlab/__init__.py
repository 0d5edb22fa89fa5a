"""The InstructLab bridge: callsheet's callbacks in InstructLab Training, and its callbacks in a loop of callsheet."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, ClassVar

from callsheet.bridges.guest_base import Guest, no_guest
from callsheet.bridges.instructlab.names import (
    HOOK_NAMES,
    TrainingContext,
    awaited,
    bases,
    listens_to,
    log_failure,
    seen,
)
from callsheet.callback import Callback
from callsheet.context import CheckpointInfo, Context
from callsheet.lanes import LaneOptions
from callsheet.manager import CallbackManager
from callsheet.run_lock import LOCK_TIMEOUT_SECONDS
from callsheet.time import TimeUnit

EVENT_MAP: Mapping[str, str] = {
    "on_train_begin": "on_train_start",
    "on_epoch_begin": "on_epoch_start",
    "on_step_begin": "on_train_step_start",
    "on_before_forward": "on_forward_start",
    "on_after_backward": "on_backward_end",
    "on_pre_optimizer_step": "on_clip_gradients_start",
    "on_optimizer_step": "on_optimizer_step_end",
    "on_log": "on_log",
    "on_evaluate": "on_eval_all_end",
    "on_save": "on_checkpoint_published",
    "on_step_end": "on_train_step_end",
    "on_epoch_end": "on_epoch_end",
    "on_train_end": "on_run_end",
}
"""InstructLab's hook, and our event. A guest is told a step's and an epoch's end when what is evaluated and saved there is over."""

NOT_FIRED: tuple[str, ...] = (
    *("on_checkpoint_due", "on_preempt", "on_exception"),
    *("on_eval_step_start", "on_eval_forward_start", "on_eval_forward_end", "on_eval_step_end"),
    *("on_test_start", "on_test_step_start", "on_test_forward_start", "on_test_forward_end", "on_test_step_end", "on_test_end"),
    *("on_predict_start", "on_predict_step_start", "on_predict_forward_start", "on_predict_forward_end", "on_predict_step_end"),
    "on_predict_end",
)
"""Events that InstructLab has no hook for: a callback may hear them if it hears another as well."""

NOT_SEEN: tuple[str, ...] = (
    *("on_fetch_start", "on_fetch_end", "on_forward_end", "on_loss_start", "on_loss_end", "on_backward_start"),
    *("on_clip_gradients_end", "on_optimizer_step_start"),
)
"""Events of every step whose moment passes without a hook: no callback may hear them."""


def host(
    callbacks: CallbackManager | Callback | Iterable[Callback] | None,
    *,
    strict: bool = True,
    lock_timeout_seconds: float = LOCK_TIMEOUT_SECONDS,
) -> Any:
    """The callbacks as one of InstructLab's, for `TrainingArgs(callbacks=[host([...])])` or a `CallbackManager` of its own.

    InstructLab tells its callbacks on a thread of its own, where training does not wait for them and nothing of it can be reached. So do
    ours hear it: losses, rates, speeds, evaluations and checkpoints as InstructLab gives them, each rank for itself. A record is made at
    every `on_log`. An error of a callback ends callsheet's run, as failed, and not InstructLab's.

    Where InstructLab starts the ranks itself, they are sent the callbacks with `with hosted.sent(): run_training(...)`.

    Args:
        strict: whether it is an error that a callback needs what is not there; else a warning.
        lock_timeout_seconds: how long to wait if another process writes in the run's folder. Then the run fails with `RunInUseError`, and
            InstructLab's training continues.

    Raises:
        NotSupported: a callback hears what is not told, reads the model or the like, or asks for something; see `strict`.
    """
    from callsheet.bridges.instructlab.hosts import host_of  # which imports InstructLab, where it is installed

    return host_of(callbacks, strict=strict, lock_timeout_seconds=lock_timeout_seconds)


def guest(
    foreign: Any, *, name: str = "", phase: str = "report", strict: bool = True, deadline: float = 60.0
) -> InstructLabGuest:
    """A callback of InstructLab as one of ours, in a lane of its own; see `InstructLabGuest`."""
    return InstructLabGuest(foreign, name=name, phase=phase, strict=strict, deadline=deadline)


class InstructLabGuest(Guest):
    """A callback of InstructLab, told in InstructLab's order and on no training thread; nothing that it is told gets lost.

    Its `TrainingContext` is the same on all ranks but for the two flags: what stands in it comes from the records, which the ranks share.
    So with `log_interval="1ba"` it holds what InstructLab's own does, and else the mean since the last record. What a hook raises is
    logged and does not come out.

    Args:
        foreign: a `TrainerCallback`, of InstructLab or of `callsheet.compat.instructlab`.
        name: under which its state is kept, if it has a `state_dict`; else that of its class.
        phase: where in each event's order it stands.
        strict: nothing of InstructLab's is never told.
        deadline: seconds: how long the end of the run waits for it.

    Raises:
        RegistrationError: no callback of InstructLab.
    """

    FRAMEWORK = "InstructLab Training"
    OWN: ClassVar[Mapping[str, str]] = {
        "on_train_start": "_train_begins",
        "on_epoch_start": "_epoch_begins",
        "on_train_step_start": "_step_begins",
        "on_forward_start": "_forward_begins",
        "on_backward_end": "_backward_ends",
        "on_clip_gradients_start": "_gradients_are_there",
        "on_optimizer_step_end": "_optimizer_ends",
        "on_train_step_end": "_step_ends",
        "on_log": "_logged",
        "on_eval_all_end": "_evaluated",
        "on_checkpoint_published": "_saved",
        "on_epoch_end": "_epoch_ends",
        "on_run_end": "_run_ends",
    }
    ONLY_FOR: ClassVar[Mapping[str, str]] = {
        "on_forward_start": "on_before_forward",
        "on_clip_gradients_start": "on_pre_optimizer_step",
        "on_optimizer_step_end": "on_optimizer_step",
    }
    """Events that need not be heard where it does not hear the hook."""

    lane = "background"
    snapshot_fields = ("loss", "record", "eval_results", "standalone", "checkpoint")

    def __init__(
        self, foreign: Any, *, name: str = "", phase: str = "report", strict: bool = True, deadline: float = 60.0
    ) -> None:
        if not isinstance(foreign, bases()):
            raise no_guest(foreign, "an instance of a TrainerCallback of InstructLab's")
        self.lane_options = LaneOptions(deadline=deadline)
        super().__init__(foreign, name=name, phase=phase, strict=strict)
        heard = [hook for hook in HOOK_NAMES if listens_to(foreign, hook)]
        self._hooks: dict[str, Callable[[TrainingContext], Any]] = {hook: getattr(foreign, hook) for hook in heard}
        for event, hook in self.ONLY_FOR.items():
            if hook not in self._hooks:
                delattr(self, event)
        self._begin()

    def _begin(self) -> None:
        self.context = TrainingContext()
        self._is_training = self._ends_step = self._ends_epoch = False
        self._microbatches = 0
        self._last = (0, 0, 0, 0.0)  # step, samples, tokens and seconds at the last record

    # --- what it is told of: InstructLab's order ---

    def _train_begins(self, ctx: Context) -> Awaitable[None] | None:
        ended = self._ended()  # an earlier `fit`
        self._begin()
        context, run, now = self.context, ctx.run, ctx.state.timestamp
        context.step, context.epoch = now.batch + 1, now.epoch
        context.total_samples, context.total_tokens = now.sample, now.token
        context.output_dir, context.model_name_or_path = self.output_dir(ctx), _model_path(run.config)
        longest = ctx.state.max_duration
        context.max_epochs = int(longest.value) if longest is not None and longest.unit is TimeUnit.EPOCH else 0
        context.world_size = run.world_size
        context.is_local_process_zero, context.is_world_process_zero = run.is_local_process_zero, run.is_world_process_zero
        self._last = now.batch, now.sample, now.token, now.seconds
        self._is_training = True
        return self._tell(*ended, self._told("on_train_begin"))

    def _epoch_begins(self, ctx: Context) -> Awaitable[None] | None:
        ended = self._boundary()
        self.context.epoch = ctx.epoch - 1
        return self._tell(*ended, self._told("on_epoch_begin"))

    def _step_begins(self, ctx: Context) -> Awaitable[None] | None:
        ended = self._boundary()
        self.context.step, self._microbatches = ctx.step, 0
        return self._tell(*ended, self._told("on_step_begin"))

    def _forward_begins(self, ctx: Context) -> Awaitable[None] | None:
        return self._tell(self._told("on_before_forward"))

    def _backward_ends(self, ctx: Context) -> Awaitable[None] | None:
        self._microbatches += 1
        return self._tell(self._told("on_after_backward"))

    def _gradients_are_there(self, ctx: Context) -> Awaitable[None] | None:
        if ctx.run.world_size == 1:  # else the ranks have one each, and meet at the record
            self.context.loss = float(ctx.loss)
        return self._tell(self._told("on_pre_optimizer_step"))

    def _optimizer_ends(self, ctx: Context) -> Awaitable[None] | None:
        return self._tell(self._told("on_optimizer_step"))

    def _step_ends(self, ctx: Context) -> None:
        self._ends_step = True

    def _logged(self, ctx: Context) -> Awaitable[None] | None:
        values = ctx.record.values
        if "train/loss" not in values:  # an evaluation's record: nothing was trained since the last
            return None
        context, now, last = self.context, ctx.state.timestamp, self._last
        steps, seconds = ctx.record.step - last[0], ctx.record.elapsed_seconds - last[3]
        context.total_samples, context.total_tokens = now.sample, now.token
        context.loss, context.learning_rate = values["train/loss"], values.get("train/learning_rate")
        context.grad_norm = values.get("train/grad_norm")
        context.elapsed_time = seconds / max(1, steps)
        context.overall_throughput = ctx.record.samples_per_second
        if ctx.run.device.startswith("cuda"):
            context.cuda_mem_allocated = ctx.record.memory_bytes / 2**30
        context.batch_metrics = {
            "total_samples": now.sample - last[1],
            "total_length": now.token - last[2],
            "num_loss_counted_tokens": int(values.get("train/label_tokens", now.token - last[2])),
            "grad_accum_steps": self._microbatches,
            "num_minibatches": self._microbatches,
        }
        self._last = ctx.record.step, now.sample, now.token, ctx.record.elapsed_seconds
        return self._tell(self._told("on_log"))

    def _evaluated(self, ctx: Context) -> Awaitable[None] | None:
        results = ctx.eval_results
        if ctx.standalone or not self._is_training or not results:
            return None
        first = next(iter(results.values()))
        self.context.val_metrics = {f"val_{name}": value for name, value in first.items()}
        if len(results) > 1:
            self.context.val_metrics |= {
                f"{name}/{metric}": value for name, found in results.items() for metric, value in found.items()
            }
        return self._tell(self._told("on_evaluate"))

    def _saved(self, ctx: Context) -> Awaitable[None] | None:
        if ctx.checkpoint is None or not self._is_training:
            return None
        return self._tell(self._told("on_save", checkpoint_path=self.checkpoint_path(ctx.checkpoint, ctx)))

    def _epoch_ends(self, ctx: Context) -> None:
        self._ends_epoch = True

    def _run_ends(self, ctx: Context) -> Awaitable[None] | None:
        return self._tell(*self._ended())

    # --- what it is given ---

    def output_dir(self, ctx: Context) -> str:
        """Where the run writes."""
        return str(ctx.run.folder or "")

    def checkpoint_path(self, info: CheckpointInfo, ctx: Context) -> str:
        """Where the checkpoint stands."""
        return info.path

    # --- telling ---

    def _boundary(self) -> list[_Telling]:
        """The next step, epoch or the end has come: what was evaluated and saved at the last one's end is over."""
        ended: list[_Telling] = []
        if self._ends_step:
            self._ends_step = False
            ended.append(self._told("on_step_end"))
        if self._ends_epoch:
            self._ends_epoch = False
            ended.append(self._told("on_epoch_end"))
        return ended

    def _ended(self) -> list[_Telling]:
        if not self._is_training:
            return []
        ended = [*self._boundary(), self._told("on_train_end")]
        self._is_training = False
        return ended

    def _told(self, hook: str, **changes: Any) -> _Telling:
        method = self._hooks.get(hook)
        return None if method is None else (method, seen(self.context, hook, **changes))

    def _tell(self, *tellings: _Telling) -> Awaitable[None] | None:
        """Call the hooks, one after the other; from the first that is to be awaited on, give that back to be awaited."""
        left = deque(telling for telling in tellings if telling is not None)
        while left:
            if (waits := _called(*left[0])) is not None:
                return _rest(left, waits)
            left.popleft()
        return None


_Telling = tuple[Callable[[TrainingContext], Any], TrainingContext] | None


def _called(method: Callable[[TrainingContext], Any], context: TrainingContext) -> Any:
    """What is to be awaited, or None."""
    try:
        result = method(context)
        return result if inspect.isawaitable(result) else None
    except BaseException as error:  # SystemExit too: a hook cannot end training
        log_failure(method, context, error)
        return None


async def _rest(left: deque[Any], waits: Any) -> None:
    while left:
        method, context = left.popleft()
        try:
            if waits is not None:
                await awaited(waits)
        except BaseException as error:
            log_failure(method, context, error)
        waits = _called(*left[0]) if left else None


def _model_path(config: Mapping[str, Any]) -> str:
    """Of a recipe's configuration."""
    model = config.get("model")
    return str(model.get("path") or "") if isinstance(model, Mapping) else ""
