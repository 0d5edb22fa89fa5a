"""Placeholders for unsupported names of other training systems.

The placeholders can be imported, and using one raises an error that says what to do instead.
"""

from __future__ import annotations

from typing import Any, NoReturn

from callsheet.errors import NotSupported


class _NotOffered(type):
    """The metaclass of placeholders for unsupported names. Calling one, or reading its public attributes, raises `NotSupported`."""

    instead: str
    system: str

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotSupported(f"{cls.__name__} is not supported, unlike in {cls.system}: {cls.instead}")

    def __getattr__(cls, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(f"type object {cls.__name__!r} has no attribute {name!r}")
        raise NotSupported(f"{cls.__name__}.{name} is not supported, unlike in {cls.system}: {cls.instead}")

    def __repr__(cls) -> str:
        return f"<{cls.__name__}, not supported, unlike in {cls.system}>"


def not_offered(name: str, system: str, instead: str, module: str) -> type:
    """Return a placeholder class for the unsupported `name`. Its errors contain `instead`, which says what to use in place of `name`."""
    about = f"Not supported, unlike in {system}: {instead}."
    return _NotOffered(name, (), {"instead": instead, "system": system, "__doc__": about, "__module__": module})
