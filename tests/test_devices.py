"""Values that are on several devices, without such devices: torch's fake tensors have a device and no data."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorDeviceMismatchError, FakeTensorMode

from callsheet.callbacks.optimizer_monitor import _norms
from callsheet.run.devices import on_one_device
from callsheet.run.metrics import Series

DEVICES = ("cpu", "cuda:0", "cuda:1")


@pytest.fixture(autouse=True)
def fake_tensors() -> Iterator[None]:
    with FakeTensorMode():
        yield


def on_each(*size: int) -> list[Tensor]:
    return [torch.ones(size, device=device) for device in DEVICES]


def test_fake_tensors_on_several_devices_cannot_be_stacked() -> None:
    """This shows that the tests below can fail."""
    with pytest.raises(FakeTensorDeviceMismatchError):
        torch.stack(on_each())


def test_tensors_are_copied_to_the_first_device_that_is_not_the_host() -> None:
    assert {str(tensor.device) for tensor in on_one_device(on_each())} == {"cuda:0"}
    assert {str(tensor.device) for tensor in on_one_device(on_each()[::-1])} == {"cuda:1"}


def test_tensors_on_one_device_are_not_copied() -> None:
    tensors = [torch.ones(3), torch.ones(4)]
    assert on_one_device(tensors) is tensors


@pytest.mark.parametrize("over", ["mean", "sum"])
@pytest.mark.parametrize("size", [(), (3,)])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_values_of_a_metric_on_several_devices_are_reduced_on_one(over: str, size: tuple[int, ...], is_weighted: bool) -> None:
    series = Series(over, "mean")  # type: ignore[arg-type]
    weights = on_each()[1:] + on_each()[:1] if is_weighted else [None] * len(DEVICES)
    for value, weight in zip(on_each(*size), weights, strict=True):
        series.add(value, weight)
    if not size:
        series.add(2.0)
    total, _ = series.result()
    assert str(total.device) == "cuda:0"
    assert total.shape == torch.Size(size)


def test_gradient_norms_of_a_model_on_several_devices_are_computed() -> None:
    order, norms = _norms([*on_each(4), *on_each(2, 2)])
    assert order == [0, 3, 1, 4, 2, 5]
    assert norms.shape == (6,)
