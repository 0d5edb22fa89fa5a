"""Record the behavior that users can observe in this checkout of callsheet and in an older one, and report the differences.

    python tools/behavior.py OLD_CHECKOUT                          record both, print every difference, exit 1 if one has no reason
    python tools/behavior.py OLD_CHECKOUT --only hosts recipes     only these parts
    python tools/behavior.py OLD_CHECKOUT --table FILE             also write the result as a table
    python tools/behavior.py OLD_CHECKOUT --results FILE           continue an interrupted comparison of the same two commits

The parts are

- hosts: a short real run in each framework's loop: the order of its events, the fields available at each, the logged metrics, losses
  and final weights, bit for bit
- recipes: a few steps of each recipe, started from the command line: its files, and what the loggers wrote
- run_folders: a run and its checkpoint, written by the older checkout, are read and resumed by each
- matrix: the verdict of each cell
- names: the public modules and their names, and whether the imports in the older docs and examples still work
- commands: the options of the command line
- yaml: the keys and defaults of the recipes
- rejections: which errors and messages the tests of transport, control and registration expect

The older checkout is run twice: values that differ between these two runs (times, rates, memory) are not compared. What is compared,
with new names and the reasons of differences, is in `behavior_recorders.py`, `behavior_rejections.py` and `behavior_reasons.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from behavior_reasons import RENAMED, RENAMED_IN_TESTS, REWORDED, reason
from behavior_recorders import RECIPES, RECORDERS
from behavior_rejections import closest, expected, paired

HOSTS = (
    *("trainer", "bare", "huggingface", "lightning", "ignite", "accelerate", "torchtnt", "keras"),
    *("megatron_bridge", "automodel", "instructlab", "composer", "ultralytics"),
)
OWN_INTERPRETERS = {"composer": ".venv-composer/bin/python", "ultralytics": ".venv-ultralytics/bin/python"}
"""The interpreters of the frameworks that cannot be installed together with the others."""

PARTS = (*RECORDERS, "rejections")
ROOT = Path(__file__).resolve().parent.parent
RECORDER = Path(__file__).resolve().parent / "behavior_recorders.py"
SECONDS = 600
"""The time limit for one run."""

ABSENT = "absent"


@dataclass(frozen=True)
class Difference:
    """A value that differs, and why; an empty reason if nobody has written one down."""

    key: str
    was: Any
    is_: Any
    reason: str

    @property
    def change(self) -> str:
        """Return "added", "removed" or "changed"."""
        return change(self.was, self.is_)

    def __str__(self) -> str:
        return f"  {self.key}: was {self.was!r}, is {self.is_!r}{f' ({self.reason})' if self.reason else ''}"


@dataclass(frozen=True)
class Comparison:
    """The result for one part, or one host or recipe of it. If it could not be compared, `not_compared` says why."""

    title: str
    compared: int = 0
    varying: int = 0
    differences: list[Difference] = field(default_factory=list)
    not_compared: str = ""

    @property
    def unexplained(self) -> list[Difference]:
        """Return the differences that have no reason."""
        return [each for each in self.differences if not each.reason]

    def __str__(self) -> str:
        if self.not_compared:
            return f"{self.title}: not compared: {self.not_compared}"
        counts = f"{self.compared} values compared, {len(self.differences)} differ, {self.varying} vary by themselves"
        explained = len(self.differences) - len(self.unexplained)
        return f"{self.title}: {counts}" + (f" ({explained} of the differences have a reason)" if explained else "")


def main() -> int:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    arguments.add_argument("old", type=Path, help="the older checkout (git worktree add DIR COMMIT)")
    arguments.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="the parts to record; by default all")
    arguments.add_argument("--names", nargs="+", help="record only these hosts and recipes")
    arguments.add_argument("--table", type=Path, help="write the result to this file")
    arguments.add_argument("--results", type=Path, help="keep the result of each part in this file, and do not compare it again")
    given = arguments.parse_args()
    old = given.old.resolve()
    results = Results(given.results, f"{commit(old)}, {commit(ROOT)}")
    found: list[Comparison] = []
    for part in given.only:
        for name in {"hosts": HOSTS, "recipes": RECIPES, "run_folders": RECIPES}.get(part, ("",)):
            if not given.names or not name or name in given.names:
                compared = results.get(f"{part} {name}".strip())
                if compared is None:
                    results.add(compared := compare_rejections(old) if part == "rejections" else compare(part, name, old))
                found.append(compared)
                shown = compared.unexplained + [each for each in compared.differences if each.reason]
                print(compared, *shown[:40], sep="\n", flush=True)
    unexplained = sum(len(each.unexplained) for each in found)
    print(
        f"{sum(each.compared for each in found)} values compared, {sum(len(each.differences) for each in found)} differ, "
        f"{unexplained} without a reason; not compared: {', '.join(each.title for each in found if each.not_compared) or 'nothing'}"
    )
    if given.table:
        given.table.write_text("\n".join(table(found, old)) + "\n", "utf-8")
    return bool(unexplained)


class Results:
    """The results of the parts that were compared so far, in a file. Reasons are not kept, so that new ones apply to old results.

    Args:
        path: the file, or None to keep nothing.
        commits: the compared commits; results of other commits are dropped.
    """

    def __init__(self, path: Path | None, commits: str) -> None:
        self._path, self._commits = path, commits
        known = json.loads(path.read_text("utf-8")) if path and path.exists() else {}
        self._parts: dict[str, Any] = known["parts"] if known.get("commits") == commits else {}

    def get(self, title: str) -> Comparison | None:
        """Return the known result of a part, or None."""
        if title == "rejections" or title not in self._parts:  # comparing rejections takes no time
            return None
        compared, varying, not_compared, differences = self._parts[title]
        explained = [Difference(key, was, is_, reason(title, key, change(was, is_))) for key, was, is_ in differences]
        return Comparison(title, compared, varying, explained, not_compared)

    def add(self, one: Comparison) -> None:
        """Keep a result."""
        differences = [(each.key, each.was, each.is_) for each in one.differences]
        self._parts[one.title] = (one.compared, one.varying, one.not_compared, differences)
        if self._path:
            self._path.write_text(json.dumps({"commits": self._commits, "parts": self._parts}), "utf-8")


def compare(part: str, name: str, old: Path) -> Comparison:
    """Record this part in the older checkout, twice, and in this one, and compare the values."""
    title = f"{part} {name}".strip()
    interpreter = Path(OWN_INTERPRETERS.get(name, sys.executable)).absolute()
    if not interpreter.exists():
        return Comparison(title, not_compared=f"there is no {interpreter}")
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        first, second, found = threads.map(lambda tree: record(tree, part, name, interpreter, old), (old, old, ROOT))
    if "not there" in first:
        return Comparison(title, not_compared="the older checkout does not have it")
    for each in (first, second):
        if "failed" in each:
            return Comparison(title, not_compared=f"the older checkout cannot run it: {each['failed']}")
    if problem := found.get("not there") or found.get("failed"):
        return Comparison(title, 1, 0, [Difference("run", "works", f"fails: {problem}", "")])
    same = {key: value for key, value in first.items() if second.get(key, ABSENT) == value}
    varying = renamed(dict.fromkeys((first.keys() | second.keys()) - same.keys())).keys()
    stable = renamed(same)
    differences = []
    for key in sorted(stable.keys() | (found.keys() - varying)):
        was, is_ = stable.get(key, ABSENT), found.get(key, ABSENT)
        if was != is_:
            differences.append(Difference(key, was, is_, reason(title, key, change(was, is_))))
    return Comparison(title, len(stable), len(varying), differences)


def change(was: Any, is_: Any) -> str:
    """Return whether a value was "added", "removed" or "changed"."""
    return "added" if was == ABSENT else "removed" if is_ == ABSENT else "changed"


def record(tree: Path, part: str, name: str, interpreter: Path, old: Path) -> dict[str, Any]:
    """Run the recorder with the packages and tests of the checkout `tree`, and return the values that it prints as JSON."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {
            "PYTHONPATH": f"{tree / 'src'}{os.pathsep}{tree / 'tests'}",
            "PYTHONHASHSEED": "0",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "KERAS_BACKEND": "torch",
            "COLUMNS": "100",
        }
        ran = subprocess.run(
            [str(interpreter), "-W", "ignore", str(RECORDER), part, name, str(old)],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    if ran.returncode:
        print(ran.stderr[-3000:], file=sys.stderr)
        return {"failed": "; ".join(ran.stderr.strip().splitlines()[-1:]) or f"exit status {ran.returncode}"}
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


def renamed(values: dict[str, Any]) -> dict[str, Any]:
    """Replace old names in the keys, and in the values that are names."""

    def name(text: Any) -> Any:
        return re.sub(r"\w+", lambda word: RENAMED.get(word[0], word[0]), text) if isinstance(text, str) else text

    return {name(key): name(value) if isinstance(value, str) and " " not in value else value for key, value in values.items()}


def compare_rejections(old: Path) -> Comparison:
    """Compare which errors and messages the tests of rejected input expect.

    The tests' names may change. A message without an equal one is paired with the most similar one for the same error.
    """
    before, now = (expected(tree / "tests", RENAMED_IN_TESTS) for tree in (old, ROOT))
    _, reworded, missing, added = paired(before, now)
    differences = [Difference(f"{one.subject}: {one.error}", one.message, other.message, REWORDED) for one, other in reworded]
    for one in missing:
        text = reason("rejections", str(one), "removed")
        differences.append(
            Difference(f"{one} (in {one.test}; the closest now is: {closest(one, now)})", "expected", ABSENT, text)
        )
    for other in added:
        text = reason("rejections", str(other), "added")
        differences.append(Difference(f"{other} (in {other.test})", ABSENT, "expected", text))
    return Comparison("rejections", len(before), 0, differences)


def table(found: list[Comparison], old: Path) -> Iterator[str]:
    """Yield the lines of the page with the results."""
    yield "# What users can observe, compared with an older commit"
    yield ""
    yield f"Made by `make behavior OLD=DIR`, where `DIR` has {commit(old)}. This checkout has {commit(ROOT)}."
    yield f"Both ran with Python {platform.python_version()} and torch {version('torch')} on the CPU. The older commit ran twice: a value that"
    yield "differed between its two runs, such as a time, is not compared. Values are compared bit for bit, after the old names in the table"
    yield "below are replaced by new ones. `tools/behavior.py` says what each part records."
    yield ""
    yield "| part | values compared | equal | vary by themselves | changed | removed | added | without a reason |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for each in found:
        if not each.not_compared:
            counts = {kind: sum(one.change == kind for one in each.differences) for kind in ("changed", "removed", "added")}
            equal = each.compared - counts["changed"] - counts["removed"]
            cells = (each.compared, equal, each.varying, *counts.values(), len(each.unexplained))
            yield f"| {each.title} | {' | '.join(map(str, cells))} |"
    if any(each.not_compared for each in found):
        yield from ("", "Not compared:", "")
        yield from (f"- {each.title}: {cell(each.not_compared)}" for each in found if each.not_compared)
    yield from (
        "",
        "## Differences and their reasons",
        "",
        "| reason | where | values | for example |",
        "| --- | --- | --- | --- |",
    )
    yield from differences_by_reason(found)
    yield from ("", "## Names that were replaced before values were compared", "", "| then | now |", "| --- | --- |")
    yield from (f"| `{before}` | `{now}` |" for before, now in RENAMED.items())
    reworded = [one for each in found for one in each.differences if one.reason == REWORDED]
    if reworded:
        yield from ("", "## Messages of rejections that were reworded", "", "| error | then | now |", "| --- | --- | --- |")
        for one in reworded:
            yield f"| {one.key} | {cell(one.was)} | {cell(one.is_)} |"


def differences_by_reason(found: list[Comparison]) -> Iterator[str]:
    """Yield a row for each reason, with the parts in which it occurs and up to three differences."""
    by_reason: dict[str, list[tuple[str, Difference]]] = {}
    for each in found:
        for one in each.differences:
            by_reason.setdefault(one.reason, []).append((each.title, one))
    for text, values in by_reason.items():
        parts = dict.fromkeys(title for title, _ in values)
        kinds = {kind: sum(one.change == kind for _, one in values) for kind in ("changed", "removed", "added")}
        counted = ", ".join(f"{count} {kind}" for kind, count in kinds.items() if count)
        examples = [example(one) for _, one in values][:3]
        yield f"| {text or '**none given**'} | {', '.join(parts)} | {counted} | {'<br>'.join(examples)} |"


def example(one: Difference) -> str:
    """Return a difference in a few words."""
    key = cell(one.key)
    return f"{key}: {cell(one.was)} → {cell(one.is_)}" if one.change == "changed" else f"{key} ({one.change})"


def cell(value: Any) -> str:
    """Return a value as one short line of a table."""
    text = re.sub(r"\s+", " ", str(value)).replace("|", "\\|")
    return f"`{text[:157]}{'...' if len(text) > 157 else ''}`" if text else "(empty)"


def commit(tree: Path) -> str:
    """Return the commit of a checkout, with its date."""
    log = ["git", "-C", str(tree), "log", "-1", "--format=commit %h of %as"]
    return subprocess.run(log, capture_output=True, text=True, check=False).stdout.strip() or "no commit"


if __name__ == "__main__":
    sys.exit(main())
