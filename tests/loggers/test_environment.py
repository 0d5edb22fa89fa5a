"""The environment with which a run was started: command, packages, repository."""

from __future__ import annotations

import json
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from callsheet import Trainer
from callsheet.loggers import JSONLLogger
from callsheet.loggers.support import environment


def recorded_environment(monkeypatch: pytest.MonkeyPatch, folder: Path, *command: str) -> dict[str, Any]:
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.orig_argv", ["python", "train.py", *command])
    found: list[dict[str, Any]] = []
    environment.record_environment("cpu", found.append).join(60)
    return found[0]


def git(folder: Path, *words: str) -> None:
    subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "code"
    (folder / "inner").mkdir(parents=True)
    git(folder, "init", "-q")
    (folder / "train.py").write_text("rate = 0.1\n")
    (folder / ".env").write_text("WORD=one\n")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "first")
    return folder


def test_the_commit_of_a_clean_repository_is_recorded(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = recorded_environment(monkeypatch, repository)
    assert len(found["git"]["commit"]) == 40
    assert (found["git"]["is_dirty"], found["git"]["diff"], found["git"]["untracked"]) == (False, "", [])
    assert found["packages"]["torch"].startswith("2.")
    assert found["hardware"]["memory_bytes"] > 2**28
    assert found["command"] == ["python", "train.py"]
    json.dumps(found)


def test_changes_are_recorded_without_secrets(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (repository / "train.py").write_text(
        'rate = 0.2\nwandb_token = "abcdef123"\nhub = login("hf_abcdefghijklmnopqrst")\npw = "hunter2"\n'
        'key = """\n-----BEGIN RSA PRIVATE KEY-----\nMIIEbody\n-----END RSA PRIVATE KEY-----\n"""\nafter = 1\n'
    )
    (repository / ".env").write_text("WORD=two\n")
    (repository / "new.py").write_text("new = 1\n")
    found = recorded_environment(monkeypatch, repository / "inner")["git"]
    assert "+rate = 0.2" in found["diff"]
    assert "+after = 1" in found["diff"]
    assert "WORD" not in found["diff"]
    assert not [secret for secret in ("abcdef123", "hf_abc", "hunter2", "MIIEbody") if secret in json.dumps(found)]
    assert found["is_dirty"]
    assert (found["left_out"], found["untracked"]) == ([".env"], ["new.py"])


def test_a_large_diff_is_cut(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (repository / "train.py").write_text("x = 1\n" * 100_000)
    found = recorded_environment(monkeypatch, repository)["git"]
    assert found["is_diff_cut"]
    assert len(found["diff"]) <= environment._MAX_DIFF_CHARACTERS


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        (["--api_key", "abc", "--lr", "1"], ["--api_key", "...", "--lr", "1"]),
        (["--token=abc"], ["--token=..."]),
        (["s3://me:word@host/x"], ["s3://...@host/x"]),
        (["--password", "--lr", "1"], ["--password", "--lr", "1"]),
    ],
)
def test_the_command_has_no_secrets(
    command: list[str], shown: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert recorded_environment(monkeypatch, tmp_path, *command)["command"][2:] == shown


def test_without_git_or_a_repository_the_rest_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert recorded_environment(monkeypatch, tmp_path)["git"] == {}
    monkeypatch.setenv("PATH", "")
    assert recorded_environment(monkeypatch, tmp_path)["git"] == {}


def test_a_run_writes_its_environment_without_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_continue = threading.Event(), threading.Event()

    def slow(folder: Path) -> dict[str, Any]:
        begun.set()
        assert may_continue.wait(60)
        return {"commit": "abc"}

    monkeypatch.setattr(environment, "_git", slow)
    with Trainer(
        nn.Linear(2, 1), nn.functional.mse_loss, [(torch.ones(2, 2), torch.ones(2, 1))] * 4,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        loggers=[JSONLLogger()], run_name="a", runs_folder=tmp_path, progress=False,
    ) as trainer:  # fmt: skip
        trainer.fit()
        assert begun.is_set()
        assert not (tmp_path / "a" / environment.ENVIRONMENT_FILE).exists()
        may_continue.set()
    assert json.loads((tmp_path / "a" / environment.ENVIRONMENT_FILE).read_text())["git"] == {"commit": "abc"}


def test_a_failure_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    def full(found: dict[str, Any]) -> None:
        raise OSError("No space left on device")

    environment.record_environment("cpu", full).join(60)
    assert caplog.messages == ["What the run was started with is not recorded in environment.json: No space left on device"]
