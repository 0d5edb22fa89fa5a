from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from callsheet import Callback, Context, Trainer
from callsheet.callbacks.optimizer_monitor import OptimizerMonitor, _norms
from callsheet.errors import ConfigError
from callsheet.testing import run_ranks


class ReferenceNorms(Callback):
    """Computes the norms independently, in a simple and slow way, and records those of the monitor."""

    phase = "report"

    def __init__(self) -> None:
        self.reference: dict[int, dict[str, float]] = {}
        self.records: dict[int, dict[str, float]] = {}

    def on_clip_gradients_start(self, ctx: Context) -> None:
        norms = self.reference[ctx.step] = dict[str, float]()
        for kind in ("grad", "weight"):
            wholes = {}
            for name, parameter in ctx.model.named_parameters():
                tensor: Any = parameter.grad if kind == "grad" else parameter.detach()
                wholes[name] = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
                norms[f"l2_norm/{kind}/{name}"] = float(wholes[name].norm())
            norms[f"l2_norm/{kind}/global"] = math.sqrt(sum(float(whole.norm()) ** 2 for whole in wholes.values()))

    def on_log(self, ctx: Context) -> None:
        self.records[ctx.step] = {
            name: value
            for name, value in ctx.record.values.items()
            if name.split("/")[0] in ("l2_norm", "other", "second_moment")
        }


class Reporting(torch.optim.AdamW):
    """An optimizer with the reporting method of Composer's optimizers."""

    def report_per_parameter_metrics(self, parameter: Tensor, name: str, metrics: dict[str, Tensor]) -> dict[str, Tensor]:
        metrics[f"second_moment/{name}"] = self.state[parameter]["exp_avg_sq"].sum()
        return metrics


def fit(folder: Path | str, *callbacks: Callback, optimizer: Any = torch.optim.AdamW, **options: Any) -> ReferenceNorms:
    reference = ReferenceNorms()
    torch.manual_seed(0)
    data = [(torch.randn(4, 3), torch.randn(4, 1)) for _ in range(12)]
    with Trainer(
        nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1)),
        nn.functional.mse_loss,
        data,
        optimizer=lambda parameters: optimizer(parameters, lr=0.1),
        callbacks=[*callbacks, reference],
        runs_folder=folder,
        log_interval="2ba",
        clip_grad_norm=0.01,
        device="cpu",
        **options,
    ) as trainer:
        trainer.fit()
    return reference


def check(reference: ReferenceNorms, steps: list[int], kinds: tuple[str, ...]) -> None:
    for step in steps:
        wanted = {name: value for name, value in reference.reference[step].items() if name.split("/")[1] in kinds}
        assert reference.records[step] == pytest.approx(wanted, rel=1e-5)


def test_the_norms_are_of_the_whole_step_before_clipping(tmp_path: Path) -> None:
    reference = fit(tmp_path, OptimizerMonitor(batch_log_interval=4, weights=True), microbatch_size=1)
    check(reference, [4, 8, 12], ("grad", "weight"))
    assert reference.records[2] == reference.records[6] == {}
    assert reference.records[4]["l2_norm/grad/global"] > 0.1  # after clipping, it would be 0.01


def test_without_per_parameter_only_the_global_norm_is_logged(tmp_path: Path) -> None:
    reference = fit(tmp_path, OptimizerMonitor(batch_log_interval=2, per_parameter=False))
    assert set(reference.records[2]) == {"l2_norm/grad/global"}


def test_a_parameter_without_a_gradient_is_left_out(tmp_path: Path) -> None:
    class Frozen(Callback):
        def on_train_start(self, ctx: Context) -> None:
            ctx.model[0].weight.requires_grad_(False)

    class OnlyRecords(ReferenceNorms):
        def on_clip_gradients_start(self, ctx: Context) -> None: ...

    seen = OnlyRecords()
    fit_with = [Frozen(), OptimizerMonitor(batch_log_interval=2), seen]
    data = [(torch.randn(4, 3), torch.randn(4, 1))] * 2
    with Trainer(
        nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1)),
        nn.functional.mse_loss,
        data,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        callbacks=fit_with,
        runs_folder=tmp_path,
        log_interval="2ba",
        device="cpu",
    ) as trainer:
        trainer.fit()
    assert "l2_norm/grad/0.weight" not in seen.records[2]
    assert "l2_norm/grad/0.bias" in seen.records[2]


def test_an_infinite_gradient_is_logged(tmp_path: Path) -> None:
    class MakesGradientInfinite(Callback):
        phase = "change"

        def on_backward_end(self, ctx: Context) -> None:
            if ctx.step == 2:
                ctx.model[1].bias.grad.fill_(math.inf)

    reference = fit(tmp_path, MakesGradientInfinite(), OptimizerMonitor(batch_log_interval=2))
    assert reference.records[2]["l2_norm/grad/1.bias"] == reference.records[2]["l2_norm/grad/global"] == math.inf


def test_half_precision_does_not_overflow() -> None:
    big = torch.full((4,), 60000.0, dtype=torch.float16)
    order, norms = _norms([big])
    assert order == [0]
    assert norms.tolist() == pytest.approx([120000.0])


def test_several_types_are_logged_in_the_widest() -> None:
    tensors = [
        torch.full((4,), 60000.0, dtype=torch.float16),
        torch.ones(4, dtype=torch.float64),
        torch.ones(9),
        torch.ones(1).half(),
    ]
    order, norms = _norms(tensors)
    assert dict(zip(order, norms.tolist(), strict=True)) == pytest.approx({0: 120000.0, 1: 2.0, 2: 3.0, 3: 1.0})
    assert norms.dtype == torch.float64


def test_metrics_that_the_optimizer_reports_are_logged(tmp_path: Path) -> None:
    reference = fit(tmp_path, OptimizerMonitor(batch_log_interval=2), optimizer=Reporting)
    assert reference.records[2]["second_moment/0.weight"] > 0
    without_optimizer_metrics = fit(
        tmp_path, OptimizerMonitor(batch_log_interval=2, log_optimizer_metrics=False), optimizer=Reporting
    )
    assert "second_moment/0.weight" not in without_optimizer_metrics.records[2]


def test_two_instances_work_in_one_run(tmp_path: Path) -> None:
    other = OptimizerMonitor(batch_log_interval=4, per_parameter=False)
    other.name = "other"
    reference = fit(tmp_path, OptimizerMonitor(batch_log_interval=2), other)
    assert reference.records[4]["other/grad/global"] == reference.records[4]["l2_norm/grad/global"]
    assert "other/grad/global" not in reference.records[2]


def on_ranks(folder: str, parallel: str) -> tuple[dict[int, dict[str, float]], dict[int, dict[str, float]]]:
    monitor = OptimizerMonitor(batch_log_interval=2, weights=True)
    reference = fit(folder, monitor, parallel=parallel, optimizer=Reporting)
    return reference.reference, reference.records


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_sharded_norms_equal_those_of_the_unsharded_model(parallel: str, tmp_path: Path) -> None:
    (reference, first), (_, second) = run_ranks(on_ranks, 2, str(tmp_path), parallel)
    assert first == second
    for step, values in first.items():
        norms = {name: value for name, value in values.items() if name.startswith("l2_norm")}
        assert norms == pytest.approx(reference[step], rel=1e-5)
        assert values["second_moment/0.weight"] > 0


def test_rejects_no_interval() -> None:
    with pytest.raises(ConfigError, match="batch_log_interval=0"):
        OptimizerMonitor(batch_log_interval=0)
