"""Everything that is generated from the lifecycle table agrees with the table."""

import importlib
import inspect
import re
import subprocess
from pathlib import Path

import pytest

import callsheet
from callsheet.core.callback import Callback
from callsheet.core.context import Context
from callsheet.core.events import Event
from callsheet.core.hooks import Hooks
from callsheet.core.lifecycle import EVENTS, FIELDS, SPANS, description, fields_available
from callsheet.core.spans import HasListeners, Spans
from forked import python  # type: ignore[import-not-found]  # pytest has its folder on the path

ROOT = Path(__file__).resolve().parent.parent


def test_generated_files_are_up_to_date() -> None:
    ran = subprocess.run(
        [python(), str(ROOT / "tools" / "generate.py"), "--check"], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")


def test_every_event_has_a_method_and_every_method_an_event() -> None:
    methods = [name for name, thing in vars(Hooks).items() if inspect.isfunction(thing)]
    assert methods == list(EVENTS) == [event.value for event in Event]


def test_every_method_takes_the_context_and_does_nothing() -> None:
    for event in EVENTS:
        assert list(inspect.signature(getattr(Callback, event)).parameters) == ["self", "ctx"]
        assert getattr(Callback(), event)(None) is None


def test_every_method_s_docstring_says_when_it_is_called_and_which_fields_are_available() -> None:
    for event in EVENTS:
        text = inspect.getdoc(getattr(Hooks, event)) or ""
        assert text.startswith(description(event)), event
        fields = ", ".join(fields_available(event))
        assert (f"Available here: {fields}." in text) if fields else ("Available here" not in text), event


def test_the_annotations_of_the_context_are_the_fields_of_the_table() -> None:
    written = {name: text for name, text in Context.__annotations__.items() if not name.startswith("_")}
    written["event"] = vars(Context)["event"].fget.__annotations__["return"]
    assert written == {field.name: field.type for field in FIELDS.values()}
    assert set(FIELDS) - {"event"} <= set(Context.__slots__)


def test_the_spans_and_flags_are_those_of_the_table() -> None:
    assert [name for name, kind in Spans.__annotations__.items() if kind == "Span"] == list(SPANS)
    assert list(HasListeners.__annotations__) == list(EVENTS)


API_PAGES = ROOT / "docs" / "reference"
PUBLIC_MODULES = ["callsheet", *(f"callsheet.{module}" for module in callsheet._SUBPACKAGES)]


@pytest.mark.parametrize("module", [name for name in PUBLIC_MODULES if hasattr(importlib.import_module(name), "__all__")])
def test_every_public_class_and_function_is_on_an_api_page(module: str) -> None:
    entries = [re.findall(r"^::: ([\w.]+)$", page.read_text(encoding="utf-8"), re.MULTILINE) for page in API_PAGES.glob("*.md")]
    shown = {entry.rpartition(".")[2] for page in entries for entry in page}
    package = importlib.import_module(module)
    public = [name for name in package.__all__ if inspect.isclass(thing := getattr(package, name)) or inspect.isfunction(thing)]
    assert public
    assert [name for name in public if name not in shown] == []
