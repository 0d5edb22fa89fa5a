"""Optional packages."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

from callsheet.core.optional import load
from callsheet.errors import MissingPackage


def test_load_imports_an_installed_package() -> None:
    assert load("json.decoder", extra="train", wanted_by="SomeLogger").JSONDecoder is not None


def test_a_missing_package_is_named_with_the_installation_command() -> None:
    with pytest.raises(MissingPackage, match=r"SomeLogger needs no_such_thing.*pip install 'callsheet\[tracker\]'"):
        load("no_such_thing.inner", extra="tracker", wanted_by="SomeLogger")


def test_an_import_error_inside_a_package_is_raised_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "half_installed.py").write_text("import its_own_dependency")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with pytest.raises(ModuleNotFoundError, match="its_own_dependency") as found:
        load("half_installed", extra="tracker", wanted_by="SomeLogger")
    assert not isinstance(found.value, MissingPackage)


def test_a_package_that_draws_random_numbers_at_import_does_not_change_the_random_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "draws_at_import.py").write_text("import random\nDRAWN = random.getrandbits(24)\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    before = random.getstate()
    drawn = load("draws_at_import", extra="tracker", wanted_by="SomeLogger").DRAWN
    assert random.getstate() == before
    assert random.getrandbits(24) == drawn


def test_a_folder_with_the_package_s_name_does_not_count_as_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tracker_output").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with pytest.raises(MissingPackage, match="tracker_output, which is not installed"):
        load("tracker_output", extra="tracker", wanted_by="SomeLogger")
