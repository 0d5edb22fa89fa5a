"""`callsheet evaluate`: compute a trained model's losses and metrics on every dataset that its recipe evaluates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from callsheet.cli.opened import name_of, open_run
from callsheet.cli.whole_file import write_whole
from callsheet.errors import CheckpointError, ConfigError
from callsheet.loggers.support.json_text import json_text

_FORMAT = "{:.6g}".format


def evaluate(run: str, overrides: Sequence[str], *, checkpoint: str | None = None, out: str | None = None) -> str:
    """Evaluate a run's model and return a table of the results. If `out` is given, also write the results there as JSON.

    Raises:
        ConfigError: there is no such run or checkpoint, or the run's recipe has no data to evaluate.
        CheckpointError: the checkpoint is invalid, or a callback cannot load its state from the checkpoint.
    """
    try:
        job = open_run(run, overrides, command="evaluate", checkpoint=checkpoint, with_changes=True)
    except CheckpointError as error:
        raise CheckpointError(
            f"{error} (if a callback does not fit: --callbacks '[]' evaluates the weights of the checkpoint without it)"
        ) from error
    with job.trainer as trainer:
        results = job.evaluate()
        step = trainer.state.timestamp.batch
    if not results:
        raise ConfigError(f"the recipe of {job.folder} evaluates nothing; name validation data in it")
    if out is not None and job.ranks.rank == 0:
        content = {"run": str(job.folder), "checkpoint": checkpoint, "step": step, "results": results}
        write_whole(Path(out), json_text(content, indent=1) + "\n")
    return f"{name_of(job)}:\n{table(results)}"


def table(results: Mapping[str, Mapping[str, float]]) -> str:
    """Return the results as a text table with a line for each dataset, and a column for each loss and metric."""
    metrics = list(dict.fromkeys(metric for scores in results.values() for metric in scores))
    rows = [["", *metrics]]
    for dataset, scores in results.items():
        rows.append([dataset, *(_FORMAT(scores[metric]) if metric in scores else "" for metric in metrics)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))] for row in rows
    ]
    return "\n".join("  ".join(line).rstrip() for line in lines)
