"""A host that fails at any part of a step logs it once, and training continues to the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from callsheet import Callback
from callsheet.bridges.hosted_run import HostedRun
from callsheet.bridges.instructlab.run import HookedRun
from callsheet.errors import HostError

from .faults import ALWAYS, EVALUATED, TRAINED, Breaks
from .loops import accelerate, automodel, bare, huggingface, ignite, instructlab, lightning, megatron_bridge, torchtnt
from .loops import keras as keras_loop
from .loops.job import POINTS

LOOPS = (accelerate, automodel, bare, huggingface, ignite, instructlab, keras_loop, lightning, megatron_bridge, torchtnt)


def weights(loop: Any, folder: Path, callbacks: list[Callback] | None) -> list[torch.Tensor]:
    model = loop.train(POINTS, folder, callbacks, strict=False)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.fixture(scope="module", params=LOOPS, ids=lambda loop: loop.NAME)
def loop_and_weights(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[torch.Tensor]]:
    return request.param, weights(request.param, tmp_path_factory.mktemp("plain"), None)


@pytest.mark.parametrize("edge", ["start", "end"])
@pytest.mark.parametrize(
    "span", [span if span in ALWAYS else pytest.param(span, marks=pytest.mark.slow) for span in TRAINED + EVALUATED]
)
def test_a_fault_at_a_part_of_a_step(
    loop_and_weights: tuple[Any, list[torch.Tensor]],
    span: str,
    edge: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop, expected = loop_and_weights
    breaks = Breaks(span, edge)
    for kind in (HostedRun, HookedRun):
        begin: Any = kind.begin

        def begun(self: Any, *args: Any, begin: Any = begin, **given: Any) -> Any:
            breaks.run = self
            return begin(self, *args, **given)

        monkeypatch.setattr(kind, "begin", begun)
    found = weights(loop, tmp_path, [breaks])
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
    assert caplog.text.count("callsheet cannot follow") == bool(breaks.faults)
    assert breaks.ends == ([HostError, "failed"] if breaks.faults else ["finished"])
    if span == "train_step":
        assert breaks.faults
