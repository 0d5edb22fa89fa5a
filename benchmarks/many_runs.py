"""Listing 1,000 runs and comparing 50 with callsheet's commands, compared with processes that only parse the same files.

A small run is trained once and copied. Each copy has other settings; in the comparison, each copy also has a longer history.
Times are the wall times of whole processes, the fastest of several turns. The targets are 1 s for a list from the index, and 10 s
and 10 MB for a comparison.

    python benchmarks/many_runs.py [--turns 5]
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

from callsheet import Trainer
from callsheet.callbacks import LRMonitor, SpeedMonitor
from callsheet.loggers import JSONLLogger
from timing import machine

LISTED, COMPARED, RECORDS = 1_000, 50, 2_000
PARSE = "import json, sys, pathlib\nfor path in pathlib.Path(sys.argv[1]).glob('*/*.jsonl'):\n  for line in open(path): json.loads(line)"


def train(folder: Path) -> Path:
    """Train a small run of 100 steps with a record for each step, and return its folder."""
    data = [(torch.randn(8, 4), torch.randn(8, 1)) for _ in range(20)]
    trainer = Trainer(
        nn.Linear(4, 1), nn.functional.mse_loss, data, data[:2], optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        max_duration="5ep", eval_interval="1ep", log_interval="1ba", device="cpu", runs_folder=folder, run_name="first", progress=False,
        loggers=[JSONLLogger()], callbacks=[SpeedMonitor(), LRMonitor()], config={"lr": 0.1, "seed": 0, "model": {"layers": 2}},
    )  # fmt: skip
    with trainer:
        trainer.fit()
    return folder / "first"


def copy_runs(first: Path, folder: Path, count: int, records: int) -> None:
    """Copy the run `count` times with other settings. If `records` is not 0, each copy has that many records with noise."""
    line = json.loads((first / "metrics.jsonl").read_text().splitlines()[50])
    for number in range(count):
        rng, to = random.Random(number), folder / f"run-{number:04}"
        shutil.copytree(first, to)
        settings = {"lr": rng.choice([0.1, 0.01, 0.001]), "seed": number % 5, "model": {"layers": rng.choice([2, 4])}}
        (to / "hyperparameters.json").write_text(json.dumps(settings))
        if records:
            with open(to / "metrics.jsonl", "w") as file:
                for step in range(1, records + 1):
                    values = {name: value * rng.uniform(0.9, 1.1) / math.sqrt(step) for name, value in line["values"].items()}
                    file.write(json.dumps({**line, "step": step, "elapsed_seconds": step / 10, "values": values}) + "\n")


def seconds(*command: str | Path) -> float:
    """Return the wall time of a process."""
    began = time.perf_counter()
    subprocess.run([sys.executable, *map(str, command)], check=True, capture_output=True)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    turns = parser.parse_args().turns
    with tempfile.TemporaryDirectory() as place:
        many, some, page = Path(place) / "many", Path(place) / "some", Path(place) / "page.html"
        first = train(Path(place))
        copy_runs(first, many, LISTED, 0)
        copy_runs(first, some, COMPARED, RECORDS)
        runs, index = ("-m", "callsheet", "runs", many), many / ".index.sqlite"

        def without_index() -> float:
            index.unlink(missing_ok=True)
            return seconds(*runs)

        found = {
            "parse": min(seconds("-c", PARSE, many) for _ in range(turns)),
            "without index": min(without_index() for _ in range(turns)),
            "again": min(seconds(*runs) for _ in range(turns)),
            "filtered": min(seconds(*runs, "--where", "lr = 0.01", "--sort", "lowest") for _ in range(turns)),
            "parse some": min(seconds("-c", PARSE, some) for _ in range(turns)),
            "tables": min(seconds("-m", "callsheet", "compare", some, "--group-by", "seed", "--json") for _ in range(turns)),
            "page": min(seconds("-m", "callsheet", "compare", some, "-o", page) for _ in range(turns)),
        }
        size = page.stat().st_size / 1e6
    print(
        f"{machine()}; the fastest of {turns} turns\n\n| | seconds | relative to parsing the files | target |\n| --- | --- | --- | --- |"
    )
    for what, key, floor, target in (
        (f"`callsheet runs`, {LISTED:,} runs, from the index", "again", "parse", "1 s"),
        ("the same with `--where` and `--sort`", "filtered", "parse", "1 s"),
        ("the same without an index", "without index", "parse", ""),
        (f"`callsheet compare --json`, {COMPARED} runs of {RECORDS:,} records", "tables", "parse some", "10 s"),
        (f"`callsheet compare -o`, the same runs; a page of {size:.1f} MB (target 10 MB)", "page", "parse some", "10 s"),
    ):
        print(f"| {what} | {found[key]:.2f} | {found[key] / found[floor]:.2f} x | {target} |")


if __name__ == "__main__":
    main()
