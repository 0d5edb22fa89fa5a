"""Every benchmark in turn; what they print also goes to benchmarks/results/.

make bench
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
WITH_COMPOSER = ("guests",)  # in the venv that sees all of this one, and has Composer


def main() -> int:
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
        ("monitors", ["monitors.py"]),
        ("lanes", ["lanes.py"]),
        ("lane_loss", ["lane_loss.py"]),
        ("recipes", ["recipes.py"]),
        ("bridges", ["bridges.py", "--anew", "--raw", str(HERE / "results" / "bridges.jsonl")]),
        ("guests", ["guests.py"]),
        ("instructions", ["instructions.py", "hosts"]),
        ("guest-instructions", ["instructions.py", "guests"]),
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
