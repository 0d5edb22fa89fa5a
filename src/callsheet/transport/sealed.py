"""Signed files in a private folder, for one launch. If another user changes a file, the change is detected before the content is used.

A sealed file consists of a magic number, the launch's id, the kind of content, the content, and an HMAC-SHA-256 over all of them.
Each launch has a new random key, which is in no file. The signature protects against other users and against files of earlier
launches. It does not protect against a program of the same user, which could also read this process's memory.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import secrets
import shutil
import stat
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from callsheet.errors import CallsheetError

MAX_CONTENT_BYTES = 128 * 2**20
"""The largest size in bytes of the callbacks and arguments, or of one rank's result. Larger data belongs in a file of its own."""
MAX_FILE_BYTES = 2 * MAX_CONTENT_BYTES
"""The largest size in bytes of a file that is read. A file has more than the content, such as the signature."""

_MAGIC = b"callsheet sealed 1\n"
# The sizes in bytes of three fields: the launch's id, the name of the content's kind (such as `result`), and the signature.
_LAUNCH_BYTES, _KIND_BYTES, _MAC_BYTES = 16, 16, 32
_SECRET_BYTES = 32

_FOLDER_PREFIX = "callsheet-launch-"
_LOCK_FILE = "lock"


class TransportError(CallsheetError, ValueError):
    """An object cannot be sent to another process, or the object that arrived differs from the one that was sent."""


@dataclass(frozen=True, slots=True)
class Key:
    """The key with which the files of one launch are signed: the launch's id, and a secret.

    The secret is in no file, on no command line and in no message.
    """

    launch: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def new(cls) -> Self:
        """Return a new key for a launch, with a random secret."""
        return cls(secrets.token_bytes(_LAUNCH_BYTES), secrets.token_bytes(_SECRET_BYTES))

    @classmethod
    def read(cls, text: str) -> Self:
        """Parse `text`, which `Key.text` has returned, and return the key.

        Raise a `TransportError` if `text` is not a key. The error does not repeat the text.
        """
        try:
            raw = bytes.fromhex(text)
        except ValueError:
            raw = b""
        if len(raw) != _LAUNCH_BYTES + _SECRET_BYTES:
            raise TransportError(
                "the launch's key is not one that callsheet made; pass on the environment that post() gives, unchanged"
            )
        return cls(raw[:_LAUNCH_BYTES], raw[_LAUNCH_BYTES:])

    def text(self) -> str:
        """Return the key as text, for an environment variable of the workers."""
        return (self.launch + self.secret).hex()


def seal(key: Key, kind: str, content: bytes) -> bytes:
    """Return the bytes of a signed file: the launch's id, the kind of the content, the content, and a signature."""
    signed = _MAGIC + key.launch + kind.encode().ljust(_KIND_BYTES) + content
    return signed + hmac.digest(key.secret, signed, "sha256")


def unseal(key: Key, kind: str, sealed: bytes, source: str) -> bytes:
    """Return the content of `sealed`, the bytes of a signed file, after checking its signature.

    Raises:
        TransportError: the content is cut short, was changed, or belongs to another launch. The message says which, and does not
            repeat the content.
    """
    head = len(_MAGIC) + _LAUNCH_BYTES + _KIND_BYTES
    if len(sealed) < head + _MAC_BYTES:
        raise TransportError(f"{source} is cut short: {len(sealed)} bytes are fewer than its header and signature have")
    signed, mac = sealed[:-_MAC_BYTES], sealed[-_MAC_BYTES:]
    launch = signed[len(_MAGIC) : len(_MAGIC) + _LAUNCH_BYTES]
    holds = hmac.compare_digest(hmac.digest(key.secret, signed, "sha256"), mac)
    if not hmac.compare_digest(launch, key.launch):
        raise TransportError(f"{source} does not belong to this launch, but to an earlier one; pack again for each launch")
    if not holds:
        raise TransportError(f"{source} was changed or cut short after it was signed: its signature is not valid")
    if signed[len(_MAGIC) + _LAUNCH_BYTES : head] != kind.encode().ljust(_KIND_BYTES):
        raise TransportError(f"{source} is not a {kind}")
    return signed[head:]


def write_private(path: Path, content: bytes) -> None:
    """Write a new file that only this user may read or write, whatever the umask is."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb") as file:
        os.fchmod(descriptor, 0o600)
        file.write(content)


def read_private(path: Path, *, largest: int = MAX_FILE_BYTES) -> bytes:
    """Return the content of a file, after checking that only this user could have written it.

    Owner and mode are checked on the opened folder and file, so that they cannot be exchanged between the check and the reading.

    Raises:
        TransportError: the file is missing, is a link or not a regular file, belongs to another user, is accessible to others, or
            is too large.
    """
    try:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise TransportError(f"{path.parent}: {_reason_for(error)}") from None
    try:
        _check_private(os.fstat(folder), path.parent)
        try:
            descriptor = os.open(path.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        except OSError as error:
            raise TransportError(f"{path}: {_reason_for(error)}") from None
    finally:
        os.close(folder)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise TransportError(f"{path} is not a regular file")
        _check_private(status, path)
        with open(descriptor, "rb", closefd=False) as file:
            content = file.read(largest + 1) if status.st_size <= largest else b""
    finally:
        os.close(descriptor)
    if status.st_size > largest or len(content) > largest:
        raise TransportError(f"{path} is larger than {largest} bytes")
    return content


def _check_private(status: os.stat_result, path: Path) -> None:
    if status.st_uid != os.geteuid():
        raise TransportError(f"{path} belongs to user {status.st_uid}, and this process runs as user {os.geteuid()}")
    if status.st_mode & 0o077:
        raise TransportError(
            f"{path} can be read or written by others (mode {stat.S_IMODE(status.st_mode):o}); only the user who launches may have access"
        )


def _reason_for(error: OSError) -> str:
    if error.errno in (errno.ELOOP, errno.ENOTDIR):
        return "it is a symbolic link, or not of the expected type"
    if error.errno == errno.ENOENT:
        return "it does not exist: the launch that it belongs to has ended"
    return os.strerror(error.errno or 0)


class PrivateFolder:
    """A folder of mode 0700 for one launch, which is removed when the `with` block ends.

    A launcher that is killed removes nothing. So each folder has a lock file that is locked by the process that made it. Whenever
    such a folder is created, this user's earlier folders are removed if their lock is free.
    """

    def __init__(self) -> None:
        import fcntl

        _sweep()
        self.path = Path(tempfile.mkdtemp(prefix=_FOLDER_PREFIX))
        # If an error occurs, remove the folder: without a lock, no later launch would remove it.
        with contextlib.ExitStack() as undo:
            undo.callback(shutil.rmtree, self.path, ignore_errors=True)
            self._lock = os.open(self.path / "lock.new", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            undo.callback(os.close, self._lock)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            # Lock the file before it gets its final name, so that no other process ever finds an unlocked file of this name.
            os.rename(self.path / "lock.new", self.path / _LOCK_FILE)
            undo.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _sweep() -> None:
    """Remove the folders that killed launchers have left behind."""
    import fcntl

    with contextlib.suppress(OSError), os.scandir(tempfile.gettempdir()) as found:
        for entry in found:
            if not entry.name.startswith(_FOLDER_PREFIX):
                continue
            with contextlib.suppress(OSError):  # skip a folder of another user, or a folder that another process is removing now
                if entry.is_dir(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_uid == os.geteuid():
                    lock = os.open(Path(entry.path) / _LOCK_FILE, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
                    try:
                        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        shutil.rmtree(entry.path, ignore_errors=True)
                    finally:
                        os.close(lock)
