"""Megatron Bridge's callbacks do the same as guests as in Megatron Bridge, of whose interface there is a copy."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from callsheet import CallbackManager as OwnManager
from callsheet import Trainer
from callsheet.bridges.megatron_bridge import GUEST_EVENTS, guest
from callsheet.bridges.megatron_bridge import names as interface_copy
from callsheet.bridges.megatron_bridge.state import StepContext
from callsheet.callbacks import CheckpointSaver, History
from callsheet.errors import NotSupported
from callsheet.testing.ranks import run_ranks

from .loops.job import POINTS
from .loops.megatron_bridge import configuration, interface
from .test_megatron_bridge import loop

real = interface()


pytestmark = pytest.mark.usefixtures("one_thread")


def trainer(folder: Path, callbacks: Any, **options: Any) -> Trainer:
    given: dict[str, Any] = {
        "max_duration": "12ba",
        "eval_interval": "6ba",
        "log_interval": "2ba",
        "clip_grad_norm": 1.0,
    } | options
    return Trainer(
        POINTS.made_model(),
        POINTS.loss,
        list(POINTS.batches()),
        list(POINTS.validation_batches()),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.02),
        seed=3,
        device="cpu",
        run_name="small",
        runs_folder=folder,
        callbacks=callbacks,
        **given,
    )


class RecordsCalls(interface_copy.Callback):
    """Records what it can read at every event."""

    def __init__(self) -> None:
        self.recorded: list[tuple[str, int, set[str]]] = []
        self.contexts: list[interface_copy.CallbackContext] = []


def _note(event: str) -> Callable[[RecordsCalls, interface_copy.CallbackContext], None]:
    def note(self: RecordsCalls, context: interface_copy.CallbackContext) -> None:
        given = ("optimizer", "loss_dict", "grad_norm", "skipped_iter", "total_loss_dict")
        self.recorded.append(
            (event, context.state.train_state.step, {name for name in given if getattr(context, name) is not None})
        )
        self.contexts.append(context)

    return note


for _event in interface_copy.VALID_EVENTS:
    setattr(RecordsCalls, _event, _note(_event))


def test_a_guest_receives_the_same_events_and_values_as_in_megatron_bridge(tmp_path: Path) -> None:
    notes, in_framework = RecordsCalls(), RecordsCalls()
    with trainer(tmp_path / "ours", [guest(notes), CheckpointSaver(save_interval="6ba")]) as trained:
        trained.fit()
        trained.evaluate()
        trained.test(POINTS.validation_batches())
    loop(tmp_path / "theirs", [in_framework], checkpoint__save_interval=6).run()
    assert notes.recorded == in_framework.recorded
    assert {event for event, *_ in notes.recorded} == interface_copy.VALID_EVENTS
    assert len({id(context) for context in notes.contexts}) == len(notes.contexts)  # a new context each time
    for mine, theirs in zip(notes.contexts, in_framework.contexts, strict=True):
        assert mine.model == [trained.model]
        for losses, wanted in ((mine.loss_dict, theirs.loss_dict), (mine.total_loss_dict, theirs.total_loss_dict)):
            if wanted is not None:
                assert losses is not None
                assert losses["lm loss"].item() == pytest.approx(wanted["lm loss"].item(), rel=1e-5)
        assert mine.grad_norm == (pytest.approx(theirs.grad_norm, rel=1e-5) if theirs.grad_norm is not None else None)
        assert mine.skipped_iter == theirs.skipped_iter


def test_callbacks_of_one_event_share_a_context_and_are_called_in_order(tmp_path: Path) -> None:
    manager, recorded = interface_copy.CallbackManager(), list[Any]()

    class RecordsUserState(interface_copy.Callback):
        def on_train_start(self, context: interface_copy.CallbackContext) -> None:
            recorded.append(("class", context.user_state["n"], context))

    manager.register("on_train_start", lambda context: recorded.append(("first", context.user_state.setdefault("n", 1), context)))
    manager.register("on_train_start", lambda context: manager.register("on_train_step_end", late))
    manager.add(RecordsUserState())

    def late(context: interface_copy.CallbackContext) -> None:
        recorded.append(("late", context.state.train_state.step, context))

    with trainer(tmp_path, [guest(manager)], max_duration="2ba") as trained:
        trained.fit()
    assert [each[:2] for each in recorded] == [("first", 1), ("class", 1), ("late", 0), ("late", 1)]
    assert recorded[0][2] is recorded[1][2]
    assert manager.user_state == {"n": 1}


def test_single_guests_share_context_and_user_state_but_not_with_a_manager(tmp_path: Path) -> None:
    seen: dict[str, list[Any]] = {}

    class RecordsContexts(interface_copy.Callback):
        def __init__(self, name: str) -> None:
            self.name = name

        def on_train_step_end(self, context: interface_copy.CallbackContext) -> None:
            context.user_state[self.name] = context.state.train_state.step
            seen.setdefault(self.name, []).append(context)

    manager = interface_copy.CallbackManager()
    manager.add(RecordsContexts("apart"))
    with trainer(
        tmp_path,
        [guest(RecordsContexts("one"), name="one"), guest(manager), guest(RecordsContexts("two"), name="two")],
        max_duration="2ba",
    ) as trained:
        trained.fit()
    assert [one is two for one, two in zip(seen["one"], seen["two"], strict=True)] == [True, True]
    assert seen["one"][-1].user_state == {"one": 1, "two": 1}
    assert manager.user_state == {"apart": 1}
    assert seen["apart"][-1].state is not seen["one"][-1].state


def test_an_error_of_one_callback_is_raised_and_the_rest_are_not_called(tmp_path: Path) -> None:
    manager, recorded = interface_copy.CallbackManager(), list[Any]()
    manager.register("on_train_step_end", lambda context: 1 // 0)
    manager.register("on_train_step_end", recorded.append)
    with pytest.raises(ZeroDivisionError), trainer(tmp_path, [guest(manager)]) as trained:
        trained.fit()
    assert not recorded


class StopsByStep(interface_copy.Callback):
    """Ends training as MLPerf's callbacks do: sets the step beyond the last one."""

    def on_eval_end(self, context: interface_copy.CallbackContext) -> None:
        context.state.mine = getattr(context.state, "mine", 0) + 1  # an attribute that the callback adds to the state
        if context.state.train_state.step >= 6:
            context.state.train_state.step = context.state.cfg.train.train_iters + 1


class StopsByLength(interface_copy.Callback):
    """Ends training by setting `train_iters`."""

    def on_train_step_end(self, context: interface_copy.CallbackContext) -> None:
        assert context.loss_dict is not None
        if context.loss_dict["lm loss"] < 3.0:
            context.state.cfg.train.train_iters = context.state.train_state.step + 1


class Decays(interface_copy.Callback):
    """Sets the learning rate."""

    def on_train_step_start(self, context: interface_copy.CallbackContext) -> None:
        for group in context.optimizer.param_groups:
            group["lr"] = 0.1 / (1 + context.state.train_state.step)


class KeepsLowestLoss(interface_copy.Callback):
    """Keeps the lowest loss."""

    def on_train_step_end(self, context: interface_copy.CallbackContext) -> None:
        assert context.loss_dict is not None
        loss = context.loss_dict["lm loss"].item()
        context.user_state["best"] = min(loss, context.user_state.get("best", math.inf))


@pytest.mark.parametrize(
    "make", [KeepsLowestLoss, Decays, StopsByStep, StopsByLength]
)  # the first one only listens, the others drive
def test_a_guest_has_the_same_effects_as_in_its_framework(make: type[interface_copy.Callback], tmp_path: Path) -> None:
    manager, in_framework = interface_copy.CallbackManager(), interface_copy.CallbackManager()
    manager.add(make())
    in_framework.add(make())
    history = History()
    with trainer(tmp_path, [guest(manager), history], log_interval="1ba") as trained:
        trained.fit()
    wanted = loop(None, in_framework)
    wanted.run()
    assert trained.state.timestamp.batch == len(wanted.losses)
    assert history["train/loss"] == pytest.approx(wanted.losses, rel=1e-4)
    assert manager.user_state == pytest.approx(in_framework.user_state, rel=1e-4)


@pytest.mark.parametrize("config", [None, configuration()], ids=["callsheet's", "Megatron's"])
def test_changing_the_step_other_than_to_end_training_is_rejected(config: Any, tmp_path: Path) -> None:
    def jump(context: interface_copy.CallbackContext) -> None:
        context.state.train_state.step += 2

    manager = interface_copy.CallbackManager()
    manager.register("on_train_step_end", jump)
    with (
        pytest.raises(NotSupported, match="can only end training at once"),
        trainer(tmp_path, [guest(manager, config=config)]) as made,
    ):
        made.fit()


def test_changing_a_copy_of_the_state_has_no_effect(tmp_path: Path) -> None:
    """Setting a value to its current value has no effect either."""

    def change_copy(context: interface_copy.CallbackContext) -> None:
        later = copy.deepcopy(context.state)
        later.train_state.step += 2
        later.cfg.train.train_iters += 2
        context.state.train_state.step = context.state.train_state.step  # the guest checks each assignment

    manager = interface_copy.CallbackManager()
    manager.register("on_train_step_end", change_copy)
    with trainer(tmp_path, [guest(manager), guest(StopsByStep())], max_duration="3ba") as trained:
        trained.fit()
    assert trained.state.timestamp.batch == 3


def test_unsupported_state_is_rejected_by_name(tmp_path: Path) -> None:
    found: list[Any] = []

    def read_state(context: interface_copy.CallbackContext) -> None:
        state = context.state
        found.append((hasattr(state, "warmup"), state.tensorboard_logger, state.cfg.train.train_iters))
        state.timers("mine").start()
        state.timers("mine").stop()
        assert state.timers("mine").elapsed() >= 0
        for read in (
            lambda: state.signal_handler,
            lambda: state.cfg.model,
            lambda: state.cfg.train.eval_interval,
            lambda: state.train_state.floating_point_operations_so_far,
            lambda: setattr(state, "cfg", None),
            lambda: setattr(state.train_state, "consumed_train_samples", 3),
        ):
            with pytest.raises(NotSupported):
                read()

    manager = interface_copy.CallbackManager()
    manager.register("on_train_step_end", read_state)
    with trainer(tmp_path, [guest(manager)], max_duration="1ba") as trained:
        trained.fit()
    assert found == [(False, None, 1)]


def test_a_gradient_norm_on_the_device_becomes_a_float_when_it_is_read() -> None:
    context = StepContext(None, [], {}, None, None, {}, torch.tensor(2.0))  # type: ignore[arg-type]  # as the loop passes it
    assert isinstance(vars(context)["grad_norm"], Tensor)
    assert isinstance(context.grad_norm, float)
    assert context == StepContext(None, [], {}, None, None, {}, 2.0)


def test_a_user_s_configuration_is_in_the_state(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    config = configuration()

    def record_counts(context: interface_copy.CallbackContext) -> None:
        seen.append((context.state.cfg.logger.log_interval, context.state.train_state.consumed_train_samples))

    manager = interface_copy.CallbackManager()
    manager.register("on_train_step_end", record_counts)
    with trainer(tmp_path, [guest(manager, config=config)], max_duration="3ba") as trained:
        trained.fit()
    assert seen == [(2, 0), (2, 4), (2, 8)]


def test_plain_values_of_user_state_are_saved(tmp_path: Path) -> None:
    class Counts(interface_copy.Callback):
        def on_train_step_end(self, context: interface_copy.CallbackContext) -> None:
            context.user_state["steps"] = context.user_state.get("steps", 0) + 1
            context.user_state["lock"] = object()

        def state_dict(self) -> dict[str, Any]:
            return {"own": 5}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.loaded = state

    with trainer(tmp_path, [guest(Counts()), CheckpointSaver(save_interval="4ba")], max_duration="4ba") as trained:
        trained.fit()
    foreign = Counts()
    again = guest(foreign)
    with trainer(tmp_path, [again, CheckpointSaver(save_interval="4ba")], resume="auto") as trained:
        trained.fit()
    assert again.common.user_state["steps"] == 12
    assert foreign.loaded == {"own": 5}
    assert (
        again.state.train_state.consumed_valid_samples == 12 * 3
    )  # three evaluations of 12 samples, the first of them before the resume


def test_a_guest_that_listens_to_an_event_that_is_never_fired_is_rejected_by_name(caplog: pytest.LogCaptureFixture) -> None:
    class Base:  # like Megatron-LM's base class, which has events that Megatron Bridge lacks
        def on_log(self, context: Any) -> None: ...
        def on_train_end(self, context: Any) -> None: ...

    Base.__name__ = "Callback"

    class Logs(Base):
        def on_log(self, context: Any) -> None: ...

    class ListensToNothing(Base): ...

    with pytest.raises(NotSupported, match="Logs listens to on_log of Megatron Bridge, which callsheet does not fire"):
        guest(Logs())
    guest(Logs(), strict=False)
    assert "Logs listens to on_log" in caplog.text
    guest(ListensToNothing())
    with pytest.raises(NotSupported, match="pass a list of its callbacks"):
        guest(SimpleNamespace(callback_context=None, fire=None, has_callbacks=None))


COUNTS_SAMPLES = ["on_eval_end", "on_eval_start", "on_eval_step_end"]
"""The events at which a guest counts the samples of evaluations, although its callbacks do not listen to them."""


def test_a_guest_listens_only_to_the_hooks_that_it_overrides() -> None:
    manager = OwnManager([guest(Decays())])
    received = [event for event in GUEST_EVENTS if manager.list_callbacks(event)]
    assert received == [*COUNTS_SAMPLES, "on_train_step_start"]


@pytest.mark.skipif(real is None, reason="megatron-bridge is not installed")
def test_the_package_s_own_callbacks_and_managers_are_accepted_as_guests(tmp_path: Path) -> None:
    assert real is not None
    recorded: list[tuple[str, int]] = []

    class RecordsSteps(real.Callback):  # type: ignore[misc, name-defined]  # the module is loaded by its path
        def on_train_step_end(self, context: Any) -> None:
            recorded.append(("class", context.state.train_state.step))

    manager = real.CallbackManager()
    manager.register("on_train_step_end", lambda context: recorded.append(("function", context.state.train_state.step)))
    guests = [guest(RecordsSteps()), guest([RecordsSteps()], name="list"), guest(manager)]
    assert [event for event in GUEST_EVENTS if OwnManager([guests[0]]).list_callbacks(event)] == [
        *COUNTS_SAMPLES,
        "on_train_step_end",
    ]
    with trainer(tmp_path, guests, max_duration="1ba") as trained:
        trained.fit()
    assert recorded == [("class", 0), ("class", 0), ("function", 0)]


class RecordsProgress(interface_copy.Callback):
    """Records step, samples and `train_iters` at the start or end of each step, and at each checkpoint."""

    def __init__(self) -> None:
        self.recorded: list[tuple[int, int, int | None]] = []

    def _record(self, context: interface_copy.CallbackContext) -> None:
        state = context.state.train_state
        self.recorded.append((state.step, state.consumed_train_samples, context.state.cfg.train.train_iters))

    on_checkpoint_save = _record

    @classmethod
    def at(cls, event: str) -> RecordsProgress:
        """Return a callback that also records at this event."""
        made: RecordsProgress = type(cls.__name__, (cls,), {event: cls._record})()
        return made


@pytest.mark.parametrize("event", ["on_train_step_start", "on_train_step_end"])
def test_samples_and_the_length_in_epochs_are_known_at_every_step(event: str, tmp_path: Path) -> None:
    first, resumed = RecordsProgress.at(event), RecordsProgress.at(event)
    options: dict[str, Any] = {"max_duration": "2ep", "eval_interval": None, "log_interval": "5ba"}
    with trainer(tmp_path, [guest(first), CheckpointSaver(save_interval="4ba", save_at_end=False)], **options) as trained:
        trained.fit()
    saves = (4, 8, 12)
    in_steps = [(step, 4 * step, 12) for step in range(12)]
    assert sorted(first.recorded) == sorted(in_steps + [(step, 4 * step, 12) for step in saves])
    middle = str(tmp_path / "small" / "checkpoints" / "ep1-ba8")
    with trainer(tmp_path / "resumed", [guest(resumed)], resume=middle, **options) as trained:
        trained.fit()
    assert resumed.recorded == in_steps[8:]


def train_on_rank(folder: str) -> list[tuple[int, int, int | None]]:
    torch.set_num_threads(1)
    progress = RecordsProgress.at("on_train_step_end")
    with trainer(Path(folder), [guest(progress)], max_duration="2ep", eval_interval=None, parallel="ddp") as trained:
        trained.fit()
    return progress.recorded


def test_samples_of_all_ranks_are_counted_at_every_step(tmp_path: Path) -> None:
    assert run_ranks(train_on_rank, 2, str(tmp_path)) == [[(step, 8 * step, 6) for step in range(6)]] * 2


def evaluate_on_rank(folder: str) -> list[int]:
    torch.set_num_threads(1)
    adapted = guest(RecordsCalls())
    # Three batches of four samples: the second rank has no batch in the second step, and gets a filler.
    with trainer(Path(folder), [adapted], max_duration="1ba", eval_interval=None, parallel="ddp") as trained:
        trained.evaluate()
        listed = adapted.state.train_state.consumed_valid_samples
        trained.evaluate({"loader": POINTS.validation_batches()})
    return [listed, adapted.state.train_state.consumed_valid_samples - listed]


def test_fillers_of_ranks_without_a_batch_are_not_counted(tmp_path: Path) -> None:
    assert run_ranks(evaluate_on_rank, 2, str(tmp_path)) == [[12, 12], [12, 12]]


def evaluate_own_data_on_rank(folder: str) -> list[int]:
    torch.set_num_threads(1)
    adapted = guest(RecordsCalls())
    # The ranks have two batches and one batch of their own, with four samples each.
    own = list(POINTS.validation_batches())[: 2 - int(os.environ["RANK"])]
    with trainer(Path(folder), [adapted], max_duration="1ba", eval_interval=None, parallel="ddp", shard_data=False) as trained:
        trained.evaluate({"own": own})
        return [adapted.state.train_state.consumed_valid_samples]


def test_samples_of_ranks_own_data_are_exact_after_an_evaluation(tmp_path: Path) -> None:
    assert run_ranks(evaluate_own_data_on_rank, 2, str(tmp_path)) == [[12], [12]]
