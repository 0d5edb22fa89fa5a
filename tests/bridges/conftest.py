"""Fixtures of the tests of bridges."""

import gc
import logging
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from callsheet.bridges import versions

versions.warned.update(
    versions.TESTED
)  # no warnings of untested versions: `make versions` runs the tests with such versions, and tests check the log


@pytest.fixture(autouse=True)
def _nothing_is_left_in_torch() -> Iterator[None]:
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
    assert not kept.messages or "counts_may_differ" in request.fixturenames, kept.messages


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Let torch use one thread: more threads would compete for the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
