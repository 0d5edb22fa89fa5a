from __future__ import annotations

import math
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from callsheet import Callback, CallbackManager, Context, RunInfo, Trainer
from callsheet.callbacks import CheckpointSaver
from callsheet.callbacks.ema import EMA
from callsheet.checkpoint import find_checkpoints, read_checkpoint
from callsheet.checkpoint.draft import Kind
from callsheet.errors import CheckpointError, ConfigError
from callsheet.testing import run_ranks

Weights = dict[str, Tensor]
STEPS = 12


class Net(nn.Module):
    """A model with running statistics, a frozen module and a tied one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Linear(6, 6))
        self.frozen = nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(6, 1)
        self.tied = self.head

    def forward(self, inputs: Tensor) -> Any:
        return self.tied(self.frozen(self.body(inputs)).relu())


def whole(model: nn.Module) -> Weights:
    """Return the floating-point tensors of a model's state; shards are gathered."""
    return {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()
        for name, tensor in model.state_dict().items()
        if tensor.is_floating_point()
    }


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


class RecordsWeights(Callback):
    """Records the weights at the given events."""

    def __init__(self, *events: str) -> None:
        self.events = events
        self.seen: list[tuple[str, int, Weights]] = []

    def on_event(self, ctx: Context) -> None:
        if str(ctx.event) in self.events:
            self.seen.append((str(ctx.event), ctx.step, whole(ctx.model)))

    def at(self, event: str, step: int) -> Weights:
        (found,) = [weights for name, number, weights in self.seen if (name, number) == (event, step)]
        return found


def trainer(folder: Path, *callbacks: Callback, dtype: torch.dtype = torch.float32, **options: Any) -> Trainer:
    torch.manual_seed(3)
    model = Net().to(dtype)
    inputs = torch.randn(4 * STEPS, 3, generator=torch.Generator().manual_seed(1)).to(dtype)
    data = [(part, part.sum(1, keepdim=True)) for part in inputs.split(4)]
    arguments: dict[str, Any] = {"max_duration": "1ep", "eval_interval": "4ba", "run_name": "run", "seed": 1}
    return Trainer(
        model,
        nn.functional.mse_loss,
        data,
        data[:2],
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.05),
        callbacks=CallbackManager(callbacks, checking=True),
        runs_folder=folder,
        device="cpu",
        **(arguments | options),
    )


def fit(folder: Path, *callbacks: Callback, **options: Any) -> Weights:
    with trainer(folder, *callbacks, **options) as trained:
        trained.fit()
        return whole(trained.model)


def expected(trained: list[Weights], first: Weights, decay: float, interval: int = 1) -> Weights:
    mean = {name: tensor.float() for name, tensor in first.items()}
    for step, weights in enumerate(trained, 1):
        if step % interval == 0:
            mean = {name: mean[name] + (1 - decay) * (weights[name].float() - mean[name]) for name in mean}
    return mean


@pytest.mark.parametrize(
    ("options", "decay", "interval"),
    [
        ({"decay": 0.7}, 0.7, 1),
        ({"half_life": 4}, 0.5**0.25, 1),
        ({"half_life": "4ba", "update_interval": 2}, 0.5**0.5, 2),
        ({"decay": 0.6, "update_interval": 3}, 0.6, 3),
    ],
)
def test_the_average_is_evaluated_and_training_continues_with_the_weights(
    tmp_path: Path, options: dict[str, Any], decay: float, interval: int
) -> None:
    plain, sees = (
        RecordsWeights("on_train_start", "on_train_step_end"),
        RecordsWeights("on_train_step_end", "on_eval_all_start", "on_eval_all_end"),
    )
    undisturbed = fit(tmp_path / "plain", plain)
    left = fit(tmp_path / "averaged", sees, EMA(**options, at_end=False))
    assert same(left, undisturbed)
    first, *trained = [weights for _, _, weights in plain.seen]
    for step, weights in enumerate(trained, 1):
        assert same(sees.at("on_train_step_end", step), weights)
        if step % 4 == 0:
            mean = expected(trained[:step], first, decay, interval)
            for event in ("on_eval_all_start", "on_eval_all_end"):
                for name, tensor in sees.at(event, step).items():
                    torch.testing.assert_close(tensor, mean[name], msg=name)
            assert not torch.equal(mean["body.0.weight"], weights["body.0.weight"])
            assert not torch.equal(mean["body.1.running_mean"], weights["body.1.running_mean"])


def test_the_evaluation_s_result_is_that_of_the_average(tmp_path: Path) -> None:
    sees = RecordsWeights("on_eval_all_end")
    with trainer(tmp_path, sees, EMA(decay=0.9)) as trained:
        trained.fit()
        recorded = trained.eval_results["validation"]["loss"]
        model = Net()
        model.load_state_dict(sees.at("on_eval_all_end", STEPS), strict=False)
        model.eval()
        inputs = torch.randn(4 * STEPS, 3, generator=torch.Generator().manual_seed(1))[:8]
        assert recorded == pytest.approx(nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True)).item(), rel=1e-5)


def test_frozen_parameters_cost_no_memory_and_tied_ones_are_kept_once() -> None:
    ema, ctx = EMA(), Context(run=RunInfo("run"), model=Net())
    ema.on_train_start(ctx)
    assert set(ema._average) == {
        *(f"body.{i}.{kind}" for i in (0, 1, 2) for kind in ("weight", "bias")),
        "body.1.running_mean",
        "body.1.running_var",
        "head.weight",
        "head.bias",
    }
    before = {name: tensor.data_ptr() for name, tensor in ema._average.items()}
    ema.on_eval_all_start(ctx)
    assert {name: tensor.data_ptr() for name, tensor in ema._trained.items()} == before  # a third copy is not allocated


def test_parameters_that_are_unfrozen_later_are_averaged(tmp_path: Path) -> None:
    ema = EMA(decay=0.5)
    with trainer(tmp_path, ema, max_duration="2ep") as trained:
        unfreeze = lambda ctx: ctx.model.frozen.requires_grad_(ctx.epoch == 2)  # noqa: E731
        trained.callbacks.register("on_epoch_start", unfreeze, phase="change")
        trained.fit("1ep")
        assert "frozen.weight" not in ema._trained
        trained.fit("2ep")
        assert "frozen.weight" in ema._trained


def test_there_is_no_average_before_the_start(tmp_path: Path) -> None:
    sees = RecordsWeights("on_train_step_end", "on_eval_all_end")
    fit(tmp_path, sees, EMA(decay=0.5, start="6ba"))
    trained = [weights for event, _, weights in sees.seen if event == "on_train_step_end"]
    assert same(sees.at("on_eval_all_end", 4), trained[3])
    mean = expected(trained[6:8], trained[5], 0.5)
    for name, tensor in sees.at("on_eval_all_end", 8).items():
        torch.testing.assert_close(tensor, mean[name])


@pytest.mark.parametrize("at_end", [True, False])
def test_at_end_keeps_the_average_in_the_model(tmp_path: Path, at_end: bool) -> None:
    sees = RecordsWeights("on_eval_all_end", "on_train_end", "on_test_end", "on_predict_end")
    with trainer(tmp_path, sees, EMA(decay=0.9, at_end=at_end)) as trained:
        trained.fit()
        mean, weights = sees.at("on_eval_all_end", STEPS), sees.at("on_train_end", STEPS)
        assert not same(mean, weights)
        trained.export(tmp_path / "model.safetensors")
        exported = load_file(tmp_path / "model.safetensors")
        assert torch.equal(exported["body.0.weight"], (mean if at_end else weights)["body.0.weight"])
        data = [(torch.ones(2, 3), torch.ones(2, 1))]
        trained.test(data)
        trained.predict(data)
        assert same(sees.at("on_test_end", STEPS), mean)
        assert same(sees.at("on_predict_end", STEPS), mean)
        assert same(whole(trained.model), mean if at_end else weights)


def test_a_further_fit_continues_with_the_trained_weights(tmp_path: Path) -> None:
    once = fit(tmp_path / "once", EMA(decay=0.9), max_duration="3ep")
    with trainer(tmp_path / "thrice", EMA(decay=0.9)) as trained:
        for duration in ("1ep", "2ep", "3ep"):
            trained.fit(duration)
            trained.evaluate()
            trained.save_checkpoint()
    assert same(whole(trained.model), once)


@pytest.mark.test_all
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("in_background", [False, True])
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path, dtype: torch.dtype, in_background: bool) -> None:
    sees, saver = RecordsWeights("on_eval_all_end", "on_train_end"), CheckpointSaver(save_interval="1ba", keep=None)
    options: dict[str, Any] = {"dtype": dtype, "save_in_background": in_background}
    last = fit(tmp_path, sees, EMA(decay=0.9), saver, **options)
    found = find_checkpoints(tmp_path / "run" / "checkpoints").checkpoints
    assert len(found) == STEPS
    for checkpoint in found:
        again = RecordsWeights("on_eval_all_end", "on_train_end")
        resumed = fit(tmp_path, again, EMA(decay=0.9), run_name=f"from{checkpoint.step}", resume=checkpoint.path, **options)
        assert same(resumed, last)
        assert same(again.at("on_train_end", STEPS), sees.at("on_train_end", STEPS))
        if checkpoint.step < STEPS:
            assert same(again.at("on_eval_all_end", STEPS), sees.at("on_eval_all_end", STEPS))


def test_a_checkpoint_s_model_is_the_one_that_was_evaluated(tmp_path: Path) -> None:
    sees = RecordsWeights("on_eval_all_end", "on_train_step_end")
    fit(tmp_path, sees, EMA(decay=0.9), CheckpointSaver(save_interval="4ba", keep=None))
    checkpoints = find_checkpoints(tmp_path / "run" / "checkpoints").checkpoints
    assert checkpoints
    for found in checkpoints:
        model = read_checkpoint(found.path).shared["model"]
        mean = sees.at("on_eval_all_end", found.step)
        assert same({name: model[name] for name in mean}, mean)
        own = read_checkpoint(found.path).local["callbacks"]["callbacks"]["EMA"]
        assert torch.equal(own["trained"]["head.weight"], sees.at("on_train_step_end", found.step)["head.weight"])


def test_a_checkpoint_without_an_average_starts_a_new_average(tmp_path: Path) -> None:
    not_averaged = fit(tmp_path, CheckpointSaver(), run_name="plain", max_duration="2ep")
    fit(tmp_path, CheckpointSaver())
    with trainer(tmp_path, EMA(decay=0.9), resume="auto", max_duration="2ep") as resumed:
        resumed.fit("2ep")
        assert not same(whole(resumed.model), not_averaged)


class MakesWeightsNaN(Callback):
    """Makes the weights NaN at a step at which the average is not updated."""

    phase = "change"

    def on_train_step_end(self, ctx: Context) -> None:
        if ctx.step == 5:
            with torch.no_grad():
                ctx.model.head.weight.fill_(math.nan)


@pytest.mark.parametrize("is_average_kept", [False, True])
def test_a_finite_average_does_not_hide_weights_with_nan(tmp_path: Path, is_average_kept: bool) -> None:
    with trainer(tmp_path, EMA(decay=0.9, update_interval=4), MakesWeightsNaN()) as trained:
        if is_average_kept:
            trained.fit("5ba")
            trained.save_checkpoint()
            assert torch.isfinite(trained.model.state_dict()["head.weight"]).all()
        else:
            trained.callbacks.register("on_train_step_end", lambda ctx: ctx.control.save("now") if ctx.step == 5 else None)
            trained.fit("6ba")
    (found,) = find_checkpoints(tmp_path / "run" / "checkpoints").checkpoints
    assert not found.seal.info["is_finite"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_average", [False, True])
def test_the_buffers_of_the_first_save_are_allocated_in_advance(
    tmp_path: Path, has_average: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This includes weights, optimizer state and the average. The save itself allocates only buffers for random states."""
    late: list[Kind] = []

    def buffer(kind: Kind) -> Tensor:
        if threading.current_thread() is threading.main_thread():
            late.append(kind)
        return allocate(kind)

    allocate = Kind.buffer
    monkeypatch.setattr(Kind, "buffer", buffer)
    average = [EMA(decay=0.9)] if has_average else []
    fit(tmp_path, *average, CheckpointSaver(save_interval="6ba"), dtype=dtype, save_in_background=True)
    assert find_checkpoints(tmp_path / "run" / "checkpoints").checkpoints
    assert [kind for kind in late if kind.dtype.is_floating_point] == []
    assert late  # buffers for the random states


@pytest.mark.parametrize("event", ["on_eval_step_end", "on_checkpoint_save_start"])
def test_after_an_exception_the_model_has_its_trained_weights(tmp_path: Path, event: str) -> None:
    class Breaks(Callback):
        def on_event(self, ctx: Context) -> None:
            if ctx.event == event and ctx.step == 4:
                raise ZeroDivisionError

    sees = RecordsWeights("on_train_step_end")
    broken = trainer(tmp_path, sees, EMA(decay=0.9), Breaks(), CheckpointSaver(save_interval="4ba"))
    with pytest.raises(ZeroDivisionError):
        broken.fit()
    assert same(whole(broken.model), sees.at("on_train_step_end", 4))


def test_after_an_error_following_training_the_model_has_the_average(tmp_path: Path) -> None:
    sees = RecordsWeights("on_eval_all_end")
    trained = trainer(tmp_path, sees, EMA(decay=0.9))
    trained.fit()
    with pytest.raises(ZeroDivisionError), trained:
        raise ZeroDivisionError
    assert same(whole(trained.model), sees.at("on_eval_all_end", STEPS))


def test_skipped_steps_do_not_count() -> None:
    ema, ctx = EMA(decay=0.5), Context(run=RunInfo("run"), model=nn.Linear(1, 1, bias=False))
    nn.init.constant_(ctx.model.weight, 1.0)
    ema.on_train_start(ctx)
    nn.init.constant_(ctx.model.weight, 2.0)
    for ctx.step, ctx.step_skipped, mean in ((1, True, 1.0), (2, False, 1.5)):
        ema.on_train_step_end(ctx)
        assert ema._average["weight"].item() == mean


def test_a_new_run_starts_from_scratch(tmp_path: Path) -> None:
    ema = EMA(decay=0.9)
    first = fit(tmp_path / "one", ema)
    assert same(fit(tmp_path / "two", ema), first)


def test_a_second_average_is_rejected(tmp_path: Path) -> None:
    second = EMA(decay=0.5)
    second.name = "second"
    with pytest.raises(ConfigError, match="EMA and second would put their averages in the same model"):
        trainer(tmp_path, EMA(decay=0.9), second)


@pytest.mark.parametrize(
    "options",
    [
        {"half_life": 10, "decay": 0.9},
        {"decay": 1.0},
        {"decay": 0.0},
        {"half_life": 0},
        {"half_life": "1ep"},
        {"update_interval": 0},
        {"start": "0ba"},
    ],
)
def test_rejects_bad_arguments(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        EMA(**options)


def on_a_rank(folder: str, parallel: str, averaged: bool, resume: str | None = None) -> dict[str, Any]:
    sees = RecordsWeights("on_eval_all_end", "on_train_end")
    saver = CheckpointSaver(save_interval="1ba", keep=None)
    callbacks: list[Callback] = [sees, saver, *([EMA(decay=0.9)] if averaged else [])]
    name = "plain" if not averaged else "run" if resume is None else f"{parallel}-{os.path.basename(resume)}"
    last = fit(Path(folder), *callbacks, run_name=name, parallel=parallel, resume=resume, eval_interval="2ba")
    lists = {event: {name: tensor.tolist() for name, tensor in weights.items()} for event, _, weights in sees.seen}
    return {"last": {name: tensor.tolist() for name, tensor in last.items()}, **lists}


def parameters(weights: Weights) -> Weights:
    """Return the weights without running statistics, which differ by rank between two forwards."""
    return {name: tensor for name, tensor in weights.items() if "running" not in name}


@pytest.mark.test_all
@pytest.mark.parametrize("parallel", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp"])
def test_two_ranks_average_equally_and_resume_exactly(tmp_path: Path, parallel: str) -> None:
    plain = run_ranks(on_a_rank, 2, str(tmp_path), parallel, False)
    runs = run_ranks(on_a_rank, 2, str(tmp_path), parallel, True)
    assert runs[0]["on_train_end"] == plain[0]["on_train_end"]
    assert parameters(runs[1]["on_train_end"]) == parameters(plain[1]["on_train_end"])
    assert runs[0]["last"] == runs[1]["last"] == runs[0]["on_eval_all_end"] == runs[1]["on_eval_all_end"]
    assert runs[0]["last"] != plain[0]["last"]
    for step in (1, 3, 4, 6):
        path = str(tmp_path / "run" / "checkpoints" / f"ep0-ba{step}")
        again = run_ranks(on_a_rank, 2, str(tmp_path), parallel, True, path)
        assert again[0]["last"] == again[1]["last"] == runs[0]["last"]
        if step < 6:
            assert again[0]["on_train_end"] == runs[0]["on_train_end"]
            assert parameters(again[1]["on_train_end"]) == parameters(runs[1]["on_train_end"])


def test_replicated_weights_resume_with_another_number_of_ranks(tmp_path: Path) -> None:
    run_ranks(on_a_rank, 2, str(tmp_path), "ddp", True)
    path = tmp_path / "run" / "checkpoints" / "ep0-ba4"
    assert ".trained." in (path / "local-00000.json").read_text()
    assert ".trained." not in (path / "local-00001.json").read_text()  # state that is equal on both ranks is saved once
    with trainer(tmp_path, EMA(decay=0.9), resume=path, run_name="alone") as alone:
        kept = read_checkpoint(path).local["callbacks"]["callbacks"]["EMA"]["trained"]
        assert len(kept) == 10
        assert torch.equal(whole(alone.model)["head.weight"], kept["head.weight"])


def test_shards_of_another_number_of_ranks_are_rejected(tmp_path: Path) -> None:
    run_ranks(on_a_rank, 2, str(tmp_path), "fsdp", True)
    with pytest.raises(CheckpointError, match=r"in shards on a mesh of \(2,\), but the model is now whole"):
        trainer(tmp_path, EMA(decay=0.9), resume=tmp_path / "run" / "checkpoints" / "ep0-ba4", run_name="alone")
