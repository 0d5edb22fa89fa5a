"""What all tests need."""

import signal

pytest_plugins = ["built_ins"]  # its fixtures


def pytest_configure() -> None:
    """A shell starts what it puts into the background with Ctrl-C ignored, and a trainer respects that; tests of Ctrl-C need it back."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
