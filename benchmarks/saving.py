"""What a background save of `Trainer` and `CheckpointSaver` costs training, compared with other copies of the state.

python benchmarks/saving.py [--runs 8] [--rounds 5] [--layers 32] [--device cuda] [--raw results/saving.jsonl] [--folder ...]

Each run is one `Trainer` for one model with AdamW, on one thread. In each round, the run saves a checkpoint in the background.
Some steps later it copies the same state once, and then passes it to `dcp.async_save` with a stager that is reused.

The time for which training is blocked is the time between two steps, from `on_train_step_end` to the next `on_train_step_start`,
minus the median of this time without a save. A step is counted as a step during a save if all of it lies between the start of the
save and the time at which the manifest was written. Besides the wall time, the tables have the processor time of the training
thread: other processes disturb it less, and it does not include waiting.

With `--device cuda` each step, each time between steps and each copy is measured until the device has finished. The copy and
`dcp.async_save` use pinned memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import async_save

from callsheet import Callback, Context, Trainer
from callsheet.callbacks import CheckpointSaver
from devices import add_device, check_device, wait_for
from timing import machine

WIDTH, BATCH = 1024, 16
ROUND = {"cpu": 30, "cuda": 600}  # steps from one save to the next: long enough to write the save; the steps on CUDA are shorter
COPY_AT, DCP_AT = (14, 30), (16, 30)  # when the copy and `dcp.async_save` run, as fractions of a round; the save is at 0
SETTLING = 2  # steps after a save that count neither as during it nor as undisturbed


Moment = tuple[float, float]
"""The wall time, and the processor time of the training thread, in seconds."""


def now(device: str) -> Moment:
    wait_for(device)
    return time.time(), time.thread_time()


def since(moment: Moment, device: str) -> Moment:
    wait_for(device)
    return time.time() - moment[0], time.thread_time() - moment[1]


class Clock(Callback):
    """Records by step when the step begins and ends, and when something is written. Also runs the copy and `dcp.async_save`."""

    def __init__(self, folder: Path, device: str) -> None:
        self._device = device
        self.steps: dict[int, tuple[Moment, Moment]] = {}
        self.saves: dict[int, tuple[float, float]] = {}
        self.published: list[int] = []
        self.dcp_saves: dict[int, tuple[float, float]] = {}
        self.dcp_blocked: dict[int, Moment] = {}
        self.copies: dict[int, Moment] = {}
        self._folder = folder
        is_cuda = device == "cuda"
        self._stager = DefaultStager(StagingOptions(is_cuda, False, False, is_cuda))  # pinned memory, copied without blocking
        self._future: Future[Any] | None = None
        self._buffers: list[Tensor] = []
        self._began = now(self._device)
        self._is_saving = False
        self._has_failed = False  # whether `dcp.async_save` has failed

    def on_train_step_start(self, ctx: Context) -> None:
        self._began = now(self._device)

    def on_train_step_end(self, ctx: Context) -> None:
        self.steps[ctx.step] = (self._began, now(self._device))

    def on_checkpoint_save_start(self, ctx: Context) -> None:
        self._is_saving = True

    def on_checkpoint_published(self, ctx: Context) -> None:
        assert ctx.checkpoint is not None
        durable = (Path(ctx.checkpoint.path) / "manifest.json").stat().st_mtime
        self.saves[ctx.checkpoint.step] = (self.steps[ctx.checkpoint.step][1][0], durable)
        self.published.append(ctx.step)
        self._is_saving = False

    def on_checkpoint_due(self, ctx: Context) -> None:
        """Run the copy or `dcp.async_save` if it is time for one, unless a save is still being written."""
        length = ROUND[self._device]
        place = ctx.step % length
        if place == 0 and self._future is not None:
            self._future.result()
        elif place == place_in(length, COPY_AT) and not self._is_saving:
            tensors = list(tensors_of(state_of(ctx)))
            if not self._buffers:
                self._buffers = [torch.zeros_like(tensor, device="cpu", pin_memory=self._device == "cuda") for tensor in tensors]
            began = now(self._device)
            torch._foreach_copy_(self._buffers, tensors, non_blocking=self._device == "cuda")
            self.copies[ctx.step] = since(began, self._device)
        elif place == place_in(length, DCP_AT) and not self._is_saving and not self._has_failed:
            began, step = now(self._device), ctx.step
            try:
                found = async_save(state_of(ctx), checkpoint_id=self._folder / "dcp", async_stager=self._stager, no_dist=True)
            except Exception as error:  # such as the KeyError of its stager at the second save in torch 2.11 on CUDA
                self._has_failed = True
                print(f"dcp.async_save failed and is left out: {type(error).__name__}: {error}", file=sys.stderr)
                return
            self.dcp_blocked[step] = since(began, self._device)
            assert isinstance(found, Future)
            self._future = found
            found.add_done_callback(lambda _: self.dcp_saves.update({step: (began[0], time.time())}))


def place_in(length: int, fraction: tuple[int, int]) -> int:
    return length * fraction[0] // fraction[1]


def state_of(ctx: Context) -> dict[str, Any]:
    return {"model": ctx.model.state_dict(), "optimizer": ctx.optimizer.state_dict()}


def tensors_of(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict):
        for each in tree.values():
            yield from tensors_of(each)


class Batches:
    """Yields one batch again and again."""

    def __init__(self, steps: int, device: str) -> None:
        self._batch = (torch.randn(BATCH, WIDTH).to(device), torch.randn(BATCH, WIDTH).to(device))
        self._steps = steps

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter([self._batch] * self._steps)


def run(layers: int, rounds: int, folder: Path, device: str) -> dict[str, Any]:
    """Run one `Trainer`, and return the measured times in seconds."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    clock = Clock(folder, device)
    steps = ROUND[device] * (rounds + 1) - 1
    with Trainer(
        model,
        nn.functional.mse_loss,
        Batches(steps, device),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-6),
        max_duration=f"{steps}ba",
        save_in_background=True,
        callbacks=[CheckpointSaver(save_interval=f"{ROUND[device]}ba", keep=1, save_at_end=False), clock],
        runs_folder=folder,
        run_name="saving",
        device=device,
    ) as trainer:
        trainer.fit()
    return measured(clock, ROUND[device])


def measured(clock: Clock, length: int) -> dict[str, Any]:
    steps = clock.steps
    gaps = {
        step: (steps[step + 1][0][0] - steps[step][1][0], steps[step + 1][0][1] - steps[step][1][1])
        for step in steps
        if step + 1 in steps
    }
    busy = {*clock.saves, *clock.published, *clock.copies, *clock.dcp_blocked}
    idle = [statistics.median(gap[kind] for step, gap in gaps.items() if step not in busy) for kind in (0, 1)]
    everything = [*clock.saves.values(), *clock.dcp_saves.values()]
    lasted = {step: (end[0] - begin[0], end[1] - begin[1]) for step, (begin, end) in steps.items()}

    def is_undisturbed(step: int) -> bool:
        return all(
            steps[step][1][0] <= begin or (step - SETTLING in steps and steps[step - SETTLING][0][0] >= end)
            for begin, end in everything
        )

    def blocked(at: list[int]) -> list[Moment]:
        return [(gaps[step][0] - idle[0], gaps[step][1] - idle[1]) for step in at if step in gaps]

    def beside(spans: dict[int, tuple[float, float]]) -> list[dict[str, list[Moment]]]:
        """Return, for each save, the steps that lie entirely within it, and the undisturbed steps around it."""
        found = []
        for at, (begin, end) in spans.items():
            during = [lasted[step] for step in steps if begin <= steps[step][0][0] and steps[step][1][0] <= end]
            near = range(max(SETTLING + 2, at - place_in(length, DCP_AT)), at + length)
            quiet = [lasted[step] for step in near if step in steps and is_undisturbed(step)]
            if during and quiet:
                found.append({"during": during, "quiet": quiet})
        return found

    return {
        "blocked": blocked(list(clock.saves)),
        "published": blocked(clock.published),
        "copies": list(clock.copies.values()),
        "dcp_blocked": list(clock.dcp_blocked.values()),
        "durable": [end - begin for begin, end in clock.saves.values()],
        "dcp_durable": [end - begin for begin, end in clock.dcp_saves.values()],
        "beside_save": beside(clock.saves),
        "beside_dcp": beside(clock.dcp_saves),
    }


def tables(runs: list[dict[str, Any]], title: str) -> None:
    def several(key: str, part: slice = slice(None)) -> list[Moment]:
        return [each for run in runs for each in run[key][part]]

    copy = [statistics.median(each[kind] for each in several("copies")) for kind in (0, 1)]
    print(
        f"{title}\n\n| what blocks the training thread | times | minimum, ms | median, ms | maximum, ms | median, in copies | processor time, ms | in copies |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name, moments in (
        ("one copy of the state into existing buffers", several("copies")),
        ("the first save of a run", several("blocked", slice(1))),
        ("every other save", several("blocked", slice(1, None))),
        ("its publication, with the deletion of an older one", several("published", slice(1, None))),
        ("`dcp.async_save`, the first of a run", several("dcp_blocked", slice(1))),
        ("`dcp.async_save`, every other", several("dcp_blocked", slice(1, None))),
    ):
        if not moments:
            continue
        clock, processor = zip(*moments, strict=True)
        middle, used = statistics.median(clock), statistics.median(processor)
        print(
            f"| {name} | {len(moments)} | {min(clock) * 1e3:.0f} | {middle * 1e3:.0f} | {max(clock) * 1e3:.0f} | {middle / copy[0]:.2f} "
            f"| {used * 1e3:.0f} | {used / copy[1]:.2f} |"
        )
    print(
        "\n| steps beside | saves, steps | step without a save, ms | step during a save, ms | relative speed, by the medians of a round | by the fastest steps | in processor time | until it is on disk, ms |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name, key, durable in (
        ("a save in the background", "beside_save", "durable"),
        ("`dcp.async_save`", "beside_dcp", "dcp_durable"),
    ):
        rounds = [each for run in runs for each in run[key]]
        if not rounds:
            continue
        during, quiet = ([step for each in rounds for step in each[kind]] for kind in ("during", "quiet"))
        ratios = [
            [
                statistics.median(s[kind] for s in each["quiet"]) / statistics.median(s[kind] for s in each["during"])
                for each in rounds
            ]
            for kind in (0, 1)
        ]
        print(
            f"| {name} | {len(rounds)}, {len(during)} | {statistics.median(s[0] for s in quiet) * 1e3:.1f} "
            f"| {statistics.median(s[0] for s in during) * 1e3:.1f} | {statistics.median(ratios[0]):.3f} "
            f"| {min(s[0] for s in quiet) / min(s[0] for s in during):.3f} | {statistics.median(ratios[1]):.3f} "
            f"| {statistics.median(each for run in runs for each in run[durable]) * 1e3:.0f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=32, help=f"of {WIDTH} x {WIDTH} weights: 12 MiB of state each")
    parser.add_argument("--raw", type=Path, help="a file for the figures of each run, one a line")
    parser.add_argument(
        "--folder", type=Path, help="where to write the checkpoints; by default the system's folder for temporary files"
    )
    add_device(parser)
    arguments = parser.parse_args()
    check_device(arguments.device)
    torch.set_num_threads(1)
    warnings.filterwarnings(
        "ignore", module="torch.distributed"
    )  # warnings that there is only one process, and that it overwrites files
    runs = []
    for _ in range(arguments.runs):
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            runs.append(run(arguments.layers, arguments.rounds, Path(folder), arguments.device))
        print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    megabytes = arguments.layers * WIDTH * WIDTH * 12 / 1e6
    title = f"{machine(arguments.device)}; {megabytes:.0f} MB in {3 * arguments.layers} large tensors; {arguments.runs} runs, {arguments.rounds} saves each, one thread"
    if arguments.raw is not None:
        arguments.raw.write_text("".join(json.dumps({"on": title, **each}) + "\n" for each in runs))
    tables(runs, title)


if __name__ == "__main__":
    main()
