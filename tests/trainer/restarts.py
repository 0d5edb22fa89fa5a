"""Jobs whose ranks die under torch's own launcher: the launcher restarts all ranks, and the run resumes.

`restarted` runs one job. The long version, which writes a table, is `make restarts`:

    python -m trainer.restarts RESULT.md [--rounds N]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn

from callsheet import Callback, Context, Trainer
from callsheet.callbacks import CheckpointSaver
from callsheet.trainer import Parallel

STEPS = 24
TIMEOUT_SECONDS = 20.0
RENDEZVOUS = ("standalone", "c10d", "static", "two machines", "launch")
"""How the ranks are started: by torchrun with each of its rendezvous, by two agents of torchrun, and by `callsheet.launch`."""


@dataclass(frozen=True)
class Death:
    """Rank `rank` dies during step `step`: by SIGKILL, by `os._exit`, or with an error."""

    rank: int
    step: int
    way: str = "SIGKILL"

    def __str__(self) -> str:
        return f"rank {self.rank} by {self.way} at step {self.step}"


class Dies(Callback):
    """Kills this process at the planned steps, once for each death: marker files record which deaths have happened."""

    def __init__(self, folder: Path, deaths: list[Death]) -> None:
        self.folder, self.deaths = folder, deaths

    def on_backward_start(self, ctx: Context) -> None:
        for number, death in enumerate(self.deaths):
            mark = self.folder / f"died-{number}"
            if (death.rank, death.step) == (ctx.run.rank, ctx.step) and not mark.exists():
                mark.write_text(str(time.time()))
                if death.way == "SIGKILL":
                    os.kill(os.getpid(), signal.SIGKILL)
                elif death.way == "os._exit":
                    os._exit(3)
                else:
                    raise RuntimeError("this rank fails")


def train(given: str, deaths: list[dict[str, Any]], has_group: bool) -> None:
    """Train on one rank; rank 0 writes the final weights."""
    folder = Path(given)
    rank = int(os.environ["RANK"])
    (folder / f"started-{rank}-{time.time_ns()}").touch()
    if has_group:
        distributed.init_process_group("gloo")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    data = [(torch.randn(4, 3), torch.randn(4, 1)) for _ in range(12)]
    with Trainer(
        nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 1)),
        nn.functional.mse_loss,
        data,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.02),
        max_duration=f"{STEPS}ba",
        callbacks=[CheckpointSaver(save_interval="2ba", keep=2), Dies(folder, [Death(**death) for death in deaths])],
        # Without this, DDP changes the layout of its gradient buckets after the first step. With 3 or
        # more ranks, this changes the order of the sums.
        parallel=Parallel("ddp", options={"find_unused_parameters": True}),
        runs_folder=folder,
        run_name="run",
        resume="auto",
        seed=1,
        timeout_seconds=TIMEOUT_SECONDS,
        grace_seconds=6,
    ) as trainer:
        trainer.fit()
        if trainer.run.is_world_process_zero and not trainer.preempted:
            weights = {
                name: [value.hex() for value in tensor.flatten().tolist()] for name, tensor in trainer.model.state_dict().items()
            }
            (folder / "weights.json").write_text(json.dumps([trainer.state.timestamp.batch, weights]))
    if has_group:
        distributed.destroy_process_group()


@dataclass
class Restarted:
    """The result of a job: its final weights (None if it failed), the number of attempts, and its output."""

    weights: Any
    attempts: int
    seconds: float
    output: str


def restarted(
    folder: Path,
    rendezvous: str,
    ranks: int,
    deaths: list[Death],
    *,
    has_group: bool = False,
    timeout: float = 180.0,
) -> Restarted:
    """Run the job under the launcher, which restarts it after every death."""
    folder.mkdir(parents=True)
    began = time.monotonic()
    job = [str(folder), json.dumps([asdict(death) for death in deaths]), str(int(has_group))]
    here = Path(__file__).resolve()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(here.parents[1]), *sys.path[1:]])}
    with ExitStack() as stack:
        started = [
            stack.enter_context(running([sys.executable, *command, *job], environment, folder / f"output-{number}"))
            for number, command in enumerate(commands(rendezvous, ranks, len(deaths)))
        ]
        for process in started:
            try:
                process.wait(max(1.0, timeout - (time.monotonic() - began)))
            except subprocess.TimeoutExpired:
                break
    output = "\n".join(path.read_text(errors="replace") for path in sorted(folder.glob("output-*")))
    weights = json.loads((folder / "weights.json").read_text()) if (folder / "weights.json").exists() else None
    attempts = len(list(folder.glob("started-*"))) // ranks
    return Restarted(weights, attempts, time.monotonic() - began, output)


def commands(rendezvous: str, ranks: int, restarts: int) -> list[list[str]]:
    """Return the arguments for `python`: one command, or one for each of two simulated machines."""
    if rendezvous == "launch":
        return [["-m", "trainer.restarts_launched", str(ranks), str(restarts)]]
    torchrun = ["-m", "torch.distributed.run", "--max-restarts", str(restarts), "--monitor-interval", "0.1"]
    script = ["-m", "trainer.restarts", "--job"]
    port = free_port()
    if rendezvous == "standalone":
        return [[*torchrun, "--standalone", "--nproc-per-node", str(ranks), *script]]
    if rendezvous == "static":
        where = ["--nnodes", "1", "--node-rank", "0", "--master-addr", "127.0.0.1", "--master-port", str(port)]
        return [[*torchrun, *where, "--nproc-per-node", str(ranks), *script]]
    machines = 2 if rendezvous == "two machines" else 1
    where = ["--nnodes", str(machines), "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "job"]
    where += ["--local-addr", "127.0.0.1"]
    return [[*torchrun, *where, "--nproc-per-node", str(ranks // machines), *script]] * machines


@contextmanager
def running(command: list[str], environment: dict[str, str], output: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process in a session of its own, and kill what is left of the session at the end."""
    with output.open("wb") as file:
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        number: int = one.getsockname()[1]
        return number


HEAD = """# Runs whose ranks died, restarted by the launcher

Made by `make restarts`. Every row is one run of {steps} steps (DDP on gloo, dropout, AdamW, a checkpoint every 2 steps, `resume="auto"`).
The rank ends itself in the backward pass, the launcher restarts all ranks, and the final weights are compared with those of
an uninterrupted run, bit by bit. *Two machines* are two agents of torchrun on one machine. DDP has `find_unused_parameters=True`. Without
this option, DDP changes the layout of its gradient buckets after the first step, so that after a restart on 4 ranks the last bit of a weight may differ.

| launcher | ranks | deaths | attempts | seconds | final weights |
| --- | --- | --- | --- | --- | --- |
"""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result", type=Path)
    parser.add_argument("--rounds", type=int, default=1, help="runs of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=RENDEZVOUS)
    given = parser.parse_args(arguments)
    rng, rows, restarts, lost = random.Random(given.seed), [], 0, 0
    with tempfile.TemporaryDirectory() as folder:
        good = {ranks: restarted(Path(folder) / f"good-{ranks}", "standalone", ranks, []).weights for ranks in (2, 4)}
        assert all(good.values())
        for number in range(given.rounds):
            for rendezvous in given.only:
                for ranks in (2, 4):
                    steps = sorted(rng.sample(range(1, STEPS + 1), rng.randint(1, 3)))
                    deaths = [
                        Death(rng.randrange(ranks), step, rng.choice(["SIGKILL", "os._exit", "an error"])) for step in steps
                    ]
                    job = Path(folder) / f"{rendezvous}-{ranks}-{number}"
                    found = restarted(job, rendezvous, ranks, deaths)
                    restarts += len(deaths)
                    is_same = found.weights == good[ranks]
                    if not is_same:
                        lost += 1
                        print(found.output[-6000:], flush=True)
                    end = "the same bits" if is_same else "none" if found.weights is None else "OTHERS"
                    recorded = ", ".join(map(str, deaths))
                    rows.append(f"| {rendezvous} | {ranks} | {recorded} | {found.attempts} | {found.seconds:.0f} | {end} |")
                    print(rows[-1], flush=True)
    summary = f"\nOf the {len(rows)} runs, which had {restarts} restarts in total, {len(rows) - lost} ended with the same weights as the uninterrupted run.\n"
    given.result.write_text(HEAD.format(steps=STEPS) + "\n".join(rows) + "\n" + summary)
    print(summary)
    return 1 if lost else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--job"]:
        train(sys.argv[2], json.loads(sys.argv[3]), sys.argv[4] == "1")
    else:
        sys.exit(main(sys.argv[1:]))
