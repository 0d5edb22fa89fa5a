from __future__ import annotations

import json
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image
from torch import nn

import callsheet
from callsheet import Callback, Context, MetricsRecord, RunInfo, Trainer
from callsheet.errors import ConfigError
from callsheet.loggers import JSONLLogger, read_metrics
from callsheet.testing import run_ranks

DATA = [(torch.ones(2, 2), torch.ones(2, 1))] * 3


class Acts(Callback):
    """Calls the given functions at the ends of steps."""

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


def fit(folder: Path, *callbacks: Callback, is_logged: bool = True, **options: Any) -> None:
    options = {"max_duration": "3ep", "log_interval": "1ba", "run_name": "run", **options}
    torch.manual_seed(1)  # so that two runs start with the same weights
    with Trainer(
        nn.Linear(2, 1),
        nn.functional.mse_loss,
        DATA,
        DATA[:1],
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        callbacks=callbacks,
        runs_folder=folder,
        device="cpu",
        **{"loggers": [JSONLLogger()] if is_logged else [], **options},
    ) as trainer:
        trainer.fit()


def curve(folder: Path) -> list[tuple[int, dict[str, float]]]:
    """Return the values of the records that do not depend on the clock."""
    timed = {"train/tokens_per_second"}
    return [
        (record.step, {name: value for name, value in record.values.items() if name not in timed})
        for record in read_metrics(folder)
    ]


def lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file, parsed as strict JSON."""

    def reject(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=reject) for line in path.read_text().splitlines()]


def events(folder: Path) -> list[tuple[str, int]]:
    return [(line["event"], line["step"]) for line in lines(folder / "events.jsonl")]


# --- metrics ---


def test_every_record_is_a_line_that_reads_back(tmp_path: Path) -> None:
    kept: list[MetricsRecord] = []

    class KeepsRecords(Callback):
        phase = "report"

        def on_log(self, ctx: Context) -> None:
            kept.append(ctx.record)

    fit(tmp_path, KeepsRecords())
    assert len(kept) == 9 + 3  # each epoch is evaluated
    assert read_metrics(tmp_path / "run") == kept


def test_numbers_that_are_not_finite_are_read_back(tmp_path: Path) -> None:
    def odd(ctx: Context) -> None:
        ctx.log({"odd/nan": math.nan, "odd/inf": math.inf, "odd/minus": -math.inf}, across="same")

    fit(tmp_path, Acts(at_2=odd), max_duration="1ep")
    assert lines(tmp_path / "run" / "metrics.jsonl")[1]["values"]["odd/inf"] == "Infinity"
    values = read_metrics(tmp_path / "run")[1].values
    assert math.isnan(values["odd/nan"])
    assert (values["odd/inf"], values["odd/minus"]) == (math.inf, -math.inf)


def test_everything_is_on_disk_at_an_evaluation_s_end_and_at_a_checkpoint(tmp_path: Path) -> None:
    seen: dict[str, tuple[int, list[str]]] = {}

    class Looks(Callback):
        phase = "restore"  # after the loggers

        def look(self, ctx: Context) -> None:
            seen[f"{ctx.event} {ctx.step}"] = len(read_metrics(tmp_path / "run")), [name for name, _ in events(tmp_path / "run")]

        on_eval_all_end = on_checkpoint_save_start = on_checkpoint_published = look
        on_train_step_end = on_exception = on_run_end = look

    with pytest.raises(ValueError, match="a bad step"):
        fit(tmp_path, Looks(), Acts(at_2=save, at_5=fail), loggers=[JSONLLogger(flush_seconds=3600)])
    assert seen["on_train_step_end 2"] == (0, ["run_start"])  # there is no write for every line
    assert seen["on_checkpoint_save_start 2"][0] == 2
    assert seen["on_checkpoint_published 2"] == (2, ["run_start", "checkpoint"])
    assert seen["on_train_step_end 4"][0] == 3
    assert seen["on_eval_all_end 3"] == (3, ["run_start", "checkpoint", "evaluation"])
    assert seen["on_exception 5"] == (5, ["run_start", "checkpoint", "evaluation", "exception"])
    assert seen["on_run_end 5"][1][-1] == "run_end"


def test_many_lines_are_written_with_few_system_calls(tmp_path: Path) -> None:
    counts = Path("/proc/self/io")
    if not counts.exists():
        pytest.skip("this system does not count a process's writes")

    class Counts(Callback):
        def __init__(self) -> None:
            self.found: list[int] = []

        def on_train_start(self, ctx: Context) -> None:
            self.found.append(int(re.findall(r"syscw: (\d+)", counts.read_text())[0]))

        on_train_end = on_train_start

    fewest = 1000
    for number in range(5):  # threads of earlier tests may write too
        count, folder = Counts(), tmp_path / str(number)
        fit(folder, count, max_duration="300ba", eval_interval=None, loggers=[JSONLLogger(flush_seconds=3600)])
        assert len(read_metrics(folder / "run")) == 300
        fewest = min(fewest, count.found[1] - count.found[0])
        if fewest < 100:
            break
    assert fewest < 100


KILLED = """
import os, sys, time, torch
from callsheet import Callback, Trainer
from callsheet.loggers import JSONLLogger

class PrintsTimes(Callback):
    "Says when each record was logged."
    phase = "restore"
    def on_log(self, ctx):
        os.write(1, f"{ctx.record.step} {time.time()}\\n".encode())
    def on_train_step_end(self, ctx):
        time.sleep(0.01)

with Trainer(
    torch.nn.Linear(2, 1), torch.nn.functional.mse_loss, [(torch.ones(2, 2), torch.ones(2, 1))] * 10, log_interval="1ba",
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01), loggers=JSONLLogger(), callbacks=PrintsTimes(),
    max_duration="1000000ba", runs_folder=sys.argv[1], run_name="run", device="cpu",
) as trainer:
    trainer.fit()
"""
LOST_SECONDS = 3.0  # half a second is documented; this allows for a busy machine


@pytest.mark.slow
def test_a_killed_process_loses_only_the_last_moment(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(Path(callsheet.__file__).parents[1])}
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], env=env, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    recorded: list[tuple[int, float]] = []
    for line in process.stdout:
        step, moment = line.split()
        recorded.append((int(step), float(moment)))
        if recorded[-1][1] - recorded[0][1] > 2 * LOST_SECONDS:
            break
    killed_at = recorded[-1][1]
    process.kill()
    process.communicate()
    kept = [record.step for record in read_metrics(tmp_path / "run")]
    assert kept == list(range(1, len(kept) + 1))  # all lines from the first on
    assert all(moment > killed_at - LOST_SECONDS for step, moment in recorded if step > len(kept))
    assert len(kept) > 10
    assert [name for name, _ in events(tmp_path / "run")] == ["run_start"]


def test_lines_wait_until_the_disk_can_be_written_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "run"

    def break_disk(ctx: Context) -> None:
        (folder / "tables").write_text("a file where a folder should be")
        ctx.log_table("scores", ["score"], [[1]])

    def table(ctx: Context) -> None:
        ctx.log_table("scores", ["score"], [[ctx.step]])

    def hint(ctx: Context) -> None:
        (folder / "tables").unlink()

    acts = {f"at_{step}": table for step in (2, 3, 4, 5, 7)}
    fit(tmp_path, Acts(at_1=break_disk, at_6=hint, **acts), loggers=[JSONLLogger(flush_seconds=0.001)])
    assert [line["rows"] for line in lines(folder / "tables" / "scores.jsonl")] == [[[1]], [[2]], [[3]], [[4]], [[5]], [[7]]]
    assert len(read_metrics(folder)) == 9 + 3  # other files are complete
    recorded = [record.getMessage() for record in caplog.records if "JSONLLogger" in record.getMessage()]
    assert len(recorded) == 1  # one warning, and the logger is not disabled
    assert "tables" in recorded[0]


def test_lines_that_were_never_written_are_reported_at_the_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def break_disk(ctx: Context) -> None:
        (tmp_path / "run" / "tables").write_text("a file where a folder should be")
        ctx.log_table("scores", ["score"], [[1]])

    fit(tmp_path, Acts(at_1=break_disk))
    assert "the last lines of tables/scores.jsonl in" in caplog.text
    assert events(tmp_path / "run")[-1] == ("run_end", 9)


def test_no_thread_is_left(tmp_path: Path) -> None:
    before, seen = set(threading.enumerate()), set[threading.Thread]()
    fit(tmp_path, Acts(at_1=lambda ctx: seen.update(threading.enumerate())))
    assert seen - before
    for thread in seen - before:
        thread.join(10)  # the one that reads the environment may take longer on a busy machine than the run waits for it
    assert set(threading.enumerate()) <= before


# --- resuming ---


@pytest.mark.parametrize("step", [2, 3, 4, 6])
def test_the_curve_continues_without_duplicates(tmp_path: Path, step: int) -> None:
    """The run is saved, continues, is killed and resumed. Its records are those of an uninterrupted run."""
    fit(tmp_path, run_name="whole")
    with pytest.raises(ValueError, match="a bad step"):
        fit(tmp_path, Acts(**{f"at_{step}": save, "at_8": fail}))
    fit(tmp_path, resume="auto")
    assert curve(tmp_path / "run") == curve(tmp_path / "whole")
    resumed = [line for line in lines(tmp_path / "run" / "metrics.jsonl") if "resumed_from_step" in line]
    assert {line["resumed_from_step"] for line in resumed} == {step}


def test_the_curve_continues_after_several_resumes_also_from_an_earlier_checkpoint(tmp_path: Path) -> None:
    fit(tmp_path, run_name="whole")
    with pytest.raises(ValueError, match="a bad step"):
        fit(tmp_path, Acts(at_2=save, at_5=save, at_8=fail))
    with pytest.raises(ValueError, match="a bad step"):
        fit(tmp_path, Acts(at_8=fail), resume="auto")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "ep1-ba5")
    fit(tmp_path, resume="auto")
    assert curve(tmp_path / "run") == curve(tmp_path / "whole")


def test_a_run_that_restarts_without_a_checkpoint_has_no_duplicate_records(tmp_path: Path) -> None:
    fit(tmp_path, run_name="whole")
    with pytest.raises(ValueError, match="a bad step"):
        fit(tmp_path, Acts(at_5=fail))
    fit(tmp_path, resume="auto")
    assert curve(tmp_path / "run") == curve(tmp_path / "whole")


def test_a_resumed_run_that_was_not_logged_before_has_no_duplicate_records(tmp_path: Path) -> None:
    fit(tmp_path, Acts(at_4=save, at_5=stop), is_logged=False)
    fit(tmp_path, Acts(at_8=stop), resume=tmp_path / "run" / "checkpoints" / "ep1-ba4")
    fit(tmp_path, resume=tmp_path / "run" / "checkpoints" / "ep1-ba4")  # it has no line counts, so steps decide
    assert [step for step, _ in curve(tmp_path / "run")] == [5, 6, 6, 7, 8, 9, 9]


def test_the_curve_continues_if_checkpoints_are_elsewhere(tmp_path: Path) -> None:
    fit(tmp_path, run_name="whole")
    with pytest.raises(ValueError, match="a bad step"):
        fit(tmp_path, Acts(at_4=save, at_8=fail), checkpoints_folder=tmp_path / "elsewhere")
    fit(tmp_path, resume="auto", checkpoints_folder=tmp_path / "elsewhere")
    assert curve(tmp_path / "run") == curve(tmp_path / "whole")


def test_a_logger_of_a_resumed_run_starts_another_run_from_scratch(tmp_path: Path) -> None:
    logger = JSONLLogger()
    fit(tmp_path, Acts(at_4=save, at_5=stop), loggers=[logger])
    fit(tmp_path, Acts(at_6=stop), resume="auto", loggers=[logger])
    fit(tmp_path, Acts(at_4=save, at_5=stop), is_logged=False, run_name="other")
    fit(tmp_path, Acts(at_6=stop), run_name="other", resume="auto", loggers=[logger])
    fit(tmp_path, run_name="third", loggers=[logger])
    assert [step for step, _ in curve(tmp_path / "other")] == [5, 6, 6]
    assert len(curve(tmp_path / "third")) == 12


def test_a_fork_has_its_own_curve(tmp_path: Path) -> None:
    fit(tmp_path, Acts(at_4=save))
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    fit(tmp_path, run_name="fork", resume=tmp_path / "run" / "checkpoints" / "ep1-ba4")
    assert [step for step, _ in curve(tmp_path / "fork")] == [5, 6, 6, 7, 8, 9, 9]
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def test_an_incomplete_line_is_skipped_and_repaired(tmp_path: Path) -> None:
    fit(tmp_path, run_name="whole")
    with pytest.raises(ValueError, match="a bad step"):
        fit(tmp_path, Acts(at_4=save, at_8=fail))
    metrics = tmp_path / "run" / "metrics.jsonl"
    content = metrics.read_bytes()
    metrics.write_bytes(content[:-30])  # as if killed while writing
    assert len(read_metrics(tmp_path / "run")) == content.count(b"\n") - 1
    fit(tmp_path, resume="auto")
    assert curve(tmp_path / "run") == curve(tmp_path / "whole")


def test_lines_in_another_format_are_skipped(tmp_path: Path) -> None:
    fit(tmp_path)
    kept = read_metrics(tmp_path / "run")
    with open(tmp_path / "run" / "metrics.jsonl", "ab") as file:
        file.write(b'3\n[]\n{}\n{"step": 4}\n{"step": 4, "values": {"x": "y"}}\n{"resumed_from_step": 1}\n\0\0\0\n\xff\n\n')
    assert read_metrics(tmp_path / "run") == kept


def test_the_curve_continues_after_a_crash_that_lost_lines(tmp_path: Path) -> None:
    fit(tmp_path, Acts(at_5=save, at_6=stop))
    metrics = tmp_path / "run" / "metrics.jsonl"
    metrics.write_bytes(b"".join(metrics.read_bytes().splitlines(keepends=True)[:2]))  # the rest never reached the disk
    fit(tmp_path, Acts(at_7=save, at_8=stop), resume="auto")
    fit(tmp_path, resume="auto")
    assert [step for step, _ in curve(tmp_path / "run")] == [1, 2, 6, 6, 7, 8, 9, 9]


def test_a_folder_without_metrics_has_no_records(tmp_path: Path) -> None:
    assert read_metrics(tmp_path) == []


# --- events ---


def test_the_events_of_a_run_are_written_in_order(tmp_path: Path) -> None:
    fit(tmp_path, Acts(at_2=save), max_duration="1ep")
    assert events(tmp_path / "run") == [("run_start", 0), ("checkpoint", 2), ("evaluation", 3), ("run_end", 3)]
    start, checkpoint, evaluation, end = lines(tmp_path / "run" / "events.jsonl")
    assert start["resumed_from"] is None
    versions = {"callsheet": callsheet.__version__, "python": platform.python_version(), "torch": str(torch.__version__)}
    assert (start["versions"], start["pid"]) == (versions, os.getpid())
    assert start["host"]
    assert (checkpoint["checkpoint"]["kind"], Path(checkpoint["checkpoint"]["path"]).name) == ("requested", "ep0-ba2")
    assert evaluation["results"]["validation"].keys() == {"loss"}
    assert end["outcome"] == "finished"
    assert start["time"] <= checkpoint["time"] <= end["time"]


def test_writes_the_exception_and_the_resume(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a bad step"):
        fit(tmp_path, Acts(at_2=save, at_3=fail))
    fit(tmp_path, Acts(at_3=stop), resume="auto")
    recorded = lines(tmp_path / "run" / "events.jsonl")
    exception = next(line for line in recorded if line["event"] == "exception")
    assert (exception["type"], exception["message"], exception["span"]) == ("ValueError", "a bad step", "train_step")
    assert [line["outcome"] for line in recorded if line["event"] == "run_end"] == ["failed", "stopped"]
    assert Path([line for line in recorded if line["event"] == "run_start"][1]["resumed_from"]).name == "ep0-ba2"


def test_another_runs_folder_is_not_written_to(tmp_path: Path) -> None:
    fit(tmp_path)
    before = {path: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    with pytest.raises(ConfigError, match="already holds a run"):
        fit(tmp_path)
    assert {path: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before


def test_a_run_without_a_folder_is_an_error(tmp_path: Path) -> None:
    ctx = Context(RunInfo("run"))
    ctx.checkpoint = None
    with pytest.raises(ConfigError, match="no folder"):
        JSONLLogger().on_checkpoint_load_end(ctx)


# --- settings and tables ---


def test_settings_are_collected_in_one_file(tmp_path: Path) -> None:
    more = {"lr": 0.1, "path": Path("x"), "limit": math.inf, "nested": {"scale": torch.tensor([1.0, 2.0])}}
    fit(tmp_path, Acts(at_1=lambda ctx: ctx.log_hyperparameters(more)), config={"lr": 0.5, "depth": 2}, max_duration="1ep")
    assert json.loads((tmp_path / "run" / "hyperparameters.json").read_text()) == {
        "lr": 0.1,
        "depth": 2,
        "path": "x",
        "limit": "Infinity",
        "nested": {"scale": [1.0, 2.0]},
    }


def test_each_table_is_one_line(tmp_path: Path) -> None:
    def table(ctx: Context) -> None:
        ctx.log_table("eval/samples", ["prompt", "score"], [["höher?", 0.5], ["why?", math.nan]])
        ctx.log_table("../../outside", ["a"], [])

    fit(tmp_path, Acts(at_1=table, at_2=table), max_duration="1ep")
    first, second = lines(tmp_path / "run" / "tables" / "eval" / "samples.jsonl")
    assert first["name"] == "eval/samples"
    assert (first["step"], second["step"]) == (1, 2)
    assert (first["columns"], first["rows"]) == (["prompt", "score"], [["höher?", 0.5], ["why?", "NaN"]])
    assert {path.name for path in tmp_path.iterdir()} == {"run"}


def test_images_are_in_files_that_a_line_names(tmp_path: Path) -> None:
    black, white = torch.zeros(2, 3), torch.ones(3, 4, 5)

    def images(ctx: Context) -> None:
        ctx.log_images("eval/inputs", [black, white])
        ctx.log_images("eval/inputs", [white])
        ctx.log_images("../outside", [black])

    fit(tmp_path, Acts(at_1=images, at_2=images), max_duration="1ep")
    recorded = lines(tmp_path / "run" / "images.jsonl")
    assert [(line["step"], line["name"], len(line["files"])) for line in recorded[:3]] == [
        (1, "eval/inputs", 2),
        (1, "eval/inputs", 1),
        (1, "../outside", 1),
    ]
    files = [name for line in recorded for name in line["files"]]
    assert len(set(files)) == 8
    assert files[:3] == ["images/eval/inputs/1-0.png", "images/eval/inputs/1-1.png", "images/eval/inputs/1-2.png"]
    second = Image.open(tmp_path / "run" / recorded[0]["files"][1])
    assert numpy.array_equal(numpy.asarray(second), numpy.full((4, 5, 3), 255))
    assert {path.name for path in tmp_path.iterdir()} == {"run"}


def test_a_logged_file_is_written_as_an_event(tmp_path: Path) -> None:
    fit(tmp_path, Acts(at_1=lambda ctx: ctx.log_file("export", tmp_path / "model.onnx")), max_duration="1ep")
    line = next(line for line in lines(tmp_path / "run" / "events.jsonl") if line["event"] == "file")
    assert (line["name"], line["path"], line["step"]) == ("export", str(tmp_path / "model.onnx"), 1)


def test_costs_and_timeline_name_the_process(tmp_path: Path) -> None:
    fit(tmp_path, Acts(at_200=save, at_210=stop), max_duration="300ba", eval_interval=None)
    fit(tmp_path, max_duration="300ba", resume="auto", eval_interval=None)
    starts = [line["process"] for line in lines(tmp_path / "run" / "events.jsonl") if line["event"] == "run_start"]
    assert len(set(starts)) == 2
    costs = lines(tmp_path / "run" / "costs.jsonl")
    assert {line["process"]: line["steps"] for line in costs} == dict(zip(starts, (210, 100), strict=True))
    assert any(cost["callback"] == "JSONLLogger" and cost["calls"] >= 100 for cost in costs[-1]["costs"])
    timeline = lines(tmp_path / "run" / "timeline.jsonl")
    assert {line["process"] for line in timeline} <= set(starts)
    assert all(line["first_step"] <= line["last_step"] <= line["step"] for line in timeline)
    assert any(slice_[0] == "forward" for line in timeline for slice_ in line["slices"])


# --- several ---


def test_a_named_logger_writes_to_its_own_folder(tmp_path: Path) -> None:
    other = JSONLLogger()
    other.name = "../again"
    fit(tmp_path, loggers=[JSONLLogger(), other])
    assert read_metrics(tmp_path / "run" / "_" / "again") == read_metrics(tmp_path / "run") != []


def on_a_rank(folder: str) -> None:
    fit(Path(folder), Acts(at_2=save, at_5=stop))
    fit(Path(folder), resume="auto")


def test_only_one_of_two_ranks_writes(tmp_path: Path) -> None:
    run_ranks(on_a_rank, 2, str(tmp_path))
    assert [step for step, _ in curve(tmp_path / "run")] == sorted(step for step, _ in curve(tmp_path / "run"))
    steps = [record.step for record in read_metrics(tmp_path / "run") if "train/loss" in record.values]
    assert steps == list(range(1, steps[-1] + 1))
    assert [line["event"] for line in lines(tmp_path / "run" / "events.jsonl")].count("run_start") == 2


def test_a_second_end_writes_nothing(tmp_path: Path) -> None:
    logger = JSONLLogger()
    fit(tmp_path, loggers=[logger])
    before = (tmp_path / "run" / "events.jsonl").read_bytes()
    ctx = Context(RunInfo("run", tmp_path / "run"))
    logger.on_run_end(ctx)
    assert (tmp_path / "run" / "events.jsonl").read_bytes() == before


def test_rejects_bad_arguments() -> None:
    with pytest.raises(ConfigError, match="flush_seconds=0"):
        JSONLLogger(flush_seconds=0)


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_an_exception_that_cannot_be_printed_is_written_as_an_event(tmp_path: Path) -> None:
    def fails(ctx: Context) -> None:
        raise Unprintable

    with pytest.raises(Unprintable):
        fit(tmp_path, Acts(at_2=fails))
    (found,) = [line for line in lines(tmp_path / "run" / "events.jsonl") if line["event"] == "exception"]
    assert (found["type"], found["message"]) == ("Unprintable", "<no text: __str__ of Unprintable raised RuntimeError>")
