"""Runs callsheet's callbacks in NeMo AutoModel's recipes, as one callback of AutoModel."""

from __future__ import annotations

import logging
import signal
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from callsheet.bridges.automodel.events import NOT_FIRED, NOT_FIRED_FOR_SEVERAL
from callsheet.bridges.automodel.hooks import CalledModel
from callsheet.bridges.automodel.names import Callback as AutoModelCallback
from callsheet.bridges.backward_watch import BackwardWatch
from callsheet.bridges.count_check import Counts
from callsheet.bridges.host_base import Callbacks, HostBase, in_a_run, observing
from callsheet.bridges.host_states import STATE, read_states, resume_without_states, write_states
from callsheet.bridges.hosted_run import HostedRun
from callsheet.bridges.loop_arguments import without_ddp
from callsheet.bridges.optimizer_hooks import OptimizerHooks
from callsheet.core.callback import Callback
from callsheet.core.control import Request
from callsheet.core.manager import CallbackManager
from callsheet.core.run_state import CheckpointInfo
from callsheet.errors import NotSupported
from callsheet.run.defaults import LOCK_TIMEOUT_SECONDS, LOG_INTERVAL

logger = logging.getLogger("callsheet")

_METRIC_NAMES = {
    "grad_norm": "train/grad_norm",
    "num_label_tokens": "train/label_tokens",
    "accuracy": "train/accuracy",
}
_LOGGED_ELSEWHERE = frozenset({"loss", "ce_loss", "kd_loss", "lr"})
_NOT_RESULTS = frozenset({"lr", "mem", "num_label_tokens"})
"""Values that AutoModel reports together with the results of a validation, but that are not results."""

_ONLY_VALIDATION_SET = "default"
"""The name that AutoModel gives to the validation set if there is only one."""


def host(
    callbacks: CallbackManager | Callback | Iterable[Callback] | None,
    *,
    log_interval: str | int = LOG_INTERVAL,
    strict: bool = True,
    lock_timeout_seconds: float = LOCK_TIMEOUT_SECONDS,
) -> AutoModelHost:
    """Wrap the callbacks in one callback of AutoModel, for `Recipe(cfg, callbacks=[host([...])])`.

    A run is one call of `recipe.run_train_validation_loop()`. AutoModel has only six hooks. The host observes the other parts of
    a step with PyTorch hooks on the model, in `backward` and on the optimizer. `ctx.batch` is the argument of the model's call.
    The metrics that AutoModel measures at a step are in the metrics records, as `automodel/<name>` if callsheet has no name for
    them.

    If a callback requests a stop, a save or an evaluation, AutoModel carries it out after the current step, because the host
    changes AutoModel's step scheduler. AutoModel validates whenever it saves. The host adds the callbacks' states to AutoModel's
    checkpoints, and loads them when training resumes from one.

    Not supported: gradients at `on_train_step_end`, because AutoModel has already zeroed them; the fetch of a step's microbatches
    after the first; the steps of an evaluation of several validation sets; pipeline parallelism. The host learns of an exception
    only if the script calls `CallbackRunner.on_exception`, as AutoModel's own `main` does. Otherwise a failed run ends when the
    host is garbage-collected or the program ends; it is recorded as failed.

    Args:
        callbacks: a manager, a callback, or any iterable of callbacks.
        log_interval: how often a metrics record is made.
        strict: whether to raise an error if a callback listens to an event that is never fired. False: a warning is logged.
        lock_timeout_seconds: how long to wait while another process trains in the run's folder; then `RunInUseError` is raised.

    Returns:
        A callback of AutoModel.

    Raises:
        NotSupported: a callback cannot work in this loop, see `strict`. Raised when training begins or after the first step.
    """
    return AutoModelHost(callbacks, log_interval=log_interval, strict=strict, lock_timeout_seconds=lock_timeout_seconds)


class _HostRequests:
    """Carries out callbacks' requests (save, evaluate, stop) by changing AutoModel's step scheduler.

    It has no reference to the recipe: the run refers to this object, and must not keep the recipe (and so the host) alive.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._changed: dict[str, Any] = {}  # the original values of the scheduler's attributes that were changed, by name

    def save(self, requests: tuple[Request, ...]) -> None:
        """Make the recipe save after the current step: change the scheduler's checkpoint interval until `restore` is called."""
        self._now("ckpt_every_steps")

    def evaluate(self) -> None:
        """Make the recipe validate after the current step: change the scheduler's validation interval until `restore` is called."""
        self._now("val_every_steps")

    def stop(self, *, now: bool = False) -> None:
        """Make the recipe stop after the current step. With `now=True` (used only before the first step), no step is trained."""
        scheduler = self._scheduler
        scheduler.max_steps = min(scheduler.max_steps, scheduler.step + (not now))

    def restore(self) -> bool:
        """Restore the scheduler's intervals that `save` and `evaluate` have changed. Return whether any interval was changed."""
        changed, self._changed = self._changed, {}
        for name, value in changed.items():
            setattr(self._scheduler, name, value)
        return bool(changed)

    def _now(self, name: str) -> None:
        self._changed.setdefault(name, getattr(self._scheduler, name))
        setattr(self._scheduler, name, self._scheduler.step + 1)


class AutoModelHost(HostBase, AutoModelCallback):
    """The AutoModel callback that `host` returns: it fires callsheet's events in an AutoModel recipe.

    The arguments are those of `host`.
    """

    _run: HostedRun | None = None

    def __init__(self, callbacks: Callbacks, **options: Any) -> None:
        super().__init__(callbacks, **options)
        self._requests: Any = None  # the `_HostRequests`, set when a run begins
        self._is_over = True  # True before AutoModel's first step and after AutoModel's last step
        self._measured_step = -1  # the step of AutoModel's latest metrics, as AutoModel counts steps
        self._being_written: CheckpointInfo | None = None  # the checkpoint that AutoModel is writing in the background

    # --- the run ---

    @observing
    def on_train_start(self, recipe: Any, **_: Any) -> None:
        """Begin a run of callsheet's callbacks, because AutoModel begins to train."""
        self._forget_earlier_run()
        if getattr(recipe, "pp", None) is not None:
            raise NotSupported(
                "AutoModel's pipeline parallelism is not supported, because the parts of a step cannot be observed in its stages; "
                "train without it"
            )
        scheduler = recipe.step_scheduler
        model = _only(getattr(recipe, "model_parts", None) or recipe.model)
        optimizer = _only(recipe.optimizer)
        checkpoints = getattr(getattr(recipe, "checkpointer", None), "config", None)
        output = Path(getattr(checkpoints, "checkpoint_dir", None) or "runs/automodel").absolute()
        sets = _validation_sets(recipe)
        self._requests = requests = _HostRequests(scheduler)
        self._run = run = HostedRun(
            self.manager,
            model=without_ddp(model),
            optimizer=optimizer,
            scheduler=_only(getattr(recipe, "lr_scheduler", None)),
            host="NeMo AutoModel",
            run_name=output.name,
            runs_folder=output.parent,
            config=_plain(getattr(recipe, "cfg", None)),
            max_duration=f"{scheduler.max_steps}ba" if scheduler.max_steps < 2**62 else None,
            able=("stop", *(["save"] if getattr(checkpoints, "enabled", False) else []), *(["evaluate"] if sets else [])),
            saves=requests.save,
            **self._run_options,
        )
        run.evaluation.request = requests.evaluate
        run.state.epoch_batches = getattr(scheduler, "epoch_len", None)
        run.state.evaluators = tuple(sets)
        if scheduler.step:
            given = recipe.cfg.get("checkpoint.restore_from", None) if hasattr(recipe.cfg, "get") else None
            places = [Path(given), output / given] if isinstance(given, str) else []
            run.checkpoints.loads = partial(_load, run, [*places, *output.glob(f"*step_{scheduler.step - 1}")], scheduler)
        self._watch = watch = BackwardWatch(run.driver, run.ctx)
        run.losses = watch.reader
        self._called = CalledModel(
            run, watch, scheduler, model, OptimizerHooks(run.driver, optimizer, is_always_observed=False), sets
        )
        never = NOT_FIRED + (NOT_FIRED_FOR_SEVERAL if len(sets) > 1 else ())
        self._begin_run(run, [self._called, watch, self._called.wrap(recipe)], never)
        self._is_over, self._measured_step = True, -1
        run.counts.follow(partial(_read_counts, weakref.proxy(self), scheduler))
        self._is_over = False
        run.driver.start("round")
        if run.control.stop_requested is not None:
            requests.stop(now=True)

    @in_a_run
    def on_train_end(self, run: HostedRun, recipe: Any, **_: Any) -> None:
        """End the run of callsheet's callbacks, because AutoModel has finished training."""
        self._is_over = True
        # The last epoch is still open if its length is unknown, or if AutoModel has not reported the epoch's last batch.
        if run.driver.is_open("epoch"):
            scheduler = recipe.step_scheduler
            is_whole = not _is_leaving(recipe) and scheduler.step < scheduler.max_steps
            # If the epoch's length is known, the number of steps shows whether the epoch is complete.
            if length := getattr(scheduler, "epoch_len", None):
                is_whole = scheduler.step % length == 0
            run.end_epoch(is_whole=is_whole)
        self._publish(run)
        if _is_leaving(recipe):
            _preempt(run)
        self._requests.restore()
        run.finish()
        if self._requests.restore():
            logger.warning("a checkpoint or an evaluation was requested after AutoModel's training was over; it is not made")
        self._release()

    def on_exception(self, recipe: Any, *, exception: BaseException | None = None, **_: Any) -> None:
        """End the run as failed, unless a callback's error has ended it already."""
        self._fail(exception if exception is not None else RuntimeError("AutoModel reported a failure without an exception"))

    def _release(self) -> None:
        if self._requests is not None:
            self._requests.restore()
        super()._release()
        self._being_written = None

    def _handle(self, method: Callable[..., None], recipe: Any, **given: Any) -> None:
        """Call `method`, which handles a hook of AutoModel, with the current run. If there is no run, do nothing.

        Until `method` returns, calls of the model come from a callback and are not part of the loop.
        """
        if self._run is not None:
            called = self._called
            called.is_inert = True
            method(self, self._run, recipe, **given)
            called.is_inert = False

    # --- steps ---

    def on_train_batch_end(self, recipe: Any, *, train_log_data: Any = None, **_: Any) -> None:
        """End the step, and carry out the actions that are due after it, such as a requested stop or save."""
        run = self._run
        if run is None:
            return
        called, step = self._called, getattr(train_log_data, "step", None)
        called.is_inert = True
        try:
            if step is not None:
                if step <= self._measured_step:  # AutoModel reports the end of an earlier step again
                    called.is_inert = False
                    run.counts.doubt()
                    return
                self._measured_step = step
            self._requests.restore()
            called.end_step()
            self._take(run, {} if train_log_data is None else train_log_data.metrics)
            if run.end_step():
                self._after_step(run)
            if getattr(recipe.step_scheduler, "is_last_batch", False):
                run.end_epoch(is_whole=True)
                self._stop_if_asked(run)
            # Read `is_val_step` only now: if a callback has just requested a save or a stop, AutoModel validates too.
            if not called.is_wrapped:
                called.is_validating = bool(getattr(recipe.step_scheduler, "is_val_step", False))
            called.is_inert = False
        except BaseException as error:
            self._leave(error)

    def _take(self, run: HostedRun, measured: Mapping[str, Any]) -> None:
        """Copy AutoModel's loss and other metrics of the step to the run, if a callback listens to `on_log` or to the step's end.

        AutoModel's loss covers all ranks and microbatches.
        """
        listeners = run.manager.has_listeners
        if not listeners.on_log and not listeners.on_train_step_end:
            return
        if "loss" in measured:
            self._watch.total = _scalar(measured["loss"])
        run.other_losses = {name: _scalar(measured[name]) for name in ("ce_loss", "kd_loss") if name in measured}
        if "grad_norm" in measured and run.driver.is_open("train_step"):
            run.grad_norm = _scalar(measured["grad_norm"])
        if listeners.on_log:
            for name, value in measured.items():
                if name not in _LOGGED_ELSEWHERE:
                    run.ctx.log({_METRIC_NAMES.get(name, f"automodel/{name}"): value}, over="mean", across="same")

    def _stop(self, loop: Any) -> None:
        self._requests.stop()

    # --- evaluations and checkpoints ---

    @in_a_run
    def on_validation_end(self, run: HostedRun, recipe: Any, *, val_results: Mapping[str, Any] | None = None, **_: Any) -> None:
        """End the evaluation of all validation sets.

        A recipe without validation sets also calls this method; in this case, the method does nothing.
        """
        self._called.is_validating = False
        if not val_results:
            return
        for name, sample in val_results.items():
            shown = _shown_name(name)
            if not run.eval.driver.is_open("eval"):
                run.eval.begin(shown)
            found = {key.removeprefix("val_"): value for key, value in sample.metrics.items() if key not in _NOT_RESULTS}
            run.eval.end_dataset(shown, found)
        run.eval.end()
        run.fire_record()
        self._fire_due(run)  # fire `on_checkpoint_due` now, so that a requested checkpoint is saved at this step
        self._stop_if_asked(run)

    @in_a_run
    def on_save_checkpoint(self, run: HostedRun, recipe: Any, *, checkpoint_info: Mapping[str, Any], **_: Any) -> None:
        """Add the callbacks' states to a checkpoint that AutoModel has written, or is writing in the background.

        AutoModel calls this method even if AutoModel writes no checkpoints; in this case, the method does nothing.
        """
        # AutoModel has waited until the previous checkpoint was completely written, so publish that checkpoint.
        self._publish(run)
        if "save" not in run.control.able:
            return
        if _is_leaving(recipe):
            _preempt(run)
        else:
            self._fire_due(run)
        if (loss := checkpoint_info.get("train_loss")) is not None:
            run.records.last_loss = _scalar(loss)
        path = Path(checkpoint_info["checkpoint_path"])
        in_background = bool(getattr(recipe.checkpointer.config, "is_async", False))
        info = run.fire_checkpoint(
            str(path), lambda info: write_states(run, path, info), is_durable=not in_background, has_trained_weights=True
        )
        self._being_written = info if in_background else None
        self._stop_if_asked(run)

    def _fire_due(self, run: HostedRun) -> None:
        """Fire `on_checkpoint_due`, at most once after a step and once more after an evaluation that follows this step."""
        run.boundaries.fire_checkpoint_due("step" if run.driver.is_open("epoch") else "epoch")

    def _publish(self, run: HostedRun) -> None:
        info, self._being_written = self._being_written, None
        if info is not None:
            run.publish(info)


def _read_counts(host: AutoModelHost, scheduler: Any) -> Counts:
    """Return how many steps AutoModel has completed, and how many epochs if the number of steps in an epoch is known.

    AutoModel counts a step only after all hooks of the step.
    """
    is_in_hook = host._called.is_inert and not host._is_over
    steps, length = scheduler.step + is_in_hook, getattr(scheduler, "epoch_len", None)
    return Counts(steps, steps // length if length else None)


def _load(run: HostedRun, places: list[Path], scheduler: Any) -> CheckpointInfo | None:
    """Load the callbacks' states from the checkpoint from which AutoModel has resumed model and optimizer."""
    step, found = scheduler.step, next((place for place in places if (place / STATE).is_dir()), None)
    if found is None:
        logger.warning("%s resumes from step %d, but no state of callbacks was found in its checkpoint", run.host, step)
        resume_without_states(run, step, scheduler.epoch)
        return None
    return read_states(run, found, step)


def _is_leaving(recipe: Any) -> bool:
    """Return whether AutoModel ends training because of a SIGTERM. AutoModel gives the same answer on all ranks."""
    return bool(getattr(recipe.step_scheduler, "sigterm_flag", False))


def _preempt(run: HostedRun) -> None:
    """End the run as preempted, because AutoModel has received a SIGTERM. AutoModel's next checkpoint is the preemption checkpoint."""
    if not run.boundaries.is_preempted:
        run.control.able.add("save")  # allow the save that a preemption requests; AutoModel decides whether it saves
        run.signals.received, run.signals.arrived_at = signal.SIGTERM, time.monotonic()
        run.boundaries.finish()  # `finish` lets the ranks exchange requests, so that all ranks know of the preemption


def _scalar(measured: Any) -> Tensor:
    """Return the value as a float32 tensor. `torch.scalar_tensor` is used because it converts numbers faster than `torch.tensor`."""
    return measured.float() if isinstance(measured, Tensor) else torch.scalar_tensor(measured, dtype=torch.float32)


def _only(given: Any) -> Any:
    """Return the first item of a list such as `model_parts`, or None if the list is empty. Return any other object unchanged.

    A recipe has such lists for pipeline parallelism."""
    return next(iter(given), None) if isinstance(given, (list, tuple)) else given


def _validation_sets(recipe: Any) -> list[str]:
    """Return callsheet's names for the recipe's validation sets."""
    several = getattr(recipe, "val_dataloaders", None)
    if several is not None:
        return [_shown_name(name) for name in several]
    return ["validation"] if getattr(recipe, "val_dataloader", None) is not None else []


def _shown_name(name: str) -> str:
    return "validation" if name == _ONLY_VALIDATION_SET else name


def _plain(config: Any) -> dict[str, Any]:
    values = config.to_dict() if hasattr(config, "to_dict") else config
    if not isinstance(values, Mapping):
        return {}
    return {
        str(name): _plain(value) if isinstance(value, Mapping) else value
        for name, value in values.items()
        if isinstance(value, (bool, int, float, str, Mapping)) or value is None
    }
