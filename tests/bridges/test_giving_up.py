"""A host that fails in any span of a step logs the error once, and training continues to the same weights."""

from __future__ import annotations

import contextlib
import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from callsheet import Callback, Context, attach
from callsheet.bridges.hosted_run import HostedRun
from callsheet.bridges.instructlab.run import HookedRun
from callsheet.callbacks import CheckpointSaver
from callsheet.errors import HostError
from callsheet.testing import run_ranks

from .faults import ALWAYS, EVALUATED, TRAINED, FailsInSpan
from .loops import accelerate, automodel, bare, huggingface, ignite, instructlab, lightning, megatron_bridge, torchtnt
from .loops import keras as keras_loop
from .loops.job import POINTS

LOOPS = (accelerate, automodel, bare, huggingface, ignite, instructlab, keras_loop, lightning, megatron_bridge, torchtnt)


EDGES = ("start", "end")
_EVAL_STEP_EDGES = {(span, edge) for span in ("eval_step", "eval_forward") for edge in EDGES}
NEVER_FIRED = dict.fromkeys((accelerate.NAME, bare.NAME, instructlab.NAME), _EVAL_STEP_EDGES)
NEVER_FIRED[megatron_bridge.NAME] = {("epoch", "start")}  # Megatron Bridge trains a single epoch
"""By loop: the edges (starts and ends) of spans that do not come after the third step."""


def weights(loop: Any, folder: Path, callbacks: list[Callback] | None) -> list[torch.Tensor]:
    model = loop.train(POINTS, folder, callbacks, strict=False)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.fixture(scope="module", params=LOOPS, ids=lambda loop: loop.NAME)
def loop_and_weights(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[torch.Tensor]]:
    return request.param, weights(request.param, tmp_path_factory.mktemp("plain"), None)


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize(
    "span", [span if span in ALWAYS else pytest.param(span, marks=pytest.mark.slow) for span in TRAINED + EVALUATED]
)
def test_training_is_unchanged_after_the_host_fails_in_a_span(
    loop_and_weights: tuple[Any, list[torch.Tensor]],
    span: str,
    edge: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop, expected = loop_and_weights
    fails_in_span = FailsInSpan(span, edge)
    for kind in (HostedRun, HookedRun):
        begin: Any = kind.begin

        def begin_and_keep_run(self: Any, *args: Any, begin: Any = begin, **given: Any) -> Any:
            fails_in_span.run = self
            return begin(self, *args, **given)

        monkeypatch.setattr(kind, "begin", begin_and_keep_run)
    found = weights(loop, tmp_path, [fails_in_span])
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
    assert caplog.text.count("callsheet cannot follow") == bool(fails_in_span.faults)
    assert fails_in_span.ends == ([HostError, "failed"] if fails_in_span.faults else ["finished"])
    assert bool(fails_in_span.faults) == ((span, edge) not in NEVER_FIRED.get(loop.NAME, ()))


# --- several ranks ---


def train_with_a_fault(folder: str, is_observed: bool) -> tuple[list[float], list[Any], list[str]]:
    """Train twelve steps by hand in DDP; rank 1's host has a fault after step 3. Return the weights, how the run ended, and the log."""
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = [(torch.full((2, 3), 0.1 * (rank + step)), torch.zeros(2, 1)) for step in range(12)]
    fails_in_span = FailsInSpan("train_step" if rank == 1 else "", "end")
    log: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: log.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("callsheet").addHandler(handler)
    given: Any = {"model": model, "optimizer": optimizer, "callbacks": [fails_in_span, CheckpointSaver(save_interval="5ba")]}
    with attach(**given, runs_folder=folder) if is_observed else contextlib.nullcontext() as run:
        fails_in_span.run = run and run._run
        for inputs, targets in run.steps(data) if run is not None else data:
            torch.nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
    weights = [float(each) for parameter in model.parameters() for each in parameter.detach().flatten()]
    # Do not destroy the process group: even without callsheet, torch can hang if it frees a DDP model after its group.
    return weights, fails_in_span.ends, log


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.test_all)])
def test_the_other_ranks_continue_without_callsheet_too(count: int, tmp_path: Path) -> None:
    """The rank whose host fails closes its connections, so that the other ranks do not wait for it until a timeout."""
    plain = run_ranks(train_with_a_fault, count, str(tmp_path / "plain"), False)
    began = time.monotonic()
    found = run_ranks(train_with_a_fault, count, str(tmp_path / "observed"), True)
    assert time.monotonic() - began < 240  # the timeout is 600 s; starting the ranks takes most of this time
    assert [weights for weights, _, _ in found] == [weights for weights, _, _ in plain]
    assert [ends for _, ends, _ in found] == [[HostError, "failed"]] * count
    for rank, (_, _, log) in enumerate(found):
        assert len(log) == 1
        assert "Training continues" in log[0]
        assert "RuntimeError: a fault of the host" in log[0]
        assert ("rank 1" in log[0]) == (rank != 1)


def test_an_error_of_the_user_on_one_rank_still_ends_the_others(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"rank 1 .*ZeroDivisionError: the user's"):
        run_ranks(train_with_an_error_of_the_user, 2, str(tmp_path))


def train_with_an_error_of_the_user(folder: str) -> str:
    torch.distributed.init_process_group("gloo")
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    class Fails(Callback):
        def on_train_step_end(self, ctx: Context) -> None:
            if ctx.step == 3 and ctx.run.rank == 1:
                raise ZeroDivisionError("the user's")

    with (
        pytest.raises(ZeroDivisionError) if torch.distributed.get_rank() == 1 else contextlib.nullcontext(),
        attach(
            model=model, optimizer=optimizer, callbacks=[Fails(), CheckpointSaver(save_interval="5ba")], runs_folder=folder
        ) as run,
    ):
        for inputs in run.steps([torch.ones(2, 3)] * 12):
            model(inputs).sum().backward()
            optimizer.step()
    return "the end"
