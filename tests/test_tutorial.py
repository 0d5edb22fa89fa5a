"""The programs of the tutorial run, and the chapters show their code and what they print."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROGRAMS = ROOT / "examples" / "tutorial"
CHAPTERS = ROOT / "docs" / "tutorial"
VARIES = re.compile(r"\d+\.\d+ s\b|\b[0-9a-f]{16}\b")
"""Times, and digests of weights, whose last bits depend on the processor."""


def page(chapter: str) -> str:
    return (CHAPTERS / f"{chapter}.md").read_text(encoding="utf-8")


def outputs(chapter: str) -> list[str]:
    return re.findall(r'^```text title="Output"\n(.*?)^```$', page(chapter), re.MULTILINE | re.DOTALL)


def printed_by(*command: str, folder: Path) -> str:
    """Return what a program prints on its standard output."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, check=False, cwd=folder, env=environment, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def assert_shown(shown: str, printed: str) -> None:
    """The lines are equal, apart from times and digests."""
    assert VARIES.sub("#", shown).splitlines() == VARIES.sub("#", printed).splitlines()


def test_every_program_has_a_chapter_and_every_chapter_a_program() -> None:
    programs = sorted(path.stem for path in PROGRAMS.glob("*.py"))
    assert programs == sorted(path.stem for path in CHAPTERS.glob("*.md") if path.stem != "index")


@pytest.mark.parametrize("program", sorted(PROGRAMS.glob("*.py")), ids=lambda path: path.stem)
def test_a_chapter_shows_the_code_of_its_program(program: Path) -> None:
    source = program.read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", page(program.stem), re.MULTILINE | re.DOTALL)
    assert [block for block in blocks if block not in source] == []
    shown = sum(len(block.split()) for block in blocks)
    assert shown > 0.8 * len(source.split())


@pytest.mark.parametrize(
    "chapter",
    ["first_callback", "plateau_stopper", "background_lane", pytest.param("same_class_three_loops", marks=pytest.mark.test_all)],
)
def test_a_chapter_shows_what_its_program_prints(chapter: str, tmp_path: Path) -> None:
    (shown,) = outputs(chapter)
    assert f"python examples/tutorial/{chapter}.py" in page(chapter)
    assert_shown(shown, printed_by(str(PROGRAMS / f"{chapter}.py"), folder=tmp_path))


def test_the_class_of_chapters_two_and_three_is_the_same() -> None:
    classes = {
        re.search(r"^class PlateauStopper.*?(?=^\w)", (PROGRAMS / name).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)[0]  # type: ignore[index]
        for name in ("plateau_stopper.py", "same_class_three_loops.py")
    }
    assert len(classes) == 1


@pytest.mark.test_all
def test_a_killed_run_on_two_processes_ends_with_the_same_weights(tmp_path: Path) -> None:
    killed, undisturbed = outputs("killed_and_resumed")
    program = str(PROGRAMS / "killed_and_resumed.py")
    torchrun = ("-m", "torch.distributed.run", "--nproc_per_node", "2")
    found = printed_by(*torchrun, "--max-restarts", "1", program, "runs/killed", "25", folder=tmp_path)
    assert_shown(killed, found)
    expected = printed_by(*torchrun, program, "runs/undisturbed", folder=tmp_path)
    assert_shown(undisturbed, expected)
    assert found.splitlines()[-1] == expected.splitlines()[-1]
