from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from callsheet import Callback, CallbackManager, Trainer
from callsheet.callbacks.load_checkpoint import LoadCheckpoint
from callsheet.errors import CheckpointError, ConfigError
from callsheet.testing import RanksFailed, run_ranks

Weights = dict[str, Tensor]


class Net(nn.Module):
    def __init__(self, width: int = 4, tied: bool = False) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        self.inner = nn.Linear(4, 4)
        self.again = nn.Linear(4, 4)
        self.head = nn.Linear(4, width)
        if tied:
            self.again.weight = self.inner.weight

    def forward(self, inputs: Tensor) -> Any:
        return self.head(self.again(self.inner(self.body(inputs)))).sum(1, keepdim=True)


def trainer(folder: Path, *callbacks: Callback, seed: int = 1, model: nn.Module | None = None, **options: Any) -> Trainer:
    torch.manual_seed(seed)
    model = model or Net()
    data = [(torch.randn(4, 3), torch.ones(4, 1))] * 4
    return Trainer(
        model,
        nn.functional.mse_loss,
        data,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.05),
        callbacks=CallbackManager(callbacks, checking=True),
        runs_folder=folder,
        device="cpu",
        **({"run_name": "new"} | options),
    )


def whole(model: nn.Module) -> Weights:
    return {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()
        for name, tensor in model.state_dict().items()
    }


def saved(folder: Path, **options: Any) -> tuple[str, Weights]:
    """Train a run, and return its checkpoint and the weights in it."""
    with trainer(folder, **({"run_name": "old"} | options)) as trained:
        trained.fit()
        return trained.save_checkpoint().path, whole(trained.model)


def loaded(folder: Path, callback: Callback, **options: Any) -> Weights:
    """Return the weights of a new run before its first step."""
    with trainer(folder, callback, **({"seed": 9} | options)) as made:
        assert made.state.timestamp.batch == 0
        assert made.optimizer is not None
        assert not made.optimizer.state
        return whole(made.model)


def initial_weights() -> Weights:
    torch.manual_seed(9)
    return whole(Net())


def loaded_names(found: Weights, old: Weights) -> set[str]:
    """Return the names of the weights that were loaded; all others must have their initial values."""
    new = initial_weights()
    for name, tensor in found.items():
        assert torch.equal(tensor, old[name]) or torch.equal(tensor, new[name]), name
    return {name for name, tensor in found.items() if torch.equal(tensor, old[name]) and not torch.equal(tensor, new[name])}


EVERY = {f"{part}.{kind}" for part in ("body.0", "body.1", "inner", "again", "head") for kind in ("weight", "bias")} | {
    "body.1.running_mean",
    "body.1.running_var",
    "body.1.num_batches_tracked",
}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, EVERY),
        ({"weights": "body.*"}, {name for name in EVERY if name.startswith("body.")}),
        ({"weights": ["inner.*", "head.bias"]}, {"inner.weight", "inner.bias", "head.bias"}),
        ({"leave_out": "head.*"}, EVERY - {"head.weight", "head.bias"}),
        ({"weights": "*.weight", "leave_out": ["body.*"]}, {"inner.weight", "again.weight", "head.weight"}),
    ],
)
def test_loads_only_the_named_weights(tmp_path: Path, options: dict[str, Any], expected: set[str]) -> None:
    path, old = saved(tmp_path)
    assert loaded_names(loaded(tmp_path, LoadCheckpoint(path=path, **options)), old) == expected


def test_training_starts_with_the_loaded_weights(tmp_path: Path) -> None:
    path, old = saved(tmp_path)
    with trainer(tmp_path, run_name="by hand") as by_hand:
        by_hand.model.load_state_dict(old)
        by_hand.fit()
    with trainer(tmp_path, LoadCheckpoint(path=path)) as other:
        other.fit()
    assert all(torch.equal(tensor, whole(by_hand.model)[name]) for name, tensor in whole(other.model).items())


def test_a_checkpoint_is_loaded_from_a_url(tmp_path: Path) -> None:
    path, old = saved(tmp_path)
    assert loaded_names(loaded(tmp_path, LoadCheckpoint(path=f"file://{path}")), old) == EVERY


def test_a_resumed_run_is_not_changed(tmp_path: Path) -> None:
    path, _ = saved(tmp_path)
    with trainer(tmp_path, LoadCheckpoint(path=path, leave_out="head.*")) as first:
        first.fit()
        first.save_checkpoint()
        last = whole(first.model)
    with trainer(tmp_path, LoadCheckpoint(path=path, leave_out="head.*"), resume="auto", seed=5) as resumed:
        assert all(torch.equal(tensor, last[name]) for name, tensor in whole(resumed.model).items())
    with trainer(tmp_path, LoadCheckpoint(path="gone"), resume="auto"):
        pass  # the checkpoint does not have to exist any more


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: Net(width=5), r"head.weight has the size \[4, 4\] in the checkpoint and \[5, 4\] in the model"),
        (lambda: nn.Sequential(Net(), nn.Linear(1, 1)), r"0.body.0.weight is not in the checkpoint, .* and \d+ more"),
        (lambda: Net().body, r"0.weight is not in the checkpoint"),
    ],
)
def test_weights_that_do_not_fit_are_an_error(tmp_path: Path, model: Any, message: str) -> None:
    path, _ = saved(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        trainer(tmp_path, LoadCheckpoint(path=path), model=model())


def test_a_weight_that_the_model_does_not_have_is_an_error(tmp_path: Path) -> None:
    path, _ = saved(tmp_path)
    model = Net()
    del model.head
    with pytest.raises(CheckpointError, match=r"head\.weight is not in the model"):
        trainer(tmp_path, LoadCheckpoint(path=path), model=model)
    trainer(tmp_path, LoadCheckpoint(path=path, leave_out="head.*"), model=model).close()


def test_without_strict_the_weights_that_fit_are_loaded_and_the_rest_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, old = saved(tmp_path)
    with caplog.at_level(logging.INFO, "callsheet"):
        found = loaded(tmp_path, LoadCheckpoint(path=path, strict=False), model=Net(width=5))
    assert {name for name in found if name in old and torch.equal(found[name], old[name])} == EVERY - {"head.weight", "head.bias"}
    (message,) = [message for message in caplog.messages if "LoadCheckpoint" in message]
    assert "loaded 11 weights" in message
    assert "head.bias has the size [4] in the checkpoint and [5] in the model" in message
    with pytest.raises(CheckpointError, match="nothing in"):
        trainer(tmp_path, LoadCheckpoint(path=path, strict=False), model=nn.Linear(3, 1))


@pytest.mark.parametrize(("is_saved_tied", "is_model_tied"), [(True, True), (True, False), (False, True)])
def test_weights_are_loaded_between_tied_and_untied_models(tmp_path: Path, is_saved_tied: bool, is_model_tied: bool) -> None:
    path, old = saved(tmp_path, model=Net(tied=is_saved_tied))
    found = loaded(tmp_path, LoadCheckpoint(path=path), model=Net(tied=is_model_tied))
    if is_model_tied and not is_saved_tied:  # the two became one weight, with the value that was read last
        assert any(torch.equal(found["inner.weight"], old[f"{name}.weight"]) for name in ("inner", "again"))
        assert torch.equal(found["inner.weight"], found["again.weight"])
    else:
        assert all(torch.equal(tensor, old[name]) for name, tensor in found.items())


def test_a_tied_weight_whose_other_name_is_left_out_is_named(tmp_path: Path) -> None:
    path, _ = saved(tmp_path, model=Net(tied=True))
    with pytest.raises(CheckpointError, match=r"again\.weight shares its weights in the checkpoint with a name that is left out"):
        trainer(tmp_path, LoadCheckpoint(path=path, weights="again.*"))


def test_weights_are_cast_to_the_model_s_dtype(tmp_path: Path) -> None:
    path, old = saved(tmp_path)
    found = loaded(tmp_path, LoadCheckpoint(path=path), model=Net().double())
    assert torch.equal(found["head.weight"], old["head.weight"].double())


def test_several_callbacks_load_parts_of_a_model(tmp_path: Path) -> None:
    path, old = saved(tmp_path)
    other, others = saved(tmp_path, seed=4, run_name="other")
    body, head = LoadCheckpoint(path=path, weights="body.*"), LoadCheckpoint(path=other, weights="head.*")
    with trainer(tmp_path, body, head) as made:
        assert torch.equal(whole(made.model)["body.0.weight"], old["body.0.weight"])
        assert torch.equal(whole(made.model)["head.weight"], others["head.weight"])


@pytest.mark.parametrize("damage", ["gone", "changed"])
def test_a_missing_or_damaged_checkpoint_is_an_error(tmp_path: Path, damage: str) -> None:
    path, _ = saved(tmp_path)
    if damage == "changed":
        shard = next(Path(path).glob("shard*"))
        shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError):
        trainer(tmp_path, LoadCheckpoint(path=path if damage == "changed" else f"{path}-gone"))


def test_a_pattern_that_matches_no_weight_is_an_error(tmp_path: Path) -> None:
    path, _ = saved(tmp_path)
    with pytest.raises(CheckpointError, match="no weight of the model matches boddy"):
        trainer(tmp_path, LoadCheckpoint(path=path, weights="boddy.*"))


@pytest.mark.parametrize("options", [{"path": ""}, {"path": "x", "weights": []}])
def test_rejects_bad_arguments(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        LoadCheckpoint(**options)


def on_a_rank(folder: str, path: str, parallel: str) -> dict[str, list[float]]:
    with trainer(Path(folder), LoadCheckpoint(path=path), seed=9, parallel=parallel, run_name=parallel) as made:
        return {name: tensor.flatten().tolist() for name, tensor in whole(made.model).items()}


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_ranks_load_the_same_weights(tmp_path: Path, parallel: str) -> None:
    path, old = saved(tmp_path)
    expected = {name: tensor.flatten().tolist() for name, tensor in old.items()}
    assert run_ranks(on_a_rank, 2, str(tmp_path), path, parallel) == [expected] * 2


def with_another_path(folder: str, path: str) -> None:
    is_model_tied = path if os.environ["RANK"] == "0" else f"{path}-gone"
    trainer(Path(folder), LoadCheckpoint(path=is_model_tied), timeout_seconds=20).close()


def test_a_failure_on_one_rank_fails_on_all(tmp_path: Path) -> None:
    path, _ = saved(tmp_path)
    with pytest.raises(RanksFailed) as caught:
        run_ranks(with_another_path, 2, str(tmp_path), path)
    assert str(caught.value).count("CheckpointError: rank 1: ") == 2
