"""`callsheet bridges` prints the results of the bridges' tests."""

from __future__ import annotations

import pytest

from callsheet.bridges.matrix import Cell, Framework, about, frameworks, markdown, markdown_of, overview, read
from callsheet.cli.main import main


def test_without_a_name_all_bridges_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bridges"]) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[0].split() == list(frameworks())
    assert printed == overview() + "\n"
    line = next(line for line in printed.splitlines() if line.startswith("GradientAccumulationScheduler "))
    assert "✗" in line


def test_a_named_bridge_is_shown_with_its_limits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bridges", "bare"]) == 0
    printed = capsys.readouterr().out
    assert "torch 2." in printed
    assert "✗ GradientAccumulationScheduler" in printed
    assert frameworks()["bare"].callbacks["GradientAccumulationScheduler"].why in " ".join(printed.split())


def test_an_unknown_bridge_is_rejected_with_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bridges", "bar"]) == 2
    assert "there is no bridge 'bar'; did you mean 'bare'?" in capsys.readouterr().err


def test_results_are_read_back_from_their_json() -> None:
    made = Framework(
        "It", "1.0", "Its events were fired", {"EMA": Cell("limited", "logs no a|b")}, {"Timer": Cell("works", tier="drives")}
    )
    assert read(made.to_json()) == made


def test_the_pages_show_every_result(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Framework(
        "It", "1.0", "Its events were fired", {"EMA": Cell("limited", "logs no a|b")}, {"Timer": Cell("works", tier="drives")}
    )
    monkeypatch.setattr("callsheet.bridges.matrix.frameworks", lambda: {"it": made})
    assert "| `EMA` | ~ |" in "\n".join(markdown())
    page = "\n".join(markdown_of("it"))
    assert "It 1.0. Its events were fired." in page
    assert "| `EMA` | ~ | logs no a\\|b |" in page
    assert "| `Timer` | drives | ✓ |" in page
    assert "~ EMA" in about("it")
    assert "drives" in about("it")
