"""What works where: built-in callbacks in each host, and other frameworks' callbacks as guests here.

The files beside this one are made by the tests (`make matrix`), one a framework, and held against what the tests find; so the table says
what was run, with which version.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib import resources
from textwrap import wrap

SIGNS = {"works": "✓", "limited": "~", "rejected": "✗"}
"""How a verdict is drawn."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One callback in one loop: `works`, `limited` or `refused`, and what the limit or the reason is.

    `tier` is said of guests: `listens` to events only, `reads` the trainer's state, or `drives` the trainer.
    """

    verdict: str
    why: str = ""
    tier: str = ""


@dataclass(frozen=True, slots=True)
class Framework:
    """A loop that has a bridge: its `name` in sentences, the `version` that was tested, and `how` where it was not a real training."""

    name: str
    version: str
    how: str = ""
    callbacks: Mapping[str, Cell] = field(default_factory=dict)
    guests: Mapping[str, Cell] = field(default_factory=dict)

    def to_json(self) -> str:
        """As the file has it."""
        return json.dumps(asdict(self), indent=1, sort_keys=True, ensure_ascii=False) + "\n"


@cache
def frameworks() -> Mapping[str, Framework]:
    """Every framework by the name of its bridge, in alphabetical order."""
    files = sorted(resources.files(__name__).iterdir(), key=lambda file: file.name)
    return {file.name.removesuffix(".json"): read(file.read_text("utf-8")) for file in files if file.name.endswith(".json")}


def read(text: str) -> Framework:
    """A framework's file."""
    given = json.loads(text)
    for part in ("callbacks", "guests"):
        given[part] = {name: Cell(**cell) for name, cell in given[part].items()}
    return Framework(**given)


def overview() -> str:
    """All built-ins in all hosts, a sign each, as text."""
    found = frameworks()
    names = sorted({name for each in found.values() for name in each.callbacks}, key=str.lower)
    width = max(map(len, names), default=0)
    lines = [" ".join([" " * width, *found])]
    for name in names:
        signs = [_sign(each.callbacks.get(name)).ljust(len(bridge)) for bridge, each in found.items()]
        lines.append(" ".join([name.ljust(width), *signs]).rstrip())
    legend = "✓ works   ~ works, with a limit that is named   ✗ is refused, with the reason"
    return "\n".join(
        [*lines, "", legend, "callsheet bridges NAME tells of one: its limits, and its own callbacks as guests here"]
    )


def about(bridge: str) -> str:
    """One framework: what was tested, the limits by name, its guests by tier."""
    found = frameworks()[bridge]
    lines = [f"{found.name} {found.version}{f', {found.how}' if found.how else ''}"]
    for title, cells in (("callsheet's callbacks in it", found.callbacks), ("its callbacks here", found.guests)):
        if cells:
            lines += ["", title]
        width = max(map(len, cells), default=0)
        for name in sorted(cells, key=str.lower):
            cell = cells[name]
            words = ", ".join(part for part in (cell.tier, cell.why) if part)
            first, *rest = wrap(words, 110) or [""]
            lines.append(f"  {_sign(cell)} {name:<{width}}  {first}".rstrip())
            lines += [f"    {'':<{width}}  {line}" for line in rest]
    return "\n".join(lines)


def _sign(cell: Cell | None) -> str:
    return SIGNS[cell.verdict] if cell is not None else ""


def markdown() -> list[str]:
    """The overview for the docs, and each limit below it."""
    found = frameworks()
    names = sorted({name for each in found.values() for name in each.callbacks}, key=str.lower)
    lines = [f"| | {' | '.join(found)} |", f"| --- |{' --- |' * len(found)}"]
    return lines + [f"| `{name}` | {' | '.join(_sign(each.callbacks.get(name)) for each in found.values())} |" for name in names]


def markdown_of(bridge: str) -> list[str]:
    """One framework for its page: limits and refusals, then guests."""
    found = frameworks()[bridge]
    lines = [f"Tested with {found.name} {found.version}{f', {found.how}' if found.how else ''}.", ""]
    marked = {name: cell for name, cell in sorted(found.callbacks.items()) if cell.verdict != "works"}
    if found.callbacks:
        whole = sum(cell.verdict == "works" for cell in found.callbacks.values())
        lines += [
            f"Of {len(found.callbacks)} built-ins {whole} work here as in callsheet's own Trainer{'; the others:' if marked else '.'}",
            "",
        ]
    if marked:
        lines += ["| built-in | | |", "| --- | --- | --- |"]
        lines += [f"| `{name}` | {SIGNS[cell.verdict]} | {_cell(cell.why)} |" for name, cell in marked.items()] + [""]
    if found.guests:
        lines += ["| its callback as a guest here | tier | | |", "| --- | --- | --- | --- |"]
        lines += [
            f"| `{name}` | {cell.tier} | {SIGNS[cell.verdict]} | {_cell(cell.why)} |"
            for name, cell in sorted(found.guests.items())
        ]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
