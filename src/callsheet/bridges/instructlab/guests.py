"""Runs InstructLab's callbacks in callsheet's loop (as guests)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from callsheet.bridges.guest_base import Guest, no_guest
from callsheet.bridges.instructlab.internals import PACKAGE
from callsheet.bridges.instructlab.names import (
    HOOK_NAMES,
    TASKS_SECONDS,
    TrainingContext,
    bases,
    call_hook,
    listens_to,
    seen,
)
from callsheet.core.callback import Phase, label_of
from callsheet.core.context import Context
from callsheet.core.lane_options import LaneOptions
from callsheet.core.run_state import CheckpointInfo
from callsheet.core.time import TimeUnit
from callsheet.lanes.tasks import finish_tasks


def guest(
    foreign: Any, *, name: str = "", phase: Phase = "report", strict: bool = True, deadline: float = 60.0
) -> InstructLabGuest:
    """Wrap a callback of InstructLab as a callsheet callback with a thread of its own.

    The arguments are those of `InstructLabGuest`.

    Returns:
        A callback for `Trainer(callbacks=[...])`, `attach` or a host of another framework.

    Raises:
        RegistrationError: `foreign` is not a callback of InstructLab.
    """
    return InstructLabGuest(foreign, name=name, phase=phase, strict=strict, deadline=deadline)


class InstructLabGuest(Guest):
    """Runs a callback of InstructLab in callsheet's loop. The hooks are called on a background thread, in InstructLab's order.

    The callback's `TrainingContext` is the same on all ranks, except for the two `is_..._process_zero` flags, because its values
    come from the metrics records, which the ranks share. With `log_interval="1ba"` the values are those of InstructLab's own context,
    otherwise the means since the last record. No event is dropped. An error of a hook is logged and not raised. All hooks run in
    one asyncio event loop, so they may start tasks, for which the end of the run waits up to 5 s.

    Args:
        foreign: a `TrainerCallback`, of InstructLab or of `callsheet.compat.instructlab`.
        name: the name under which the callback's state is saved, if it has a `state_dict`; by default that of its class.
        phase: the callback's phase.
        strict: has no effect: callsheet fires every event of InstructLab.
        deadline: how many seconds the end of the run waits for the callback.

    Raises:
        RegistrationError: `foreign` is not a callback of InstructLab.
    """

    FRAMEWORK = "InstructLab Training"
    PACKAGE = PACKAGE
    OWN_HANDLERS: ClassVar[Mapping[str, str]] = {
        "on_train_start": "_train_begins",
        "on_epoch_start": "_epoch_begins",
        "on_train_step_start": "_step_begins",
        "on_forward_start": "_forward_begins",
        "on_backward_end": "_backward_ends",
        "on_clip_gradients_start": "_gradients_are_there",
        "on_optimizer_step_end": "_optimizer_ends",
        "on_train_step_end": "_step_ends",
        "on_log": "_call_on_log",
        "on_eval_all_end": "_call_on_evaluate",
        "on_checkpoint_published": "_call_on_save",
        "on_epoch_end": "_epoch_ends",
        "on_run_end": "_run_ends",
    }
    REQUIRED_HOOKS: ClassVar[Mapping[str, str]] = {
        "on_forward_start": "on_before_forward",
        "on_clip_gradients_start": "on_pre_optimizer_step",
        "on_optimizer_step_end": "on_optimizer_step",
    }
    """For some events of callsheet, a hook. The guest listens to the event only if the wrapped callback overrides this hook."""

    lane = "background"
    snapshot_fields = ("loss", "record", "eval_results", "standalone", "checkpoint")

    def __init__(
        self, foreign: Any, *, name: str = "", phase: Phase = "report", strict: bool = True, deadline: float = 60.0
    ) -> None:
        if not isinstance(foreign, bases()):
            raise no_guest(foreign, "an instance of a TrainerCallback of InstructLab's")
        self.lane_options = LaneOptions(deadline=deadline)
        super().__init__(foreign, name=name, phase=phase, strict=strict)
        hooks = [hook for hook in HOOK_NAMES if listens_to(foreign, hook)]
        self._hooks: dict[str, Callable[[TrainingContext], Any]] = {hook: getattr(foreign, hook) for hook in hooks}
        for event, hook in self.REQUIRED_HOOKS.items():
            if hook not in self._hooks:
                delattr(self, event)
        self._begin()

    def _begin(self) -> None:
        self.context = TrainingContext()
        self._is_training = self._ends_step = self._ends_epoch = False
        self._microbatches = 0
        self._last = (0, 0, 0, 0.0)  # step, samples, tokens and seconds at the last metrics record

    # --- handlers of callsheet's events, which call the hooks in InstructLab's order ---

    async def _train_begins(self, ctx: Context) -> None:
        ended = self._end_training()  # call the end hooks of an earlier training in this run, if they were not called yet
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
        await self._call(*ended, self._hook_call("on_train_begin"))

    async def _epoch_begins(self, ctx: Context) -> None:
        ended = self._boundary()
        self.context.epoch = ctx.epoch - 1
        await self._call(*ended, self._hook_call("on_epoch_begin"))

    async def _step_begins(self, ctx: Context) -> None:
        ended = self._boundary()
        self.context.step, self._microbatches = ctx.step, 0
        await self._call(*ended, self._hook_call("on_step_begin"))

    async def _forward_begins(self, ctx: Context) -> None:
        await self._call(self._hook_call("on_before_forward"))

    async def _backward_ends(self, ctx: Context) -> None:
        self._microbatches += 1
        await self._call(self._hook_call("on_after_backward"))

    async def _gradients_are_there(self, ctx: Context) -> None:
        if ctx.run.world_size == 1:  # otherwise `ctx.loss` is the loss of this rank only, so wait for the mean of all ranks
            self.context.loss = float(ctx.loss)
        await self._call(self._hook_call("on_pre_optimizer_step"))

    async def _optimizer_ends(self, ctx: Context) -> None:
        await self._call(self._hook_call("on_optimizer_step"))

    def _step_ends(self, ctx: Context) -> None:
        self._ends_step = True

    async def _call_on_log(self, ctx: Context) -> None:
        values = ctx.record.values
        if "train/loss" not in values:  # this is the record of an evaluation
            return
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
        await self._call(self._hook_call("on_log"))

    async def _call_on_evaluate(self, ctx: Context) -> None:
        results = ctx.eval_results
        if ctx.standalone or not self._is_training or not results:
            return
        first = next(iter(results.values()))
        self.context.val_metrics = {f"val_{name}": value for name, value in first.items()}
        if len(results) > 1:
            self.context.val_metrics |= {
                f"{name}/{metric}": value for name, found in results.items() for metric, value in found.items()
            }
        await self._call(self._hook_call("on_evaluate"))

    async def _call_on_save(self, ctx: Context) -> None:
        if ctx.checkpoint is None or not self._is_training:
            return
        await self._call(self._hook_call("on_save", checkpoint_path=self.checkpoint_path(ctx.checkpoint, ctx)))

    async def _epoch_ends(self, ctx: Context) -> None:
        ended = self._boundary()  # `on_step_end`, because the evaluation and the save after the last step are over
        self._ends_epoch = True
        await self._call(*ended)

    async def _run_ends(self, ctx: Context) -> None:
        await self._call(*self._end_training())
        await finish_tasks(TASKS_SECONDS, f"InstructLab's callback {label_of(self)}")

    # --- paths in the context ---

    def output_dir(self, ctx: Context) -> str:
        """Return the folder that the callback receives as `output_dir`: the run's folder."""
        return str(ctx.run.folder or "")

    def checkpoint_path(self, info: CheckpointInfo, ctx: Context) -> str:
        """Return the path that the callback receives as `checkpoint_path`: the folder of the checkpoint.

        Args:
            info: the checkpoint that was written.
        """
        return info.path

    # --- calling the hooks ---

    def _boundary(self) -> list[_HookCall]:
        """Return the due calls of `on_step_end` and `on_epoch_end`, which were postponed until evaluations and saves had ended."""
        ended: list[_HookCall] = []
        if self._ends_step:
            self._ends_step = False
            ended.append(self._hook_call("on_step_end"))
        if self._ends_epoch:
            self._ends_epoch = False
            ended.append(self._hook_call("on_epoch_end"))
        return ended

    def _end_training(self) -> list[_HookCall]:
        if not self._is_training:
            return []
        ended = [*self._boundary(), self._hook_call("on_train_end")]
        self._is_training = False
        return ended

    def _hook_call(self, hook: str, **changes: Any) -> _HookCall:
        method = self._hooks.get(hook)
        return None if method is None else (method, seen(self.context, hook, **changes))

    async def _call(self, *calls: _HookCall) -> None:
        """Call, one after the other, those hooks of the wrapped callback that `calls` lists."""
        for call in calls:
            if call is not None:
                await call_hook(*call)


_HookCall = tuple[Callable[[TrainingContext], Any], TrainingContext] | None


def _model_path(config: Mapping[str, Any]) -> str:
    """Return the model's path in a recipe's configuration, or an empty string."""
    model = config.get("model")
    return str(model.get("path") or "") if isinstance(model, Mapping) else ""
