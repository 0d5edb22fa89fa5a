"""Fixtures of the tests of bridges."""

import gc
import logging
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from callsheet.bridges import versions

versions.warned.update(
    versions.TESTED
)  # no warnings of untested versions: `make versions` runs the tests with such versions, and tests check the log


@pytest.fixture(autouse=True)
def _backward_is_not_patched_afterwards() -> Iterator[None]:
    """Check after each test that `Tensor.backward` is not patched. After a failed loop, garbage collection restores it."""
    yield
    if Tensor.backward.__qualname__ != "Tensor.backward":  # collect only if necessary, because it takes half a second
        gc.collect()
    assert Tensor.backward.__qualname__ == "Tensor.backward"


@pytest.fixture
def counts_may_differ() -> None:
    """Allow the counts of steps and epochs of a framework and of callsheet to differ in a test; see `_counts_are_equal`."""


class _Keeps(logging.Handler):
    """Keeps the log messages that contain a text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if self.text in record.getMessage():
            self.messages.append(record.getMessage())


@pytest.fixture(autouse=True)
def _counts_are_equal(request: pytest.FixtureRequest) -> Iterator[None]:
    """Check in each test that no host logs a warning that its counts differ from the framework's, unless the test allows it."""
    kept = _Keeps("figures per step or epoch may be wrong")
    logging.getLogger("callsheet").addHandler(kept)
    yield
    logging.getLogger("callsheet").removeHandler(kept)
    request.node.user_properties.append(("warned", bool(kept.messages)))
    assert not kept.messages or "counts_may_differ" in request.fixturenames, kept.messages


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Let torch use one thread: more threads would compete for the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


_faulty_runs: dict[tuple[str, str], str] = {}
"""How each run with random faults has ended, by its loop and its test."""


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Record how a run with random faults has ended. With several workers, this is called in the process that started them."""
    found = re.search(r"test_(\w+)_with_random_faults", report.nodeid)
    if found and report.failed:
        _faulty_runs[found[1], report.nodeid] = "failed"
    elif found and report.when == "teardown":
        _faulty_runs.setdefault((found[1], report.nodeid), "warned" if dict(report.user_properties)["warned"] else "exact")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the table of `make faults` to the path CALLSHEET_FAULTS. Keep the rows of loops that other sessions have run."""
    path = os.environ.get("CALLSHEET_FAULTS")
    if path and _faulty_runs and not hasattr(session.config, "workerinput"):
        counts: dict[str, Counter[str]] = defaultdict(Counter)
        for (loop, _), outcome in _faulty_runs.items():
            counts[loop.replace("_", " ")][outcome] += 1
        table = Path(path)
        rows = dict(re.findall(r"^\| ([a-z ]+) (\|(?: \d+ \|)+)$", table.read_text(), re.MULTILINE)) if table.exists() else {}
        for loop, found in counts.items():
            rows[loop] = f"| {found.total()} | {found['exact']} | {found['warned']} | {found['failed']} |"
        table.write_text("\n".join([_FAULTS_TABLE, *(f"| {loop} {row}" for loop, row in sorted(rows.items())), ""]))


_FAULTS_TABLE = """# Frameworks whose events are missing, repeated or in another order

Runs of `tests/bridges/test_unforeseen.py`, and of Composer's and Ultralytics' tests in venvs of their own, made by `make faults` with 80
seeds. In half of the runs 15 %, in the other half 2 % of the framework's calls to callsheet's host are left out, made twice, or preceded
by a repeated earlier call; in Composer, which has many more events in a step, a tenth of these shares. The loop by hand leaves out,
repeats and reorders its own calls.
In all runs that have not failed, the weights are equal to those of training without callsheet, and the events are in lifecycle order.
In the frameworks, each step is reported once, with its epoch; its loss is the one that the loop has computed, or there is none. This holds
in the whole run or, if callsheet has logged a warning, before the step that the warning names. In Composer and Ultralytics, the same holds for the steps of
evaluations, and the losses of evaluations are those that the framework has computed.
Composer runs with and without saves and evaluations within an epoch, with callbacks that listen only to the ends of steps, and with an
optimizer that calls a closure. Ultralytics runs with one and with two batches a step, and with callbacks that listen only to the ends of
steps.

| loop | runs | without a warning | with a warning | failed |
| --- | --- | --- | --- | --- |"""
