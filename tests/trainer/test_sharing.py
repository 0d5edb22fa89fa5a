"""With any dataloader, the ranks take every sample once, in equally many batches. Augmentation does not depend on the ranks."""

from __future__ import annotations

import pickle
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from callsheet.core.randomness import random_state, same_random_state
from callsheet.core.ranks import read_ranks
from callsheet.errors import ConfigError
from callsheet.run.process_groups import ProcessGroups
from callsheet.testing.ranks import run_ranks
from callsheet.trainer.data import SeededDataset, share_loader
from callsheet.trainer.data.seeded import mix, seeded
from callsheet.trainer.data.splitting import Split, draw_order

pytestmark = pytest.mark.test_all


SMALL = st.integers(1, 5)
RANKS = 3


def splits(batch_size: int | None, drop_last: bool, world_size: int) -> list[Split]:
    return [Split(batch_size, drop_last, rank, world_size) for rank in range(world_size)]


# --- the algebra ---


@given(n=st.integers(0, 60), batch_size=SMALL, world_size=SMALL, drop_last=st.booleans(), start=st.integers(0, 60))
def test_every_sample_is_in_one_share(n: int, batch_size: int, world_size: int, drop_last: bool, start: int) -> None:
    start = min(start, n)
    order = random.Random(n).sample(range(1000), n)
    parts = splits(batch_size, drop_last, world_size)
    by_rank = [list(part.shares(order, start)) for part in parts]
    assert {len(shares) for shares in by_rank} == {parts[0].count(n - start)}
    for number, shares in enumerate(zip(*by_rank, strict=True)):
        first = start + number * batch_size * world_size
        expected = order[first : first + batch_size * world_size]
        counted = [index for share in shares for index in share.indices if not share.is_filler]
        sizes = [share.samples_here for share in shares]
        assert sorted(counted) == sorted(expected)
        assert max(sizes) - min(sizes) <= 1
        assert max(sizes) <= batch_size
        assert all(share.samples_in_all == sum(sizes) == len(expected) for share in shares)
        assert all(len(share.indices) == 1 and share.indices[0] in expected for share in shares if share.is_filler)
    left = n - start - parts[0].count(n - start) * batch_size * world_size
    assert (0 <= left < batch_size * world_size) if drop_last else left <= 0


@given(n=st.integers(1, 60), batch_size=SMALL, world_size=SMALL, factor=SMALL, before=st.integers(0, 5))
def test_another_world_size_continues_with_the_same_global_batches(
    n: int, batch_size: int, world_size: int, factor: int, before: int
) -> None:
    """`world_size * factor` ranks with `batch_size` samples get the batches of `world_size` ranks with `batch_size * factor`."""
    many, few = splits(batch_size, False, world_size * factor), splits(batch_size * factor, False, world_size)
    start = min(n, before * many[0].global_size)

    def batches(parts: list[Split]) -> list[set[int]]:
        together = zip(*(part.shares(range(n), start) for part in parts), strict=True)
        return [{index for share in shares for index in share.indices} for shares in together]

    assert batches(many) == batches(few)


@given(sizes=st.lists(st.integers(1, 4), max_size=20), world_size=SMALL)
def test_whole_batches_are_taken_in_turn(sizes: list[int], world_size: int) -> None:
    order = [[(number, i) for i in range(size)] for number, size in enumerate(sizes)]
    by_rank = [list(part.shares(order)) for part in splits(None, False, world_size)]
    counted = [share.indices for shares in zip(*by_rank, strict=True) for share in shares if not share.is_filler]
    assert counted == order
    for shares in zip(*by_rank, strict=True):
        assert {share.samples_in_all for share in shares} == {sum(share.samples_here for share in shares)}


class Shuffles(Sampler[int]):
    """A sampler that draws from the global random states, as many custom ones do."""

    def __iter__(self) -> Iterator[int]:
        return iter(random.sample(range(20), 20))

    def __len__(self) -> int:
        return 20


def some_samplers() -> list[Any]:
    generator = torch.Generator().manual_seed(5)
    weights = [1.0] * 20
    return [
        RandomSampler(range(20)),
        RandomSampler(range(20), generator=generator),
        RandomSampler(range(20), replacement=True, num_samples=30),
        WeightedRandomSampler(weights, 20, generator=generator),
        WeightedRandomSampler(weights, 20),
        SubsetRandomSampler(range(20)),
        Shuffles(),
        StatefulDataLoader(range(20), shuffle=True).sampler,
        BatchSampler(SubsetRandomSampler(range(20)), 3, False),
    ]


@pytest.mark.filterwarnings("ignore:.*set_vital")
def test_an_order_depends_on_the_seed_alone_and_disturbs_nothing() -> None:
    for sampler in some_samplers():
        before, own = random_state(), getattr(sampler, "generator", None)
        state = own.get_state() if own is not None else torch.empty(0)
        order = list(draw_order(sampler, 7))
        assert same_random_state(before, random_state())
        assert own is None or torch.equal(own.get_state(), state)
        random.random()
        torch.rand(3)
        assert list(draw_order(sampler, 7)) == order
        assert list(draw_order(sampler, 8)) != order
        assert all(type(index) in (int, list) for index in order)
    assert list(draw_order(SequentialSampler(range(4)), 7)) == [0, 1, 2, 3]


# --- samples with random states of their own ---


class Noisy(Dataset[Any]):
    """Draws from all three generators."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.requested: list[Any] = []

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> list[float]:
        self.requested.append(index)
        return [float(index), random.random(), float(numpy.random.rand()), float(torch.rand(()))]


class NoisyAtOnce(Noisy):
    def __getitems__(self, indices: Sequence[int]) -> list[list[float]]:
        self.requested.append(list(indices))
        return numpy.column_stack([indices, numpy.random.rand(len(indices))]).tolist()  # type: ignore[no-any-return]


def test_a_sample_s_random_numbers_depend_on_seed_epoch_and_index_only() -> None:
    before = random_state()
    data = SeededDataset(Noisy(10), seed=3)
    first = [data[index] for index in range(10)]
    assert same_random_state(before, random_state())
    assert data.__getitems__([4, 2]) == [first[4], first[2]]
    assert Subset(data, [7, 1]).__getitems__([1]) == [first[1]]
    assert same_random_state(before, random_state())
    drawn = [value for sample in first for value in sample[1:]]
    assert len(set(drawn)) == 30  # so NumPy and torch do not draw equal numbers either
    assert SeededDataset(Noisy(10), seed=3)[4] == pickle.loads(pickle.dumps(data))[4] == first[4]
    assert SeededDataset(Noisy(10), seed=4)[4] != first[4]
    data.set_epoch(1)
    assert data[4] != first[4]
    data.set_epoch(0)
    assert data[4] == first[4]


def test_numpy_and_torch_do_not_draw_the_same_numbers() -> None:
    """With the same 32-bit seed, they would."""
    torch.manual_seed(5)
    numpy.random.seed(5)
    assert int(torch.empty((), dtype=torch.int32).random_()) == numpy.random.randint(2**31)
    with seeded(5):
        assert int(torch.empty((), dtype=torch.int32).random_()) != numpy.random.randint(2**31)
    seeds = {mix(seed, epoch, index) for seed in range(10) for epoch in range(10) for index in range(100)}
    assert len({number & 0xFFFFFFFF for number in seeds}) > 9990
    assert len({number >> 32 for number in seeds}) > 9990


def test_a_dataset_that_loads_batches_at_once_still_does() -> None:
    inner = NoisyAtOnce(10)
    data = SeededDataset(inner, seed=3)
    assert data.__getitems__([4, 2]) == data.__getitems__([4, 2]) != data.__getitems__([2, 4])
    assert inner.requested == [[4, 2], [4, 2], [2, 4]]


def test_a_seeded_dataset_otherwise_behaves_like_its_dataset() -> None:
    inner = Noisy(10)
    data = SeededDataset(inner, seed=3)
    data.opened = "file"
    assert vars(inner)["opened"] == data.opened == "file"
    assert (len(data), data.n) == (10, 10)
    named: Any = {"a": 1, "b": 2}
    assert SeededDataset(named, 0)["b"] == 2
    with pytest.raises(AttributeError, match="nonsense"):
        _ = data.nonsense
    with pytest.raises(ConfigError, match="SeededDataset\\(Counting\\): seeding a sample requires an index"):
        SeededDataset(Counting(3), 0)


# --- real ranks ---


class Numbers(Dataset[int]):
    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        return index


class Counting(IterableDataset[int]):
    """A stream in its own random order, with an unknown length."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[int]:
        return iter(random.sample(range(self.n), self.n))


class Stream:
    """An iterable of batches of random sizes in random order, which is not a torch class."""

    def __iter__(self) -> Iterator[list[int]]:
        left = random.sample(range(20), 20)
        while left:
            size = random.randint(1, 4)
            yield left[:size]
            left = left[size:]


class Uneven(Sampler[list[int]]):
    """A batch sampler with batches of uneven sizes, such as bucketing by length gives."""

    def __iter__(self) -> Iterator[list[int]]:
        order = random.sample(range(20), 20)
        return iter([order[:3], order[3:10], order[10:12], order[12:]])

    def __len__(self) -> int:
        return 4


class NoLength(Shuffles):
    """A sampler that may be endless: it has no length."""

    def __len__(self) -> int:
        raise TypeError


class ListWithoutLength(list[Any]):
    """A list whose `len` raises an error."""

    def __len__(self) -> int:
        raise TypeError

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)


class Replays(DataLoader[Any]):
    """A DataLoader subclass with its own constructor, such as PyTorch Geometric's."""

    def __init__(self, n: int) -> None:
        super().__init__(Numbers(n), batch_size=2, collate_fn=list)


class Odd(Replays):
    """A DataLoader subclass that overrides `__iter__`, which a DataLoader that we create would ignore."""

    def __iter__(self) -> Any:
        yield from super().__iter__()


def loaders(rank: int) -> dict[str, tuple[Any, dict[str, Any]]]:
    """Return the loaders and their options, by name."""
    listed: dict[str, Any] = {"collate_fn": list}
    workers: dict[str, Any] = {"num_workers": 1, "persistent_workers": True, "multiprocessing_context": "fork"}
    lengths = [2, 5, 4]
    own = [[10 * rank + i] for i in range(lengths[rank])]
    hugging_face: Any = pytest.importorskip("datasets").IterableDataset
    stream = hugging_face.from_generator(lambda: ({"n": n} for n in range(20)))
    samples, generator = Numbers(20), torch.Generator().manual_seed(rank)
    return {
        "resampled sequential": (DataLoader(samples, batch_size=2, **listed), {}),
        "resampled random": (DataLoader(samples, batch_size=2, shuffle=True, **listed), {}),
        "resampled dropping": (DataLoader(samples, batch_size=2, shuffle=True, drop_last=True, **listed), {}),
        "resampled batch sampler": (DataLoader(samples, batch_sampler=BatchSampler(Shuffles(), 2, False), **listed), {}),
        "resampled sampler": (DataLoader(samples, batch_size=2, sampler=Shuffles(), **listed), {}),
        "resampled uneven": (DataLoader(samples, batch_sampler=Uneven(), **listed), {}),
        "resampled stateful": (StatefulDataLoader(samples, batch_size=2, shuffle=True, **listed), {}),
        "resampled subclass": (Replays(20), {}),
        "resampled fewer than ranks": (DataLoader(Numbers(2), **listed), {}),
        "resampled workers": (DataLoader(samples, batch_size=3, shuffle=True, **workers, **listed), {}),
        "round_robin list": ([[n, n + 1] for n in range(0, 20, 2)], {}),
        "round_robin stream": (Stream(), {}),
        "round_robin dataset": (DataLoader(Counting(20), batch_size=3, **listed), {}),
        "round_robin unmeasured": (DataLoader(samples, batch_size=2, sampler=NoLength(), **listed), {}),
        "round_robin unbatched": (
            DataLoader(samples, batch_size=None, shuffle=True, generator=generator, collate_fn=lambda n: [n]),
            {},
        ),
        "presharded distributed": (
            DataLoader(samples, sampler=DistributedSampler(samples, RANKS, rank, shuffle=False), **listed),
            {},
        ),
        "presharded list": (own, {"shard": False}),
        "presharded unknown": (ListWithoutLength(own), {"shard": False}),
        "presharded hugging face": (DataLoader(stream, batch_size=2, collate_fn=lambda rows: [row["n"] for row in rows]), {}),
    }


def iterate_all() -> dict[str, list[Any]]:
    """Iterate each loader twice on a rank. Return the batches with the numbers of samples and whether they are fillers."""
    groups = ProcessGroups(read_ranks(), torch.device("cpu"), timeout=60)
    random.seed(groups.rank)
    torch.manual_seed(groups.rank)
    found: dict[str, list[Any]] = {}
    for name, (loader, options) in loaders(groups.rank).items():
        batches = share_loader(loader, groups, 11, argument=name, count_samples=len, **options)
        strategy = batches._sharing.strategy
        assert strategy == name.split()[0], f"{name} is {strategy}"
        seen = []
        for _ in range(2):
            epoch = iter(batches)
            seen.append([(batch, epoch.samples_here, epoch.samples_in_all, epoch.is_filler) for batch in epoch])
        found[name] = [batches.length, *seen]
    groups.close()
    return found


@pytest.fixture(scope="module")
def ranks_found() -> list[dict[str, list[Any]]]:
    return run_ranks(iterate_all, RANKS)


@pytest.mark.filterwarnings("ignore:.*set_vital")
@pytest.mark.parametrize("name", sorted(loaders(0)))
def test_all_ranks_together_take_every_sample_once(name: str, ranks_found: list[dict[str, list[Any]]]) -> None:
    by_rank = [found[name][1] for found in ranks_found]
    is_presharded, is_dropping = name.startswith("presharded"), "dropping" in name
    # The second pass gives the same samples as the first.
    assert [found[name][1] for found in ranks_found] == [found[name][2] for found in ranks_found]
    [length] = {found[name][0] for found in ranks_found}
    assert {len(seen) for seen in by_rank} == {len(by_rank[0])}
    assert length in (None, len(by_rank[0]))
    counted: Counter[int] = Counter()
    for together in zip(*by_rank, strict=True):
        here = [0 if is_filler else len(batch) for batch, _, _, is_filler in together]
        counted.update(sample for batch, _, _, is_filler in together if not is_filler for sample in batch)
        assert all(batch for batch, *_ in together)  # a filler is a real batch too
        for size, (_, samples_here, in_all, is_filler) in zip(here, together, strict=True):
            assert samples_here == size or (is_presharded and not is_filler and samples_here is None)
            assert in_all == (None if is_presharded else sum(here))
    assert set(counted.values()) == {1} or "distributed" in name  # a DistributedSampler gives some samples twice
    samples = {"presharded list": 11, "presharded unknown": 11, "resampled fewer than ranks": 2}.get(name, 20)
    assert len(counted) == (samples - samples % (2 * RANKS) if is_dropping else samples)
    fillers = {name for name, [_, seen, _] in ranks_found[0].items() if any(is_filler for *_, is_filler in seen)}
    assert "presharded list" in fillers
    assert "presharded unknown" in fillers


def rejected(kind: str) -> str:
    """Return the error on a rank; it must be raised on all ranks."""
    groups = ProcessGroups(read_ranks(), torch.device("cpu"), timeout=60)
    empty: Iterable[Any] = [] if groups.rank == 1 else [[1]]
    cases: dict[str, tuple[Any, bool]] = {
        "presharded empty": (empty, False),
        "presharded empty unknown": (ListWithoutLength(empty), False),
        "other samples": (DataLoader(Numbers(10 + groups.rank)), True),
        "other batches": ([1, 2, 3][groups.rank :], True),
        "odd": (Odd(10), True),
        "none": ([], True),
        "too few": (DataLoader(Numbers(5), batch_size=2, drop_last=True), True),
    }
    loader, shard = cases[kind]
    try:
        list(share_loader(loader, groups, 0, argument="data", shard=shard))
    except ConfigError as error:
        return str(error)
    finally:
        groups.close()
    return ""


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("presharded empty", "data has no batches on rank 1 of 3; give every rank some"),
        pytest.param(
            "presharded empty unknown", "data has no batches on rank 1 of 3; give every rank some", marks=pytest.mark.slow
        ),
        ("other samples", "data: the order of the samples (1{} on rank {}) is not the same on all ranks"),
        pytest.param("other batches", "not the same number on all ranks", marks=pytest.mark.slow),
        pytest.param("odd", "data is a Odd, which overrides how batches are made", marks=pytest.mark.slow),
        pytest.param("none", "data has no batches; is the dataset empty", marks=pytest.mark.slow),
        ("too few", "data has 5 samples, not enough for one batch of 2 on each of 3 ranks"),
    ],
)
def test_a_loader_that_cannot_be_shared_is_rejected_on_all_ranks(kind: str, message: str) -> None:
    for rank, error in enumerate(run_ranks(rejected, RANKS, kind)):
        assert message.format(rank, rank) in error
