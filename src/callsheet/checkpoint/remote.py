"""A folder that is accessed through fsspec, such as `s3://bucket/run`. Files are written in place and never renamed."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

from callsheet.checkpoint.storage import Chunk, FileSeal, Folder, digest_chunks, plain_name
from callsheet.errors import CheckpointError


class RemoteFolder(Folder):
    """A folder in a store that fsspec accesses; see `Folder`. A file is durable as soon as the store has accepted it.

    Args:
        files: the fsspec file system.
        root: the folder's path in that file system.
        path: the folder's URL.
    """

    def __init__(self, files: Any, root: str, path: str) -> None:
        self._files = files
        self._root = root
        self.path = path

    @classmethod
    def at(cls, url: str) -> RemoteFolder:
        """Return the folder at a URL.

        Raise `CheckpointError` if its protocol is unknown or needs a package that is not installed.
        """
        with _errors("open", url):
            import fsspec

            files, root = fsspec.core.url_to_fs(url)
        return cls(files, root.rstrip("/"), url.rstrip("/"))

    def child(self, name: str) -> RemoteFolder:
        return RemoteFolder(self._files, f"{self._root}/{name}", f"{self.path}/{name}")

    def parent(self) -> RemoteFolder:
        return RemoteFolder(self._files, self._root.rpartition("/")[0], self.path.rpartition("/")[0])

    def is_folder(self) -> bool:
        with _errors("read", self.path):
            self._files.invalidate_cache()
            return bool(self._files.isdir(self._root))

    def entries(self) -> dict[str, int | None]:
        return {_name(found): found["size"] if found["type"] == "file" else None for found in self._list_entries()}

    def folders(self) -> list[str]:
        return sorted(_name(found) for found in self._list_entries() if found["type"] == "directory")

    def make(self) -> None:
        with _errors("write", self.path):
            self._files.makedirs(self._root, exist_ok=True)

    def write(self, name: str, chunks: Iterable[Chunk]) -> FileSeal:
        seal: list[FileSeal] = []
        try:
            with _errors("write", f"{self.path}/{name}"), self._files.open(self._at(name), "wb") as file:
                for chunk in digest_chunks(chunks, seal):
                    file.write(chunk)
        except BaseException:
            with contextlib.suppress(Exception):
                self._files.rm_file(self._at(name))
            raise
        return seal[0]

    def replace(self, name: str, content: bytes) -> FileSeal:
        with _errors("write", f"{self.path}/{name}"):
            # `pipe_file` replaces the content in one call. With `open`, the content would change only when the file is closed.
            self._files.pipe_file(self._at(name), content)
        return FileSeal(len(content), hashlib.sha256(content).hexdigest())

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[BinaryIO]:
        with _errors("read", f"{self.path}/{name}"), self._files.open(self._at(name), "rb") as file:
            yield file

    def remove(self, name: str) -> None:
        with _errors("delete", f"{self.path}/{name}"):
            self._files.rm(f"{self._root}/{name}", recursive=True)

    def remove_itself(self) -> None:
        with contextlib.suppress(Exception):  # most stores have no empty folders, so there may be nothing to remove
            self._files.rmdir(self._root)

    def sync(self) -> None:
        """Do nothing, because an object store makes a file and its name durable at the same time."""

    def _at(self, name: str) -> str:
        return f"{self._root}/{plain_name(self.path, name)}"

    def _list_entries(self) -> list[dict[str, Any]]:
        with _errors("read", self.path):
            self._files.invalidate_cache()  # forget the cached listing, since other ranks write to this folder too
            try:
                found = self._files.ls(self._root, detail=True)
            except FileNotFoundError:
                return []
            return [entry for entry in found if entry["name"].rstrip("/") != self._root]  # some stores list the folder itself


@contextlib.contextmanager
def _errors(verb: str, path: str) -> Iterator[None]:
    """Convert an error inside the `with` block to a `CheckpointError`, whichever library (such as botocore) raises it."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"cannot {verb} {path}: {type(error).__name__}: {error}") from error


def _name(entry: dict[str, Any]) -> str:
    name: str = entry["name"].rstrip("/").rpartition("/")[2]
    return name
