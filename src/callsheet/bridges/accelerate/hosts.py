"""Runs callsheet's callbacks in a training loop that is written by hand with an Accelerator."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from accelerate import Accelerator
from accelerate.tracking import GeneralTracker
from accelerate.utils import DistributedType
from torch import nn
from torch.optim import Optimizer

from callsheet.bridges.accelerate.events import NOT_FIRED
from callsheet.bridges.accelerate.guests import numbers
from callsheet.bridges.accelerate.internals import HOST, PACKAGE
from callsheet.bridges.bare import AttachedRun, check_model, torch_optimizer
from callsheet.bridges.giving_up import weakly
from callsheet.bridges.host_parts import Evaluates
from callsheet.bridges.host_states import own_state, restore_states
from callsheet.bridges.hosted_run import HostedRun
from callsheet.bridges.versions import check_versions
from callsheet.core.callback import Callback
from callsheet.core.context import Context
from callsheet.core.manager import CallbackManager
from callsheet.core.run_state import CheckpointInfo
from callsheet.core.time import Time
from callsheet.errors import NotSupported, RequestRejected, mark_as_users
from callsheet.run.run_lock import LOCK_TIMEOUT_SECONDS
from callsheet.run.run_names import check_resume
from callsheet.trainer.tasks import counts_of

logger = logging.getLogger("callsheet")

_OWN_ENGINES = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)
"""Distributed types whose own engines run backward and the optimizer step, so that callsheet's hooks cannot observe these."""


def host(
    callbacks: CallbackManager | Callback | Iterable[Callback] | None,
    *,
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Optimizer,
    scheduler: Any = None,
    max_duration: str | Time | None = None,
    log_interval: str | int | Time = "10ba",
    run_name: str | None = None,
    runs_folder: str | os.PathLike[str] = "runs",
    resume: str | os.PathLike[str] | None = None,
    evaluate: Evaluates | None = None,
    config: Mapping[str, Any] | None = None,
    preempt_signals: Iterable[str] = ("SIGTERM",),
    timeout_seconds: float = 600.0,
    lock_timeout_seconds: float = LOCK_TIMEOUT_SECONDS,
    strict: bool = True,
) -> AcceleratedRun:
    """Run the callbacks in a loop around an Accelerator: `with host([...], accelerator=..., model=..., optimizer=...) as run:`.

    The loop has to iterate over `run.steps(dataloader)`. Nothing else in it changes. A step ends with a batch for which
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
    if accelerator.distributed_type in _OWN_ENGINES:
        raise NotSupported(
            f"{accelerator.distributed_type.value} runs backward and step in its own engine, which callsheet cannot observe; train with DDP or "
            "FSDP, or without callsheet"
        )
    check_model(model)
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
            saves=lambda requests: me()._save_as_requested(),  # type: ignore[union-attr]  # the AcceleratedRun outlives its HostedRun
            signals=("SIGINT", *preempt_signals),
            timeout_seconds=timeout_seconds,
            lock_timeout_seconds=lock_timeout_seconds,
        ),
        model,
        optimizer,
        accelerator,
        resume=os.fspath(resume) if resume is not None else None,
        strict=strict,
    )
    me = weakref.ref(accelerated)
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
            run, model, optimizer, gradient_accumulation_steps=1, scaler=accelerator.scaler, resume=resume, strict=strict
        )
        self._accelerator = accelerator
        self._patches = _AcceleratorPatches(accelerator, self)
        self._loaded: Mapping[str, Any] | None = None
        self._is_inside = False  # whether the loop is inside the `with` block of this run
        self._microbatches = 0  # how many microbatches the current step has had
        self._taken = 0  # how many batches of the current epoch were yielded
        self._to_skip = 0  # how many batches of the first epoch to skip after a resume
        self._is_resumed = False
        self._may_fire_save = True  # whether a save may fire checkpoint events: only between two steps, and only once there
        self._saves = False  # whether a checkpoint that a callback requested is being written
        self._is_saved = False  # whether the latest checkpoint holds the callbacks' states

    def __enter__(self) -> Self:
        super().__enter__()
        self._is_inside = True
        if not self._has_given_up:
            self._patches.begin()
        return self

    def _begin(self) -> None:
        self._run.checkpoints.loads = self._load
        self._support.before_run(NOT_FIRED, self._run.control)
        super()._begin()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None) -> None:
        try:
            super().__exit__(kind, error, frames)
        finally:
            self._is_inside = False
            self._patches.end()

    def _release(self) -> None:
        super()._release()
        self._is_inside = False
        self._patches.end()

    def evaluated(self, results: Mapping[str, Mapping[str, Any]]) -> None:
        """Fire the start and end events of an evaluation, after the loop has carried it out.

        `results` are the metrics by dataset name: `{"validation": {"loss": 1.2}}`.
        """
        super().evaluated(results)
        self._may_fire_save = True

    def steps(self, dataloader: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches of one epoch. A resumed run leaves out the batches that it has already trained on.

        Raises:
            RequestRejected: this is called inside another call of `steps`.
        """
        if self._is_iterating:
            raise RequestRejected("steps() inside steps(): an epoch has to end before the next begins")
        if not self._begin_epoch():
            return
        run, driver, ctx = self._run, self._run.driver, self._run.ctx
        self._is_iterating, is_whole = True, False
        batches: Iterator[Any] | None = None
        try:
            if not self._has_given_up:
                driver.start("epoch")
                batches = self._iterate(dataloader)
            while not self._is_over and not self._has_given_up:
                self._group = []
                batch = self._fetch(batches)  # type: ignore[arg-type]
                if batch is None:
                    is_whole = True
                    break
                samples, tokens = counts_of(batch)
                run.counted = (run.counted[0] + samples, run.counted[1] + tokens)
                self._microbatches += 1
                self._taken += 1
                self._backward.is_on, ctx.batch = True, batch
                if self._listens_to_microbatch:
                    ctx.microbatch = batch
                    driver.start("microbatch")
                    batch = ctx.microbatch
                self._group = []
                yield batch
                if self._has_given_up:
                    break  # type: ignore[unreachable]  # a hook may have called `_give_up` after an error
                self._backward.is_on = False
                self._end_microbatch()
            if not self._has_given_up:
                if self._microbatches:  # the last step is still open if none of its batches synchronized the gradients
                    self._end_step()
                if is_whole:
                    self._taken = 0
                self._is_over |= run.end_epoch(is_whole=is_whole)
                self._may_fire_save = True
        except Exception as error:
            self._give_up(error)
        finally:
            self._is_iterating = False
            if self._backward is not None:
                self._backward.is_on = False
        if self._has_given_up and not self._is_over:
            # If an error in callsheet has ended the run, the loop still continues, so count the current step here and later ones in
            # `_remaining`.
            was_in_step, self._was_in_step = self._was_in_step, False
            if was_in_step and not self._group and self._ends_step(1):
                self._count_step()
            yield from self._remaining(self._iterate(dataloader) if batches is None else batches, self._group, 0)

    def _iterate(self, dataloader: Any) -> Iterator[Any]:
        try:
            return iter(self._left_of(dataloader))
        except Exception as error:
            mark_as_users(error)  # raise the error to the user, since training is impossible without data
            raise

    def _ends_step(self, given: int) -> bool:
        return bool(self._accelerator.sync_gradients)

    def _reset_position(self) -> None:
        self._taken = 0

    def _left_of(self, dataloader: Any) -> Iterable[Any]:
        skip, self._to_skip = self._to_skip, 0
        self._taken = skip
        # In a new process, the dataloader counts epochs from 0, but a resumed run does not.
        if self._is_resumed and hasattr(dataloader, "set_epoch"):
            dataloader.set_epoch(self._run.state.timestamp.epoch)
        # A stateful dataloader needs no skipping, because it continues at its saved position by itself.
        if not skip or self._accelerator.dataloader_config.use_stateful_dataloader:
            return dataloader  # type: ignore[no-any-return]
        left = self._accelerator.skip_first_batches(dataloader, skip)
        if hasattr(dataloader, "iteration"):
            # Before Accelerate 1.15, `left` counts epochs from 0. Without this line, it would shuffle the data as in the first
            # epoch.
            left.iteration = dataloader.iteration
        return left  # type: ignore[no-any-return]

    def _fetch(self, batches: Iterator[Any]) -> Any:
        """Return the next batch, or None at the epoch's end. Fire the fetch events only for the first batch of a step.

        Batches are not fetched in advance, because the accelerator saves the dataloader's position.
        """
        is_first = not self._microbatches
        run, driver, ctx = self._run, self._run.driver, self._run.ctx
        if is_first:
            self._may_fire_save = False
            if driver.listen():
                self._listens_to_fetch, self._listens_to_microbatch = driver.listens_to("fetch"), driver.listens_to("microbatch")
                self._model_hooks.listen(self._listens_to_microbatch)
                self._optimizer_hooks.listen(driver.is_read)
                self._backward.listen(driver.is_loss_read)
            if self._listens_to_fetch:
                driver.start("fetch")
        try:
            batch = next(batches, None)
        except Exception as error:
            mark_as_users(error)  # raise the error to the user, since training is impossible without data
            raise
        if batch is not None:
            self._group.append(batch)  # stored before events are fired, so that the loop gets the batch even if firing them fails
        if is_first:
            ctx.batch = batch
            if self._listens_to_fetch:
                driver.end("fetch")
                batch = ctx.batch
            if batch is not None:
                run.counted = (0, 0)
                self._optimizer_hooks.has_stepped, self._backward.total = False, None
                driver.start_step()
        return batch

    def _end_microbatch(self) -> None:
        """End the microbatch. If Accelerate synchronized the gradients in it, end the whole step."""
        if not self._microbatches:
            return
        if self._accelerator.sync_gradients:
            self._end_step()
        else:
            self._run.driver.end("microbatch")

    def _end_step(self) -> None:
        self._microbatches = 0
        super()._end_step()
        self._may_fire_save = True

    def _check_first_step(self) -> None:
        run = self._run
        if not self._optimizer_hooks.has_stepped:
            self._support.without_optimizer_step(
                run.driver,
                is_scaled=self._scaler is not None,
                message=(
                    "the loop has not stepped the optimizer in its first step, where gradients were synchronized; give host the optimizer that"
                    " the loop steps, and iterate over run.steps(dataloader) around accelerator.accumulate(model)"
                ),
            )
        self._support.after_first_step(run.driver)

    # --- wrappers around the accelerator's methods ---

    def _clip(self, clips: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `accelerator.clip_grad_norm_`, fire the clipping events, and log the gradient norm."""
        run = self._run
        if self._has_given_up or not self._backward.is_on or not self._accelerator.sync_gradients:
            return clips(*args, **kwargs)
        try:
            run.driver.start("clip_gradients")
        except Exception as error:
            self._give_up(error)
        norm = clips(*args, **kwargs)
        if self._has_given_up:
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
        """Call `accelerator.save_state` and fire the checkpoint events. If the optimizer has stepped, end the step first."""
        try:
            if self._is_iterating and not self._has_given_up and self._optimizer_hooks.has_stepped:
                self._end_microbatch()
        except Exception as error:
            self._give_up(error)
        may_fire, self._may_fire_save = self._may_fire_save or self._saves, False
        self._is_saved = False
        folder = saves(*args, **kwargs)
        if self._has_given_up:
            return folder
        if not self._is_saved:
            logger.warning("%s holds no states of callbacks: accelerator.register_for_checkpointing(run) adds them", folder)
        try:
            if may_fire:
                # Pass a function that does nothing, because the accelerator has already written the callbacks' states.
                self._run.fire_checkpoint(str(folder), lambda info: None)
        except Exception as error:
            self._give_up(error)
        return folder

    def _save_as_requested(self) -> None:
        accelerator, run = self._accelerator, self._run
        self._saves = True
        try:
            if accelerator.project_configuration.automatic_checkpoint_naming:
                accelerator.save_state()
            else:
                accelerator.save_state(str(Path(run.ctx.run.checkpoints) / f"step-{run.state.timestamp.batch}"))
        finally:
            self._saves = False

    def state_dict(self) -> dict[str, Any]:
        """Return the callbacks' states and the run's progress. If the run is registered, `accelerator.save_state` calls this."""
        run = self._run
        self._is_saved = True
        if self._loaded is not None:
            return dict(self._loaded)
        if self._has_given_up:
            return {}  # an error in callsheet ended the run earlier, so the callbacks' states are older than this checkpoint
        return {**own_state(run), "taken": self._taken}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the callbacks' states and the run's progress: now, or at the start of the `with` block if it has not begun.

        Raises:
            RequestRejected: this is called within an epoch.
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
        self._to_skip, self._is_resumed = loaded["taken"], True
        now = run.state.timestamp
        return CheckpointInfo(self._resume or "", now.batch, now.epoch, "periodic")


class _AcceleratorPatches:
    """Wraps methods of an Accelerator and adds a tracker to it during a run, since an Accelerator has no events."""

    def __init__(self, accelerator: Accelerator, run: AcceleratedRun) -> None:
        self._accelerator = accelerator
        self._run = weakref.proxy(run)
        self._tracker = _Tracker(run.ctx, weakly(run._give_up))
        self._before: dict[str, Any] = {}

    def begin(self) -> None:
        """Wrap methods of the Accelerator, and add a `_Tracker` to its trackers."""
        run = self._run
        for name, method in (("clip_grad_norm_", run._clip), ("save_state", run._save_state)):
            self._before[name] = vars(self._accelerator).get(name)
            setattr(self._accelerator, name, _around(getattr(self._accelerator, name), method))
        self._accelerator.trackers.append(self._tracker)

    def end(self) -> None:
        """Remove the wrappers and the `_Tracker` from the Accelerator."""
        for name, before in self._before.items():
            if before is None:
                delattr(self._accelerator, name)
            else:
                setattr(self._accelerator, name, before)
        self._before.clear()
        # Assign a new list, because `accelerator.log` may be iterating over the old one.
        self._accelerator.trackers = [each for each in self._accelerator.trackers if each is not self._tracker]


def _around(theirs: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: ours(theirs, *args, **kwargs)


class _Tracker(GeneralTracker):  # type: ignore[misc]  # mypy does not read Accelerate's types
    """A tracker that adds what the loop logs with `accelerator.log` to callsheet's metrics records."""

    name = "callsheet"
    requires_logging_directory = False
    main_process_only = False

    def __init__(self, ctx: Context, give_up: Callable[[Exception], None]) -> None:
        self.tracker, self._give_up = ctx, give_up
        super().__init__()  # called last, because the base class reads the attributes that were just set

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        try:
            self.tracker.log_hyperparameters(values)
        except Exception as error:
            self._give_up(error)

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        try:
            if found := numbers(values):
                self.tracker.log({f"accelerate/{name}": value for name, value in found.items()}, across="same")
        except Exception as error:
            self._give_up(error)
