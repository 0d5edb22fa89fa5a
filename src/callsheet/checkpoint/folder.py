"""Checkpoints as folders: written, read, found and deleted.

    step-100/
        checkpoint.txt          written first, removed last: this folder is ours to clear
        state.json              the state's document (`plain`)
        tensors.safetensors     its tensors
        manifest.json           the seal, written last (`seal`)

A checkpoint that is overwritten stays whole until the new one is sealed: the new files stand beside the old ones under their
other names (`state.2.json`, ...), and the manifest, which says which ones count, changes in one instant.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from callsheet.checkpoint.disk import os_errors, read_verified, sync_folder, write_file
from callsheet.checkpoint.plain import flatten, unflatten
from callsheet.checkpoint.seal import MANIFEST, Seal, Unsealed, read_manifest, read_seal, write_seal
from callsheet.checkpoint.tensors import read_tensors, write_tensors
from callsheet.errors import CheckpointError

KIND = "callsheet.checkpoint.plain"
MARKER = "checkpoint.txt"
LATEST = "latest"

_FILES = (("state.json", "tensors.safetensors"), ("state.2.json", "tensors.2.safetensors"))
_NOTE = f"A checkpoint of callsheet. Without a {MANIFEST} that holds, it is what a killed process left, and may be deleted.\n"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A sealed folder, and what its seal says."""

    path: Path
    seal: Seal

    @property
    def step(self) -> int:
        """The step that its info tells, or -1."""
        step = self.seal.info.get("step")
        return step if type(step) is int else -1


class Found(NamedTuple):
    """The checkpoints under a root, newest first, and the folders that are none, with the reason."""

    checkpoints: list[Checkpoint]
    skipped: list[tuple[Path, str]]


def write_checkpoint(path: str | os.PathLike[str], state: object, info: Mapping[str, Any], *, overwrite: bool = False) -> int:
    """Write `state` to the folder `path` and seal it with `info`; returns the size of its files in bytes.

    What a killed writer left at `path` is cleared first. A checkpoint that stands there is refused, or with `overwrite` stays
    readable until the new one is sealed, and goes then.

    Raises `CheckpointError` where the state is not plain data, `path` holds anything else, or the disk refuses; nothing of the
    new checkpoint is left then.
    """
    path = Path(path)
    document, tensors = flatten(state)
    content = json.dumps(document, allow_nan=False).encode()
    with os_errors("write", path):
        path.mkdir(parents=True, exist_ok=True)
        old = _cleared(path, overwrite)
        names = next((pair for pair in _FILES if old is None or old.files.keys().isdisjoint(pair)), _FILES[0])
        try:
            if not (path / MARKER).exists():
                write_file(path, MARKER, [_NOTE.encode()])
            files = {names[0]: write_file(path, names[0], [content]), names[1]: write_tensors(path, names[1], tensors)}
            sealed = write_seal(path, files, info, kind=KIND, replace=old is not None)
        except BaseException:
            with contextlib.suppress(OSError, CheckpointError):  # the first error is the one to tell
                if old is None:
                    _remove(path)
                else:
                    _clear(path)
            raise
        with contextlib.suppress(OSError, CheckpointError):  # the new one is published; what stays is cleared by the next writer
            _clear(path)
    return sealed.size_bytes


def read_checkpoint(path: str | os.PathLike[str], device: torch.device | str = "cpu") -> tuple[Any, dict[str, Any]]:
    """The state and the info of a checkpoint, with its tensors on `device`; runs no code of the file's.

    Each file is read once, and its digest is taken of the very bytes that are then parsed: what changes on disk meanwhile cannot
    slip in between, nor crash a memory map. The price is host memory of twice the tensor file for a moment.

    Raises `CheckpointError` saying why it does not hold.
    """
    path = Path(path)
    sealed = read_seal(path)
    names = next((pair for pair in _FILES if sealed.files.keys() >= set(pair)), None)
    if sealed.kind != KIND or names is None:
        raise CheckpointError(f"{path} is a {sealed.kind!r}, not a {KIND!r} with its files; read it by what wrote it")
    state, tensors = (read_verified(path, name, sealed.files[name]) for name in names)
    try:
        document = json.loads(state, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path / names[0]} is not JSON: {error}; use another checkpoint") from error
    return unflatten(document, read_tensors(tensors, path / names[1], device)), sealed.info


def find_checkpoints(root: str | os.PathLike[str]) -> Found:
    """The checkpoints directly under `root`, newest first: by the time of the seal, since a run that went back to an earlier one leaves
    behind later steps that did not happen.

    Digests are not taken here but while reading: who resumes goes down the list until one reads. Links are left out, and a root
    that does not exist has none.
    """
    root, found = Path(root), Found([], [])
    with os_errors("read", root):
        folders = [entry for entry in root.iterdir() if entry.is_dir() and not entry.is_symlink()] if root.exists() else []
    for folder in sorted(folders):
        try:
            found.checkpoints.append(Checkpoint(folder, read_seal(folder)))
        except CheckpointError as error:
            found.skipped.append((folder, str(error)))
    found.checkpoints.sort(key=lambda checkpoint: (checkpoint.seal.sealed_at, checkpoint.step), reverse=True)
    return found


def newest(root: str | os.PathLike[str]) -> Checkpoint | None:
    """The newest checkpoint directly under `root`, or None."""
    return next(iter(find_checkpoints(root).checkpoints), None)


def delete_checkpoint(path: str | os.PathLike[str]) -> None:
    """Delete a checkpoint, or what a killed writer or deleter left of one.

    The seal goes first: a kill in the middle leaves a folder that does not exist. Raises `CheckpointError` for a folder that is
    not a checkpoint's, for a link, and where the disk refuses.
    """
    path = Path(path)
    with os_errors("delete", path):
        if path.is_symlink() or not _is_ours(path):
            raise CheckpointError(f"{path} is not the folder of a checkpoint, so it is not deleted; remove it by hand")
        _remove(path)


def point_latest(path: str | os.PathLike[str]) -> None:
    """Name the sealed checkpoint `path` in the file `latest` beside it: a hint for people and scripts, which nothing here reads."""
    path = Path(path)
    read_manifest(path)
    hint, draft = path.parent / LATEST, path.parent / f"{LATEST}.new"
    with os_errors("write", hint):
        draft.write_text(f"{path.name}\n", encoding="utf-8")
        os.replace(draft, hint)


def _cleared(path: Path, overwrite: bool) -> Seal | None:
    """The seal that stands at `path`, once nothing else does."""
    try:
        old = read_manifest(path)
    except Unsealed:
        if not _is_ours(path) and any(path.iterdir()):
            raise CheckpointError(f"{path} holds files that are no checkpoint's; choose a new folder") from None
        old = None
    if old is not None and not overwrite:
        raise CheckpointError(f"{path} is a sealed checkpoint; choose a new folder or pass overwrite=True")
    _clear(path)
    return old


def _is_ours(path: Path) -> bool:
    if (path / MARKER).is_file():
        return True
    with contextlib.suppress(Unsealed):
        read_manifest(path)
        return True
    return False


def _clear(path: Path) -> None:
    """Take away everything that the seal at `path` does not count, or everything where there is no seal; the marker stays."""
    kept = {MARKER}
    with contextlib.suppress(Unsealed):
        kept |= {MANIFEST} | {name.partition("/")[0] for name in read_manifest(path).files}
    for entry in path.iterdir():
        if entry.name in kept:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _remove(path: Path) -> None:
    (path / MANIFEST).unlink(missing_ok=True)
    sync_folder(path)  # or a crash could bring the seal back over missing files
    _clear(path)
    (path / MARKER).unlink(missing_ok=True)
    path.rmdir()


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
