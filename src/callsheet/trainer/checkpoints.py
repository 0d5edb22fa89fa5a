"""The run's checkpoints: saved and loaded with their events, and which of them to resume from."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from callsheet.checkpoint import (
    all_finite,
    find_checkpoints,
    flatten,
    point_latest,
    read_checkpoint,
    read_manifest,
    write_checkpoint,
)
from callsheet.context import CheckpointInfo, Context
from callsheet.control import SAVE_KINDS, Request
from callsheet.errors import CheckpointError, ConfigError, did_you_mean
from callsheet.events import Event
from callsheet.manager import CallbackManager
from callsheet.spans import Spans

logger = logging.getLogger("callsheet")

AUTO = "auto"


class Stateful(Protocol):
    """A part of the run that a checkpoint holds."""

    def state_dict(self) -> Any:
        """Its state, as plain data and tensors."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Take back what `state_dict` gave."""


class Typed:
    """An optimizer or scheduler as a part: its class is saved with it, since another's state would load and fail later."""

    def __init__(self, part: Any) -> None:
        self._part = part

    def state_dict(self) -> dict[str, Any]:
        """The part's state, and its class's name."""
        return {"class": type(self._part).__name__, "state": self._part.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load it; ValueError where it is another class's."""
        if state["class"] != type(self._part).__name__:
            raise ValueError(f"it is a {state['class']}'s, and this is a {type(self._part).__name__}")
        self._part.load_state_dict(state["state"])


class Checkpoints:
    """Reads and writes `<run folder>/checkpoints`.

    Args:
        parts: what a checkpoint holds, by name; loaded in this order.
    """

    def __init__(self, manager: CallbackManager, ctx: Context, spans: Spans, parts: dict[str, Stateful]) -> None:
        self._manager = manager
        self._ctx = ctx
        self._spans = spans
        self.parts = parts
        self._written: set[Path] = set()
        self._named: set[str] = set()

    @property
    def folder(self) -> Path:
        """Where they stand."""
        return Path(self._ctx.run.folder or ".") / "checkpoints"

    def save(
        self,
        requests: tuple[Request, ...],
        path: str | os.PathLike[str] | None,
        *,
        train_loss: Tensor | None,
        val_losses: dict[str, float],
    ) -> CheckpointInfo:
        """Write one checkpoint for all requests, or by hand where there are none, and tell it; `train_loss` is waited for.

        One whose weights or loss are not finite is marked so in its seal, and never resumed from by itself.

        Raises:
            CheckpointError: it cannot be written, or a callback's state is not plain data.
        """
        ctx = self._ctx
        epoch, step = ctx.state.timestamp.epoch, ctx.state.timestamp.batch
        kind = max((request.kind for request in requests), key=SAVE_KINDS.index, default="requested")
        ctx.checkpoint = info = CheckpointInfo(
            path=os.fspath(path) if path is not None else str(self._free_path(f"ep{epoch}-ba{step}", kind)),
            step=step,
            epoch=epoch,
            kind=kind,
            train_loss=train_loss.item() if train_loss is not None else None,
            val_losses=val_losses,
            best_metric_key=next((request.metric for request in requests if request.metric), None),
            requested_by=tuple(dict.fromkeys(request.by for request in requests)),
        )
        with self._spans.checkpoint_save:
            state = {name: part.state_dict() for name, part in self.parts.items()}
            state["callbacks"]["user_state"] = self._plain(state["callbacks"]["user_state"])
            is_finite = all_finite([*ctx.model.parameters(), *([train_loss] if train_loss is not None else [])])
            if not is_finite:
                logger.error("%s has weights or a loss that are not finite: automatic resume will pass it by", info.path)
            info = replace(info, is_finite=is_finite)
            ctx.checkpoint = info = replace(info, size_bytes=self._write(info, state))
        ctx.close("on_checkpoint_save_end")
        ctx.checkpoint = info
        self._manager.fire(Event.CHECKPOINT_PUBLISHED, ctx)
        ctx.close("on_checkpoint_published")
        return info

    def load(self, resume: str | os.PathLike[str] | None) -> None:
        """Restore what a callback, or else `resume`, names.

        Raises:
            ConfigError: to start anew where another run has written.
            CheckpointError: what was named does not hold, or is not of this run's parts.
        """
        ctx = self._ctx
        ctx.control.able.add("load")
        with self._spans.checkpoint_load:
            ctx.control.able.discard("load")
            found = self._choose(ctx.control.load_path or resume)
            ctx.checkpoint = found[1] if found is not None else None
            if found is not None:
                state, info = found
                self._restore(state, info.path)
                logger.debug("resumed from %s, step %d", info.path, info.step)
        ctx.close("on_checkpoint_load_end")

    def _restore(self, state: Mapping[str, Any], path: str) -> None:
        for name, part in self.parts.items():
            if name not in state:
                raise CheckpointError(f"{path} holds no {name}; was it saved by a trainer that had none?")
            try:
                part.load_state_dict(state[name])
            except (RuntimeError, ValueError, KeyError, TypeError) as error:
                raise CheckpointError(f"{path} does not fit: its {name} is not of this run's {name}: {error}") from error

    def _choose(self, resume: str | os.PathLike[str] | None) -> tuple[dict[str, Any], CheckpointInfo] | None:
        """The newest checkpoint that holds and is good for `"auto"`, saying why others were left out; or just the one that is named."""
        folder = self._ctx.run.folder
        if resume is None:
            if folder is not None and folder.exists() and any(folder.iterdir()):
                raise ConfigError(
                    f"{folder} holds a run already; resume='auto' goes on with it, another run_name starts beside it"
                )
            return None
        if os.fspath(resume) != AUTO:
            if not Path(resume).exists():
                raise CheckpointError(
                    f"resume={os.fspath(resume)!r}: there is no such checkpoint{did_you_mean(os.fspath(resume), [AUTO])}"
                )
            return _read(Path(resume))
        found = find_checkpoints(self.folder)
        for path, reason in found.skipped:
            logger.warning("not resuming from %s: %s", path, reason)
        for checkpoint in found.checkpoints:
            if not checkpoint.seal.info.get("is_finite", True):
                logger.warning("not resuming from %s: it was saved with weights or a loss that are not finite", checkpoint.path)
                continue
            try:
                return _read(checkpoint.path)
            except CheckpointError as error:
                logger.warning("not resuming from %s: %s", checkpoint.path, error)
        return None

    def _write(self, info: CheckpointInfo, state: Mapping[str, Any]) -> int:
        """What stands there from before a resume belongs to a future that did not happen; it goes once the new one is sealed."""
        path = Path(info.path)
        told = {name: value for name, value in asdict(info).items() if name not in ("path", "size_bytes")}
        size = write_checkpoint(path, state, {**told, "run": self._ctx.run.name}, overwrite=True)
        self._written.add(path)
        if info.is_finite and path.parent == self.folder:
            point_latest(path)
        return size

    def _plain(self, user_state: dict[str, Any]) -> dict[str, Any]:
        """What can be saved of it; what cannot is named, once."""
        plain: dict[str, Any] = {}
        for name, value in user_state.items():
            try:
                flatten(value)
                plain[name] = value
            except CheckpointError as error:
                if name not in self._named:
                    logger.warning("ctx.user_state[%r] is not saved in checkpoints: %s", name, error)
                    self._named.add(name)
        return plain

    def _free_path(self, name: str, kind: str) -> Path:
        """A folder that this process has not written yet."""
        path, number = self.folder / name, 1
        while path in self._written:
            path, number = self.folder / (f"{name}-{kind}" if number == 1 else f"{name}-{kind}-{number}"), number + 1
        return path


def _read(path: Path) -> tuple[dict[str, Any], CheckpointInfo]:
    state, told = read_checkpoint(path)
    names = ("step", "epoch", "kind", "train_loss", "val_losses", "best_metric_key")
    if not isinstance(state, dict) or any(name not in told for name in names):
        raise CheckpointError(f"{path} was not saved by a Trainer: its seal does not tell {', '.join(names)}")
    size = read_manifest(path).size_bytes
    since = {name: told[name] for name in ("is_finite", "requested_by") if name in told}  # older seals lack them
    return state, CheckpointInfo(path=str(path), size_bytes=size, **{name: told[name] for name in names}, **since)
