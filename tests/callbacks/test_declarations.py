"""The built-in callbacks declare the requests and fields that their source uses, and whether they write to the run's folder."""

import ast
import inspect
import textwrap

import pytest

from callsheet import Callback, callbacks, loggers
from callsheet.core.control import REQUESTS

ONLY_READ_THE_FOLDER = {"DiskSpaceGuard", "SystemMetricsMonitor"}
"""They measure the disk that the folder is on."""

BUILT_INS: dict[str, type[Callback]] = {
    name: kind
    for package in (callbacks, loggers)
    for name in package.__all__
    if isinstance(kind := getattr(package, name), type) and issubclass(kind, Callback)
}
OFTEN_MISSING = ("model", "optimizer", "scheduler", "batch", "microbatch", "outputs")
"""The fields that a host may not provide."""


def uses(kind: type[Callback]) -> set[str]:
    """Return the context attributes in the source of a class and its base classes, without fields checked with `ctx.has`."""
    found, checked = set(kind.snapshot_fields), set()
    for base in kind.__mro__[: kind.__mro__.index(Callback)]:
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(base)))):
            if isinstance(node, ast.Attribute):
                found.add(path_of(node))
            elif isinstance(node, ast.Call) and path_of(node.func) == "has" and isinstance(node.args[0], ast.Constant):
                checked.add(str(node.args[0].value))
    return {path for path in found if path.partition(".")[0] not in checked}


def path_of(node: ast.AST) -> str:
    """Return the attribute path below `ctx`, such as `control.stop` for `ctx.control.stop`."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return ".".join(reversed(names)) if isinstance(node, ast.Name) and node.id == "ctx" else ""


@pytest.mark.parametrize("name", BUILT_INS)
def test_declarations_match_the_source(name: str) -> None:
    kind = BUILT_INS[name]
    used = uses(kind)
    assert set(kind.requests) == {request for request in REQUESTS if f"control.{request}" in used}
    fields = {path.partition(".")[0] for path in used}
    assert set(kind.required_fields) == fields & set(OFTEN_MISSING)
    if "run.folder" in used:
        assert kind.writes_to_run_folder or name in ONLY_READ_THE_FOLDER


def test_uses_finds_requests_and_fields() -> None:
    assert uses(callbacks.SaveOnTrigger) >= {"control.stop", "control.save", "control.evaluate", "run.folder"}
