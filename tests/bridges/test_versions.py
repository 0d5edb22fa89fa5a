"""The tested versions of the frameworks: the page about them, and what hosts do if a version is not tested."""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from callsheet import attach
from callsheet.bridges import versions
from callsheet.bridges.versions import check_version, is_tested, span
from callsheet.callbacks import History

from .cells import loop_of
from .loops.job import POINTS

ROOT = Path(__file__).resolve().parents[2]
BRIDGES = ("accelerate", "huggingface", "ignite", "instructlab", "keras", "lightning", "megatron_bridge", "torchtnt")
for _bridge in BRIDGES:
    loop_of(_bridge)  # imports Keras, which must be imported after torch and after its backend is set
PACKAGES = {bridge: importlib.import_module(f"callsheet.bridges.{bridge}.internals").PACKAGE for bridge in BRIDGES}


@pytest.fixture(scope="module")
def tool() -> Any:
    """Import `tools/versions.py`."""
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        return importlib.import_module("versions")
    finally:
        sys.path.remove(str(ROOT / "tools"))


def test_the_page_of_versions_shows_the_recorded_results(tool: Any) -> None:
    assert tool.PAGE.read_text() == tool.page(tool.read().values()), "make versions writes the page"


def test_the_tested_versions_are_those_with_which_all_tests_passed(tool: Any) -> None:
    checked = {package.name for package in tool.PACKAGES if package.is_checked}
    assert dict(versions.TESTED) == {name: each for name, each in tool.working(tool.read().values()).items() if name in checked}


def test_every_pinned_version_has_a_result(tool: Any) -> None:
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    results = tool.read()
    for package in tool.PACKAGES:
        if package.name in pinned:
            assert results[package.name, pinned[package.name]].verdict == "works", package.name


def test_the_package_requires_no_version_older_than_those_that_are_tested(tool: Any) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    required = dict(
        re.findall(r"^([\w-]+)>=([\d.]+)", "\n".join(text for texts in extras.values() for text in texts), re.MULTILINE)
    )
    tested = {package: minors[0] for package, minors in tool.working(tool.read().values()).items() if package in required}
    assert {package: required[package] for package in tested} == tested


# --- a version that is not tested ---


@pytest.fixture
def untested_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every package report version 99.1."""
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "99.1.0+local")
    monkeypatch.setattr(versions, "warned", set())


@pytest.mark.usefixtures("untested_versions")
def test_an_untested_version_is_reported_once_with_the_tested_versions(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        check_version("keras")
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == (
        f"keras 99.1.0+local is not tested with callsheet: the tests pass with {span(versions.TESTED['keras'])}. Parts of the bridge may not work"
    )


@pytest.mark.usefixtures("untested_versions")
def test_attach_reports_an_untested_version_of_torch(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    attach(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), runs_folder=tmp_path)
    assert "torch 99.1.0+local is not tested with callsheet" in caplog.text


@pytest.mark.usefixtures("untested_versions")
@pytest.mark.parametrize("bridge", BRIDGES)
def test_a_host_reports_an_untested_version_of_its_framework_once(
    bridge: str, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    loop_of(bridge).train(POINTS, tmp_path, [History()])
    assert caplog.text.count(f"{PACKAGES[bridge]} 99.1.0+local is not tested with callsheet") == 1


def test_a_tested_version_is_not_reported(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "warned", set())
    for package, tested in versions.TESTED.items():
        monkeypatch.setattr(importlib.metadata, "version", lambda name, tested=tested: f"{tested[-1]}.7")
        check_version(package)
    assert not caplog.records


def test_is_tested_accepts_patch_releases_of_a_tested_minor_release() -> None:
    assert is_tested("2.13.0+cpu", ["2.12", "2.13"])
    assert is_tested("0.5.5", ["0.5.5"])
    assert not is_tested("2.1.0", ["2.12", "2.13"])
    assert not is_tested("0.5.6", ["0.5.5"])
    assert not is_tested("3", ["3.1"])
