"""The code in README and docs runs, and the links lead to existing files."""

import re
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    """Return the code blocks of a page, also those in a tab, which are indented."""
    found = re.findall(rf"^( *)```{language}\n(.*?)^\1```$", page.read_text(), re.MULTILINE | re.DOTALL)
    return [textwrap.dedent(text) for _, text in found]


@pytest.mark.test_all
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.name)
def test_the_code_of_a_page_runs(page: Path, folder_of_the_page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {"__name__": "page"}
    for number, code in enumerate(blocks(page, "python")):
        exec(compile(code, f"{page.name}[{number}]", "exec"), names)
    printed = capsys.readouterr().out
    if page.name == "README.md":
        sheet = blocks(page, "text")[0]
        assert sheet.strip() in printed
        assert re.search(r"step 50: loss \d", printed)
        assert "finished" in printed


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_targets_of_links_exist(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", text) + re.findall(r"<img src=\"([^\"]+)\"", text):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


def test_make_targets_in_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"(?:^|`)make ([a-z-]+)", (ROOT / "README.md").read_text(), re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
