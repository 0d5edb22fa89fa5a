"""The class `Run`, which assembles the parts of a run, both for the Trainer and for other frameworks' loops."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from callsheet.checkpoint import plain_copy
from callsheet.core.background import inner
from callsheet.core.context import Context
from callsheet.core.control import Control
from callsheet.core.manager import CallbackManager
from callsheet.core.ranks import Ranks
from callsheet.core.run_state import RunInfo, TrainState
from callsheet.core.spans import Spans
from callsheet.core.time import Interval
from callsheet.run.agreement import Agreement
from callsheet.run.boundaries import Boundaries
from callsheet.run.checkpoints import Checkpoints
from callsheet.run.lifetime import Lifetime
from callsheet.run.log_ranks import LogRanks
from callsheet.run.parts import CheckpointsPart, EvaluationPart, Stateful
from callsheet.run.process_groups import ProcessGroups
from callsheet.run.reasons import without_secrets
from callsheet.run.records import Records
from callsheet.run.run_guard import RunGuard
from callsheet.run.settings import settings_of
from callsheet.run.signals import GRACE_SECONDS, SignalWatch


def run_info(
    name: str,
    runs_folder: str | os.PathLike[str],
    ranks: Ranks,
    device: torch.device,
    config: Mapping[str, Any] | None = None,
    checkpoints_folder: str | os.PathLike[str] | None = None,
) -> RunInfo:
    """Return the `RunInfo` of a new run in `runs_folder/name`. An environment variable of torchrun has the restart count."""
    return RunInfo(
        name,
        config=dict(config or {}),
        folder=Path(runs_folder) / name,
        ranks=ranks,
        checkpoints=f"{os.fspath(checkpoints_folder).rstrip('/')}/{name}/checkpoints" if checkpoints_folder is not None else "",
        restart_count=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        device=str(device),
    )


class CallbackStates:
    """Saves and loads the states of all callbacks as one part of a checkpoint.

    The state of a callback whose errors do not end the run (it is isolated or has a lane) is copied and checked when it is read.
    If a checkpoint cannot hold such a state, the checkpoint is written without it, and the run continues.
    """

    def __init__(self, manager: CallbackManager) -> None:
        self._manager = manager

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all callbacks."""
        return self._manager.state_dict(copied=plain_copy)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the saved states into the callbacks."""
        self._manager.load_state_dict(state)


class Run:
    """The parts that every run has: context, records, agreement between ranks, lifetime, and the lock of the run's folder.

    `connect` adds the boundaries, once evaluation and checkpoints exist. After that, `load` resumes the run.

    Args:
        manager: the callbacks.
        info: the run's name, folder and ranks.
        model: the model as callbacks see it; None if the loop does not provide it.
        state: the progress of training.
        control: the requests of callbacks.
        signals: the signals that preempt the run.
        groups: the process groups.
        log_every: how often a metrics record is made.
        device: the model's device.
        log_ranks: which ranks print log lines.
        lock_timeout: seconds to wait if another process trains in the run's folder.
        is_busy: whether the loop may still be running. While it is, no other run of this process takes over the run's folder.
    """

    boundaries: Boundaries
    checkpoints: CheckpointsPart
    alive: ClassVar[weakref.WeakSet[Run]] = weakref.WeakSet()
    """All runs of this process that are still in memory."""
    CONTEXT: ClassVar[type[Context]] = Context
    """The class of the context that callbacks receive."""
    RECORDS: ClassVar[type[Records]] = Records
    """The class that makes the metrics records."""
    BOUNDARIES: ClassVar[type[Boundaries]] = Boundaries
    """The class that carries out what is due at the end of a step, an epoch or a round."""

    def __init__(
        self,
        manager: CallbackManager,
        info: RunInfo,
        *,
        model: nn.Module | None,
        state: TrainState,
        control: Control,
        signals: SignalWatch,
        groups: ProcessGroups,
        log_every: Interval,
        device: torch.device,
        log_ranks: LogRanks,
        lock_timeout: float,
        is_busy: Callable[[Lifetime], bool],
    ) -> None:
        Run.alive.add(self)
        self.manager = manager
        self.callback_states = CallbackStates(manager)
        self.state = state
        self.control = control
        self.signals = signals
        self.groups = groups
        self.log_ranks = log_ranks
        self.records = self.RECORDS(manager, log_every, device, groups)
        self.agreement = Agreement(groups, control, signals)
        self.ctx = ctx = self.CONTEXT(
            info,
            state=state,
            model=model,
            user_state=manager.user_state,
            control=control,
            accumulator=self.records.metrics,
            loggers=self._notify_loggers,
        )
        ctx.tally = self.records.tally
        self.lifetime = lifetime = Lifetime(manager, ctx)
        self.guard = RunGuard(groups, info, control, timeout=lock_timeout, is_busy=lambda: is_busy(lifetime))
        groups.at_step = lambda: ctx.step
        # The lifetime calls these functions in reverse order, so the lock of the run's folder is released last.
        for close in (self.guard.end, groups.close, self.agreement.end, log_ranks.end):
            lifetime.at_end(close)
        log_ranks.start()

    @property
    def has_writing_callbacks(self) -> bool:
        """Whether any callback writes to the run's folder."""
        return any(inner(each).writes_to_run_folder for each in self.manager.callbacks)

    def _notify_loggers(self, method: str, ctx: Context, /, **payload: Any) -> None:
        if method == "log_hyperparameters":
            payload = {"values": without_secrets(payload["values"])}
        self.manager.notify_loggers(method, ctx, **payload)

    def notify_loggers_of_settings(self, settings: Mapping[str, Any]) -> None:
        """Pass the configuration, the call sheet and the settings of the run to the loggers, without credentials."""
        if self.ctx.run.config:
            self.ctx.log_hyperparameters(self.ctx.run.config)
        self.manager.notify_loggers("log_call_sheet", self.ctx, sheet=str(self.manager.call_sheet()))
        self.manager.notify_loggers("log_settings", self.ctx, settings=settings)

    @cached_property
    def spans(self) -> Spans:
        """The spans that the loop uses to fire its events."""
        return self.manager.spans(self.ctx)

    def start(self, *, locks: bool) -> None:
        """Compile the table of all handlers for this run, and fire `on_run_start`. If `locks`, first lock the run's folder.

        Raises:
            RunInUseError: another process trains in the run's folder. The run is ended before the error is raised.
        """
        if locks:
            try:
                self.guard.acquire()
            except BaseException as error:
                self.lifetime.fail(error)  # closes what the run has opened; no event is fired, because the run has not started
                raise
        self.lifetime.start()

    def begin_training(self, *, marks: bool) -> None:
        """Begin to time handlers, and unmute those that are due. If `marks`, first mark the run's folder; see `RunGuard.begin`."""
        if marks:
            self.guard.begin()
        self.manager.between_steps(self.ctx.step)

    def connect(
        self,
        evaluation: EvaluationPart,
        checkpoints: CheckpointsPart | None = None,
        *,
        in_background: bool = False,
        grace: float = GRACE_SECONDS,
    ) -> None:
        """Create `self.boundaries`, which runs the evaluations and saves that are due, and set `self.checkpoints`.

        Args:
            evaluation: the loop's evaluation.
            checkpoints: writes checkpoints in the framework's format. None: callsheet writes them in its own format.
            in_background: whether callsheet writes checkpoints while training continues.
            grace: see `SignalWatch`.
        """
        if checkpoints is None:
            checkpoints = Checkpoints(
                self.manager, self.ctx, self.spans, self.groups, self.guard, in_background=in_background, grace=grace
            )
        self.checkpoints = checkpoints
        self.lifetime.at_end(checkpoints.close)
        self.agreement.durable = checkpoints.durable
        self.boundaries = self.BOUNDARIES(
            self.manager, self.ctx, self.lifetime, self.agreement, self.records, evaluation, checkpoints, self.guard
        )

    def load(
        self,
        shared: Mapping[str, Stateful],
        local: Mapping[str, Stateful],
        resume: str | os.PathLike[str] | None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """Load the checkpoint that `resume` names into the objects of the loop, such as the model and the optimizer.

        Args:
            shared: the parts that are the same on all ranks.
            local: the parts of which each rank has its own, such as random states.
            resume: `"auto"`, the path of a checkpoint, or None.
            options: the loop's own options, which are recorded with the run's settings.
        """
        self.checkpoints.shared, self.checkpoints.local = dict(shared), dict(local)
        # Read the settings now, because loading the checkpoint may change them, for example the learning rate.
        optimizer, scheduler = (getattr(shared.get(name), "part", None) for name in ("optimizer", "scheduler"))
        options = {"max_duration": self.state.max_duration, **(options or {})}
        settings = settings_of(self.ctx.model, optimizer, scheduler, self.manager.callbacks, options)
        self.checkpoints.load(resume)
        self.notify_loggers_of_settings(settings)
        self.ctx.step, self.ctx.epoch = self.state.timestamp.batch, self.state.timestamp.epoch
