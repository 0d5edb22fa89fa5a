"""Run every benchmark, and write the output of each to benchmarks/results/.

make bench

With `--device cuda`: run only the benchmarks that support CUDA, and write to benchmarks/results/cuda/.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from devices import add_device, check_device

HERE = Path(__file__).resolve().parent
WITH_COMPOSER = ("guests",)  # benchmarks that run in the environment that also has Composer
ON_CUDA = ("trainer", "saving", "monitors", "pretraining")


def run_on_cuda() -> int:
    status = 0
    results = HERE / "results" / "cuda"
    results.mkdir(parents=True, exist_ok=True)
    for name in ON_CUDA:
        print(f"\n{name}", flush=True)
        command = [sys.executable, f"{name}.py", "--device", "cuda"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, cwd=HERE)
        print(done.stdout, end="", flush=True)
        if done.returncode == 0:
            (results / f"{name}.md").write_text(done.stdout)
        status = status or done.returncode
    return status


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_device(parser)
    arguments = parser.parse_args()
    check_device(arguments.device)
    if arguments.device == "cuda":
        return run_on_cuda()
    status = 0
    made = subprocess.check_output([sys.executable, HERE.parent / "tools" / "composer_venv.py"], text=True)
    with_composer = made.splitlines()[-1]
    (HERE / "results").mkdir(exist_ok=True)
    for name, command in (
        ("dispatch", ["dispatch.py"]),
        ("imports", ["imports.py"]),
        ("trainer", ["trainer.py"]),
        ("profile", ["trainer.py", "--profile"]),
        ("distributed", ["distributed.py"]),
        ("saving", ["saving.py", "--raw", str(HERE / "results" / "saving.jsonl")]),
        ("scale", ["scale.py"]),
        ("many-runs", ["many_runs.py"]),
        ("monitors", ["monitors.py"]),
        ("lanes", ["lanes.py"]),
        ("lane_loss", ["lane_loss.py"]),
        ("lane-work", ["lane_work.py"]),
        ("recipes", ["recipes.py"]),
        ("pretraining", ["pretraining.py"]),
        ("bridges", ["bridges.py", "--restart", "--raw", str(HERE / "results" / "bridges.jsonl")]),
        ("guests", ["guests.py"]),
        ("instructions", ["instructions.py", "hosts"]),
        ("bytecodes", ["instructions.py", "bytecodes"]),
        ("guest-instructions", ["instructions.py", "guests"]),
        ("exec-instructions", ["exec_cost.py", "instructions"]),
        ("exec-seconds", ["exec_cost.py", "seconds"]),
        ("shortcuts", ["shortcuts.py"]),
        ("watching", ["watching.py"]),
    ):
        print(f"\n{name}", flush=True)
        done = subprocess.run(
            [with_composer if name in WITH_COMPOSER else sys.executable, *command],
            stdout=subprocess.PIPE,
            text=True,
            check=False,
            cwd=HERE,
        )
        print(done.stdout, end="", flush=True)
        if done.returncode == 0:
            (HERE / "results" / f"{name}.md").write_text(done.stdout)
        status = status or done.returncode
    return status


if __name__ == "__main__":
    sys.exit(main())
