"""Finds the checkpoint from which a run resumes, and restores it."""

from __future__ import annotations

import hashlib
import inspect
import logging
import os
import re
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from callsheet.checkpoint import Loaded, RankLost, find_checkpoints, read_checkpoint
from callsheet.core.callback import label_of
from callsheet.core.context import Context
from callsheet.core.control import Request
from callsheet.core.manager import CallbackManager
from callsheet.core.run_state import CheckpointInfo
from callsheet.errors import CallsheetError, CheckpointError, ConfigError, did_you_mean
from callsheet.run.parts import Stateful
from callsheet.run.process_groups import ProcessGroups
from callsheet.run.run_marker import is_marked
from callsheet.run.typed_state import Typed

logger = logging.getLogger("callsheet")

AUTO = "auto"
"""The value of `resume` that resumes the run from its newest valid checkpoint."""

_OPTIMIZER_STATE_PATTERN = re.compile(r"optimizer\.state\.state\.(\d+)\.")


def checkpoints_folder(ctx: Context) -> str:
    """Return the folder of the run's checkpoints: a path or a URL."""
    return ctx.run.checkpoints or "checkpoints"


def stop_conditions(manager: CallbackManager, ctx: Context, by: str) -> dict[str, str]:
    """Return the settings that decide whether a resumed run may continue after the callback `by` has stopped it.

    Training continues only if at least one of these settings has changed.
    """
    made = [
        # Include the signature, because it contains the default values, which a user may change in the class.
        (type(each).__qualname__, str(inspect.signature(type(each).__init__)), each._arguments)
        for each in manager.callbacks
        if label_of(each) == by
    ]
    return {
        "max_duration": str(ctx.state.max_duration),
        # Save only a digest, because settings may contain secrets.
        # Remove the addresses of objects from the text, because addresses differ between processes.
        "settings": hashlib.blake2s(re.sub(r" at 0x[0-9a-f]+", "", repr(made)).encode(), digest_size=8).hexdigest(),
    }


class Resumption:
    """Restores the checkpoint from which a run resumes. `restore` is a collective."""

    def __init__(self, manager: CallbackManager, ctx: Context, groups: ProcessGroups) -> None:
        self.abandoned: list[str] = []
        """Unfinished checkpoints of earlier processes, kept until this run has published one."""
        self._manager = manager
        self._ctx = ctx
        self._groups = groups
        self._shared: Mapping[str, Stateful] = {}
        self._local: Mapping[str, Stateful] = {}
        self._optional: Collection[str] = ()
        self._is_auto = False  # whether the run was resumed with "auto"
        self._stop: Mapping[str, Any] | None = None  # the stop request in the checkpoint from which `resume="auto"` continued
        self._tensors: dict[str, Tensor] | None = None  # the model's tensors, while a checkpoint is loaded

    def restore(
        self,
        resume: str | os.PathLike[str] | None,
        *,
        shared: Mapping[str, Stateful],
        local: Mapping[str, Stateful],
        optional: Collection[str],
    ) -> CheckpointInfo | None:
        """Restore the checkpoint that `resume` names, and return its description. Return None if there is no checkpoint to restore.

        Args:
            resume: `"auto"`, the path of a checkpoint, or None.
            shared: the parts of a checkpoint that are the same on all ranks, or sharded over the ranks.
            local: the parts of a checkpoint that belong to one rank. They are loaded after the shared parts.
            optional: the names of parts that a checkpoint of an earlier version may lack. Such a part then keeps its state.

        Raises:
            ConfigError: `resume` is None, and another run has written to the folder.
            CheckpointError: the checkpoint is not valid, or does not fit this run's parts.
        """
        self._shared, self._local, self._optional = shared, local, optional
        return self._restore_newest(self._candidates(resume))

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
                f"none of the {len(candidates)} sealed checkpoint(s) in {checkpoints_folder(self._ctx)} could be resumed from: {'; '.join(rejected)}; "
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
        if any(stop.get(name) != now for name, now in stop_conditions(self._manager, self._ctx, by).items()):
            return None
        return Request("stop", str(stop.get("why")), by)

    def _candidates(self, resume: str | os.PathLike[str] | None) -> list[str]:
        """Return the paths of the checkpoints to try to resume from, the best first. Rank 0 finds them for all ranks."""
        found: list[str] | CallsheetError = []
        if self._groups.rank == 0:
            try:
                found = self._list_checkpoints(resume)
            except CallsheetError as error:  # keep the error, which is raised below on all ranks
                found = error
        found = self._groups.of_rank_zero(found)
        if isinstance(found, CallsheetError):
            raise found
        self._is_auto = resume is not None and os.fspath(resume) == AUTO
        return found

    def _list_checkpoints(self, resume: str | os.PathLike[str] | None) -> list[str]:
        """Return the paths of the checkpoints that `resume` names: one path or, for `"auto"`, several.

        For `"auto"`, return the valid checkpoints, the newest first, and log why others are not used.
        """
        folder = self._ctx.run.folder
        if resume is None:
            is_begun = folder is not None and is_marked(folder)
            if is_begun or find_checkpoints(checkpoints_folder(self._ctx)).checkpoints:
                raise ConfigError(
                    f"{folder if is_begun else checkpoints_folder(self._ctx)} already holds a run; resume it with resume='auto', or choose another run_name"
                )
            return []
        if os.fspath(resume) != AUTO:
            if "://" not in os.fspath(resume) and not Path(resume).exists():
                raise CheckpointError(
                    f"resume={os.fspath(resume)!r}: there is no such checkpoint{did_you_mean(os.fspath(resume), [AUTO])}; give the path of a "
                    "checkpoint, or 'auto' for the newest one of this run"
                )
            return [os.fspath(resume)]
        found = find_checkpoints(checkpoints_folder(self._ctx))
        for path, reason in found.skipped:
            logger.warning("not resuming from %s: %s", path, reason)
        # Unfinished checkpoints may be deleted only in the run's folder, because the run's lock protects only that folder.
        if folder is not None and Path(checkpoints_folder(self._ctx)).parent == folder:
            self.abandoned = found.abandoned
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
        optimizer = self._shared.get("optimizer")
        groups = optimizer.part.param_groups if isinstance(optimizer, Typed) else []
        return [parameter for group in groups for parameter in group["params"]]

    def _restore(self, state: Mapping[str, Any], path: str) -> None:
        if unclaimed := sorted(state.keys() - self._shared.keys() - self._local.keys()):
            logger.warning("%s holds the state of parts that this run does not have: %s", path, ", ".join(unclaimed))
        for name, part in (*self._shared.items(), *self._local.items()):
            if name not in state:
                if name in self._optional:
                    continue
                raise CheckpointError(f"{path} holds no {name}; was it saved by a trainer without one?")
            try:
                part.load_state_dict(state[name])
            except (RuntimeError, ValueError, KeyError, TypeError) as error:
                raise CheckpointError(
                    f"{path} does not fit: its {name} cannot be loaded into this run's: {type(error).__name__}: {error}"
                ) from error


def _info(path: str, found: Loaded) -> CheckpointInfo:
    """Return the `CheckpointInfo` of a checkpoint that a Trainer wrote, from its manifest."""
    record = found.info
    names = ("step", "epoch", "kind", "train_loss", "val_losses", "best_metric_key", "is_finite", "requested_by")
    if any(name not in record for name in names):
        raise CheckpointError(f"{path} was not saved by a Trainer: its manifest lacks some of {', '.join(names)}")
    return CheckpointInfo(path=path, size_bytes=found.seal.size_bytes, **{name: record[name] for name in names})
