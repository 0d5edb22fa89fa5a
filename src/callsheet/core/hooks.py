"""One empty method for every event. `Callback` inherits them, so that editors can complete their names.

A handler returns None. An `async def` handler returns an awaitable, which its lane awaits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from callsheet.core.context import Context


class Hooks:
    """The methods of the lifecycle's events."""

    # generated: hooks
    def on_run_start(self, ctx: Context) -> Awaitable[None] | None:
        """The first event, fired by the trainer's constructor: the run's name, folder and ranks are known."""

    def on_checkpoint_load_start(self, ctx: Context) -> Awaitable[None] | None:
        """Before a checkpoint is searched for; `ctx.control.load(path)` may name one."""

    def on_checkpoint_load_end(self, ctx: Context) -> Awaitable[None] | None:
        """Everything but the random states is restored, or there was nothing to load (`ctx.checkpoint` is None).

        Available here: checkpoint.
        """

    def on_data_init_start(self, ctx: Context) -> Awaitable[None] | None:
        """Model, optimizer and checkpoint are ready; data may be read from here on, not before.

        Available here: optimizer, scheduler.
        """

    def on_data_init_end(self, ctx: Context) -> Awaitable[None] | None:
        """The dataloaders exist.

        Available here: optimizer, scheduler.
        """

    def on_train_start(self, ctx: Context) -> Awaitable[None] | None:
        """The model is in training mode; the first round follows.

        Available here: optimizer, scheduler.
        """

    def on_round_start(self, ctx: Context) -> Awaitable[None] | None:
        """Before a group of epochs; most runs have one round.

        Available here: optimizer, scheduler.
        """

    def on_epoch_start(self, ctx: Context) -> Awaitable[None] | None:
        """Before a pass over the training data; fired again when a resumed run continues in the middle of an epoch.

        Available here: optimizer, scheduler.
        """

    def on_fetch_start(self, ctx: Context) -> Awaitable[None] | None:
        """Before the next batch is requested from the dataloader; a step may use several batches.

        Available here: optimizer, scheduler.
        """

    def on_fetch_end(self, ctx: Context) -> Awaitable[None] | None:
        """The batch is on the device and may be replaced; `ctx.batch` is None when the data has run out.

        Available here: optimizer, scheduler, batch.
        """

    def on_train_step_start(self, ctx: Context) -> Awaitable[None] | None:
        """Before one optimizer step over one global batch.

        Available here: optimizer, scheduler, batch.
        """

    def on_forward_backward_start(self, ctx: Context) -> Awaitable[None] | None:
        """Before the step's first microbatch.

        Available here: optimizer, scheduler, batch.
        """

    def on_microbatch_start(self, ctx: Context) -> Awaitable[None] | None:
        """Before a microbatch's forward pass; `ctx.microbatch` may be replaced.

        Available here: optimizer, scheduler, batch, microbatch.
        """

    def on_forward_start(self, ctx: Context) -> Awaitable[None] | None:
        """Before the model is called on a microbatch.

        Available here: optimizer, scheduler, batch, microbatch.
        """

    def on_forward_end(self, ctx: Context) -> Awaitable[None] | None:
        """The model has returned its outputs, which may be replaced.

        Available here: optimizer, scheduler, batch, microbatch, outputs.
        """

    def on_loss_start(self, ctx: Context) -> Awaitable[None] | None:
        """Before the loss is computed.

        Available here: optimizer, scheduler, batch, microbatch, outputs.
        """

    def on_loss_end(self, ctx: Context) -> Awaitable[None] | None:
        """The microbatch's loss is computed and may be replaced.

        Available here: optimizer, scheduler, batch, microbatch, outputs, loss.
        """

    def on_backward_start(self, ctx: Context) -> Awaitable[None] | None:
        """Before the backward pass.

        Available here: optimizer, scheduler, batch, microbatch, loss.
        """

    def on_backward_end(self, ctx: Context) -> Awaitable[None] | None:
        """The microbatch's gradients have been added to each parameter's `.grad`.

        Available here: optimizer, scheduler, batch, microbatch, loss.
        """

    def on_microbatch_end(self, ctx: Context) -> Awaitable[None] | None:
        """After the microbatch's backward pass.

        Available here: optimizer, scheduler, batch, microbatch, loss.
        """

    def on_forward_backward_end(self, ctx: Context) -> Awaitable[None] | None:
        """All microbatches are done; gradients are complete and unscaled; `ctx.loss` is the step's mean.

        Available here: optimizer, scheduler, batch, loss.
        """

    def on_clip_gradients_start(self, ctx: Context) -> Awaitable[None] | None:
        """Before gradients are clipped; fired also if clipping is off.

        Available here: optimizer, scheduler, batch, loss.
        """

    def on_clip_gradients_end(self, ctx: Context) -> Awaitable[None] | None:
        """Gradients are clipped; their total norm before clipping is known, if it was computed.

        Available here: optimizer, scheduler, batch, loss, grad_norm.
        """

    def on_optimizer_step_start(self, ctx: Context) -> Awaitable[None] | None:
        """Before `optimizer.step()`; the learning rate of this step is known.

        Available here: optimizer, scheduler, batch, loss, grad_norm, learning_rate.
        """

    def on_optimizer_step_end(self, ctx: Context) -> Awaitable[None] | None:
        """After `optimizer.step()` and before the scheduler steps; `ctx.step_skipped` says whether the step was skipped.

        Available here: optimizer, scheduler, batch, loss, grad_norm, learning_rate, step_skipped.
        """

    def on_train_step_end(self, ctx: Context) -> Awaitable[None] | None:
        """The optimizer and the scheduler have stepped; gradients are still available, and zeroed afterwards.

        Available here: optimizer, scheduler, batch, loss, loss_dict, grad_norm, learning_rate, step_skipped.
        """

    def on_log(self, ctx: Context) -> Awaitable[None] | None:
        """Every `log_interval`, and before and after an evaluation: `ctx.record` holds what was logged since the last `on_log`.

        Available here: optimizer, scheduler, record.
        """

    def on_eval_all_start(self, ctx: Context) -> Awaitable[None] | None:
        """The model is in evaluation mode; the evaluators that are due follow.

        Available here: optimizer, scheduler, standalone.
        """

    def on_eval_start(self, ctx: Context) -> Awaitable[None] | None:
        """Before one named dataset is evaluated.

        Available here: optimizer, scheduler, eval_name, standalone.
        """

    def on_eval_step_start(self, ctx: Context) -> Awaitable[None] | None:
        """Before an evaluation batch.

        Available here: optimizer, scheduler, batch, eval_name, standalone.
        """

    def on_eval_forward_start(self, ctx: Context) -> Awaitable[None] | None:
        """Before the model is called on an evaluation batch.

        Available here: optimizer, scheduler, batch, eval_name, standalone.
        """

    def on_eval_forward_end(self, ctx: Context) -> Awaitable[None] | None:
        """The model has returned its outputs, which may be replaced.

        Available here: optimizer, scheduler, batch, outputs, eval_name, standalone.
        """

    def on_eval_step_end(self, ctx: Context) -> Awaitable[None] | None:
        """After an evaluation batch.

        Available here: optimizer, scheduler, batch, outputs, eval_name, standalone.
        """

    def on_eval_end(self, ctx: Context) -> Awaitable[None] | None:
        """The losses and metrics of one dataset are aggregated.

        Available here: optimizer, scheduler, eval_name, standalone, eval_losses.
        """

    def on_eval_all_end(self, ctx: Context) -> Awaitable[None] | None:
        """All evaluators are done; the model is still in evaluation mode.

        Available here: optimizer, scheduler, standalone, eval_results.
        """

    def on_checkpoint_due(self, ctx: Context) -> Awaitable[None] | None:
        """After a step, an epoch or a round, and before an evaluation: a checkpoint may be requested; `ctx.boundary` says which.

        Available here: optimizer, scheduler, boundary.
        """

    def on_checkpoint_save_start(self, ctx: Context) -> Awaitable[None] | None:
        """Before a checkpoint is written; its kind and path are known.

        Available here: optimizer, scheduler, checkpoint.
        """

    def on_checkpoint_save_end(self, ctx: Context) -> Awaitable[None] | None:
        """The training thread continues: everything is written, or copied if saving is asynchronous.

        Available here: optimizer, scheduler, checkpoint.
        """

    def on_epoch_end(self, ctx: Context) -> Awaitable[None] | None:
        """After one pass over the training data (an epoch), or when training stops within it.

        Available here: optimizer, scheduler.
        """

    def on_round_end(self, ctx: Context) -> Awaitable[None] | None:
        """After the last epoch of a round, or when training stops within it.

        Available here: optimizer, scheduler.
        """

    def on_train_end(self, ctx: Context) -> Awaitable[None] | None:
        """Training has finished, was stopped, or was preempted; not fired if training failed.

        Available here: optimizer, scheduler.
        """

    def on_test_start(self, ctx: Context) -> Awaitable[None] | None:
        """The model is in evaluation mode; the first test batch follows.

        Available here: optimizer, scheduler.
        """

    def on_test_step_start(self, ctx: Context) -> Awaitable[None] | None:
        """Before a test batch.

        Available here: optimizer, scheduler, batch.
        """

    def on_test_forward_start(self, ctx: Context) -> Awaitable[None] | None:
        """Before the model is called on a test batch.

        Available here: optimizer, scheduler, batch.
        """

    def on_test_forward_end(self, ctx: Context) -> Awaitable[None] | None:
        """The model has returned its outputs.

        Available here: optimizer, scheduler, batch, outputs.
        """

    def on_test_step_end(self, ctx: Context) -> Awaitable[None] | None:
        """After a test batch.

        Available here: optimizer, scheduler, batch, outputs.
        """

    def on_test_end(self, ctx: Context) -> Awaitable[None] | None:
        """The test losses are aggregated.

        Available here: optimizer, scheduler, eval_losses.
        """

    def on_predict_start(self, ctx: Context) -> Awaitable[None] | None:
        """The model is in evaluation mode; the first batch of prediction follows.

        Available here: optimizer, scheduler.
        """

    def on_predict_step_start(self, ctx: Context) -> Awaitable[None] | None:
        """Before a prediction batch.

        Available here: optimizer, scheduler, batch.
        """

    def on_predict_forward_start(self, ctx: Context) -> Awaitable[None] | None:
        """Before the model is called on a prediction batch.

        Available here: optimizer, scheduler, batch.
        """

    def on_predict_forward_end(self, ctx: Context) -> Awaitable[None] | None:
        """The model has returned its outputs.

        Available here: optimizer, scheduler, batch, outputs.
        """

    def on_predict_step_end(self, ctx: Context) -> Awaitable[None] | None:
        """After a prediction batch.

        Available here: optimizer, scheduler, batch, outputs.
        """

    def on_predict_end(self, ctx: Context) -> Awaitable[None] | None:
        """All predictions are made.

        Available here: optimizer, scheduler.
        """

    def on_checkpoint_published(self, ctx: Context) -> Awaitable[None] | None:
        """A checkpoint is durable and visible, perhaps many steps after it was saved.

        Available here: checkpoint.
        """

    def on_preempt(self, ctx: Context) -> Awaitable[None] | None:
        """The run is preempted by a signal: a checkpoint follows, then the end."""

    def on_exception(self, ctx: Context) -> Awaitable[None] | None:
        """Once, when an exception leaves the trainer; `ctx.span` names the innermost span that was open.

        Available here: exception, span.
        """

    def on_run_end(self, ctx: Context) -> Awaitable[None] | None:
        """The last event, fired exactly once however the run ends; `ctx.run.outcome` says how it ended, and `ctx.run.outcome_reason` why.

        Available here: optimizer, scheduler.
        """

    # end of generated: hooks
