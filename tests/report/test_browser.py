"""The page in a real browser without a network: what is drawn, interaction, and hostile content."""

from __future__ import annotations

import csv
import json
import re
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from callsheet.report import Live, RunFolder, RunReader, data, image_bytes, page, write_report

from .driver import expect
from .sample_run import HOSTILE

WIDE, NARROW = 1280, 390


def until(page: Any, condition: str, seconds: float = 20.0) -> None:
    """Wait until `condition` holds in the page. Its policy forbids Playwright's `wait_for_function`."""
    give_up = time.monotonic() + seconds
    while not page.evaluate(condition):
        assert time.monotonic() < give_up, f"not true after {seconds} seconds: {condition}"
        page.wait_for_timeout(20)


class OpenedPage:
    """A page in the browser, with its errors and network requests."""

    def __init__(self, chromium: Any, **options: Any) -> None:
        self.context = chromium.new_context(**{"viewport": {"width": WIDE, "height": 900}, **options})
        self.page = self.context.new_page()
        self.page.set_default_timeout(20_000)
        self.faults: list[str] = []
        self.requests: list[str] = []
        self.page.on(
            "console", lambda message: self.faults.append(message.text) if message.type in ("error", "warning") else None
        )
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))

    def open(self, url: str) -> Any:
        self.page.goto(url)
        self.page.locator("nav a").first.wait_for()
        return self.page

    def drawn(self, title: str) -> list[dict[str, Any]]:
        """Wait for plotly to draw a chart, and return its traces."""
        card = (
            self.page.locator(".chart-card")
            .filter(has=self.page.get_by_role("heading", name=title, exact=True))
            .locator(".chart")
        )
        card.scroll_into_view_if_needed()
        card.locator(".plot-container").wait_for()
        found: list[dict[str, Any]] = card.evaluate(
            "chart => chart.data.map(trace => ({x: [...trace.x], y: [...trace.y], name: trace.name, meta: trace.meta, text: trace.text}))"
        )
        return found


@pytest.fixture(scope="module")
def report(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_report(folder, tmp_path_factory.mktemp("report") / "report.html").as_uri()


@pytest.fixture
def seen(chromium: Any) -> Iterator[OpenedPage]:
    """Open a browser without a network. At the end, check that there were no errors and no network requests."""
    seen = OpenedPage(chromium, offline=True)
    yield seen
    seen.context.close()
    assert seen.faults == []
    assert [url for url in seen.requests if not url.startswith(("file:", "data:", "blob:"))] == []


# --- curves ---


def test_the_curves_show_the_records(seen: OpenedPage, report: str, folder: Path) -> None:
    seen.open(report)
    train, validation = [trace for trace in seen.drawn("loss") if trace["meta"] == "curve"]
    records = RunFolder.read(folder).records
    for trace, name in ((train, "train"), (validation, "validation")):
        recorded = [(record.step, record.values[f"{name}/loss"]) for record in records if f"{name}/loss" in record.values]
        assert trace["name"] == name
        assert trace["x"] == [step for step, _ in recorded]
        assert trace["y"] == pytest.approx([value for _, value in recorded], rel=1e-8)
    path = seen.page.locator(".chart-card").first.locator("path.js-line").first.get_attribute("d")
    assert path is not None
    assert path.count("L") + path.count("H") + path.count("V") > 100  # the curve is on the screen


def test_a_value_that_is_not_finite_leaves_a_gap_and_a_mark(seen: OpenedPage, report: str) -> None:
    seen.open(report)
    curve, *marks = seen.drawn("odd/sometimes")
    assert (curve["x"][24], curve["y"][24]) == (25, None)
    assert [25] in [mark["x"] for mark in marks]
    assert marks[0]["x"] == [20, 40, 60, 80, 100, 120]  # the steps of evaluations
    assert "checkpoint, requested" in seen.drawn("loss")[-1]["text"]


def test_many_checkpoints_are_not_drawn_as_a_bar(seen: OpenedPage, tmp_path: Path) -> None:
    with open(tmp_path / "metrics.jsonl", "w") as file:
        file.writelines(json.dumps({"step": step, "values": {"train/loss": 1 / step}}) + "\n" for step in range(1, 701))
    with open(tmp_path / "events.jsonl", "w") as file:
        for step in range(2, 701, 2):
            file.write(
                json.dumps({"event": "checkpoint", "step": step, "checkpoint": {"path": f"ba{step}", "kind": "rolling"}}) + "\n"
            )
    page = seen.open(write_report(tmp_path).as_uri())
    marks = seen.drawn("loss")[-1]
    assert 20 < len(marks["x"]) < 160
    assert re.fullmatch(r"\d+ checkpoints, steps 2 to \d+", marks["text"][0])
    page.locator("input.from").fill("30")
    page.locator("input.to").fill("50")
    page.locator("input.to").press("Tab")
    until(page, "String(document.querySelector('.chart').layout.xaxis.range) === '30,50'")
    assert {30, 32, 34, 36} <= set(seen.drawn("loss")[-1]["x"])  # zoomed in, every point is drawn


def test_dragging_zooms_all_charts_and_a_double_click_shows_all(seen: OpenedPage, report: str) -> None:
    page = seen.open(report)
    seen.drawn("lr")
    box = page.locator(".chart-card .nsewdrag").first.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.25, box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 60, steps=5)
    page.mouse.up()
    ranges = "[...document.querySelectorAll('.chart.js-plotly-plot')].map(chart => chart.layout.xaxis.range)"
    until(page, "document.querySelector('input.from').value !== ''")
    found = page.evaluate(ranges)
    assert len(found) > 1
    assert all(each == found[0] for each in found)
    assert 25 < found[0][0] < 40 < 55 < found[0][1] < 70
    page.mouse.dblclick(box["x"] + box["width"] * 0.5, box["y"] + 60)
    until(page, "document.querySelector('input.from').value === ''")
    assert page.evaluate("document.querySelector('.chart').layout.xaxis.range[1]") > 119


def test_typing_a_range_of_steps_zooms_the_charts(seen: OpenedPage, report: str) -> None:
    page = seen.open(report)
    seen.drawn("loss")
    page.locator("input.from").fill("30")
    page.locator("input.to").fill("50")
    page.locator("input.to").press("Tab")
    until(page, "String(document.querySelector('.chart').layout.xaxis.range) === '30,50'")
    page.get_by_role("button", name="Whole run").click()
    until(page, "document.querySelector('.chart').layout.xaxis.range[1] > 100")


def test_the_curves_can_be_smoothed_logarithmic_and_drawn_over_time(seen: OpenedPage, report: str, folder: Path) -> None:
    page = seen.open(report)
    raw = seen.drawn("loss")[0]
    page.locator("#smooth").fill("0.9")
    traces = seen.drawn("loss")
    assert [trace["meta"] for trace in traces][:3] == ["raw", "smoothed", "curve"]  # validation has too few points to be smoothed
    assert traces[0]["y"] == raw["y"]

    def centered(values: list[float], half: int) -> list[float]:
        sides = [min(half, at, len(values) - 1 - at) for at in range(len(values))]
        return [sum(values[at - side : at + side + 1]) / (2 * side + 1) for at, side in enumerate(sides)]

    assert traces[1]["y"] == pytest.approx(centered(centered(raw["y"], 5), 4))
    page.locator("#log").check()
    assert page.evaluate("document.querySelector('.chart').layout.yaxis.type") == "log"
    page.get_by_role("button", name="Time", exact=True).click()
    seconds = [record.elapsed_seconds for record in RunFolder.read(folder).records if "train/loss" in record.values]
    assert seen.drawn("loss")[0]["x"] == pytest.approx(seconds, abs=0.001)


def test_a_smoothed_curve_does_not_lag_behind(seen: OpenedPage, tmp_path: Path) -> None:
    """The smoothing window is centered: a window over past values only would shift a falling curve upwards."""
    with open(tmp_path / "metrics.jsonl", "w") as file:
        for step in range(1, 201):
            values = {"train/loss": 10 - step / 25} | ({"validation/loss": 10.1 - step / 25} if step % 20 == 0 else {})
            file.write(json.dumps({"step": step, "values": values}) + "\n")
    page = seen.open(write_report(tmp_path).as_uri())
    page.locator("#smooth").fill("0.95")
    train = next(trace for trace in seen.drawn("loss") if trace["meta"] == "smoothed")
    assert train["y"] == pytest.approx([10 - step / 25 for step in range(1, 201)])


def test_one_chart_is_logarithmic_and_can_be_saved(chromium: Any, tmp_path: Path) -> None:
    """Whatever the names of metrics are, the CSV contains no formula and the file names contain no path."""
    evil = '=HYPERLINK("x"),../../"@'
    with open(tmp_path / "metrics.jsonl", "w") as file:
        for step, loss in ((1, 4.0), (2, "NaN"), (3, -1.5)):
            file.write(
                json.dumps({"step": step, "values": {"train/loss": loss, f"{evil}/{evil}": 1.0, "validation/loss": 2}}) + "\n"
            )
    seen = OpenedPage(chromium, offline=True)
    page = seen.open(write_report(tmp_path).as_uri())
    seen.drawn("loss")
    loss, other = page.locator(".chart-card").first, page.locator(".chart-card").last
    loss.get_by_role("button", name="Logarithmic scale").click()
    kinds = "[...document.querySelectorAll('.chart.js-plotly-plot')].map(chart => chart.layout.yaxis.type)"
    assert page.evaluate(kinds) == ["log", "linear"]
    assert loss.get_by_role("button", name="Logarithmic scale").get_attribute("aria-pressed") == "true"
    with page.expect_download() as saving:
        loss.get_by_role("button", name="Download the values as CSV").click()
    assert Path(saving.value.path()).read_bytes() == b'"step","train/loss","validation/loss"\r\n1,4,2\r\n2,NaN,2\r\n3,-1.5,2\r\n'
    with page.expect_download() as saving:
        other.get_by_role("button", name="Download the values as CSV").click()
    with open(saving.value.path(), newline="") as file:
        head = next(csv.reader(file))
    assert head == ["step", f"'{evil}/{evil}"]
    assert re.fullmatch(r"[\w-]+\.csv", saving.value.suggested_filename)
    with page.expect_download() as saving:
        loss.get_by_role("button", name="Download the chart as an image").click()
    assert saving.value.suggested_filename.endswith("loss.png")
    assert Path(saving.value.path()).read_bytes().startswith(b"\x89PNG")
    assert seen.faults == []
    seen.context.close()


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_a_chart_can_be_enlarged(width: int, chromium: Any, report: str) -> None:
    seen = OpenedPage(chromium, viewport={"width": width, "height": 900})
    page = seen.open(report)
    seen.drawn("odd/sometimes")
    card = page.locator(".chart-card").filter(has=page.get_by_role("heading", name="odd/sometimes", exact=True))
    small = card.bounding_box()
    card.get_by_role("button", name="The whole width").click()
    until(page, "document.querySelector('.chart-card.large .main-svg')?.getBoundingClientRect().height > 500")
    large, drawn = card.bounding_box(), card.locator(".main-svg").first.bounding_box()
    assert large["width"] > 0.9 * page.locator("main").bounding_box()["width"]
    assert abs(drawn["width"] - large["width"]) < 40
    page.locator("#search").fill("sometimes")  # the card is created again
    card.get_by_role("button", name="The whole width", pressed=True).click()
    assert card.bounding_box()["height"] <= small["height"] + 2
    assert seen.faults == []
    seen.context.close()


def test_the_cost_table_is_whole_on_a_phone(chromium: Any, report: str) -> None:
    seen = OpenedPage(chromium, offline=True, viewport={"width": NARROW, "height": 800})
    page = seen.open(report)
    page.locator("#table-costs").scroll_into_view_if_needed()
    edges = "[...document.querySelectorAll('#table-costs td')].map(cell => cell.getBoundingClientRect().right)"
    assert 0 < max(page.evaluate(edges)) <= NARROW
    seen.context.close()


def test_searching_filters_the_charts_and_the_legend_hides_a_curve(seen: OpenedPage, report: str) -> None:
    page = seen.open(report)
    page.locator("#search").fill("GRAD bias")
    assert page.locator("#curves .chart-card h3").all_inner_texts() == ["grad/0.bias", "grad/3.bias"]
    page.locator("#search").fill("no such thing")
    assert page.get_by_text("No metric has all these words").is_visible()
    page.locator("#search").fill("")
    page.locator(".legend button").filter(has_text="validation").click()
    assert page.evaluate(
        "document.querySelector('.chart').data.filter(trace => trace.name === 'validation').map(trace => trace.visible)"
    ) == [False]


def test_of_thousands_of_metrics_only_visible_charts_are_drawn(seen: OpenedPage, tmp_path: Path) -> None:
    with open(tmp_path / "metrics.jsonl", "w") as file:
        for step in range(1, 40):
            values = {"train/loss": 1 / step, **{f"l2_norm/grad/layer.{number}": step * number for number in range(3000)}}
            file.write(json.dumps({"step": step, "values": values, "elapsed_seconds": step}) + "\n")
    page = seen.open(write_report(tmp_path).as_uri())
    seen.drawn("loss")
    expect(page.locator(".chart-card")).to_have_count(1)  # the family is collapsed
    page.locator("summary").filter(has_text="l2_norm").click()
    expect(page.locator(".chart-card")).to_have_count(25)
    page.get_by_role("button", name="24 more of 2,976").click()
    expect(page.locator(".chart-card")).to_have_count(49)
    page.locator("#search").fill("layer.2999")
    assert seen.drawn("grad/layer.2999")[0]["y"][0] == 2999
    assert page.locator(".chart.js-plotly-plot").count() < 10


# --- other parts ---


def test_the_timeline_shows_spans_and_callbacks(seen: OpenedPage, report: str) -> None:
    page = seen.open(report)
    timeline = page.locator("#timeline")
    timeline.scroll_into_view_if_needed()
    expect(timeline.locator("svg text.step-name")).to_have_count(4)
    names = set(timeline.locator("svg text").all_text_contents())
    assert {"train_step", "Slow"} <= names
    slow = timeline.locator("svg text", has_text="Slow").first
    assert "callback-text" in (slow.get_attribute("class") or "")
    slow.hover(position={"x": 5, "y": 5}, force=True)  # `force`: the slice behind the text receives the events
    tip = page.locator("#tip")
    tip.wait_for(state="visible")
    assert tip.inner_text().startswith("Slow\nat on_train_step_end\n")
    assert "of the window" in tip.inner_text()
    assert "of step" in tip.inner_text()
    slices = timeline.locator("rect.slice").count()
    slow.dblclick(position={"x": 5, "y": 5}, force=True)  # zoom to the slice
    until(page, f"document.querySelectorAll('#timeline rect.slice').length < {slices}")
    timeline.locator("svg").press("0")
    expect(timeline.locator("svg text.step-name")).to_have_count(4)
    timeline.locator("svg").press("+")
    until(page, "document.querySelectorAll('#timeline svg text.step-name').length < 4")
    page.get_by_role("button", name="Earlier window").click()
    expect(timeline.locator("svg text.step-name")).to_have_count(4)
    timeline.locator("summary").click()
    timeline.locator("tbody td").first.wait_for()
    assert {"forward", "backward", "Slow"} <= set(timeline.locator("tbody td:first-child").all_inner_texts())


def test_clicking_a_column_s_head_sorts_the_table(seen: OpenedPage, report: str) -> None:
    page = seen.open(report)
    costs = page.locator("#table-costs")

    def calls() -> list[int]:
        cells = costs.locator("tbody tr:not(.inner) td:nth-child(2)").all_inner_texts()
        return [int(text.replace(",", "")) for text in cells]

    costs.get_by_role("button", name="calls").click()
    assert calls() == sorted(calls(), reverse=True)
    costs.get_by_role("button", name="calls").press("Enter")
    assert calls() == sorted(calls())
    assert costs.locator("th[aria-sort=ascending]").inner_text().startswith("calls")
    row = costs.locator("tbody tr").filter(has_text="Slow")
    row.get_by_role("button").click()
    assert costs.locator("tr.inner").inner_text().startswith("on_train_step_end")


def test_every_section_of_the_page_has_its_content(seen: OpenedPage, report: str) -> None:
    page = seen.open(report)
    parts = [
        "Problems",
        "Results",
        "Curves",
        "Timeline",
        "Costs",
        "Memory",
        "Evaluations",
        "Checkpoints",
        "Images",
        "Tables",
        "What happened",
        "Call sheet",
        "Settings",
    ]
    assert page.locator("nav a").all_inner_texts() == parts
    assert page.locator("#outcome").inner_text() == "finished"
    assert "validation/loss" in page.locator("#results tbody").inner_text()
    assert "it wrote this" in page.locator("#results pre").inner_text()
    assert page.locator("#reason").inner_text() == "reached max_duration, 120ba"
    assert "Broken failed" in page.locator(".problem.error").first.inner_text()
    page.locator("#images img").first.scroll_into_view_if_needed()
    assert page.locator("#images img").first.evaluate("image => image.decode().then(() => image.naturalWidth)") == 16
    page.locator("#images input[type=range]").fill("0")
    assert page.locator("#images").get_by_text("step 20", exact=True).is_visible()
    assert "at step 120" in page.locator("#tables").inner_text()
    page.locator("#tables select").select_option(label="step 20")
    assert "at step 20" in page.locator("#tables tbody").inner_text()
    assert "on_train_step_end" in page.locator("#callsheet").inner_text()
    assert page.locator("#settings details[open]").count() == 0
    page.locator("summary", has_text="config.yaml").click()
    page.locator("#settings pre").get_by_text("batch_size: 8").wait_for()
    assert "This run has no data for: logs." in page.locator("footer").inner_text()


def test_an_empty_run_has_a_page(seen: OpenedPage, tmp_path: Path) -> None:
    page = seen.open(write_report(tmp_path).as_uri())
    assert page.locator("nav a").all_inner_texts() == ["Problems"]
    assert "The run is lost" in page.locator("#problems").inner_text()


# --- hostile content ---


def test_no_text_of_a_run_is_executed(seen: OpenedPage, tmp_path: Path) -> None:
    """The run has markup in all its texts: names, tables, events, logs, settings."""
    evil = HOSTILE + "</script><script>window.hostile=1</script><a href='https://example.com'>x</a>%{y}"
    values = {
        f"{evil}/{evil}": 1.0,
        evil: 2.0,
        f"train/{evil}": "NaN",
        f"memory/{evil}": 3.0,
        "__proto__": 1.0,
        "constructor/__proto__": 2.0,
    }
    window = {
        "first_step": 1,
        "last_step": 2,
        "began": 1.0,
        "seconds": 0.01,
        "slices": [[evil, 0.0, 0.005, 1, ""], [evil, 0.001, 0.002, 1, evil]],
    }
    cost = {"callback": evil, "event": evil, "calls": 1, "seconds": 1.0, "worst_seconds": 1.0, "is_sampled": False}
    failure = {"callback": evil, "count": 3, "is_off": True, "last": evil}
    costs = {
        "mode": evil,
        "steps": 1,
        "seconds": 2.0,
        "window_steps": 1,
        "window_seconds": 1.0,
        "costs": [cost],
        "failures": [failure],
    }
    info = {
        "path": evil,
        "kind": evil,
        "val_losses": {evil: 1.0},
        "best_metric_key": evil,
        "requested_by": [evil],
        "size_bytes": evil,
        "epoch": [evil],
    }
    events: list[dict[str, Any]] = [
        {
            "event": "run_start",
            "run": evil,
            "device": evil,
            "world_size": evil,
            "host": evil,
            "versions": {evil: evil},
            "time": evil,
        },
        {"event": "checkpoint", "step": evil, "checkpoint": info},
        {"event": "evaluation", "step": 1, "results": {evil: {evil: 1.0}}},
        {"event": "exception", "type": evil, "message": evil, "span": evil},
        {"event": evil, evil: evil},
        {"event": "run_end", "outcome": evil, "reason": evil},
    ]
    lines: dict[str, list[dict[str, Any]]] = {
        "metrics": [{"step": step, "values": values, "elapsed_seconds": step} for step in range(1, 50)],
        "timeline": [window],
        "costs": [{**costs, "process": evil}],
        "events": events,
        "images": [{"step": 1, "name": evil, "files": [f"images/{evil}.png", "../../etc/passwd", "https://example.com/a.png"]}],
        "tables/t": [
            {"step": 1, "name": evil, "columns": [evil, evil], "rows": [[evil, {evil: evil}], [evil], [1.0, None, evil]]}
        ],
    }
    for name, each in lines.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in each))
    (tmp_path / "hyperparameters.json").write_text(json.dumps({evil: evil, "nested": {evil: [evil]}}))
    (tmp_path / "results.json").write_text(json.dumps({"unit": evil, "results": {evil: 1.0}, "samples": [evil], "step": evil}))
    (tmp_path / "notes.json").write_text(json.dumps({"tags": ["good", evil], "note": evil}))
    for name in ("config.yaml", "call_sheet.txt", "logs/rank-0.log"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{evil}\nWARNING {evil}\n")
    page = seen.open(write_report(tmp_path).as_uri())
    for summary in page.locator("summary").all():
        summary.click()
    for chart in page.locator(".chart").all():
        chart.scroll_into_view_if_needed()
        chart.hover(force=True)
    page.locator("#timeline rect.slice").last.hover(force=True)
    page.wait_for_timeout(200)
    assert page.evaluate("window.hostile") is None
    assert page.locator("img, #page a[href^=http], svg a, #page script, #page iframe").count() == 0
    assert page.locator("h1").inner_text() == evil
    assert page.locator("#note").inner_text() == f"#good {evil}"


# --- layout and colors ---


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_the_page_fits_the_screen_and_its_text_has_enough_contrast(chromium: Any, report: str, scheme: str, width: int) -> None:
    seen = OpenedPage(chromium, offline=True, color_scheme=scheme, viewport={"width": width, "height": 800})
    page = seen.open(report)
    seen.drawn("loss")
    assert page.evaluate("document.documentElement.scrollWidth") <= width  # nothing overflows
    for selector in (
        "h1",
        ".facts span",
        ".problem .title",
        ".problem.error .title",
        "nav a",
        ".about",
        ".legend button",
        "tbody td",
        ".pill",
    ):
        assert contrast(page, selector) >= 4.5, selector
    seen.context.close()
    assert seen.faults == []


def test_the_keyboard_reaches_everything(seen: OpenedPage, report: str) -> None:
    page = seen.open(report)
    reached = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.add(
            page.evaluate(
                "(document.activeElement.id || document.activeElement.className || document.activeElement.textContent).toString()"
            )
        )
    assert {"skip", "search", "smooth", "log", "from", "to"} <= reached


def contrast(page: Any, selector: str) -> float:
    """Return the contrast of an element's text to its background, as WCAG defines it."""
    colors = page.locator(selector).first.evaluate(
        """element => {
            const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
            const behind = [];
            for (let each = element; each; each = each.parentElement) behind.unshift(getComputedStyle(each).backgroundColor);
            const read = (layers) => { for (const color of layers) { canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1); } return [...canvas.getImageData(0, 0, 1, 1).data]; };
            return [read([...behind, getComputedStyle(element).color]), read(behind)];
        }"""
    )

    def brightness(color: list[int]) -> float:
        red, green, blue = (
            part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in (each / 255 for each in color[:3])
        )
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    lighter, darker = sorted(map(brightness, colors), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


# --- live ---


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Any]:
    """Serve the live page of a growing run like `callsheet watch`, but without access control."""
    reader = RunReader(tmp_path)

    class Handler(BaseHTTPRequestHandler):
        requests: list[dict[str, Any]] = []
        tokens: set[str | None] = set()
        disabled_reason = ""

        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            run = reader.read()
            if parts.path == "/":
                self.answer(page(run, live=Live("secret", seconds=0.1)).encode(), "text/html")
            elif parts.path == "/data.json":
                self.tokens.add(self.headers["X-Callsheet-Token"])
                if parse_qs(parts.query)["since"] == [run.version] and not self.disabled_reason:
                    self.answer(b"", "application/json", 204)
                else:
                    self.answer(json.dumps({**data(run), "disabled_reason": self.disabled_reason}).encode(), "application/json")
            else:
                content = image_bytes(tmp_path, parts.path.removeprefix("/"))
                self.answer(content or b"", "image/png", 200 if content else 404)

        def do_POST(self) -> None:
            self.requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.answer(b'{"message": "the run will do so"}', "application/json")

        def answer(self, content: bytes, kind: str, status: int = 200) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            if status != 204:
                self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        yield Handler, f"http://127.0.0.1:{listening.server_address[1]}/"
        listening.shutdown()
        thread.join()


def grow(folder: Path, steps: range, **more: float) -> None:
    with open(folder / "metrics.jsonl", "a") as file:
        for step in steps:
            file.write(json.dumps({"step": step, "values": {"train/loss": 1 / step, **more}, "elapsed_seconds": step}) + "\n")


def test_a_live_page_follows_the_run_and_sends_requests(chromium: Any, server: Any, tmp_path: Path) -> None:
    handler, url = server
    grow(tmp_path, range(1, 11))
    seen = OpenedPage(chromium)
    page = seen.open(url)
    page.on("dialog", lambda dialog: dialog.dismiss())
    assert seen.drawn("loss")[0]["x"] == list(range(1, 11))
    page.locator("#search").fill("loss")
    page.locator("#log").check()
    grow(tmp_path, range(11, 31))
    until(page, "document.querySelector('.chart').data[0].x.length === 30")
    assert page.locator("#search").input_value() == "loss"  # the reader's choice is kept
    assert page.evaluate("document.querySelector('.chart').layout.yaxis.type") == "log"
    assert handler.tokens == {"secret"}
    (tmp_path / "events.jsonl").write_text(
        '{"event": "checkpoint", "step": 20, "checkpoint": {"path": "checkpoints/ep0-ba20"}}\n'
    )
    page.locator("#checkpoints").get_by_text("ep0-ba20").wait_for()

    page.locator("#act-save").click()
    page.get_by_text("the run will do so").wait_for()
    page.locator("#act-stop").click()
    page.get_by_role("button", name="Continue training").click()
    page.locator("dialog").wait_for(state="detached")
    page.locator("#act-stop").click()
    page.locator("#confirm-stop").click()
    page.locator("dialog").wait_for(state="detached")
    until(page, "document.getElementById('request-message').textContent !== ''")
    page.wait_for_timeout(200)
    assert handler.requests == [{"act": "save"}, {"act": "stop"}]

    assert page.locator("#status-text").inner_text() == "live"
    handler.disabled_reason = "the run has ended"
    page.get_by_text("the run has ended").wait_for()
    assert page.locator("#act-save").is_disabled()
    (tmp_path / "events.jsonl").write_text('{"event": "run_end", "step": 30, "time": 1e9, "outcome": "finished"}\n')
    page.locator("#status-text").get_by_text("ended 2001-09-").wait_for()
    assert seen.faults == []
    seen.context.close()


def test_new_metrics_are_drawn_while_others_are_being_drawn(chromium: Any, server: Any, tmp_path: Path) -> None:
    _, url = server
    grow(tmp_path, range(1, 5))
    seen = OpenedPage(chromium)
    page = seen.open(url)
    for number in range(12):
        grow(tmp_path, range(5 + number, 6 + number), **{f"new/metric{number}": 1.0, "train/norm": 1.0})
        until(page, f"document.querySelectorAll('.chart-card').length >= {number + 2}")
    assert seen.drawn("metric11")[0]["x"] == [16]
    assert seen.faults == []
    seen.context.close()


def test_a_server_that_stops_is_reported(chromium: Any, server: Any, tmp_path: Path) -> None:
    _, url = server
    grow(tmp_path, range(1, 5))
    seen = OpenedPage(chromium)
    page = seen.open(url)
    seen.context.set_offline(True)
    page.get_by_text("no answer since").wait_for()
    seen.context.set_offline(False)
    page.get_by_text("live", exact=True).wait_for()
    seen.context.close()
