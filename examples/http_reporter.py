"""A reporter of one's own: records and evaluations as JSON to an HTTP endpoint, off the training thread.

    python examples/http_reporter.py URL [FOLDER]
    torchrun --nproc_per_node 2 examples/http_reporter.py URL [FOLDER]

Training does not wait for the endpoint. One that is down or slow costs records, never the run: what failed is counted, and is told in
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
    """Post every record, every evaluation and how the run ended."""

    phase = "report"  # after those who add to the record
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
        with urlopen(request, timeout=self.timeout):  # what it raises is this callback's failure, not the run's
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
