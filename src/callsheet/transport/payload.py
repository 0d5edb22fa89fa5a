"""`pack` and `unpack`: callbacks on their way into other processes."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from callsheet.callback import Callback, label_of
from callsheet.registration import check_callback
from callsheet.transport.data import decode, encode
from callsheet.transport.names import become
from callsheet.transport.preflight import check_arrival
from callsheet.transport.sealed import LARGEST, Key, PrivateFolder, TransportError, read_private, seal, unseal, write_private

PAYLOAD = "CALLSHEET_PAYLOAD"
KEY = "CALLSHEET_PAYLOAD_KEY"
"""The environment variables of a process that is sent something. They are taken out of the environment when they are read."""

is_sent = False
"""This process was started for what it was sent, by `launch` or for a trial."""
is_opening = False
"""It is just taking it in, which imports the script."""


@dataclass(frozen=True, slots=True)
class Payload:
    """Callbacks as bytes, ready to be sent; `post` sends them."""

    names: tuple[str, ...]
    """Of the callbacks."""
    content: bytes = field(repr=False)

    @contextmanager
    def post(self) -> Iterator[dict[str, str]]:
        """Lay the payload down for one launch; gives the environment variables that the processes need, and removes all at the end.

        Example:
            ```python
            with pack(callbacks).post() as variables:
                subprocess.run(["torchrun", "train.py"], env=os.environ | variables, check=True)
            ```
        """
        with PrivateFolder() as folder:
            key = Key.new()
            path = folder.path / "payload"
            write_private(path, seal(key, "payload", self.content))
            yield {PAYLOAD: str(path), KEY: key.text()}


def pack(callbacks: Iterable[Callback], *, allow_pickle: bool = False, extra: Mapping[str, Any] | None = None) -> Payload:
    """Callbacks as a payload: classes by their import path, arguments, state.

    They are rebuilt once in a fresh interpreter, and compared with the originals, before anything is sent.

    Args:
        callbacks: what is to arrive over there.
        allow_pickle: send what has no import path (lambdas, closures, what a notebook defines) as signed cloudpickle.
        extra: further values, which `Unpacked.extra` gives.

    Raises:
        TransportError: something in them cannot be carried, or would arrive as something else; the message names it and the mend.
        NotACallbackError: something is no callback.
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
        for part in (encode(around, allow_pickle=False), encode(values, allow_pickle=allow_pickle))
    )
    if len(content) > LARGEST // 2:
        raise TransportError(
            f"the callbacks and arguments are {len(content)} bytes, and {LARGEST // 2} are the most; save what is large to a file, and "
            "give its path"
        )
    payload = Payload(tuple(map(label_of, callbacks)), content)
    with payload.post() as variables:
        check_arrival(values, variables)
    return payload


def unpack() -> list[Callback]:
    """The callbacks that were sent to this process, which was started with the variables that `Payload.post` gave.

    May be called once: the key is taken out of the environment, so that processes which this one starts do not have it.

    Raises:
        TransportError: nothing was sent, or it is not what was sent: the file is not this user's alone, was changed, or is of another launch.
    """
    return open_payload(os.environ).callbacks


@dataclass(frozen=True, slots=True)
class Unpacked:
    """What has arrived."""

    callbacks: list[Callback]
    extra: dict[str, Any]
    folder: Path
    key: Key
    launcher: int
    """The process that sent it."""


def open_payload(environment: MutableMapping[str, str], *, is_ours: bool = False) -> Unpacked:
    """What was sent to this process; with `is_ours` the process exists for that alone, and becomes like the one that sent it.

    Raises:
        TransportError: see `unpack`.
    """
    global is_sent, is_opening
    path, text = environment.pop(PAYLOAD, ""), environment.pop(KEY, "")
    if not path or not text:
        raise TransportError(
            f"nothing was sent to this process: {PAYLOAD if not path else KEY} is not in its environment. Start it with the variables that "
            "Payload.post() gives, and unpack once"
        )
    key = Key.read(text)
    content = unseal(key, "payload", read_private(Path(path)), path)
    end = 8 + int.from_bytes(content[:8], "little")
    around = decode(content[8:end])
    if around["python"].split(".")[:2] != platform.python_version().split(".")[:2]:
        raise TransportError(
            f"the payload comes from Python {around['python']}, and this is {platform.python_version()}: use one for both"
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
