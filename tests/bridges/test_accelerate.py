"""callsheet's callbacks around a real Accelerator, and Accelerate's trackers as loggers."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.tracking import GeneralTracker, TensorBoardTracker
from accelerate.utils import DataLoaderConfiguration, DistributedType, GradientAccumulationPlugin, ProjectConfiguration
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.data import DataLoader

from callsheet import Callback, CallbackManager, Context, Trainer
from callsheet.bridges.accelerate import AcceleratedRun, guest, host
from callsheet.bridges.accelerate.events import NOT_FIRED
from callsheet.bridges.matrix import Cell
from callsheet.callbacks import CheckpointSaver, EarlyStopper, History, LRMonitor, NaNMonitor, OptimizerMonitor, SpeedMonitor
from callsheet.errors import NotSupported, RegistrationError, RequestRejected
from callsheet.loggers import Logger
from callsheet.testing import Recorder, check_events, run_ranks

from .faults import seeds
from .loops.job import POINTS
from .rows import check_or_write_cell
from .subsets import compare_subsets

torch.set_num_threads(1)

STEPS = 6
"""Steps per epoch."""


@pytest.fixture(autouse=True)
def _reset_accelerate_state() -> Iterator[None]:
    """Reset Accelerate's state, which is shared in a process, so that each test creates its own."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


class Setup:
    """A training program as a user of Accelerate writes it. It records its losses.

    The model draws no random numbers, so that a resumed run can be compared with an uninterrupted one.
    """

    def __init__(self, folder: Path, *, accumulate: int = 1, sizes: int = 4, **options: Any) -> None:
        torch.manual_seed(3)
        self.folder = folder
        plugin = GradientAccumulationPlugin(num_steps=accumulate, **options.pop("plugin", {}))
        self.accelerator: Any = Accelerator(cpu=True, gradient_accumulation_plugin=plugin, **options)
        self.plain = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(self.plain.parameters(), lr=0.02)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.5)
        data = DataLoader(POINTS.train, batch_size=sizes, shuffle=True)
        self.model, self.optimizer, self.data, self.validation, self.scheduler = self.accelerator.prepare(
            self.plain, optimizer, data, POINTS.validation_batches(), scheduler
        )
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.found: list[dict[str, dict[str, float]]] = []

    def host(self, callbacks: list[Callback], **options: Any) -> AcceleratedRun:
        given: dict[str, Any] = {
            "log_interval": "1ba",
            "run_name": "small",
            "runs_folder": self.folder,
            "evaluate": self.evaluate,
        }
        run = host(
            callbacks,
            accelerator=self.accelerator,
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            **given | options,
        )
        self.accelerator.register_for_checkpointing(run)
        return run

    @torch.no_grad()
    def evaluate(self) -> dict[str, dict[str, float]]:
        self.model.eval()
        losses = [POINTS.loss(self.model(inputs), targets) for inputs, targets in self.validation]
        self.model.train()
        found = {"validation": {"loss": float(self.accelerator.reduce(torch.stack(losses).mean(), "mean"))}}
        self.found.append(found)
        return found

    def train_on(self, batch: Any) -> None:
        """Train on one batch."""
        accelerator, model = self.accelerator, self.model
        inputs, targets = batch
        with accelerator.accumulate(model):
            loss = POINTS.loss(model(inputs), targets)
            self.losses.append(loss.item())
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                self.norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()

    def run(self, run: AcceleratedRun | None = None, *, epochs: int = 2) -> None:
        for _ in range(epochs) if run is None else run.epochs(epochs):
            for batch in self.data if run is None else run.steps(self.data):
                self.train_on(batch)
            found = self.evaluate()
            if run is not None:
                run.evaluated(found)

    def weights(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.plain.parameters()]


def same(a: Setup, b: Setup) -> bool:
    return all(torch.equal(one, other) for one, other in zip(a.weights(), b.weights(), strict=True))


class RequestsAtStep(Callback):
    """Makes a request at the end of a step."""

    def __init__(self, what: str, step: int) -> None:
        self.what, self.step = what, step

    def on_train_step_end(self, ctx: Context) -> None:
        if ctx.step == self.step:
            getattr(ctx.control, self.what)("asked")


class RecordsOutcomes(Callback):
    """Records how runs ended."""

    phase = "report"

    def __init__(self) -> None:
        self.outcomes: list[str] = []

    def on_run_end(self, ctx: Context) -> None:
        self.outcomes.append(str(ctx.run.outcome))


@pytest.mark.parametrize(
    ("accumulate", "sizes", "steps", "parts"),
    [(1, 4, 6, [1] * 6), (2, 4, 3, [2] * 3), (4, 4, 2, [4, 2]), (3, 5, 2, [3, 2])],
    ids=["1 of 6", "2 of 6", "4 of 6", "3 of 5"],
)
def test_training_is_unchanged_and_every_event_is_fired(
    accumulate: int, sizes: int, steps: int, parts: list[int], tmp_path: Path
) -> None:
    recorder, history, ends = (
        Recorder(fields=("grad_norm", "learning_rate", "batch", "eval_results")),
        History(),
        RecordsOutcomes(),
    )
    plain = Setup(tmp_path, accumulate=accumulate, sizes=sizes)
    plain.run()
    hosted = Setup(tmp_path, accumulate=accumulate, sizes=sizes)
    with hosted.host([recorder, history, ends, SpeedMonitor(), OptimizerMonitor(), LRMonitor(), NaNMonitor()]) as run:
        hosted.run(run)
    assert same(hosted, plain)
    assert hosted.losses == plain.losses
    check_events(recorder.events)
    counts = {event: recorder.events.count(event) for event in set(recorder.events)}
    assert counts["on_run_start"] == counts["on_run_end"] == counts["on_train_start"] == counts["on_train_end"] == 1
    assert counts["on_epoch_start"] == counts["on_epoch_end"] == counts["on_eval_all_end"] == 2
    assert counts["on_train_step_end"] == counts["on_optimizer_step_end"] == counts["on_clip_gradients_end"] == 2 * steps
    assert counts["on_fetch_end"] == 2 * steps + 2  # the last fetch finds the end of the data
    assert counts["on_microbatch_end"] == counts["on_forward_end"] == counts["on_backward_end"] == 2 * sum(parts)
    losses = iter(plain.losses)
    recorded = [sum(next(losses) for _ in range(part)) / accumulate for part in parts * 2]
    assert history["train/loss"] == pytest.approx(recorded, rel=1e-6)
    norms = [float(norm) for event, norm in recorder.values["grad_norm"] if event == "on_train_step_end"]
    assert norms == history["train/grad_norm"] == plain.norms
    rates = [rate for event, rate in recorder.values["learning_rate"] if event == "on_train_step_end"]
    assert rates == [0.02 * 0.5 ** (step // 4) for step in range(2 * steps)]
    assert [results for _, results in recorder.values["eval_results"]] == plain.found
    assert ends.outcomes == ["finished"]
    assert not vars(hosted.accelerator).keys() & {"save_state", "clip_grad_norm_"}
    assert hosted.accelerator.trackers == []


def test_an_incomplete_accumulation_at_the_end_is_reported_as_a_skipped_step(tmp_path: Path) -> None:
    recorder = Recorder(fields=("step_skipped",))
    setup = Setup(tmp_path, accumulate=4, plugin={"sync_with_dataloader": False})
    with setup.host([recorder], strict=False) as run:
        setup.run(run, epochs=1)
    skipped = [value for event, value in recorder.values["step_skipped"] if event == "on_train_step_end"]
    assert skipped == [False, True]
    check_events(recorder.events)


def test_requests_are_carried_out(tmp_path: Path) -> None:
    recorder, ends = Recorder(fields=("checkpoint",)), RecordsOutcomes()
    setup = Setup(tmp_path)
    with setup.host([RequestsAtStep("save", 2), RequestsAtStep("evaluate", 3), RequestsAtStep("stop", 8), recorder, ends]) as run:
        setup.run(run)
        assert run.is_over
    assert len(setup.losses) == 8
    assert recorder.events.count("on_eval_all_end") == len(setup.found) == 3  # one of the three is the loop's own, after the stop
    recorded = [
        (info.step, info.kind, Path(info.path).name)
        for event, info in recorder.values["checkpoint"]
        if event.endswith("published")
    ]
    assert recorded == [(2, "requested", "step-2")]
    assert ends.outcomes == ["stopped"]
    check_events(recorder.events)


def test_checkpoints_that_the_loop_saves_are_reported(tmp_path: Path) -> None:
    recorder = Recorder(fields=("checkpoint",))
    project = ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True)
    setup = Setup(tmp_path, project_config=project)
    with setup.host([recorder, RequestsAtStep("save", 5)]) as run:
        for epoch in run.epochs(2):
            for number, batch in enumerate(run.steps(setup.data)):
                setup.train_on(batch)
                if (epoch, number) == (0, 2):
                    setup.accelerator.save_state()  # this ends the step, because the optimizer has stepped
                    setup.accelerator.save_state()  # a second checkpoint of the same step is not reported
            setup.accelerator.save_state()
    check_events(recorder.events)
    recorded = [
        (info.step, info.epoch, Path(info.path).name)
        for event, info in recorder.values["checkpoint"]
        if event.endswith("published")
    ]
    assert recorded == [(3, 0, "checkpoint_0"), (5, 0, "checkpoint_2"), (6, 1, "checkpoint_3"), (12, 2, "checkpoint_4")]
    kept = torch.load(tmp_path / "checkpoints" / "checkpoint_0" / "custom_checkpoint_0.pkl", weights_only=True)
    assert (kept["state"]["timestamp"]["batch"], kept["taken"]) == (3, 3)


def test_a_checkpoint_at_an_epoch_s_end_holds_the_loop_s_evaluation(tmp_path: Path) -> None:
    setup = Setup(tmp_path)
    with suppress(RuntimeError), setup.host([CheckpointSaver(keep=None), EarlyStopper(monitor="validation/loss")]) as run:
        for epoch in run.epochs(3):
            for batch in run.steps(setup.data):
                if epoch == 1:
                    raise RuntimeError("the run dies")
                setup.train_on(batch)
            run.evaluated(setup.evaluate())
    again, stopper = Setup(tmp_path), EarlyStopper(monitor="validation/loss")
    with again.host([stopper], resume=tmp_path / "small" / "checkpoints" / "step-6") as run:
        assert stopper.state_dict()["seen_at"]["batch"] == 6
        again.run(run, epochs=3)
    assert [run.ctx.step, len(again.found)] == [18, 2]


def test_checkpoints_that_the_loop_saves_are_reported_if_no_callback_requests_any(tmp_path: Path) -> None:
    class Published(Callback):
        def on_checkpoint_published(self, ctx: Context) -> None:
            steps.append(ctx.step)

    steps: list[int] = []
    setup = Setup(tmp_path)
    with setup.host([Published()], log_interval="100ba") as run:
        for number, batch in enumerate(run.steps(setup.data), 1):
            setup.train_on(batch)
            setup.accelerator.save_state(str(tmp_path / f"own-{number}"))
    assert steps == [1, 2, 3, 4, 5, 6]


@pytest.fixture
def before_1_15(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `skip_first_batches` lose the epoch count, as it does before Accelerate 1.15."""
    skip = Accelerator.skip_first_batches

    def skip_and_lose_count(self: Any, dataloader: Any, num_batches: int = 0) -> Any:
        left = skip(self, dataloader, num_batches)
        left.iteration = 0
        return left

    monkeypatch.setattr(Accelerator, "skip_first_batches", skip_and_lose_count)


@pytest.mark.parametrize("at", [6, 8])
@pytest.mark.parametrize("how", ["resume", "before", "inside"])
@pytest.mark.parametrize("version", ["installed", "before_1_15"])
def test_a_resume_from_an_accelerate_checkpoint_restores_the_callback_states(
    version: str, how: str, at: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if version == "before_1_15":
        request.getfixturevalue(version)
    options = {"dataloader_config": DataLoaderConfiguration(use_seedable_sampler=True)}
    whole, history, recorder = History(), History(), Recorder(fields=("checkpoint",))
    uninterrupted = Setup(tmp_path, **options)
    with uninterrupted.host([whole], run_name="whole") as run:
        uninterrupted.run(run, epochs=3)
    interrupted = Setup(tmp_path, **options)
    with interrupted.host([History(), RequestsAtStep("save", at)], max_duration="9ba") as run:
        interrupted.run(run, epochs=3)
    path = tmp_path / "small" / "checkpoints" / f"step-{at}"
    again = Setup(tmp_path, **options)
    attached = again.host([history, recorder], resume=path if how == "resume" else None)
    if how == "before":
        again.accelerator.load_state(path)
    with attached as run:
        if how == "inside":
            again.accelerator.load_state(path)
        assert (run.ctx.step, run.ctx.state.timestamp.batch) == (at, at)
        again.run(run, epochs=3)
    assert recorder.recorded[-1].batch == 3 * STEPS
    assert recorder.recorded[-1].epoch == 3
    if how != "inside":
        loaded = next(info for event, info in recorder.values["checkpoint"] if event == "on_checkpoint_load_end")
        assert loaded.step == at
    assert again.losses == uninterrupted.losses[at:]
    assert same(again, uninterrupted)
    assert history["train/loss"] == whole["train/loss"]
    check_events(recorder.events)


@pytest.mark.parametrize("at", [STEPS, STEPS + 2])
def test_a_stateful_dataloader_continues_with_the_next_batch_or_the_next_epoch(at: int, tmp_path: Path) -> None:
    options = {"dataloader_config": DataLoaderConfiguration(use_seedable_sampler=True, use_stateful_dataloader=True)}
    whole = Setup(tmp_path, **options)
    with whole.host([RequestsAtStep("save", at)]) as run:
        whole.run(run, epochs=3)
    again = Setup(tmp_path, **options)
    with again.host([], run_name="again", resume=tmp_path / "small" / "checkpoints" / f"step-{at}") as run:
        again.run(run, epochs=3)
    assert run.ctx.step == 3 * STEPS
    assert again.losses == whole.losses[at:]
    assert same(again, whole)


def test_callback_states_that_are_not_registered_are_reported_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    setup = Setup(tmp_path)
    run = setup.host([RequestsAtStep("save", 1)])
    setup.accelerator._custom_objects.clear()
    with run:
        setup.run(run, epochs=1)
    assert "holds no states of callbacks: accelerator.register_for_checkpointing(run) adds them" in caplog.text
    again = Setup(tmp_path)
    run = again.host([], resume=tmp_path / "small" / "checkpoints" / "step-1")
    again.accelerator._custom_objects.clear()
    with run:
        assert run.ctx.state.timestamp.batch == 0
    assert "no states of callbacks were loaded" in caplog.text


def test_loading_a_state_within_an_epoch_is_rejected(tmp_path: Path) -> None:
    setup = Setup(tmp_path)
    run = setup.host([RequestsAtStep("save", 1)])
    with pytest.raises(RequestRejected, match="load before the first epoch"), run:  # noqa: PT012  # the loop raises
        for batch in run.steps(setup.data):
            setup.train_on(batch)
            if run.ctx.state.timestamp.batch == 1:
                setup.accelerator.load_state(tmp_path / "small" / "checkpoints" / "step-1")


def test_an_early_stop_and_a_break_end_training(tmp_path: Path) -> None:
    ends = RecordsOutcomes()
    setup = Setup(tmp_path)
    with setup.host([EarlyStopper(monitor="validation/loss", patience="1ep"), ends]) as run:
        for epoch in run.epochs(9):
            for batch in run.steps(setup.data):
                setup.train_on(batch)
            run.evaluated({"validation": {"loss": float(epoch)}})
    assert len(setup.losses) == 2 * STEPS
    recorder = Recorder()
    triggered = Setup(tmp_path)
    with triggered.host([recorder, ends]) as run:
        for number, batch in enumerate(run.steps(triggered.data)):
            triggered.train_on(batch)
            if number == 2:
                triggered.accelerator.set_trigger()
            if triggered.accelerator.check_trigger():
                break
    assert recorder.events.count("on_train_step_end") == 3
    check_events(recorder.events)
    assert ends.outcomes == ["stopped", "finished"]


def test_values_logged_with_the_accelerator_are_in_the_metrics_records(tmp_path: Path) -> None:
    class Settings(Logger):
        values: dict[str, Any]

        def log_hyperparameters(self, ctx: Context, values: Any) -> None:
            self.values = dict(values)

    history, settings = History(), Settings()
    setup = Setup(tmp_path)
    with setup.host([history, settings]) as run:
        setup.accelerator.init_trackers("project", config={"lr": 0.02})
        for step, batch in enumerate(run.steps(setup.data)):
            setup.train_on(batch)
            setup.accelerator.log({"mine/number": step, "tensor": torch.tensor(2.0), "text": "no number"}, step=step)
        setup.accelerator.log({"last": 1.0})
    assert history["accelerate/mine/number"] == [float(step) for step in range(STEPS)]
    assert history["accelerate/tensor"] == [2.0] * STEPS
    assert history["accelerate/last"] == [1.0]  # logged after the last step, so it is in a record of its own
    assert "accelerate/text" not in history.records[0][1]
    assert settings.values == {"lr": 0.02}
    setup.accelerator.log({"after": 1.0})  # the run has ended, so no callback receives this


def test_listeners_to_events_that_the_loop_never_fires_are_rejected(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Listens(Callback):
        def on_eval_forward_end(self, ctx: Context) -> None: ...

    setup = Setup(tmp_path)
    with pytest.raises(
        NotSupported, match="Listens listens to on_eval_forward_end, which this loop with Accelerate does not fire"
    ):
        setup.host([Listens()]).__enter__()
    with setup.host([Listens()], strict=False) as run:
        setup.run(run, epochs=1)
    assert "Listens listens to on_eval_forward_end" in caplog.text
    another = Setup(tmp_path)
    another.optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.raises(NotSupported, match="has not stepped the optimizer in its first step"), another.host([Recorder()]) as run:  # noqa: PT012
        for inputs, targets in run.steps(another.data):
            another.accelerator.backward(POINTS.loss(another.model(inputs), targets))


def test_engines_that_cannot_be_observed_are_rejected(tmp_path: Path) -> None:
    setup = Setup(tmp_path)
    setup.accelerator.state.distributed_type = DistributedType.DEEPSPEED
    with pytest.raises(NotSupported, match="DEEPSPEED runs backward and step in its own engine"):
        setup.host([])


def test_an_exception_fails_the_run(tmp_path: Path) -> None:
    ends, recorder = RecordsOutcomes(), Recorder(fields=("exception",))
    setup = Setup(tmp_path)
    with pytest.raises(RuntimeError), setup.host([ends, recorder]) as run:  # noqa: PT012  # the loop is what raises
        for _ in run.steps(setup.data):
            setup.train_on((torch.ones(4, 9), torch.ones(4, 1)))
    assert ends.outcomes == ["failed"]
    assert [type(error) for _, error in recorder.values["exception"]] == [RuntimeError]
    check_events(recorder.events)
    assert not vars(setup.accelerator).keys() & {"save_state", "clip_grad_norm_"}
    assert not setup.model._forward_hooks


def test_a_signal_preempts_the_run_after_a_save(tmp_path: Path) -> None:
    ends = RecordsOutcomes()
    setup = Setup(tmp_path)
    with setup.host([ends]) as run:
        for number, batch in enumerate(run.steps(setup.data)):
            setup.train_on(batch)
            if number == 2:
                os.kill(os.getpid(), signal.SIGTERM)
        assert run.preempted
    assert len(setup.losses) == 3
    assert ends.outcomes == ["preempted"]
    assert (tmp_path / "small" / "checkpoints" / "step-3" / "custom_checkpoint_0.pkl").is_file()


def test_an_accelerator_can_be_used_for_several_runs(tmp_path: Path) -> None:
    recorder = Recorder()
    setup = Setup(tmp_path)
    for _ in range(2):
        with setup.host([recorder], run_name=None) as run:
            setup.run(run, epochs=1)
    assert recorder.events.count("on_run_end") == 2
    assert recorder.events.count("on_train_step_end") == 2 * STEPS
    with pytest.raises(RequestRejected, match=r"steps\(\) inside steps"), setup.host([]) as run:  # noqa: PT012  # the loop raises
        for _ in run.steps(setup.data):
            next(run.steps(setup.data))


# --- several ranks ---


def train_on_rank(folder: str) -> dict[str, Any]:
    class RequestsStop(Callback):
        def on_train_step_end(self, ctx: Context) -> None:
            if ctx.run.rank == 1 and ctx.step == 4:
                ctx.control.stop("one rank wants to")

    recorder, history, ends = Recorder(), History(), RecordsOutcomes()
    hosted = Setup(Path(folder), accumulate=3)
    with hosted.host([recorder, history, ends, RequestsStop(), CheckpointSaver(save_interval="1ep")]) as run:
        for _ in run.epochs(40):
            for batch in run.steps(hosted.data):
                hosted.train_on(batch)
                hosted.accelerator.log({"loss": hosted.losses[-1]})  # on the main process only
            run.evaluated(hosted.evaluate())
        steps = run.ctx.state.timestamp.batch
    check_events(recorder.events)
    GradientState._reset_state()
    plain = Setup(Path(folder), accumulate=3)
    while len(plain.losses) < len(hosted.losses):
        for batch in plain.data:
            plain.train_on(batch)
    triggered = Setup(Path(folder))
    with triggered.host([ends], run_name="triggered") as run:
        for number, batch in enumerate(run.steps(triggered.data)):
            triggered.train_on(batch)
            if number == 1 and run.ctx.run.rank == 1:
                triggered.accelerator.set_trigger()
            if triggered.accelerator.check_trigger():
                break
    return {
        "steps": steps,
        "outcomes": ends.outcomes,
        "losses": (hosted.losses, plain.losses, history["train/loss"], history["train/grad_norm"], history["accelerate/loss"]),
        "norms": plain.norms,
        "weights": [[value.tolist() for value in each.weights()] for each in (hosted, plain)],
        "triggered": len(triggered.losses),
    }


def test_two_ranks_train_one_model_and_stop_together(tmp_path: Path) -> None:
    zero, one = run_ranks(train_on_rank, 2, str(tmp_path))
    assert zero["steps"] == one["steps"] < 40
    assert zero["outcomes"] == one["outcomes"] == ["stopped", "finished"]
    assert zero["triggered"] == one["triggered"] == 2
    (a, b), (c, d) = zero["weights"], one["weights"]
    assert a == b == c == d
    hosted, plain, recorded, norms, logged = zero["losses"]
    assert hosted == plain
    means = [sum(losses) / 2 for losses in zip(plain, one["losses"][1], strict=True)]
    assert recorded == pytest.approx([sum(means[i : i + 3]) / 3 for i in range(0, len(means), 3)], rel=1e-6)
    assert norms == pytest.approx(zero["norms"])
    assert logged
    assert (tmp_path / "small" / "checkpoints" / "step-1" / "random_states_1.pkl").is_file()


# --- trackers as loggers ---


class RecordingTracker(GeneralTracker):  # type: ignore[misc]  # Accelerate's types are not read
    """A user-defined tracker."""

    name = "notes"
    requires_logging_directory = False
    main_process_only = False

    def __init__(self) -> None:
        super().__init__()
        self.recorded: list[Any] = []

    @property
    def tracker(self) -> list[Any]:
        return self.recorded

    def start(self) -> None:
        self.recorded.append("start")

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.recorded.append(values)

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        self.recorded.append((step, values))

    def log_table(self, table_name: str, columns: list[str], data: list[list[Any]], step: int | None = None) -> None:
        self.recorded.append((step, table_name, columns, data))

    def finish(self) -> None:
        self.recorded.append("finish")


class LogsTablesAndImages(Callback):
    """Logs tables and images."""

    def on_train_step_end(self, ctx: Context) -> None:
        if ctx.step == 3:
            ctx.log_table("table", ["a", "b"], [[1, "x"]])
            ctx.log_images("image", [numpy.zeros((4, 6)), numpy.ones((3, 4, 6))])
            ctx.log_images("odd", [numpy.zeros((4, 6)), numpy.ones((2, 2))])


def train(folder: Path, callbacks: list[Callback]) -> None:
    trainer = Trainer(
        POINTS.made_model(),
        POINTS.loss,
        POINTS.batches(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.02),
        max_duration="6ba",
        log_interval="2ba",
        device="cpu",
        run_name="small",
        runs_folder=folder,
        config={"lr": 0.02, "layers": [1, 2], "nested": {"deep": True}},
        callbacks=callbacks,
    )
    with trainer:
        trainer.fit()


def test_a_custom_tracker_receives_the_records(tmp_path: Path) -> None:
    notes, history = RecordingTracker(), History()
    train(tmp_path, [guest(notes), history, LogsTablesAndImages()])
    assert notes.recorded[0] == "start"
    assert notes.recorded[-1] == "finish"
    settings = [recorded for recorded in notes.recorded if isinstance(recorded, dict)]
    assert {"lr": 0.02, "layers": "[1, 2]", "nested.deep": True}.items() <= settings[0].items()
    records = [recorded for recorded in notes.recorded if isinstance(recorded, tuple) and len(recorded) == 2]
    assert [step for step, _ in records] == [2, 4, 6]
    assert [values["train/loss"] for _, values in records] == history["train/loss"]
    assert (3, "table", ["a", "b"], [[1, "x"]]) in notes.recorded
    with pytest.raises(RegistrationError, match="not an instance of"):
        guest(object())


def test_accelerate_s_tensorboard_tracker_writes_the_same_as_in_accelerate(tmp_path: Path) -> None:
    history = History()
    train(tmp_path, [guest(TensorBoardTracker("here", tmp_path)), history, LogsTablesAndImages()])
    accelerator: Any = Accelerator(cpu=True, log_with="tensorboard", project_dir=tmp_path)
    accelerator.init_trackers("framework", config={"lr": 0.02})
    for step, (loss, rate) in enumerate(zip(history["train/loss"], history["train/learning_rate"], strict=True)):
        accelerator.log({"train/loss": loss, "train/learning_rate": rate}, step=2 * step + 2)
    accelerator.end_training()
    found = {}
    for run in ("here", "framework"):
        events = EventAccumulator(str(tmp_path / run)).Reload()
        found[run] = {
            name: [(event.step, event.value) for event in events.Scalars(name)] for name in ("train/loss", "train/learning_rate")
        }
        if run == "here":
            assert {"image", "odd"} <= {name.split("/")[0] for name in events.Tags()["images"]}
    assert found["here"] == found["framework"]
    assert [step for step, _ in found["here"]["train/loss"]] == [2, 4, 6]
    assert list((tmp_path / "here").rglob("hparams.yml"))
    check_or_write_cell("accelerate", "guests", "TensorBoardTracker", Cell("works", tier="listens"))


def test_a_tracker_that_fails_does_not_end_the_run(tmp_path: Path) -> None:
    class Fails(RecordingTracker):
        def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
            raise OSError("the network is away")

    ends = RecordsOutcomes()
    train(tmp_path, [guest(Fails()), ends])
    assert ends.outcomes == ["finished"]


def train_with_clipping(folder: Path, callbacks: Any, accumulate: int = 1) -> None:
    setup = Setup(folder, accumulate=accumulate)
    with setup.host(callbacks, log_interval="2ba", max_duration="2ep") as run:
        for _ in run.epochs(2):
            for inputs, targets in run.steps(setup.data):
                with setup.accelerator.accumulate(setup.model):
                    setup.accelerator.backward(nn.functional.mse_loss(setup.model(inputs), targets))
                    if setup.accelerator.sync_gradients:
                        setup.accelerator.clip_grad_norm_(setup.model.parameters(), 1.0)
                    setup.optimizer.step()
                    setup.optimizer.zero_grad()
            run.evaluated(setup.evaluate())


def test_the_gradient_norm_is_not_available_after_a_step_that_no_callback_reads(tmp_path: Path) -> None:
    readable: list[bool] = []

    class ReadsAtEpochEnds(Callback):
        def on_epoch_end(self, ctx: Context) -> None:
            readable.append(ctx.has("grad_norm"))

    train_with_clipping(tmp_path, [ReadsAtEpochEnds()])
    assert readable == [False, False]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_callbacks_that_listen_to_some_events_receive_the_same_as_one_that_listens_to_all(
    accumulate: int, tmp_path: Path
) -> None:
    def train_once(manager: CallbackManager) -> None:
        train_with_clipping(tmp_path, manager, accumulate)

    compare_subsets(train_once, NOT_FIRED, seeds(30))
