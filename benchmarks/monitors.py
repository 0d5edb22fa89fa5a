"""What all built-in monitors together add to a training step, and what timing the callbacks adds.

The step is that of a small Llama model on bytes, from forward to optimizer step. The target is that the monitors add at most 1 %.
This depends on the length of the step, and milliseconds depend on the machine. So the length of the step is chosen relative to
the bare loop of `benchmarks/trainer.py`: the step is at most as long as 28.6 steps of that loop, which is 10 ms if one of them
takes 350 µs.

Everything is measured within one run, because the load of the machine differs between runs. Every ten steps, which is the log
interval, the monitors are muted or unmuted, or timing is switched on or off. The time of each group of ten steps is compared with
that of its neighbors. Each group has one metrics record. The first step after each change is left out, and the mean of the
ordinary steps is used for it. The first groups, in which the FLOPs of a step are counted, are left out too.

With `--device cuda` the model is the decoder of `benchmarks/pretraining.py`, which needs no further package. The time of a step
is the time between two CUDA events, so that nothing waits for the device. Two further runs, without and with the monitors, and a
bare loop count the device synchronizations per step. Monitors whose packages are not installed are left out, and their names are
printed.

    python benchmarks/monitors.py [--stretches 300] [--device cuda]
"""

from __future__ import annotations

import argparse
import itertools
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import nullcontext, redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import trainer as peers
from callsheet import Callback, CallbackManager, Context, Trainer, callbacks
from callsheet.core.costs import PATH_EVENTS
from callsheet.core.lifecycle import EVENTS
from callsheet.errors import MissingPackage
from decoder import SHAPES, Decoder, RandomTokens, next_token_loss
from devices import Section, add_device, check_device
from timing import machine, winsorized_mean

STRETCH = 10  # the steps of a group between two changes of the state
SETTLING = 3  # the number of groups of each state that are left out at the beginning
TARGET = 10_000 / 350  # the most that a step may take, in steps of the bare loop
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
MONITORS = (
    "ActivationMonitor",
    "DiskSpaceGuard",
    "HangDetector",
    "Heartbeat",
    "History",
    "LRMonitor",
    "LossSpikeDetector",
    "MemoryMonitor",
    "NaNMonitor",
    "OOMObserver",
    "OptimizerMonitor",
    "RuntimeEstimator",
    "SaveOnTrigger",
    "SlowRankDetector",
    "SpeedMonitor",
    "SystemMetricsMonitor",
)
"""The built-in callbacks that watch a run and log."""
STATES = MUTED, UNMUTED, TIMED = "muted", "all monitors", "all monitors, timed"
STEP_EVENTS = [event for event in EVENTS if event in PATH_EVENTS or event == "on_log"]


class Bytes:
    """Random bytes. The number of sequences per batch sets the length of a step."""

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


Mark = float | torch.cuda.Event


class Switch(Callback):
    """Changes the state of the monitors every `STRETCH` steps, and measures the steps."""

    phase = "change"

    def __init__(self, monitors: list[Callback], states: Iterable[str], device: str) -> None:
        self.monitors = monitors
        self.manager: CallbackManager
        self._states = itertools.cycle(states)
        self._is_on_cuda = device == "cuda"
        self._marks: list[tuple[str, list[tuple[Mark, Mark]]]] = []
        self._began: Mark = 0.0

    @property
    def stretches(self) -> list[tuple[str, list[float]]]:
        """The state of each complete group of steps, and the microseconds of its steps except the first. The last has a record.

        On the CPU the time is that of the training thread, on CUDA that between two events on the device.
        """
        if self._is_on_cuda:
            torch.cuda.synchronize()
        return [
            (state, [_microseconds(*step) for step in steps]) for state, steps in self._marks[:-1]
        ]  # the last group is not complete

    def _mark(self) -> Mark:
        if not self._is_on_cuda:
            return time.thread_time()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def on_fetch_start(self, ctx: Context) -> None:
        now, step = self._mark(), ctx.step  # the number of completed steps
        if step % STRETCH != 1 and self._marks:
            self._marks[-1][1].append((self._began, now))
        self._began = now
        if step % STRETCH == 0:
            state = next(self._states)
            self._marks.append((state, []))
            self.manager.costs.mode = "all" if state == TIMED else "off"
            for registration in self.manager._table.registrations:
                if registration.thing in self.monitors:  # handlers that a monitor has muted by itself stay muted
                    registration.is_off = state == MUTED
            self.manager._table.recompile()

    def on_log(self, ctx: Context) -> None:
        """Do nothing. The handler makes the manager make records even if all monitors are muted."""


def _microseconds(began: Mark, ended: Mark) -> float:
    if isinstance(began, float) and isinstance(ended, float):
        return (ended - began) * 1e6
    milliseconds: float = began.elapsed_time(ended)  # type: ignore[union-attr, arg-type]  # both are events
    return milliseconds * 1e3


def monitors() -> list[Callback]:
    """Return all monitors whose packages are installed."""
    found: list[Callback] = []
    for name in MONITORS:
        try:
            found.append(getattr(callbacks, name)())
        except MissingPackage as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
    return found


def fit(
    shape: dict[str, Any],
    sequences: int,
    stretches: int,
    folder: Path,
    states: Iterable[str],
    watching: list[Callback],
    device: str,
    *,
    section: Section | None = None,
) -> Switch:
    """Train for the given number of groups of steps. `section` measures only `fit`."""
    torch.manual_seed(0)
    switch = Switch(watching, states, device)
    switch.manager = CallbackManager([switch, *watching], costs="off")
    steps = (stretches + 1) * STRETCH
    if device == "cuda":
        job: dict[str, Any] = {
            "model": Decoder(SHAPES[device]),
            "task": next_token_loss,
            "train_dataloader": RandomTokens(SHAPES[device], steps, device),
            "precision": "bf16",
        }
    else:
        from transformers import LlamaConfig, LlamaForCausalLM

        job = {"model": LlamaForCausalLM(LlamaConfig(**shape)), "train_dataloader": Bytes(sequences, steps)}
    with Trainer(
        **job,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        max_duration="1ep",
        log_interval=f"{STRETCH}ba",
        device=device,
        progress=False,
        callbacks=switch.manager,
        run_name=f"run-{time.monotonic_ns()}",
        runs_folder=folder,
    ) as trainer:
        with section or nullcontext():
            trainer.fit()
    return switch


def synchronizations(folder: Path, watching: list[Callback], device: str) -> dict[str, float]:
    """Return the device synchronizations per step of a bare loop, and of runs without and with the monitors."""
    stretches = 10
    steps, found = (stretches + 1) * STRETCH, {}
    model = Decoder(SHAPES[device]).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = RandomTokens(SHAPES[device], steps, device)
    with Section(device, counts=True) as section:
        for inputs, targets in batches:
            with torch.autocast(device, torch.bfloat16):
                loss = next_token_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    found["a bare loop"] = section.figure / steps
    for name, present in (("the Trainer, a record every ten steps", []), ("the same, with all monitors", watching)):
        section = Section(device, counts=True)
        fit({}, 0, stretches, folder, [UNMUTED], present, device, section=section)
        found[name] = section.figure / steps
    return found


def mean_step(stretch: list[float]) -> float:
    """Return the mean time of a step of the stretch. One step in ten has a record."""
    *ordinary, last = stretch
    return statistics.fmean(ordinary) * (1 - 1 / STRETCH) + last / STRETCH


def choose_size(folder: Path) -> tuple[dict[str, Any], int, float]:
    """Return the shape of the model and the sequences per batch of the longest step that is not above the target.

    The third value is the microseconds of a step of the bare loop.
    """
    bare = statistics.median(peers.bare() for _ in range(15))
    found = SHAPE | {"num_hidden_layers": 1}, 1
    for layers, sequences in ((2, 1), (2, 2), (4, 1), (4, 2), (4, 3), (4, 4), (4, 6), (4, 8)):
        shape = SHAPE | {"num_hidden_layers": layers}
        if (
            statistics.median(
                itertools.chain(*(took for _, took in fit(shape, sequences, 12, folder, [MUTED], monitors(), "cpu").stretches))
            )
            > TARGET * bare
        ):
            break
        found = shape, sequences
    return *found, bare


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--stretches", type=int, default=300, help="the number of groups of ten steps in each of the three states"
    )
    add_device(parser)
    arguments = parser.parse_args()
    device = arguments.device
    check_device(device)
    torch.set_num_threads(1)
    logging.getLogger("callsheet").setLevel(logging.ERROR)
    watching = monitors()
    waits: dict[str, float] = {}
    shape: dict[str, Any] = {}
    sequences, bare = 0, 0.0
    with tempfile.TemporaryDirectory() as folder, redirect_stderr(StringIO()):
        if device == "cpu":
            shape, sequences, bare = choose_size(Path(folder))
        switch = fit(shape, sequences, len(STATES) * (arguments.stretches + SETTLING), Path(folder), STATES, watching, device)
        if device == "cuda":
            waits = synchronizations(Path(folder), monitors(), device)
    stretches = switch.stretches
    took = [mean_step(stretch) for _, stretch in stretches[len(STATES) * SETTLING :]]
    rounds = [took[i : i + 3] for i in range(0, len(took) - 2, 3)]
    step = statistics.median(muted for muted, _, _ in rounds)
    all_steps = sum(state == TIMED for state, _ in stretches) * STRETCH
    shares = {type(monitor).__name__: 0.0 for monitor in watching}
    for cost in switch.manager.cost_report(1).costs:
        if cost.event in STEP_EVENTS and cost.callback in shares:
            shares[cost.callback] += cost.seconds / all_steps * 1e6 / step
    if device == "cuda":
        of_step = f"{step / 1000:.1f} ms between CUDA events ({SHAPES[device]}, bf16)"
    else:
        of_step = (
            f"{step / 1000:.1f} ms of the training thread, as long as {step / bare:.0f} steps of the bare loop "
            f"({shape['num_hidden_layers']} layers, {sequences} sequences)"
        )
    print(f"{machine(device)}; {arguments.stretches} groups of {STRETCH} steps in each state; a step of {of_step}\n")
    print(f"All monitors: {', '.join(shares)}.\n")
    print("| added | µs per step ± standard error | share of the step |\n| --- | --- | --- |")
    for name, differences in (
        ("all monitors", [unmuted - muted for muted, unmuted, _ in rounds]),
        ("timing all their handlers", [timed - unmuted for _, unmuted, timed in rounds]),
    ):
        added, error = winsorized_mean(differences)
        print(f"| {name} | {added:+.0f} ± {error:.0f} | {added / step:+.2%} ± {error / step:.2%} |")
    print("\n| handlers of (by the cost accounting) | share of the step |\n| --- | --- |")
    for name, share in sorted({**shares, "(all)": sum(shares.values())}.items(), key=lambda item: -item[1]):
        print(f"| {name} | {share:.2%} |")
    if waits:
        print("\n| loop | device synchronizations per step |\n| --- | --- |")
        for name, count in waits.items():
            print(f"| {name} | {count:.3f} |")


if __name__ == "__main__":
    main()
