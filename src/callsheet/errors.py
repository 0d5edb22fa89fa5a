"""What callsheet raises, and how it words it.

Every error says what was wrong, where, and the mend. All share the base `CallsheetError`; those that a caller may want to
tell apart have a class of their own, which is also the built-in kind that a caller would expect (`ValueError`, `TypeError`, ...).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class CallsheetError(Exception):
    """The base of everything that callsheet raises on purpose."""


class UnknownEventError(CallsheetError, ValueError):
    """An event name that the lifecycle does not have."""


class RegistrationError(CallsheetError, ValueError):
    """A callback that cannot be added as it stands: the message names it, its source line and the mend."""


class NotACallbackError(CallsheetError, TypeError):
    """Something was given in the place of a callback that is none."""


class FieldNotAvailable(CallsheetError, AttributeError):
    """A context field was read outside the window in which the lifecycle tells it."""


class MixedUnitsError(CallsheetError, TypeError):
    """Two times in different units were compared or added."""


class RequestRejected(CallsheetError, RuntimeError):
    """A request to the loop that cannot be carried out from where it was made."""


class RunEndedError(CallsheetError, RuntimeError):
    """A run that has ended was asked to go on."""


class CheckpointError(CallsheetError, RuntimeError):
    """A checkpoint that cannot be written, or does not hold when it is read."""


class RunInUseError(CallsheetError, RuntimeError):
    """Another process, or another run of this one, trains in the run's folder."""


class RunLockLostError(CheckpointError):
    """Another process has taken over the run's folder from this one, which was suspended or cut off for too long."""


class DistributedError(CallsheetError, RuntimeError):
    """The ranks could not agree: one of them is dead, stuck, or somewhere else in the loop; the message names it."""


class HangError(CallsheetError, TimeoutError):
    """No step came for much longer than one takes."""


class NonFiniteError(CallsheetError, FloatingPointError):
    """A loss, norm or weight that is NaN or infinite."""


class MissingPackage(CallsheetError, ImportError):
    """An optional package that is not installed; the message says how to install it."""


class ConfigError(CallsheetError, ValueError):
    """An argument or a configuration value that cannot work: the message names it and the mend."""


class UnknownArgument(ConfigError, TypeError):
    """A keyword argument that a class or function does not have; the message says what it is called here."""


class HostError(CallsheetError, RuntimeError):
    """A host could not follow another framework's loop, and observes the run no longer; training goes on."""


class NotSupported(CallsheetError, RuntimeError):
    """Something that a bridge cannot carry over between callsheet and another framework; the message names both sides."""


def text_of(error: BaseException) -> str:
    """Return `str(error)`, or a placeholder if the exception's own `__str__` raises: reporting an error must not raise another."""
    try:
        return str(error)
    except Exception as another:
        return f"<no text: __str__ of {type(error).__name__} raised {type(another).__name__}>"


def did_you_mean(name: str, valid: Iterable[str], *, cutoff: float = 0.5) -> str:
    """Return `; did you mean 'x'?` for the valid name nearest to `name`, or the empty string if none is near.

    Upper and lower case are compared as one. `cutoff` is how alike the two must be, from 0 to 1.
    """
    import difflib  # which only a mistake needs

    by_folded: dict[str, str] = {}
    for each in valid:
        by_folded.setdefault(each.lower(), each)
    near = difflib.get_close_matches(name.lower(), list(by_folded), n=1, cutoff=cutoff)
    return f"; did you mean {by_folded[near[0]]!r}?" if near else ""


def names_unknown(familiar: Callable[[], Mapping[str, str]]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function so that a keyword argument it does not have raises `UnknownArgument`, with what to write in its place.

    `familiar` returns what to write for arguments of other frameworks.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        known = frozenset(inspect.signature(function).parameters)
        called = function.__qualname__.removesuffix(".__init__")

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            for name in kwargs:
                if name not in known:
                    meant = familiar().get(name)
                    hint = f"; give {meant}" if meant is not None else did_you_mean(name, known - {"self"}, cutoff=0.6)
                    raise UnknownArgument(f"{called} has no argument {name!r}{hint}")
            return function(*args, **kwargs)

        return checked

    return decorate


def where(thing: object) -> str:
    """`file.py:12` of the function, method or class `thing`, or `<unknown source>` where it has none (a notebook's, a builtin)."""
    while isinstance(thing, functools.partial):
        thing = thing.func
    function = inspect.unwrap(thing) if callable(thing) else thing
    code = getattr(function, "__code__", None)
    if code is not None:
        return f"{Path(code.co_filename).name}:{code.co_firstlineno}"
    kind: Any = function if inspect.isclass(function) else type(function)
    return _where_class(kind)


@functools.lru_cache(maxsize=1024)  # finding a class in its source takes milliseconds
def _where_class(kind: Any) -> str:
    try:
        return f"{Path(inspect.getsourcefile(kind) or '?').name}:{inspect.getsourcelines(kind)[1]}"
    except (OSError, TypeError):  # defined where there is no source file
        return "<unknown source>"


def mark_as_users(error: BaseException) -> None:
    """Note on the error that it comes from code of the user's, such as a callback: a host lets it out."""
    error.__dict__["_callsheet_users"] = True  # not setattr: a frozen exception would refuse it


def is_users(error: BaseException) -> bool:
    """Return whether `mark_as_users` was called on the error."""
    return "_callsheet_users" in error.__dict__
