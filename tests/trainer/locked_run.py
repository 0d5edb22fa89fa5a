"""A script for the tests of the run lock: `locked_run.py FOLDER STEPS [option=value ...]` saves a checkpoint after every step.

Options: `heartbeat`, `stale` and `machine` of the lock; `timeout` is the run's `lock_timeout_seconds`. Prints its progress.
"""

from __future__ import annotations

import functools
import logging
import sys
import time

import torch

from callsheet import Callback, CallsheetError, Context, Trainer
from callsheet.callbacks import CheckpointSaver
from callsheet.loggers import JSONLLogger
from callsheet.run import lock_claims, run_lock


class PrintsSteps(Callback):
    """Prints a line on rank 0 after every step."""

    ranks = "zero"

    def on_train_step_end(self, ctx: Context) -> None:
        print(f"step {ctx.step}", flush=True)
        time.sleep(0.02)


def main(folder: str, steps: str, *words: str) -> int:
    options = dict(word.split("=") for word in words)
    logging.basicConfig(level=logging.INFO, format="log: %(message)s", stream=sys.stdout)
    run_lock.HEARTBEAT_SECONDS = float(options.get("heartbeat", 0.1))
    lock_claims.STALE_SECONDS = float(options.get("stale", 60))
    if "machine" in options:
        lock_claims.machine_id = functools.cache(lambda: options["machine"])
    torch.manual_seed(0)
    data = [(torch.randn(4, 2), torch.randn(4, 1)) for _ in range(1000)]
    try:
        with Trainer(
            torch.nn.Linear(2, 1),
            torch.nn.functional.mse_loss,
            data,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            max_duration=f"{steps}ba",
            callbacks=[CheckpointSaver(save_interval="1ba", keep=2), PrintsSteps()],
            loggers=[JSONLLogger()],
            run_name="x",
            runs_folder=folder,
            resume="auto",
            device="cpu",
            timeout_seconds=30,
            lock_timeout_seconds=float(options.get("timeout", 0)),
        ) as trainer:
            print(f"begins at {trainer.state.timestamp.batch}", flush=True)
            trainer.fit()
    except CallsheetError as error:
        print(f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ()), flush=True)
        return 1
    print("done", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
