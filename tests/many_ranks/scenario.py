"""Random runs on several ranks with a failure: planned from a seed, run by real processes, and reported by each of them."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from callsheet import Callback, Context, Trainer
from callsheet.callbacks import CheckpointSaver
from callsheet.testing import RankProcesses, Recorder
from callsheet.trainer.parallel import ParallelKind

TIMEOUT, GRACE = 5.0, 6.0
ANSWER = TIMEOUT / 4
"""Seconds until a collective that some rank does not reach fails, that the others then have to say how they fare, and of a signal's grace."""

KINDS = ("calm", "signal", "dead", "calm", "raise", "paused", "signal", "calm", "stuck", "raise")
"""What goes wrong: in `calm` runs nothing but slowness, uneven data, and requests; in the others just one thing besides."""

FATAL = ("dead", "raise", "stuck")
DATA = ("items", "batches", "stream", "own", "own_stream")
REQUEST_EVENTS = (
    "on_fetch_start",
    "on_train_step_start",
    "on_forward_end",
    "on_backward_start",
    "on_optimizer_step_end",
    "on_train_step_end",
    "on_eval_step_start",
    "on_eval_end",
    "on_log",
    "on_checkpoint_due",
    "on_checkpoint_save_start",
    "on_epoch_end",
)


@dataclass(frozen=True)
class PlannedRequest:
    """A request that one rank makes at the first `event` from `step` on, or `delay` seconds later from another thread."""

    what: str
    rank: int
    event: str
    step: int
    delay: float | None

    @property
    def name(self) -> str:
        """Return the text that identifies the request in outcomes and checkpoints."""
        return f"{self.what} of rank {self.rank} at {self.event} {self.step}"


@dataclass(frozen=True)
class Scenario:
    """The plan of a run, which the seed determines completely."""

    seed: int
    kind: str
    world_size: int
    parallel: ParallelKind
    data: str
    lengths: tuple[int, ...]
    """The number of batches of each rank's own data. For shared data: the number of all samples, once for each rank."""
    epochs: int
    accumulate: int
    eval_interval: str
    log_interval: str
    save_interval: str
    in_background: bool
    pauses: tuple[float, ...]
    """The duration of a step in seconds, by rank."""
    requests: tuple[PlannedRequest, ...]
    rank: int
    """The rank on which the failure happens. For signals, -1 means all ranks."""
    event: str
    step: int
    delay: float | None
    """Seconds between the event and the failure, which then comes from another thread. None: during the event."""
    signal: str
    launcher_follows: bool
    """Whether the other ranks receive SIGTERM after a death, as torchrun sends it."""

    @property
    def is_fatal(self) -> bool:
        """Return whether one rank cannot continue after the failure."""
        return self.kind in FATAL

    def __str__(self) -> str:
        what = (
            ""
            if self.kind == "calm"
            else f", {'all ranks' if self.rank < 0 else f'rank {self.rank}'} at {self.event} {self.step}"
        )
        return f"seed {self.seed}: {self.kind}{what}, {self.world_size} ranks, {self.parallel}, {self.data}"


def planned(seed: int) -> Scenario:
    """Return the scenario of a seed."""
    draw = random.Random(seed)
    kind = KINDS[seed % len(KINDS)]
    size = draw.choice((2, 4))
    data = draw.choice(DATA)
    shared = draw.randrange(20, 28) * size + draw.randrange(size)
    ranks = range(size)
    own = [draw.randrange(8, 14) for _ in ranks]
    epochs = draw.choice((2, 3))
    steps = 9 * epochs
    slow = draw.randrange(size)

    def request() -> PlannedRequest:
        delay = draw.choice((None, None, draw.uniform(0, 0.2)))
        what = draw.choice(("save", "save", "evaluate", "evaluate", "stop"))
        step = draw.randrange(1, steps) if what != "stop" else draw.randrange(steps // 2, steps + 4)
        return PlannedRequest(
            what, draw.randrange(size), draw.choice(("on_train_step_start", "on_train_step_end", "on_eval_step_end")), step, delay
        )

    requests = tuple(request() for _ in range(draw.randrange(4)))
    by_signal = kind == "signal"
    return Scenario(
        seed=seed,
        kind=kind,
        world_size=size,
        parallel=draw.choice(("ddp", "fsdp")),
        data=data,
        lengths=tuple(own) if data.startswith("own") else (shared,) * size,
        epochs=epochs,
        accumulate=draw.choice((1, 1, 2)),
        eval_interval=draw.choice(("1ep", "4ba", "7ba")),
        log_interval=draw.choice(("1ba", "3ba", "5ba")),
        save_interval=draw.choice(("1ep", "5ba")),
        in_background=draw.random() < 0.5,
        pauses=tuple(draw.choice((0.02, 0.05)) if rank == slow else 0.01 for rank in ranks),
        requests=requests,
        rank=draw.choice((-1, *ranks)) if by_signal else draw.randrange(size),
        event=draw.choice(REQUEST_EVENTS),
        step=draw.randrange(1, steps // 2),
        delay=draw.uniform(0, 0.3) if by_signal or (kind != "raise" and draw.random() < 0.5) else None,
        signal=draw.choice(("SIGTERM", "SIGINT")),
        launcher_follows=kind == "dead" and draw.random() < 0.5,
    )


# --- the data ---

BATCH = 2


def samples(first: int, number: int) -> Tensor:
    """Return samples whose first value is their number."""
    numbers = torch.arange(first, first + number, dtype=torch.float32)
    return torch.stack([numbers, torch.cos(numbers)], 1)


def batches(first: int, number: int) -> list[tuple[Tensor, Tensor]]:
    """Return batches of samples with their targets."""
    return [(part, part[:, 1:] * 0.5) for part in torch.split(samples(first, number), BATCH)]


class Stream:
    """An iterable of batches without a length."""

    def __init__(self, given: list[tuple[Tensor, Tensor]]) -> None:
        self.given = given

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(self.given)


def loader(scenario: Scenario, rank: int) -> Any:
    """Return the training data that this rank passes to its Trainer."""
    number = scenario.lengths[rank]
    if scenario.data == "items":
        inputs = samples(0, number)
        return DataLoader(TensorDataset(inputs, inputs[:, 1:] * 0.5), batch_size=BATCH, shuffle=True)
    if scenario.data.startswith("own"):
        own = batches(1000 * rank, number * BATCH)
        return own if scenario.data == "own" else Stream(own)
    return batches(0, number) if scenario.data == "batches" else Stream(batches(0, number))


def eval_loader(scenario: Scenario, rank: int) -> Any:
    """Return the evaluation data, which is shared, or different on each rank, like the training data."""
    own = scenario.data.startswith("own")
    given = batches(0, 2 * (2 + scenario.lengths[rank] % 4)) if own else batches(0, 13)
    return Stream(given) if scenario.data.endswith("stream") else given


# --- what the ranks do ---


class PlannedError(RuntimeError):
    """The error that the scenario plans for a rank."""


@dataclass
class Report:
    """What one rank observed."""

    outcome: str = ""
    step: int = 0
    samples: int = 0
    error: str = ""
    notes: str = ""
    is_planned: bool = False
    """Whether the error is the one that was planned for this rank."""
    events: list[tuple[str, int]] = field(default_factory=list)
    records: list[tuple[int, dict[str, str]]] = field(default_factory=list)
    published: list[tuple[str, int, str, tuple[str, ...]]] = field(default_factory=list)
    evaluated: list[tuple[int, str]] = field(default_factory=list)
    """The steps of the evaluations, and the names of their requests."""
    stopped_by: str = ""
    signal: str = ""
    drawn: list[tuple[int, int, tuple[int, ...]]] = field(default_factory=list)
    """The epoch, step and samples of each batch."""
    counted: dict[int, int] = field(default_factory=dict)
    """The number of samples that the run had counted at the end of each epoch."""
    requested: list[PlannedRequest] = field(default_factory=list)
    """The requests that this rank made before training ended."""
    struck: bool = False
    """Whether this rank's failure happened before training ended."""
    logged: float = 0.0
    """The sum of the values that this rank has logged as `sum/odd`."""
    weights: list[str] = field(default_factory=list)
    ended_at: float = 0.0


class MakesRequestsAndFails(Callback):
    """Makes this rank's planned requests, and causes its planned failure."""

    def __init__(self, scenario: Scenario, rank: int, folder: Path, report: Report) -> None:
        self.scenario = scenario
        self.rank_number = rank
        self.folder = folder
        self.report = report
        self.planned = [request for request in scenario.requests if request.rank == rank]
        self.is_mine = scenario.kind != "calm" and scenario.rank in (rank, -1)
        self.is_over = False
        self.lock = threading.Lock()

    def on_event(self, ctx: Context) -> None:
        event = str(ctx.event)
        if event in ("on_train_end", "on_run_end"):
            with self.lock:  # a request in progress counts as made before
                self.is_over = True
        step = max(ctx.step, 0)
        for request in [request for request in self.planned if request.event == event and step >= request.step]:
            self.planned.remove(request)
            self.later(request.delay, lambda request=request: self.request_now(ctx, request))  # type: ignore[misc]
        if self.is_mine and step >= self.scenario.step and event == self.scenario.event:
            self.is_mine = False
            self.later(self.scenario.delay, self.strike)

    def later(self, delay: float | None, act: Callable[[], None]) -> None:
        if delay is None:
            act()
            return

        def late() -> None:
            with self.lock:
                if not self.is_over:
                    act()

        timer = threading.Timer(delay, late)
        timer.daemon = True
        timer.start()

    def request_now(self, ctx: Context, request: PlannedRequest) -> None:
        if self.is_over:
            return
        self.report.requested.append(request)
        if request.what == "save":
            ctx.control.save(request.name, by=request.name)
        elif request.what == "evaluate":
            ctx.control.evaluate(request.name)
        else:
            ctx.control.stop(request.name)

    def strike(self) -> None:
        if self.is_over:
            return
        self.report.struck = True
        kind, me = self.scenario.kind, os.getpid()
        (self.folder / "struck").write_text(repr(time.time()))
        if kind == "raise":
            raise PlannedError(f"as planned on rank {self.rank_number}")
        if kind == "dead":
            os.kill(me, signal.SIGKILL)
        if kind == "paused":
            subprocess.Popen(["sh", "-c", f"sleep {TIMEOUT / 3}; kill -CONT {me}"])
        if kind in ("paused", "stuck"):
            os.kill(me, signal.SIGSTOP)
        if kind == "signal":
            os.kill(me, signal.Signals[self.scenario.signal])


class LogsAndReports(Callback):
    """Takes time, logs metrics, and records events and results in the report."""

    def __init__(self, scenario: Scenario, rank: int, report: Report) -> None:
        self.scenario = scenario
        self.rank_number = rank
        self.report = report
        self.draw = random.Random(1000 * scenario.seed + rank)

    def on_fetch_end(self, ctx: Context) -> None:
        if ctx.batch is not None:
            self.report.drawn.append((ctx.epoch, ctx.step, tuple(ctx.batch[0][:, 0].int().tolist())))

    def on_train_step_start(self, ctx: Context) -> None:
        time.sleep(self.scenario.pauses[self.rank_number] * self.draw.choice((0.5, 1, 1.5)))

    def on_eval_step_start(self, ctx: Context) -> None:
        time.sleep(self.scenario.pauses[self.rank_number] / 2)

    def on_train_step_end(self, ctx: Context) -> None:
        """Log keys that differ by rank, in random order, and sometimes NaN."""
        draw, rank = self.draw, self.rank_number
        keys = [name for name in ("mean/here", "max/here", "last/here") if draw.random() < 0.5]
        draw.shuffle(keys)
        for name in keys:
            value = float("nan") if draw.random() < 0.05 else draw.random()
            ctx.log(
                {name: value},
                over="last" if name.startswith("last") else "mean",
                across="max" if name.startswith("max") else "mean",
            )
        if ctx.step == self.scenario.step and rank == self.scenario.world_size - 1:
            ctx.log({f"only/{rank}": 1.0})
        if rank % 2:
            ctx.log({"sum/odd": ctx.step}, over="sum", across="sum")
            self.report.logged += ctx.step

    def on_eval_all_start(self, ctx: Context) -> None:
        request = ctx.control.evaluate_requested
        self.report.evaluated.append((ctx.step, request.why if request is not None else ""))

    def on_eval_all_end(self, ctx: Context) -> None:
        for name, found in ctx.eval_results.items():
            ctx.log({f"{name}/twice": 2 * found["loss"]}, across="same")

    def on_epoch_end(self, ctx: Context) -> None:
        self.report.counted[ctx.epoch] = ctx.state.timestamp.sample

    def on_log(self, ctx: Context) -> None:
        values = {name: value.hex() for name, value in ctx.record.values.items() if not name.endswith("per_second")}
        self.report.records.append((ctx.record.step, values))

    def on_checkpoint_published(self, ctx: Context) -> None:
        info = ctx.checkpoint
        assert info is not None
        self.report.published.append((str(info.path), info.step, info.kind, info.requested_by))

    def on_train_end(self, ctx: Context) -> None:
        request = ctx.control.stop_requested
        self.report.stopped_by = request.why if request is not None else ""


def run_on_rank(scenario: Scenario, folder: Path) -> Report:
    """Run the scenario on one rank."""
    rank = int(os.environ["RANK"])
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: None)  # a signal after training is ignored
    report = Report()
    recorder, fate = Recorder(), MakesRequestsAndFails(scenario, rank, folder, report)
    torch.manual_seed(scenario.seed)
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
    trainer = None
    try:
        with Trainer(
            model,
            nn.functional.mse_loss,
            loader(scenario, rank),
            {"valid": eval_loader(scenario, rank)},
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
            max_duration=f"{scenario.epochs}ep",
            parallel=scenario.parallel,
            shard_data=not scenario.data.startswith("own"),
            gradient_accumulation_steps=scenario.accumulate,
            eval_interval=scenario.eval_interval,
            log_interval=scenario.log_interval,
            clip_grad_norm=1.0,
            callbacks=[
                LogsAndReports(scenario, rank, report),
                fate,
                CheckpointSaver(save_interval=scenario.save_interval, keep=None),
            ],
            loggers=[recorder],
            run_name="run",
            runs_folder=folder,
            save_in_background=scenario.in_background,
            seed=scenario.seed,
            grace_seconds=GRACE,
            timeout_seconds=TIMEOUT,
        ) as trainer:
            trainer.fit()
            if scenario.parallel == "ddp":
                report.weights = [value.hex() for tensor in model.state_dict().values() for value in tensor.flatten().tolist()]
    except BaseException as error:
        report.error = f"{type(error).__name__}: {error}"
        report.notes = "\n".join(getattr(error, "__notes__", []))
        report.is_planned = isinstance(error, PlannedError)
    with fate.lock:
        fate.is_over = True
    report.ended_at = time.time()
    report.events = [(noted.event, noted.step) for noted in recorder.recorded]
    if trainer is not None:
        report.outcome, report.step = str(trainer.run.outcome), trainer.state.timestamp.batch
        report.samples, report.signal = trainer.state.timestamp.sample, str(trainer.signal)
    return report


@dataclass
class RunResult:
    """The result of a scenario."""

    scenario: Scenario
    reports: dict[int, Report]
    """The reports of the ranks that returned one."""
    silent: dict[int, str]
    """The exit codes and tracebacks of the other ranks."""
    struck_after: float | None
    """Seconds from the start to the failure, or None if it did not happen."""
    seconds: float
    """Seconds from the failure, or else from the start, until the last rank ended."""


def run_scenario(scenario: Scenario, folder: Path) -> RunResult:
    """Run the scenario. A rank that is stuck is killed once the others have ended."""
    began = time.time()
    bad = scenario.rank if scenario.is_fatal else -1
    with RankProcesses(run_on_rank, scenario.world_size, scenario, folder) as ranks:

        def terminate_others() -> None:
            others = [process for rank, process in enumerate(ranks.processes) if rank != bad]
            if scenario.launcher_follows:
                ranks.processes[bad].join(60)
                time.sleep(random.Random(scenario.seed).uniform(0, 0.3))
                for process in others:
                    if process.exitcode is None:
                        process.terminate()
            for process in others:
                process.join(60)
            if scenario.kind == "stuck" and all(process.exitcode is not None for process in others):
                ranks.kill(bad)

        watcher = threading.Thread(target=terminate_others)
        watcher.start()
        ends = ranks.wait(70)
        watcher.join()
    struck = folder / "struck"
    struck_at = float(struck.read_text()) if struck.exists() else None
    reports = {end.rank: end.value for end in ends if isinstance(end.value, Report)}
    over = max((report.ended_at for report in reports.values()), default=began)
    return RunResult(
        scenario,
        reports,
        {end.rank: f"exit code {end.exitcode} {end.error}" for end in ends if end.rank not in reports},
        struck_at - began if struck_at is not None else None,
        over - (struck_at or began),
    )


def blamed(report: Report) -> set[int]:
    """Return the ranks that an error names as failed or not answering."""
    found = {int(rank) for rank in re.findall(r"rank (\d+) on machine \S+ failed", report.error)}
    for ranks in re.findall(r"ranks? (\d+ on [^;]*?) did not answer", report.error):
        found |= {int(rank) for rank in re.findall(r"(\d+) on machine", ranks)}
    return found


def main() -> None:
    """Run the given seeds, to find the reason for a failure: `python -m tests.many_ranks.scenario SEED`."""
    import tempfile

    for seed in map(int, sys.argv[1:]):
        with tempfile.TemporaryDirectory() as folder:
            result = run_scenario(planned(seed), Path(folder))
        print(result.scenario)
        print(result.struck_after, result.seconds, result.silent)
        for rank, report in result.reports.items():
            print(
                rank,
                report.outcome,
                report.step,
                len(report.events),
                report.error,
                "|",
                report.notes,
                report.requested,
                report.struck,
            )


if __name__ == "__main__":
    main()
