"""Ignite's handlers do the same in an Ignite engine and as guests in callsheet's Trainer."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from ignite.engine import Engine, EventEnum, Events, create_supervised_evaluator, create_supervised_trainer
from ignite.handlers import (
    Checkpoint,
    EarlyStopping,
    EMAHandler,
    EpochOutputStore,
    FastaiLRFinder,
    HandlersTimeProfiler,
    LinearCyclicalScheduler,
    LRScheduler,
    ModelCheckpoint,
    ProgressBar,
    TerminateOnNan,
    TimeLimit,
    Timer,
    global_step_from_engine,
)
from ignite.metrics import Loss, MeanAbsoluteError, RunningAverage
from torch import nn

from callsheet import Callback, Context, Trainer
from callsheet.bridges.ignite import GuestEngine, guest
from callsheet.bridges.matrix import Cell
from callsheet.callbacks import CheckpointSaver, History
from callsheet.errors import NotSupported, RegistrationError

from .loops.job import POINTS
from .rows import check_or_write_cell

torch.set_num_threads(1)

EPOCHS, STEPS = 4, 6

Attach = Callable[["TrainingSetup"], Callable[[], Any]]
"""Attaches a handler as a user of Ignite does. Returns a function that returns the handler's results after training."""


class TrainingSetup:
    """A model to train, and engines that train it, or placeholders for them."""

    def __init__(self, folder: Path, trainer: Any, evaluator: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.folder, self.trainer, self.evaluator, self.model, self.optimizer = folder, trainer, evaluator, model, optimizer


def made(rate: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -0.5, 0.5, generator=generator)
    return model, torch.optim.SGD(model.parameters(), lr=rate)


def in_framework(folder: Path, attach: Attach, rate: float) -> tuple[int, Any, nn.Module]:
    model, optimizer = made(rate)
    trainer: Any = create_supervised_trainer(model, optimizer, POINTS.loss)
    evaluator: Any = create_supervised_evaluator(model, {"loss": Loss(POINTS.loss)})
    result = attach(TrainingSetup(folder, trainer, evaluator, model, optimizer))
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run(POINTS.validation_batches()))
    trainer.run(POINTS.batches(), max_epochs=EPOCHS)
    return trainer.state.iteration, result(), model


def run_here(folder: Path, callbacks: list[Callback], model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> Any:
    given: dict[str, Any] = {"max_duration": f"{EPOCHS}ep", "eval_interval": "1ep", "log_interval": "1ba", "runs_folder": folder}
    trainer: Any = Trainer(
        model,
        POINTS.loss,
        POINTS.batches(),
        POINTS.validation_batches(),
        optimizer=lambda _: optimizer,
        callbacks=callbacks,
        device="cpu",
        **given | options,
    )
    with trainer:
        trainer.fit()
    return trainer


def here(folder: Path, attach: Attach, rate: float) -> tuple[int, Any, nn.Module]:
    model, optimizer = made(rate)
    engine = GuestEngine(lambda ctx: ctx.loss.item())
    result = attach(TrainingSetup(folder, engine, engine.evaluator(), model, optimizer))
    trainer = run_here(folder, [guest(engine)], model, optimizer)
    return trainer.state.timestamp.batch, result(), model


def early_stopping(given: TrainingSetup) -> Callable[[], Any]:
    scores = iter([5.0, 4.0, 6.0, 6.0])
    stopper = EarlyStopping(patience=1, score_function=lambda engine: next(scores), trainer=given.trainer)
    given.evaluator.add_event_handler(Events.COMPLETED, stopper)
    return lambda: (stopper.counter, round(stopper.best_score or 0.0, 6))


def early_stopping_on_the_loss(given: TrainingSetup) -> Callable[[], Any]:
    if not hasattr(EarlyStopping, "attach"):
        pytest.skip("Ignite before 0.5.4 does not have it")
    known = signature(EarlyStopping).parameters  # Ignite 0.5.5 renamed some of them
    options = {"threshold": 0.5, "cumulative": True} if "threshold" in known else {"min_delta": 0.5, "cumulative_delta": True}
    stopper = EarlyStopping(2, lambda engine: -engine.state.metrics["loss"], given.trainer, **options)
    stopper.attach(given.evaluator, reset_engine=given.trainer)
    return lambda: (stopper.counter, round(stopper.best_score or 0.0, 6))


def terminate_on_nan(given: TrainingSetup) -> Callable[[], Any]:
    given.trainer.add_event_handler(Events.ITERATION_COMPLETED, TerminateOnNan())
    return lambda: None


def time_limit(given: TrainingSetup) -> Callable[[], Any]:
    limit = TimeLimit(limit_sec=60)

    def pass_time() -> None:
        limit.start_time -= 100

    given.trainer.add_event_handler(Events.ITERATION_COMPLETED(once=9), pass_time)
    given.trainer.add_event_handler(Events.ITERATION_COMPLETED, limit)
    return lambda: None


def linear_schedule(given: TrainingSetup) -> Callable[[], Any]:
    schedule = LinearCyclicalScheduler(given.optimizer, "lr", 0.1, 0.0, 10, save_history=True)
    given.trainer.add_event_handler(Events.ITERATION_STARTED, schedule)
    return lambda: given.trainer.state.param_history["lr"]


def torch_schedule(given: TrainingSetup) -> Callable[[], Any]:
    schedule = LRScheduler(torch.optim.lr_scheduler.StepLR(given.optimizer, step_size=2, gamma=0.5))
    given.trainer.add_event_handler(Events.EPOCH_COMPLETED, schedule)
    return lambda: given.optimizer.param_groups[0]["lr"]


def timer(given: TrainingSetup) -> Callable[[], Any]:
    taken = Timer(average=True)
    taken.attach(
        given.trainer,
        start=Events.EPOCH_STARTED,
        pause=Events.ITERATION_COMPLETED,
        resume=Events.ITERATION_STARTED,
        step=Events.ITERATION_COMPLETED,
    )
    return lambda: (taken.step_count, taken.running, taken.value() > 0)


def average_of_the_weights(given: TrainingSetup) -> Callable[[], Any]:
    handler = EMAHandler(given.model, momentum=0.1, momentum_warmup=0.5, warmup_iters=6)
    handler.attach(given.trainer, name="ema_momentum", event=Events.ITERATION_COMPLETED(every=2))
    return lambda: [value.tolist() for value in handler.ema_model.state_dict().values()]


def progress_bar(given: TrainingSetup) -> Callable[[], Any]:
    screen = io.StringIO()
    bar = ProgressBar(persist=True, bar_format="{desc} {n_fmt}/{total_fmt}{postfix}", file=screen, mininterval=0, ascii=True)
    bar.attach(given.trainer, output_transform=lambda loss: {"loss": f"{loss:.4f}"})
    return lambda: [line.strip() for line in re.split(r"[\r\n]+", screen.getvalue()) if line.strip()]


def epoch_outputs(given: TrainingSetup) -> Callable[[], Any]:
    EpochOutputStore(lambda output: output[0].flatten().tolist()).attach(given.evaluator, "predictions")
    return lambda: given.evaluator.state.predictions


def running_average(given: TrainingSetup) -> Callable[[], Any]:
    seen: list[float] = []
    RunningAverage(output_transform=lambda loss: loss).attach(given.trainer, "running_loss")
    given.trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: seen.append(given.trainer.state.metrics["running_loss"]))
    return lambda: seen


def a_metric(given: TrainingSetup) -> Callable[[], Any]:
    MeanAbsoluteError().attach(given.evaluator, "mae")
    return lambda: given.evaluator.state.metrics["mae"]


def checkpoints(given: TrainingSetup) -> Callable[[], Any]:
    best = Checkpoint(
        {"model": given.model},
        given.folder / "best",
        n_saved=2,
        score_name="loss",
        score_function=Checkpoint.get_default_score_fn("loss", -1.0),
        global_step_transform=lambda *_: given.trainer.state.epoch,
    )
    given.evaluator.add_event_handler(Events.COMPLETED, best)
    given.trainer.add_event_handler(
        Events.ITERATION_COMPLETED(every=5), checkpoint := ModelCheckpoint(given.folder / "every"), {"m": given.model}
    )

    def result() -> Any:
        files = sorted((given.folder / "best").iterdir()) + sorted((given.folder / "every").iterdir())
        assert str(checkpoint.last_checkpoint) == str(files[-1])
        return [(path.name, [value.tolist() for value in torch.load(path, weights_only=True).values()]) for path in files]

    return result


def filters(given: TrainingSetup) -> Callable[[], Any]:
    """Attach a function to all kinds of Ignite's filtered events."""
    recorded: list[Any] = []

    def note(engine: Engine, what: str) -> None:
        recorded.append((what, engine.state.iteration, engine.state.epoch))

    filtered = {
        "every": Events.ITERATION_COMPLETED(every=5),
        "once": Events.ITERATION_STARTED(once=[3, 9]),
        "filter": Events.EPOCH_COMPLETED(event_filter=lambda engine, epoch: epoch % 2 == 1),
        "between": Events.GET_BATCH_COMPLETED(before=5, after=2),
        "both": Events.EPOCH_STARTED(every=2, after=1) | Events.COMPLETED | Events.GET_BATCH_STARTED(once=2),
        "started": Events.STARTED,
    }
    for what, event in filtered.items():
        given.trainer.add_event_handler(event, note, what)

    events = Events.ITERATION_COMPLETED(every=2) | Events.STARTED | Events.GET_BATCH_STARTED(once=1) | Events.EPOCH_COMPLETED
    given.evaluator.on(events)(lambda engine: note(engine, "evaluated"))

    removed = given.trainer.add_event_handler(Events.ITERATION_STARTED, note, "removed")
    assert given.trainer.has_event_handler(note, Events.ITERATION_STARTED)
    given.trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), removed.remove)

    class Own(EventEnum):  # type: ignore[misc]  # Ignite's types are not read
        HALF = "half"

    given.trainer.register_events(*Own)
    given.trainer.add_event_handler(Own.HALF, note, "own")
    given.trainer.add_event_handler(Events.ITERATION_COMPLETED(once=3), lambda: given.trainer.fire_event(Own.HALF))
    return lambda: recorded


NAMES = {
    early_stopping_on_the_loss: "EarlyStopping",
    terminate_on_nan: "TerminateOnNan",
    time_limit: "TimeLimit",
    linear_schedule: "LinearCyclicalScheduler",
    torch_schedule: "LRScheduler",
    average_of_the_weights: "EMAHandler",
    progress_bar: "ProgressBar",
    epoch_outputs: "EpochOutputStore",
    running_average: "RunningAverage",
    a_metric: "MeanAbsoluteError",
    checkpoints: "Checkpoint",
    timer: "Timer",
}
"""The names of the handlers in the matrix."""


@pytest.mark.parametrize(
    ("attach", "tier"),
    [
        (early_stopping, "drives"),
        (early_stopping_on_the_loss, "drives"),
        (terminate_on_nan, "drives"),
        (time_limit, "drives"),
        (linear_schedule, "drives"),
        (torch_schedule, "drives"),
        (average_of_the_weights, "reads"),
        (progress_bar, "reads"),
        (epoch_outputs, "reads"),
        (running_average, "reads"),
        (a_metric, "reads"),
        (checkpoints, "reads"),
        (filters, "reads"),
        (timer, "listens"),
    ],
)
def test_a_guest_has_the_same_effects_as_in_its_framework(attach: Attach, tier: str, tmp_path: Path) -> None:
    rate = 1e12 if attach is terminate_on_nan else 0.1
    steps_framework, result_framework, model_framework = in_framework(tmp_path / "framework", attach, rate)
    steps_here, result_here, model_here = here(tmp_path / "here", attach, rate)
    assert (steps_here, result_here) == (steps_framework, result_framework)
    weights = [list(model.parameters()) for model in (model_framework, model_here)]
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(*weights, strict=True))
    changes_the_rate = attach in (linear_schedule, torch_schedule)
    assert (steps_framework < EPOCHS * STEPS) == (tier == "drives" and not changes_the_rate)
    if attach in NAMES:
        check_or_write_cell("ignite", "guests", NAMES[attach], Cell("works", tier=tier))


def test_ignite_s_metrics_are_in_the_metrics_records(tmp_path: Path) -> None:
    model, optimizer = made(0.1)
    engine = GuestEngine()
    RunningAverage(output_transform=lambda loss: loss).attach(engine, "running_loss")
    MeanAbsoluteError().attach(engine.evaluator(), "mae")
    run_here(tmp_path, [guest(engine), history := History()], model, optimizer)
    assert len(history["validation/mae"]) == len(history["ignite/running_loss"]) == EPOCHS
    assert history["ignite/running_loss"][-1] == pytest.approx(float(engine.state.metrics["running_loss"]))


def test_a_resume_restores_the_states_of_ignite_s_handlers(tmp_path: Path) -> None:
    def guests(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[EarlyStopping, EMAHandler, Callback]:
        engine = GuestEngine()
        stopper = EarlyStopping(100, lambda each: 1.0, engine)
        engine.evaluator().add_event_handler(Events.COMPLETED, stopper)
        handler = EMAHandler(model, momentum=0.1)
        handler.attach(engine)
        engine.add_event_handler(Events.ITERATION_STARTED, LinearCyclicalScheduler(optimizer, "lr", 0.1, 0.0, 10))
        return stopper, handler, guest(engine, to_save={"average": handler.ema_model}, name="ignite's")

    whole_model, optimizer = made(0.1)
    stopper, whole, callback = guests(whole_model, optimizer)
    run_here(tmp_path, [callback], whole_model, optimizer, run_name="whole")
    assert stopper.counter == EPOCHS - 1
    model, optimizer = made(0.1)
    run_here(
        tmp_path,
        [guests(model, optimizer)[2], CheckpointSaver(save_interval="1ep")],
        model,
        optimizer,
        run_name="a",
        max_duration="2ep",
    )
    model, optimizer = made(0.1)
    stopper, handler, callback = guests(model, optimizer)
    run_here(tmp_path, [callback], model, optimizer, run_name="a", resume="auto")
    assert stopper.counter == EPOCHS - 1
    for a, b in ((whole_model, model), (whole.ema_model, handler.ema_model)):
        assert all(torch.equal(one, other) for one, other in zip(a.parameters(), b.parameters(), strict=True))


def test_guest_accepts_a_handler_without_an_engine(tmp_path: Path) -> None:
    model, optimizer = made(0.1)
    timer, nan = Timer(), TerminateOnNan()
    callbacks = [guest(timer), guest(nan, Events.ITERATION_COMPLETED(every=2) | Events.EPOCH_COMPLETED)]
    assert [callback.name for callback in callbacks] == ["Timer", "TerminateOnNan"]
    trainer = run_here(tmp_path, callbacks, model, optimizer)
    assert trainer.state.timestamp.batch == EPOCHS * STEPS
    assert not timer.running
    with pytest.raises(RegistrationError, match="give the event at which it is called"):
        guest(TerminateOnNan())
    engine = GuestEngine()
    guest(engine)
    with pytest.raises(RegistrationError, match="this engine belongs to a guest already"):
        guest(engine)


def test_unsupported_handlers_are_rejected_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def interrupted() -> None: ...

    with pytest.raises(NotSupported, match="HandlersTimeProfiler cannot be a guest: it measures Ignite's loop"):
        guest(HandlersTimeProfiler())
    with pytest.raises(NotSupported, match="FastaiLRFinder cannot be a guest: it runs the trainer itself"):
        guest(FastaiLRFinder())
    with pytest.raises(NotSupported, match=r"interrupted listens to INTERRUPT of Ignite, which callsheet does not fire"):
        guest(interrupted, Events.INTERRUPT | Events.STARTED)
    engine = GuestEngine()
    engine.evaluator().add_event_handler(Events.TERMINATE, interrupted)
    with pytest.raises(NotSupported, match=r"interrupted listens to TERMINATE of Ignite"):
        guest(engine)
    guest(interrupted, Events.INTERRUPT, strict=False)
    assert "interrupted listens to INTERRUPT" in caplog.text


@pytest.mark.parametrize(
    ("does", "message"),
    [
        (lambda engine: engine.run([1]), r"has here no run\(\): a guest may call add_event_handler"),
        (lambda engine: engine.terminate_epoch(), r"has here no terminate_epoch\(\)"),
        (lambda engine: engine.interrupt(), r"has here no interrupt\(\)"),
        (lambda engine: engine.load_state_dict({}), r"has here no load_state_dict\(\)"),
        (lambda engine: engine.state.dataloader, "has here no 'dataloader': a guest may use batch, epoch"),
        (lambda engine: setattr(engine.state, "batch", None), "may replace the batch of an Ignite engine at GET_BATCH_COMPLETED"),
        (lambda engine: engine.evaluator().terminate(), "an evaluator of Ignite's cannot be terminated here"),
        (
            lambda engine: engine.add_event_handler(Events.COMPLETED, print),
            "print was attached to COMPLETED of Ignite during training",
        ),
    ],
)
def test_calls_that_a_guest_s_engine_does_not_support_are_rejected(
    does: Callable[[Any], Any], message: str, tmp_path: Path
) -> None:
    model, optimizer = made(0.1)
    with pytest.raises(NotSupported, match=message):
        run_here(tmp_path, [guest(does, Events.ITERATION_STARTED)], model, optimizer)


def test_terminating_an_engine_before_training_is_rejected() -> None:
    with pytest.raises(NotSupported, match="only after training has begun"):
        GuestEngine().terminate()


def test_a_guest_can_replace_the_batch(tmp_path: Path) -> None:
    seen: list[float] = []

    def zeros(engine: Any) -> None:
        engine.state.batch = [torch.zeros_like(part) for part in engine.state.batch]

    class RecordsBatches(Callback):
        def on_forward_end(self, ctx: Context) -> None:
            seen.append(float(ctx.batch[0].abs().sum()))

    model, optimizer = made(0.1)
    run_here(tmp_path, [guest(zeros, Events.GET_BATCH_COMPLETED(every=2), phase="change"), RecordsBatches()], model, optimizer)
    assert [value == 0 for value in seen[:3]] == [True, False, True]  # the filter counts completed iterations


@pytest.mark.parametrize("skips", [False, True])
def test_a_termination_fires_the_same_final_events_as_in_ignite(skips: bool, tmp_path: Path) -> None:
    def attach(given: TrainingSetup) -> Callable[[], Any]:
        recorded: list[str] = []
        for event in (Events.ITERATION_COMPLETED, Events.EPOCH_COMPLETED, Events.TERMINATE, Events.COMPLETED):
            given.trainer.add_event_handler(event, lambda name: recorded.append(name), event.name)
        given.trainer.add_event_handler(Events.ITERATION_STARTED(once=8), lambda: given.trainer.terminate(skip_completed=skips))
        return lambda: recorded

    _, result_framework, _ = in_framework(tmp_path, attach, 0.1)
    _, result_here, _ = here(tmp_path, attach, 0.1)
    assert result_here == result_framework
    assert result_framework[-2:] == (["ITERATION_COMPLETED", "TERMINATE"] if skips else ["TERMINATE", "COMPLETED"])


def test_an_exception_is_reported_to_handlers_and_raised_once(tmp_path: Path) -> None:
    recorded: list[BaseException] = []

    def keeps(error: BaseException) -> None:
        recorded.append(error)

    def raises_again(error: BaseException) -> None:
        raise error

    def fails() -> None:
        raise ZeroDivisionError

    engine = GuestEngine()
    engine.add_event_handler(Events.EXCEPTION_RAISED, keeps)
    engine.add_event_handler(Events.EXCEPTION_RAISED, raises_again)
    engine.add_event_handler(Events.ITERATION_STARTED(once=3), fails)
    model, optimizer = made(0.1)
    with pytest.raises(ZeroDivisionError) as raised:
        run_here(tmp_path, [guest(engine)], model, optimizer)
    assert recorded == [raised.value]
    assert not any("another error" in note for note in raised.value.__notes__)


def test_a_handler_of_an_evaluator_reads_the_trainer_s_progress(tmp_path: Path) -> None:
    model, optimizer = made(0.1)
    engine, steps = GuestEngine(), []
    global_step = global_step_from_engine(engine)
    engine.evaluator().add_event_handler(
        Events.COMPLETED, lambda evaluator: steps.append((global_step(evaluator, Events.COMPLETED), engine.state.iteration))
    )
    run_here(tmp_path, [guest(engine)], model, optimizer, max_duration="3ep")
    assert [epoch for epoch, _ in steps] == [1, 2, 3]
    assert [iteration for _, iteration in steps] == [steps[0][1] * number for number in (1, 2, 3)]


def test_evaluators_do_not_run_after_a_termination(tmp_path: Path) -> None:
    model, optimizer = made(0.1)
    engine, evaluated = GuestEngine(), []
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda engine: engine.terminate())
    for event in (Events.STARTED, Events.ITERATION_COMPLETED, Events.COMPLETED):
        engine.evaluator().add_event_handler(event, lambda evaluator: evaluated.append(1))
    run_here(tmp_path, [guest(engine)], model, optimizer)
    assert evaluated == []
