"""A folder on this machine. Files are durable once they are written, and links are not followed."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from callsheet.checkpoint.storage import Chunk, FileSeal, Folder, digest_chunks, plain_name
from callsheet.errors import CheckpointError

_HINT_OF_ERRNO = {
    errno.ENOSPC: "free space on the disk, or keep fewer checkpoints",
    errno.EDQUOT: "free space in the quota, or keep fewer checkpoints",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f)",
    errno.EACCES: "check the permissions",
    errno.EPERM: "check the permissions",
    errno.EEXIST: "choose a new path",
    errno.ENOTDIR: "choose a path whose parents are folders",
    errno.EROFS: "choose a folder that can be written",
    errno.ELOOP: "a checkpoint may not contain links: copy the files into it",
}


class LocalFolder(Folder):
    """A folder on a disk of this machine; see `Folder` for its methods."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self.path = str(self._path)

    def child(self, name: str) -> LocalFolder:
        return LocalFolder(self._path / name)

    def parent(self) -> LocalFolder:
        return LocalFolder(self._path.parent)

    def is_folder(self) -> bool:
        return self._path.is_dir() and not self._path.is_symlink()

    def entries(self) -> dict[str, int | None]:
        with os_errors("read", self._path):
            try:
                with os.scandir(self._path) as found:
                    return {entry.name: _size(entry.stat(follow_symlinks=False)) for entry in found}
            except FileNotFoundError:
                return {}

    def folders(self) -> list[str]:
        with os_errors("read", self._path):
            try:
                with os.scandir(self._path) as found:
                    return sorted(entry.name for entry in found if entry.is_dir(follow_symlinks=False))
            except FileNotFoundError:
                return []

    def make(self) -> None:
        with os_errors("write", self._path):
            try:
                self._path.mkdir(parents=True)
            except FileExistsError:
                if not self._path.is_dir():
                    raise
            else:
                _sync(self._path.absolute().parent)

    def write(self, name: str, chunks: Iterable[Chunk]) -> FileSeal:
        path = self._path / plain_name(self.path, name)
        seal: list[FileSeal] = []
        with os_errors("write", path), open(path, "xb") as file:
            try:
                for chunk in digest_chunks(chunks, seal):
                    file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
            except BaseException:
                with contextlib.suppress(OSError):
                    file.close()  # closing flushes the file, which may raise a second error
                with contextlib.suppress(OSError):
                    path.unlink()
                raise
        return seal[0]

    def replace(self, name: str, content: bytes) -> FileSeal:
        draft = f"{plain_name(self.path, name)}.new"
        with os_errors("write", self._path / name):
            (self._path / draft).unlink(missing_ok=True)  # remove the draft of a killed writer
            seal = self.write(draft, [content])
            os.replace(self._path / draft, self._path / name)
        return seal

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[BinaryIO]:
        path = self._path / plain_name(self.path, name)
        flags = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
        with os_errors("read", path), open(path, "rb", opener=lambda path, mode: os.open(path, mode | flags)) as file:
            if _size(os.fstat(file.fileno())) is None:
                raise OSError(errno.EINVAL, "not a regular file", str(path))
            yield file

    def remove(self, name: str) -> None:
        path = self._path / name
        with os_errors("delete", path):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()

    def remove_itself(self) -> None:
        with os_errors("delete", self._path):
            self._path.rmdir()

    def sync(self) -> None:
        with os_errors("write", self._path):
            _sync(self._path)


@contextlib.contextmanager
def os_errors(verb: str, path: Path) -> Iterator[None]:
    """Convert an `OSError` inside the `with` block to a `CheckpointError` with the path, the reason and a hint."""
    try:
        yield
    except OSError as error:
        hint = _HINT_OF_ERRNO.get(error.errno or 0, "")
        raise CheckpointError(f"cannot {verb} {path}: {error.strerror or error}{hint and f'; {hint}'}") from error


def _size(found: os.stat_result) -> int | None:
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def _sync(path: Path) -> None:
    """Make the names of a folder's files durable (fsync). Do nothing where that is impossible (Windows, some network disks)."""
    if os.name == "nt":
        return
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(fd)
