from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from callsheet import Callback, Context, MetricsRecord, RunInfo, Trainer
from callsheet.loggers import CSVLogger
from callsheet.testing import run_ranks

DATA = [(torch.ones(2, 2), torch.ones(2, 1))] * 3
TIMED = ("time", "elapsed_seconds", "samples_per_second", "tokens_per_second", "memory_bytes", "train/tokens_per_second")


class Acts(Callback):
    """Calls the given functions at the ends of steps."""

    def __init__(self, **acts: Any) -> None:
        self.acts = acts

    def on_train_step_end(self, ctx: Context) -> None:
        if act := self.acts.get(f"at_{ctx.step}"):
            act(ctx)


class KeepsRecords(Callback):
    phase = "report"

    def __init__(self) -> None:
        self.records: list[MetricsRecord] = []

    def on_log(self, ctx: Context) -> None:
        self.records.append(ctx.record)


def save(ctx: Context) -> None:
    ctx.control.save("asked for")


def stop(ctx: Context) -> None:
    ctx.control.stop("asked for")


def fail(ctx: Context) -> None:
    raise ValueError("a bad step")


def fit(folder: Path, *callbacks: Callback, logger: CSVLogger | None = None, **options: Any) -> None:
    torch.manual_seed(1)
    with Trainer(
        nn.Linear(2, 1),
        nn.functional.mse_loss,
        DATA,
        DATA[:1],
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        callbacks=callbacks,
        loggers=[logger or CSVLogger()],
        runs_folder=folder,
        device="cpu",
        **{"max_duration": "3ep", "log_interval": "1ba", "run_name": "run", **options},
    ) as trainer:
        trainer.fit()


def table(folder: Path) -> list[dict[str, str]]:
    with open(folder / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file, strict=True))


def curve(folder: Path) -> list[dict[str, str]]:
    """Return the columns that do not depend on the clock."""
    return [{name: cell for name, cell in row.items() if name not in TIMED} for row in table(folder)]


def test_every_record_is_a_row_that_reads_back(tmp_path: Path) -> None:
    keeps = KeepsRecords()
    fit(tmp_path, keeps)
    rows = table(tmp_path / "run")
    assert list(rows[0])[:3] == ["step", "time", "elapsed_seconds"]
    assert len(rows) == len(keeps.records) == 9 + 3
    for row, record in zip(rows, keeps.records, strict=True):
        assert (int(row["step"]), float(row["samples_per_second"])) == (record.step, record.samples_per_second)
        recorded = {name: float(cell) for name, cell in row.items() if cell and "/" in name}
        assert recorded == record.values


def test_a_metric_that_appears_later_makes_the_table_wider(tmp_path: Path) -> None:
    odd = {"odd/nan": math.nan, "odd/inf": -math.inf, 'odd/,\n"': 0.1, "step": 7.0}
    seen: list[bytes] = []
    path = tmp_path / "run" / "metrics.csv"
    look = Acts(at_2=lambda ctx: seen.append(path.read_bytes()), at_5=lambda ctx: ctx.log(odd, across="same"))
    fit(tmp_path, look)
    assert len(seen[0].splitlines()) == 2  # the first record is written immediately
    rows = table(tmp_path / "run")
    assert list(rows[0])[-4:] == [*list(odd)[:3], "metric/step"]
    fifth = next(row for row in rows if row["step"] == "5")
    assert [fifth[name] for name in ("odd/nan", "odd/inf", 'odd/,\n"', "metric/step")] == ["nan", "-inf", "0.1", "7.0"]
    assert all(row["odd/nan"] == "" for row in rows if row is not fifth)
    assert list(rows[0]).index("validation/loss") > list(rows[0]).index("train/loss")


@pytest.mark.parametrize("step", [2, 3, 4, 6])
def test_a_resume_drops_the_rows_after_its_checkpoint(tmp_path: Path, step: int) -> None:
    fit(tmp_path, run_name="whole")
    with pytest.raises(ValueError, match="a bad step"):
        fit(tmp_path, Acts(**{f"at_{step}": save, "at_8": fail}))
    with open(tmp_path / "run" / "metrics.csv", "a") as file:
        file.write("9,1.0,0.")  # an incomplete row
    fit(tmp_path, resume="auto")
    assert curve(tmp_path / "run") == curve(tmp_path / "whole")


def test_a_restarted_run_and_a_fork_each_have_all_their_rows(tmp_path: Path) -> None:
    logger = CSVLogger()
    with pytest.raises(ValueError, match="a bad step"):
        fit(tmp_path, Acts(at_5=fail), logger=logger)
    fit(tmp_path, Acts(at_4=save), resume="auto", logger=logger)
    assert [row["step"] for row in table(tmp_path / "run") if row["train/loss"]] == [str(step) for step in range(1, 10)]
    before = (tmp_path / "run" / "metrics.csv").read_bytes()
    fit(tmp_path, run_name="fork", resume=tmp_path / "run" / "checkpoints" / "ep1-ba4", logger=logger)
    assert [row["step"] for row in table(tmp_path / "fork") if row["train/loss"]] == [str(step) for step in range(5, 10)]
    assert (tmp_path / "run" / "metrics.csv").read_bytes() == before


def test_a_disk_that_fails_does_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "run" / "metrics.csv").mkdir(parents=True)
    fit(tmp_path)
    assert "CSVLogger" in caplog.text
    assert caplog.text.count("training continues") == 1


def in_a_small_disk(folder: str) -> None:
    import resource
    import signal

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    path = Path(folder) / "run" / "metrics.csv"

    def fill(ctx: Context) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, limits[1]))

    def free(ctx: Context) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    fit(Path(folder), Acts(at_3=fill, at_5=free), eval_interval=None)


def test_a_row_that_could_not_be_written_leaves_no_partial_row(tmp_path: Path) -> None:
    pytest.importorskip("resource")
    run_ranks(in_a_small_disk, 1, str(tmp_path))
    assert [row["step"] for row in table(tmp_path / "run")] == ["1", "2", "5", "6", "7", "8", "9"]


def test_a_named_logger_writes_to_its_own_folder_and_may_end_twice(tmp_path: Path) -> None:
    logger = CSVLogger()
    logger.name = "again"
    fit(tmp_path, logger=logger)
    assert len(table(tmp_path / "run" / "again")) == 12
    logger.on_run_end(Context(RunInfo("run")))


def on_a_rank(folder: str) -> None:
    fit(Path(folder), Acts(at_2=save, at_5=stop))
    fit(Path(folder), resume="auto")


def test_only_one_of_two_ranks_writes(tmp_path: Path) -> None:
    run_ranks(on_a_rank, 2, str(tmp_path))
    steps = [int(row["step"]) for row in table(tmp_path / "run") if row["train/loss"]]
    assert steps == list(range(1, steps[-1] + 1))
