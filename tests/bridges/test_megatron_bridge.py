"""callsheet's callbacks in a loop that fires what Megatron Bridge's fires, and its callbacks in callsheet's Trainer.

The host is told through the package's own interface where that is installed, and through callsheet's names for it.
"""

from __future__ import annotations

import copy
import functools
import gc
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from callsheet import Callback, Context, NotCarried, RequestRefused, Trainer
from callsheet import CallbackManager as OwnManager
from callsheet.bridges.megatron_bridge import GUEST_EVENTS, MegatronBridgeHost, guest, host
from callsheet.bridges.megatron_bridge import names as ours
from callsheet.bridges.megatron_bridge.state import StepContext
from callsheet.callbacks import (
    EMA,
    CheckpointSaver,
    EarlyStopper,
    History,
    LRMonitor,
    NaNMonitor,
    SpeedMonitor,
    ThresholdStopper,
)
from callsheet.lifecycle import EVENTS
from callsheet.testing import Recorder, check_events, run_ranks

from .homes.job import POINTS
from .homes.megatron_bridge import Loop, Optimizer, configuration, interface

real = interface()


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=[ours, real] if real is not None else [ours], ids=lambda names: names.__name__.rpartition(".")[2])
def names(request: pytest.FixtureRequest) -> ModuleType:
    return request.param  # type: ignore[no-any-return]


def loop(folder: Path | None, hosted: Any, *, names: ModuleType = ours, scheduler: bool = False, **values: Any) -> Loop:
    given = [hosted] if isinstance(hosted, MegatronBridgeHost) else hosted
    return Loop(configuration(folder, **values), POINTS, given, names=names, scheduler=scheduler)


def weights(trained: Loop) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in trained.model[0].parameters()]


class Asks(Callback):
    """Asks for something at an event of a step."""

    def __init__(self, what: str, step: int, event: str = "on_train_step_end") -> None:
        self.what, self.step = what, step
        setattr(self, event, self._ask)

    def _ask(self, ctx: Context) -> None:
        if ctx.step == self.step:
            getattr(ctx.control, self.what)("asked")


class Ending(Callback):
    """How runs end."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def on_exception(self, ctx: Context) -> None:
        self.told.append(f"{type(ctx.exception).__name__} in {ctx.span}")

    def on_run_end(self, ctx: Context) -> None:
        self.told.append(str(ctx.run.outcome))
        self.at = ctx.state.timestamp


# --- the host ---


@pytest.mark.parametrize("micro", [4, 2])
def test_it_trains_what_it_trained_and_tells_every_event(micro: int, names: ModuleType) -> None:
    recorder, history = Recorder(fields=("grad_norm", "learning_rate", "loss_dict", "eval_losses", "batch")), History()
    hosted = host([recorder, history, SpeedMonitor(), LRMonitor(), NaNMonitor()])
    values: dict[str, Any] = {"train__micro_batch_size": micro, "logger__log_interval": 1}
    with_them = loop(None, hosted, names=names, scheduler=True, **values)
    with_them.run()
    without = loop(None, None, names=names, scheduler=True, **values)
    without.run()
    assert all(torch.equal(a, b) for a, b in zip(weights(with_them), weights(without), strict=True))
    check_events(recorder.events)
    counts = {event: recorder.events.count(event) for event in EVENTS}
    microbatches = 4 // micro
    assert counts["on_train_step_end"] == counts["on_fetch_end"] == counts["on_optimizer_step_end"] == 12
    assert counts["on_forward_end"] == counts["on_backward_end"] == counts["on_microbatch_end"] == 12 * microbatches
    assert counts["on_eval_all_end"] == 3  # after steps 6 and 12, and after training
    assert counts["on_eval_step_end"] == counts["on_eval_forward_end"] == 9
    assert counts["on_test_end"] == 1
    assert counts["on_test_step_end"] == 3
    assert recorder.events.index("on_train_end") < recorder.events.index("on_test_start")
    assert recorder.events[-1] == "on_run_end"
    assert history["train/loss"] == pytest.approx(without.losses)
    assert history["validation/loss"] == pytest.approx(without.evaluated[:3])
    assert history["test/loss"] == pytest.approx(without.evaluated[3:])
    assert history["train/load_balancing_loss"] == pytest.approx([2 * loss for loss in without.losses])
    assert history["lr/Optimizer/0"] == pytest.approx([0.02 * 0.9**step for step in range(12)])  # as the steps used it
    told = [value for event, value in recorder.values["grad_norm"] if event == "on_train_step_end"]
    assert len(told) == 12
    assert all(isinstance(norm, Tensor) and norm > 0 for norm in told)
    assert set(recorder.values["loss_dict"][0][1]) == {"loss", "load_balancing_loss"}


def test_samples_and_tokens_are_counted() -> None:
    ending = Ending()
    loop(None, host([ending]), model__seq_length=7).run()
    assert (ending.at.batch, ending.at.sample, ending.at.token) == (12, 12 * 4, 12 * 4 * 7)


def test_the_rate_is_the_step_s_own_where_nobody_hears_the_optimizer() -> None:
    trained = loop(None, host([history := History()]), scheduler=True, train__eval_iters=0, logger__log_interval=1)
    trained.run()
    assert history["train/learning_rate"] == pytest.approx([0.02 * 0.9**step for step in range(12)])


def test_hooks_stand_in_the_model_only_while_somebody_hears_them() -> None:
    counts: list[int] = []

    class Looks(Callback):
        def on_log(self, ctx: Context) -> None:
            counts.append(len(trained.model[0]._forward_hooks))

    trained = loop(None, host(OwnManager([Looks()], costs="off")))
    trained.run()
    unheard = len(counts)
    assert counts == [0] * unheard
    assert unheard
    trained = loop(None, host([Looks(), Recorder()]))
    trained.run()
    assert counts[unheard:][:6] == [1] * 6  # and none once training is over
    assert not trained.model[0]._forward_hooks
    assert not trained.optimizer.optimizer._optimizer_step_pre_hooks


def test_outputs_can_be_replaced_and_batches_too() -> None:
    class Silences(Callback):
        def on_forward_end(self, ctx: Context) -> None:
            ctx.outputs = ctx.outputs * 0

        def on_microbatch_start(self, ctx: Context) -> None:
            seen.append(ctx.microbatch)
            ctx.microbatch = ctx.microbatch * 0

    class Sees(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, inputs: Tensor) -> Any:
            given.append(inputs.abs().sum().item())
            return self.module(inputs)

    seen: list[Tensor] = []
    given: list[float] = []
    trained = loop(None, host([Silences()]), train__eval_iters=0)
    trained.model[0].module = Sees(trained.model[0].module)
    trained.run()
    assert all(value.abs().sum() > 0 for value in seen)
    assert given == [0.0] * 12
    targets = [target for _, target in POINTS.batches()] * 2
    assert trained.losses == pytest.approx([target.square().mean().item() for target in targets])


def test_a_stop_shortens_training_and_a_save_is_written_at_once(tmp_path: Path) -> None:
    recorder, ending = Recorder(fields=("checkpoint",)), Ending()
    hosted = host([Asks("save", 3), Asks("stop", 7), recorder, ending])
    trained = loop(tmp_path / "checkpoints", hosted)
    trained.run()
    assert trained.state.train_state.step == 7
    assert trained.saved == [3, 7]  # the last is Megatron's own
    assert trained.cfg.train.train_iters == 12
    assert trained.cfg.checkpoint.save_interval == 1000
    published = [info for event, info in recorder.values["checkpoint"] if event == "on_checkpoint_published"]
    assert [(Path(info.path).name, info.step, info.kind) for info in published] == [
        ("iter_0000003", 3, "requested"),
        ("iter_0000007", 7, "periodic"),
    ]
    assert ending.told == ["stopped"]
    check_events(recorder.events)


def test_a_checkpoint_saver_and_an_early_stopper_do_what_they_do(tmp_path: Path) -> None:
    saver = CheckpointSaver(save_interval="5ba", monitor="validation/loss")
    stopper = EarlyStopper(monitor="validation/loss", min_delta=1e9, patience="6ba")
    hosted = host([saver, stopper, recorder := Recorder()])
    trained = loop(tmp_path / "checkpoints", hosted, train__train_iters=30)
    trained.run()
    assert trained.state.train_state.step < 30
    assert {5, 6} <= set(trained.saved)
    check_events(recorder.events)


def test_an_evaluation_cannot_be_asked_for() -> None:
    with pytest.raises(RequestRefused, match="cannot evaluate on request here; it can stop"):
        loop(None, host([Asks("evaluate", 2)])).run()


def test_what_is_asked_for_after_training_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Late(Callback):
        def on_train_end(self, ctx: Context) -> None:
            ctx.control.save("late")

    loop(tmp_path, host([Late()])).run()
    assert "a checkpoint was asked for after training" in caplog.text


@pytest.mark.parametrize("is_async", [False, True])
def test_the_callbacks_states_are_in_its_checkpoints(is_async: bool, tmp_path: Path) -> None:
    whole = History()
    values: dict[str, Any] = {"checkpoint__async_save": is_async, "logger__log_interval": 1}
    unbroken = loop(tmp_path / "whole", host([whole]), **values)
    unbroken.run()

    class Fails(Callback):
        def on_train_step_end(self, ctx: Context) -> None:
            if ctx.step == 8:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        loop(tmp_path / "some", host([History(), Fails()]), checkpoint__save_interval=5, **values).run()
    recorder = Recorder(fields=("checkpoint",))
    again = loop(tmp_path / "some", host([history := History(), recorder]), **values)
    again.run()
    assert history["train/loss"] == pytest.approx(whole["train/loss"])
    assert all(torch.equal(a, b) for a, b in zip(weights(again), weights(unbroken), strict=True))
    event, info = recorder.values["checkpoint"][0]
    assert (event, info.step) == ("on_checkpoint_load_end", 5)
    assert recorder.events.count("on_train_step_end") == 7
    assert recorder.told[-1].batch == 12
    check_events(recorder.events)


def test_a_checkpoint_without_states_is_gone_on_from(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loop(tmp_path, None, train__train_iters=4).run()
    again = loop(tmp_path, host([recorder := Recorder()]))
    again.run()
    assert "goes on from step 4, and no state of callbacks was found" in caplog.text
    assert recorder.told[-1].batch == 12
    assert recorder.events.count("on_train_step_end") == 8


def test_a_step_that_was_skipped_is_told_as_such() -> None:
    recorder = Recorder(fields=("step_skipped",))
    trained = loop(None, host([recorder]), train__eval_iters=0)
    trained.optimizer = Overflows(trained.optimizer.optimizer, {0, 4})
    trained.run()
    told = [value for event, value in recorder.values["step_skipped"] if event == "on_train_step_end"]
    assert [step for step, skipped in enumerate(told) if skipped] == [0, 4]
    assert recorder.events.count("on_optimizer_step_end") == 12
    check_events(recorder.events)


class Overflows(Optimizer):
    """Leaves out steps, as under a loss scale."""

    def __init__(self, optimizer: torch.optim.Optimizer, steps: set[int]) -> None:
        super().__init__(optimizer, 1.0)
        self.steps, self.made = steps, -1

    def step(self) -> tuple[bool, float | None, None]:
        self.made += 1
        return (False, math.inf, None) if self.made in self.steps else super().step()


def test_iterations_that_are_left_out_are_counted() -> None:
    recorder = Recorder(fields=("step",))
    trained = loop(None, host([recorder]))
    hear = trained.fire

    def leave_out(event: str, **fields: Any) -> None:
        if event == "on_train_step_start" and trained.state.train_state.step == 3:
            trained.state.train_state.step = 5
        hear(event, **fields)

    trained.fire = leave_out  # type: ignore[method-assign]
    trained.run()
    steps = [step for event, step in recorder.values["step"] if event == "on_train_step_end"]
    assert steps == [1, 2, 3, 6, 7, 8, 9, 10, 11, 12]


def test_what_it_cannot_tell_is_refused_by_name(caplog: pytest.LogCaptureFixture) -> None:
    class Predicts(Callback):
        def on_predict_end(self, ctx: Context) -> None: ...

    with pytest.raises(NotCarried, match="Predicts hears on_predict_end, and Megatron Bridge never tells it"):
        loop(None, host([Predicts()])).run()
    loop(None, host([Predicts()], strict=False)).run()
    assert "Predicts hears on_predict_end" in caplog.text


@pytest.mark.skipif(real is None or "on_checkpoint_save" in real.VALID_EVENTS, reason="a release that tells of no checkpoints")
def test_a_release_without_checkpoint_events_is_named() -> None:
    class Uploads(Callback):
        def on_checkpoint_published(self, ctx: Context) -> None: ...

    assert real is not None
    with pytest.raises(NotCarried, match="Uploads hears on_checkpoint_published"):
        loop(None, host([Uploads()]), names=real).run()


class HearsForward(Callback):
    """Hears what only a hook can tell."""

    def on_forward_end(self, ctx: Context) -> None: ...


def test_pipelined_microbatches_are_not_taken_apart(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(
        NotCarried, match="HearsForward hears on_forward_end, and Megatron Bridge has not told it in its first step"
    ):
        loop(None, host([HearsForward()]), model__pipeline_model_parallel_size=2).run()
    history = History()
    trained = loop(
        None, host([HearsForward(), history], strict=False), model__pipeline_model_parallel_size=2, logger__log_interval=1
    )
    trained.run()
    assert "HearsForward" in caplog.text
    assert history["train/loss"] == pytest.approx(trained.losses)


def test_several_chunks_are_shown_as_a_list() -> None:
    seen: list[Any] = []

    class Looks(Callback):
        def on_train_start(self, ctx: Context) -> None:
            seen.append(ctx.model)

    trained = loop(None, host([Looks()]))
    trained.model.append(nn.Linear(1, 1))  # type: ignore[arg-type]
    trained.run()
    assert seen == [[trained.model[0].module, trained.model[1]]]


def test_errors_end_the_run_as_they_are(tmp_path: Path) -> None:
    class Fails(Callback):
        def on_optimizer_step_start(self, ctx: Context) -> None:
            raise ZeroDivisionError

    ending = Ending()
    with pytest.raises(ZeroDivisionError):
        loop(None, host([Fails(), ending])).run()
    assert ending.told == ["ZeroDivisionError in optimizer_step", "failed"]

    def breaks(trained: Loop, error: BaseException) -> None:
        def step(_: Any) -> Any:
            raise error

        trained.step = step  # type: ignore[method-assign, assignment]
        trained.run()

    for error, told in [
        (ValueError(), ["ValueError in run", "failed"]),
        (KeyboardInterrupt(), ["KeyboardInterrupt in run", "interrupted"]),
        (SystemExit(1), ["SystemExit in run", "failed"]),
        (SystemExit(0), ["stopped"]),
    ]:
        ending.told.clear()
        with pytest.raises(type(error)), host([ending]) as hosted:
            breaks(loop(None, hosted), error)
        assert ending.told == told
    ending.told.clear()
    with pytest.raises(ValueError, match="alone"):
        breaks(loop(None, host([ending])), ValueError("alone"))
    gc.collect()
    assert ending.told == ["failed"]  # when it was forgotten


def test_a_signal_s_way_out_is_told_as_preempted(tmp_path: Path) -> None:
    hosted = host([ending := Ending()])
    trained = loop(tmp_path, hosted, train__exit_signal_handler=True)
    trained.state.signal_handler._signal_received = True
    with pytest.raises(SystemExit), hosted:
        trained.run()
    assert ending.told == ["preempted"]
    assert trained.saved == [1]


def test_a_host_serves_one_run_after_another() -> None:
    ending, recorder = Ending(), Recorder()
    hosted = host([ending, recorder])
    loop(None, hosted).run()
    check_events(recorder.events)
    first = len(recorder.events)
    loop(None, hosted, train__train_iters=3).run()
    check_events(recorder.events[first:])
    assert ending.told == ["finished", "finished"]


def test_evaluating_alone_is_a_run(names: ModuleType) -> None:
    recorder = Recorder(fields=("standalone",))
    loop(None, host([recorder]), names=names, train__skip_train=True).run()
    check_events(recorder.events)
    assert recorder.events.count("on_eval_all_end") == recorder.events.count("on_test_end") == 1
    assert recorder.values["standalone"][0][1] is True
    assert "on_train_start" not in recorder.events
    assert recorder.events[-1] == "on_run_end"


def test_without_validation_the_run_ends_with_training() -> None:
    loop(None, host([recorder := Recorder()]), train__eval_iters=0).run()
    assert recorder.events[-2:] == ["on_train_end", "on_run_end"]


def test_data_is_told_of_where_somebody_hears_it() -> None:
    """Megatron refuses to count in epochs where that event is heard."""
    assert not hasattr(host([History()]), "on_data_init_start")
    loop(None, host([recorder := Recorder()])).run()
    order = ["on_checkpoint_load_end", "on_data_init_start", "on_data_init_end", "on_train_start"]
    assert [event for event in recorder.events if event in order] == order


def test_megatron_lm_s_context_has_no_state() -> None:
    """Its callbacks have the same shape: what is there is told, and what cannot be asked for is refused."""

    def run(hosted: MegatronBridgeHost) -> None:
        trained = loop(None, None)

        def fire(event: str, **fields: Any) -> None:
            told = getattr(hosted, event, None)
            if told is not None:
                told(
                    SimpleNamespace(**{"optimizer": None, "scheduler": None, "loss_dict": None, "model": trained.model, **fields})
                )

        trained.fire = fire  # type: ignore[method-assign]
        with hosted:
            trained.run()

    recorder, ending = Recorder(), Ending()
    run(host([recorder, ending]))
    check_events(recorder.events)
    assert recorder.events.count("on_train_step_end") == 12
    assert recorder.events.count("on_test_end") == 1
    assert ending.told == ["finished"]
    with pytest.raises(RequestRefused, match="cannot stop"):
        run(host([Asks("stop", 2)]))


def train_on_ranks(folder: str) -> tuple[int, int, list[float]]:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()

    class Stops(Callback):
        def on_train_step_end(self, ctx: Context) -> None:
            if rank == 1 and ctx.step == 2:
                ctx.control.stop("one rank's wish")

    history, recorder, ending = History(), Recorder(), Ending()
    trained = loop(
        Path(folder), host([Stops(), history, recorder, ending]),
        train__train_iters=5000, train__eval_iters=0, logger__log_interval=10,
    )  # fmt: skip
    if rank:
        trained.save = functools.partial(waits, trained)  # type: ignore[method-assign]  # rank 0 writes, and all are told
    trained.run()
    check_events(recorder.events)
    torch.distributed.destroy_process_group()
    return trained.state.train_state.step, int(ending.at.sample), history["train/loss"]


def waits(trained: Loop) -> None:
    trained.last_saved = trained.state.train_state.step
    trained.fire("on_checkpoint_save", optimizer=trained.optimizer)


def test_two_ranks_stop_together_and_save_one_state(tmp_path: Path) -> None:
    one, other = run_ranks(train_on_ranks, 2, str(tmp_path))
    assert one[0] == other[0] < 5000
    assert one[1] == other[1] == 4 * one[0]
    assert one[2] == other[2]
    assert (tmp_path / f"iter_{one[0]:07d}" / "callsheet").is_dir()


# --- guests ---


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


class Notes(ours.Callback):
    """What it can read, at every event."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int, set[str]]] = []
        self.contexts: list[ours.CallbackContext] = []


def _note(event: str) -> Callable[[Notes, ours.CallbackContext], None]:
    def note(self: Notes, context: ours.CallbackContext) -> None:
        given = ("optimizer", "loss_dict", "grad_norm", "skipped_iter", "total_loss_dict")
        self.told.append((event, context.state.train_state.step, {name for name in given if getattr(context, name) is not None}))
        self.contexts.append(context)

    return note


for _event in ours.VALID_EVENTS:
    setattr(Notes, _event, _note(_event))


def test_a_guest_is_told_in_megatron_s_order_with_its_steps(tmp_path: Path) -> None:
    notes, at_home = Notes(), Notes()
    with trainer(tmp_path / "ours", [guest(notes), CheckpointSaver(save_interval="6ba")]) as trained:
        trained.fit()
        trained.evaluate()
        trained.test(POINTS.validation_batches())
    loop(tmp_path / "theirs", [at_home], checkpoint__save_interval=6).run()
    assert notes.told == at_home.told
    assert {event for event, *_ in notes.told} == ours.VALID_EVENTS
    assert len({id(context) for context in notes.contexts}) == len(notes.contexts)  # each a new one
    for mine, theirs in zip(notes.contexts, at_home.contexts, strict=True):
        assert mine.model == [trained.model]
        for losses, wanted in ((mine.loss_dict, theirs.loss_dict), (mine.total_loss_dict, theirs.total_loss_dict)):
            if wanted is not None:
                assert losses is not None
                assert losses["lm loss"].item() == pytest.approx(wanted["lm loss"].item(), rel=1e-5)
        assert mine.grad_norm == (pytest.approx(theirs.grad_norm, rel=1e-5) if theirs.grad_norm is not None else None)
        assert mine.skipped_iter == theirs.skipped_iter


def test_callbacks_of_one_event_share_a_context_in_the_order_of_registration(tmp_path: Path) -> None:
    manager, told = ours.CallbackManager(), list[Any]()

    class Third(ours.Callback):
        def on_train_start(self, context: ours.CallbackContext) -> None:
            told.append(("class", context.user_state["n"], context))

    manager.register("on_train_start", lambda context: told.append(("first", context.user_state.setdefault("n", 1), context)))
    manager.register("on_train_start", lambda context: manager.register("on_train_step_end", late))
    manager.add(Third())

    def late(context: ours.CallbackContext) -> None:
        told.append(("late", context.state.train_state.step, context))

    with trainer(tmp_path, [guest(manager)], max_duration="2ba") as trained:
        trained.fit()
    assert [each[:2] for each in told] == [("first", 1), ("class", 1), ("late", 0), ("late", 1)]
    assert told[0][2] is told[1][2]
    assert manager.user_state == {"n": 1}


def test_guests_of_a_run_share_what_callbacks_of_a_manager_share(tmp_path: Path) -> None:
    seen: dict[str, list[Any]] = {}

    class Sees(ours.Callback):
        def __init__(self, name: str) -> None:
            self.name = name

        def on_train_step_end(self, context: ours.CallbackContext) -> None:
            context.user_state[self.name] = context.state.train_state.step
            seen.setdefault(self.name, []).append(context)

    manager = ours.CallbackManager()
    manager.add(Sees("apart"))
    with trainer(
        tmp_path, [guest(Sees("one"), name="one"), guest(manager), guest(Sees("two"), name="two")], max_duration="2ba"
    ) as trained:
        trained.fit()
    assert [one is two for one, two in zip(seen["one"], seen["two"], strict=True)] == [True, True]
    assert seen["one"][-1].user_state == {"one": 1, "two": 1}
    assert manager.user_state == {"apart": 1}
    assert seen["apart"][-1].state is not seen["one"][-1].state


def test_an_error_of_one_comes_out_and_stops_the_rest(tmp_path: Path) -> None:
    manager, told = ours.CallbackManager(), list[Any]()
    manager.register("on_train_step_end", lambda context: 1 // 0)
    manager.register("on_train_step_end", told.append)
    with pytest.raises(ZeroDivisionError), trainer(tmp_path, [guest(manager)]) as trained:
        trained.fit()
    assert not told


class StopsByStep(ours.Callback):
    """Ends training as MLPerf's callbacks do: by a step beyond the last."""

    def on_eval_end(self, context: ours.CallbackContext) -> None:
        context.state.mine = getattr(context.state, "mine", 0) + 1  # a note of its own, on the state
        if context.state.train_state.step >= 6:
            context.state.train_state.step = context.state.cfg.train.train_iters + 1


class StopsByLength(ours.Callback):
    """Ends training by its length."""

    def on_train_step_end(self, context: ours.CallbackContext) -> None:
        assert context.loss_dict is not None
        if context.loss_dict["lm loss"] < 3.0:
            context.state.cfg.train.train_iters = context.state.train_state.step + 1


class Decays(ours.Callback):
    """Sets the learning rate."""

    def on_train_step_start(self, context: ours.CallbackContext) -> None:
        for group in context.optimizer.param_groups:
            group["lr"] = 0.1 / (1 + context.state.train_state.step)


class Watches(ours.Callback):
    """Hears the losses, and keeps the best."""

    def on_train_step_end(self, context: ours.CallbackContext) -> None:
        assert context.loss_dict is not None
        loss = context.loss_dict["lm loss"].item()
        context.user_state["best"] = min(loss, context.user_state.get("best", math.inf))


@pytest.mark.parametrize("make", [Watches, Decays, StopsByStep, StopsByLength])  # hears, drives, drives, drives
def test_a_guest_does_what_it_does_at_home(make: type[ours.Callback], tmp_path: Path) -> None:
    manager, at_home = ours.CallbackManager(), ours.CallbackManager()
    manager.add(make())
    at_home.add(make())
    history = History()
    with trainer(tmp_path, [guest(manager), history], log_interval="1ba") as trained:
        trained.fit()
    wanted = loop(None, at_home)
    wanted.run()
    assert trained.state.timestamp.batch == len(wanted.losses)
    assert history["train/loss"] == pytest.approx(wanted.losses, rel=1e-4)
    assert manager.user_state == pytest.approx(at_home.user_state, rel=1e-4)


@pytest.mark.parametrize("config", [None, configuration()], ids=["callsheet's", "Megatron's"])
def test_a_step_that_is_moved_for_another_end_is_refused(config: Any, tmp_path: Path) -> None:
    def jump(context: ours.CallbackContext) -> None:
        context.state.train_state.step += 2

    manager = ours.CallbackManager()
    manager.register("on_train_step_end", jump)
    with (
        pytest.raises(NotCarried, match="that can end training now, and nothing else"),
        trainer(tmp_path, [guest(manager, config=config)]) as made,
    ):
        made.fit()


def test_what_a_copy_is_set_to_moves_nothing(tmp_path: Path) -> None:
    """And a number that was put back, neither."""

    def looks_ahead(context: ours.CallbackContext) -> None:
        later = copy.deepcopy(context.state)
        later.train_state.step += 2
        later.cfg.train.train_iters += 2
        context.state.train_state.step = context.state.train_state.step  # which somebody hears

    manager = ours.CallbackManager()
    manager.register("on_train_step_end", looks_ahead)
    with trainer(tmp_path, [guest(manager), guest(StopsByStep())], max_duration="3ba") as trained:
        trained.fit()
    assert trained.state.timestamp.batch == 3


def test_what_is_not_here_is_refused_by_name(tmp_path: Path) -> None:
    asked: list[Any] = []

    def ask(context: ours.CallbackContext) -> None:
        state = context.state
        asked.append((hasattr(state, "warmup"), state.tensorboard_logger, state.cfg.train.train_iters))
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
            with pytest.raises(NotCarried):
                read()

    manager = ours.CallbackManager()
    manager.register("on_train_step_end", ask)
    with trainer(tmp_path, [guest(manager)], max_duration="1ba") as trained:
        trained.fit()
    assert asked == [(False, None, 1)]


def test_a_norm_on_the_device_is_a_number_once_it_is_read() -> None:
    context = StepContext(None, [], {}, None, None, {}, torch.tensor(2.0))  # type: ignore[arg-type]  # as the loop has it
    assert isinstance(vars(context)["grad_norm"], Tensor)
    assert isinstance(context.grad_norm, float)
    assert context == StepContext(None, [], {}, None, None, {}, 2.0)


def test_a_configuration_of_one_s_own_is_shown(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    config = configuration()

    def look(context: ours.CallbackContext) -> None:
        seen.append((context.state.cfg.logger.log_interval, context.state.train_state.consumed_train_samples))

    manager = ours.CallbackManager()
    manager.register("on_train_step_end", look)
    with trainer(tmp_path, [guest(manager, config=config)], max_duration="3ba") as trained:
        trained.fit()
    assert seen == [(2, 0), (2, 4), (2, 8)]


def test_user_state_is_saved_as_far_as_it_is_plain(tmp_path: Path) -> None:
    class Counts(ours.Callback):
        def on_train_step_end(self, context: ours.CallbackContext) -> None:
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
    assert again.state.train_state.consumed_valid_samples == 12 * 3  # once in the first run


def test_events_that_are_never_told_are_refused_by_name(caplog: pytest.LogCaptureFixture) -> None:
    class Base:  # the shape of Megatron-LM's, whose events are more
        def on_log(self, context: Any) -> None: ...
        def on_train_end(self, context: Any) -> None: ...

    Base.__name__ = "Callback"

    class Logs(Base):
        def on_log(self, context: Any) -> None: ...

    class Quiet(Base): ...

    with pytest.raises(NotCarried, match="Logs hears on_log of Megatron Bridge, which callsheet never tells"):
        guest(Logs())
    guest(Logs(), strict=False)
    assert "Logs hears on_log" in caplog.text
    guest(Quiet())
    with pytest.raises(NotCarried, match="give its callbacks, as a list"):
        guest(SimpleNamespace(callback_context=None, fire=None, has_callbacks=None))


def test_a_guest_hears_what_it_overrides_and_nothing_else() -> None:
    manager = OwnManager([guest(Decays())])
    heard = [event for event in GUEST_EVENTS if manager.list_callbacks(event)]
    assert heard == ["on_eval_step_end", "on_train_step_start"]  # the first for the samples that it counts


@pytest.mark.skipif(real is None, reason="megatron-bridge is not installed")
def test_the_package_s_own_callbacks_and_managers_are_guests(tmp_path: Path) -> None:
    assert real is not None
    told: list[tuple[str, int]] = []

    class Theirs(real.Callback):  # type: ignore[misc, name-defined]  # of a module that is loaded by its path
        def on_train_step_end(self, context: Any) -> None:
            told.append(("class", context.state.train_state.step))

    manager = real.CallbackManager()
    manager.register("on_train_step_end", lambda context: told.append(("function", context.state.train_state.step)))
    guests = [guest(Theirs()), guest([Theirs()], name="list"), guest(manager)]
    assert [event for event in GUEST_EVENTS if OwnManager([guests[0]]).list_callbacks(event)] == [
        "on_eval_step_end",
        "on_train_step_end",
    ]
    with trainer(tmp_path, guests, max_duration="1ba") as trained:
        trained.fit()
    assert told == [("class", 0), ("class", 0), ("function", 0)]


def test_a_hosted_ema_and_threshold_stopper_work() -> None:
    ending = Ending()
    trained = loop(
        None, host([EMA(half_life="2ba"), ThresholdStopper(monitor="train/loss", threshold=1e9), ending]), logger__log_interval=1
    )
    trained.run()
    assert ending.told == ["stopped"]
    assert trained.state.train_state.step == 1
