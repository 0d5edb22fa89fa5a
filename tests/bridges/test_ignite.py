"""callsheet's callbacks attached to a real Ignite engine."""

from __future__ import annotations

import gc
import os
import signal
from inspect import signature
from pathlib import Path
from typing import Any

import ignite.distributed as idist
import pytest
import torch
from ignite.engine import Engine, Events, create_supervised_evaluator, create_supervised_trainer
from ignite.handlers import Checkpoint, DiskSaver, ModelCheckpoint
from ignite.metrics import Loss, MeanAbsoluteError
from torch import nn

from callsheet import Callback, Context
from callsheet.bridges.ignite import host
from callsheet.callbacks import (
    EMA,
    CheckpointSaver,
    EarlyStopper,
    History,
    LRMonitor,
    NaNMonitor,
    OptimizerMonitor,
    SaveOnTrigger,
    SpeedMonitor,
)
from callsheet.errors import CheckpointError, ConfigError, DistributedError, NotSupported
from callsheet.testing import Recorder, check_events, run_ranks

from .loops.job import POINTS


def iterations(number: int) -> dict[str, int | None]:
    """Return the arguments of `Engine.run` for `number` iterations. Ignite before 0.5.5 needs one epoch of that length."""
    is_new = "max_iters" in signature(Engine.run).parameters
    return {"max_iters": number, "max_epochs": None} if is_new else {"epoch_length": number, "max_epochs": 1}


torch.set_num_threads(1)

STEPS = 6
"""Steps per epoch."""


class Setup:
    """A trainer as a user of Ignite creates it. It records its losses and the results of its evaluations."""

    def __init__(self, folder: Path, *, accumulate: int = 1, evaluates: bool = True) -> None:
        self.folder, self.accumulate = folder, accumulate
        self.model = POINTS.made_model()
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.02)
        self.trainer: Any = create_supervised_trainer(
            self.model, self.optimizer, POINTS.loss, gradient_accumulation_steps=accumulate
        )
        self.evaluator: Any = create_supervised_evaluator(self.model, {"loss": Loss(POINTS.loss), "mae": MeanAbsoluteError()})
        self.losses: list[float] = []
        self.found: list[dict[str, float]] = []
        # Seed each epoch, so that its dropout does not depend on earlier epochs.
        self.trainer.add_event_handler(Events.EPOCH_STARTED, lambda: torch.manual_seed(self.trainer.state.epoch))
        self.trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: self.losses.append(self.trainer.state.output))
        if evaluates:
            self.trainer.add_event_handler(Events.EPOCH_COMPLETED, self.evaluate)

    def evaluate(self) -> None:
        self.evaluator.run(POINTS.validation_batches())
        self.found.append(dict(self.evaluator.state.metrics))

    def host(self, callbacks: list[Callback], *, saves: bool = True, **options: Any) -> Any:
        given: dict[str, Any] = {
            "log_interval": "1ba",
            "evaluators": {"validation": self.evaluator},
            "evaluate": self.evaluate,
        } | options
        hosted = host(
            callbacks,
            model=self.model,
            optimizer=self.optimizer,
            gradient_accumulation_steps=self.accumulate,
            run_name="small",
            runs_folder=self.folder,
            **given,
        )
        self.parts = {"model": self.model, "optimizer": self.optimizer, "trainer": self.trainer, "callsheet": hosted}
        self.checkpoint: Any = Checkpoint(self.parts, DiskSaver(self.folder / "saved", require_empty=False), n_saved=None)
        return hosted.attach(self.trainer, checkpoint=self.checkpoint if saves else None)

    def run(self, **options: Any) -> None:
        self.trainer.run(POINTS.batches(), **({"max_epochs": 2} | options))

    def weights(self) -> list[torch.Tensor]:
        return [value.clone() for value in self.model.state_dict().values()]

    def files(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "saved").iterdir())


def same(a: Setup, b: Setup) -> bool:
    return all(torch.equal(one, other) for one, other in zip(a.weights(), b.weights(), strict=True))


class RequestsAtStep(Callback):
    """Makes a request at an event of a step."""

    def __init__(self, what: str, step: int, event: str = "on_train_step_end") -> None:
        self.what, self.step = what, step
        setattr(self, event, self.request)

    def request(self, ctx: Context) -> None:
        if ctx.step == self.step:
            getattr(ctx.control, self.what)("asked")


class Fails(Callback):
    """Raises at a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_step_end(self, ctx: Context) -> None:
        if ctx.step == self.step:
            raise ZeroDivisionError


class RecordsOutcomes(Callback):
    """Records how runs ended."""

    phase = "report"

    def __init__(self) -> None:
        self.outcomes: list[str] = []

    def on_run_end(self, ctx: Context) -> None:
        self.outcomes.append(str(ctx.run.outcome))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_training_is_unchanged_and_every_event_is_fired(accumulate: int, tmp_path: Path) -> None:
    recorder, history, ends = Recorder(fields=("loss", "batch", "eval_results")), History(), RecordsOutcomes()
    hosted, plain = Setup(tmp_path, accumulate=accumulate), Setup(tmp_path, accumulate=accumulate)
    hosted.host([recorder, history, ends, SpeedMonitor(), OptimizerMonitor(), LRMonitor(), NaNMonitor()])
    hosted.run()
    plain.run()
    assert same(hosted, plain)
    assert hosted.losses == plain.losses
    check_events(recorder.events)
    steps = 2 * STEPS // accumulate
    counts = {event: recorder.events.count(event) for event in set(recorder.events)}
    assert counts["on_run_start"] == counts["on_run_end"] == counts["on_train_start"] == counts["on_train_end"] == 1
    assert counts["on_epoch_start"] == counts["on_epoch_end"] == 2
    assert counts["on_train_step_end"] == counts["on_optimizer_step_end"] == counts["on_fetch_end"] == steps
    assert counts["on_microbatch_end"] == counts["on_forward_end"] == counts["on_backward_end"] == 2 * STEPS
    assert counts["on_eval_all_end"] == counts["on_eval_end"] == 2
    assert counts["on_eval_step_end"] == counts["on_eval_forward_end"] == 2 * 3
    means = [sum(plain.losses[i : i + accumulate]) / accumulate for i in range(0, 2 * STEPS, accumulate)]
    assert history["train/loss"] == pytest.approx(means, rel=1e-6)
    assert [results for _, results in recorder.values["eval_results"]] == [{"validation": found} for found in plain.found]
    assert history["validation/mae"] == [found["mae"] for found in plain.found]
    assert ends.outcomes == ["finished"]


@pytest.mark.parametrize("is_first", [True, False])
def test_the_order_of_handlers_does_not_matter(is_first: bool, tmp_path: Path) -> None:
    recorder = Recorder(fields=("checkpoint",))
    setup = Setup(tmp_path, evaluates=False)

    def attach_the_others() -> None:
        setup.trainer.add_event_handler(Events.EPOCH_COMPLETED, setup.evaluate)
        setup.trainer.add_event_handler(Events.ITERATION_COMPLETED(once=4), setup.evaluate)
        setup.trainer.add_event_handler(
            Events.EPOCH_COMPLETED | Events.ITERATION_COMPLETED(once=2), lambda: setup.checkpoint(setup.trainer)
        )

    if not is_first:
        attach_the_others()
    setup.host([recorder], evaluate=None)
    if is_first:
        attach_the_others()
    setup.run()
    check_events(recorder.events)
    recorded = [event for event in recorder.events if event in ("on_epoch_end", "on_eval_all_start", "on_checkpoint_save_end")]
    epoch = ["on_epoch_end", "on_eval_all_start", "on_checkpoint_save_end"]
    assert recorded == ["on_checkpoint_save_end", "on_eval_all_start", *epoch, *epoch]
    published = [info for event, info in recorder.values["checkpoint"] if event == "on_checkpoint_published"]
    assert [Path(info.path).name for info in published] == [f"checkpoint_{step}.pt" for step in (2, 6, 12)]
    assert [(info.step, info.epoch) for info in published] == [(2, 0), (6, 1), (12, 2)]
    for info in published:
        assert torch.load(info.path, weights_only=True)["callsheet"]["state"]["timestamp"]["batch"] == info.step


def test_evaluators_that_are_run_together_are_one_evaluation(tmp_path: Path) -> None:
    recorder = Recorder(fields=("eval_results", "standalone"))
    setup = Setup(tmp_path, evaluates=False)
    evaluators = {"seen": create_supervised_evaluator(setup.model, {"loss": Loss(POINTS.loss)}), "validation": setup.evaluator}

    def evaluate() -> None:
        evaluators["seen"].run(POINTS.batches())
        setup.evaluate()

    setup.host([recorder], evaluators=evaluators, evaluate=evaluate)
    setup.trainer.add_event_handler(Events.EPOCH_COMPLETED, evaluate)
    setup.trainer.add_event_handler(Events.STARTED | Events.ITERATION_COMPLETED(once=3), setup.evaluate)
    setup.run()
    check_events(recorder.events)
    assert [set(results) for _, results in recorder.values["eval_results"]] == [
        {"validation"}, {"validation"}, {"seen", "validation"}, {"seen", "validation"}
    ]  # fmt: skip
    assert recorder.values["eval_results"][-1][1]["seen"] == evaluators["seen"].state.metrics
    standalone = [value for event, value in recorder.values["standalone"] if event == "on_eval_all_start"]
    assert standalone == [True, False, False, False]


def test_the_engine_carries_out_requests(tmp_path: Path) -> None:
    recorder, ends = Recorder(fields=("checkpoint",)), RecordsOutcomes()
    setup = Setup(tmp_path)
    setup.host([RequestsAtStep("save", 2), RequestsAtStep("evaluate", 3), RequestsAtStep("stop", 8), recorder, ends])
    setup.run()
    assert setup.trainer.state.iteration == 8
    assert setup.files() == ["checkpoint_2.pt"]
    recorded = [(event, info.step, info.kind) for event, info in recorder.values["checkpoint"] if info is not None]
    assert ("on_checkpoint_published", 2, "requested") in recorded
    assert len(setup.found) == recorder.events.count("on_eval_all_end") == 2
    assert ends.outcomes == ["stopped"]
    check_events(recorder.events)


def test_requests_that_need_missing_arguments_are_rejected(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    setup = Setup(tmp_path)
    setup.host([RequestsAtStep("save", 2)], saves=False)
    setup.run()
    assert (
        "RequestsAtStep calls ctx.control.save, which this Ignite engine does not support here; it supports evaluate, stop."
        in caplog.text
    )
    assert "give attach(trainer, checkpoint=...) the handler that writes checkpoints" in caplog.text
    setup = Setup(tmp_path)
    setup.host([RequestsAtStep("evaluate", 2)], evaluate=None)
    setup.run()
    assert (
        "RequestsAtStep calls ctx.control.evaluate, which this Ignite engine does not support here; it supports save, stop."
        in caplog.text
    )


def test_a_callback_that_only_saves_is_rejected_if_nothing_can_be_saved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rejected = Setup(tmp_path)
    rejected.host([CheckpointSaver(save_interval="1ep")], saves=False)
    with pytest.raises(
        NotSupported,
        match=r"CheckpointSaver asks for ctx\.control\.save, which this Ignite engine does not support here; give attach",
    ):
        rejected.run()
    assert rejected.trainer.state.iteration == 0
    continued = Setup(tmp_path)
    continued.host([SaveOnTrigger()], saves=False)  # this callback makes other requests too
    continued.run()


def test_an_evaluation_requested_at_an_epoch_s_end_is_made_once(tmp_path: Path) -> None:
    recorder = Recorder()
    setup = Setup(tmp_path)
    setup.host([RequestsAtStep("evaluate", STEPS, "on_epoch_end"), recorder])
    setup.run()
    check_events(recorder.events)
    assert len(setup.found) == recorder.events.count("on_eval_all_end") == 2


def test_the_callbacks_states_are_in_its_checkpoints(tmp_path: Path) -> None:
    whole = History()
    uninterrupted = Setup(tmp_path / "whole")
    uninterrupted.host([whole, CheckpointSaver(save_interval="1ep")])
    uninterrupted.run(max_epochs=3)
    broken = Setup(tmp_path)
    broken.host([History(), CheckpointSaver(save_interval="1ep"), Fails(15)])
    with pytest.raises(ZeroDivisionError):
        broken.run(max_epochs=3)
    history, recorder = History(), Recorder(fields=("checkpoint",))
    again = Setup(tmp_path)
    again.host([history, recorder])
    Checkpoint.load_objects(again.parts, tmp_path / "saved" / "checkpoint_12.pt")
    again.run(max_epochs=3)
    assert recorder.recorded[-1].batch == again.trainer.state.iteration == 18
    loaded = next(info for event, info in recorder.values["checkpoint"] if event == "on_checkpoint_load_end")
    assert (loaded.step, loaded.epoch) == (12, 2)
    assert history["train/loss"] == whole["train/loss"]
    assert history["validation/loss"] == whole["validation/loss"]
    assert same(again, uninterrupted)
    check_events(recorder.events)


def test_states_of_another_step_are_rejected(tmp_path: Path) -> None:
    setup = Setup(tmp_path)
    setup.host([History(), RequestsAtStep("save", 4)])
    setup.run()
    again = Setup(tmp_path)
    again.host([History()])
    del again.parts["trainer"]
    Checkpoint.load_objects(again.parts, tmp_path / "saved" / "checkpoint_4.pt")
    with pytest.raises(CheckpointError, match="of step 4, and the engine resumes from step 0"):
        again.run()


def test_a_resume_without_states_logs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder()
    setup = Setup(tmp_path)
    setup.host([recorder])
    setup.trainer.load_state_dict({"iteration": 6, "epoch_length": 6, "max_epochs": 2})
    setup.run()
    assert "resumes from step 6, and no callbacks' states were loaded" in caplog.text
    assert (recorder.recorded[-1].step, recorder.recorded[-1].epoch) == (12, 2)
    check_events(recorder.events)


def test_an_early_stop_stops_it(tmp_path: Path) -> None:
    class Worse(Callback):
        phase = "change"

        def on_eval_forward_end(self, ctx: Context) -> None:
            ctx.outputs = ctx.outputs + ctx.step

    setup = Setup(tmp_path)
    setup.host([Worse(), EarlyStopper(monitor="validation/loss", patience="1ep")])
    setup.run(max_epochs=9)
    assert setup.trainer.state.epoch == 2
    assert setup.found[0]["loss"] < setup.found[1]["loss"]


def test_averaged_weights_are_used_for_evaluation_only(tmp_path: Path) -> None:
    averaged, plain = Setup(tmp_path), Setup(tmp_path)
    averaged.host([EMA(half_life=3)])
    averaged.run()
    plain.run()
    assert averaged.losses == plain.losses
    assert [found["loss"] for found in averaged.found] != [found["loss"] for found in plain.found]


def test_a_callback_may_replace_batch_and_loss(tmp_path: Path) -> None:
    class Halves(Callback):
        phase = "change"

        def on_fetch_end(self, ctx: Context) -> None:
            if ctx.batch is not None:
                ctx.batch = [part / 2 for part in ctx.batch]

        def on_loss_end(self, ctx: Context) -> None:
            ctx.loss = ctx.loss * 3

    setup, halved = Setup(tmp_path), Setup(tmp_path)
    history = History()
    setup.host([Halves(), history])
    setup.run(**iterations(1))
    torch.manual_seed(1)
    inputs, targets = next(iter(POINTS.batches()))
    expected = POINTS.loss(halved.model(inputs / 2), targets / 2).detach()
    assert setup.losses == [pytest.approx(float(expected))]  # the value that the step function returns
    assert history["train/loss"] == [pytest.approx(3 * float(expected))]  # the loss on which backward was called


def test_events_that_ignite_never_fires_are_rejected(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Listens(Callback):
        def on_predict_end(self, ctx: Context) -> None: ...

    class Evaluates(Callback):
        def on_eval_end(self, ctx: Context) -> None: ...

    def run(*callbacks: Callback, **options: Any) -> None:
        setup = Setup(tmp_path)
        setup.host(list(callbacks), **options)
        setup.run()

    with pytest.raises(NotSupported, match="Listens listens to on_predict_end, which this Ignite engine does not fire"):
        run(Listens())
    with pytest.raises(NotSupported, match="Evaluates listens to on_eval_end"):
        run(Evaluates(), evaluators=None, evaluate=None)
    run(Listens(), strict=False)
    assert "Listens listens to on_predict_end" in caplog.text


def test_events_that_the_first_step_does_not_fire_are_rejected(tmp_path: Path) -> None:
    def run(optimizer: torch.optim.Optimizer | None = None, *, strict: bool = True) -> None:
        setup = Setup(tmp_path)
        trained, setup.optimizer = setup.optimizer, optimizer or setup.optimizer
        setup.host([Recorder(), OptimizerMonitor()], strict=strict)
        setup.optimizer = trained
        setup.run()

    another = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.raises(NotSupported, match="the engine has not stepped the optimizer in its first iteration"):
        run(another)
    run(another, strict=False)
    setup = Setup(tmp_path, accumulate=4)
    setup.host([])
    with pytest.raises(
        NotSupported, match="an epoch of 6 iterations does not end with a whole step of gradient_accumulation_steps=4"
    ):
        setup.run()


def test_arguments_that_cannot_work(tmp_path: Path) -> None:
    setup = Setup(tmp_path)
    for accumulate in (0, True, 1.5):
        with pytest.raises(ConfigError, match="give a whole number above 0"):
            host([], model=setup.model, optimizer=setup.optimizer, gradient_accumulation_steps=accumulate)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="train/loss is the loss of the steps; give that dataset another name"):
        setup.host([], evaluators={"train": setup.evaluator})
    with pytest.raises(ConfigError, match="give them with evaluators="):
        setup.host([], evaluators=None)
    with pytest.raises(ConfigError, match=r"attach\(trainer, checkpoint=...\)"):
        setup.host([], saves=False, preempt_signals=["SIGTERM"])
    hosted = setup.host([])
    with pytest.raises(ConfigError, match="attached to an engine"):
        hosted.attach(setup.trainer)
    with pytest.raises(ConfigError, match="a ModelCheckpoint gets what it saves only when it is called"):
        host([], model=setup.model, optimizer=setup.optimizer).attach(
            setup.trainer, checkpoint=ModelCheckpoint(tmp_path / "other")
        )


def test_an_exception_fails_the_run(tmp_path: Path) -> None:
    ends, recorder = RecordsOutcomes(), Recorder(fields=("exception", "span"))
    setup = Setup(tmp_path)
    setup.host([Fails(2), ends])
    with pytest.raises(ZeroDivisionError):
        setup.run()
    assert ends.outcomes == ["failed"]
    setup = Setup(tmp_path)
    setup.host([ends, recorder])
    with pytest.raises(RuntimeError):
        setup.trainer.run([(torch.ones(4, 9), torch.ones(4, 1))])  # the model fails
    assert ends.outcomes == ["failed", "failed"]
    assert [type(error) for _, error in recorder.values["exception"]] == [RuntimeError]
    assert ("on_exception", "forward") in recorder.values["span"]
    check_events(recorder.events)


def test_an_exception_that_another_handler_suppresses_is_not_raised(tmp_path: Path) -> None:
    ends = RecordsOutcomes()
    kept: list[BaseException] = []
    setup = Setup(tmp_path)
    setup.host([Fails(2), ends])
    setup.trainer.add_event_handler(Events.EXCEPTION_RAISED, kept.append)
    setup.run(max_epochs=1)
    assert [type(error) for error in kept] == [ZeroDivisionError]
    assert ends.outcomes == ["failed"]


def test_ctrl_c_is_an_interruption(tmp_path: Path) -> None:
    ends = RecordsOutcomes()
    setup = Setup(tmp_path)
    setup.host([ends])

    def press() -> None:
        raise KeyboardInterrupt

    setup.trainer.add_event_handler(Events.ITERATION_STARTED(once=3), press)
    with pytest.raises(KeyboardInterrupt):
        setup.run()
    assert ends.outcomes == ["interrupted"]


def test_a_signal_preempts_the_run_after_a_save(tmp_path: Path) -> None:
    ends, recorder = RecordsOutcomes(), Recorder()
    setup = Setup(tmp_path)
    setup.host([ends, recorder], preempt_signals=["SIGUSR1"])
    setup.trainer.add_event_handler(Events.ITERATION_STARTED(once=3), lambda: os.kill(os.getpid(), signal.SIGUSR1))
    setup.run()
    assert setup.trainer.state.iteration == 3
    assert ends.outcomes == ["preempted"]
    assert setup.files() == ["checkpoint_3.pt"]
    assert "on_preempt" in recorder.events
    check_events(recorder.events)


def test_run_may_be_called_again(tmp_path: Path) -> None:
    recorder, ends = Recorder(), RecordsOutcomes()
    setup = Setup(tmp_path)
    setup.host([recorder, ends])
    setup.run(max_epochs=1)
    setup.run(max_epochs=1)
    assert ends.outcomes == ["finished", "finished"]
    assert recorder.events.count("on_train_step_end") == 2 * STEPS
    assert not setup.model._forward_hooks
    first = recorder.events.index("on_run_end") + 1
    check_events(recorder.events[:first])
    check_events(recorder.events[first:])


def terminate_trainer(setup: Setup, how: str) -> None:
    trainer = setup.trainer
    if how == "interrupt":
        trainer.interrupt()
    elif how == "terminate_epoch":
        trainer.terminate_epoch()
    elif how == "skip_epoch_completed":
        trainer.terminate_epoch(skip_epoch_completed=True)
    else:
        trainer.terminate(skip_completed=how == "skip_completed")


@pytest.mark.parametrize(
    ("how", "steps", "epochs", "outcome"),
    [
        ("terminate", 3, 0, "stopped"),
        ("skip_completed", 3, 0, "stopped"),
        ("terminate_epoch", 3 + STEPS, 2, "finished"),
        ("skip_epoch_completed", 3 + STEPS, 2, "finished"),
    ],
)
def test_all_of_ignite_s_ways_to_terminate(how: str, steps: int, epochs: int, outcome: str, tmp_path: Path) -> None:
    recorder, ends = Recorder(), RecordsOutcomes()
    setup = Setup(tmp_path)
    setup.host([recorder, ends])
    setup.trainer.add_event_handler(Events.ITERATION_COMPLETED(once=3), terminate_trainer, setup, how)
    setup.run()
    assert setup.trainer.state.iteration == recorder.recorded[-1].batch == steps
    assert recorder.recorded[-1].epoch == max(epochs, 1)
    assert ends.outcomes == [outcome]
    check_events(recorder.events)


def test_a_terminated_step_is_a_skipped_step(tmp_path: Path) -> None:
    recorder, history = Recorder(fields=("step_skipped",)), History()
    setup = Setup(tmp_path, accumulate=2, evaluates=False)
    setup.host([recorder, history], log_interval="2ba")
    setup.trainer.add_event_handler(Events.ITERATION_COMPLETED(once=5), terminate_trainer, setup, "terminate")
    setup.run()
    skipped = [value for event, value in recorder.values["step_skipped"] if event == "on_train_step_end"]
    assert skipped == [False, False, True]
    assert len(history["train/loss"]) == 2  # one record after two steps, and one at the end
    check_events(recorder.events)


def test_an_interrupted_run_continues_or_ends_as_interrupted(tmp_path: Path) -> None:
    recorder, ends = Recorder(), RecordsOutcomes()
    setup = Setup(tmp_path)
    setup.host([recorder, ends])
    setup.trainer.add_event_handler(Events.ITERATION_COMPLETED(every=4), terminate_trainer, setup, "interrupt")
    setup.run()
    assert recorder.recorded[-1].batch == 4
    assert ends.outcomes == []
    setup.run()
    setup.run()
    assert recorder.recorded[-1].batch == 2 * STEPS
    setup.run()  # it was interrupted at its last step
    assert ends.outcomes == ["finished"]
    check_events(recorder.events)
    setup = Setup(tmp_path)
    setup.host([ends])
    setup.trainer.add_event_handler(Events.ITERATION_COMPLETED(once=4), terminate_trainer, setup, "interrupt")
    setup.run()
    del setup
    gc.collect()
    assert ends.outcomes == ["finished", "interrupted"]


@pytest.mark.parametrize("data", ["endless", "unsized", "none"])
def test_data_of_any_kind(data: str, tmp_path: Path) -> None:
    batches = list(POINTS.batches())
    recorder, ends = Recorder(), RecordsOutcomes()
    setup = Setup(tmp_path, evaluates=False)
    if data == "none":

        def train(engine: Engine, batch: Any) -> float:
            setup.optimizer.zero_grad()
            inputs, targets = batches[(engine.state.iteration - 1) % STEPS]
            loss = POINTS.loss(setup.model(inputs), targets)
            loss.backward()
            setup.optimizer.step()
            return loss.item()

        setup.trainer = Engine(train)
    setup.host([recorder, ends])
    if data == "endless":  # the data starts again during an epoch
        setup.trainer.run(batches, epoch_length=4, max_epochs=3)
    elif data == "unsized":  # an epoch is as long as the data, whose length is determined during the first epoch

        class Unsized:
            def __iter__(self) -> Any:
                return iter(batches)

        setup.trainer.run(Unsized(), max_epochs=2)
    else:
        setup.trainer.run(max_epochs=2, epoch_length=STEPS)
    check_events(recorder.events)
    assert recorder.events.count("on_train_step_end") == 2 * STEPS
    assert recorder.events.count("on_epoch_end") == (3 if data == "endless" else 2)
    assert ends.outcomes == ["finished"]


class DataParallel(Setup):
    """The same setup on several ranks, each with its part of the data."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, evaluates=False)
        self.inside, self.model = self.model, idist.auto_model(self.model)
        self.trainer = create_supervised_trainer(self.model, self.optimizer, POINTS.loss)
        self.evaluator = create_supervised_evaluator(self.model, {"loss": Loss(POINTS.loss)})
        self.trainer.add_event_handler(Events.EPOCH_COMPLETED, self.evaluate)
        self.trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: self.losses.append(self.trainer.state.output))

    def evaluate(self) -> None:
        self.evaluator.run(list(POINTS.validation_batches())[idist.get_rank() :: 2])

    def run(self, **options: Any) -> None:
        torch.manual_seed(3)
        self.trainer.run(list(POINTS.batches())[idist.get_rank() :: 2], **options)

    def weights(self) -> list[Any]:
        return [value.tolist() for value in self.inside.parameters()]


def train_on_rank(folder: str) -> dict[str, Any]:
    idist.initialize("gloo")

    class RequestsStop(Callback):
        def on_train_step_end(self, ctx: Context) -> None:
            if ctx.run.rank == 1 and ctx.step == 7:
                ctx.control.stop("one rank wants to")

    recorder, history, ends = Recorder(), History(), RecordsOutcomes()
    hosted, plain = DataParallel(Path(folder)), DataParallel(Path(folder))
    hosted.host([recorder, history, ends, RequestsStop(), CheckpointSaver(save_interval="1ep")])
    hosted.run(max_epochs=40)
    plain.trainer.add_event_handler(Events.ITERATION_COMPLETED(once=hosted.trainer.state.iteration), plain.trainer.terminate)
    plain.run(max_epochs=40)
    idist.finalize()
    check_events(recorder.events)
    return {
        "step": hosted.trainer.state.iteration,
        "outcome": ends.outcomes,
        "losses": (hosted.losses, plain.losses, history["train/loss"]),
        "evaluated": history["validation/loss"],
        "weights": (hosted.weights(), plain.weights()),
    }


def test_two_ranks_train_one_model_and_stop_together(tmp_path: Path) -> None:
    zero, one = run_ranks(train_on_rank, 2, str(tmp_path))
    assert zero["step"] == one["step"] < 40 * 3
    assert zero["outcome"] == one["outcome"] == ["stopped"]
    (a, b), (c, d) = zero["weights"], one["weights"]
    assert a == b == c == d
    means = [sum(losses) / 2 for losses in zip(zero["losses"][1], one["losses"][1], strict=True)]
    assert zero["losses"][2] == pytest.approx(means, rel=1e-6)
    assert zero["evaluated"] == one["evaluated"]
    assert len(zero["evaluated"]) == zero["step"] // 3
    assert (tmp_path / "saved" / "checkpoint_6.pt").is_file()


def evaluate_on_rank_zero(folder: str) -> str:
    idist.initialize("gloo")

    class EvaluatesOnRankZero(DataParallel):
        def evaluate(self) -> None:
            if idist.get_rank() == 0:
                self.evaluator.run([0])

    setup = EvaluatesOnRankZero(Path(folder))
    setup.evaluator = Engine(
        lambda engine, batch: engine.state.metrics.update(loss=1.0)
    )  # without a metric that Ignite reduces itself
    setup.host([History()])
    with pytest.raises(DistributedError) as raised:
        setup.run(max_epochs=3)
    return str(raised.value)


def test_an_evaluator_that_only_rank_zero_runs_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    for message in run_ranks(evaluate_on_rank_zero, 2, str(tmp_path)):
        assert "the ranks call different collectives at the same time" in message


def test_a_step_during_which_the_epoch_is_terminated_ends_with_its_fields(tmp_path: Path) -> None:
    recorded: list[tuple[str, bool, bool]] = []

    class ReadsFields(Callback):
        def on_train_step_end(self, ctx: Context) -> None:
            recorded.append(("step", ctx.has("batch"), ctx.has("loss")))

        def on_epoch_end(self, ctx: Context) -> None:
            recorded.append(("epoch", ctx.has("batch"), ctx.has("loss")))

    setup = Setup(tmp_path, accumulate=2, evaluates=False)
    setup.host([ReadsFields()], saves=False)
    setup.trainer.add_event_handler(Events.ITERATION_COMPLETED(once=3), setup.trainer.terminate_epoch)
    setup.trainer.run(POINTS.batches(), max_epochs=1)
    assert recorded == [("step", True, True)] * 2 + [("epoch", False, False)]


@pytest.mark.parametrize("is_first", [True, False])
def test_an_error_is_reported_before_a_handler_that_raises_it_again(is_first: bool, tmp_path: Path) -> None:
    def handle_exception(error: BaseException) -> None:
        recorded.append(recorder.events[-2:])
        raise error

    setup, recorder, recorded = Setup(tmp_path, evaluates=False), Recorder(), list[list[str]]()
    if is_first:
        setup.trainer.add_event_handler(Events.EXCEPTION_RAISED, handle_exception)
    setup.host([recorder, Fails(3)], saves=False, strict=False)
    if not is_first:
        setup.trainer.add_event_handler(Events.EXCEPTION_RAISED, handle_exception)
    with pytest.raises(ZeroDivisionError):
        setup.run()
    assert recorded[0] == ["on_exception", "on_run_end"]  # Ignite raises the event again around it
    assert recorder.events.count("on_exception") == recorder.events.count("on_run_end") == 1
