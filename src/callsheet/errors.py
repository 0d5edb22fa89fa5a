"""The exceptions of callsheet, and helpers for their messages.

Every message says what is wrong, where, and what to do. All exceptions in this module derive from `CallsheetError`. Each also derives from the
built-in exception that a caller would expect (`ValueError`, `TypeError`, ...).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class CallsheetError(Exception):
    """The base class of the exceptions that callsheet raises in a training program."""


class UnknownEventError(CallsheetError, ValueError):
    """An event's name is unknown: callsheet's lifecycle has no event of this name."""


class RegistrationError(CallsheetError, ValueError):
    """A callback cannot be added. The message names the callback and its source line, and gives a hint."""


class NotACallbackError(CallsheetError, TypeError):
    """An object that is not an instance of `Callback` was given as a callback."""


class FieldNotAvailable(CallsheetError, AttributeError):
    """A context field was read at an event at which it is not available."""


class MixedUnitsError(CallsheetError, TypeError):
    """Two times in different units were compared or added."""


class RequestRejected(CallsheetError, RuntimeError):
    """A callback requested or called something that the training loop does not support, or does not allow at this point."""


class RunEndedError(CallsheetError, RuntimeError):
    """A method that continues a run, such as `fit`, was called after the run's end."""


class CheckpointError(CallsheetError, RuntimeError):
    """A checkpoint cannot be written, or is invalid when it is read."""


class RunInUseError(CallsheetError, RuntimeError):
    """Another process, or another run of this process, trains in the run's folder."""


class RunLockLostError(CheckpointError):
    """Another process has taken over the run's folder, because this process was suspended or disconnected for too long."""


class DistributedError(CallsheetError, RuntimeError):
    """The ranks could not agree, because one of them is dead, stuck, or at another place in the loop.

    The message names that rank.
    """


class HangError(CallsheetError, TimeoutError):
    """No training step has ended for much longer than a step usually takes."""


class NonFiniteError(CallsheetError, FloatingPointError):
    """A loss, norm or weight is NaN or infinite."""


class MissingPackage(CallsheetError, ImportError):
    """An optional package is not installed; the message says how to install it."""


class ConfigError(CallsheetError, ValueError):
    """An argument or a configuration value is invalid. The message names the argument or value and says what to do.

    Args:
        message: the message. Of an error that torch raises again for a worker of a dataloader, only the worker's own message is kept.
        more: further arguments of the exception.
    """

    def __init__(self, message: object = "", *more: object) -> None:
        if isinstance(message, str) and message.startswith(f"Caught {type(self).__name__} in DataLoader worker process "):
            # torch raises an error of a worker again with the worker's traceback as the message, which ends with this line.
            message = message.rpartition(f"\n{type(self).__module__}.{type(self).__name__}: ")[2].rstrip("\n")
        super().__init__(message, *more)


class UnknownArgument(ConfigError, TypeError):
    """A class or function was called with a keyword argument that it does not have. The message suggests the right argument."""


class HostError(CallsheetError, RuntimeError):
    """A host (the adapter that runs callbacks in another framework's loop) could not observe that loop.

    The host stops observing the run, and training continues.
    """


class NotSupported(CallsheetError, RuntimeError):
    """A bridge to another framework does not support an event, field or request; the message says which."""


def text_of(error: BaseException) -> str:
    """Return `str(error)`, or a placeholder text if the exception's own `__str__` raises.

    Reporting an error must not raise another one.
    """
    try:
        return str(error)
    except Exception as another:
        return f"<no text: __str__ of {type(error).__name__} raised {type(another).__name__}>"


def did_you_mean(name: str, valid: Iterable[str], *, cutoff: float = 0.5) -> str:
    """Return `; did you mean 'x'?` for the valid name that is most similar to `name`, or an empty string if none is similar.

    The comparison ignores case. A valid name such as `optimizer.lr` or `train/loss` counts as similar to its last part. `cutoff` is
    the minimal similarity, from 0 to 1.
    """
    import difflib  # import `difflib` here, because only error messages need it

    by_folded: dict[str, str] = {}
    for each in valid:
        by_folded.setdefault(each.lower(), each)
    for folded, each in by_folded.items():
        if folded != name.lower() and folded.endswith((f".{name.lower()}", f"/{name.lower()}")):
            return f"; did you mean {each!r}?"
    near = difflib.get_close_matches(name.lower(), list(by_folded), n=1, cutoff=cutoff)
    return f"; did you mean {by_folded[near[0]]!r}?" if near else ""


def check_characters(text: str, place: str) -> None:
    """Raise ConfigError if a text has half of a surrogate pair, which no tokenizer can encode. `place` says where the text is."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start]
        raise ConfigError(f"{place}: half of a surrogate pair, {half!a}, is not a character; remove it") from None


def unknown_arguments(strays: Sequence[str], options: Iterable[str]) -> str:
    """Return an error message for unknown arguments of a command. The message suggests an option similar to the first unknown one."""
    wrong = next((word.partition("=")[0] for word in strays if word.startswith("--")), None)
    return f"unknown arguments: {' '.join(strays)}{did_you_mean(wrong, options) if wrong is not None else ''}"


def names_unknown(familiar: Callable[[], Mapping[str, str]]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that makes a function raise `UnknownArgument`, with a hint, if it is called with an unknown argument.

    `familiar` returns hints by argument name, for arguments that other frameworks use.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        parameters = inspect.signature(function).parameters
        called = function.__qualname__.removesuffix(".__init__")

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            check_arguments(called, parameters, args, kwargs, familiar)
            return function(*args, **kwargs)

        return checked

    return decorate


def check_arguments(
    called: str,
    parameters: Mapping[str, inspect.Parameter],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    familiar: Callable[[], Mapping[str, str]],
) -> None:
    """Raise `UnknownArgument`, with a hint, if a call has an unknown argument, or gives a keyword-only argument by position.

    Args:
        called: the function's name in the message.
        parameters: the function's parameters by name, with `self` for a method.
        args, kwargs: the arguments of a call.
        familiar: returns hints by argument name, for arguments that other frameworks use.
    """
    kinds = {parameter.kind for parameter in parameters.values()}
    by_name = [name for name, parameter in parameters.items() if parameter.kind is parameter.KEYWORD_ONLY]
    by_place = [name for name, parameter in parameters.items() if parameter.kind <= parameter.POSITIONAL_OR_KEYWORD]
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        for name in kwargs:
            if name not in parameters:
                meant = familiar().get(name)
                known = [each for each in parameters if each != "self"]
                hint = f"; give {meant}" if meant is not None else did_you_mean(name, known, cutoff=0.6)
                raise UnknownArgument(f"{called} has no argument {name!r}{hint}")
    if inspect.Parameter.VAR_POSITIONAL not in kinds and len(args) > len(by_place) and by_name:
        misplaced = by_name[: len(args) - len(by_place)]
        written = ", ".join([*(each for each in by_place if each != "self"), *(f"{name}=..." for name in misplaced)])
        raise UnknownArgument(
            f"{called} takes {'no' if set(by_place) <= {'self'} else 'no further'} argument without its name: write {called}({written})"
        )


def where(thing: object) -> str:
    """Return `file.py:12` for a function, method or class, or `<unknown source>` if it has no source file, as in a notebook."""
    while isinstance(thing, functools.partial):
        thing = thing.func
    function = inspect.unwrap(thing) if callable(thing) else thing
    code = getattr(function, "__code__", None)
    if code is not None:
        return f"{Path(code.co_filename).name}:{code.co_firstlineno}"
    kind: Any = function if inspect.isclass(function) else type(function)
    return _where_class(kind)


@functools.lru_cache(maxsize=1024)  # cached, because finding a class in its source takes milliseconds
def _where_class(kind: Any) -> str:
    try:
        return f"{Path(inspect.getsourcefile(kind) or '?').name}:{inspect.getsourcelines(kind)[1]}"
    except (OSError, TypeError):  # the object has no source file
        return "<unknown source>"


def mark_as_users(error: BaseException) -> None:
    """Mark an error as raised by the user's code, such as a callback or a dataset, so that it ends training and is not only logged."""
    error.__dict__["_callsheet_users"] = True  # setattr would fail if the exception is a frozen dataclass


def is_users(error: BaseException) -> bool:
    """Return whether `mark_as_users` has marked the error as raised by the user's code."""
    return "_callsheet_users" in error.__dict__


def is_from_signal_handler(error: BaseException) -> bool:
    """Return whether a signal handler raised the error. Python may call signal handlers at any place in the main thread.

    A signal handler is recognized by its second argument, the interrupted frame. That frame is also the handler's caller.
    """
    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        if frame.f_back is not None:
            for value in frame.f_locals.values():
                if value is frame.f_back or (type(value) is tuple and any(each is frame.f_back for each in value)):
                    return True
        trace = trace.tb_next
    return False
