"""A step on several ranks gives the weights of one process with the whole global batch, compared with a plain PyTorch loop."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from callsheet import Callback, Context, Trainer
from callsheet.core.ranks import read_ranks
from callsheet.errors import ConfigError
from callsheet.testing.ranks import run_ranks
from callsheet.trainer import ForwardStepTask, Parallel
from callsheet.trainer.parallel import ParallelKind

GLOBAL_BATCH, EPOCHS = 8, 2
SAMPLES = 17
"""The last global batch of an epoch is one sample: all ranks but one have a filler."""
CLIP = 0.3
KINDS = {"ddp": Parallel("ddp"), "fsdp": Parallel("fsdp"), "hsdp": Parallel("fsdp", shard_size=2)}


@dataclass(frozen=True)
class Case:
    """How a step is divided. `later` is the number of batches to accumulate that a callback sets at the end of step 2."""

    accumulate: int = 1
    microbatch_size: int | None = None
    later: int | None = None
    samples: int = SAMPLES
    is_frozen: bool = False


CASES = {
    "plain": Case(),
    "two samples left": Case(samples=18),  # two of 4 ranks have fillers, which repeat another rank's sample
    "microbatches": Case(microbatch_size=3),
    "unequally many microbatches": Case(microbatch_size=1, samples=21),  # 3 and 2 samples on 2 ranks, 2, 1, 1 and 1 on 4
    "accumulate 2": Case(accumulate=2),
    "accumulate 3": Case(accumulate=3),
    "accumulate microbatches": Case(accumulate=3, microbatch_size=2),
    "accumulate unequally many microbatches": Case(accumulate=2, microbatch_size=1, samples=29),
    "frozen": Case(microbatch_size=3, is_frozen=True),
    "accumulate later": Case(later=2),
    "accumulate less later": Case(accumulate=2, microbatch_size=3, later=1),
}


class AccumulatesLater(Callback):
    phase = "change"

    def __init__(self, batches: int) -> None:
        self.batches = batches

    def on_train_step_end(self, ctx: Context) -> None:
        if ctx.step == 2:
            ctx.control.set_gradient_accumulation(self.batches)


class Norms(Callback):
    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_train_step_end(self, ctx: Context) -> None:
        assert ctx.grad_norm is not None
        self.norms.append(float(ctx.grad_norm))


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def weights_of(model: nn.Module) -> dict[str, Any]:
    """Return the weights as numbers. For sharded models, this is a collective call."""
    return {name: full(tensor.detach()).tolist() for name, tensor in model.named_parameters()}


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.1)


def scheduler_of(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 3))


def groups(batches: list[Any], case: Case) -> Iterator[list[Any]]:
    """Yield the global batches of each step, over all epochs."""
    accumulate, step = case.accumulate, 0
    for _ in range(EPOCHS):
        left = list(batches)
        while left:
            yield left[:accumulate]
            del left[:accumulate]
            step += 1
            if step == 2 and case.later is not None:
                accumulate = case.later


def assert_same_weights(found: dict[str, Any], expected: dict[str, Any], *, rtol: float, atol: float) -> None:
    assert found.keys() == expected.keys()
    for name, numbers in expected.items():
        torch.testing.assert_close(
            torch.tensor(found[name], dtype=torch.float64), torch.tensor(numbers, dtype=torch.float64), rtol=rtol, atol=atol
        )


# --- a mean over samples ---


def perceptron(seed: int, *, is_frozen: bool = False) -> nn.Module:
    """Return a model in double precision, so that any difference beyond rounding is a bug."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    for parameter in list(model.parameters())[2:5]:  # one layer, and a part of the next
        parameter.requires_grad_(not is_frozen)
    return model


def dataset(samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(samples, 3, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True) + torch.randn(samples, 1, generator=generator).double())


def train_perceptrons(kind: str) -> dict[str, dict[str, Any]]:
    """Train every case on a rank, each with its own Trainer."""
    ranks = read_ranks()
    distributed.init_process_group("gloo", timeout=timedelta(seconds=20))
    found = {}
    for name, case in CASES.items():
        norms = Norms()
        later = [AccumulatesLater(case.later)] if case.later is not None else []
        with Trainer(
            perceptron(ranks.rank, is_frozen=case.is_frozen),  # rank 0's weights are broadcast
            mse_loss,
            DataLoader(dataset(case.samples), batch_size=GLOBAL_BATCH // ranks.world_size),
            optimizer=optimizer_of,
            scheduler=scheduler_of,
            max_duration=f"{EPOCHS}ep",
            microbatch_size=case.microbatch_size,
            gradient_accumulation_steps=case.accumulate,
            clip_grad_norm=CLIP,
            parallel=KINDS[kind],
            callbacks=[norms, *later],
            timeout_seconds=20,
        ) as trainer:
            trainer.fit()
            found[name] = {"weights": weights_of(trainer.model), "norms": norms.norms, "samples": trainer.state.timestamp.sample}
    return found


@functools.cache
def trained_perceptrons(kind: str, world_size: int) -> list[dict[str, dict[str, Any]]]:
    return run_ranks(train_perceptrons, world_size, kind)


def bare_perceptron(case: Case) -> dict[str, Any]:
    """Train the case without a Trainer: the loss of a step is the mean over all its samples, in one forward pass."""
    model = perceptron(0, is_frozen=case.is_frozen)
    optimizer = optimizer_of([parameter for parameter in model.parameters() if parameter.requires_grad])
    scheduler = scheduler_of(optimizer)
    norms = []
    for group in groups(list(DataLoader(dataset(case.samples), batch_size=GLOBAL_BATCH)), case):
        inputs, targets = (torch.cat(parts) for parts in zip(*group, strict=True))
        mse_loss(model(inputs), targets).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return {"weights": weights_of(model), "norms": norms}


ALWAYS = {
    ("ddp", 2): set(CASES),
    ("fsdp", 4): {"plain", "two samples left", "accumulate unequally many microbatches", "frozen"},
    ("hsdp", 4): {"accumulate microbatches"},
}
"""What `make test` runs of them; `make slow` runs the rest."""


@pytest.mark.test_all
@pytest.mark.parametrize(
    ("kind", "world_size", "name"),
    [
        pytest.param(kind, size, name, marks=() if name in ALWAYS.get((kind, size), ()) else pytest.mark.slow)
        for kind, size in (("ddp", 2), ("ddp", 4), ("fsdp", 2), ("fsdp", 4), ("hsdp", 4))
        for name in CASES
    ],
)
def test_ranks_train_the_weights_that_one_process_trains(kind: str, world_size: int, name: str) -> None:
    expected = bare_perceptron(CASES[name])
    assert any(norm > CLIP for norm in expected["norms"])
    for found in trained_perceptrons(kind, world_size):
        assert_same_weights(found[name]["weights"], expected["weights"], rtol=1e-9, atol=1e-11)
        assert found[name]["norms"] == pytest.approx(expected["norms"], rel=1e-9)
        assert found[name]["samples"] == EPOCHS * CASES[name].samples


# --- a mean over labeled tokens ---

TOKEN_STEPS = 5


def token_batch(rank: int, number: int) -> dict[str, Tensor] | None:
    """Return a rank's batch: step 2 has no labels on rank 1, step 3 has none at all, and rank 1 has no batch in the last step."""
    if rank == 1 and number == TOKEN_STEPS:
        return None
    generator = torch.Generator().manual_seed(10 * number + rank)
    ids = torch.randint(0, 11, (2 + (rank + number) % 2, 6), generator=generator)
    labels = torch.where(torch.rand(ids.shape, generator=generator) < 0.5, -100, ids)
    labels[0, 3] = ids[0, 3]
    if number == 3 or (number == 2 and rank == 1):
        labels[:, 1:] = -100  # no token predicts the first one, so its label does not count
    return {"input_ids": ids, "labels": labels}


def llama(seed: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=11,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=16,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    """Return SGD with momentum: Adam would hide a wrong factor of the gradients."""
    return torch.optim.SGD(parameters, lr=0.3, momentum=0.9)


TOKEN_CASES = {"plain": Case(), "microbatches": Case(microbatch_size=1), "accumulate": Case(accumulate=2, microbatch_size=2)}


class Losses(Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_log(self, ctx: Context) -> None:
        self.losses.append(ctx.record.values["train/loss"])


def train_llamas(kind: str) -> dict[str, Any]:
    rank = read_ranks().rank
    distributed.init_process_group("gloo", timeout=timedelta(seconds=20))
    found = {}
    for name, case in TOKEN_CASES.items():
        losses = Losses()
        with Trainer(
            llama(rank),
            None,
            [batch for number in range(1, TOKEN_STEPS + 1) if (batch := token_batch(rank, number)) is not None],
            optimizer=momentum,
            max_duration=f"{EPOCHS}ep",
            microbatch_size=case.microbatch_size,
            gradient_accumulation_steps=case.accumulate,
            log_interval="1ba",
            shard_data=False,
            parallel=KINDS[kind],
            callbacks=losses,
            timeout_seconds=20,
        ) as trainer:
            trainer.fit()
            found[name] = {"weights": weights_of(trainer.model), "losses": losses.losses}
    return found


@functools.cache
def trained_llamas(kind: str) -> list[dict[str, Any]]:
    return run_ranks(train_llamas, 2, kind)


def bare_llama(case: Case) -> dict[str, Any]:
    model = llama(0)
    model.train()
    optimizer = momentum(model.parameters())
    batches = [
        [batch for rank in range(2) if (batch := token_batch(rank, number)) is not None] for number in range(1, TOKEN_STEPS + 1)
    ]
    losses = []
    for group in groups(batches, case):
        parts = [batch for together in group for batch in together]
        whole = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
        if (whole["labels"][:, 1:] != -100).any():
            loss = model(**whole).loss
            loss.backward()
            losses.append(loss.item())
        else:
            losses.append(0.0)
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
    return {"weights": weights_of(model), "losses": losses}


@pytest.mark.test_all
@pytest.mark.parametrize("name", TOKEN_CASES)
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_language_model_s_ranks_train_the_mean_over_all_labelled_tokens(kind: str, name: str) -> None:
    """The tolerance is for single precision, in which the model computes its loss. A mean of means would differ by a tenth."""
    expected = bare_llama(TOKEN_CASES[name])
    for found in trained_llamas(kind):
        assert found[name]["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        assert_same_weights(found[name]["weights"], expected["weights"], rtol=1e-4, atol=1e-6)


# --- buffers, tied weights ---


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(1)
        self.linear = nn.Linear(1, 1)

    def forward(self, inputs: Tensor) -> Any:
        return self.linear(self.norm(inputs))


def train_normalised(kind: ParallelKind) -> dict[str, Any]:
    """Train rank r on values around 10 r, so that the statistics of the ranks differ."""
    rank = read_ranks().rank
    torch.manual_seed(0)
    own = [(torch.randn(4, 1) + 10 * rank, torch.randn(4, 1)) for _ in range(3)]
    model = Normalised()
    with Trainer(
        model,
        mse_loss,
        own,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        shard_data=False,
        parallel=kind,
        gradient_accumulation_steps=2,
    ) as trainer:
        trainer.fit("1ep")
        after = model.norm.running_mean.item()  # type: ignore[union-attr]
        results = trainer.evaluate([(torch.ones(2, 1) * 5, torch.zeros(2, 1))])
    return {"after": after, "evaluated": model.norm.running_mean.item(), "results": results}  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_running_statistics_are_those_of_rank_0(kind: str) -> None:
    zero, one = run_ranks(train_normalised, 2, kind)
    assert abs(zero["after"]) < 1  # it has only seen its own values
    assert one["evaluated"] == zero["evaluated"] == zero["after"]
    assert one["results"] == zero["results"]


class Tied(nn.Sequential):
    """A model whose first and last child share their weight. If they were sharded separately, it would become two weights."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(3, 3, bias=False), nn.Tanh(), nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3, bias=False))
        self[4].weight = self[0].weight


def train_tied() -> dict[str, Any]:
    data = [(torch.ones(2, 3), torch.zeros(2, 3)), (torch.ones(2, 3) * 2, torch.zeros(2, 3))]
    with Trainer(Tied(), mse_loss, data, optimizer=momentum, parallel="fsdp") as trainer:
        trainer.fit("3ep")
        assert trainer.model[0].weight is trainer.model[4].weight  # type: ignore[index]
        return weights_of(trainer.model)


def test_shared_weights_stay_shared_under_fsdp() -> None:
    model = Tied()
    optimizer = momentum(model.parameters())
    for _ in range(3):
        inputs = torch.cat([torch.ones(2, 3), torch.ones(2, 3) * 2])
        mse_loss(model(inputs), torch.zeros(4, 3)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for found in run_ranks(train_tied, 2):
        assert_same_weights(found, weights_of(model), rtol=1e-5, atol=1e-6)


# --- the choice of `parallel`, and what is rejected ---


def chosen() -> list[Any]:
    """Return the type of the parameters under `auto`, `ddp` and `fsdp`."""
    distributed.init_process_group("gloo", timeout=timedelta(seconds=20))
    found = []
    for parallel in ("auto", "ddp", "fsdp"):
        with Trainer(perceptron(0), mse_loss, [(torch.ones(1, 3), torch.ones(1, 1))] * 2, parallel=parallel) as trainer:
            found.append(type(next(trainer.model.parameters())).__name__)
    return found


def test_auto_replicates_a_model_that_fits_and_one_rank_shards_nothing() -> None:
    assert run_ranks(chosen, 2) == [["Parameter", "Parameter", "DTensor"]] * 2
    for parallel in ("auto", "single", "ddp", "fsdp", Parallel("fsdp", shard_size=1)):
        with Trainer(perceptron(0), mse_loss, [(torch.ones(1, 3), torch.ones(1, 1))], parallel=parallel) as trainer:
            assert type(trainer.model[0].weight) is nn.Parameter  # type: ignore[index]


def rejected() -> dict[str, str]:
    """Return the error of each choice that cannot work, on a rank."""
    distributed.init_process_group("gloo", timeout=timedelta(seconds=20))
    data = [(torch.ones(1, 3), torch.ones(1, 1))] * 2
    found = {}
    for name, parallel in {
        "single": Parallel("single"),
        "shard_size": Parallel("fsdp", shard_size=3),
        "no shard": Parallel("fsdp", shard_size=0),
        "blocks": Parallel("fsdp", blocks=("Linear", "Attention")),
    }.items():
        with pytest.raises(ConfigError) as raised:
            Trainer(perceptron(0), mse_loss, data, parallel=parallel)
        found[name] = str(raised.value)
    model = perceptron(0)
    with pytest.raises(ConfigError) as raised:
        Trainer(model, mse_loss, data, parallel="fsdp", optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    found["optimizer"] = str(raised.value)
    return found


@pytest.mark.test_all
def test_invalid_parallel_settings_are_rejected_on_all_ranks() -> None:
    for recorded in run_ranks(rejected, 2):
        assert "parallel='single' among 2 ranks" in recorded["single"]
        assert "'ddp' or 'fsdp'" in recorded["single"]
        assert "shard_size=3 does not divide the 2 ranks" in recorded["shard_size"]
        assert "shard_size=0" in recorded["no shard"]
        assert "blocks Attention: the model has no such module; it has Linear, Sequential, Tanh" in recorded["blocks"]
        assert "give a function instead" in recorded["optimizer"]


def test_invalid_arguments_of_parallel_are_rejected() -> None:
    with pytest.raises(ConfigError, match=r"unknown parallel 'dpp'; did you mean 'ddp'"):
        Parallel("dpp")  # type: ignore[arg-type]  # the mistake that is tested
    with pytest.raises(ConfigError, match="shard_size and blocks are for parallel='fsdp', not 'ddp'"):
        Parallel("ddp", shard_size=2)
    with pytest.raises(ConfigError, match="not 'auto'"):
        Parallel(blocks=("Linear",))


def train_unused() -> str:
    model = nn.ModuleDict({"used": nn.Linear(1, 1), "unused": nn.Linear(1, 1)})
    data = [(torch.ones(1, 1), torch.ones(1, 1))] * 4
    parallel = Parallel("ddp", options={"find_unused_parameters": True})
    task = ForwardStepTask(lambda model, batch: (model(batch[0]), lambda outputs: mse_loss(outputs, batch[1])))
    model.forward = model["used"].forward
    with Trainer(model, task, data, optimizer=momentum, parallel=parallel, timeout_seconds=20) as trainer:
        trainer.fit("1ep")
    return str(trainer.run.outcome)


def test_options_of_parallel_are_passed_to_torch() -> None:
    assert run_ranks(train_unused, 2) == ["finished", "finished"]
