"""The examples run."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).resolve().parent.parent / "examples").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_an_example_runs_and_learns(example: Path, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(example)], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    losses = [
        float(line.split("train/loss': ")[1].split("}")[0].split(",")[0])
        for line in done.stdout.splitlines()
        if "train/loss" in line
    ]
    assert losses[-1] < losses[0] / 10
