"""Ranks as processes on one machine."""

import os

import pytest

from callsheet.testing import run_ranks

pytestmark = pytest.mark.test_all


def recorded() -> tuple[str | None, str | None, str]:
    return os.environ.get("GIVEN"), os.environ.get("GIVEN_BEFORE"), os.environ["RANK"]


def test_ranks_have_the_current_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds although the server that forks them was started with another environment."""
    monkeypatch.setenv("GIVEN_BEFORE", "this")
    assert run_ranks(recorded, 2) == [(None, "this", "0"), (None, "this", "1")]
    monkeypatch.delenv("GIVEN_BEFORE")
    monkeypatch.setenv("GIVEN", "that")
    assert run_ranks(recorded, 2) == [("that", None, "0"), ("that", None, "1")]
