"""Fixtures for all tests."""

import os

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # before torch is imported; tests/gpu has the tests for CUDA
# MLflow's thread for telemetry changes environment variables, so another thread that reads all of them may get a KeyError.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")

import ctypes
import gc
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from forked import fork_for_multiprocessing  # type: ignore[import-not-found]  # pytest has its folder on the path

gc.disable()  # until `pytest_runtestloop`: the imports create a million objects, and none of them is garbage

pytest_plugins = ["built_ins"]  # its fixtures


def pytest_configure() -> None:
    """Start processes quickly, and with Ctrl-C: a shell ignores it in what it puts into the background, and a trainer respects that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    fork_for_multiprocessing()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Enable garbage collection again, which was off during the imports."""
    gc.enable()


number_of_modules = 0  # that were imported when objects were last excluded from garbage collection


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Exclude the objects of imported modules from garbage collection: many tests collect garbage, and each time would take a second."""
    global number_of_modules
    if len(sys.modules) >= number_of_modules + 100:
        number_of_modules = len(sys.modules)
        gc.collect()
        gc.freeze()


ONLY_IN_TEST_ALL = ("commands/", "report/", "testing/", "test_cli", "test_docs_", "test_examples", "test_tutorial")
"""The beginnings of the paths of tests that only `make test-all` runs: those of the commands, the reports, the test kit and the docs."""


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Mark the tests that only `make test-all` runs, before pytest selects tests by their marks.

    After all plugins, which may change the order, put the tests with long time limits first, so that no worker is left alone with
    one of them at the end.
    """

    def limit(item: pytest.Item) -> float:
        marker = item.get_closest_marker("timeout")
        return float(marker.args[0]) if marker is not None else 0.0

    folder = Path(__file__).parent
    for item in items:
        if item.path.relative_to(folder).as_posix().startswith(ONLY_IN_TEST_ALL):
            item.add_marker(pytest.mark.test_all)
    yield
    items.sort(key=limit, reverse=True)


@pytest.fixture(autouse=True)
def nothing_was_compiled() -> None:
    """Clear torch's counters of compiled graphs, which an earlier test may have left: they change what is counted in a step."""
    if "torch._dynamo.utils" in sys.modules:
        sys.modules["torch._dynamo.utils"].counters.clear()


@pytest.fixture
def folder_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to a working folder for the code of a page. Trackers write their runs to it, and send nothing."""
    monkeypatch.chdir(tmp_path)
    for name, value in {
        "TRACKIO_DIR": str(tmp_path),
        "WANDB_ERROR_REPORTING": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }.items():
        monkeypatch.setenv(name, value)
    return tmp_path


@pytest.fixture
def read_only_folder(tmp_path: Path) -> Iterator[Path]:
    """Yield a folder in which no file can be created. Root may write everywhere, so root gives up this right during the test."""
    folder = tmp_path / "read-only"
    folder.mkdir(mode=0o555)
    if os.geteuid() != 0:
        yield folder
    elif sys.platform != "linux":
        pytest.skip("only on Linux can root give up its right to write everywhere")
    else:
        libc = ctypes.CDLL(None, use_errno=True)
        header, rights = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
        assert libc.capget(header, rights) == 0
        before = rights[0]
        rights[0] &= ~0b110  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH
        assert libc.capset(header, rights) == 0
        yield folder
        rights[0] = before
        assert libc.capset(header, rights) == 0
