"""The training loop. For each part of the run, the loop enters a span, such as `with spans.epoch:`, which fires the part's events."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from callsheet.errors import ConfigError
from callsheet.run.metrics import lasting
from callsheet.run.run import Run
from callsheet.trainer.batches import TrainBatches, to_device
from callsheet.trainer.data import SharedBatches
from callsheet.trainer.microbatches import Fetched, MicrobatchPlan, add_losses, select_loss
from callsheet.trainer.parallel import ParallelModel, clip_gradients
from callsheet.trainer.precision import Precision
from callsheet.trainer.tasks import Task

_END_OF_DATA: Any = object()  # marks the end of the data


class TrainLoop:
    """Trains until the run's duration is reached or a stop is requested.

    Args:
        run: the run; `run.connect` must have been called before.
        microbatch_size: samples per microbatch, or None for whole batches.
        gradient_accumulation_steps: how many batches are fetched for one step; the last step of an epoch may have fewer.
        clip_grad_norm: see `Trainer`.
        epochs_per_round: see `Trainer`.
    """

    def __init__(
        self,
        run: Run,
        model: ParallelModel,
        task: Task,
        optimizer: Optimizer,
        scheduler: LRScheduler | None,
        precision: Precision,
        batches: TrainBatches,
        device: torch.device,
        *,
        microbatch_size: int | None,
        gradient_accumulation_steps: int,
        clip_grad_norm: float | None,
        epochs_per_round: int | None,
    ) -> None:
        self._ctx = run.ctx
        self._spans = run.spans
        self._groups = run.groups
        self._records = run.records
        self._boundaries = run.boundaries
        self._signals = run.signals
        self._has_listeners = run.manager.has_listeners
        self._model = model
        self._task = task
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._precision = precision
        self._batches = batches
        self._compute = device
        self._device = device if device.type != "cpu" else None  # None on the CPU, where batches need not be moved
        self._microbatch_size = microbatch_size
        self.gradient_accumulation_steps = gradient_accumulation_steps
        self._clip_grad_norm = clip_grad_norm
        self._epochs_per_round = epochs_per_round

    def run(self) -> None:
        """Train the remaining epochs of the run, in rounds (groups of epochs)."""
        ctx, spans, state, boundaries = self._ctx, self._spans, self._ctx.state, self._boundaries
        ctx.model.train()
        try:
            with spans.train:
                is_over = boundaries.is_over or boundaries.finish_undone("round")
                while not is_over:
                    with spans.round:
                        is_over = boundaries.finish_undone("epoch")
                        while not is_over and not self._round_is_full:
                            ctx.epoch = state.timestamp.epoch + 1
                            with spans.epoch:
                                is_whole = self._epoch()
                                self._records.tally.update_timestamp(state)
                                if is_whole:
                                    self._batches.end_epoch()
                                    state.timestamp = state.timestamp.next_epoch()
                            is_over = boundaries.reach("epoch") if is_whole else True
                        is_full = self._round_is_full
                        if is_full:
                            state.timestamp = state.timestamp.next_round()
                    if is_full:
                        is_over = boundaries.reach("round") or is_over
                boundaries.finish_save()
                self._records.tally.update_timestamp(state)
        finally:
            self._records.tally.stop()

    def _epoch(self) -> bool:
        """Train on the remaining batches of the current epoch, until the data or training ends. Return whether the data has ended."""
        ctx, spans, module, task, optimizer = self._ctx, self._spans, self._model.module, self._task, self._optimizer
        state, records, control, boundaries, signals = ctx.state, self._records, ctx.control, self._boundaries, self._signals
        precision, batches, size, listens = self._precision, self._batches, self._microbatch_size, self._has_listeners
        casting, casting_loss = precision.casting, precision.casting_loss
        epoch = batches.epoch(ctx.epoch)
        if boundaries.finish_undone("step"):
            return batches.is_at_end
        is_shared = isinstance(epoch, SharedBatches)
        next_boundary = boundaries.next_step()
        records.tally.start()
        is_exhausted = False
        while not is_exhausted:
            if control.accumulation is not None:
                self._accumulate(control.accumulation)
            if not self._fetch(epoch):
                del ctx.batch
                if not state.timestamp.batch_in_epoch:
                    raise ConfigError(f"epoch {ctx.epoch} had no batches; is the dataset empty, or was an iterator used up?")
                return True
            if is_shared or size is not None or self.gradient_accumulation_steps > 1:
                fetched, is_exhausted = self._fetch_rest(epoch)
                if not fetched:
                    del ctx.batch
                    return False  # the run is preempted: drop these batches, which a resumed run fetches again
                taken = len(fetched)
            else:
                fetched, taken = [], 1
            ctx.step += 1
            with spans.train_step:
                if fetched:
                    fetched[-1].batch = ctx.batch  # a handler may have replaced the batch
                    plan = MicrobatchPlan(fetched, size, task, self._groups, self._compute, same_number=self._model.forward_meets)
                    parts = plan.parts
                else:
                    # There is one rank and one microbatch, so the loss is not averaged with other losses, and needs no weight.
                    plan, parts = None, [(ctx.batch, ctx.batch, None)]
                with spans.forward_backward:
                    means: dict[str, Tensor] = {}
                    left = len(parts)
                    for ctx.batch, ctx.microbatch, share in parts:
                        left -= 1
                        if is_shared:
                            self._model.gradients_meet(not left)
                            ctx.is_filler = plan.fillers[-1 - left]  # type: ignore[union-attr]  # several ranks always have a plan
                        with spans.microbatch:
                            with spans.forward:
                                with casting:
                                    ctx.outputs = task.forward(module, ctx.microbatch)
                            with spans.loss:
                                with casting_loss:
                                    losses = task.loss(ctx.outputs, ctx.microbatch)
                                ctx.loss = losses if type(losses) is Tensor and not losses.dim() else select_loss(losses)
                            if "outputs" not in ctx.kept:
                                del ctx.outputs
                            with spans.backward:
                                precision.scale_loss(ctx.loss if plan is None else plan.weigh_loss(ctx.loss, share)).backward()
                            if share is None and type(losses) is Tensor:
                                means = {"loss": lasting(ctx.loss)}
                            else:
                                means = add_losses(means, ctx.loss, losses, share)
                        del ctx.microbatch, ctx.loss
                    ctx.loss = means["loss"]
                    # Keep the autograd graph of a single loss until the next loss exists: allocating the next graph is then faster.
                    if type(losses) is not Tensor:
                        del losses  # losses that had no backward pass still hold their autograd graphs, so free them
                    precision.unscale(optimizer)
                with spans.clip_gradients:
                    ctx.grad_norm = None
                    if self._clip_grad_norm is not None:
                        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
                        ctx.grad_norm = clip_gradients(parameters, self._clip_grad_norm)
                        records.metrics.log({"train/grad_norm": ctx.grad_norm}, over="mean", across="same")
                rate: Any = optimizer.param_groups[0].get("lr")  # None if the optimizer has no learning rate
                if isinstance(rate, Tensor):
                    rate = rate.clone()  # copy a learning rate that is a tensor, because the scheduler changes it in place
                ctx.learning_rate = records.learning_rate = rate
                with spans.optimizer_step:
                    ctx.step_skipped = not precision.step(optimizer)
                if self._scheduler is not None and not ctx.step_skipped:
                    self._scheduler.step()
                if plan is None:
                    records.tally.count(*task.counts(ctx.batch))
                    records.add(means, moved=not ctx.step_skipped)
                else:
                    records.tally.count(*plan.counts(task))
                    records.add(means, plan.scale, moved=not ctx.step_skipped)
                state.previous_timestamp, state.timestamp = state.timestamp, state.timestamp.next_batch()
                # The number of label tokens is needed only in a step after which a metrics record is made.
                if ctx.step >= next_boundary and records.are_read and records.are_due(ctx):
                    labels = task.label_tokens(ctx.batch) if plan is None else plan.label_tokens(task)
                    if labels is not None:
                        records.metrics.log({"train/label_tokens": labels}, across="sum")
                ctx.loss_dict = means
            del ctx.batch, ctx.loss, ctx.loss_dict, ctx.grad_norm, ctx.learning_rate, ctx.step_skipped
            if "outputs" in ctx.kept:
                del ctx.outputs
            optimizer.zero_grad()
            batches.taken += taken
            if ctx.step >= next_boundary or control.pending or signals.received is not None:
                if boundaries.reach("step"):
                    break
                next_boundary = boundaries.next_step()
            elif listens.on_checkpoint_due:
                boundaries.fire_checkpoint_due("step")
        return is_exhausted or batches.is_at_end

    def _fetch(self, epoch: Iterator[Any]) -> bool:
        """Fetch the next batch into `ctx.batch`, which is None at the end of the data. Return whether there was a batch."""
        ctx = self._ctx
        with self._spans.fetch:
            batch = next(epoch, _END_OF_DATA)
            if batch is None:  # in `ctx.batch`, None means the end of the data, so a batch must not be None
                raise ConfigError(
                    f"the train_dataloader returned None for a batch of epoch {ctx.epoch}; let its collate_fn drop bad samples, not "
                    "whole batches"
                )
            if batch is _END_OF_DATA:
                ctx.batch = None
            else:
                ctx.batch = batch if self._device is None else to_device(batch, self._device)
        return batch is not _END_OF_DATA

    def _fetch_rest(self, epoch: Iterator[Any]) -> tuple[list[Fetched], bool]:
        """Fetch the other batches of the step whose first batch is `ctx.batch`.

        Return all batches of the step, and whether the epoch has ended.

        If a preemption signal arrives meanwhile, return no batches, so that training ends before this step. This is done only in a
        single process whose dataloader has no `state_dict`, because only then does a resumed run fetch the same batches again.
        """
        ctx = self._ctx
        fetched = [self._wrap_batch(epoch)]
        may_leave = not isinstance(epoch, SharedBatches) and not hasattr(self._batches.loader, "state_dict")
        while len(fetched) < self.gradient_accumulation_steps:
            if may_leave and self._signals.received is not None:
                return [], False
            if not self._fetch(epoch):
                ctx.batch = fetched[-1].batch
                return fetched, True
            fetched.append(self._wrap_batch(epoch))
        return fetched, False

    def _wrap_batch(self, epoch: Iterator[Any]) -> Fetched:
        if isinstance(epoch, SharedBatches):
            return Fetched(self._ctx.batch, epoch.is_filler, epoch.samples_here, epoch.samples_in_all)
        return Fetched(self._ctx.batch)

    def _accumulate(self, batches: int) -> None:
        """Change the number of batches per step to `batches`, if a callback requested this during the last step."""
        self.gradient_accumulation_steps = batches
        self._ctx.control.accumulation = None
        self.set_epoch_length()

    def set_epoch_length(self) -> None:
        """Set `epoch_batches` of the run's state to the number of steps in the epoch, if the length of the data is known."""
        ctx, length = self._ctx, self._batches.length
        if length is not None:
            left = max(0, length - self._batches.taken)
            ctx.state.epoch_batches = ctx.state.timestamp.batch_in_epoch + -(-left // self.gradient_accumulation_steps)

    @property
    def _round_is_full(self) -> bool:
        return self._epochs_per_round is not None and self._ctx.state.timestamp.epoch_in_round >= self._epochs_per_round

    def state_dict(self) -> dict[str, Any]:
        """Return the current number of batches per step, for a checkpoint."""
        return {"accumulate": self.gradient_accumulation_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.gradient_accumulation_steps = state["accumulate"]
