"""How often `callsheet exec` makes metrics records, and what its default observers log with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from callsheet.exec.log_pace import LogPace
from callsheet.report import RunFolder
from forked import run_forked  # type: ignore[import-not-found]  # pytest has its folder on the path

SCRIPT = """
import sys, torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(1, 201):
    optimizer.zero_grad()
    loss = (model(torch.ones(8, 4)) ** 2).mean()
    if step == int(sys.argv[1]):
        loss = loss * float("nan")
    loss.backward()
    optimizer.step()
"""


def run_observed(folder: Path, *exec_words: str, nan_at: int = 0) -> tuple[RunFolder, str]:
    (folder / "train.py").write_text(SCRIPT)
    done = run_forked(folder, "train.py", str(nan_at), exec_words=["--run_name", "a", *exec_words])
    assert done.returncode == 0, done.stderr
    return RunFolder.read(folder / "runs" / "a"), done.stderr


def test_the_interval_doubles_while_records_come_less_than_two_seconds_apart() -> None:
    pace = LogPace(None)
    assert [(pace.adapt(seconds), pace.steps) for seconds in (1.8, 3.9, 5.6, 7.4, 60.0)] == [
        (True, 20),
        (False, 20),
        (True, 40),
        (True, 80),
        (False, 80),
    ]


def test_the_interval_returns_to_the_first_one_after_ten_seconds_without_a_record() -> None:
    pace = LogPace(None)
    for seconds in (0.1, 0.2, 0.3):
        pace.adapt(seconds)
    assert [(pace.shorten(seconds), pace.steps) for seconds in (9.9, 10.1, 10.1)] == [(False, 80), (True, 10), (False, 10)]


BECOMES_SLOW = (
    SCRIPT.replace("201", "1341")
    .replace("sys.argv[1])", "sys.argv[1]) or step > 1285")
    .replace('loss * float("nan")', "loss; time.sleep(1.1 if step < 1295 else 0.05)")
)


@pytest.mark.test_all
def test_records_are_frequent_again_when_steps_become_slow(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import time\n" + BECOMES_SLOW)
    done = run_forked(tmp_path, "train.py", "0", exec_words=["--run_name", "a"])
    assert done.returncode == 0, done.stderr
    records = {record.step: record for record in RunFolder.read(tmp_path / "runs" / "a").records}
    later = [record.values for step, record in records.items() if 1300 < step < 1340]
    assert later  # the interval that the fast steps had would give no record here
    assert any("l2_norm/grad/global" in values for values in later)


def test_a_given_interval_does_not_change() -> None:
    pace = LogPace(7)
    assert not pace.adapt(0.01)
    assert not pace.shorten(100.0)
    assert pace.steps == 7


def test_the_interval_between_records_of_short_steps_grows(tmp_path: Path) -> None:
    run, _ = run_observed(tmp_path)
    # What is expected is computed from the measured times, because a busy machine may take a second for ten steps.
    pace, expected = LogPace(None), [10]
    for record in run.records[:-1]:
        pace.adapt(record.elapsed_seconds)
        expected.append(min((record.step // pace.steps + 1) * pace.steps, 200))
    assert [record.step for record in run.records] == expected
    assert len(expected) < 20  # a fixed interval would give 20 records
    for record in run.records:
        has_norm = not record.step % 10 and record.step in expected[:-1]
        assert not has_norm or "l2_norm/grad/global" in record.values, record


def test_every_record_at_a_given_interval_has_the_gradient_norm(tmp_path: Path) -> None:
    run, _ = run_observed(tmp_path, "--log_interval", "40")
    assert [record.step for record in run.records] == [40, 80, 120, 160, 200]
    assert all("l2_norm/grad/global" in record.values for record in run.records)


@pytest.mark.parametrize("interval", ["1", "50"])
def test_a_loss_that_is_not_finite_is_reported_once(tmp_path: Path, interval: str) -> None:
    _, printed = run_observed(tmp_path, "--log_interval", interval, nan_at=60)
    found = [line for line in printed.splitlines() if "LossCheck" in line]
    assert len(found) == 1, printed
    assert ("steps 60 to 60 is nan" if interval == "1" else "steps 51 to 100 is nan") in found[0]


CLOSURE_LATER = """
import torch
from torch import nn


class Twice(torch.optim.SGD):
    def step(self, closure=None):
        if closure is not None:
            with torch.enable_grad():
                closure()
                closure()
        return super().step()


torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = Twice(model.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
shift = 0.0


def closure():
    global loss, shift
    shift += 1.0
    loss = (model(torch.ones(8, 4)) ** 2).mean() + shift
    loss.backward()
    return loss


for step in range(46):
    optimizer.zero_grad()
    if step < 43:
        closure()
        optimizer.step()
    else:
        optimizer.step(closure)
    print(loss.item(), optimizer.param_groups[0]["lr"])
    schedule.step()
"""


def test_a_closure_that_is_first_used_late_is_recorded_with_its_last_loss(tmp_path: Path) -> None:
    """Between records no hook runs before the optimizer's step, so the first closure must register it."""
    (tmp_path / "train.py").write_text(CLOSURE_LATER)
    (tmp_path / "none.yaml").write_text("[]")
    done = run_forked(tmp_path, "train.py", exec_words=["--run_name", "a", "--log_interval", "1", "--callbacks", "none.yaml"])
    assert done.returncode == 0, done.stderr
    expected = [tuple(map(float, line.split())) for line in done.stdout.splitlines()]
    records = RunFolder.read(tmp_path / "runs" / "a").records
    assert [record.values["train/loss"] for record in records] == pytest.approx([loss for loss, _ in expected])
    assert [record.values["train/learning_rate"] for record in records] == [rate for _, rate in expected]
    assert [record.values["time/batch"] for record in records] == list(range(1, 47))
