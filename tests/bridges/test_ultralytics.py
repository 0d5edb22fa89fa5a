"""The bridge to Ultralytics: with the real one in a venv of its own, and what needs no Ultralytics here."""

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
    """Every test of `ultralytics_in_its_own_venv.py`, and the matrix's and others of Ultralytics; those that fail are named with what went wrong."""
    others = ("test_matrix.py", "test_alone.py", "test_copies.py")
    files = [f"tests/bridges/{name}" for name in ("ultralytics_in_its_own_venv.py", *others)]
    which = [] if os.environ.get("CALLSHEET_MATRIX") else ["-m", "not slow"]
    options = ["-o", "addopts=--strict-markers", "-p", "no:xdist", "-p", "no:cacheprovider", "-k", "ultralytics", *which]
    ran = subprocess.run([PYTHON, "-m", "pytest", *options, *files], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-20_000:] + ran.stderr[-5_000:]
    assert re.search(r"\d+ passed", ran.stdout), ran.stdout
