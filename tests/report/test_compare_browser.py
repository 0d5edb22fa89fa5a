"""The page of a comparison in a real browser: what is drawn, interaction, and hostile content."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from callsheet.report import RunFolder, write_report
from callsheet.report.compare.comparison import Comparison
from callsheet.report.compare.page import write_comparison

from .compared_runs import write_run, write_timeline
from .driver import expect
from .sample_run import HOSTILE
from .test_browser import NARROW, OpenedPage, until

STEPS = 60


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Write runs of two rates with two seeds each. The runs of the second rate are slower and have half as many steps."""
    folder = tmp_path_factory.mktemp("runs")
    found = []
    for rate in (1, 2):
        for seed in (0, 1):
            losses = {step: 10 * rate + seed + 1 / step for step in range(1, STEPS // rate + 1)}
            settings = {"lr": rate, "seed": seed, "note": "a word " * 30 * (rate - 1)}
            run = write_run(folder, f"lr{rate}-{seed}", losses, seconds=0.5 * rate, settings=settings)
            write_timeline(run, 4, forward=0.05 * rate, backward=0.05)
            found.append(run)
    return found


@pytest.fixture(scope="module")
def single(runs: list[Path], tmp_path_factory: pytest.TempPathFactory) -> str:
    comparison = Comparison([RunFolder.read(run) for run in runs])
    return write_comparison(comparison, tmp_path_factory.mktemp("page") / "compare.html").as_uri()


@pytest.fixture(scope="module")
def grouped(runs: list[Path], tmp_path_factory: pytest.TempPathFactory) -> str:
    comparison = Comparison([RunFolder.read(run) for run in runs], group_by="lr")
    return write_comparison(comparison, tmp_path_factory.mktemp("page") / "compare.html").as_uri()


@pytest.fixture
def seen(chromium: Any) -> Iterator[OpenedPage]:
    """Open a browser without a network. At the end, check that there were no errors and no network requests."""
    seen = OpenedPage(chromium, offline=True)
    yield seen
    seen.context.close()
    assert seen.faults == []
    assert [url for url in seen.requests if not url.startswith(("file:", "data:", "blob:"))] == []


def test_each_run_has_a_curve_in_its_own_color(seen: OpenedPage, single: str) -> None:
    page = seen.open(single)
    lines = seen.drawn("train/loss")
    assert [line["name"] for line in lines] == ["lr1-0", "lr1-1", "lr2-0", "lr2-1"]
    assert lines[2]["y"] == pytest.approx([20 + 1 / step for step in range(1, 31)], rel=1e-5)
    colors = page.evaluate("document.querySelector('.chart').data.map(trace => trace.line.color)")
    assert colors == ["#0072b2", "#d55e00", "#009e73", "#cc79a7"]
    assert page.evaluate("getComputedStyle(document.querySelector('#runs .swatch line')).stroke") == "rgb(0, 114, 178)"


@pytest.mark.parametrize(
    ("axis", "scale"), [("Step", 1), ("Training time", 0.5), ("Wall time", 0.75), ("Tokens", 100), ("Samples", 4)]
)
def test_a_button_changes_the_horizontal_axis(axis: str, scale: float, seen: OpenedPage, single: str) -> None:
    page = seen.open(single)
    seen.drawn("train/loss")
    page.get_by_role("button", name=axis, exact=True).click()
    assert seen.drawn("train/loss")[0]["x"] == pytest.approx([step * scale for step in range(1, STEPS + 1)])


def test_a_hidden_run_is_hidden_in_all_sections(seen: OpenedPage, single: str) -> None:
    page = seen.open(single)
    seen.drawn("train/loss")
    page.locator("#runs").get_by_label("lr1-1").uncheck()
    assert [line["name"] for line in seen.drawn("train/loss")] == ["lr1-0", "lr2-0", "lr2-1"]
    assert "lr1-1" not in page.locator("#differences thead").first.inner_text()
    assert "lr1-1" not in page.locator("#table-values").inner_text()
    assert "lr1-1" not in page.locator("#table-anatomy").inner_text()
    page.locator("#curves .legend button").filter(has_text="lr1-1").first.click()
    expect(page.locator("#runs").get_by_label("lr1-1")).to_be_checked()
    page.get_by_role("button", name="Hide all").click()
    assert seen.drawn("train/loss") == []
    page.get_by_role("button", name="Show all").click()
    assert len(seen.drawn("train/loss")) == 4


def test_smoothing_logarithms_and_zoom_are_for_all_charts(seen: OpenedPage, single: str) -> None:
    page = seen.open(single)
    seen.drawn("train/loss")
    page.locator("#smooth").fill("0.9")
    # The shorter runs have too few points to be smoothed.
    assert {line["meta"] for line in seen.drawn("train/loss")} == {
        "raw",
        "smoothed",
        "curve",
    }
    page.locator("#log").check()
    assert page.evaluate("document.querySelector('.chart').layout.yaxis.type") == "log"
    page.locator("input.from").fill("10")
    page.locator("input.to").fill("20")
    page.locator("input.to").press("Tab")
    until(
        page,
        "[...document.querySelectorAll('.chart.js-plotly-plot')].every(chart => String(chart.layout.xaxis.range) === '10,20')",
    )


def test_a_group_is_its_mean_with_a_band(seen: OpenedPage, grouped: str) -> None:
    page = seen.open(grouped)
    low, high, mean, *others = seen.drawn("train/loss")
    assert [trace["meta"] for trace in (low, high, mean)] == ["low", "high", "curve"]
    assert mean["name"] == "lr=1"
    assert mean["y"] == pytest.approx([10.5 + 1 / step for step in range(1, STEPS + 1)], rel=1e-5)
    assert low["y"] == pytest.approx([10 + 1 / step for step in range(1, STEPS + 1)], rel=1e-5)
    assert high["y"] == pytest.approx([11 + 1 / step for step in range(1, STEPS + 1)], rel=1e-5)
    assert len(others) == 3
    page.get_by_role("button", name="± deviation").click()
    assert seen.drawn("train/loss")[1]["y"][0] == pytest.approx(11.5 + 0.5**0.5)
    page.get_by_role("button", name="Single runs").click()
    assert [trace["name"] for trace in seen.drawn("train/loss")] == ["lr1-0", "lr1-1", "lr2-0", "lr2-1"]
    page.get_by_role("button", name="Min to max").click()
    page.locator("#table-runs button.fold").first.click()
    page.locator("#runs").get_by_label("lr1-1").uncheck()
    assert seen.drawn("train/loss")[2]["y"][0] == pytest.approx(11)  # the mean of the remaining run
    assert page.locator("#runs").get_by_label("lr=1").evaluate("box => box.indeterminate")


def test_the_band_of_a_group_with_many_points_contains_every_spike(seen: OpenedPage, tmp_path: Path) -> None:
    losses = {step: 1 + 1 / step for step in range(1, 1801)}
    runs = [
        write_run(tmp_path, "spike", losses | {777: 90.0}, settings={"seed": 0}),
        write_run(tmp_path, "dip", losses | {1234: -90.0}, settings={"seed": 1}),
    ]
    comparison = Comparison([RunFolder.read(run) for run in runs], group_by="seed")
    seen.open(write_comparison(comparison, tmp_path / "compare.html").as_uri())
    low, high, mean = seen.drawn("train/loss")
    assert 300 <= len(mean["x"]) <= 500
    assert (low["x"][0], low["x"][-1]) == (1, 1800)
    assert (max(high["y"]), high["x"][high["y"].index(90)]) == (90, 777)
    assert (min(low["y"]), low["x"][low["y"].index(-90)]) == (-90, 1234)


def test_differing_settings_are_listed_and_long_values_are_collapsed(seen: OpenedPage, single: str) -> None:
    page = seen.open(single)
    settings = page.locator("#table-differences-settings")
    assert settings.locator("tbody td:first-child").all_inner_texts() == ["lr", "seed", "note"]
    long = settings.locator("details").first
    assert len(long.locator("summary").inner_text()) < 70
    long.locator("summary").click()
    assert long.locator(".cell").inner_text().count("a word") == 30


def test_the_table_of_values_can_be_sorted_and_searched(seen: OpenedPage, grouped: str) -> None:
    page = seen.open(grouped)
    page.locator("#value-search").fill("train/LOSS")
    values = page.locator("#table-values")
    expect(values.locator("tbody tr")).to_have_count(2)
    values.get_by_role("button", name="value").click()
    assert values.locator("tbody td:nth-child(2)").all_inner_texts() == ["lr=2", "lr=1"]
    text = values.locator("tbody tr").first.inner_text()
    assert "20.53 ± 0.71" in text
    assert "+10.017" in text
    assert "more than noise, p\u00a0=\u00a0" in text


def test_results_are_at_the_top(seen: OpenedPage, grouped: str) -> None:
    page = seen.open(grouped)
    results = page.locator("#table-results")
    heads = [text.splitlines()[0] for text in results.locator("thead th").all_inner_texts()]
    assert heads[1:3] == ["train/loss", "step_seconds"]
    first, second = (results.locator("tbody tr").nth(number) for number in (0, 1))
    assert first.locator("b").first.inner_text() == "10.52 ± 0.71"
    assert "+95.2 %, worse" in second.inner_text()
    page.locator("#table-runs input[type=checkbox]").first.uncheck()
    expect(results.locator("tbody tr")).to_have_count(1)


def test_if_all_runs_are_hidden_every_section_says_so(seen: OpenedPage, grouped: str) -> None:
    page = seen.open(grouped)
    boxes = page.locator("#table-runs input[type=checkbox]")
    for number in range(boxes.count()):
        if boxes.nth(number).is_checked():
            boxes.nth(number).uncheck()
    for section in ("results", "problems", "anatomy", "values"):
        expect(page.locator(f"#{section}")).to_contain_text("All runs are hidden.")
        expect(page.locator(f"#{section} table")).to_have_count(0)


def test_slowdowns_are_described_in_words(seen: OpenedPage, grouped: str) -> None:
    page = seen.open(grouped)
    row = page.locator("#table-anatomy tbody tr").filter(has_text="forward").first
    assert row.locator("td").nth(1).inner_text().startswith("50 ms, 50 %")
    assert "▲ slower, 2 times as long" in row.locator("td").nth(2).inner_text()
    step = page.locator("#table-anatomy tbody tr").filter(has_text="train_step")
    assert "▲ 50 % slower" in step.inner_text()


def test_hostile_names_do_nothing(seen: OpenedPage, tmp_path: Path) -> None:
    folders = []
    for name in ("one", "other"):
        run = write_run(
            tmp_path, name, {1: 1.0, 2: 2.0, 3: 3.0}, more={f"hostile/{HOSTILE}": 1.0}, settings={HOSTILE: HOSTILE + name}
        )
        text = (run / "events.jsonl").read_text().replace(f'"{name}"', json.dumps(HOSTILE + name))
        (run / "run.json").unlink()  # so that the name is taken from the events
        (run / "events.jsonl").write_text(text)
        folders.append(run)
    for group_by in (None, HOSTILE):
        comparison = Comparison([RunFolder.read(run) for run in folders], group_by=group_by)
        page = seen.open(write_comparison(comparison, tmp_path / "compare.html").as_uri())
        page.locator(".chart-card").first.scroll_into_view_if_needed()
        box = page.locator(".chart-card").first.locator(".nsewdrag")
        box.hover()
        page.locator(".hoverlayer text").first.wait_for()
        assert page.evaluate("window.hostile") is None
        assert page.locator("img").count() == 0
        assert (
            HOSTILE in page.locator("#runs").inner_html().replace("&lt;", "<").replace("&gt;", ">").replace("&quot;", '"')
            or group_by
        )


def test_everything_of_real_runs_is_drawn(seen: OpenedPage, folder: Path, tmp_path: Path) -> None:
    comparison = Comparison([RunFolder.read(folder), RunFolder.read(folder)])
    page = seen.open(write_comparison(comparison, tmp_path / "compare.html").as_uri())
    parts = [
        "Runs",
        "Results",
        "Curves",
        "Values",
        "Anatomy of a step",
        "Problems",
        "Evaluations",
        "Checkpoints",
        "Tables",
        "Images",
    ]
    assert page.locator("nav a").all_inner_texts() == parts
    slider = page.locator("#images input[type=range]")
    slider.scroll_into_view_if_needed()
    slider.press("Home")
    assert page.locator("#images .one img").count() == 4
    page.locator("#tables input[type=range]").press("Home")
    assert "at step 20" in page.locator("#tables .one").first.inner_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone(chromium: Any, grouped: str, scheme: str) -> None:
    seen = OpenedPage(chromium, offline=True, viewport={"width": NARROW, "height": 800}, color_scheme=scheme)
    page = seen.open(grouped)
    seen.drawn("train/loss")
    assert page.evaluate("document.documentElement.scrollWidth") <= NARROW
    assert seen.faults == []
    seen.context.close()


def test_a_last_value_that_is_not_finite_is_named(seen: OpenedPage, tmp_path: Path) -> None:
    """The headings of charts and the summary name it: the last finite value would look like a result."""
    good, bad = (write_run(tmp_path, name, {1: 3.0, 2: 2.0, 3: last}) for name, last in (("good", 1.0), ("bad", float("nan"))))
    page = seen.open(
        write_comparison(Comparison([RunFolder.read(run) for run in (good, bad)]), tmp_path / "compare.html").as_uri()
    )
    card = page.locator(".chart-card").filter(has=page.get_by_role("heading", name="train/loss", exact=True))
    assert card.locator("b").all_inner_texts() == ["1", "not finite"]
    page = seen.open(write_report(bad).as_uri())
    assert page.locator(".tile").first.inner_text().splitlines()[:2] == ["train/loss", "not finite"]
    assert page.locator(".chart-card b").first.inner_text() == "not finite"


def hovered(page: Any, title: str, share: float) -> list[str]:
    """Return the lines of the hover box at the given share of a chart's width."""
    card = page.locator(".chart-card").filter(has=page.get_by_role("heading", name=title, exact=True))
    card.scroll_into_view_if_needed()
    card.locator(".plot-container").wait_for()
    box = card.locator(".nsewdrag").bounding_box()
    page.mouse.move(box["x"] + share * box["width"] - 4, box["y"] + box["height"] / 2)
    page.mouse.move(box["x"] + share * box["width"], box["y"] + box["height"] / 2)
    page.wait_for_timeout(300)
    return [(text or "").strip() for text in card.locator(".hoverlayer text").all_text_contents()]


def test_the_values_below_the_pointer_are_those_of_its_step(seen: OpenedPage, tmp_path: Path) -> None:
    """A run that ended earlier, or has no finite value at the step, is not in the box."""
    steps = range(10, 410, 10)
    losses = {
        "whole": {step: 1.0 * step for step in steps},
        "short": {step: 2.0 * step for step in steps if step <= 100},
        "nan": {step: 3.0 * step if step <= 200 else float("nan") for step in steps},
        "sparse": {step: 4.0 * step for step in steps if step % 80 == 0},
    }
    runs = [RunFolder.read(write_run(tmp_path, name, each)) for name, each in losses.items()]
    page = seen.open(write_comparison(Comparison(runs), tmp_path / "compare.html").as_uri())
    late = " ".join(hovered(page, "train/loss", 0.8))
    assert "whole" in late
    assert "short" not in late
    assert "nan" not in late
    early = " ".join(hovered(page, "train/loss", 0.2))
    assert all(name in early for name in losses)
    assert re.search(r"sparse : 320 *\(step 80\)", early), early
    assert "The numbers of steps differ (100 to 400)" in page.locator("#results").inner_text()
