"""One empty method for every event. `Callback` inherits these methods, so that editors can complete the names of the events.

A handler returns None. An `async def` handler returns an awaitable, which its lane awaits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from callsheet.core.context import Context


class Hooks:
    """One empty method for each event of a run."""

    # generated: hooks
    def on_run_start(self, ctx: Context) -> Awaitable[None] | None:
        """Called first, by the trainer's constructor. The run's name, folder and ranks are known."""

    def on_checkpoint_load_start(self, ctx: Context) -> Awaitable[None] | None:
        """Called before the loop looks for a checkpoint to load. A callback may choose the checkpoint with `ctx.control.load(path)`."""

    def on_checkpoint_load_end(self, ctx: Context) -> Awaitable[None] | None:
        """Called when the checkpoint has been loaded, except for the random states. `ctx.checkpoint` is None if there was none to load.

        Available here: checkpoint.
        """

    def on_data_init_start(self, ctx: Context) -> Awaitable[None] | None:
        """Called when model and optimizer are ready and the checkpoint has been loaded. No data has been read yet.

        Available here: optimizer, scheduler.
        """

    def on_data_init_end(self, ctx: Context) -> Awaitable[None] | None:
        """Called when the dataloaders have been made.

        Available here: optimizer, scheduler.
        """

    def on_train_start(self, ctx: Context) -> Awaitable[None] | None:
        """Called when training begins. The model is in training mode.

        Available here: optimizer, scheduler.
        """

    def on_round_start(self, ctx: Context) -> Awaitable[None] | None:
        """Called before a round (a group of epochs). Most runs have one round.

        Available here: optimizer, scheduler.
        """

    def on_epoch_start(self, ctx: Context) -> Awaitable[None] | None:
        """Called before an epoch (a pass over the training data), and again when a run resumes in the middle of an epoch.

        Available here: optimizer, scheduler.
        """

    def on_fetch_start(self, ctx: Context) -> Awaitable[None] | None:
        """Called before the next batch is requested from the dataloader. A step may take several batches.

        Available here: optimizer, scheduler.
        """

    def on_fetch_end(self, ctx: Context) -> Awaitable[None] | None:
        """Called when the batch is on the device. `ctx.batch` may be replaced; it is None when the data has run out.

        Available here: optimizer, scheduler, batch.
        """

    def on_train_step_start(self, ctx: Context) -> Awaitable[None] | None:
        """Called before one optimizer step over one global batch.

        Available here: optimizer, scheduler, batch.
        """

    def on_forward_backward_start(self, ctx: Context) -> Awaitable[None] | None:
        """Called before the step's first microbatch.

        Available here: optimizer, scheduler, batch.
        """

    def on_microbatch_start(self, ctx: Context) -> Awaitable[None] | None:
        """Called before a microbatch's forward pass. `ctx.microbatch` may be replaced.

        Available here: optimizer, scheduler, batch, microbatch.
        """

    def on_forward_start(self, ctx: Context) -> Awaitable[None] | None:
        """Called before the model is called on a microbatch.

        Available here: optimizer, scheduler, batch, microbatch.
        """

    def on_forward_end(self, ctx: Context) -> Awaitable[None] | None:
        """Called when the model has returned its outputs, which may be replaced.

        Available here: optimizer, scheduler, batch, microbatch, outputs.
        """

    def on_loss_start(self, ctx: Context) -> Awaitable[None] | None:
        """Called before the loss is computed.

        Available here: optimizer, scheduler, batch, microbatch, outputs.
        """

    def on_loss_end(self, ctx: Context) -> Awaitable[None] | None:
        """Called when the microbatch's loss has been computed. `ctx.loss` may be replaced.

        Available here: optimizer, scheduler, batch, microbatch, outputs, loss.
        """

    def on_backward_start(self, ctx: Context) -> Awaitable[None] | None:
        """Called before the backward pass.

        Available here: optimizer, scheduler, batch, microbatch, loss.
        """

    def on_backward_end(self, ctx: Context) -> Awaitable[None] | None:
        """Called when the microbatch's gradients have been added to each parameter's `.grad`.

        Available here: optimizer, scheduler, batch, microbatch, loss.
        """

    def on_microbatch_end(self, ctx: Context) -> Awaitable[None] | None:
        """Called after the microbatch's backward pass.

        Available here: optimizer, scheduler, batch, microbatch, loss.
        """

    def on_forward_backward_end(self, ctx: Context) -> Awaitable[None] | None:
        """Called after the step's last microbatch. The gradients are complete and unscaled, and `ctx.loss` is the step's mean loss.

        Available here: optimizer, scheduler, batch, loss.
        """

    def on_clip_gradients_start(self, ctx: Context) -> Awaitable[None] | None:
        """Called before gradients are clipped, and also if clipping is off.

        Available here: optimizer, scheduler, batch, loss.
        """

    def on_clip_gradients_end(self, ctx: Context) -> Awaitable[None] | None:
        """Called when gradients have been clipped. `ctx.grad_norm` is their total norm before clipping, or None if it was not computed.

        Available here: optimizer, scheduler, batch, loss, grad_norm.
        """

    def on_optimizer_step_start(self, ctx: Context) -> Awaitable[None] | None:
        """Called before `optimizer.step()`. `ctx.learning_rate` is the rate that this step uses.

        Available here: optimizer, scheduler, batch, loss, grad_norm, learning_rate.
        """

    def on_optimizer_step_end(self, ctx: Context) -> Awaitable[None] | None:
        """Called after `optimizer.step()` and before the scheduler steps. `ctx.step_skipped` says whether the step was skipped.

        Available here: optimizer, scheduler, batch, loss, grad_norm, learning_rate, step_skipped.
        """

    def on_train_step_end(self, ctx: Context) -> Awaitable[None] | None:
        """Called when the optimizer and the scheduler have stepped. The gradients are still available, and are zeroed afterwards.

        Available here: optimizer, scheduler, batch, loss, loss_dict, grad_norm, learning_rate, step_skipped.
        """

    def on_log(self, ctx: Context) -> Awaitable[None] | None:
        """Called every `log_interval`, and before and after an evaluation. `ctx.record` holds what was logged since the last `on_log`.

        Available here: optimizer, scheduler, record.
        """

    def on_eval_all_start(self, ctx: Context) -> Awaitable[None] | None:
        """Called before the evaluations that are due. The model is in evaluation mode.

        Available here: optimizer, scheduler, standalone.
        """

    def on_eval_start(self, ctx: Context) -> Awaitable[None] | None:
        """Called before one named dataset is evaluated.

        Available here: optimizer, scheduler, eval_name, standalone.
        """

    def on_eval_step_start(self, ctx: Context) -> Awaitable[None] | None:
        """Called before an evaluation batch.

        Available here: optimizer, scheduler, batch, eval_name, standalone.
        """

    def on_eval_forward_start(self, ctx: Context) -> Awaitable[None] | None:
        """Called before the model is called on an evaluation batch.

        Available here: optimizer, scheduler, batch, eval_name, standalone.
        """

    def on_eval_forward_end(self, ctx: Context) -> Awaitable[None] | None:
        """Called when the model has returned its outputs, which may be replaced.

        Available here: optimizer, scheduler, batch, outputs, eval_name, standalone.
        """

    def on_eval_step_end(self, ctx: Context) -> Awaitable[None] | None:
        """Called after an evaluation batch.

        Available here: optimizer, scheduler, batch, outputs, eval_name, standalone.
        """

    def on_eval_end(self, ctx: Context) -> Awaitable[None] | None:
        """Called after one named dataset has been evaluated and its losses and metrics have been aggregated.

        Available here: optimizer, scheduler, eval_name, standalone, eval_losses.
        """

    def on_eval_all_end(self, ctx: Context) -> Awaitable[None] | None:
        """Called after all evaluations that were due. The model is still in evaluation mode.

        Available here: optimizer, scheduler, standalone, eval_results.
        """

    def on_checkpoint_due(self, ctx: Context) -> Awaitable[None] | None:
        """Called after a step, epoch or round, and before an evaluation (`ctx.boundary` says which). Callbacks may request a checkpoint.

        Available here: optimizer, scheduler, boundary.
        """

    def on_checkpoint_save_start(self, ctx: Context) -> Awaitable[None] | None:
        """Called before a checkpoint is written. Its kind and path are known.

        Available here: optimizer, scheduler, checkpoint.
        """

    def on_checkpoint_save_end(self, ctx: Context) -> Awaitable[None] | None:
        """Called when the checkpoint has been written. If saves run in the background, called when the state was copied, before it is written.

        Available here: optimizer, scheduler, checkpoint.
        """

    def on_epoch_end(self, ctx: Context) -> Awaitable[None] | None:
        """Called after an epoch (a pass over the training data), or when training stops within the epoch.

        Available here: optimizer, scheduler.
        """

    def on_round_end(self, ctx: Context) -> Awaitable[None] | None:
        """Called after the last epoch of a round, or when training stops within the round.

        Available here: optimizer, scheduler.
        """

    def on_train_end(self, ctx: Context) -> Awaitable[None] | None:
        """Called when training has finished, was stopped, or was preempted, but not when it failed.

        Available here: optimizer, scheduler.
        """

    def on_test_start(self, ctx: Context) -> Awaitable[None] | None:
        """Called before the first test batch. The model is in evaluation mode.

        Available here: optimizer, scheduler.
        """

    def on_test_step_start(self, ctx: Context) -> Awaitable[None] | None:
        """Called before a test batch.

        Available here: optimizer, scheduler, batch.
        """

    def on_test_forward_start(self, ctx: Context) -> Awaitable[None] | None:
        """Called before the model is called on a test batch.

        Available here: optimizer, scheduler, batch.
        """

    def on_test_forward_end(self, ctx: Context) -> Awaitable[None] | None:
        """Called when the model has returned its outputs.

        Available here: optimizer, scheduler, batch, outputs.
        """

    def on_test_step_end(self, ctx: Context) -> Awaitable[None] | None:
        """Called after a test batch.

        Available here: optimizer, scheduler, batch, outputs.
        """

    def on_test_end(self, ctx: Context) -> Awaitable[None] | None:
        """Called after the last test batch, when the test losses have been aggregated.

        Available here: optimizer, scheduler, eval_losses.
        """

    def on_predict_start(self, ctx: Context) -> Awaitable[None] | None:
        """Called before the first prediction batch. The model is in evaluation mode.

        Available here: optimizer, scheduler.
        """

    def on_predict_step_start(self, ctx: Context) -> Awaitable[None] | None:
        """Called before a prediction batch.

        Available here: optimizer, scheduler, batch.
        """

    def on_predict_forward_start(self, ctx: Context) -> Awaitable[None] | None:
        """Called before the model is called on a prediction batch.

        Available here: optimizer, scheduler, batch.
        """

    def on_predict_forward_end(self, ctx: Context) -> Awaitable[None] | None:
        """Called when the model has returned its outputs.

        Available here: optimizer, scheduler, batch, outputs.
        """

    def on_predict_step_end(self, ctx: Context) -> Awaitable[None] | None:
        """Called after a prediction batch.

        Available here: optimizer, scheduler, batch, outputs.
        """

    def on_predict_end(self, ctx: Context) -> Awaitable[None] | None:
        """Called after the last prediction batch.

        Available here: optimizer, scheduler.
        """

    def on_checkpoint_published(self, ctx: Context) -> Awaitable[None] | None:
        """Called when a checkpoint is durable and visible, perhaps many steps after it was saved.

        Available here: checkpoint.
        """

    def on_preempt(self, ctx: Context) -> Awaitable[None] | None:
        """Called when a signal has preempted the run. A checkpoint is saved next, and then the run ends."""

    def on_exception(self, ctx: Context) -> Awaitable[None] | None:
        """Called once, when an exception leaves the trainer. `ctx.span` names the innermost span that was open.

        Available here: exception, span.
        """

    def on_run_end(self, ctx: Context) -> Awaitable[None] | None:
        """Called last, and exactly once, however the run ends. `ctx.run.outcome` says how it ended, and `ctx.run.outcome_reason` why.

        Available here: optimizer, scheduler.
        """

    # end of generated: hooks
