"""`callsheet train` as a process that a cluster preempts and restarts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from callsheet.cli.main import main
from callsheet.loggers import read_metrics
from forked import python  # type: ignore[import-not-found]  # pytest has its folder on the path

RUN = Path("runs/tiny")


def start_training(*options: str) -> subprocess.Popen[str]:
    path = os.pathsep.join(str(folder) for folder in (Path(__file__).parents[2] / "src", Path(__file__).parents[1]))
    command = [python(), "-m", "callsheet", "train", "tiny.yaml", *options]
    return subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@pytest.mark.slow
def test_a_preempted_run_is_saved_and_resumed(recipe_folder: Path) -> None:
    first = start_training("--max_duration", "100000ba", "--eval_interval", "100000ba")
    deadline = time.monotonic() + 120
    while not ((RUN / "metrics.jsonl").exists() and read_metrics(RUN)) and time.monotonic() < deadline:
        time.sleep(0.05)
    first.send_signal(signal.SIGTERM)
    output = first.communicate(timeout=120)[0]
    assert first.returncode == 128 + signal.SIGTERM, output
    events = [json.loads(line) for line in (RUN / "events.jsonl").read_text().splitlines()]
    assert [event["outcome"] for event in events if "outcome" in event] == ["preempted"]
    (saved,) = (
        path for path in (RUN / "checkpoints").iterdir() if (path / "manifest.json").exists() and "preempt" in _kind(path)
    )
    step = int(saved.name.partition("-ba")[2].partition("-")[0])
    second = start_training("--max_duration", f"{step + 6}ba", "--eval_interval", "100000ba")
    output = second.communicate(timeout=120)[0]
    assert second.returncode == 0, output
    assert f"Found the run 'tiny' at step {step}" in output
    assert read_metrics(RUN)[-1].step == step + 6


@pytest.mark.slow
def test_a_second_process_cannot_train_the_same_run(recipe_folder: Path) -> None:
    long = ("--max_duration", "100000ba", "--eval_interval", "100000ba", "--resume", "auto")
    first = start_training(*long)
    deadline = time.monotonic() + 120
    while not ((RUN / "metrics.jsonl").exists() and read_metrics(RUN)) and time.monotonic() < deadline:
        time.sleep(0.05)
    before = sorted(path.name for path in Path("runs").iterdir())
    (claim,) = Path("runs/.tiny.lock").iterdir()
    owner = json.loads(claim.read_text())["pid"]  # a fork, so not `first.pid`
    for resume in ("auto", "new"):
        second = start_training(*long[:-1], resume, "--lock_timeout_seconds", "0")
        output = second.communicate(timeout=120)[0]
        assert second.returncode == 1, output
        assert f"runs/tiny is being trained by process {owner} on machine " in output
        assert "Give the run another name or folder to train beside it." in output
        assert "Traceback" not in output
    assert sorted(path.name for path in Path("runs").iterdir()) == before  # the run's folder is not moved
    first.kill()
    first.communicate()
    third = start_training("--max_duration", "6ba", "--eval_interval", "100000ba", "--resume", "new")
    output = third.communicate(timeout=120)[0]
    assert third.returncode == 0, output
    assert sorted(path.name for path in Path("runs").iterdir() if path.name[0] != ".") == ["tiny", "tiny.1"]


def _kind(checkpoint: Path) -> str:
    return str(json.loads((checkpoint / "manifest.json").read_text()).get("info", {}).get("kind", ""))


def test_a_run_of_an_earlier_version_is_shown_and_resumed(
    run_of_earlier_version: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", run_of_earlier_version]) == 0
    shown = capsys.readouterr().out
    assert "From runs/tiny/config.yaml:" in shown
    assert "gradient_accumulation_steps" in shown
    assert main(["train", "runs/tiny/config.yaml", "--max_duration", "8ba"]) == 0
    assert "ep0-ba3, ep0-ba6, ep0-ba8" in capsys.readouterr().out
    assert "gradient_accumulation_steps:" in Path("runs/tiny/config.yaml").read_text()
