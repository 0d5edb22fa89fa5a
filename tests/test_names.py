"""Names of functions and methods: a verb names a function."""

from __future__ import annotations

import ast
from pathlib import Path

import callsheet

SOURCE = Path(callsheet.__file__).parent

IRREGULAR = frozenset(
    {"chosen", "drawn", "found", "given", "held", "kept", "known", "left", "lost", "made", "sent", "shown", "taken", "written"}
)
VERBS = frozenset({"_seed", "embed", "need", "proceed", "seed"})

PUBLIC = {
    "callsheet/bridges/attached_run.py": {"evaluated"},
    "callsheet/bridges/instructlab/hook_host.py": {"sent"},
    "callsheet/core/context.py": {"logged"},
}
"""Names that users write or override, by file."""

OTHERS = {
    "callsheet/bridges/ignite/guests.py": {"_completed", "_started"},
    "callsheet/bridges/ignite/hosts.py": {"_completed", "_started"},
    "callsheet/bridges/megatron_bridge/state.py": {"elapsed"},
}
"""Names that another framework defines, or that are derived from the names of its events, by file."""

DECORATORS = {
    "callsheet/bridges/torch_hooks.py": {"untraced"},
    "callsheet/cli/names.py": {"named"},
    "callsheet/trainer/data/seeded.py": {"seeded"},
}
"""Decorators, context managers and a function of recipe files, which read as a statement about the code to which they are applied."""


def functions(path: Path) -> set[str]:
    """Return the names of the functions and methods of a file, without properties and functions inside functions."""
    found = set()
    for owner in ast.walk(ast.parse(path.read_text())):
        if isinstance(owner, (ast.Module, ast.ClassDef)):
            for each in owner.body:
                if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    decorators = " ".join(map(ast.unparse, each.decorator_list))
                    if "property" not in decorators and "setter" not in decorators:
                        found.add(each.name)
    return found


def is_participle(name: str) -> bool:
    word = name.strip("_")
    return name not in VERBS and "_" not in word and (word in IRREGULAR or word.endswith("ed"))


def test_no_function_is_named_by_a_participle() -> None:
    named: dict[str, set[str]] = {}
    for path in SOURCE.rglob("*.py"):
        if names := set(filter(is_participle, functions(path))):
            named[path.relative_to(SOURCE.parent).as_posix()] = names
    for file in [*PUBLIC, *OTHERS, *DECORATORS]:
        allowed = PUBLIC.get(file, set()) | OTHERS.get(file, set()) | DECORATORS.get(file, set())
        assert named.get(file, set()) >= allowed, f"{file}: a name that is allowed here is gone"
        named[file] = named.get(file, set()) - allowed
    left = {file: sorted(names) for file, names in sorted(named.items()) if names}
    assert not left, f"name these functions by verbs: {left}"
