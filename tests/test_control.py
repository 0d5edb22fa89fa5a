"""Requests are kept with the name of the requesting callback, and rejected if the loop cannot carry them out."""

from pathlib import Path
from typing import Any

import pytest

from callsheet import Callback, CallbackManager, Context, RunInfo
from callsheet.core.control import SAVE_KINDS, Control
from callsheet.errors import ConfigError, RegistrationError, RequestRejected

ALL = frozenset({"stop", "save", "evaluate", "set_gradient_accumulation", "load"})


class Requester:
    def ask(self, control: Control) -> None:
        control.stop("loss is flat")
        control.save("best so far", kind="best")
        control.evaluate("to be sure")


def test_nothing_is_requested_at_first() -> None:
    control = Control()
    assert (control.stop_requested, control.save_requested, control.evaluate_requested) == (None, None, None)
    assert (control.accumulation, control.load_path) == (None, None)


def test_a_request_has_its_requester_and_reason() -> None:
    control = Control()
    Requester().ask(control)
    for request, what, why, kind in (
        (control.stop_requested, "stop", "loss is flat", ""),
        (control.save_requested, "save", "best so far", "best"),
        (control.evaluate_requested, "evaluate", "to be sure", ""),
    ):
        assert request is not None
        assert (request.what, request.why, request.by, request.kind) == (what, why, "Requester.ask", kind)
        assert str(request) == f"Requester.ask: {why}"


def test_the_first_requester_of_a_stop_is_kept() -> None:
    control = Control()
    control.stop("first")
    control.stop("second")
    control.evaluate("third")
    control.evaluate("fourth")
    assert control.stop_requested is not None
    assert control.stop_requested.why == "first"
    assert control.evaluate_requested is not None
    assert control.evaluate_requested.why == "third"


def pending(control: Control) -> list[str]:
    requests = (control.stop_requested, control.save_requested, control.evaluate_requested)
    return [request.what for request in requests if request is not None]


def test_requests_stay_until_they_are_done() -> None:
    control = Control()
    Requester().ask(control)
    assert pending(control) == ["stop", "save", "evaluate"]
    control.done("save")
    assert pending(control) == ["stop", "evaluate"]
    control.done("evaluate")
    assert pending(control) == ["stop"]
    control.done("stop")
    assert pending(control) == []


@pytest.mark.parametrize("last", range(len(SAVE_KINDS)))
def test_of_several_save_requests_the_kind_listed_last_is_used(last: int) -> None:
    control = Control()
    for kind in reversed(SAVE_KINDS[: last + 1]):
        control.save("x", kind=kind)
    assert control.save_requested is not None
    assert control.save_requested.kind == SAVE_KINDS[last]


def test_a_save_request_has_the_requester_given_as_by() -> None:
    control = Control()
    assert not control.save_requests
    control.save("often", kind="periodic", by="saver")
    Requester().ask(control)
    assert [(request.by, request.kind) for request in control.save_requests] == [("saver", "periodic"), ("Requester.ask", "best")]
    assert control.save_requested == control.save_requests[1]
    control.done("save")
    assert control.save_requests == ()


def test_the_default_kind_of_a_save_is_requested() -> None:
    control = Control()
    control.save("x")
    assert control.save_requested is not None
    assert control.save_requested.kind == "requested"


def test_an_unknown_kind_of_save_names_the_nearest_and_all_kinds() -> None:
    with pytest.raises(
        ConfigError,
        match=r"unknown kind of checkpoint 'bets'; did you mean 'best'\? \(one of requested, periodic, best, final, preempt\)",
    ):
        Control().save("x", kind="bets")  # type: ignore[arg-type]  # the mistake that is tested


def test_an_unsupported_request_is_rejected_and_not_kept() -> None:
    control = Control(frozenset({"save"}))
    with pytest.raises(RequestRejected, match=r"this loop does not support ctx\.control\.stop; it supports save"):
        control.stop("x")
    with pytest.raises(RequestRejected, match=r"does not support ctx\.control\.evaluate"):
        control.evaluate("x")
    with pytest.raises(RequestRejected, match=r"does not support ctx\.control\.set_gradient_accumulation"):
        control.set_gradient_accumulation(2)
    with pytest.raises(RequestRejected, match=r"does not support ctx\.control\.load"):
        control.load("x")
    assert (control.stop_requested, control.evaluate_requested, control.accumulation, control.load_path) == (None,) * 4
    control.save("x")
    assert control.save_requested is not None


def test_a_replicated_request_is_rejected_in_a_handler_that_runs_on_some_ranks_only() -> None:
    control = Control()
    control.in_gate = True
    for ask in (control.stop, control.save, control.evaluate):
        with pytest.raises(RequestRejected, match="the others would not request it; leave replicated out"):
            ask("x", replicated=True)
    assert (control.stop_requested, control.save_requested, control.evaluate_requested) == (None, None, None)
    control.stop("from one rank")
    assert control.stop_requested is not None


def test_a_replicated_request_is_accepted_in_a_handler_that_runs_on_all_ranks() -> None:
    control = Control()
    control.stop("x", replicated=True)
    assert control.stop_requested is not None


def test_the_last_accumulation_and_the_path_to_load_are_kept() -> None:
    control = Control(ALL)
    control.set_gradient_accumulation(1)
    control.set_gradient_accumulation(4)
    control.load(Path("a") / "b")
    assert control.accumulation == 4
    assert control.load_path == "a/b"
    with pytest.raises(ConfigError, match="at least one batch, not 0"):
        control.set_gradient_accumulation(0)
    assert control.accumulation == 4


def test_a_request_cannot_be_assigned() -> None:
    control = Control()
    control.stop("x")
    with pytest.raises(AttributeError):
        control.stop_requested = None  # type: ignore[misc]  # that is what is tested


def test_pending_is_true_while_there_is_a_stop_save_or_evaluate_request() -> None:
    control = Control(ALL)
    seen = [control.pending]
    control.set_gradient_accumulation(2)
    control.load("x")
    seen.append(control.pending)
    assert seen == [False, False]
    for what, ask in (("save", control.save), ("evaluate", control.evaluate), ("stop", control.stop)):
        ask("x")
        ask("y")
        seen = [control.pending]
        control.done(what)
        assert [*seen, control.pending] == [True, False], what
    Requester().ask(control)
    seen = []
    for what in ("stop", "save", "evaluate"):
        control.done(what)
        seen.append(control.pending)
    assert seen == [True, True, False]


def test_done_with_an_unknown_request_does_not_clear_a_stop() -> None:
    control = Control()
    control.stop("x")
    with pytest.raises(ConfigError, match=r"there is no request 'saev'; did you mean 'save'\?"):
        control.done("saev")
    with pytest.raises(ConfigError, match="there is no request 'set_gradient_accumulation'"):
        control.done("set_gradient_accumulation")
    assert control.stop_requested is not None


class Saves(Callback):
    def on_train_step_end(self, ctx: Context) -> None:
        ctx.control.save("now")
        ctx.control.set_gradient_accumulation(2)


def test_in_the_loop_of_a_host_an_unsupported_request_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    control = Control(("stop",), host="Some Trainer")
    control.hints = {"save": "give host(checkpoints=...) a folder"}
    ctx = Context(RunInfo("test"), control=control)
    manager = CallbackManager([Saves()])
    for _ in range(3):
        manager.fire("on_train_step_end", ctx)
    assert (control.save_requested, control.accumulation, control.pending) == (None, None, False)
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR"]
    assert caplog.messages[0] == (
        "Saves calls ctx.control.save, which Some Trainer does not support here; it supports stop. The request is ignored, and training "
        "continues; give host(checkpoints=...) a folder"
    )
    control.stop("a function may stop it")
    assert control.stop_requested is not None


@pytest.mark.parametrize("declared", [{"requests": ("halt",)}, {"required_fields": ("modle",)}])
def test_a_declaration_with_an_unknown_request_or_field_is_rejected(declared: dict[str, Any]) -> None:
    with pytest.raises(RegistrationError, match=r"ctx\.control\.halt|called 'modle'; did you mean 'model'"):
        CallbackManager([type("Wrong", (Callback,), declared)()])
