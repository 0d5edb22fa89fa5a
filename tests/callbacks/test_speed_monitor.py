from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.utils  # counts what has been compiled
from torch import Tensor, nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from torch.utils.checkpoint import checkpoint

from callsheet import Callback, Context, Trainer
from callsheet.callbacks.speed_monitor import SpeedMonitor
from callsheet.errors import ConfigError
from callsheet.testing import run_ranks
from callsheet.trainer import Task


@pytest.fixture(autouse=True)
def without_compiled_code() -> None:
    """Remove compiled code of other tests, because FLOPs of compiled code are not counted."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


class Records(Callback):
    """Records every metrics record with its timestamp."""

    phase = "report"

    def __init__(self) -> None:
        self.records: list[tuple[int, float, dict[str, float]]] = []

    def on_log(self, ctx: Context) -> None:
        assert not any(
            name.endswith("/flops") for name in ctx.record.values
        )  # the sum from which the rate is computed is not logged
        speeds = {name: value for name, value in ctx.record.values.items() if name.startswith("throughput")}
        self.records.append((ctx.step, ctx.state.timestamp.seconds, speeds))


class SaveAndStop(Callback):
    def on_train_step_end(self, ctx: Context) -> None:
        if ctx.step == 5:
            ctx.control.save("to resume")
            ctx.control.stop("to resume")


def fit(folder: Path, *callbacks: Callback, **options: Any) -> Records:
    records = Records()
    data = [(torch.ones(4, 2), torch.ones(4, 1))] * 12
    with Trainer(
        nn.Linear(2, 1),
        lambda outputs, targets: (outputs.sum() - targets.sum()) ** 2,
        data,
        data[:1],
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-4),
        callbacks=[records, *callbacks],
        runs_folder=folder,
        run_name="run",
        device="cpu",
        **options,
    ) as trainer:
        trainer.fit()
    return records


def test_the_rates_are_over_the_window_and_in_the_record_that_ends_it(tmp_path: Path) -> None:
    records = fit(tmp_path, SpeedMonitor(window_size=4), log_interval="2ba", eval_interval=None).records
    at = {0: 0.0, **{step: seconds for step, seconds, _ in records}}
    assert [step for step, _, _ in records] == [2, 4, 6, 8, 10, 12]
    for step, seconds, speeds in records:
        window = min(step, 4)
        rate = window / (seconds - at[step - window])
        assert speeds["throughput/batches_per_second"] == pytest.approx(rate)
        assert speeds["throughput/samples_per_second"] == pytest.approx(4 * rate)
        assert speeds["throughput/device/samples_per_second"] == pytest.approx(4 * rate)
        assert "throughput/tokens_per_second" not in speeds  # the data has no tokens


def test_tokens_are_logged_if_they_are_counted(tmp_path: Path) -> None:
    class Tokens(Task):
        def forward(self, model: nn.Module, batch: Any) -> Any:
            return model(batch["input_ids"].float())

        def loss(self, outputs: Any, batch: Any) -> Any:
            return outputs.sum()

    records = Records()
    with Trainer(
        nn.Linear(5, 1),
        Tokens(),
        [{"input_ids": torch.ones(2, 5, dtype=torch.long)}] * 4,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-4),
        callbacks=[SpeedMonitor(), records],
        runs_folder=tmp_path,
        log_interval="4ba",
        device="cpu",
    ) as trainer:
        trainer.fit()
    ((_, seconds, speeds),) = records.records
    assert speeds["throughput/tokens_per_second"] == pytest.approx(40 / seconds)
    assert speeds["throughput/samples_per_second"] == pytest.approx(8 / seconds)


def test_a_window_shorter_than_the_log_interval_is_that_interval(tmp_path: Path) -> None:
    records = fit(tmp_path, SpeedMonitor(window_size=1), log_interval="6ba", eval_interval=None).records
    (_, first, _), (_, second, speeds) = records
    assert speeds["throughput/batches_per_second"] == pytest.approx(6 / (second - first))


def test_an_evaluation_s_record_has_no_speed_and_does_not_move_the_window(tmp_path: Path) -> None:
    records = fit(tmp_path, SpeedMonitor(window_size=100), log_interval="4ba", eval_interval="4ba", max_duration="8ba").records
    assert [bool(speeds) for _, _, speeds in records] == [True, False, True, False]
    _, seconds, speeds = records[2]
    assert speeds["throughput/batches_per_second"] == pytest.approx(8 / seconds)


def test_the_window_continues_across_a_resume(tmp_path: Path) -> None:
    fit(tmp_path, SpeedMonitor(window_size=100), SaveAndStop(), log_interval="2ba", eval_interval=None)
    resumed = fit(tmp_path, SpeedMonitor(window_size=100), log_interval="2ba", eval_interval=None, resume="auto").records
    step, seconds, speeds = resumed[0]
    assert step == 6
    assert speeds["throughput/batches_per_second"] == pytest.approx(6 / seconds)  # measured from the first process on


def test_a_new_run_has_a_new_window(tmp_path: Path) -> None:
    monitor = SpeedMonitor(window_size=100)
    fit(tmp_path / "first", monitor, log_interval="4ba", eval_interval=None)
    step, seconds, speeds = fit(tmp_path / "second", monitor, log_interval="4ba", eval_interval=None).records[0]
    assert speeds["throughput/batches_per_second"] == pytest.approx(step / seconds)


def test_two_monitors_work_in_one_run(tmp_path: Path) -> None:
    short, long = SpeedMonitor(window_size=2), SpeedMonitor(window_size=100)
    long.name = "throughput/long"
    records = fit(tmp_path, short, long, log_interval="2ba", eval_interval=None).records
    (_, before, _), (_, seconds, speeds) = records[-2:]
    assert speeds["throughput/batches_per_second"] == pytest.approx(2 / (seconds - before))
    assert speeds["throughput/long/batches_per_second"] == pytest.approx(12 / seconds)


def test_rejects_an_empty_window() -> None:
    with pytest.raises(ConfigError, match="window_size=0"):
        SpeedMonitor(window_size=0)


# --- FLOPs ---

DEPTH = 3
PER_SAMPLE = DEPTH * 3 * 2 * 8 * 8 - 2 * 8 * 8 + 3 * 2 * 8 * 4
"""Of a `Net`: forward, and backward for weights and inputs, but not for those of the first layer."""


class Net(nn.Module):
    """A model whose layers can be recomputed in the backward."""

    def __init__(self, *, recomputes: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(DEPTH))
        self.last = nn.Linear(8, 4)
        self.recomputes = recomputes

    def forward(self, inputs: Tensor) -> Any:
        for layer in self.layers:
            inputs = checkpoint(layer, inputs, use_reentrant=False) if self.recomputes else layer(inputs)
            inputs = nn.functional.dropout(inputs, 0.1)
        return self.last(inputs)


class FlopsByMethod(Net):
    """Reports its FLOPs by a method, which records the batch sizes."""

    def flops_per_batch(self, batch: Any) -> Any:
        vars(self).setdefault("batch_sizes", []).append(len(batch[0]))
        return 100 * len(batch[0])


class FlopsAsTensor(Net):
    """Reports its FLOPs as a tensor, as a method that counts labels would."""

    def floating_point_ops(self, inputs: Any) -> Any:
        return (inputs[0] == inputs[0]).sum()


class FlopsAsNumber(Net):
    flops_per_batch = 1000


class FlopsAsText(Net):
    flops_per_batch = "many"


SIZES = (4, 6, 4, 2, 4, 4)


def train(folder: Path | str, *callbacks: Callback, model: nn.Module | None = None, **options: Any) -> tuple[Records, Any]:
    """Train on batches of several sizes, and return the records and the weights."""
    torch.manual_seed(0)
    model = model or Net()
    generator = torch.Generator().manual_seed(1)
    data = [(torch.randn(size, 8, generator=generator), torch.randn(size, 4, generator=generator)) for size in SIZES]
    records = Records()
    with Trainer(
        model,
        nn.functional.mse_loss,
        data,
        **{
            "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
            "callbacks": [*callbacks, records],
            "runs_folder": folder,
            "run_name": "run",
            "device": "cpu",
            "seed": 3,
            "log_interval": "2ba",
            **options,
        },
    ) as trainer:
        trainer.fit()
        weights = {
            name: (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).tolist()
            for name, tensor in model.state_dict().items()
        }
    return records, weights


def flops_per_sample(records: Records) -> list[float]:
    return [
        speeds["throughput/flops_per_second"] / speeds["throughput/samples_per_second"]
        for _, _, speeds in records.records
        if "throughput/flops_per_second" in speeds
    ]


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("options", [{}, {"microbatch_size": 2}, {"gradient_accumulation_steps": 2}, {"precision": "bf16"}])
def test_recomputation_does_not_count(options: dict[str, Any], recomputes: bool, tmp_path: Path) -> None:
    records, _ = train(tmp_path, SpeedMonitor(window_size=2), model=Net(recomputes=recomputes), **options)
    assert flops_per_sample(records) == pytest.approx([PER_SAMPLE] * len(records.records))


def test_the_rate_is_that_of_the_window(tmp_path: Path) -> None:
    """The first step is not counted, so its record has no rate. A later record has the rate of its window."""
    records = train(tmp_path, SpeedMonitor(window_size=1), log_interval=1)[0].records
    assert "throughput/flops_per_second" not in records[0][2]
    for (_, before, _), (_, seconds, speeds), size in zip(records, records[1:], SIZES[1:], strict=False):
        assert speeds["throughput/flops_per_second"] * (seconds - before) == pytest.approx(size * PER_SAMPLE)


class Tokens(Task):
    def forward(self, model: nn.Module, batch: Any) -> Any:
        return model(batch["input_ids"])

    def loss(self, outputs: Any, batch: Any) -> Any:
        return outputs.sum()


class RecordsFetches(SpeedMonitor):
    """Records the steps at which it receives batches."""

    def __init__(self) -> None:
        super().__init__(window_size=2)
        self.steps: list[int] = []

    def on_fetch_end(self, ctx: Context) -> None:
        super().on_fetch_end(ctx)
        self.steps.append(ctx.step + 1)


def flops_per_token(folder: Path | str, *callbacks: Callback, name: str = "input_ids", **options: Any) -> list[float]:
    """Train on batches of several lengths, and return the FLOPs per token of each record."""
    lengths = (5, 7, 3, 8, 4, 6, 9, 2)
    records = Records()
    with Trainer(
        nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 8)),
        Tokens(),
        [{"lengths": torch.tensor([length]), "input_ids": torch.ones(2, length, dtype=torch.long)} for length in lengths],
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-4),
        callbacks=[*callbacks, records],
        runs_folder=folder,
        run_name="run",
        log_interval=2,
        device="cpu",
        **options,
    ) as trainer:
        trainer.fit()
    return [
        speeds["throughput/flops_per_second"] / speeds["throughput/tokens_per_second"]
        for _, _, speeds in records.records
        if "throughput/flops_per_second" in speeds
    ]


PER_TOKEN = 3 * 2 * 4 * 8


def test_tokens_are_counted_if_batches_are_dictionaries(tmp_path: Path) -> None:
    """Once the run counts the tokens itself, the monitor no longer receives batches."""
    monitor = RecordsFetches()
    assert flops_per_token(tmp_path, monitor) == pytest.approx([PER_TOKEN] * 4)
    assert monitor.steps == [1, 2]


def test_the_token_count_continues_across_a_resume(tmp_path: Path) -> None:
    before = flops_per_token(tmp_path, RecordsFetches(), SavesAndStops(5, stops=True))
    monitor = RecordsFetches()
    assert before + flops_per_token(tmp_path, monitor, resume="auto") == pytest.approx([PER_TOKEN] * 5)
    assert monitor.steps == [6]  # then the monitor finds that the run counts the tokens


def test_without_counted_tokens_it_receives_all_batches(tmp_path: Path) -> None:
    monitor = RecordsFetches()
    train(tmp_path, monitor)
    assert monitor.steps == list(range(1, len(SIZES) + 2))  # the last fetch finds the end of the data


def tokens_on_ranks(folder: str) -> tuple[list[float], list[int]]:
    monitor = RecordsFetches()
    return flops_per_token(folder, monitor), monitor.steps


def test_tokens_are_counted_equally_on_all_ranks(tmp_path: Path) -> None:
    for recorded, steps in run_ranks(tokens_on_ranks, 2, str(tmp_path)):
        assert recorded == pytest.approx([PER_TOKEN] * 2)
        assert steps == [1, 2]


def test_the_flops_that_a_model_reports_are_used(tmp_path: Path) -> None:
    model = FlopsByMethod()
    records, _ = train(tmp_path, SpeedMonitor(), model=model, microbatch_size=2, log_interval=1)
    assert model.batch_sizes == list(SIZES)  # whole batches, in order
    assert flops_per_sample(records) == pytest.approx([100.0] * 6)
    assert flops_per_sample(train(tmp_path / "tensor", SpeedMonitor(), model=FlopsAsTensor())[0]) == pytest.approx([8.0] * 3)
    for _, _, speeds in train(tmp_path / "number", SpeedMonitor(), model=FlopsAsNumber())[0].records:
        assert speeds["throughput/flops_per_second"] / speeds["throughput/batches_per_second"] == pytest.approx(1000)


def test_a_model_that_reports_text_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the model reports 'many' as the FLOPs of a batch"):
        train(tmp_path, SpeedMonitor(), model=FlopsAsText())


def test_utilization_is_relative_to_the_given_peak(tmp_path: Path) -> None:
    records = train(tmp_path, SpeedMonitor(peak_flops=2e9), model=FlopsAsNumber())[0].records
    assert records
    for _, _, speeds in records:
        assert speeds["throughput/device/mfu"] == pytest.approx(speeds["throughput/device/flops_per_second"] / 2e9)


class OnAnotherDevice(Callback):
    """Changes the run's device to an unknown one."""

    def on_run_start(self, ctx: Context) -> None:
        ctx.run.device = "new:0"


def test_an_unknown_device_has_no_utilization_and_a_single_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "callsheet")
    train(tmp_path, OnAnotherDevice(), SpeedMonitor(), model=FlopsAsNumber(), log_interval=1)
    (message,) = [record.getMessage() for record in caplog.records if "MFU" in record.getMessage()]
    assert "'new:0'" in message
    assert "give peak_flops=" in message


def test_on_a_cpu_there_is_no_warning_about_utilization(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "callsheet")
    records, _ = train(tmp_path, SpeedMonitor(), model=FlopsAsNumber(), log_interval=1)
    assert "MFU" not in caplog.text
    assert any("flops" in name for _, _, speeds in records.records for name in speeds)
    assert not any("mfu" in name for _, _, speeds in records.records for name in speeds)


def test_flops_can_be_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "callsheet")
    model = FlopsByMethod()
    records, _ = train(tmp_path, SpeedMonitor(count_flops=False), model=model)
    assert flops_per_sample(records) == []
    assert not hasattr(model, "batch_sizes")
    assert "SpeedMonitor" not in caplog.text


def test_a_model_without_a_known_operation_is_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Scales(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, inputs: Tensor) -> Any:
            return inputs[:, :4] * self.scale

    caplog.set_level(logging.INFO, "callsheet")
    assert flops_per_sample(train(tmp_path, SpeedMonitor(), model=Scales())[0]) == []
    (message,) = [record.getMessage() for record in caplog.records if "FLOPs are not logged" in record.getMessage()]
    assert "flops_per_batch" in message


class Attends(nn.Module):
    """A model with convolution, attention and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(1, 8, 3, padding=1)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
        self.last = nn.Linear(8, 1)

    def forward(self, inputs: Tensor) -> Any:
        hidden = self.convolution(inputs[:, None]).transpose(1, 2)
        hidden = hidden + self.attention(hidden, hidden, hidden, need_weights=False)[0]
        return self.last(hidden)[:, :4, 0]


@pytest.mark.parametrize("kind", [Net, Attends])
@pytest.mark.parametrize("options", [{}, {"precision": "bf16"}, {"precision": "fp16"}])
def test_counting_does_not_change_training(kind: type[nn.Module], options: dict[str, Any], tmp_path: Path) -> None:
    def weights(folder: str, *callbacks: Callback) -> Any:
        torch.manual_seed(0)
        return train(tmp_path / folder, *callbacks, model=kind(), **options)[1]

    assert weights("watched", SpeedMonitor()) == weights("bare")


def test_two_monitors_both_count_and_remove_their_dispatch_modes(tmp_path: Path) -> None:
    """They must not count in the same step: torch's dispatch modes must be left in the reverse of the order of entry."""
    other = SpeedMonitor()
    other.name = "throughput/other"
    records = train(tmp_path, SpeedMonitor(), other)[0].records
    _, _, speeds = records[-1]
    samples = speeds["throughput/samples_per_second"]
    assert speeds["throughput/flops_per_second"] / samples == pytest.approx(PER_SAMPLE)
    assert "throughput/flops" not in speeds
    _, seconds, _ = records[-1]
    _, before, _ = records[0]  # the other monitor counts in step 3, too late for the first record
    recorded = speeds["throughput/other/flops_per_second"] * (seconds - before)
    assert recorded == pytest.approx(sum(SIZES[2:]) * PER_SAMPLE)
    assert not is_in_torch_dispatch_mode(include_infra_modes=True)


class Breaks(Net):
    """Fails in the step that is counted."""

    def forward(self, inputs: Tensor) -> Any:
        outputs = super().forward(inputs)
        if len(inputs) == SIZES[1]:
            raise ArithmeticError("broken")
        return outputs


def test_the_dispatch_mode_is_removed_after_a_step_that_fails(tmp_path: Path) -> None:
    with pytest.raises(ArithmeticError):
        train(tmp_path, SpeedMonitor(), model=Breaks())
    assert not is_in_torch_dispatch_mode(include_infra_modes=True)


class SavesAndStops(Callback):
    """Saves at a step, and stops there if `stops`."""

    def __init__(self, step: int, *, stops: bool) -> None:
        self.step = step
        self.stops = stops

    def on_train_step_end(self, ctx: Context) -> None:
        if ctx.step == self.step:
            ctx.control.save("to resume", replicated=True)
            if self.stops:
                ctx.control.stop("to resume", replicated=True)


@pytest.mark.parametrize(("step", "recorded"), [(1, 2), (3, 2), (4, 1)])
@pytest.mark.parametrize("kind", [Net, FlopsAsNumber])
def test_a_resumed_run_logs_the_same_as_an_uninterrupted_one(
    step: int, recorded: int, kind: type[nn.Module], tmp_path: Path
) -> None:
    """One checkpoint is between two records. If nothing was counted before, the resumed process counts in its second step."""
    monitor = SpeedMonitor(window_size=2)
    unbroken = flops_per_sample(train(tmp_path, monitor, SavesAndStops(step, stops=False), model=kind())[0])
    rest = flops_per_sample(train(tmp_path, SpeedMonitor(window_size=2), model=kind(), resume="auto")[0])
    assert len(unbroken) == 3
    assert rest == pytest.approx(unbroken[-len(rest) :], rel=1e-12)
    assert len(rest) == (recorded if kind is Net else 3 - step // 2)


def test_counted_flops_are_kept_in_the_checkpoint(tmp_path: Path) -> None:
    """The resumed process has frozen layers, but keeps the earlier count instead of counting again."""
    train(tmp_path, SpeedMonitor(), SavesAndStops(4, stops=True))
    other = Net()
    other.layers.requires_grad_(False)
    optimizer = torch.optim.AdamW(other.parameters(), lr=1e-2)
    records, _ = train(tmp_path, SpeedMonitor(), model=other, resume="auto", optimizer=optimizer)
    assert flops_per_sample(records) == pytest.approx([PER_SAMPLE])


def test_a_new_run_counts_from_zero(tmp_path: Path) -> None:
    monitor = SpeedMonitor()
    train(tmp_path / "one", monitor)
    other = Net()
    other.layers.requires_grad_(False)
    records, _ = train(tmp_path / "two", monitor, model=other)
    assert flops_per_sample(records)[-1] < PER_SAMPLE / 2


# --- torch.compile ---


def test_compiled_code_is_not_counted_and_stays_compiled(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "callsheet")
    compile = {"backend": "aot_eager", "dynamic": True}
    _, bare = train(tmp_path / "bare", compile=compile)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    records, watched = train(tmp_path / "watched", SpeedMonitor(), compile=compile)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs > 0
    assert watched == bare
    assert flops_per_sample(records) == []
    (message,) = [record.getMessage() for record in caplog.records if "FLOPs are not logged" in record.getMessage()]
    assert "torch.compile" in message


def test_a_compiled_model_reports_its_own_flops(tmp_path: Path) -> None:
    records, _ = train(tmp_path, SpeedMonitor(peak_flops=1e9), model=FlopsByMethod(), compile={"backend": "eager"})
    assert flops_per_sample(records) == pytest.approx([100.0] * 3)
    assert all("throughput/device/mfu" in speeds for _, _, speeds in records.records)


# --- several ranks ---


def on_ranks(folder: str, parallel: str, watched: bool) -> tuple[list[float], list[float], Any]:
    records, weights = train(folder, *([SpeedMonitor(peak_flops=1e9)] if watched else []), parallel=parallel)
    _, _, speeds = records.records[-1]
    whole, device, mfu = (
        speeds.get(f"throughput/{name}", 0.0) for name in ("flops_per_second", "device/flops_per_second", "device/mfu")
    )
    return flops_per_sample(records), [whole / 2 / 1e9, device / 1e9, mfu], weights


@pytest.mark.test_all
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_the_flops_of_all_ranks_are_logged_and_training_is_unchanged(parallel: str, tmp_path: Path) -> None:
    """The ranks have batches of different sizes."""
    watched = run_ranks(on_ranks, 2, str(tmp_path / "watched"), parallel, True)
    bare = run_ranks(on_ranks, 2, str(tmp_path / "bare"), parallel, False)
    for (ratios, rates, weights), (_, _, bare_weights) in zip(watched, bare, strict=True):
        assert ratios == pytest.approx([PER_SAMPLE] * 2)
        assert rates == pytest.approx([rates[0]] * 3)
        assert rates == watched[0][1]
        assert weights == bare_weights


def test_rejects_bad_arguments() -> None:
    with pytest.raises(ConfigError, match="peak_flops=0"):
        SpeedMonitor(peak_flops=0)
    with pytest.raises(ConfigError, match="did you mean 'bf16'"):
        SpeedMonitor(precision="bf_16")  # type: ignore[arg-type]  # the mistake that is tested
