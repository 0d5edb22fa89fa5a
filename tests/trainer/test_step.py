"""One step: what is computed, what a callback may change, what is logged, and how a trainer is closed."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from callsheet import Callback, Context, MetricsRecord, Outcome, Time, Trainer
from callsheet.errors import FieldNotAvailable, RegistrationError, RequestRejected, RunEndedError
from callsheet.testing import Recorder
from callsheet.trainer import HuggingFaceTask, SupervisedTask, Task


def linear(weight: float = 0.5) -> nn.Linear:
    """Return a layer with one weight and no bias, so that results can be computed by hand."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, weight)
    return model


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32).reshape(-1, 1)


def trainer_of(
    model: nn.Module, data: Any, *callbacks: Callback, task: Any = mse_loss, lr: float = 0.1, **changes: Any
) -> Trainer:
    arguments: dict[str, Any] = {
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=lr),
        "log_interval": "1ba",
        "eval_interval": None,
    }
    return Trainer(model, task, data, callbacks=callbacks, run_name="step", **(arguments | changes))


class Steps(Callback):
    """Records the gradients, losses, gradient norm and learning rate of every step."""

    def __init__(self) -> None:
        self.gradients: list[Tensor] = []
        self.losses: list[float] = []
        self.loss_dicts: list[dict[str, float]] = []
        self.norms: list[float | None] = []
        self.rates: list[Any] = []

    def on_forward_backward_end(self, ctx: Context) -> None:
        self.gradients.append(torch.cat([p.grad.flatten() for p in ctx.model.parameters() if p.grad is not None]))

    def on_train_step_end(self, ctx: Context) -> None:
        self.losses.append(float(ctx.loss))
        self.loss_dicts.append({name: float(loss) for name, loss in ctx.loss_dict.items()})
        self.norms.append(None if ctx.grad_norm is None else float(ctx.grad_norm))
        self.rates.append(ctx.learning_rate)


class Logged(Callback):
    def __init__(self) -> None:
        self.records: list[MetricsRecord] = []

    def on_log(self, ctx: Context) -> None:
        self.records.append(ctx.record)


# --- microbatches ---


def deep() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 7), min_size=1, max_size=3),
    microbatch_size=st.integers(1, 8),
    clip=st.sampled_from([None, 0.1]),
)
def test_microbatches_give_the_gradients_and_losses_of_the_whole_batch(
    sizes: list[int], microbatch_size: int, clip: float | None
) -> None:
    generator = torch.Generator().manual_seed(sum(sizes))
    data = [(torch.randn(n, 3, generator=generator), torch.randn(n, 2, generator=generator)) for n in sizes]
    runs = []
    for size in (None, microbatch_size):
        steps = Steps()
        with trainer_of(deep(), data, steps, microbatch_size=size, clip_grad_norm=clip) as trainer:
            trainer.fit("2ep")
        runs.append((steps, trainer.model.state_dict()))
    (whole, whole_weights), (parts, weights) = runs
    torch.testing.assert_close(parts.gradients, whole.gradients)
    assert parts.losses == pytest.approx(whole.losses, rel=1e-5)
    for name, tensor in whole_weights.items():
        torch.testing.assert_close(weights[name], tensor)


def test_an_uneven_split_weighs_by_samples() -> None:
    """The expected values are computed by hand: w = 0.5, three samples of target 0, microbatches of two and one."""
    steps, recorder = Steps(), Recorder(fields=("microbatch", "loss"))
    with trainer_of(linear(), [(column(1, 2, 6), column(0, 0, 0))], steps, recorder, microbatch_size=2) as trainer:
        trainer.fit("1ba")
    sizes = [len(part[0]) for event, part in recorder.values["microbatch"] if event == "on_microbatch_start"]
    losses = {
        event: [float(v.detach()) for e, v in recorder.values["loss"] if e == event] for event, _ in recorder.values["loss"]
    }
    assert sizes == [2, 1]
    assert losses["on_loss_end"] == losses["on_microbatch_end"] == [pytest.approx((0.25 + 1) / 2), pytest.approx(9.0)]
    assert losses["on_forward_backward_end"] == losses["on_train_step_end"] == [pytest.approx((0.25 + 1 + 9) / 3)]
    assert steps.gradients[0].item() == pytest.approx(2 * 0.5 * (1 + 4 + 36) / 3)
    assert trainer.model.state_dict()["weight"].item() == pytest.approx(0.5 - 0.1 * 41 / 3)


def test_gradients_exist_at_the_step_s_end_but_not_at_the_next_start() -> None:
    seen: list[tuple[str, bool]] = []

    class Looks(Callback):
        def on_train_step_start(self, ctx: Context) -> None:
            seen.append(("start", ctx.model.weight.grad is not None))

        def on_train_step_end(self, ctx: Context) -> None:
            seen.append(("end", ctx.model.weight.grad is not None))

    with trainer_of(linear(), [(column(1), column(0))], Looks()) as trainer:
        trainer.fit("2ep")
    assert seen == [("start", False), ("end", True)] * 2
    assert next(trainer.model.parameters()).grad is None


@dataclass
class Output:
    """The output of a Hugging Face model."""

    loss: Tensor | None
    logits: Tensor


class Embeds(nn.Module):
    """A language model of one layer with the interface of a Hugging Face model: it shifts the labels and ignores -100."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.config = {"vocab_size": 7}
        self.embedding = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7)

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Output:
        logits = self.head(self.embedding(input_ids))
        loss = None
        if labels is not None:
            loss = cross_entropy(logits[:, :-1].reshape(-1, 7), labels[:, 1:].reshape(-1))
        return Output(loss, logits)


def tokens(*lengths: int, width: int = 6) -> dict[str, Tensor]:
    """Return a batch with one sequence for each length, padded with labels that are ignored."""
    ids = torch.randint(0, 7, (len(lengths), width), generator=torch.Generator().manual_seed(len(lengths)))
    labels = ids.clone()
    for row, length in enumerate(lengths):
        labels[row, length:] = -100
    return {"input_ids": ids, "labels": labels}


@pytest.mark.parametrize("microbatch_size", [1, 2, 3])
def test_microbatches_of_a_language_model_weigh_by_labelled_tokens(microbatch_size: int) -> None:
    runs = []
    for size in (None, microbatch_size):
        steps = Steps()
        with trainer_of(Embeds(), [tokens(6, 2, 3, 5)], steps, task=None, microbatch_size=size, lr=0.5) as trainer:
            trainer.fit("3ep")
        runs.append(steps)
    torch.testing.assert_close(runs[1].gradients, runs[0].gradients)
    assert runs[1].losses == pytest.approx(runs[0].losses, rel=1e-5)


def test_an_evaluation_batch_without_labels_does_not_spoil_the_mean() -> None:
    with trainer_of(Embeds(), [tokens(6)], task=None) as trainer:
        expected = trainer.evaluate([tokens(6, 4)])
        found = trainer.evaluate([tokens(6, 4), tokens(0)])
    assert found["validation"]["loss"] == pytest.approx(expected["validation"]["loss"])


def test_an_evaluation_s_mean_is_over_labelled_tokens_not_batches() -> None:
    whole = tokens(6, 2, 3)
    parts = [{name: tensor[:1] for name, tensor in whole.items()}, {name: tensor[1:] for name, tensor in whole.items()}]
    with trainer_of(Embeds(), [whole], task=None) as trainer:
        expected = trainer.evaluate([whole])["validation"]["loss"]
        assert trainer.evaluate(parts)["validation"]["loss"] == pytest.approx(expected, rel=1e-6)
        mean_of_means = sum(trainer.evaluate([part])["validation"]["loss"] for part in parts) / 2
    assert mean_of_means != pytest.approx(expected, rel=1e-3)


def test_tokens_and_samples_are_counted() -> None:
    logged = Logged()
    with trainer_of(Embeds(), [tokens(6, 2, 3), tokens(6)], logged, task=HuggingFaceTask(), microbatch_size=2) as trainer:
        trainer.fit("1ep")
    first, second = logged.records
    assert (first.values["time/sample"], first.values["time/token"]) == (3, 18)
    assert (second.values["time/sample"], second.values["time/token"]) == (4, 24)
    assert second.tokens_per_second == second.values["train/tokens_per_second"] > 0


# --- clipping, schedule, losses by name ---


@pytest.mark.parametrize(("clip", "change"), [(None, 0.1 * 4), (100.0, 0.1 * 4), (1.0, 0.1 * 1)])
def test_clipping_bounds_the_step_and_reports_the_norm_before_it(clip: float | None, change: float) -> None:
    """Computed by hand, the gradient of (w x - 0)^2 at w = 0.5, x = 2 is 4."""
    steps, logged = Steps(), Logged()
    with trainer_of(linear(), [(column(2), column(0))], steps, logged, clip_grad_norm=clip) as trainer:
        trainer.fit("1ba")
    assert trainer.model.state_dict()["weight"].item() == pytest.approx(0.5 - change, rel=1e-5)
    assert steps.norms == [None if clip is None else pytest.approx(4)]
    assert logged.records[0].values.get("train/grad_norm") == (None if clip is None else pytest.approx(4))


def test_the_norm_is_over_all_of_a_step_s_microbatches() -> None:
    steps = Steps()
    with trainer_of(linear(), [(column(2, 2), column(0, 0))], steps, clip_grad_norm=1, microbatch_size=1) as trainer:
        trainer.fit("1ba")
    assert steps.norms == [pytest.approx(4)]


def test_parameters_that_a_callback_adds_to_the_optimizer_are_clipped() -> None:
    class Unfreezes(Callback):
        phase = "change"

        def on_train_step_start(self, ctx: Context) -> None:
            if ctx.step == 1:
                ctx.optimizer.add_param_group({"params": [ctx.model.bias], "lr": 1.0})

    model = nn.Linear(1, 1)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    steps = Steps()
    only_weight = torch.optim.SGD([model.weight], lr=1.0)
    with trainer_of(model, [(column(3), column(1))], Unfreezes(), steps, optimizer=only_weight, clip_grad_norm=1e-3) as trainer:
        trainer.fit("1ba")
    assert steps.norms == [pytest.approx(2 * 10**0.5)]
    assert abs(model.bias.item()) <= 1e-3


def test_the_learning_rate_is_the_one_that_the_step_used() -> None:
    """The gradient is always 1 (loss w x with x = 1); the rates are 0.1, 0.01, 0.001."""
    logged, recorder = Logged(), Recorder(fields=("learning_rate",))
    seen: list[tuple[str, float]] = []

    class Looks(Callback):
        def on_optimizer_step_end(self, ctx: Context) -> None:
            seen.append(("before the scheduler", ctx.optimizer.param_groups[0]["lr"]))

        def on_train_step_end(self, ctx: Context) -> None:
            seen.append(("after the scheduler", ctx.optimizer.param_groups[0]["lr"]))

    with trainer_of(
        linear(),
        [(column(1), column(0))],
        logged,
        recorder,
        Looks(),
        task=lambda outputs, targets: outputs.mean(),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1),
    ) as trainer:
        trainer.fit("3ep")
    assert trainer.model.state_dict()["weight"].item() == pytest.approx(0.5 - 0.111)
    rates = [rate for event, rate in recorder.values["learning_rate"] if event == "on_optimizer_step_start"]
    assert rates == pytest.approx([0.1, 0.01, 0.001])
    assert [rate for event, rate in recorder.values["learning_rate"] if event == "on_train_step_end"] == rates
    assert all(type(rate) is float for _, rate in recorder.values["learning_rate"])
    assert [record.values["train/learning_rate"] for record in logged.records] == rates
    assert [rate for when, rate in seen if when == "before the scheduler"] == rates
    assert [rate for when, rate in seen if when == "after the scheduler"] == pytest.approx([0.01, 0.001, 0.0001])


def test_a_rate_that_is_a_tensor_is_copied_as_the_step_used_it() -> None:
    """The scheduler modifies the optimizer's tensor in place, while records hold floats."""
    steps, logged = Steps(), Logged()
    with trainer_of(
        linear(),
        [(column(1), column(0))],
        steps,
        logged,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=torch.tensor(0.5)),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
    ) as trainer:
        trainer.fit("2ep")
    assert [record.values["train/learning_rate"] for record in logged.records] == [0.5, 0.25]
    assert [float(rate) for rate in steps.rates] == [0.5, 0.25]
    assert all(isinstance(rate, Tensor) and not rate.dim() for rate in steps.rates)
    assert all(type(record.values["train/learning_rate"]) is float for record in logged.records)


class TwoLosses(Task):
    """Returns a loss to train on and a second one that is only reported."""

    def forward(self, model: nn.Module, batch: Any) -> Any:
        return model(batch[0])

    def loss(self, outputs: Any, batch: Any) -> Mapping[str, Tensor]:
        error = outputs - batch[1]
        return {"absolute": error.abs().mean(), "loss": (error**2).mean()}


@pytest.mark.parametrize("microbatch_size", [None, 2])
def test_losses_by_name_are_means_over_the_step(microbatch_size: int | None) -> None:
    steps, logged = Steps(), Logged()
    data = [(column(1, 2, 6), column(0, 0, 0))]
    with trainer_of(linear(), data, steps, logged, task=TwoLosses(), microbatch_size=microbatch_size) as trainer:
        trainer.fit("1ba")
        results = trainer.evaluate(data)
    assert steps.loss_dicts == [{"loss": pytest.approx(10.25 / 3), "absolute": pytest.approx(1.5)}]
    assert logged.records[0].values["train/loss"] == pytest.approx(10.25 / 3)
    assert logged.records[0].values["train/absolute"] == pytest.approx(1.5)
    weight = 0.5 - 0.1 * 41 / 3
    assert results == {"validation": {"absolute": pytest.approx(abs(weight) * 3), "loss": pytest.approx(weight**2 * 41 / 3)}}


def test_the_step_s_loss_holds_no_graph() -> None:
    recorder = Recorder(fields=("loss", "loss_dict"))
    with trainer_of(linear(), [(column(1), column(0))], recorder) as trainer:
        trainer.fit("1ba")
    ends = [value for event, value in recorder.values["loss"] if event in ("on_forward_backward_end", "on_train_step_end")]
    assert len(ends) == 2
    assert all(not loss.requires_grad for loss in ends)
    assert all(not loss.requires_grad for _, losses in recorder.values["loss_dict"] for loss in losses.values())


# --- what callbacks may change ---


class Changes(Callback):
    phase = "change"

    def __init__(self, event: str, change: Callable[[Context], None]) -> None:
        self.event = event
        self.change = change

    def on_event(self, ctx: Context) -> None:
        if ctx.event == self.event:
            self.change(ctx)


def with_batch(ctx: Context) -> None:
    if ctx.batch is not None:
        ctx.batch = (ctx.batch[0] * 2, ctx.batch[1])


def with_microbatch(ctx: Context) -> None:
    ctx.microbatch = (ctx.microbatch[0] * 2, ctx.microbatch[1])


def with_outputs(ctx: Context) -> None:
    ctx.outputs = ctx.outputs * 2


def with_loss(ctx: Context) -> None:
    ctx.loss = ctx.loss * 4


@pytest.mark.parametrize("microbatch_size", [None, 1])
@pytest.mark.parametrize(
    ("event", "change"),
    [
        ("on_fetch_end", with_batch),
        ("on_microbatch_start", with_microbatch),
        ("on_forward_end", with_outputs),
        ("on_loss_end", with_loss),
    ],
)
def test_what_a_callback_writes_takes_effect(event: str, change: Callable[[Context], None], microbatch_size: int | None) -> None:
    """With target 0, each change makes the loss four times as large: (2 x w)^2 or 4 (x w)^2."""
    steps, logged = Steps(), Logged()
    data = [(column(1, 1), column(0, 0))]
    with trainer_of(linear(), data, Changes(event, change), steps, logged, microbatch_size=microbatch_size) as trainer:
        trainer.fit("1ba")
    assert steps.gradients[0].item() == pytest.approx(4 * 2 * 0.5)
    assert trainer.model.state_dict()["weight"].item() == pytest.approx(0.5 - 0.1 * 4)
    assert steps.losses == [pytest.approx(4 * 0.25)]
    assert steps.loss_dicts == [{"loss": pytest.approx(1.0)}]
    assert logged.records[0].values["train/loss"] == pytest.approx(1.0)


def test_samples_are_counted_of_the_batch_that_a_callback_wrote() -> None:
    def halved(ctx: Context) -> None:
        if ctx.batch is not None:
            ctx.batch = (ctx.batch[0][:2], ctx.batch[1][:2])

    with trainer_of(linear(), [(column(1, 1, 1, 1), column(0, 0, 0, 0))], Changes("on_fetch_end", halved)) as trainer:
        trainer.fit("1ep")
    assert trainer.state.timestamp.sample == 2


def test_outputs_that_a_callback_writes_in_an_evaluation_take_effect() -> None:
    data = [(column(1, 1), column(0, 0))]
    with trainer_of(linear(), data, Changes("on_eval_forward_end", with_outputs)) as trainer:
        assert trainer.evaluate(data)["validation"]["loss"] == pytest.approx(1.0)


def test_changes_of_training_batches_do_not_affect_evaluation() -> None:
    data = [(column(1, 1), column(0, 0))]
    with trainer_of(linear(), data, Changes("on_fetch_end", with_batch), Changes("on_forward_end", with_outputs)) as trainer:
        assert trainer.evaluate(data)["validation"]["loss"] == pytest.approx(0.25)


class WantsOutputs(Callback):
    keep_fields = ("outputs",)

    def __init__(self) -> None:
        self.outputs: list[Tensor] = []

    def on_train_step_end(self, ctx: Context) -> None:
        self.outputs.append(ctx.outputs.detach())


def test_outputs_are_kept_to_the_step_s_end_if_declared() -> None:
    wants, recorder = WantsOutputs(), Recorder()
    with trainer_of(linear(), [(column(1, 2, 6), column(0, 0, 0))], wants, recorder, microbatch_size=2) as trainer:
        trainer.fit("2ba")
    weight_after_one_step = 0.5 - 0.1 * 41 / 3
    assert [outputs.flatten().tolist() for outputs in wants.outputs] == [
        [pytest.approx(3.0)],  # outputs of the last microbatch
        [pytest.approx(6 * weight_after_one_step, rel=1e-5)],
    ]
    assert all(
        "outputs" not in noted.fields for noted in recorder.recorded if noted.event in ("on_fetch_end", "on_train_step_start")
    )


def test_outputs_are_released_before_backward_if_not_declared() -> None:
    class Looks(Callback):
        def on_backward_start(self, ctx: Context) -> None:
            with pytest.raises(FieldNotAvailable, match=r"outputs.*on_backward_start.*on_forward_end to on_loss_end"):
                _ = ctx.outputs

    with trainer_of(linear(), [(column(1), column(0))], Looks()) as trainer:
        trainer.fit("1ba")


@pytest.mark.parametrize("name", ["record", "boundary", "optimizer"])
def test_a_field_whose_window_cannot_be_longer_is_rejected(name: str) -> None:
    class Wants(Callback):
        keep_fields = (name,)

        def on_train_step_start(self, ctx: Context) -> None: ...

    with pytest.raises(RegistrationError, match=rf"{name}.*Wants"):
        trainer_of(linear(), [(column(1), column(0))], Wants())


# --- numbers ---


def test_steps_are_numbered_from_1_and_time_moves_just_before_the_end_events() -> None:
    recorder = Recorder()
    data = [(column(1), column(0))] * 2
    with trainer_of(linear(), data, recorder, microbatch_size=1, epochs_per_round=1, log_interval="1ep") as trainer:
        trainer.fit("2ep")
    inside = {"on_train_step_start", "on_microbatch_start", "on_loss_end", "on_optimizer_step_end"}
    for event in inside:
        assert [(noted.step, noted.epoch, noted.batch) for noted in recorder.recorded if noted.event == event] == [
            (1, 1, 0),
            (2, 1, 1),
            (3, 2, 2),
            (4, 2, 3),
        ]
    ends = [(noted.step, noted.epoch, noted.batch) for noted in recorder.recorded if noted.event == "on_train_step_end"]
    assert ends == [(1, 1, 1), (2, 1, 2), (3, 2, 3), (4, 2, 4)]
    fetches = [noted.step for noted in recorder.recorded if noted.event == "on_fetch_start"]
    assert fetches == [0, 1, 2, 2, 3, 4]  # between two steps, it is the number of the last one


def test_epochs_and_rounds_count_just_before_their_ends() -> None:
    seen: list[tuple[str, int, int, int, int]] = []

    class Looks(Callback):
        def on_event(self, ctx: Context) -> None:
            if str(ctx.event) in ("on_epoch_start", "on_epoch_end", "on_round_start", "on_round_end"):
                now = ctx.state.timestamp
                seen.append((str(ctx.event), now.round, now.epoch, now.epoch_in_round, now.batch_in_epoch))

    with trainer_of(linear(), [(column(1), column(0))] * 2, Looks(), epochs_per_round=2, max_duration="2iter") as trainer:
        trainer.fit()
    assert seen[:6] == [
        ("on_round_start", 0, 0, 0, 0),
        ("on_epoch_start", 0, 0, 0, 0),
        ("on_epoch_end", 0, 1, 1, 0),
        ("on_epoch_start", 0, 1, 1, 0),
        ("on_epoch_end", 0, 2, 2, 0),
        ("on_round_end", 1, 2, 0, 0),
    ]
    assert seen[-1] == ("on_round_end", 2, 4, 0, 0)


def test_an_epoch_that_is_stopped_midway_is_not_counted() -> None:
    class Stops(Callback):
        def on_train_step_end(self, ctx: Context) -> None:
            ctx.control.stop("enough")

    with trainer_of(linear(), [(column(1), column(0))] * 2, Stops(), max_duration="5ep") as trainer:
        trainer.fit()
    assert (trainer.state.timestamp.epoch, trainer.state.timestamp.batch) == (0, 1)
    assert trainer.run.outcome is Outcome.STOPPED


# --- records ---


def test_records_hold_the_values_computed_by_hand() -> None:
    """Three batches of one sample, log_interval 2ba. w is 0.5, 0.4, 0.2 before the steps, so the losses are w^2, 4 w^2, w^2."""

    class Logs(Callback):
        def on_train_step_end(self, ctx: Context) -> None:
            ctx.log({"own/last": ctx.step})
            ctx.log({"own/mean": ctx.step}, over="mean")
            ctx.log({"own/sum": torch.tensor(float(ctx.step))}, over="sum")
            ctx.log({"own/weighted": ctx.step}, over="mean", weight=ctx.step)

    logged = Logged()
    data = [(column(1), column(0)), (column(2), column(0)), (column(1), column(0))]
    lr = 0.1
    with trainer_of(linear(), data, Logs(), logged, log_interval="2ba", lr=lr) as trainer:
        trainer.fit("1ep")
    w0 = 0.5
    w1 = w0 - lr * 2 * w0
    w2 = w1 - lr * 2 * w1 * 4
    first, second = logged.records
    assert (first.step, second.step) == (2, 3)
    assert first.values == {
        "train/loss": pytest.approx((w0**2 + 4 * w1**2) / 2),
        "own/last": 2.0,
        "own/mean": 1.5,
        "own/sum": 3.0,
        "own/weighted": pytest.approx(5 / 3),
        "train/learning_rate": lr,
        "time/epoch": 0.0,
        "time/batch": 2.0,
        "time/sample": 2.0,
        "time/token": 0.0,
    }
    assert second.values == {
        "train/loss": pytest.approx(w2**2),
        "own/last": 3.0,
        "own/mean": 3.0,
        "own/sum": 3.0,
        "own/weighted": 3.0,
        "train/learning_rate": lr,
        "time/epoch": 1.0,
        "time/batch": 3.0,
        "time/sample": 3.0,
        "time/token": 0.0,
    }
    assert all(type(value) is float for record in logged.records for value in record.values.values())
    assert 0 < first.elapsed_seconds <= second.elapsed_seconds
    assert first.samples_per_second > 0
    assert first.memory_bytes > 1_000_000


def test_a_record_comes_before_the_evaluation_of_its_boundary_and_the_evaluation_s_own_after_it() -> None:
    logged, recorder = Logged(), Recorder()
    data = [(column(1), column(0))]
    with trainer_of(
        linear(), data, logged, recorder, eval_dataloader={"a": data, "b": data}, eval_interval="2ba", log_interval="2ba"
    ) as trainer:
        trainer.fit("2ep")
    noted = [event for event in recorder.events if event in ("on_log", "on_eval_all_start", "on_eval_all_end")]
    assert noted == ["on_log", "on_eval_all_start", "on_eval_all_end", "on_log"]
    assert set(logged.records[1].values) == {"a/loss", "b/loss"}
    assert logged.records[1].step == 2


def test_stopped_by_its_evaluation_a_run_still_fires_its_last_record() -> None:
    class Stops(Callback):
        def on_eval_all_end(self, ctx: Context) -> None:
            ctx.control.stop("good enough")

    logged = Logged()
    data = [(column(1), column(0))] * 2
    with trainer_of(linear(), data, Stops(), logged, eval_dataloader=data, eval_interval="3ba", log_interval="10ba") as trainer:
        trainer.fit("9ep")
    assert trainer.state.timestamp.batch == 3
    assert any("train/loss" in record.values for record in logged.records)


def test_stopped_at_a_record_a_run_is_evaluated_at_that_boundary_after_it() -> None:
    class Stops(Callback):
        def on_log(self, ctx: Context) -> None:
            if ctx.step == 2:
                ctx.control.stop("good enough")

    recorder = Recorder()
    data = [(column(1), column(0))] * 4
    with trainer_of(linear(), data, Stops(), recorder, eval_dataloader=data, eval_interval="1ep") as trainer:
        trainer.fit("9ep")
    noted = [event for event in recorder.events if event in ("on_log", "on_eval_all_start", "on_epoch_end", "on_train_end")]
    assert noted == ["on_log", "on_log", "on_eval_all_start", "on_log", "on_epoch_end", "on_train_end"]
    assert trainer.run.outcome is Outcome.STOPPED


def test_the_same_weights_are_not_evaluated_twice() -> None:
    recorder = Recorder()
    data = [(column(1), column(0))] * 2
    with trainer_of(linear(), data, recorder, eval_dataloader=data, eval_interval="1ep") as trainer:
        trainer.fit("2ba")
    assert recorder.events.count("on_eval_all_start") == 1


def test_evaluations_are_due_by_their_interval_and_at_the_end() -> None:
    recorder = Recorder()
    data = [(column(1), column(0))]
    with trainer_of(linear(), data * 5, recorder, eval_dataloader=data, eval_interval="2ba") as trainer:
        trainer.fit("1ep")
    assert [noted.step for noted in recorder.recorded if noted.event == "on_eval_all_start"] == [2, 4, 5]


def test_predict_returns_the_outputs_and_test_the_mean_loss() -> None:
    data = [(column(1, 2), column(0, 0)), (column(6), column(0))]
    logged = Logged()
    with trainer_of(linear(), data, logged) as trainer:
        predicted = trainer.predict(data)
        assert [outputs.flatten().tolist() for outputs in predicted] == [[0.5, 1.0], [3.0]]
        assert not any(outputs.requires_grad for outputs in predicted)
        assert trainer.test(data) == {"loss": pytest.approx(10.25 / 3)}
    assert logged.records[-1].values == {"test/loss": pytest.approx(10.25 / 3)}


# --- closing a trainer ---


def test_close_fires_the_end_once() -> None:
    recorder = Recorder()
    trainer = trainer_of(linear(), [(column(1), column(0))], recorder)
    trainer.close()
    trainer.close()
    assert recorder.events.count("on_run_end") == 1
    assert recorder.events[-1] == "on_run_end"
    with pytest.raises(RunEndedError, match=r"'step' has ended.*resume="):
        trainer.fit()
    assert recorder.events.count("on_exception") == 0


def test_an_error_in_the_with_block_is_reported_and_raised() -> None:
    recorder = Recorder(fields=("exception", "span"))
    error = KeyError("the user's own")
    trainer = trainer_of(linear(), [(column(1), column(0))], recorder)
    trainer.fit("1ba")
    with pytest.raises(KeyError) as raised, trainer:
        raise error
    assert raised.value is error
    assert recorder.values == {"exception": [("on_exception", error)], "span": [("on_exception", "run")]}
    assert recorder.events[-2:] == ["on_exception", "on_run_end"]
    assert trainer.run.outcome is Outcome.FAILED


def test_a_trainer_that_is_garbage_collected_fires_its_end() -> None:
    recorder = Recorder()
    trainer = trainer_of(linear(), [(column(1), column(0))], recorder)
    trainer.fit("1ba")
    assert "on_run_end" not in recorder.events
    del trainer
    gc.collect()
    assert recorder.events.count("on_run_end") == 1


@pytest.mark.test_all
def test_a_script_that_never_closes_fires_the_end_at_exit(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\n"
        "from callsheet import Callback, Trainer\n"
        "class Last(Callback):\n"
        "    def on_run_end(self, ctx):\n"
        "        print('ended', ctx.run.outcome, ctx.state.timestamp.batch)\n"
        "data = [(torch.ones(2, 1), torch.ones(2, 1))]\n"
        "trainer = Trainer(torch.nn.Linear(1, 1), torch.nn.functional.mse_loss, data, callbacks=[Last()],\n"
        "                  optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))\n"
        "trainer.fit('3ba')\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "ended finished 3\n"
    assert done.stderr == ""
    assert not (tmp_path / "runs").exists()  # no callback wrote a file


def test_closing_during_training_is_rejected_or_ends_it_in_order() -> None:
    recorder = Recorder()
    held: list[Trainer] = []

    class Closes(Callback):
        def on_train_step_end(self, ctx: Context) -> None:
            held[0].close()

    trainer = trainer_of(linear(), [(column(1), column(0))], Closes(), recorder)
    held.append(trainer)
    with suppress(RequestRejected):
        trainer.fit("2ep")
    trainer.close()
    assert recorder.events.count("on_run_end") == 1
    assert recorder.events[-1] == "on_run_end"


def test_a_loss_function_makes_a_supervised_task() -> None:
    one, other = linear(), linear()
    with trainer_of(one, [(column(1), column(0))]) as trainer:
        trainer.fit("2ep")
    with trainer_of(other, [(column(1), column(0))], task=SupervisedTask(mse_loss)) as trainer:
        trainer.fit("2ep")
    assert torch.equal(one.weight, other.weight)
    assert one.weight.item() == pytest.approx(0.5 * 0.8 * 0.8)


class Samples(Callback):
    """Records the timestamp's sample count at every step's start."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_train_step_start(self, ctx: Context) -> None:
        self.seen.append(ctx.state.timestamp.sample)


@pytest.mark.parametrize("reads", [False, True])
def test_sample_counts_are_updated_at_log_boundaries_with_and_without_listeners(reads: bool) -> None:
    samples = Samples()
    readers = [Recorder()] if reads else []
    data = [(column(1.0, 2.0), column(1.0, 2.0))] * 7
    with trainer_of(linear(), data, samples, *readers, log_interval="3ba", max_duration="1ep") as trainer:
        trainer.fit()
        assert samples.seen == [0, 0, 0, 6, 6, 6, 12]
        assert trainer.state.timestamp.sample == 14


@pytest.mark.parametrize(("max_duration", "steps"), [("9sp", 6), ("5ba", 5), ("2ep", 14)])
def test_training_ends_at_the_same_step_without_listeners_to_records(max_duration: str, steps: int) -> None:
    data = [(column(1.0, 2.0), column(1.0, 2.0))] * 7
    with trainer_of(linear(), data, log_interval="3ba", max_duration=max_duration) as trainer:
        trainer.fit()
        assert trainer.state.timestamp.batch == steps


def test_a_log_boundary_without_listeners_carries_out_requests() -> None:
    class Stops(Callback):
        def on_train_step_end(self, ctx: Context) -> None:
            if ctx.step == 3:
                ctx.control.stop("enough")

    data = [(column(1.0, 2.0), column(1.0, 2.0))] * 7
    with trainer_of(linear(), data, Stops(), log_interval="3ba", max_duration="1ep") as trainer:
        trainer.fit()
        assert trainer.state.timestamp.batch == 3


def test_a_shortened_duration_ends_training_at_the_next_log_boundary_without_listeners() -> None:
    class Shortens(Callback):
        def on_train_step_end(self, ctx: Context) -> None:
            if ctx.step == 4:
                ctx.state.max_duration = Time("2ba")

    data = [(column(1.0, 2.0), column(1.0, 2.0))] * 14
    with trainer_of(linear(), data, Shortens(), log_interval="3ba", max_duration="1ep") as trainer:
        trainer.fit()
        assert trainer.state.timestamp.batch == 6
