"""Compiled forwards and checkpointed activations: the same losses, and every span fires its events."""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from callsheet import Callback, Context, Trainer
from callsheet.errors import ConfigError
from callsheet.testing import Recorder, check_events
from callsheet.testing.ranks import run_ranks
from callsheet.trainer.arguments import check_cuda_graphs
from callsheet.trainer.parallel import ParallelKind

HAS_COMPILER = shutil.which("c++") is not None and Path(sysconfig.get_paths()["include"], "Python.h").exists()


class Losses(Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_step_end(self, ctx: Context) -> None:
        self.losses.append(float(ctx.loss))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


class Small(nn.Module):
    """Defines its own forward: torch does not compile the forward of its own modules, such as a Sequential's."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 8)
        self.last = nn.Linear(8, 1)

    def forward(self, inputs: Tensor) -> Any:
        return self.last(self.first(inputs).tanh())


def train(compile: Any, parallel: ParallelKind = "auto", **changes: Any) -> tuple[list[float], list[str], int]:
    """Return the losses, the events, and the number of compiled graphs."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    model = Small()
    generator = torch.Generator().manual_seed(1)
    data = [(torch.randn(4, 3, generator=generator), torch.randn(4, 1, generator=generator)) for _ in range(4)]
    losses, recorder = Losses(), Recorder()
    with Trainer(
        model,
        mse_loss,
        data,
        data[:2],
        optimizer=sgd,
        callbacks=[losses, recorder],
        compile=compile,
        parallel=parallel,
        timeout_seconds=60,
        **changes,
    ) as trainer:
        trainer.fit("2ep")
        assert set(trainer.model.state_dict()) == {"first.weight", "first.bias", "last.weight", "last.bias"}
    check_events(recorder.events)
    return losses.losses, recorder.events, torch._dynamo.utils.counters["stats"]["unique_graphs"]


BACKENDS = [
    "aot_eager",
    pytest.param(
        "inductor",
        marks=[pytest.mark.slow, pytest.mark.skipif(not HAS_COMPILER, reason="inductor needs a C++ compiler and Python.h")],
    ),
]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_model_has_the_same_losses_and_events(backend: str) -> None:
    expected, events, none = train(False)
    found, compiled_events, graphs = train({"backend": backend})
    assert found == pytest.approx(expected, rel=1e-5)
    assert compiled_events == events
    assert {"on_forward_start", "on_forward_end", "on_loss_end", "on_backward_end"} <= set(events)
    assert (none, graphs > 0) == (0, True)


@pytest.mark.parametrize("parallel", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp"])
@pytest.mark.slow
def test_a_compiled_model_on_two_ranks_has_the_same_losses_and_events(parallel: str) -> None:
    expected = run_ranks(train, 2, False, parallel)
    for (found, events, graphs), (losses, eager_events, _) in zip(
        run_ranks(train, 2, {"backend": "aot_eager"}, parallel), expected, strict=True
    ):
        assert found == pytest.approx(losses, rel=1e-5)
        assert events == eager_events
        assert graphs > 0


def tiny_llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=11, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=8
    )
    return LlamaForCausalLM(config)


def train_llama(is_checkpointing: bool, parallel: ParallelKind = "auto") -> tuple[list[float], int]:
    """Return the losses, and how often a block's forward ran."""
    model, losses, forwards = tiny_llama(), Losses(), 0

    def count(*_: Any) -> None:
        nonlocal forwards
        forwards += 1

    # Count a module inside the block: recomputation stops as soon as it has the activations that it needs.
    model.model.layers[0].mlp.register_forward_pre_hook(count)
    ids = torch.randint(0, 11, (4, 2, 6), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": batch, "labels": batch} for batch in ids]
    with Trainer(
        model,
        None,
        data,
        optimizer=sgd,
        callbacks=losses,
        gradient_checkpointing=is_checkpointing,
        parallel=parallel,
        timeout_seconds=60,
    ) as trainer:
        trainer.fit("1ep")
    return losses.losses, forwards


def test_activations_are_computed_again_and_the_losses_are_the_same() -> None:
    (plain, once), (checkpointed, twice) = train_llama(False), train_llama(True)
    assert checkpointed == plain
    assert (once, twice) == (4, 8)


@pytest.mark.test_all
@pytest.mark.parametrize("parallel", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp"])
def test_activations_are_computed_again_on_ranks(parallel: str) -> None:
    for found, expected in zip(
        run_ranks(train_llama, 2, True, parallel), run_ranks(train_llama, 2, False, parallel), strict=True
    ):
        assert found[0] == pytest.approx(expected[0], rel=1e-6)
        assert found[1] == 2 * expected[1]


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_cuda_graphs_with_several_microbatches_are_rejected(mode: str) -> None:
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    with pytest.raises(ConfigError, match=rf"compile=\{{'mode': '{mode}'\}} records CUDA graphs.*max-autotune-no-cudagraphs"):
        check_cuda_graphs({"mode": mode}, cuda, has_microbatches=True)
    check_cuda_graphs({"mode": mode}, cuda, has_microbatches=False)
    check_cuda_graphs({"mode": mode}, cpu, has_microbatches=True)
    check_cuda_graphs({"mode": "default"}, cuda, has_microbatches=True)
    check_cuda_graphs(True, cuda, has_microbatches=True)


def test_a_model_without_activation_checkpointing_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"Linear has no gradient_checkpointing_enable\(\).*torch\.utils\.checkpoint"):
        Trainer(nn.Linear(1, 1), mse_loss, [(torch.ones(1, 1), torch.ones(1, 1))], gradient_checkpointing=True)


def test_a_hugging_face_model_without_activation_checkpointing_is_rejected() -> None:
    model = tiny_llama()
    type(model).supports_gradient_checkpointing = False
    try:
        with pytest.raises(ConfigError, match=r"gradient_checkpointing=True: LlamaForCausalLM does not support"):
            Trainer(model, None, [{"input_ids": torch.ones(1, 2)}], gradient_checkpointing=True)
    finally:
        del type(model).supports_gradient_checkpointing
