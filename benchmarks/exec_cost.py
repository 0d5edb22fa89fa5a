"""What `callsheet exec` adds to each step of a training script, compared with `attach` and with the script alone.

    python benchmarks/exec_cost.py instructions
    python benchmarks/exec_cost.py seconds

`instructions` needs valgrind. It counts the instructions of forty steps, two metrics records among them: of the script alone, of the same loop with
`attach` and a JSONLLogger, and of the script under `callsheet exec` with an empty list of callbacks, to which it adds a JSONLLogger. Each is counted
several times, because the counts of one variant differ by up to a tenth of what callsheet adds; the table has the means and their standard errors.

`seconds` runs the script with steps of about ten milliseconds under `callsheet exec`, with the default observers, and with the log interval that
steps of this length have by default. The script switches the observation off and on again every forty steps: off means that the functions of torch and the hooks of the model and the
optimizer are as without callsheet. So both are measured in the same process; two processes with the same script differ by more than callsheet
adds. A figure is the mean over pairs of neighboring stretches, without their outer quarters, and its standard error. All steps count but the
first of each stretch, also those with a metrics record.

What the switch cannot show is measured in rounds of two processes: the script alone, and alone in a larger process, which has imported
callsheet's modules and has a second thread that only waits, as under `callsheet exec`. Both make the script slower by themselves: so does a list
of 60,000 small dicts, and so does a waiting thread without callsheet. A process that loads data with workers, or computes with several threads,
has more than one thread anyway.
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from callsheet.exec.log_pace import LogPace
from instructions import COUNTED, RECORD_EVERY, WARM, Count, check_valgrind
from timing import machine, middle_mean

STRETCH = 40  # steps
SCRIPT = f"""
import gc, json, os, resource, subprocess, sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

if os.environ.get("LARGER"):
    import threading
    import callsheet.exec.bare_loop, callsheet.exec.default_observers, callsheet.exec.observation
    threading.Thread(target=threading.Event().wait, daemon=True).start()

switches = os.environ.get("SWITCHES")
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
        elif not switches and self.seen >= steps // 3:
            self.clocks.append(clocks())
        return super().forward(inputs)


model = Net(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = TensorDataset(torch.randn(steps * batch, width), torch.randn(steps * batch, 1))
loader = DataLoader(data, batch_size=batch)


class Switch:  # switches the observation off and on, and measures each stretch without its first step
    def __init__(self):
        self.stretches, self.step, self.began, self.is_on = [], 0, None, True
        self.observed = {{place: getattr(*place) for place in sys.functions_of_torch}}
        self.hooks = []

    def between_steps(self):
        place = self.step % {STRETCH}
        if place == 0:
            if self.began is not None:
                self.stretches.append((self.is_on, [(b - a) / ({STRETCH} - 1) for a, b in zip(self.began, clocks())]))
            self.is_on = not self.is_on
            for (owner, name), function in (self.observed if self.is_on else sys.functions_of_torch).items():
                setattr(owner, name, function)
            if self.is_on:
                for owner, saved in self.hooks:
                    owner.update(saved)
            else:
                owners = [value for part in (model, optimizer) for name, value in vars(part).items() if name.endswith("_hooks")]
                owners.append(sys.modules["torch.optim.optimizer"]._global_optimizer_pre_hooks)
                self.hooks = [(owner, dict(owner)) for owner in owners]
                for owner in owners:
                    owner.clear()
        elif place == 1:
            self.began = clocks()
        self.step += 1


def train(batches):
    for inputs, targets in batches:
        if switch is not None:
            switch.between_steps()
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()


switch = None
if switches:
    train(loader)  # the loop is recognized
    switch = Switch()
    while len(switch.stretches) < int(switches):
        train(loader)
elif os.environ.get("ATTACH"):
    import callsheet
    from callsheet.loggers import JSONLLogger

    with callsheet.attach(
        model=model, optimizer=optimizer, log_interval="{RECORD_EVERY}ba", run_name="attached", runs_folder=os.environ["ATTACH"],
        loggers=[JSONLLogger()],
    ) as run:
        train(run.steps(loader))
else:
    train(loader)
if results and switches:
    with open(results, "w") as file:
        json.dump(switch.stretches, file)
elif results:
    each = [[b - a for a, b in zip(before, after)] for before, after in zip(model.clocks, model.clocks[1:])]
    with open(results, "w") as file:
        json.dump([sum(of_clock) / len(each) for of_clock in zip(*each)], file)
"""
"""The script. It counts its own steps from the forward of one to the forward of another, in the same way in all variants."""

STARTER = """
import sys
import torch
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

places = [(torch.Tensor, "backward"), (DataLoader, "__iter__"), (_BaseDataLoaderIter, "__next__"), (torch.amp.GradScaler, "step")]
places += [(torch.optim.Optimizer, "zero_grad"), (torch.nn.Module, "zero_grad"), (torch.nn.Module, "eval")]
sys.functions_of_torch = {place: getattr(*place) for place in places}

from callsheet.exec.command import main

main()
"""
"""Runs `callsheet exec` after it has kept the functions of torch for the script's switch."""

SMALL = {"WIDTH": "64", "BATCH": "16", "STEPS": str(WARM + COUNTED + 8)}
TEN_MILLISECONDS = {"WIDTH": "640", "BATCH": "104", "STEPS": "300"}
_KEPT = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 32)}
"""Lets glibc keep freed memory. Otherwise the script alone returns the gradients' memory to the system in each step and gets it anew, and any
other allocation, such as callsheet's, may end that and make the step a tenth faster."""

STRETCHES = 160  # of each observed process
CLOCKS = ("CPU time of the training thread", "CPU time of the process", "wall time")
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
    merged.pop("PYTHONDONTWRITEBYTECODE", None)  # compiling callsheet leaves other gaps in memory than reading its bytecode
    for each in settings:
        merged |= each
    return merged


def run(words: list[str], variables: dict[str, str]) -> None:
    done = subprocess.run(words, env=variables, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr[-2000:]}")


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
        if variant != ALONE and steps_observed(folder) < WARM + COUNTED:
            raise RuntimeError(f"{variant}: the counted steps were not observed")
        (path,) = (each for each in folder.glob("out*") if "Trigger: Client Request" in each.read_text())
        return Count.read(path)


def steps_observed(folder: Path) -> int:
    """Return the step of the run's last metrics record."""
    (records,) = folder.glob("runs/*/metrics.jsonl")
    step: int = json.loads(records.read_text().splitlines()[-1])["step"]
    return step


def result_of(variant: str, folder: Path, interval: int | None = None, **variables: str) -> Any:
    """Run the script with steps of about ten milliseconds, and return what it has measured."""
    words, more = command(variant, folder, interval)
    if "SWITCHES" in variables:
        starter = folder / "starter.py"
        starter.write_text(STARTER, encoding="utf-8")
        words = [str(starter), *words[2:]]  # instead of `-m callsheet.exec`
    results = folder / "results.json"
    run([sys.executable, *words], environment(TEN_MILLISECONDS, {"RESULTS": str(results)}, more, variables))
    return json.loads(results.read_text())


def seconds_of(variant: str) -> list[float]:
    """Return the seconds of a step of the variant, in the order of `CLOCKS`."""
    with tempfile.TemporaryDirectory() as name:
        seconds: list[float] = result_of(variant, Path(name))
        return seconds


def log_interval(step_seconds: float) -> int:
    """Return the number of steps between two metrics records that a script with such steps has by default.

    The script that switches the observation off must be given this number. In it, time also passes while no step is counted, so by
    itself `callsheet exec` would make records after fewer steps.
    """
    pace, seconds = LogPace(None), 0.0
    while True:
        seconds += pace.steps * step_seconds
        if not pace.adapt(seconds):
            return pace.steps


def added_by_observing(stretches: int, interval: int) -> tuple[list[list[float]], list[list[float]]]:
    """Return, for each of `CLOCKS`, what observing adds to a step in each stretch with it, compared with the stretches before and
    after, and the seconds of a step in the stretches without it."""
    with tempfile.TemporaryDirectory() as name:
        found = result_of(OBSERVED, Path(name), interval, SWITCHES=str(stretches))
        observed = steps_observed(Path(name))
    if observed < STRETCH * stretches / 2 - interval:
        raise RuntimeError(f"only {observed} steps of {stretches} stretches were observed")
    on = [each for is_on, each in found if is_on]
    off = [each for is_on, each in found if not is_on]
    clocks = range(len(CLOCKS))
    added = [[b[clock] - (a[clock] + c[clock]) / 2 for a, b, c in zip(off, on, off[1:], strict=False)] for clock in clocks]
    return added, [[each[clock] for each in off] for clock in clocks]


def print_instructions(counts: int) -> None:
    """Print what each variant adds to the script alone."""
    variants = (ALONE, ATTACHED, BARE)
    found: dict[str, list[Count]] = {variant: [] for variant in variants}
    with tempfile.TemporaryDirectory() as name:  # write the bytecode files
        words, variables = command(BARE, Path(name), RECORD_EVERY)
        run([sys.executable, *words], environment(SMALL, variables))
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # other work does not change the counts
        for at, (variant, count) in enumerate(zip(variants * counts, pool.map(count_of, variants * counts), strict=True)):
            found[variant].append(count)
            progress(at, counts * len(variants), "counts")
    floor = Count(*map(statistics.mean, zip(*found[ALONE], strict=True)))
    print(
        f"{machine()}; {COUNTED} steps, means of {counts} counts; a step of the script alone has {floor.instructions:,.0f} instructions in {floor.cycles:,.0f} cycles\n"
    )
    print("| variant | instructions added to a step | cycles added to a step |\n| --- | --- | --- |")
    for variant in (ATTACHED, BARE):
        cells = [
            f"{statistics.mean(values) - alone:,.0f} ± {statistics.stdev(values) / counts**0.5:,.0f}"
            for values, alone in zip(zip(*found[variant], strict=True), floor, strict=True)
        ]
        print(f"| {variant} | {' | '.join(cells)} |")


def print_seconds(processes: int, rounds: int) -> None:
    """Print what observing adds to a step, and what a larger process adds to a step of the script alone."""
    added: list[list[float]] = [[] for _ in CLOCKS]
    without: list[list[float]] = [[] for _ in CLOCKS]
    interval = log_interval(seconds_of(ALONE)[-1])
    for at in range(processes):
        for clock, (more, plain) in enumerate(zip(*added_by_observing(STRETCHES, interval), strict=True)):
            added[clock] += more
            without[clock] += plain
        progress(at, processes, "processes")
    print(
        f"{machine()}; {processes} processes with {STRETCHES} stretches of {STRETCH} steps each; a metrics record every {interval} steps\n"
    )
    print("| clock | a step that is not observed, ms | added by observing, ms | share of the step |\n| --- | --- | --- | --- |")
    for name, more, plain in zip(CLOCKS, added, without, strict=True):
        step = statistics.median(plain)
        mean, error = middle_mean(more)
        print(
            f"| {name} | {1e3 * step:.2f} | {1e3 * mean:.3f} ± {1e3 * error:.3f} | {mean / step:.2%} ± {error / step:.2%} |",
            flush=True,
        )
    found: dict[str, list[list[float]]] = {ALONE: [], LARGER: []}
    for at in range(rounds):
        for variant in (ALONE, LARGER)[:: -1 if at % 2 else 1]:
            found[variant].append(seconds_of(variant))
        progress(at, rounds, "rounds")
    print(
        f"\nThe script alone, in two processes, of which the larger has imported callsheet; {rounds} rounds; medians, and in brackets the 25th and 75th percentiles\n"
    )
    print("| clock | a step, ms | added by the larger process |\n| --- | --- | --- |")
    for place, name in enumerate(CLOCKS):
        alone, larger = ([each[place] for each in found[variant]] for variant in (ALONE, LARGER))
        low, middle, high = statistics.quantiles([b / a - 1 for a, b in zip(alone, larger, strict=True)], n=4)
        print(f"| {name} | {1e3 * statistics.median(alone):.2f} | {middle:.2%} ({low:.2%} to {high:.2%}) |")


def progress(at: int, total: int, what: str) -> None:
    if sys.stderr.isatty():
        print(f"\r{at + 1} of {total} {what} ", end="" if at + 1 < total else "\r", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("instructions", "seconds"))
    parser.add_argument("--counts", type=int, default=6, help="counts of each variant for `instructions`; two or more")
    parser.add_argument("--processes", type=int, default=8, help="observed processes for `seconds`")
    parser.add_argument("--rounds", type=int, default=10, help="rounds of the script alone for `seconds`; two or more")
    options = parser.parse_args()
    if options.what == "instructions":
        check_valgrind(parser)
        if options.counts < 2:
            parser.error("--counts must be 2 or more")
        print_instructions(options.counts)
    elif options.rounds < 2:
        parser.error("--rounds must be 2 or more")
    else:
        print_seconds(options.processes, options.rounds)


if __name__ == "__main__":
    main()
