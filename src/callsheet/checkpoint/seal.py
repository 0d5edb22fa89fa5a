"""The seal of a checkpoint: `manifest.json`, written last. A folder without its seal does not exist.

The manifest lists every file with its size and SHA-256, and tells a format version, a kind and a free `info`. It begins with the
digest of all its bytes that follow, so that not a bit of it can change unseen. It is written in place after everything else is
on disk: half a manifest holds no better than none, and no rename is needed (an object store has none).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from callsheet.checkpoint.disk import FileSeal, inside, open_regular, os_errors, sync_folder, write_file
from callsheet.checkpoint.plain import flatten, unflatten
from callsheet.errors import CheckpointError

MANIFEST = "manifest.json"
FORMAT = 1

_SEALED = re.compile(rb'\{"sha256": "([0-9a-f]{64})",(.*)', re.DOTALL)


class Unsealed(CheckpointError):
    """No manifest, or one that does not match its own digest: what a killed writer leaves. There is no checkpoint."""


@dataclass(frozen=True, slots=True)
class Seal:
    """What a manifest says: files by their name inside the folder, and when they were sealed (seconds since the epoch)."""

    kind: str
    files: Mapping[str, FileSeal]
    info: dict[str, Any]
    sealed_at: float

    @property
    def size_bytes(self) -> int:
        """Of all files that the seal counts, in bytes."""
        return sum(file.size_bytes for file in self.files.values())


def write_seal(folder: Path, files: Mapping[str, FileSeal], info: Mapping[str, Any], *, kind: str, replace: bool = False) -> Seal:
    """Make `folder` a checkpoint of these files, which must all be written and synced.

    `info` may hold what `plain.flatten` takes, except tensors. With `replace` the seal takes the place of the one that stands,
    in one instant (a rename here, a plain put on an object store).

    Raises `CheckpointError` where the folder is sealed already, a file is not there in its size, or the disk refuses.
    """
    document, tensors = flatten(dict(info))
    if tensors:
        raise CheckpointError(f"info.{next(iter(tensors))}: a tensor cannot stand in a manifest; give its .item()")
    for name, file in files.items():
        _check_present(folder, name, file)
    if (folder / MANIFEST).exists() and not replace:
        raise CheckpointError(f"{folder} is sealed already; write to a new folder")
    sealed = Seal(kind, dict(files), unflatten(document, {}), time.time())
    body = json.dumps({"format": FORMAT, **asdict(sealed), "info": document}, indent=1, allow_nan=False)[1:].encode()
    content = b'{"sha256": "%s",' % hashlib.sha256(body).hexdigest().encode() + body
    with os_errors("seal", folder):
        for parent in {inside(folder, name).parent for name in files} | {folder}:
            sync_folder(parent)  # the files' own entries, before anything says that they exist
        if replace:
            write_file(folder, f"{MANIFEST}.new", [content])
            os.replace(folder / f"{MANIFEST}.new", folder / MANIFEST)
        else:
            write_file(folder, MANIFEST, [content])
        sync_folder(folder)
        sync_folder(folder.absolute().parent)
    return sealed


def read_manifest(folder: Path) -> Seal:
    """What the manifest says, held against its own digest, but not yet against the files.

    Raises `Unsealed` where there is none that holds, and `CheckpointError` where it cannot be read or understood.
    """
    path = folder / MANIFEST
    try:
        with os_errors("read", path), open_regular(path) as file:
            content = file.read()
    except CheckpointError as error:
        if isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
            raise Unsealed(
                f"{folder} is not a checkpoint: it has no {MANIFEST}, so its writer never finished; use another"
            ) from None
        raise  # it may well be there: a disk that fails for a moment must not make it a leftover
    parts = _SEALED.fullmatch(content)
    if parts is None or hashlib.sha256(parts[2]).hexdigest().encode() != parts[1]:
        raise Unsealed(f"{folder} is not a checkpoint: its {MANIFEST} is truncated or was changed; use another")
    try:
        return _understood(json.loads(content), folder)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{folder}: its {MANIFEST} is malformed ({error!r}); use another checkpoint") from error


def read_seal(folder: Path) -> Seal:
    """What the manifest says, held against the files: all there, regular, inside the folder, in their size (not yet digested).

    Raises `CheckpointError` saying why the checkpoint does not hold.
    """
    sealed = read_manifest(folder)
    for name, file in sealed.files.items():
        _check_present(folder, name, file)
    return sealed


def _understood(content: dict[str, Any], folder: Path) -> Seal:
    version = content["format"]
    if type(version) is not int or not 1 <= version <= FORMAT:
        reason = f"its {MANIFEST} has format {version!r}, and this callsheet knows up to {FORMAT}"
        raise CheckpointError(f"{folder}: {reason}; use a newer callsheet")
    files = {name: FileSeal(int(file["size_bytes"]), str(file["sha256"])) for name, file in content["files"].items()}
    for name in files:
        inside(folder, name)
    info = unflatten(content["info"], {})
    if not isinstance(info, dict):
        raise TypeError("info is not an object")
    return Seal(str(content["kind"]), files, info, float(content["sealed_at"]))


def _check_present(folder: Path, name: str, expected: FileSeal) -> None:
    path = inside(folder, name)
    with os_errors("read", path):
        try:
            found = path.lstat()
        except (FileNotFoundError, NotADirectoryError):
            raise CheckpointError(f"{folder} does not hold: {name} is missing; use another checkpoint") from None
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(f"{folder} does not hold: {name} is not a regular file; use another checkpoint")
    if found.st_size != expected.size_bytes:
        sizes = f"{found.st_size} bytes, not {expected.size_bytes}"
        raise CheckpointError(f"{folder} does not hold: {name} has {sizes}; use another checkpoint")
