"""Runs callsheet's callbacks in a training loop that is written by hand with an Accelerator."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn
from torch.optim import Optimizer

from callsheet.bridges.accelerate.events import NOT_FIRED
from callsheet.bridges.accelerate.internals import HOST, PACKAGE
from callsheet.bridges.accelerate.position import AcceleratePosition
from callsheet.bridges.accelerate.tracker import RecordTracker
from callsheet.bridges.attached_run import NO_BATCH, AttachedRun
from callsheet.bridges.giving_up import weakly
from callsheet.bridges.host_parts import Evaluates
from callsheet.bridges.host_states import own_state, restore_states
from callsheet.bridges.hosted_run import HostedRun
from callsheet.bridges.loop_arguments import check_model, check_others, torch_optimizer
from callsheet.bridges.versions import check_versions
from callsheet.bridges.wrapped_methods import WrappedMethods
from callsheet.core.callback import Callback
from callsheet.core.manager import CallbackManager
from callsheet.core.run_state import CheckpointInfo
from callsheet.core.time import Time
from callsheet.errors import NotSupported, RequestRejected, mark_as_users
from callsheet.run.defaults import LOCK_TIMEOUT_SECONDS, LOG_INTERVAL, TIMEOUT_SECONDS
from callsheet.run.parts import Stateful
from callsheet.run.run_names import check_resume
from callsheet.run.signals import PreemptSignals, signals_of
from callsheet.trainer.tasks import counts_of

logger = logging.getLogger("callsheet")

_TYPES_WITH_OWN_ENGINE = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)
"""Distributed types of Accelerate whose engines run backward and the optimizer step where callsheet's hooks do not work."""


def host(
    callbacks: CallbackManager | Callback | Iterable[Callback] | None,
    *,
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Optimizer,
    scheduler: Stateful | None = None,
    max_duration: str | Time | None = None,
    log_interval: str | int | Time = LOG_INTERVAL,
    run_name: str | None = None,
    runs_folder: str | os.PathLike[str] = "runs",
    resume: str | os.PathLike[str] | None = None,
    evaluate: Evaluates | None = None,
    config: Mapping[str, Any] | None = None,
    preempt_signals: PreemptSignals = ("SIGTERM",),
    timeout_seconds: float = TIMEOUT_SECONDS,
    lock_timeout_seconds: float = LOCK_TIMEOUT_SECONDS,
    strict: bool = True,
) -> AcceleratedRun:
    """Run the callbacks in a loop around an Accelerator: `with host([...], accelerator=..., model=..., optimizer=...) as run:`.

    The loop has to iterate over `run.steps(dataloader)`. Nothing else in the loop changes. A step ends with a batch for which
    `accelerator.sync_gradients` is true, so gradient accumulation follows the accelerator's setting. The gradient norm is that of
    `accelerator.clip_grad_norm_`. What the loop logs with `accelerator.log` is in the metrics records. Checkpoints are written
    with `accelerator.save_state`, by the loop or because a callback requests one. To save the callbacks' states in them, call
    `accelerator.register_for_checkpointing(run)`.

    Args:
        callbacks: a manager, a callback, or any iterable of callbacks.
        accelerator: the Accelerator whose `prepare` was called.
        model, optimizer, scheduler: as `prepare` returned them.
        max_duration: how long to train, such as `"2ep"`. `run.steps` ends then. None: until the loop ends.
        log_interval: how often a metrics record is made. A bare number means batches.
        run_name, runs_folder: the run's name, and the folder that contains the run's folder.
        resume: a folder that `accelerator.save_state` has written. It is loaded at the start of the `with` block.
        evaluate: called without arguments when a callback asks for an evaluation. It returns the results by dataset name, such as
            `{"validation": {"loss": 1.2}}`.
        config: the program's settings, stored with the run.
        preempt_signals: the signals that make the run save a checkpoint and end as preempted.
        timeout_seconds: the run fails if a rank does not answer for this long.
        lock_timeout_seconds: how long to wait while another process trains in the run's folder; then `RunInUseError` is raised.
        strict: whether to raise an error if a callback listens to an event that is not fired; else log a warning.

    Returns:
        The run, a context manager. Iterate over `run.steps(dataloader)` inside its `with` block.

    Raises:
        ConfigError: the model is not a `torch.nn.Module`, or the optimizer not a `torch.optim.Optimizer`.
        NotSupported: the accelerator uses DeepSpeed or Megatron-LM; or a callback cannot work in this loop, see `strict`.
    """
    check_versions(PACKAGE, HOST, "this host")
    if accelerator.distributed_type in _TYPES_WITH_OWN_ENGINE:
        raise NotSupported(
            f"{accelerator.distributed_type.value} runs backward and step in its own engine, which callsheet cannot observe; train with DDP or "
            "FSDP, or without callsheet"
        )
    check_model(model)
    check_others(scheduler=scheduler, evaluate=evaluate, config=config)
    check_resume(resume)
    optimizer = torch_optimizer(getattr(optimizer, "optimizer", optimizer))
    accelerated = AcceleratedRun(
        HostedRun(
            callbacks,
            model=accelerator.unwrap_model(model),
            optimizer=optimizer,
            scheduler=getattr(scheduler, "scheduler", scheduler),
            host="this loop with Accelerate",
            run_name=run_name,
            runs_folder=runs_folder,
            config=config,
            max_duration=max_duration,
            log_interval=log_interval,
            device=accelerator.device,
            evaluates=evaluate,
            saves=lambda requests: me._save_as_requested(),  # the AcceleratedRun outlives its HostedRun
            signals=("SIGINT", *signals_of(preempt_signals)),
            timeout_seconds=timeout_seconds,
            lock_timeout_seconds=lock_timeout_seconds,
        ),
        model,
        optimizer,
        accelerator,
        resume=os.fspath(resume) if resume is not None else None,
        strict=strict,
    )
    me = weakref.proxy(accelerated)
    return accelerated


class AcceleratedRun(AttachedRun):
    """The run that `host` returns: an `AttachedRun` that can also be registered for checkpointing.

    Make it with `host`, which has other arguments.
    """

    def __init__(
        self,
        run: HostedRun,
        model: nn.Module,
        optimizer: Optimizer,
        accelerator: Accelerator,
        *,
        resume: str | None,
        strict: bool,
    ) -> None:
        super().__init__(
            run,
            model,
            optimizer,
            gradient_accumulation_steps=1,
            scaler=accelerator.scaler,
            position=AcceleratePosition(accelerator),
            resume=resume,
            strict=strict,
        )
        self._accelerator = accelerator
        self._loaded: Mapping[str, Any] | None = None
        self._is_inside = False  # whether the loop is inside the `with` block of this run
        self._microbatches = 0  # how many microbatches the current step has had so far
        self._is_saved = False  # whether the latest checkpoint holds the callbacks' states

    def _begin(self) -> None:
        self._run.checkpoints.loads = self._load
        self._support.before_run(NOT_FIRED, self._run.control)
        super()._begin()
        self._is_inside = True
        methods = WrappedMethods(self._accelerator)
        methods.wrap("clip_grad_norm_", self._clip)
        methods.wrap("save_state", self._save_state)
        self._removed_at_end += [methods, RecordTracker(self._accelerator, self.ctx, weakly(self._give_up))]

    def _release(self) -> None:
        self._is_inside = False
        super()._release()

    def steps(self, dataloader: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches of one epoch. A resumed run leaves out the batches that it has already trained on.

        Raises:
            RequestRejected: `steps` is called inside another call of `steps`.
        """
        if not self._begin_epoch():
            return
        run, driver, ctx, position, hooks = self._run, self._run.driver, self._run.ctx, self._position, self._hooks
        batches: Iterator[Any] | None = None
        group: list[Any] = []  # holds a fetched batch until the loop receives the batch; otherwise empty
        self._is_iterating = True
        try:
            if self._unobserved is None:
                driver.start("epoch")
                batches = position.begin(dataloader, run.state.timestamp.epoch)
            while not self._is_over and self._unobserved is None:
                self._fetch(batches, group)  # type: ignore[arg-type]
                if not group:
                    break
                (batch,) = group
                samples, tokens = counts_of(batch)
                run.counted = (run.counted[0] + samples, run.counted[1] + tokens)
                self._microbatches += 1
                position.taken += 1
                hooks.backward.is_on, ctx.batch = True, batch
                if hooks.listens_to_microbatch:
                    ctx.microbatch = batch
                    driver.start("microbatch")
                    batch = ctx.microbatch
                group.clear()
                yield batch
                if self._unobserved is not None:
                    break  # type: ignore[unreachable]  # a hook may have called `_give_up` after an error
                hooks.backward.is_on = False
                self._end_microbatch()
            self._end_epoch()
        except Exception as error:
            self._give_up(error)
        finally:
            self._is_iterating = False
            if hooks is not None:
                hooks.backward.is_on = False
        yield from self._rest_of_epoch(dataloader, batches, group, given=0 if group else 1)

    def _ends_step(self, given: int) -> bool:
        return bool(self._accelerator.sync_gradients)

    def _fetch(self, batches: Iterator[Any], group: list[Any]) -> None:
        """Get the next batch, if any, and append it to `group`. For the first batch of a step, also fire the fetch events.

        Batches are not fetched in advance, because the accelerator saves the dataloader's position.
        """
        is_first = not self._microbatches
        run, driver, ctx = self._run, self._run.driver, self._run.ctx
        if is_first:
            if driver.listen():
                self._hooks.listen()
            if has_listeners := not driver.spans["fetch"].has_no_listeners:
                driver.start("fetch")
        try:
            batch = next(batches, NO_BATCH)
        except Exception as error:
            mark_as_users(error)  # end training instead of only logging the error, because training cannot continue without data
            raise
        if batch is NO_BATCH:
            self._position.is_exhausted = True
        else:
            # Append the batch before further events are fired, so that the loop gets the batch even if an event's handler fails.
            group.append(batch)
        if is_first:
            ctx.batch = batch if group else None
            if has_listeners:
                driver.end("fetch")
            if group:
                group[0] = ctx.batch
                run.counted = (0, 0)
                self._hooks.optimizer.has_stepped, self._hooks.backward.total = False, None
                driver.start_step()

    def _end_microbatch(self) -> None:
        """End the microbatch. If Accelerate synchronized the gradients in this microbatch, end the whole step."""
        if not self._microbatches:
            return
        if self._accelerator.sync_gradients:
            self._end_step()
        else:
            self._run.driver.end("microbatch")

    def _end_step(self) -> None:
        self._microbatches = 0
        super()._end_step()

    @property
    def _without_step(self) -> str:
        return (
            "the loop has not stepped the optimizer in its first step, where gradients were synchronized; give host the optimizer that"
            " the loop steps, and iterate over run.steps(dataloader) around accelerator.accumulate(model)"
        )

    def _end_epoch(self) -> None:
        # A step is still open if its last batch did not synchronize the gradients.
        if self._microbatches and self._unobserved is None:
            self._end_step()
        super()._end_epoch()

    # --- wrappers around the accelerator's methods ---

    def _clip(self, clips: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `accelerator.clip_grad_norm_`, fire the clipping events, and log the gradient norm."""
        run = self._run
        if self._unobserved is not None or not self._hooks.backward.is_on or not self._accelerator.sync_gradients:
            return clips(*args, **kwargs)
        try:
            run.driver.start("clip_gradients")
        except Exception as error:
            self._give_up(error)
        norm = clips(*args, **kwargs)
        if self._unobserved is not None:
            return norm  # type: ignore[unreachable]
        try:
            run.grad_norm = norm
            run.driver.end("clip_gradients")
            if norm is not None:
                run.ctx.log({"train/grad_norm": norm}, over="mean", across="same")
        except Exception as error:
            self._give_up(error)
        return norm

    def _save_state(self, saves: Callable[..., str], *args: Any, **kwargs: Any) -> str:
        """End the training step if the optimizer has stepped. Then call `accelerator.save_state` and fire the checkpoint events."""
        try:
            if self._unobserved is None:
                if not self._is_iterating:
                    self._run.boundaries.fire_postponed()  # `on_checkpoint_due` comes before the events of a checkpoint
                elif self._hooks.optimizer.has_stepped:
                    self._end_microbatch()
        except Exception as error:
            self._give_up(error)
        may_fire, self._is_saved = self._run.eval.order.allows_save(), False
        folder = saves(*args, **kwargs)
        if self._unobserved is not None:
            return folder
        if not self._is_saved:
            logger.warning("%s holds no states of callbacks: accelerator.register_for_checkpointing(run) adds them", folder)
        try:
            if may_fire:
                # Let `fire_checkpoint` write nothing, because the accelerator has already written the callbacks' states.
                self._run.fire_checkpoint(str(folder), lambda info: None)
        except Exception as error:
            self._give_up(error)
        return folder

    def _save_as_requested(self) -> None:
        accelerator, run = self._accelerator, self._run
        if accelerator.project_configuration.automatic_checkpoint_naming:
            accelerator.save_state()
        else:
            accelerator.save_state(str(Path(run.ctx.run.checkpoints) / f"step-{run.state.timestamp.batch}"))

    def state_dict(self) -> dict[str, Any]:
        """Return the callbacks' states and the run's progress. `accelerator.save_state` calls this method of a registered run."""
        run = self._run
        self._is_saved = True
        if self._loaded is not None:
            return dict(self._loaded)
        if self._unobserved is not None:
            # An error in callsheet has ended the run, so the callbacks' states are outdated. Do not save them in this checkpoint.
            return {}
        return {**own_state(run), **self._position.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the callbacks' states and the run's progress. Before the run's `with` block, only store them until it begins.

        Raises:
            RequestRejected: `load_state_dict` is called within an epoch.
        """
        if self._is_iterating:
            raise RequestRejected("accelerator.load_state() inside steps(): load before the first epoch")
        self._loaded = state
        if self._is_inside:
            self._load()

    def _load(self) -> CheckpointInfo | None:
        run = self._run
        if self._resume is not None and not self._is_inside:
            self._accelerator.load_state(self._resume)
        loaded, self._loaded = self._loaded, None
        if not loaded:
            if self._resume is not None:
                logger.warning(
                    "no states of callbacks were loaded from %s: accelerator.register_for_checkpointing(run) does", self._resume
                )
            return None
        restore_states(run, loaded)
        self._position.load_state_dict(loaded)
        now = run.state.timestamp
        return CheckpointInfo(self._resume or "", now.batch, now.epoch, "periodic")
