"""The data of a comparison's page. The drawing is tested in a browser."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from callsheet.cli.main import main
from callsheet.report import RunFolder
from callsheet.report.compare.comparison import Comparison
from callsheet.report.compare.page import comparison_page, data, write_comparison
from callsheet.report.compare.tables import format_tables

from .compared_runs import STARTED, write_run, write_timeline
from .sample_run import HOSTILE


def compared(*folders: Path, group_by: str | None = None) -> Comparison:
    return Comparison([RunFolder.read(folder) for folder in folders], group_by=group_by)


def falling(steps: int, begin: float = 2.0) -> dict[int, float]:
    return {step: begin / step for step in range(1, steps + 1)}


def test_each_metric_is_a_chart_with_a_curve_of_each_run(tmp_path: Path) -> None:
    one, other = write_run(tmp_path, "one", falling(20), more={"grad/norm": 1.5}), write_run(tmp_path, "other", falling(10, 3.0))
    found = data(compared(one, other))
    titles = [chart["title"] for family in found["families"] for chart in family["charts"]]
    assert titles == ["train/loss", "grad/norm"]
    assert [curve["run"] for curve in found["curves"]["train/loss"]] == [0, 1]
    assert [curve["run"] for curve in found["curves"]["grad/norm"]] == [0]
    first = found["curves"]["train/loss"][0]
    assert first["x"] == list(range(1, 21))
    assert first["y"] == pytest.approx([2 / step for step in range(1, 21)], rel=1e-5)


def test_the_axes_are_steps_tokens_samples_and_times(tmp_path: Path) -> None:
    run = write_run(tmp_path, "one", falling(4), seconds=2.0)
    bare = write_run(tmp_path, "bare", falling(4))
    lines = [json.loads(line) for line in (bare / "metrics.jsonl").read_text().splitlines()]
    (bare / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": line["step"], "values": {"train/loss": 1.0}}) + "\n" for line in lines)
    )
    axes = data(compared(run, bare))["axes"]
    assert axes[0] == {
        "step": [1, 2, 3, 4],
        "seconds": [2, 4, 6, 8],
        "tokens": [100, 200, 300, 400],
        "samples": [4, 8, 12, 16],
        "wall": [3, 6, 9, 12],
    }
    assert (axes[1]["tokens"], axes[1]["samples"], axes[1]["wall"]) == ([], [], [])


def test_the_data_have_only_the_requested_metrics(tmp_path: Path) -> None:
    runs = [write_run(tmp_path, name, falling(5), more={"grad/norm": 1.5}) for name in ("one", "other")]
    found = data(compared(*runs), ["grad/norm"])
    assert list(found["curves"]) == ["grad/norm"]
    assert {row["metric"] for row in found["values"]} == {"grad/norm"}


def test_groups_refer_to_runs_by_number(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path, f"{rate}-{seed}", falling(5, rate + seed), settings={"lr": rate, "seed": seed})
        for rate in (1, 2)
        for seed in (0, 1)
    ]
    found = data(compared(*runs, group_by="seed"))
    assert found["groups"] == ["lr=1", "lr=2"]
    assert [run["group"] for run in found["runs"]] == [0, 0, 1, 1]
    row = next(row for row in found["values"] if (row["metric"], row["group"]) == ("train/loss", 1))
    assert (row["mean"], row["runs"], row["difference"]) == pytest.approx((0.5, 2, 0.2))
    assert found["differences"]["settings"] == {"lr": ["1", "1", "2", "2"], "seed": ["0", "1", "0", "1"]}


def test_the_anatomy_marks_the_spans_that_became_slower(tmp_path: Path) -> None:
    runs = [write_run(tmp_path, name, falling(5)) for name in ("one", "other", "untimed")]
    write_timeline(runs[0], 4, forward=0.04, backward=0.06)
    write_timeline(runs[1], 4, forward=0.05, backward=0.0605)
    found = {row["name"]: row["cells"] for row in data(compared(*runs))["anatomy"]}
    assert found["forward"][0] == {"seconds": pytest.approx(0.04), "share": pytest.approx(0.4), "change": 0, "mark": ""}
    assert found["forward"][1]["change"] == pytest.approx(0.25)
    assert found["forward"][1]["mark"] == "slower"
    assert found["backward"][1]["mark"] == ""  # 0.8 % is too little
    assert found["train_step"][1]["mark"] == "slower"
    assert found["forward"][2] is None


def test_a_change_of_the_anatomy_may_be_noise(tmp_path: Path) -> None:
    """With one run on each side, the timed steps decide. With several runs, their spread decides."""
    runs = [
        write_run(tmp_path, name, falling(5), settings={"lr": lr, "seed": name}) for name, lr in zip("abcd", "1122", strict=True)
    ]
    for run, forward in zip(runs, (0.04, 0.05, 0.045, 0.055), strict=True):
        write_timeline(run, 4, forward=forward, backward=0.06)
    rows = {row["name"]: row["cells"] for row in compared(*runs).anatomy()}
    assert [cell["mark"] for cell in rows["forward"]] == ["", "slower", "slower", "slower"]
    rows = {row["name"]: row["cells"] for row in Comparison(list(map(RunFolder.read, runs)), group_by="lr").anatomy()}
    assert [cell["mark"] for cell in rows["forward"]] == ["", "noise"]
    write_timeline(runs[0], 2, forward=0.04, backward=0.06)
    write_timeline(runs[1], 2, forward=0.05, backward=0.06)
    comparison = compared(*runs[:2])
    assert comparison.timed_steps() == [2, 2]
    assert {row["name"]: row["cells"] for row in comparison.anatomy()}["forward"][1]["mark"] == "noise"
    text = format_tables(comparison, "text")
    assert re.search(r"\n  timed steps +2 +2\n", text)
    assert "50, 45.5 %, +25 %, may be noise" in text


def test_problems_are_in_text_and_json(tmp_path: Path) -> None:
    good, bad = write_run(tmp_path, "good", falling(10)), write_run(tmp_path, "bad", {**falling(10), 11: math.nan})
    comparison = compared(good, bad)
    (problem,) = [each for each in comparison.to_dict()["problems"] if each["level"] == "error"]
    assert list(problem["runs"]) == ["bad"]
    assert re.search(rf"\n  error +{re.escape(problem['title'])} +bad\n", f"{format_tables(comparison, 'text')}\n")


def test_the_data_have_problems_evaluations_and_checkpoints_of_each_run(tmp_path: Path) -> None:
    def events(loss: float) -> list[dict[str, Any]]:
        results = {"validation": {"loss": loss}}
        info = {
            "path": "checkpoints/ba5",
            "kind": "rolling",
            "size_bytes": 1000,
            "best_metric_key": "validation/loss",
            "val_losses": {"validation": loss},
        }
        return [
            {"event": "evaluation", "time": STARTED + 1, "step": 5, "results": results},
            {"event": "checkpoint", "time": STARTED + 2, "step": 5, "checkpoint": info},
        ]

    good = write_run(tmp_path, "good", falling(10), events=events(0.5))
    bad = write_run(tmp_path, "bad", {**falling(10), 11: math.nan}, events=events(0.75))
    found = data(compared(good, bad))
    assert found["evaluations"] == [{"name": "validation/loss", "better": "lower", "runs": [[0, [[5, 0.5]]], [1, [[5, 0.75]]]]}]
    first = found["checkpoints"][0]
    assert (first["count"], first["last_step"], first["best_step"], first["size"]) == (1, 5, 5, 1000)
    assert [info["name"] for info in first["latest"]] == ["ba5"]
    problem = next(problem for problem in found["problems"] if "not finite" in problem["title"])
    assert problem["level"] == "error"
    assert [run for run, _ in problem["runs"]] == [1]
    assert found["curves"]["train/loss"][1]["odd"] == 1


def test_the_data_have_tables_and_images_of_each_run(folder: Path) -> None:
    found = data(compared(folder, folder))
    assert [each["run"] for each in found["tables"]["generations"]] == [0, 1]
    steps = [entry["step"] for entry in found["tables"]["generations"][0]["entries"]]
    assert steps == sorted(steps)
    html = comparison_page(compared(folder, folder))
    pixels = embedded(html)["pixels"]
    assert len(pixels) == 24
    assert {file.partition("/")[0] for file in pixels} == {"0", "1"}


def embedded(html: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="page-data">(.*?)</script>', html, re.DOTALL)
    assert found is not None
    content: dict[str, Any] = json.loads(found.group(1))
    return content


def test_fifty_runs_with_many_metrics_fit_into_ten_megabytes(tmp_path: Path) -> None:
    more = {f"l2_norm/grad/layer.{number}": 1 / (number + 3) for number in range(60)}
    runs = [
        write_run(tmp_path, f"run-{number}", falling(300, number + 1), more=more, settings={"lr": number, "note": "x" * 250})
        for number in range(50)
    ]
    page = comparison_page(compared(*runs))
    assert len(page.encode()) < 10_000_000
    curves = embedded(page)["data"]["curves"]
    assert sum(len(curve["x"]) for each in curves.values() for curve in each) <= 150_000
    assert len(curves["train/loss"]) == 50
    assert min(len(curve["x"]) for curve in curves["train/loss"]) > 250


def test_metrics_that_do_not_fit_are_counted(tmp_path: Path) -> None:
    more = {f"m{number % 3}/{number}": 1.0 for number in range(5_000)}
    found = data(compared(*[write_run(tmp_path, name, falling(2), more=more) for name in ("one", "other")]))
    assert "train/loss" in found["curves"]
    assert found["metrics_left_out"] == 5_001 - len(found["curves"]) > 0
    assert found["values_left_out"] > 0
    assert {"train/loss", "train_seconds"} <= {row["metric"] for row in found["values"]}


def test_names_cannot_end_the_embedded_data(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path, name, falling(3), more={f"{HOSTILE}</script>": 1.0}, settings={HOSTILE: name})
        for name in ("one", "other")
    ]
    for run in runs:
        text = (run / "events.jsonl").read_text()
        (run / "run.json").unlink()  # so that the name is taken from the events
        (run / "events.jsonl").write_text(text.replace(f'"{run.name}"', json.dumps(f"{HOSTILE}{run.name}")))
    html = comparison_page(compared(*runs, group_by=HOSTILE))
    before, _, rest = html.partition("/**\n* plotly.js")
    assert "<img src=x" not in before + rest.partition("</script>")[2]
    assert embedded(html)["data"]["runs"][0]["name"] == f"{HOSTILE}one"


@pytest.mark.parametrize("words", [["one", "other"], ["--last", "2"], ["one", "other", "--group-by", "seed"]])
def test_the_command_writes_the_page_and_prints_its_path(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, name in enumerate(("one", "other")):
        write_run(tmp_path / "runs", name, falling(3), settings={"seed": number})
    out = tmp_path / "pages" / "compare.html"
    assert main(["compare", "--folder", str(tmp_path / "runs"), *words, "-o", str(out)]) == 0
    assert capsys.readouterr().out.strip() == str(out)
    assert [run["name"] for run in embedded(out.read_text())["data"]["runs"]] == ["one", "other"]


def test_the_gate_writes_the_page_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [write_run(tmp_path, name, falling(3, begin)) for name, begin in (("one", 1.0), ("other", 9.0))]
    out = tmp_path / "compare.html"
    words = ["compare", *map(str, runs), "--fail-if", "train/loss > +1", "--out", str(out)]
    assert main(words) == 1
    verdict, path = capsys.readouterr().out.splitlines()
    assert verdict.startswith("FAIL")
    assert path == str(out)
    assert out.exists()


def test_a_folder_as_output_file_is_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [write_run(tmp_path, name, falling(3)) for name in ("one", "other")]
    assert main(["compare", *map(str, runs), "-o", str(tmp_path)]) == 2
    assert "is a folder; give the name of a file in it" in capsys.readouterr().err


def test_empty_runs_make_a_page(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    path = write_comparison(compared(tmp_path / "one", tmp_path / "other"), tmp_path / "compare.html")
    assert embedded(path.read_text())["data"]["families"] == []
