"""`ComposerHost`, which runs callsheet's callbacks in Composer's Trainer. This module imports Composer."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from composer import Callback as ComposerCallback
from composer import Event
from torch import Tensor

from callsheet.bridges.composer.events import NOT_FIRED
from callsheet.bridges.composer.host_parts import (
    EvaluationRequests,
    EventTable,
    EventTables,
    Listener,
    SavedCheckpoints,
    StepLosses,
    is_one_number,
    training_loss,
)
from callsheet.bridges.composer.internals import HOST, PACKAGE
from callsheet.bridges.composer.names import Event as OurEvent
from callsheet.bridges.count_check import Counts
from callsheet.bridges.host_base import Callbacks, HostBase
from callsheet.bridges.host_states import own_state, restore_states
from callsheet.bridges.hosted_run import HostedRun
from callsheet.bridges.optimizer_hooks import SteppedHooks
from callsheet.bridges.versions import check_events
from callsheet.core.control import Request
from callsheet.core.run_state import CheckpointInfo, Outcome
from callsheet.trainer.arguments import duration
from callsheet.trainer.tasks import counts_of

logger = logging.getLogger("callsheet")


class ComposerHost(HostBase, ComposerCallback):  # type: ignore[misc]  # mypy does not read Composer's types
    """The Composer callback that `callsheet.bridges.composer.host` returns: it fires callsheet's events in Composer's Trainer."""

    _PACKAGE, _INTERNALS = PACKAGE, HOST
    _IS_END_REPORTED = True

    def __init__(self, callbacks: Callbacks, *, run_name: str | None, **options: Any) -> None:
        super().__init__(callbacks, **options)
        self._run_name = run_name
        self._hosts: Sequence[ComposerHost] = ()
        self._saved: Mapping[str, Any] | None = None
        self._evaluation_requests = EvaluationRequests()
        self._losses = StepLosses()
        self._is_standalone = False
        handlers = {event.value: getattr(self, f"_{event.value}") for event in OurEvent if hasattr(self, f"_{event.value}")}
        check_events(PACKAGE, (OurEvent.AFTER_LOAD.value, *handlers), {event.value for event in Event})
        self._tables = EventTables(
            handlers,
            {Event.BEFORE_TRAIN_BATCH.value: self._before_train_batch, Event.AFTER_LOSS.value: self._after_loss_again},
            self._doubt,
        )
        self._table: EventTable = self._tables.before_run

    def run_event(self, event: Any, state: Any, logger: Any) -> None:
        """Handle an event of Composer. An error in a callback is raised. After an error in callsheet, training continues."""
        entry = self._table[event._value_]  # look up the event's value, because hashing the event itself is slow
        if entry is None:
            return
        try:
            handler, self._table = entry
            if handler is None:
                self._begin(state, logger)
            else:
                handler(state)
        except BaseException as error:
            self._leave(error)

    def _doubt(self, event: str, state: Any) -> None:
        """Warn that events are missing, repeated or in another order, unless Composer has run out of memory and repeats the batch."""
        if not (event == "before_train_batch" and state.auto_microbatching):
            self._run.counts.doubt()

    # --- the run ---

    def _begin(self, state: Any, logger_: Any) -> None:
        self._forget_earlier_run()
        self._saves = SavedCheckpoints(state, logger_)
        self._hosts = [each for each in state.callbacks if isinstance(each, ComposerHost)]
        optimizer = state.optimizers[0] if state.optimizers else None
        self._state = state
        self._run = run = HostedRun(
            self.manager,
            model=state.model,
            optimizer=optimizer,
            scheduler=state.schedulers[0] if len(state.schedulers) == 1 else None,
            host="Composer's Trainer",
            run_name=self._run_name or state.run_name,
            config={"seed": state.seed, "precision": state.precision.value, "max_duration": str(state.max_duration or "")},
            max_duration=str(state.max_duration) if state.max_duration is not None else None,
            able=("stop", *(["save"] if self._saves.savers else []), *(["evaluate"] if state.evaluators else [])),
            saves=self._save,
            **self._run_options,
        )
        run.evaluation.request = self._evaluation_requests.ask
        run.checkpoints.loads = self._loads
        run.losses = self._losses.mean
        self._stepped = SteppedHooks(run, [optimizer] if optimizer is not None else [])
        self._begin_run(run, [self._stepped], NOT_FIRED, end=_end)
        self._hooks.append(Listener(run, logger_))
        self._table = self._tables.after[""]

    def _loads(self) -> CheckpointInfo | None:
        """Load the callbacks' states from Composer's checkpoint. Return the checkpoint's `CheckpointInfo`; None for a new run."""
        run, saved, self._saved = self._run, self._saved, None
        at = self._state.timestamp
        if saved is not None:
            own = saved["hosts"][self._hosts.index(self)] if self in self._hosts[: len(saved["hosts"])] else None
            if own:
                restore_states(run, own)
        if run.state.timestamp.batch != int(at.batch):
            if not self.only_observes:
                logger.warning(
                    "%s resumes from step %d, but its checkpoint has no state of these callbacks", run.host, int(at.batch)
                )
            run.state.timestamp = run.state.baseline = run.state.timestamp._replace(
                epoch=int(at.epoch),
                batch=int(at.batch),
                epoch_in_round=int(at.epoch_in_iteration),
                batch_in_epoch=int(at.batch_in_epoch),
            )
        if not int(at.batch):
            return None
        return CheckpointInfo(str(getattr(self._state, "load_path", None) or ""), int(at.batch), int(at.epoch), "periodic")

    def begin(self, trainer: Any) -> None:
        """Begin a run in a Trainer that was created without this host. Call this method before `Trainer.fit`."""
        trainer.state.callbacks.append(self)
        self.run_event(Event.AFTER_LOAD, trainer.state, trainer.logger)

    def close(self, state: Any, logger: Any) -> None:
        """End the run of callsheet's callbacks, because Composer closes its callbacks.

        If training is not over, an exception has ended it, and the run has failed. Composer also calls `close` at program exit.
        """
        if self._run is not None:
            self._saves.report(self._run)
            self._release()

    def _release(self) -> None:
        self._table = self._tables.before_run
        super()._release()

    # --- training ---

    def _fit_start(self, state: Any) -> None:
        run = self._run
        run.control.done("stop")
        run.state.max_duration = duration(str(state.max_duration), 1)
        run.state.epoch_batches = int(state.dataloader_len) if state.dataloader_len is not None else None
        run.state.evaluators = tuple(evaluator.label for evaluator in state.evaluators)
        if state.evaluators:
            run.control.able.add("evaluate")
            self._evaluation_requests.install(state.evaluators)
        run.counts.follow(lambda: Counts(int(state.timestamp.batch), int(state.timestamp.epoch)))
        self._table = self._tables.after[""]
        run.driver.start("train")

    def _iteration_start(self, state: Any) -> None:
        self._saves.report(self._run)
        self._run.driver.start("round")

    def _epoch_start(self, state: Any) -> None:
        self._saves.report(self._run)
        self._run.counts.check()  # Composer may not have reported the end of the last epoch
        self._run.driver.start("epoch")

    def _before_dataloader(self, state: Any) -> None:
        self._saves.report(self._run)
        driver = self._run.driver
        if driver.listen():
            self._tables.listen(driver)
            self._table = self._tables.after[OurEvent.BEFORE_DATALOADER.value]
            self._stepped.listen(driver.is_loss_read)
        # A resumed Trainer skips batches that it has already trained on, without `after_dataloader`. So the fetch may still be open.
        if not driver.is_open("fetch"):
            driver.start("fetch")

    def _after_dataloader(self, state: Any) -> None:
        run = self._run
        run.ctx.batch = state.batch
        run.driver.end("fetch")
        state.batch = run.ctx.batch
        run.counted = counts_of(state.batch)

    def _batch_start(self, state: Any) -> None:
        run = self._run
        run.driver.start_step()
        run.step_skipped = self._stepped.is_observed

    def _before_train_batch(self, state: Any) -> None:
        driver = self._run.driver
        self._losses.parts.clear()
        # If the optimizer's step has already begun, the optimizer is calling its closure again. Only the last call's loss counts.
        if driver.is_open("optimizer_step"):
            self._table = self._tables.in_closure
        else:
            driver.start("forward_backward")

    def _before_forward(self, state: Any) -> None:
        run = self._run
        run.driver.end("microbatch")  # end the previous microbatch, because Composer may not have reported its end
        run.ctx.microbatch = state.batch
        run.driver.start("microbatch")
        state.batch = run.ctx.microbatch
        run.driver.start("forward")

    def _after_forward(self, state: Any) -> None:
        ctx = self._run.ctx
        ctx.outputs = state.outputs
        self._run.driver.end("forward")
        state.outputs = ctx.outputs

    def _before_loss(self, state: Any) -> None:
        self._run.driver.start("loss")

    def _after_loss(self, state: Any) -> None:
        loss = training_loss(state.loss)
        if not self._run.driver.spans["loss"].has_no_listeners:
            loss = self._end_loss(loss, state)
        self._losses.add(state, loss, self._run.counted[0])

    def _after_loss_again(self, state: Any) -> None:
        self._losses.add(state, training_loss(state.loss), self._run.counted[0])

    def _end_loss(self, loss: Tensor, state: Any) -> Tensor:
        """Fire `on_loss_end`, at which a callback may replace the loss.

        Return the loss that Composer uses: the model's loss, or the loss with which a callback has replaced it.
        """
        ctx = self._run.ctx
        ctx.loss = loss
        self._run.driver.end("loss")
        current: Tensor = ctx.loss
        if current is not loss:
            if isinstance(state.loss, dict) and "total" in state.loss:
                state.loss["total"] = current
            else:
                state.loss = current
        return current

    def _before_backward(self, state: Any) -> None:
        self._run.driver.start("backward")

    def _after_backward(self, state: Any) -> None:
        self._run.driver.end("microbatch")

    def _after_train_batch(self, state: Any) -> None:
        driver, spans = self._run.driver, self._run.driver.spans
        if not spans["forward_backward"].has_no_listeners:
            driver.end("forward_backward")
        if not spans["clip_gradients"].has_no_listeners:
            driver.start_and_end("clip_gradients")  # `clip_gradients` is fired even if no algorithm clips
        driver.start("optimizer_step")

    def _batch_end(self, state: Any) -> None:
        if self._stepped.fault is not None:
            raise self._stepped.fault
        self._run.driver.end_step()
        self._ask_for_evaluation()

    def _batch_checkpoint(self, state: Any) -> None:
        if self._run.end_step():
            self._after_step(self._run)

    def _epoch_end(self, state: Any) -> None:
        self._saves.report(self._run)
        if self._run.driver.is_open("fetch"):
            self._run.ctx.batch = None  # at `on_fetch_end`, a batch of None means that the data has ended
        self._run.close_epoch(is_whole=True)
        self._ask_for_evaluation()

    def _epoch_checkpoint(self, state: Any) -> None:
        self._run.boundaries.reach("epoch")
        self._stop_if_asked(self._run)

    def _iteration_end(self, state: Any) -> None:
        self._saves.report(self._run)
        run = self._run
        run.state.timestamp = run.state.timestamp.next_round()
        run.driver.end("round")

    def _iteration_checkpoint(self, state: Any) -> None:
        self._run.boundaries.reach("round")
        self._stop_if_asked(self._run)

    def _fit_end(self, state: Any) -> None:
        self._saves.report(self._run)
        self._run.finish_training()
        self._table = self._tables.after_training

    def _stop(self, loop: Any) -> None:
        self._state.stop_training()

    def _ask_for_evaluation(self) -> None:
        control = self._run.control
        if control.evaluate_requested is not None:
            self._evaluation_requests.ask()
            control.done("evaluate")

    # --- evaluation and prediction ---

    def _eval_standalone_start(self, state: Any) -> None:
        self._is_standalone = True
        self._eval_before_all(state)

    def _eval_before_all(self, state: Any) -> None:
        self._run.eval.begin_all(standalone=self._is_standalone)

    def _eval_start(self, state: Any) -> None:
        self._run.eval.begin(state.dataloader_label, standalone=self._is_standalone)

    def _eval_batch_start(self, state: Any) -> None:
        self._run.eval.ctx.batch = state.batch
        self._run.eval.driver.start("eval_step")

    def _eval_before_forward(self, state: Any) -> None:
        self._run.eval.ctx.batch = state.batch
        self._run.eval.driver.start("eval_forward")

    def _eval_after_forward(self, state: Any) -> None:
        run = self._run
        if run.eval.driver.is_open("eval_forward"):
            run.eval.ctx.outputs = state.outputs
            run.eval.driver.end("eval_forward")
            state.outputs = run.eval.ctx.outputs

    def _eval_batch_end(self, state: Any) -> None:
        self._run.eval.driver.end("eval_step")

    def _eval_end(self, state: Any) -> None:
        label = state.dataloader_label
        if label not in state.eval_metrics:  # the current dataloader does not belong to an evaluation
            return
        found = {name: metric.compute() for name, metric in state.eval_metrics[label].items()}
        self._run.eval.end_dataset(label, {name: value for name, value in found.items() if is_one_number(value)})

    def _eval_after_all(self, state: Any) -> None:
        run = self._run
        run.eval.end()
        if self._is_standalone:
            run.records.tally.stop()
        self._evaluation_requests.is_pending = False
        run.fire_record()

    def _eval_standalone_end(self, state: Any) -> None:
        self._eval_after_all(state)
        self._is_standalone = False

    def _predict_start(self, state: Any) -> None:
        self._run.eval.driver.start("predict")

    def _predict_batch_start(self, state: Any) -> None:
        self._run.eval.ctx.batch = state.batch
        self._run.eval.driver.start("predict_step")

    def _predict_before_forward(self, state: Any) -> None:
        self._run.eval.driver.start("predict_forward")

    def _predict_after_forward(self, state: Any) -> None:
        self._run.eval.ctx.outputs = state.outputs
        self._run.eval.driver.end("predict_forward")

    def _predict_batch_end(self, state: Any) -> None:
        self._run.eval.driver.end("predict_step")

    def _predict_end(self, state: Any) -> None:
        self._run.eval.driver.end("predict")

    # --- checkpoints ---

    def _save(self, requests: tuple[Request, ...]) -> None:
        self._saves.save()
        self._saves.report(self._run)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all hosts in the Trainer, because Composer saves only the last host's `state_dict`."""
        return {} if self.only_observes else {"hosts": [host._own_state() for host in self._hosts]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Store the callbacks' states. They are restored when the run begins, after Composer has loaded everything else."""
        self._saved = state

    def _own_state(self) -> dict[str, Any]:
        return own_state(self._run) if self._run is not None else {}


def _end(run: HostedRun, hooks: list[Any]) -> None:
    """Remove the hooks and end the run. If training or an evaluation is still open, an exception has ended it, so the run has failed."""
    for hook in reversed(hooks):
        hook.remove()
    if run.driver.is_open("train") or run.eval.driver.is_open("eval_all"):
        run.lifetime.outcome = Outcome.FAILED
        run.driver.forget()
    run.lifetime.end()
