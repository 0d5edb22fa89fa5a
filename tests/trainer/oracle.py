"""The long version of `test_resume_on_ranks.py`: compares runs that are killed repeatedly with uninterrupted ones, bit by bit.

python -m trainer.oracle RESULT.md [--rounds N]
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

from .ranked_run import STEPS, Death, Setting, flip_a_bit, survives, undisturbed

SETTINGS = [
    Setting(workers=4, loader="stateful", in_background=True, pause=0.02),
    Setting(workers=4, pause=0.02),
    Setting("ddp", 2, workers=4, in_background=True, pause=0.02),
    Setting("fsdp", 2, workers=4, in_background=True, pause=0.02),
    Setting("fsdp", 4, shard_size=2, workers=4, in_background=True, pause=0.02),
    Setting("fsdp", 2),
]

HEAD = """# Runs that were killed and resumed

Made by `make oracle`. Every row is one run that was restarted after each kill with `resume="auto"`. The losses of every rank are compared
with those of an uninterrupted run. A run has {steps} steps, shuffled data with random augmentation, dropout, a scheduler, clipping and AdamW.
*In a save*: killed when a rank opened a shard for writing, in the background thread if there is one. *One bit*: after each kill one
bit of the newest sealed checkpoint was flipped.

| run | killed | how | one bit | losses |
| --- | --- | --- | --- | --- |
"""


def death(rng: random.Random, setting: Setting) -> Death:
    """Return a random way to kill the job."""
    rank = rng.choice([None, *range(setting.world_size)])
    kind = rng.choice(["moment", "save", "save", "signal"])
    if kind == "save":
        return Death(rank=rank, in_save=rng.randint(1, 4))
    if kind == "signal":
        return Death(rank=rank, signal=signal.SIGTERM, after=rng.uniform(0.1, 0.9))
    return Death(rank=rank, after=rng.uniform(0.1, 0.9))


def recorded(kind: Death) -> str:
    """Describe the death in the words of the table."""
    who = "all ranks" if kind.rank is None else f"rank {kind.rank}"
    name = signal.Signals(kind.signal).name
    return f"{who} in a save" if kind.in_save is not None else f"{who} by {name} after {kind.after:.1f} s"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result", type=Path)
    parser.add_argument("--rounds", type=int, default=5, help="runs of each kind")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    rng, rows, wrong = random.Random(given.seed), [], 0
    for setting in SETTINGS:
        with tempfile.TemporaryDirectory() as folder:
            good = undisturbed(Path(folder) / "undisturbed", setting)
            for number in range(given.rounds):
                began, flips = time.monotonic(), bool(number % 2)
                deaths = [death(rng, setting) for _ in range(rng.randint(2, 5))]
                survival = survives(Path(folder) / str(number), setting, deaths, between=flip_a_bit if flips else None)
                same = [found["losses"] == wanted["losses"] for found, wanted in zip(survival.values, good, strict=True)]
                wrong += not all(same)
                each = ", ".join(map(recorded, deaths[: survival.deaths])) or "did not"
                rows.append(
                    f"| {setting} | {survival.deaths} times | {each} | {'flipped' if flips else '-'} | "
                    f"{'the same bits' if all(same) else 'OTHERS'} |"
                )
                print(f"{rows[-1]} {time.monotonic() - began:.0f} s", flush=True)
    given.result.write_text(HEAD.format(steps=STEPS) + "\n".join(rows) + "\n")
    print(f"{len(rows)} runs, {wrong} with other losses; the table is in {given.result}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
