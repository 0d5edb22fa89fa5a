from __future__ import annotations

import io
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from callsheet import Callback, Context, Trainer
from callsheet.errors import ConfigError
from callsheet.loggers import ConsoleLogger
from callsheet.testing import run_ranks

DATA = [(torch.ones(2, 2), torch.ones(2, 1))] * 4


class Acts(Callback):
    """Calls the given functions at the ends of steps."""

    def __init__(self, **acts: Any) -> None:
        self.acts = acts

    def on_train_step_end(self, ctx: Context) -> None:
        if act := self.acts.get(f"at_{ctx.step}"):
            act(ctx)


def fit(folder: Path, logger: ConsoleLogger, *callbacks: Callback, **options: Any) -> None:
    with Trainer(
        nn.Linear(2, 1),
        nn.functional.mse_loss,
        DATA,
        DATA[:1],
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        callbacks=callbacks,
        loggers=[logger],
        runs_folder=folder,
        device="cpu",
        **{"max_duration": "2ep", "log_interval": "1ba", "run_name": "run", **options},
    ) as trainer:
        trainer.fit()


def steps(lines: list[str]) -> list[int]:
    """Return the steps of the records in the printed lines."""
    return [int(found[1]) for line in lines if (found := re.match(r"epoch \d+  step (\d+)", line))]


def test_records_evaluations_and_the_outcome_are_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path, ConsoleLogger())
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert err == ""
    assert len(lines) == 8 + 2 + 1
    assert re.fullmatch(
        r"epoch 1  step 1  train/loss [\d.e-]+  train/learning_rate 0.01( +train/tokens_per_second [\d.e+]+)?  [\d,.]+ samples/s.*",
        lines[0],
    )
    assert re.fullmatch(r"evaluation at step 4: validation/loss [\d.e-]+", lines[4])
    assert re.fullmatch(r"run finished: epoch 2  step 8  0:00:0\d of training  \(reached max_duration, 2ep\)", lines[-1])
    assert steps(lines) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert "time/" not in out


def test_only_the_selected_metrics_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logger = ConsoleLogger(stream="stderr", metrics=["*/*rate", "odd/*"], leave_out=["odd/not"])
    fit(tmp_path, logger, Acts(at_1=lambda ctx: ctx.log({"odd/one": 1 / 3, "odd/not": 1.0}, across="same")))
    out, err = capsys.readouterr()
    assert out == ""
    first = err.splitlines()[0]
    assert "train/learning_rate 0.01" in first
    assert "odd/one 0.3333" in first
    assert "odd/not" not in err
    assert "train/loss" not in err


@pytest.mark.parametrize(("interval", "recorded"), [(3, [3, 6, 8]), ("1ep", [5, 8]), ("0.5dur", [5, 8]), ("100ba", [8])])
def test_records_are_printed_at_the_interval_and_at_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], interval: str | int, recorded: list[int]
) -> None:
    fit(tmp_path, ConsoleLogger(interval=interval))
    lines = capsys.readouterr().out.splitlines()
    assert steps(lines) == recorded
    assert sum(line.startswith("evaluation") for line in lines) == 2


def test_other_metrics_of_an_evaluation_are_printed_at_any_interval(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class LogsScore(Callback):
        def on_eval_end(self, ctx: Context) -> None:
            ctx.log({"judge/score": 0.25}, across="same")

    fit(tmp_path, ConsoleLogger(interval="100ba"), LogsScore())
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "judge" in line] == [
        f"epoch {epoch}  step {4 * epoch}  judge/score 0.25" for epoch in (1, 2)
    ]


def test_a_resume_continues_the_interval(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def leave(ctx: Context) -> None:
        ctx.control.save("asked for")
        ctx.control.stop("asked for")

    fit(tmp_path, ConsoleLogger(interval=3), Acts(at_5=leave))
    capsys.readouterr()
    fit(tmp_path, ConsoleLogger(interval=3), resume="auto")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"resumed from {tmp_path / 'run' / 'checkpoints' / 'ep1-ba5'}, step 5"
    assert steps(lines) == [6, 8]


def test_the_last_record_before_an_exception_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(ctx: Context) -> None:
        raise ValueError("a bad step")

    with pytest.raises(ValueError, match="a bad step"):
        fit(tmp_path, ConsoleLogger(interval=3), Acts(at_6=fail))
    lines = capsys.readouterr().out.splitlines()
    assert steps(lines) == [3, 5]
    assert lines[-1].startswith("run failed: epoch 2  step 6")


def test_tables_are_printed_without_control_characters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [["a\x1b[31mb\n", 1 / 3], ["x" * 200, None], *[["more", 0]] * 3]
    fit(tmp_path, ConsoleLogger(table_rows=2), Acts(at_2=lambda ctx: ctx.log_table("some/table", ["text", "score"], rows)))
    lines = capsys.readouterr().out.splitlines()
    start = lines.index("some/table at step 2:")
    assert lines[start + 1 : start + 5] == [
        f"  text{' ' * 56}  score",
        f"  a\\x1b[31mb\\n{' ' * 48}  0.3333",
        f"  {'x' * 57}...  None",
        "  ... and 3 more rows",
    ]


def test_tables_can_be_turned_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path, ConsoleLogger(table_rows=0), Acts(at_2=lambda ctx: ctx.log_table("some/table", ["text"], [])))
    assert "table" not in capsys.readouterr().out


def test_a_pipe_that_breaks_does_not_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError("no reader")

    class Ends(Callback):
        def on_run_end(self, ctx: Context) -> None:
            outcomes.append(ctx.run.outcome)

    outcomes: list[Any] = []
    monkeypatch.setattr(sys, "stdout", Broken())
    fit(tmp_path, ConsoleLogger(), Ends())
    assert outcomes == ["finished"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stream": "stdot"}, "did you mean 'stdout'"),
        ({"interval": 0}, "more than 0"),
        ({"metrics": "train/*"}, "give a list of patterns"),
        ({"table_rows": -1}, "table_rows=-1"),
    ],
)
def test_rejects_bad_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ConsoleLogger(**options)


def on_a_rank(folder: str) -> str:
    sys.stdout = kept = io.StringIO()
    fit(Path(folder), ConsoleLogger())
    sys.stdout = sys.__stdout__
    return kept.getvalue()


def test_only_one_of_two_ranks_prints(tmp_path: Path) -> None:
    first, second = run_ranks(on_a_rank, 2, str(tmp_path))
    assert "run finished" in first
    assert second == ""
