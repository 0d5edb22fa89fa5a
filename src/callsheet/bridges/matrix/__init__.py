"""The matrix: which callbacks of callsheet work in each framework's loop, and which callbacks of each framework work in callsheet's.

`make matrix` runs the tests that write the JSON files in this folder, one for each framework. The same tests check that the files
agree with the tests' results. So the table records which callbacks were run, and with which version of the framework.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib import resources
from textwrap import wrap

SIGNS = {"works": "✓", "limited": "~", "rejected": "✗"}
"""For each verdict (`works`, `limited`, `rejected`), the sign that shows it in the table."""


@dataclass(frozen=True, slots=True)
class Cell:
    """The result of one callback in one loop: `works`, `limited` or `rejected`, and why.

    `tier` is set for guests: a callback only listens to events (`listens`), also reads the trainer's state (`reads`), or also
    changes this state (`drives`).
    """

    verdict: str
    why: str = ""
    tier: str = ""


@dataclass(frozen=True, slots=True)
class Derived:
    """A trainer of another library that is built on a framework's trainer, such as a trainer of TRL.

    `library` is the library with its version, and `checks` has the result of each of `CHECKS`.
    """

    library: str
    checks: Mapping[str, Cell] = field(default_factory=dict)


CHECKS = ("observers", "stop", "save", "EMA", "resume")
"""The checks of a `Derived` trainer: one trains with callbacks that only observe, and each other one tests an action of a callback."""


@dataclass(frozen=True, slots=True)
class Framework:
    """A framework whose callbacks or loops callsheet supports through a bridge.

    `name` is the framework's name in sentences, and `version` the tested version. `how` is a sentence (without its full stop)
    that says how the framework was tested, if that was not a real training. `derived` has the trainers of other libraries that are
    built on the framework's trainer.
    """

    name: str
    version: str
    how: str = ""
    callbacks: Mapping[str, Cell] = field(default_factory=dict)
    guests: Mapping[str, Cell] = field(default_factory=dict)
    derived: Mapping[str, Derived] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return the content of the framework's JSON file."""
        return json.dumps(asdict(self), indent=1, sort_keys=True, ensure_ascii=False) + "\n"


@cache
def frameworks() -> Mapping[str, Framework]:
    """Return a dict of all frameworks by the names of their bridges, in alphabetical order."""
    files = sorted(resources.files(__name__).iterdir(), key=lambda file: file.name)
    return {file.name.removesuffix(".json"): read(file.read_text("utf-8")) for file in files if file.name.endswith(".json")}


def read(text: str) -> Framework:
    """Parse the content of a framework's JSON file."""
    given = json.loads(text)
    for part in ("callbacks", "guests"):
        given[part] = _cells(given[part])
    given["derived"] = {name: Derived(row["library"], _cells(row["checks"])) for name, row in given.get("derived", {}).items()}
    return Framework(**given)


def _cells(given: Mapping[str, Mapping[str, str]]) -> dict[str, Cell]:
    return {name: Cell(**cell) for name, cell in given.items()}


def overview() -> str:
    """Return a text table with one sign (✓, ~ or ✗) for each built-in callback in each framework's loop."""
    found = frameworks()
    names = sorted({name for each in found.values() for name in each.callbacks}, key=str.lower)
    width = max(map(len, names), default=0)
    lines = [" ".join([" " * width, *found])]
    for name in names:
        signs = [_sign(each.callbacks.get(name)).ljust(len(bridge)) for bridge, each in found.items()]
        lines.append(" ".join([name.ljust(width), *signs]).rstrip())
    legend = "✓ works   ~ works with a limit   ✗ rejected"
    hint = "`callsheet bridges NAME` prints the limits and reasons of one bridge, and that framework's callbacks as guests"
    built_on = [
        line for each in found.values() if each.derived for line in ["", f"Built on {each.name}", *_format_derived_trainers(each)]
    ]
    return "\n".join([*lines, *built_on, "", legend, hint])


def _format_derived_trainers(framework: Framework) -> list[str]:
    """Return a text table of other libraries' trainers that are built on the framework's trainer."""
    width = max(map(len, framework.derived))
    lines = [" ".join([" " * width, *CHECKS, "library"])]
    for name, row in framework.derived.items():
        signs = [_sign(row.checks.get(check)).ljust(len(check)) for check in CHECKS]
        lines.append(" ".join([name.ljust(width), *signs, row.library]))
    return lines


def about(bridge: str) -> str:
    """Return the matrix of one framework as text: callsheet's callbacks in the framework, and the framework's callbacks in callsheet."""
    found = frameworks()[bridge]
    lines = [f"{found.name} {found.version}{f'. {found.how}.' if found.how else ''}"]
    for title, cells in (
        ("callsheet's callbacks in it", found.callbacks),
        ("its callbacks as guests in callsheet", found.guests),
    ):
        if cells:
            lines += ["", title]
        width = max(map(len, cells), default=0)
        for name in sorted(cells, key=str.lower):
            cell = cells[name]
            words = ", ".join(part for part in (cell.tier, cell.why) if part)
            first, *rest = wrap(words, 110) or [""]
            lines.append(f"  {_sign(cell)} {name:<{width}}  {first}".rstrip())
            lines += [f"    {'':<{width}}  {line}" for line in rest]
    if found.derived:
        lines += ["", f"trainers that are built on {found.name}", *_format_derived_trainers(found)]
        lines += [f"  {_sign(cell)} {name}: {cell.why}" for name, _, cell in _limits(found)]
    return "\n".join(lines)


def _limits(framework: Framework) -> list[tuple[str, str, Cell]]:
    """Return all results of the trainers in `framework.derived` that have a reason (`why`), as tuples (trainer, check, result)."""
    return [(name, check, cell) for name, row in framework.derived.items() for check, cell in row.checks.items() if cell.why]


def _sign(cell: Cell | None) -> str:
    return SIGNS[cell.verdict] if cell is not None else ""


def markdown() -> list[str]:
    """Return the table of all built-in callbacks and frameworks as Markdown, for the docs."""
    found = frameworks()
    names = sorted({name for each in found.values() for name in each.callbacks}, key=str.lower)
    lines = [f"| | {' | '.join(found)} |", f"| --- |{' --- |' * len(found)}"]
    return lines + [f"| `{name}` | {' | '.join(_sign(each.callbacks.get(name)) for each in found.values())} |" for name in names]


def markdown_of_derived() -> list[str]:
    """Return a Markdown table of the trainers that are built on a framework's trainer, and below it a list of their limits."""
    lines = [f"| trainer | library | {' | '.join(CHECKS)} |", f"| --- | --- |{' --- |' * len(CHECKS)}"]
    limits = []
    for each in frameworks().values():
        for name, row in each.derived.items():
            lines.append(f"| `{name}` | {row.library} | {' | '.join(_sign(row.checks.get(check)) for check in CHECKS)} |")
        limits += [f"- `{name}`, {check}: {cell.why}." for name, check, cell in _limits(each)]
    return [*lines, *([""] if limits else []), *limits]


def markdown_of(bridge: str) -> list[str]:
    """Return the Markdown for a framework's page: the callbacks of callsheet that have limits, and the framework's callbacks as guests."""
    found = frameworks()[bridge]
    lines = [f"The tests ran with {found.name} {found.version}.{f' {found.how}.' if found.how else ''}", ""]
    marked = {name: cell for name, cell in sorted(found.callbacks.items()) if cell.verdict != "works"}
    if found.callbacks:
        working = sum(cell.verdict == "works" for cell in found.callbacks.values())
        rest = " The built-in callbacks in the following table are limited (~) or rejected (✗)." if marked else ""
        lines += [
            f"{working} of callsheet's {len(found.callbacks)} built-in callbacks work in {found.name} as in callsheet's own Trainer.{rest}",
            "",
        ]
    if marked:
        lines += ["| built-in | | why |", "| --- | --- | --- |"]
        lines += [f"| `{name}` | {SIGNS[cell.verdict]} | {_cell(cell.why)} |" for name, cell in marked.items()] + [""]
    if found.guests:
        lines += ["| callback as a guest | tier | | why |", "| --- | --- | --- | --- |"]
        lines += [
            f"| `{name}` | {cell.tier} | {SIGNS[cell.verdict]} | {_cell(cell.why)} |"
            for name, cell in sorted(found.guests.items())
        ]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
