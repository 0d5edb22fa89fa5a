"""A resumed run logs a warning of a dataloader whose order it cannot restore."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler

from callsheet.bridges.epoch_position import warn_if_not_restored

DATA: Any = list(range(4))  # used as a dataset


@pytest.mark.parametrize(
    ("loader", "cause"),
    [
        (DataLoader(DATA, shuffle=True, generator=torch.Generator()), "a generator of its own"),
        (DataLoader(DATA, sampler=RandomSampler(DATA, generator=torch.Generator())), "a generator of its own"),
        (DataLoader(DATA, num_workers=1, persistent_workers=True), "persistent workers"),
    ],
)
def test_a_dataloader_whose_order_cannot_be_restored_is_reported_with_a_warning(
    loader: object, cause: str, caplog: pytest.LogCaptureFixture
) -> None:
    warn_if_not_restored(loader, "torchtnt")
    (message,) = caplog.messages
    assert message.startswith(f"torchtnt resumes with a dataloader that has {cause}, whose state its checkpoints do not hold")


@pytest.mark.parametrize("loader", [DATA, DataLoader(DATA, shuffle=True), DataLoader(DATA, num_workers=1)])
def test_data_whose_order_can_be_restored_is_not_reported(loader: object, caplog: pytest.LogCaptureFixture) -> None:
    warn_if_not_restored(loader, "torchtnt")
    assert caplog.messages == []
