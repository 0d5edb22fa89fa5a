"""Resume at any position in the data, also with another number of ranks: the rest of the epoch is unchanged."""

from __future__ import annotations

import logging
import pickle
import random
from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from callsheet.checkpoint import flatten, unflatten
from callsheet.core.randomness import seed_all
from callsheet.core.ranks import Ranks, read_ranks
from callsheet.errors import ConfigError
from callsheet.run.process_groups import ProcessGroups
from callsheet.testing.ranks import run_ranks
from callsheet.trainer.batches import TrainBatches
from callsheet.trainer.data import SeededDataset, SharedBatches

from .small_run import Noisy

pytestmark = pytest.mark.filterwarnings("ignore:.*set_vital", "ignore:This DataLoader will create")

SAMPLES = 22

State = dict[str, Any]


class Numbers(Dataset[Tensor]):
    """Samples of (index, noise). `loaded` lists the indices that this process has loaded."""

    def __init__(self, n: int = SAMPLES) -> None:
        self.n = n
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Tensor:
        self.loaded.append(index)
        return torch.tensor([index, random.random(), float(torch.rand(()))])


class Stream:
    """Yields batches in random order; it has no length."""

    def __init__(self, batches: int, first: int = 0) -> None:
        self.batches = batches
        self.first = first

    def __iter__(self) -> Iterator[Tensor]:
        for number in random.sample(range(self.first, self.first + self.batches), self.batches):
            yield torch.tensor([[number, random.random(), float(torch.rand(()))]])


class StatefulStream(Stream):
    """Yields batches in order; its state dict holds the position, from which it continues."""

    def __init__(self, batches: int, first: int = 0) -> None:
        super().__init__(batches, first)
        self.at = self.come_back_to = 0

    def __iter__(self) -> Iterator[Tensor]:
        self.at, self.come_back_to = self.come_back_to, 0
        return self._rest()

    def _rest(self) -> Iterator[Tensor]:
        while self.at < self.batches:
            self.at += 1
            yield torch.tensor([[self.first + self.at - 1, random.random()]])

    def state_dict(self) -> State:
        return {"at": self.at}

    def load_state_dict(self, state: State) -> None:
        self.come_back_to = state["at"]


def loader_for(kind: str, rank: int = 0, batch_size: int = 2) -> Any:
    options = {"batch_size": batch_size, "shuffle": True}
    if kind in ("resampled", "workers"):
        workers = {"num_workers": 4, "persistent_workers": True, "multiprocessing_context": "fork"} if kind == "workers" else {}
        return DataLoader(Numbers(), **options, **workers)  # type: ignore[arg-type]  # as it is called
    own = 3 + 2 * rank  # batches
    return {
        "dropping": DataLoader(Numbers(), **options, drop_last=True),  # type: ignore[arg-type]
        "round_robin": Stream(7),
        "round_robin stateful": StatefulStream(7),
        "round_robin list": [torch.full((2, 1), n) for n in range(9)],
        "presharded": [torch.full((1, 1), 10 * rank + n) for n in range(own)],
        "presharded unknown": Stream(own, 10 * rank),
        "presharded stateful": StatefulStream(own, 10 * rank),
    }[kind]


def made_batches(groups: ProcessGroups, kind: str, batch_size: int = 2) -> TrainBatches:
    batches = TrainBatches(groups, 9, shard=not kind.startswith("presharded"), count_samples=len)
    batches.load(loader_for(kind, groups.rank, batch_size))
    return batches


def trained(batches: TrainBatches, number: int, until: int | None = None) -> list[Any]:
    """Return the batches that training would receive in an epoch, up to its end or to `until` batches."""
    seen: list[Any] = []
    epoch = batches.epoch(number)
    while (until is None or batches.taken < until) and (batch := next(epoch, None)) is not None:
        share = (epoch.samples_here, epoch.samples_in_all, epoch.is_filler) if isinstance(epoch, SharedBatches) else None
        seen.append((batch.tolist(), share, float(torch.rand(()))))  # dropout draws too
        batches.taken += 1
    if until is None:
        batches.end_epoch()
    return seen


def saved(state: State) -> State:
    """Return the state as a checkpoint stores and restores it."""
    read: State = unflatten(*flatten(state))
    return read


# --- several ranks ---


def compare_at_every_position(kinds: list[str]) -> dict[str, list[Any]]:
    """Compare, on one rank, two uninterrupted epochs with ones that new objects resume at every position of the second epoch.

    The new objects start in another random state. Returns the positions with a difference, by kind of loader.
    """
    groups = ProcessGroups(read_ranks(), torch.device("cpu"), timeout=60)
    wrong: dict[str, list[Any]] = {}
    for kind in kinds:
        seed_all(groups.rank)
        straight = made_batches(groups, kind)
        trained(straight, 1)
        start = saved(straight.state_dict())
        expected = [trained(straight, 2), trained(straight, 3)]
        wrong[kind] = []
        for place in range(len(expected[0]) + 1):
            first = made_batches(groups, kind)
            first.load_state_dict(start)
            before = trained(first, 2, until=place)
            state = saved(first.state_dict())
            is_at_end = first.is_at_end
            seed_all(100 + place)
            second = TrainBatches(groups, 1000 + place, shard=not kind.startswith("presharded"), count_samples=len)
            second.load_state_dict(state)
            second.load(loader_for(kind, groups.rank))
            assert saved(second.state_dict()).keys() == state.keys()
            second.epoch(2)
            third = made_batches(groups, kind)
            third.load_state_dict(saved(second.state_dict()))
            found = [before + trained(third, 2), trained(third, 3)]
            if found != expected or (third.length is not None and is_at_end != (place == len(expected[0]))):
                wrong[kind].append((place, is_at_end, found, expected))
    groups.close()
    return wrong


@pytest.mark.parametrize(
    "kinds",
    [
        ["resampled", "dropping"],
        ["round_robin", "round_robin stateful", "round_robin list"],
        ["presharded", "presharded unknown", "presharded stateful"],
    ],
)
def test_an_epoch_resumed_at_any_position_has_the_same_remaining_batches(kinds: list[str]) -> None:
    for wrong in run_ranks(compare_at_every_position, 2, kinds):
        assert wrong == {kind: [] for kind in kinds}


def with_workers() -> tuple[list[Any], list[Any], int]:
    """Return an uninterrupted epoch, a resumed one, and the number of samples with repeated noise, with four workers."""
    groups = ProcessGroups(read_ranks(), torch.device("cpu"), timeout=60)
    seed_all(groups.rank)
    straight = made_batches(groups, "workers")
    epochs = [trained(straight, number) for number in (1, 2)]
    seed_all(groups.rank)
    first = made_batches(groups, "workers")
    trained(first, 1)
    before = trained(first, 2, until=3)
    state = saved(first.state_dict())
    seed_all(50)
    second = made_batches(groups, "workers")
    second.load_state_dict(state)
    found = before + trained(second, 2)
    groups.close()
    noise = {sample[0]: sample[1] for batch, _, _ in epochs[0] for sample in batch}
    same = sum(noise.get(sample[0]) == sample[1] for batch, _, _ in epochs[1] for sample in batch)
    return epochs[1], found, same


def test_augmentation_in_workers_is_exact_on_several_ranks() -> None:
    for expected, found, same in run_ranks(with_workers, 2):
        assert found == expected
        assert same == 0  # persistent workers received the second epoch


def batches_of_second_epoch(
    kind: str, batch_size: int, place: int, state: bytes | None, until: int | None
) -> tuple[list[Any], bytes]:
    """Return the batches that this rank takes from the second epoch, starting at `state`, and the state afterwards."""
    groups = ProcessGroups(read_ranks(), torch.device("cpu"), timeout=60)
    batches = made_batches(groups, kind, batch_size)
    if state is not None:
        batches.load_state_dict(pickle.loads(state))
    assert batches.taken == place
    seen = trained(batches, 2, until)
    groups.close()
    return seen, pickle.dumps(saved(batches.state_dict()))


def together(ends: list[tuple[list[Any], bytes]]) -> list[list[Any]]:
    """Merge all ranks' batches into global batches: samples are sorted, fillers are left out."""
    by_rank = [seen for seen, _ in ends]
    return [
        sorted(sample for batch, share, _ in batches if not share[2] for sample in batch)
        for batches in zip(*by_rank, strict=True)
    ]


@pytest.mark.test_all
@pytest.mark.parametrize("kind", ["resampled", "round_robin", "round_robin stateful"])
def test_an_epoch_resumes_on_another_number_of_ranks(kind: str) -> None:
    """Resume from 4 ranks on 2 with batches of twice the size, and on a single process."""
    is_resampled = kind == "resampled"
    whole = together(run_ranks(batches_of_second_epoch, 4, kind, 1, 0, None, None))
    before = run_ranks(batches_of_second_epoch, 4, kind, 1, 0, None, 1)
    for world_size in (2, 1):
        ends = run_ranks(batches_of_second_epoch, world_size, kind, 4 // world_size, 1, before[0][1], None)
        found = together(before) + together(ends)
        if is_resampled:
            assert found == whole
        else:  # whole batches are given to the ranks in turn, so a global batch has as many of them as there are ranks
            assert sorted(chain(*found)) == sorted(chain(*whole))
            assert found[0] == whole[0]


def on_other_ranks(state: bytes, kind: str) -> str:
    groups = ProcessGroups(read_ranks(), torch.device("cpu"), timeout=60)
    batches = TrainBatches(groups, 9, shard=not kind.startswith("presharded"))
    batches.load_state_dict(pickle.loads(state))
    try:
        batches.load(loader_for(kind, groups.rank))
    except ConfigError as error:
        return str(error)
    finally:
        groups.close()
    return ""


def test_a_position_in_the_ranks_own_data_needs_the_same_number_of_ranks() -> None:
    [(_, state), _] = run_ranks(batches_of_second_epoch, 2, "presharded", 2, 0, None, 1)
    for error in run_ranks(on_other_ranks, 1, state, "presharded"):
        assert "in the middle of an epoch of train_dataloader, which 2 ranks divided by the strategy 'presharded'" in error
        assert "now it is 'presharded' on 1 ranks: resume with 2 ranks" in error
    [(_, state)] = run_ranks(
        batches_of_second_epoch, 1, "resampled", 2, 0, None, 1
    )  # a single process uses the loader's own order
    for error in run_ranks(on_other_ranks, 2, state, "resampled"):
        assert "which 1 ranks divided by the strategy 'presharded'; now it is 'resampled' on 2 ranks" in error


def too_few() -> list[str]:
    groups = ProcessGroups(read_ranks(), torch.device("cpu"), timeout=60)
    errors = []
    for loader in (DataLoader(Numbers(1)), [torch.ones(1)]):
        with pytest.raises(ConfigError) as error:
            TrainBatches(groups, 9).load(loader)
        errors.append(str(error.value))
    place = {"position": 8, "in_all": 23, "order": 1234}
    state = {"taken": 2, "seed": 9, "strategy": "resampled", "world_size": 2, "place": place, "now": {}}
    batches = made_batches(groups, "resampled")
    batches.load_state_dict(state)
    with pytest.raises(ConfigError) as error:
        batches.epoch(1)
    groups.close()
    return [*errors, str(error.value)]


def test_too_few_samples_or_others_are_rejected() -> None:
    for errors in run_ranks(too_few, 2):
        assert "train_dataloader has 1 samples, fewer than the 2 ranks" in errors[0]
        assert "train_dataloader has 1 batches, fewer than the 2 ranks" in errors[1]
        assert "train_dataloader has 22 samples in epoch 1, in another order than the 23 of the checkpoint" in errors[2]


@pytest.mark.parametrize(("old", "new"), [("own", "presharded"), ("split", "resampled"), ("dealt", "round_robin")])
def test_the_strategy_of_an_old_checkpoint_is_read(old: str, new: str) -> None:
    """Checkpoints from before the renames have the strategy under the key "way"."""
    batches = TrainBatches(ProcessGroups(Ranks(), torch.device("cpu"), timeout=60), 9)
    batches.load_state_dict({"taken": 2, "seed": 9, "way": old, "world_size": 2, "place": {"some": "position"}, "now": {}})
    with pytest.raises(ConfigError, match=rf"which 2 ranks divided by the strategy '{new}'; now it is"):
        batches.load([torch.ones(1)] if old == "split" else DataLoader(Numbers()) if old == "dealt" else [torch.ones(1)])


# --- nothing is loaded twice ---


def test_batches_that_were_trained_on_are_not_loaded_again() -> None:
    dataset = Numbers()
    for loader in (DataLoader(SeededDataset(dataset, 4), batch_size=2, shuffle=True), DataLoader(dataset, batch_size=2)):
        batches = TrainBatches()
        batches.load(loader)
        trained(batches, 1, until=6)
        state = saved(batches.state_dict())
        again = TrainBatches()
        again.load(loader)
        again.load_state_dict(state)
        dataset.loaded.clear()
        next(again.epoch(1))
        assert len(dataset.loaded) == (2 if isinstance(loader.dataset, SeededDataset) else 14)


# --- one process with workers ---


def resumed_with_workers(make: Any) -> tuple[list[Any], list[Any]]:
    """Return the second epoch, uninterrupted and resumed after its second batch."""
    seed_all(1)
    straight = TrainBatches()
    straight.load(make)
    trained(straight, 1)
    expected = trained(straight, 2)
    seed_all(1)
    first = TrainBatches()
    first.load(make)
    trained(first, 1)
    before = trained(first, 2, until=2)
    state = saved(first.state_dict())
    seed_all(50)
    second = TrainBatches()
    second.load(make)
    second.load_state_dict(state)
    return expected, before + trained(second, 2)


class Inputs(Dataset[Tensor]):
    """The inputs of the noisy samples, without their targets."""

    def __init__(self) -> None:
        self.noisy = Noisy()

    def __len__(self) -> int:
        return len(self.noisy)

    def __getitem__(self, index: int) -> Tensor:
        return self.noisy[index][0]


@pytest.mark.test_all
@pytest.mark.parametrize("kind", ["plain", "plain seeded", "stateful seeded"])
def test_augmentation_in_workers_is_exact_in_one_process(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    def make() -> Any:
        dataset = SeededDataset(Inputs(), seed=2) if "seeded" in kind else Inputs()
        made = StatefulDataLoader if "stateful" in kind else DataLoader
        return made(dataset, batch_size=2, shuffle=True, num_workers=4, generator=torch.Generator().manual_seed(3))

    with caplog.at_level(logging.WARNING):
        expected, found = resumed_with_workers(make)
    assert found == expected
    assert not caplog.records


@pytest.mark.test_all
def test_persistent_workers_of_another_interpreter_receive_the_epoch() -> None:
    """Spawned workers have a copy of the dataset that was pickled before the first epoch."""
    there, here = SeededDataset(Numbers(), 4), SeededDataset(Numbers(), 4)
    loader = DataLoader(there, None, num_workers=1, persistent_workers=True, multiprocessing_context="spawn")
    for epoch in (0, 5):
        there.set_epoch(epoch)
        here.set_epoch(epoch)
        assert torch.equal(torch.stack(list(loader)), torch.stack([here[index] for index in range(SAMPLES)]))


def test_a_warning_says_where_augmentation_is_not_exact(caplog: pytest.LogCaptureFixture) -> None:
    def make() -> Any:
        return StatefulDataLoader(Numbers(), batch_size=2, shuffle=True, num_workers=2)

    expected, found = resumed_with_workers(make)
    order = [[[sample[0] for sample in batch] for batch, *_ in epoch] for epoch in (expected, found)]
    assert order[0] == order[1]
    assert found != expected
    [record] = caplog.records
    assert "train_dataloader: the order is resumed exactly, augmentation is not" in record.message
    assert "callsheet.trainer.SeededDataset(dataset, seed)" in record.message
