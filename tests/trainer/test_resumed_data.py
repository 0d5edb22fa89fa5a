"""With any dataloader, a resumed run receives the data of an uninterrupted one, or a warning names the difference.

The long version, with random cases of all kinds, is `make resume`.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from callsheet.trainer.data.loaders import attributes

from .resumed_data import BATCH_SAMPLERS, ORDERS, STEPS, STREAMS, Case, random_case, result_of

pytestmark = pytest.mark.filterwarnings("ignore:.*set_vital", "ignore:This DataLoader will create")

PLACES = [(1, 2), (2, 0), (2, 3), (2, STEPS), (3, 1)]
PERSISTENT: Mapping[str, Any] = {"workers": 2, "persistent": True, "context": "fork"}


@pytest.mark.test_all
@pytest.mark.parametrize(("epoch", "place"), PLACES)
@pytest.mark.parametrize("seeded", [False, True])
def test_persistent_workers_are_resumed_exactly(epoch: int, place: int, seeded: bool) -> None:
    assert result_of(Case(**PERSISTENT, seeded=seeded, epoch=epoch, place=place)).outcome == "exact"


@pytest.mark.parametrize("order", [order for order in ORDERS if order not in ("counting", "shuffles its list", "lazy, torch")])
@pytest.mark.parametrize("kind", ["plain", "stateful"])
def test_samplers_are_resumed_exactly(order: str, kind: str) -> None:
    for epoch, place in PLACES:
        assert result_of(Case(order=order, kind=kind, epoch=epoch, place=place)).outcome == "exact", (epoch, place)


@pytest.mark.parametrize("order", ["counting", "shuffles its list"])
def test_a_sampler_that_changes_and_has_no_state_is_named(order: str) -> None:
    name = {"counting": "Counting.count", "shuffles its list": "ShufflesItsList.indices"}[order]
    for place in (0, 2):
        result = result_of(Case(order=order, epoch=2, place=place))
        assert result.outcome == "warned"
        assert f"{name} changed while training" in result.message


def test_an_order_that_depends_on_what_training_draws_is_warned_about() -> None:
    result = result_of(Case(order="lazy, torch", place=4))
    assert result.outcome == "warned"
    assert "train_dataloader: LazyTorch did not repeat the batches" in result.message


@pytest.mark.test_all
@pytest.mark.parametrize("data", ["stream", "stream of epoch", "stream with generator"])
def test_iterables_are_resumed_exactly(data: str) -> None:
    for case in (Case(data, ""), Case(data, "", **PERSISTENT), Case(data, "", epoch=3, place=0, **PERSISTENT)):
        result = result_of(case)
        assert "warned" not in result.outcome or "draws from torch's random state" in result.message  # noise, without workers
        assert "exact" in result.outcome


def test_an_iterable_whose_order_depends_on_what_training_draws_is_warned_about() -> None:
    result = result_of(Case("shuffle buffer", "", place=4))
    assert result.outcome == "warned"
    assert "DataLoader draws from torch's random state while it is iterated over, and so does training" in result.message


def test_an_iterable_that_counts_in_persistent_workers_is_warned_about_while_training() -> None:
    result = result_of(Case("counting stream", "", epoch=3, **PERSISTENT))
    assert result.outcome == "warned"
    assert "CountingStream has changed attributes of its own in persistent workers" in result.message


class Holder:
    """An iterable with its batches in an attribute."""

    def __init__(self, data: Any) -> None:
        self.data = data


def test_tensors_of_a_dataset_are_compared_without_copying_them() -> None:
    small, large = torch.arange(6.0).view(2, 3), torch.ones(1).expand(1 << 40)  # a copy would have 4 TiB
    checksums = attributes([Holder([small, large, np.arange(3)])])
    assert list(checksums) == ["0.Holder.data"]
    assert attributes([Holder([small.clone(), large, np.arange(3)])]) == checksums
    assert attributes([Holder([large, small, np.arange(3)])]) != checksums
    assert attributes([Holder([small + 1, large, np.arange(3)])]) != checksums
    assert attributes([Holder([small, large, np.arange(3) + 1])]) != checksums


def test_values_that_are_large_are_not_compared() -> None:
    assert attributes([Holder("x" * 2_000_000)]) == {}


@pytest.mark.test_all
@pytest.mark.parametrize("number", range(6))
def test_a_random_dataloader_does_not_differ_without_a_warning(number: int) -> None:
    case = random_case(random.Random())
    assert result_of(case).outcome != "SILENT", repr(case)


@pytest.mark.slow
@pytest.mark.parametrize("context", ["spawn", "forkserver"])
@pytest.mark.parametrize("data", ["items", "stream"])
def test_workers_of_other_interpreters_are_resumed_exactly(context: str, data: str) -> None:
    case = replace(Case(data, "shuffle" if data == "items" else "", **PERSISTENT), context=context)
    assert result_of(case).outcome == "exact"


@pytest.mark.slow
@pytest.mark.parametrize("data", ["items", *STREAMS])
def test_resuming_at_any_batch_of_any_epoch_is_exact_or_warned_about(data: str) -> None:
    orders = [""] if data in STREAMS else ["shuffle", "eager", *BATCH_SAMPLERS]
    for order in orders:
        for epoch in (1, 2, 3):
            for place in range(STEPS + 1):
                case = Case(data, order, epoch=epoch, place=place, **PERSISTENT)
                assert result_of(case).outcome != "SILENT", repr(case)
