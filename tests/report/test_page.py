"""The page as a file: complete, self-contained, and without executable content of a run. Drawing is tested in a browser."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from callsheet import Trainer
from callsheet.loggers import JSONLLogger
from callsheet.report import Live, RunFolder, data, page, write_report

from .sample_run import HOSTILE


@pytest.fixture(scope="module")
def html(folder: Path) -> str:
    return page(RunFolder.read(folder))


def embedded(html: str) -> dict[str, Any]:
    """Return the data that is embedded in the page."""
    found = re.search(r'<script type="application/json" id="page-data">(.*?)</script>', html, re.DOTALL)
    assert found is not None
    plain: dict[str, Any] = json.loads(found.group(1))
    return plain


def own(html: str) -> str:
    """Return the page without plotly's script."""
    before, _, rest = html.partition("/**\n* plotly.js")
    return before + rest.partition("</script>")[2]


def test_the_embedded_data_are_those_of_the_run(html: str, folder: Path) -> None:
    run = RunFolder.read(folder)
    curve = embedded(html)["data"]["curves"]["train/loss"]
    recorded = [(record.step, record.values["train/loss"]) for record in run.records if "train/loss" in record.values]
    assert curve["x"] == [step for step, _ in recorded]
    assert curve["y"] == pytest.approx([value for _, value in recorded], rel=1e-8)
    assert embedded(html)["data"]["run"]["outcome"] == "finished"
    assert {row["callback"]: row["of_step"] > 0.05 for row in embedded(html)["data"]["costs"]["rows"]}["Slow"]


@pytest.mark.parametrize(("steps", "epochs"), [(6, 3), (5, 2)])
def test_epochs_are_the_completed_ones(steps: int, epochs: int, tmp_path: Path) -> None:
    data = [(torch.ones(2, 2), torch.ones(2, 1))] * 2
    with Trainer(
        torch.nn.Linear(2, 1), torch.nn.functional.mse_loss, data, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        max_duration=f"{steps}ba", log_interval=1, loggers=[JSONLLogger()], run_name="run", runs_folder=tmp_path, device="cpu",
    ) as trainer:  # fmt: skip
        trainer.fit()
    assert embedded(page(RunFolder.read(tmp_path / "run")))["data"]["run"]["epochs"] == epochs


def test_the_results_of_a_recipe_are_in_the_page(html: str) -> None:
    rows = [["validation/loss", 0.25], [f"{HOSTILE}, bigram", None]]
    assert embedded(html)["data"]["results"] == {"step": 120, "unit": "nats", "rows": rows, "samples": ["it wrote this", HOSTILE]}


def test_images_are_in_the_page(html: str) -> None:
    pixels = embedded(html)["pixels"]
    assert len(pixels) == 12
    assert all(uri.startswith("data:image/png;base64,iVBOR") for uri in pixels.values())


def test_the_page_needs_no_network(html: str) -> None:
    page = own(html)
    assert not re.search(r"""(src|href|action|data|poster)\s*=\s*["']?\s*(https?:)?//""", page)
    assert not re.search(r"""url\(|@import|fetch\(["'`]http|XMLHttpRequest|sendBeacon|WebSocket""", page)
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None
    assert "default-src &#x27;none&#x27;" in policy.group(1)
    assert "connect-src &#x27;none&#x27;" in policy.group(1)
    assert "unsafe-eval" not in policy.group(1)
    assert not re.search(r"script-src[^;]*unsafe-inline", policy.group(1))


def test_texts_of_a_run_stay_text(html: str) -> None:
    assert html.count("<script") == 3  # the data, plotly, and the page's own script
    assert HOSTILE not in html
    assert f"hostile/{HOSTILE}" in embedded(html)["data"]["curves"]


def test_a_name_with_half_a_character_can_be_written(tmp_path: Path) -> None:
    run = RunFolder(tmp_path, "half \ud800 </title><script>", outcome="finished")
    text = page(run)
    text.encode()
    assert "<title>half ? &lt;/title&gt;&lt;script&gt; - callsheet</title>" in text


def test_a_live_page_may_ask_its_own_server_and_holds_no_images(folder: Path) -> None:
    html = page(RunFolder.read(folder), live=Live("the-token", nonce="abc", disabled_reason="it has ended"))
    assert embedded(html)["pixels"] == {}
    assert embedded(html)["live"] == {
        "token": "the-token",
        "poll": "data.json",
        "act": "act",
        "seconds": 2.0,
        "disabled_reason": "it has ended",
        "nonce": "abc",
    }
    assert html.count('<script nonce="abc">') == 2
    assert "connect-src &#x27;self&#x27;" in html


def test_data_is_plain_json(folder: Path) -> None:
    json.dumps(data(RunFolder.read(folder)), allow_nan=False)


# --- files ---


def test_the_report_is_written_beside_the_run(folder: Path, tmp_path: Path) -> None:
    written = write_report(folder, tmp_path / "new" / "report.html")
    assert written == tmp_path / "new" / "report.html"
    assert {path.name for path in written.parent.iterdir()} == {"report.html", "trace.json"}
    assert written.read_text(encoding="utf-8").startswith("<!doctype html>")
    other = write_report(folder, tmp_path / "new" / "run.html")
    assert other.with_name("run.trace.json").exists()
    assert json.loads(written.with_name("trace.json").read_text())["otherData"]["run"] == "sample"


def test_the_report_of_a_run_lies_in_its_folder(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "values": {"a/b": 1.0}}\n')
    assert write_report(tmp_path) == tmp_path / "report.html"
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl", "report.html", "trace.json"}
    first = (tmp_path / "report.html").stat().st_ino
    write_report(tmp_path)
    assert (tmp_path / "report.html").stat().st_ino != first  # it was replaced by another file


def test_without_a_folder_there_is_no_report(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_report(tmp_path / "nothing")
    assert list(tmp_path.iterdir()) == []


def test_without_plotly_the_error_has_a_hint(folder: Path) -> None:
    code = (
        "import sys; sys.modules['plotly'] = None\n"
        "from callsheet.report import RunFolder, page\n"
        f"page(RunFolder.read({str(folder)!r}))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "pip install 'callsheet[report]'" in ran.stderr.splitlines()[-1]


def test_reading_and_reporting_needs_no_torch(folder: Path) -> None:
    code = f"import sys; from callsheet.report import RunFolder, page; page(RunFolder.read({str(folder)!r})); print('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.stdout == "False\n", ran.stderr


def test_a_table_of_evaluations_that_is_cut_has_the_lowest_value_of_all_evaluations(tmp_path: Path) -> None:
    results = {f"other{number}": {"loss": 2.0} for number in range(50)}
    lines = [
        {"time": 1e9 + step, "event": "evaluation", "step": step, "epoch": 0, "results": {"validation": {"loss": 0.1 if step == 50 else 1.0}, **results}}
        for step in range(1, 601)
    ]  # fmt: skip
    (tmp_path / "events.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (tmp_path / "metrics.jsonl").write_text('{"step": 600, "elapsed_seconds": 1.0, "values": {"train/loss": 1.0}}\n')
    table = data(RunFolder.read(tmp_path))["evaluations"]
    assert (len(table["rows"]), table["rows_left_out"]) == (500, 100)
    assert (len(table["columns"]), table["columns_left_out"]) == (40, 11)
    assert table["lowest"][table["columns"].index("validation/loss")] == 0.1
