"""What all the built-in monitors together add to a step of about 10 ms, and what taking the callbacks' time adds.

The step is a small Llama-shaped model's on bytes, forward to optimizer step, sized to about 10 ms on this machine's one thread. Every turn
trains the same few hundred steps with nobody on the call sheet and with the monitors, one after the other. What comes once a run, before
the fifth step and after the last, such as counting the FLOPs of a step, is told apart: it is not the steps'.

    python benchmarks/monitors.py [--turns 12]
"""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stderr
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from callsheet import Callback, CallbackManager, Trainer, callbacks
from callsheet.costs import PATH_EVENTS
from timing import difference, in_turns, machine

STEPS = 400
FIRST = 4  # steps that are left out at the beginning
TARGET_SECONDS = 0.010
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
ALL_TAKEN = "all monitors, everybody's time taken"


class Bytes:
    """The same batches for everybody; a step's length is set by how many sequences a batch has."""

    def __init__(self, sequences: int) -> None:
        self.began = self.ended = 0.0  # of the steps that count
        generator = torch.Generator().manual_seed(0)
        self.batches = [torch.randint(0, 256, (sequences, 64), generator=generator) for _ in range(STEPS)]

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for i, batch in enumerate(self.batches):
            if i == FIRST:
                self.began = time.thread_time()
            yield {"input_ids": batch, "labels": batch}
        self.ended = time.thread_time()

    def __len__(self) -> int:
        return len(self.batches)


def fit(sequences: int, manager: CallbackManager, folder: Path) -> tuple[float, float]:
    """Microseconds a step; and of the whole run, without as much for each step: of the training thread's own time, since a machine that
    serves others as well makes more of a difference to the clock on the wall than all monitors do."""
    torch.manual_seed(0)
    data = Bytes(sequences)
    with Trainer(
        LlamaForCausalLM(LlamaConfig(**SHAPE)),
        train_dataloader=data,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        max_duration="1ep",
        device="cpu",
        callbacks=manager,
        run_name=f"run-{time.monotonic_ns()}",
        runs_folder=folder,
    ) as trainer:
        began = time.thread_time()
        trainer.fit()
        whole = time.thread_time() - began
    step = (data.ended - data.began) / (STEPS - FIRST)
    return step * 1e6, (whole - step * STEPS) * 1e6


def sized(folder: Path) -> int:
    """How many sequences make a step of about 10 ms here."""
    for sequences in range(1, 65):
        if fit(sequences, CallbackManager(), folder)[0] >= TARGET_SECONDS * 1e6 * 0.95:
            return sequences
    return 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--each", action="store_true", help="every monitor alone as well")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("callsheet").setLevel(logging.ERROR)

    def made(kinds: Iterable[Callable[[], Callback]], **options: Any) -> CallbackManager:
        return CallbackManager([kind() for kind in kinds], **options)

    with tempfile.TemporaryDirectory() as folder, redirect_stderr(StringIO()):
        runs = Path(folder)
        sequences = sized(runs)
        once: dict[str, list[float]] = {}
        handlers: dict[str, list[float]] = {}  # their share of the step, of every turn whose time was all taken

        def turn(name: str, make: Callable[[], CallbackManager]) -> float:
            manager = make()
            step, rest = fit(sequences, manager, runs)
            once.setdefault(name, []).append(rest)
            if name == ALL_TAKEN:
                shares = dict.fromkeys(MONITORS, 0.0)
                for cost in manager.cost_report(STEPS).costs:
                    if cost.event in PATH_EVENTS or cost.event == "on_log":
                        shares[cost.callback] += cost.seconds / STEPS * 1e6 / step
                for callback, share in {**shares, "(all)": sum(shares.values())}.items():
                    handlers.setdefault(callback, []).append(share)
            return step

        subjects: dict[str, Callable[[], CallbackManager]] = {
            "nobody": CallbackManager,
            "all monitors": lambda: made(MONITORS.values()),
            "all monitors, nobody's time taken": lambda: made(MONITORS.values(), costs="off"),
            ALL_TAKEN: lambda: made(MONITORS.values(), costs="all"),
        }
        if arguments.each:
            subjects |= {name: (lambda kind=kind: made([kind])) for name, kind in MONITORS.items()}  # type: ignore[misc]
        figures = in_turns({name: partial(turn, name, make) for name, make in subjects.items()}, arguments.turns)
    step = statistics.median(figures["nobody"])
    print(
        f"{machine()}; medians over {arguments.turns} turns of {STEPS} steps of {step / 1000:.1f} ms of the training thread's time\n"
    )
    print(f"All monitors: {', '.join(MONITORS)}.\n")
    print("| on the call sheet | µs a step over nobody | of the step | ms once a run |\n| --- | --- | --- | --- |")
    for name in subjects:
        if name != "nobody":
            added = difference(figures, name, "nobody")
            print(f"| {name} | {added:+.0f} | {added / step:+.2%} | {difference(once, name, 'nobody') / 1000:+.0f} |")
    print("\n| by the cost accounting of the runs whose time was all taken: handlers of | of the step |\n| --- | --- |")
    for name, shares in sorted(handlers.items(), key=lambda item: -statistics.median(item[1])):
        print(f"| {name} | {statistics.median(shares):.2%} |")
    print("\n| what taking the time adds to all monitors | µs a step | of the step |\n| --- | --- | --- |")
    for name in ("all monitors", ALL_TAKEN):
        added = difference(figures, name, "all monitors, nobody's time taken")
        print(f"| {'in windows, the default' if name == 'all monitors' else 'all of it'} | {added:+.0f} | {added / step:+.2%} |")


if __name__ == "__main__":
    main()
