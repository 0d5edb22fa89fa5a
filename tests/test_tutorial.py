"""The programs of the tutorial run, and the chapters show their whole code and their actual output."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from forked import on_path  # type: ignore[import-not-found]  # pytest has its folder on the path

ROOT = Path(__file__).resolve().parent.parent
PROGRAMS = ROOT / "examples" / "tutorial"
CHAPTERS = ROOT / "docs" / "tutorial"
NAMES = ["first_callback", "plateau_stopper", "same_class_three_loops", "background_lane", "killed_and_resumed"]
VARIES = re.compile(r"\d+\.\d+ s\b|\b[0-9a-f]{16}\b")
"""Times, and digests of weights, whose last bits depend on the processor."""
FENCE = re.compile(r'^```(python|sh|diff|text)(?: title="Output")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)


def page(chapter: str) -> str:
    return (CHAPTERS / f"{chapter}.md").read_text(encoding="utf-8")


def parts(chapter: str) -> tuple[str, str]:
    """Return the chapter before "Try this", and the section "Try this"."""
    before, found, rest = page(chapter).partition("\n## Try this\n")
    assert found, f"{chapter} has no section 'Try this'"
    return before, rest


def blocks(text: str, kind: str) -> list[str]:
    return [block for found, block in FENCE.findall(text) if found == kind]


def experiments(chapter: str) -> Iterator[tuple[dict[str, str], str, str]]:
    """Yield each experiment of "Try this": what to replace in the program, the commands to run, and the shown output.

    A block of the kind `diff` changes the program. Without a block of the kind `sh`, the chapter's own command is run.
    """
    before, rest = parts(chapter)
    (command, *_) = blocks(before, "sh")
    edits: dict[str, str] = {}
    commands = command
    for kind, block in FENCE.findall(rest):
        if kind == "diff":
            lines = block.splitlines(keepends=True)
            edits["".join(line[1:] for line in lines if line[0] != "+")] = "".join(line[1:] for line in lines if line[0] != "-")
        elif kind == "sh":
            commands = block
        else:
            assert kind == "text"
            yield edits, commands, block
            edits, commands = {}, command


def run(commands: str, folder: Path, *, are_errors_shown: bool = False) -> str:
    """Run shell commands in a folder with a copy of the programs. Return what they print."""
    done = subprocess.run(
        ["bash", "-c", commands],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if are_errors_shown else subprocess.PIPE,
        text=True,
        check=False,
        cwd=folder,
        env=os.environ | {"PATH": on_path(), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        timeout=240,
    )
    assert are_errors_shown or done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a copy of the programs."""
    shutil.copytree(PROGRAMS, tmp_path / "examples" / "tutorial")
    return tmp_path


def assert_shown(shown: str, printed: str) -> None:
    """Check that the lines are equal, apart from times and digests."""
    assert VARIES.sub("#", shown).splitlines() == VARIES.sub("#", printed).splitlines()


def assert_lines_are_printed(shown: str, printed: str) -> None:
    """Check that each shown line is printed, in this order, apart from times and digests. `...` matches any text."""
    lines = iter(VARIES.sub("#", printed).splitlines())
    for line in VARIES.sub("#", shown).splitlines():
        pattern = re.compile(".*".join(map(re.escape, line.split("..."))))
        assert any(map(pattern.fullmatch, lines)), f"{line!r} is not printed, or not in this place:\n{printed}"


def test_every_program_has_a_chapter_and_every_chapter_a_program() -> None:
    programs = sorted(path.stem for path in PROGRAMS.glob("*.py"))
    assert programs == sorted(NAMES) == sorted(path.stem for path in CHAPTERS.glob("*.md") if path.stem != "index")


@pytest.mark.parametrize("chapter", NAMES)
def test_the_code_of_a_chapter_put_together_is_the_whole_program(chapter: str) -> None:
    source = (PROGRAMS / f"{chapter}.py").read_text(encoding="utf-8")
    docstring = ast.parse(source).body[0].end_lineno
    program = [line for line in source.splitlines()[docstring:] if line]
    assert [line for line in "".join(blocks(page(chapter), "python")).splitlines() if line] == program


@pytest.mark.parametrize(
    "chapter",
    ["first_callback", "plateau_stopper", "background_lane", pytest.param("same_class_three_loops", marks=pytest.mark.test_all)],
)
def test_a_chapter_shows_what_its_program_prints(chapter: str, folder: Path) -> None:
    before, _ = parts(chapter)
    (command,), (shown,) = blocks(before, "sh"), blocks(before, "text")
    assert command == f"python examples/tutorial/{chapter}.py\n"
    assert_shown(shown, run(command, folder))


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "chapter",
    [
        "plateau_stopper",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("first_callback", "same_class_three_loops", "background_lane", "killed_and_resumed")
        ),
    ],
)
def test_the_experiments_of_a_chapter_print_what_it_shows(chapter: str, folder: Path) -> None:
    """Every experiment starts from the chapter's program, and from the files that the runs before it wrote."""
    program = folder / "examples" / "tutorial" / f"{chapter}.py"
    source = program.read_text(encoding="utf-8")
    before, _ = parts(chapter)
    if chapter == "killed_and_resumed":
        run(blocks(before, "sh")[0], folder)
    tried = 0
    for edits, commands, shown in experiments(chapter):
        changed = source
        for old, new in edits.items():
            assert changed.count(old) == 1, f"{old!r} is {changed.count(old)} times in the program"
            changed = changed.replace(old, new)
        program.write_text(changed, encoding="utf-8")
        assert_lines_are_printed(shown, run(commands, folder, are_errors_shown=True))
        tried += 1
    assert tried > 1


def test_the_class_of_chapters_two_and_three_is_the_same() -> None:
    classes = {
        re.search(r"^class PlateauStopper.*?(?=^\w)", (PROGRAMS / name).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)[0]  # type: ignore[index]
        for name in ("plateau_stopper.py", "same_class_three_loops.py")
    }
    assert len(classes) == 1


@pytest.mark.test_all
def test_a_killed_run_on_two_processes_ends_with_the_same_weights(folder: Path) -> None:
    before, _ = parts("killed_and_resumed")
    printed = []
    for command, shown in zip(blocks(before, "sh"), blocks(before, "text"), strict=True):
        printed.append(run(command, folder))
        assert_shown(shown, printed[-1])
    killed, undisturbed = printed
    assert killed.splitlines()[-2:] == undisturbed.splitlines()[-2:]  # the digest, and the outcome
