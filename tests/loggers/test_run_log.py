from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from callsheet import Callback, ConfigError, Context, LogRecord, RunInfo, Trainer
from callsheet.loggers import RunLog, read_metrics

DATA = [(torch.ones(2, 2), torch.ones(2, 1))] * 3


class Acts(Callback):
    """Does something at a step's end."""

    def __init__(self, **acts: Any) -> None:
        self.acts = acts

    def on_train_step_end(self, ctx: Context) -> None:
        if act := self.acts.get(f"at_{ctx.step}"):
            act(ctx)


def save(ctx: Context) -> None:
    ctx.control.save("asked for")


def stop(ctx: Context) -> None:
    ctx.control.stop("asked for")


def fail(ctx: Context) -> None:
    raise ValueError("a bad step")


def fit(folder: Path, *callbacks: Callback, run_log: bool = True, **options: Any) -> None:
    options = {"max_duration": "3ep", "log_interval": "1ba", "run_name": "run", **options}
    torch.manual_seed(1)  # so that two runs begin alike
    with Trainer(
        nn.Linear(2, 1),
        nn.functional.mse_loss,
        DATA,
        DATA[:1],
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        callbacks=callbacks,
        loggers=[RunLog()] if run_log else [],
        runs_folder=folder,
        device="cpu",
        **options,
    ) as trainer:
        trainer.fit()


def curve(folder: Path) -> list[tuple[int, dict[str, float]]]:
    """What the records say that does not depend on the clock."""
    timed = {"train/tokens_per_second"}
    return [
        (record.step, {name: value for name, value in record.values.items() if name not in timed})
        for record in read_metrics(folder)
    ]


def lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a file, read as strictly as JSON asks."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def events(folder: Path) -> list[tuple[str, int]]:
    return [(line["event"], line["step"]) for line in lines(folder / "events.jsonl")]


# --- metrics ---


def test_every_record_is_a_line_that_reads_back(tmp_path: Path) -> None:
    kept: list[LogRecord] = []

    class Keep(Callback):
        phase = "report"

        def on_log(self, ctx: Context) -> None:
            kept.append(ctx.record)

    fit(tmp_path, Keep())
    assert len(kept) == 9 + 3  # each epoch is evaluated
    assert read_metrics(tmp_path / "run") == kept


def test_numbers_that_json_does_not_know_read_back(tmp_path: Path) -> None:
    def odd(ctx: Context) -> None:
        ctx.log({"odd/nan": math.nan, "odd/inf": math.inf, "odd/minus": -math.inf}, across="same")

    fit(tmp_path, Acts(at_2=odd), max_duration="1ep")
    assert lines(tmp_path / "run" / "metrics.jsonl")[1]["values"]["odd/inf"] == "Infinity"
    values = read_metrics(tmp_path / "run")[1].values
    assert math.isnan(values["odd/nan"])
    assert (values["odd/inf"], values["odd/minus"]) == (math.inf, -math.inf)


def test_a_line_is_there_as_soon_as_it_was_logged(tmp_path: Path) -> None:
    seen: list[int] = []
    fit(tmp_path, Acts(at_3=lambda ctx: seen.append(len(read_metrics(tmp_path / "run")))), max_duration="1ep")
    assert seen == [2]


# --- resuming ---


@pytest.mark.parametrize("step", [2, 3, 4, 6])
def test_the_curve_goes_on_without_doubles(tmp_path: Path, step: int) -> None:
    """Saved at a step, trained on, killed, resumed: the records are those of a run that was never killed."""
    fit(tmp_path, run_name="whole")
    with pytest.raises(ValueError, match="a bad step"):
        fit(tmp_path, Acts(**{f"at_{step}": save, "at_8": fail}))
    fit(tmp_path, resume="auto")
    assert curve(tmp_path / "run") == curve(tmp_path / "whole")
    resumed = [line for line in lines(tmp_path / "run" / "metrics.jsonl") if "resumed_from_step" in line]
    assert [line["resumed_from_step"] for line in resumed] == [step]


def test_several_resumes_of_which_one_leads_further_back(tmp_path: Path) -> None:
    fit(tmp_path, run_name="whole")
    with pytest.raises(ValueError, match="a bad step"):
        fit(tmp_path, Acts(at_2=save, at_5=save, at_8=fail))
    with pytest.raises(ValueError, match="a bad step"):
        fit(tmp_path, Acts(at_8=fail), resume="auto")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "ep1-ba5")
    fit(tmp_path, resume="auto")
    assert curve(tmp_path / "run") == curve(tmp_path / "whole")


def test_a_run_that_begins_again_for_want_of_a_checkpoint(tmp_path: Path) -> None:
    fit(tmp_path, run_name="whole")
    with pytest.raises(ValueError, match="a bad step"):
        fit(tmp_path, Acts(at_5=fail))
    fit(tmp_path, resume="auto")
    assert curve(tmp_path / "run") == curve(tmp_path / "whole")


def test_a_run_that_was_not_logged_before(tmp_path: Path) -> None:
    fit(tmp_path, Acts(at_4=save, at_5=stop), run_log=False)
    fit(tmp_path, Acts(at_8=stop), resume=tmp_path / "run" / "checkpoints" / "ep1-ba4")
    fit(tmp_path, resume=tmp_path / "run" / "checkpoints" / "ep1-ba4")  # which counts no lines: the steps have to do
    assert [step for step, _ in curve(tmp_path / "run")] == [5, 6, 6, 7, 8, 9, 9]


def test_a_fork_has_a_curve_of_its_own(tmp_path: Path) -> None:
    fit(tmp_path, Acts(at_4=save))
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    fit(tmp_path, run_name="fork", resume=tmp_path / "run" / "checkpoints" / "ep1-ba4")
    assert [step for step, _ in curve(tmp_path / "fork")] == [5, 6, 6, 7, 8, 9, 9]
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def test_a_torn_line_is_passed_by_and_mended(tmp_path: Path) -> None:
    fit(tmp_path, run_name="whole")
    with pytest.raises(ValueError, match="a bad step"):
        fit(tmp_path, Acts(at_4=save, at_8=fail))
    metrics = tmp_path / "run" / "metrics.jsonl"
    content = metrics.read_bytes()
    metrics.write_bytes(content[:-30])  # killed in the midst of writing
    assert len(read_metrics(tmp_path / "run")) == content.count(b"\n") - 1
    fit(tmp_path, resume="auto")
    assert curve(tmp_path / "run") == curve(tmp_path / "whole")


def test_lines_that_a_crash_lost_are_not_counted_on(tmp_path: Path) -> None:
    fit(tmp_path, Acts(at_5=save, at_6=stop))
    metrics = tmp_path / "run" / "metrics.jsonl"
    metrics.write_bytes(b"".join(metrics.read_bytes().splitlines(keepends=True)[:2]))  # the disk never saw the rest
    fit(tmp_path, Acts(at_7=save, at_8=stop), resume="auto")
    fit(tmp_path, resume="auto")
    assert [step for step, _ in curve(tmp_path / "run")] == [1, 2, 6, 6, 7, 8, 9, 9]


def test_a_folder_without_metrics_has_none(tmp_path: Path) -> None:
    assert read_metrics(tmp_path) == []


# --- events ---


def test_tells_what_happened(tmp_path: Path) -> None:
    fit(tmp_path, Acts(at_2=save), max_duration="1ep")
    assert events(tmp_path / "run") == [("run_start", 0), ("checkpoint", 2), ("evaluation", 3), ("run_end", 3)]
    start, checkpoint, evaluation, end = lines(tmp_path / "run" / "events.jsonl")
    assert start["resumed_from"] is None
    assert (checkpoint["checkpoint"]["kind"], Path(checkpoint["checkpoint"]["path"]).name) == ("requested", "ep0-ba2")
    assert evaluation["results"]["validation"].keys() == {"loss"}
    assert end["outcome"] == "finished"
    assert start["time"] <= checkpoint["time"] <= end["time"]


def test_tells_the_exception_and_the_resume(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a bad step"):
        fit(tmp_path, Acts(at_2=save, at_3=fail))
    fit(tmp_path, Acts(at_3=stop), resume="auto")
    told = lines(tmp_path / "run" / "events.jsonl")
    exception = next(line for line in told if line["event"] == "exception")
    assert (exception["type"], exception["message"], exception["span"]) == ("ValueError", "a bad step", "train_step")
    assert [line["outcome"] for line in told if line["event"] == "run_end"] == ["failed", "stopped"]
    assert Path([line for line in told if line["event"] == "run_start"][1]["resumed_from"]).name == "ep0-ba2"


def test_another_runs_folder_is_not_written_to(tmp_path: Path) -> None:
    fit(tmp_path)
    before = {path: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    with pytest.raises(ConfigError, match="holds a run already"):
        fit(tmp_path)
    assert {path: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before


def test_a_run_without_a_folder_is_told_so(tmp_path: Path) -> None:
    ctx = Context(RunInfo("run"))
    ctx.checkpoint = None
    with pytest.raises(ConfigError, match="no folder"):
        RunLog().on_checkpoint_load_end(ctx)


# --- settings and tables ---


def test_settings_are_gathered_in_one_file(tmp_path: Path) -> None:
    more = {"lr": 0.1, "path": Path("x"), "limit": math.inf, "nested": {"scale": torch.tensor([1.0, 2.0])}}
    fit(tmp_path, Acts(at_1=lambda ctx: ctx.log_hyperparameters(more)), config={"lr": 0.5, "depth": 2}, max_duration="1ep")
    assert json.loads((tmp_path / "run" / "hyperparameters.json").read_text()) == {
        "lr": 0.1,
        "depth": 2,
        "path": "x",
        "limit": "Infinity",
        "nested": {"scale": [1.0, 2.0]},
    }


def test_a_table_is_a_line_each_time(tmp_path: Path) -> None:
    def table(ctx: Context) -> None:
        ctx.log_table("eval/samples", ["prompt", "score"], [["höher?", 0.5], ["why?", math.nan]])
        ctx.log_table("../../outside", ["a"], [])

    fit(tmp_path, Acts(at_1=table, at_2=table), max_duration="1ep")
    first, second = lines(tmp_path / "run" / "tables" / "eval" / "samples.jsonl")
    assert (first["step"], second["step"]) == (1, 2)
    assert (first["columns"], first["rows"]) == (["prompt", "score"], [["höher?", 0.5], ["why?", "NaN"]])
    assert {path.name for path in tmp_path.iterdir()} == {"run"}
