"""Callbacks that need what a host does not support are rejected, or a warning is logged."""

from __future__ import annotations

import logging

import pytest

from callsheet import Callback, CallbackManager, Context
from callsheet.bridges.lifecycle_driver import LifecycleDriver
from callsheet.bridges.support_check import SupportCheck, events_of
from callsheet.core.control import Control
from callsheet.core.lifecycle import EVENTS
from callsheet.core.run_state import RunInfo
from callsheet.errors import NotSupported

NEVER = ("on_preempt", "on_predict_start", "on_predict_end")


class OnlyPreempt(Callback):
    def on_preempt(self, ctx: Context) -> None: ...


class AlsoSteps(OnlyPreempt):
    def on_train_step_end(self, ctx: Context) -> None: ...


class Everything(Callback):
    def on_event(self, ctx: Context) -> None: ...


class Saves(Callback):
    requests = ("save",)

    def on_train_step_end(self, ctx: Context) -> None: ...


def check(*callbacks: Callback, strict: bool = True) -> SupportCheck:
    return SupportCheck(CallbackManager(callbacks), "this host", strict=strict)


def test_a_callback_none_of_whose_events_the_host_fires_is_rejected() -> None:
    with pytest.raises(
        NotSupported, match="OnlyPreempt listens to on_preempt, which this host does not fire; leave the callback out"
    ):
        check(OnlyPreempt()).before_run(NEVER, Control())


def test_events_that_a_still_useful_callback_does_not_receive_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "callsheet")
    check(AlsoSteps(), Everything()).before_run(NEVER, Control())
    assert caplog.messages == ["AlsoSteps also listens to on_preempt, which this host does not fire"]


def test_without_strict_a_warning_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    check(OnlyPreempt(), strict=False).before_run(NEVER, Control())
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("WARNING", "OnlyPreempt listens to on_preempt, which this host does not fire")
    ]


def test_a_callback_none_of_whose_requests_is_supported_is_rejected() -> None:
    control = Control(able=("stop",))
    control.hints = {"save": "give the host a checkpoint handler"}
    with pytest.raises(
        NotSupported, match=r"Saves asks for ctx\.control\.save, .* here; give the host a checkpoint handler, or pass"
    ):
        check(Saves()).before_run((), control)
    check(Saves()).before_run((), Control(able=("stop", "save")))
    check(Saves()).before_run((), Control(able=()))  # no error: a run that supports no request at all does not train


def test_a_function_that_listens_to_all_events_is_not_rejected() -> None:
    manager = CallbackManager()

    def handle(ctx: Context) -> None: ...

    for event in EVENTS:
        manager.register(event, handle)
    SupportCheck(manager, "this host", strict=True).before_run(NEVER, Control())


def test_events_that_the_first_step_did_not_fire_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    class Forward(Callback):
        def on_forward_end(self, ctx: Context) -> None: ...

    manager = CallbackManager([Forward()])
    driver = LifecycleDriver(manager.spans(Context(RunInfo("run"))), {})
    driver.synthesized = {"optimizer_step", "forward"}
    checked = SupportCheck(manager, "this host", strict=False)
    for _ in range(2):
        checked.after_first_step(driver)
    (message,) = caplog.messages
    assert message.startswith(
        "Forward listens to on_forward_end, which this host did not fire in its first step: backward() was called"
    )


@pytest.mark.parametrize("is_scaled", [False, True])
def test_a_first_step_without_an_optimizer_step_is_rejected_unless_a_scaler_may_skip_it(is_scaled: bool) -> None:
    class Stepped(Callback):
        def on_clip_gradients_end(self, ctx: Context) -> None: ...

        def on_optimizer_step_end(self, ctx: Context) -> None: ...

    driver = LifecycleDriver(CallbackManager().spans(Context(RunInfo("run"))), {})
    driver.synthesized = {"fetch", "clip_gradients", "optimizer_step"}
    if is_scaled:
        check(Stepped()).after_first_step(driver, may_skip_step=True, without_step="no step")
        assert not driver.synthesized
    else:
        with pytest.raises(NotSupported, match="no step"):
            check(Stepped()).after_first_step(driver, without_step="no step")


def test_events_of_returns_events_in_the_order_of_the_lifecycle() -> None:
    assert [event for _, event in events_of({"backward", "forward"})] == [
        "on_forward_start",
        "on_forward_end",
        "on_backward_start",
        "on_backward_end",
    ]
