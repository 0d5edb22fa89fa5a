"""callsheet's callbacks in NeMo AutoModel's recipe (`loops.automodel` is a small copy), and AutoModel's callbacks in our loop."""

from __future__ import annotations

import gc
import logging
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from callsheet import Callback, Context, Trainer
from callsheet.bridges.automodel import EVENTS, NOT_FIRED, guest, host
from callsheet.bridges.automodel.names import HOOKS, CallbackRunner, MetricsSample
from callsheet.bridges.automodel.names import Callback as AutoModelCallback
from callsheet.callbacks import EMA, CheckpointSaver, EarlyStopper, History, LRMonitor, NaNMonitor, OptimizerMonitor, SpeedMonitor
from callsheet.core.lifecycle import EVENTS as OURS
from callsheet.errors import NotSupported, RegistrationError
from callsheet.testing import FakeLoop, Recorder, check_events
from callsheet.testing.ranks import run_ranks
from callsheet.trainer.tasks import Task

from .loops import automodel as own_loop
from .loops.automodel import Recipe, StepScheduler, released_scheduler, train
from .loops.job import POINTS

torch.set_num_threads(1)

RELEASED = released_scheduler()


@pytest.fixture(
    autouse=True,
    params=[
        pytest.param(StepScheduler, id="copy"),
        *([] if RELEASED is None else [pytest.param(RELEASED, id="release")]),
    ],
)
def step_scheduler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the recipe use the copy of the step scheduler, and that of the installed release."""
    monkeypatch.setattr(own_loop, "StepScheduler", request.param)


def run_recipe(folder: Path, callbacks: Any, *, strict: bool = True, **options: Any) -> Recipe:
    """Run a recipe of two epochs of six steps, which validates and saves after each epoch."""
    torch.manual_seed(3)
    hosted = [] if callbacks is None else [host(callbacks, log_interval=1, strict=strict)]
    recipe = Recipe(POINTS, folder, hosted, **{"num_epochs": 2, **options})
    recipe.setup()
    recipe.run_train_validation_loop()
    return recipe


def weights(recipe: Recipe) -> list[torch.Tensor]:
    return [value.clone() for value in recipe.model_parts[0].state_dict().values()]


class RecordsOutcomes(Callback):
    """Records how the run ended."""

    phase = "report"

    def __init__(self) -> None:
        self.outcome = ""
        self.error: BaseException | None = None

    def on_exception(self, ctx: Context) -> None:
        self.error = ctx.exception

    def on_run_end(self, ctx: Context) -> None:
        self.outcome = str(ctx.run.outcome)


class RequestsAtStep(Callback):
    """Makes a request at an event of a step."""

    def __init__(self, what: str, step: int, event: str = "on_train_step_end") -> None:
        self.what, self.step = what, step
        setattr(self, event, self._request)

    def _request(self, ctx: Context) -> None:
        if ctx.step == self.step:
            getattr(ctx.control, self.what)("asked")


# --- the host ---


def test_the_map_of_a_guest_covers_all_hooks_and_names_existing_events() -> None:
    assert set(HOOKS) == {hook for hooks in EVENTS.values() for hook in hooks}
    assert set(EVENTS) <= set(OURS)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_training_is_unchanged_and_every_event_is_fired(accumulate: int, tmp_path: Path) -> None:
    recorder, history = Recorder(fields=("loss", "learning_rate", "grad_norm")), History()
    callbacks = [recorder, history, SpeedMonitor(), OptimizerMonitor(), LRMonitor(), NaNMonitor()]
    recipe = run_recipe(tmp_path / "with", callbacks, accumulate=accumulate)
    plain = run_recipe(tmp_path / "without", None, accumulate=accumulate)
    assert all(torch.equal(a, b) for a, b in zip(weights(recipe), weights(plain), strict=True))
    check_events(recorder.events)
    counted = {event: recorder.events.count(event) for event in set(recorder.events)}
    steps = 12 // accumulate
    assert {counted[f"on_{name}"] for name in ("train_step_start", "train_step_end", "optimizer_step_end", "fetch_end")} == {
        steps
    }
    assert {counted[f"on_{name}"] for name in ("forward_start", "loss_end", "backward_end", "microbatch_end")} == {12}
    assert {counted[f"on_{name}"] for name in ("eval_all_start", "eval_end", "epoch_end", "checkpoint_published")} == {2}
    assert counted["on_eval_forward_end"] == counted["on_eval_step_end"] == 6
    assert counted["on_log"] == steps + 2
    assert set(OURS) - set(counted) == {*NOT_FIRED, "on_exception", "on_preempt"}
    assert history["train/loss"] == pytest.approx(plain.losses)
    assert history["validation/loss"] == pytest.approx([each["default"] for each in plain.evaluated])
    assert history["train/label_tokens"] == [4.0] * steps
    assert history["automodel/tps"] == [1.0] * steps
    norms = dict(recorder.values["grad_norm"])
    assert norms["on_train_step_end"] > 0
    rates = {value for event, value in recorder.values["learning_rate"] if event == "on_optimizer_step_end"}
    assert rates == {0.02}


def test_train_of_the_loop_module_is_unchanged_with_and_without_evaluation(tmp_path: Path) -> None:
    model, plain = train(POINTS, tmp_path / "a", [recorder := Recorder()]), train(POINTS, tmp_path / "b", "empty")
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), plain.state_dict().values(), strict=True))
    assert recorder.events.count("on_log") == 6 + 2
    train(POINTS, tmp_path / "c", [alone := Recorder()], evaluate=False)
    assert not {"on_eval_all_start", "on_checkpoint_save_start"} & set(alone.events)
    check_events(alone.events)


def test_the_learning_rate_of_a_step_is_the_one_before_the_scheduler_steps(tmp_path: Path) -> None:
    class Schedules(Recipe):
        def setup(self) -> None:
            super().setup()
            self.lr_scheduler = [torch.optim.lr_scheduler.StepLR(self.optimizer[0], 1, gamma=0.5)]

    recorder = Recorder(fields=("learning_rate", "scheduler"))
    recipe = Schedules(POINTS, tmp_path, [host([recorder])], num_epochs=1)
    recipe.setup()
    recipe.run_train_validation_loop()
    rates = [value for event, value in recorder.values["learning_rate"] if event == "on_train_step_end"]
    assert rates == pytest.approx([0.02 * 0.5**step for step in range(6)])


def test_automodel_carries_out_requests(tmp_path: Path) -> None:
    recorder = Recorder(fields=("checkpoint",))
    callbacks = [RequestsAtStep("evaluate", 2), RequestsAtStep("save", 3), RequestsAtStep("stop", 8), recorder]
    recipe = run_recipe(tmp_path, callbacks)
    assert len(recipe.losses) == 8
    recorded = [(info.step, info.kind) for event, info in recorder.values["checkpoint"] if event == "on_checkpoint_published"]
    assert recorded == [(3, "requested"), (6, "periodic"), (8, "periodic")]  # AutoModel also saves at its last step
    assert len(recipe.evaluated) == 4  # after step 2, and at each of the three saves
    assert sorted(path.name for path in tmp_path.glob("epoch*")) == ["epoch_0_step_2", "epoch_0_step_5", "epoch_1_step_7"]
    assert recipe.step_scheduler.ckpt_every_steps == 6
    assert recipe.step_scheduler.val_every_steps is None
    check_events(recorder.events)


@pytest.mark.parametrize(
    ("event", "step", "steps"), [("on_train_start", 0, 0), ("on_eval_all_end", 6, 6), ("on_checkpoint_published", 6, 6)]
)
def test_a_stop_ends_training_whichever_event_it_is_requested_at(event: str, step: int, steps: int, tmp_path: Path) -> None:
    ends = RecordsOutcomes()
    recipe = run_recipe(tmp_path, [RequestsAtStep("stop", step, event), ends])
    assert len(recipe.losses) == steps
    assert ends.outcome == "stopped"


def test_a_save_requested_after_an_evaluation_is_written_at_that_step(tmp_path: Path) -> None:
    recorder = Recorder(fields=("checkpoint",))
    saver = CheckpointSaver(save_interval="1ep", monitor="validation/loss", mode="min")
    recipe = run_recipe(tmp_path, [saver, recorder], val_every_steps=3)
    infos = [info for event, info in recorder.values["checkpoint"] if event == "on_checkpoint_published"]
    assert {info.step for info in infos} >= {6, 12}
    assert all(info.val_losses["validation"] in [each["default"] for each in recipe.evaluated] for info in infos)
    assert any(info.best_metric_key == "validation/loss" for info in infos)
    losses = {info.step: info.train_loss for info in infos}
    assert losses[12] == pytest.approx(recipe.losses[-1])


@pytest.mark.parametrize("averages", [False, True])
def test_a_resume_from_an_automodel_checkpoint_restores_the_callback_states(averages: bool, tmp_path: Path) -> None:
    def more() -> list[Callback]:
        return [EMA(half_life=3)] if averages else []

    whole, part, rest = History(), History(), History()
    uninterrupted = run_recipe(tmp_path / "whole", [whole, *more()])
    run_recipe(tmp_path / "part", [part, *more()], max_steps=6)
    recorder = Recorder(fields=("checkpoint",))
    path = str(tmp_path / "part" / "epoch_0_step_5")
    hosted = host([rest, recorder, *more()], log_interval=1)
    again = Recipe(POINTS, tmp_path / "part", [hosted], num_epochs=2, cfg={"checkpoint.restore_from": path})
    again.setup()
    again.step_scheduler.epoch = 1  # AutoModel's own sampler would restore this
    again.run_train_validation_loop()
    assert all(torch.equal(a, b) for a, b in zip(weights(again), weights(uninterrupted), strict=True))
    assert rest["train/loss"] == pytest.approx(whole["train/loss"])
    assert recorder.recorded[-1].batch == 12
    loaded = dict(recorder.values["checkpoint"])["on_checkpoint_load_end"]
    assert (loaded.path, loaded.step) == (path, 6)
    check_events(recorder.events)


def test_a_resume_without_callback_states_logs_a_warning_and_continues(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run_recipe(tmp_path, None, max_steps=6)
    recorder = Recorder()
    path = str(tmp_path / "epoch_0_step_5")
    again = Recipe(POINTS, tmp_path, [host([recorder])], num_epochs=2, cfg={"checkpoint.restore_from": path})
    again.setup()
    with caplog.at_level(logging.WARNING, "callsheet"):
        again.run_train_validation_loop()
    assert "resumes from step 6, but no state of callbacks was found" in caplog.text
    assert recorder.recorded[-1].batch == 12


def test_a_background_checkpoint_is_published_when_it_is_complete(tmp_path: Path) -> None:
    recorder = Recorder(fields=("checkpoint",))
    run_recipe(tmp_path, [recorder], is_async=True)
    order = [
        event
        for event in recorder.events
        if event in ("on_checkpoint_save_end", "on_checkpoint_published", "on_epoch_end", "on_train_end")
    ]
    assert order == [
        *("on_epoch_end", "on_checkpoint_save_end", "on_epoch_end", "on_checkpoint_published"),
        *("on_checkpoint_save_end", "on_checkpoint_published", "on_train_end"),
    ]
    published = [info.step for event, info in recorder.values["checkpoint"] if event == "on_checkpoint_published"]
    assert published == [6, 12]
    check_events(recorder.events)


def test_no_checkpoint_is_reported_if_nothing_is_saved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder()
    run_recipe(tmp_path, [recorder], saves=False)
    assert "on_checkpoint_save_start" not in recorder.events
    assert not list(tmp_path.glob("epoch*"))
    run_recipe(tmp_path, [RequestsAtStep("save", 2)], saves=False)
    assert "RequestsAtStep calls ctx.control.save, which" in caplog.text


def test_several_validation_sets_are_named_and_evaluated_with_averaged_weights(tmp_path: Path) -> None:
    batches = list(POINTS.validation_batches())
    sets = {"squad": batches[:1], "hellaswag": batches[1:]}
    recorder, seen = Recorder(fields=("eval_name", "eval_results")), []

    class ComparesWeights(Callback):
        def on_train_step_end(self, ctx: Context) -> None:
            self.trained = [parameter.detach().clone() for parameter in ctx.model.parameters()]

        def on_eval_end(self, ctx: Context) -> None:
            seen.append(all(torch.equal(a, b) for a, b in zip(self.trained, ctx.model.parameters(), strict=True)))

    recipe = run_recipe(tmp_path / "a", [recorder, EMA(half_life=3), ComparesWeights()], sets=sets)
    plain = run_recipe(tmp_path / "b", None, sets=sets)
    assert [name for event, name in recorder.values["eval_name"] if event == "on_eval_end"] == ["squad", "hellaswag"] * 2
    found = [value for event, value in recorder.values["eval_results"] if event == "on_eval_all_end"]
    losses = [(name, each["loss"]) for result in found for name, each in result.items()]
    assert losses == [(name, pytest.approx(loss)) for result in recipe.evaluated for name, loss in result.items()]
    assert recipe.evaluated != plain.evaluated
    assert seen == [False] * 4
    assert recipe.losses == plain.losses
    check_events(recorder.events)


def test_epochs_are_counted_for_data_of_unknown_length(tmp_path: Path) -> None:
    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(POINTS.batches())

    recorder = Recorder()
    loader = iter_only(Stream())
    run_recipe(tmp_path, [recorder], dataloader=loader, max_steps=12, ckpt_every_steps=100)
    assert recorder.events.count("on_epoch_end") == recorder.events.count("on_epoch_start") == 2
    assert recorder.recorded[-1].batch == 12
    check_events(recorder.events)


class iter_only:  # noqa: N801  # an object that has only `__iter__`
    def __init__(self, data: Any) -> None:
        self._data = data

    def __iter__(self) -> Any:
        return iter(self._data)


def test_an_early_stop_ends_training(tmp_path: Path) -> None:
    class RaisesEvalLoss(Callback):
        phase = "change"

        def on_eval_forward_end(self, ctx: Context) -> None:
            ctx.outputs = ctx.outputs + 100.0 * ctx.step

    recipe = run_recipe(tmp_path, [RaisesEvalLoss(), EarlyStopper(monitor="validation/loss", patience="1ep")], num_epochs=9)
    assert len(recipe.losses) < 5 * 6


def test_a_callback_can_replace_batch_and_outputs(tmp_path: Path) -> None:
    class Changes(Callback):
        phase = "change"

        def on_fetch_end(self, ctx: Context) -> None:
            ctx.batch = ctx.batch * 0.0

        def on_forward_end(self, ctx: Context) -> None:
            ctx.outputs = ctx.outputs * 0.0 + 1.0

    recipe = run_recipe(tmp_path, [Changes()], num_epochs=1, saves=False)
    targets = torch.cat([targets for _, targets in POINTS.batches()])
    assert sum(recipe.losses) / 6 == pytest.approx((targets - 1.0).square().mean().item(), rel=1e-5)


def test_model_calls_by_a_callback_fire_no_forward_events(tmp_path: Path) -> None:
    class Calls(Callback):
        draws_random = False

        def on_train_step_end(self, ctx: Context) -> None:
            ctx.model.eval()
            with torch.no_grad():
                ctx.model(torch.zeros(4, 4))
            ctx.model.train()
            ctx.model(torch.zeros(4, 4))

    recorder = Recorder()
    run_recipe(tmp_path, [Calls(), recorder], num_epochs=1)
    check_events(recorder.events)
    assert recorder.events.count("on_eval_forward_end") == 3
    assert recorder.events.count("on_forward_end") == 6


class CallsModel(AutoModelCallback):
    """An AutoModel callback that calls the model at every event, in evaluation mode and in training mode."""

    def _call_model(self, recipe: Any, **_: Any) -> None:
        model = recipe.model_parts[0]
        was_training = model.training
        model.eval()
        with torch.no_grad():
            model(torch.zeros(4, 4))
        model.train()
        model(torch.zeros(4, 4))
        model.train(was_training)


for _hook in ("on_train_start", "on_train_batch_end", "on_validation_end", "on_save_checkpoint", "on_train_end"):
    setattr(CallsModel, _hook, CallsModel._call_model)


def test_a_callback_that_calls_the_model_at_every_event_starts_no_evaluation(tmp_path: Path) -> None:
    found: list[Any] = []
    for hosted in ([], [host(recorder := Recorder()), host(EMA(half_life=2, at_end=False))]):
        torch.manual_seed(3)
        recipe = Recipe(POINTS, tmp_path / f"{len(found)}", [*hosted, CallsModel()], num_epochs=2, val_every_steps=2)
        recipe.setup()
        recipe.run_train_validation_loop()
        found.append((recipe.losses, weights(recipe)))
    (plain, before), (ours, after) = found
    assert plain == ours
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    check_events(recorder.events)
    assert recorder.events.count("on_train_step_end") == len(ours) == recorder.events.count("on_microbatch_end")
    assert recorder.events.count("on_eval_all_end") == len(recipe.evaluated)
    assert not {"_run_train_optim_step", "_run_validation_epoch"} & set(vars(recipe))


class WithoutMethods(Recipe):
    """A recipe whose methods for steps and validations have other names, as in AutoModel's for sequence classification."""

    STEP, VALIDATION = "_step", "_validate"
    _step, _validate = Recipe._run_train_optim_step, Recipe._run_validation_epoch

    def __getattribute__(self, name: str) -> Any:
        if name in (Recipe.STEP, Recipe.VALIDATION):
            raise AttributeError(name)
        return super().__getattribute__(name)


@pytest.mark.parametrize("request_", ["evaluate", "save"])
def test_a_requested_validation_is_observed_in_a_recipe_without_the_methods(request_: str, tmp_path: Path) -> None:
    class Requests(Callback):
        def on_train_step_end(self, ctx: Context) -> None:
            if ctx.step == 2:
                getattr(ctx.control, request_)("a test")

    recorder = Recorder()
    recipe = WithoutMethods(POINTS, tmp_path, [host([recorder, Requests()])], num_epochs=1)
    recipe.setup()
    recipe.run_train_validation_loop()
    check_events(recorder.events)
    assert len(recipe.evaluated) == recorder.events.count("on_eval_all_end")
    assert recorder.events.count("on_eval_forward_end") == recorder.events.count("on_eval_step_end") == 3 * len(recipe.evaluated)


class CallsModelTwice(Recipe):
    """A recipe whose loss calls the model twice."""

    def setup(self) -> None:
        super().setup()
        once = self.job.loss

        class Job:
            """The recipe's job with another loss."""

            def __init__(self, job: Any) -> None:
                self._job = job

            def __getattr__(self, name: str) -> Any:
                return getattr(self._job, name)

            def loss(self, outputs: Any, targets: Any, model: Any = self.model_parts[0]) -> Any:
                loss = once(outputs, targets)
                return loss + model(torch.zeros(4, 4)).square().mean() if model.training else loss

        self.job = cast(Any, Job(self.job))


def test_several_forward_passes_of_a_batch_are_one_microbatch(tmp_path: Path) -> None:
    recorder, history = Recorder(fields=("microbatch",)), History()
    recipe = CallsModelTwice(POINTS, tmp_path, [host([recorder, history])], num_epochs=1, accumulate=2)
    recipe.setup()
    recipe.run_train_validation_loop()
    check_events(recorder.events)
    assert recorder.events.count("on_microbatch_end") == 2 * recorder.events.count("on_train_step_end")
    assert history.records[-1][1]["time/sample"] == sum(len(inputs) for inputs, _ in POINTS.batches())


def test_events_that_are_never_fired_are_rejected(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Listens(Callback):
        def on_predict_end(self, ctx: Context) -> None: ...

    with pytest.raises(NotSupported, match="Listens listens to on_predict_end, which NeMo AutoModel does not fire"):
        run_recipe(tmp_path / "a", [Listens()])
    run_recipe(tmp_path / "b", [Listens()], strict=False)
    assert "NeMo AutoModel does not fire" in caplog.text

    class Steps(Callback):
        def on_eval_step_end(self, ctx: Context) -> None: ...

    run_recipe(tmp_path / "c", [Steps()])
    with pytest.raises(NotSupported, match="Steps listens to on_eval_step_end"):
        run_recipe(tmp_path / "d", [Steps()], sets={"a": [], "b": []})
    recipe = Recipe(POINTS, tmp_path, [host([])], num_epochs=1)
    recipe.setup()
    recipe.pp = object()  # type: ignore[attr-defined]
    with pytest.raises(NotSupported, match="pipeline parallelism is not supported"):
        recipe.run_train_validation_loop()


def test_a_loop_that_does_not_call_its_model_as_a_whole_is_rejected(tmp_path: Path) -> None:
    class Parts(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.inner = model

        def __call__(self, inputs: Any) -> Any:
            return self.inner(inputs)  # PyTorch does not call the hooks of the whole model then

    class Listens(Callback):
        def on_forward_start(self, ctx: Context) -> None: ...

    with pytest.raises(
        NotSupported, match="Listens listens to on_forward_start, which NeMo AutoModel did not fire in its first step"
    ):
        run_recipe(tmp_path, [Listens()], model_wrap=Parts)


@pytest.mark.parametrize("reports_exception", [True, False])
def test_an_exception_fails_the_run(reports_exception: bool, tmp_path: Path) -> None:
    class Broken(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.inner, self.calls = model, 0

        def forward(self, inputs: Any) -> Any:
            self.calls += 1
            if self.calls == 3:
                raise ZeroDivisionError("in the model")
            return self.inner(inputs)

    ends = RecordsOutcomes()
    recipe = Recipe(POINTS, tmp_path, [host([ends])], num_epochs=1, model_wrap=Broken)
    recipe.setup()
    with pytest.raises(ZeroDivisionError) as caught:
        recipe.run_train_validation_loop()
    assert ends.outcome == ""
    if reports_exception:  # AutoModel's own `main` reports the error like this
        recipe.callback_runner.on_exception(recipe, exception=caught.value)
        assert ends.error is caught.value
    else:
        del recipe, caught
        gc.collect()
    assert ends.outcome == "failed"


def test_an_error_of_a_callback_is_reported_once(tmp_path: Path) -> None:
    class Fails(Callback):
        def on_train_step_end(self, ctx: Context) -> None:
            if ctx.step == 2:
                raise ZeroDivisionError

    ends = RecordsOutcomes()
    recipe = Recipe(POINTS, tmp_path, [hosted := host([Fails(), ends])], num_epochs=1)
    recipe.setup()
    with pytest.raises(ZeroDivisionError) as caught:
        recipe.run_train_validation_loop()
    assert (ends.outcome, ends.error) == ("failed", caught.value)
    hosted.on_exception(recipe, exception=RuntimeError("again"))
    assert ends.error is caught.value
    assert not recipe.model_parts[0]._forward_pre_hooks


@pytest.mark.parametrize("saves", [True, False])
def test_sigterm_preempts_the_run(saves: bool, tmp_path: Path) -> None:
    class Kills(Callback):
        def on_train_step_end(self, ctx: Context) -> None:
            if ctx.step == 3:
                os.kill(os.getpid(), signal.SIGTERM)

    ends, recorder = RecordsOutcomes(), Recorder(fields=("checkpoint",))
    recipe = run_recipe(tmp_path, [Kills(), ends, recorder], saves=saves)
    assert len(recipe.losses) == 3
    assert ends.outcome == "preempted"
    assert recorder.events.count("on_preempt") == 1
    kinds = [(info.step, info.kind) for event, info in recorder.values["checkpoint"] if event == "on_checkpoint_published"]
    assert kinds == ([(3, "preempt")] if saves else [])
    check_events(recorder.events)


def test_a_host_can_be_used_for_several_runs(tmp_path: Path) -> None:
    recorder = Recorder()
    hosted = host([recorder])
    for name in ("a", "b"):
        recipe = Recipe(POINTS, tmp_path / name, [hosted], num_epochs=1)
        recipe.setup()
        recipe.run_train_validation_loop()
        assert not recipe.model_parts[0]._forward_hooks
    assert recorder.events.count("on_run_start") == recorder.events.count("on_run_end") == 2


def test_the_losses_of_a_distillation_are_logged_and_in_the_loss_dict(tmp_path: Path) -> None:
    class Distils(Recipe):
        def _run_train_optim_step(self, batches: list[Any]) -> MetricsSample:
            sample = super()._run_train_optim_step(batches)
            sample.metrics |= {"ce_loss": 1.0, "kd_loss": 3.0, "accuracy": 0.5}
            return sample

    history, recorder = History(), Recorder(fields=("loss_dict",))
    recipe = Distils(POINTS, tmp_path, [host([history, recorder], log_interval=1)], num_epochs=1)
    recipe.setup()
    recipe.run_train_validation_loop()
    assert history["train/kd_loss"] == [3.0] * 6
    assert history["train/accuracy"] == [0.5] * 6
    assert set(dict(recorder.values["loss_dict"])["on_train_step_end"]) == {"loss", "ce_loss", "kd_loss"}


# --- guests ---


class Collector(AutoModelCallback):
    """Records everything that AutoModel passes: the loss of each step, each validation, each checkpoint."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_start(self, recipe: Any, **kwargs: Any) -> None:
        scheduler = recipe.step_scheduler
        self.seen.append(
            ("start", scheduler.step, scheduler.epoch, scheduler.max_steps, scheduler.num_epochs, scheduler.epoch_len)
        )

    def on_train_batch_end(self, recipe: Any, **kwargs: Any) -> None:
        sample, scheduler = kwargs["train_log_data"], recipe.step_scheduler
        assert (sample.step, sample.epoch) == (scheduler.step, scheduler.epoch)
        rate = recipe.optimizer[0].param_groups[0]["lr"]
        assert sample.metrics["lr"] == rate
        last = (scheduler.is_last_batch, scheduler.is_last_step)
        self.seen.append(("step", sample.step, sample.epoch, round(float(sample.metrics["loss"]), 5), round(rate, 6), last))

    def on_validation_end(self, recipe: Any, **kwargs: Any) -> None:
        assert not recipe.model_parts[0].training
        for sample in kwargs["val_results"].values():
            self.seen.append(("validation", sample.step, sample.epoch, round(sample.metrics["val_loss"], 5)))

    def on_save_checkpoint(self, recipe: Any, **kwargs: Any) -> None:
        info = kwargs["checkpoint_info"]
        self.seen.append(
            ("saved", info["step"], info["epoch"], round(info["train_loss"], 5), list(map(float, info["val_losses"].values())))
        )

    def on_train_end(self, recipe: Any, **kwargs: Any) -> None:
        self.seen.append(("end", recipe.step_scheduler.step))


class Patience(AutoModelCallback):
    """Ends training when the validation loss has hardly fallen."""

    def __init__(self, how: str) -> None:
        self.how = how
        self.best = float("inf")
        self.decided: list[tuple[int, float]] = []

    def on_validation_end(self, recipe: Any, **kwargs: Any) -> None:
        (sample,) = kwargs["val_results"].values()
        loss, scheduler = sample.metrics["val_loss"], recipe.step_scheduler
        if loss > self.best - 0.7:
            self.decided.append((sample.step, round(loss, 5)))
            setattr(scheduler, self.how, True if self.how == "sigterm_flag" else scheduler.step + 1)
        self.best = min(self.best, loss)

    def state_dict(self) -> Mapping[str, Any]:
        return {"best": self.best}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best = state["best"]


def in_framework(folder: Path, callback: Any, **options: Any) -> Recipe:
    class Schedules(Recipe):
        def setup(self) -> None:
            super().setup()
            self.lr_scheduler = [torch.optim.lr_scheduler.StepLR(self.optimizer[0], 1, gamma=0.9)]

    torch.manual_seed(3)
    recipe = Schedules(POINTS, folder, [callback], **{"num_epochs": 2, **options})
    recipe.setup()
    recipe.run_train_validation_loop()
    return recipe


def as_guest(folder: Path, callback: Any, **options: Any) -> Trainer:
    torch.manual_seed(3)
    trainer = Trainer(
        POINTS.made_model(),
        POINTS.loss,
        POINTS.batches(),
        POINTS.validation_batches(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.02),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9),
        clip_grad_norm=1e9,
        seed=3,
        device="cpu",
        runs_folder=folder,
        **{
            "run_name": "guest",
            "max_duration": "2ep",
            "callbacks": [guest(callback), CheckpointSaver(save_interval="1ep", save_at_end=False)],
        }
        | options,
    )
    with trainer:
        trainer.fit()
    return trainer


def test_a_guest_receives_the_same_values_as_in_its_framework(tmp_path: Path) -> None:
    native, hosted_one = Collector(), Collector()
    in_framework(tmp_path, native)
    as_guest(tmp_path, hosted_one)
    assert [each[:3] for each in hosted_one.seen] == [each[:3] for each in native.seen]
    for mine, theirs in zip(hosted_one.seen, native.seen, strict=True):
        assert flat(mine[3:]) == pytest.approx(flat(theirs[3:]), abs=2e-4)


class Log(AutoModelCallback):
    """Records a line for each event."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def on_train_start(self, recipe: Any, **kwargs: Any) -> None:
        self.lines.append(f"training on {recipe.dist_env.world_size}")

    def on_save_checkpoint(self, recipe: Any, **kwargs: Any) -> None:
        self.lines.append(f"saved {'checkpoint_path' in kwargs['checkpoint_info']}")

    def on_validation_end(self, recipe: Any, **kwargs: Any) -> None:
        self.lines.append("validated")

    def on_train_end(self, recipe: Any, **kwargs: Any) -> None:
        self.lines.append("done")


def test_a_guest_is_called_in_the_same_order_as_in_its_framework(tmp_path: Path) -> None:
    native, hosted_one = Log(), Log()
    in_framework(tmp_path, native)
    as_guest(tmp_path, hosted_one)
    assert hosted_one.lines == native.lines == ["training on 1", *["validated", "saved True"] * 2, "done"]


def flat(values: Any) -> list[float]:
    return [number for value in values for number in (flat(value) if isinstance(value, (list, tuple)) else [value])]


@pytest.mark.parametrize("how", ["max_steps", "sigterm_flag"])
def test_a_guest_stops_at_the_same_step_as_in_its_framework(how: str, tmp_path: Path) -> None:
    native, hosted_one = Patience(how), Patience(how)
    recipe = in_framework(tmp_path, native, num_epochs=6)
    trainer = as_guest(tmp_path, hosted_one, max_duration="6ep")
    assert native.decided
    assert flat(hosted_one.decided) == pytest.approx(flat(native.decided), abs=2e-4)
    assert trainer.state.timestamp.batch == len(recipe.losses) < 36
    assert str(trainer.run.outcome) == "stopped"


def test_a_guest_s_state_is_saved_and_loaded(tmp_path: Path) -> None:
    first, second = Patience("max_steps"), Patience("max_steps")
    as_guest(tmp_path, first, max_duration="1ep", run_name="kept")
    assert first.best < float("inf")
    resumed = guest(second)
    with Trainer(
        POINTS.made_model(), POINTS.loss, POINTS.batches(), device="cpu", resume="auto", run_name="kept", runs_folder=tmp_path,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.02), callbacks=[resumed],
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9),
    ):  # fmt: skip
        assert second.best == first.best
    both = guest(CallbackRunner([Collector(), first]))
    assert both.state_dict() == {"1.Patience": {"best": first.best}}
    both.load_state_dict({"1.Patience": {"best": 0.5}})
    assert first.best == 0.5


def test_a_guest_listens_only_to_the_hooks_that_it_defines() -> None:
    class OverridesTrainEnd(AutoModelCallback):
        def on_train_end(self, recipe: Any, **kwargs: Any) -> None: ...

    wrapped = guest(OverridesTrainEnd())
    assert {event for event in OURS if event in vars(wrapped)} == {"on_data_init_end", "on_train_end"}

    class WithoutBaseClass:  # AutoModel's runner requires no base class
        def on_train_end(self, recipe: Any) -> None: ...

    assert "on_train_end" in vars(guest(WithoutBaseClass()))
    with pytest.raises(RegistrationError, match="not a callback with one of AutoModel's hooks"):
        guest(object())


def test_a_guest_receives_an_exception_and_not_the_end(tmp_path: Path) -> None:
    recorded: list[Any] = []

    class Listens(AutoModelCallback):
        def on_exception(self, recipe: Any, **kwargs: Any) -> None:
            recorded.append((recipe.step_scheduler.step, kwargs["exception"]))

        def on_train_end(self, recipe: Any, **kwargs: Any) -> None:
            recorded.append("end")

    error = ValueError("in the model")
    loop = FakeLoop(guest(Listens()), [3.0, 2.0, 1.0], folder=tmp_path, raises={3: error})
    with pytest.raises(ValueError, match="in the model"):
        loop.run()
    assert recorded == [(2, error)]


def test_a_guest_that_changes_the_last_step_to_a_later_one_is_rejected(tmp_path: Path) -> None:
    class SetsLaterMaxSteps(AutoModelCallback):
        def on_train_batch_end(self, recipe: Any, **kwargs: Any) -> None:
            recipe.step_scheduler.max_steps = 50

    with pytest.raises(NotSupported, match="max_steps=50 at step 0"):
        FakeLoop(guest(SetsLaterMaxSteps()), [1.0, 2.0], folder=tmp_path).run()


# --- several ranks ---


class RequestsOnRank1(Callback):
    """Makes requests on rank 1 only."""

    def on_train_step_end(self, ctx: Context) -> None:
        if ctx.run.rank == 1 and ctx.step in (3, 8):
            (ctx.control.save if ctx.step == 3 else ctx.control.stop)("the second rank")


def train_on_rank(folder: str) -> dict[str, Any]:
    import torch.distributed as dist

    class OnRanks(Recipe):
        """A recipe for two ranks, which both train on all of the data. The test only checks that both ranks do the same."""

        def setup(self) -> None:
            super().setup()
            self.model_parts = [nn.parallel.DistributedDataParallel(self.model_parts[0])]

        def _save(self, epoch: int, sample: MetricsSample, found: Mapping[str, MetricsSample]) -> None:
            path = Path(folder) / f"epoch_{epoch}_step_{self.step_scheduler.step}"
            path.mkdir(parents=True, exist_ok=True)
            dist.barrier()
            info = {"checkpoint_path": str(path), "train_loss": sample.metrics["loss"]}
            self.callback_runner.on_save_checkpoint(self, checkpoint_info=info)

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    recorder = Recorder(fields=("checkpoint", "model"))
    recipe = OnRanks(POINTS, Path(folder), [host([RequestsOnRank1(), recorder])], num_epochs=30)
    recipe.setup()
    recipe.run_train_validation_loop()
    check_events(recorder.events)
    saved = [(info.step, info.kind) for event, info in recorder.values["checkpoint"] if event == "on_checkpoint_published"]

    collected: list[MetricsSample] = []

    class CollectsMetrics(AutoModelCallback):
        def on_train_batch_end(self, recipe: Any, **kwargs: Any) -> None:
            collected.append(kwargs["train_log_data"])

        def on_validation_end(self, recipe: Any, **kwargs: Any) -> None:
            collected.extend(kwargs["val_results"].values())

    as_guest(Path(folder) / "guest", CollectsMetrics(), max_duration="1ep", parallel="ddp", callbacks=[guest(CollectsMetrics())])
    dist.destroy_process_group()
    losses = [round(float(sample.metrics.get("loss", sample.metrics.get("val_loss", 0.0))), 5) for sample in collected]
    return {"steps": len(recipe.losses), "saved": saved, "model": type(recorder.values["model"][0][1]).__name__, "losses": losses}


def test_all_ranks_take_the_same_steps_and_save_the_same_checkpoints(tmp_path: Path) -> None:
    first, second = run_ranks(train_on_rank, 2, str(tmp_path))
    assert first == second
    assert any(
        step > 3 and kind == "requested" for step, kind in first["saved"]
    )  # one rank made the request at step 3, and all ranks agreed on a later step
    assert 8 < first["steps"] < 180
    assert first["model"] == "SmallModel"
    assert all(loss > 0 for loss in first["losses"])
    assert len(first["losses"]) == 3 + 1  # the Trainer shards the data: three steps per epoch, and a validation


class TokenTask(Task):
    """Predicts each token's label from a batch with `input_ids` and `labels`."""

    def forward(self, model: nn.Module, batch: Any) -> Any:
        return model(batch["input_ids"])

    def loss(self, outputs: Any, batch: Any) -> Any:
        return nn.functional.cross_entropy(outputs.transpose(1, 2), batch["labels"])

    def weight(self, batch: Any) -> Any:
        return (batch["labels"] != -100).sum()


def count_tokens_on_rank(folder: str) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    collected: list[dict[str, Any]] = []

    class CollectsMetrics(AutoModelCallback):
        def on_train_batch_end(self, recipe: Any, **kwargs: Any) -> None:
            metrics = kwargs["train_log_data"].metrics
            collected.append({name: metrics[name] for name in ("num_tokens_per_step", "num_label_tokens", "loss")})

        def on_validation_end(self, recipe: Any, **kwargs: Any) -> None:
            collected.extend({"num_label_tokens": each.metrics["num_label_tokens"]} for each in kwargs["val_results"].values())

    # Three batches: the second rank has no batch in the second step, and gets a filler.
    ids = [torch.arange(12).reshape(2, 6) % 5 + number for number in range(3)]
    batches = [{"input_ids": each, "labels": each.where(each > 1, -100)} for each in ids]
    torch.manual_seed(3)
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8))
    trainer = Trainer(
        model, TokenTask(), batches, batches, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0), device="cpu",
        runs_folder=folder, run_name="fillers", max_duration="1ep", parallel="ddp", callbacks=[guest(CollectsMetrics())],
    )  # fmt: skip
    with trainer:
        trainer.fit()
        third = nn.functional.cross_entropy(model(ids[2]).transpose(1, 2), batches[2]["labels"])
    return [*collected, {"labels": [int((each["labels"] != -100).sum()) for each in batches], "third": float(third)}]


def test_fillers_of_ranks_without_a_batch_are_not_counted(tmp_path: Path) -> None:
    for *seen, wanted in run_ranks(count_tokens_on_rank, 2, str(tmp_path)):
        first, second, validation = seen
        labels = wanted["labels"]
        assert (first["num_tokens_per_step"], first["num_label_tokens"]) == (24, labels[0] + labels[1])
        assert (second["num_tokens_per_step"], second["num_label_tokens"]) == (12, labels[2])
        assert second["loss"] == pytest.approx(wanted["third"])
        assert validation["num_label_tokens"] == sum(labels)
