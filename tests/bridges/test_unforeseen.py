"""If a framework does not do what its host expects, events stay in order, weights are unchanged, and training continues."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from pathlib import Path
from types import MethodType
from typing import Any

import hypothesis
import pytest
import torch
from accelerate import Accelerator
from hypothesis import strategies as st
from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from ignite.metrics import Loss
from torch import Tensor, nn
from torchtnt.framework.fit import fit
from transformers import PrinterCallback, TrainerCallback, TrainingArguments
from transformers import Trainer as HuggingFaceTrainer
from transformers.trainer_callback import CallbackHandler

from callsheet import Callback, Context, attach
from callsheet.bridges.accelerate import host as accelerate_host
from callsheet.bridges.automodel import host as automodel_host
from callsheet.bridges.hosted_run import HostedRun
from callsheet.bridges.huggingface import HuggingFaceHost
from callsheet.bridges.huggingface import host as huggingface_host
from callsheet.bridges.ignite import host as ignite_host
from callsheet.bridges.instructlab import host as instructlab_host
from callsheet.bridges.lightning import host as lightning_host
from callsheet.bridges.megatron_bridge import host as megatron_host
from callsheet.bridges.megatron_bridge import names as megatron_names
from callsheet.bridges.torchtnt import host as torchtnt_host
from callsheet.callbacks import EMA, History, NaNMonitor
from callsheet.core.lifecycle import FIELDS, is_available
from callsheet.errors import FieldNotAvailable, HostError
from callsheet.testing import Recorder, check_events

from .faults import OBSERVERS, RandomFaults, StepRecorder, assert_counts_are_right, assert_training_is_unchanged, rate_of, seeds
from .loops import automodel as automodel_loop
from .loops import huggingface as huggingface_loop
from .loops import instructlab as instructlab_loop
from .loops import keras as keras_loop
from .loops import lightning as lightning_loop
from .loops import megatron_bridge as megatron_loop
from .loops import torchtnt as torchtnt_loop
from .loops.job import POINTS, Job

import keras  # isort: skip  # after the loop, which chooses its backend

from callsheet.bridges.keras import host as keras_host  # isort: skip

STEP = (
    "train_step",
    "fetch",
    "forward_backward",
    "microbatch",
    "forward",
    "loss",
    "backward",
    "clip_gradients",
    "optimizer_step",
)
OUTER = ("train", "round", "epoch")
EVALUATION_SPANS = ("eval_all", "eval", "eval_step", "eval_forward", "test", "test_step", "predict_step")
WORDS = (
    *((word, name) for word in ("start", "end", "start_and_end") for name in STEP * 2 + OUTER),
    *((word, name) for word in ("start_eval", "end_eval") for name in EVALUATION_SPANS),
    *(
        ("host", what)
        for what in ("step", "step", "epoch", "evaluate", "dataset", "evaluated", "reported evaluation", "train", "train")
    ),
)


class ReadsAll(Callback):
    """Reads every field that should be available, at every event."""

    def __init__(self) -> None:
        self.read = 0

    def on_event(self, ctx: Context) -> None:
        assert ctx.event is not None
        for name in FIELDS:
            if is_available(name, ctx.event):
                getattr(ctx, name)
                self.read += 1


class SimulatedFramework:
    """A run whose host the test calls in any order, as a framework could. `weights` are those of training without callbacks."""

    def __init__(self, folder: Path, callbacks: list[Callback]) -> None:
        self.model = nn.Linear(3, 1)
        self.weights = self.model.weight.detach().clone()
        self.run = HostedRun(
            callbacks,
            model=self.model,
            optimizer=torch.optim.SGD(self.model.parameters(), lr=0.1),
            run_name="small",
            runs_folder=folder,
            log_interval="2ba",
        )

    def train(self) -> None:
        """Enter a step and change the weights, as every loop does."""
        self.run.driver.start("forward")
        for weights in (self.weights, self.model.weight.data):
            weights += 0.125

    def perform(self, word: str, name: str) -> None:
        run = self.run
        if word in ("start", "end", "start_and_end"):
            getattr(run.driver, word)(name)
        elif word in ("start_eval", "end_eval"):
            (run.eval.driver.start if word == "start_eval" else run.eval.driver.end)(name)
        else:
            acts: dict[str, Any] = {
                "step": run.end_step,
                "epoch": lambda: run.end_epoch(is_whole=True),
                "evaluate": lambda: run.eval.begin("validation"),
                "dataset": lambda: run.eval.end_dataset("validation", {"loss": 1.0}),
                "evaluated": run.eval.end,
                "reported evaluation": lambda: run.eval.fire({"validation": {"loss": 2.0}}),
                "train": self.train,
            }
            acts[name]()


@hypothesis.settings(max_examples=80, deadline=None)
@hypothesis.given(words=st.lists(st.sampled_from(WORDS), max_size=60))
@hypothesis.example(words=[("host", each) for each in ("train", "step", "train", "step", "evaluate")])
@hypothesis.example(words=[("host", each) for each in ("train", "step", "evaluate", "epoch", "train", "step")])
@hypothesis.example(
    words=[("host", "train"), ("host", "step"), ("start_eval", "test"), ("end", "train"), ("start_eval", "predict_step")]
)
def test_events_are_in_order_if_a_framework_adds_omits_or_reorders_calls(
    words: list[tuple[str, str]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    tmp_path = tmp_path_factory.mktemp("run")
    recorder, reads = Recorder(), ReadsAll()
    loop = SimulatedFramework(tmp_path, [EMA(half_life=2, at_end=False), NaNMonitor(), History(), recorder, reads])
    run = loop.run
    run.begin()
    for word, name in words:
        loop.perform(word, name)
        loop.run.driver.listen()
    run.finish()
    check_events(recorder.events)
    assert recorder.events[-1] == "on_run_end"
    assert torch.equal(loop.model.weight, loop.weights)
    assert [part.name for driver in (run.driver, run.eval.driver) for part in driver.opened] == ["run", "run"]
    assert reads.read


def test_a_field_that_the_host_did_not_provide_skips_the_handler_and_logs_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class ReadsLossAtLossEnd(Callback):
        def __init__(self) -> None:
            self.after = 0

        def on_loss_end(self, ctx: Context) -> None:
            _ = ctx.loss
            self.after += 1

    class Later(ReadsLossAtLossEnd):
        def on_loss_end(self, ctx: Context) -> None:
            self.after += 1

    reads, later = ReadsLossAtLossEnd(), Later()
    loop = SimulatedFramework(tmp_path, [reads, later])
    loop.run.begin()
    for _ in range(3):
        loop.train()
        loop.run.end_step()
    loop.run.finish()
    assert (reads.after, later.after) == (0, 3)
    messages = [record.message for record in caplog.records if "reads ctx.loss at on_loss_end" in record.message]
    assert len(messages) == 1
    assert "training continues" in messages[0]


def test_reading_a_field_outside_its_window_raises_field_not_available(tmp_path: Path) -> None:
    class ReadsLossAtStepStart(Callback):
        def on_train_step_start(self, ctx: Context) -> None:
            _ = ctx.loss

    loop = SimulatedFramework(tmp_path, [ReadsLossAtStepStart()])
    loop.run.begin()
    with pytest.raises(FieldNotAvailable, match=r"ctx\.loss is not available at on_train_step_start"):
        loop.train()
    loop.run.fail(ZeroDivisionError())


def test_an_evaluation_whose_end_is_not_reported_ends_before_the_next_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder()
    loop = SimulatedFramework(tmp_path, [EMA(half_life=1, at_end=False), recorder])
    run = loop.run
    run.begin()
    for _ in range(3):
        loop.train()
        run.end_step()
        run.eval.begin("validation")
        assert not torch.equal(loop.model.weight, loop.weights)  # the model has the averaged weights here
    loop.train()
    assert torch.equal(loop.model.weight, loop.weights)
    run.finish()
    check_events(recorder.events)
    assert recorder.events.count("on_eval_all_end") == 3
    assert sum("was not reported" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("kind", ["eval_all", "test", "predict"])
def test_an_evaluation_whose_start_is_not_reported_starts_at_the_last_trained_step(kind: str, tmp_path: Path) -> None:
    class RecordsStepAtStart(Callback):
        def __init__(self) -> None:
            self.positions: list[tuple[int, int]] = []

        def on_event(self, ctx: Context) -> None:
            if ctx.event == f"on_{kind}_start":
                self.positions.append((ctx.step, ctx.epoch))

    records_positions = RecordsStepAtStart()
    loop = SimulatedFramework(tmp_path, [records_positions])
    run = loop.run
    run.begin()
    for _ in range(2):
        loop.train()
        run.end_step()
        if kind == "eval_all":
            run.eval.driver.start("eval_step")
            run.eval.end()
    run.finish_training()
    if kind != "eval_all":
        run.eval.driver.start(f"{kind}_step")
    run.lifetime.end()
    assert records_positions.positions == ([(1, 1), (2, 1)] if kind == "eval_all" else [(2, 1)])


SEEDS = seeds()


@pytest.mark.usefixtures("counts_may_differ")
@pytest.mark.parametrize("seed", SEEDS)
def test_ignite_with_random_faults(seed: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def trained(recorder: StepRecorder | None) -> nn.Module:
        torch.manual_seed(3)
        job = POINTS if recorder is None else recorder.job
        model = job.made_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        trainer: Any = create_supervised_trainer(model, optimizer, job.loss)
        evaluator: Any = create_supervised_evaluator(model, {"loss": Loss(POINTS.loss)})
        trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run(POINTS.validation_batches()))
        if recorder is not None:
            hosted: Any = ignite_host(
                [*(make() for make in OBSERVERS), recorder], model=model, optimizer=optimizer, strict=False,
                evaluators={"validation": evaluator}, run_name="small", runs_folder=tmp_path, log_interval=1,
            )  # fmt: skip
            of_trainer = ("get_batch_started", "get_batch_completed", "iteration_started", "iteration_completed", "epoch_started")
            of_evaluator = ("started", "iteration_started", "iteration_completed", "completed")
            names = (*of_trainer, "epoch_completed", *(f"evaluation_{name}" for name in of_evaluator))
            RandomFaults(hosted, tuple(f"_{name}" for name in names), seed)
            hosted.attach(trainer)
        trainer.run(POINTS.batches(), max_epochs=3)
        return model

    recorder = StepRecorder()
    assert_training_is_unchanged(recorder, trained(None), trained(recorder))
    assert_counts_are_right(recorder, 18, 3, caplog)


@pytest.mark.usefixtures("counts_may_differ")
@pytest.mark.parametrize("seed", SEEDS)
def test_lightning_with_random_faults(seed: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def trained(recorder: StepRecorder | None) -> nn.Module:
        torch.manual_seed(3)
        module = lightning_loop.Module(POINTS if recorder is None else recorder.job)
        hosted: list[Any] = []
        if recorder is not None:
            hosted = [lightning_host([*(make() for make in OBSERVERS), recorder], strict=False)]
            steps = ("on_train_batch_start", "on_before_optimizer_step", "on_train_batch_end")
            epochs = ("on_train_epoch_start", "on_train_epoch_end")
            evaluation_events = (
                "on_validation_start",
                "on_validation_batch_start",
                "on_validation_batch_end",
                "on_validation_end",
            )
            RandomFaults(hosted[0], (*steps, *epochs, *evaluation_events), seed)
        lightning_loop.quiet_trainer(tmp_path, hosted, num_sanity_val_steps=0).fit(
            module, POINTS.batches(), POINTS.validation_batches()
        )
        return module

    recorder = StepRecorder()
    assert_training_is_unchanged(recorder, trained(None), trained(recorder))
    assert_counts_are_right(recorder, 12, 2, caplog)


@pytest.mark.usefixtures("counts_may_differ")
@pytest.mark.parametrize("seed", sorted({*SEEDS, 34, 163}))
def test_torchtnt_with_random_faults(seed: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def trained(recorder: StepRecorder | None) -> nn.Module:
        torch.manual_seed(3)
        unit = torchtnt_loop.Unit(POINTS if recorder is None else recorder.job)
        hosted: list[Any] = []
        if recorder is not None:
            hosted = [
                torchtnt_host([*(make() for make in OBSERVERS), recorder], strict=False, run_name="small", runs_folder=tmp_path)
            ]
            names = ("on_train_epoch_start", "on_train_step_start", "on_train_step_end", "on_train_epoch_end")
            evaluation_events = ("on_eval_start", "on_eval_step_start", "on_eval_step_end", "on_eval_end")
            RandomFaults(hosted[0], (*names, *evaluation_events), seed)
        fit(unit, POINTS.batches(), POINTS.validation_batches(), max_epochs=3, callbacks=hosted)
        module: nn.Module = unit.module
        return module

    recorder = StepRecorder()
    assert_training_is_unchanged(recorder, trained(None), trained(recorder))
    assert_counts_are_right(recorder, 18, 3, caplog)


@pytest.mark.usefixtures("counts_may_differ")
@pytest.mark.parametrize("seed", sorted({*SEEDS, 14, 28}))
def test_instructlab_with_random_faults(seed: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def trained(name: str, recorder: StepRecorder | None) -> nn.Module:
        torch.manual_seed(3)
        manager = instructlab_loop.API.CallbackManager()
        if recorder is not None:
            hosted = instructlab_host([History(), recorder], strict=False)
            steps = ("step_begin", "before_forward", "after_backward", "pre_optimizer_step", "optimizer_step", "log", "step_end")
            between = ("epoch_begin", "epoch_end", "evaluate", "save")
            RandomFaults(hosted.host, tuple(f"on_{name}" for name in (*steps, *between)), seed)
            manager.add_callback(hosted)
        job = POINTS if recorder is None else recorder.job
        loop = instructlab_loop.Training(job, manager, tmp_path / name, epochs=3, steps_an_epoch=4, evaluate=True)
        loop.save_samples, loop.checkpoint_at_epoch, loop.save_last = 8, True, True
        loop.run()
        return loop.model

    recorder = StepRecorder()
    assert_training_is_unchanged(recorder, trained("plain", None), trained("observed", recorder))
    assert_counts_are_right(recorder, 12, 3, caplog)
    assert "failed" not in caplog.text


@pytest.mark.usefixtures("counts_may_differ")
@pytest.mark.parametrize("seed", SEEDS)
def test_automodel_with_random_faults(seed: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def trained(name: str, recorder: StepRecorder | None) -> nn.Module:
        torch.manual_seed(3)
        hosted: list[Any] = []
        if recorder is not None:
            hosted = [automodel_host([*(make() for make in OBSERVERS), recorder], strict=False)]
            RandomFaults(hosted[0], ("on_train_batch_end", "on_validation_end", "on_save_checkpoint"), seed)
        job = POINTS if recorder is None else recorder.job
        recipe = automodel_loop.Recipe(job, tmp_path / name, hosted, num_epochs=3, val_every_steps=4, ckpt_every_steps=4)
        recipe.setup()
        recipe.run_train_validation_loop()
        assert not {"_run_train_optim_step", "_run_validation_epoch"} & set(vars(recipe))
        assert recipe.step_scheduler.step == 18
        model: nn.Module = recipe.model_parts[0]
        return model

    recorder = StepRecorder()
    assert_training_is_unchanged(recorder, trained("plain", None), trained("observed", recorder))
    assert_counts_are_right(recorder, 18, 3, caplog)


@pytest.mark.usefixtures("counts_may_differ")
@pytest.mark.parametrize("seed", SEEDS)
def test_keras_with_random_faults(seed: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def trained(recorder: StepRecorder | None) -> Any:
        torch.manual_seed(3)
        model = keras_loop.compiled(POINTS if recorder is None else recorder.job)
        hosted: list[Any] = []
        if recorder is not None:
            observers = [*(make() for make in OBSERVERS), recorder]
            hosted = [keras_host(observers, strict=False, run_name="small", runs_folder=tmp_path, log_interval=1)]
            RandomFaults(hosted[0], ("on_epoch_begin", "on_epoch_end", "on_test_begin", "on_test_end"), seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            data = {"validation_data": POINTS.validation_batches(), "epochs": 4}
            history = model.fit(POINTS.batches(), callbacks=hosted, verbose=0, **data)
        assert len(history.history["loss"]) == 4
        assert "apply" not in vars(model.optimizer)
        return model

    recorder = StepRecorder()
    observed = trained(recorder)
    assert_training_is_unchanged(recorder, trained(None), observed)
    assert_counts_are_right(recorder, int(observed.optimizer.iterations), 4, caplog)


@pytest.mark.usefixtures("counts_may_differ")
def test_a_difference_in_counts_is_recorded_if_keras_s_host_misses_steps(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Rebuilds(keras.callbacks.Callback):  # type: ignore[misc]  # Keras's types are not read
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if self.model.optimizer.iterations == 9:
                self.model.make_train_function(force=True)  # without the host's wrapper

    recorder = StepRecorder()
    model = keras_loop.compiled(recorder.job)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.fit(POINTS.batches(), epochs=3, verbose=0, callbacks=[keras_host([recorder], runs_folder=tmp_path), Rebuilds()])
    assert_counts_are_right(recorder, int(model.optimizer.iterations), 3, caplog)
    assert recorder.inexact.startswith("Keras has counted 12 steps, and callsheet 9")


@pytest.mark.usefixtures("counts_may_differ")
@pytest.mark.parametrize("seed", SEEDS)
def test_megatron_with_random_faults(seed: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def trained(name: str, recorder: StepRecorder | None) -> nn.Module:
        cfg = megatron_loop.configuration(tmp_path / name / "checkpoints", train__eval_interval=4, checkpoint__save_interval=3)
        hosted: list[Any] = []
        if recorder is not None:
            hosted = [megatron_host([*(make() for make in OBSERVERS), recorder], strict=False)]
            steps = ("on_train_step_start", "on_train_step_end", "on_checkpoint_save")
            evaluation_events = ("on_eval_start", "on_eval_step_start", "on_eval_step_end", "on_eval_end")
            tested = ("on_test_start", "on_test_step_start", "on_test_step_end")  # without `on_test_end`, which ends the run
            faults = RandomFaults(hosted[0], (), seed)
            for name in (*steps, *evaluation_events, *tested):  # Megatron's manager accepts only methods
                call = faults.around(getattr(hosted[0], name))
                setattr(hosted[0], name, MethodType(lambda self, context, call=call: call(context), hosted[0]))
        job = POINTS if recorder is None else recorder.job
        loop = megatron_loop.Loop(cfg, job, hosted or None, names=megatron_names)
        model = loop.run()
        assert loop.state.train_state.step == 12
        assert cfg.checkpoint.save_interval == 3
        return model

    recorder = StepRecorder()
    assert_training_is_unchanged(recorder, trained("plain", None), trained("observed", recorder))
    assert_counts_are_right(recorder, 12, 0, caplog)


class FaultyHandler(CallbackHandler):  # type: ignore[misc]  # transformers' types are not read
    """The Trainer's callback handler with faults: it skips, repeats and reorders the events that callsheet's host receives."""

    drawn: random.Random
    rate: float
    callbacks: list[Any]

    def call_event(self, event: str, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        all_callbacks = self.callbacks
        self.callbacks = [each for each in all_callbacks if not isinstance(each, HuggingFaceHost)]
        super().call_event(event, args, state, control, **kwargs)
        self.callbacks = [each for each in all_callbacks if isinstance(each, HuggingFaceHost)]
        made = self.__dict__.setdefault("made", [])
        calls: list[tuple[str, dict[str, Any]]] = [(event, kwargs)]
        if event not in ("on_init_end", "on_train_begin", "on_train_end"):
            made.append(calls[0])
            if self.drawn.random() < self.rate:
                calls = self.drawn.choice([[], calls * 2, [self.drawn.choice(made), *calls]])
        for name, given in calls:
            super().call_event(name, args, state, control, **given)
        self.callbacks = all_callbacks
        return control


def huggingface_trainer(folder: Path, *callbacks: Any, kind: type = HuggingFaceTrainer, job: Job = POINTS) -> Any:
    model = huggingface_loop.with_loss(job)
    arguments = TrainingArguments(
        str(folder / "small"), num_train_epochs=3, per_device_train_batch_size=2, per_device_eval_batch_size=4,
        gradient_accumulation_steps=2, train_sampling_strategy="sequential", logging_steps=2, eval_strategy="steps", eval_steps=4,
        save_strategy="steps", save_steps=8, report_to=[], disable_tqdm=True, seed=3, use_cpu=True,
    )  # fmt: skip
    rows = [huggingface_loop.Rows(data) for data in (POINTS.train, POINTS.validation)]
    trainer: Any = kind(model, arguments, train_dataset=rows[0], eval_dataset=rows[1], callbacks=list(callbacks))
    trainer.remove_callback(PrinterCallback)
    return trainer


@pytest.mark.usefixtures("counts_may_differ")
@pytest.mark.parametrize("seed", SEEDS)
def test_huggingface_with_random_faults(seed: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain = huggingface_trainer(tmp_path / "plain")
    plain.train()
    recorder = StepRecorder()
    hosted = huggingface_host([*(make() for make in OBSERVERS), recorder], strict=False)
    observed = huggingface_trainer(tmp_path / "observed", hosted, job=recorder.job)
    observed.callback_handler.__class__ = FaultyHandler
    observed.callback_handler.drawn, observed.callback_handler.rate = random.Random(seed), rate_of(seed)
    observed.train()
    assert observed.state.global_step == 18
    assert_training_is_unchanged(recorder, plain.model, observed.model)
    assert_counts_are_right(recorder, 18, 3, caplog)
    assert not {"training_step", "compute_loss", "prediction_step", "evaluate"} & set(vars(observed))
    assert "callsheet cannot follow" not in caplog.text  # the host does not disable itself


class RecordsOutcomes(Callback):
    """Records how the run ends after its host has disabled itself."""

    def __init__(self) -> None:
        self.recorded: list[Any] = []

    def on_exception(self, ctx: Context) -> None:
        self.recorded.append(type(ctx.exception))

    def on_run_end(self, ctx: Context) -> None:
        self.recorded.append(ctx.run.outcome)


def assert_host_disabled_itself(
    ends: RecordsOutcomes, caplog: pytest.LogCaptureFixture, plain: nn.Module, observed: nn.Module
) -> None:
    assert ends.recorded == [HostError, "failed"]
    failed = [record for record in caplog.records if "callsheet cannot follow" in record.message]
    assert len(failed) == 1
    assert failed[0].exc_info
    assert all(torch.equal(one, other) for one, other in zip(plain.parameters(), observed.parameters(), strict=True))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in observed.modules())


class LogsRows(HuggingFaceTrainer):  # type: ignore[misc]
    """Logs a list instead of a dictionary, after a few steps."""

    def log(self, logs: Any, *args: Any, **kwargs: Any) -> None:
        if self.state.global_step > 4:
            self.callback_handler.on_log(self.args, self.state, self.control, list(logs.items()))


def test_the_hugging_face_host_disables_itself_after_logs_of_a_wrong_type(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def trained(*callbacks: Any) -> Any:
        trainer = huggingface_trainer(tmp_path, *callbacks, kind=LogsRows)
        trainer.train()
        return trainer

    ends = RecordsOutcomes()
    plain, observed = trained(), trained(huggingface_host([ends, EMA(half_life=2, at_end=False)]))
    assert_host_disabled_itself(ends, caplog, plain.model, observed.model)
    assert not {"training_step", "compute_loss", "prediction_step", "evaluate"} & set(vars(observed))


@pytest.mark.parametrize("where", ["train", "eval"])
def test_the_hugging_face_host_disables_itself_after_an_error_in_its_hook(
    where: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found: list[float] = []
    calls: list[int] = []

    class Counts(HuggingFaceTrainer):  # type: ignore[misc]
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            calls.append(self.state.global_step)
            return super().training_step(*args, **kwargs)

        def evaluate(self, *args: Any, **kwargs: Any) -> Any:
            metrics = super().evaluate(*args, **kwargs)
            found.append(metrics["eval_loss"])
            return metrics

    class BreaksHost(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 4:
                hooks: Any = hosted._forward
                if where == "eval":
                    hooks.name_of_dataset = None  # an error of the host's own, while EMA's weights are in the model
                else:
                    hooks._begin_microbatch = None

    plain = huggingface_trainer(tmp_path / "plain", kind=Counts)
    plain.train()
    expected, expected_calls = found[:], calls[:]
    found.clear()
    calls.clear()
    ends = RecordsOutcomes()
    hosted = huggingface_host([ends, EMA(half_life=2, at_end=False)])
    observed = huggingface_trainer(tmp_path / "observed", hosted, BreaksHost(), kind=Counts)
    observed.train()
    assert_host_disabled_itself(ends, caplog, plain.model, observed.model)
    assert calls == expected_calls
    assert found[1:] == expected[1:]  # the trained weights were restored


def test_the_automodel_host_disables_itself_after_metrics_of_a_wrong_type(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class SendsMetricsAlone(automodel_loop.Recipe):
        def _run_train_optim_step(self, batches: list[Any]) -> Any:
            sample = super()._run_train_optim_step(batches)
            if self.step_scheduler.step == 4:
                self.callback_runner.on_train_batch_end(self, train_log_data=sample.metrics)  # a dict instead of a MetricsSample
            return sample

    def trained(name: str, *callbacks: Any) -> nn.Module:
        torch.manual_seed(3)
        recipe = SendsMetricsAlone(POINTS, tmp_path / name, callbacks, num_epochs=2)
        recipe.setup()
        recipe.run_train_validation_loop()
        assert not {"_run_train_optim_step", "_run_validation_epoch"} & set(vars(recipe))
        model: nn.Module = recipe.model_parts[0]
        return model

    ends = RecordsOutcomes()
    assert_host_disabled_itself(
        ends, caplog, trained("plain"), trained("observed", automodel_host([ends, EMA(half_life=2, at_end=False), NaNMonitor()]))
    )


def test_the_keras_host_disables_itself_after_a_log_that_is_not_a_number(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Confusion(keras_loop.Model):
        def train_step(self, data: Any) -> Any:
            return {**super().train_step(data), "confusion": torch.zeros(2, 2)}

    def trained(*callbacks: Any) -> tuple[Any, list[float]]:
        torch.manual_seed(3)
        keras.utils.clear_session(free_memory=False)
        model = Confusion(POINTS)
        model.compile(optimizer=keras.optimizers.AdamW(learning_rate=0.02))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            history = model.fit(
                POINTS.batches(), validation_data=POINTS.validation_batches(), epochs=3, callbacks=list(callbacks), verbose=0
            )
        return model, history.history["val_loss"]

    plain, expected = trained()
    ends = RecordsOutcomes()
    observed, found = trained(
        keras_host([ends, EMA(half_life=2, at_end=False)], run_name="small", runs_folder=tmp_path, log_interval="1ba")
    )
    assert_host_disabled_itself(ends, caplog, plain.inner.module, observed.inner.module)
    assert found[1:] == expected[1:]
    assert "apply" not in vars(observed.optimizer)


def test_the_megatron_host_disables_itself_after_losses_of_a_wrong_type(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Lists(megatron_loop.Loop):
        def step(self, batches: Any) -> Any:
            losses, norm, skipped = super().step(batches)
            return list(losses.items()) if self.state.train_state.step == 4 else losses, norm, skipped

    def trained(name: str, *callbacks: Any) -> nn.Module:
        cfg = megatron_loop.configuration(tmp_path / name / "checkpoints")
        loop = Lists(cfg, POINTS, list(callbacks) or None, names=megatron_names)
        model = loop.run()
        assert loop.state.train_state.step == 12
        assert cfg.checkpoint.save_interval == 1000
        return model

    ends = RecordsOutcomes()
    observed = trained("observed", megatron_host([ends, EMA(half_life=2, at_end=False), NaNMonitor()]))
    assert_host_disabled_itself(ends, caplog, trained("plain"), observed)


@pytest.mark.parametrize("loop", [huggingface_loop, automodel_loop, keras_loop, megatron_loop], ids=lambda loop: loop.NAME)
def test_an_error_of_a_callback_still_ends_training(loop: Any, tmp_path: Path) -> None:
    class Fails(Callback):
        def on_train_step_end(self, ctx: Context) -> None:
            if ctx.step == 4:
                raise ZeroDivisionError

    ends = RecordsOutcomes()
    with pytest.raises(ZeroDivisionError):
        loop.train(POINTS, tmp_path, [Fails(), ends])
    assert ends.recorded == [ZeroDivisionError, "failed"]


def test_the_ignite_host_disables_itself_after_an_error_of_its_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = POINTS.made_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    trainer: Any = create_supervised_trainer(model, optimizer, POINTS.loss)
    ends = RecordsOutcomes()
    hosted = ignite_host([ends, EMA(half_life=2)], model=model, optimizer=optimizer, run_name="small", runs_folder=tmp_path)
    hosted.attach(trainer)

    def break_host() -> None:
        hosted._training = None  # type: ignore[assignment]  # an error of the host's own

    trainer.add_event_handler(Events.GET_BATCH_COMPLETED(once=5), break_host)
    trainer.run(POINTS.batches(), max_epochs=2)
    assert trainer.state.epoch == 2
    assert ends.recorded == [HostError, "failed"]
    failed = [record for record in caplog.records if "cannot follow this Ignite engine" in record.message]
    assert len(failed) == 1
    assert failed[0].exc_info
    assert not model._forward_hooks


class LoopWithRandomCalls:
    """A hand-written loop, with Accelerate or without, that randomly skips, repeats and reorders its calls.

    The calls depend only on the seed, so that runs with and without a host make the same calls. `at_batch` is called before each batch.
    """

    def __init__(self, seed: int, *, accelerated: bool) -> None:
        self.drawn = random.Random(seed)
        self.model = POINTS.made_model()
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=0.02)
        self.hook_calls = 0
        self.batches: Any = POINTS.batches()
        self.called: nn.Module = self.model
        self.accelerator = None
        if accelerated:
            self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
            self.called, self.optimizer, self.batches = self.accelerator.prepare(self.model, self.optimizer, self.batches)
        self.given = 0

    def attach(self, callbacks: list[Callback], folder: Path, **options: Any) -> Any:
        options |= {"run_name": "small", "runs_folder": folder, "log_interval": 1, "strict": False}
        if self.accelerator is None:
            return attach(
                model=self.called, optimizer=self.optimizer, callbacks=callbacks, gradient_accumulation_steps=2, **options
            )
        return accelerate_host(callbacks, accelerator=self.accelerator, model=self.called, optimizer=self.optimizer, **options)

    def backward(self, loss: Tensor) -> None:
        if self.accelerator is None:
            loss.backward()
        else:
            self.accelerator.backward(loss)

    def train(self, run: Any, at_batch: Callable[[int], None] = lambda given: None, *, is_random: bool = True) -> None:
        torch.manual_seed(3)
        for _ in range(4):
            batches: Iterable[Any] = self.batches if run is None else run.steps(self.batches)
            for inputs, targets in batches:
                at_batch(self.given)
                self.given += 1
                with nullcontext() if self.accelerator is None else self.accelerator.accumulate(self.called):
                    self.batch(inputs, targets, run, is_random=is_random)
                if is_random and self.drawn.random() < 0.05:
                    break
            if run is not None:
                run.evaluated({"validation": {"loss": 1.0}})

    def batch(self, inputs: Tensor, targets: Tensor, run: Any, *, is_random: bool) -> None:
        calls = ["zero", "forward", "backward", "clip", "step"]
        if is_random and self.drawn.random() < 0.5:
            others = ["caught", "evaluate", "without gradients", "reported", "logged"]
            how = self.drawn.randrange(4)
            if how == 0:
                calls.remove(self.drawn.choice(calls))
            elif how == 1:
                calls.insert(self.drawn.randrange(5), self.drawn.choice(calls))
            elif how == 2:
                self.drawn.shuffle(calls)
            else:
                calls.insert(self.drawn.randrange(5), self.drawn.choice(others))
        loss = None
        for call in calls:
            if call == "zero":
                self.optimizer.zero_grad()
            elif call == "forward":
                loss = POINTS.loss(self.called(inputs), targets)
            elif call == "backward":
                if loss is None:  # a backward pass without a forward pass
                    loss = sum((weight.square().sum() for weight in self.model.parameters()), start=torch.tensor(0.0))
                with suppress(RuntimeError):  # raised if the weights have changed since the forward pass
                    self.backward(loss)
                loss = None
            elif call == "clip":
                clip: Any = nn.utils.clip_grad_norm_ if self.accelerator is None else self.accelerator.clip_grad_norm_
                clip(self.model.parameters(), 1.0)
            elif call == "step":
                self.optimizer.step()
            elif call == "caught":
                with pytest.raises(RuntimeError):
                    self.called(inputs[:, :1])
            elif call == "evaluate":
                self.called.eval()
                self.called(inputs)
                self.called.train()
            elif call == "without gradients":
                with torch.no_grad():
                    self.called(inputs)
            elif run is not None:
                run.evaluated({"validation": {"loss": 1.0}}) if call == "reported" else run.log({"mine": 1.0})


def hooks_of(optimizer: Any) -> list[Any]:
    optimizer = getattr(optimizer, "optimizer", optimizer)
    return [*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()]


@pytest.mark.parametrize("accelerated", [False, True])
@pytest.mark.usefixtures("counts_may_differ")
@pytest.mark.parametrize("seed", SEEDS)
def test_a_hand_written_loop_with_random_faults(
    seed: int, accelerated: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain, observed = (LoopWithRandomCalls(seed, accelerated=accelerated) for _ in range(2))
    plain.train(None)
    recorder, backward = Recorder(), Tensor.backward
    with observed.attach([*(make() for make in OBSERVERS), recorder], tmp_path) as run:
        observed.train(run)
    assert_training_is_unchanged(recorder, plain.model, observed.model)
    assert not hooks_of(observed.optimizer)
    assert Tensor.backward is backward
    assert "cannot follow" not in caplog.text


FAULTS: dict[str, Callable[[Any], Any]] = {
    "forward": lambda run: setattr(run._hooks.forward, "_ctx", None),
    "backward": lambda run: setattr(run._hooks.backward, "_ctx", None),
    "optimizer step": lambda run: setattr(run._hooks.optimizer, "_own", None),
    "optimizer step's end": lambda run: run._run._optimizer.register_step_pre_hook(  # it runs after the host's hook
        lambda *_: setattr(run._hooks.optimizer, "_own", None)
    ),
    "position in the data": lambda run: setattr(run._position, "taken", None),
    "end of the step": lambda run: setattr(run._run, "counted", None),
}


@pytest.mark.parametrize("accelerated", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("at", [0, 3])
def test_the_host_of_a_hand_written_loop_disables_itself_after_an_error_of_its_own(
    at: int, fault: str, accelerated: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain, observed = (LoopWithRandomCalls(0, accelerated=accelerated) for _ in range(2))
    plain.train(None, is_random=False)
    recorder, backward, seen = Recorder(), Tensor.backward, []
    attached = observed.attach([*(make() for make in OBSERVERS), recorder], tmp_path)
    with attached as run:
        inside = getattr(observed.optimizer, "optimizer", observed.optimizer)
        inside.register_step_pre_hook(lambda *_: seen.append("pre"))
        inside.register_step_post_hook(lambda *_: seen.append("post"))
        observed.train(run, lambda given: FAULTS[fault](attached) if given == at else None, is_random=False)
        run.log({"mine": 1.0})
    assert_training_is_unchanged(recorder, plain.model, observed.model)
    assert observed.given == plain.given
    assert all(hook.__name__ == "<lambda>" for hook in hooks_of(observed.optimizer))  # the user's hook
    assert seen
    assert seen == ["pre", "post"] * (len(seen) // 2)
    assert Tensor.backward is backward
    assert recorder.events[-2:] == ["on_exception", "on_run_end"]
    assert caplog.text.count("callsheet cannot follow") == 1


@pytest.mark.parametrize("accelerated", [False, True])
@pytest.mark.parametrize("duration", ["9ba", "2ep", "30sp"])
def test_training_ends_at_its_duration_after_the_host_has_failed(duration: str, accelerated: bool, tmp_path: Path) -> None:
    healthy, failing = (LoopWithRandomCalls(0, accelerated=accelerated) for _ in range(2))
    for loop in (healthy, failing):
        attached = loop.attach([Recorder()], tmp_path / str(loop is failing), max_duration=duration)
        with attached as run:
            fails = [3] if loop is failing else []
            for _ in range(9):
                loop.train(run, lambda given: FAULTS["forward"](attached) if given in fails else None, is_random=False)  # noqa: B023
            assert run.is_over
    if duration != "30sp":  # samples are counted in full only at boundaries
        assert failing.given == healthy.given
