"""InstructLab's way of sending callbacks to its ranks: as source on a command line, where it is executed. Refused by name."""

from __future__ import annotations

from typing import NoReturn

from callsheet.errors import NotSupported

_INSTEAD = (
    "source is sent to nobody here, and none is executed: run_training(torch_args, TrainingArgs(callbacks=[...])) sends callbacks with their "
    "arguments and states, as callsheet.transport.pack does for a launcher of your own (see docs/launch.md)"
)


def serialize_callback(callback: object) -> NoReturn:
    """Refused. Raises NotSupported."""
    raise NotSupported(f"serialize_callback(): {_INSTEAD}")


def deserialize_callback(encoded: str) -> NoReturn:
    """Refused. Raises NotSupported."""
    raise NotSupported(f"deserialize_callback(): {_INSTEAD}")


def serialize_callbacks_for_cli(callbacks: object) -> NoReturn:
    """Refused. Raises NotSupported."""
    raise NotSupported(f"serialize_callbacks_for_cli(): {_INSTEAD}")


def deserialize_callbacks_from_cli(encoded: str) -> NoReturn:
    """Refused. Raises NotSupported."""
    raise NotSupported(f"deserialize_callbacks_from_cli(): {_INSTEAD}")


def reject_command_line(arguments: list[str]) -> NoReturn:
    """InstructLab's `main_ds.py` is a program for its ranks; here the ranks are given no command line. Raises NotSupported."""
    given = next((argument.partition("=")[0] for argument in arguments if argument.startswith("--callbacks")), "")
    raise NotSupported(f"{given or 'a command line'}: {_INSTEAD}")
