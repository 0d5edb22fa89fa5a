"""callsheet's callbacks in a real Lightning Trainer."""

from __future__ import annotations

import logging
import signal
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning
import pytest
import pytorch_lightning
import torch
from lightning.pytorch.callbacks import Callback as LightningCallback
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision
from packaging import version
from torch import nn
from torch.utils.data import DataLoader

from callsheet import Callback, Context
from callsheet.bridges.lightning import host
from callsheet.callbacks import (
    EMA,
    CheckpointSaver,
    EarlyStopper,
    GradientAccumulationScheduler,
    History,
    LRMonitor,
    NaNMonitor,
    OptimizerMonitor,
    SpeedMonitor,
)
from callsheet.errors import NotSupported
from callsheet.loggers import JSONLLogger, read_metrics
from callsheet.testing import Recorder, check_events, run_ranks

from .cells import RecordsLoadedSteps
from .loops.job import POINTS
from .loops.lightning import Module, quiet_trainer
from .test_lightning_fabric import trained as trained_with_fabric

torch.set_num_threads(1)
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


@pytest.fixture(autouse=True)
def _ignore_lightning_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning|pytorch_lightning")
        yield


class Recorded(LightningCallback):  # type: ignore[misc]  # Lightning's types are not read
    """Records the losses that Lightning reports."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.evaluated: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self.evaluated.append(float(trainer.callback_metrics["val_loss"]))


class Plain(Module):
    """A module without dropout, because Lightning's checkpoints contain no random states."""

    def __init__(self) -> None:
        super().__init__(POINTS)
        self.dropout.p = 0.0


def fitted(
    folder: Path, callbacks: list[Any], *, module: Any = None, validation: Any = None, ckpt_path: Any = None, **options: Any
) -> tuple[Any, Any]:
    torch.manual_seed(3)
    module = Module(POINTS) if module is None else module
    trainer = quiet_trainer(folder, callbacks, **options)
    trainer.fit(module, POINTS.batches(), POINTS.validation_batches() if validation is None else validation, ckpt_path=ckpt_path)
    return trainer, module


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


@pytest.mark.parametrize("accumulate", [1, 4])
def test_training_is_unchanged_and_every_event_is_fired(accumulate: int, tmp_path: Path) -> None:
    recorder, history, recorded = Recorder(fields=("loss", "learning_rate", "batch", "step_skipped")), History(), Recorded()
    observers = [recorder, history, SpeedMonitor(), OptimizerMonitor(), LRMonitor(), NaNMonitor()]
    options: dict[str, Any] = {"accumulate_grad_batches": accumulate, "gradient_clip_val": 0.5, "log_every_n_steps": 1}
    trainer, module = fitted(tmp_path, [host(observers), recorded], **options)
    _, alone = fitted(tmp_path, [], **options)
    assert same(module, alone)
    check_events(recorder.events)
    steps = trainer.global_step
    assert steps == {1: 12, 4: 4}[accumulate]
    assert recorder.events.count("on_train_step_end") == recorder.events.count("on_optimizer_step_end") == steps
    assert recorder.events.count("on_forward_end") == recorder.events.count("on_backward_end") == 12
    assert recorder.events.count("on_eval_all_end") == recorder.events.count("on_epoch_end") == 2
    assert recorder.events.count("on_eval_forward_end") == 6
    assert recorder.events[-1] == "on_run_end"
    groups = [recorded.losses[:6][at : at + accumulate] for at in range(0, 6, accumulate)]
    groups += [recorded.losses[6:][at : at + accumulate] for at in range(0, 6, accumulate)]
    assert history["train/loss"] == pytest.approx([sum(group) for group in groups])
    assert history["validation/loss"] == pytest.approx(recorded.evaluated)
    assert history["lightning/train_loss"][: steps - 1] == pytest.approx([group[-1] * accumulate for group in groups[:-1]])
    assert {skipped for _, skipped in recorder.values["step_skipped"]} == {False}
    assert not module._forward_hooks
    assert {"training_step", "configure_gradient_clipping"}.isdisjoint(vars(module))
    assert "save_checkpoint" not in vars(trainer)


class RecordsGradientNorms(Callback):
    """Records the gradient norm before and after clipping."""

    def __init__(self) -> None:
        self.norms: dict[str, list[float]] = {"on_clip_gradients_start": [], "on_clip_gradients_end": []}

    def _look(self, ctx: Context) -> None:
        squares = [float(parameter.grad.square().sum()) for parameter in ctx.model.parameters()]
        self.norms[str(ctx.event)].append(sum(squares) ** 0.5)

    on_clip_gradients_start = on_clip_gradients_end = _look


def test_clip_gradients_events_are_fired_before_and_after_lightning_clips(tmp_path: Path) -> None:
    records_norms = RecordsGradientNorms()
    fitted(tmp_path, [host([records_norms])], gradient_clip_val=0.1)
    before, after = records_norms.norms.values()
    assert len(before) == 12
    assert max(before) > 0.2
    assert max(after) < 0.101


class RequestsAtStep(Callback):
    """Makes a request at the end of a step."""

    def __init__(self, what: str, step: int) -> None:
        self.what, self.step = what, step

    def on_train_step_end(self, ctx: Context) -> None:
        if ctx.step == self.step:
            getattr(ctx.control, self.what)("asked")


class Fails(Callback):
    """Raises at a step."""

    def __init__(self, step: int, error: type[BaseException] = ZeroDivisionError) -> None:
        self.step, self.error = step, error

    def on_train_step_end(self, ctx: Context) -> None:
        if ctx.step == self.step:
            raise self.error


class RecordsOutcomes(Callback):
    """Records how the run ended."""

    phase = "report"
    outcome = ""

    def on_run_end(self, ctx: Context) -> None:
        self.outcome = str(ctx.run.outcome)


@pytest.mark.skipif(
    version.parse(lightning.__version__) < version.parse("2.6"), reason="Lightning before 2.6 has no intervals of time"
)
def test_requests_for_evaluations_are_rejected_if_lightning_evaluates_at_intervals_of_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fitted(tmp_path, [host([RequestsAtStep("evaluate", 3)])], val_check_interval="00:00:10:00")
    assert "calls ctx.control.evaluate, which Lightning's Trainer does not support here" in caplog.text


def test_lightning_carries_out_requests(tmp_path: Path) -> None:
    recorder, ends = Recorder(fields=("checkpoint",)), RecordsOutcomes()
    hosted = host([RequestsAtStep("save", 2), RequestsAtStep("evaluate", 3), RequestsAtStep("stop", 8), recorder, ends])
    trainer, _ = fitted(tmp_path, [hosted], val_check_interval=1.0)
    assert trainer.global_step == 8
    assert ends.outcome == "stopped"
    assert (tmp_path / "small" / "checkpoints" / "step=2.ckpt").is_file()
    recorded = [(event, info.step, info.kind) for event, info in recorder.values["checkpoint"] if info is not None]
    assert ("on_checkpoint_published", 2, "requested") in recorded
    evaluated = [
        recorded.batch for event, recorded in zip(recorder.events, recorder.recorded, strict=True) if event == "on_eval_all_end"
    ]
    assert evaluated == [3, 6, 8]  # step 3: requested; step 6: the epoch's end; step 8: Lightning evaluates before it stops
    assert trainer.check_val_every_n_epoch == 1
    check_events(recorder.events)


def test_a_requested_evaluation_is_unsupported_without_validation_batches(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fitted(tmp_path, [host([RequestsAtStep("evaluate", 1)])], limit_val_batches=0)
    assert "RequestsAtStep calls ctx.control.evaluate, which Lightning's Trainer does not support here" in caplog.text


def test_a_callback_can_replace_batch_outputs_and_loss(tmp_path: Path) -> None:
    class Replaces(Callback):
        phase = "change"

        def on_fetch_end(self, ctx: Context) -> None:
            inputs, targets = ctx.batch
            ctx.batch = [inputs * 2, targets]

        def on_forward_end(self, ctx: Context) -> None:
            ctx.outputs = ctx.outputs * 3

        def on_loss_end(self, ctx: Context) -> None:
            ctx.loss = ctx.loss * 0.5

    class ComputesReplacedLoss(Module):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            inputs, targets = batch
            return POINTS.loss(self(inputs * 2) * 3, targets) * 0.5

    _, module = fitted(tmp_path, [host([Replaces()])])
    _, other = fitted(tmp_path, [], module=ComputesReplacedLoss(POINTS))
    assert same(module, other)


def test_a_callback_can_change_the_gradient_accumulation_between_epochs(tmp_path: Path) -> None:
    recorder = Recorder()
    trainer, _ = fitted(tmp_path, [host([GradientAccumulationScheduler(schedule={1: 1, 2: 3}), recorder])])
    assert trainer.global_step == 6 + 2
    assert recorder.events.count("on_train_step_end") == 8
    check_events(recorder.events)


@pytest.mark.parametrize("averages", [False, True])
@pytest.mark.parametrize("saver", ["ModelCheckpoint", "CheckpointSaver"])
def test_a_resume_from_a_lightning_checkpoint_restores_the_callback_states(saver: str, averages: bool, tmp_path: Path) -> None:
    def more() -> list[Callback]:
        return [EMA(half_life=3)] if averages else []

    whole = History()
    _, uninterrupted = fitted(tmp_path / "whole", [host([whole, *more()])], module=Plain(), max_epochs=3)
    model_checkpoints = [ModelCheckpoint(dirpath=tmp_path / "theirs", filename="last")] if saver == "ModelCheckpoint" else []
    savers: list[Callback] = [CheckpointSaver(save_interval="1ep")] if saver == "CheckpointSaver" else []
    recorder = Recorder()
    with pytest.raises(ZeroDivisionError):
        fitted(
            tmp_path,
            [host([History(), *savers, Fails(8), recorder, *more()]), *model_checkpoints],
            module=Plain(),
            max_epochs=3,
            enable_checkpointing=bool(model_checkpoints),
        )
    check_events(recorder.events)
    assert recorder.events.count("on_checkpoint_published") == 1
    path = tmp_path / "theirs" / "last.ckpt" if model_checkpoints else tmp_path / "small" / "checkpoints" / "step=6.ckpt"
    state = torch.load(path, weights_only=True)["callbacks"]["LightningHost"]
    assert state["state"]["timestamp"]["batch"] == 6
    history, recorder, loads = History(), Recorder(), RecordsLoadedSteps()
    again, module = fitted(
        tmp_path, [host([history, *savers, recorder, loads, *more()])], module=Plain(), max_epochs=3, ckpt_path=path,
        num_sanity_val_steps=0,
    )  # fmt: skip
    assert loads.steps == [6]
    assert recorder.recorded[-1].batch == again.global_step == 18
    assert history["train/loss"] == pytest.approx(whole["train/loss"])
    assert history["validation/loss"] == pytest.approx(whole["validation/loss"])
    assert same(module, uninterrupted)
    check_events(recorder.events)


@pytest.mark.parametrize("step", [3, 6])
def test_a_resume_within_an_epoch_continues_the_step_count(step: int, tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        fitted(tmp_path, [host([RequestsAtStep("save", step), Fails(step + 1)])])
    recorder = Recorder()
    again, _ = fitted(tmp_path, [host([recorder])], ckpt_path=tmp_path / "small" / "checkpoints" / f"step={step}.ckpt")
    assert recorder.recorded[-1].batch == again.global_step
    assert recorder.recorded[-1].epoch == 2
    assert again.current_epoch == 2
    check_events(recorder.events)


def test_a_resume_without_callback_states_logs_a_warning_and_continues(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer, _ = fitted(tmp_path, [], max_epochs=1)
    trainer.save_checkpoint(tmp_path / "bare.ckpt")
    recorder = Recorder()
    fitted(tmp_path, [host([recorder])], ckpt_path=tmp_path / "bare.ckpt")
    assert "no callbacks' states were found" in caplog.text
    assert recorder.recorded[-1].batch == 12


def test_a_checkpoint_saved_after_training_has_the_callback_states(tmp_path: Path) -> None:
    trainer, _ = fitted(tmp_path, [host([History()])])
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    state = torch.load(tmp_path / "after.ckpt", weights_only=True)["callbacks"]["LightningHost"]
    assert state["state"]["timestamp"]["batch"] == 12


def test_our_early_stop_ends_training_and_lightning_s_is_reported_as_a_stop(tmp_path: Path) -> None:
    ours = EarlyStopper(monitor="validation/loss", min_delta=1e9, patience="1ep")
    trainer, _ = fitted(tmp_path, [host([ours])], max_epochs=9)
    assert trainer.current_epoch < 5
    ends = RecordsOutcomes()
    trainer, _ = fitted(tmp_path, [host([ends]), EarlyStopping("val_loss", min_delta=1e9, patience=1)], max_epochs=9)
    assert trainer.current_epoch < 5
    assert ends.outcome == "stopped"


def test_several_datasets_are_reported_by_name(tmp_path: Path) -> None:
    class TwoValidationSets(Module):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            inputs, targets = batch
            self.log("val_loss", POINTS.loss(self(inputs), targets) + dataloader_idx)

    recorder, history = Recorder(fields=("eval_name", "eval_results")), History()
    loaders = {"near": POINTS.validation_batches(), "far": POINTS.validation_batches()}
    trainer, _ = fitted(tmp_path, [host([recorder, history])], module=TwoValidationSets(POINTS), validation=loaders)
    check_events(recorder.events)
    assert [name for event, name in recorder.values["eval_name"] if event == "on_eval_start"] == ["near", "far"] * 2
    assert history["near/loss"][-1] == pytest.approx(float(trainer.callback_metrics["val_loss/dataloader_idx_0"]))
    assert history["far/loss"] == pytest.approx([value + 1 for value in history["near/loss"]])
    assert set(recorder.values["eval_results"][-1][1]) == {"near", "far"}


def test_validate_test_and_predict_are_separate_runs(tmp_path: Path) -> None:
    recorder, history = Recorder(fields=("standalone",)), History()
    trainer, module = fitted(tmp_path, [host([recorder, history])], max_epochs=1)
    batches = POINTS.validation_batches()
    recorded = len(recorder.events)
    (validated,) = trainer.validate(module, batches, verbose=False)
    check_events(recorder.events[recorded:])
    assert recorder.values["standalone"][-1][1] is True
    assert history["validation/loss"] == pytest.approx([validated["val_loss"]])
    recorded = len(recorder.events)
    (tested,) = trainer.test(module, batches, verbose=False)
    check_events(recorder.events[recorded:])
    assert recorder.events[recorded:].count("on_test_forward_end") == recorder.events[recorded:].count("on_test_step_end") == 3
    assert history["test/val_loss"] == pytest.approx([tested["val_loss"]])
    recorded = len(recorder.events)
    inputs: Any = POINTS.validation.tensors[0]
    trainer.predict(module, DataLoader(inputs, batch_size=4))
    check_events(recorder.events[recorded:])
    assert recorder.events[recorded:].count("on_predict_forward_end") == 3


def test_averaged_weights_are_used_for_evaluation_only(tmp_path: Path) -> None:
    plain, averaged = History(), History()
    fitted(tmp_path, [host([plain])])
    fitted(tmp_path, [host([EMA(half_life=3), averaged])])
    assert plain["validation/loss"] != averaged["validation/loss"]
    assert plain["train/loss"] == averaged["train/loss"]


def test_a_logger_writes_into_the_trainer_s_folder(tmp_path: Path) -> None:
    fitted(tmp_path, [host([JSONLLogger()])])
    assert [record.step for record in read_metrics(tmp_path / "small")][:3] == [2, 4, 6]


class ByHand(Module):
    """A module with manual optimization that steps two optimizers."""

    def __init__(self) -> None:
        super().__init__(POINTS)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        inputs, targets = batch
        for optimizer in self.optimizers():
            loss = POINTS.loss(self(inputs), targets)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=0.02), torch.optim.SGD(self.parameters(), lr=0.01)]


def test_with_manual_optimization_the_first_optimizer_is_observed(tmp_path: Path) -> None:
    recorder, rates = Recorder(fields=("learning_rate",)), LRMonitor()
    _, module = fitted(tmp_path, [host([recorder, rates])], module=ByHand())
    _, alone = fitted(tmp_path, [], module=ByHand())
    assert same(module, alone)
    check_events(recorder.events)
    assert recorder.events.count("on_train_step_end") == recorder.events.count("on_backward_end") == 12
    assert {rate for _, rate in recorder.values["learning_rate"]} == {0.02}


@pytest.mark.parametrize(("skipped", "accumulate"), [({0}, 1), ({0, 1}, 1), ({1}, 2)])
def test_batches_that_the_module_skips_at_first_are_no_error(skipped: set[int], accumulate: int, tmp_path: Path) -> None:
    """`training_step` returns None before the forward pass, which is Lightning's way to skip a batch."""

    class Skips(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx in skipped else super().training_step(batch, batch_idx)

    trainer = quiet_trainer(
        tmp_path, [host([SpeedMonitor(), recorder := Recorder()])], max_epochs=1, accumulate_grad_batches=accumulate
    )
    trainer.fit(Skips(POINTS), POINTS.batches())
    check_events(recorder.events)
    assert recorder.events.count("on_train_step_end") == len(POINTS.batches()) / accumulate


def test_a_forward_that_cannot_be_observed_is_rejected(tmp_path: Path) -> None:
    class ByParts(Module):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            inputs, targets = batch
            return POINTS.loss(self.head(torch.relu(self.body(inputs))), targets)

    class Listens(Callback):
        def on_forward_end(self, ctx: Context) -> None: ...

    with pytest.raises(
        NotSupported, match="Listens listens to on_forward_end, which Lightning's Trainer did not fire in its first step"
    ):
        fitted(tmp_path, [host([Listens()])], module=ByParts(POINTS))
    trainer, _ = fitted(tmp_path, [host([Listens()], strict=False)], module=ByParts(POINTS))
    assert trainer.global_step == 12


def test_the_only_child_of_a_module_is_observed_as_the_model(tmp_path: Path) -> None:
    class WrapsNetwork(Module):
        def __init__(self) -> None:
            super().__init__(POINTS)
            self.net = nn.Sequential(self.body, nn.ReLU(), self.head)
            del self.body, self.head, self.norm, self.dropout

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            inputs, targets = batch
            return POINTS.loss(self.net(inputs), targets)

        def forward(self, inputs: Any) -> Any:
            return self.net(inputs) * 2

    recorder = Recorder(fields=("outputs",))
    fitted(tmp_path, [host([recorder])], module=WrapsNetwork())
    check_events(recorder.events)
    assert recorder.events.count("on_forward_end") == 12
    assert recorder.events.count("on_eval_forward_end") == 6


@pytest.mark.parametrize("who", ["a callback", "the model"])
def test_an_exception_fails_the_run(who: str, tmp_path: Path) -> None:
    class RaisesAtEpochEnd(Module):
        def on_train_epoch_end(self) -> None:
            raise ZeroDivisionError

    ends, recorder = RecordsOutcomes(), Recorder()
    callbacks: list[Callback] = [Fails(2)] if who == "a callback" else []
    with pytest.raises(ZeroDivisionError):
        fitted(tmp_path, [host([*callbacks, ends, recorder])], module=RaisesAtEpochEnd(POINTS))
    assert ends.outcome == "failed"
    check_events(recorder.events)


def test_ctrl_c_ends_the_run_as_interrupted(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    ends = RecordsOutcomes()
    exits = version.parse(lightning.__version__) >= version.parse("2.4")
    with pytest.raises(SystemExit) if exits else nullcontext():
        fitted(tmp_path, [host([Fails(3, KeyboardInterrupt), ends])])
    signal.signal(signal.SIGINT, before)  # Lightning leaves SIGINT ignored
    assert ends.outcome == "interrupted"


@pytest.mark.parametrize("at", ["on_train_step_end", "on_eval_step_end"])
def test_sigterm_saves_a_checkpoint_and_preempts_the_run(at: str, tmp_path: Path) -> None:
    class Kills(Callback):
        def on_event(self, ctx: Context) -> None:
            if ctx.event == at and ctx.step in (3, 6):
                signal.raise_signal(signal.SIGTERM)

    ends, recorder = RecordsOutcomes(), Recorder()
    with pytest.raises(SystemExit):
        fitted(tmp_path, [host([Kills(), ends, recorder])])
    assert ends.outcome == "preempted"
    assert recorder.events.count("on_preempt") == 1
    check_events(recorder.events)
    assert (tmp_path / "small" / "checkpoints" / f"step={3 if at == 'on_train_step_end' else 6}.ckpt").is_file()


def test_fit_can_be_called_again(tmp_path: Path) -> None:
    recorder = Recorder()
    trainer, module = fitted(tmp_path, [host([recorder])])
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, POINTS.batches(), POINTS.validation_batches())
    assert recorder.events.count("on_run_start") == recorder.events.count("on_run_end") == 2
    assert recorder.recorded[-1].batch == 18


def test_a_step_that_loss_scaling_skips_is_reported_as_skipped(tmp_path: Path) -> None:
    def scaling() -> Any:
        return MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=2.0**18))

    recorder, history, recorded = Recorder(fields=("step_skipped",)), History(), Recorded()
    hosted = host([recorder, history])
    _, module = fitted(tmp_path, [hosted, recorded], plugins=[scaling()], max_epochs=1, log_every_n_steps=1)
    _, alone = fitted(tmp_path, [], plugins=[scaling()], max_epochs=1)
    assert same(module, alone)
    check_events(recorder.events)
    skipped = [value for event, value in recorder.values["step_skipped"] if event == "on_train_step_end"]
    assert skipped[0]
    assert not skipped[-1]
    assert history["train/loss"] == pytest.approx(recorded.losses, rel=1e-3)


@pytest.mark.skipif(
    version.parse(lightning.__version__) < version.parse("2.6"),
    reason="it takes no callbacks of lightning.pytorch before Lightning 2.6",
)
def test_the_host_works_in_the_trainer_of_pytorch_lightning(tmp_path: Path) -> None:
    class PytorchLightningModule(pytorch_lightning.LightningModule):  # type: ignore[misc]  # Lightning's types are not read
        def __init__(self) -> None:
            super().__init__()
            self.net = POINTS.made_model()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return POINTS.loss(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.02)

    recorder = Recorder()
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pytorch_lightning.Trainer(
        default_root_dir=tmp_path / "small", callbacks=[host([recorder])], accelerator="cpu", max_epochs=2, **options
    )
    trainer.fit(PytorchLightningModule(), POINTS.batches())
    check_events(recorder.events)
    assert recorder.events.count("on_forward_end") == 12


class OneRankStops(Callback):
    """Requests a stop on one rank."""

    def on_train_step_end(self, ctx: Context) -> None:
        if ctx.step == 1 and ctx.run.rank == 1:
            ctx.control.stop("one of two")


def train_on_rank(folder: str) -> list[Any]:
    """Return the events on a rank under DDP, in Lightning's Trainer and in a Fabric loop, in which one rank requests a stop."""
    torch.set_num_threads(1)
    received: list[Any] = []
    recorder, history = Recorder(), History()
    hosted = host([recorder, history, OneRankStops(), CheckpointSaver(save_interval="1ep")])
    trainer, _ = fitted(Path(folder), [hosted], devices=2, strategy="ddp", log_every_n_steps=1, max_epochs=4)
    received += [recorder.events, history["train/loss"], trainer.world_size, len(hosted.state_dict()["ranks"])]
    recorder, history = Recorder(), History()
    trained_with_fabric([recorder, history, OneRankStops()], Path(folder), epochs=4, devices=2, log_interval=1)
    return [*received, recorder.events, history["train/loss"]]


def test_two_ranks_fire_the_same_events_and_stop_together(tmp_path: Path) -> None:
    one, other = run_ranks(train_on_rank, 2, str(tmp_path))
    assert one == other
    events, losses, size, states, fabric_events, fabric_losses = one
    assert size == states == 2
    for recorded, numbers in ((events, losses), (fabric_events, fabric_losses)):
        check_events(recorded)
        assert recorded.count("on_forward_end") == recorded.count("on_train_step_end") == len(numbers)
        assert len(numbers) < 12  # 4 epochs of 3 steps would be 12, but training was stopped
