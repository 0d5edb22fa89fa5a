"""Save and load the run's checkpoints, and fire the events for checkpoints."""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from callsheet.checkpoint import (
    AsyncWriter,
    Seal,
    all_finite,
    delete_later,
    flatten,
    point_latest,
    write_checkpoint,
)
from callsheet.checkpoint.disk_thread import finish_deletions
from callsheet.checkpoint.layout import LATEST
from callsheet.core.background import inner
from callsheet.core.callback import Callback, label_of
from callsheet.core.context import Context
from callsheet.core.control import SAVE_KINDS, Request
from callsheet.core.events import Event
from callsheet.core.manager import CallbackManager
from callsheet.core.run_state import CheckpointInfo
from callsheet.core.spans import Spans
from callsheet.errors import CheckpointError
from callsheet.run.parts import Stateful
from callsheet.run.process_groups import ProcessGroups
from callsheet.run.reasons import one_line
from callsheet.run.resumption import Resumption, checkpoints_folder, stop_conditions
from callsheet.run.run_guard import RunGuard, why_not_writable
from callsheet.run.typed_state import Typed

logger = logging.getLogger("callsheet")


class Checkpoints:
    """Saves and loads the run's checkpoints in `<run folder>/checkpoints`. All methods except `durable` are collectives.

    Args:
        in_background: whether to copy the state and write the copy while training continues.
        grace: seconds between a preemption signal and the process being killed.
    """

    def __init__(
        self,
        manager: CallbackManager,
        ctx: Context,
        spans: Spans,
        groups: ProcessGroups,
        guard: RunGuard,
        *,
        in_background: bool,
        grace: float,
    ) -> None:
        self.shared: dict[str, Stateful] = {}
        """The parts of a checkpoint that are the same on all ranks, or sharded over the ranks. They are loaded in this order."""
        self.local: dict[str, Stateful] = {}
        """The parts of a checkpoint that belong to one rank, such as its random states. They are loaded after the shared parts."""
        self.optional: set[str] = set()
        """The names of parts that a checkpoint of an earlier version may lack. Such a part then keeps its state."""
        self.loads: Callable[[], CheckpointInfo | None] | None = None
        """A function that `load` calls instead of loading a checkpoint, because another framework has loaded it.

        It is called once and then forgotten, because it may hold a reference to the host, whose garbage collection ends the run.
        """
        self.begun = 0
        """How many background saves this rank has begun."""
        self.stopped_by: Request | None = None
        """The request that ended training, which is stored in checkpoints that are saved afterwards."""
        self._manager = manager
        self._ctx = ctx
        self._spans = spans
        self._groups = groups
        self._guard = guard
        self._resumption = Resumption(manager, ctx, groups)
        self._writer = AsyncWriter(groups.saving) if in_background else None
        self._pending: CheckpointInfo | None = None  # the background save that is not yet published
        self._grace = grace
        self._is_slow = False  # whether a save has taken longer than `grace`; this is logged once
        self._began = 0.0  # when the background save began
        self._written: set[str] = set()  # the paths of the checkpoints that this process has written
        self._not_saved: set[str] = set()  # entries of `user_state` that no checkpoint can hold; each is logged only once
        self._prepare_at = sys.maxsize if self._writer is None else 0  # the step at which to allocate the writer's buffers
        self._prepare_again = 1  # number of steps until the next attempt to allocate the buffers; it doubles each time

    @property
    def folder(self) -> str:
        """The folder of the run's checkpoints: a path or a URL."""
        return checkpoints_folder(self._ctx)

    @property
    def is_writing(self) -> bool:
        """Whether a background save is in progress, or `on_checkpoint_published` has not been fired for it yet."""
        return self._pending is not None

    def check_writable(self) -> None:
        """Before training begins, check that the checkpoints' folder is writable, if a callback saves checkpoints regularly.

        Raises:
            CheckpointError: rank 0 cannot write to the checkpoints' folder. Raised on all ranks.
        """
        message = ""
        if self._groups.rank == 0 and "://" not in self.folder and self._manager.has_listeners.on_checkpoint_due:
            savers = dict.fromkeys(
                entry.registration.label
                for entry in self._manager.call_sheet().entries
                if entry.event == Event.CHECKPOINT_DUE and "save" in getattr(entry.registration.thing, "requests", ())
            )
            if savers and (why := why_not_writable(Path(self.folder))):
                message = (
                    f"cannot write to {self.folder} ({why}), where {' and '.join(savers)} would save checkpoints. Make the folder "
                    "writable, or choose another one with runs_folder"
                )
        if message := self._groups.of_rank_zero(message):
            raise CheckpointError(message)

    def durable(self) -> int:
        """Return how many background saves this rank has finished. This never waits."""
        return self.begun - (self._writer is not None and not self._writer.is_done)

    def save(
        self,
        requests: tuple[Request, ...],
        path: str | os.PathLike[str] | None,
        *,
        train_loss: float | None,
        val_losses: Mapping[str, float],
        waits: bool = False,
    ) -> CheckpointInfo:
        """Write one checkpoint for all `requests`, and fire the events for saving.

        `requests` is empty if the user called `Trainer.save_checkpoint`.

        A checkpoint with weights or a loss that are not finite is marked in its manifest, and automatic resume ignores it.

        Args:
            waits: write the checkpoint before returning, even if saves run in the background.

        Raises:
            CheckpointError: the checkpoint cannot be written, or a callback's state is not plain data.
        """
        ctx = self._ctx
        self.finish()
        finish_deletions()
        epoch, step = ctx.state.timestamp.epoch, ctx.state.timestamp.batch
        kind = max((request.kind for request in requests), key=SAVE_KINDS.index, default="requested")
        ctx.checkpoint = info = CheckpointInfo(
            path=os.fspath(path) if path is not None else self._free_path(f"ep{epoch}-ba{step}", kind),
            step=step,
            epoch=epoch,
            kind=kind,
            train_loss=train_loss,
            val_losses=dict(val_losses),
            best_metric_key=next((request.metric for request in requests if request.metric), None),
            requested_by=tuple(dict.fromkeys(request.by for request in requests)),
        )
        began = time.monotonic()
        with self._spans.checkpoint_save:
            shared = {name: part.state_dict() for name, part in self.shared.items()}
            local = {name: part.state_dict() for name, part in self.local.items()}
            local["callbacks"]["user_state"] = self._plain(local["callbacks"]["user_state"])
            info = replace(info, is_finite=train_loss is None or math.isfinite(train_loss))
            record = self._record(info)
            self._written.add(info.path)
            check_owner = partial(self._guard.check, acquires=path is None)
            parameters = frozenset(name for name, _ in ctx.model.named_parameters(remove_duplicate=False))
            is_good = partial(_is_good, parameters, self._prefixes_of_weights())
            # If this path already has a checkpoint, an earlier process of the run saved it.
            # With `overwrite`, an earlier checkpoint at this path is removed once the new checkpoint is committed.
            if self._writer is None or waits:
                seal = write_checkpoint(
                    info.path,
                    shared,
                    local,
                    record,
                    group=self._groups.saving,
                    overwrite=True,
                    check_owner=check_owner,
                    is_good=is_good,
                )
                ctx.checkpoint = info = _complete_info(info, seal)
            else:
                self._writer.begin(info.path, shared, local, record, overwrite=True, check_owner=check_owner, is_good=is_good)
                self.begun += 1
                self._prepare_at = sys.maxsize
                self._pending = ctx.checkpoint = info
        ctx.close("on_checkpoint_save_end")
        if self._pending is None:
            self._fire_published(info)
            self._compare_with_grace(time.monotonic() - began)
        else:
            self._began = began
        return info

    def _record(self, info: CheckpointInfo) -> dict[str, Any]:
        """Return, as plain data, the facts about a checkpoint to write into the checkpoint's manifest."""
        record = {name: value for name, value in asdict(info).items() if name not in ("path", "size_bytes")}
        record["run"] = self._ctx.run.name
        stop = self._ctx.control.stop_requested or self.stopped_by
        if stop is not None and not stop.resumable:
            record["stop"] = {"by": stop.by, "why": one_line(stop.why), **stop_conditions(self._manager, self._ctx, stop.by)}
        return record

    @property
    def next_step(self) -> int:
        """The training step after which the loop must call `prepare` next."""
        return self._prepare_at

    def prepare(self, step: int) -> None:
        """After `step`, begin to allocate buffers for the first background save, so that the save need not wait for them.

        The first attempt is after the first step, when the optimizer has created its state. Further attempts follow at longer and
        longer distances, because more state may appear, or a callback that requests checkpoints may be added. Nothing is
        allocated while no callback listens to `on_checkpoint_due`.
        """
        if self._writer is None or step < self._prepare_at:
            return
        self._prepare_at, self._prepare_again = step + self._prepare_again, 2 * self._prepare_again
        if self._manager.has_listeners.on_checkpoint_due:
            optimizer = self.shared.get("optimizer")
            state = optimizer.part.state if isinstance(optimizer, Typed) else {}
            weights = [*self._ctx.model.parameters(), *self._ctx.model.buffers()]
            self._writer.prepare([*weights, *_tensors_in(state), *self._tensors_of_callbacks(weights)])

    def _callbacks_with_weights(self) -> list[Callback]:
        return [callback for callback in map(inner, self._manager.callbacks) if callback.weights_in_state]

    def _prefixes_of_weights(self) -> tuple[str, ...]:
        """Return the prefixes of the names of weights in checkpoints: `model.`, and one for each callback that saves weights."""
        others = [f"callbacks.callbacks.{label_of(each)}.{each.weights_in_state}." for each in self._callbacks_with_weights()]
        return ("model.", *others)

    def _tensors_of_callbacks(self, weights: list[Tensor]) -> Iterator[Tensor]:
        """Yield tensors as large as those that callbacks will save (such as averaged weights), for allocating buffers.

        For each callback that saves weights, these are the trained weights and those of its own tensors whose dtype no weight has.
        """
        dtypes = {weight.dtype for weight in weights}
        for callback in self._callbacks_with_weights():
            if found := list(_tensors_in(callback.state_dict())):
                yield from (each for each in weights if each.is_floating_point() and _is_trained(each))
                yield from (each for each in found if each.dtype not in dtypes)

    def publish(self, durable: int) -> None:
        """Fire `on_checkpoint_published` for the background save, if all ranks have finished it.

        `durable` is the number of background saves that all ranks have finished.
        """
        if self._pending is not None and durable >= self.begun:
            self.finish()

    def finish(self) -> None:
        """Wait until all ranks have completely written the background save, and fire `on_checkpoint_published`.

        Raises:
            CheckpointError: the save failed, on any rank.
        """
        if self._pending is not None and self._writer is not None:
            info, self._pending = self._pending, None
            seal = self._writer.result()
            self._compare_with_grace(time.monotonic() - self._began)
            self._fire_published(_complete_info(info, seal))

    def close(self) -> None:
        """If a background save is in progress, wait until it has finished. Fire no event, because the run is over."""
        finish_deletions()
        if self._writer is not None:
            self._writer.close()

    def _fire_published(self, info: CheckpointInfo) -> None:
        self._guard.check()  # before handlers may delete checkpoints, raise an error if another run has taken over the folder
        self._guard.mark()
        is_in_folder = info.path.rpartition("/")[0] == self.folder
        if not info.is_finite:
            logger.error("%s has weights or a loss that are not finite: automatic resume ignores it", info.path)
        elif is_in_folder and self._groups.rank == 0:
            try:
                point_latest(info.path)
            except CheckpointError as error:  # the file `latest` is only for users, so a failure must not end the run
                logger.warning("the file %r does not name the newest checkpoint: %s", LATEST, error)
        if is_in_folder:  # this run holds the folder's lock, so no other process is still writing the unfinished checkpoints
            abandoned, self._resumption.abandoned = self._resumption.abandoned, []
            for path in abandoned:
                if path != info.path:
                    logger.info("deleting %s, which a killed process left unfinished", path)
                    delete_later(path, is_abandoned=True)
        self._ctx.checkpoint = info
        self._manager.fire(Event.CHECKPOINT_PUBLISHED, self._ctx)
        self._ctx.close("on_checkpoint_published")

    def _compare_with_grace(self, seconds: float) -> None:
        if seconds > self._grace and not self._is_slow:
            self._is_slow = True
            logger.warning(
                "saving took %.1f s, but a process is killed %.1f s after a preemption signal: a preempted run could not save a "
                "checkpoint of its last step; save regularly, or raise grace_seconds if the launcher waits longer",
                seconds,
                self._grace,
            )

    def load(self, resume: str | os.PathLike[str] | None) -> None:
        """Restore the checkpoint that a callback requests, or otherwise the one that `resume` names.

        If `loads` is set, call it instead.

        Raises:
            ConfigError: `resume` is None, and another run has written to the folder.
            CheckpointError: the checkpoint is not valid, or does not fit this run's parts.
        """
        ctx = self._ctx
        loads, self.loads = self.loads, None
        ctx.control.able.add("load")
        with self._spans.checkpoint_load:
            ctx.control.able.discard("load")
            if loads is not None:
                ctx.checkpoint = loads()
            else:
                ctx.checkpoint = self._resumption.restore(
                    ctx.control.load_path or resume, shared=self.shared, local=self.local, optional=self.optional
                )
        ctx.close("on_checkpoint_load_end")

    def earlier_stop(self) -> Request | None:
        """Return the request that stopped the run before it was resumed with `"auto"`, or None if training may continue."""
        return self._resumption.earlier_stop()

    def _plain(self, user_state: dict[str, Any]) -> dict[str, Any]:
        """Return the entries of `user_state` that a checkpoint can hold. Warn once about each entry that it cannot hold."""
        plain: dict[str, Any] = {}
        for name, value in user_state.items():
            try:
                flatten(value)
                plain[name] = value
            except CheckpointError as error:
                if name not in self._not_saved:
                    logger.warning("ctx.user_state[%r] is not saved in checkpoints: %s", name, error)
                    self._not_saved.add(name)
        return plain

    def _free_path(self, name: str, kind: str) -> str:
        """Return a path for a new checkpoint, other than the paths to which this process has already written."""
        names = chain((name, f"{name}-{kind}"), (f"{name}-{kind}-{number}" for number in count(2)))
        return next(path for each in names if (path := f"{self.folder}/{each}") not in self._written)


def _is_good(parameters: frozenset[str], prefixes: tuple[str, ...], name: str, piece: Tensor) -> bool:
    """Return whether the values in `piece`, a part of the saved tensor `name`, are valid.

    A weight must not contain NaN or infinity. A buffer must not contain NaN, but may contain infinities, as masks do. Other
    tensors are not checked.
    """
    prefix = next(filter(name.startswith, prefixes), None)
    if prefix is None or all_finite([piece]):
        return True
    is_weight = name.removeprefix(prefix) in parameters
    return not is_weight and not bool((piece.float() if piece.itemsize == 1 else piece).isnan().any())


def _complete_info(info: CheckpointInfo, seal: Seal) -> CheckpointInfo:
    """Return a copy of `info` with what is known once the checkpoint is written: its size, and whether its values are finite."""
    return replace(info, size_bytes=seal.size_bytes, is_finite=seal.info["is_finite"])


def _is_trained(weight: Tensor) -> bool:
    return weight.requires_grad or not isinstance(weight, nn.Parameter)


def _tensors_in(tree: object) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from _tensors_in(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _tensors_in(value)
