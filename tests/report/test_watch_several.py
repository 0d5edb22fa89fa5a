"""The live page of several runs: updates while the runs write, and the pages of single runs."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from callsheet.callbacks.support.listeners import announce
from callsheet.cli.main import main
from callsheet.cli.watch import NewRuns
from callsheet.errors import RequestRejected
from callsheet.report import RunFolder, live_run
from callsheet.report.compare.values import Value, values_of
from callsheet.report.live_comparison import LiveComparison
from callsheet.report.watch import WatchServer

from .compared_runs import write_run
from .driver import expect
from .test_browser import OpenedPage, until
from .test_watch import Client, eventually, interrupted, watch_command

pytestmark = pytest.mark.test_all  # real servers and the files of other packages take long

PNG = b"\x89PNG\r\n\x1a\n"


def start_run(folder: Path, name: str, *, losses: dict[int, float] | None = None, **options: Any) -> Path:
    """Write a run that has not ended and accepts requests."""
    run = write_run(folder, name, losses or {1: 3.0, 2: 2.0}, **options)
    events = run / "events.jsonl"
    lines = events.read_text().splitlines(keepends=True)
    events.write_text("".join(line for line in lines if json.loads(line)["event"] != "run_end"))
    announce(run, "SaveOnTrigger", run / "trigger")
    return run


def log(run: Path, step: int, **values: float) -> None:
    """Append a record, as a job would."""
    values = {"train/loss": 1 / step} | values
    line = {"step": step, "values": values, "elapsed_seconds": step * 0.5, "time": time.time()}
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps(line) + "\n")


def add_event(run: Path, **event: Any) -> None:
    with open(run / "events.jsonl", "a") as file:
        file.write(json.dumps({"time": time.time(), **event}) + "\n")


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """Write two running runs and one that has finished."""
    folder = tmp_path / "runs"
    return [
        start_run(folder, "lr-1", settings={"lr": 1}),
        start_run(folder, "lr-2", settings={"lr": 2}),
        write_run(folder, "lr-3", {1: 3.0, 2: 2.5}, settings={"lr": 3}),
    ]


@pytest.fixture
def serve() -> Iterator[Callable[[LiveComparison], WatchServer]]:
    """Return a function that serves runs until the test ends."""
    servers: list[WatchServer] = []

    def start(watched: LiveComparison) -> WatchServer:
        server = WatchServer(watched)
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def pattern(folder: Path, **options: Any) -> LiveComparison:
    """Watch `lr-*` in the folder."""
    new = NewRuns(["lr-*"], folder)
    return LiveComparison(sorted(folder.glob("lr-*")), find_new=new.find, looks_for=new.looks_for, **options)


def news(watched: LiveComparison, since: str = "") -> dict[str, Any] | None:
    body = watched.news(since)
    return json.loads(body) if body is not None else None


def wait_for(watched: LiveComparison, condition: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """Return the first data that fulfills the condition."""

    def ask() -> dict[str, Any] | None:
        found = news(watched)
        return found if found is not None and condition(found) else None

    found: dict[str, Any] = eventually(ask)
    return found


# --- news ---


def test_a_new_record_changes_the_data(runs: list[Path]) -> None:
    watched = LiveComparison(runs)
    first = news(watched)
    assert first is not None
    assert [run["name"] for run in first["runs"]] == ["lr-1", "lr-2", "lr-3"]
    assert news(watched, first["version"]) is None
    log(runs[1], 8)
    second = wait_for(watched, lambda data: data["version"] != first["version"])
    assert [run["steps"] for run in second["runs"]] == [2, 8, 2]
    assert second["curves"]["train/loss"][1]["x"] == [1, 2, 8]
    (value,) = [row["mean"] for row in second["values"] if (row["metric"], row["group"]) == ("train/loss", 1)]
    assert value == 0.125
    add_event(runs[1], event="run_end", outcome="failed", step=8, reason="out of memory")
    third = wait_for(watched, lambda data: data["runs"][1]["outcome"] == "failed")
    assert third["runs"][1]["reason"] == "out of memory"
    assert any(problem["level"] == "error" and problem["runs"][0][0] == 1 for problem in third["problems"])


def test_only_what_changed_is_computed_again(runs: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    watched = LiveComparison(runs)
    before = news(watched)
    computed: list[str] = []

    def counted(run: RunFolder) -> dict[str, Value]:
        computed.append(run.name)
        return values_of(run)

    monkeypatch.setattr("callsheet.report.compare.comparison.values_of", counted)
    assert before is not None
    assert news(watched, before["version"]) is None
    assert computed == []
    log(runs[0], 9)
    wait_for(watched, lambda data: data["runs"][0]["steps"] == 9)
    assert computed == ["lr-1"]


def test_the_data_equal_those_of_a_new_comparison(runs: list[Path]) -> None:
    """Parts that are kept from an earlier comparison must not be outdated."""
    watched = LiveComparison(runs)
    log(runs[0], 9, more=1.0)
    wait_for(watched, lambda data: data["runs"][0]["steps"] == 9)
    log(runs[1], 5)
    found = wait_for(watched, lambda data: data["runs"][1]["steps"] == 5)
    again = news(LiveComparison(runs))
    assert again is not None
    for each in (found, again):
        del each["generated"], each["version"]
    assert found == again


def test_reading_takes_a_share_of_the_time_over_all_runs(runs: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    watched = LiveComparison(runs)
    monkeypatch.setattr(live_run, "_MAX_CORE_SHARE", 1e-9)
    first = news(watched)
    assert first is not None
    log(runs[0], 9)
    log(runs[1], 9)
    assert news(watched, first["version"]) is None
    assert json.loads(watched.runs[1].news("") or b"")["run"]["steps"] == 2  # the page of a single run shares the budget
    monkeypatch.setattr(watched.budget, "not_before", 0.0)
    second = news(watched, first["version"])
    assert second is not None
    assert [run["steps"] for run in second["runs"]] == [9, 9, 2]  # both runs are read, so that none waits for the other


def test_a_process_writes_while_it_is_read(tmp_path: Path) -> None:
    runs = [start_run(tmp_path, name) for name in ("a", "b")]
    script = (
        "import json, sys, time\n"
        "with open(sys.argv[1], 'a') as file:\n"
        "    for step in range(3, 401):\n"
        "        line = json.dumps({'step': step, 'values': {'train/loss': step / 7}, 'elapsed_seconds': step, 'time': time.time()}) + chr(10)\n"
        "        for part in (line[:9], line[9:]):\n"
        "            file.write(part)\n"
        "            file.flush()\n"
        "        time.sleep(0.001)\n"
    )
    watched = LiveComparison(runs)
    with subprocess.Popen([sys.executable, "-c", script, str(runs[0] / "metrics.jsonl")]) as writer:
        seen = [0]
        while seen[-1] < 400:
            seen.append(wait_for(watched, lambda data: data["runs"][0]["steps"] > seen[-1])["runs"][0]["steps"])
    assert writer.returncode == 0
    assert len(seen) > 3
    found = news(watched)
    assert found is not None
    assert found["curves"]["train/loss"][0]["count"] == 400
    assert not any("incomplete" in problem["title"] for problem in found["problems"])


# --- runs that come and go ---


def test_a_run_that_begins_later_is_added_at_the_end(runs: list[Path]) -> None:
    folder = runs[0].parent
    watched = pattern(folder)
    first = news(watched)
    assert first is not None
    assert first["looks_for"] == ["lr-*"]
    start_run(folder, "other", settings={"lr": 9})
    start_run(folder, "lr-0", settings={"lr": 0})  # if runs were sorted by name, it would be the baseline
    found = wait_for(watched, lambda data: len(data["runs"]) > 3)
    assert [run["name"] for run in found["runs"]] == ["lr-1", "lr-2", "lr-3", "lr-0"]
    assert found["differences"]["settings"]["lr"] == ["1", "2", "3", "0"]
    log(folder / "lr-0", 7)
    wait_for(watched, lambda data: data["runs"][3]["steps"] == 7)


def test_runs_that_were_not_selected_are_not_added_later(runs: list[Path]) -> None:
    """With `--last 1`, the other two exist already, so they are not new."""
    new = NewRuns([str(runs[0].parent)], runs[0].parent)
    watched = LiveComparison(runs[2:], find_new=new.find, looks_for=new.looks_for)
    found = news(watched)
    assert found is not None
    assert [run["name"] for run in found["runs"]] == ["lr-3"]
    start_run(runs[0].parent, "lr-4")
    found = wait_for(watched, lambda data: len(data["runs"]) > 1)
    assert [run["name"] for run in found["runs"]] == ["lr-3", "lr-4"]


def test_given_names_are_not_searched_again_once_found(runs: list[Path]) -> None:
    folder = runs[0].parent
    new = NewRuns(["lr-1", str(runs[1]), "lr-9"], folder)
    assert new.looks_for == ["lr-9"]
    assert new.find() == []
    write_run(folder, "lr-9", {1: 1.0})
    assert new.find() == [folder / "lr-9"]
    assert new.find() == []


def test_a_run_whose_folder_is_gone_stays(runs: list[Path], serve: Callable[[LiveComparison], WatchServer]) -> None:
    watched = pattern(runs[0].parent)
    visitor = Client(serve(watched))
    runs[1].rename(runs[1].with_name("set-aside"))
    found = wait_for(watched, lambda data: not all(data["are_there"]))
    assert found["are_there"] == [True, False, True]
    assert found["runs"][1]["steps"] == 2
    log(runs[0], 6)
    wait_for(watched, lambda data: data["runs"][0]["steps"] == 6)
    assert visitor.get("/") == visitor.get("/run/1/") == 200
    assert act(visitor, 1, "stop") == (409, f"the folder {runs[1]} is gone\n")
    runs[1].with_name("set-aside").rename(runs[1])
    assert wait_for(watched, lambda data: all(data["are_there"]))["are_there"] == [True] * 3


def test_runs_can_be_grouped_by_a_setting_that_no_run_has_yet(runs: list[Path]) -> None:
    watched = pattern(runs[0].parent, group_by="rate")
    found = news(watched)
    assert found is not None
    assert found["group_by"] is None
    assert "no run has this setting" in found["notice"]
    start_run(runs[0].parent, "lr-4", settings={"lr": 3, "rate": 5})
    found = wait_for(watched, lambda data: len(data["runs"]) > 3)
    assert (found["group_by"], found["groups"], found["notice"]) == ("rate", ["rate=(none)", "rate=5"], "")


def test_a_single_run_can_be_watched_as_a_comparison(runs: list[Path]) -> None:
    """A sweep may have just started."""
    found = news(LiveComparison(runs[:1]))
    assert found is not None
    assert found["groups"] == ["lr-1"]


# --- pages of single runs ---


def act(visitor: Client, run: int, word: str) -> tuple[int, str]:
    headers = {"Origin": f"http://{visitor.headers['Host']}", "X-Callsheet-Token": visitor.server.form_token}
    status, _, body = visitor.ask("POST", f"/run/{run}/act", json.dumps({"act": word}).encode(), **headers)
    return status, body.decode()


def test_a_request_reaches_only_its_run(runs: list[Path], serve: Callable[[LiveComparison], WatchServer]) -> None:
    visitor = Client(serve(LiveComparison(runs)))
    status, text = act(visitor, 1, "save")
    assert (status, f"requested through {runs[1] / 'trigger'}" in text) == (200, True)
    assert (runs[1] / "trigger").read_text() == "save asked for in the browser\n"
    assert not (runs[0] / "trigger").exists()
    assert act(visitor, 2, "save") == (409, "the run has ended: finished\n")
    assert visitor.act("save")[0] == 404  # the comparison itself has no buttons
    assert visitor.get("/run/1/act") == 405
    assert visitor.get("/act") == 404


def test_each_run_has_its_page_data_and_images(runs: list[Path], serve: Callable[[LiveComparison], WatchServer]) -> None:
    for number, run in enumerate(runs[:2]):
        image = run / "images" / "grey" / "2 0.png"
        image.parent.mkdir(parents=True)
        image.write_bytes(PNG + bytes([number]))
        (run / "images.jsonl").write_text(json.dumps({"step": 2, "name": "grey", "files": ["images/grey/2 0.png"]}) + "\n")
    visitor = Client(serve(LiveComparison(runs)))
    for number in (0, 1):
        assert f"<title>lr-{number + 1} - callsheet".encode() in visitor.ask("GET", f"/run/{number}/")[2]
        assert json.loads(visitor.ask("GET", f"/run/{number}/data.json")[2])["run"]["name"] == f"lr-{number + 1}"
        assert visitor.ask("GET", f"/run/{number}/images/grey/{quote('2 0.png')}")[2] == PNG + bytes([number])
    status, headers, body = visitor.ask("GET", "/")
    assert (status, b"<title>3 runs compared" in body) == (200, True)
    assert "script-src 'nonce-" in headers["Content-Security-Policy"]
    images = json.loads(visitor.ask("GET", "/data.json")[2])["images"]["grey"]
    assert [each["entries"][0]["files"] for each in images] == [["0/images/grey/2 0.png"], ["1/images/grey/2 0.png"]]


def test_only_pages_data_and_images_of_the_runs_are_served(
    runs: list[Path], serve: Callable[[LiveComparison], WatchServer]
) -> None:
    (runs[1] / "images").mkdir()
    (runs[1] / "images" / "a.png").write_bytes(PNG)
    (runs[0] / "beside.png").write_bytes(PNG)
    visitor = Client(serve(LiveComparison(runs)))
    assert visitor.get("/run/1/images/a.png") == 200
    for path in (
        "/run",
        "/run/",
        "/run/1",
        "/run/3/",
        "/run/-1/",
        "/run/01/",
        "/run/+1/",
        "/run/1%20/",
        "/run/%31/",
        f"/run/{quote(chr(0x661))}/",  # a digit in another script
        "/run/9999999999999999999999/",
        "/run/lr-1/",
        "/run/../",
        "/run/0/../1/",
        "/run/0/images/a.png",
        "/run/0/images/../beside.png",
        "/run/0/images/%2e%2e/beside.png",
        "/run/0/images/%2e%2e/%2e%2e/lr-2/images/a.png",
        f"/run/0/images/{quote(str(runs[1] / 'images' / 'a.png'), safe='')}",
        "/run/0/metrics.jsonl",
        "/run/0/run/1/",
        "/run/0//",
        "/run/0/data.json/",
        "/images/a.png",
        "/1/images/a.png",
        "/lr-1/",
    ):
        assert visitor.get(path) == 404, path


def test_the_pages_of_runs_need_the_same_secrets(runs: list[Path], serve: Callable[[LiveComparison], WatchServer]) -> None:
    server = serve(LiveComparison(runs))
    visitor, stranger = Client(server), Client(server, enters=False)
    for path in ("/", "/data.json", "/run/0/", "/run/0/data.json", "/run/0/images/a.png", "/run/9/"):
        assert stranger.get(path) == 403
        assert stranger.get(f"{path}x?token={server.token}") == 403
        assert visitor.get(path, Host="evil.example") == 403
    assert stranger.get(f"/run/0/?token={server.token}") == 403  # the token is only for the first request
    own: dict[str, str | None] = {"Origin": f"http://{visitor.headers['Host']}", "X-Callsheet-Token": server.form_token}
    wrong: list[dict[str, str | None]] = [
        {"Origin": "http://evil.example"},
        {"Origin": None},
        {"X-Callsheet-Token": server.token},
        {"Cookie": None},
    ]
    for headers in wrong:
        assert visitor.ask("POST", "/run/0/act", b'{"act": "stop"}', **(own | headers))[0] == 403
    assert not (runs[0] / "trigger").exists()
    assert visitor.ask("POST", "/run/0/act", b'{"act": "stopp"}', **own)[0] == 400


def test_a_late_request_is_withdrawn_although_only_the_comparison_is_open(runs: list[Path]) -> None:
    watched = LiveComparison(runs)
    watched.runs[0].ask("stop")
    assert (runs[0] / "trigger").exists()
    add_event(runs[0], event="run_end", outcome="finished", step=2)
    wait_for(watched, lambda data: data["runs"][0]["outcome"] == "finished")
    assert not (runs[0] / "trigger").exists()
    with pytest.raises(RequestRejected, match="the run has ended"):
        watched.runs[0].ask("stop")


# --- the command ---


def test_the_command_waits_for_the_first_run_that_matches_a_pattern(tmp_path: Path) -> None:
    watch = watch_command("lr-*", "--no-browser", "--group-by", "lr", cwd=tmp_path)
    try:
        assert watch.stdout is not None
        assert watch.stdout.readline() == "there is no run 'lr-*' yet\n"
        assert watch.stdout.readline() == "it is added when it begins\n"
        start_run(tmp_path / "runs", "lr-1", settings={"lr": 1})
        assert watch.stdout.readline().startswith("watching 1 run: http://127.0.0.1:")
        assert watch.stdout.readline() == "Ctrl-C stops watching; the runs continue\n"
        assert interrupted(watch).endswith("no longer watching\n")
    finally:
        watch.kill()
        watch.wait(60)


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["lr-1"], "runs/lr-1"),
        (["lr-1", "--group-by", "lr"], "1 run"),
        (["lr-1", "lr-3", "lr-1"], "2 runs"),
        (["lr-1", "lr-9"], "1 run"),
        (["runs"], "3 runs"),
        (["runs/lr-[12]"], "2 runs"),
        (["--last", "2"], "2 runs"),
        (["lr-1", "--folder", "runs"], "runs/lr-1"),
    ],
)
def test_the_arguments_select_the_watched_runs(
    runs: list[Path], arguments: list[str], what: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def serve_forever(server: WatchServer) -> None:
        raise KeyboardInterrupt

    monkeypatch.chdir(runs[0].parent.parent)
    monkeypatch.setattr(WatchServer, "serve_forever", serve_forever)
    assert main(["watch", *arguments, "--no-browser"]) == 0
    assert f"watching {what}: http://" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "why"),
    [([], "give a run"), (["--last", "1"], "--last 1"), (["--last", "2", "--folder", "nowhere"], "give --folder")],
)
def test_contradictory_options_are_rejected(
    arguments: list[str], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["watch", *arguments]) == 2
    assert why in capsys.readouterr().err


# --- in a browser ---


def test_updates_keep_the_reader_s_choices(chromium: Any, tmp_path: Path, serve: Callable[[LiveComparison], WatchServer]) -> None:
    folder = tmp_path / "runs"
    long = "a word " * 30
    losses = {step: 3 / step for step in range(1, 61)}
    runs = [start_run(folder, f"lr-{n}", losses=losses, settings={"lr": n, "note": f"{n} {long}"}) for n in (1, 2, 3)]
    for n in (1, 2, 3):
        add_event(runs[0], event="evaluation", step=n, results={"validation": {"loss": 1 / n, "accuracy": n / 4}})
    (runs[0] / "tables").mkdir()
    table = runs[0] / "tables" / "samples.jsonl"
    rows = [{"step": step, "name": "samples", "columns": ["text"], "rows": [[f"of step {step}"]]} for step in (10, 20, 30)]
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    server = serve(pattern(folder))
    seen = OpenedPage(chromium, viewport={"width": 1280, "height": 800})
    page = seen.open(server.url)
    seen.drawn("train/loss")

    page.locator("#runs").get_by_label("lr-2").uncheck()
    page.get_by_role("button", name="Training time").click()
    page.locator("#smooth").fill("0.5")
    page.locator("#log").check()
    page.locator("input.from").fill("5")
    page.locator("input.to").fill("20")
    page.locator("input.to").press("Tab")
    page.locator("#differences details summary").first.click()
    page.locator("#table-values").get_by_role("button", name="value").click()
    page.locator("#evaluations select").select_option(label="validation/accuracy")
    page.locator("#tables input[type=range]").press("Home")
    page.locator("#value-search").fill("loss")
    page.locator("#value-search").press("ArrowLeft")
    before = page.evaluate("document.querySelector('#values').getBoundingClientRect().top")

    log(runs[0], 100)
    log(runs[2], 80)
    table.write_text(table.read_text() + json.dumps(rows[0] | {"step": 40, "rows": [["of step 40"]]}) + "\n")
    start_run(folder, "lr-0", losses=losses, settings={"lr": 0, "note": long})
    expect(page.locator("#table-runs")).to_contain_text("lr-0", timeout=30_000)
    expect(page.locator("h1")).to_have_text("4 runs compared")
    expect(page.locator("#table-runs tbody tr").first).to_contain_text("100")

    assert abs(page.evaluate("document.querySelector('#values').getBoundingClientRect().top") - before) < 3
    assert page.evaluate("[document.activeElement.id, document.activeElement.selectionStart]") == ["value-search", 3]
    assert page.locator("#value-search").input_value() == "loss"
    expect(page.locator("#runs").get_by_label("lr-2")).not_to_be_checked()
    expect(page.locator("#table-values")).not_to_contain_text("lr-2")
    expect(page.locator("#table-values")).to_contain_text("lr-0")
    expect(page.locator("#table-values th[aria-sort=ascending], #table-values th[aria-sort=descending]")).to_contain_text("value")
    expect(page.get_by_role("button", name="Training time")).to_have_attribute("aria-pressed", "true")
    assert page.locator("#smooth").input_value() == "0.5"
    expect(page.locator("#log")).to_be_checked()
    assert page.locator("input.from").input_value() == "5"
    assert page.locator("#differences details").first.get_attribute("open") is not None
    assert page.locator("#evaluations select option:checked").inner_text() == "validation/accuracy"
    expect(page.locator("#tables")).to_contain_text("of step 10")
    assert page.locator("#tables input[type=range]").get_attribute("max") == "3"
    until(page, "document.querySelector('.chart').data.some(line => line.name === 'lr-0')")
    lines = [line for line in seen.drawn("train/loss") if line["meta"] == "smoothed"]
    assert [line["name"] for line in lines] == ["lr-1", "lr-3", "lr-0"]
    assert lines[0]["x"][-1] == 50.0  # seconds of training
    shown = page.evaluate("(({ xaxis, yaxis }) => [[...xaxis.range], yaxis.type])(document.querySelector('.chart').layout)")
    assert shown == [[5, 20], "log"]

    with seen.context.expect_page() as opened:
        page.locator("#table-runs").get_by_role("link", name="lr-3").click()
    run = opened.value
    expect(run.locator("h1")).to_have_text("lr-3")
    run.locator("#act-save").click()
    expect(run.locator("#request-message")).to_contain_text(f"requested through {runs[2] / 'trigger'}")
    assert (runs[2] / "trigger").read_text() == "save asked for in the browser\n"
    runs[2].rename(folder / "set-aside")
    expect(page.locator("#table-runs")).to_contain_text("its folder is gone", timeout=30_000)
    assert seen.faults == []
    seen.context.close()
