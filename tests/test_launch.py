"""`launch` with real workers of torch's elastic launcher, from a script, a package and a notebook; failures and signals."""

from __future__ import annotations

import atexit
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from callsheet import Callback
from callsheet.callbacks import History
from callsheet.checkpoint import find_checkpoints, newest
from callsheet.errors import ConfigError
from callsheet.launcher import LaunchError, RankFailure, launch
from callsheet.launcher.failures import report_of
from callsheet.transport import TransportError
from callsheet.transport.payload import KEY_VARIABLE, PAYLOAD_VARIABLE
from forked import python  # type: ignore[import-not-found]  # pytest has its folder on the path

pytestmark = pytest.mark.test_all


EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
PATIENCE = 240.0  # seconds, on a busy machine


class SavesCount(Callback):
    def __init__(self, given: Any = None) -> None:
        self.given = given
        self.seen = 0

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: Any) -> None:
        self.seen = state["seen"]


# --- running processes, and what other users can see of them -------------------------------------------------------------------------


def processes() -> Iterator[tuple[int, str, dict[str, str]]]:
    """Number, command line and environment of all processes that can be seen."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                lines = (folder / "environ").read_bytes().split(b"\0")
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:  # the process has just ended
                continue
            yield int(folder.name), command, dict(line.decode(errors="replace").split("=", 1) for line in lines if b"=" in line)


def workers(tmp: Path) -> dict[int, dict[str, str]]:
    """Return the environments of the workers whose payload is under `tmp`, by process id."""
    return {
        pid: environment
        for pid, command, environment in processes()
        if environment.get(PAYLOAD_VARIABLE, "").startswith(str(tmp)) and "callsheet.launcher.worker" in command
    }


def wait_for(what: Callable[[], Any], process: subprocess.Popen[str] | None = None, seconds: float = PATIENCE) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := what()) and time.monotonic() < deadline and (process is None or process.poll() is None):
        time.sleep(0.05)
    return found


@pytest.fixture
def tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder for the temporary files of this test. `assert_nothing_left` checks that it is empty and that no worker runs."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def assert_nothing_left(tmp: Path) -> None:
    assert wait_for(lambda: not workers(tmp), seconds=20), "workers are left running"
    assert [path for path in tmp.iterdir() if path.name.startswith(("callsheet", "torchelastic"))] == []


def started(*command: str, cwd: Path, program: str = sys.executable, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [program, *command],
        cwd=cwd,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


# --- a job, as a script and in a package ----------------------------------------------------------------------------------

PARTS = '''
"""The source says: 7c1f-of-the-source."""
import json, os, subprocess, sys, time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

from callsheet import Callback, Trainer
from callsheet.callbacks import CheckpointSaver
from callsheet.loggers import JSONLLogger


class Journal(Callback):
    """Writes JSON lines, one file a rank, and counts what it has seen."""

    def __init__(self, folder, *, weights, names=()):
        self.folder, self.weights, self.names = folder, weights, names
        self.seen = 0

    def on_train_step_end(self, ctx):
        self.seen += 1
        line = {"step": ctx.step, "seen": self.seen, "names": self.names, "weights": self.weights.tolist(), "learning_rate": 0.1}
        with open(Path(self.folder) / f"journal-{os.environ['RANK']}.jsonl", "a") as file:
            file.write(json.dumps(line) + "\\n")

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


class Holds(Callback):
    """Starts a child process, and holds the run until the test has inspected all processes."""

    def __init__(self, file):
        self.file = Path(file)

    def on_train_end(self, ctx):
        if os.environ["RANK"] == "0" and self.file.parent.exists():
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            self.file.write_text(str(child.pid))
            while self.file.exists():
                time.sleep(0.05)
            child.kill()
            child.wait()


def train(folder, duration, callbacks):
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
    with Trainer(
        torch.nn.Linear(4, 1),
        torch.nn.functional.mse_loss,
        lambda: DataLoader(data, batch_size=4, shuffle=True),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        max_duration=duration,
        run_name="job",
        runs_folder=folder,
        log_interval="2ba",
        callbacks=callbacks,
    ) as trainer:
        trainer.fit()
    journal = callbacks[0]
    return {
        "rank": int(os.environ["RANK"]),
        "world": int(os.environ["WORLD_SIZE"]),
        "seen": journal.seen,
        "names": journal.names,
        "argv": sys.argv[1:],
        "key": sorted(name for name in os.environ if name.startswith("CALLSHEET")),
        "weight": trainer.model.state_dict()["weight"].sum().item().hex(),
    }


def callbacks_for(folder, hold):
    journal = Journal(folder, weights=torch.arange(3.0), names=["a", ("b", 1)])
    journal.seen = 40
    return [journal, Holds(hold), JSONLLogger(), CheckpointSaver(save_interval="4ba")]
'''

MAIN = """
def main():
    folder, duration, hold = sys.argv[1:4]
    try:
        results = launch(train, (folder, duration), callbacks=callbacks_for(folder, hold), grace_seconds=60)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        raise SystemExit(5)
    print(json.dumps(results))

if __name__ == "__main__":
    main()
"""


def check_journals(folder: Path, results: list[dict[str, Any]], steps: int, argv: list[str]) -> None:
    """Check that both ranks fired the same events for callbacks with the right arguments and state."""
    assert [result["rank"] for result in results] == [0, 1]
    assert {result["world"] for result in results} == {2}
    assert {result["seen"] for result in results} == {40 + steps}
    assert all(result["names"] == ["a", ["b", 1]] or result["names"] == ["a", ("b", 1)] for result in results)
    assert all(result["argv"] == argv and result["key"] == [] for result in results)
    assert results[0]["weight"] == results[1]["weight"]
    journals = [(folder / f"journal-{rank}.jsonl").read_text().splitlines() for rank in (0, 1)]
    assert journals[0] == journals[1]
    assert len(journals[0]) == steps
    assert json.loads(journals[0][0])["weights"] == [0.0, 1.0, 2.0]
    assert json.loads(journals[0][0])["seen"] == 41


def test_launch_from_a_script_works_and_exposes_neither_payload_nor_key(tmp_path: Path, tmp: Path) -> None:
    """Both ranks receive arguments and state. No command line, log, child process or file of the run contains payload, source or key."""
    (tmp_path / "job.py").write_text(PARTS + "from callsheet import launch\n" + MAIN)
    hold = tmp_path / "hold" / "pid"
    hold.parent.mkdir()
    process = started("job.py", str(tmp_path), "2ep", str(hold), cwd=tmp_path, LOGLEVEL="DEBUG", TORCH_LOGS="+all")
    child = int(wait_for(lambda: hold.exists() and hold.read_text(), process) or 0)
    found = workers(tmp)
    everything = {pid: (command, environment) for pid, command, environment in processes()}
    payload = {Path(environment[PAYLOAD_VARIABLE]) for environment in found.values()}
    content = next(iter(payload)).read_bytes() if payload else b""
    if child:
        hold.unlink()
    output, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    assert len(found) == 2
    assert len(payload) == 1
    [key] = {environment[KEY_VARIABLE] for environment in found.values()}
    printed = output + errors
    words = [key, key[32:], "7c1f-of-the-source", "class Journal", content[-64:].hex(), "callsheet sealed"]
    assert b"Journal" in content  # the payload does contain the words that the test looks for
    for word in words:
        assert not [command for command, _ in everything.values() if word in command]
        assert word not in printed
        for file in (tmp_path / "job").rglob("*"):
            assert not file.is_file() or word.encode() not in file.read_bytes(), file
    assert "Starting elastic_operator" in printed  # torch's own logging was enabled
    assert KEY_VARIABLE not in everything[child][1]
    assert PAYLOAD_VARIABLE not in everything[child][1]
    check_journals(tmp_path, json.loads(output.splitlines()[-1]), 8, [str(tmp_path), "2ep", str(hold)])
    assert_nothing_left(tmp)


@pytest.mark.slow
def test_launch_works_from_a_package(tmp_path: Path, tmp: Path) -> None:
    package = tmp_path / "project" / "training"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "parts.py").write_text(PARTS)
    (package / "__main__.py").write_text(
        "import json, sys\nfrom callsheet import launch\nfrom .parts import callbacks_for, train\n" + MAIN
    )
    process = started("-m", "training", str(tmp_path), "2ep", str(tmp_path / "no" / "hold"), cwd=package.parent)
    output, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    check_journals(tmp_path, json.loads(output.splitlines()[-1]), 8, [str(tmp_path), "2ep", str(tmp_path / "no" / "hold")])
    assert_nothing_left(tmp)


@pytest.mark.slow
def test_transported_callbacks_work_under_torchrun(tmp_path: Path, tmp: Path) -> None:
    """torchrun starts the workers, and callsheet's transport sends the callbacks."""
    (tmp_path / "parts.py").write_text(PARTS)
    (tmp_path / "worker.py").write_text(
        "import json, os, sys\nfrom callsheet.transport import unpack\nfrom parts import train\n"
        "result = train(sys.argv[1], '2ep', callbacks=unpack())\n"
        "open(f'{sys.argv[1]}/result-' + os.environ['RANK'], 'w').write(json.dumps(result))\n"
    )
    (tmp_path / "start.py").write_text(
        "import os, subprocess, sys\nfrom callsheet.transport import pack\nfrom parts import callbacks_for\n"
        "with pack(callbacks_for(sys.argv[1], 'no/hold')).post() as variables:\n"
        "    command = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=2', 'worker.py', sys.argv[1]]\n"
        "    subprocess.run(command, env=os.environ | variables, check=True)\n"
    )
    process = started("start.py", str(tmp_path), cwd=tmp_path)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    results = [json.loads((tmp_path / f"result-{rank}").read_text()) for rank in (0, 1)]
    check_journals(tmp_path, results, 8, [str(tmp_path)])
    assert not list(tmp.glob("callsheet*"))


def notebook(*cells: str, folder: Path) -> list[str]:
    """Run the cells in a real kernel, and return the output of each cell."""
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    v4 = importlib.import_module("nbformat").v4
    book = v4.new_notebook(cells=[v4.new_code_cell(textwrap.dedent(cell)) for cell in cells])
    client = nbclient.NotebookClient(
        book, timeout=int(PATIENCE), kernel_name="python3", allow_errors=True, resources={"metadata": {"path": str(folder)}}
    )
    client.execute()

    def shown(output: Any) -> str:
        return str(output.get("text") or f"{output.get('ename')}: {output.get('evalue')}")

    return ["".join(shown(output) for output in cell.outputs) for cell in book.cells]


@pytest.mark.filterwarnings("ignore")  # the kernel client's own
@pytest.mark.slow
def test_launch_works_from_a_notebook(tmp_path: Path, tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Classes and functions that are in no file: rejected with a hint, and sent if pickles are allowed."""
    monkeypatch.delenv("PYTEST_CURRENT_TEST", raising=False)  # under it a kernel does not show what child processes print
    outputs = notebook(
        PARTS,
        """
        from callsheet import launch
        seen_here = []
        class Mine(Journal):
            shift = 2
            def on_train_step_end(self, ctx):
                super().on_train_step_end(ctx)
                seen_here.append(self.shift)

        def job(folder, callbacks):
            print("rank", os.environ["RANK"], "begins")
            return train(folder, "2ep", callbacks) | {"seen_here": len(seen_here)}

        mine = Mine(os.getcwd(), weights=torch.arange(3.0), names=["a", ("b", 1)])
        mine.seen = 40
        """,
        "launch(job, (os.getcwd(),), callbacks=[mine])",
        "results = launch(job, (os.getcwd(),), callbacks=[mine], allow_pickle=True)\nprint(json.dumps(results))",
        """
        def fails(callbacks):
            if os.environ["RANK"] == "1":
                raise ValueError("on purpose")  # this very line

        import signal
        try:
            launch(fails, callbacks=[mine], allow_pickle=True)
        except Exception as error:
            print(error)
        print(signal.getsignal(signal.SIGINT) is signal.default_int_handler, "TORCHELASTIC_SIGNALS_TO_HANDLE" in os.environ)
        """,
        folder=tmp_path,
    )
    assert "TransportError: callbacks[0] (Mine): Mine is defined in a notebook or at a prompt" in outputs[2]
    assert "allow_pickle=True" in outputs[2]
    assert "rank 0 begins" in outputs[3]  # what ranks print is shown
    assert "rank 1 begins" in outputs[3]
    [results] = [json.loads(line) for line in outputs[3].splitlines() if line.startswith("[{")]
    assert {result.pop("seen_here") for result in results} == {8}
    check_journals(tmp_path, results, 8, results[0]["argv"])
    assert "rank 1 of 2 failed first: ValueError: on purpose" in outputs[4]
    assert 'raise ValueError("on purpose")  # this very line' in outputs[4]  # although no worker has the source
    assert outputs[4].splitlines()[-1] == "True False"
    assert_nothing_left(tmp)


# --- results and failures ------------------------------------------------------------------------------------------------------


def comes_back(factor: float, callbacks: list[Any]) -> Any:
    print("a line of rank", os.environ["RANK"])
    rank = int(os.environ["RANK"])
    callbacks[0].seen += rank
    return {"tensor": factor * torch.ones(2) * rank, "callback": callbacks[0], "threads": os.environ["OMP_NUM_THREADS"]}


def test_results_come_back_by_rank(tmp: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", python())  # forks start faster; the other tests start interpreters
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)}
    callback = SavesCount(["x"])
    callback.seen = 5
    results = launch(comes_back, (2.0,), callbacks=[callback], nproc_per_node=3, prefix=True)
    assert [result["tensor"].tolist() for result in results] == [[0.0, 0.0], [2.0, 2.0], [4.0, 4.0]]
    assert [result["callback"].seen for result in results] == [5, 6, 7]
    assert callback.seen == 5
    assert {result["threads"] for result in results} == {"1"}  # as under torchrun
    assert sorted(capfd.readouterr().out.splitlines()) == [f"[{rank}] a line of rank {rank}" for rank in range(3)]
    assert {number: signal.getsignal(number) for number in before} == before
    assert_nothing_left(tmp)


def shares(history: History, callbacks: list[Any]) -> bool:
    return history is callbacks[0]


def returns_a_lambda() -> Any:
    return lambda: int(os.environ.get("RANK", "-1"))


@pytest.mark.slow
def test_arguments_and_results_follow_the_same_rules_of_transport(tmp: Path) -> None:
    history = History()
    assert launch(shares, (history,), callbacks=[history], nproc_per_node=1) == [True]
    with pytest.raises(LaunchError, match=r"rank 0 of 1 failed first: .*TransportError: result: it is a lambda"):
        launch(returns_a_lambda, nproc_per_node=1)
    [function] = launch(returns_a_lambda, nproc_per_node=1, allow_pickle=True)
    assert function() == -1
    with pytest.raises(TransportError, match=r"arguments\[0\]\['a'\]: it is a lambda"):
        launch(shares, ({"a": lambda: 1},), callbacks=[history])
    assert_nothing_left(tmp)


def large_on_rank_one(elements: int) -> torch.Tensor:
    return torch.zeros(elements if os.environ["RANK"] == "1" else 1)


@pytest.mark.slow
def test_a_result_above_the_size_limit_is_rejected_with_its_rank(tmp: Path) -> None:
    with pytest.raises(LaunchError) as caught:
        launch(large_on_rank_one, (2**25 + 1,))
    assert caught.value.failures[0].rank == 1
    assert re.search(
        r"TransportError: the result of rank 1: \d+ bytes, more than the limit of 134217728; save large data to a file, and send",
        caught.value.failures[0].error,
    )
    assert_nothing_left(tmp)


def damages_its_result_or_fails() -> None:
    def damage() -> None:
        for file in Path(tempfile.gettempdir()).rglob("result-*-1"):
            file.write_bytes(file.read_bytes()[:-1])

    if os.environ["RANK"] == "0":
        raise ValueError("rank 0 has failed")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torch's launcher ends this rank when the other one has failed
    atexit.register(damage)


@pytest.mark.slow
def test_a_damaged_result_is_reported_with_the_failures_of_the_other_ranks(tmp: Path) -> None:
    with pytest.raises(LaunchError) as caught:
        launch(damages_its_result_or_fails, nproc_per_node=2)
    first, second = caught.value.failures
    assert (first.rank, first.error) == (0, "ValueError: rank 0 has failed")
    assert second.rank == 1
    assert second.error.startswith("callsheet.transport.sealed.TransportError: ")
    assert_nothing_left(tmp)


def ends(how: list[str]) -> str:
    rank = int(os.environ["RANK"])
    match how[rank]:
        case "raises":
            raise ValueError(f"rank {rank} raises")
        case "misses the others":
            time.sleep(0.5)
            torch.distributed.init_process_group("gloo")
            torch.distributed.barrier()
        case "joins and raises":
            torch.distributed.init_process_group("gloo")
            raise KeyError(f"rank {rank}")
        case "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "is interrupted":
            signal.raise_signal(signal.SIGINT)
        case "leaves":
            sys.exit(0)
        case "leaves with a code":
            sys.exit(3)
        case "leaves at once":
            os._exit(0)
        case "waits":
            time.sleep(PATIENCE)
        case "fails once" if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            raise OSError("the first time")
    return f"{how[rank]}, attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}"


def failures(*how: str, **options: Any) -> tuple[RankFailure, ...]:
    with pytest.raises(LaunchError) as caught:
        launch(ends, (list(how),), nproc_per_node=len(how), **options)
    first = caught.value.failures[0]
    assert str(caught.value).startswith(f"rank {first.rank} of {len(how)} failed first: {first}")
    if first.traceback:
        assert caught.value.args[0].index(first.traceback) < 200
    return caught.value.failures


@pytest.mark.slow
def test_the_first_failing_rank_is_reported_first(tmp: Path) -> None:
    """A rank that loses its peer fails too, and is often noticed first, but it is not the cause."""
    recorded = failures("misses the others", "joins and raises")
    assert (recorded[0].rank, recorded[0].error) == (1, "KeyError: 'rank 1'")
    assert recorded[0].exitcode in (1, -signal.SIGTERM)  # torch may notice the other rank first, and terminate this one
    assert "in ends" in recorded[0].traceback
    assert "launcher" not in recorded[0].traceback  # only the user's frames are shown
    recorded = failures("waits", "is killed")
    assert (recorded[0].rank, str(recorded[0]), recorded[0].exitcode) == (1, "killed by SIGKILL", -9)
    assert [failure.rank for failure in recorded] == [1, 0]
    recorded = failures("leaves with a code", "waits")
    assert (recorded[0].rank, recorded[0].error, recorded[0].exitcode) == (0, "SystemExit: 3", 3)
    recorded = failures("is interrupted", "waits")
    assert (recorded[0].rank, recorded[0].error, recorded[0].exitcode) == (0, "KeyboardInterrupt", 128 + signal.SIGINT)
    assert "in ends" in recorded[0].traceback
    recorded = failures("leaves", "leaves at once")
    assert [(failure.rank, str(failure)) for failure in recorded] == [(1, "exited with code 0 without a result")]
    assert_nothing_left(tmp)


@pytest.mark.slow
def test_ranks_may_exit_and_are_restarted_up_to_max_restarts(tmp: Path) -> None:
    assert launch(ends, (["leaves", "returns"],)) == [None, "returns, attempt 0"]
    recorded = launch(ends, (["fails once", "returns"],), max_restarts=1)
    assert recorded == ["fails once, attempt 1", "returns, attempt 1"]
    assert_nothing_left(tmp)


class NotOnRankOne(Callback):
    """A callback whose constructor fails on rank 1."""

    def __init__(self, how: str) -> None:
        if os.environ.get("RANK") == "1":
            if how == "exits":
                sys.exit(0)
            raise ValueError("no device for me")


def has_callbacks(callbacks: list[Any]) -> str:
    return type(callbacks[0]).__name__


@pytest.mark.parametrize(
    ("how", "error"), [("raises", "ValueError: no device for me"), pytest.param("exits", "SystemExit: 0", marks=pytest.mark.slow)]
)
@pytest.mark.slow
def test_a_callback_that_cannot_be_rebuilt_on_a_rank_is_reported_with_its_traceback(how: str, error: str, tmp: Path) -> None:
    with pytest.raises(LaunchError, match="rank 1 of 2 failed first: ") as caught:
        launch(has_callbacks, callbacks=[NotOnRankOne(how)])
    first = caught.value.failures[0]
    assert (first.rank, first.error, first.exitcode) == (1, error, 1)
    assert "in __init__" in first.traceback
    assert_nothing_left(tmp)


def takes_nothing() -> None: ...


def test_invalid_arguments_of_launch_are_rejected_before_workers_start(monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong, message in (
        ({"nproc_per_node": 0}, "nproc_per_node=0: give a whole number, at least 1"),
        ({"nproc_per_node": True}, "nproc_per_node=True"),
        ({"max_restarts": -1}, "max_restarts=-1"),
        (
            {"nnodes": 2},
            r"nnodes=2: launch\(\) starts ranks on this machine only. .* start the script with torchrun on each",
        ),
        ({"grace_seconds": 0}, "grace_seconds=0: give seconds above zero"),
        ({"callbacks": [SavesCount()]}, r"takes_nothing\(\) -> .*None.* does not take callbacks; add the parameter `callbacks`"),
        ({"args": (1,)}, r"cannot be called with 1 argument: too many positional arguments"),
    ):
        with pytest.raises(ConfigError, match=message):
            launch(takes_nothing, **wrong)
    with pytest.raises(ConfigError, match="launch\\(\\) needs a function or a recipe, and 5 is neither"):
        launch(5)  # type: ignore[call-overload]  # that is the test
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    with pytest.raises(ConfigError, match="in a process that torchrun started"):
        launch(takes_nothing)


def test_a_script_without_a_guard_is_rejected(tmp_path: Path, tmp: Path) -> None:
    (tmp_path / "job.py").write_text(
        "from callsheet import launch\ndef work(): return 1\nprint('begins', flush=True)\nlaunch(work)\n"
    )
    process = started("job.py", cwd=tmp_path, program=python())
    output, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert output.splitlines() == ["begins"]
    assert "while it imports the script: put the call under `if __name__ == '__main__'`" in errors
    assert_nothing_left(tmp)


def test_exceptions_have_the_names_that_the_script_gives_them(tmp_path: Path, tmp: Path) -> None:
    """The ranks import the script as `__mp_main__`, which no user knows."""
    (tmp_path / "job.py").write_text(
        "from callsheet.launcher import LaunchError, launch\nclass Odd(Exception): ...\n"
        "def work():\n    raise ExceptionGroup('two', [Odd('one'), Odd(Odd)]) from Odd('\\n  first line\\nsecond')\n"
        "if __name__ == '__main__':\n"
        "    try:\n        launch(work, nproc_per_node=1)\n"
        "    except LaunchError as error:\n        print(error)\n"
    )
    process = started("job.py", cwd=tmp_path, program=python())
    output, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    assert output.startswith("rank 0 of 1 failed first: ExceptionGroup: two (2 sub-exceptions)\n")
    for line in ("Odd: \n  first line\nsecond\n", "    | Odd: one\n", "    | Odd: <class '__main__.Odd'>\n"):
        assert line in output
    assert "__mp_main__" not in output
    assert_nothing_left(tmp)


class OddError(Exception): ...


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("\n\n  a table\nof values"), "ValueError: a table"),
        (ValueError(" \n"), "ValueError"),
        (KeyError("\n"), r"KeyError: '\n'"),
        (SyntaxError("invalid", ("x.py", 1, 1, "a b")), "SyntaxError: invalid (x.py, line 1)"),
        (OddError("on purpose"), "test_launch.OddError: on purpose"),
    ],
)
def test_an_exception_in_one_line_has_its_type_and_message(error: Exception, line: str) -> None:
    assert report_of(error)["error"] == line


# --- signals --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def long_job(tmp_path: Path, tmp: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a script that trains forever, and return it once it has saved its first checkpoint."""
    (tmp_path / "job.py").write_text(PARTS + "from callsheet import launch\n" + MAIN)
    process = started("job.py", str(tmp_path), "1000000ep", str(tmp_path / "no" / "hold"), cwd=tmp_path, program=python())
    wait_for(lambda: find_checkpoints(tmp_path / "job" / "checkpoints").checkpoints, process)
    yield process
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def test_sigterm_reaches_the_ranks_and_the_run_is_saved(long_job: subprocess.Popen[str], tmp_path: Path, tmp: Path) -> None:
    long_job.send_signal(signal.SIGTERM)
    _, errors = long_job.communicate(timeout=PATIENCE)
    assert long_job.returncode == -signal.SIGTERM, errors  # the exit code of a process that SIGTERM ends
    found = newest(tmp_path / "job" / "checkpoints")
    assert found is not None
    assert found.seal.info["kind"] == "preempt"
    assert found.world_size == 2
    assert_nothing_left(tmp)


@pytest.mark.slow
def test_ctrl_c_reaches_the_ranks_once_and_the_run_is_saved(long_job: subprocess.Popen[str], tmp_path: Path, tmp: Path) -> None:
    """A terminal sends Ctrl-C to the whole process group. If it reached the ranks twice, the second one would interrupt the save."""
    os.killpg(long_job.pid, signal.SIGINT)
    output, errors = long_job.communicate(timeout=PATIENCE)
    assert (output, long_job.returncode) == ("interrupted\n", 5), errors
    found = newest(tmp_path / "job" / "checkpoints")
    assert found is not None
    assert found.seal.info["kind"] == "preempt"
    assert "Traceback" not in errors
    assert_nothing_left(tmp)


@pytest.mark.slow
def test_a_killed_launcher_leaves_no_workers_and_no_files(long_job: subprocess.Popen[str], tmp_path: Path, tmp: Path) -> None:
    """The ranks notice it, save and end, and the payload is deleted."""
    assert len(workers(tmp)) == 2
    long_job.kill()
    assert wait_for(lambda: not workers(tmp), seconds=90)
    assert_nothing_left(tmp)
    found = newest(tmp_path / "job" / "checkpoints")
    assert found is not None
    assert found.seal.info["kind"] == "preempt"


@pytest.mark.slow
def test_repeated_ctrl_c_ends_workers_that_ignore_signals(tmp_path: Path, tmp: Path) -> None:
    """Pressing Ctrl-C repeatedly ends the launch, and with it the workers, although they ignore signals."""
    (tmp_path / "job.py").write_text(
        "import os, signal, time\nfrom callsheet import launch\n"
        "def work(folder):\n"
        "    for number in (signal.SIGINT, signal.SIGTERM):\n        signal.signal(number, signal.SIG_IGN)\n"
        "    open(f'{folder}/ignores-signals-' + os.environ['RANK'], 'w').close()\n"
        "    time.sleep(600)\n"
        "if __name__ == '__main__':\n    launch(work, (os.getcwd(),), grace_seconds=300)\n"
    )
    process = started("job.py", cwd=tmp_path)
    assert wait_for(lambda: len(list(tmp_path.glob("ignores-signals-*"))) == 2, process)
    for _ in range(60):
        if process.poll() is not None:
            break
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == -signal.SIGINT or "KeyboardInterrupt" in errors
    assert_nothing_left(tmp)


def signals_its_launcher(number: int) -> str:
    if os.environ["RANK"] == "0":
        os.kill(os.getppid(), number)
    signal.sigtimedwait([], 1.0)
    return "continued"


@pytest.mark.slow
def test_launch_ignores_an_ignored_signal_and_calls_a_signal_s_handler_after_the_ranks_end(
    tmp: Path,
) -> None:
    """SIGHUP is ignored under nohup; a handler of another signal is called once the ranks have ended."""
    earlier = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert launch(signals_its_launcher, (int(signal.SIGHUP),)) == ["continued", "continued"]
    finally:
        signal.signal(signal.SIGHUP, earlier)
    handled: list[tuple[int, int]] = []
    earlier = signal.signal(signal.SIGTERM, lambda number, frame: handled.append((number, len(workers(tmp)))))
    try:
        with pytest.raises(SystemExit) as caught:
            launch(signals_its_launcher, (int(signal.SIGTERM),))
    finally:
        signal.signal(signal.SIGTERM, earlier)
    assert caught.value.code == 128 + signal.SIGTERM
    assert handled == [(signal.SIGTERM, 0)]
    assert_nothing_left(tmp)


@pytest.mark.slow
def test_launch_works_from_another_thread(tmp: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(launch, ends, (["returns", "leaves"],)).result() == ["returns, attempt 0", None]
    assert_nothing_left(tmp)


@pytest.mark.slow
def test_the_launch_example_trains_two_ranks(tmp_path: Path, tmp: Path) -> None:
    process = started(str(EXAMPLES / "launch.py"), str(tmp_path), cwd=tmp_path)
    output, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    losses = [float(found) for found in re.findall(r"rank \d: validation/loss ([\d.]+)", output)]
    assert len(losses) == 2
    assert losses[0] == losses[1] < 20
    assert output.count("train/loss below 50") == 1
    assert_nothing_left(tmp)
