"""How long expensive work in a lane keeps other threads waiting, because it holds the interpreter lock.

The work is done on a thread of this process: rendering the HTML pages of a memory snapshot, as `MemorySnapshot` and `OOMObserver`
do in a process of their own, and encoding an image, as `JSONLLogger` does on a thread. Meanwhile, the main thread sleeps a
millisecond at a time. The longest time between two of its turns shows how long it had to wait. All times are processor time of
this process, so that other work on the machine does not change them much.

    python benchmarks/lane_work.py [--entries 100000] [--frames 10] [--side 2048]
"""

from __future__ import annotations

import argparse
import pickle
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy

from callsheet.callbacks.support.memory_pages import render_memory
from callsheet.loggers.support.pixels import png
from timing import machine


def snapshot(entries: int, frames: int) -> dict[str, Any]:
    """Return a snapshot in torch's format, in which every second entry frees what the entry before it has allocated."""
    trace = []
    for number in range(entries):
        allocation = number // 2
        stack = [
            {"filename": f"module_{depth}.py", "line": allocation % 500 + depth, "name": f"call_{depth}"}
            for depth in range(frames)
        ]
        action = "free_completed" if number % 2 else "alloc"
        trace.append({"action": action, "addr": 512 * allocation, "size": 512, "stream": 0, "frames": stack})
    segment = {"device": 0, "address": 0, "total_size": 512 * entries, "stream": 0, "blocks": []}
    return {"device_traces": [trace], "segments": [segment]}


def waited(work: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds that the work took on another thread, and the longest time between two turns of this thread."""
    thread = threading.Thread(target=work)
    longest, began = 0.0, time.process_time()
    thread.start()
    last = began
    while thread.is_alive():
        time.sleep(0.001)
        longest, last = max(longest, time.process_time() - last), time.process_time()
    return time.process_time() - began, longest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=100_000)
    parser.add_argument("--frames", type=int, default=10)
    parser.add_argument("--side", type=int, default=2048)
    given = parser.parse_args()
    image = numpy.random.default_rng(0).integers(0, 256, (given.side, given.side, 3), dtype=numpy.uint8)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "snapshot.pickle"
        path.write_bytes(pickle.dumps(snapshot(given.entries, given.frames)))
        works: dict[str, Callable[[], object]] = {
            f"the pages of a memory snapshot with {given.entries:,} entries of {given.frames} stack frames": lambda: (
                render_memory(path)
            ),
            f"a PNG file of {given.side} x {given.side} pixels": lambda: png(image),
        }
        print(
            f"{machine()}\n\n| work on a thread | seconds of processor time | longest wait of another thread, in the same unit |\n| --- | --- | --- |"
        )
        for name, work in works.items():
            took, longest = waited(work)
            print(f"| {name} | {took:.1f} | {longest:.3f} |", flush=True)


if __name__ == "__main__":
    main()
