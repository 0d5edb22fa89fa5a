"""callsheet's callbacks in InstructLab's hooks, and InstructLab's callbacks in a loop of callsheet."""

from __future__ import annotations

import asyncio
import base64
import gc
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from callsheet import Callback, CallbackManager, Context, Trainer, loggers
from callsheet.bridges.instructlab import NOT_FIRED, NOT_SEEN, guest, host
from callsheet.bridges.instructlab import names as instructlab_names
from callsheet.bridges.instructlab.names import HOOK_NAMES
from callsheet.callbacks import CheckpointSaver, EarlyStopper, Heartbeat, History, NaNMonitor, RuntimeEstimator
from callsheet.core.lifecycle import EVENTS
from callsheet.errors import NotSupported, RegistrationError, RunInUseError
from callsheet.loggers import JSONLLogger, read_metrics
from callsheet.run.run_lock import RunLock
from callsheet.testing import Recorder, Subject, check_events, run_ranks
from forked import python  # type: ignore[import-not-found]  # pytest has its folder on the path

from .loops import instructlab as own_loop
from .loops.instructlab import Loop
from .loops.job import EMPTY, POINTS

needs_the_package = pytest.mark.skipif(
    own_loop.REAL is None, reason="InstructLab is not installed: pip install --no-deps instructlab-training"
)
INTERFACES = [
    pytest.param(instructlab_names, id="ours"),
    pytest.param(own_loop.REAL, id="theirs", marks=needs_the_package),
]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(params=INTERFACES)
def api(request: pytest.FixtureRequest) -> Any:
    """InstructLab's callback interface: callsheet's copy, and the package's own."""
    return request.param


def hosted(folder: Path, given: list[Callback], *, strict: bool = True, **options: Any) -> Loop:
    """Return a loop of InstructLab with these callbacks. The caller runs it."""
    manager = own_loop.API.CallbackManager()
    manager.add_callback(host(given, strict=strict))
    return Loop(manager, folder, **options)


# --- the host ---


def test_the_copied_names_equal_those_of_the_package() -> None:
    assert set(EVENTS) >= {*NOT_FIRED, *NOT_SEEN}
    if own_loop.REAL is not None:
        assert list(HOOK_NAMES) == list(own_loop.REAL.HOOK_NAMES)
        assert vars(instructlab_names.TrainingContext()) == vars(own_loop.REAL.TrainingContext())


@pytest.mark.parametrize("microbatches", [1, 3])
def test_every_event_is_fired_in_the_lifecycle_s_order(microbatches: int, tmp_path: Path) -> None:
    recorder, history = Recorder(fields=("loss", "checkpoint", "record")), History()
    loop = hosted(
        tmp_path,
        [recorder, history, NaNMonitor(), RuntimeEstimator(), Heartbeat()],
        microbatches=microbatches, validate_every=2, save_samples=8, checkpoint_at_epoch=True, save_last=True,
    )  # fmt: skip
    loop.run()
    check_events(recorder.events)
    assert recorder.events.count("on_train_step_end") == recorder.events.count("on_optimizer_step_end") == 6
    assert recorder.events.count("on_backward_end") == 6 * microbatches
    assert recorder.events.count("on_eval_all_end") == 3
    assert recorder.events[-1] == "on_run_end"
    assert history["train/loss"] == pytest.approx([1 / step for step in range(1, 7)])
    assert history["train/learning_rate"] == [0.02] * 6
    assert history["train/grad_norm"] == [2.0] * 6
    assert history["time/sample"] == [4 * step for step in range(1, 7)]
    assert history["validation/loss"] == [0.25, 0.125, pytest.approx(1 / 12)]
    saved = [info for event, info in recorder.values["checkpoint"] if event == "on_checkpoint_published"]
    assert [(info.step, info.epoch, info.kind) for info in saved] == [
        *((2, 0, "periodic"), (3, 1, "periodic"), (4, 1, "periodic"), (6, 1, "periodic")),
        *((6, 2, "periodic"), (6, 2, "final")),
    ]
    assert saved[0].path == str(tmp_path / "hf_format" / "samples_8")
    assert saved[0].val_losses == {"validation": 0.25}
    steps = [
        recorded.batch for recorded, event in zip(recorder.recorded, recorder.events, strict=True) if event == "on_train_step_end"
    ]
    assert steps == [1, 2, 3, 4, 5, 6]


def test_a_second_run_in_a_locked_folder_fails_within_its_time(tmp_path: Path) -> None:
    output = tmp_path / "out"
    lock = RunLock(output, is_busy=lambda: True)
    lock.acquire(0)
    recorder = Recorder()
    hosted = host([JSONLLogger(), recorder], strict=False, lock_timeout_seconds=0.2)
    context = instructlab_names.TrainingContext()
    context.output_dir, context.max_epochs, context.is_world_process_zero = str(output), 1, True
    failures: list[BaseException] = []

    def begin() -> None:  # on another thread, as in InstructLab; the thread that locked the folder would not wait
        try:
            hosted.on_train_begin(context)
        except RunInUseError as error:
            failures.append(error)

    thread = threading.Thread(target=begin)
    began = time.monotonic()
    thread.start()
    thread.join(20)  # the default time limit would be 30
    assert not thread.is_alive()
    assert time.monotonic() - began >= 0.2
    assert len(failures) == 1
    assert not recorder.events
    lock.release()
    hosted.on_train_begin(context)
    assert recorder.events[0] == "on_run_start"
    hosted.on_train_end(context)


def test_the_host_does_not_change_training(tmp_path: Path) -> None:
    recorder = Recorder()
    with_them = own_loop.train(POINTS, tmp_path / "with", [recorder, JSONLLogger()])
    without = own_loop.train(POINTS, tmp_path / "without", None)
    empty = own_loop.train(POINTS, tmp_path / "empty", EMPTY)
    for other in (without, empty):
        assert all(torch.equal(a, b) for a, b in zip(with_them.state_dict().values(), other.state_dict().values(), strict=True))
    check_events(recorder.events)
    records = list(read_metrics(tmp_path / "with"))
    assert [record.step for record in records if "train/loss" in record.values] == list(range(1, 13))
    assert records[-1].step == 12


class Counts(Callback):
    """Counts the steps, and saves the count."""

    def __init__(self) -> None:
        self.steps = 0

    def on_train_step_end(self, ctx: Context) -> None:
        self.steps += 1

    def state_dict(self) -> Mapping[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps = state["steps"]


@pytest.mark.parametrize("not_counted", [0, 3], ids=["continues to count", "counts from one again"])
def test_states_are_in_its_checkpoints_and_restored(not_counted: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hosted(tmp_path, [Counts()], epochs=1, checkpoint_at_epoch=True).run()
    again, recorder = Counts(), Recorder()
    loop = hosted(tmp_path, [again, recorder])
    loop.done, loop.first_epoch, loop.not_counted = 3, 1, not_counted
    loop.run()
    assert again.steps == 6
    assert recorder.events.count("on_train_step_end") == 3
    assert "repeated" not in caplog.text
    check_events(recorder.events)
    assert recorder.recorded[-1].batch == 6
    assert recorder.recorded[-1].epoch == 2


def test_a_run_continues_if_its_states_are_not_found(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    counts, recorder = Counts(), Recorder()
    loop = hosted(tmp_path, [counts, recorder])
    loop.done, loop.first_epoch = 3, 1
    loop.run()
    assert counts.steps == 3
    assert recorder.recorded[-1].batch == 6
    assert "no state of callbacks was found" in caplog.text
    check_events(recorder.events)


class RecordsOutcomes(Callback):
    """Records how the run ended."""

    phase = "report"

    def __init__(self) -> None:
        self.outcome, self.has_begun, self.has_ended = "", threading.Event(), threading.Event()

    def on_run_start(self, ctx: Context) -> None:
        self.has_begun.set()

    def on_run_end(self, ctx: Context) -> None:
        self.outcome = str(ctx.run.outcome)
        self.has_ended.set()


@pytest.mark.parametrize(("interrupted_in", "steps"), [("forward", 1), ("optimizer", 2)])
def test_a_run_that_gets_a_signal_is_preempted(interrupted_in: str, steps: int, tmp_path: Path) -> None:
    ends, recorder, counts = RecordsOutcomes(), Recorder(), Counts()
    loop = hosted(tmp_path, [ends, recorder, counts])
    loop.interrupted_at = (interrupted_in, 2)
    loop.run()
    assert ends.outcome == "preempted"
    assert counts.steps == steps  # depends on whether the second step was complete
    check_events(recorder.events)


# A recorded warning would refer to InstructLab's coroutine, which would keep the host alive.
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
def test_a_run_that_breaks_off_has_failed_once_the_host_is_deleted(tmp_path: Path) -> None:
    ends = RecordsOutcomes()
    loop = hosted(tmp_path, [ends])
    loop.validate_every = 2

    def fail_validation() -> dict[str, float]:
        # Wait for the first hook, because a closed manager drops the hooks that its thread has not called yet.
        assert ends.has_begun.wait(60)
        raise ZeroDivisionError

    loop.validate = fail_validation  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        loop.run()
    assert ends.outcome == ""  # InstructLab does not report errors to its callbacks
    del loop
    deadline = time.monotonic() + 60
    while not ends.has_ended.wait(0.01) and time.monotonic() < deadline:  # until the manager's thread has ended
        gc.collect()
    assert ends.outcome == "failed"


def test_an_error_ends_callsheet_s_run_and_not_instructlab_s_training(tmp_path: Path) -> None:
    class Fails(Callback):
        def on_train_step_end(self, ctx: Context) -> None:
            if ctx.step == 2:
                raise ZeroDivisionError

    ends, recorder = RecordsOutcomes(), Recorder()
    loop = hosted(tmp_path, [Fails(), ends, recorder])
    loop.run()
    assert loop.done == 6
    assert ends.outcome == "failed"
    assert recorder.events.count("on_exception") == 1
    check_events(recorder.events)


@pytest.mark.parametrize("strict", [True, False])
def test_a_hook_that_is_not_called_is_named_after_the_first_step(
    strict: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Listens(Callback):
        def on_optimizer_step_end(self, ctx: Context) -> None: ...

    ends = RecordsOutcomes()
    loop = hosted(tmp_path, [Listens(), ends], strict=strict)
    fire = loop.manager.fire

    def fire_all_but_one(hook: str, **given: Any) -> None:
        if hook != "on_optimizer_step":
            fire(hook, **given)

    loop.manager.fire = fire_all_but_one
    loop.run()
    assert loop.done == 6
    assert ends.outcome == ("failed" if strict else "finished")
    assert "Listens listens to on_optimizer_step_end, which InstructLab Training did not fire in its first step" in caplog.text


def test_a_run_twice(tmp_path: Path) -> None:
    recorder = Recorder()
    one = host([recorder])
    for name in ("first", "second"):
        manager = own_loop.API.CallbackManager()
        manager.add_callback(one)
        Loop(manager, tmp_path / name).run()
    assert recorder.events.count("on_run_start") == recorder.events.count("on_run_end") == 2
    check_events(recorder.events[: len(recorder.events) // 2])


class ListensToLoss(Callback):
    def on_loss_end(self, ctx: Context) -> None: ...


class ListensOnlyToTests(Callback):
    def on_test_end(self, ctx: Context) -> None: ...


class ListensAlsoToTests(ListensOnlyToTests):
    def on_train_step_end(self, ctx: Context) -> None: ...


class ReadsTheModel(Callback):
    required_fields = ("model",)

    def on_train_step_end(self, ctx: Context) -> None:
        self.mode = ctx.model.training


class ReadsModelIfAvailable(Callback):
    def on_train_step_end(self, ctx: Context) -> None:
        self.mode = ctx.model.training if ctx.has("model") else None


class Stops(Callback):
    requests = ("stop",)

    def on_train_step_end(self, ctx: Context) -> None:
        ctx.control.stop("enough")


@pytest.mark.parametrize(
    ("callback", "why"),
    [
        (ListensToLoss(), "ListensToLoss listens to on_loss_end, which InstructLab Training does not fire"),
        (ListensOnlyToTests(), "ListensOnlyToTests listens to on_test_end, which InstructLab Training does not fire"),
        (ReadsTheModel(), "ReadsTheModel reads ctx.model, which InstructLab Training does not provide to callbacks"),
        (Stops(), "Stops may call ctx.control.stop, but InstructLab Training supports no requests"),
        (EarlyStopper(monitor="validation/loss"), "EarlyStopper may call ctx.control.stop"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Callback) else "",
)
def test_what_is_not_supported_is_rejected_by_name(
    callback: Callback, why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(NotSupported, match=why):
        host([callback])
    host([callback], strict=False)
    assert why in caplog.text


def test_callbacks_that_work_without_unsupported_parts_are_accepted(tmp_path: Path) -> None:
    hosted(tmp_path, [ListensAlsoToTests(), callback := ReadsModelIfAvailable()]).run()
    assert callback.mode is None


def test_a_request_that_was_accepted_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loop = hosted(tmp_path, [Stops()], strict=False)
    loop.run()
    assert loop.done == 6
    text = "Stops calls ctx.control.stop, which InstructLab Training does not support here; it supports no request."
    assert caplog.text.count(text) == 1


def test_a_callback_that_declares_nothing_does_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Undeclared(Callback):
        def on_train_step_end(self, ctx: Context) -> None:
            if ctx.step == 2:
                ctx.control.save("asked")
            self.mode = ctx.model.training

    loop = hosted(tmp_path, [Undeclared(), history := History()])
    loop.run()
    assert loop.done == 6
    assert history.records
    assert caplog.text.count("Undeclared calls ctx.control.save") == 1
    assert caplog.text.count("reads ctx.model at on_train_step_end, and InstructLab Training has not provided it there") == 1


SUPPORTED = {
    *(
        "GarbageCollection",
        "HangDetector",
        "Heartbeat",
        "History",
        "Lambda",
        "LossSpikeDetector",
        "MemoryMonitor",
        "MemorySnapshot",
        "NaNMonitor",
        "Notify",
    ),
    *("RuntimeEstimator", "SystemMetricsMonitor", "TorchProfiler"),
    *(name for name in loggers.__all__ if isinstance(kind := getattr(loggers, name), type) and issubclass(kind, Callback)),
}
"""The built-ins that run in InstructLab according to the docs."""


def test_the_built_ins_that_run_there(subjects: Mapping[str, Subject]) -> None:
    host([])  # raises NotSupported if nothing runs in the installed release
    taken = set()
    for name, subject in subjects.items():
        callback = subject.make()
        try:
            host([callback])
        except NotSupported:
            continue
        taken.add(name)
    assert taken == SUPPORTED
    page = (Path(__file__).parents[2] / "docs" / "bridges" / "instructlab.md").read_text()
    for name in SUPPORTED:
        assert name in page or name.endswith("Logger")


def train_on_rank(folder: str) -> dict[str, Any]:
    """Train on one of two ranks, which do not communicate."""
    history, ends, recorder = History(), RecordsOutcomes(), Recorder(fields=("record",))
    hosted(Path(folder), [history, ends, recorder], checkpoint_at_epoch=True).run()
    has_rates = all("train/learning_rate" in record.values for _, record in recorder.values["record"])
    return {"loss": history["train/loss"], "has_rates": has_rates, "outcome": ends.outcome}


def test_each_rank_receives_its_own_events(tmp_path: Path) -> None:
    zero, one = run_ranks(train_on_rank, 2, str(tmp_path))
    assert zero["loss"] == one["loss"]
    assert zero["outcome"] == one["outcome"] == "finished"
    assert zero["has_rates"]
    assert not one["has_rates"]  # InstructLab sets the learning rate only on local rank 0
    states = [path.name for path in (tmp_path / "hf_format" / "samples_12" / "callsheet").iterdir()]
    assert sorted(states) == ["rank-0", "rank-1"]


@needs_the_package
def test_callbacks_reach_a_rank_through_the_package_s_own_transport(tmp_path: Path) -> None:
    """InstructLab passes the source on a command line and executes it. The callbacks themselves are sent by callsheet's transport."""
    assert own_loop.REAL is not None
    given = host([JSONLLogger(), Counts()])
    sent = own_loop.REAL.serialize_callbacks_for_cli([given])
    assert b"CallsheetCallback" in base64.b64decode(json.loads(base64.b64decode(sent))[0])
    script = tmp_path / "rank.py"
    script.write_text(
        "import sys\n"
        "from pathlib import Path\n"
        "from bridges.loops.instructlab import REAL, Loop\n"
        "manager = REAL.CallbackManager()\n"
        "for callback in REAL.deserialize_callbacks_from_cli(sys.argv[1]):\n"
        "    manager.add_callback(callback)\n"
        "Loop(manager, Path(sys.argv[2])).run()\n"
        "counts = callback.host.manager.callbacks[1]\n"
        "assert counts.steps == 6, counts.steps\n"
    )
    tests = str(Path(__file__).parents[1])
    with given.sent():
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([tests, *filter(None, sys.path)])}
        subprocess.run([python(), str(script), sent, str(tmp_path / "out")], env=environment, check=True, timeout=120)
    assert [record.step for record in read_metrics(tmp_path / "out")][-1] == 6
    assert "CALLSHEET_PAYLOAD" not in os.environ


def test_a_function_is_not_sent() -> None:
    manager = CallbackManager()
    manager.register("on_log", lambda ctx: None)
    with pytest.raises(NotSupported, match="the function <lambda> cannot be sent to the ranks"), host(manager).sent():
        pass


def installed(folder: Path, version: str, *modules: str) -> Path:
    """Write a package that is installed like this release of InstructLab, with these modules."""
    for name in ("__init__", *modules):
        path = folder / "instructlab" / "training" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("class TrainerCallback: ...\n")
    metadata = folder / f"instructlab_training-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: instructlab-training\nVersion: {version}\n")
    return folder


def test_a_release_that_ignores_callbacks_is_rejected(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from callsheet.bridges.instructlab import host; print(type(host([])).__mro__)"]
    for version, modules in {"0.15.2": (), "0.16.0": ("callbacks",)}.items():
        path = os.pathsep.join([str(installed(tmp_path / version, version, *modules)), *filter(None, sys.path)])
        ran = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, timeout=120, check=False
        )
        if modules:
            assert ("instructlab.training.callbacks.TrainerCallback" in ran.stdout, ran.stderr) == (True, "")
        else:
            assert ran.returncode == 1
            assert (
                f"NotSupported: this host needs instructlab.training.callbacks, which instructlab-training {version} does not have; "
                "install one of the tested versions, 0.16" in ran.stderr
            )


# --- the guest ---

DATA = [(torch.full((4, 2), 0.5 + step), torch.ones(4, 1)) for step in range(3)]


def fit(given: list[Callback], folder: Path, **changes: Any) -> Trainer:
    """Train two epochs of three steps of two microbatches, with a record each step."""
    torch.manual_seed(0)
    arguments: dict[str, Any] = {
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        "max_duration": "2ep",
        "log_interval": "1ba",
        "microbatch_size": 2,
        "eval_dataloader": DATA[:2],
        "eval_interval": "2ba",
        "device": "cpu",
        "runs_folder": folder,
        "run_name": "guests",
    }
    with Trainer(nn.Linear(2, 1), nn.functional.mse_loss, DATA, callbacks=given, **(arguments | changes)) as trainer:
        trainer.fit()
    return trainer


def callback_of(api: Any, record: Callable[[str, Any], object], hooks: tuple[str, ...] = HOOK_NAMES) -> Any:
    """Return a callback that has these hooks."""

    def hook_of(name: str) -> Callable[[Any, Any], None]:
        def hook(self: Any, context: Any) -> None:
            record(name, context)

        return hook

    return type("Listens", (api.TrainerCallback,), {name: hook_of(name) for name in hooks})()


@pytest.mark.parametrize("interval", ["2ba", "1ep"])
def test_a_guest_is_called_in_instructlab_s_order(api: Any, interval: str, tmp_path: Path) -> None:
    recorded: list[tuple[str, int, int]] = []
    callback = callback_of(api, lambda hook, context: recorded.append((hook, context.step, context.epoch)))
    fit([guest(callback), CheckpointSaver(save_interval="1ep")], tmp_path, eval_interval=interval)
    microbatch = ["on_before_forward", "on_after_backward"]
    expected: list[tuple[str, int, int]] = [("on_train_begin", 1, 0)]
    for epoch in range(2):
        expected.append(("on_epoch_begin", max(1, 3 * epoch), epoch))  # still the number of the last step
        for step in range(3 * epoch + 1, 3 * epoch + 4):
            is_last = step in (3, 6)
            evaluated = ["on_evaluate"] if interval == "2ba" and step % 2 == 0 else []
            at_epoch_end = [*(["on_evaluate"] if interval == "1ep" else []), "on_save"] if is_last else []
            hooks = ["on_step_begin", *microbatch * 2, "on_pre_optimizer_step", "on_optimizer_step", "on_log", *evaluated]
            expected += [(hook, step, epoch) for hook in [*hooks, "on_step_end", *at_epoch_end]]
        expected.append(("on_epoch_end", 3 * epoch + 3, epoch))
    assert recorded == [*expected, ("on_train_end", 6, 1)]


def test_a_guest_s_context_has_the_values_that_the_run_logs(tmp_path: Path) -> None:
    found: dict[tuple[str, int], dict[str, Any]] = {}
    callback = callback_of(instructlab_names, lambda hook, context: found.update({(hook, context.step): dict(vars(context))}))
    history = History()
    fit([guest(callback), history, CheckpointSaver(save_interval="1ep")], tmp_path)
    losses = history["train/loss"]
    assert [found["on_log", step]["loss"] for step in range(1, 7)] == losses
    assert [found["on_pre_optimizer_step", step]["loss"] for step in range(1, 7)] == pytest.approx(losses)
    assert [found["on_step_begin", step]["loss"] for step in range(1, 7)] == [None, *losses[:-1]]  # that of the previous step
    assert found["on_log", 4]["learning_rate"] == 0.01
    assert found["on_log", 4]["total_samples"] == 16
    assert found["on_log", 4]["batch_metrics"] == {
        "total_samples": 4, "total_length": 0, "num_loss_counted_tokens": 0, "grad_accum_steps": 2, "num_minibatches": 2,
    }  # fmt: skip
    assert found["on_log", 4]["elapsed_time"] > 0
    assert found["on_evaluate", 4]["val_metrics"]["val_loss"] == history["validation/loss"][1]
    assert found["on_step_begin", 1]["val_metrics"] == {}
    assert found["on_save", 3]["checkpoint_path"] == str(tmp_path / "guests" / "checkpoints" / "ep1-ba3")
    assert found["on_step_end", 3]["checkpoint_path"] is None
    begin = found["on_train_begin", 1]
    assert (begin["output_dir"], begin["max_epochs"], begin["world_size"]) == (str(tmp_path / "guests"), 2, 1)
    assert begin["is_world_process_zero"]


def test_slow_async_hooks_receive_all_events_without_delaying_training(api: Any, tmp_path: Path) -> None:
    recorded: list[tuple[str, int]] = []
    may_go = threading.Event()

    class Slow(api.TrainerCallback):  # type: ignore[misc]  # `api` is one of two modules
        async def on_step_begin(self, context: Any) -> None:
            await asyncio.to_thread(may_go.wait, 60)  # waits until training has ended
            recorded.append(("begin", context.step))

        async def on_step_end(self, context: Any) -> None:
            recorded.append(("end", context.step))

        def on_train_end(self, context: Any) -> None:
            recorded.append(("over", context.step))

    class Trained(Callback):
        def on_train_end(self, ctx: Context) -> None:
            recorded.append(("trained", ctx.step))
            may_go.set()

    fit([guest(Slow()), Trained()], tmp_path)
    steps = [(what, step) for step in range(1, 7) for what in ("begin", "end")]
    assert recorded == [("trained", 6), *steps, ("over", 6)]


def test_hooks_run_in_an_event_loop_and_the_run_waits_for_their_tasks(api: Any, tmp_path: Path) -> None:
    recorded: list[str] = []

    async def yield_often(name: str) -> None:
        for _ in range(100):
            await asyncio.sleep(0)
        recorded.append(name)

    class Starts(api.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, context: Any) -> None:
            asyncio.get_running_loop().create_task(yield_often(f"step {context.step}"))

        async def on_train_end(self, context: Any) -> None:
            asyncio.get_running_loop().create_task(yield_often("end"))

    fit([guest(Starts())], tmp_path)
    assert sorted(recorded) == ["end", *(f"step {number}" for number in range(1, 7))]


def test_an_error_of_a_hook_is_logged_and_does_not_end_the_run(
    api: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Fails(api.TrainerCallback):  # type: ignore[misc]
        calls = 0

        def on_step_end(self, context: Any) -> None:
            Fails.calls += 1
            raise SystemExit("of the callback alone") if context.step == 2 else ValueError("of the callback alone")

        async def on_log(self, context: Any) -> None:
            raise ValueError("in between")

    trainer = fit([guest(Fails())], tmp_path)
    assert trainer.run.outcome == "finished"
    assert Fails.calls == 6
    assert caplog.text.count("Fails failed at on_step_end") == 6
    assert caplog.text.count("Fails failed at on_log") == 6


def test_on_train_end_is_called_once_after_an_error(api: Any, tmp_path: Path) -> None:
    class RaisesAtEvent(Callback):
        def __init__(self, event: str) -> None:
            self.event = event

        def on_event(self, ctx: Context) -> None:
            if ctx.event == self.event and ctx.step >= 2:
                raise ZeroDivisionError

    for event in ("on_forward_start", "on_train_step_end", "on_eval_all_start"):
        recorded: list[tuple[str, int]] = []
        callback = callback_of(api, lambda hook, context: recorded.append((hook, context.step)))  # noqa: B023  # read before the next iteration
        with pytest.raises(ZeroDivisionError):
            fit([guest(callback), RaisesAtEvent(event)], tmp_path / event)
        assert recorded[-1] == ("on_train_end", 2)
        assert [hook for hook, _ in recorded].count("on_train_end") == 1


def test_an_evaluation_without_training_calls_no_hooks(tmp_path: Path) -> None:
    recorded: list[str] = []
    with Trainer(nn.Linear(2, 1), nn.functional.mse_loss, eval_dataloader=DATA, device="cpu", runs_folder=tmp_path,
                 callbacks=[guest(callback_of(instructlab_names, lambda hook, context: recorded.append(hook)))]) as trainer:  # fmt: skip
        trainer.evaluate()
    assert recorded == []


def test_a_guest_listens_only_to_the_hooks_that_it_overrides() -> None:
    one = guest(callback_of(instructlab_names, lambda hook, context: None, ("on_log",)))
    assert "on_forward_start" not in vars(one)
    assert "on_log" in vars(one)


def test_objects_that_are_not_instructlab_callbacks_are_rejected() -> None:
    with pytest.raises(RegistrationError, match="not an instance of a TrainerCallback"):
        guest(object())
    with pytest.raises(RegistrationError, match="give an instance"):
        guest(instructlab_names.TrainerCallback)


def test_a_resume_restores_the_state_of_a_guest(api: Any, tmp_path: Path) -> None:
    class CountsSteps(api.TrainerCallback):  # type: ignore[misc]
        steps = 0

        def on_step_end(self, context: Any) -> None:
            self.steps += 1

        def state_dict(self) -> dict[str, int]:
            return {"steps": self.steps}

        def load_state_dict(self, state: Mapping[str, int]) -> None:
            self.steps = state["steps"]

    fit([guest(CountsSteps()), CheckpointSaver(save_interval="1ep")], tmp_path, max_duration="1ep")
    again = CountsSteps()
    fit([guest(again)], tmp_path, resume="auto")
    assert again.steps >= 5  # 2 or 3 were saved: the hook of the third step's end may not have been called yet


def test_a_guest_does_not_change_training(api: Any, tmp_path: Path) -> None:
    with_it = fit([guest(callback_of(api, lambda hook, context: None))], tmp_path / "with")
    without = fit([], tmp_path / "without")
    assert all(
        torch.equal(a, b) for a, b in zip(with_it.model.state_dict().values(), without.model.state_dict().values(), strict=True)
    )


HOOK_ROWS: dict[str, tuple[str, ...]] = {"progress": ("on_log",), "timer": ("on_step_begin", "on_step_end"), "all": HOOK_NAMES}


@pytest.mark.parametrize("row", HOOK_ROWS)
def test_a_guest_receives_the_same_values_as_in_its_framework(api: Any, row: str, tmp_path: Path) -> None:
    """With the same losses, InstructLab's loop and ours call the same hooks with the same numbers."""

    def recording(recorded: list[Any]) -> Any:
        def record(hook: str, context: Any) -> None:
            recorded.append(
                (hook, context.step, context.epoch, context.total_samples, context.loss, context.val_metrics.get("val_loss"))
            )

        return callback_of(api, record, HOOK_ROWS[row])

    there: list[Any] = []
    here: list[Any] = []
    manager = api.CallbackManager()
    manager.add_callback(recording(there))
    fire = manager.fire

    def fire_and_wait(hook: str, **given: Any) -> None:
        """Wait until the callbacks were called, because InstructLab's loop changes the context afterwards."""
        received = len(there) + (hook in HOOK_ROWS[row])
        fire(hook, **given)
        deadline = time.monotonic() + 30
        while len(there) < received and time.monotonic() < deadline:
            time.sleep(0.001)

    manager.fire = fire_and_wait
    torch.manual_seed(3)
    own_loop.Training(POINTS, manager, tmp_path, epochs=1, steps_an_epoch=6, evaluate=True).run()
    with Trainer(
        POINTS.made_model(), POINTS.loss, POINTS.batches, POINTS.validation_batches, max_duration="1ep", log_interval="1ba",
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.02), eval_interval="6ba", clip_grad_norm=1.0,
        callbacks=[guest(recording(here))], device="cpu", runs_folder=tmp_path, seed=3,
    ) as trainer:  # fmt: skip
        trainer.fit()
    assert here == there
    assert len(here) == {"progress": 6, "timer": 12, "all": 6 * 7 + 5}[row]
