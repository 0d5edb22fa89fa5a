"""What all tests of bridges need."""

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from callsheet.bridges import versions

versions.warned.update(versions.TESTED)  # `make versions` runs the tests in other versions, and they look at the log


@pytest.fixture(autouse=True)
def _nothing_is_left_in_torch() -> Iterator[None]:
    """A host whose loop failed puts everything back when it is forgotten."""
    yield
    if Tensor.backward.__qualname__ != "Tensor.backward":  # a collection looks at all that the frameworks hold: half a second
        gc.collect()
    assert Tensor.backward.__qualname__ == "Tensor.backward"


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Of torch's own: more would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
