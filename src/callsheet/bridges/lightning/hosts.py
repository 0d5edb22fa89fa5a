"""Runs callsheet's callbacks in Lightning's Trainer, as one callback of Lightning."""

from __future__ import annotations

import functools
import logging
import os
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from callsheet.bridges.forward_hooks import Mode
from callsheet.bridges.host_base import Callbacks, HostBase, in_a_run, observing
from callsheet.bridges.host_states import own_state, restore_states, resume_without_states
from callsheet.bridges.hosted_run import HostedRun
from callsheet.bridges.lightning.events import NOT_FIRED
from callsheet.bridges.lightning.internals import HOST, PACKAGE
from callsheet.bridges.lightning.parts import (
    Cadence,
    ClipHook,
    ClosureWatch,
    Saves,
    StepHooks,
    dataset_names,
    duration_of,
    plain_name,
    read_counts,
)
from callsheet.bridges.optimizer_hooks import SteppedHooks
from callsheet.core import ranks as distributed
from callsheet.core.callback import Callback
from callsheet.core.control import Request
from callsheet.core.manager import CallbackManager
from callsheet.core.run_state import CheckpointInfo, Outcome
from callsheet.errors import mark_as_users
from callsheet.run.defaults import LOCK_TIMEOUT_SECONDS
from callsheet.trainer.tasks import counts_of

try:
    from lightning.pytorch import Callback as LightningCallback
except ImportError:
    from pytorch_lightning import Callback as LightningCallback

logger = logging.getLogger("callsheet")


def host(
    callbacks: CallbackManager | Callback | Iterable[Callback] | None,
    *,
    strict: bool = True,
    run_name: str | None = None,
    runs_folder: str | os.PathLike[str] | None = None,
    lock_timeout_seconds: float = LOCK_TIMEOUT_SECONDS,
) -> LightningHost:
    """Return one `lightning.pytorch.Callback` that wraps the callbacks, for `Trainer(callbacks=[host([...])])`.

    A run is one call of `trainer.fit`, `validate`, `test` or `predict`. Its folder is `trainer.log_dir`. A metrics record is made
    every `log_every_n_steps` steps. It contains the values that the LightningModule logs, as `lightning/<name>`. If a callback
    requests a stop or an evaluation, the Trainer carries it out. If a callback requests a checkpoint, the host calls
    `trainer.save_checkpoint`. The host also reports the checkpoints that Lightning writes by itself. All of them contain the
    callbacks' states, which are restored when `fit` resumes from one. No events are fired during Lightning's sanity check.

    Args:
        callbacks: a manager, a callback, or any iterable of callbacks.
        strict: whether to raise an error if a callback listens to an event that is not fired; else log a warning.
        run_name, runs_folder: the run's name, and the folder that contains the run's folder. None: taken from `trainer.log_dir`.
        lock_timeout_seconds: how long to wait while another process trains in the run's folder; then `RunInUseError` is raised.

    Raises:
        NotSupported: a callback cannot work in Lightning's loop; see `strict`.
    """
    return LightningHost(
        callbacks, strict=strict, run_name=run_name, runs_folder=runs_folder, lock_timeout_seconds=lock_timeout_seconds
    )


class LightningHost(HostBase, LightningCallback):  # type: ignore[misc]  # mypy does not read Lightning's types
    """The Lightning callback that `host` returns: it fires callsheet's events in Lightning's Trainer.

    The arguments are those of `host`.
    """

    _PACKAGE = PACKAGE
    _INTERNALS = tuple(f"{LightningCallback.__module__.partition('.callbacks')[0]}.{name}" for name in HOST)

    def __init__(
        self,
        callbacks: Callbacks,
        *,
        run_name: str | None,
        runs_folder: str | os.PathLike[str] | None,
        **options: Any,
    ) -> None:
        super().__init__(callbacks, **options)
        self._run_name, self._runs_folder = run_name, runs_folder
        self._run: Any = None  # a HostedRun from the first to the last hook of a run; otherwise None
        self._trained: HostedRun | None = None  # the run of the latest `fit`; kept for checkpoints that are written later
        self._loaded: Mapping[str, Any] | None = None

    # --- a run ---

    def _begin(self, trainer: Any, module: Any, mode: Mode = "eval", *, fits: bool = False, **options: Any) -> HostedRun:
        """Begin a run of callsheet's callbacks.

        Args:
            trainer: Lightning's Trainer.
            module: the LightningModule.
            mode: the kind of evaluation to observe.
            fits: whether the Trainer trains; then the run resumes if the Trainer does.
            options: further arguments of `HostedRun`.
        """
        self._forget_earlier_run()
        folder = Path(trainer.log_dir or trainer.default_root_dir).absolute()
        self._run = run = HostedRun(
            self.manager,
            model=module,
            host="Lightning's Trainer",
            run_name=self._run_name or folder.name,
            runs_folder=self._runs_folder or folder.parent,
            config={name: value for name, value in dict(module.hparams).items() if isinstance(value, (bool, int, float, str))},
            log_interval=f"{trainer.log_every_n_steps}ba" if trainer.log_every_n_steps else "1ep",
            device=trainer.strategy.root_device,
            **self._run_options,
            **options,
        )
        self._steps = StepHooks(run.eval.driver, run.eval.ctx, module, mode)
        self._is_first_eval_step = True
        self._names: list[str] = []  # the names of the datasets of the current evaluation; empty between evaluations
        self._known: dict[str, Any] = dict(trainer.callback_metrics)
        if fits:
            run.checkpoints.loads = lambda: self._load(trainer, run)
        self._begin_run(run, [self._steps], NOT_FIRED)
        return run

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """End the run of callsheet's callbacks because of an error, Ctrl-C or SIGTERM."""
        run = self._run
        if run is None:
            return
        if type(exception).__name__ == "SIGTERMException":
            self._preempt(run)
            self._release()
        else:
            self._fail(exception)

    def _preempt(self, run: HostedRun) -> None:
        """End the run as preempted, because a signal has made Lightning stop between two batches.

        Save a checkpoint only if there is one rank: other ranks may be at another step.
        """
        run.manager.fire("on_preempt", run.ctx)
        if run.eval.driver.is_open("eval"):
            run.eval.end_dataset(run.eval.ctx.eval_name, {})
            run.eval.end()
        for driver, span in ((run.driver, "train"), (run.eval.driver, "test"), (run.eval.driver, "predict")):
            driver.end(span)
        if run is self._trained and run.groups.size == 1:
            run.control.save("SIGTERM", kind="preempt", replicated=True)
            run.boundaries.finish()
        run.lifetime.end(Outcome.PREEMPTED)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """End the run as stopped, if it is still open.

        Lightning's tuner, for example, leaves the loop without calling `on_train_end`.
        """
        if self._run is not None:
            self._run.lifetime.end(Outcome.STOPPED)
            self._release()

    # --- training ---

    @observing
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin a run of callsheet's callbacks when `fit` begins to train. If `fit` resumes, its checkpoint is already loaded."""
        optimizers, schedulers = trainer.optimizers, trainer.lr_scheduler_configs
        evaluates = trainer.enable_validation and Cadence.is_able(trainer)
        self._cadence = cadence = Cadence(trainer)
        run = self._trained = self._begin(
            trainer,
            pl_module,
            fits=True,
            optimizer=optimizers[0] if optimizers else None,
            scheduler=schedulers[0].scheduler if schedulers else None,
            max_duration=duration_of(trainer),
            able=(
                "stop",
                "save",
                *(["evaluate"] if evaluates else []),
                *(["set_gradient_accumulation"] if pl_module.automatic_optimization else []),
            ),
            saves=lambda requests: self._save(trainer),
        )
        run.evaluation.request = cadence.ask
        self._is_in_batch = self._listens_to_microbatch = False
        self._skips_batch = False  # whether a batch of the current step was skipped; only known before the first step was checked
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self._watch = watch = ClosureWatch(run.driver, run.ctx, scaler)
        run.losses = watch.reader
        self._forward = StepHooks(run.driver, run.ctx, pl_module)
        self._clip = ClipHook(pl_module, self._end_clipping)
        # With manual optimization, ignore a backward pass after `optimizer.step()`, because it belongs to the next optimizer.
        is_manual = not pl_module.automatic_optimization
        self._stepped = SteppedHooks(run, optimizers, ended=watch.stop if is_manual else None)
        self._stepped.has_begun = False
        self._stepped.listen(True)
        self._hooks += [watch, self._forward, self._clip, cadence, Saves(trainer, self._save_and_report), self._stepped]
        # A checkpoint that was saved at an epoch's last step does not count this epoch, so count the epoch now.
        while run.state.timestamp.epoch < trainer.current_epoch:
            run.state.timestamp = run.state.timestamp.next_epoch()
        run.counts.follow(functools.partial(read_counts, weakref.proxy(trainer)))
        batches = trainer.num_training_batches
        self._length = int(batches) if batches != float("inf") else None
        self._set_epoch_length(trainer)
        run.driver.start("round")
        self._stop_if_asked(run, trainer)

    def _set_epoch_length(self, trainer: Any) -> None:
        if self._length is not None:
            self._run.state.epoch_batches = -(-self._length // trainer.accumulate_grad_batches)

    @in_a_run
    def on_train_epoch_start(self, run: HostedRun, trainer: Any, pl_module: Any) -> None:
        self._start_epoch(run, trainer)

    def _start_epoch(self, run: HostedRun, trainer: Any) -> None:
        """Start an epoch.

        Lightning calls no `on_train_epoch_start` if it resumes within an epoch; then `on_train_batch_start` calls this method.
        """
        control = run.control
        run.driver.start("epoch")
        if control.accumulation is not None:  # Lightning can change the number of accumulated batches only between epochs
            trainer.accumulate_grad_batches, control.accumulation = control.accumulation, None
            self._set_epoch_length(trainer)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Start a microbatch. Before the first microbatch of a step, start the step."""
        run = self._run
        if run is None:
            return
        try:
            driver, ctx, watch = run.driver, run.ctx, self._watch
            samples, tokens = counts_of(batch)
            ctx.batch = batch
            spans = driver.spans
            if spans["train_step"].is_open:
                counted = run.counted
                run.counted = counted[0] + samples, counted[1] + tokens
            else:
                run.counted = samples, tokens
                if not spans["epoch"].is_open:
                    self._start_epoch(run, trainer)
                if driver.listen():
                    watch.listen(driver.is_loss_read)
                    self._listens_to_microbatch = driver.listens_to("microbatch")
                    self._forward.listen(self._listens_to_microbatch or driver.listens_to("fetch"))
                    self._clip.listen(driver.listens_to("clip_gradients") and pl_module.automatic_optimization)
                if not spans["fetch"].has_no_listeners:
                    driver.start_and_end("fetch")
                driver.start_step()
                watch.total, run.step_skipped = None, True
                self._stepped.has_begun = False
            watch.is_on, watch.before = True, watch.total
            if self._is_in_batch:
                # Lightning has not reported the end of the last batch, or has reported the start of this batch twice.
                run.counts.doubt()
            self._is_in_batch = True
            given = ctx.batch
            if self._listens_to_microbatch:
                if spans["microbatch"].is_open:  # end the previous microbatch, whose end Lightning has not reported
                    driver.end("microbatch")
                ctx.microbatch = given
                driver.start("microbatch")
                given = ctx.microbatch
            self._forward.replaced = [given] if given is not batch else None
        except Exception as error:
            self._leave(error)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Fire the start of gradient clipping. Called when the gradients are computed and unscaled."""
        run = self._run
        if run is None:
            return
        try:
            watch, stepped = self._watch, self._stepped
            if not self._is_in_batch:  # Lightning has not reported the start of this batch
                run.counts.doubt()
            # If this step has begun already, the optimizer is calling its closure again, or a second optimizer is stepping.
            if stepped.has_begun:
                watch.keep_last()
                return
            stepped.has_begun, watch.is_on, watch.is_in_closure = True, True, True
            if not run.driver.spans["clip_gradients"].has_no_listeners:
                run.driver.start("clip_gradients")
            if not self._clip.is_on:
                self._end_clipping()
            # Reset the sum only now, because the events above make the step's loss available.
            watch.last, watch.total = watch.total, None
        except Exception as error:
            self._leave(error)

    def _end_clipping(self) -> None:
        run = self._run
        if run is None:
            return
        try:
            driver, spans = run.driver, run.driver.spans
            if spans["train_step"].is_open and not spans["optimizer_step"].is_open:
                if not spans["clip_gradients"].has_no_listeners:
                    driver.end("clip_gradients")
                if driver.is_read:
                    driver.start("optimizer_step")
        except Exception as error:
            self._leave(error)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """End the microbatch. After the last microbatch of a step, end the step."""
        run = self._run
        if run is None:
            return
        try:
            watch, stepped = self._watch, self._stepped
            if stepped.fault is not None:
                raise stepped.fault
            if not self._is_in_batch:  # Lightning has not reported the start of this batch, or has reported its end twice
                run.counts.doubt()
            self._is_in_batch = False
            watch.is_on = watch.is_in_closure = False
            if stepped.has_begun:
                watch.keep_last()
                watch.total = watch.last
            if not self._is_checked:
                # A `training_step` that returns None skips its batch. With manual optimization, it returns None anyway.
                is_without_loss = watch.total is None and not stepped.has_begun
                self._skips_batch |= not outputs if pl_module.automatic_optimization else is_without_loss
            if trainer.accumulate_grad_batches > 1 and pl_module.automatic_optimization and trainer.fit_loop._should_accumulate():
                run.driver.end("microbatch")
                return
            if run.step_skipped:
                run.driver.end("optimizer_step")
            if run.manager.has_listeners.on_log and trainer.log_every_n_steps and run.ctx.step % trainer.log_every_n_steps == 0:
                self._log(trainer)
            # With manual optimization, a step may need several batches, so a batch without a step is no error.
            if run.end_step():
                if self._skips_batch:  # check a later step
                    self._stop_if_asked(run, trainer)
                else:
                    self._after_step(run, trainer, may_skip_step=not stepped.has_begun)
            if self._skips_batch:
                self._skips_batch = False
                run.driver.synthesized.clear()
        except Exception as error:
            self._leave(error)

    @in_a_run
    def on_train_epoch_end(self, run: HostedRun, trainer: Any, pl_module: Any) -> None:
        """End the epoch, also if Lightning has left the epoch before the last batch."""
        if not run.driver.is_open("epoch"):
            return
        if run.manager.has_listeners.on_log:
            self._log(trainer)
        run.end_epoch(is_whole=trainer.is_last_batch)
        self._stop_if_asked(run, trainer)

    @in_a_run
    def on_train_end(self, run: HostedRun, trainer: Any, pl_module: Any) -> None:
        """End callsheet's run, because Lightning's training has ended."""
        if trainer.should_stop and run.control.stop_requested is None:
            run.control.agree(Request("stop", "trainer.should_stop", "Lightning"))
        self._finish()

    def _stop(self, loop: Any) -> None:
        loop.should_stop = True

    def _log(self, trainer: Any) -> None:
        """Add to callsheet's next metrics record what the LightningModule has logged since the last call of this method."""
        if logged := {f"lightning/{name}": value.detach() for name, value in self._new_metrics(trainer).items()}:
            self._run.ctx.log(logged)

    def _new_metrics(self, trainer: Any) -> dict[str, Tensor]:
        """Return the metrics that Lightning has logged since the last call of this method. Each of them is a new tensor object."""
        known, self._known = self._known, dict(trainer.callback_metrics)
        return {name: value for name, value in self._known.items() if known.get(name) is not value and value.numel() == 1}

    # --- evaluation ---

    @observing
    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin an evaluation with its first dataset. `on_validation_batch_start` begins each further dataset."""
        if trainer.sanity_checking or (self._has_given_up and trainer.state.fn == "fit"):
            return
        run = self._run
        if run is None:
            run = self._begin(trainer, pl_module, able=())
        else:
            self._cadence.remove()
        self._names = dataset_names(trainer.val_dataloaders)
        self._steps.listen(run.eval.listens_to_outputs("eval"))
        self._known = dict(trainer.callback_metrics)
        self._next_dataset(run, 0)

    def _next_dataset(self, run: HostedRun, index: int) -> None:
        self._dataset = index
        run.eval.begin(self._names[index], standalone=not run.driver.is_open("train"))

    @observing
    def on_validation_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Start an evaluation step. Before the first batch of a further dataset, end the evaluation of the previous dataset."""
        run = self._run
        if trainer.sanity_checking or run is None or not self._names:
            return
        if dataloader_idx != self._dataset:
            run.eval.end_dataset(self._names[self._dataset], self._read_results(trainer, "val"))
            self._next_dataset(run, dataloader_idx)
        run.eval.ctx.batch = batch
        run.eval.driver.start("eval_step")

    @observing
    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if not trainer.sanity_checking:
            self._end_batch("eval_step")

    def _end_batch(self, step: str) -> None:
        run = self._run
        if run is None:
            return
        run.eval.driver.end(step)
        if self._is_first_eval_step:
            self._is_first_eval_step = False
            self._support(run).after_first_step(run.eval.driver)

    @observing
    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """End the evaluation, whose results are available now."""
        run = self._run
        if trainer.sanity_checking or run is None:
            return
        if self._names:
            run.eval.end_dataset(self._names[self._dataset], self._read_results(trainer, "val"))
        self._names = []
        run.eval.end()
        self._steps.remove()
        run.fire_record()
        if not run.driver.is_open("train"):
            self._finish()
            return
        run.boundaries.fire_checkpoint_due("step")
        self._stop_if_asked(run, trainer)

    def _read_results(self, trainer: Any, prefix: str) -> dict[str, float]:
        """Return an evaluation's results under names without Lightning's prefixes, such as `loss` for `val_loss`."""
        return {plain_name(name, prefix): float(value) for name, value in self._new_metrics(trainer).items()}

    # --- test and prediction ---

    @observing
    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin a run of callsheet's callbacks for the test."""
        self._begin_standalone(trainer, pl_module, "test")

    @observing
    def on_test_batch_start(self, trainer: Any, pl_module: Any, batch: Any, *_: Any) -> None:
        if self._run is not None:
            self._run.eval.ctx.batch = batch
            self._run.eval.driver.start("test_step" if trainer.testing else "predict_step")

    @observing
    def on_test_batch_end(self, trainer: Any, *_: Any) -> None:
        self._end_batch("test_step" if trainer.testing else "predict_step")

    on_predict_batch_start, on_predict_batch_end = on_test_batch_start, on_test_batch_end

    @in_a_run
    def on_test_end(self, run: HostedRun, trainer: Any, pl_module: Any) -> None:
        """End the test, whose results are available now."""
        found = self._read_results(trainer, "test")
        run.eval.ctx.eval_losses = {name: torch.tensor(value) for name, value in found.items() if "loss" in name}
        run.eval.ctx.log({f"test/{name}": value for name, value in found.items()}, across="same")
        run.eval.driver.end("test")
        run.records.fire_log(run.ctx)
        self._finish()

    @observing
    def on_predict_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin a run of callsheet's callbacks for the prediction."""
        self._begin_standalone(trainer, pl_module, "predict")

    @in_a_run
    def on_predict_end(self, run: HostedRun, trainer: Any, pl_module: Any) -> None:
        """End the prediction, and with it the run."""
        run.eval.driver.end("predict")
        self._finish()

    def _begin_standalone(self, trainer: Any, module: Any, mode: Mode) -> None:
        run = self._begin(trainer, module, mode, able=())
        self._steps.listen(run.eval.listens_to_outputs(mode))
        run.eval.driver.start(mode)

    # --- checkpoints ---

    def _save(self, trainer: Any) -> None:
        """Write a checkpoint that a callback has requested."""
        run = self._run
        trainer.save_checkpoint(str(Path(run.ctx.run.checkpoints) / f"step={run.state.timestamp.batch}.ckpt"))

    def _save_and_report(self, save: Any, path: Any, *args: Any, **given: Any) -> Any:
        """Make Lightning write a checkpoint, and fire the checkpoint's events.

        Of several checkpoints between two steps, only the first is reported.
        """
        run = self._trained
        if run is None or not run.eval.order.allows_save():
            return save(path, *args, **given)
        is_written = False

        def write(info: Any) -> None:
            nonlocal is_written
            is_written = True
            try:
                save(path, *args, **given)
            except BaseException as error:
                mark_as_users(error)  # end training instead of only logging the error, because Lightning's own save has failed
                raise

        try:
            run.fire_checkpoint(str(path), write)
        except BaseException as error:
            self._leave(error)
            if not is_written:
                save(path, *args, **given)

    def state_dict(self) -> dict[str, Any]:
        """Return the callbacks' states of all ranks, for Lightning's checkpoint. All ranks must call this method."""
        run = self._trained
        if self.only_observes:
            return {}
        if run is None:
            return dict(self._loaded or {})
        if self._has_given_up:
            # An error in callsheet has ended the run, so the run's state is outdated. Do not save it in this checkpoint.
            distributed.gather({})
            return {}
        own = own_state(run)
        return {"state": own.pop("state"), "ranks": distributed.gather(own)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Store the callbacks' states. They are restored when training begins."""
        self._loaded = state_dict or None

    def _load(self, trainer: Any, run: HostedRun) -> CheckpointInfo | None:
        """Load the callbacks' states from the Trainer's checkpoint. Return the checkpoint's `CheckpointInfo`; None for a new run."""
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            ranks = loaded["ranks"]
            own = ranks[run.groups.rank if run.groups.size == len(ranks) else 0]
            restore_states(run, {"state": loaded["state"], **own})
        elif trainer.global_step:
            if trainer.ckpt_path is not None and not self.only_observes:
                logger.warning("%s resumes from %s, in which no callbacks' states were found", run.host, trainer.ckpt_path)
            resume_without_states(run, trainer.global_step, trainer.current_epoch)
        if loaded is None and not trainer.global_step:
            return None
        return CheckpointInfo(str(trainer.ckpt_path or ""), trainer.global_step, trainer.current_epoch, "periodic")
