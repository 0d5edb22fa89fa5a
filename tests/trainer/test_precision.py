"""bf16 and fp16: the types of computation, unscaled gradients, skipped steps, and the loss scale in checkpoints."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy, mse_loss

from callsheet import Callback, Context, Trainer
from callsheet.core.ranks import read_ranks
from callsheet.testing import Recorder, check_events
from callsheet.testing.ranks import run_ranks

STEPS = 6


def model_of(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))


def data_of(batches: int, size: int = 4) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(batches, size, 3, generator=generator)
    return [(batch, batch.sum(1, keepdim=True)) for batch in inputs]


def small_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return a loss that is small enough: its gradients times the scale of 65536 stay within fp16's maximum, 65504."""
    return mse_loss(outputs, targets) / 20


def trainer_of(*callbacks: Callback, batches: int = STEPS, **changes: Any) -> Trainer:
    arguments: dict[str, Any] = {
        "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        "scheduler": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
        "clip_grad_norm": 0.05,
        "log_interval": "1ba",
        "timeout_seconds": 20,
    }
    return Trainer(model_of(), small_loss, data_of(batches), callbacks=callbacks, **(arguments | changes))


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def weights_of(model: nn.Module) -> list[list[float]]:
    return [full(parameter.detach()).flatten().tolist() for parameter in model.parameters()]


class Overflows(Callback):
    """Makes the loss of one step on one rank so large that its scaled gradients overflow. The loss itself is finite."""

    phase = "change"

    def __init__(self, step: int, rank: int = 0) -> None:
        self.step = step
        self.rank = rank

    def on_loss_end(self, ctx: Context) -> None:
        if ctx.step == self.step and ctx.run.rank == self.rank:
            ctx.loss = ctx.loss * 1e6


class RecordsSteps(Callback):
    """Records the loss, gradients, learning rate and weights of each step."""

    def __init__(self) -> None:
        self.types: set[torch.dtype] = set()
        self.skipped: list[bool] = []
        self.rates: list[float] = []
        self.gradients: list[Tensor] = []
        self.norms: list[float] = []
        self.losses: list[float] = []
        self.weights: list[list[list[float]]] = []

    def on_forward_end(self, ctx: Context) -> None:
        self.types.add(ctx.outputs.dtype)

    def on_forward_backward_end(self, ctx: Context) -> None:
        self.gradients.append(torch.cat([full(p.grad).flatten() for p in ctx.model.parameters()]).clone())

    def on_train_step_end(self, ctx: Context) -> None:
        self.skipped.append(ctx.step_skipped)
        self.rates.append(ctx.learning_rate)
        assert ctx.grad_norm is not None
        self.norms.append(float(ctx.grad_norm))
        self.losses.append(float(ctx.loss))
        self.weights.append(weights_of(ctx.model))


@pytest.mark.parametrize(("precision", "kind"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_callbacks_receive_unscaled_gradients(precision: str, kind: torch.dtype) -> None:
    """They are close to those of single precision, within the 8 or 11 bits of the type. A scale of 65536 would be visible."""
    looks, reference = RecordsSteps(), RecordsSteps()
    with trainer_of(looks, precision=precision) as trainer, trainer_of(reference) as other:
        trainer.fit("1ba")
        other.fit("1ba")
    assert looks.types == {kind}
    assert reference.types == {torch.float32}
    atol = 0.005 if precision == "bf16" else 0.001
    torch.testing.assert_close(looks.gradients[0], reference.gradients[0], rtol=0.05, atol=atol)
    assert looks.norms == [pytest.approx(reference.norms[0], rel=0.05)]
    assert looks.losses == [pytest.approx(reference.losses[0], rel=0.02)]
    assert not torch.equal(looks.gradients[0], reference.gradients[0])
    assert all(parameter.dtype is torch.float32 for parameter in trainer.model.parameters())


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("parts", [{}, {"microbatch_size": 2}, {"gradient_accumulation_steps": 2}])
def test_a_step_that_overflows_is_skipped_with_its_scheduler(fused: bool, parts: dict[str, int]) -> None:
    looks, recorder = RecordsSteps(), Recorder()
    with trainer_of(
        Overflows(3),
        looks,
        recorder,
        precision="fp16",
        batches=12,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=fused),
        **parts,
    ) as trainer:
        trainer.fit("5ba")
    assert looks.skipped == [False, False, True, False, False]
    assert looks.rates == pytest.approx([0.01, 0.005, 0.01 / 3, 0.01 / 3, 0.0025])
    assert looks.weights[2] == looks.weights[1]
    assert looks.weights[3] != looks.weights[2]
    assert not math.isfinite(looks.norms[2])
    check_events(recorder.events)
    assert recorder.events.count("on_optimizer_step_end") == 5


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_without_a_scale_no_step_is_skipped(precision: str) -> None:
    looks = RecordsSteps()
    with trainer_of(Overflows(2), looks, precision=precision) as trainer:
        trainer.fit("3ba")
    assert looks.skipped == [False] * 3
    assert looks.rates == pytest.approx([0.01, 0.005, 0.01 / 3])


class SavesAt(Callback):
    phase = "save"

    def __init__(self, step: int) -> None:
        self.step = step

    def on_checkpoint_due(self, ctx: Context) -> None:
        if ctx.step == self.step and ctx.boundary == "step":
            ctx.control.save("the test", replicated=True)


@pytest.mark.parametrize("overflow", [2, 3, 4])
def test_the_scale_is_restored_bit_for_bit(overflow: int, tmp_path: Path) -> None:
    """The checkpoint is from step 3. If the scale were reset to its initial value, other bits would be lost in rounding."""
    whole, first, rest = RecordsSteps(), RecordsSteps(), RecordsSteps()
    keep: dict[str, Any] = {"precision": "fp16", "runs_folder": tmp_path, "seed": 0}
    with trainer_of(Overflows(overflow), whole, run_name="whole", **keep) as trainer:
        trainer.fit("1ep")
        scale = trainer.save_checkpoint().path
    with trainer_of(Overflows(overflow), first, SavesAt(3), run_name="parts", **keep) as trainer:
        trainer.fit("3ba")
    with trainer_of(Overflows(overflow), rest, run_name="parts", resume="auto", **keep) as trainer:
        assert trainer.state.timestamp.batch == 3
        trainer.fit("1ep")
        other = trainer.save_checkpoint().path
    assert first.weights + rest.weights == whole.weights
    assert [*first.losses, *rest.losses] == whole.losses
    assert [*first.skipped, *rest.skipped] == whole.skipped == [step == overflow for step in range(1, STEPS + 1)]
    assert _scale_in(scale) == _scale_in(other) == {"scale": 2.0**15, "growth": STEPS - overflow}


def _scale_in(path: str) -> dict[str, float]:
    from callsheet.checkpoint import read_checkpoint

    found = read_checkpoint(path).shared["precision"]["scaler"]
    return {"scale": found["scale"], "growth": found["_growth_tracker"]}


def test_a_run_may_resume_in_another_precision(tmp_path: Path) -> None:
    for number, precision in enumerate(["fp16", "fp32", "bf16", "fp16"], start=1):
        with trainer_of(precision=precision, runs_folder=tmp_path, run_name="run", resume="auto") as trainer:
            trainer.fit(f"{number}ba")
            trainer.save_checkpoint()
    assert trainer.state.timestamp.batch == 4


# --- on several ranks ---


def train(precision: str, parallel: str, overflow: int) -> dict[str, Any]:
    """Train with an overflow on rank 1 only, at step `overflow`, if any."""
    looks = RecordsSteps()
    with trainer_of(
        Overflows(overflow, rank=1),
        looks,
        precision=precision,
        parallel=parallel,
        batches=2 * STEPS,
    ) as trainer:
        trainer.fit()
    return {name: value for name, value in vars(looks).items() if name not in ("gradients", "types")} | {
        "types": [str(kind) for kind in looks.types],
        "finite": [bool(gradients.isfinite().all()) for gradients in looks.gradients],
        "steps": trainer.state.timestamp.batch,
    }


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_an_overflow_on_one_rank_skips_the_step_on_all(parallel: str) -> None:
    zero, one = run_ranks(train, 2, "fp16", parallel, 3)
    assert zero["skipped"] == one["skipped"] == [False, False, True, False, False, False]
    assert zero["rates"] == one["rates"]
    assert zero["weights"] == one["weights"]
    assert zero["weights"][2] == zero["weights"][1] != zero["weights"][3]
    assert zero["finite"] == [step != 3 for step in range(1, STEPS + 1)]
    assert all(math.isfinite(value) for numbers in zero["weights"][-1] for value in [sum(numbers)])


class OverflowsInOneWeight(Callback):
    """Makes the gradient of the first weight's first row infinite, which is in one rank's shard."""

    phase = "change"

    def on_train_step_start(self, ctx: Context) -> None:
        if ctx.step == 2:
            for parameter in list(ctx.model.parameters())[:1]:
                self.handle = parameter.register_post_accumulate_grad_hook(_spoil)

    def on_train_step_end(self, ctx: Context) -> None:
        if ctx.step == 2:
            self.handle.remove()


def _spoil(parameter: Tensor) -> None:
    assert parameter.grad is not None
    grad: Any = parameter.grad
    if read_ranks().rank == 0:
        (grad.to_local() if isinstance(grad, DTensor) else grad)[0, 0] = math.inf


def train_with_a_bad_shard(shard_size: int | None) -> dict[str, Any]:
    from callsheet.trainer import Parallel

    looks = RecordsSteps()
    with trainer_of(
        OverflowsInOneWeight(), looks, precision="fp16", parallel=Parallel("fsdp", shard_size=shard_size), batches=8
    ) as trainer:
        trainer.fit("3ba")
        return {"skipped": looks.skipped, "rates": looks.rates, "weights": weights_of(trainer.model)}


def test_an_overflow_in_one_shard_skips_the_step_on_all() -> None:
    zero, one = run_ranks(train_with_a_bad_shard, 2, None)
    assert zero["skipped"] == one["skipped"] == [False, True, False]
    assert zero == one


@pytest.mark.test_all
@pytest.mark.parametrize(("precision", "kind"), [("bf16", "torch.bfloat16"), ("fp16", "torch.float16")])
def test_a_sharded_model_computes_in_the_same_type(precision: str, kind: str) -> None:
    """The results are close to those of replicas: both round to 8 or 11 bits, but not always at the same operations."""
    sharded = run_ranks(train, 2, precision, "fsdp", 0)
    replicated = run_ranks(train, 2, precision, "ddp", 0)
    for one, other in zip(sharded, replicated, strict=True):
        assert one["types"] == other["types"] == [kind]
        assert one["skipped"] == other["skipped"] == [False] * STEPS
        assert one["losses"] == pytest.approx(other["losses"], rel=0.05, abs=0.02)
        found, expected = (torch.tensor([v for numbers in it["weights"][-1] for v in numbers]) for it in (one, other))
        torch.testing.assert_close(found, expected, rtol=0.05, atol=0.01)


def losses_of_a_sharded_model() -> list[float]:
    """Return the losses for three equally likely classes: log 3, which bf16 would round to 1.1016."""
    found: list[float] = []

    class Notes(Callback):
        def on_loss_end(self, ctx: Context) -> None:
            found.append(float(ctx.loss))

    model = nn.Linear(1, 3)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    data = [(torch.zeros(2, 1), torch.tensor([0, 2]))] * 2
    with Trainer(
        model,
        cross_entropy,
        data,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        precision="bf16",
        parallel="fsdp",
        callbacks=Notes(),
    ) as trainer:
        trainer.fit()
    return found


def test_a_sharded_model_s_loss_has_full_precision() -> None:
    assert run_ranks(losses_of_a_sharded_model, 2) == [[pytest.approx(math.log(3), rel=1e-6)]] * 2
