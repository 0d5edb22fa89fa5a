"""Read, from the syntax trees of a checkout's tests, which errors with which messages the tests expect for wrong input.

`expected` returns one `Rejection` for each expected message: the pattern of a `pytest.raises(Error, match=...)`, or a text that the
message of a caught error is compared with. `paired` finds the counterpart of each rejection of an older checkout.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path

SUBJECTS = ("transport", "control", "registration")
"""The tests of rejected input: `tests/test_<subject>.py`."""

PRINTED = "(printed)"
"""The error of a rejection that a test reads from the output of a program."""

LIKE = 0.5
"""Least similarity (from 0 to 1) of two expected messages, with the names of their tests, that are counted as one, reworded."""


@dataclass(frozen=True, order=True)
class Rejection:
    """One expected message. `test` is the name of its test, which may change."""

    subject: str
    error: str
    message: str
    test: str = ""

    def __str__(self) -> str:
        return f"{self.subject}: {self.error}: {self.message or '(any message)'}"


def expected(tests: Path, renamed: Mapping[str, str], subjects: Iterable[str] = SUBJECTS) -> list[Rejection]:
    """Return the rejections that the tests of `subjects` in the folder `tests` expect, in the order of the files.

    `renamed` maps old names to new ones, and is applied to the errors' classes and the words of messages and of tests' names.
    """
    found: list[Rejection] = []
    for subject in subjects:
        module = ast.parse((tests / f"test_{subject}.py").read_text("utf-8"))
        functions = {each.name: each for each in module.body if isinstance(each, ast.FunctionDef)}
        helpers = {name: each for name, each in functions.items() if not name.startswith("test_") and any(_raises(each))}
        for name, function in functions.items():
            if name.startswith("test_"):
                test = _Test(function, functions, helpers)
                found += [
                    Rejection(subject, _named(error, renamed), _plain(text, renamed), renamed.get(name, name))
                    for error, text in test.expected()
                ]
    return found


def paired(
    old: Iterable[Rejection], new: Iterable[Rejection]
) -> tuple[list[tuple[Rejection, Rejection]], list[tuple[Rejection, Rejection]], list[Rejection], list[Rejection]]:
    """Return which are equal, which are reworded, which old ones are missing, and which new ones were added.

    Equal ones have the same subject, error and message, as often as each occurs. Of the others, the most similar of the same subject
    and error are paired first, by their messages and the names of their tests.
    """
    old_left, new_left, equal = list(old), list(new), []
    for one in list(old_left):
        same = [
            other for other in new_left if (other.subject, other.error, other.message) == (one.subject, one.error, one.message)
        ]
        if same:
            other = max(same, key=lambda each: _similarity(one.test, each.test))
            equal.append((one, other))
            old_left.remove(one)
            new_left.remove(other)
    scored = sorted(
        (
            (likeness(one, other), i, j)
            for i, one in enumerate(old_left)
            for j, other in enumerate(new_left)
            if (one.subject, one.error) == (other.subject, other.error)
        ),
        reverse=True,
    )
    pairs: dict[int, int] = {}
    for score, i, j in scored:
        if score >= LIKE and i not in pairs and j not in pairs.values():
            pairs[i] = j
    return (
        equal,
        [(one, new_left[pairs[i]]) for i, one in enumerate(old_left) if i in pairs],
        [one for i, one in enumerate(old_left) if i not in pairs],
        [other for j, other in enumerate(new_left) if j not in pairs.values()],
    )


def closest(one: Rejection, others: Iterable[Rejection]) -> Rejection | None:
    """Return the rejection most similar to `one`, whatever its subject and error."""
    return max(others, key=lambda other: likeness(one, other), default=None)


def likeness(one: Rejection, other: Rejection) -> float:
    """Return how similar two rejections are, from 0 to 1: half by their messages, half by the names of their tests."""
    return (_similarity(one.message, other.message) + _similarity(one.test, other.test)) / 2


def _similarity(one: str, other: str) -> float:
    words, others = (re.findall(r"\w+|[^\w\s]", text.replace("_", " ")) for text in (one, other))
    return SequenceMatcher(None, words, others, autojunk=False).ratio()


class _Test:
    """A test function, with what its module's other functions give it."""

    def __init__(
        self, function: ast.FunctionDef, functions: Mapping[str, ast.FunctionDef], helpers: Mapping[str, ast.FunctionDef]
    ):
        self.function, self.functions, self.helpers = function, functions, helpers
        self.parameters = dict(self._parameters())
        self.messages: dict[str, str] = {}
        """For each variable that has a caught error or its message, the class of the error."""

    def expected(self) -> Iterator[tuple[str, str]]:
        """Yield the class and the expected text of each error."""
        compared: set[str] = set()
        without_text: list[str] = []
        for node in _in_order(self.function):
            if isinstance(node, ast.With):
                for item in node.items:
                    call = item.context_expr
                    if not isinstance(call, ast.Call) or not _is_raises(call):
                        continue
                    error = ast.unparse(call.args[0])
                    pattern = next((keyword.value for keyword in call.keywords if keyword.arg == "match"), None)
                    if pattern is not None:
                        yield from ((error, _unescaped(text)) for text in self._texts(pattern))
                    else:
                        without_text.append(error)
                    if isinstance(item.optional_vars, ast.Name):
                        self.messages[item.optional_vars.id] = error
            elif isinstance(node, ast.Assign) and (error := self._error_of(node.value)):
                self.messages.update(
                    {name.id: error for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name)}
                )
            elif isinstance(node, ast.Assert):
                for error, text in self._asserted(node.test):
                    compared.add(error)
                    yield error, text
            if isinstance(node, ast.Assert) and not self._catches and re.search("refuse|reject", self.function.name):
                yield from ((PRINTED, text) for text in self._printed(node.test))
        yield from ((error, "") for error in without_text if error not in compared)

    @property
    def _catches(self) -> bool:
        """Whether the test catches an error itself or with a helper; else it reads what a program prints about one."""
        called = {
            node.func.id for node in ast.walk(self.function) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        return any(_raises(self.function)) or bool(called & self.helpers.keys())

    def _printed(self, test: ast.expr) -> list[str]:
        """Return the text that must be in a program's output."""
        if isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.In):
            return self._texts(test.left)
        if isinstance(test, ast.Call) and isinstance(test.func, ast.Attribute) and test.func.attr == "startswith":
            return self._texts(test.args[0])
        return []

    def _asserted(self, test: ast.expr) -> Iterator[tuple[str, str]]:
        """Yield what is compared with the message of an error."""
        if isinstance(test, ast.BoolOp):
            for each in test.values:
                yield from self._asserted(each)
        elif isinstance(test, ast.Compare):
            sides = [test.left, *test.comparators]
            error = next(filter(None, map(self._error_of, sides)), "")
            if error and not any(isinstance(each, ast.NotIn | ast.NotEq | ast.Is) for each in test.ops):
                yield from ((error, text) for side in sides if not self._error_of(side) for text in self._texts(side))
        elif isinstance(test, ast.Call) and isinstance(test.func, ast.Attribute) and test.func.attr in ("startswith", "endswith"):
            if error := self._error_of(test.func.value):
                yield from ((error, text) for text in self._texts(test.args[0]))
        elif isinstance(test, ast.Call) and isinstance(test.func, ast.Name) and test.func.id in ("any", "all"):
            for node in ast.walk(test):
                if isinstance(node, ast.GeneratorExp) and any(self._error_of(each.iter) for each in node.generators):
                    error = next(filter(None, (self._error_of(each.iter) for each in node.generators)))
                    names = {name.id for each in node.generators for name in ast.walk(each.target) if isinstance(name, ast.Name)}
                    self.messages.update(dict.fromkeys(names, error))
                    yield from self._asserted(node.elt)

    def _error_of(self, value: ast.expr) -> str:
        """Return the class of the error whose message an expression contains, or an empty string."""
        for node in ast.walk(value):
            if isinstance(node, ast.Name) and node.id in self.messages:
                return self.messages[node.id]
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and (helper := self.helpers.get(node.func.id)):
                error = ast.unparse(next(iter(_raises(helper))).args[0])
                names = [each.arg for each in helper.args.args]
                return ast.unparse(node.args[names.index(error)]) if error in names else error
        return ""

    def _texts(self, value: ast.expr) -> list[str]:
        """Return the texts that an expression can be: of a parameter of the test, one for each of its values."""
        if isinstance(value, ast.Constant):
            return [value.value] if isinstance(value.value, str) else []
        if isinstance(value, ast.JoinedStr):
            return ["".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in value.values)]
        if isinstance(value, ast.Set | ast.Tuple | ast.List):
            return [text for each in value.elts for text in self._texts(each)]
        if isinstance(value, ast.BinOp):
            return ["".join(text for side in (value.left, value.right) for text in self._texts(side)[:1])]
        if isinstance(value, ast.Call) and value.args:  # re.escape(text)
            return self._texts(value.args[0])
        return self.parameters.get(value.id, []) if isinstance(value, ast.Name) else []

    def _parameters(self) -> Iterator[tuple[str, list[str]]]:
        """Yield the names of the parametrized arguments, and those of their values that are texts."""
        for decorator in self.function.decorator_list:
            if not isinstance(decorator, ast.Call) or not ast.unparse(decorator.func).endswith("parametrize"):
                continue
            given = ast.literal_eval(decorator.args[0])
            names = [name.strip() for name in given.split(",")] if isinstance(given, str) else list(given)
            for position, name in enumerate(names):
                yield name, [text for row in self._rows(decorator.args[1]) for text in _constants(row, position)]

    def _rows(self, values: ast.expr) -> list[list[ast.expr]]:
        """Return the rows of a table of parameters, also of one that a function of the module yields."""
        if isinstance(values, ast.ListComp) and isinstance(called := values.generators[0].iter, ast.Call):
            target, element = values.generators[0].target, values.elt
            places = [each.id for each in target.elts if isinstance(each, ast.Name)] if isinstance(target, ast.Tuple) else []
            given = element.args if isinstance(element, ast.Call) else []
            yields = [each.value for each in ast.walk(self.functions[ast.unparse(called.func)]) if isinstance(each, ast.Yield)]
            return [
                [row.elts[places.index(each.id)] for each in given if isinstance(each, ast.Name)]
                for row in yields
                if isinstance(row, ast.Tuple)
            ]
        rows = values.elts if isinstance(values, ast.List | ast.Tuple) else []
        return [
            row.args if isinstance(row, ast.Call) else list(row.elts) if isinstance(row, ast.Tuple) else [row] for row in rows
        ]


def _constants(row: list[ast.expr], position: int) -> list[str]:
    value = row[position] if position < len(row) else None
    return [value.value] if isinstance(value, ast.Constant) and isinstance(value.value, str) else []


def _in_order(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """Yield the statements and expressions of a function in the order of the text."""

    def visit(node: ast.AST) -> Iterator[ast.AST]:
        for child in ast.iter_child_nodes(node):
            yield child
            yield from visit(child)

    return visit(function)


def _is_raises(call: ast.Call) -> bool:
    return ast.unparse(call.func) == "pytest.raises" and bool(call.args)


def _raises(function: ast.FunctionDef) -> Iterator[ast.Call]:
    return (node for node in ast.walk(function) if isinstance(node, ast.Call) and _is_raises(node))


def _unescaped(pattern: str) -> str:
    """Return the text of a regular expression, with "..." for what it leaves open."""
    open_parts = re.sub(r"(?<!\\)\.[*+]\??|\\[dwsS][+*]?", "...", pattern).replace(r"\n", " ")
    return re.sub(r"\\(.)", r"\1", open_parts)


def _named(error: str, renamed: Mapping[str, str]) -> str:
    return renamed.get(error.rpartition(".")[2], error.rpartition(".")[2])


def _plain(text: str, renamed: Mapping[str, str]) -> str:
    words = re.sub(r"\w+", lambda word: renamed.get(word[0], word[0]), text)
    return re.sub(r"\s+", " ", words).strip()
