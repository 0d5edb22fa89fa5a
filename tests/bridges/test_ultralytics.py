"""The bridge to Ultralytics: runs the tests with the real Ultralytics in a separate venv, and tests what does not need Ultralytics."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-ultralytics" / ("Scripts" if sys.platform == "win32" else "bin") / "python"


@pytest.mark.timeout(900)
@pytest.mark.skipif(not PYTHON.exists(), reason="no .venv-ultralytics: python tools/ultralytics_venv.py makes it")
def test_with_the_real_ultralytics() -> None:
    """Run `ultralytics_in_its_own_venv.py`, and the tests in other files that cover Ultralytics."""
    others = ("test_matrix.py", "test_alone.py", "test_copies.py", "test_fired_at.py")
    files = [f"tests/bridges/{name}" for name in ("ultralytics_in_its_own_venv.py", *others)]
    which = [] if os.environ.get("CALLSHEET_MATRIX") else ["-m", "not slow"]
    options = ["-o", "addopts=--strict-markers", "-p", "no:xdist", "-p", "no:cacheprovider", "-k", "ultralytics", *which]
    ran = subprocess.run([PYTHON, "-m", "pytest", *options, *files], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-20_000:] + ran.stderr[-5_000:]
    assert re.search(r"\d+ passed", ran.stdout), ran.stdout
