"""The torchtnt bridge: callsheet's callbacks in torchtnt's `train`, `fit`, `evaluate` and `predict`, and torchtnt's callbacks here."""

from __future__ import annotations

import io
import logging
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from callsheet.extras import needed_by

with needed_by(__name__):
    import torch
    from torchtnt.framework.callback import Callback as TorchTNTCallback
    from torchtnt.framework.evaluate import evaluate
    from torchtnt.framework.state import EntryPoint, State
    from torchtnt.utils.progress import estimated_steps_in_epoch

from callsheet.bridges.epoch_position import EpochPosition
from callsheet.bridges.giving_up import GivesUp, observing
from callsheet.bridges.host_states import own_state, take_back
from callsheet.bridges.hosted_run import HostedRun
from callsheet.bridges.torch_hooks import BackwardWatch, JudgingHooks, ModelHooks, OptimizerHooks
from callsheet.bridges.torchtnt.guests import TorchTNTGuest, guest
from callsheet.bridges.torchtnt.unit import Fetches, duration_of, losses_in, one_of_unit
from callsheet.callback import Callback
from callsheet.context import Outcome
from callsheet.errors import CheckpointError, NotSupported
from callsheet.manager import CallbackManager, normalize_callbacks
from callsheet.run_lock import LOCK_TIMEOUT_SECONDS
from callsheet.time import Time
from callsheet.trainer.tasks import counts_of

__all__ = ["NOT_FIRED", "TorchTNTGuest", "TorchTNTHost", "guest", "host"]

logger = logging.getLogger("callsheet")

NOT_FIRED = (
    "on_test_start",
    "on_test_step_start",
    "on_test_forward_start",
    "on_test_forward_end",
    "on_test_step_end",
    "on_test_end",
)
"""Events that torchtnt has no moment for."""

EVALUATED = "validation"
"""The name of torchtnt's one evaluated dataset."""


def host(
    callbacks: CallbackManager | Callback | Iterable[Callback] | None,
    *,
    strict: bool = True,
    metrics: Iterable[str] = (),
    run_name: str | None = None,
    runs_folder: str | os.PathLike[str] = "runs",
    resume: str | os.PathLike[str] | None = None,
    log_interval: str | int | Time = "10ba",
    preempt_signals: Iterable[str] = (),
    lock_timeout_seconds: float = LOCK_TIMEOUT_SECONDS,
) -> TorchTNTHost:
    """The callbacks as one torchtnt callback, for `fit(unit, ..., callbacks=[host([...])])`, `train`, `evaluate` or `predict`.

    A run is one such call. The batch is what the unit's `get_next_train_batch` gives, the forward is heard from the unit's module, the
    loss from `backward`, the step from its optimizer: where the unit steps it only every few batches, that is one step of ours.
    A stop ends torchtnt's loop; an evaluation that is asked for within `fit` is made with torchtnt's `evaluate`; a checkpoint that is
    asked for is written as a checkpoint of callsheet's, with all that the unit tracks. Assigned to the unit, as in
    `unit.callsheet = host([...])`, the callbacks' states are in torchtnt's own checkpoints as well.

    Args:
        strict: whether it is an error that somebody hears an event which is not told; else a warning.
        metrics: names of attributes of the unit that are told with each evaluation, beside the loss that `eval_step` returns.
        run_name, runs_folder: of the run and its folder, where checkpoints stand.
        resume: `"auto"` for the newest good checkpoint of this run, or none; a path for just that one; None to start anew, or with what
            torchtnt has restored.
        log_interval: how often a record is made; a whole number means batches.
        preempt_signals: which ask the run to save and make way.
        lock_timeout_seconds: how long to wait if another process trains in the run's folder; then `RunInUseError` is raised.

    Raises:
        NotSupported: when training begins, or after the first step; see `strict`. Also for a unit whose `train_step` takes an iterator, or
            which tracks several modules or optimizers, none of them as `module` and `optimizer`.
    """
    return TorchTNTHost(
        callbacks,
        strict=strict,
        metrics=tuple(metrics),
        resume=os.fspath(resume) if resume is not None else None,
        settings={
            "run_name": run_name, "runs_folder": runs_folder, "log_interval": log_interval, "signals": tuple(preempt_signals),
            "lock_timeout_seconds": lock_timeout_seconds,
        },
    )  # fmt: skip


class TorchTNTHost(GivesUp, TorchTNTCallback):  # type: ignore[misc]  # torchtnt's types are not read
    """See `host`."""

    def __init__(
        self,
        callbacks: CallbackManager | Callback | Iterable[Callback] | None,
        *,
        strict: bool,
        metrics: tuple[str, ...],
        resume: str | None,
        settings: Mapping[str, Any],
    ) -> None:
        self.manager = normalize_callbacks(callbacks) or CallbackManager()
        self._strict = strict
        self._metrics = metrics
        self._resume_path = resume
        self._settings = settings
        self._run: HostedRun | None = None
        self._restored: dict[str, Any] | None = None
        self._steps_fired = 0  # of torchtnt's, for its checkpoints

    # --- the run ---

    def _begin(self, state: State, unit: Any) -> HostedRun:
        if self._run is not None:  # one that an exception had left of which torchtnt tells nobody
            self._release()
        self._has_given_up = False
        module = one_of_unit(unit.tracked_modules(), "module")
        if module is None:
            raise NotSupported(
                "the torchtnt unit tracks no module: there is nothing that callbacks could see; assign it to unit.module"
            )
        is_training = state.train_state is not None
        self._optimizer = optimizer = one_of_unit(unit.tracked_optimizers(), "optimizer") if is_training else None
        scheduler = one_of_unit(unit.tracked_lr_schedulers(), "lr_scheduler") if is_training else None
        inside = module.module if type(module).__name__ == "DistributedDataParallel" else module
        self._scaler = getattr(unit, "grad_scaler", None)
        self._accumulate = getattr(unit, "gradient_accumulation_steps", 1)
        me = weakref.ref(self)
        self._run = run = HostedRun(
            self.manager,
            model=inside,
            optimizer=optimizer,
            scheduler=scheduler,
            host="torchtnt",
            config={"entry_point": state.entry_point.name, "unit": type(unit).__qualname__},
            max_duration=duration_of(state, self._accumulate),
            evaluates=(lambda: me()._evaluate(state, unit)) if state.entry_point is EntryPoint.FIT else None,  # type: ignore[union-attr]
            able=("stop", "save") if is_training else (),
            **self._settings,
        )
        if state.eval_state is not None:
            run.state.evaluators = (EVALUATED,)
        self._place = EpochPosition()
        known = {id(self), id(module), id(optimizer), id(scheduler)}
        run.parts = {f"unit_{name}": part for name, part in unit.app_state().items() if id(part) not in known} | {
            "place": self._place
        }
        self._watch = watch = BackwardWatch(run.driver, run.ctx, self._scaler)
        self._model_hooks = ModelHooks(run.driver, run.ctx, module)
        self._judging_hooks = JudgingHooks(run.eval_driver, run.eval_ctx, module)
        self._predict_hooks = JudgingHooks(run.driver, run.ctx, module, kind="predict")
        hooks: list[Any] = [watch, self._model_hooks, self._judging_hooks, self._predict_hooks, Fetches(unit, self._fetchers())]
        self._optimizer_hooks = OptimizerHooks(run.driver, optimizer, watch=watch) if optimizer is not None else None
        if self._optimizer_hooks is not None:
            hooks.append(self._optimizer_hooks)
        run.losses = watch.reader
        run.fails_by(self._leave)
        self._is_checked = False  # whether the first step has told all that is heard
        self._waiting = ""  # the boundary that an evaluation of torchtnt's stands before
        self._is_exhausted = False
        self._batch: Any = None
        self._listens_to_forward = True
        self._progress: Any = getattr(unit, "train_progress", None)  # a unit looks long for what it has
        self._evaluates_every = state.eval_state.evaluate_every_n_steps if state.eval_state is not None else None
        run.signals.__enter__()
        self._ends = weakref.finalize(self, _end, run, hooks)
        run.reject(NOT_FIRED, strict=self._strict, logger=logger)
        run.begin(self._resume_path if self._restored is None else None)
        if self._restored is not None:
            self._take_back(run, unit)
        return run

    def _finish(self) -> None:
        if self._run is not None:
            self._run.finish()
            self._release()

    def on_exception(self, state: State, unit: Any, exc: BaseException) -> None:
        """The run has failed."""
        if self._run is not None:
            self._run.fail(exc)
            self._release()

    # --- training ---

    @observing
    def on_train_start(self, state: State, unit: Any) -> None:
        """Begin a run."""
        run = self._begin(state, unit)
        run.driver.start("round")
        if self._place.to_skip:  # within an epoch, whose start torchtnt tells nobody
            self._place.begin()
            run.driver.start("epoch")
        self._stop_if_asked(run, state)

    @observing
    def on_train_epoch_start(self, state: State, unit: Any) -> None:
        """An epoch begins."""
        run = self._run
        if run is None:
            return
        self._place.begin()
        self._is_exhausted = False
        run.driver.start("epoch")

    def _fetched(self, fetch: Callable[[State, Iterator[Any]], Any], state: State, batches: Iterator[Any]) -> Any:
        """What the unit's `get_next_train_batch` gives, or what a callback puts in its place."""
        run, place = self._run, self._place
        if run is None:
            return fetch(state, batches)
        while place.to_skip:
            fetch(state, batches)
            place.to_skip -= 1
            if not place.to_skip:
                place.skipped()
        is_told = self._begin_fetch(run)
        try:
            batch = fetch(state, batches)
        except StopIteration:
            self._is_exhausted = True
            self._end_fetch(run, None, is_told=is_told)
            raise
        if batch is batches:
            raise NotSupported("train_step takes an iterator, so that its batches cannot be told; let it take a batch")
        place.taken += 1
        return self._end_fetch(run, batch, is_told=is_told)

    @observing
    def _begin_fetch(self, run: HostedRun) -> bool | None:
        """Whether anybody listens to it."""
        driver = run.driver
        is_told = not driver.parts["train_step"].is_open
        if is_told:  # the further batches of a step come within it
            if driver.listen():
                self._listens_to_forward = driver.listens_to("forward")
                self._model_hooks.listen(self._listens_to_forward)
                self._watch.listen(driver.is_loss_read)
                if self._optimizer_hooks is not None:
                    self._optimizer_hooks.listen(driver.is_read)
            is_told = not driver.parts["fetch"].has_no_listeners
            if is_told:
                driver.start("fetch")
        run.ctx.batch = None
        return is_told

    def _end_fetch(self, run: HostedRun, batch: Any, *, is_told: bool | None) -> Any:
        """The batch, or what a callback puts in its place."""
        try:
            run.ctx.batch = batch
            if is_told:
                run.driver.end("fetch")
            return run.ctx.batch
        except BaseException as error:
            self._leave(error)
            return batch

    def _fetched_to_judge(self, fetch: Callable[[State, Iterator[Any]], Any], state: State, batches: Iterator[Any]) -> Any:
        """What `get_next_eval_batch` or `get_next_predict_batch` gives."""
        self._batch = batch = fetch(state, batches)
        return batch

    def _fetchers(self) -> dict[str, Callable[..., Any]]:
        judged = dict.fromkeys(("get_next_eval_batch", "get_next_predict_batch"), self._fetched_to_judge)
        return {"get_next_train_batch": self._fetched, **judged}

    def on_train_step_start(self, state: State, unit: Any) -> None:
        """A batch is to be trained on: of a step the first, or a further one."""
        run = self._run
        if run is None:
            return
        try:
            driver, ctx, watch = run.driver, run.ctx, self._watch
            counted = counts_of(ctx.batch)
            if driver.parts["train_step"].is_open:
                run.counted = run.counted[0] + counted[0], run.counted[1] + counted[1]
            else:
                driver.start_step()
                run.counted = counted
                watch.total = None
                if self._optimizer_hooks is not None:
                    self._optimizer_hooks.has_stepped = False
            watch.is_on = True
            if self._listens_to_forward:
                ctx.microbatch = ctx.batch
                driver.start("microbatch")
        except Exception as error:
            self._leave(error)

    def on_train_step_end(self, state: State, unit: Any) -> None:
        """The batch is through; with it the step, if the optimizer has stepped, or would have."""
        run = self._run
        if run is None:
            return
        try:
            self._watch.is_on = False
            progress, hooks = self._progress, self._optimizer_hooks
            self._steps_fired = steps = progress.num_steps_completed
            if hooks is not None and not hooks.has_stepped:
                would = self._scaler is not None and progress.num_steps_completed_in_epoch % self._accumulate == 0
                if not would:
                    run.driver.end("microbatch")
                    return
            run.step_skipped = hooks is not None and not hooks.has_stepped
            every = self._evaluates_every
            if every and steps % every == 0:
                run.driver.end_step()
                self._waiting = "step"
            else:
                self._end_step(run, state)
        except Exception as error:
            self._leave(error)

    def _end_step(self, run: HostedRun, state: State) -> None:
        run.end_step()
        if not self._is_checked:
            self._is_checked = True
            if self._scaler is not None:  # it leaves steps out until it has found its scale
                run.driver.synthesized -= {"clip_gradients", "optimizer_step"}
            run.check_supported(strict=self._strict, logger=logger)
        if run.control.pending or run.boundaries.is_making_way:
            self._stop_if_asked(run, state)

    @observing
    def on_train_epoch_end(self, state: State, unit: Any) -> None:
        """The epoch is over, or left."""
        run, train = self._run, state.train_state
        if run is None:
            return
        place = self._place
        length = estimated_steps_in_epoch(
            train.dataloader, num_steps_completed=0, max_steps=None, max_steps_per_epoch=train.max_steps_per_epoch
        )
        is_whole = self._is_exhausted or place.taken >= length
        place.end()
        run.close_epoch(is_whole=is_whole)
        every = state.eval_state.evaluate_every_n_epochs if state.eval_state is not None else None
        self._waiting = "epoch" if is_whole else ""
        if not every or unit.train_progress.num_epochs_completed % every or state.should_stop:
            self._reach(run, state)

    def _reach(self, run: HostedRun, state: State) -> None:
        """The boundary that waited for an evaluation."""
        waiting, self._waiting = self._waiting, ""
        if waiting == "step":
            self._end_step(run, state)
        elif waiting == "epoch":
            run.boundaries.reach("epoch")
            self._stop_if_asked(run, state)

    def _stop_if_asked(self, run: HostedRun, state: State) -> None:
        if (run.control.stop_requested is not None or run.boundaries.is_making_way) and not state.should_stop:
            state.stop()

    @observing
    def on_train_end(self, state: State, unit: Any) -> None:
        """End the run."""
        self._finish()

    # --- evaluation ---

    def _evaluate(self, state: State, unit: Any) -> dict[str, dict[str, float]]:
        """A callback has asked for it; it is told while it is made."""
        loop = state.eval_state
        evaluate(unit, loop.dataloader, max_steps_per_epoch=loop.max_steps_per_epoch, callbacks=[self], timer=state.timer)
        return {}

    @observing
    def on_eval_start(self, state: State, unit: Any) -> None:
        """An evaluation begins, which is a run of its own outside training."""
        run = self._run
        if run is None and self._has_given_up and state.train_state is not None:
            return
        if run is None or (state.train_state is None and not run.driver.is_open("train")):
            run = self._begin(state, unit)
        self._sums: dict[str, Any] = {}
        self._weight = 0
        self._is_telling = not (state.should_stop or run.driver.is_open("train_step"))
        if self._is_telling:
            run.begin_evaluation(EVALUATED, standalone=not run.driver.is_open("train"))
            self._judging_hooks.listen(True)

    @observing
    def on_eval_step_start(self, state: State, unit: Any) -> None:
        """A batch is to be evaluated."""
        run = self._run
        if run is not None and self._is_telling:
            run.eval_ctx.batch = self._batch
            run.eval_driver.start("eval_step")

    @observing
    def on_eval_step_end(self, state: State, unit: Any) -> None:
        """It has been."""
        run = self._run
        if run is None:
            return
        samples = counts_of(self._batch)[0] or 1
        self._weight += samples
        for name, loss in losses_in(state.eval_state.step_output).items():
            self._sums[name] = self._sums.get(name, 0.0) + loss * samples
        run.eval_driver.end("eval_step")

    @observing
    def on_eval_end(self, state: State, unit: Any) -> None:
        """The evaluation is over, and then what waited for it."""
        run = self._run
        if run is None:
            return
        self._judging_hooks.listen(False)
        self._batch = None
        found = {name: float(total) / self._weight for name, total in self._sums.items()}
        found |= {name: float(getattr(unit, name)) for name in self._metrics} if self._weight else {}
        if self._is_telling:
            run.end_dataset(EVALUATED, found)
            run.end_evaluation()
            run.records.tally.settle(run.state)
            run.records.tell(run.ctx)
            run.check_supported(strict=self._strict, logger=logger, driver=run.eval_driver)
        elif self._weight:  # within a step of several batches: told when that is over
            run.made.append({EVALUATED: found})
        self._reach(run, state)
        if not run.driver.is_open("train"):
            self._finish()

    # --- prediction ---

    @observing
    def on_predict_start(self, state: State, unit: Any) -> None:
        """A run that predicts; one within training is not told."""
        if self._run is not None and self._run.driver.is_open("train"):
            return
        self._begin(state, unit).driver.start("predict")
        self._predict_hooks.listen(True)

    @observing
    def on_predict_step_start(self, state: State, unit: Any) -> None:
        """A batch is to be predicted on."""
        run = self._run
        if run is not None and run.driver.is_open("predict"):
            run.ctx.batch = self._batch
            run.driver.start("predict_step")

    @observing
    def on_predict_step_end(self, state: State, unit: Any) -> None:
        """It has been."""
        if self._run is not None:
            self._run.driver.end("predict_step")

    @observing
    def on_predict_end(self, state: State, unit: Any) -> None:
        """End the run."""
        if self._run is not None and self._run.driver.is_open("predict"):
            self._run.driver.end("predict")
            self._finish()

    # --- in torchtnt's checkpoints ---

    def state_dict(self) -> dict[str, bytes]:
        """The callbacks' states and how far they have been told, as bytes: torchtnt's checkpointers ask for one unchanging structure."""
        run = self._run
        if run is None:
            return {"states": b""}
        states = {"steps": self._steps_fired, **own_state(run)}
        file = io.BytesIO()
        torch.save(states, file)
        return {"states": file.getvalue()}

    def load_state_dict(self, state: Mapping[str, bytes]) -> None:
        """The next run goes on from there."""
        self._restored = torch.load(io.BytesIO(state["states"]), weights_only=True) if state["states"] else None

    def _take_back(self, run: HostedRun, unit: Any) -> None:
        restored, self._restored = self._restored, None
        assert restored is not None
        if (progress := getattr(unit, "train_progress", None)) is not None and progress.num_steps_completed != restored["steps"]:
            raise CheckpointError(
                f"the callbacks' states are of step {restored['steps']}, and torchtnt goes on from {progress.num_steps_completed}; "
                "let the host stand before the checkpointer in callbacks=[...]"
            )
        take_back(run, restored)
        self._steps_fired = restored["steps"]


def _end(run: HostedRun, hooks: list[Any]) -> None:
    """Also when the program ends, or the host is forgotten: then training was left by an exception that torchtnt tells nobody."""
    for hook in hooks:
        hook.remove()
    run.signals.__exit__(None, None, None)
    run.lifetime.end(Outcome.FAILED)
