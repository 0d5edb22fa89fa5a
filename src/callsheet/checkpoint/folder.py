"""Checkpoints as folders: opened, found, cleared and deleted."""

from __future__ import annotations

import contextlib
import logging
import os
from dataclasses import dataclass
from typing import NamedTuple

from callsheet.checkpoint.layout import LATEST, MARKER
from callsheet.checkpoint.local import LocalFolder
from callsheet.checkpoint.remote import RemoteFolder
from callsheet.checkpoint.seal import MANIFEST, Seal, Unsealed, manifest_of, seal_of
from callsheet.checkpoint.storage import Folder
from callsheet.disk_thread import begin_deletion, finish_deletions
from callsheet.errors import CheckpointError

logger = logging.getLogger("callsheet")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A sealed folder, by its path or URL, and what its seal says."""

    path: str
    seal: Seal

    @property
    def name(self) -> str:
        """The folder's own name."""
        return os.path.basename(self.path)

    @property
    def step(self) -> int:
        """The step that its info tells, or -1."""
        step = self.seal.info.get("step")
        return step if type(step) is int else -1

    @property
    def world_size(self) -> int:
        """How many ranks wrote it."""
        return self.seal.world_size


class Found(NamedTuple):
    """The checkpoints under a root, newest first; the folders that are none, with the reason; and what killed writers left."""

    checkpoints: list[Checkpoint]
    skipped: list[tuple[str, str]]
    abandoned: list[str]


def open_folder(path: str | os.PathLike[str]) -> Folder:
    """The folder at a path of this machine, or at a URL such as `s3://bucket/run`.

    Raises `CheckpointError` for a URL whose protocol is not known, or needs what is not installed.
    """
    name = os.fspath(path)
    protocol, _, rest = name.partition("://")
    if rest and protocol != "file":
        return RemoteFolder.at(name)
    return LocalFolder(rest or name)


def find_checkpoints(root: str | os.PathLike[str]) -> Found:
    """The checkpoints directly under `root`, newest first: by the time of the seal, since a run that went back to an earlier one leaves
    behind later steps that did not happen.

    Digests are not taken here but while reading: who resumes goes down the list until one reads. Links are left out, and a root
    that does not exist has none.
    """
    parent, found = open_folder(root), Found([], [], [])
    for name in parent.folders():
        folder = parent.child(name)
        try:
            found.checkpoints.append(Checkpoint(folder.path, seal_of(folder)))
        except CheckpointError as error:
            if isinstance(error, Unsealed) and _is_draft(folder):
                found.abandoned.append(folder.path)
            else:
                found.skipped.append((folder.path, str(error)))
    found.checkpoints.sort(key=lambda checkpoint: (checkpoint.seal.sealed_at, checkpoint.step), reverse=True)
    return found


def newest(root: str | os.PathLike[str]) -> Checkpoint | None:
    """The newest checkpoint directly under `root`, or None."""
    return next(iter(find_checkpoints(root).checkpoints), None)


def read_manifest(path: str | os.PathLike[str]) -> Seal:
    """What the seal of the checkpoint at `path` says, held against its own digest alone; `Unsealed` where there is none that holds."""
    return manifest_of(open_folder(path))


def delete_checkpoint(path: str | os.PathLike[str]) -> None:
    """Delete a checkpoint, or what a killed writer or deleter left of one.

    The seal goes first: a kill in the middle leaves a folder that does not exist. Raises `CheckpointError` for a folder that is
    not a checkpoint's, for a link, and where the disk refuses.
    """
    folder = open_folder(path)
    if not folder.is_folder() or not _is_ours(folder):
        raise CheckpointError(f"{folder.path} is not the folder of a checkpoint, so it is not deleted; remove it by hand")
    remove(folder)


def delete_abandoned(path: str | os.PathLike[str]) -> None:
    """Delete what a killed writer or deleter left. Call this only where nobody else can be writing there.

    Raises `CheckpointError` for a folder that is anything else, and where the disk refuses.
    """
    folder = open_folder(path)
    if not folder.is_folder() or not _is_draft(folder):
        raise CheckpointError(f"{folder.path} is not an unfinished checkpoint, so it is not deleted; remove it by hand")
    remove(folder)


def delete_later(path: str | os.PathLike[str], *, is_abandoned: bool = False) -> None:
    """Have a thread call `delete_checkpoint`, or `delete_abandoned`; `finish_deletions` waits for it. A failure is a warning."""

    def delete() -> None:
        try:
            delete_abandoned(path) if is_abandoned else delete_checkpoint(path)
        except CheckpointError as error:
            logger.warning("an old checkpoint could not be deleted: %s", error)

    begin_deletion(delete)


def point_latest(path: str | os.PathLike[str]) -> None:
    """Name the sealed checkpoint `path` in the file `latest` beside it: a hint for people and scripts, which nothing here reads."""
    folder = open_folder(path)
    checkpoint = Checkpoint(folder.path, manifest_of(folder))
    folder.parent().replace(LATEST, f"{checkpoint.name}\n".encode())


def cleared(folder: Folder, overwrite: bool) -> Seal | None:
    """The seal that stands in the folder, which is made where it is not there, once nothing else does.

    Raises `CheckpointError` where something stands there that is not to be cleared.
    """
    finish_deletions()
    folder.make()
    try:
        old = manifest_of(folder)
    except Unsealed:
        if not _is_ours(folder) and folder.entries():
            raise CheckpointError(f"{folder.path} holds files that are no checkpoint's; choose a new folder") from None
        old = None
    if old is not None and not overwrite:
        raise CheckpointError(f"{folder.path} is a sealed checkpoint; choose a new folder or pass overwrite=True")
    clear(folder)
    return old


def clear(folder: Folder) -> None:
    """Take away everything that the folder's seal does not count, or everything where there is no seal; the marker stays."""
    kept = {MARKER}
    with contextlib.suppress(Unsealed):
        kept |= {MANIFEST, *manifest_of(folder).files}
    for name in folder.entries():
        if name not in kept:
            folder.remove(name)


def remove(folder: Folder) -> None:
    """Take away the folder, the seal first and the marker last."""
    if MANIFEST in folder.entries():
        folder.remove(MANIFEST)
        folder.sync()  # or a crash could bring the seal back over missing files
    clear(folder)
    if MARKER in folder.entries():
        folder.remove(MARKER)
    folder.remove_itself()


def _is_draft(folder: Folder) -> bool:
    """Whether it has no manifest, and is empty or has our marker: it was never committed, or its deletion has begun."""
    found = folder.entries()
    return MANIFEST not in found and (not found or found.get(MARKER) is not None)


def _is_ours(folder: Folder) -> bool:
    if folder.entries().get(MARKER) is not None:
        return True
    with contextlib.suppress(Unsealed):
        manifest_of(folder)
        return True
    return False
