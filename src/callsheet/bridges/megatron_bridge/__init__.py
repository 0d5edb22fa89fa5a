"""The Megatron Bridge bridge: callsheet's callbacks in its training loop, and its callbacks in ours.

Megatron-LM's own callbacks have the same shape, with a context that has no `state`: there events are told, and nothing can be asked for.
"""

from __future__ import annotations

import copy
import functools
import logging
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from callsheet.extras import needed_by

with needed_by(__name__):
    import torch
    from torch import Tensor

from callsheet.bridges.giving_up import GivesUp, observing
from callsheet.bridges.host_states import own_state, write_states
from callsheet.bridges.hosted_run import HostedRun
from callsheet.bridges.megatron_bridge.guests import GUEST_EVENTS, MODULE, NEVER, MegatronBridgeGuest
from callsheet.bridges.megatron_bridge.hooks import ForwardHooks, torch_optimizers
from callsheet.bridges.megatron_bridge.names import CallbackContext
from callsheet.bridges.megatron_bridge.run import LM_LOSS
from callsheet.bridges.megatron_bridge.settings import Settings, load_states, move
from callsheet.bridges.megatron_bridge.state import GlobalState
from callsheet.bridges.torch_hooks import OptimizerHooks
from callsheet.callback import Callback
from callsheet.context import Outcome
from callsheet.manager import CallbackManager, normalize_callbacks
from callsheet.run_lock import LOCK_TIMEOUT_SECONDS

__all__ = ["GUEST_EVENTS", "HOST_EVENTS", "NEVER", "NOT_FIRED", "MegatronBridgeHost", "guest", "host"]

logger = logging.getLogger("callsheet")

HOST_EVENTS: Mapping[str, tuple[str, ...]] = {
    "on_data_init_start": ("on_run_start", "on_checkpoint_load_start", "on_checkpoint_load_end", "on_data_init_start"),
    "on_train_start": ("on_data_init_end", "on_train_start", "on_round_start", "on_epoch_start"),
    "on_train_step_start": ("on_fetch_start", "on_fetch_end", "on_train_step_start"),
    "on_train_step_end": ("on_train_step_end", "on_log", "on_checkpoint_due"),
    "on_eval_start": ("on_eval_all_start", "on_eval_start"),
    "on_eval_step_start": ("on_eval_step_start",),
    "on_eval_step_end": ("on_eval_step_end",),
    "on_eval_end": ("on_eval_end", "on_eval_all_end", "on_log", "on_checkpoint_due"),
    "on_checkpoint_save": ("on_checkpoint_save_start", "on_checkpoint_save_end", "on_checkpoint_published"),
    "on_train_end": ("on_epoch_end", "on_round_end", "on_train_end"),
    "on_test_start": ("on_test_start",),
    "on_test_step_start": ("on_test_step_start",),
    "on_test_step_end": ("on_test_step_end",),
    "on_test_end": ("on_test_end", "on_log"),
}
"""What is told at each event of Megatron Bridge. What stands between a step's start and end comes from PyTorch; the run's end is told
with the last of these."""

NOT_FIRED = (
    *("on_predict_start", "on_predict_step_start", "on_predict_forward_start", "on_predict_forward_end", "on_predict_step_end"),
    *("on_predict_end", "on_preempt"),
)
"""Events that it has no moment for."""


def host(
    callbacks: CallbackManager | Callback | Iterable[Callback] | None,
    *,
    strict: bool = True,
    lock_timeout_seconds: float = LOCK_TIMEOUT_SECONDS,
) -> MegatronBridgeHost:
    """The callbacks as one callback of Megatron Bridge, for `pretrain(config, forward_step, callbacks=[host([...])])`.

    A run is one `pretrain`. Forward and backward are heard from the model, where nothing is pipelined, and the optimizer's step from
    torch's optimizer inside Megatron's; hooks stand in the model only while somebody hears them. Losses, norm and skipped steps are
    Megatron's own, the loss under `loss`, and `ctx.model` is the list of chunks, or the only one, out of their wrappers.

    A stop that a callback asks for lowers `cfg.train.train_iters` until training is over; a save sets `cfg.checkpoint.save_interval` to
    1 for one step. An evaluation cannot be asked for: Megatron counts out its validation data beforehand. The callbacks' states are
    written into its checkpoints when they are durable, and read where training goes on from one.

    Megatron tells no exceptions, and leaves by `sys.exit` on a signal: such a run ends when the host is forgotten or the program ends.
    In a `with` block it ends there, and is told as it is:

        with host([...]) as hosted:
            pretrain(config, forward_step, callbacks=[hosted])

    Args:
        strict: whether it is an error that somebody hears an event which is not told; else a warning.
        lock_timeout_seconds: how long to wait if another process trains in the run's folder; then `RunInUseError` is raised.

    Raises:
        NotSupported: when training begins, or after the first step; see `strict`.
    """
    return MegatronBridgeHost(callbacks, strict=strict, lock_timeout_seconds=lock_timeout_seconds)


def guest(
    foreign: Any, *, name: str = "", phase: str = "measure", strict: bool = True, config: Any = None
) -> MegatronBridgeGuest:
    """A callback of Megatron Bridge, a list of them, or a manager, as one callback of callsheet.

    They are told in their own order, each event in a context of its own, with the step as Megatron counts it; several guests of a run are
    given the same context, as the callbacks of one manager are, and share its `user_state`. A manager keeps its own. What they may read is
    `context.state` with `train_state`, `timers` and `cfg`; how they may drive is what ends training at home: `train_state.step` or
    `cfg.train.train_iters`, set so that the one is not below the other.

    Args:
        name: under which state is kept; else that of the callback's class, or of the manager's.
        phase: where all of them stand in each event's order.
        strict: whether it is an error that one hears an event which is never told here; else a warning.
        config: what they find at `context.state.cfg`; it has to have `train.train_iters`. None shows that alone.

    Raises:
        NotSupported: with `strict`; also where a callback asks for what is not here, when it does.
    """
    state = GlobalState(config) if config is not None else None
    return MegatronBridgeGuest(foreign, name=name, phase=phase, strict=strict, state=state)


def _told(method: Callable[[MegatronBridgeHost, HostedRun, Any], None]) -> Callable[[MegatronBridgeHost, CallbackContext], None]:
    """Called as Megatron calls it, and given the run, which begins with the first event. An error ends it; see `GivesUp._leave`."""

    @functools.wraps(method)
    def told(self: MegatronBridgeHost, context: CallbackContext) -> None:
        if self._has_given_up:
            return
        try:
            method(self, self._run or self._begin(context), context)
        except BaseException as error:
            self._leave(error)

    return told


class MegatronBridgeHost(GivesUp):
    """See `host`. Not of Megatron's base class: its manager takes what has methods of these names, and need not be there."""

    def __init__(
        self, callbacks: CallbackManager | Callback | Iterable[Callback] | None, *, strict: bool, lock_timeout_seconds: float
    ) -> None:
        self.manager = normalize_callbacks(callbacks) or CallbackManager()
        self._strict = strict
        self._lock_timeout_seconds = lock_timeout_seconds
        self._run: HostedRun | None = None
        self._has_trained = False  # in the run in hand
        if any(self.manager.list_callbacks(event) for event in ("on_data_init_start", "on_data_init_end")):
            self.on_data_init_start = self._on_data_init_start  # with it, Megatron refuses to count in epochs

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
            lock_timeout_seconds=self._lock_timeout_seconds,
        )
        samples = settings.get("train.global_batch_size") or 0
        tokens = samples * (settings.get("model.seq_length") or 0)
        run.counted = (samples, tokens) if run.ctx.run.rank == 0 else (0, 0)  # the ranks' counts are added up, and each is of all
        run.losses = lambda: settings.loss
        run.checkpoints.loads = functools.partial(load_states, run, settings)
        self._is_pipelined = len(chunks) > 1 or (settings.get("model.pipeline_model_parallel_size") or 1) > 1
        self._is_due_fired = self._is_checked = self._has_trained = self._listens_to_forward = False
        self._states: dict[int, Any] = {}  # of steps whose checkpoints are still being written
        run.fails_by(self._leave)
        self._forward = ForwardHooks(run, chunks[0])
        self._steps = OptimizerHooks(run.driver, *torch_optimizers(context.optimizer), asks=False)
        self._ends = weakref.finalize(self, _end, run, settings, self._forward, self._steps)
        run.reject(_never_told(), strict=self._strict, logger=logger)
        run.begin(data_is_made=data_is_made)
        return run

    @observing
    def _on_data_init_start(self, context: CallbackContext) -> None:
        """Begin a run; the data is about to be made."""
        self._release()  # of one that an exception had left
        self._has_trained = self._has_given_up = False
        self._begin(context, data_is_made=False)

    def on_train_start(self, context: CallbackContext) -> None:
        """Begin a run, if it has not begun."""
        if self._has_trained:  # the run in hand was left by an exception
            self._release()
            self._has_given_up = False
        self._start(context)
        self._has_trained = True

    @_told
    def _start(self, run: HostedRun, context: Any) -> None:
        self._settings.is_training = True
        run.driver.start("round")
        self._stop_if_asked(run)

    @_told
    def on_train_end(self, run: HostedRun, context: Any) -> None:
        """Training is over; a validation and a test may follow."""
        settings = self._settings
        settings.restore()
        settings.is_training = False
        self._forward.listen(False)
        run.finish_training()
        if settings.is_last("do_valid", "do_test"):
            self._release()

    def _fail(self, error: BaseException) -> None:
        if self._run is not None:
            self._run.fail(error)
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

    @_told
    def on_train_step_start(self, run: HostedRun, context: Any) -> None:
        """A step begins; it is told with its first forward, where somebody hears that or the data being fetched."""
        settings, driver = self._settings, run.driver
        if not settings.is_training:  # it is over
            return
        interval, step = settings.save_interval, settings.step
        settings.restore_interval()
        settings.loss = None
        if step is not None and step != run.state.timestamp.batch:
            move(run, step)  # over iterations that are left out
        if step and interval and step % interval == 0 and settings.get("checkpoint.async_save"):
            self._states[step] = copy.deepcopy(own_state(run))  # of the checkpoint that is being written
        if driver.listen():
            self._listens_to_step = driver.has_listeners
            self._listens_to_forward = self._listens_to_step and not self._is_pipelined
            self._forward.listen(self._listens_to_forward)
            self._steps.listen(self._listens_to_step)
        self._forward.in_step = self._listens_to_forward
        if not self._listens_to_forward:
            driver.start_step()
        if not self._listens_to_step and driver.is_read:
            driver.start("optimizer_step")  # notes the learning rate that the step will use

    @_told
    def on_train_step_end(self, run: HostedRun, context: Any) -> None:
        """The parameters have moved, and the scheduler."""
        settings, driver = self._settings, run.driver
        if not settings.is_training:  # it is over
            return
        self._forward.in_step = False
        if not driver.parts["train_step"].is_open:
            driver.synthesized.add("fetch")
            driver.tell("fetch")
            driver.start_step()
        settings.loss, run.other_losses = _losses(context.loss_dict or {})
        run.step_skipped = bool(context.skipped_iter)
        if run.step_skipped and driver.is_read:  # torch's optimizer was not called
            driver.tell("clip_gradients")
            driver.tell("optimizer_step")
        norm = context.grad_norm
        if run.spans.train_step.ends is not None:  # somebody hears it
            run.grad_norm = norm if norm is None or isinstance(norm, Tensor) else torch.scalar_tensor(norm)
        if norm is not None and run.manager.has_listeners.on_log:
            run.records.metrics.log({"train/grad_norm": norm}, over="mean", across="same")
        run.end_step()
        if self._is_pipelined:
            run.records.last_loss = None  # only the last stage has one, and its mean would be asked of all ranks
        self._is_due_fired = True
        if not self._is_checked and not run.step_skipped:
            self._is_checked = True
            run.check_supported(strict=self._strict, logger=logger)
        if run.control.pending:
            self._stop_if_asked(run, ahead=1)  # Megatron counts the step after this

    def _stop_if_asked(self, run: HostedRun, *, ahead: int = 0) -> None:
        if run.control.stop_requested is not None:
            self._settings.stop(ahead)

    # --- evaluations and tests ---

    @_told
    def on_eval_start(self, run: HostedRun, context: Any) -> None:
        """A validation begins."""
        run.driver.end("data_init")
        run.begin_evaluation("validation", standalone=not self._settings.is_training)
        self._judge(run, "eval")

    @_told
    def on_eval_step_start(self, run: HostedRun, context: Any) -> None:
        """A global batch of it."""
        run.eval_driver.start("eval_step")

    @_told
    def on_eval_step_end(self, run: HostedRun, context: Any) -> None:
        """It is through."""
        run.eval_driver.end("eval_step")

    @_told
    def on_eval_end(self, run: HostedRun, context: Any) -> None:
        """The validation is over."""
        self._end_judging()
        run.end_dataset("validation", self._found(run, context))
        run.end_evaluation()
        run.records.tally.settle(run.state)
        run.records.tell(run.ctx)
        if self._settings.is_training:
            run.boundaries.fire_checkpoint_due("step")
            self._stop_if_asked(run)
        elif self._settings.is_last("do_test"):
            self._release()

    @_told
    def on_test_start(self, run: HostedRun, context: Any) -> None:
        """A test begins."""
        run.driver.end("data_init")
        run.eval_ctx.step, run.eval_ctx.epoch = run.ctx.step, run.ctx.epoch
        run.eval_driver.start("test")
        self._judge(run, "test")

    @_told
    def on_test_step_start(self, run: HostedRun, context: Any) -> None:
        """A global batch of it."""
        run.eval_driver.start("test_step")

    @_told
    def on_test_step_end(self, run: HostedRun, context: Any) -> None:
        """It is through."""
        run.eval_driver.end("test_step")

    @_told
    def on_test_end(self, run: HostedRun, context: Any) -> None:
        """The test is over, and the run with it."""
        self._end_judging()
        ctx = run.eval_ctx
        found = self._found(run, context)
        ctx.eval_losses = {name: torch.tensor(value) for name, value in found.items()}
        ctx.log({f"test/{name}": value for name, value in found.items()}, across="same")
        run.eval_driver.end("test")
        run.records.tell(run.ctx)
        if not self._settings.is_training:
            self._release()

    def _judge(self, run: HostedRun, kind: str) -> None:
        has_listeners = run.listens_to_outputs(kind) and not self._is_pipelined
        self._forward.listen(has_listeners or self._settings.is_training)
        self._forward.judging = kind if has_listeners else ""

    def _end_judging(self) -> None:
        self._forward.judging = ""
        self._forward.listen(self._listens_to_forward and self._settings.is_training)

    def _found(self, run: HostedRun, context: Any) -> dict[str, float]:
        """The losses; with pipelining the last stage alone has them, and all ranks have to hear the same."""
        loss, others = _losses(context.total_loss_dict or {})
        found = {name: float(value) for name, value in {"loss": loss, **others}.items() if value is not None}
        return next(filter(None, run.world.gather(found)), {}) if self._is_pipelined else found

    # --- checkpoints ---

    @_told
    def on_checkpoint_save(self, run: HostedRun, context: Any) -> None:
        """A checkpoint is durable: add the callbacks' states to it. One that was written in the background is of an earlier step."""
        settings = self._settings
        settings.restore_interval()
        now = run.state.timestamp.batch
        step = run.world.of_rank_zero(settings.saved_step() or now)
        if not self._is_due_fired:
            run.boundaries.fire_checkpoint_due("step")
        path = Path(settings.get("checkpoint.save")) / f"iter_{step:07d}"
        states = self._states.pop(step, None) if step != now else own_state(run)
        if states is None:
            logger.warning("%s: the callbacks' states of step %d are no longer there", path, step)
        run.fire_checkpoint(
            str(path), lambda info: write_states(run, path, info, states) if states is not None else None, step=step
        )
        self._is_due_fired = False


def _end(run: HostedRun, settings: Settings, forward: ForwardHooks, steps: OptimizerHooks) -> None:
    """Also when the program ends, or the host is forgotten: then training was left by an exception, or by a signal."""
    settings.restore()
    forward.remove()
    steps.remove()
    if settings.was_preempted():
        run.lifetime.end(Outcome.PREEMPTED)
    else:
        run.lifetime.end(Outcome.FAILED if settings.is_training else None)


def _never_told() -> tuple[str, ...]:
    """A release that is loaded may be one that tells of no checkpoints."""
    package = sys.modules.get(MODULE)
    if package is None or "on_checkpoint_save" in package.VALID_EVENTS:
        return NOT_FIRED
    return (*NOT_FIRED, *HOST_EVENTS["on_checkpoint_save"])


_WRAPPERS = frozenset({"DistributedDataParallel", "FullyShardedDataParallel", "Float16Module"})


def _inner(chunk: Any) -> Any:
    """The model itself, out of Megatron's wrappers."""
    while type(chunk).__name__ in _WRAPPERS and hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def _losses(given: Mapping[str, Any]) -> tuple[Tensor | None, dict[str, Any]]:
    """The loss, Megatron's `lm loss` or the first there is, and the others."""
    if len(given) == 1:  # as it mostly is
        return next(iter(given.values())), {}
    name = LM_LOSS if LM_LOSS in given else next(iter(given), None)
    others = {other.replace(" ", "_"): value for other, value in given.items() if other != name}
    return (given[name] if name is not None else None), others
