"""Where a checkpoint's files stand: a folder of this machine, or one that is reached through fsspec."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import BinaryIO, Protocol

from callsheet.errors import CheckpointError

Chunk = bytes | memoryview

_PIECE = 1 << 22  # bytes


@dataclass(frozen=True, slots=True)
class FileSeal:
    """One file: its size, and the SHA-256 of its content in hexadecimal."""

    size_bytes: int
    sha256: str


class Folder(Protocol):
    """A folder and the files directly in it. Whatever refuses is a `CheckpointError` that names the file, the reason and the mend."""

    path: str
    """As messages name it."""

    def child(self, name: str) -> Folder:
        """The folder `name` in it, which need not be there."""

    def parent(self) -> Folder:
        """The folder it stands in."""

    def is_folder(self) -> bool:
        """Whether it is there, itself and not a link."""

    def entries(self) -> dict[str, int | None]:
        """Everything in it by name: the size of a regular file in bytes, None for anything else; nothing where it is not there."""

    def folders(self) -> list[str]:
        """The names of the folders in it, links left out; none where it is not there."""

    def make(self) -> None:
        """Make it, and what it stands in."""

    def write(self, name: str, chunks: Iterable[Chunk]) -> FileSeal:
        """Write a new file, digested on the way, and durable once this returns; where it fails, what was written is taken away."""

    def replace(self, name: str, content: bytes) -> FileSeal:
        """Write a file in the place of the one that stands: a reader sees the old or the new one, whole."""

    def open(self, name: str) -> contextlib.AbstractContextManager[BinaryIO]:
        """Open a regular file for reading; no link is followed, and no pipe can make us wait."""

    def remove(self, name: str) -> None:
        """Remove an entry, and all that is in it."""

    def remove_itself(self) -> None:
        """Remove the folder, which is empty."""

    def sync(self) -> None:
        """Make the names in it durable."""


def plain_name(folder: str, name: str) -> str:
    """`name`; `CheckpointError` where it is not that of a file directly in the folder."""
    if name in ("", ".", "..") or any(c in name for c in "/\\:\0"):
        raise CheckpointError(f"{folder}: {name!r} is not the name of a file inside a checkpoint; use plain names")
    return name


def digested(chunks: Iterable[Chunk], seal: list[FileSeal]) -> Iterator[Chunk]:
    """The chunks as they pass; once all have, their seal is appended to `seal`."""
    digest, size = hashlib.sha256(), 0
    for chunk in chunks:
        digest.update(chunk)
        size += len(chunk)
        yield chunk
    seal.append(FileSeal(size, digest.hexdigest()))


def measure(folder: Folder, name: str) -> FileSeal:
    """The seal of a file that stands."""
    seal: list[FileSeal] = []
    with folder.open(name) as file:
        for _ in digested(iter(lambda: file.read(_PIECE), b""), seal):
            pass
    return seal[0]


def verify(folder: Folder, name: str, expected: FileSeal) -> None:
    """Digest a sealed file piece by piece; `CheckpointError` where it is not what was sealed."""
    _compare(folder, name, measure(folder, name), expected)


def read_verified(folder: Folder, name: str, expected: FileSeal) -> bytes:
    """The content of a sealed file, read once: the bytes that come back are the bytes that were digested."""
    with folder.open(name) as file:
        content = file.read(expected.size_bytes + 1)
    _compare(folder, name, FileSeal(len(content), hashlib.sha256(content).hexdigest()), expected)
    return content


def _compare(folder: Folder, name: str, found: FileSeal, expected: FileSeal) -> None:
    if found != expected:
        raise CheckpointError(
            f"{folder.path}/{name} was changed or damaged after it was sealed (its digest differs); use another checkpoint"
        )
