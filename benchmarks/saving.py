"""What a checkpoint costs training, through `Trainer(save_in_background=True)` and `CheckpointSaver`, with other copies of the state beside it.

python benchmarks/saving.py [--runs 4] [--rounds 5] [--layers 32] [--raw results/saving.jsonl]

Every run is one `Trainer` over one model with AdamW, on one thread. In every round the same run saves a checkpoint in the background, and
a few steps later copies the same state once, and then gives it to `dcp.async_save` with a stager that is reused. Blocked is the time
between two steps, from `on_train_step_end` to the next `on_train_step_start`, less the median of that time without a save. A step is
counted as one beside a save where all of it lies between the begin of the save and the time of the manifest.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from callsheet import Callback, Context, Trainer
from callsheet.callbacks import CheckpointSaver
from timing import machine

WIDTH, BATCH = 1024, 16
ROUND = 40  # steps
COPY_AT, DCP_AT = 18, 20  # steps of a round, with the checkpoint at 0
SETTLING = 2  # steps after something is over that count as neither beside it nor without it


class Clock(Callback):
    """Notes when steps begin and end, and when something is written: (name, begin, end), in seconds."""

    def __init__(self, folder: Path) -> None:
        self.steps: dict[int, tuple[float, float]] = {}
        self.saves: dict[int, tuple[float, float]] = {}
        self.published: list[int] = []
        self.dcp_saves: dict[int, tuple[float, float]] = {}
        self.dcp_blocked: dict[int, float] = {}
        self.copies: dict[int, float] = {}
        self._folder = folder
        self._stager = DefaultStager(StagingOptions(False, False, False, False))
        self._future: Future[Any] | None = None
        self._buffers: list[Tensor] = []
        self._began = 0.0

    def on_train_step_start(self, ctx: Context) -> None:
        self._began = time.time()

    def on_train_step_end(self, ctx: Context) -> None:
        self.steps[ctx.step] = (self._began, time.time())

    def on_checkpoint_save_start(self, ctx: Context) -> None:
        self._began = time.time()

    def on_checkpoint_published(self, ctx: Context) -> None:
        assert ctx.checkpoint is not None
        self.saves[ctx.checkpoint.step] = (
            self.steps[ctx.checkpoint.step][1],
            (Path(ctx.checkpoint.path) / "manifest.json").stat().st_mtime,
        )
        self.published.append(ctx.step)

    def on_checkpoint_due(self, ctx: Context) -> None:
        """The peers, at a boundary as well."""
        if ctx.step % ROUND == COPY_AT:
            tensors = list(tensors_of(state_of(ctx)))
            if not self._buffers:
                self._buffers = [torch.zeros_like(tensor) for tensor in tensors]
            began = time.time()
            torch._foreach_copy_(self._buffers, tensors)
            self.copies[ctx.step] = time.time() - began
        elif ctx.step % ROUND == DCP_AT:
            began = time.time()
            found = dcp.async_save(state_of(ctx), checkpoint_id=self._folder / "dcp", async_stager=self._stager, no_dist=True)
            self.dcp_blocked[ctx.step] = time.time() - began
            assert isinstance(found, Future)
            self._future = found
            step = ctx.step
            found.add_done_callback(lambda _: self.dcp_saves.update({step: (began, time.time())}))
        elif ctx.step % ROUND == 0 and self._future is not None:
            self._future.result()


def state_of(ctx: Context) -> dict[str, Any]:
    return {"model": ctx.model.state_dict(), "optimizer": ctx.optimizer.state_dict()}


def tensors_of(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict):
        for each in tree.values():
            yield from tensors_of(each)


class Batches:
    """The same batch for ever."""

    def __init__(self, steps: int) -> None:
        self._batch = (torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH))
        self._steps = steps

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter([self._batch] * self._steps)


def run(layers: int, rounds: int, folder: Path) -> dict[str, Any]:
    """One `Trainer`; what was measured, in seconds."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    clock = Clock(folder)
    steps = ROUND * (rounds + 1) - 1
    with Trainer(
        model,
        nn.functional.mse_loss,
        Batches(steps),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-6),
        max_duration=f"{steps}ba",
        save_in_background=True,
        callbacks=[CheckpointSaver(save_interval=f"{ROUND}ba", keep=1, save_at_end=False), clock],
        runs_folder=folder,
        run_name="saving",
        device="cpu",
    ) as trainer:
        trainer.fit()
    return measured(clock)


def measured(clock: Clock) -> dict[str, Any]:
    steps = clock.steps
    gaps = {step: steps[step + 1][0] - steps[step][1] for step in steps if step + 1 in steps}
    busy = {*clock.saves, *clock.published, *clock.copies, *clock.dcp_blocked}
    idle_gap = statistics.median(gap for step, gap in gaps.items() if step not in busy)

    def beside(spans: dict[int, tuple[float, float]]) -> list[dict[str, list[float]]]:
        """For every save, the steps that lie wholly beside it, and those of the same round that lie beside nothing."""
        everything = [*clock.saves.values(), *clock.dcp_saves.values()]
        found = []
        for at, (begin, end) in spans.items():
            during = [b - a for a, b in steps.values() if begin <= a and b <= end]
            quiet = [
                b - a
                for step, (a, b) in ((step, steps[step]) for step in range(max(4, at - 14), at + 20) if step in steps)
                if all(b <= span_begin or steps[step - SETTLING][0] >= span_end for span_begin, span_end in everything)
            ]
            if during and quiet:
                found.append({"during": during, "quiet": quiet})
        return found

    return {
        "idle_gap": idle_gap,
        "blocked": [gaps[step] - idle_gap for step in clock.saves if step in gaps],
        "published": [gaps[step] - idle_gap for step in clock.published if step in gaps],
        "copies": list(clock.copies.values()),
        "dcp_blocked": list(clock.dcp_blocked.values()),
        "durable": [end - begin for begin, end in clock.saves.values()],
        "dcp_durable": [end - begin for begin, end in clock.dcp_saves.values()],
        "beside_save": beside(clock.saves),
        "beside_dcp": beside(clock.dcp_saves),
    }


def tables(runs: list[dict[str, Any]], title: str) -> None:
    copy = statistics.median(each for run in runs for each in run["copies"])
    print(f"{title}\n\n| what | saves | least, ms | median | most | median, in copies |\n| --- | --- | --- | --- | --- | --- |")

    def row(name: str, seconds: list[float]) -> None:
        middle = statistics.median(seconds)
        print(
            f"| {name} | {len(seconds)} | {min(seconds) * 1e3:.0f} | {middle * 1e3:.0f} | {max(seconds) * 1e3:.0f} | {middle / copy:.2f} |"
        )

    def several(key: str, part: slice) -> list[float]:
        return [each for run in runs for each in run[key][part]]

    row("one copy of the state into buffers that are there", several("copies", slice(None)))
    row("blocked by the first save of a run", several("blocked", slice(1)))
    row("blocked by every other save", several("blocked", slice(1, None)))
    row("blocked by `dcp.async_save`, the first of a run", several("dcp_blocked", slice(1)))
    row("blocked by `dcp.async_save`, every other", several("dcp_blocked", slice(1, None)))
    row("blocked when a save is published, and the old one deleted", several("published", slice(1, None)))
    row("until a save is on the disk", several("durable", slice(None)))
    row("until that of `dcp.async_save` is", several("dcp_durable", slice(None)))
    print(
        "\n| steps beside | rounds | a step without, ms | beside it | speed, median | of all steps | least disturbed |\n| --- | --- | --- | --- | --- | --- | --- |"
    )
    for name, key in (("a save in the background", "beside_save"), ("`dcp.async_save`", "beside_dcp")):
        rounds = [each for run in runs for each in run[key]]
        if not rounds:
            print(f"| {name} | 0 | | | | | |")
            continue
        during, quiet = ([step for each in rounds for step in each[kind]] for kind in ("during", "quiet"))
        ratios = [statistics.median(each["quiet"]) / statistics.median(each["during"]) for each in rounds]
        print(
            f"| {name} | {len(rounds)} | {statistics.median(quiet) * 1e3:.1f} | {statistics.median(during) * 1e3:.1f} "
            f"| {statistics.median(ratios):.3f} | {statistics.fmean(quiet) / statistics.fmean(during):.3f} | {min(quiet) / min(during):.3f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=32, help=f"of {WIDTH} x {WIDTH} weights: 12 MiB of state each")
    parser.add_argument("--raw", type=Path, help="where every run's figures go, a line each")
    parser.add_argument("--folder", type=Path, help="on which disk to write; the system's folder for temporary files otherwise")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    runs = []
    for _ in range(arguments.runs):
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            runs.append(run(arguments.layers, arguments.rounds, Path(folder)))
        print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    megabytes = arguments.layers * WIDTH * WIDTH * 12 / 1e6
    title = f"{machine()}; {megabytes:.0f} MB in {3 * arguments.layers} large tensors; {arguments.runs} runs, {arguments.rounds} saves each, one thread"
    if arguments.raw is not None:
        arguments.raw.write_text("".join(json.dumps({"on": title, **each}) + "\n" for each in runs))
    tables(runs, title)


if __name__ == "__main__":
    main()
