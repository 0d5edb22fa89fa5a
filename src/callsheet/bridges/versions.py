"""The framework versions with which each bridge is tested, and the check of the installed version.

If the installed version is not tested, a warning is logged once. If this version lacks an attribute that a bridge needs and that
is not public API, the bridge raises `NotSupported`, which names the attribute.
"""

from __future__ import annotations

import dis
import importlib
import importlib.metadata
import inspect
import logging
import re
from collections.abc import Container, Iterable, Mapping
from typing import Any

from callsheet.errors import NotSupported

logger = logging.getLogger("callsheet")

TESTED: Mapping[str, tuple[str, ...]] = {
    "torch": ("2.11", "2.12", "2.13", "2.14"),
    "transformers": ("5.21", "5.22", "5.23", "5.24"),
    "lightning": ("2.3", "2.4", "2.5", "2.6"),
    "pytorch-ignite": ("0.5.3", "0.5.4", "0.5.5"),
    "accelerate": ("1.12", "1.13", "1.14", "1.15"),
    "torchtnt": ("0.2.4",),
    "keras": ("3.12", "3.13", "3.14", "3.15"),
    "mosaicml": ("0.29", "0.30", "0.31", "0.32"),
    "ultralytics": ("8.4",),
    "instructlab-training": ("0.16",),
    "megatron-bridge": ("0.3.0", "0.3.1"),
}
"""For each package, the minor releases that the tests pass with, the oldest first.

On the page docs/bridges/versions.md, these versions have the verdict `works`.
"""

_EQUIVALENT_PACKAGE: Mapping[str, str] = {"lightning": "pytorch-lightning"}
"""For each package listed here, another package with the same content and versions, which may be installed instead."""

warned: set[str] = set()
"""The packages about which this process has logged a warning."""


def check_version(package: str, internals: Iterable[str] = (), *, needed_by: str = "") -> None:
    """Log a warning, once per process, if the installed version of a framework is not tested.

    Args:
        package: the name of the framework's package, as in `TESTED`.
        internals: the attributes of the framework that are needed and not public API, as dotted names; see `has`.
        needed_by: what needs these attributes, for the error message.

    Raises:
        NotSupported: the framework lacks some of `internals`; the message names them.
    """
    version = _installed_version(package)
    tested = TESTED[package]
    if missing := [name for name in internals if not has(name)]:
        raise NotSupported(
            f"{needed_by or package} needs {', '.join(missing)}, which {package} {version or '(unknown version)'} does not have; install one "
            f"of the tested versions, {span(tested)}"
        )
    if version is not None and tested and not is_tested(version, tested) and package not in warned:
        warned.add(package)
        logger.warning(
            "%s %s is not tested with callsheet: the tests pass with %s. Parts of the bridge may not work",
            package,
            version,
            span(tested),
        )


def check_events(package: str, events: Iterable[str], known: Container[str]) -> None:
    """Raise NotSupported if the installed version of the framework does not have all events that the host handles.

    Args:
        package: the name of the framework's package, as in `TESTED`.
        events: the events that the host handles.
        known: the events that the installed version of the framework fires.

    Raises:
        NotSupported: the framework lacks some of the events; the message names them.
    """
    if missing := [event for event in events if event not in known]:
        raise NotSupported(
            f"this host needs the events {', '.join(missing)}, which {package} {_installed_version(package) or '(unknown version)'} does not have; "
            f"install one of the tested versions, {span(TESTED[package])}"
        )


def check_versions(package: str = "", internals: Iterable[str] = (), needed_by: str = "") -> None:
    """Check the installed version of torch and, if `package` is given, of the framework. See `check_version`."""
    check_version("torch")
    if package:
        check_version(package, internals, needed_by=needed_by)


def is_tested(version: str, tested: Iterable[str]) -> bool:
    """Return whether the version is a tested minor release, such as 5.21, or one of its patch releases, such as 5.21.3."""
    numbers = _numbers(version)
    return any(numbers[: len(minor)] == minor for minor in map(_numbers, tested))


def span(tested: tuple[str, ...]) -> str:
    """Return the tested minor releases as text, such as `5.21 to 5.24`."""
    return tested[0] if len(tested) == 1 else f"{tested[0]} to {tested[-1]}" if tested else "none"


def has(name: str) -> bool:
    """Return whether a dotted name such as `ignite.engine.Engine._event_handlers` exists in the installed version.

    The name consists of a module, a class or function, and for a class perhaps an attribute. An attribute of the class's
    instances counts too, if the class annotates it or one of its methods assigns it.
    """
    parts = name.split(".")
    found: Any = None
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            if not hasattr(found, part):
                return isinstance(found, type) and _is_of_instances(found, part)
            found = getattr(found, part)
        return True
    return False


def _is_of_instances(kind: type, attribute: str) -> bool:
    for base in kind.__mro__:
        if attribute in inspect.get_annotations(base):
            return True
        if any(_assigns(inspect.unwrap(each), attribute) for each in vars(base).values() if inspect.isfunction(each)):
            return True
    return False


def _assigns(function: Any, attribute: str) -> bool:
    """Return whether the function's code assigns the attribute to an object, as in `self.attribute = ...`."""
    if attribute not in function.__code__.co_names:  # this check is fast, and excludes most functions
        return False
    return any(each.opname == "STORE_ATTR" and each.argval == attribute for each in dis.get_instructions(function))


def _installed_version(package: str) -> str | None:
    for name in (package, _EQUIVALENT_PACKAGE.get(package, package)):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: `(2, 13, 0)` for `2.13.0+cpu`."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()
