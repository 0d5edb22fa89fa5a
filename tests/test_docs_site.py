"""The documentation builds as a site without warnings, loads nothing from the network, and shows the actual output of its code."""

from __future__ import annotations

import math
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import yaml

from callsheet import Event
from callsheet.core.lifecycle import SPANS
from forked import on_path  # type: ignore[import-not-found]  # pytest has its folder on the path

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
FENCE = re.compile(
    r"^( *)```(python|sh|text)(?: title=\"([^\"]+)\")?\n(.*?)^\1```\n(?=(\n *```text title=\"Output\")?)",
    re.MULTILINE | re.DOTALL,
)
"""A block, which is indented in a tab: its language, its title, its text, and whether an output follows it at once."""
NUMBER = re.compile(r"\d+\.\d+(?:e[-+]?\d+)?")
COLUMN_GAP = re.compile(r"(?<=\S) {2,}")
"""The space between two columns of a table. Its width depends on the table's other rows, which a page may leave out."""

PAGES_WITH_OUTPUT = [
    page
    for page in sorted(DOCS.rglob("*.md"))
    if 'title="Output"' in page.read_text(encoding="utf-8") and page.parent.name != "tutorial"  # which test_tutorial.py tests
]


MIGRATION_GUIDES = [page for page in sorted(DOCS.glob("howto/migrate/*.md")) if page.stem != "index"]


def assert_same_output(shown: str, printed: str) -> None:
    """Check that the lines are equal, apart from the widths of columns and the last digits of fractional numbers.

    The digits vary with torch's version and the CPU, the widths with the digits and with warnings about a busy machine.
    """
    lines_shown, lines_printed = (COLUMN_GAP.sub("  ", NUMBER.sub("#", text)).splitlines() for text in (shown, printed))
    assert lines_shown == lines_printed
    for a, b in zip(NUMBER.findall(shown), NUMBER.findall(printed), strict=True):
        assert math.isclose(float(a), float(b), rel_tol=0.02, abs_tol=0.002), f"the page says {a}, the code prints {b}"


def pages_in(nav: object) -> list[str]:
    """Return the pages of a navigation, in order."""
    if isinstance(nav, str):
        return [nav]
    entries = nav.values() if isinstance(nav, dict) else nav if isinstance(nav, list) else ()
    return [page for entry in entries for page in pages_in(entry)]


def test_the_tests_that_pages_name_exist() -> None:
    files = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py")]
    known = {name for text in files for name in re.findall(r"^def (test_\w+)", text, re.MULTILINE)} | set(SPANS)
    for page in DOCS.rglob("*.md"):
        text = page.read_text(encoding="utf-8")
        if "`tests/" in text:  # a page about callsheet's own tests
            assert sorted(set(re.findall(r"`(test_\w+)`", text)) - known) == [], page
        assert [path for path in re.findall(r"`(tests/[\w/]+\.py)`", text) if not (ROOT / path).exists()] == [], page


def test_every_page_is_in_the_navigation_once() -> None:
    listed = pages_in(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])
    assert sorted(listed) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


def printed_by_shell(commands: str, folder: Path) -> str:
    """Return what shell commands print on standard output. Their port is replaced by one that is free."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        commands = commands.replace("29400", str(free.getsockname()[1]))
    process = subprocess.Popen(
        ["bash", "-c", commands],
        cwd=folder,
        # With an unbuffered output, the text and the line break of two ranks' `print` could be mixed.
        env=os.environ | {"PATH": on_path(), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        printed, errors = process.communicate(timeout=240)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)  # torchrun passes it on to its ranks
    assert process.returncode == 0, printed + errors
    return printed


@pytest.mark.test_all
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", PAGES_WITH_OUTPUT, ids=lambda page: str(page.relative_to(DOCS)))
def test_the_output_on_a_page_is_what_its_code_prints(
    page: Path, folder_of_the_page: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A text block with the title Output shows what the code since the last such block printed.

    A Python block with a title is a file of that name. Shell commands run if an output follows them at once.
    """
    names: dict[str, object] = {"__name__": "page"}
    capsys.readouterr()
    printed = ""
    for number, (_, language, title, indented, is_shown) in enumerate(FENCE.findall(page.read_text(encoding="utf-8"))):
        text = textwrap.dedent(indented)
        if language == "python" and title:
            (folder_of_the_page / title).write_text(text, encoding="utf-8")
        elif language == "python":
            exec(compile(text, f"{page.name}[{number}]", "exec"), names)
            printed += capsys.readouterr().out
        elif language == "sh" and is_shown:
            printed += printed_by_shell(text, folder_of_the_page)
        elif title == "Output":
            assert_same_output(text, printed)
            printed = ""


@pytest.mark.parametrize("page", MIGRATION_GUIDES, ids=lambda page: page.stem)
def test_a_migration_guide_has_code_before_and_after_and_a_table_of_names(page: Path) -> None:
    """The events that the table names exist. That both versions of the code print the same is checked by the test of outputs."""
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL))
    outputs = [
        [text for _, _, title, text, _ in FENCE.findall(sections[part]) if title == "Output"] for part in ("Before", "After")
    ]
    assert outputs[0] == outputs[1] != []
    rows = re.findall(r"^\| (.+?) \| (.+) \|$", sections["Names"], re.MULTILINE)[2:]
    assert len(rows) > 5
    named = {name for _, ours in rows for name in re.findall(r"`(on_\w+)`", ours)}
    assert named
    assert named <= set(Event), named - set(Event)


@pytest.mark.test_all
def test_the_site_builds_without_a_warning_and_loads_nothing_from_the_network(tmp_path: Path) -> None:
    pytest.importorskip("material")
    pytest.importorskip("mkdocstrings")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    pages = sorted((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 60
    for page in pages:
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:script|img|iframe|source|video|audio)\b[^>]*\ssrc=[\"']?([^\"' >]+)", text)
        loaded += re.findall(r"<link\b(?![^>]*rel=[\"']?(?:canonical|prev|next))[^>]*\shref=[\"']?([^\"' >]+)", text)
        assert loaded
        assert [target for target in loaded if re.match(r"(?:https?:)?//", target)] == [], page.name
    for style in (tmp_path / "site").rglob("*.css"):
        assert re.findall(r"url\([\"']?(?:https?:)?//|@import", style.read_text(encoding="utf-8")) == [], style.name
