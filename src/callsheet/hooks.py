"""A method for every event, each of which does nothing: what `Callback` inherits, and an editor completes.

A handler returns nothing; one that is `async def` returns what its lane awaits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from callsheet.context import Context


class Hooks:
    """The methods that the lifecycle names."""

    # generated: hooks
    def on_run_start(self, ctx: Context) -> Awaitable[None] | None:
        """First of all, told by the trainer's constructor: the run's name, folder and ranks are known."""

    def on_checkpoint_load_start(self, ctx: Context) -> Awaitable[None] | None:
        """Before a checkpoint is looked for; `ctx.control.load(path)` may name one."""

    def on_checkpoint_load_end(self, ctx: Context) -> Awaitable[None] | None:
        """All but the random states is restored, or there was nothing to load (`ctx.checkpoint` is None).

        Told here: checkpoint.
        """

    def on_data_init_start(self, ctx: Context) -> Awaitable[None] | None:
        """Model, optimizer and checkpoint are ready; dataset input may begin from here, not before.

        Told here: optimizer, scheduler.
        """

    def on_data_init_end(self, ctx: Context) -> Awaitable[None] | None:
        """The dataloaders exist.

        Told here: optimizer, scheduler.
        """

    def on_train_start(self, ctx: Context) -> Awaitable[None] | None:
        """The model is in training mode; the first round follows.

        Told here: optimizer, scheduler.
        """

    def on_round_start(self, ctx: Context) -> Awaitable[None] | None:
        """Before a group of epochs; most runs have one round.

        Told here: optimizer, scheduler.
        """

    def on_epoch_start(self, ctx: Context) -> Awaitable[None] | None:
        """Before a pass over the training data; told again when a resumed run enters the middle of one.

        Told here: optimizer, scheduler.
        """

    def on_fetch_start(self, ctx: Context) -> Awaitable[None] | None:
        """Before the next batch is asked for; a step may take several.

        Told here: optimizer, scheduler.
        """

    def on_fetch_end(self, ctx: Context) -> Awaitable[None] | None:
        """The batch is on the device and may be replaced; at exhaustion `ctx.batch` is None.

        Told here: optimizer, scheduler, batch.
        """

    def on_train_step_start(self, ctx: Context) -> Awaitable[None] | None:
        """Before one optimizer step over one global batch.

        Told here: optimizer, scheduler, batch.
        """

    def on_forward_backward_start(self, ctx: Context) -> Awaitable[None] | None:
        """Before the step's first microbatch.

        Told here: optimizer, scheduler, batch.
        """

    def on_microbatch_start(self, ctx: Context) -> Awaitable[None] | None:
        """Before a microbatch's forward; it may be replaced.

        Told here: optimizer, scheduler, batch, microbatch.
        """

    def on_forward_start(self, ctx: Context) -> Awaitable[None] | None:
        """Before the model is called.

        Told here: optimizer, scheduler, batch, microbatch.
        """

    def on_forward_end(self, ctx: Context) -> Awaitable[None] | None:
        """The model's outputs are there and may be replaced.

        Told here: optimizer, scheduler, batch, microbatch, outputs.
        """

    def on_loss_start(self, ctx: Context) -> Awaitable[None] | None:
        """Before the loss is computed.

        Told here: optimizer, scheduler, batch, microbatch, outputs.
        """

    def on_loss_end(self, ctx: Context) -> Awaitable[None] | None:
        """The microbatch's loss is there and may be replaced.

        Told here: optimizer, scheduler, batch, microbatch, outputs, loss.
        """

    def on_backward_start(self, ctx: Context) -> Awaitable[None] | None:
        """Before the backward pass.

        Told here: optimizer, scheduler, batch, microbatch, loss.
        """

    def on_backward_end(self, ctx: Context) -> Awaitable[None] | None:
        """The microbatch's gradients have been added.

        Told here: optimizer, scheduler, batch, microbatch, loss.
        """

    def on_microbatch_end(self, ctx: Context) -> Awaitable[None] | None:
        """After its backward.

        Told here: optimizer, scheduler, batch, microbatch, loss.
        """

    def on_forward_backward_end(self, ctx: Context) -> Awaitable[None] | None:
        """All microbatches are through; gradients are complete and unscaled; `ctx.loss` is the step's mean.

        Told here: optimizer, scheduler, batch, loss.
        """

    def on_clip_gradients_start(self, ctx: Context) -> Awaitable[None] | None:
        """Before gradients are clipped, whether or not they will be.

        Told here: optimizer, scheduler, batch, loss.
        """

    def on_clip_gradients_end(self, ctx: Context) -> Awaitable[None] | None:
        """Gradients are clipped; their total norm before it is known, where it was computed.

        Told here: optimizer, scheduler, batch, loss, grad_norm.
        """

    def on_optimizer_step_start(self, ctx: Context) -> Awaitable[None] | None:
        """Before `optimizer.step()`; the learning rate of this step is known.

        Told here: optimizer, scheduler, batch, loss, grad_norm, learning_rate.
        """

    def on_optimizer_step_end(self, ctx: Context) -> Awaitable[None] | None:
        """After `optimizer.step()` and before the scheduler moves; whether the step was skipped is known.

        Told here: optimizer, scheduler, batch, loss, grad_norm, learning_rate, step_skipped.
        """

    def on_train_step_end(self, ctx: Context) -> Awaitable[None] | None:
        """The parameters and the scheduler have moved; gradients are still there, and zeroed afterwards.

        Told here: optimizer, scheduler, batch, loss, loss_dict, grad_norm, learning_rate, step_skipped.
        """

    def on_log(self, ctx: Context) -> Awaitable[None] | None:
        """At a log boundary, and before and after an evaluation: `ctx.record` holds what was logged since the last one.

        Told here: optimizer, scheduler, record.
        """

    def on_eval_all_start(self, ctx: Context) -> Awaitable[None] | None:
        """The model is in evaluation mode; the evaluators that are due follow.

        Told here: optimizer, scheduler, standalone.
        """

    def on_eval_start(self, ctx: Context) -> Awaitable[None] | None:
        """Before one named dataset is evaluated.

        Told here: optimizer, scheduler, eval_name, standalone.
        """

    def on_eval_step_start(self, ctx: Context) -> Awaitable[None] | None:
        """Before an evaluation batch.

        Told here: optimizer, scheduler, batch, eval_name, standalone.
        """

    def on_eval_forward_start(self, ctx: Context) -> Awaitable[None] | None:
        """Before the model is called.

        Told here: optimizer, scheduler, batch, eval_name, standalone.
        """

    def on_eval_forward_end(self, ctx: Context) -> Awaitable[None] | None:
        """The model's outputs are there and may be replaced.

        Told here: optimizer, scheduler, batch, outputs, eval_name, standalone.
        """

    def on_eval_step_end(self, ctx: Context) -> Awaitable[None] | None:
        """After an evaluation batch.

        Told here: optimizer, scheduler, batch, outputs, eval_name, standalone.
        """

    def on_eval_end(self, ctx: Context) -> Awaitable[None] | None:
        """Its losses and metrics are aggregated.

        Told here: optimizer, scheduler, eval_name, standalone, eval_losses.
        """

    def on_eval_all_end(self, ctx: Context) -> Awaitable[None] | None:
        """All evaluators are through; the model is still in evaluation mode.

        Told here: optimizer, scheduler, standalone, eval_results.
        """

    def on_checkpoint_due(self, ctx: Context) -> Awaitable[None] | None:
        """At a boundary where a checkpoint may be asked for; `ctx.boundary` says which.

        Told here: optimizer, scheduler, boundary.
        """

    def on_checkpoint_save_start(self, ctx: Context) -> Awaitable[None] | None:
        """Before a checkpoint is written; its kind and path are known.

        Told here: optimizer, scheduler, checkpoint.
        """

    def on_checkpoint_save_end(self, ctx: Context) -> Awaitable[None] | None:
        """The training thread goes on: everything is written, or, when saving is asynchronous, copied.

        Told here: optimizer, scheduler, checkpoint.
        """

    def on_epoch_end(self, ctx: Context) -> Awaitable[None] | None:
        """After the pass, or when training stops in the midst of it.

        Told here: optimizer, scheduler.
        """

    def on_round_end(self, ctx: Context) -> Awaitable[None] | None:
        """After the group's last epoch, or when training stops in the midst of it.

        Told here: optimizer, scheduler.
        """

    def on_train_end(self, ctx: Context) -> Awaitable[None] | None:
        """Training has finished, was stopped, or was preempted; not told when it failed.

        Told here: optimizer, scheduler.
        """

    def on_test_start(self, ctx: Context) -> Awaitable[None] | None:
        """The model is in evaluation mode.

        Told here: optimizer, scheduler.
        """

    def on_test_step_start(self, ctx: Context) -> Awaitable[None] | None:
        """Before a test batch.

        Told here: optimizer, scheduler, batch.
        """

    def on_test_forward_start(self, ctx: Context) -> Awaitable[None] | None:
        """Before the model is called.

        Told here: optimizer, scheduler, batch.
        """

    def on_test_forward_end(self, ctx: Context) -> Awaitable[None] | None:
        """The model's outputs are there.

        Told here: optimizer, scheduler, batch, outputs.
        """

    def on_test_step_end(self, ctx: Context) -> Awaitable[None] | None:
        """After a test batch.

        Told here: optimizer, scheduler, batch, outputs.
        """

    def on_test_end(self, ctx: Context) -> Awaitable[None] | None:
        """The test losses are aggregated.

        Told here: optimizer, scheduler, eval_losses.
        """

    def on_predict_start(self, ctx: Context) -> Awaitable[None] | None:
        """The model is in evaluation mode.

        Told here: optimizer, scheduler.
        """

    def on_predict_step_start(self, ctx: Context) -> Awaitable[None] | None:
        """Before a prediction batch.

        Told here: optimizer, scheduler, batch.
        """

    def on_predict_forward_start(self, ctx: Context) -> Awaitable[None] | None:
        """Before the model is called.

        Told here: optimizer, scheduler, batch.
        """

    def on_predict_forward_end(self, ctx: Context) -> Awaitable[None] | None:
        """The model's outputs are there.

        Told here: optimizer, scheduler, batch, outputs.
        """

    def on_predict_step_end(self, ctx: Context) -> Awaitable[None] | None:
        """After a prediction batch.

        Told here: optimizer, scheduler, batch, outputs.
        """

    def on_predict_end(self, ctx: Context) -> Awaitable[None] | None:
        """All predictions are made.

        Told here: optimizer, scheduler.
        """

    def on_checkpoint_published(self, ctx: Context) -> Awaitable[None] | None:
        """A checkpoint is durable and visible, perhaps many steps after it was saved.

        Told here: checkpoint.
        """

    def on_preempt(self, ctx: Context) -> Awaitable[None] | None:
        """A signal asked the run to make way: a checkpoint follows, then the end."""

    def on_exception(self, ctx: Context) -> Awaitable[None] | None:
        """Once, when an exception leaves the trainer, in the span that was open.

        Told here: exception, span.
        """

    def on_run_end(self, ctx: Context) -> Awaitable[None] | None:
        """Last of all, exactly once, on every way out; `ctx.run.outcome` says how the run ended, and `ctx.run.outcome_reason` why.

        Told here: optimizer, scheduler.
        """

    # end of generated: hooks
