"""A run that is killed and restarted on several ranks has the losses of an uninterrupted run on every rank, bit by bit.

The long version, with more kinds of runs and deaths and a table of the results, is `make oracle`.
"""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest

from .ranked_run import STEPS, Death, Setting, Survival, flip_a_bit, launch_once, survives, undisturbed

SETTINGS = {
    "ddp": Setting("ddp", 2, workers=4, in_background=True, pause=0.002),
    "fsdp": Setting("fsdp", 2, workers=4, in_background=True, pause=0.002),
    "replicas of shards": Setting("fsdp", 4, shard_size=2),
    "one rank": Setting(workers=4, loader="stateful", in_background=True, pause=0.002),
}

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def check(survival: Survival, wanted: list[dict[str, object]], *, records: bool = True) -> None:
    for found, good in zip(survival.values, wanted, strict=True):
        assert found["losses"] == good["losses"]
        assert found["weights"] == good["weights"]
        if records:
            assert found["records"] == good["records"]


@pytest.mark.test_all
@pytest.mark.parametrize("name", [name if name == "fsdp" else pytest.param(name, marks=pytest.mark.slow) for name in SETTINGS])
def test_a_run_killed_twice_inside_a_save_has_the_losses_of_an_uninterrupted_one(name: str, tmp_path: Path) -> None:
    setting = SETTINGS[name]
    good = undisturbed(tmp_path / "undisturbed", setting)
    assert [len(value["losses"]) for value in good] == [STEPS] * setting.world_size
    deaths = [Death(in_save=3), Death(rank=setting.world_size - 1, in_save=2)]
    survival = survives(tmp_path / "killed", setting, deaths)
    assert survival.deaths == 2
    check(survival, good)


@pytest.mark.slow
def test_a_run_with_kills_a_damaged_checkpoint_and_a_preemption_has_the_same_losses(tmp_path: Path) -> None:
    random.seed(3)
    setting = SETTINGS["fsdp"]
    good = undisturbed(tmp_path / "undisturbed", setting)
    deaths = [Death(in_save=5), Death(in_save=3), Death(signal=signal.SIGTERM, after=0.3)]
    survival = survives(tmp_path / "killed", setting, deaths, between=flip_a_bit)
    assert survival.deaths >= 2
    check(survival, good, records=False)  # a preempted run fires an additional record before it ends


@pytest.mark.slow
def test_a_run_of_four_ranks_resumes_with_two(tmp_path: Path) -> None:
    """The global batches are the same, but sums are in another order, so losses are compared with a tolerance.

    The run has no dropout and augmentation, as each rank draws its own.
    """
    four, two = Setting("fsdp", 4, noise=0.0), Setting("fsdp", 2, noise=0.0)
    good = undisturbed(tmp_path / "undisturbed", four)
    ends = launch_once(tmp_path / "moved", four, Death(in_save=5), seed=5)
    assert all(end.value is None for end in ends)
    moved = undisturbed(tmp_path / "moved", two)
    counts, losses = (
        [
            [
                (step, {name: float.fromhex(value) for name, value in values.items() if name.startswith(family)})
                for step, values in run
            ]
            for run in (moved[0]["records"], good[0]["records"])
        ]
        for family in ("time/", ("train/", "validation/"))
    )
    assert counts[0] == counts[1]
    for (step, found), (_, wanted) in zip(*losses, strict=True):
        if step != 9:  # part of this record was collected by ranks that no longer exist
            assert found == pytest.approx(wanted, rel=1e-4), step
