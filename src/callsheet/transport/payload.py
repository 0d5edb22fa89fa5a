"""The functions `pack` and `unpack`, which send callbacks to other processes."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from callsheet.core.callback import Callback, label_of
from callsheet.core.registration import check_callback
from callsheet.transport.data import decode, encode
from callsheet.transport.names import become
from callsheet.transport.preflight import check_arrival
from callsheet.transport.sealed import (
    Key,
    PrivateFolder,
    TransportError,
    read_private,
    seal,
    unseal,
    write_private,
)

PAYLOAD_VARIABLE = "CALLSHEET_PAYLOAD"
KEY_VARIABLE = "CALLSHEET_PAYLOAD_KEY"
"""The environment variables through which a process receives a payload: the file's path, and the key to check its signature.

Both variables are removed from the environment when they are read.
"""

is_sent = False
"""Whether `launch` or a preflight check started this process to receive a payload."""
is_opening = False
"""Whether this process is rebuilding the payload now, which imports the user's script."""


@dataclass(frozen=True, slots=True)
class Payload:
    """Callbacks encoded as bytes, which `pack` made and `post` sends to other processes.

    Attributes:
        content: the encoded callbacks and values, with a description of the process that sends them.
    """

    names: tuple[str, ...]
    """The names of the callbacks, for messages."""
    content: bytes = field(repr=False)

    @contextmanager
    def post(self) -> Iterator[dict[str, str]]:
        """While the `with` block runs, provide the payload to other processes in a signed file for one launch.

        The file is readable only by the user, and is deleted at the end of the block.

        Yields:
            The environment variables that the receiving processes need: the path of the file, and the key that signs it.

        Examples:
            ```python
            with pack(callbacks).post() as variables:
                subprocess.run(["torchrun", "train.py"], env=os.environ | variables, check=True)
            ```
        """
        with PrivateFolder() as folder:
            key = Key.new()
            path = folder.path / "payload"
            write_private(path, seal(key, "payload", self.content))
            yield {PAYLOAD_VARIABLE: str(path), KEY_VARIABLE: key.text()}


def pack(callbacks: Iterable[Callback], *, allow_pickle: bool = False, extra: Mapping[str, Any] | None = None) -> Payload:
    """Encode the callbacks as a payload: the import paths of their classes, their arguments and their states.

    Before anything is sent, the callbacks are rebuilt once in a fresh interpreter and compared with the originals.

    Args:
        callbacks: the callbacks to send.
        allow_pickle: send objects without an import path (lambdas, closures, definitions in a notebook) as signed cloudpickle.
        extra: further values, returned as `Unpacked.extra`.

    Returns:
        The payload, which `unpack` decodes in another process.

    Raises:
        TransportError: something cannot be sent, or would not arrive unchanged; the message names it and says what to do.
        NotACallbackError: something is not a callback.
    """
    if is_opening:
        raise TransportError(
            "pack() was called while a new process imports the script: put the call under `if __name__ == '__main__'`"
        )
    callbacks = [check_callback(callback) for callback in callbacks]
    values = {"callbacks": callbacks, **(extra or {})}
    around = {
        "python": platform.python_version(),
        "sys_path": [path or os.getcwd() for path in sys.path],
        "argv": list(sys.argv),
        "launcher": os.getpid(),
    }
    content = b"".join(
        len(part).to_bytes(8, "little") + part
        for part in (
            encode(around, allow_pickle=False),
            encode(values, allow_pickle=allow_pickle, what="the callbacks and arguments together"),
        )
    )
    payload = Payload(tuple(map(label_of, callbacks)), content)
    with payload.post() as variables:
        check_arrival(values, variables)
    return payload


def unpack() -> list[Callback]:
    """Return the callbacks that were sent to this process with `Payload.post`.

    This can be called only once, because it removes the key from the environment, so that child processes do not inherit the key.

    Raises:
        TransportError: nothing was sent; or other users can access the file, it was changed, or it belongs to another launch.
    """
    return open_payload(os.environ).callbacks


@dataclass(frozen=True, slots=True)
class Unpacked:
    """The decoded content of a payload, in the process that received it."""

    callbacks: list[Callback]
    extra: dict[str, Any]
    folder: Path
    key: Key
    launcher: int
    """The id of the process that sent the payload."""


def open_payload(environment: MutableMapping[str, str], *, is_ours: bool = False) -> Unpacked:
    """Decode and return the payload that was sent to this process.

    With `is_ours`, callsheet started the process only for this payload. The process then uses the sender's `sys.path`, `sys.argv`
    and `__main__`.

    Raises:
        TransportError: see `unpack`.
    """
    global is_sent, is_opening
    path, text = environment.pop(PAYLOAD_VARIABLE, ""), environment.pop(KEY_VARIABLE, "")
    if not path or not text:
        raise TransportError(
            f"nothing was sent to this process: {PAYLOAD_VARIABLE if not path else KEY_VARIABLE} is not in its environment. Start it with the variables that "
            "Payload.post() gives, and unpack once"
        )
    key = Key.read(text)
    content = unseal(key, "payload", read_private(Path(path)), path)
    end = 8 + int.from_bytes(content[:8], "little")
    around = decode(content[8:end])
    if around["python"].split(".")[:2] != platform.python_version().split(".")[:2]:
        raise TransportError(
            f"the payload comes from Python {around['python']}, and this is {platform.python_version()}: use the same version for both"
        )
    if not is_ours:
        sys.path.extend(entry for entry in around["sys_path"] if entry not in sys.path)
        values = decode(content[end + 8 :])
    else:
        sys.path[:], sys.argv[:] = around["sys_path"], around["argv"]
        is_sent = is_opening = True
        try:
            values = decode(content[end + 8 :], on_script=become)
        finally:
            is_opening = False
    return Unpacked(values.pop("callbacks"), values, Path(path).parent, key, around["launcher"])
