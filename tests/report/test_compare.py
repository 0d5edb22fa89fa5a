"""Comparisons of real runs: selection of runs, differences, values with spread, and the gate."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from callsheet import Callback, Context, Trainer
from callsheet.callbacks import CheckpointSaver, EarlyStopper
from callsheet.cli.main import main
from callsheet.errors import ConfigError
from callsheet.loggers import JSONLLogger
from callsheet.report import RunFolder
from callsheet.report.compare.anatomy import anatomy_of
from callsheet.report.compare.comparison import Comparison
from callsheet.report.compare.gate import Condition, judge
from callsheet.report.compare.tables import format_tables
from callsheet.report.compare.values import Value, better, difference, values_of
from callsheet.report.notes import change_notes

RATES, SEEDS = (0.05, 0.2), (0, 1, 2)


class Slow(Callback):
    """Sleeps at each step."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_train_step_end(self, ctx: Context) -> None:
        time.sleep(self.seconds)


def train(folder: Path, name: str, rate: float, seed: int, *callbacks: Callback, **config: Any) -> None:
    torch.manual_seed(seed)
    inputs = torch.randn(64, 4)
    data = [(batch, batch.sum(1, keepdim=True)) for batch in inputs.split(4)]
    with Trainer(
        nn.Linear(4, 1), nn.functional.mse_loss, data, data[:4],
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=rate),
        max_duration="4ep", log_interval="2ba", seed=seed, callbacks=callbacks, loggers=[JSONLLogger()], run_name=name, runs_folder=folder,
        config={"optimizer": {"lr": rate}, "seed": seed, "run_name": name, **config}, progress=False,
    ) as trainer:  # fmt: skip
        trainer.fit()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for rate in RATES:
        for seed in SEEDS:
            train(folder, f"lr{rate}-{seed}", rate, seed)
    return folder


@pytest.fixture
def called(runs: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def call(*words: str) -> tuple[int, str, str]:
        status = main(["compare", "--folder", str(runs), *words])
        out, err = capsys.readouterr()
        return status, out, err

    return call


Call = Callable[..., tuple[int, str, str]]


def test_two_runs_are_compared_in_a_table(called: Call) -> None:
    status, out, _ = called("lr0.05-0", "lr0.2-0")
    assert status == 0
    assert re.search(r"optimizer.lr +0.05 +0.2\n", out)
    assert "run_name" not in out
    assert re.search(r"train/loss +lr0.05-0 +[\d.e-]+ ", out)
    assert re.search(r"step_seconds +lr0.2-0 .*(may be noise|more than noise), p = ", out)
    assert re.search(r"\n  train_step +[\d.]+, [\d.]+ % ", out)


def test_runs_that_differ_only_in_the_seed_are_one_group_with_a_spread(called: Call) -> None:
    status, out, _ = called("lr*", "--group-by", "seed", "--json")
    content = json.loads(out)
    assert status == 0
    assert content["baseline"] == "lr=0.05"
    rows = {(row["metric"], row["group"]): row for row in content["values"]}
    first, other = rows["validation/loss", "lr=0.05"], rows["validation/loss", "lr=0.2"]
    by_name = {run["name"]: run["values"]["validation/loss"]["last"] for run in content["runs"]}
    for row, rate in ((first, 0.05), (other, 0.2)):
        each = [by_name[f"lr{rate}-{seed}"] for seed in SEEDS]
        assert row["runs"] == 3
        assert row["mean"] == pytest.approx(sum(each) / 3)
        assert row["deviation"] == pytest.approx(torch.tensor(each, dtype=torch.float64).std().item())
    assert other["difference"] == pytest.approx(other["mean"] - first["mean"])
    assert other["spread_of"] == "seeds"
    assert 0 <= other["p"] <= 1


def test_runs_are_grouped_by_a_setting(called: Call) -> None:
    _, out, _ = called("lr*", "--group-by", "optimizer.lr", "--csv", "--metric", "train/loss")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert [(row["metric"], row["group"], row["runs"]) for row in rows] == [
        ("train/loss", "lr=0.05", "3"),
        ("train/loss", "lr=0.2", "3"),
    ]


def test_last_selects_the_newest_runs(called: Call) -> None:
    _, out, _ = called("--last", "2", "--json")
    assert [run["name"] for run in json.loads(out)["runs"]] == ["lr0.2-1", "lr0.2-2"]


def test_a_folder_selects_all_its_runs(runs: Path, called: Call) -> None:
    _, out, _ = called(str(runs), "--json")
    assert len(json.loads(out)["runs"]) == 6


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["lr0.05-0"], "a comparison needs two runs, and there is 1 run"),
        ([], "there is no run"),
        (["lr0.05-0", "lr0.05-7"], "there is no run 'lr0.05-7'"),
        (["x*", "y"], "no run matches 'x*'"),
        (["lr*", "--group-by", "optimizer.lrr"], "did you mean 'optimizer.lr'?"),
        (["lr*", "--metric", "train/los"], "did you mean 'train/loss'?"),
        (["lr*", "--fail-if", "train/loss"], "is not a condition; write a metric, >, >=, < or <="),
        (["lr*", "--fail-if", "train/los > 1"], "did you mean 'train/loss'?"),
        (["--last", "1"], "--last 1: a comparison needs two runs or more"),
    ],
)
def test_a_wrong_argument_is_reported_in_one_line(words: list[str], message: str, called: Call) -> None:
    status, out, err = called(*words)
    assert (status, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_a_comparison_can_be_written_as_markdown_and_latex(runs: Path, called: Call) -> None:
    _, markdown, _ = called("lr0.05-0", "lr0.2-0", "--markdown")
    assert "### Values\n\n| metric | run | value | best | against the first |\n| --- |" in markdown
    _, latex, _ = called("lr0.05-0", "lr0.2-0", "--latex")
    assert latex.count(r"\begin{tabular}") == latex.count(r"\end{tabular}") >= 4
    assert r"step\_seconds & " in latex


# --- the gate ---


def test_the_gate_passes_and_fails(called: Call) -> None:
    status, out, _ = called("lr*", "--group-by", "seed", "--fail-if", "best(validation/loss) > +1000%")
    assert status == 0
    assert re.fullmatch(r"ok: lr=0.2: best\(validation/loss\) [+-][\d.e+-]+ %, 95 % interval .* over the seeds; limit .*\n", out)
    status, out, _ = called("lr*", "--group-by", "seed", "--fail-if", "train/loss < +1e9", "--fail-if", "train/loss > +1e9")
    assert status == 1
    assert [line.partition(":")[0] for line in out.splitlines()] == ["FAIL", "ok"]


def test_a_slower_step_is_found_and_the_callback_named(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, seconds in (("before", 0.002), ("after", 0.06)):
        train(tmp_path, name, 0.05, 0, Slow(seconds))
    words = ["compare", str(tmp_path / "before"), str(tmp_path / "after")]
    assert main([*words, "--fail-if", "step_seconds > +50%"]) == 1
    assert capsys.readouterr().out.startswith("FAIL: after: step_seconds +")
    assert main([*words, "--fail-if", "step_seconds < -5%"]) == 0
    capsys.readouterr()
    main([*words, "--json"])
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["anatomy"]}
    assert rows["Slow"]["kind"] == "callback"
    assert rows["Slow"]["groups"]["after"]["seconds"] > rows["Slow"]["groups"]["before"]["seconds"]
    assert rows["Slow"]["groups"]["after"]["mark"] == rows["train_step"]["groups"]["after"]["mark"] == "slower"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("step_seconds > +5%", ("step_seconds", False, ">", 0.05, True)),
        ("validation/loss>0.01", ("validation/loss", False, ">", 0.01, False)),
        ("validation/loss >= .5", ("validation/loss", False, ">=", 0.5, False)),
        ("best(validation/accuracy) < -1e-2", ("validation/accuracy", True, "<", -0.01, False)),
        ("best(validation/accuracy)<=-.5%", ("validation/accuracy", True, "<=", -0.005, True)),
    ],
)
def test_a_condition_of_the_gate_is_parsed(text: str, expected: tuple[Any, ...]) -> None:
    found = Condition.parse(text)
    assert (found.metric, found.of_best, found.compare, found.limit, found.is_relative) == expected


def test_the_interval_and_p_are_those_of_welch() -> None:
    one, other = [27.5, 21.0, 19.0, 23.6, 17.0], [27.1, 22.0, 20.8, 29.4, 23.4, 30.5]
    found = difference([Value(each, each) for each in one], [Value(each, each) for each in other])
    from scipy.stats import ttest_ind  # takes a second, and each process of pytest-xdist imports this file

    expected = ttest_ind(other, one, equal_var=False)
    low, high = expected.confidence_interval(0.95)
    assert found.p == pytest.approx(expected.pvalue)
    assert (found.absolute - found.margin, found.absolute + found.margin) == pytest.approx((low, high))
    assert (found.is_noise, found.source) == (expected.pvalue >= 0.05, "seeds")


def test_one_run_on_a_side_has_no_spread() -> None:
    found = difference([Value(1.0, 1.0)], [Value(2.0, 2.0)])
    assert found.absolute == pytest.approx(1.0)
    assert (found.is_noise, found.source) == (None, "")
    assert math.isnan(found.margin)


def test_one_run_is_compared_with_several_by_their_spread() -> None:
    several = [2.0, 2.1, 1.9, 2.05]
    found = difference([Value(1.0, 1.0)], [Value(value, value) for value in several])
    assert (found.is_noise, found.source) == (False, "one side")
    from scipy.stats import ttest_ind

    pooled = ttest_ind(several, [1.0])  # with one value on a side, the pooled variance is that of the other side
    assert found.p == pytest.approx(pooled.pvalue)
    other = difference([Value(value, value) for value in several], [Value(2.1, 2.1)])
    assert (other.is_noise, other.source) == (True, "one side")


@pytest.mark.parametrize(
    ("metric", "lower"),
    [
        ("validation/loss", True),
        ("step_seconds", True),
        ("tokens_per_second", False),
        ("validation/accuracy", False),
        ("memory_bytes", True),
        ("validation/loss_per_second", False),
        ("eval/top1_acc", False),
        ("loss/train", True),
        ("accuracy/validation", False),
        ("l2_norm/grad/global", None),
        ("train/capacity", None),
        ("validation/answer_accuracy", False),
        ("validation/cancer_recall", False),
        ("tower_iou", False),
        ("error_free_accuracy", False),
        ("memory/accuracy", False),
        ("score_error", True),
        ("validation/valloss", True),
        ("validation/MeanSquaredError", True),
        ("validation/MulticlassF1Score", False),
        ("test/bce_loss2", True),
        ("wer", True),
    ],
)
def test_the_direction_in_which_a_metric_is_better(metric: str, lower: bool | None) -> None:
    assert better(metric) == {True: "lower", False: "higher", None: None}[lower]


# --- what differs ---


def test_differences_of_callbacks_and_code_are_found(tmp_path: Path) -> None:
    train(tmp_path, "plain", 0.05, 0)
    stopper = [{"class_path": "callsheet.callbacks.EarlyStopper", "init_args": {"patience": 3}}]
    train(tmp_path, "stopper", 0.05, 0, EarlyStopper(monitor="validation/loss", patience=3), callbacks=stopper)
    (tmp_path / "stopper" / "environment.json").write_text(
        json.dumps({"git": {"commit": "abc", "diff": "+x"}, "packages": {"torch": "9"}, "hardware": {"cpus": 64}})
    )
    found = Comparison([RunFolder.read(tmp_path / name) for name in ("plain", "stopper")]).differences
    assert found["callbacks"]["EarlyStopper"] == ["", "yes"]
    assert found["callbacks"]["EarlyStopper.patience"] == ["", "3"]
    assert found["code"]["commit"][1] == "abc"
    assert found["code"]["uncommitted changes"][1] == "+x"
    assert found["packages"]["torch"][1] == "9"
    assert found["hardware"]["cpus"][1] == "64"
    assert "settings" not in found


def test_hostile_names_do_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "=cmd|' x'"
    train(tmp_path, "plain", 0.05, 0)
    (tmp_path / "plain").rename(folder)
    lines = (folder / "metrics.jsonl").read_text().replace("train/loss", "\\u001b[31m$x & _y% {z} | <script>")
    (folder / "metrics.jsonl").write_text(lines)
    events = (folder / "events.jsonl").read_text().replace('"run": "plain"', '"run": "=cmd|\' x"')
    (folder / "events.jsonl").write_text(events)
    run = RunFolder.read(folder)
    comparison = Comparison([run, run])
    for form in ("text", "markdown", "latex"):
        text = format_tables(comparison, form)
        assert "\x1b" not in text
    assert "<script>" not in format_tables(comparison, "markdown")
    assert r"\$x \& \_y\% \{z\}" in format_tables(comparison, "latex")
    assert all(
        not cell.startswith(("=", "+", "@")) for row in csv.reader(io.StringIO(format_tables(comparison, "csv"))) for cell in row
    )


@pytest.mark.parametrize("name", ["empty", "torn"])
def test_an_empty_or_truncated_run_can_be_compared(name: str, tmp_path: Path, runs: Path) -> None:
    folder = tmp_path / name
    folder.mkdir()
    (folder / "metrics.jsonl").write_text('{"step": 1, "values": {"train/loss": "NaN"}}\n{"st' if name == "torn" else "")
    (folder / "environment.json").write_text('{"git": [], "packages": 3, "hardware": null, "command": "x"}')
    text = format_tables(Comparison([RunFolder.read(folder), RunFolder.read(runs / "lr0.05-0")]), "text")
    assert name in text
    assert "lr0.05-0" in text
    assert "Runs" in text


def test_values_of_returns_speed_memory_losses_and_training_time(runs: Path) -> None:
    values = values_of(RunFolder.read(runs / "lr0.05-0"))
    assert (values["step_seconds"].best or 0.0) > 0
    assert len(values["step_seconds"].samples) > 10
    assert (values["memory_bytes"].best or 0.0) > 1e7
    assert (values["train/loss"].best or math.inf) <= values["train/loss"].last
    assert values["train_seconds"].last > 0


def test_the_text_leaves_out_metrics_of_single_parameters(tmp_path: Path, called: Call) -> None:
    """CSV and JSON contain them, and `--metric` shows one."""
    for number, steps in ((1, 5), (2, 6)):
        folder = tmp_path / f"norms-{number}"
        folder.mkdir()
        command = "/usr/bin/python -m callsheet train a-recipe-with-a-long-name --seed 0 --run_name"
        (folder / "environment.json").write_text(json.dumps({"command": [*command.split(), f"norms-{number}"]}))
        values = {"train/loss": 1.0 * number, "l2/grad/layers.0.weight": 2.0, "l2/grad/layers.1.weight": 3.0}
        lines = [json.dumps({"step": step, "values": values}) for step in range(1, steps)]
        (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    both = [str(tmp_path / f"norms-{number}") for number in (1, 2)]
    _, text, _ = called(*both)
    assert "layers.0" not in text
    assert "Values; 2 of single parameters are left out: --metric NAME shows one, --csv and --json all" in text
    assert "Runs; their numbers of steps differ, so the last values are of different steps" in text
    assert re.search(r"\n  command +\.\.\.--run_name norms-1 +\.\.\.--run_name norms-2\n", text)
    assert "layers.0" in called(*both, "--metric", "l2/grad/layers.0.weight")[1]
    assert "layers.1" in called(*both, "--csv")[1]


def folder_of(tmp_path: Path, name: str, losses: Sequence[float], **environment: Any) -> str:
    """Write a run of a few records, and return its folder."""
    folder = tmp_path / name
    folder.mkdir()
    lines = [
        {"step": step, "elapsed_seconds": step / 10, "values": {"validation/loss": loss, "time/token": 100 * step**2}}
        for step, loss in enumerate(losses, 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    if environment:
        (folder / "environment.json").write_text(json.dumps(environment))
    return str(folder)


def test_with_a_format_the_gate_prints_its_result_on_standard_error(called: Call) -> None:
    """Standard output contains only the format, so that a program can read it."""
    status, out, err = called("lr0.05-0", "lr0.2-0", "--json", "--fail-if", "train/loss < -100%")
    assert (status, json.loads(out)["baseline"]) == (0, "lr0.05-0")
    assert err.startswith("ok: lr0.2-0: train/loss")
    status, out, err = called("lr0.05-0", "lr0.2-0", "--markdown", "--fail-if", "train/loss > -200%")
    assert (status, out.startswith("### Runs"), err.startswith("FAIL: ")) == (1, True, True)


def test_a_run_that_ends_in_nan_does_not_pass_the_gate(tmp_path: Path, called: Call) -> None:
    good = folder_of(tmp_path, "good", [3.0, 2.0, 1.0])
    bad = folder_of(tmp_path, "bad", [3.0, 1.0, math.nan])
    status, out, _ = called(good, bad, "--fail-if", "validation/loss > +0.01")
    assert (status, out.split(";")[0]) == (1, "FAIL: bad: validation/loss ended as NaN or infinity, and the baseline's did not")
    assert called(good, bad, "--fail-if", "best(validation/loss) > +0.01")[0] == 0
    never = folder_of(tmp_path, "never", [math.nan, math.inf, math.nan])
    for condition in ("validation/loss > +0.01", "best(validation/loss) > +0.01"):
        status, out, _ = called(good, never, "--fail-if", condition)
        assert (status, out.startswith("FAIL: never: ")) == (1, True)
    status, out, _ = called(good, never)
    assert "not finite" in out
    status, _, err = called(bad, good, "--fail-if", "validation/loss > +0.01")  # a baseline without a valid value
    assert (status, "of the baseline ended as NaN or infinity" in err) == (2, True)


def test_different_numbers_of_steps_are_noted(tmp_path: Path, called: Call) -> None:
    long, short = folder_of(tmp_path, "long", [3.0, 2.0, 1.0]), folder_of(tmp_path, "short", [3.0])
    _, out, _ = called(long, short, "--fail-if", "validation/loss > +9")
    assert "; after 1 steps, the baseline after 3" in out
    other = folder_of(tmp_path, "other", [3.0, 2.0, 1.0])
    assert "steps" not in called(long, other, "--fail-if", "validation/loss > +9")[1].splitlines()[0]


def test_with_metric_only_that_metric_is_shown(tmp_path: Path, called: Call) -> None:
    good, bad = folder_of(tmp_path, "good", [3.0, 2.0, 1.0]), folder_of(tmp_path, "bad", [3.0, 1.0, math.nan])
    assert called(good, bad, "--metric", "validation/loss")[1].startswith("Values\n")
    rows = list(csv.DictReader(called(good, bad, "--metric", "validation/loss", "--csv")[1].splitlines()))
    assert [row["mean"] for row in rows] == ["1.0", "nan"]


def timed(folder: Path, seconds: float, elapsed: list[float]) -> str:
    """Write a run with one timing window of three equal steps, and records every ten steps that are `elapsed` seconds apart."""
    path = Path(folder_of(folder, f"run-{seconds}", [1.0]))
    slices = [["train_step", 10 * step, seconds, step, ""] for step in range(1, 4)]
    window = {"first_step": 1, "last_step": 3, "began": 0.0, "seconds": 40.0, "slices": slices, "is_whole": True}
    (path / "timeline.jsonl").write_text(json.dumps(window) + "\n")
    ends = [sum(elapsed[:number]) for number in range(1, len(elapsed) + 1)]
    records = [{"step": 10 * number, "values": {"train/loss": 1.0}, "elapsed_seconds": end} for number, end in enumerate(ends, 1)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.mark.parametrize(("second", "marks"), [(2.0, ("slower", "slower")), (1.0, ("", "noise"))])
def test_one_slow_window_is_noise_if_the_whole_step_is_not_slower(
    second: float, marks: tuple[str, str], tmp_path: Path, called: Call
) -> None:
    """Load on the machine can slow all steps of one window."""
    spread = [0.0, 0.01, -0.01, 0.02, -0.02, 0.01, -0.01]
    one, other = timed(tmp_path, 0.1, [1.0 + each for each in spread]), timed(tmp_path, 0.2, [second + each for each in spread])
    rows = {row["name"]: list(row["groups"].values())[1] for row in json.loads(called(one, other, "--json")[1])["anatomy"]}
    assert (rows["step_seconds"]["mark"], rows["train_step"]["mark"]) == marks
    assert rows["step_seconds"]["share"] in (None, "NaN")
    assert rows["train_step"]["share"] == pytest.approx(1.0)


def test_the_last_value_of_a_run_that_ends_in_nan_is_shown_as_such(tmp_path: Path, called: Call) -> None:
    good = folder_of(tmp_path, "good", [3.0, 2.0, 1.0])
    bad = folder_of(tmp_path, "bad", [3.0, 1.0, math.nan])
    _, out, _ = called(good, bad, "--metric", "validation/loss")
    assert re.search(r"validation/loss +bad +not finite +1 at step 2\n", out), out
    values = values_of(RunFolder.read(bad))["validation/loss"]
    assert (math.isnan(values.last), values.best) == (True, 1.0)


class SleepsAtRecords(Callback):
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_log(self, ctx: Context) -> None:
        time.sleep(self.seconds)


def test_a_callback_outside_the_timed_steps_is_in_the_anatomy(tmp_path: Path, called: Call) -> None:
    """Its event is outside of a step, so only the time of the whole step contains it, not the step's spans."""
    for name, seconds in (("before", 0.001), ("after", 0.05)):
        train(tmp_path, name, 0.05, 0, SleepsAtRecords(seconds))
    _, out, _ = called(str(tmp_path / "before"), str(tmp_path / "after"), "--json")
    rows = {row["name"]: row["groups"]["after"] for row in json.loads(out)["anatomy"]}
    assert rows["SleepsAtRecords"]["mark"] == rows["step_seconds"]["mark"] == "slower"
    assert rows["SleepsAtRecords"]["seconds"] > 0.02  # a record every two steps
    wholes = [row["seconds"] / row["share"] for row in rows.values() if row and row["share"] not in (None, "NaN")]
    assert len(wholes) > 3
    assert wholes == pytest.approx([wholes[0]] * len(wholes))  # all shares have the same denominator


def test_credentials_are_not_compared(tmp_path: Path, called: Call) -> None:
    folders = []
    for number in "12":
        config = {
            "api_key": f"SECRET{number}",
            "nested": {"token": f"SECRET{number}"},
            "url": f"postgres://me:SECRET{number}@host/db",
        }
        train(tmp_path, f"run-{number}", 0.05, 0, **config)
        folders.append(tmp_path / f"run-{number}")
    (folders[1] / "config.yaml").write_text("callbacks: [{class_path: Mine, init_args: {api_key: SECRET3}}]\n")
    _, out, _ = called(*map(str, folders), "--json")
    assert "SECRET" not in out
    assert "SECRET" not in (folders[0] / "hyperparameters.json").read_text()


def test_the_best_of_a_metric_whose_name_does_not_show_which_is_better() -> None:
    values = {"l2_norm/grad/global": Value(1.0)}
    with pytest.raises(ConfigError, match="does not show whether lower or higher is better"):
        judge(Condition.parse("best(l2_norm/grad/global) > +1"), [values], [values], "other")
    assert not judge(Condition.parse("l2_norm/grad/global > +1"), [values], [values], "other").fails


def test_speed_is_that_between_two_records(tmp_path: Path) -> None:
    """A mean over a window of records would have too small a spread."""
    values = values_of(RunFolder.read(folder_of(tmp_path, "run", [1.0] * 4)))
    assert values["tokens_per_second"].samples == pytest.approx((5000.0, 7000.0))


def test_a_value_that_a_run_has_not_recorded_is_not_a_difference(tmp_path: Path) -> None:
    paths = [
        folder_of(tmp_path, "with", [1.0], packages={"torch": "2.13"}, git={"diff": "+" + "a" * 400}),
        folder_of(tmp_path, "without", [1.0]),
        folder_of(tmp_path, "other", [1.0], packages={"torch": "2.12"}, git={"diff": "+" + "a" * 399 + "b"}),
    ]
    runs = [RunFolder.read(path) for path in paths]
    assert Comparison(runs[:2]).differences == {}
    assert Comparison(runs).differences["packages"] == {"torch": ["2.13", "", "2.12"]}
    # They differ in the last of 401 characters.
    assert "uncommitted changes" in Comparison([runs[0], runs[2]]).differences["code"]


def test_runs_without_settings_are_not_grouped_by_seed(tmp_path: Path, called: Call) -> None:
    status, _, err = called(*(folder_of(tmp_path, name, [1.0]) for name in ("a", "b")), "--group-by", "seed")
    assert status == 2
    assert "--group-by seed: a, b have recorded no settings, so nothing shows whether they differ in seeds alone" in err


def test_the_durations_of_evaluations_and_saves_are_compared(tmp_path: Path) -> None:
    train(tmp_path, "run", 0.05, 0, CheckpointSaver(save_interval="1ep"))
    values = values_of(RunFolder.read(tmp_path / "run"))
    for name in ("eval_all_seconds", "checkpoint_save_seconds"):
        assert len(values[name].samples) > 1
        assert 0 < (values[name].best or 0.0) < 60


def test_one_slow_step_does_not_decide_the_anatomy(tmp_path: Path) -> None:
    folder = Path(folder_of(tmp_path, "run", [1.0]))
    slices = [["train_step", step, 10.0 if step == 2 else 0.1, step, ""] for step in range(1, 6)]
    window = {"first_step": 1, "last_step": 5, "began": 0.0, "seconds": 20.0, "slices": slices, "is_whole": True}
    (folder / "timeline.jsonl").write_text(json.dumps(window) + "\n")
    assert anatomy_of(RunFolder.read(folder)).parts["span", "train_step"].seconds == pytest.approx(0.1)


def test_a_page_that_cannot_be_written_is_named(tmp_path: Path, called: Call) -> None:
    (tmp_path / "file").touch()
    status, _, err = called("lr0.05-0", "lr0.2-0", "-o", str(tmp_path / "file" / "page.html"))
    assert status == 2
    assert "page.html cannot be written" in err
    status, _, err = called("lr0.05-0", "lr0.2-0", "-o", "/dev/null")
    assert status == 2
    assert "--out /dev/null is not a regular file" in err


def test_archived_runs_must_be_named(tmp_path: Path, called: Call) -> None:
    paths = [folder_of(tmp_path, name, [1.0]) for name in ("a-1", "a-2", "a-3")]
    change_notes(paths[2], is_archived=True)
    for words in ([str(tmp_path)], [str(tmp_path / "a-*")]):
        assert "a-3" not in called(*words)[1]
    assert "a-3" in called(*paths)[1]
    for path in paths:
        change_notes(path, is_archived=True)
    status, _, err = called(str(tmp_path / "a-*"))
    assert status == 2
    assert "are archived; name one, or run callsheet mark" in err


def test_the_fetch_of_a_batch_belongs_to_the_step_that_follows(tmp_path: Path) -> None:
    folder = Path(folder_of(tmp_path, "run", [1.0]))
    slices: list[list[Any]] = []
    for step in range(1, 5):  # while a batch is fetched, the run's step is the previous one
        slices += [["fetch", 2.0 * step, 0.5, step - 1, ""], ["on_fetch_end", 2.0 * step + 0.5, 0.1, step - 1, "Late"]]
        slices += [["train_step", 2.0 * step + 1, 0.2, step, ""]]
    window = {"first_step": 1, "last_step": 4, "began": 0.0, "seconds": 8.0, "slices": slices, "is_whole": True}
    (folder / "timeline.jsonl").write_text(json.dumps(window) + "\n")
    found = anatomy_of(RunFolder.read(folder))
    assert found.steps == 4
    assert found.parts["span", "fetch"].extremes == (0.5, 0.5)
    assert found.parts["span", "fetch"].step == pytest.approx(0.7)


@pytest.mark.parametrize(
    ("before", "after", "condition", "fails"),
    [
        (1.0, 1.05, "m > +5%", False),
        (0.3, 0.31, "m > +0.01", False),
        (0.8, 0.792, "m < -1%", False),
        (2.0, 2.01, "m >= +0.01", True),
        (1.0, 1.0500001, "m > +5%", True),
        (2.0, 2.0099999, "m >= +0.01", False),
    ],
)
def test_a_difference_that_equals_the_limit_is_not_beyond_it(before: float, after: float, condition: str, fails: bool) -> None:
    sides = ({"m": Value(each, each)} for each in (before, after))
    baseline, other = ([side] for side in sides)
    assert judge(Condition.parse(condition), baseline, other, "other").fails == fails


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ([math.inf, -math.inf], "not finite"),
        ([1e80, 3e80], "2e+80 ± 1.4142e+80 (2 runs)"),
        ([1e308, 1.5e308], "1.25e+308 ± "),
        ([1e-15, 2e-15], "1.5e-15 ± 7.0711e-16 (2 runs)"),
    ],
)
def test_groups_with_extreme_values_are_compared(values: list[float], shown: str, tmp_path: Path, called: Call) -> None:
    for seed, value in enumerate(values):
        for name in ("a", "b"):
            folder = folder_of(tmp_path, f"{name}{seed}", [value, value])
            Path(folder, "config.yaml").write_text(f"seed: {seed}\nkind: {name}\n")
    status, out, err = called(*(str(each) for each in sorted(tmp_path.iterdir())), "--group-by", "kind")
    assert (status, err) == (0, "")
    assert shown in out
