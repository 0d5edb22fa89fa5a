"""What all the built-in monitors together add to a step of about 10 ms, and what taking the callbacks' time adds.

The step is a small Llama-shaped model's on bytes, forward to optimizer step. Microseconds move with the machine, so its length is counted in
steps of the bare loop of `benchmarks/trainer.py`: one of those took 350 µs where the promise of 1 % of a 10 ms step was made, and so this one is
as long as 28.6 of them take here and now, or a little less. All is measured within one run, since two runs never have the same weather: every
ten steps, which is the log interval, the monitors are muted or told again, or their time is taken or not, and what a stretch took is held against
its neighbours. A record is made in all of them. The step after each change is left out, and an ordinary one counts for it; so are the first
stretches, in which the FLOPs of a step are counted.

    python benchmarks/monitors.py [--stretches 300]
"""

from __future__ import annotations

import argparse
import itertools
import logging
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import trainer as peers
from callsheet import Callback, CallbackManager, Context, Trainer, callbacks
from callsheet.core.costs import PATH_EVENTS
from callsheet.core.lifecycle import EVENTS
from timing import held_mean, machine

STRETCH = 10
SETTLING = 3  # stretches of each state that are left out at the beginning
TARGET = 10_000 / 350  # steps of the bare loop
SHAPE: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "use_cache": False,
    "bos_token_id": None,
    "eos_token_id": None,
}
MONITORS: dict[str, Callable[[], Callback]] = {
    "ActivationMonitor": callbacks.ActivationMonitor,
    "DiskSpaceGuard": callbacks.DiskSpaceGuard,
    "HangDetector": callbacks.HangDetector,
    "Heartbeat": callbacks.Heartbeat,
    "History": callbacks.History,
    "LRMonitor": callbacks.LRMonitor,
    "LossSpikeDetector": callbacks.LossSpikeDetector,
    "MemoryMonitor": callbacks.MemoryMonitor,
    "NaNMonitor": callbacks.NaNMonitor,
    "OOMObserver": callbacks.OOMObserver,
    "OptimizerMonitor": callbacks.OptimizerMonitor,
    "RuntimeEstimator": callbacks.RuntimeEstimator,
    "SaveOnTrigger": callbacks.SaveOnTrigger,
    "SlowRankDetector": callbacks.SlowRankDetector,
    "SpeedMonitor": callbacks.SpeedMonitor,
    "SystemMetricsMonitor": callbacks.SystemMetricsMonitor,
}
"""All that watch and log; what changes or stops training, and what writes pictures, is not among them."""
STATES = NOBODY, TOLD, ALL_TAKEN = "nobody", "all monitors", "all monitors, all time taken"
STEP_EVENTS = [event for event in EVENTS if event in PATH_EVENTS or event == "on_log"]


class Bytes:
    """Random bytes; a step's length is set by how many sequences a batch has."""

    def __init__(self, sequences: int, steps: int) -> None:
        generator = torch.Generator().manual_seed(0)
        batches = [torch.randint(0, 256, (sequences, 64), generator=generator) for _ in range(50)]
        self._batches = [{"input_ids": batch, "labels": batch} for batch in batches]
        self._steps = steps

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for step in range(self._steps):
            yield self._batches[step % len(self._batches)]

    def __len__(self) -> int:
        return self._steps


class Switch(Callback):
    """Goes from one state of the monitors to the next every `STRETCH` steps, and takes the time of the steps."""

    phase = "change"

    def __init__(self, monitors: list[Callback], states: Iterable[str]) -> None:
        self.monitors = monitors
        self.stretches: list[tuple[str, list[float]]] = []
        """The state, and microseconds of the training thread of each of its steps but the first; the last is one with a record."""
        self.manager: Any = None
        self._states = itertools.cycle(states)
        self._began = 0.0

    def on_fetch_start(self, ctx: Context) -> None:
        now, step = time.thread_time(), ctx.step  # which is over
        if step % STRETCH != 1 and self.stretches:
            self.stretches[-1][1].append((now - self._began) * 1e6)
        self._began = now
        if step % STRETCH == 0:
            state = next(self._states)
            self.stretches.append((state, []))
            self.manager.costs.mode = "all" if state == ALL_TAKEN else "off"
            for member in self.manager._registrations:
                if member.thing in self.monitors:  # whose own mutes stay, and end
                    member.is_off = state == NOBODY
            self.manager._table.changed()

    def on_log(self, ctx: Context) -> None:
        """So that a record is made in every state."""


def fit(shape: dict[str, Any], sequences: int, stretches: int, folder: Path, states: Iterable[str]) -> Switch:
    """A run of so many stretches."""
    torch.manual_seed(0)
    monitors = [kind() for kind in MONITORS.values()]
    switch = Switch(monitors, states)
    switch.manager = CallbackManager([switch, *monitors], costs="off")
    with Trainer(
        LlamaForCausalLM(LlamaConfig(**shape)),
        train_dataloader=Bytes(sequences, (stretches + 1) * STRETCH),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        max_duration="1ep",
        log_interval=f"{STRETCH}ba",
        device="cpu",
        progress=False,
        callbacks=switch.manager,
        run_name=f"run-{time.monotonic_ns()}",
        runs_folder=folder,
    ) as trainer:
        trainer.fit()
    switch.stretches.pop()  # which only began
    return switch


def a_step(stretch: list[float]) -> float:
    """What a step of it takes, in the mean: one in ten has a record, and perhaps a monitor's look."""
    *ordinary, last = stretch
    return statistics.fmean(ordinary) * (1 - 1 / STRETCH) + last / STRETCH


def sized(folder: Path) -> tuple[dict[str, Any], int, float]:
    """The largest of these models and batches whose step is no longer than the target; and a step of the bare loop, in microseconds."""
    bare = statistics.median(peers.bare() for _ in range(15))
    found = SHAPE | {"num_hidden_layers": 1}, 1
    for layers, sequences in ((2, 1), (2, 2), (4, 1), (4, 2), (4, 3), (4, 4), (4, 6), (4, 8)):
        shape = SHAPE | {"num_hidden_layers": layers}
        if (
            statistics.median(itertools.chain(*(took for _, took in fit(shape, sequences, 12, folder, [NOBODY]).stretches)))
            > TARGET * bare
        ):
            break
        found = shape, sequences
    return *found, bare


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stretches", type=int, default=300, help="of each of the three states")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("callsheet").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder, redirect_stderr(StringIO()):
        shape, sequences, bare = sized(Path(folder))
        switch = fit(shape, sequences, len(STATES) * (arguments.stretches + SETTLING), Path(folder), STATES)
    took = [a_step(stretch) for _, stretch in switch.stretches[len(STATES) * SETTLING :]]
    rounds = [took[i : i + 3] for i in range(0, len(took) - 2, 3)]
    step = statistics.median(nobody for nobody, _, _ in rounds)
    all_steps = sum(state == ALL_TAKEN for state, _ in switch.stretches) * STRETCH
    shares = dict.fromkeys(MONITORS, 0.0)
    for cost in switch.manager.cost_report(1).costs:
        if cost.event in STEP_EVENTS and cost.callback in shares:
            shares[cost.callback] += cost.seconds / all_steps * 1e6 / step
    print(
        f"{machine()}; {arguments.stretches} stretches of {STRETCH} steps in each state; a step of {step / 1000:.1f} ms of the training "
        f"thread's time, {step / bare:.0f} of the bare loop's ({shape['num_hidden_layers']} layers, {sequences} sequences)\n"
    )
    print(f"All monitors: {', '.join(MONITORS)}.\n")
    print("| what is added | µs a step, and its standard error | of the step |\n| --- | --- | --- |")
    for name, differences in (
        ("all monitors", [told - nobody for nobody, told, _ in rounds]),
        ("taking the time of all that they are told", [taken - told for _, told, taken in rounds]),
    ):
        added, error = held_mean(differences)
        print(f"| {name} | {added:+.0f} ± {error:.0f} | {added / step:+.2%} ± {error / step:.2%} |")
    print("\n| by the cost accounting: handlers of | of the step |\n| --- | --- |")
    for name, share in sorted({**shares, "(all)": sum(shares.values())}.items(), key=lambda item: -item[1]):
        print(f"| {name} | {share:.2%} |")


if __name__ == "__main__":
    main()
