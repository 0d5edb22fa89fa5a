"""Every public name has a docstring, and the examples in docstrings run."""

import ast
import doctest
import importlib
import re
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parent.parent / "src"
MODULES = sorted(path for path in SOURCE.rglob("*.py") if path.name != "__main__.py")

TREES = {path: ast.parse(path.read_text()) for path in MODULES}


def named(node: ast.expr) -> str:
    """`Base` for the base class `Base`, `module.Base` or `Base[T]`."""
    if isinstance(node, ast.Subscript):
        return named(node.value)
    return getattr(node, "id", "") or getattr(node, "attr", "")


COMMON = {"load_state_dict"}
"""Methods that mean the same in every class: this one loads what `state_dict` of the class returned."""

BASES: dict[str, set[str]] = {}
DOCUMENTED: dict[str, set[str]] = {}
OF_CLASS: dict[str, str] = {}
for tree in TREES.values():
    for each in ast.walk(tree):
        if isinstance(each, ast.ClassDef):
            BASES.setdefault(each.name, set()).update(map(named, each.bases))
            OF_CLASS[each.name] = f"{OF_CLASS.get(each.name, '')}\n{ast.get_docstring(each) or ''}"
            methods = [node for node in each.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
            DOCUMENTED.setdefault(each.name, set()).update(node.name for node in methods if ast.get_docstring(node))


def inherited(name: str) -> set[str]:
    """The methods that base classes in the package document: an override repeats that only if it has something to add."""
    return set().union(*(DOCUMENTED[base] | inherited(base) for base in BASES[name] if base in BASES and base != name))


def of_constructor(name: str) -> str:
    """The docstrings of a class and of its base classes in the package, which describe the arguments."""
    return "\n".join([OF_CLASS[name], *(of_constructor(base) for base in BASES[name] if base in BASES and base != name)])


def undocumented(tree: ast.Module) -> list[str]:
    missing = [] if ast.get_docstring(tree) else ["module"]

    def look(body: list[ast.stmt], prefix: str, documented: set[str]) -> None:
        for node in body:
            if not isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) or node.name.startswith("_"):
                continue
            # the first overload and the getter have the docstring for the others
            is_another = any(
                getattr(mark, "id", "") == "overload" or getattr(mark, "attr", "") == "setter" for mark in node.decorator_list
            )
            if not is_another and node.name not in documented and not ast.get_docstring(node):
                missing.append(prefix + node.name)
            if isinstance(node, ast.ClassDef):
                look(node.body, f"{prefix}{node.name}.", COMMON | inherited(node.name))

    look(tree.body, "", set())
    return missing


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_every_public_name_has_a_docstring(path: Path) -> None:
    assert undocumented(TREES[path]) == []


REFERENCE = SOURCE.parent / "docs" / "reference"


def defining_module(module: str, name: str) -> Path:
    """The file with the definition of a name that a module may import from another one."""
    path = SOURCE.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    imports = [node for node in ast.walk(TREES[path]) if isinstance(node, ast.ImportFrom)]
    other = next((node.module for node in imports if node.module and name in {alias.name for alias in node.names}), None)
    return defining_module(other, name) if other is not None else path


API = {
    (defining_module(module, name), name)
    for page in REFERENCE.glob("*.md")
    for module, name in re.findall(r"^::: (callsheet[\w.]*)\.(\w+)$", page.read_text(), re.MULTILINE)
}
"""The functions and classes that have a place in the API reference, with the files that define them."""


def documented_arguments(docstring: str) -> list[str]:
    """The names in the section Args, where one entry may describe several: `run_name, runs_folder: ...`."""
    sections = re.findall(r"^Args:\n((?:[ ]+.*\n|\n)*)", docstring + "\n", re.MULTILINE)
    entries = re.findall(r"^ {4}(\*{0,2}\w+(?:, \*{0,2}\w+)*):", "".join(sections), re.MULTILINE)
    return [name.strip("*") for entry in entries for name in entry.split(", ")]


Function = ast.FunctionDef | ast.AsyncFunctionDef


def parameters_of(function: Function) -> list[str]:
    given = function.args
    return [each.arg for each in (*given.posonlyargs, *given.args, given.vararg, *given.kwonlyargs, given.kwarg) if each]


def public_parameters(function: Function) -> set[str]:
    known = ("self", "cls", "ctx", "args", "kwargs")
    return {each for each in parameters_of(function) if each not in known and not each.startswith("_")}


def undescribed(function: Function, owner: str) -> set[str]:
    """The parameters that neither a section Args describes nor a docstring names in backticks.

    A base class describes those of a method that is overridden, and a framework those of its hooks.
    """
    if function.name == "__init__":
        docstring = of_constructor(owner)
    elif function.name.startswith(("_", "on_", "teardown")) or function.name in COMMON | (inherited(owner) if owner else set()):
        return set()
    else:
        docstring = ast.get_docstring(function) or ""  # if there is none, another test fails
    if not docstring or re.search(r"The arguments are those of `[\w.]+`|Make it with `\w+`", docstring):
        return set()
    quoted = re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", docstring)))
    return public_parameters(function).difference(quoted, documented_arguments(docstring))


def wrong_sections(path: Path) -> list[str]:
    """Functions whose Args are not their parameters, and sections under another name than Google's.

    In the API also functions with a parameter that is not described.
    """
    wrong, tree = [], TREES[path]
    of_the_api = {id(node): "" for node in tree.body if isinstance(node, Function) and (path, node.name) in API}
    for each in tree.body:
        if isinstance(each, ast.ClassDef) and (path, each.name) in API:
            of_the_api |= dict.fromkeys(map(id, each.body), each.name)
    for node in ast.walk(tree):
        if isinstance(node, Function) and id(node) in of_the_api:
            owner = of_the_api[id(node)]
            wrong += [f"{owner}.{node.name} does not describe {each}" for each in sorted(undescribed(node, owner))]
        docstring = ast.get_docstring(node) if isinstance(node, ast.Module | ast.ClassDef | Function) else None
        if not docstring:
            continue
        name = getattr(node, "name", "module")
        if other := re.search(r"^(Example|Arguments|Parameters|Params|Return|Yield|Raise|Throws):$", docstring, re.MULTILINE):
            wrong.append(f"{name}: the section {other[0]}")
        if isinstance(node, Function) and (described := documented_arguments(docstring)):
            given = parameters_of(node)
            wrong += [f"{name}: Args describe {each}, which is no parameter" for each in described if each not in given]
            if id(node) in of_the_api:
                wrong += [f"{name}: Args leave out {each}" for each in sorted(public_parameters(node).difference(described))]
    return wrong


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_the_sections_of_docstrings_are_google_s_and_args_are_the_parameters(path: Path) -> None:
    """A function may describe its parameters in a sentence. If a public one has a section Args, the section is complete."""
    assert wrong_sections(path) == []


def with_examples() -> list[str]:
    """The modules that have an example in a docstring, by their import path."""

    def has_example(node: ast.AST) -> bool:
        docstring = ast.get_docstring(node) if isinstance(node, ast.Module | ast.ClassDef | Function) else None
        return bool(docstring and doctest.DocTestParser().get_examples(docstring))

    found = [path for path, tree in TREES.items() if any(map(has_example, ast.walk(tree)))]
    return [".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__") for path in found]


NEEDED = {"callsheet.bridges.huggingface.guests": "transformers", "callsheet.bridges.ignite.guests": "ignite"}
"""The packages that examples need, and that may be missing."""

NOT_RUN = {f"callsheet.recipes.{name}" for name in ("classify", "distill", "finetune", "finetune_vlm", "pretrain")}
"""The modules whose examples train a model of a hub on the user's files. Each of these examples is marked with SKIP."""

SLOW = {"callsheet.testing.ranks"}
"""The modules whose examples start ranks."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.test_all] * (name in SLOW)) for name in with_examples()])
def test_examples_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name in NEEDED:
        pytest.importorskip(NEEDED[name])
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(name)
    tests = [test for test in doctest.DocTestFinder(exclude_empty=True).find(module) if test.examples]
    skipped = [doctest.SKIP in example.options for test in tests for example in test.examples]
    assert skipped
    assert all(skipped) if name in NOT_RUN else not any(skipped)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL)
    for test in tests:
        assert not runner.run(test).failed, test.name
    assert list(tmp_path.iterdir()) == []
