"""Callbacks in lanes receive the same events as others, do not change training, and can log and make requests."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, UserDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import torch

from callsheet import (
    Background,
    Callback,
    CallbackManager,
    CallbackSpec,
    Context,
    Outcome,
    Process,
    RunInfo,
    Trainer,
    callbacks,
    every,
)
from callsheet.core.lifecycle import EVENTS
from callsheet.errors import ConfigError, NotACallbackError, RegistrationError, RequestRejected
from callsheet.lanes.capture import copy_value
from callsheet.loggers import Logger
from callsheet.testing import Recorder, run_ranks

from .far_callbacks import Far, FarByClass, Forks, LogsFromThreads, LogsInState
from .small_run import EPOCHS, STEPS, History, run_small, small_trainer


class RecordsThreads(Callback):
    """Records every event, and the threads on which the handlers run."""

    def __init__(self) -> None:
        self.received: list[tuple[str, int]] = []
        self.threads: set[str] = set()

    def on_event(self, ctx: Context) -> None:
        self.received.append((str(ctx.event), ctx.step))
        self.threads.add(threading.current_thread().name)


def fit(folder: Path, *callbacks: Callback, **changes: Any) -> Any:
    with small_trainer(folder, *callbacks, **changes) as trainer:
        trainer.fit()
    return trainer


def test_a_lane_receives_the_same_events_in_order_on_another_thread(tmp_path: Path) -> None:
    inline, behind = RecordsThreads(), RecordsThreads()
    fit(tmp_path, inline, Background(behind))
    assert behind.received == inline.received
    assert inline.threads == {"MainThread"}
    assert behind.threads == {"callsheet-lane-RecordsThreads"}
    assert behind.received[-1][0] == "on_run_end"


def test_async_methods_are_awaited_one_after_the_other(tmp_path: Path) -> None:
    class Hesitant(Callback):
        def __init__(self) -> None:
            self.received: list[str] = []
            self.loops: set[int] = set()
            self.at_once = self.most_at_once = 0

        async def record(self, ctx: Context) -> None:
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
            self.loops.add(id(asyncio.get_running_loop()))
            await asyncio.sleep(0.003 if str(ctx.event).endswith("_start") else 0)  # overlapping starts would finish last
            self.received.append(str(ctx.event))
            self.at_once -= 1

        async def on_train_step_start(self, ctx: Context) -> None:
            await self.record(ctx)

        async def on_train_step_end(self, ctx: Context) -> None:
            await self.record(ctx)

    hesitant = Hesitant()
    fit(tmp_path, Background(hesitant))
    assert hesitant.received == ["on_train_step_start", "on_train_step_end"] * STEPS
    assert hesitant.most_at_once == 1
    assert len(hesitant.loops) == 1


def test_a_class_can_declare_its_lane(tmp_path: Path) -> None:
    class Ready(RecordsThreads):
        lane = "background"

    ready = Ready()
    fit(tmp_path, ready)
    assert ready.threads == {"callsheet-lane-Ready"}


def test_a_function_can_run_in_a_lane(tmp_path: Path) -> None:
    threads: set[str] = set()
    manager = CallbackManager()
    manager.register("on_log", lambda ctx: threads.add(threading.current_thread().name), lane="background", name="listener")
    fit(tmp_path, callbacks=manager)
    assert threads == {"callsheet-lane-listener"}


def test_intervals_gates_and_phases_are_kept(tmp_path: Path) -> None:
    class Seldom(Callback):
        phase = "report"

        def __init__(self) -> None:
            self.steps: list[int] = []

        @every("4ba")
        def on_train_step_end(self, ctx: Context) -> None:
            self.steps.append(ctx.step)

    seldom, elsewhere = Seldom(), Seldom()
    elsewhere.ranks, elsewhere.name = {5}, "elsewhere"
    trainer = fit(tmp_path, Background(seldom), Background(elsewhere))
    assert seldom.steps == [4, 8, 12]
    assert elsewhere.steps == []
    assert [row[1:5] for row in trainer.callbacks.call_sheet().rows()] == [
        ("report", "Seldom", "all", "background"),
        ("report", "elsewhere", "5", "background"),
    ]


# --- the snapshot ---


def test_a_snapshot_does_not_move_with_training(tmp_path: Path) -> None:
    class Watch(Callback):
        snapshot_fields = ("loss", "loss_dict", "grad_norm", "learning_rate", "user_state", "batch")

        def __init__(self) -> None:
            self.seen: list[list[Any]] = []

        def on_train_step_end(self, ctx: Context) -> None:
            self.seen.append(values(ctx))

    class Spoils(Callback):
        """Modifies fields in place right after the snapshot was taken."""

        phase = "report"

        def on_train_step_end(self, ctx: Context) -> None:
            ctx.loss.zero_()
            ctx.batch[0].zero_()
            ctx.user_state["nested"][0].append(ctx.step)
            ctx.loss_dict.clear()

    def values(ctx: Context) -> list[Any]:
        assert ctx.grad_norm is not None
        numbers = [float(ctx.loss), float(ctx.loss_dict["loss"]), float(ctx.grad_norm), float(ctx.learning_rate)]
        nested = [list(inner) for inner in ctx.user_state["nested"]]
        return [ctx.step, ctx.state.timestamp, numbers, nested, ctx.batch[0].sum().item()]

    expected: list[list[Any]] = []
    watch = Watch()
    manager = CallbackManager([Background(watch)])
    manager.user_state["nested"] = [[]]
    manager.register("on_train_step_end", lambda ctx: expected.append(values(ctx)), name="inline")
    manager.add(Spoils())
    fit(tmp_path, callbacks=manager)
    assert watch.seen == expected
    assert len({tuple(map(tuple, seen[3])) for seen in expected}) == STEPS


@pytest.mark.parametrize("fields", [("loss",), ("grad_norm",), ("loss", "grad_norm", "learning_rate")])
def test_fields_that_each_step_creates_are_not_copied(tmp_path: Path, fields: tuple[str, ...]) -> None:
    class Watch(Callback):
        snapshot_fields = fields

        def __init__(self) -> None:
            self.seen: list[list[Any]] = []

        def on_train_step_end(self, ctx: Context) -> None:
            self.seen.append([getattr(ctx, name) for name in fields])

    watch, kept = Watch(), Watch()
    kept.name = "kept"
    fit(tmp_path, Background(watch), kept)
    assert len(watch.seen) == STEPS
    assert all(a is b for ours, theirs in zip(watch.seen, kept.seen, strict=True) for a, b in zip(ours, theirs, strict=True))


def test_a_field_outside_the_snapshot_is_named_with_a_hint(tmp_path: Path) -> None:
    messages: dict[str, str] = {}

    class Greedy(Callback):
        def on_train_step_end(self, ctx: Context) -> None:
            for name in ("model", "optimizer", "loss", "user_state", "eval_results", "nonsense"):
                try:
                    getattr(ctx, name)
                except AttributeError as error:
                    messages[name] = str(error)

    fit(tmp_path, Background(Greedy()))
    assert "not available in a lane, since training keeps changing it" in messages["model"]
    assert "not available in a lane" in messages["optimizer"]
    assert "snapshot_fields = ('loss', ...)" in messages["loss"]
    assert "snapshot_fields = ('user_state', ...)" in messages["user_state"]
    assert "it is available at on_eval_all_end" in messages["eval_results"]
    assert "has no field 'nonsense'" in messages["nonsense"]


def test_without_declared_fields_a_snapshot_holds_what_costs_nothing(tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    class Plain(Callback):
        def on_train_step_end(self, ctx: Context) -> None:
            seen["step"] = (ctx.epoch, ctx.learning_rate, ctx.step_skipped, ctx.run.name, ctx.state.elapsed)

        def on_log(self, ctx: Context) -> None:
            seen["record"] = ctx.record.values.get("train/loss", seen.get("record"))

        def on_eval_all_end(self, ctx: Context) -> None:
            seen["evaluation"] = (ctx.eval_results["noisy"]["loss"], ctx.standalone)

        def on_run_end(self, ctx: Context) -> None:
            seen["outcome"] = ctx.run.outcome

    fit(tmp_path, Background(Plain()))
    assert seen["step"][0] == 4
    assert seen["step"][3:] == ("small", 0.75)  # of four epochs, three are complete
    assert isinstance(seen["record"], float)
    assert isinstance(seen["evaluation"][0], float)
    assert seen["outcome"] is Outcome.FINISHED


def test_lanes_change_nothing(tmp_path: Path) -> None:
    class Copies(RecordsThreads):
        snapshot_fields = ("loss", "batch", "outputs", "grad_norm", "user_state")

    bare = run_small(tmp_path / "bare")
    with_lanes = run_small(tmp_path / "lanes", Background(Copies()), Background(Recorder()))
    assert with_lanes == bare


# --- logging and requests ---


def test_logged_metrics_are_recorded_and_tables_reach_the_loggers(tmp_path: Path) -> None:
    tables: list[Any] = []

    class Tables(Logger):
        def log_table(self, ctx: Context, name: str, columns: Any, rows: Any) -> None:
            tables.append((threading.current_thread().name, name, columns, rows))

    class Logs(Callback):
        snapshot_fields = ("loss",)

        def on_train_step_end(self, ctx: Context) -> None:
            ctx.log({"lane/steps": 1}, over="sum", across="same")
            ctx.log({"lane/loss": ctx.loss}, over="mean")

        def on_train_end(self, ctx: Context) -> None:
            ctx.log_table("words", ["a"], [[1]])

    logged: Counter[str] = Counter()
    manager = CallbackManager([Background(Logs()), Tables()])
    manager.register("on_log", lambda ctx: logged.update({name: int(ctx.record.values.get(name, 0)) for name in ("lane/steps",)}))
    with small_trainer(tmp_path, callbacks=manager, log_interval="1ba") as trainer:
        trainer.fit()
        trainer.callbacks.drain(trainer.ctx)
        trainer.fit("5ep")
    assert logged["lane/steps"] >= STEPS
    assert tables[0] == ("MainThread", "words", ["a"], [[1]])


@pytest.mark.parametrize("what", ["stop", "save", "evaluate"])
def test_requests_from_a_lane_are_carried_out(what: str, tmp_path: Path) -> None:
    class MakesRequest(Callback):
        def on_train_step_end(self, ctx: Context) -> None:
            if ctx.step == 2:
                getattr(ctx.control, what)("from a lane")

    recorder = Recorder()
    manager = CallbackManager([Background(MakesRequest()), recorder])
    manager.register("on_train_step_end", lambda ctx: time.sleep(0.05))
    stop_requests: list[str] = []
    manager.register("on_checkpoint_due", lambda ctx: stop_requests.append(str(ctx.control.stop_requested)))
    trainer = fit(tmp_path, callbacks=manager, eval_interval=None)
    if what == "stop":
        assert trainer.run.outcome is Outcome.STOPPED
        assert stop_requests[-1] == "MakesRequest: from a lane"
        assert 2 <= trainer.state.timestamp.batch < STEPS
    else:
        assert ("on_checkpoint_save_end" if what == "save" else "on_eval_all_end") in [
            str(noted.event) for noted in recorder.recorded
        ]


def test_requests_that_a_lane_cannot_make(tmp_path: Path) -> None:
    rejected: list[str] = []

    class MakesRejectedRequests(Callback):
        def on_train_end(self, ctx: Context) -> None:
            for ask in (
                lambda: ctx.control.stop("all of us", replicated=True),
                lambda: ctx.gather(1),
                lambda: ctx.control.save("odd", kind="odd"),  # type: ignore[arg-type]  # the mistake that is tested
            ):
                try:
                    ask()
                except (RequestRejected, ConfigError) as error:
                    rejected.append(str(error))

    fit(tmp_path, Background(MakesRejectedRequests()))
    assert [message[:22] for message in rejected] == [
        "control.stop(replicate",
        "ctx.gather() in a lane",
        "unknown kind of checkp",
    ]


# --- failing ---


def test_failures_are_isolated_and_counted_and_disable_the_callback(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Callback):
        calls = 0

        def on_train_step_end(self, ctx: Context) -> None:
            self.calls += 1
            raise SystemExit("a lane is no program") if self.calls == 2 else ValueError("broken")

    broken, history = Broken(), History()
    trainer = fit(tmp_path, Background(broken), history)
    assert trainer.run.outcome is Outcome.FINISHED
    assert broken.calls == 3
    assert len(history.losses) == STEPS
    assert "Callback Broken is switched off after 3 failures in a row" in caplog.text
    assert "LaneExit: SystemExit: a lane is no program" in caplog.text


def test_a_bad_log_call_in_a_lane_does_not_fail_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Logs(Callback):
        def on_train_step_end(self, ctx: Context) -> None:
            if ctx.step == 1:
                ctx.log({"metric": 1.0}, over="avg")  # type: ignore[arg-type]

    manager = CallbackManager([Background(Logs())])
    manager.register("on_train_step_end", lambda ctx: time.sleep(0.02))
    trainer = fit(tmp_path, callbacks=manager)
    assert trainer.run.outcome is Outcome.FINISHED
    assert "The message 'log' from the lane of Logs failed: unknown over 'avg'" in caplog.text


def test_a_tensor_that_is_modified_in_place_keeps_its_value_in_the_lane(tmp_path: Path) -> None:
    class Reads(Callback):
        snapshot_fields = ("user_state",)

        def __init__(self) -> None:
            self.seen: list[float] = []

        def on_train_step_end(self, ctx: Context) -> None:
            self.seen.append(float(ctx.user_state["count"]))

    reads = Reads()
    manager = CallbackManager()
    manager.user_state["count"] = torch.zeros(())
    manager.register("on_train_step_end", lambda ctx: ctx.user_state["count"].add_(1))
    manager.add(Background(reads))
    fit(tmp_path, callbacks=manager)
    assert reads.seen == [float(step) for step in range(1, STEPS + 1)]


@pytest.mark.test_all
def test_a_change_that_torch_does_not_count_reaches_the_lane(tmp_path: Path) -> None:
    """A write through `.data`, NumPy or a collective leaves the tensor's version as it is."""

    class Counts(Callback):
        snapshot_fields = ("outputs",)

        def __init__(self) -> None:
            self.seen: list[float] = []

        def on_forward_end(self, ctx: Context) -> None:
            self.seen.append(ctx.outputs["count"].item())

    inline, first, second = Counts(), Counts(), Counts()
    data = [torch.ones(2, 4) for _ in range(5)]
    with Trainer(
        Counted(), lambda outputs, batch: outputs["y"].mean(), [(each, each) for each in data],
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1), callbacks=[inline, Background(first), Background(second)],
        runs_folder=tmp_path, device="cpu",
    ) as trainer:  # fmt: skip
        trainer.fit()
    assert inline.seen == first.seen == second.seen == [1, 2, 3, 4, 5]


class Counted(torch.nn.Module):
    """Returns the number of calls, in a tensor that each call changes without increasing its version."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.count = torch.zeros(())

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        self.count.data.add_(1)
        return {"y": self.layer(x), "count": self.count}


@dataclass
class Plain:
    y: torch.Tensor
    next: Plain | None = None


class Words(list[Any]): ...


class Pair(tuple[Any, Any]):
    def __new__(cls, first: Any, second: Any) -> Pair:
        return super().__new__(cls, (first, second))


class Named(NamedTuple):
    y: torch.Tensor


@pytest.mark.parametrize(
    "make",
    [
        lambda y: Plain(y, Plain(y)),
        lambda y: Words([y, {"y": y}]),
        lambda y: {"y": y, "shape": y.shape},
        lambda y: torch.max(y, 0),
        lambda y: torch.distributions.Normal(y, 1.0),
        lambda y: UserDict(y=y),
        lambda y: defaultdict(list, y=[y]),
        lambda y: (y, [y]),
        lambda y: Pair(y, [y]),
        Named,
    ],
    ids=["dataclass", "list", "size", "structseq", "object", "UserDict", "defaultdict", "tuple", "pair", "namedtuple"],
)
def test_values_of_all_kinds_keep_their_type_in_a_snapshot(make: Callable[[torch.Tensor], Any]) -> None:
    y = torch.ones(3, requires_grad=True) * 2
    value = make(y)
    made = copy_value(value, {})
    assert type(made) is type(value)
    assert repr(made) == re.sub(r", grad_fn=<\w+>", "", repr(value))
    before = repr(made)
    y.data.mul_(3)
    assert repr(made) == before


def test_a_process_may_log_from_several_threads(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(tmp_path, Process(LogsFromThreads()))
    assert "LogsFromThreads" not in caplog.text


def test_what_a_process_sends_while_its_state_is_read_has_its_effect(tmp_path: Path) -> None:
    records: list[float | None] = []
    manager = CallbackManager([Process(LogsInState(), deadline=60)])
    manager.register("on_log", lambda ctx: records.append(ctx.record.values.get("far/state")))
    with small_trainer(tmp_path, callbacks=manager, log_interval="1ba", eval_interval=None) as trainer:
        trainer.fit("1ep")
        trainer.save_checkpoint()
        trainer.fit(f"{EPOCHS}ep")
    assert 1.0 in records
    assert (trainer.run.outcome, trainer.run.outcome_reason) == (Outcome.STOPPED, "stopped by LogsInState: from the state")


def test_a_process_that_a_callback_forks_ends_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(tmp_path, Process(Forks(str(tmp_path / "codes"))))
    assert "Forks" not in caplog.text
    assert (tmp_path / "codes").read_text().split() == ["3"] * STEPS


def test_a_process_ends_when_the_training_process_is_killed(tmp_path: Path) -> None:
    """Even while a handler runs."""
    file = tmp_path / "pid"
    code = (
        "import sys; from pathlib import Path\n"
        "from callsheet import Process\n"
        "from tests.trainer.far_callbacks import SleepsLong\n"
        "from tests.trainer.small_run import small_trainer\n"
        "if __name__ == '__main__':\n"
        f"    with small_trainer(Path({str(tmp_path)!r}), Process(SleepsLong({str(file)!r}))) as trainer:\n"
        "        trainer.fit()\n"
    )
    (tmp_path / "trains.py").write_text(code)
    root = Path(__file__).parents[2]
    training = subprocess.Popen([sys.executable, str(tmp_path / "trains.py")], env=os.environ | {"PYTHONPATH": str(root)})
    try:
        assert happens(lambda: file.exists() and file.read_text() != "", 60)
    finally:
        training.kill()
        training.wait()
    worker = int(file.read_text())
    assert happens(lambda: not is_running(worker), 20)


def is_running(process: int) -> bool:
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def happens(is_done: Callable[[], bool], seconds: float) -> bool:
    """Wait until `is_done` returns True. Return whether it did within this time."""
    end = time.monotonic() + seconds
    while not (done := is_done()) and time.monotonic() < end:
        time.sleep(0.05)
    return done


def test_a_process_that_hangs_does_not_block_checkpoints_forever(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    far = Process(Far(hang_at=2), deadline=2.0)
    with small_trainer(tmp_path, far, eval_interval=None) as trainer:
        trainer.fit("2ep")
        began = time.monotonic()
        trainer.save_checkpoint()
        trainer.save_checkpoint()
        assert time.monotonic() - began < 15
        trainer.fit(f"{EPOCHS}ep")
    assert trainer.run.outcome is Outcome.FINISHED
    assert "The state of callback Far" in caplog.text  # it is missing: an earlier state would not belong to the checkpoint's step


def test_a_field_that_cannot_be_copied_is_a_failure_of_the_callback(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Wants(Callback):
        snapshot_fields = ("user_state",)

        def on_train_step_end(self, ctx: Context) -> None: ...

    manager = CallbackManager([Background(Wants())])
    manager.user_state["lock"] = threading.Lock()
    with small_trainer(tmp_path, callbacks=manager) as trainer:
        trainer.fit()
        manager.user_state.clear()
    assert trainer.run.outcome is Outcome.FINISHED
    assert "Callback Wants is switched off after 3 failures in a row" in caplog.text
    assert "cannot pickle" in caplog.text


@pytest.mark.test_all
def test_a_lane_that_hangs_delays_the_end_by_its_deadline_and_no_more(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    release = threading.Event()

    class Hangs(Callback):
        def on_train_start(self, ctx: Context) -> None:
            release.wait(30)

        def on_train_step_end(self, ctx: Context) -> None: ...

    hanging = [Background(Hangs(), deadline=2.0) for _ in range(3)]
    for number, callback in enumerate(hanging):
        callback.name = f"hangs-{number}"
    well = RecordsThreads()
    trainer = small_trainer(tmp_path, *hanging, Background(well, deadline=1.0))
    began = time.monotonic()
    trainer.fit()
    trainer.close()
    took = time.monotonic() - began
    release.set()
    assert 1.9 < took < 5.5  # it would be 6 if the deadlines of the lanes were added up
    assert well.received[-1][0] == "on_run_end"
    for number in range(3):
        assert f"a lane has not delivered all events: hangs-{number}: {STEPS} waiting, and one has not returned" in caplog.text


def test_the_last_record_has_what_a_slow_lane_logs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Counts(Callback):
        def on_train_step_end(self, ctx: Context) -> None:
            time.sleep(0.1)
            ctx.log({"lane/steps": 1.0}, over="sum")

    class LogsAtEnd(Callback):
        def on_run_end(self, ctx: Context) -> None:
            ctx.log({"lane/end": 1.0})

    fit(tmp_path, Background(Counts()), Background(LogsAtEnd()), history := callbacks.History())
    assert sum(history["lane/steps"]) == STEPS
    assert "Messages from the lane of LogsAtEnd came at the run's end, too late for the loggers: log, 1 times" in caplog.text
    assert "the lane of Counts" not in caplog.text


@pytest.mark.parametrize("end", ["error", "interrupt"])
def test_lanes_are_emptied_when_training_fails(end: str, tmp_path: Path) -> None:
    class Fails(Callback):
        def on_train_step_end(self, ctx: Context) -> None:
            if ctx.step == 3:
                raise KeyboardInterrupt if end == "interrupt" else RuntimeError("training failed")

    ears = RecordsThreads()
    with pytest.raises(KeyboardInterrupt if end == "interrupt" else RuntimeError):
        fit(tmp_path, Background(ears), Fails())
    assert ears.received[-2:] == [("on_exception", 3), ("on_run_end", 3)]


def test_a_manager_alone_empties_its_lanes_when_it_is_closed() -> None:
    from callsheet import RunInfo

    ears = RecordsThreads()
    manager = CallbackManager([Background(ears)])
    ctx = Context(RunInfo("by hand"))
    manager.open(ctx)
    for ctx.step in range(1, 51):
        manager.fire("on_train_step_end", ctx)
    manager.close()
    manager.close()
    assert [step for _, step in ears.received] == list(range(1, 51))


def test_dropped_events_are_in_the_report(tmp_path: Path) -> None:
    reports: list[Any] = []

    class Takes(Logger):
        def log_costs(self, ctx: Context, report: Any) -> None:
            reports.append(report)

    class Slow(Callback):
        def on_train_step_end(self, ctx: Context) -> None:
            time.sleep(0.02)

    fit(tmp_path, Background(Slow(), queue=2, overflow="drop_oldest"), Takes())
    (noted,) = reports[-1].failures
    assert (noted.callback, noted.count) == ("Slow", 0)
    assert noted.dropped > 0


# --- state ---


class Tally(Callback):
    """Counts steps, slowly."""

    def __init__(self) -> None:
        self.steps = 0

    def on_train_step_end(self, ctx: Context) -> None:
        time.sleep(0.002)
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: Any) -> None:
        self.steps = state["steps"]


def test_the_saved_state_is_that_of_the_checkpoint_s_step(tmp_path: Path) -> None:
    with small_trainer(tmp_path, Background(Tally())) as trainer:
        trainer.fit("2ep")
        trainer.save_checkpoint()
    resumed = Tally()
    with small_trainer(tmp_path, Background(resumed), resume="auto") as trainer:
        assert resumed.steps == STEPS // 2
        trainer.fit()
    assert resumed.steps == STEPS


def test_a_background_callback_can_be_described_as_data() -> None:
    far = Background(Far(bias=3), queue=7, overflow="latest")
    spec = CallbackSpec.from_dict(CallbackSpec.of(far).to_dict())
    again = spec.build()
    assert isinstance(again, Background)
    assert isinstance(again.callback, Far)
    assert (again.callback.bias, again.lane_options.queue, again.lane_options.overflow) == (3, 7, "latest")


def test_a_background_callback_can_be_removed_by_its_inner_callback() -> None:
    ears, far = RecordsThreads(), Far()
    manager = CallbackManager([Background(ears), Background(far)])
    assert manager.remove(ears) == 1
    assert manager.remove(Far) == 1
    assert manager.callbacks == []


# --- what is rejected ---


def test_a_callback_that_cannot_run_in_a_lane_is_rejected_when_it_is_added() -> None:
    class Draws(Callback):
        draws_random = True

        def on_log(self, ctx: Context) -> None: ...

    class Wants(Callback):
        snapshot_fields = ("model", "loss")

        def on_log(self, ctx: Context) -> None: ...

    class Collects(Callback):
        collective = True

        def on_log(self, ctx: Context) -> None: ...

    for callback, message in (
        (Draws(), "draws random numbers"),
        (Wants(), "snapshot_fields: model"),
        (Collects(), "calls collectives"),
    ):
        with pytest.raises(RegistrationError, match=message):
            CallbackManager([Background(callback)])
    with pytest.raises(NotACallbackError, match="not in a lane yet"):
        Background(Background(RecordsThreads()))
    with pytest.raises(ConfigError, match="unknown overflow 'drop'; did you mean 'drop_oldest'"):
        Background(RecordsThreads(), overflow="drop")  # type: ignore[arg-type]  # the mistake that is tested


# --- on two ranks ---


class FailsOn(Callback):
    """Fails at every step on one rank."""

    on_error = "isolate"

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.calls = 0

    def on_train_step_end(self, ctx: Context) -> None:
        self.calls += 1
        time.sleep(0.01)
        if ctx.run.rank == self.rank:
            raise ValueError("broken here")


def failing_on_one_rank(folder: str, in_lane: bool) -> list[int]:
    torch.manual_seed(0)
    logging.getLogger("callsheet").setLevel(logging.CRITICAL)
    callback = FailsOn(1)
    steps: list[int] = []
    manager = CallbackManager([Background(callback) if in_lane else callback])
    manager.register("on_train_step_end", lambda ctx: steps.append(ctx.step))
    with small_trainer(Path(folder), callbacks=manager, max_duration="30ep", seed=1) as trainer:
        trainer.fit()
        off = [member.is_off for member in manager._table.registrations[:1]]
    return [len(steps), callback.calls, int(off[0])]


@pytest.mark.test_all
@pytest.mark.parametrize("in_lane", [False, True])
def test_a_callback_that_fails_on_one_rank_is_disabled_on_all(in_lane: bool, tmp_path: Path) -> None:
    ends = run_ranks(failing_on_one_rank, 2, str(tmp_path), in_lane)
    steps = {end[0] for end in ends}
    assert len(steps) == 1
    for rank, (_, calls, is_off) in enumerate(ends):
        assert is_off
        assert (3 if rank == 1 else 0) <= calls < steps.copy().pop()  # the other rank's lane may lag when it is disabled
    if not in_lane:
        assert ends[0][1] == ends[1][1]  # on both ranks at the same step


# --- in a process of its own ---


@pytest.mark.test_all
def test_a_callback_in_its_own_process(tmp_path: Path) -> None:
    records: dict[int, float] = {}
    far = Process(Far(bias=100), deadline=100)
    manager = CallbackManager([far])
    manager.register("on_log", lambda ctx: records.update({ctx.step: ctx.record.values.get("far/steps", 0.0)}))
    with small_trainer(tmp_path, callbacks=manager, log_interval="1ba", eval_interval=None) as trainer:
        trainer.fit("2ep")
        checkpoint = trainer.save_checkpoint()
        state = dict(manager.state_dict()["callbacks"]["Far"])
        manager.register("on_train_step_end", lambda ctx: time.sleep(0.05))
        trainer.fit(f"{EPOCHS}ep")
    assert state == {"steps": STEPS // 2, "pid": state["pid"]}
    assert state["pid"] != os.getpid()
    assert max(records.values()) > 100 + STEPS // 2
    outcome, steps, pid = (tmp_path / "small" / "far.txt").read_text().split()
    assert (outcome, steps, pid) == ("finished", str(STEPS), str(state["pid"]))
    with pytest.raises(ProcessLookupError):
        os.kill(state["pid"], 0)
    resumed = Process(Far(), deadline=100)
    with small_trainer(tmp_path, resumed, resume=checkpoint.path) as trainer:
        trainer.fit()
        assert trainer.callbacks.state_dict()["callbacks"]["Far"]["steps"] == STEPS


@pytest.mark.test_all
def test_a_process_that_dies_is_counted_and_started_again_with_its_last_state(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    far = Process(Far(crash_at=8, exit_at=2), deadline=100)
    with small_trainer(tmp_path, far, eval_interval=None) as trainer:
        trainer.fit("2ep")
        trainer.save_checkpoint()
        trainer.fit(f"{EPOCHS}ep")
        assert trainer.callbacks.state_dict()["callbacks"]["Far"]["steps"] == STEPS - 2  # steps 7 and 8 were lost with it
    assert trainer.run.outcome is Outcome.FINISHED
    assert "ProcessDied: the process of Far died, exit code 7" in caplog.text
    assert "SystemExit: enough" in caplog.text


@pytest.mark.test_all
def test_a_process_that_hangs_is_killed_when_its_time_is_over(tmp_path: Path) -> None:
    far = Process(Far(hang_at=1), deadline=2.0)
    trainer = small_trainer(tmp_path, far, eval_interval=None)
    trainer.fit()
    end = time.monotonic() + 60
    while (pid := far.pid) is None:
        assert time.monotonic() < end
        time.sleep(0.01)
    began = time.monotonic()
    trainer.close()
    assert time.monotonic() - began < 20
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.test_all
def test_a_process_can_stop_the_run_and_a_class_can_declare_a_process(tmp_path: Path) -> None:
    manager = CallbackManager([FarByClass(stop_at=2)])
    stop_requests: list[str] = []
    manager.register("on_train_step_end", lambda ctx: time.sleep(0.05))
    manager.register("on_checkpoint_due", lambda ctx: stop_requests.append(str(ctx.control.stop_requested)))
    trainer = fit(tmp_path, callbacks=manager, max_duration="100ep", eval_interval=None)
    assert trainer.run.outcome is Outcome.STOPPED
    assert stop_requests[-1] == "FarByClass: far enough"
    assert manager.call_sheet().rows()[0][4] == "process"


def test_a_callback_that_another_process_cannot_build_is_rejected() -> None:
    class Local(Callback):
        def on_log(self, ctx: Context) -> None: ...

    with pytest.raises(ConfigError, match=r"Local is defined in a function.*move the class into a module"):
        Process(Local())
    with pytest.raises(ConfigError, match=r"Far cannot be built in another process"):
        Process(Far(bias=threading.Lock()))  # type: ignore[arg-type]  # that is what is tested
    with pytest.raises(RegistrationError, match="cannot be sent to another process"):
        CallbackManager().register("on_log", lambda ctx: None, lane="process")


def test_every_event_can_be_handled_in_a_lane(tmp_path: Path) -> None:
    ears = RecordsThreads()
    data = [(torch.zeros(2, 3), torch.zeros(2, 1))]
    with small_trainer(tmp_path, Background(ears)) as trainer:
        trainer.fit()
        trainer.save_checkpoint()
        trainer.test(data)
        trainer.predict(data)
    missing = set(EVENTS) - {event for event, _ in ears.received}
    assert missing == {"on_preempt", "on_exception"}


def test_a_name_is_set_on_the_lane_and_its_callback() -> None:
    far = Far()
    lane = Background(far)
    assert lane.name == "Far"
    lane.name = "another"
    assert far.name == "another"
    CallbackManager([lane, Background(Far())])  # two callbacks with state need different names


def test_what_is_logged_at_the_last_step_is_in_the_last_record(tmp_path: Path) -> None:
    class Logs(Callback):
        def on_train_step_end(self, ctx: Context) -> None:
            ctx.log({"lane/step": ctx.step}, across="same")

    records: list[tuple[int, float | None]] = []
    manager = CallbackManager([Background(Logs())])
    manager.register("on_log", lambda ctx: records.append((ctx.record.step, ctx.record.values.get("lane/step"))))
    fit(tmp_path, callbacks=manager, max_duration=f"{STEPS}ba", log_interval=f"{STEPS}ba", eval_interval=None)
    assert records == [(STEPS, STEPS)]


@pytest.mark.test_all
def test_one_hung_lane_leaves_a_preempted_run_the_time_to_save(tmp_path: Path) -> None:
    class Hangs(Callback):
        release = threading.Event()

        def on_train_start(self, ctx: Context) -> None:
            self.release.wait(60)

        def state_dict(self) -> dict[str, Any]:
            return {"a": 1}

    class Preempted(Callback):
        began = saved = 0.0

        def on_train_step_end(self, ctx: Context) -> None:
            if ctx.step == 2:
                self.began = time.monotonic()
                os.kill(os.getpid(), signal.SIGTERM)

        def on_checkpoint_save_end(self, ctx: Context) -> None:
            self.saved = time.monotonic()
            Hangs.release.set()

    preempted = Preempted()
    trainer = fit(tmp_path, Background(Hangs(), deadline=40), preempted, grace_seconds=6.0, eval_interval=None)
    assert trainer.run.outcome is Outcome.PREEMPTED
    assert 1.0 < preempted.saved - preempted.began < 6.0


class KeepsLosses(Callback):
    """Keeps the loss tensors that it receives, and their values at the time of the call."""

    snapshot_fields = ("loss",)

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []

    def on_train_step_end(self, ctx: Context) -> None:
        self.tensors.append(ctx.loss)


def test_the_loss_of_a_step_reaches_a_lane_without_a_copy_and_stays_what_it_was(tmp_path: Path) -> None:
    inline, lane = KeepsLosses(), KeepsLosses()
    inline.name = "inline"
    data = [(torch.full((2, 2), float(step)), torch.ones(2, 1)) for step in range(20)]
    with Trainer(
        torch.nn.Linear(2, 1),
        torch.nn.functional.mse_loss,
        train_dataloader=data,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
        max_duration="1ep",
        callbacks=[inline, Background(lane)],
        runs_folder=tmp_path,
    ) as trainer:
        trainer.fit()
    assert len(lane.tensors) == 20
    assert all(here is there for here, there in zip(inline.tensors, lane.tensors, strict=True))
    assert len({tensor.item() for tensor in lane.tensors}) == 20
    assert not any(tensor.requires_grad for tensor in lane.tensors)


def test_the_loss_of_a_loop_that_may_write_to_it_is_copied() -> None:
    lane = KeepsLosses()
    manager, ctx = CallbackManager([Background(lane)]), Context(RunInfo("by hand"))
    manager.open(ctx)
    ctx.loss = torch.zeros(())
    for step in range(3):
        ctx.loss.fill_(step)
        manager.fire("on_train_step_end", ctx)
    manager.drain(ctx)
    assert [tensor.item() for tensor in lane.tensors] == [0, 1, 2]
    manager.close()
