"""callsheet's callbacks in Keras's loops, and Keras's callbacks in ours."""

from __future__ import annotations

import csv
import gc
import os
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from callsheet import Callback, Context, Trainer
from callsheet.callbacks import EMA, CheckpointSaver, History, LRMonitor, NaNMonitor, OptimizerMonitor, SpeedMonitor
from callsheet.errors import ConfigError, NotSupported
from callsheet.testing import Recorder, check_events, run_ranks

from .loops import keras as own_loop  # before keras, because it sets the backend
from .loops.job import POINTS, Job
from .rows import check_or_write_cell

import keras  # isort: skip

from callsheet.bridges.keras import guest, host  # isort: skip
from callsheet.bridges.matrix import Cell

LINE = Job(lambda: nn.Linear(4, 1), POINTS.loss, POINTS.train, POINTS.validation)
"""A job without random numbers, so that its losses are the same in every loop."""

pytestmark = pytest.mark.filterwarnings("ignore:.*shuffle=True.*")  # Keras ignores shuffle for a DataLoader, with a warning


pytestmark = pytest.mark.usefixtures("one_thread")


def hosted(folder: Path, *callbacks: Callback, **options: Any) -> Any:
    return host(list(callbacks), run_name="small", runs_folder=folder, **{"log_interval": "2ba", **options})


def trained(
    callbacks: list[Any], *, job: Job = POINTS, model: Any = None, epochs: int = 2, evaluated: bool = True, verbose: int = 0
) -> Any:
    torch.manual_seed(3)
    model = model if model is not None else own_loop.compiled(job)
    validation = job.validation_batches() if evaluated else None
    model.fit(job.batches(), validation_data=validation, epochs=epochs, callbacks=callbacks, verbose=verbose)
    return model


def same(one: Any, other: Any) -> bool:
    values = [each.inner.module.state_dict().values() for each in (one, other)]
    return all(torch.equal(a, b) for a, b in zip(*values, strict=True))


def test_training_is_unchanged_and_every_event_is_fired(tmp_path: Path) -> None:
    recorder, history = Recorder(fields=("loss", "batch", "learning_rate")), History()
    given = [recorder, history, SpeedMonitor(), OptimizerMonitor(), LRMonitor(), NaNMonitor()]
    with_them = trained([hosted(tmp_path, *given, log_interval="1ba")])
    without = trained([])
    assert same(with_them, without)
    check_events(recorder.events)
    events = recorder.events
    for event in ("train_step_end", "forward_end", "backward_end", "loss_end", "clip_gradients_end", "optimizer_step_end"):
        assert events.count(f"on_{event}") == 12, event
    assert events.count("on_eval_all_end") == 2
    assert events.count("on_eval_forward_end") == 6
    assert (events[0], events[-1]) == ("on_run_start", "on_run_end")
    losses = history["train/loss"]
    means = [sum(losses[i : i + 6]) / 6 for i in (0, 6)]
    assert means == pytest.approx(without.history.history["loss"], rel=1e-5)
    assert history["validation/loss"] == pytest.approx(without.history.history["val_loss"], rel=1e-6)
    assert history["lr/AdamW/0"] == pytest.approx([0.02] * 12)
    assert [tuple(part.shape) for part in recorder.values["batch"][0][1]] == [(4, 4), (4, 1)]


def test_training_with_keras_s_own_layers_losses_and_metrics_is_unchanged(tmp_path: Path) -> None:
    def fit(callbacks: list[Any]) -> Any:
        keras.utils.set_random_seed(3)
        layers = [keras.layers.Dense(8), keras.layers.BatchNormalization(), keras.layers.Dropout(0.3), keras.layers.Dense(1)]
        model = keras.Sequential([keras.layers.Input((4,)), *layers])
        rate = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
        model.compile(optimizer=keras.optimizers.SGD(rate, loss_scale_factor=8.0), loss="mse", metrics=["mae"])
        inputs, targets = (tensor.numpy() for tensor in LINE.train.tensors)
        return model, model.fit(inputs, targets, batch_size=8, epochs=2, validation_split=0.25, callbacks=callbacks, verbose=0)

    recorder, history = Recorder(fields=("learning_rate",)), History()
    model, ours = fit([hosted(tmp_path, recorder, history, log_interval="1ba")])
    plain, theirs = fit([])
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), plain.state_dict().values(), strict=True))
    assert ours.history == theirs.history
    check_events(recorder.events)
    losses = history["train/loss"]  # batches of 8, 8 and 2 rows; the loss is not scaled
    means = [(8 * losses[i] + 8 * losses[i + 1] + 2 * losses[i + 2]) / 18 for i in (0, 3)]
    assert means == pytest.approx(theirs.history["loss"], rel=1e-5)
    assert history["validation/mae"] == pytest.approx(theirs.history["val_mae"])
    assert history["keras/mae"] == pytest.approx(theirs.history["mae"])
    rates = [float(rate) for event, rate in recorder.values["learning_rate"] if event == "on_train_step_end"]
    assert rates == pytest.approx([0.1 * 0.5**step for step in range(6)])


def test_a_module_in_a_keras_model_is_observed_with_its_own_parameter_names(tmp_path: Path) -> None:
    recorder, history, model = Recorder(), History(), own_loop.compiled(POINTS)
    trained([hosted(tmp_path, recorder, history, OptimizerMonitor(batch_log_interval=2), model=model.inner.module)], model=model)
    assert same(model, trained([]))
    check_events(recorder.events)
    assert recorder.events.count("on_forward_end") == 12
    assert len(history["l2_norm/grad/body.weight"]) == 6
    with pytest.raises(ConfigError, match="has 6 weights that are not in"):
        trained([hosted(tmp_path, model=nn.Linear(1, 1))])


def test_an_error_when_training_begins_fails_the_run(tmp_path: Path) -> None:
    class RaisesAtTheStart(Callback):
        def on_train_start(self, ctx: Context) -> None:
            raise ZeroDivisionError

    ends, model = RecordsOutcomes(), own_loop.compiled(POINTS)
    with pytest.raises(ZeroDivisionError):
        trained([hosted(tmp_path, ends, RaisesAtTheStart())], model=model)
    assert ends.recorded == ["ZeroDivisionError", "failed"]
    assert "apply" not in vars(model.optimizer)


def test_no_hooks_and_wrappers_are_left_in_the_model(tmp_path: Path) -> None:
    recorder = Recorder()
    bridge, model = hosted(tmp_path, recorder), own_loop.compiled(POINTS)
    trained([bridge], model=model)
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert "apply" not in vars(model.optimizer)
    assert "_PatchedFunction" not in model.train_function.__qualname__
    assert "_PatchedFunction" not in model.test_function.__qualname__
    trained([bridge], model=model)  # the host can be used again
    assert recorder.events.count("on_run_start") == recorder.events.count("on_run_end") == 2
    assert recorder.events.count("on_train_step_end") == 24


class RequestsAtStep(Callback):
    """Makes a request at the end of a step."""

    def __init__(self, what: str, step: int) -> None:
        self.what, self.step = what, step

    def on_train_step_end(self, ctx: Context) -> None:
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
    """Records how the run ended, and the exception."""

    def __init__(self) -> None:
        self.recorded: list[str] = []

    def on_exception(self, ctx: Context) -> None:
        self.recorded.append(type(ctx.exception).__name__)

    def on_run_end(self, ctx: Context) -> None:
        self.recorded.append(str(ctx.run.outcome))


def test_requests_are_carried_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder(fields=("checkpoint",))
    model = trained([hosted(tmp_path, RequestsAtStep("save", 2), RequestsAtStep("stop", 7), recorder)])
    assert int(model.optimizer.iterations) == 7
    calls = [(event, info.step, info.kind) for event, info in recorder.values["checkpoint"] if info is not None]
    assert ("on_checkpoint_published", 2, "requested") in calls
    check_events(recorder.events)
    trained([hosted(tmp_path / "2", RequestsAtStep("evaluate", 2))])
    assert "RequestsAtStep calls ctx.control.evaluate, which Keras does not support here" in caplog.text


@pytest.mark.parametrize("step", [4, 6, 9])
def test_a_resume_from_our_checkpoint_gives_identical_weights_and_losses(step: int, tmp_path: Path) -> None:
    whole, history, recorder = History(), History(), Recorder()
    uninterrupted = trained([hosted(tmp_path / "whole", whole, EMA(half_life=3))])
    saver = CheckpointSaver(save_interval=f"{step}ba")
    with pytest.raises(ZeroDivisionError):
        trained([hosted(tmp_path, History(), EMA(half_life=3), saver, Fails(step + 1))])
    saver = CheckpointSaver(save_interval="50ba")
    again = trained([hosted(tmp_path, history, EMA(half_life=3), recorder, saver, resume="auto")])
    assert same(again, uninterrupted)
    assert int(again.optimizer.iterations) == recorder.recorded[-1].batch == 12
    assert history["train/loss"] == whole["train/loss"]
    assert history["validation/loss"] == whole["validation/loss"]
    check_events(recorder.events)


class SendsSIGTERM(Callback):
    """Sends SIGTERM to its own process at a step."""

    def on_train_step_end(self, ctx: Context) -> None:
        if ctx.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)


def test_sigterm_saves_a_checkpoint_and_preempts_the_run(tmp_path: Path) -> None:
    ends, recorder = RecordsOutcomes(), Recorder(fields=("checkpoint",))
    model = trained([hosted(tmp_path, ends, recorder, SendsSIGTERM(), preempt_signals=("SIGTERM",))])
    assert int(model.optimizer.iterations) == 3
    assert ends.recorded == ["preempted"]
    assert [info.kind for event, info in recorder.values["checkpoint"] if event == "on_checkpoint_published"] == ["preempt"]
    check_events(recorder.events)


def test_on_run_end_has_the_outcome_of_the_run(tmp_path: Path) -> None:
    ends = RecordsOutcomes()
    trained([hosted(tmp_path, ends)], epochs=1)
    trained([hosted(tmp_path / "2", ends, RequestsAtStep("stop", 2))])
    assert ends.recorded == ["finished", "stopped"]
    for error, outcome in ((ZeroDivisionError, "failed"), (KeyboardInterrupt, "interrupted")):
        ends, model = RecordsOutcomes(), own_loop.compiled(LINE)
        model.job_loss = _raises(error)
        with pytest.raises(error):
            trained([hosted(tmp_path / outcome, ends)], model=model)
        assert ends.recorded == [error.__name__, outcome]
        assert "apply" not in vars(model.optimizer)

    def fails(*_: Any) -> None:
        raise ZeroDivisionError

    ends = RecordsOutcomes()
    given: Any = [hosted(tmp_path / "5", ends), keras.callbacks.LambdaCallback(on_epoch_begin=fails)]
    with pytest.raises(ZeroDivisionError):
        trained(given)
    assert ends.recorded == []  # Keras does not report one callback's error to the others
    del given
    gc.collect()
    assert ends.recorded == ["failed"]


def _raises(error: type[BaseException]) -> Callable[..., Any]:
    def loss(*_: Any) -> Any:
        raise error

    return loss


def test_evaluate_and_predict_are_separate_runs(tmp_path: Path) -> None:
    recorder, model = Recorder(fields=("standalone", "eval_results")), own_loop.compiled(LINE)
    found = model.evaluate(LINE.validation_batches(), callbacks=[hosted(tmp_path, recorder)], return_dict=True, verbose=0)
    check_events(recorder.events)
    assert recorder.events.count("on_eval_forward_end") == recorder.events.count("on_eval_step_end") == 3
    assert all(value for _, value in recorder.values["standalone"])
    assert dict(recorder.values["eval_results"])["on_eval_all_end"] == {"validation": found}
    recorder = Recorder(fields=("outputs",))
    inputs = LINE.validation.tensors[0].numpy()
    predicted = model.predict(inputs, batch_size=4, callbacks=[hosted(tmp_path / "2", recorder)], verbose=0)
    check_events(recorder.events)
    assert recorder.events.count("on_predict_forward_end") == 3
    assert dict(recorder.values["outputs"])["on_predict_step_end"].tolist() == predicted[-4:].tolist()


def test_unsupported_events_and_settings_are_rejected(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Listens(Callback):
        def on_test_end(self, ctx: Context) -> None: ...

    with pytest.raises(NotSupported, match="Listens listens to on_test_end, which Keras does not fire"):
        trained([hosted(tmp_path, Listens())])
    trained([hosted(tmp_path, Listens(), strict=False)], epochs=1)
    assert "Listens listens to on_test_end" in caplog.text
    bridge = hosted(tmp_path)
    bridge.set_params({})
    bridge.set_model(own_loop.compiled(LINE, jit_compile=True))
    with pytest.raises(NotSupported, match="jit_compile"):
        bridge.on_train_begin()  # not through `fit`, which first imports all of torch's compiler
    model = own_loop.Model(LINE)
    model.compile(optimizer=keras.optimizers.SGD(0.1, gradient_accumulation_steps=2))
    with pytest.raises(NotSupported, match="gradient_accumulation_steps"):
        trained([hosted(tmp_path)], model=model)


def test_events_that_the_first_step_does_not_fire_are_rejected(tmp_path: Path) -> None:
    class Listens(Callback):
        def on_backward_end(self, ctx: Context) -> None: ...

    class UsesAutogradBackward(own_loop.Model):
        def train_step(self, data: Any) -> Any:
            self.zero_grad()
            torch.autograd.backward([self.compute_loss(y=data[1], y_pred=self(data[0], training=True))])
            weights = self.trainable_weights
            self.optimizer.apply([weight.value.grad for weight in weights], weights)
            return {}

    model = UsesAutogradBackward(LINE)
    model.compile(optimizer=keras.optimizers.SGD(0.1))
    with pytest.raises(NotSupported, match="Listens listens to on_backward_end, which Keras did not fire"):
        trained([hosted(tmp_path, Listens())], model=model)


def test_a_callback_can_set_the_learning_rate(tmp_path: Path) -> None:
    class Halves(Callback):
        def on_epoch_end(self, ctx: Context) -> None:
            ctx.optimizer.param_groups[0]["lr"] *= 0.5

    model = trained([hosted(tmp_path, Halves())])
    assert float(model.optimizer.learning_rate) == pytest.approx(0.005)


# --- guests ---


@dataclass
class Row:
    """A Keras callback, and the results to compare between a run in Keras and a run as a guest."""

    tier: str
    make: Callable[[Path], Any]
    of: Callable[[Any], Any]
    rate: float = 0.05
    steps: int = 24


def _every_hook(folder: Path) -> Any:
    calls: list[Any] = []

    class RecordsCalls(keras.callbacks.Callback):  # type: ignore[misc]  # Keras's types are not read
        pass

    def noting(name: str) -> Callable[..., None]:
        def recorded(self: Any, *given: Any, **named: Any) -> None:
            logs = (named or {"logs": given[-1] if given and isinstance(given[-1], dict) else {}})["logs"] or {}
            numbers = [value for value in given if isinstance(value, int)]
            calls.append((name, numbers, {} if "test" in name else dict(logs)))

        return recorded

    for name in vars(keras.callbacks.Callback):
        if name.startswith("on_") and name not in ("on_batch_begin", "on_batch_end"):
            setattr(RecordsCalls, name, noting(name))
    notes = RecordsCalls()
    notes.calls = calls
    return notes


def _rows_of(callback: Any) -> list[dict[str, float]]:
    with open(callback.filename) as file:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]


def _lambda(folder: Path) -> Any:
    calls: list[Any] = []
    callback = keras.callbacks.LambdaCallback(
        on_train_begin=lambda logs: calls.append("begin"),
        on_epoch_end=lambda epoch, logs: calls.append((epoch, sorted(logs))),
        on_train_batch_end=lambda batch, logs: calls.append(batch),
    )
    callback.calls = calls
    return callback


ROWS = {
    "EarlyStopping": Row(
        "drives",
        lambda folder: keras.callbacks.EarlyStopping(min_delta=100, patience=2, restore_best_weights=True),
        lambda callback: [callback.stopped_epoch, callback.best_epoch, callback.wait, callback.best],
        steps=18,
    ),
    "TerminateOnNaN": Row("drives", lambda folder: keras.callbacks.TerminateOnNaN(), lambda callback: [], rate=1e30, steps=2),
    "ReduceLROnPlateau": Row(
        "drives",
        lambda folder: keras.callbacks.ReduceLROnPlateau(min_delta=100, patience=1, factor=0.3),
        lambda callback: [callback.best, callback.wait],  # the test compares the weights too, which show the learning rate
    ),
    "LearningRateScheduler": Row(
        "drives",
        lambda folder: keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5 if epoch else rate),
        lambda callback: [],  # the test compares the weights, which show the learning rate
    ),
    "CSVLogger": Row("reads", lambda folder: keras.callbacks.CSVLogger(str(folder / "log.csv")), _rows_of),
    "History": Row(
        "reads", lambda folder: keras.callbacks.History(), lambda callback: [callback.history, {"epoch": callback.epoch}]
    ),
    "ProgbarLogger": Row(
        "listens", lambda folder: keras.callbacks.ProgbarLogger(), lambda callback: [callback.seen, callback.target]
    ),
    "LambdaCallback": Row("listens", _lambda, lambda callback: callback.calls),
    "every hook": Row("listens", _every_hook, lambda callback: callback.calls),
}


def _is_close(one: Any, other: Any) -> bool:
    """Compare up to rounding: Keras's optimizer stores its learning rate in single precision."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_is_close(one[name], other[name]) for name in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_is_close, one, other))
    return bool(one == (other if isinstance(other, str) else pytest.approx(other, rel=1e-4)))


def _here(folder: Path, callback: Callback, rate: float) -> tuple[Any, int]:
    recorder = Recorder()
    with Trainer(
        LINE.made_model(), LINE.loss, LINE.batches(), LINE.validation_batches(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=rate),
        max_duration="4ep", eval_interval="1ep", log_interval="2ba", device="cpu", run_name="here", runs_folder=folder,
        callbacks=[callback, recorder],
    ) as trainer:  # fmt: skip
        trainer.fit()
    return trainer.model, recorder.events.count("on_train_step_end")


def _in_framework(callback: Any, rate: float) -> tuple[Any, int]:
    model = own_loop.Model(LINE)
    model.compile(optimizer=keras.optimizers.SGD(rate))
    trained([callback], model=model, epochs=4, verbose=2)
    return model.inner.module, int(model.optimizer.iterations)


@pytest.mark.parametrize("name", ROWS)
def test_a_guest_has_the_same_effects_as_in_its_framework(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = ROWS[name]
    folders = [tmp_path / "framework", tmp_path / "here"]
    for folder in folders:
        folder.mkdir()
    theirs, ours = (row.make(folder) for folder in folders)
    in_framework, steps = _in_framework(theirs, row.rate)
    printed = capsys.readouterr().out
    here, steps_here = _here(tmp_path, guest(ours, verbose=2), row.rate)
    printed_here = capsys.readouterr().out
    assert steps_here == steps == row.steps
    found = row.of(theirs)
    assert _is_close(row.of(ours), found), (row.of(ours), found)
    if name == "ProgbarLogger":
        assert re.findall(r"Epoch \d/\d|\d/\d -|loss: \d+\.\d", printed_here) == re.findall(
            r"Epoch \d/\d|\d/\d -|loss: \d+\.\d", printed
        )
        assert "val_loss" in printed_here
    if row.rate < 1:
        assert torch.allclose(here.weight, in_framework.weight, rtol=1e-4)
    if name != "every hook":
        check_or_write_cell("keras", "guests", name, Cell("works", tier=row.tier))


@pytest.mark.parametrize(
    "make",
    [
        lambda folder: keras.callbacks.ModelCheckpoint(str(folder / "model.keras")),
        lambda folder: keras.callbacks.BackupAndRestore(str(folder)),
        lambda folder: keras.callbacks.TensorBoard(str(folder)),
        lambda folder: keras.callbacks.SwapEMAWeights(),
    ],
)
def test_an_unsupported_callback_is_rejected_as_a_guest(make: Callable[[Path], Any], tmp_path: Path) -> None:
    callback = make(tmp_path)
    name = type(callback).__name__
    with pytest.raises(NotSupported, match=f"{name} cannot be a guest: .*; use callsheet") as rejected:
        guest(callback)
    check_or_write_cell("keras", "guests", name, Cell("rejected", str(rejected.value)))


def test_a_guest_that_uses_an_unavailable_attribute_is_rejected(tmp_path: Path) -> None:
    for what, message in (
        (lambda model: model.layers, "Keras's model has here no 'layers'"),
        (lambda model: setattr(model, "trainable", False), "may not write 'trainable'"),
        (lambda model: model.optimizer.momentum, "Keras's optimizer has here no 'momentum'"),
    ):
        callback: Any = keras.callbacks.Callback()
        callback.on_train_begin = lambda logs, read=what, callback=callback: read(callback.model)
        with pytest.raises(NotSupported, match=message):
            _here(tmp_path, guest(callback), 0.05)


def test_a_resume_within_an_epoch_restores_a_guest_s_epoch_mean(tmp_path: Path) -> None:
    def run(folder: Path, callbacks: list[Callback], resume: str | None = None) -> None:
        with Trainer(
            LINE.made_model(), LINE.loss, LINE.batches(), optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05),
            max_duration="1ep", log_interval="2ba", device="cpu", run_name="here", runs_folder=folder, callbacks=callbacks, resume=resume,
        ) as trainer:  # fmt: skip
            trainer.fit()

    whole, again = keras.callbacks.History(), keras.callbacks.History()
    run(tmp_path / "whole", [guest(whole)])
    with pytest.raises(ZeroDivisionError):
        run(tmp_path, [guest(keras.callbacks.History()), CheckpointSaver(save_interval="4ba"), Fails(5)])
    run(tmp_path, [guest(again), CheckpointSaver(save_interval="50ba")], resume="auto")
    assert again.history["loss"] == pytest.approx(whole.history["loss"])


@pytest.mark.parametrize("interval", ["1ep", "2ba", "2ep"])
def test_a_guest_s_logs_of_an_epoch_have_the_results_of_its_last_evaluation(interval: str, tmp_path: Path) -> None:
    history, recorder = keras.callbacks.History(), Recorder()
    evaluated: list[tuple[int, float]] = []

    class RecordsLosses(Callback):
        def on_eval_all_end(self, ctx: Context) -> None:
            evaluated.append((ctx.epoch, ctx.eval_results["validation"]["loss"]))

    with Trainer(
        LINE.made_model(), LINE.loss, LINE.batches(), LINE.validation_batches(), device="cpu", runs_folder=tmp_path,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05), max_duration="4ep", eval_interval=interval,
        callbacks=[guest(history), RecordsLosses(), recorder],
    ) as trainer:  # fmt: skip
        trainer.fit()
    assert history.history["val_loss"] == pytest.approx(list(dict(evaluated).values()))
    assert len(history.history["val_loss"]) == (2 if interval == "2ep" else 4)


def epoch_means_on_rank(folder: str, gradient_accumulation_steps: int) -> tuple[list[float], list[float]]:
    torch.set_num_threads(1)
    history = keras.callbacks.History()
    # Three batches of four samples: the second rank has no third batch, and gets a filler.
    with Trainer(
        LINE.made_model(), LINE.loss, list(LINE.batches())[:3], device="cpu", runs_folder=folder, parallel="ddp",
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0), max_duration="2ep", callbacks=[guest(history)],
        gradient_accumulation_steps=gradient_accumulation_steps,
    ) as trainer:  # fmt: skip
        trainer.fit()
        model = LINE.made_model()
        losses = [float(LINE.loss(model(inputs), targets)) for inputs, targets in list(LINE.batches())[:3]]
    return history.history["loss"], losses


@pytest.mark.parametrize("gradient_accumulation_steps", [1, 2])
def test_a_guest_s_epoch_mean_does_not_count_fillers(gradient_accumulation_steps: int, tmp_path: Path) -> None:
    (first, losses), (second, _) = run_ranks(epoch_means_on_rank, 2, str(tmp_path), gradient_accumulation_steps)
    assert first == pytest.approx([(losses[0] + losses[2]) / 2] * 2)
    assert second == pytest.approx([losses[1]] * 2)
