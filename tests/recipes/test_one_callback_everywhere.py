"""The same callbacks work unchanged in every recipe, with the same events, fields and metric names."""

from __future__ import annotations

import math
import re
from functools import cache
from pathlib import Path

import pytest

from callsheet.callbacks import CheckpointSaver
from callsheet.cli.shipped import RECIPES
from callsheet.core.spec import import_path
from callsheet.testing import check_events

from . import tiny
from .everywhere import RecordsEvents, Report

COMMON = {
    *("train/loss", "train/grad_norm", "train/learning_rate", "train/tokens_per_second"),
    *("time/epoch", "time/batch", "time/sample", "time/token"),
    *("validation/loss", "test/loss", "everywhere/steps"),
}
"""The metrics that every recipe has under these names."""

MORE = {
    "pretrain": {"train/label_tokens"},
    "finetune": {"train/label_tokens"},
    "finetune_vlm": {"train/label_tokens"},
    "classify": {f"{dataset}/{metric}" for dataset in ("validation", "test") for metric in ("accuracy", "f1")},
    "distill": {
        *("train/label_tokens", "train/ce_loss", "train/kd_loss"),
        *(f"{dataset}/{loss}" for dataset in ("validation", "test") for loss in ("ce_loss", "kd_loss", "teacher_loss")),
    },
}
"""The metrics that only some recipes have."""


ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("everywhere")


@cache
def recorded(name: str, folder: Path) -> tuple[RecordsEvents, Report]:
    """Run the recipe's tiny job once for all tests, and return both callbacks."""
    recorder, report = RecordsEvents(), Report()
    config = getattr(tiny, f"tiny_{name}")(folder / name)
    recipe = import_path(RECIPES[name])(config, callbacks=[report, CheckpointSaver(save_interval="2ba"), recorder])
    recipe.setup()
    recipe.run()
    return recorder, report


@pytest.mark.parametrize("name", RECIPES)
def test_events_and_fields_are_the_same_as_in_pretraining(name: str, folder: Path) -> None:
    events = [event for event, *_ in recorded(name, folder)[0].recorded]
    check_events(events)
    assert recorded(name, folder)[0].recorded == recorded("pretrain", folder)[0].recorded


@pytest.mark.parametrize("name", RECIPES)
def test_metrics_have_the_same_names_in_every_recipe(name: str, folder: Path) -> None:
    _, report = recorded(name, folder)
    names = {metric for _, values in report.records for metric in values}
    assert names == COMMON | MORE.get(name, set())
    assert [step for step, _ in report.records] == [step for step, _ in recorded("pretrain", folder)[1].records]
    assert all(math.isfinite(value) for _, values in report.records for value in values.values())


@pytest.mark.parametrize("name", RECIPES)
def test_the_docs_list_exactly_the_metrics_of_each_recipe(name: str) -> None:
    page = (ROOT / "docs" / "reference" / "recipe_keys.md").read_text(encoding="utf-8")
    rows = [line.split(" | ") for line in page.partition("## Metrics\n")[2].splitlines() if line.startswith("| `")]
    documented = {
        metric.replace("<dataset>", dataset)
        for metrics, _, recipes, _ in rows
        if recipes == "all" or f"`{name}`" in recipes
        for metric in re.findall(r"`([^`]+)`", metrics)
        for dataset in ("validation", "test")
    }
    assert documented == (COMMON | MORE[name]) - {"everywhere/steps"}


@pytest.mark.parametrize("name", RECIPES)
def test_a_callback_can_collect_a_report_of_each_recipe(name: str, folder: Path) -> None:
    _, report = recorded(name, folder)
    assert (report.steps, report.outcome) == (4, "finished")
    assert len(report.losses) == len(report.norms) == 4
    means = [values["train/loss"] for _, values in report.records if "train/loss" in values]
    # Rows of one or two tokens have the same weight.
    assert means == pytest.approx([sum(report.losses[:2]) / 2, sum(report.losses[2:]) / 2], rel=1e-5)
    assert [step for step, _ in report.evaluations] == [2, 4]
    assert [(step, {"validation": results["validation"]["loss"]}) for step, results in report.evaluations] == report.checkpoints
    assert report.tests[0]["loss"] > 0
