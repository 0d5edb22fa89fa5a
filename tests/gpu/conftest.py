"""`make test-gpu` runs these tests with a given interpreter and installs nothing; missing packages are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

OLDEST_TORCH = (2, 11)


def _missing() -> str:
    """Return the reason why these tests cannot run here, or an empty string."""
    try:
        import torch

        from callsheet import Trainer  # noqa: F401  # it needs further packages
    except ImportError as error:
        return str(error)
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < OLDEST_TORCH:
        return f"torch {torch.__version__} is installed, and callsheet needs {'.'.join(map(str, OLDEST_TORCH))} or later"
    return "" if torch.cuda.is_available() else f"torch {torch.__version__} finds no CUDA device"


MISSING = _missing()

if not MISSING:
    # Import the fixtures, because tests/conftest.py is not loaded here.
    from built_ins import built_in, collector, subjects  # type: ignore[import-not-found]  # noqa: F401


class SkippedModule(pytest.Module):
    """A test module that is not imported."""

    def collect(self) -> Any:
        pytest.skip(MISSING, allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    return SkippedModule.from_parent(parent, path=module_path) if MISSING else None
