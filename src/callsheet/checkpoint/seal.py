"""The seal of a checkpoint: the file `manifest.json`, which is written last. A folder without a valid manifest is not a checkpoint.

The manifest lists every file with its size and SHA-256. It also stores the format version, the kind of content, the number of
ranks, and `info`, any data of the writer. It begins with a digest of all bytes that follow, so that any change is detected. It is
written after all other files are durable. A new manifest is written in place, without a rename, which object stores do not have:
if the writing is interrupted, the digest does not match, and the manifest is invalid.
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
FORMAT_VERSION = 1

_SEALED_PATTERN = re.compile(rb'\{"sha256": "([0-9a-f]{64})",(.*)', re.DOTALL)
_MAX_RANKS = 1 << 24


class Unsealed(CheckpointError):
    """The folder is not a checkpoint: its manifest is missing, or the manifest's content does not match the digest in it.

    A writer that was killed leaves such a folder.
    """


@dataclass(frozen=True, slots=True)
class Seal:
    """The content of a checkpoint's manifest.

    Attributes:
        kind: what the folder holds; `callsheet.checkpoint` for every checkpoint of callsheet.
        world_size: how many ranks wrote the files.
        files: the size and digest of each file, by name.
        info: the data that was given when the checkpoint was written, such as the step.
        sealed_at: when the manifest was written, in seconds since 1970.
    """

    kind: str
    world_size: int
    files: Mapping[str, FileSeal]
    info: dict[str, Any]
    sealed_at: float

    @property
    def size_bytes(self) -> int:
        """The size in bytes of all files that the manifest lists, together."""
        return sum(file.size_bytes for file in self.files.values())


def plain_info(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of `info`, in the form in which it will be read from a manifest.

    Raise `CheckpointError` if `info` is not plain data or contains a tensor.
    """
    document, tensors = flatten(dict(info))
    if tensors:
        raise CheckpointError(f"info.{next(iter(tensors))}: a manifest cannot hold a tensor; give its .item()")
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
    """Write the manifest, which makes `folder` a valid checkpoint. All other files must already be written and durable.

    `info` is stored in the manifest. It may contain everything that `plain.flatten` accepts, except tensors. With `replace`, an
    existing manifest is replaced atomically.

    Raises `CheckpointError` if the folder is sealed already (unless `replace`), a file is missing or has another size, or the disk
    reports an error.
    """
    sealed = Seal(kind, world_size, dict(files), plain_info(info), time.time())
    found = folder.entries()
    _check_present(folder, found, sealed.files)
    if not replace and MANIFEST in found:
        raise CheckpointError(f"{folder.path} is already sealed; write to a new folder")
    body = json.dumps({"format": FORMAT_VERSION, **asdict(sealed), "info": flatten(sealed.info)[0]}, indent=1, allow_nan=False)[
        1:
    ].encode()
    content = b'{"sha256": "%s",' % hashlib.sha256(body).hexdigest().encode() + body
    folder.sync()  # make the files' directory entries durable before the manifest lists them
    if replace:
        folder.replace(MANIFEST, content)
    else:
        folder.write(MANIFEST, [content])
    folder.sync()
    return sealed


def manifest_of(folder: Folder) -> Seal:
    """Return the manifest of the checkpoint in `folder`. The manifest's own digest is checked, but not the files that it lists.

    Raises `Unsealed` if there is no valid manifest, and `CheckpointError` if it cannot be read or parsed.
    """
    try:
        with folder.open(MANIFEST) as file:
            content = file.read()
    except CheckpointError as error:
        if isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
            raise Unsealed(
                f"{folder.path} is not a checkpoint: it has no {MANIFEST}, so its writer never finished; use another"
            ) from None
        raise  # the manifest may exist, but cannot be read, so raise this error and not `Unsealed`
    parts = _SEALED_PATTERN.fullmatch(content)
    if parts is None or hashlib.sha256(parts[2]).hexdigest().encode() != parts[1]:
        raise Unsealed(f"{folder.path} is not a checkpoint: its {MANIFEST} is truncated or was changed; use another")
    try:
        return _parse(json.loads(content), folder)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{folder.path}: its {MANIFEST} is malformed ({error!r}); use another checkpoint") from error


def seal_of(folder: Folder) -> Seal:
    """Return the manifest of the checkpoint in `folder`, after checking the files that it lists.

    All files must exist, be regular files, and have the right size. Digests are not checked.

    Raises `CheckpointError` with the reason if the checkpoint is not valid.
    """
    sealed = manifest_of(folder)
    _check_present(folder, folder.entries(), sealed.files)
    return sealed


def _parse(content: dict[str, Any], folder: Folder) -> Seal:
    version = content["format"]
    if type(version) is not int or not 1 <= version <= FORMAT_VERSION:
        reason = f"its {MANIFEST} has format {version!r}, and this version of callsheet reads up to {FORMAT_VERSION}"
        raise CheckpointError(f"{folder.path}: {reason}; use a newer callsheet")
    ranks = content["world_size"]
    if type(ranks) is not int or not 1 <= ranks <= _MAX_RANKS:
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
            raise CheckpointError(f"{folder.path} is not valid: {name} is missing; use another checkpoint")
        size = found[name]
        if size is None:
            raise CheckpointError(f"{folder.path} is not valid: {name} is not a regular file; use another checkpoint")
        if size != file.size_bytes:
            sizes = f"{size} bytes, not {file.size_bytes}"
            raise CheckpointError(f"{folder.path} is not valid: {name} has {sizes}; use another checkpoint")
