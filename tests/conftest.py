"""What all tests need."""

import signal
import sys

import pytest

pytest_plugins = ["built_ins"]  # its fixtures


def pytest_configure() -> None:
    """A shell starts what it puts into the background with Ctrl-C ignored, and a trainer respects that; tests of Ctrl-C need it back."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def nothing_was_compiled() -> None:
    """What is counted of a step depends on whether this process has compiled anything: another test may have."""
    if "torch._dynamo.utils" in sys.modules:
        sys.modules["torch._dynamo.utils"].counters.clear()
