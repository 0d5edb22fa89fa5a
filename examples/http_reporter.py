"""Your own reporter: post records and evaluations as JSON to an HTTP endpoint, from a background thread.

    python examples/http_reporter.py URL [FOLDER]
    torchrun --nproc_per_node 2 examples/http_reporter.py URL [FOLDER]

Training does not wait for the endpoint. If it is down or slow, reports are lost, but the run continues. Failures are counted, and appear in
the log and in the run's report.
"""

from __future__ import annotations

import json
import sys
from typing import Any
from urllib.request import Request, urlopen

from callsheet import Callback, Context
from callsheet.recipes import ByteFiles, LanguageModel, PretrainConfig, pretrain


class HTTPReporter(Callback):
    """Post every record, every evaluation and the outcome of the run."""

    phase = "report"  # after the callbacks that add to the record
    ranks = "zero"  # a record is the same on all ranks
    lane = "background"  # a thread and a queue of its own

    def __init__(self, url: str, *, timeout: float = 5.0) -> None:
        self.url = url
        self.timeout = timeout

    def on_log(self, ctx: Context) -> None:
        self._post({"event": "record", "run": ctx.run.name, "step": ctx.record.step, "metrics": ctx.record.values})

    def on_eval_all_end(self, ctx: Context) -> None:
        self._post({"event": "evaluation", "run": ctx.run.name, "step": ctx.step, "results": ctx.eval_results})

    def on_run_end(self, ctx: Context) -> None:
        self._post({"event": "end", "run": ctx.run.name, "step": ctx.step, "outcome": ctx.run.outcome})

    def _post(self, facts: dict[str, Any]) -> None:
        request = Request(self.url, json.dumps(facts).encode(), {"Content-Type": "application/json"})
        with urlopen(request, timeout=self.timeout):  # an exception here does not end the run
            pass


def main(url: str, folder: str = "runs") -> None:
    config = PretrainConfig(
        run_name="http-reporter",
        runs_folder=folder,
        max_duration="40ba",
        eval_interval="20ba",
        log_interval=10,
        batch_size=8,
        model=LanguageModel(hidden_size=32, layers=1, heads=2, intermediate_size=64),
        data=ByteFiles(sequence_length=64, validation_windows=32),
        prompts=[],
        threads=1,
    )
    print(pretrain(config, callbacks=HTTPReporter(url)).report())


if __name__ == "__main__":
    main(*sys.argv[1:])
