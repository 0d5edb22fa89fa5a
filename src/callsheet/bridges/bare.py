"""The bare bridge: run callbacks in a training loop that is written by hand, with three more lines."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from signal import Signals
from time import perf_counter
from types import TracebackType
from typing import Any, Never, Self

from callsheet.core.optional import needed_by

with needed_by("callsheet.attach"):
    from torch import nn
    from torch.optim import Optimizer

from callsheet.bridges.data_position import DataPosition
from callsheet.bridges.giving_up import give_up
from callsheet.bridges.host_parts import Evaluates
from callsheet.bridges.hosted_run import HostedRun
from callsheet.bridges.support_check import SupportCheck
from callsheet.bridges.torch_hooks import BackwardWatch, ForwardHooks, OptimizerHooks
from callsheet.bridges.versions import check_versions
from callsheet.core.callback import Callback
from callsheet.core.callbacks_argument import manager_of
from callsheet.core.context import NO_VALUES, Context
from callsheet.core.familiar_names import TRAINER_ARGUMENTS
from callsheet.core.manager import CallbackManager
from callsheet.core.run_state import Outcome
from callsheet.core.time import Time, TimeUnit
from callsheet.errors import ConfigError, RequestRejected, mark_as_users, names_unknown
from callsheet.run.lifetime import stop_reason
from callsheet.run.run_lock import LOCK_TIMEOUT_SECONDS
from callsheet.run.run_names import check_run_name
from callsheet.trainer.tasks import counts_of

logger = logging.getLogger("callsheet")

_SHARED = ("gradient_accumulation_steps", "max_duration", "log_interval", "loggers", "resume", "callbacks", "scheduler")
"""Arguments of the Trainer that `attach` has too."""

_OF_EVALUATION = ("eval_interval", "eval_dataloader")
"""Arguments of the Trainer about evaluations, which `attach` does not have."""
_EVALUATION = (
    "the results of each evaluation that the loop makes to run.evaluated({'validation': {'loss': ...}}); evaluate=FUNCTION makes those that "
    "callbacks ask for"
)
"""What to use in `attach` instead of the arguments in `_OF_EVALUATION`, for error messages."""


def _familiar() -> dict[str, str]:
    """Return a hint for each argument that users know from other frameworks or the Trainer: what to use in `attach` instead."""
    of_evaluation = {name: _EVALUATION for name, meant in TRAINER_ARGUMENTS.items() if meant.startswith(_OF_EVALUATION)}
    shared = {name: meant for name, meant in TRAINER_ARGUMENTS.items() if meant.partition("=")[0] in _SHARED}
    return shared | of_evaluation | dict.fromkeys(_OF_EVALUATION, _EVALUATION)


@names_unknown(_familiar)
def attach(
    *,
    model: nn.Module,
    optimizer: Optimizer,
    callbacks: CallbackManager | Callback | Iterable[Callback] | None = None,
    loggers: Iterable[Callback] | None = None,
    scheduler: Any = None,
    gradient_accumulation_steps: int = 1,
    scaler: Any = None,
    max_duration: str | Time | None = None,
    log_interval: str | int | Time = "10ba",
    run_name: str | None = None,
    runs_folder: str | os.PathLike[str] = "runs",
    resume: str | os.PathLike[str] | None = None,
    evaluate: Evaluates | None = None,
    config: Mapping[str, Any] | None = None,
    save_in_background: bool = False,
    preempt_signals: Iterable[str] = ("SIGTERM",),
    timeout_seconds: float = 600.0,
    lock_timeout_seconds: float = LOCK_TIMEOUT_SECONDS,
    strict: bool = True,
) -> AttachedRun:
    """Attach callbacks to a training loop written by hand, which then iterates over the `steps` of the returned run.

    Hooks observe the forward pass in the model, the loss in `backward()`, and the step in the optimizer. The gradient norm is not
    observed. The loss of a step is the sum of the losses on which `backward()` was called.

    Args:
        model: the model that the loop calls. With DDP, callbacks see the module inside the wrapper.
        optimizer: the optimizer that the loop steps. In a wrapper such as fastai's OptimWrapper, torch's optimizer inside is observed.
        callbacks: a manager, a callback, or any iterable of callbacks.
        loggers: more callbacks, called after the others in the phase `report`.
        scheduler: the scheduler to save in checkpoints and to show to callbacks. The loop steps it.
        gradient_accumulation_steps: how many batches the loop uses for one optimizer step. All of them are fetched before the step.
        scaler: the `torch.amp.GradScaler` that scales the loss.
        max_duration: how long to train, such as `"2ep"`. `run.steps` ends then. None: until the loop ends.
        log_interval: how often a metrics record is made. A bare number means batches.
        run_name, runs_folder: the run's name, and the folder that contains the run's folder, in which checkpoints are saved.
        resume: `"auto"` for the newest valid checkpoint of this run, if there is one; a path for that checkpoint; None for a new run.
        evaluate: called without arguments when a callback asks for an evaluation. It returns the results by dataset name, such as
            `{"validation": {"loss": 1.2}}`.
        config: the loop's settings, stored with the run.
        save_in_background: whether to copy the state and write the copy while training continues.
        preempt_signals: the signals that make the run save a checkpoint and end as preempted.
        timeout_seconds: the run fails if a rank does not answer for this long.
        lock_timeout_seconds: how long to wait while another process trains in the run's folder; then `RunInUseError` is raised.
        strict: whether to raise an error if a callback listens to an event that the loop does not fire; else log a warning.

    Returns:
        The run, a context manager. Inside its `with` block, iterate over `run.steps(batches)`. When the block ends, the run ends.

    Raises:
        ConfigError: an argument is invalid.
        NotSupported: raised at the end of the first step; see `strict`.

    Examples:
        >>> import torch
        >>> from callsheet.callbacks import History
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> data = [(torch.randn(4, 2), torch.randn(4, 1))] * 3
        >>> with attach(model=model, optimizer=optimizer, callbacks=[history := History()], log_interval=1) as run:
        ...     for inputs, targets in run.steps(data):
        ...         loss = torch.nn.functional.mse_loss(model(inputs), targets)
        ...         loss.backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        >>> len(history["train/loss"])
        3
    """
    check_accumulation(gradient_accumulation_steps)
    manager = manager_of(callbacks)
    manager.add(loggers or ())
    check_model(model)
    optimizer = torch_optimizer(optimizer)
    check_run_name(run_name, resume)
    check_versions()
    return AttachedRun(
        HostedRun(
            manager,
            model=getattr(model, "module", model) if type(model).__name__ == "DistributedDataParallel" else model,
            optimizer=optimizer,
            scheduler=scheduler,
            run_name=run_name,
            runs_folder=runs_folder,
            config=config,
            max_duration=max_duration,
            log_interval=log_interval,
            evaluates=evaluate,
            signals=("SIGINT", *preempt_signals),
            save_in_background=save_in_background,
            timeout_seconds=timeout_seconds,
            lock_timeout_seconds=lock_timeout_seconds,
        ),
        model,
        optimizer,
        gradient_accumulation_steps=gradient_accumulation_steps,
        scaler=scaler,
        resume=os.fspath(resume) if resume is not None else None,
        strict=strict,
    )


def check_accumulation(steps: Any) -> None:
    """Raise ConfigError if `gradient_accumulation_steps=` is not a whole number above 0."""
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ConfigError(f"gradient_accumulation_steps={steps!r}: give a whole number above 0")


def check_model(model: Any) -> None:
    """Raise ConfigError if `model` is not a `torch.nn.Module`."""
    if isinstance(model, nn.Module):
        return
    if isinstance(model, type):
        raise ConfigError(
            f"model= is the class {model.__name__}, and not a model. Give the model that the loop trains, such as {model.__name__}(...)"
        )
    if isinstance(model, (list, tuple, set, Mapping)):
        raise ConfigError(
            f"model= is a {type(model).__name__} of {len(model)}, and callbacks observe one model with one optimizer. Give the model whose "
            "forward and loss callbacks should see. To observe several models as one, give a torch.nn.Module whose forward calls them"
        )
    parts = [f"model=model.{name}" for name, value in _attributes(model) if isinstance(value, nn.Module)]
    raise ConfigError(
        f"model= is a {type(model).__name__}, which is not a torch.nn.Module. Give the module that the loop trains"
        + (f": {' or '.join(parts)}" if parts else "")
    )


def torch_optimizer(optimizer: Any) -> Optimizer:
    """Return the `torch.optim.Optimizer` that the loop steps: `optimizer`, or the one inside a wrapper such as fastai's OptimWrapper.

    Raises:
        ConfigError: there is no such optimizer, or several.
    """
    if isinstance(optimizer, type):
        made = f"{optimizer.__name__}(model.parameters(), lr=0.1)"
        raise ConfigError(
            f"optimizer= is the class {optimizer.__name__}, and not an optimizer. Give the optimizer that the loop steps, such as {made}"
        )
    if hasattr(optimizer, "register_step_post_hook"):
        return optimizer  # type: ignore[no-any-return]
    if isinstance(optimizer, (list, tuple, set, Mapping)):
        raise ConfigError(
            f"optimizer= is a {type(optimizer).__name__} of {len(optimizer)}, and callbacks observe one model with one optimizer. Give the one "
            "that the loop steps last: callbacks see its step"
        )
    inside = [value for _, value in _attributes(optimizer) if isinstance(value, Optimizer)]
    if len(inside) == 1:
        return inside[0]
    raise ConfigError(
        f"optimizer= is a {type(optimizer).__name__}, which is not a torch.optim.Optimizer, so that its steps cannot be observed. Give the "
        "torch.optim.Optimizer that the loop steps; with fastai, train with OptimWrapper(opt=torch.optim.AdamW) and give that"
    )


def _attributes(thing: Any) -> list[tuple[str, Any]]:
    return list(getattr(thing, "__dict__", {}).items())


class AttachedRun:
    """The run that `attach` returns. The loop iterates over `steps`, which fires the events around each batch."""

    def __init__(
        self,
        run: HostedRun,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        gradient_accumulation_steps: int,
        scaler: Any,
        resume: str | None,
        strict: bool,
    ) -> None:
        self._run = run
        self._model = model
        self._optimizer = optimizer
        self._batches_per_step = gradient_accumulation_steps
        self._scaler = scaler
        self._resume = resume
        self._support = SupportCheck(run.manager, run.host, strict=strict)
        self._position = DataPosition()
        run.parts["place"] = self._position
        self._is_over = False
        self._is_end_logged = False  # whether a warning has said that training has ended, or that it was complete before it began
        self._counts_epochs = False  # whether the loop iterates over `epochs()`
        self._is_iterating = False
        self._is_checked = False
        self._listens_to_fetch = self._listens_to_microbatch = True
        self._hooks: list[ForwardHooks | OptimizerHooks | BackwardWatch] = []
        self._backward: Any = None  # a BackwardWatch, set within the `with` block
        self._has_given_up = False
        self._was_in_step = False  # whether the loop was in a step when an error in callsheet ended the run
        self._epoch: int | None = None  # the epoch of the last call of `steps`
        self._group: list[Any] = []  # the batches of the current step
        run.fails_by(self._give_up)
        self._support.before_run((), run.control)

    @property
    def ctx(self) -> Context:
        """The context that the callbacks receive."""
        return self._run.ctx

    @property
    def is_over(self) -> bool:
        """Whether training has reached its duration, was stopped by a callback, or is preempted.

        In these cases `steps` yields no more batches.
        """
        return self._is_over

    @property
    def preempted(self) -> bool:
        """Whether a signal other than Ctrl-C has preempted the run.

        A checkpoint was saved if a callback or the signal requested it.
        """
        return self._run.lifetime.outcome is Outcome.PREEMPTED

    def log(self, values: Mapping[str, Any] = NO_VALUES, *misplaced: Never, **options: Any) -> None:
        """Log numbers for the next metrics record; see `Context.log`."""
        if not self._has_given_up:
            self._run.ctx.log(values, *misplaced, **options)

    def evaluated(self, results: Mapping[str, Mapping[str, Any]]) -> None:
        """Fire the start and end events of an evaluation, after the loop has carried it out.

        `results` are the metrics by dataset name: `{"validation": {"loss": 1.2}}`.
        """
        if not isinstance(results, Mapping):
            raise ConfigError(
                f"evaluated({str(results)[:40]}): give the results by dataset name, such as {{'validation': {{'loss': 1.2}}}}"
            )
        if odd := next((name for name, found in results.items() if not isinstance(found, Mapping)), None):
            raise ConfigError(
                f"evaluated({{{odd!r}: ...}}): give the results by dataset name, such as {{'validation': {{'loss': 1.2}}}}"
            )
        if self._has_given_up:
            return
        if self._is_iterating:
            made = self._run.made
            for name, found in results.items():
                made[name] = {**made.get(name, {}), **found}
            return
        try:
            self._close_epoch(continues=True)
            if not self._run.eval.order.allows("E"):
                self._reject_evaluation()
                return
            self._is_over |= self._run.evaluated(results)
        except Exception as error:
            self._give_up(error)

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the index of each epoch, from 0 to `count - 1`. A resumed run leaves out the epochs that are complete."""
        if not hasattr(count, "__index__"):
            raise ConfigError(f"epochs({count!r}): give the number of epochs, a whole number")
        self._counts_epochs = True
        state = self._run.state
        is_resumed = self._epoch is None and state.baseline.batch > 0
        if is_resumed and not self._is_over and state.timestamp.epoch >= count:
            self._log_complete(f"all {count} epochs of run.epochs({count}) are done", f"run.epochs a number above {count}")
        while not self._is_over and state.timestamp.epoch < count:
            epoch = state.timestamp.epoch
            yield epoch
            if state.timestamp.epoch == epoch:
                if self._run.ctx.step == state.baseline.batch and not self._has_given_up:
                    raise RequestRejected(
                        "an epoch of run.epochs() has ended without a step: take its batches from run.steps(dataloader)"
                    )
                return  # only an epoch that the loop has left with `break` is not counted here

    def steps(self, dataloader: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches of one epoch.

        The loop trains on each before it requests the next. A resumed run leaves out the batches that it has trained on.

        Raises:
            RequestRejected: this is called inside another call of `steps`, or outside the `with` block.
        """
        if self._is_iterating:
            raise RequestRejected("steps() inside steps(): an epoch has to end before the next begins")
        if not self._hooks and not self._has_given_up:
            raise RequestRejected("steps() before the run has begun: write `with callsheet.attach(...) as run:` around the loop")
        if not self._begin_epoch():
            return
        run, driver, ctx, position, watch = self._run, self._run.driver, self._run.ctx, self._position, self._backward
        batches: Iterator[Any] | None = None
        self._is_iterating = True
        given = 0  # how many batches of the current step the loop has received
        try:
            if not self._has_given_up:
                self._is_over = run.finish_undone("epoch", position)
                if self._is_over:
                    return
                driver.start("epoch")
                batches = position.begin(dataloader, run.state.timestamp.epoch)
                self._is_over = run.finish_undone("step", position)
            while not self._is_over and not self._has_given_up:
                given = 0
                group = self._fetched(batches)  # type: ignore[arg-type]
                if not group:
                    break
                driver.start_step()
                run.counted = counts_of(group[0])
                for batch in group[1:]:
                    samples, tokens = counts_of(batch)
                    run.counted = (run.counted[0] + samples, run.counted[1] + tokens)
                self._optimizer_hooks.has_stepped, watch.total = False, None
                watch.is_on, has_listeners = True, self._listens_to_microbatch
                position.taken += len(group)  # counted before the loop gets the batches, since the loop may leave with `break`
                for batch in group:
                    ctx.batch = batch
                    if has_listeners:
                        ctx.microbatch = batch
                        driver.start("microbatch")
                        batch = ctx.microbatch
                        given += 1
                        yield batch
                        driver.end("microbatch")
                    else:
                        given += 1
                        yield batch
                    if self._has_given_up:
                        break  # type: ignore[unreachable]  # a hook may have called `_give_up` after an error
                else:
                    watch.is_on = False
                    self._end_step()
            if not self._has_given_up:
                if is_whole := position.is_at_end:
                    position.end()
                self._is_over |= run.end_epoch(is_whole=is_whole)
        except Exception as error:
            self._give_up(error)
        finally:
            self._is_iterating = False
        if self._has_given_up and not self._is_over:
            if batches is None:
                batches = position.begin_unobserved(dataloader, run.state.timestamp.epoch)
            yield from self._remaining(batches, self._group, given)

    def _begin_epoch(self) -> bool:
        """Begin the next epoch and return True, or return False if training is over."""
        state = self._run.state
        if self.is_over:
            self._log_over()
            return False
        if self._epoch is None and state.baseline.epoch and not self._counts_epochs and state.max_duration is None:
            self._warn(
                f"the run was resumed after {state.baseline.epoch} complete epoch{'s' * (state.baseline.epoch > 1)}. A loop "
                "`for epoch in range(n):` does not leave these out, and trains too long: write `for epoch in run.epochs(n):`"
            )
        if not self._has_given_up:
            try:
                self._close_epoch(continues=True)
            except Exception as error:
                self._give_up(error)
        if self._has_given_up:
            self._count_epoch()  # if the loop has left the last epoch with `break`, it is not counted yet
            self._group = []
            if self._is_over:
                return False
        self._epoch = state.timestamp.epoch
        return True

    def _log_complete(self, why: str, longer: str) -> None:
        """Log a warning that nothing is trained, because the resumed run was already complete."""
        run, self._is_end_logged = self._run.ctx.run, True
        self._warn(
            f"{run.folder or run.name} is complete at step {self._run.ctx.step}: {why}, and no further step is taken. To train longer, give "
            f"{longer}. To train from the start, leave out resume= and give another run_name"
        )

    def _log_over(self) -> None:
        """Log a warning that `steps` yields nothing because training has ended. Do so only once."""
        if self._is_end_logged:
            return
        self._is_end_logged = True
        run = self._run
        stop, received = run.control.stop_requested, run.agreement.signal
        if stop is not None:
            why = stop_reason(stop)
        else:
            why = f"signal {received.name}" if received is not None else f"reached max_duration, {run.state.max_duration}"
        self._warn(
            f"training has ended at step {run.ctx.step} ({why}), so run.steps() yields no more batches, but the loop around it continues. Write "
            "`for epoch in run.epochs(n):` instead of `for epoch in range(n):`, or leave the loop if run.is_over"
        )

    def _reject_evaluation(self) -> None:
        """Log a warning that the results of an evaluation are ignored. After a warning that training has ended, do nothing."""
        if not self._is_end_logged:
            self._warn(
                "run.evaluated() was called a second time without a training step in between, so its results are ignored. Give the results of "
                "all datasets in one call: run.evaluated({'validation': {...}, 'test': {...}})"
            )

    def _warn(self, message: str) -> None:
        if self._run.ctx.run.is_world_process_zero:
            self._run.driver.warn_once(message)

    def _remaining(self, batches: Iterator[Any], group: list[Any], given: int) -> Iterator[Any]:
        """Yield the epoch's remaining batches without firing events, because an error in callsheet has ended the run.

        Only steps and epochs are counted, so that training still ends at `max_duration`.
        """
        state, was_in_step, self._was_in_step = self._run.state, self._was_in_step, False
        waiting = group[given:]
        if not was_in_step and not waiting:
            given = 0
        elif given and self._ends_step(given):
            given = 0
            self._count_step()
        for batch in chain(waiting, batches):
            if self._is_over:
                return
            began = perf_counter()
            given += 1
            yield batch
            samples, tokens = counts_of(batch) if self._counts_samples else (0, 0)
            ranks = self._run.ctx.run.world_size
            spent = perf_counter() - began
            state.timestamp = state.timestamp.with_counts(samples=samples * ranks, tokens=tokens * ranks, seconds=spent)
            if self._ends_step(given):
                given = 0
                self._count_step()
        if given:
            self._count_step()
        self._count_epoch()
        self._position.end()

    @property
    def _counts_samples(self) -> bool:
        longest = self._run.state.max_duration
        return longest is not None and longest.unit in (TimeUnit.SAMPLE, TimeUnit.TOKEN)

    def _ends_step(self, given: int) -> bool:
        """Return whether the step is complete after `given` of its batches."""
        return given >= self._batches_per_step

    def _count_step(self) -> None:
        state = self._run.state
        state.timestamp = state.timestamp.next_batch()
        self._is_over |= state.is_complete

    def _count_epoch(self) -> None:
        """Count the epoch that the last call of `steps` began, unless it has been counted already."""
        state = self._run.state
        if state.timestamp.epoch == self._epoch:
            state.timestamp = state.timestamp.next_epoch()
            self._is_over |= state.is_complete

    def _give_up(self, error: Exception) -> None:
        """End the run because of an error in callsheet itself, not in the user's code. Training continues without callbacks."""
        if self._has_given_up:  # the run has already ended because of an earlier error
            raise error
        run = self._run
        was_in_step = run.driver.is_open("train_step")
        give_up(run, error)  # raises the error if it comes from the user's code
        self._has_given_up, self._was_in_step = True, was_in_step
        # If a signal was received, end the loop here, because the run that handles signals has ended.
        self._is_over |= run.signals.received is not None
        self._release()

    def _release(self) -> None:
        self._run.signals.__exit__(None, None, None)
        for hook in self._hooks:
            hook.remove()

    def _fetched(self, batches: Iterator[Any]) -> list[Any]:
        """Fetch the batches of a step: `gradient_accumulation_steps` of them, or fewer at the end of the epoch."""
        driver, ctx = self._run.driver, self._run.ctx
        group = self._group = []
        if driver.listen():
            self._listens_to_fetch, self._listens_to_microbatch = driver.listens_to("fetch"), driver.listens_to("microbatch")
            self._model_hooks.listen(self._listens_to_microbatch)
            self._optimizer_hooks.listen(driver.is_read)
        has_listeners = self._listens_to_fetch
        for _ in range(self._batches_per_step):
            if has_listeners:
                driver.start("fetch")
            try:
                ctx.batch = batch = next(batches, None)
            except Exception as error:
                mark_as_users(error)  # raise the error to the user, since training is impossible without data
                raise
            if batch is not None:
                group.append(batch)  # appended before `on_fetch_end`, so that the batch is not lost if a callback fails there
            if has_listeners:
                driver.end("fetch")
                if batch is not None:
                    group[-1] = ctx.batch
            if batch is None:
                self._position.is_exhausted = True
                break
        return group

    def _end_step(self) -> None:
        run = self._run
        run.step_skipped = not self._optimizer_hooks.has_stepped
        self._is_over = run.end_step()
        if not self._is_checked:
            self._is_checked = True
            self._check_first_step()

    def _check_first_step(self) -> None:
        run, batches = self._run, self._batches_per_step
        if not self._optimizer_hooks.has_stepped:
            self._support.without_optimizer_step(
                run.driver,
                is_scaled=self._scaler is not None,
                message=(
                    f"the loop has not stepped the optimizer in its first {f'{batches} batches' if batches > 1 else 'batch'}; set "
                    "gradient_accumulation_steps= to the number of batches of a step, and give attach the optimizer that the loop steps"
                ),
            )
        self._support.after_first_step(run.driver)

    def _close_epoch(self, *, continues: bool) -> None:
        """End a step and an epoch that the loop has left with `break`.

        `continues` says whether training may continue after them.
        """
        run = self._run
        if run.driver.is_open("train_step"):
            self._end_step()
        if run.driver.is_open("epoch"):
            if continues:
                self._reset_position()
            self._is_over = run.end_epoch(is_whole=continues) and (continues or self._is_over)

    def _reset_position(self) -> None:
        """Forget the position in the data, so that the next epoch begins with its first batch.

        This is called before the end of the epoch is handled, because a checkpoint may be written there.
        """
        self._position.end()

    def __enter__(self) -> Self:
        run = self._run
        run.is_busy = lambda: True  # no other run of this process may use the run's folder before the `with` block ends
        try:
            try:
                self._begin()
            except Exception as error:
                if self._resume is not None:  # if a resume was requested and fails, training must not start from the beginning
                    raise
                self._give_up(error)
        except BaseException as error:
            run.fail(error)
            self._release()
            raise
        self._is_over = run.boundaries.is_over
        if run.control.stop_requested is not None:
            self._is_end_logged = True  # `run.begin` has already logged which callback stopped the run before the resume
        elif run.state.is_complete and run.state.baseline.batch:
            self._log_complete(f"it has reached max_duration, {run.state.max_duration}", "a longer max_duration")
        return self

    def _begin(self) -> None:
        run = self._run
        run.begin(self._resume)
        self._model_hooks = ForwardHooks(run.driver, run.ctx, self._model)
        self._backward = BackwardWatch(run.driver, run.ctx, self._scaler)
        self._hooks = [self._model_hooks, self._backward]
        self._optimizer_hooks = OptimizerHooks(run.driver, self._optimizer, watch=self._backward)
        self._hooks.append(self._optimizer_hooks)
        run.losses = self._backward.reader
        run.signals.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None) -> None:
        run = self._run
        try:
            if error is not None:
                run.fail(error)
            else:
                try:
                    self._finish()
                except BaseException as raised:
                    run.fail(raised)
                    raise
        finally:
            self._release()
            self._position.release()
        is_interrupted = self._has_given_up and run.signals.received is Signals.SIGINT
        if error is None and (is_interrupted or run.lifetime.outcome is Outcome.INTERRUPTED):
            raise KeyboardInterrupt

    def _finish(self) -> None:
        if not self._has_given_up:
            if self._epoch is None and not (self._is_over or self._is_end_logged):
                logger.warning(
                    "callsheet.attach has observed no step: take the batches from run.steps(dataloader) within the `with` block"
                )
            try:
                self._close_epoch(continues=False)
                # A signal may have prevented an evaluation before the resume, and `finish` then runs it.
                with self._position.at_checkpoint():
                    self._run.finish()
            except Exception as error:
                self._give_up(error)
