"""The examples run, and do what their docstrings describe."""

import json
import re
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from callsheet.checkpoint import find_checkpoints, newest, read_checkpoint
from callsheet.testing import run_ranks
from forked import python  # type: ignore[import-not-found]  # pytest has its folder on the path

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


class Server:
    """A web server that keeps what is posted to it, and answers with `answer`."""

    def __init__(self) -> None:
        self.posts: list[dict[str, Any]] = []
        self.answer = 200
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                server.posts.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(server.answer)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None: ...

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_port}/hook"
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self.thread.start()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.http.shutdown()
    made.http.server_close()


def run_here(name: str, *arguments: str) -> None:
    """Run the example as a program, in this process."""
    before, threads = sys.argv, torch.get_num_threads()
    sys.argv = [name, *arguments]
    try:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    finally:
        sys.argv = before
        torch.set_num_threads(threads)


def losses(output: str) -> list[float]:
    return [float(found) for found in re.findall(r"train/loss\D+([\d.]+)", output)]


@pytest.mark.test_all
def test_the_hand_written_loop_reduces_its_loss(tmp_path: Path) -> None:
    command = [python(), str(EXAMPLES / "own_loop.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert losses(done.stdout)[-1] < losses(done.stdout)[0] / 10


def launched(script: Path, folder: Path) -> "subprocess.Popen[str]":
    command = [python(), "-m", "torch.distributed.run", "--nproc_per_node", "2", str(script), str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_the_example_on_many_ranks_is_preempted_by_the_launcher_and_resumes(tmp_path: Path) -> None:
    """The example runs under torchrun, which passes its signal on to all ranks."""
    long = tmp_path / "long.py"
    long.write_text((EXAMPLES / "many_ranks.py").read_text().replace('"4ep"', '"100000ep"').replace('"1ep"', '"50ba"'))
    first = launched(long, tmp_path)
    root, deadline = tmp_path / "many-ranks" / "checkpoints", time.monotonic() + 120
    while not find_checkpoints(root).checkpoints and time.monotonic() < deadline and first.poll() is None:
        time.sleep(0.1)
    first.send_signal(signal.SIGTERM)
    output, errors = first.communicate(timeout=60)
    found = newest(root)
    assert found is not None, errors
    assert found.seal.info["kind"] == "preempt"
    assert found.world_size == 2
    second = launched(EXAMPLES / "many_ranks.py", tmp_path / "again")
    output, errors = second.communicate(timeout=120)
    assert second.returncode == 0, errors
    assert losses(output)[-1] < losses(output)[0] / 5
    third = launched(EXAMPLES / "many_ranks.py", tmp_path / "again")
    output, errors = third.communicate(timeout=120)
    assert third.returncode == 0, errors
    assert output == ""  # the run was complete already


def check_collected(path: Path, *, ranks: int) -> None:
    """Check what `finetune_with_callback.py` collects, and what it records about itself."""
    collected = json.loads(path.read_text())
    assert collected["outcome"] == "finished"
    train = [record for record in collected["records"] if "train/loss" in record]
    assert [record["step"] for record in train] == [10, 20, 30, 40]
    assert [record["time/sample"] for record in train] == [80 * ranks, 160 * ranks, 240 * ranks, 320 * ranks]
    assert train[-1]["train/loss"] < train[0]["train/loss"] * 0.7
    assert [(each["step"], sorted(each)) for each in collected["evaluations"]] == [
        (step, ["addition", "step", "subtraction"]) for step in (20, 40)
    ]
    for saved, evaluated in zip(collected["checkpoints"], collected["evaluations"], strict=True):
        assert {name: saved[name] for name in evaluated} == evaluated


def test_the_fine_tuning_example_with_user_callbacks_logs_and_saves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    run_here("finetune_with_callback.py", str(tmp_path))
    check_collected(tmp_path / "finetune-metrics.json", ranks=1)
    output = capsys.readouterr().out
    assert re.findall(r"step (\d+): the largest gradient is that of model\.", output) == [
        "20",
        "40",
    ]  # from a function that is registered with an interval
    assert "subtraction/loss" in output
    messages = [record.getMessage() for record in caplog.records if record.name == "finetune"]
    assert all(line.startswith("[arithmetic] ") for line in messages)
    assert messages[0].endswith("training finetune for 40ba (ranks: 1)")
    assert [line.split()[2:5] for line in messages if "saved" in line] == [
        ["20:", "saved", str(tmp_path / "finetune/checkpoints/ep0-ba20")],
        ["40:", "saved", str(tmp_path / "finetune/checkpoints/ep0-ba40")],
    ]
    assert "trained for" in messages[-1]


@pytest.mark.slow
def test_the_fine_tuning_example_runs_on_eight_ranks_under_torchrun(tmp_path: Path) -> None:
    command = [
        python(),
        "-m",
        "torch.distributed.run",
        "--nproc_per_node",
        "8",
        str(EXAMPLES / "finetune_with_callback.py"),
    ]
    done = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr
    check_collected(tmp_path / "finetune-metrics.json", ranks=8)
    assert re.findall(r"step (\d+): the largest gradient", done.stdout) == ["20", "40"]  # of one rank
    assert done.stderr.count("[arithmetic] training finetune for 40ba (ranks: 8)") == 1  # and so is the log
    assert done.stderr.count("[arithmetic] step 10: loss") == 1


@pytest.mark.test_all
def test_the_reporter_example_posts_the_events_of_the_run(tmp_path: Path, server: Server) -> None:
    run_here("http_reporter.py", server.url, str(tmp_path))
    records = [post for post in server.posts if post["event"] == "record"]
    assert [post["step"] for post in records if "train/loss" in post["metrics"]] == [10, 20, 30, 40]
    evaluations = [post for post in server.posts if post["event"] == "evaluation"]
    assert [post["step"] for post in evaluations] == [20, 40]
    assert evaluations[1]["results"]["validation"]["loss"] < evaluations[0]["results"]["validation"]["loss"]
    assert "test/loss" in records[-1]["metrics"]
    assert server.posts[-1] == {"event": "end", "run": "http-reporter", "step": 40, "outcome": "finished"}  # the last is not lost


@pytest.mark.test_all
def test_an_endpoint_that_answers_with_an_error_does_not_end_the_run(
    tmp_path: Path, server: Server, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    server.answer = 503
    run_here("http_reporter.py", server.url, str(tmp_path))
    assert "The run (40 steps, " in capsys.readouterr().out
    assert 3 <= len(server.posts) <= 10  # disabled after three failures in a row, as soon as the training thread is notified
    assert "503" in caplog.text
    assert "HTTPReporter" in caplog.text


@pytest.mark.slow
def test_one_of_eight_ranks_uploads_the_checkpoints_which_can_be_read_remotely(tmp_path: Path) -> None:
    away = tmp_path / "away"
    run_ranks(run_here, 8, "checkpoint_upload.py", f"file://{away}", str(tmp_path), timeout=280)
    uploaded = find_checkpoints(f"file://{away}/checkpoint-upload")
    assert not uploaded.skipped
    assert sorted(checkpoint.step for checkpoint in uploaded.checkpoints) == [20, 40]
    for checkpoint in uploaded.checkpoints:
        assert checkpoint.world_size == 8
        here = tmp_path / "checkpoint-upload" / "checkpoints" / checkpoint.name
        there = away / "checkpoint-upload" / checkpoint.name
        for file in checkpoint.seal.files:
            assert (there / file).read_bytes() == (here / file).read_bytes()
    read_checkpoint(f"file://{uploaded.checkpoints[0].path}")


def test_notifications_are_sent(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_URL", server.url)
    run_here("notifications.py", str(tmp_path))
    recorded = [post["event"] for post in server.posts]
    assert recorded[0] == "start"
    assert recorded[-1] == "end"
    crossing = [post for post in server.posts if post.get("rule") == "validation/loss < 4.5"]
    assert len(crossing) == 1
    assert crossing[0]["metrics"]["validation/loss"] < 4.5
    assert [post["step"] for post in server.posts if post["event"] == "progress"] == [20, 40]
    assert server.posts[-1]["outcome"] == "finished"


@pytest.mark.test_all
def test_the_sent_metrics_have_the_cluster_s_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLUSTER_ID", "blue")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as agent:
        agent.bind(("127.0.0.1", 0))
        agent.settimeout(10)
        run_here("cluster_metrics.py", f"127.0.0.1:{agent.getsockname()[1]}", str(tmp_path))
        recorded = [json.loads(agent.recv(65536)) for _ in range(5)]
    assert {(each["cluster_id"], each["run"], each["rank"]) for each in recorded} == {("blue", "cluster-metrics", 0)}
    assert [each["step"] for each in recorded[:-1]] == [5, 10, 15, 20]
    assert recorded[3]["loss"] < recorded[0]["loss"]
    assert all(each["grad_norm"] > 0 and each["learning_rate"] == 1e-3 for each in recorded[:-1])
    assert recorded[-1]["outcome"] == "finished"


@pytest.mark.test_all
def test_the_hand_written_average_has_the_losses_of_the_built_in_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_here("moving_average.py", str(tmp_path))
    found = dict(re.findall(r"^(.+?) +(validation/loss [\d.]+  test/loss [\d.]+)$", capsys.readouterr().out, re.MULTILINE))
    assert found["built-in"] == found["by hand"]
    assert float(found["built-in"].split()[1]) < float(found["no average"].split()[1]) - 0.01


@pytest.mark.test_all
def test_the_learning_rate_falls_on_a_plateau(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_here("plateau.py", str(tmp_path))
    output = capsys.readouterr().out
    falls = re.findall(r"step \d+0: loss ([\d.]+), the best is ([\d.]+): learning rate ([\d.e-]+)", output)
    assert falls
    assert all(float(loss) >= float(best) for loss, best, _ in falls)
    assert [float(rate) for *_, rate in falls] == pytest.approx([0.1 * 0.3 ** (n + 1) for n in range(len(falls))], rel=0.05)
