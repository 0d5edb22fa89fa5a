"""InstructLab's functions that send callbacks as source code. They raise `NotSupported`, because callsheet executes no such code."""

from __future__ import annotations

from typing import NoReturn

from callsheet.errors import NotSupported

_HINT = (
    "source is sent to nobody here, and none is executed: run_training(torch_args, TrainingArgs(callbacks=[...])) sends callbacks with their "
    "arguments and states, as callsheet.transport.pack does for a launcher of your own (see docs/launch.md)"
)


def serialize_callback(callback: object) -> NoReturn:
    """Raise NotSupported, because callsheet sends and executes no source code.

    Args:
        callback: is not used.

    Raises:
        NotSupported: always; the message says how callbacks are sent instead.
    """
    raise NotSupported(f"serialize_callback(): {_HINT}")


def deserialize_callback(encoded: str) -> NoReturn:
    """Raise NotSupported, because callsheet sends and executes no source code.

    Args:
        encoded: is not used.

    Raises:
        NotSupported: always; the message says how callbacks are sent instead.
    """
    raise NotSupported(f"deserialize_callback(): {_HINT}")


def serialize_callbacks_for_cli(callbacks: object) -> NoReturn:
    """Raise NotSupported, because callsheet sends and executes no source code.

    Args:
        callbacks: is not used.

    Raises:
        NotSupported: always; the message says how callbacks are sent instead.
    """
    raise NotSupported(f"serialize_callbacks_for_cli(): {_HINT}")


def deserialize_callbacks_from_cli(encoded: str) -> NoReturn:
    """Raise NotSupported, because callsheet sends and executes no source code.

    Args:
        encoded: is not used.

    Raises:
        NotSupported: always; the message says how callbacks are sent instead.
    """
    raise NotSupported(f"deserialize_callbacks_from_cli(): {_HINT}")


def reject_command_line(arguments: list[str]) -> NoReturn:
    """Raise NotSupported, because callsheet does not start its ranks with a command line as InstructLab does."""
    given = next((argument.partition("=")[0] for argument in arguments if argument.startswith("--callbacks")), "")
    raise NotSupported(f"{given or 'a command line'}: {_HINT}")
