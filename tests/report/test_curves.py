"""Curves are thinned without losing extremes, and grouped into charts."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from callsheet import MetricsRecord
from callsheet.report import RunFolder
from callsheet.report.contents import contents
from callsheet.report.curves import MAX_POINTS_PER_CURVE, OTHERS_FAMILY, curves, families, select_points

SPLITS = ["train", "validation"]


@given(ys=st.lists(st.floats(), max_size=300), most=st.integers(10, 60))
def test_thinning_keeps_the_ends_and_the_extremes(ys: list[float], most: int) -> None:
    kept = select_points(range(len(ys)), ys, most)
    assert len(kept) <= max(most, 0)
    assert kept == sorted(set(kept))
    if len(ys) <= most:
        assert kept == list(range(len(ys)))
        return
    assert {0, len(ys) - 1} <= set(kept)
    shown = [ys[index] for index in kept]
    finite = [value for value in ys if math.isfinite(value)]
    if finite:
        assert max(finite) in shown
        assert min(finite) in shown
    assert any(not math.isfinite(value) for value in shown) == any(not math.isfinite(value) for value in ys)


def run_of(records: list[MetricsRecord]) -> RunFolder:
    return RunFolder(Path(), "run", records=records, times=[math.nan] * len(records))


def test_a_short_run_is_drawn_whole() -> None:
    drawn = curves(run_of([MetricsRecord(step, {"train/loss": 1 / step}, elapsed_seconds=step * 2.0) for step in range(1, 1001)]))
    curve = drawn["curves"]["train/loss"]
    assert curve["x"] == list(range(1, 1001))
    assert curve["y"] == [float(f"{1 / step:.9g}") for step in range(1, 1001)]
    assert (drawn["axis"]["step"], drawn["axis"]["seconds"]) == (curve["x"], [step * 2.0 for step in curve["x"]])
    assert drawn["axis"]["tokens"] == []


def test_a_spike_and_a_nan_among_many_are_drawn() -> None:
    values = {12_345: 99.0, 54_321: math.nan}
    drawn = curves(run_of([MetricsRecord(step, {"train/loss": values.get(step, 1.0)}) for step in range(100_000)]))
    curve = drawn["curves"]["train/loss"]
    points = dict(zip(curve["x"], curve["y"], strict=True))
    assert len(points) <= MAX_POINTS_PER_CURVE
    assert (points[12_345], points[54_321], points[99_999]) == (99.0, None, 1.0)
    assert (curve["count"], curve["odd"], curve["odd_at"]) == (100_000, 1, [(54_321, "NaN")])


@pytest.mark.test_all
def test_many_metrics_do_not_reduce_the_points_of_the_loss() -> None:
    names = [f"l2_norm/grad/layer.{number}" for number in range(2000)]
    records = [MetricsRecord(step, {"train/loss": float(step), **dict.fromkeys(names, float(step % 7))}) for step in range(1500)]
    drawn = curves(run_of(records))["curves"]
    assert len(drawn["train/loss"]["x"]) == 1500
    assert 100 < len(drawn["l2_norm/grad/layer.5"]["x"]) < 300
    assert sum(len(curve["x"]) for curve in drawn.values()) <= 510_000


def charts(names: list[str], splits: list[str] = SPLITS) -> dict[str, list[tuple[str, list[str]]]]:
    """Return the title of each chart and the labels of its curves, by family."""
    return {
        family["name"]: [(chart["title"], [curve["label"] for curve in chart["curves"]]) for chart in family["charts"]]
        for family in families(names, splits)
    }


def test_training_and_validation_share_a_chart_and_the_loss_comes_first() -> None:
    found = charts(["train/grad_norm", "validation/accuracy", "validation/loss", "train/loss", "lr/SGD/0", "lr/SGD/1"])
    assert found == {
        "": [
            ("loss", ["train", "validation"]),
            ("accuracy", ["validation"]),
            ("grad_norm", ["train"]),
            ("lr", ["SGD/0", "SGD/1"]),
        ]
    }


def test_metrics_are_grouped_by_family_and_lone_metrics_by_unit() -> None:
    found = charts(
        [
            "time/batch",
            "time/token",
            "z/a",
            "z/layer.10",
            "z/layer.2",
            "memory/resident",
            "memory/ooms",
            "alone/x",
            "gpu/use/0",
            "gpu/use/1",
        ]
    )
    assert found == {
        "memory": [("memory", ["resident"]), ("ooms", ["ooms"])],
        "z": [("a", ["a"]), ("layer.2", ["layer.2"]), ("layer.10", ["layer.10"])],
        OTHERS_FAMILY: [("alone/x", ["x"]), ("gpu/use", ["0", "1"])],
        "time": [("batch", ["batch"]), ("token", ["token"])],
    }


def test_the_speed_of_a_device_is_shown_with_that_of_all_and_not_twice() -> None:
    def drawn(scale: float) -> list[list[str]]:
        values = {"throughput/samples_per_second": 8.0, "throughput/device/samples_per_second": 8.0 * scale, "throughput/a": 1.0}
        (family,) = curves(run_of([MetricsRecord(1, values)]))["families"]
        return [[curve["name"] for curve in chart["curves"]] for chart in family["charts"]]

    assert drawn(1.0) == [["throughput/a"], ["throughput/samples_per_second"]]
    assert drawn(0.5) == [["throughput/a"], ["throughput/samples_per_second", "throughput/device/samples_per_second"]]


def test_measurements_of_records_are_drawn_if_there_is_no_monitor() -> None:
    record = MetricsRecord(1, {"train/loss": 1.0}, samples_per_second=5.0, tokens_per_second=7.0, memory_bytes=11)
    drawn = curves(run_of([record]))["curves"]
    assert drawn["throughput/samples_per_second"]["y"] == [5.0]
    assert drawn["memory/process"]["y"] == [11.0]
    monitored = MetricsRecord(
        1, {"throughput/samples_per_second": 6.0, "memory/resident": 1.0}, samples_per_second=5.0, memory_bytes=11
    )
    drawn = curves(run_of([monitored]))["curves"]
    assert drawn["throughput/samples_per_second"]["y"] == [6.0]
    assert "memory/process" not in drawn


@pytest.mark.parametrize("is_monitored", [True, False])
def test_the_tiles_agree_with_the_charts(is_monitored: bool) -> None:
    """The speed and memory in the tiles are those of the charts, and the tiles name what they measure."""
    more = [
        {"throughput/tokens_per_second": rate, "memory/resident": 3.0, "memory/peak_resident": peak}
        for rate, peak in ((90.0, 7.0), (110.0, 8.0))
    ]
    records = [
        MetricsRecord(
            step,
            {"time/token": 500.0 * step, "train/tokens_per_second": 1.0} | (more[step - 1] if is_monitored else {}),
            elapsed_seconds=5.0 * step,
            tokens_per_second=100.0 + step,
            memory_bytes=step,
        )
        for step in (1, 2)
    ]
    run = run_of(records)
    speed, most = contents(run)["tiles"]
    shown = curves(run)["curves"]
    assert speed == {
        "label": "tokens per second",
        "value": 100.0,
        "detail": "the whole run, all ranks",
        "last": shown["throughput/tokens_per_second"]["y"][-1],
        "kind": "count",
    }
    name = "memory/peak_resident" if is_monitored else "memory/process"
    assert (most["value"], most["detail"]) == (max(shown[name]["y"]), f"of {name}")


def test_odd_metric_names_get_a_chart() -> None:
    assert charts(["", "/", "loss", "train/", "/x", "a//b"]) == {
        "": [("loss", ["loss"]), ("", [""]), ("/", ["/"]), ("train/", ["train/"]), ("x", ["x"])],
        OTHERS_FAMILY: [("a//b", ["/b"])],
    }
