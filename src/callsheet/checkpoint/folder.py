"""Opens checkpoint folders, finds them, and removes their files."""

from __future__ import annotations

import contextlib
import logging
import os
from dataclasses import dataclass
from typing import NamedTuple

from callsheet.checkpoint.disk_thread import begin_deletion, finish_deletions
from callsheet.checkpoint.layout import LATEST, MARKER
from callsheet.checkpoint.local import LocalFolder
from callsheet.checkpoint.remote import RemoteFolder
from callsheet.checkpoint.seal import MANIFEST, Seal, Unsealed, manifest_of, seal_of
from callsheet.checkpoint.storage import Folder
from callsheet.errors import CheckpointError

logger = logging.getLogger("callsheet")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A committed checkpoint: its manifest has been written.

    Attributes:
        path: the path or URL of its folder.
        seal: the content of its manifest.
    """

    path: str
    seal: Seal

    @property
    def name(self) -> str:
        """The name of the checkpoint's folder, without its parents."""
        return os.path.basename(self.path)

    @property
    def step(self) -> int:
        """The training step that is stored in the manifest's `info`, or -1 if there is none."""
        step = self.seal.info.get("step")
        return step if type(step) is int else -1

    @property
    def world_size(self) -> int:
        """How many ranks wrote the checkpoint."""
        return self.seal.world_size


class Found(NamedTuple):
    """The checkpoints, unfinished checkpoints and other folders that were found in a folder of checkpoints.

    Attributes:
        checkpoints: the committed checkpoints, newest first.
        skipped: the paths of the other folders, each with the reason why it is no checkpoint.
        abandoned: the paths of unfinished checkpoints that killed writers left.
    """

    checkpoints: list[Checkpoint]
    skipped: list[tuple[str, str]]
    abandoned: list[str]


def open_folder(path: str | os.PathLike[str]) -> Folder:
    """Return an object through which the folder at a path or URL is read and written.

    Args:
        path: a local path, or a URL such as `s3://bucket/run`. The folder need not exist.

    Raises:
        CheckpointError: the URL's protocol is unknown, or needs a package that is not installed.
    """
    name = os.fspath(path)
    protocol, _, rest = name.partition("://")
    if rest and protocol != "file":
        return RemoteFolder.at(name)
    return LocalFolder(rest or name)


def find_checkpoints(root: str | os.PathLike[str]) -> Found:
    """Return the checkpoints directly under a folder, newest first.

    They are sorted by the time at which they were sealed and not by step: after a run has resumed from an earlier checkpoint,
    checkpoints with later steps remain that are obsolete.

    Digests are checked only when a checkpoint is read; a resume tries the checkpoints in order until one is valid. Links are
    ignored.

    Args:
        root: the path or URL of the folder. If it does not exist, it has no checkpoints.

    Raises:
        CheckpointError: the folder cannot be read.
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
    """Return the newest checkpoint directly under a folder, or None if there is none.

    Args:
        root: the path or URL of the folder.

    Raises:
        CheckpointError: the folder cannot be read.
    """
    return next(iter(find_checkpoints(root).checkpoints), None)


def read_manifest(path: str | os.PathLike[str]) -> Seal:
    """Return the manifest of a checkpoint. The manifest's own digest is checked, but not the files that it lists.

    Args:
        path: the path or URL of the checkpoint's folder.

    Raises:
        Unsealed: there is no valid manifest, so the folder is not a checkpoint.
        CheckpointError: the manifest cannot be read.
    """
    return manifest_of(open_folder(path))


def delete_checkpoint(path: str | os.PathLike[str]) -> None:
    """Delete a checkpoint, or the rest of a checkpoint whose writing or deletion was interrupted.

    The manifest is deleted first, so that a process that is killed in the middle leaves no checkpoint.

    Args:
        path: the path or URL of the checkpoint's folder.

    Raises:
        CheckpointError: the folder is not that of a checkpoint or is a link, or the disk reports an error.
    """
    folder = open_folder(path)
    if not folder.is_folder() or not _is_ours(folder):
        raise CheckpointError(f"{folder.path} is not the folder of a checkpoint, so it is not deleted; remove it by hand")
    remove(folder)


def delete_abandoned(path: str | os.PathLike[str]) -> None:
    """Delete an incomplete checkpoint folder, left by a process that was killed while it wrote or deleted the checkpoint.

    This may be called only if no other process can be writing to the folder.

    Raises `CheckpointError` for any other folder, and if the disk reports an error.
    """
    folder = open_folder(path)
    if not folder.is_folder() or not _is_draft(folder):
        raise CheckpointError(f"{folder.path} is not an unfinished checkpoint, so it is not deleted; remove it by hand")
    remove(folder)


def delete_later(path: str | os.PathLike[str], *, is_abandoned: bool = False) -> None:
    """Delete a checkpoint on a background thread.

    A normal exit of the process waits until the checkpoint is deleted. An error is logged as a warning.

    Args:
        path: the path or URL of the checkpoint's folder.
        is_abandoned: whether the checkpoint is unfinished because its writer was killed. Then a committed checkpoint at `path` is
            not deleted.
    """

    def delete() -> None:
        try:
            delete_abandoned(path) if is_abandoned else delete_checkpoint(path)
        except CheckpointError as error:
            logger.warning("an old checkpoint could not be deleted: %s", error)

    begin_deletion(delete)


def point_latest(path: str | os.PathLike[str]) -> None:
    """Write the name of a committed checkpoint to the file `latest`, next to the checkpoint's folder.

    The file is for people and scripts; callsheet does not read it.

    Args:
        path: the path or URL of the checkpoint's folder.

    Raises:
        CheckpointError: the folder is not a committed checkpoint, or the file cannot be written.
    """
    folder = open_folder(path)
    checkpoint = Checkpoint(folder.path, manifest_of(folder))
    folder.parent().replace(LATEST, f"{checkpoint.name}\n".encode())


def prepare_folder(folder: Folder, overwrite: bool) -> Seal | None:
    """Create the folder if needed, and remove everything from it except a committed checkpoint.

    Return the seal (manifest) of that checkpoint, or None.

    Raises `CheckpointError` if the folder holds files that do not belong to a checkpoint, or if it holds a committed checkpoint and
    `overwrite` is False.
    """
    finish_deletions()
    folder.make()
    try:
        old = manifest_of(folder)
    except Unsealed:
        if not _is_ours(folder) and folder.entries():
            raise CheckpointError(f"{folder.path} holds files that do not belong to a checkpoint; choose a new folder") from None
        old = None
    if old is not None and not overwrite:
        raise CheckpointError(f"{folder.path} is already a sealed checkpoint; choose a new folder or pass overwrite=True")
    clear(folder)
    return old


def clear(folder: Folder) -> None:
    """Remove everything in the folder that its manifest does not list, except the marker file `checkpoint.txt`.

    If there is no manifest, remove everything else.
    """
    kept = {MARKER}
    with contextlib.suppress(Unsealed):
        kept |= {MANIFEST, *manifest_of(folder).files}
    for name in folder.entries():
        if name not in kept:
            folder.remove(name)


def remove(folder: Folder) -> None:
    """Remove the folder. The manifest is removed first, and the marker file `checkpoint.txt` last."""
    if MANIFEST in folder.entries():
        folder.remove(MANIFEST)
        folder.sync()  # otherwise, after a crash, the manifest could still exist without its files
    clear(folder)
    if MARKER in folder.entries():
        folder.remove(MARKER)
    folder.remove_itself()


def _is_draft(folder: Folder) -> bool:
    """Return whether the folder is an unfinished checkpoint: it has no manifest, and is empty or has the file `checkpoint.txt`.

    Such a checkpoint was never committed, or its deletion has begun.
    """
    found = folder.entries()
    return MANIFEST not in found and (not found or found.get(MARKER) is not None)


def _is_ours(folder: Folder) -> bool:
    if folder.entries().get(MARKER) is not None:
        return True
    with contextlib.suppress(Unsealed):
        manifest_of(folder)
        return True
    return False
