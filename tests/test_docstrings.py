"""Every public name has a docstring, and the examples in docstrings run."""

import ast
import doctest
import importlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

Function = ast.FunctionDef | ast.AsyncFunctionDef

SOURCE = Path(__file__).resolve().parent.parent / "src"
MODULES = sorted(path for path in SOURCE.rglob("*.py") if path.name != "__main__.py")


@cache
def tree_of(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text())


def named(node: ast.expr) -> str:
    """`Base` for the base class `Base`, `module.Base` or `Base[T]`."""
    if isinstance(node, ast.Subscript):
        return named(node.value)
    return getattr(node, "id", "") or getattr(node, "attr", "")


def root(node: ast.expr) -> str:
    """`module` for the base class `module.Base`, and `Base` for `Base` and `Base[T]`."""
    while isinstance(node, (ast.Subscript, ast.Attribute)):
        node = node.value
    return getattr(node, "id", "")


COMMON = {"load_state_dict"}
"""Methods that mean the same in every class: this one loads what `state_dict` of the class returned."""

BASES: dict[str, set[str]] = {}
DOCUMENTED: dict[str, set[str]] = {}
OF_CLASS: dict[str, str] = {}
RETURNS: dict[str, str] = {}
"""The annotated result of each function, to find what `raise made_error(...)` raises."""


@pytest.fixture(autouse=True, scope="module")
def _all_files_are_read() -> None:
    """Fill the tables above. This takes seconds, and each process of pytest-xdist imports this file, so it waits for the first test."""
    for path in MODULES:
        for each in ast.walk(tree_of(path)):
            if isinstance(each, ast.ClassDef):
                BASES.setdefault(each.name, set()).update(map(named, each.bases))
                OF_CLASS[each.name] = f"{OF_CLASS.get(each.name, '')}\n{ast.get_docstring(each) or ''}"
                methods = [node for node in each.body if isinstance(node, Function)]
                DOCUMENTED.setdefault(each.name, set()).update(node.name for node in methods if ast.get_docstring(node))
            elif isinstance(each, Function) and each.returns is not None:
                RETURNS[each.name] = ast.unparse(each.returns)


def inherited(name: str) -> set[str]:
    """The methods that base classes in the package document: an override repeats that only if it has something to add."""
    return set().union(*(DOCUMENTED[base] | inherited(base) for base in BASES[name] if base in BASES and base != name))


def of_constructor(name: str) -> str:
    """The docstrings of a class and of its base classes in the package, which describe the arguments."""
    return "\n".join([OF_CLASS[name], *(of_constructor(base) for base in BASES[name] if base in BASES and base != name)])


def undocumented(tree: ast.Module) -> list[str]:
    missing = [] if ast.get_docstring(tree) else ["module"]
    outer = {
        alias.asname or alias.name.partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import) or (isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("callsheet"))
        for alias in node.names
    }

    def look(body: list[ast.stmt], prefix: str, documented: set[str], *, is_of_framework: bool = False) -> None:
        for node in body:
            if not isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) or node.name.startswith("_"):
                continue
            # the first overload and the getter have the docstring for the others
            is_another = any(
                getattr(mark, "id", "") == "overload" or getattr(mark, "attr", "") == "setter" for mark in node.decorator_list
            )
            # A framework's own docs describe the hooks that a class inherits from it.
            is_hook = is_of_framework and node.name.startswith("on_")
            if not is_another and not is_hook and node.name not in documented and not ast.get_docstring(node):
                missing.append(prefix + node.name)
            if isinstance(node, ast.ClassDef):
                has_outer_base = any(root(base) in outer for base in node.bases)
                look(node.body, f"{prefix}{node.name}.", COMMON | inherited(node.name), is_of_framework=has_outer_base)

    look(tree.body, "", set())
    return missing


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_every_public_name_has_a_docstring(path: Path) -> None:
    assert undocumented(tree_of(path)) == []


REFERENCE = SOURCE.parent / "docs" / "reference"


def defining_module(module: str, name: str) -> Path:
    """The file with the definition of a name that a module may import from another one."""
    path = SOURCE.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if re.search(rf"^(?:class|def|async def) {name}\b", path.read_text(), re.MULTILINE):
        return path
    imports = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.ImportFrom)]
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


def parameters_of(function: Function) -> list[str]:
    given = function.args
    return [each.arg for each in (*given.posonlyargs, *given.args, given.vararg, *given.kwonlyargs, given.kwarg) if each]


def public_parameters(function: Function) -> set[str]:
    known = ("self", "cls", "ctx", "args", "kwargs")
    return {each for each in parameters_of(function) if each not in known and not each.startswith("_")}


def section(docstring: str, *titles: str) -> str:
    """The text of the sections with these titles."""
    return "".join(re.findall(rf"^(?:{'|'.join(titles)}):\n((?:[ ]+.*\n|\n)*)", docstring + "\n", re.MULTILINE))


def marks_of(function: Function) -> list[str]:
    return [ast.unparse(mark) for mark in function.decorator_list]


def own_nodes(function: Function) -> Iterator[ast.AST]:
    """The nodes of a function's body, without those of functions and classes inside it."""
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, Function | ast.ClassDef | ast.Lambda):
            waiting += ast.iter_child_nodes(node)


def raised_in(function: Function) -> set[str]:
    """The classes of the exceptions that a function's own body raises, except those that it has caught before."""
    found = set()
    for node in own_nodes(function):
        if isinstance(node, ast.Raise) and node.exc is not None:
            name = named(node.exc.func if isinstance(node.exc, ast.Call) else node.exc)
            if name[:1].isupper():
                found.add(name)
            elif isinstance(node.exc, ast.Call):
                found.add(RETURNS.get(name, ""))
    return found - {""}


def kinds_of(error: str) -> set[str]:
    """An exception class of the package and its base classes, by their names."""
    return {error}.union(*(kinds_of(base) for base in BASES.get(error, ()) if base != error))


def fields_of(node: ast.ClassDef) -> set[str]:
    """The public fields of a dataclass or named tuple that have no docstring of their own."""
    is_data = any("dataclass" in ast.unparse(mark) for mark in node.decorator_list) or "NamedTuple" in map(named, node.bases)
    if not is_data or any(isinstance(each, Function) and each.name == "__init__" for each in node.body):
        return set()
    return {
        each.target.id
        for each, after in zip(node.body, [*node.body[1:], None], strict=True)
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name) and not each.target.id.startswith("_")
        if "ClassVar" not in ast.unparse(each.annotation)
        if not (isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str))
    }


def missing_in_function(function: Function, owner: str, docstring: str) -> Iterator[str]:
    """What the sections of a public function do not describe."""
    if not re.search(r"The arguments are those of `[\w.]+`|Make it with `\w+`", docstring):
        for each in sorted(public_parameters(function).difference(documented_arguments(docstring))):
            yield f"Args: {each}"
    returns = ast.unparse(function.returns) if function.returns is not None else "None"
    if returns not in ("None", "NoReturn") and not re.match(r"(Return|Yield)s? ", docstring):
        if not section(docstring, "Returns", "Yields"):
            yield f"Returns: {returns}"
    known = set(
        re.findall(r"\w+(?=[,:])", "".join(re.findall(r"^ {4}(\S.*?:)(?: |$)", section(docstring, "Raises"), re.MULTILINE)))
    )
    raised = raised_in(function)
    if not function.name.startswith("__"):  # the docstring of a class may name an error that a method raises
        raised |= set(re.findall(r"\b[Rr]aises? `?([A-Z]\w+)", docstring.split("Raises:\n")[0]))
    for error in sorted(raised):
        if not known & kinds_of(error):
            yield f"Raises: {error}"


def missing_sections(path: Path) -> list[str]:
    """What the docstrings of the public API in a file do not describe."""
    missing: list[str] = []
    for node in tree_of(path).body:
        name = getattr(node, "name", "")
        if (path, name) not in API:
            continue
        if isinstance(node, Function) and "overload" not in marks_of(node):
            missing += [f"{name}: {each}" for each in missing_in_function(node, "", ast.get_docstring(node) or "")]
        if not isinstance(node, ast.ClassDef):
            continue
        bases = [named(base) for base in node.bases if named(base) in BASES and named(base) != name]
        of_class = "\n".join([ast.get_docstring(node) or "", *map(of_constructor, bases)])
        described = documented_arguments(of_class) + documented_arguments(of_class.replace("Attributes:", "Args:"))
        missing += [f"{name}: Attributes: {each}" for each in sorted(fields_of(node).difference(described))]
        for each in node.body:
            marks = {mark.rpartition(".")[2] for mark in marks_of(each)} if isinstance(each, Function) else set()
            if not isinstance(each, Function) or {"overload", "property", "cached_property", "setter"} & marks:
                continue
            docstring = ast.get_docstring(each) or ""
            if each.name in ("__init__", "__post_init__"):
                docstring = of_class + "\n" + docstring
            elif each.name.startswith(("_", "on_", "teardown")) or each.name in COMMON | inherited(name):
                continue
            missing += [f"{name}.{each.name}: {what}" for what in missing_in_function(each, name, docstring)]
    return missing


@pytest.mark.parametrize("path", sorted({path for path, _ in API}), ids=lambda path: str(path.relative_to(SOURCE)))
def test_the_docstrings_of_the_public_api_have_all_sections(path: Path) -> None:
    """A user finds every argument, result and error of a public name in its docstring, each in its section.

    - Args describe every parameter. A class describes those of its constructor, and the fields of a dataclass (in Args or
      Attributes), unless a base class in the package describes them or the field has a docstring of its own.
    - A function that returns something has a section Returns or Yields. A function whose docstring begins with "Return" or "Yield"
      describes its result there, and need not repeat it in a section.
    - Raises names each exception class, or a base class of it, that the function's own body raises, or that a sentence of its docstring names.

    Exempt are properties; overrides of a method that a base class in the package documents; and hooks, whose arguments their
    framework describes (`on_...`, `teardown`). Args may be left out if the docstring says "The arguments are those of `...`" or
    "Make it with `...`".
    """
    assert missing_sections(path) == []


def wrong_sections(path: Path) -> list[str]:
    """Functions whose Args are not their parameters, and sections under another name than Google's."""
    wrong = []
    for node in ast.walk(tree_of(path)):
        docstring = ast.get_docstring(node) if isinstance(node, ast.Module | ast.ClassDef | Function) else None
        if not docstring:
            continue
        name = getattr(node, "name", "module")
        if other := re.search(r"^(Example|Arguments|Parameters|Params|Return|Yield|Raise|Throws):$", docstring, re.MULTILINE):
            wrong.append(f"{name}: the section {other[0]}")
        if several := re.search(r"^ {4}\w+, .*?:", section(docstring, "Attributes"), re.MULTILINE):
            wrong.append(f"{name}: the site shows only the first of the attributes {several[0]}")
        if isinstance(node, Function):
            given = parameters_of(node)
            described = documented_arguments(docstring)
            wrong += [f"{name}: Args describe {each}, which is no parameter" for each in described if each not in given]
    return wrong


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_the_sections_of_docstrings_are_google_s_and_args_are_the_parameters(path: Path) -> None:
    """A function that is not public may describe its parameters in a sentence."""
    assert wrong_sections(path) == []


def with_examples() -> list[str]:
    """The modules that have an example in a docstring, by their import path."""

    def has_example(node: ast.AST) -> bool:
        docstring = ast.get_docstring(node) if isinstance(node, ast.Module | ast.ClassDef | Function) else None
        return bool(docstring and doctest.DocTestParser().get_examples(docstring))

    found = [path for path in MODULES if ">>> " in path.read_text() and any(map(has_example, ast.walk(tree_of(path))))]
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
