"""Save and load the run's checkpoints, fire the events for checkpoints, and choose the checkpoint to resume from."""

from __future__ import annotations

import hashlib
import inspect
import logging
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from callsheet.checkpoint import (
    AsyncWriter,
    Loaded,
    RankLost,
    Seal,
    all_finite,
    delete_later,
    find_checkpoints,
    flatten,
    point_latest,
    read_checkpoint,
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
from callsheet.errors import CallsheetError, CheckpointError, ConfigError, did_you_mean
from callsheet.run.parts import Stateful
from callsheet.run.process_groups import ProcessGroups
from callsheet.run.reasons import one_line
from callsheet.run.run_guard import RunGuard, why_not_writable
from callsheet.run.run_marker import is_marked

logger = logging.getLogger("callsheet")

AUTO = "auto"
"""The value of `resume` that resumes the run from its newest valid checkpoint."""

_OPTIMIZER_STATE_PATTERN = re.compile(r"optimizer\.state\.state\.(\d+)\.")


class Typed:
    """Saves and loads the state of an optimizer or scheduler. Rejects a state that was saved by an object of another class.

    Without this check, the state of another class would be loaded, and an error would appear only later.

    Args:
        part: the optimizer or scheduler.
        rate_is_fixed: whether only the user sets the optimizer's learning rate, and no scheduler changes it.
    """

    def __init__(self, part: Any, *, rate_is_fixed: bool = False) -> None:
        self.part = part
        self._rate_is_fixed = rate_is_fixed

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer or scheduler, and the name of its class."""
        return {"class": type(self.part).__name__, "state": self.part.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state. Warn if loading changes the optimizer's options. Raise ValueError if another class saved the state."""
        if state["class"] != type(self.part).__name__:
            raise ValueError(
                f"the state was saved by a {state['class']}, and this is a {type(self.part).__name__}; give a {state['class']}, or start a "
                "new run with another name or folder"
            )
        given = self._options()
        self.part.load_state_dict(state["state"])
        for name, value in self._options().items():
            if name in given and given[name] != value:
                logger.warning(
                    "%s: %s is %s in the checkpoint, and %s was given. Training continues with the checkpoint's; to change it, set it in "
                    "the optimizer's param_groups after the resume, or start a new run with another name or folder",
                    type(self.part).__name__, name, value, given[name],
                )  # fmt: skip

    def _options(self) -> dict[str, Any]:
        """Return the optimizer's options by name, for each parameter group.

        For the learning rate, return the initial rate. If `initial_lr` is not stored, leave out a rate that a scheduler may change.
        """
        found: dict[str, Any] = {}
        for number, group in enumerate(getattr(self.part, "param_groups", ())):
            rate = {"lr": group["initial_lr"]} if "initial_lr" in group else {} if self._rate_is_fixed else {"lr": None}
            for name, value in {**group, **rate}.items():
                if isinstance(value, (bool, int, float, str, tuple)) and name != "initial_lr":
                    found[f"{name} (group {number})" if number else name] = value
        return found


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
        self._writer = AsyncWriter(groups.saving) if in_background else None
        self._pending: CheckpointInfo | None = None  # the background save that is not yet published
        self._grace = grace
        self._is_slow = False  # whether a save has taken longer than `grace`; this is logged once
        self._began = 0.0  # when the background save began
        self._written: set[str] = set()  # the paths of the checkpoints that this process has written
        self._not_saved: set[str] = set()  # entries of `user_state` that no checkpoint can hold; each is logged only once
        self._is_auto = False  # whether the run was resumed with "auto"
        self._stop: Mapping[str, Any] | None = None  # the stop request in the checkpoint from which `resume="auto"` continued
        self._abandoned: list[str] = []  # unfinished checkpoints of earlier processes, kept until this run has published one
        self._prepare_at = sys.maxsize if self._writer is None else 0  # the step at which to allocate the writer's buffers
        self._prepare_again = 1  # number of steps until the next attempt to allocate the buffers; it doubles each time
        self._tensors: dict[str, Tensor] | None = None  # the model's tensors, while a checkpoint is loaded

    @property
    def folder(self) -> str:
        """The folder of the run's checkpoints: a path or a URL."""
        return self._ctx.run.checkpoints or "checkpoints"

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
                ctx.checkpoint = info = _sealed(info, seal)
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
            record["stop"] = {"by": stop.by, "why": one_line(stop.why), **self._stop_conditions(stop.by)}
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
            self._fire_published(_sealed(info, seal))

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
            abandoned, self._abandoned = self._abandoned, []
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
                ctx.checkpoint = self._restore_newest(self._candidates(ctx.control.load_path or resume))
        ctx.close("on_checkpoint_load_end")

    def _restore_newest(self, candidates: list[str]) -> CheckpointInfo | None:
        """Restore the first checkpoint of `candidates` that is valid on all ranks. Log why earlier candidates are not valid.

        Raise CheckpointError if there are candidates and none of them is valid.
        """
        rejected: list[str] = []
        for path in candidates:
            try:
                found = read_checkpoint(path, group=self._groups.saving, target=partial(self._target, path))
            except CheckpointError as error:
                if not self._is_auto or isinstance(error, RankLost):
                    raise
                logger.warning("not resuming from %s: %s", path, error)
                rejected.append(str(error))
                continue
            info = _info(path, found)
            self._restore({**found.shared, **found.local}, path)
            self._tensors = None
            stop = found.info.get("stop") if self._is_auto else None
            self._stop = stop if isinstance(stop, Mapping) else None
            logger.debug("resumed from %s, step %d", path, info.step)
            return info
        if candidates:
            raise CheckpointError(
                f"none of the {len(candidates)} sealed checkpoint(s) in {self.folder} could be resumed from: {'; '.join(rejected)}; "
                "fix these problems, or start a new run with another name or folder: this one would overwrite the checkpoints"
            )
        return None

    def earlier_stop(self) -> Request | None:
        """Return the request that stopped the run before it was resumed with `"auto"`, or None if training may continue.

        Training may continue if `max_duration` or the settings of the callback that made the request have changed since.
        """
        stop = self._stop
        if stop is None:
            return None
        by = str(stop.get("by"))
        if any(stop.get(name) != now for name, now in self._stop_conditions(by).items()):
            return None
        return Request("stop", str(stop.get("why")), by)

    def _stop_conditions(self, by: str) -> dict[str, str]:
        """Return the settings that decide whether a resumed run may continue after the callback `by` has stopped it.

        Training continues only if at least one of these settings has changed.
        """
        made = [
            # Include the signature, because it contains the default values, which a user may change in the class.
            (type(each).__qualname__, str(inspect.signature(type(each).__init__)), each._arguments)
            for each in self._manager.callbacks
            if label_of(each) == by
        ]
        return {
            "max_duration": str(self._ctx.state.max_duration),
            # Save only a digest, because settings may contain secrets.
            # Remove the addresses of objects from the text, because addresses differ between processes.
            "settings": hashlib.blake2s(re.sub(r" at 0x[0-9a-f]+", "", repr(made)).encode(), digest_size=8).hexdigest(),
        }

    def _candidates(self, resume: str | os.PathLike[str] | None) -> list[str]:
        """Return the paths of the checkpoints to try to resume from, the best first. Rank 0 finds them for all ranks."""
        found: list[str] | CallsheetError = []
        if self._groups.rank == 0:
            try:
                found = self._listed(resume)
            except CallsheetError as error:  # keep the error, which is raised below on all ranks
                found = error
        found = self._groups.of_rank_zero(found)
        if isinstance(found, CallsheetError):
            raise found
        self._is_auto = resume is not None and os.fspath(resume) == AUTO
        return found

    def _listed(self, resume: str | os.PathLike[str] | None) -> list[str]:
        """Return the paths of the checkpoints that `resume` names: one path or, for `"auto"`, several.

        For `"auto"`, return the valid checkpoints, the newest first, and log why others are not used.
        """
        folder = self._ctx.run.folder
        if resume is None:
            is_begun = folder is not None and is_marked(folder)
            if is_begun or find_checkpoints(self.folder).checkpoints:
                raise ConfigError(
                    f"{folder if is_begun else self.folder} already holds a run; resume it with resume='auto', or choose another run_name"
                )
            return []
        if os.fspath(resume) != AUTO:
            if "://" not in os.fspath(resume) and not Path(resume).exists():
                raise CheckpointError(
                    f"resume={os.fspath(resume)!r}: there is no such checkpoint{did_you_mean(os.fspath(resume), [AUTO])}; give the path of a "
                    "checkpoint, or 'auto' for the newest one of this run"
                )
            return [os.fspath(resume)]
        found = find_checkpoints(self.folder)
        for path, reason in found.skipped:
            logger.warning("not resuming from %s: %s", path, reason)
        # Unfinished checkpoints may be deleted only in the run's folder, because the run's lock protects only that folder.
        if folder is not None and Path(self.folder).parent == folder:
            self._abandoned = found.abandoned
        good = [checkpoint for checkpoint in found.checkpoints if checkpoint.seal.info.get("is_finite", True)]
        for checkpoint in found.checkpoints:
            if checkpoint not in good:
                logger.warning("not resuming from %s: it was saved with weights or a loss that are not finite", checkpoint.path)
        return [os.fspath(checkpoint.path) for checkpoint in good]

    def _target(self, path: str, name: str, size: torch.Size, dtype: torch.dtype) -> Tensor | None:
        """Return the tensor into which the checkpoint's tensor `name` is read, or None to read it into a new tensor.

        For a weight, this is the model's own tensor. For the optimizer's state of a sharded parameter, it is an empty tensor with
        the same sharding.
        """
        part, _, rest = name.partition(".")
        if part == "model":
            if self._tensors is None:
                self._tensors = self._ctx.model.state_dict()
            if rest not in self._tensors:
                raise CheckpointError(f"{path} does not fit: it holds the weight {rest!r}, which this model does not have")
            if self._tensors[rest].shape != size:
                there, here = list(size), list(self._tensors[rest].shape)
                raise CheckpointError(
                    f"{path} does not fit: its weight {rest!r} has the size {there}, and this model's has the size {here}"
                )
            return self._tensors[rest]
        if match := _OPTIMIZER_STATE_PATTERN.match(name):
            parameter = dict(enumerate(self._parameters())).get(int(match[1]))
            if isinstance(parameter, DTensor) and parameter.shape == size:
                return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        return None

    def _parameters(self) -> list[Tensor]:
        """Return the optimizer's parameters. A parameter's index in this list is its number in the optimizer's `state_dict`."""
        optimizer = self.shared.get("optimizer")
        groups = optimizer.part.param_groups if isinstance(optimizer, Typed) else []
        return [parameter for group in groups for parameter in group["params"]]

    def _restore(self, state: Mapping[str, Any], path: str) -> None:
        if unclaimed := sorted(state.keys() - self.shared.keys() - self.local.keys()):
            logger.warning("%s holds the state of parts that this run does not have: %s", path, ", ".join(unclaimed))
        for name, part in (*self.shared.items(), *self.local.items()):
            if name not in state:
                if name in self.optional:
                    continue
                raise CheckpointError(f"{path} holds no {name}; was it saved by a trainer without one?")
            try:
                part.load_state_dict(state[name])
            except (RuntimeError, ValueError, KeyError, TypeError) as error:
                raise CheckpointError(
                    f"{path} does not fit: its {name} cannot be loaded into this run's: {type(error).__name__}: {error}"
                ) from error

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


def _sealed(info: CheckpointInfo, seal: Seal) -> CheckpointInfo:
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


def _info(path: str, found: Loaded) -> CheckpointInfo:
    """Return the `CheckpointInfo` of a checkpoint that a Trainer wrote, from its manifest."""
    record = found.info
    names = ("step", "epoch", "kind", "train_loss", "val_losses", "best_metric_key", "is_finite", "requested_by")
    if any(name not in record for name in names):
        raise CheckpointError(f"{path} was not saved by a Trainer: its manifest lacks some of {', '.join(names)}")
    return CheckpointInfo(path=path, size_bytes=found.seal.size_bytes, **{name: record[name] for name in names})
