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
        """The first event, fired by the trainer's constructor: the run's name, folder and ranks are known."""

    def on_checkpoint_load_start(self, ctx: Context) -> Awaitable[None] | None:
        """Before the loop looks for a checkpoint to load; a callback may name one with `ctx.control.load(path)`."""

    def on_checkpoint_load_end(self, ctx: Context) -> Awaitable[None] | None:
        """The checkpoint is loaded, except for the random states; `ctx.checkpoint` is None if there was none to load.

        Available here: checkpoint.
        """

    def on_data_init_start(self, ctx: Context) -> Awaitable[None] | None:
        """Model and optimizer are ready, and the checkpoint is loaded; no data has been read yet.

        Available here: optimizer, scheduler.
        """

    def on_data_init_end(self, ctx: Context) -> Awaitable[None] | None:
        """The dataloaders exist.

        Available here: optimizer, scheduler.
        """

    def on_train_start(self, ctx: Context) -> Awaitable[None] | None:
        """Training begins; the model is in training mode.

        Available here: optimizer, scheduler.
        """

    def on_round_start(self, ctx: Context) -> Awaitable[None] | None:
        """Before a round (a group of epochs); most runs have one round.

        Available here: optimizer, scheduler.
        """

    def on_epoch_start(self, ctx: Context) -> Awaitable[None] | None:
        """Before an epoch (a pass over the training data); fired again when a run resumes in the middle of an epoch.

        Available here: optimizer, scheduler.
        """

    def on_fetch_start(self, ctx: Context) -> Awaitable[None] | None:
        """Before the next batch is requested from the dataloader; a step may take several batches.

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
        """After the step's last microbatch; gradients are complete and unscaled; `ctx.loss` is the step's mean loss.

        Available here: optimizer, scheduler, batch, loss.
        """

    def on_clip_gradients_start(self, ctx: Context) -> Awaitable[None] | None:
        """Before gradients are clipped; fired also if clipping is off.

        Available here: optimizer, scheduler, batch, loss.
        """

    def on_clip_gradients_end(self, ctx: Context) -> Awaitable[None] | None:
        """Gradients are clipped; `ctx.grad_norm` is their total norm before clipping, or None if it was not computed.

        Available here: optimizer, scheduler, batch, loss, grad_norm.
        """

    def on_optimizer_step_start(self, ctx: Context) -> Awaitable[None] | None:
        """Before `optimizer.step()`; `ctx.learning_rate` is the rate that this step uses.

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
        """Before the evaluations that are due; the model is in evaluation mode.

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
        """After one named dataset is evaluated; its losses and metrics are aggregated.

        Available here: optimizer, scheduler, eval_name, standalone, eval_losses.
        """

    def on_eval_all_end(self, ctx: Context) -> Awaitable[None] | None:
        """After all evaluations that were due; the model is still in evaluation mode.

        Available here: optimizer, scheduler, standalone, eval_results.
        """

    def on_checkpoint_due(self, ctx: Context) -> Awaitable[None] | None:
        """After a step, epoch or round, and before an evaluation (`ctx.boundary` says which): callbacks may request a checkpoint.

        Available here: optimizer, scheduler, boundary.
        """

    def on_checkpoint_save_start(self, ctx: Context) -> Awaitable[None] | None:
        """Before a checkpoint is written; its kind and path are known.

        Available here: optimizer, scheduler, checkpoint.
        """

    def on_checkpoint_save_end(self, ctx: Context) -> Awaitable[None] | None:
        """The checkpoint is written, or, if saving is asynchronous, copied to be written in the background.

        Available here: optimizer, scheduler, checkpoint.
        """

    def on_epoch_end(self, ctx: Context) -> Awaitable[None] | None:
        """After an epoch (a pass over the training data), or when training stops within it.

        Available here: optimizer, scheduler.
        """

    def on_round_end(self, ctx: Context) -> Awaitable[None] | None:
        """After the last epoch of a round, or when training stops within it.

        Available here: optimizer, scheduler.
        """

    def on_train_end(self, ctx: Context) -> Awaitable[None] | None:
        """Training has finished, was stopped, or was preempted; not fired when it failed.

        Available here: optimizer, scheduler.
        """

    def on_test_start(self, ctx: Context) -> Awaitable[None] | None:
        """Before the first test batch; the model is in evaluation mode.

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
        """After the last test batch; the test losses are aggregated.

        Available here: optimizer, scheduler, eval_losses.
        """

    def on_predict_start(self, ctx: Context) -> Awaitable[None] | None:
        """Before the first prediction batch; the model is in evaluation mode.

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
        """After the last prediction batch.

        Available here: optimizer, scheduler.
        """

    def on_checkpoint_published(self, ctx: Context) -> Awaitable[None] | None:
        """A checkpoint is durable and visible, perhaps many steps after it was saved.

        Available here: checkpoint.
        """

    def on_preempt(self, ctx: Context) -> Awaitable[None] | None:
        """A signal has preempted the run: a checkpoint is saved next, then the run ends."""

    def on_exception(self, ctx: Context) -> Awaitable[None] | None:
        """Fired once, when an exception leaves the trainer; `ctx.span` names the innermost span that was open.

        Available here: exception, span.
        """

    def on_run_end(self, ctx: Context) -> Awaitable[None] | None:
        """The last event, fired exactly once however the run ends; `ctx.run.outcome` says how it ended, and `ctx.run.outcome_reason` why.

        Available here: optimizer, scheduler.
        """

    # end of generated: hooks
