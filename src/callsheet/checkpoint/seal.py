"""The seal of a checkpoint: `manifest.json`, written last. A folder without its seal does not exist.

The manifest lists every file with its size and SHA-256, and tells a format version, a kind, how many ranks wrote, and a free `info`.
It begins with the digest of all its bytes that follow, so that not a bit of it can change unseen. It is written in place after
everything else is durable: half a manifest holds no better than none, and no rename is needed (an object store has none).
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from callsheet.checkpoint.plain import flatten, unflatten
from callsheet.checkpoint.storage import FileSeal, Folder, plain_name
from callsheet.errors import CheckpointError

MANIFEST = "manifest.json"
FORMAT = 1

_SEALED = re.compile(rb'\{"sha256": "([0-9a-f]{64})",(.*)', re.DOTALL)
_MANY_RANKS = 1 << 24


class Unsealed(CheckpointError):
    """No manifest, or one that does not match its own digest: what a killed writer leaves. There is no checkpoint."""


@dataclass(frozen=True, slots=True)
class Seal:
    """What a manifest says: files by their name in the folder, by how many ranks, and when they were sealed (seconds since the epoch)."""

    kind: str
    world_size: int
    files: Mapping[str, FileSeal]
    info: dict[str, Any]
    sealed_at: float

    @property
    def size_bytes(self) -> int:
        """Of all files that the seal counts, in bytes."""
        return sum(file.size_bytes for file in self.files.values())


def plain_info(info: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `info` as it will be read back; `CheckpointError` where it is not plain data, or holds a tensor."""
    document, tensors = flatten(dict(info))
    if tensors:
        raise CheckpointError(f"info.{next(iter(tensors))}: a tensor cannot stand in a manifest; give its .item()")
    copy: dict[str, Any] = unflatten(document, {})
    return copy


def write_seal(
    folder: Folder,
    files: Mapping[str, FileSeal],
    info: Mapping[str, Any],
    *,
    kind: str,
    world_size: int = 1,
    replace: bool = False,
) -> Seal:
    """Make `folder` a checkpoint of these files, which must all be written and durable.

    `info` may hold what `plain.flatten` takes, except tensors. With `replace` the seal takes the place of the one that stands, in one
    instant.

    Raises `CheckpointError` where the folder is sealed already, a file is not there in its size, or the disk refuses.
    """
    sealed = Seal(kind, world_size, dict(files), plain_info(info), time.time())
    found = folder.entries()
    _check_present(folder, found, sealed.files)
    if not replace and MANIFEST in found:
        raise CheckpointError(f"{folder.path} is sealed already; write to a new folder")
    body = json.dumps({"format": FORMAT, **asdict(sealed), "info": flatten(sealed.info)[0]}, indent=1, allow_nan=False)[
        1:
    ].encode()
    content = b'{"sha256": "%s",' % hashlib.sha256(body).hexdigest().encode() + body
    folder.sync()  # the files' own entries, before anything says that they exist
    if replace:
        folder.replace(MANIFEST, content)
    else:
        folder.write(MANIFEST, [content])
    folder.sync()
    return sealed


def manifest_of(folder: Folder) -> Seal:
    """What the manifest says, held against its own digest, but not yet against the files.

    Raises `Unsealed` where there is none that holds, and `CheckpointError` where it cannot be read or understood.
    """
    try:
        with folder.open(MANIFEST) as file:
            content = file.read()
    except CheckpointError as error:
        if isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
            raise Unsealed(
                f"{folder.path} is not a checkpoint: it has no {MANIFEST}, so its writer never finished; use another"
            ) from None
        raise  # it may well be there: a disk that fails for a moment must not make it a leftover
    parts = _SEALED.fullmatch(content)
    if parts is None or hashlib.sha256(parts[2]).hexdigest().encode() != parts[1]:
        raise Unsealed(f"{folder.path} is not a checkpoint: its {MANIFEST} is truncated or was changed; use another")
    try:
        return _understood(json.loads(content), folder)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{folder.path}: its {MANIFEST} is malformed ({error!r}); use another checkpoint") from error


def seal_of(folder: Folder) -> Seal:
    """What the manifest says, held against the files: all there, regular, in their size (not yet digested).

    Raises `CheckpointError` saying why the checkpoint does not hold.
    """
    sealed = manifest_of(folder)
    _check_present(folder, folder.entries(), sealed.files)
    return sealed


def _understood(content: dict[str, Any], folder: Folder) -> Seal:
    version = content["format"]
    if type(version) is not int or not 1 <= version <= FORMAT:
        reason = f"its {MANIFEST} has format {version!r}, and this callsheet knows up to {FORMAT}"
        raise CheckpointError(f"{folder.path}: {reason}; use a newer callsheet")
    ranks = content["world_size"]
    if type(ranks) is not int or not 1 <= ranks <= _MANY_RANKS:
        raise ValueError(f"world_size {ranks!r}")
    files = {
        plain_name(folder.path, name): FileSeal(int(file["size_bytes"]), str(file["sha256"]))
        for name, file in content["files"].items()
    }
    info = unflatten(content["info"], {})
    if not isinstance(info, dict):
        raise TypeError("info is not an object")
    return Seal(str(content["kind"]), ranks, files, info, float(content["sealed_at"]))


def _check_present(folder: Folder, found: Mapping[str, int | None], files: Mapping[str, FileSeal]) -> None:
    for name, file in files.items():
        if plain_name(folder.path, name) not in found:
            raise CheckpointError(f"{folder.path} does not hold: {name} is missing; use another checkpoint")
        size = found[name]
        if size is None:
            raise CheckpointError(f"{folder.path} does not hold: {name} is not a regular file; use another checkpoint")
        if size != file.size_bytes:
            sizes = f"{size} bytes, not {file.size_bytes}"
            raise CheckpointError(f"{folder.path} does not hold: {name} has {sizes}; use another checkpoint")
