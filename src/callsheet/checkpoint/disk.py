"""Files that are on the disk once they are written, and are what was written once they are read."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from callsheet.errors import CheckpointError

_CHUNK = 1 << 22  # bytes
_MENDS = {
    errno.ENOSPC: "free space on the disk, or keep fewer checkpoints",
    errno.EDQUOT: "free space in the quota, or keep fewer checkpoints",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f)",
    errno.EACCES: "check who may write and read there",
    errno.EPERM: "check who may write and read there",
    errno.EEXIST: "choose a new folder",
    errno.ENOTDIR: "choose a path whose parents are folders",
    errno.EROFS: "choose a folder that can be written",
}


@dataclass(frozen=True, slots=True)
class FileSeal:
    """One file: its size, and the SHA-256 of its content in hexadecimal."""

    size_bytes: int
    sha256: str


def write_file(folder: Path, name: str, chunks: Iterable[bytes | memoryview]) -> FileSeal:
    """Write the new file `folder/name`, digested on the way and synced.

    Raises `CheckpointError` naming it where the disk refuses, or it stands already; what was written of it is taken away.
    """
    path = inside(folder, name)
    digest, size = hashlib.sha256(), 0
    with os_errors("write", path), open(path, "xb") as file:
        try:
            for chunk in chunks:
                digest.update(chunk)
                size += file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        except BaseException:
            with contextlib.suppress(OSError):
                file.close()  # which may flush, and be refused again
            with contextlib.suppress(OSError):
                path.unlink()
            raise
    return FileSeal(size, digest.hexdigest())


def measure(folder: Path, name: str) -> FileSeal:
    """Sync and digest a file that another writer has made: each rank measures its own, and one of them seals."""
    path = inside(folder, name)
    with os_errors("read", path), open_regular(path) as file:
        os.fsync(file.fileno())
        return _digested(file)


def read_verified(folder: Path, name: str, expected: FileSeal) -> bytes:
    """The content of a sealed file, read once: the bytes that come back are the bytes that were digested."""
    path = inside(folder, name)
    with os_errors("read", path), open_regular(path) as file:
        content = file.read(expected.size_bytes + 1)
    _compare(path, FileSeal(len(content), hashlib.sha256(content).hexdigest()), expected)
    return content


def verify(folder: Path, name: str, expected: FileSeal) -> None:
    """Digest a sealed file in chunks, for who reads it by other means; `CheckpointError` where it is not what was sealed."""
    path = inside(folder, name)
    with os_errors("read", path), open_regular(path) as file:
        _compare(path, _digested(file), expected)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable; nothing where the system cannot (Windows, some network disks)."""
    if os.name == "nt":
        return
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(fd)


def inside(folder: Path, name: str) -> Path:
    """The path of a file in the folder; `CheckpointError` for a name that leads out of it, by its spelling or by a link."""
    parts = name.split("/")
    if any(part in ("", ".", "..") for part in parts) or any(c in name for c in "\\:\0"):
        raise CheckpointError(f"{folder}: {name!r} is not the name of a file inside a checkpoint; use plain relative names")
    path = folder
    for part in parts:
        path = path / part
        if path.is_symlink():
            raise CheckpointError(f"{path} is a symbolic link; a checkpoint holds its files itself: copy them into it")
    return path


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading: no link is followed, and no pipe can make us wait."""
    flags = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    file = open(path, "rb", opener=lambda name, mode: os.open(name, mode | flags))  # noqa: SIM115 - handed to the caller open
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return file


@contextlib.contextmanager
def os_errors(verb: str, path: Path) -> Iterator[None]:
    """Turn the system's refusal into a `CheckpointError` that names the path, the reason and the mend."""
    try:
        yield
    except OSError as error:
        mend = _MENDS.get(error.errno or 0, "")
        raise CheckpointError(f"cannot {verb} {path}: {error.strerror or error}{mend and f'; {mend}'}") from error


def _compare(path: Path, found: FileSeal, expected: FileSeal) -> None:
    if found != expected:
        raise CheckpointError(f"{path} was changed or damaged after it was sealed (its digest differs); use another checkpoint")


def _digested(file: BinaryIO) -> FileSeal:
    digest, size = hashlib.sha256(), 0
    while chunk := file.read(_CHUNK):
        digest.update(chunk)
        size += len(chunk)
    return FileSeal(size, digest.hexdigest())
