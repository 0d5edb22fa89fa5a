from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from callsheet import Callback, Context, Trainer
from callsheet.callbacks.activation_monitor import ActivationMonitor
from callsheet.errors import ConfigError
from callsheet.testing import run_ranks


class ReturnsNestedOutputs(nn.Module):
    def forward(self, inputs: Tensor) -> dict[str, Any]:
        return {"scaled": inputs * 2, "more": [inputs * 0, torch.ones(3, dtype=torch.long)], "none": None}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.act = nn.ReLU()
        self.two = ReturnsNestedOutputs()
        self.head = nn.Linear(4, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.two(self.act(self.layer(inputs)))["scaled"])  # type: ignore[no-any-return]


class RecordsMetricsAndHooks(Callback):
    """Records the metrics, the number of hooks after every step, and the outputs of a separate forward at step 4."""

    phase = "report"

    def __init__(self) -> None:
        self.records: list[dict[str, float]] = []
        self.hooks: list[int] = []
        self.layer: list[Tensor] = []

    def on_microbatch_start(self, ctx: Context) -> None:
        if ctx.step == 4:
            weight, bias = ctx.model.layer.weight.detach(), ctx.model.layer.bias.detach()
            if isinstance(weight, DTensor):
                weight, bias = weight.full_tensor(), bias.full_tensor()
            self.layer.append(nn.functional.linear(ctx.microbatch[0], weight, bias))

    def on_train_step_end(self, ctx: Context) -> None:
        self.hooks.append(hooks_on(ctx.model))

    def on_log(self, ctx: Context) -> None:
        self.records.append({name: value for name, value in ctx.record.values.items() if name.startswith(("activ", "few"))})


def hooks_on(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) for module in model.modules())


def fit(folder: Path | str, *callbacks: Callback, model: nn.Module | None = None, **options: Any) -> RecordsMetricsAndHooks:
    recorder = RecordsMetricsAndHooks()
    torch.manual_seed(0)
    data = [(torch.randn(4, 3), torch.randn(4, 1)) for _ in range(8)]
    with Trainer(
        model or Model(),
        nn.functional.mse_loss,
        data,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        callbacks=[*callbacks, recorder],
        runs_folder=folder,
        log_interval="2ba",
        device="cpu",
        **options,
    ) as trainer:
        trainer.fit()
    return recorder


def test_statistics_are_computed_from_the_outputs_of_the_modules(tmp_path: Path) -> None:
    recorder = fit(tmp_path, ActivationMonitor(batch_log_interval=4), microbatch_size=2)
    assert [bool(record) for record in recorder.records] == [False, True, False, True]
    recorded = recorder.records[1]
    halves = recorder.layer
    assert len(halves) == 2
    wanted = {
        "mean": sum(float(half.mean()) for half in halves) / 2,
        "std": sum(float(half.std(correction=0)) for half in halves) / 2,
        "l2_norm": sum(float(half.norm(dim=-1).mean()) for half in halves) / 2,
        "max": max(float(half.abs().max()) for half in halves),
        "zeros": 0.0,
    }
    assert {kind: recorded[f"activations/{kind}/layer"] for kind in wanted} == pytest.approx(wanted, rel=1e-4)
    assert recorded["activations/zeros/act"] == sum(float((half <= 0).float().mean()) for half in halves) / 2
    assert recorded["activations/mean/two.0"] == pytest.approx(2 * recorded["activations/mean/act"])
    assert recorded["activations/zeros/two.1"] == 1.0  # the tensor of integers is left out
    assert "activations/mean/(model)" in recorded
    assert recorder.hooks == [0] * 8


def test_a_normal_distribution_has_kurtosis_3(tmp_path: Path) -> None:
    class Noise(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            return torch.randn(1000, 1000, generator=torch.Generator().manual_seed(1))

    class WithNoise(Model):
        def __init__(self) -> None:
            super().__init__()
            self.noise = Noise()

        def forward(self, inputs: Tensor) -> Tensor:
            self.noise(inputs)
            return super().forward(inputs)

    recorded = fit(tmp_path, ActivationMonitor(batch_log_interval=2), model=WithNoise()).records[0]
    assert recorded["activations/kurtosis/noise"] == pytest.approx(3, abs=0.05)
    assert recorded["activations/std/noise"] == pytest.approx(1, abs=0.01)


def test_two_monitors_log_only_their_selected_modules(tmp_path: Path) -> None:
    monitor = ActivationMonitor(batch_log_interval=2, modules=["l*"])
    monitor.name = "few"
    recorder = fit(
        tmp_path, monitor, ActivationMonitor(batch_log_interval=4, ignore_types=["ReLU", "Model", "ReturnsNestedOutputs"])
    )
    assert {name.rsplit("/", 1)[1] for name in recorder.records[0]} == {"layer"}
    assert {name.rsplit("/", 1)[1] for name in recorder.records[1] if name.startswith("activ")} == {"layer", "head"}


def test_no_hook_is_left_after_an_exception(tmp_path: Path) -> None:
    class Broken(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            raise RuntimeError("broken")

    model = Model()
    model.act = Broken()  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="broken"):
        fit(tmp_path, ActivationMonitor(batch_log_interval=1), model=model)
    assert hooks_on(model) == 0


def test_an_infinite_activation_is_logged(tmp_path: Path) -> None:
    class MakesBiasInfinite(Callback):
        phase = "change"

        def on_forward_backward_start(self, ctx: Context) -> None:
            if ctx.step == 2:
                with torch.no_grad():
                    ctx.model.layer.bias.fill_(float("inf"))

    recorded = fit(tmp_path, MakesBiasInfinite(), ActivationMonitor(batch_log_interval=2)).records[0]
    assert recorded["activations/max/layer"] == float("inf")


def test_recomputed_activations_are_counted_once(tmp_path: Path) -> None:
    class Recomputing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 1)
            self.calls = 0

        def forward(self, inputs: Tensor) -> Tensor:
            return torch.utils.checkpoint.checkpoint(self.layer, inputs, use_reentrant=False)  # type: ignore[no-any-return]

    calls: list[str] = []

    class Counting(ActivationMonitor):
        def _add(self, name: str, tensor: Tensor) -> None:
            calls.append(name)
            super()._add(name, tensor)

    fit(tmp_path, Counting(batch_log_interval=8), model=Recomputing())
    assert calls == ["layer", "(model)"]


def test_a_compiled_model_is_warned_about_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "callsheet"):
        recorder = fit(tmp_path, ActivationMonitor(batch_log_interval=2), compile={"backend": "eager"})
    assert caplog.text.count("no module inside the model ran its hooks") == 1
    assert {name.rsplit("/", 1)[1] for name in recorder.records[0]} == {"(model)"}


def on_ranks(folder: str, parallel: str) -> tuple[list[dict[str, float]], list[Any]]:
    recorder = fit(folder, ActivationMonitor(batch_log_interval=4), parallel=parallel)
    return recorder.records, [half.tolist() for half in recorder.layer]


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_all_ranks_report_the_same(parallel: str, tmp_path: Path) -> None:
    (first, layer), (second, layer_of_second) = run_ranks(on_ranks, 2, str(tmp_path), parallel)
    assert first == second
    assert layer != layer_of_second
    both = torch.tensor([*layer, *layer_of_second])
    assert first[1]["activations/max/layer"] == pytest.approx(float(both.abs().max()))
    assert first[1]["activations/mean/layer"] == pytest.approx(float(both.mean()), rel=1e-4)


def test_rejects_bad_arguments(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="batch_log_interval=0"):
        ActivationMonitor(batch_log_interval=0)
    with pytest.raises(ConfigError, match="put one name into a list"):
        ActivationMonitor(modules="layer")
    with pytest.raises(ConfigError, match=r"'lay\.\*'; this model has layer, act"):
        fit(tmp_path, ActivationMonitor(modules=["lay.*"]))


class CallsLayersUnevenly(nn.Module):
    """Calls one layer twice, and another one only for some samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.seldom = nn.Identity()
        self.head = nn.Linear(3, 1)
        self.layers: list[list[Tensor]] = []
        self.passed: list[list[Tensor]] = []

    def forward(self, inputs: Tensor) -> Tensor:
        first = self.layer(inputs)
        second = self.layer(first)
        goes = float(inputs[0, 0]) > 0
        self.layers.append([first.detach(), second.detach()])
        self.passed.append([second.detach()] if goes else [])
        return self.head(self.seldom(second) if goes else second)  # type: ignore[no-any-return]


@pytest.mark.parametrize("step", [2, 4, 6, 8])
def test_a_module_may_be_called_twice_or_not_at_all(step: int, tmp_path: Path) -> None:
    model = CallsLayersUnevenly()
    recorded = fit(tmp_path, ActivationMonitor(batch_log_interval=2), model=model, microbatch_size=1).records[step // 2 - 1]
    forwards = slice(4 * (step - 1), 4 * step)  # the four microbatches of the step
    for name, forwards_seen in (("layer", model.layers), ("seldom", model.passed)):
        seen = [each for several in forwards_seen[forwards] for each in several]
        assert (f"activations/mean/{name}" in recorded) == bool(seen)
        if seen:
            means, stds = [float(each.mean()) for each in seen], [float(each.std(correction=0)) for each in seen]
            assert recorded[f"activations/mean/{name}"] == pytest.approx(sum(means) / len(seen), rel=1e-4)
            assert recorded[f"activations/std/{name}"] == pytest.approx(sum(stds) / len(seen), rel=1e-4)
            assert recorded[f"activations/max/{name}"] == pytest.approx(max(float(each.abs().max()) for each in seen))


class ReturnsManyTensors(nn.Module):
    """Passes fixed tensors of two types and many shapes through identity modules; a ReLU then modifies the last one in place."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        shapes = [(), (5,), (4, 3), (4, 3), (2**21,), (2**10, 2**10), (2, 3, 4, 5), (4, 3)]
        self.made = [
            torch.randn(shape, generator=generator).to(kind) for kind in (torch.float32, torch.bfloat16) for shape in shapes
        ]
        self.made.append(torch.randn(6, 4, generator=generator).T)
        self.made.append(torch.randn(4, 3, generator=generator))
        self.parts = nn.ModuleList(nn.Identity() for _ in self.made)
        self.relu = nn.ReLU(inplace=True)
        self.layer = nn.Linear(3, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        given = [part(each.clone() if each.is_contiguous() else each) for part, each in zip(self.parts, self.made, strict=True)]
        self.relu(given[-1])
        return self.layer(inputs)  # type: ignore[no-any-return]


def test_outputs_of_any_shape_and_type_are_measured_before_they_are_modified_in_place(tmp_path: Path) -> None:
    model = ReturnsManyTensors()
    recorded = fit(tmp_path, ActivationMonitor(batch_log_interval=8), model=model).records[3]
    of = {f"parts.{i}": each for i, each in enumerate(model.made)} | {"relu": model.made[-1].relu()}
    for name, tensor in of.items():
        exact = tensor.double()
        moments = [float((exact - exact.mean()).pow(power).mean()) for power in (2, 4)]
        wanted = {
            "mean": float(exact.mean()),
            "std": moments[0] ** 0.5,
            "l2_norm": float(exact.norm(dim=-1).mean() if exact.dim() else exact.abs()),
            "kurtosis": moments[1] / moments[0] ** 2 if moments[0] else 0.0,
            "zeros": float((exact == 0).double().mean()),
            "max": float(exact.abs().max()),
        }
        assert {kind: recorded[f"activations/{kind}/{name}"] for kind in wanted} == pytest.approx(wanted, rel=1e-4, abs=1e-7), (
            name
        )


def test_another_run_starts_from_scratch(tmp_path: Path) -> None:
    monitor = ActivationMonitor(batch_log_interval=8)
    large = Model()
    with torch.no_grad():
        large.layer.bias.fill_(1000.0)
    assert not fit(tmp_path, monitor, model=large).records[3]["activations/max/layer"] < 100  # it may also be NaN
    assert fit(tmp_path, monitor).records[3]["activations/max/layer"] < 100
