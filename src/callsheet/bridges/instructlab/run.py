"""A run of callsheet's callbacks in InstructLab Training, on a background thread and on each rank separately."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from callsheet.bridges.boundary_order import BoundaryOrder
from callsheet.bridges.count_check import CountCheck, Counts
from callsheet.bridges.host_states import STATE
from callsheet.bridges.instructlab.names import TrainingContext
from callsheet.bridges.lifecycle_driver import LifecycleDriver
from callsheet.bridges.observed_run import ObservedRun
from callsheet.checkpoint import read_checkpoint, write_checkpoint
from callsheet.core.context import Boundary, Context
from callsheet.core.control import Control
from callsheet.core.manager import CallbackManager
from callsheet.core.ranks import Ranks, read_ranks
from callsheet.core.run_state import CheckpointInfo, MetricsRecord, Outcome, RunInfo, TrainState
from callsheet.core.time import Interval, Time
from callsheet.errors import NotSupported
from callsheet.run.costs import publish_costs
from callsheet.run.log_ranks import LogRanks
from callsheet.run.process_groups import ProcessGroups
from callsheet.run.run import run_info
from callsheet.run.settings import settings_of
from callsheet.run.signals import SignalWatch

logger = logging.getLogger("callsheet")

HOST = "InstructLab Training"

UNAVAILABLE_FIELDS = ("model", "optimizer", "scheduler", "batch", "microbatch", "outputs")
"""Fields of the context that are not available in InstructLab."""


_ENTRY_EVENTS = ("on_train_start", "on_round_start", "on_epoch_start", "on_fetch_start", "on_train_step_start")
"""Events at the start of training, a round, an epoch or a step. After them, training is no longer between two steps."""


class _ContextWithoutModel(Context):
    """The context that callsheet's callbacks receive in InstructLab. The model and the data are not available in it."""

    __slots__ = ()

    def __init__(self, run: RunInfo, **given: Any) -> None:
        super().__init__(run, **given)
        del self.model  # without the attribute, a handler that reads `ctx.model` is skipped with a warning

    def sibling(self, accumulator: Any = None) -> Context:
        return _ContextWithoutModel(
            self.run,
            state=self.state,
            user_state=self.user_state,
            control=self.control,
            accumulator=self._accumulator,
            loggers=self._loggers,
        )

    def gather(self, value: Any) -> list[Any]:
        """Return `[value]` if there is only one rank. Otherwise raise NotSupported."""
        if self.run.world_size > 1:
            raise NotSupported(f"ctx.gather() is not supported: it would interleave with the collectives of {HOST}'s training")
        return [value]


class HookedRun(ObservedRun):
    """A run of callsheet's callbacks in InstructLab's training, from `on_train_begin` to `on_train_end`."""

    host = HOST
    CONTEXT = _ContextWithoutModel
    _order: BoundaryOrder

    def __init__(self, manager: CallbackManager, context: TrainingContext, *, lock_timeout: float) -> None:
        output, ranks = Path(context.output_dir or "runs/instructlab").absolute(), read_ranks()
        config = {"model_name_or_path": context.model_name_or_path, "max_epochs": context.max_epochs, "output_dir": str(output)}
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        super().__init__(
            manager,
            run_info(output.name, output.parent, ranks, device, config),
            model=None,
            state=TrainState(max_duration=Time.parse(f"{context.max_epochs}ep") if context.max_epochs else None),
            control=Control((), host=HOST),
            signals=SignalWatch(()),
            # Use a group of one rank, because the collectives of this run could otherwise mix with those of training.
            groups=ProcessGroups(Ranks(), torch.device("cpu"), lock_timeout),
            log_every=Interval("1ba"),
            device=device,
            log_ranks=LogRanks("zero", ranks),
            lock_timeout=lock_timeout,
            # InstructLab calls no hook when its training fails, so a run that has not ended must not block a new run.
            is_busy=lambda lifetime: False,
        )
        self._metrics = self.records.metrics
        self.counts = CountCheck(HOST, self.ctx)
        self._counted = Counts()  # InstructLab's counts of steps and epochs at the latest check
        self.eval_ctx = self.ctx.sibling()
        self.driver = LifecycleDriver(
            self.spans,
            {
                **dict.fromkeys(_ENTRY_EVENTS, lambda: self._order.leave()),
                **dict.fromkeys(("on_epoch_end", "on_round_end"), lambda: self._order.reach()),
                "on_forward_backward_end": self._loss_is_known,
                "on_clip_gradients_end": self._clear_grad_norm,
                "on_optimizer_step_end": self._record_optimizer_step,
                "on_train_step_end": self._step_ends,
            },
        )
        self.eval_driver = LifecycleDriver(manager.spans(self.eval_ctx), {})
        self._order = BoundaryOrder(HOST, self.driver, self.eval_driver)
        self.eval_driver.is_barred = self._order.is_barred
        self.ctx.excuse = self.eval_ctx.excuse = self._order.excuse
        self.context = context
        """The context that InstructLab passed to the latest hook."""
        self.loss: torch.Tensor | None = None
        """The loss of the current step, over all ranks."""
        self.has_stepped = False
        """Whether the optimizer has stepped in the current step."""
        self.began = 0.0
        """When the current step began, as measured on this thread."""
        self._earlier_steps: int | None = None  # what `step_of` adds to InstructLab's step numbers; None before the first step
        self._totals = (context.total_samples, 0)
        self._since = (0, 0, 0.0)  # the total samples, tokens and seconds when the last step ended
        self._found: dict[str, float] = {}
        self._listens_to_parts = True

    # --- beginning and end ---

    def begin(self, context: TrainingContext) -> None:
        """Start the run, and load the callbacks' states from the checkpoint from which training resumes, if any.

        Raises:
            RunInUseError: another process trains in the run's folder.
        """
        ctx = self.ctx
        self.start(locks=self.has_writing_callbacks)
        with self.spans.checkpoint_load:
            ctx.checkpoint = self._load(context)
        ctx.close("on_checkpoint_load_end")
        ctx.step, ctx.epoch = self.state.timestamp.batch, self.state.timestamp.epoch
        self.notify_loggers_of_settings(settings_of(None, None, None, self.manager.callbacks, {}))
        with self.spans.data_init:
            pass
        self.begin_training(marks=self.has_writing_callbacks)
        self.counts.follow(lambda: self._counted)
        self.driver.start("round")

    def finish(self, context: TrainingContext) -> None:
        """End the run.

        If a step is open, InstructLab was preempted. The end of this step is fired only if the optimizer has stepped.
        """
        driver = self.driver
        # A preemption always leaves a step open. So if no step is open, the epoch is complete.
        if driver.is_open("epoch") and not driver.is_open("train_step"):
            self.end_epoch(context)
        self.lifetime.outcome = Outcome.PREEMPTED if driver.is_open("epoch") else Outcome.FINISHED
        if driver.is_open("train_step") and self.has_stepped:
            driver.end_step()
        if driver.is_open("train_step"):
            driver.forget()
            self.ctx.exception, self.ctx.span = InterruptedError(f"{HOST} was preempted during a step"), "train_step"
            self.manager.fire("on_exception", self.ctx)
        else:
            if not driver.is_open("epoch"):
                self._check(context, context.epoch + 1)
            driver.end("train")
        self.lifetime.end()

    def end_epoch(self, context: TrainingContext) -> None:
        """End the epoch. If InstructLab has not reported the end of the last step, end that step first."""
        self.driver.end("train_step")
        if self.driver.is_open("epoch"):
            self.state.timestamp = self.state.timestamp.next_epoch()
        self._check(context, context.epoch + 1)
        self.driver.end("epoch")

    def _check(self, context: TrainingContext, epochs: int | None = None, *, is_before_step: bool = False) -> None:
        """Compare callsheet's counts of steps and epochs with InstructLab's, if a step was trained."""
        if self.state.timestamp.batch != self.state.baseline.batch:
            self._counted = Counts(self.step_of(context) - is_before_step, epochs)
            self.counts.check()

    # --- the position in training ---

    def step_of(self, context: TrainingContext) -> int:
        """Return the number of the step in `context`, counted from the beginning of the run.

        If InstructLab resumes at the start of an epoch, it counts its steps from 1 again. So if the first step after a resume has a
        number that the run has already reached, this number and all later ones are increased.
        """
        if self._earlier_steps is None:
            self._earlier_steps = max(0, self.state.timestamp.batch - (context.step - 1))
        return context.step + self._earlier_steps

    def go_to(self, context: TrainingContext) -> None:
        """Set callsheet's current epoch and step to those of InstructLab's context.

        When InstructLab resumes, it does not report the batches that it skips.
        """
        self.guard.raise_if_lost()
        ctx, now = self.ctx, self.state.timestamp
        is_step = context.hook_name != "on_epoch_begin"
        step = self.step_of(context) if is_step else 0
        if context.epoch != now.epoch or (is_step and step != now.batch + 1):
            self.driver.end("train_step")
            self._check(context, context.epoch, is_before_step=is_step)
            now = self.state.timestamp
        if context.epoch != now.epoch:
            self.state.timestamp = self.state.baseline = now = now._replace(epoch=context.epoch)
        ctx.epoch = context.epoch + 1
        if is_step:
            if step != now.batch + 1:
                self.state.timestamp = self.state.baseline = now._replace(batch=step - 1)
            ctx.step = step
            self.manager.process_lane_messages(ctx)

    def listen(self) -> None:
        """Before a step, find out which of its parts (spans, such as `forward`) have listeners."""
        if self.driver.listen():
            self._listens_to_parts = any(map(self.driver.listens_to, ("forward_backward", "clip_gradients", "optimizer_step")))

    def has_listeners(self) -> bool:
        """Return whether a callback listens to an event at which the step's loss is available."""
        return self.manager.has_listeners.on_train_step_end or self._listens_to_parts

    def _loss_is_known(self) -> None:
        if self.loss is not None:
            self.ctx.loss = self.loss

    def _clear_grad_norm(self) -> None:
        self.ctx.grad_norm = None  # InstructLab reports the norm later, at `on_log`

    def _record_optimizer_step(self) -> None:
        self.ctx.step_skipped, self.has_stepped = False, True

    def _step_ends(self) -> None:
        """Count the step, and set the fields that are available at `on_train_step_end`."""
        self._order.reach()
        ctx, state, context = self.ctx, self.state, self.context
        if self.loss is not None:
            ctx.loss, ctx.loss_dict = self.loss, {"loss": self.loss}
            if context.grad_norm is not None:
                ctx.grad_norm = torch.tensor(context.grad_norm)
            if context.learning_rate is not None:  # InstructLab reports the rate only on local rank 0
                ctx.learning_rate = context.learning_rate
        seconds = context.elapsed_time if context.elapsed_time is not None else time.perf_counter() - self.began
        samples, tokens = context.total_samples - self._totals[0], context.total_tokens - self._totals[1]
        self._totals = context.total_samples, context.total_tokens
        state.previous_timestamp = state.timestamp
        state.timestamp = state.timestamp.next_batch().with_counts(samples=samples, tokens=tokens, seconds=seconds)
        self._since = samples, tokens, seconds

    # --- records, evaluations, checkpoints ---

    def fire_record(self, context: TrainingContext) -> None:
        """Make the step's metrics record, with the values that callbacks have logged, and fire `on_log`.

        Do nothing if the lifecycle allows no record at this place.
        """
        if not self._order.may_come("L"):
            return
        if not self.manager.has_listeners.on_log:
            self._metrics.clear()
            self._end_record()
            return
        now, (samples, tokens, seconds) = self.state.timestamp, self._since
        numbers = {"train/loss": context.loss, "train/grad_norm": context.grad_norm, "train/learning_rate": context.learning_rate}
        values = {name: value for name, value in numbers.items() if value is not None} | self._metrics.take()
        if tokens and seconds:
            values["train/tokens_per_second"] = tokens / seconds
        if (labels := context.batch_metrics.get("num_loss_counted_tokens")) is not None:
            values["train/label_tokens"] = float(labels)
        values |= {"time/epoch": now.epoch, "time/batch": now.batch, "time/sample": now.sample, "time/token": now.token}
        memory = int((context.cuda_mem_allocated or 0.0) * 2**30)
        self._fire_log(values, samples / seconds if seconds else 0.0, tokens / seconds if seconds else 0.0, memory)

    def _fire_log(self, values: dict[str, float], samples_per_second: float = 0.0, tokens: float = 0.0, memory: int = 0) -> None:
        ctx = self.ctx
        if self.manager.has_listeners.on_log:
            ctx.record = MetricsRecord(ctx.step, values, self.state.timestamp.seconds, samples_per_second, tokens, memory)
            self.manager.fire("on_log", ctx)
            ctx.close("on_log")
        self._end_record()

    def _end_record(self) -> None:
        if self.ctx.step >= self.manager.next_step:
            self.manager.between_steps(self.ctx.step)
        publish_costs(self.manager, self.ctx)

    def fire_evaluation(self, found: Mapping[str, float]) -> None:
        """Fire the events of an evaluation that InstructLab has completed, and make the evaluation's metrics record."""
        ctx, driver = self.eval_ctx, self.eval_driver
        self._found = dict(found)
        ctx.step, ctx.epoch, ctx.standalone, ctx.eval_name = self.ctx.step, self.ctx.epoch, False, "validation"
        driver.start("eval_all")
        if not driver.is_open("eval_all"):
            # The order of callsheet's events allows no evaluation now, so add the values to the next metrics record.
            ctx.log({f"validation/{name}": value for name, value in found.items()}, across="same")
            return
        driver.start("eval")
        ctx.eval_losses = {name: torch.tensor(value) for name, value in found.items() if "loss" in name}
        ctx.log({f"validation/{name}": value for name, value in found.items()}, across="same")
        driver.end("eval")
        ctx.eval_results = {"validation": dict(found)}
        driver.end("eval_all")
        if self._order.may_come("L"):
            self._fire_log(self._metrics.take())

    def fire_checkpoint(self, context: TrainingContext, boundary: Boundary) -> None:
        """Fire the events of a checkpoint that InstructLab has written, and add the callbacks' states to it."""
        ctx, now = self.ctx, self.state.timestamp
        losses = {"validation": self._found["loss"]} if "loss" in self._found else {}
        path = str(context.checkpoint_path)
        kind = "final" if boundary == "round" else "periodic"
        ctx.checkpoint = info = CheckpointInfo(path, now.batch, now.epoch, kind, train_loss=context.loss, val_losses=losses)
        if not self._order.may_come("D"):
            self._order.warn_of_checkpoint()
            ctx.close("on_checkpoint_published")
            self._write(context, info)
            return
        ctx.boundary = boundary
        self.manager.fire("on_checkpoint_due", ctx)
        ctx.close("on_checkpoint_due")
        self._order.may_come("S")  # this records that a save begins; the result is always True after `on_checkpoint_due`
        with self.spans.checkpoint_save:
            self._write(context, info)
        ctx.close("on_checkpoint_save_end")
        ctx.checkpoint = info
        self.manager.fire("on_checkpoint_published", ctx)
        ctx.close("on_checkpoint_published")

    def _write(self, context: TrainingContext, info: CheckpointInfo) -> None:
        """Add the callbacks' states to a checkpoint that InstructLab has written."""
        run = self.ctx.run
        local = {"callbacks": self.callback_states.state_dict(), "metrics": self._metrics.state_dict()}
        saved_info = {"run": run.name, "step": info.step, "samples": context.total_samples}
        folder = _state_folder(info.path, run.rank)
        folder.parent.mkdir(parents=True, exist_ok=True)
        write_checkpoint(folder, {"state": self.state.state_dict()}, local, saved_info, overwrite=True)

    def _load(self, context: TrainingContext) -> CheckpointInfo | None:
        """Load the callbacks' states from the checkpoint whose number of trained samples equals the number in `context`."""
        if not context.total_samples:
            return None
        folder = Path(context.output_dir) / "hf_format"
        for path in (folder / f"samples_{context.total_samples}", folder / "last_epoch"):
            found = _state_folder(path, self.ctx.run.rank)
            if not found.is_dir():
                continue
            loaded = read_checkpoint(found)
            if loaded.info.get("samples") == context.total_samples:
                self.state.load_state_dict(loaded.shared["state"])
                self.manager.load_state_dict(loaded.local["callbacks"])
                self._metrics.load_state_dict(loaded.local["metrics"])
                return CheckpointInfo(str(path), self.state.timestamp.batch, self.state.timestamp.epoch, "periodic")
        logger.warning("%s resumes from %d samples, but no state of callbacks was found", HOST, context.total_samples)
        return None


def _state_folder(checkpoint: str | Path, rank: int) -> Path:
    return Path(checkpoint) / STATE / f"rank-{rank}"
