"""The interface of a folder that stores a checkpoint's files, on this machine or through fsspec."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import BinaryIO, Protocol

from callsheet.errors import CheckpointError

Chunk = bytes | memoryview

_PIECE_BYTES = 1 << 22  # bytes; files are read and digested in pieces of this size


@dataclass(frozen=True, slots=True)
class FileSeal:
    """The size and digest of a file, as a manifest stores them.

    Attributes:
        size_bytes: the size in bytes.
        sha256: the SHA-256 of the content, in hexadecimal.
    """

    size_bytes: int
    sha256: str


class Folder(Protocol):
    """The interface through which the files of one folder are read and written.

    Errors are `CheckpointError`s that name the file and give the reason and a hint.
    """

    path: str
    """The folder's path or URL, for messages."""

    def child(self, name: str) -> Folder:
        """Return a folder inside this folder. The inner folder need not exist.

        Args:
            name: the name of the inner folder.
        """

    def parent(self) -> Folder:
        """Return the folder that contains this folder."""

    def is_folder(self) -> bool:
        """Return whether the folder exists and is not a link."""

    def entries(self) -> dict[str, int | None]:
        """Return everything in the folder by name: the size in bytes for a regular file, None for anything else.

        The result is empty if the folder does not exist.
        """

    def folders(self) -> list[str]:
        """Return the names of the folders inside this folder. Links are left out.

        The result is empty if the folder does not exist.
        """

    def make(self) -> None:
        """Create the folder and its parents."""

    def write(self, name: str, chunks: Iterable[Chunk]) -> FileSeal:
        """Write a new file durably. If writing fails, remove what was written.

        Args:
            name: the name of the file.
            chunks: the pieces of its content, in order. They may be made while the file is written.

        Returns:
            The file's size and digest.
        """

    def replace(self, name: str, content: bytes) -> FileSeal:
        """Write a file atomically, so that a reader sees either the old content or the new one.

        Args:
            name: the name of the file, which may exist.
            content: the new content.

        Returns:
            The file's size and digest.
        """

    def open(self, name: str) -> contextlib.AbstractContextManager[BinaryIO]:
        """Open a regular file for reading. Links are not followed, and a named pipe does not block the call.

        Args:
            name: the name of the file.

        Returns:
            A context manager with the open file, which reads bytes.
        """

    def remove(self, name: str) -> None:
        """Remove a file of this folder, or an inner folder with everything in it.

        Args:
            name: the name of the file or folder.
        """

    def remove_itself(self) -> None:
        """Remove the folder, which must be empty."""

    def sync(self) -> None:
        """Make the names of the files in the folder durable (fsync)."""


def plain_name(folder: str, name: str) -> str:
    """Return `name` if it is the name of a file directly in the folder. Raise `CheckpointError` if it is not."""
    if name in ("", ".", "..") or any(c in name for c in "/\\:\0"):
        raise CheckpointError(f"{folder}: {name!r} is not the name of a file inside a checkpoint; use plain names")
    return name


def digest_chunks(chunks: Iterable[Chunk], seal: list[FileSeal]) -> Iterator[Chunk]:
    """Yield the chunks unchanged. At the end, append their total size and their digest to the list `seal`."""
    digest, size = hashlib.sha256(), 0
    for chunk in chunks:
        digest.update(chunk)
        size += len(chunk)
        yield chunk
    seal.append(FileSeal(size, digest.hexdigest()))


def measure(folder: Folder, name: str) -> FileSeal:
    """Read an existing file, and return its size and digest."""
    seal: list[FileSeal] = []
    with folder.open(name) as file:
        for _ in digest_chunks(iter(lambda: file.read(_PIECE_BYTES), b""), seal):
            pass
    return seal[0]


def verify(folder: Folder, name: str, expected: FileSeal) -> None:
    """Raise `CheckpointError` unless a file has the size and digest that the manifest lists. The file is read piece by piece."""
    _compare(folder, name, measure(folder, name), expected)


def read_verified(folder: Folder, name: str, expected: FileSeal) -> bytes:
    """Return the content of a file, after checking it against the size and digest in the manifest.

    The file is read only once, so the returned bytes are the ones that were checked.
    """
    with folder.open(name) as file:
        content = file.read(expected.size_bytes + 1)
    _compare(folder, name, FileSeal(len(content), hashlib.sha256(content).hexdigest()), expected)
    return content


def _compare(folder: Folder, name: str, found: FileSeal, expected: FileSeal) -> None:
    if found != expected:
        raise CheckpointError(
            f"{folder.path}/{name} was changed or damaged after it was sealed (its digest differs); use another checkpoint"
        )
