"""How long a new record takes to reach the page of `callsheet watch` with 21 runs, if one of them is running and if all are.

A server in a separate process reads the run folders. This process appends records, and polls the server every two seconds, as the
page does.

    python benchmarks/watching.py [--records 12]
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from callsheet.report.run_page import Live
from timing import machine

RUNS, RECORDS = 21, 2_000
METRICS = ["train/loss", "lr/Adam/0", *(f"{family}/{n}" for family in ("grad", "throughput") for n in range(4))]


def append(run: Path, steps: range) -> None:
    """Append a record for each step."""
    with open(run / "metrics.jsonl", "a") as file:
        for step in steps:
            values = {name: random.random() for name in METRICS} | {"time/token": step * 8192.0}
            line = {"step": step, "values": values, "elapsed_seconds": step * 0.5, "time": time.time()}
            file.write(json.dumps(line) + "\n")


def write_run(run: Path, seed: int, *, is_running: bool) -> None:
    """Write the folder of a run of 2,000 records, with evaluations and a timed step."""
    run.mkdir(parents=True)
    (run / "run.json").write_text("{}")
    (run / "hyperparameters.json").write_text(
        json.dumps({"lr": 0.001 * (seed % 7), "seed": seed, **{f"k{n}": n for n in range(40)}})
    )
    append(run, range(1, RECORDS + 1))
    events: list[dict[str, object]] = [{"event": "run_start", "run": run.name, "step": 0}]
    events += [
        {"event": "evaluation", "step": step, "results": {"validation": {"loss": 1 / step, "accuracy": 0.5}}}
        for step in range(100, RECORDS + 1, 100)
    ]
    if not is_running:
        events.append({"event": "run_end", "outcome": "finished", "step": RECORDS, "seconds": RECORDS * 0.5})
    (run / "events.jsonl").write_text("".join(json.dumps({"time": time.time(), **event}) + "\n" for event in events))
    step_of = [["train_step", 0.0, 0.1, 1, ""], ["forward", 0.0, 0.04, 1, ""], ["backward", 0.04, 0.06, 1, ""]]
    window = {"first_step": 1, "last_step": 1, "began": time.time(), "seconds": 0.1, "is_whole": True, "slices": step_of}
    (run / "timeline.jsonl").write_text(json.dumps(window) + "\n")


class Page:
    """A client that polls for new data, as the page does."""

    def __init__(self, url: str) -> None:
        self.place = urlsplit(url)
        self.version, self.size = "", 0
        answer, _ = self._get(f"/?{self.place.query}", {})
        self.cookie = str(answer.headers["Set-Cookie"]).partition(";")[0]

    def _get(self, path: str, headers: dict[str, str]) -> tuple[http.client.HTTPResponse, bytes]:
        connection = http.client.HTTPConnection(str(self.place.hostname), self.place.port, timeout=60)
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        return answer, body

    def poll(self) -> list[int]:
        """Return the last step of each run if there is new data, otherwise an empty list."""
        _, body = self._get(f"/data.json?since={self.version}", {"Cookie": self.cookie})
        if not body:
            return []
        found = json.loads(body)
        self.version, self.size = found["version"], len(body)
        return [run["steps"] for run in found["runs"]]


@contextmanager
def watching(folder: Path) -> Iterator[tuple[str, int]]:
    """Run `callsheet watch` on the runs of a folder. The value is its URL and its process id."""
    command = [sys.executable, "-m", "callsheet", "watch", str(folder / "*"), "--no-browser"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        (url,) = re.findall(r"http://\S+", server.stdout.readline())
        yield url, server.pid
    finally:
        server.kill()
        server.wait(60)


def cpu_seconds(process: int) -> float:
    """Return the processor time of a process, in user and in kernel mode."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(running: int, records: int) -> str:
    """Measure with this number of running runs, and return the row of the table."""
    with tempfile.TemporaryDirectory() as temporary:
        runs = [Path(temporary, "runs", f"run-{seed:02d}") for seed in range(RUNS)]
        for seed, run in enumerate(runs):
            write_run(run, seed, is_running=seed < running)
        with watching(runs[0].parent) as (url, process):
            page = Page(url)
            page.poll()
            time.sleep(15)  # until the server has read all runs for the first time
            waits, began, before = [], time.monotonic(), cpu_seconds(process)
            for step in range(RECORDS + 1, RECORDS + 1 + records):
                for run in runs[:running]:
                    append(run, range(step, step + 1))
                wrote = time.monotonic()
                time.sleep(random.random() * Live("").seconds)  # a record is written at a random time between two polls
                while step not in page.poll():
                    time.sleep(Live("").seconds)
                waits.append(time.monotonic() - wrote)
            share = (cpu_seconds(process) - before) / (time.monotonic() - began)
    return f"| {running} | {statistics.median(waits):.1f} | {max(waits):.1f} | {100 * share:.0f} % | {page.size / 1e6:.1f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=12)
    records = parser.parse_args().records
    print(
        f"{machine()}; {os.cpu_count()} cores; {RUNS} runs of {RECORDS:,} records with {len(METRICS)} metrics; {records} new records\n"
    )
    print(
        "| runs that write | seconds until the data has a record, median | longest | of a core, by the server | MB of data |\n| --- | --- | --- | --- | --- |"
    )
    for running in (1, RUNS):
        print(measure(running, records), flush=True)


if __name__ == "__main__":
    main()
