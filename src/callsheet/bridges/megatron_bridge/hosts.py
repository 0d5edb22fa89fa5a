"""Runs callsheet's callbacks in Megatron Bridge's training loop, as one callback of Megatron Bridge.

Megatron-LM's own callbacks have the same methods, but their context has no `state`. In Megatron-LM, the host fires events but
supports no requests.
"""

from __future__ import annotations

import copy
import functools
import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from callsheet.bridges.count_check import Counts
from callsheet.bridges.host_base import Callbacks, HostBase, in_a_run, observing
from callsheet.bridges.host_states import own_state, write_states
from callsheet.bridges.hosted_run import HostedRun
from callsheet.bridges.megatron_bridge.events import FIRED_AT, NOT_FIRED
from callsheet.bridges.megatron_bridge.guests import MODULE
from callsheet.bridges.megatron_bridge.hooks import MegatronForwardHooks, torch_optimizers
from callsheet.bridges.megatron_bridge.internals import PACKAGE
from callsheet.bridges.megatron_bridge.names import CallbackContext
from callsheet.bridges.megatron_bridge.run import LM_LOSS
from callsheet.bridges.megatron_bridge.settings import Settings, load_states, move
from callsheet.bridges.optimizer_hooks import OptimizerHooks
from callsheet.core.callback import Callback
from callsheet.core.manager import CallbackManager
from callsheet.core.run_state import Outcome
from callsheet.run.defaults import LOCK_TIMEOUT_SECONDS

logger = logging.getLogger("callsheet")


def host(
    callbacks: CallbackManager | Callback | Iterable[Callback] | None,
    *,
    strict: bool = True,
    lock_timeout_seconds: float = LOCK_TIMEOUT_SECONDS,
) -> MegatronBridgeHost:
    """Wrap the callbacks in one callback of Megatron Bridge, for `pretrain(config, forward_step, callbacks=[host([...])])`.

    A run is one call of `pretrain`. The host observes forward and backward passes with hooks on the model, unless the model is
    pipelined, and the optimizer's step with hooks on the torch optimizer inside Megatron's optimizer. The model has hooks only
    while a callback listens to their events. Losses, gradient norm and skipped steps are those that Megatron reports; Megatron's
    `lm loss` is named `loss`. `ctx.model` is the model chunk without its wrappers, or a list if there are several chunks.

    If a callback requests a stop, the host lowers `cfg.train.train_iters` until training ends. If a callback requests a save, the
    host sets `cfg.checkpoint.save_interval` to 1 for one step. Requests to evaluate are not supported, because Megatron computes
    the amount of its validation data beforehand. The host adds the callbacks' states to each of Megatron's checkpoints when it is
    completely written, and loads them when training resumes from one.

    Megatron does not report exceptions to callbacks, and calls `sys.exit` when it receives a signal. In both cases, the run ends
    only when the host is garbage-collected or the program ends. Use a `with` block to end the run at once, with the right
    outcome:

        with host([...]) as hosted:
            pretrain(config, forward_step, callbacks=[hosted])

    Args:
        callbacks: a manager, a callback, or any iterable of callbacks.
        strict: whether to raise an error if a callback listens to an event that is never fired. False: a warning is logged.
        lock_timeout_seconds: how long to wait while another process trains in the run's folder; then `RunInUseError` is raised.

    Returns:
        A callback of Megatron Bridge, which can also be used in a `with` block.

    Raises:
        NotSupported: a callback cannot work in this loop, see `strict`. Raised when training begins or after the first step.
    """
    return MegatronBridgeHost(callbacks, strict=strict, lock_timeout_seconds=lock_timeout_seconds)


class MegatronBridgeHost(HostBase):
    """The Megatron Bridge callback that `host` returns: it fires callsheet's events in Megatron Bridge's loop.

    The arguments are those of `host`.

    The class does not inherit from Megatron's `Callback`, because Megatron's manager accepts any object that has the
    hooks as methods, and Megatron need not be installed.
    """

    _PACKAGE = PACKAGE
    _run: HostedRun | None = None

    def __init__(self, callbacks: Callbacks, **options: Any) -> None:
        super().__init__(callbacks, **options)
        self._has_trained = False  # whether training has begun in the current run
        if any(self.manager.list_callbacks(event) for event in ("on_data_init_start", "on_data_init_end")):
            # Define this hook only if it is needed: Megatron rejects a training length in epochs if any callback has the hook.
            self.on_data_init_start = self._on_data_init_start

    # --- the run ---

    def _begin(self, context: Any, *, data_is_made: bool = True) -> HostedRun:
        chunks: list[Any] = context.model if isinstance(context.model, list) else [context.model]
        model: Any = _inner(chunks[0]) if len(chunks) == 1 else list(map(_inner, chunks))
        state = getattr(context, "state", None)
        self._settings = settings = Settings(state)
        save = settings.get("checkpoint.save")
        folder = Path(save if save is not None else "runs/megatron_bridge").absolute()
        folder = folder.parent if folder.name == "checkpoints" else folder
        log_interval, length = settings.get("logger.log_interval"), settings.get("train.train_iters")
        self._run = run = HostedRun(
            self.manager,
            model=model,
            optimizer=context.optimizer,
            scheduler=context.scheduler,
            host="Megatron Bridge",
            run_name=folder.name,
            runs_folder=folder.parent,
            config=settings.plain(),
            max_duration=f"{length}ba" if length else None,
            log_interval=f"{log_interval or 10}ba",
            device=next((parameter.device for chunk in chunks for parameter in chunk.parameters()), torch.device("cpu")),
            able=[*(["stop"] if length else []), *(["save"] if save is not None else [])],
            saves=settings.save_now,
            **self._run_options,
        )
        samples = settings.get("train.global_batch_size") or 0
        tokens = samples * (settings.get("model.seq_length") or 0)
        # Only rank 0 counts, because callsheet sums the counts of the ranks, and Megatron's counts already are such sums.
        run.counted = (samples, tokens) if run.ctx.run.rank == 0 else (0, 0)
        run.losses = lambda: settings.loss
        run.checkpoints.loads = functools.partial(load_states, run, settings)
        self._is_pipelined = len(chunks) > 1 or (settings.get("model.pipeline_model_parallel_size") or 1) > 1
        self._is_checked = self._has_trained = self._listens_to_forward = False
        self._states: dict[int, Any] = {}  # step -> the callbacks' states, for each checkpoint that is still being written
        self._forward = MegatronForwardHooks(run, chunks[0])
        self._steps = OptimizerHooks(run.driver, *torch_optimizers(context.optimizer), is_always_observed=False)
        end = functools.partial(_end, settings)
        self._begin_run(run, [self._steps, self._forward], _not_fired(), end=end, data_is_made=data_is_made)
        run.counts.follow(lambda: Counts(settings.step))
        return run

    @observing
    def _on_data_init_start(self, context: CallbackContext) -> None:
        """Begin a run of callsheet's callbacks before Megatron creates its dataloaders."""
        self._forget_earlier_run()
        self._has_trained = False
        self._begin(context, data_is_made=False)

    def on_train_start(self, context: CallbackContext) -> None:
        """Begin a run of callsheet's callbacks, unless the run has begun already."""
        if self._has_trained:  # an exception has ended the earlier training, so end its run first
            self._forget_earlier_run()
        self._start(context)
        self._has_trained = True

    def _handle(self, method: Callable[..., None], context: CallbackContext) -> None:
        """Call `method`, which handles an event of Megatron Bridge, with the current run. If no run has begun yet, begin a run.

        If an error in callsheet has ended the run, do nothing.
        """
        if not self._has_given_up:
            method(self, self._run or self._begin(context), context)

    @in_a_run
    def _start(self, run: HostedRun, context: Any) -> None:
        self._settings.is_training = True
        run.driver.start("round")
        self._stop_if_asked(run)

    @in_a_run
    def on_train_end(self, run: HostedRun, context: Any) -> None:
        """End training. A validation and a test may follow."""
        settings = self._settings
        settings.restore()
        settings.is_training = False
        self._forward.listen(False)
        self._skip_iterations(run)
        run.finish_training()
        if settings.is_last("do_valid", "do_test"):
            self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None) -> None:
        if error is not None and not (isinstance(error, SystemExit) and error.code in (0, None)):
            self._fail(error)
        elif self._run is not None:
            if error is not None:
                self._run.lifetime.outcome, self._settings.is_training = Outcome.STOPPED, False
            self._release()

    # --- steps ---

    def on_train_step_start(self, context: CallbackContext) -> None:
        """Start a training step.

        If a callback listens to events inside the step, the first forward pass fires the step's start.
        """
        if self._has_given_up:
            return
        try:
            run = self._run or self._begin(context)
            settings, driver = self._settings, run.driver
            if not settings.is_training:  # training is over, so this call belongs to no training step
                return
            interval, step = settings.save_interval, settings.step
            settings.restore_interval()
            settings.loss = None
            if step is not None and step != run.state.timestamp.batch:
                driver.end("train_step")  # ends the previous step, because Megatron may not have reported its end
                self._skip_iterations(run)
                run.counts.check()
            if step and interval and step % interval == 0 and settings.get("checkpoint.async_save"):
                # Copy the states for the checkpoint of this step, which Megatron is writing in the background.
                self._states[step] = copy.deepcopy(own_state(run))
            if driver.listen():
                self._listens_to_step = driver.has_listeners
                self._listens_to_forward = self._listens_to_step and not self._is_pipelined
                self._forward.listen(self._listens_to_forward)
                self._steps.listen(self._listens_to_step)
            self._forward.in_step = self._listens_to_forward
            if not self._listens_to_forward:
                driver.start_step()
            if not self._listens_to_step and driver.is_read:
                driver.start("optimizer_step")  # records the learning rate that the step will use
        except BaseException as error:
            self._leave(error)

    def _skip_iterations(self, run: HostedRun) -> None:
        """Count the iterations that Megatron's setting `iterations_to_skip` has skipped. Megatron does not report them."""
        skipped, at, step = self._settings.get("train.iterations_to_skip"), run.state.timestamp.batch, self._settings.step
        if skipped and step is not None and step > at and all(iteration in skipped for iteration in range(at, step)):
            move(run, step)

    def on_train_step_end(self, context: Any) -> None:
        """End the step after the optimizer and the scheduler have stepped."""
        if self._has_given_up:
            return
        try:
            run = self._run or self._begin(context)
            settings, driver = self._settings, run.driver
            if not settings.is_training:  # training is over, so this call belongs to no training step
                return
            self._forward.in_step = False
            step, is_open = settings.step, driver.spans["train_step"].is_open
            if step is not None and step + is_open != run.ctx.step:  # Megatron reports the end of an earlier step again
                run.counts.doubt()
                if not is_open:
                    return
            if not is_open:
                driver.synthesized.add("fetch")
                driver.start_and_end("fetch")
                driver.start_step()
            settings.loss, run.other_losses = _losses(context.loss_dict or {})
            run.step_skipped = bool(context.skipped_iter)
            # If the step was skipped, torch's optimizer is not called, and so its events are not fired. Fire the events here.
            if run.step_skipped and driver.is_read:
                driver.start_and_end("clip_gradients")
                driver.start_and_end("optimizer_step")
            norm = context.grad_norm
            # Converting the norm costs time, so do it only if a callback listens to `on_train_step_end`.
            if run.spans.train_step.ends is not None:
                run.grad_norm = norm if norm is None or isinstance(norm, Tensor) else torch.scalar_tensor(norm)
            if norm is not None and run.manager.has_listeners.on_log:
                run.records.metrics.log({"train/grad_norm": norm}, over="mean", across="same")
            if run.end_step() or not self._is_checked:
                self._after_step(run, 1)  # 1 is the number of steps that Megatron has not counted yet: this step
            if self._is_pipelined:
                run.records.last_loss = (
                    None  # only the last pipeline stage has a loss, and a mean over all ranks would need a collective
                )
        except BaseException as error:
            self._leave(error)

    def _check_first_step(self, run: HostedRun, **options: Any) -> None:
        if not run.step_skipped:  # the first step that is not skipped is checked, because a skipped step fires fewer events
            super()._check_first_step(run, **options)

    def _stop(self, loop: int | None) -> None:
        self._settings.stop(loop or 0)

    # --- evaluations and tests ---

    @in_a_run
    def on_eval_start(self, run: HostedRun, context: Any) -> None:
        """Start a validation."""
        run.driver.end("data_init")
        run.eval.begin("validation", standalone=not self._settings.is_training)
        self._observe_forward(run, "eval")

    @in_a_run
    def on_eval_step_start(self, run: HostedRun, context: Any) -> None:
        """Start a step of the validation, which evaluates one global batch."""
        run.eval.driver.start("eval_step")

    @in_a_run
    def on_eval_step_end(self, run: HostedRun, context: Any) -> None:
        """End a step of the validation."""
        run.eval.driver.end("eval_step")

    @in_a_run
    def on_eval_end(self, run: HostedRun, context: Any) -> None:
        """End the validation."""
        self._end_observing()
        run.eval.end_dataset("validation", self._gather_eval_losses(run, context))
        run.eval.end()
        run.fire_record()
        if self._settings.is_training:
            run.boundaries.fire_checkpoint_due("step")
            self._stop_if_asked(run)
        elif self._settings.is_last("do_test"):
            self._release()

    @in_a_run
    def on_test_start(self, run: HostedRun, context: Any) -> None:
        """Start a test."""
        run.driver.end("data_init")
        run.eval.driver.start("test")
        self._observe_forward(run, "test")

    @in_a_run
    def on_test_step_start(self, run: HostedRun, context: Any) -> None:
        """Start a step of the test, which evaluates one global batch."""
        run.eval.driver.start("test_step")

    @in_a_run
    def on_test_step_end(self, run: HostedRun, context: Any) -> None:
        """End a step of the test."""
        run.eval.driver.end("test_step")

    @in_a_run
    def on_test_end(self, run: HostedRun, context: Any) -> None:
        """End the test and, unless Megatron is training, also the run."""
        self._end_observing()
        ctx = run.eval.ctx
        found = self._gather_eval_losses(run, context)
        ctx.eval_losses = {name: torch.tensor(value) for name, value in found.items()}
        ctx.log({f"test/{name}": value for name, value in found.items()}, across="same")
        run.eval.driver.end("test")
        run.records.fire_log(run.ctx)
        if not self._settings.is_training:
            self._release()

    def _observe_forward(self, run: HostedRun, kind: str) -> None:
        has_listeners = run.eval.listens_to_outputs(kind) and not self._is_pipelined
        self._forward.listen(has_listeners or self._settings.is_training)
        self._forward.evaluating = kind if has_listeners else ""

    def _end_observing(self) -> None:
        self._forward.evaluating = ""
        self._forward.listen(self._listens_to_forward and self._settings.is_training)

    def _gather_eval_losses(self, run: HostedRun, context: Any) -> dict[str, float]:
        """Return the losses of an evaluation, by name, as Megatron has computed them.

        With pipelining only the last stage has them, so they are gathered for all ranks.
        """
        loss, others = _losses(context.total_loss_dict or {})
        found = {name: float(value) for name, value in {"loss": loss, **others}.items() if value is not None}
        return next(filter(None, run.groups.gather(found)), {}) if self._is_pipelined else found

    # --- checkpoints ---

    @in_a_run
    def on_checkpoint_save(self, run: HostedRun, context: Any) -> None:
        """Add the callbacks' states to a checkpoint that Megatron has completely written, and fire the checkpoint's events.

        A checkpoint that was written in the background is of an earlier step.
        """
        settings = self._settings
        settings.restore_interval()
        run.counts.check()
        now = run.state.timestamp.batch
        step = run.groups.of_rank_zero(settings.saved_step() or now)
        run.boundaries.fire_checkpoint_due("step")  # does nothing if the event was already fired after the last step
        path = Path(settings.get("checkpoint.save")) / f"iter_{step:07d}"
        states = self._states.pop(step, None) if step != now else own_state(run)
        if states is None:
            logger.warning("%s: no callbacks' states were kept for step %d, so none are added to this checkpoint", path, step)
        run.fire_checkpoint(
            str(path), lambda info: write_states(run, path, info, states) if states is not None else None, step=step
        )


def _end(settings: Settings, run: HostedRun, hooks: list[Any]) -> None:
    """Restore Megatron's settings, remove the hooks, and end the run.

    This also runs when the program ends or the host is garbage-collected. In these cases an exception or a signal has ended
    training.
    """
    settings.restore()
    for hook in reversed(hooks):
        hook.remove()
    if settings.was_preempted():
        run.lifetime.end(Outcome.PREEMPTED)
    else:
        run.lifetime.end(Outcome.FAILED if settings.is_training else None)


def _not_fired() -> tuple[str, ...]:
    """Return the events that the imported release of Megatron Bridge never fires.

    Some releases, for example, do not report checkpoints.
    """
    package = sys.modules.get(MODULE)
    if package is None or "on_checkpoint_save" in package.VALID_EVENTS:
        return NOT_FIRED
    return (*NOT_FIRED, *FIRED_AT["on_checkpoint_save"])


_WRAPPER_CLASSES = frozenset({"DistributedDataParallel", "FullyShardedDataParallel", "Float16Module"})


def _inner(chunk: Any) -> Any:
    """Return the model inside Megatron's wrappers, such as `Float16Module`."""
    while type(chunk).__name__ in _WRAPPER_CLASSES and hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def _losses(given: Mapping[str, Any]) -> tuple[Tensor | None, dict[str, Any]]:
    """Return the loss, and the other losses by name. The loss is Megatron's `lm loss` or, if there is none, the first loss."""
    if len(given) == 1:  # usually there is only one loss, so check for this first
        return next(iter(given.values())), {}
    name = LM_LOSS if LM_LOSS in given else next(iter(given), None)
    others = {other.replace(" ", "_"): value for other, value in given.items() if other != name}
    return (given[name] if name is not None else None), others
