from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from callsheet import Callback, CallbackManager, Context, Trainer
from callsheet.callbacks import CheckpointSaver
from callsheet.callbacks.freeze_unfreeze import FreezeUnfreeze
from callsheet.checkpoint import find_checkpoints
from callsheet.errors import ConfigError
from callsheet.testing import run_ranks

Weights = dict[str, list[float]]
STEPS_PER_EPOCH = 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
        self.head = nn.Linear(4, 1)

    def forward(self, inputs: Tensor) -> Any:
        return self.head(self.body(inputs))


def weights_of(model: nn.Module) -> Weights:
    state = {name: tensor for name, tensor in model.state_dict().items() if tensor.is_floating_point()}
    return {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).flatten().tolist()
        for name, tensor in state.items()
    }


class RecordsSteps(Callback):
    """Records the weights, the gradient norm, and whether the frozen part has gradients after every step."""

    def __init__(self) -> None:
        self.weights: list[Weights] = []
        self.norms: list[float] = []
        self.requires_grad: list[bool] = []
        self.has_gradient: list[bool] = []

    def on_train_step_end(self, ctx: Context) -> None:
        self.weights.append(weights_of(ctx.model))
        assert ctx.grad_norm is not None
        self.norms.append(float(ctx.grad_norm))
        self.has_gradient.append(ctx.model.state_dict(keep_vars=True)["body.0.weight"].grad is not None)
        self.requires_grad.append(ctx.model.body[0].weight.requires_grad)


def trainer(folder: Path, *callbacks: Callback, **options: Any) -> Trainer:
    torch.manual_seed(2)
    inputs = torch.randn(12, 3, generator=torch.Generator().manual_seed(1))
    data = [(part, part.sum(1, keepdim=True)) for part in inputs.split(4)]
    arguments: dict[str, Any] = {
        "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.1),
        "max_duration": "3ep",
        "run_name": "run",
    }
    return Trainer(
        Net(),
        nn.functional.mse_loss,
        data,
        data[:1],
        clip_grad_norm=0.1,
        callbacks=CallbackManager(callbacks, checking=True),
        runs_folder=folder,
        device="cpu",
        **(arguments | options),
    )


def fit(folder: Path, *callbacks: Callback, **options: Any) -> tuple[RecordsSteps, Weights]:
    steps = RecordsSteps()
    with trainer(folder, *callbacks, steps, **options) as trained:
        first = weights_of(trained.model)
        trained.fit()
    return steps, first


def first_changes(steps: RecordsSteps, first: Weights) -> dict[str, int | None]:
    """Return the first step that changes each weight."""
    return {name: next((i for i, weights in enumerate(steps.weights, 1) if weights[name] != first[name]), None) for name in first}


@pytest.mark.parametrize(
    ("modules", "frozen"),
    [
        ("body", ["body.0", "body.1", "body.2"]),
        (["body.0"], ["body.0"]),
        ("body.[02]", ["body.0", "body.2"]),
        (["head", "body.1"], ["head", "body.1"]),
    ],
)
@pytest.mark.parametrize(("until", "step"), [("1ep", 4), (3, 4), ("5ba", 6), ("0.5dur", 7), (None, None)])
def test_frozen_modules_do_not_change_before_the_given_time(
    tmp_path: Path, modules: Any, frozen: list[str], until: Any, step: int | None
) -> None:
    steps, first = fit(tmp_path, FreezeUnfreeze(modules=modules, until=until))
    for name, first_change in first_changes(steps, first).items():
        assert first_change == (step if name.rpartition(".")[0] in frozen else 1), name


def test_statistics_are_updated_if_requested(tmp_path: Path) -> None:
    first_change = first_changes(*fit(tmp_path, FreezeUnfreeze(modules="body", until="1ep", statistics=True)))
    assert (first_change["body.1.running_mean"], first_change["body.1.weight"]) == (1, 4)


def test_other_parameters_train_as_if_the_frozen_ones_did_not_exist(tmp_path: Path) -> None:
    """Steps, clipping and moments equal those of a run whose optimizer does not have the frozen parameters."""
    steps, _ = fit(tmp_path / "frozen", FreezeUnfreeze(modules="body", statistics=True))
    bare = RecordsSteps()
    with trainer(
        tmp_path / "bare", bare, optimizer=lambda given: torch.optim.AdamW(given[-2:], lr=0.05, weight_decay=0.1)
    ) as trained:
        trained.fit()
    for one, other in zip(steps.weights, bare.weights, strict=True):
        for name in ("head.weight", "head.bias"):
            assert one[name] == pytest.approx(other[name])
    assert steps.norms == pytest.approx(bare.norms)


def test_no_gradients_are_computed_for_frozen_parameters_on_one_rank(tmp_path: Path) -> None:
    steps, _ = fit(tmp_path, FreezeUnfreeze(modules="body", until="1ep"))
    assert steps.requires_grad == [False] * 3 + [True] * 6
    assert steps.has_gradient == steps.requires_grad


def test_frozen_modules_stay_frozen_in_evaluations_and_are_restored_at_the_end(tmp_path: Path) -> None:
    with trainer(tmp_path, FreezeUnfreeze(modules="body"), eval_interval="1ba") as trained:
        first = weights_of(trained.model)
        trained.fit()
        assert weights_of(trained.model)["body.1.running_mean"] == first["body.1.running_mean"]
    assert all(parameter.requires_grad for parameter in trained.model.parameters())
    assert all(module.training for module in trained.model.modules())


@pytest.mark.test_all
@pytest.mark.parametrize("until", ["1ep", "4ba", None])
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path, until: str | None) -> None:
    def frozen() -> FreezeUnfreeze:
        return FreezeUnfreeze(modules="body", until=until)

    whole, _ = fit(tmp_path, frozen(), CheckpointSaver(save_interval="1ba", keep=None))
    found = find_checkpoints(tmp_path / "run" / "checkpoints").checkpoints
    assert {checkpoint.step for checkpoint in found} == set(range(1, 10))
    for checkpoint in found:
        steps, _ = fit(tmp_path, frozen(), resume=checkpoint.path, run_name=Path(checkpoint.path).name)
        assert steps.weights == whole.weights[checkpoint.step :]


def test_two_instances_work_in_one_run(tmp_path: Path) -> None:
    first, second = FreezeUnfreeze(modules="body.0", until="2ep"), FreezeUnfreeze(modules="body.2", until="1ep")
    first_change = first_changes(*fit(tmp_path, first, second))
    assert (first_change["body.0.weight"], first_change["body.2.weight"], first_change["head.weight"]) == (7, 4, 1)


def test_an_unknown_module_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'boddy'; did you mean 'body'\?"):
        fit(tmp_path, FreezeUnfreeze(modules=["head", "boddy"]))


def test_parameters_that_are_unfrozen_later_must_be_in_the_optimizer(tmp_path: Path) -> None:
    def last_two(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters[-2:], lr=0.1)

    with pytest.raises(ConfigError, match=r"does not hold body.0.weight"):
        fit(tmp_path, FreezeUnfreeze(modules="body", until="1ep"), optimizer=last_two)
    fit(tmp_path, FreezeUnfreeze(modules="body"), optimizer=last_two, run_name="never")


@pytest.mark.parametrize("options", [{"modules": []}, {"modules": ""}, {"modules": "body", "until": "0ep"}])
def test_rejects_bad_arguments(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        FreezeUnfreeze(**options)


def on_a_rank(folder: str, parallel: str) -> dict[str, Any]:
    steps = RecordsSteps()
    options: dict[str, Any] = {"parallel": parallel, "max_duration": "6ep"}
    with trainer(Path(folder), FreezeUnfreeze(modules="body", until="2ep"), steps, **options) as trained:
        first = weights_of(trained.model)
        trained.fit()
    return {"moves": first_changes(steps, first), "last": steps.weights[-1], "norms": steps.norms}


@pytest.mark.test_all
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_ranks_freeze_the_same_parameters_and_stay_equal(tmp_path: Path, parallel: str) -> None:
    one, other = run_ranks(on_a_rank, 2, str(tmp_path), parallel)
    assert one["norms"] == other["norms"]
    for name in one["moves"]:
        assert one["moves"][name] == other["moves"][name] == (1 if name.startswith("head") else 5)
        if "running" not in name:
            assert one["last"][name] == other["last"][name]
