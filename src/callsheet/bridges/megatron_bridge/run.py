"""The state that Megatron Bridge's callbacks share in one run of callsheet's loop.

At each event all of them receive the same context, as in Megatron Bridge.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from callsheet.bridges.guest_base import Common
from callsheet.bridges.guest_counts import counts_in_all
from callsheet.bridges.megatron_bridge.names import VALID_EVENTS, CallbackContext
from callsheet.bridges.megatron_bridge.state import Config, GlobalState, StepContext, call_when_moved
from callsheet.core.context import Context
from callsheet.core.run_state import RunConstants, TrainState
from callsheet.core.time import Time, TimeUnit
from callsheet.errors import NotSupported

LM_LOSS = "lm loss"
"""Megatron's name for the loss."""


class MegatronBridgeRun(Common):
    """Creates the `CallbackContext` that Megatron Bridge's callbacks receive in callsheet's loop.

    Each method that is named after an event of callsheet handles that event.

    Args:
        state: the `context.state` of a guest that has its own; None: create the state that all guests share.
        user_state: the `user_state` of a guest that has its own; None: create the `user_state` that all guests share.
    """

    # The samples of evaluations are counted even if no Megatron Bridge callback has a method for evaluations.
    LISTEN_ONLY = VALID_EVENTS - {"on_checkpoint_save", "on_eval_start", "on_eval_step_end", "on_eval_end"} | {
        "on_checkpoint_published"
    }

    def __init__(self, state: GlobalState | None = None, user_state: dict[Any, Any] | None = None) -> None:
        self.is_alone = state is not None or user_state is not None
        self.state = state if state is not None else GlobalState()
        self.user_state = user_state if user_state is not None else {}
        self.context: Any = None
        """The `CallbackContext` of the current event."""
        self.train = self.state.cfg.train
        self.steps = self.state.train_state.__dict__
        self.step, self.length = 0, self.train.train_iters
        """The values of `train_state.step` and `train.train_iters` before the guests handled the event."""
        self._knows_samples = hasattr(self.train, "global_batch_size")
        self._constants: RunConstants | None = None
        self._length: tuple[Time | None, int | None] = (None, None)
        """The duration of training and the number of steps in an epoch, as of the last event."""
        self._samples: int | None = None
        """How many samples were trained on before the last event."""
        self._valid_samples = 0  # `consumed_valid_samples` before the current evaluation
        self._ctx: Context | None = None
        if state is None:  # callsheet's own state can call `drive`; for a user's state, the guest calls `drive` after each event
            call_when_moved(self.state, self.drive)

    def on_train_step_start(self, ctx: Context) -> None:
        """Create the callbacks' context for this event, with optimizer and scheduler."""
        chunks = self._at(ctx, ctx.state.timestamp.batch)
        self.context = CallbackContext(self.state, chunks, self.user_state, ctx.optimizer, ctx.scheduler)

    on_data_init_start = on_train_start = on_train_end = on_train_step_start

    def on_train_step_end(self, ctx: Context) -> None:
        """Create the callbacks' context with the step's results. As in Megatron, `state.train_state.step` does not count this step yet."""
        chunks = self._at(ctx, ctx.state.timestamp.batch - 1)
        norm: Any = ctx.grad_norm
        made = CallbackContext if norm is None or type(norm) is float else StepContext
        losses, was_skipped = _rename_loss(ctx.loss_dict), bool(ctx.step_skipped)
        self.context = made(self.state, chunks, self.user_state, ctx.optimizer, ctx.scheduler, losses, norm, was_skipped)

    def on_eval_start(self, ctx: Context) -> None:
        """Create the callbacks' context for this event, without optimizer and scheduler."""
        self._valid_samples = self.steps["consumed_valid_samples"]
        self.on_eval_step_start(ctx)

    def on_eval_step_start(self, ctx: Context) -> None:
        """Create the callbacks' context for this event, without optimizer and scheduler."""
        self.context = CallbackContext(self.state, self._at(ctx, ctx.state.timestamp.batch), self.user_state)

    on_test_start = on_test_step_start = on_test_step_end = on_eval_step_start

    def on_eval_step_end(self, ctx: Context) -> None:
        """Count the evaluated samples, and create the callbacks' context."""
        samples, _ = counts_in_all(ctx)
        self.steps["consumed_valid_samples"] += samples
        self.on_eval_step_start(ctx)

    def on_eval_end(self, ctx: Context) -> None:
        """Count the evaluated samples exactly, and create a new context for the callbacks, with the losses of the evaluation."""
        if ctx.eval_samples is not None:
            self.steps["consumed_valid_samples"] = self._valid_samples + ctx.eval_samples
        self.on_test_end(ctx)

    def on_test_end(self, ctx: Context) -> None:
        """Create a new context for the callbacks, with the losses of the test."""
        self.on_eval_step_start(ctx)
        self.context.total_loss_dict = _rename_loss(ctx.eval_losses)

    def on_checkpoint_published(self, ctx: Context) -> None:
        """Create the callbacks' context for this event, with the optimizer but without the scheduler."""
        self.on_eval_step_start(ctx)
        self.context.optimizer = ctx.optimizer

    def drive(self) -> None:
        """Stop training if a callback has set `train_state.step` or `cfg.train.train_iters` so that no steps are left.

        Raises:
            NotSupported: a callback has changed one of these values, but steps are left.
        """
        ctx, step, train_iters = self._ctx, self.steps["step"], self.train.train_iters
        if ctx is None or (step == self.step and train_iters == self.length):
            return
        if train_iters is not None and max(done := ctx.state.timestamp.batch, step) < train_iters:
            raise NotSupported(
                f"train_state.step was set to {step} and cfg.train.train_iters to {train_iters} after {done} steps: in callsheet this "
                "can only end training at once; set step to at least train_iters"
            )
        ctx.control.stop("train_state.step or cfg.train.train_iters was set", resumable=True)

    def _at(self, ctx: Context, step: int) -> Any:
        """Set the counts of steps and samples in the callbacks' `context.state`. Return the model as a list, as in Megatron."""
        self._ctx, progress, train = ctx, ctx.state, self.train
        self.steps["step"] = self.step = step
        self.steps["consumed_train_samples"] = (
            step * train.global_batch_size if self._knows_samples else self._samples_before(ctx, step)
        )
        if (
            constants := progress.constants
        ) is not self._constants:  # `constants` is a new object if one of its values has changed
            self._constants, before = constants, self._length
            self._length = length = (constants.max_duration, constants.epoch_batches)
            if length != before and isinstance(self.state.cfg, Config) and (steps := _steps_of(progress)) is not None:
                # Write into `__dict__`, because assigning to the attribute would call `drive`.
                train.__dict__["train_iters"] = steps
        self.length, model = train.train_iters, ctx.model
        return model if type(model) is list else [model]

    def _samples_before(self, ctx: Context, step: int) -> int:
        """Return how many samples the first `step` steps had. `step` must be `ctx.state.timestamp.batch`, or one less."""
        now, tally, before = ctx.state.timestamp, ctx.tally, self._samples
        self._samples = samples = now.sample + (tally.uncounted_samples if tally is not None else 0)
        if step == now.batch:
            return samples
        if before is not None:
            return before
        # At the first event, the samples before the last step are not known. Estimate them as if all steps had equally many samples.
        begun, steps = (
            ctx.state.baseline.sample + (tally.resumed_samples if tally is not None else 0),
            now.batch - ctx.state.baseline.batch,
        )
        return begun + (samples - begun) * (steps - 1) // max(1, steps)


def _steps_of(progress: TrainState) -> int | None:
    """Return how many steps training has in total, or None if that is not known."""
    longest, steps, now = progress.max_duration, progress.epoch_batches, progress.timestamp
    if longest is None:
        return None
    if longest.unit is TimeUnit.EPOCH and steps is not None:
        return now.batch - now.batch_in_epoch + (int(longest.value) - now.epoch) * steps
    return int(longest.value) if longest.unit is TimeUnit.BATCH else None


def _rename_loss(losses: Mapping[str, Any]) -> dict[str, Any]:
    """Return the losses by name, with `loss` renamed to Megatron's `lm loss`.

    If the loop itself reports a loss named `lm loss`, `loss` is left out.
    """
    if len(losses) == 1 and (loss := losses.get("loss")) is not None:
        return {LM_LOSS: loss}
    others = {name: value for name, value in losses.items() if name != "loss"}
    return others if LM_LOSS in others or "loss" not in losses else {LM_LOSS: losses["loss"], **others}
