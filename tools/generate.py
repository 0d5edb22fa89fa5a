"""Write the generated regions of the source and the docs.

python tools/generate.py            write
python tools/generate.py --check    exit 1 and name the files that would change
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from callsheet.bridges import matrix
from callsheet.core import lifecycle
from callsheet.core.lifecycle import ANYWHERE, EVENTS, FIELDS, POINTS, SPANS, description, fields_available

ROOT = Path(__file__).resolve().parent.parent


def constant(event: str) -> str:
    """`on_train_step_end` as the name of an enumeration's member."""
    return event.removeprefix("on_").upper()


def events() -> list[str]:
    return [f'{constant(event)} = "{event}"' for event in EVENTS]


def hooks() -> list[str]:
    lines: list[str] = []
    for event in EVENTS:
        fields = ", ".join(fields_available(event))
        lines += [
            f"def {event}(self, ctx: Context) -> Awaitable[None] | None:",
            f'    """{description(event)}' + ("" if fields else '"""'),
            *(["", f"    Available here: {fields}.", '    """'] if fields else []),
            "",
        ]
    return lines


def has_listeners() -> list[str]:
    return [f"{event}: bool" for event in EVENTS]


def spans() -> list[str]:
    return [f"{span}: Span" for span in SPANS]


def tree() -> list[str]:
    return ["```text", *lifecycle.tree().splitlines(), "```"]


def event_table() -> list[str]:
    rows = [
        f"| `{event}` | {description(event)} | {', '.join(f'`{name}`' for name in fields_available(event))} |" for event in EVENTS
    ]
    return ["| event | when it is fired | available fields, besides those of every event |", "| --- | --- | --- |", *rows]


def field_table() -> list[str]:
    def window(name: str) -> str:
        pairs = FIELDS[name].windows
        return "; ".join(f"`{a}`" if a == b else f"`{a}` to `{b}`" for a, b in pairs) or "always"

    rows = [
        f"| `{field.name}` | `{field.type.replace('|', chr(92) + '|')}` | {field.meaning} | {field.kind} | {window(field.name)} |"
        for field in FIELDS.values()
    ]
    return ["| field | type | meaning | ranks | available |", "| --- | --- | --- | --- | --- |", *rows]


def order_table() -> list[str]:
    rows = [f"| `{span.name}` | `{span.order.replace('|', chr(92) + '|')}` |" for span in SPANS.values() if span.order]
    anywhere = ", ".join(f"`{name}`" for name in POINTS if name in ANYWHERE)
    return ["| span | what may occur directly inside |", "| --- | --- |", *rows, f"| any | {anywhere} |"]


def figures(name: str) -> Callable[[], list[str]]:
    """Return a function that reads what a benchmark printed when it last ran."""
    path = ROOT / "benchmarks" / "results" / f"{name}.md"

    def lines() -> list[str]:
        if not path.exists():
            return ["(not measured yet: `make bench`)"]
        return "\n".join(line for line in path.read_text().splitlines() if not line.startswith("# ")).strip().splitlines()

    return lines


REGIONS: dict[str, Callable[[], list[str]]] = {
    "events": events,
    "hooks": hooks,
    "has-listeners": has_listeners,
    "spans": spans,
    "tree": tree,
    "event-table": event_table,
    "field-table": field_table,
    "order-table": order_table,
    "matrix": matrix.markdown,
    **{f"matrix-{bridge}": partial(matrix.markdown_of, bridge) for bridge in matrix.frameworks()},
    **{
        f"figures-{name}": figures(name)
        for name in (
            "dispatch",
            "imports",
            "trainer",
            "profile",
            "distributed",
            "saving",
            "scale",
            "monitors",
            "lanes",
            "instructions",
            "guest-instructions",
            "shortcuts",
            "recipes",
            "bridges",
            "guests",
            "ranks",
            "resume",
            "restarts",
            "resumed-data",
            "many-runs",
            "watching",
        )
    },
}


def filled(text: str) -> str:
    """Return `text` with the content of every region between `generated: NAME` and `end of generated: NAME` generated again."""
    result: list[str] = []
    inside = ""
    for line in text.splitlines():
        marker = line.strip().removeprefix("<!--").removesuffix("-->").removeprefix("#").strip()
        if marker.startswith("end of generated: "):
            inside = ""
        if not inside:
            result.append(line)
        if marker.startswith("generated: "):
            inside = marker.removeprefix("generated: ")
            indent = line[: len(line) - len(line.lstrip())]
            gap = [""] if line.lstrip().startswith("<!--") else []
            result += [*gap, *((indent + made).rstrip() for made in REGIONS[inside]()), *gap]
    if inside:
        raise SystemExit(f"the region {inside!r} has no end")
    return "\n".join(result) + "\n"


def main() -> int:
    stale = []
    for path in sorted([*ROOT.glob("src/**/*.py"), *ROOT.glob("docs/**/*.md"), ROOT / "README.md"]):
        text = path.read_text() if path.exists() else ""
        if "generated: " in text and (made := filled(text)) != text:
            stale.append(str(path.relative_to(ROOT)))
            if "--check" not in sys.argv[1:]:
                path.write_text(made)
    if stale:
        print("stale, run `make generate`:" if "--check" in sys.argv[1:] else "written:", ", ".join(stale))
    return 1 if stale and "--check" in sys.argv[1:] else 0


if __name__ == "__main__":
    sys.exit(main())
