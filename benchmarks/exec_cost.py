"""What `callsheet exec` adds to each step of a training script, compared with `attach` and with the script alone.

    python benchmarks/exec_cost.py instructions
    python benchmarks/exec_cost.py seconds

`instructions` needs valgrind. It counts the instructions of forty steps, two metrics records among them: of the script alone, of the same loop with
`attach` and a JSONLLogger, and of the script under `callsheet exec` with an empty list of callbacks, to which it adds a JSONLLogger. Each is counted
three times, because the counts of one variant differ by up to a tenth of what callsheet adds; the table has their medians.

`seconds` runs the script with steps of about ten milliseconds, in turn alone, alone in a larger process, and under `callsheet exec` with the
default observers and the default log interval. Each round gives the differences between the CPU times of a step, on the thread that trains and
in all threads, and between the wall times. The median step is one without a metrics record; it varies less from run to run. The first third of
each run, with the imports and the recognition of the loop, is left out. The larger process has imported callsheet's modules and has a second
thread that only waits; it observes nothing. Both make the script slower by themselves: so does a list of 60,000 small dicts, and so does a
waiting thread without callsheet. A process that loads data with workers, or computes with several threads, has more than one thread anyway.
Instructions would say too much here: under valgrind the system's metrics, which are measured every five seconds, would be measured at each
record.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from instructions import COUNTED, RECORD_EVERY, WARM, Count, check_valgrind
from timing import machine

SCRIPT = f"""
import gc, json, os, resource, subprocess, sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

if os.environ.get("LARGER"):
    import threading
    import callsheet.exec.bare_loop, callsheet.exec.default_observers, callsheet.exec.observation
    threading.Thread(target=threading.Event().wait, daemon=True).start()

width, steps, batch = (int(os.environ[name]) for name in ("WIDTH", "STEPS", "BATCH"))
counts, results = os.environ.get("COUNTS"), os.environ.get("RESULTS")
torch.set_num_threads(1)
torch.manual_seed(0)


def clocks():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return [time.thread_time(), usage.ru_utime + usage.ru_stime, time.perf_counter()]


class Net(nn.Sequential):
    seen, clocks = 0, []

    def forward(self, inputs):
        self.seen += 1
        if counts:
            if self.seen == {WARM} // 2:
                gc.collect()
                gc.disable()
                subprocess.run(["callgrind_control", "-i", "on", str(os.getpid())], check=True, capture_output=True)
            elif self.seen == {WARM}:
                torch._C._valgrind_toggle()
            elif self.seen == {WARM + COUNTED}:
                torch._C._valgrind_toggle_and_dump_stats()
        elif self.seen >= steps // 3:
            self.clocks.append(clocks())
        return super().forward(inputs)


model = Net(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = TensorDataset(torch.randn(steps * batch, width), torch.randn(steps * batch, 1))
loader = DataLoader(data, batch_size=batch)


def train(batches):
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()


if os.environ.get("ATTACH"):
    import callsheet
    from callsheet.loggers import JSONLLogger

    with callsheet.attach(
        model=model, optimizer=optimizer, log_interval="{RECORD_EVERY}ba", run_name="attached", runs_folder=os.environ["ATTACH"],
        loggers=[JSONLLogger()],
    ) as run:
        train(run.steps(loader))
else:
    train(loader)
if results:
    each = [[b - a for a, b in zip(before, after)] for before, after in zip(model.clocks, model.clocks[1:])]
    taken = sorted(of_thread for of_thread, *_ in each)
    with open(results, "w") as file:
        json.dump([taken[len(taken) // 2], *(sum(of_clock) / len(each) for of_clock in zip(*each))], file)
"""
"""The script. It counts its own steps from the forward of one to the forward of another, in the same way in all variants."""

SMALL = {"WIDTH": "64", "BATCH": "16", "STEPS": str(WARM + COUNTED + 8)}
TEN_MILLISECONDS = {"WIDTH": "640", "BATCH": "192", "STEPS": "300"}
_KEPT = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 32)}
"""Lets glibc keep freed memory. Otherwise the script alone returns the gradients' memory to the system in each step and gets it anew, and any
other allocation, such as callsheet's, may end that and make the step a tenth faster."""

REPEATS = 3  # counts of each variant by valgrind
CLOCKS = (
    "median step, CPU time of the training thread",
    "mean step, CPU time of the training thread",
    "mean step, CPU time of the process",
    "mean step, wall time",
)
ALONE, LARGER, ATTACHED, BARE, OBSERVED = (
    "alone",
    "alone in a larger process",
    "`attach` with a JSONLLogger",
    "`callsheet exec` with a JSONLLogger",
    "`callsheet exec` with the default observers",
)


def command(variant: str, folder: Path, log_interval: int | None) -> tuple[list[str], dict[str, str]]:
    """Return the arguments of Python for a variant, and its environment variables."""
    script, none = folder / "train.py", folder / "none.yaml"
    script.write_text(SCRIPT, encoding="utf-8")
    none.write_text("[]\n", encoding="utf-8")
    if variant in (ALONE, LARGER, ATTACHED):
        return [str(script)], {ATTACHED: {"ATTACH": str(folder / "runs")}, LARGER: {"LARGER": "1"}}.get(variant, {})
    ours = ["-m", "callsheet.exec", "--runs_folder", str(folder / "runs")]
    interval = ["--log_interval", str(log_interval)] if log_interval is not None else []
    return [*ours, *interval, *(["--callbacks", str(none)] if variant == BARE else []), str(script)], {}


def environment(*settings: dict[str, str]) -> dict[str, str]:
    merged = {**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", **_KEPT}
    for each in settings:
        merged |= each
    return merged


def run(words: list[str], variables: dict[str, str]) -> None:
    done = subprocess.run(words, env=variables, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr[-2000:]}")


def instructions_of(variant: str) -> Count:
    """Return what a step of the variant takes: the medians of several counts."""
    counts = [count_of(variant) for _ in range(REPEATS)]
    return Count(*map(statistics.median, zip(*counts, strict=True)))


def count_of(variant: str) -> Count:
    """Return what a step of the variant takes, counted once by valgrind."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words, variables = command(variant, folder, RECORD_EVERY)
        valgrind = ["valgrind", "--tool=callgrind", "--instr-atstart=no", "--collect-atstart=no", "--cache-sim=yes"]
        run(
            [*valgrind, f"--callgrind-out-file={folder}/out", sys.executable, *words],
            environment(SMALL, {"COUNTS": "1"}, variables),
        )
        (path,) = (each for each in folder.glob("out*") if "Trigger: Client Request" in each.read_text())
        return Count.read(path)


def seconds_of(variant: str) -> list[float]:
    """Return the seconds of a step of the variant, in the order of `CLOCKS`."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words, variables = command(variant, folder, None)
        results = folder / "results.json"
        run([sys.executable, *words], environment(TEN_MILLISECONDS, {"RESULTS": str(results)}, variables))
        seconds: list[float] = json.loads(results.read_text())
        return seconds


def print_instructions() -> None:
    """Print what each variant adds to the script alone."""
    floor = instructions_of(ALONE)
    print(
        f"{machine()}; {COUNTED} steps, medians of {REPEATS} counts; a step of the script alone has {floor.instructions:,.0f} instructions in {floor.cycles:,.0f} cycles\n"
    )
    print("| variant | instructions added to a step | cycles added to a step |\n| --- | --- | --- |", flush=True)
    for variant in (ATTACHED, BARE):
        added = instructions_of(variant).over(floor)
        print(f"| {variant} | {added.instructions:,.0f} | {added.cycles:,.0f} |", flush=True)


def print_seconds(rounds: int) -> None:
    """Print what a larger process adds to a step of the script alone, and what observing it adds to that."""
    variants = (ALONE, LARGER, OBSERVED)
    found: dict[str, list[list[float]]] = {variant: [] for variant in variants}
    for at in range(rounds):
        for variant in variants[:: -1 if at % 2 else 1]:
            found[variant].append(seconds_of(variant))
        if sys.stderr.isatty():
            print(f"\r{at + 1} of {rounds} rounds ", end="" if at + 1 < rounds else "\r", file=sys.stderr, flush=True)
    print(f"{machine()}; {rounds} rounds; medians, and in brackets the middle half of the rounds\n")
    print("| clock | a step alone, ms | added by the larger process | added to that by observing, ms | share of the step |")
    print("| --- | --- | --- | --- | --- |")
    for place, clock in enumerate(CLOCKS):
        alone, larger, observed = ([each[place] for each in found[variant]] for variant in variants)
        process = statistics.median(b / a - 1 for a, b in zip(alone, larger, strict=True))
        added = statistics.median(b - a for a, b in zip(larger, observed, strict=True))
        low, middle, high = statistics.quantiles([b / a - 1 for a, b in zip(larger, observed, strict=True)], n=4)
        print(
            f"| {clock} | {1e3 * statistics.median(alone):.2f} | {process:.2%} | {1e3 * added:.3f} | {middle:.2%} ({low:.2%} to {high:.2%}) |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("instructions", "seconds"))
    parser.add_argument("--rounds", type=int, default=20, help="rounds of runs for `seconds`; two or more")
    options = parser.parse_args()
    if options.what == "instructions":
        check_valgrind(parser)
        print_instructions()
    elif options.rounds < 2:
        parser.error("--rounds must be 2 or more")
    else:
        print_seconds(options.rounds)


if __name__ == "__main__":
    main()
