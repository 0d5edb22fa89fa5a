"""The page docs/troubleshooting.md has a section for each error, and shows the messages that users get."""

from __future__ import annotations

import ast
import inspect
import logging
import os
import re
import runpy
import socket
import sys
import traceback
from functools import cache
from pathlib import Path

import pytest

import callsheet
from callsheet import errors
from callsheet.launcher import LaunchError
from callsheet.transport import TransportError

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```[^\n]*title=\"(run\.py|Error|Log|Printed)\"[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
VARYING = re.compile(
    r"\d+(?:\.\d+)?(?= s\b)"  # times
    r"|(?<=File \")[^\"]+(?=run\.py\")"  # the folder of the script
    r"|(?<=process )\d+ on machine \S+ since [\d: -]+\d"
    r"|\d+(?= bytes)|(?<= bytes, not )\d+"
    r"|(?<!\brun\.py:)(?<=\.py:)\d+"  # lines of callsheet's own source
)
LOG_METHODS = {"info", "warning", "error", "exception", "log"}
ERRORS = [kind for kind in vars(errors).values() if inspect.isclass(kind) and issubclass(kind, errors.CallsheetError)]
EXPORTED = {
    f"{module.__name__}.{name}": kind
    for module in (getattr(callsheet, name) for name in callsheet._SUBPACKAGES)
    for name in getattr(module, "__all__", ())
    if inspect.isclass(kind := getattr(module, name)) and issubclass(kind, BaseException) and kind not in ERRORS
}
"""The exceptions that public modules besides `callsheet.errors` export, by their import path."""


def sections() -> dict[str, list[tuple[str, str]]]:
    """Return the blocks of each section, as pairs of a title and a text."""
    found: dict[str, list[tuple[str, str]]] = {}
    for part in re.split(r"^### ", PAGE, flags=re.MULTILINE)[1:]:
        heading, _, text = part.partition("\n")
        found[heading] = BLOCK.findall(text)
    return found


SECTIONS = sections()
WITH_CODE = [heading for heading, blocks in SECTIONS.items() if blocks[0][0] == "run.py"]


def without_varying(text: str) -> str:
    return VARYING.sub("#", text).strip()


def run(code: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the code as `python run.py` does. Write its error and callsheet's log lines to standard error."""
    with socket.socket() as free:  # the page shows torchrun's default port, which may be in use
        free.bind(("127.0.0.1", 0))
        code = code.replace("29500", str(free.getsockname()[1]))
    script = folder / "run.py"
    script.write_text(code, encoding="utf-8")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["run.py"])
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # remembered, so that it is restored
        del os.environ[name]
    logger, handler = logging.getLogger("callsheet"), logging.StreamHandler(sys.stderr)
    handler.setLevel(logging.WARNING)
    handler.setFormatter(_WithoutTraceback())
    logger.addHandler(handler)
    try:
        runpy.run_path(str(script), run_name="__main__")
    except Exception as error:
        sys.stderr.write("".join(traceback.format_exception_only(error)))
    finally:
        logger.removeHandler(handler)


class _WithoutTraceback(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return record.getMessage()


@pytest.mark.test_all
@pytest.mark.parametrize("heading", WITH_CODE)
def test_the_code_in_a_section_causes_the_messages_that_the_section_shows(
    heading: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (_, code), *shown = SECTIONS[heading]
    run(code, tmp_path, monkeypatch)
    printed, logged = map(without_varying, capfd.readouterr())
    assert shown
    for title, text in shown:
        expected = without_varying(text)
        assert expected
        if title == "Printed":
            assert printed == expected
        elif title == "Error":
            assert ("\n" + logged).endswith("\n" + expected), logged
        else:
            assert expected in logged


@pytest.mark.parametrize("kind", [*ERRORS, LaunchError, TransportError], ids=lambda kind: kind.__name__)
def test_every_error_has_a_section_that_shows_it(kind: type[Exception]) -> None:
    texts = [text for _, text in SECTIONS[kind.__name__]]
    if kind is errors.CallsheetError:
        assert any("except CallsheetError" in text for text in texts)
        return
    assert any(re.search(rf"(?:^|\.){kind.__name__}: ", text, re.MULTILINE) for text in texts)


def test_the_page_of_exceptions_lists_those_of_other_modules_with_their_base_class() -> None:
    page = (ROOT / "docs" / "reference" / "errors.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| \[`([\w.]+)`\]\(\S+\) \| `(\w+)` \|", page, re.MULTILINE)
    assert dict(listed) == {path: kind.__base__.__name__ for path, kind in EXPORTED.items() if kind.__base__}
    outside = {path for path, kind in EXPORTED.items() if not issubclass(kind, errors.CallsheetError)}
    assert all(path.startswith("callsheet.testing.") and issubclass(EXPORTED[path], AssertionError) for path in outside)


@cache
def texts_in_source() -> tuple[list[str], list[re.Pattern[str]]]:
    """Return the texts in callsheet's source, and the messages that it logs, as patterns."""
    texts: list[str] = []
    formats: list[re.Pattern[str]] = []
    for path in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in LOG_METHODS | {"_log_once"}
            ):
                for given in node.args[:2]:
                    if isinstance(given, ast.Constant) and isinstance(given.value, str) and len(given.value) > 20:
                        literal = re.split(r"%(?:\.\d+)?[sdrgf]", given.value.replace("%%", "%"))
                        formats.append(re.compile(".+".join(map(re.escape, literal))))
    return texts, formats


def test_log_messages_in_sections_without_code_are_in_the_source() -> None:
    _, formats = texts_in_source()
    shown = [
        text.strip() for heading in SECTIONS if heading not in WITH_CODE for title, text in SECTIONS[heading] if title == "Log"
    ]
    assert len(shown) >= 8
    for text in shown:
        assert any(each.fullmatch(text.removeprefix("SpeedMonitor: ")) for each in formats), text


def test_the_parts_of_messages_in_the_tables_are_in_the_source() -> None:
    texts, _ = texts_in_source()
    tables = re.findall(r"^\| the message contains .*\n\| --- .*\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    assert len(tables) >= 4
    for row in "".join(tables).splitlines():
        part = row.split("`")[1]
        assert any(part in text for text in texts), part
