"""Write the generated regions of the source and the docs.

python tools/generate.py            write
python tools/generate.py --check    exit 1 and name the files that would change
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import built_on
from callsheet.bridges import matrix
from callsheet.cli.shipped import RECIPES
from callsheet.core import lifecycle
from callsheet.core.lifecycle import ANYWHERE_EVENTS, EVENTS, FIELDS, POINTS, SPANS, description, fields_available
from lifecycle_picture import picture
from recipe_keys import SHARED, keys_of, keys_of_all, keys_of_recipe, may_change, table

ROOT = Path(__file__).resolve().parent.parent


def constant(event: str) -> str:
    """Return the name of an event's member of the enumeration: `TRAIN_STEP_END` for `on_train_step_end`."""
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
    return ["| event | when it is called | available fields, besides those of every event |", "| --- | --- | --- |", *rows]


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
    anywhere = ", ".join(f"`{name}`" for name in POINTS if name in ANYWHERE_EVENTS)
    return ["| span | what may occur directly inside |", "| --- | --- |", *rows, f"| any | {anywhere} |"]


def figures(name: str) -> Callable[[], list[str]]:
    """Return a function that reads the output of a benchmark's last run."""
    path = ROOT / "benchmarks" / "results" / f"{name}.md"

    def lines() -> list[str]:
        if not path.exists():
            return ["(not measured yet: `make bench`)"]
        text = "\n".join(line for line in path.read_text().splitlines() if not line.startswith("# ")).strip()
        # A caption becomes a sentence, because text follows some of the tables.
        return re.sub(r"(?m)^([^|\n].*[^.:;!?|*\n])$(?=\n\n|\Z)", r"\1.", text).splitlines()

    return lines


def public_scripts() -> list[str]:
    """Return the line of the results of `make public-scripts` that counts the scripts."""
    path = ROOT / "benchmarks" / "results" / "public-scripts.md"
    return [line for line in path.read_text().splitlines() if line.startswith("Of ")]


def source_of(module: str) -> ast.Module:
    path = ROOT / "src" / module.replace(".", "/")
    return ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())


def is_class_or_function(module: str, name: str) -> bool:
    """Return whether a module, or the module that it imports the name from, defines `name` as a class or function."""
    tree = source_of(module)
    if any(isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name for node in tree.body):
        return True
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    return any(is_class_or_function(str(node.module), name) for node in imports if name in {each.name for each in node.names})


def public_names(module: str) -> list[str]:
    """Return the classes and functions in a module's `__all__`, which is read without importing the module."""
    (names,) = [
        ast.literal_eval(node.value)
        for node in source_of(module).body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__"
    ]
    return [name for name in names if is_class_or_function(module, name)]


def error_names() -> list[str]:
    """Return the exceptions of callsheet, in the order of the source."""
    tree = ast.parse((ROOT / "src/callsheet/errors.py").read_text())
    return [node.name for node in tree.body if isinstance(node, ast.ClassDef)]


def api_of_errors() -> list[str]:
    """Return the entries of the exceptions, each with a link to its section of the page about troubleshooting."""
    lines: list[str] = []
    for name in error_names():
        link = f"[The message, its causes, and what to do](../troubleshooting.md#{name.lower()})"
        lines += [f"::: callsheet.errors.{name}", "", link, ""]
    return lines[:-1]


def api(module: str, *, without: Iterable[str] = ()) -> list[str]:
    """Return the entries of an API page: mkdocstrings replaces each with the signature and the docstring."""
    return [line for name in public_names(module) if name not in without for line in (f"::: {module}.{name}", "")][:-1]


def api_of_packages(package: str) -> list[str]:
    """Return a section for each package in `bridges` or `compat`."""
    lines: list[str] = []
    for path in sorted((ROOT / "src/callsheet" / package).iterdir()):
        if (path / "__init__.py").exists() and path.name != "matrix":
            module = f"callsheet.{package}.{path.name}"
            lines += [f"## {module}", ""]
            for name in public_names(module):
                lines += [f"::: {module}.{name}", "    options:", "      heading_level: 3", ""]
    return lines[:-1]


def why() -> list[str]:
    """Return the README's comparison for the site. Links lead from the folder `docs`; a file outside it is named, not linked."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (section,) = re.findall(r"^## What it gives that other callbacks do not\n\n(.*?)\n\n## ", readme, re.MULTILINE | re.DOTALL)
    section = re.sub(r"\]\(docs/", "](", section)
    return re.sub(r"\[\w+\]\((tests/[\w/.]+)\)", r"`\1`", section).splitlines()


API = ("trainer", "callbacks", "loggers", "checkpoint", "metrics", "report", "transport", "testing", "recipes")


REGIONS: dict[str, Callable[[], list[str]]] = {
    "events": events,
    "hooks": hooks,
    "has-listeners": has_listeners,
    "spans": spans,
    "tree": tree,
    "event-table": event_table,
    "field-table": field_table,
    "order-table": order_table,
    "api-callsheet": lambda: api("callsheet", without=["Trainer", *error_names()]),
    "api-errors": api_of_errors,
    "api-launcher": lambda: api("callsheet.launcher", without=["launch"]),
    "api-bridges": partial(api_of_packages, "bridges"),
    "api-compat": partial(api_of_packages, "compat"),
    "why": why,
    "recipe-keys": keys_of_all,
    "recipe-keys-that-may-change": may_change,
    **{f"recipe-keys-{section}": partial(lambda kind: table(keys_of(kind)), kind) for kind, (_, section) in SHARED.items()},
    **{f"recipe-keys-{name}": partial(keys_of_recipe, name) for name in RECIPES},
    **{f"api-{name}": partial(api, f"callsheet.{name}") for name in API},
    "matrix": matrix.markdown,
    "matrix-built-on": matrix.markdown_of_derived,
    "programs-built-on": built_on.markdown,
    **{f"matrix-{bridge}": partial(matrix.markdown_of, bridge) for bridge in matrix.frameworks()},
    "public-scripts": public_scripts,
    **{f"figures-cuda-{name}": figures(f"cuda/{name}") for name in ("pretraining", "monitors", "trainer", "saving")},
    **{
        f"figures-{name}": figures(name)
        for name in (
            "dispatch",
            "faults",
            "imports",
            "trainer",
            "profile",
            "distributed",
            "saving",
            "scale",
            "monitors",
            "lanes",
            "lane_loss",
            "lane-work",
            "instructions",
            "bytecodes",
            "guest-instructions",
            "exec-instructions",
            "exec-seconds",
            "shortcuts",
            "recipes",
            "bridges",
            "guests",
            "ranks",
            "resume",
            "restarts",
            "resumed-data",
            "many-runs",
            "recipe-mistakes",
            "watching",
        )
    },
}


WHOLE_FILES: dict[str, Callable[[], str]] = {"docs/images/lifecycle.svg": picture}
"""Files that are generated from the first line to the last."""


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
    for name, make in WHOLE_FILES.items():
        path, made = ROOT / name, make()
        if not path.exists() or path.read_text() != made:
            stale.append(name)
            if "--check" not in sys.argv[1:]:
                path.write_text(made)
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
