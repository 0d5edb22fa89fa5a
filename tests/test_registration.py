"""A mistake is an error when the callback is added. The message names the callback and its line, and gives a hint."""

import functools
import re
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from callsheet import Callback, CallbackManager, Context, at, every, rank_zero_only
from callsheet.core.lifecycle import EVENTS, FIELDS
from callsheet.core.registration import handlers_of, is_inherited
from callsheet.errors import CallsheetError, NotACallbackError, RegistrationError, UnknownEventError

LINES = Path(__file__).read_text().splitlines()


def at_line(marker: str, *, above: int = 0) -> str:
    """Return `test_registration.py:12` for the line that ends with the comment `marker`, or for the line `above` lines before it."""
    (line,) = (number for number, text in enumerate(LINES, 1) if text.endswith(f"  # line: {marker}"))
    return f"{Path(__file__).name}:{line - above}"


def rejection(kind: type[CallsheetError], given: Any) -> str:
    """Return the message with which a manager rejects `given`. Check that nothing was added."""
    manager = CallbackManager()
    with pytest.raises(kind) as caught:
        manager.add(given)
    assert type(caught.value) is kind
    assert manager.callbacks == []
    assert manager.call_sheet().rows() == []
    return str(caught.value)


class Misspelt(Callback):
    def on_train_stepend(self, ctx: Context) -> None: ...  # line: misspelled


class Prefixless(Callback):
    def train_start(self, ctx: Context) -> None: ...  # line: prefixless


class Both(Callback):  # line: both
    def on_event(self, ctx: Context) -> None: ...

    def on_log(self, ctx: Context) -> None: ...


class Logs(Callback):  # line: logs
    def on_log(self, ctx: Context) -> None: ...  # line: on_log


class NoContext(Callback):
    def on_log(self) -> None: ...  # type: ignore[override]  # line: no context


class TwoArguments(Callback):
    def on_log(self, ctx: Context, record: Any) -> None: ...  # type: ignore[override]  # line: two arguments


class Helper(Callback):
    @every("10ba")  # line: helper
    def help(self, ctx: Context) -> None: ...


class PhasedHelper(Callback):
    @at("decide")  # line: phased helper
    def help(self, ctx: Context) -> None: ...


class Async(Callback):
    async def on_log(self, ctx: Context) -> None: ...  # line: async


def with_settings(**settings: Any) -> Callback:
    """Return a callback that listens to on_log, with these settings."""
    callback = Logs()
    for name, value in settings.items():
        setattr(callback, name, value)
    return callback


def test_an_unknown_event_names_the_callback_its_line_and_the_nearest_event() -> None:
    assert rejection(UnknownEventError, Misspelt()) == (
        f"unknown event 'on_train_stepend'; did you mean 'on_train_step_end'? (callback Misspelt, {at_line('misspelled')})"
    )


def test_the_message_uses_the_callback_s_own_name() -> None:
    callback = Misspelt()
    callback.name = "mine"
    assert "(callback mine, " in rejection(UnknownEventError, callback)


def test_an_unknown_event_on_the_instance_is_found() -> None:
    callback: Any = Logs()
    callback.on_strat = lambda ctx: None  # line: on_strat
    message = rejection(UnknownEventError, callback)
    assert "unknown event 'on_strat'" in message
    assert at_line("on_strat") in message


def test_an_attribute_that_starts_with_on_but_is_no_method_is_accepted() -> None:
    callback: Any = Logs()
    callback.on_gpu = True
    CallbackManager([callback])


def test_a_method_named_like_an_event_without_its_prefix_is_named_with_a_hint() -> None:
    message = rejection(RegistrationError, Prefixless())
    assert message == (
        f"has no handlers; did you mean on_train_start instead of train_start? (callback Prefixless, {at_line('prefixless')})"
    )


def test_a_callback_without_handlers_may_be_added() -> None:
    class Store(Callback):
        def train_loss(self) -> float:
            return 0.0

    assert CallbackManager([Store()]).call_sheet().rows() == []


def test_on_event_together_with_another_handler_is_rejected() -> None:
    assert rejection(RegistrationError, Both()) == (
        f"overrides both on_event and on_log; on_event handles that event too, so keep only one of them (callback Both, {at_line('both')})"
    )


def test_on_event_alone_listens_to_every_event() -> None:
    class All(Callback):
        def on_event(self, ctx: Context) -> None: ...

    assert list(handlers_of(All())) == list(EVENTS)


def test_only_overridden_methods_are_handlers() -> None:
    callback = Logs()
    assert handlers_of(callback) == {"on_log": callback.on_log}
    assert is_inherited(callback.on_run_start, "on_run_start")
    assert not is_inherited(callback.on_log, "on_log")


def test_methods_of_bases_mixins_and_instances_are_handlers() -> None:
    class Mixin:
        def on_run_end(self, ctx: Context) -> None: ...

    class Child(Mixin, Logs):
        pass

    callback: Any = Child()
    callback.on_train_end = lambda ctx: None
    assert list(handlers_of(callback)) == ["on_log", "on_train_end", "on_run_end"]


@pytest.mark.parametrize(("callback", "marker"), [(NoContext(), "no context"), (TwoArguments(), "two arguments")])
def test_a_handler_that_cannot_take_the_context_alone_is_rejected(callback: Callback, marker: str) -> None:
    message = rejection(RegistrationError, callback)
    assert "cannot be called with the context alone: write `def on_log(ctx)`" in message
    assert message.endswith(f"(callback {type(callback).__name__}, {at_line(marker)})")


def test_additional_arguments_with_defaults_are_accepted() -> None:
    class More(Callback):
        def on_log(self, ctx: Context, more: int = 1, *rest: int, **others: int) -> None: ...

    class Static(Callback):
        @staticmethod
        def on_log(ctx: Context) -> None: ...

    assert len(CallbackManager([More(), Static()]).list_callbacks("on_log")) == 2


@pytest.mark.parametrize(
    ("callback", "marker", "name"), [(Helper(), "helper", "Helper"), (PhasedHelper(), "phased helper", "PhasedHelper")]
)
def test_an_interval_or_a_phase_on_a_method_that_is_no_handler_is_rejected(callback: Callback, marker: str, name: str) -> None:
    message = rejection(RegistrationError, callback)
    assert message == f"'help' has an interval or a phase, but is not an event (callback {name}, {at_line(marker)})"


def test_a_rank_gate_on_a_method_that_is_no_handler_is_accepted() -> None:
    class Writes(Callback):
        @rank_zero_only
        def write(self, text: str) -> None: ...

        def on_log(self, ctx: Context) -> None: ...

    CallbackManager([Writes()])


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"phase": "mesure"}, "unknown phase 'mesure'; did you mean 'measure'?"),
        ({"lane": "backgroud"}, "unknown lane 'backgroud'; did you mean 'background'?"),
        ({"on_error": "isolated"}, "unknown on_error 'isolated'; did you mean 'isolate'?"),
        ({"ranks": "local_zer"}, "unknown ranks 'local_zer'; did you mean 'local_zero'?"),
        ({"ranks": 0}, "unknown ranks 0"),
        ({"collective": True, "ranks": "zero"}, "calls collectives, so it must run on all ranks, not on zero"),
        ({"collective": True, "ranks": {0}}, "calls collectives, so it must run on all ranks, not on frozenset({0})"),
        ({"collective": True, "lane": "background"}, "calls collectives, so it must run inline, not in the lane 'background'"),
        (
            {"collective": True, "on_error": "isolate"},
            "calls collectives, so its errors must be raised: an error isolated on one rank",
        ),
        ({"lane": "background", "on_error": "raise"}, "errors in the lane 'background' are always isolated; leave on_error out"),
    ],
)
def test_invalid_settings_name_the_callback_and_the_line_of_its_class(settings: dict[str, Any], expected: str) -> None:
    message = rejection(RegistrationError, with_settings(**settings))
    assert expected in message
    assert message.endswith(f"(callback Logs, {at_line('logs')})")


def test_a_collective_is_rejected_when_one_method_is_gated() -> None:
    class Gathers(Callback):
        collective = True

        @rank_zero_only
        def on_log(self, ctx: Context) -> None: ...  # line: gated collective

    message = rejection(RegistrationError, Gathers())
    assert "must run on all ranks, not on zero" in message
    # the line of a decorated function is that of its first decorator
    assert message.endswith(f"(callback Gathers, {at_line('gated collective', above=1)})")


def test_valid_combinations_of_settings_are_accepted() -> None:
    manager = CallbackManager([with_settings(collective=True), with_settings(collective=True, on_error="raise")])
    manager.add(with_settings(lane="background", on_error="isolate"))
    assert [row[4] for row in manager.call_sheet().rows()] == ["inline", "inline", "background"]


@pytest.mark.parametrize(
    ("settings", "kind"),
    [({"keep_fields": ("outputs", "output")}, "field that can be kept"), ({"snapshot_fields": ("loss", "output")}, "field")],
    ids=["keep_fields", "snapshot_fields"],
)
def test_unknown_fields_name_the_nearest_field(settings: dict[str, Any], kind: str) -> None:
    assert rejection(RegistrationError, with_settings(**settings)) == (
        f"{next(iter(settings))}: the context has no {kind} called 'output'; did you mean 'outputs'? (callback Logs, {at_line('logs')})"
    )


@pytest.mark.parametrize("name", FIELDS)
def test_only_fields_whose_window_can_be_extended_are_accepted_in_keep_fields(name: str) -> None:
    callback = with_settings(keep_fields=(name,), snapshot_fields=(name,))
    if FIELDS[name].kept_until:
        CallbackManager([callback])
    else:
        assert f"keep_fields: the context has no field that can be kept called {name!r}" in rejection(RegistrationError, callback)


def test_a_name_must_be_a_string() -> None:
    callback: Any = Logs()
    callback.name = 3
    assert "the name of a callback must be a string, not 3" in rejection(RegistrationError, callback)


# --- objects that are not callbacks ---


def test_a_class_is_rejected_with_a_hint() -> None:
    assert rejection(NotACallbackError, Logs) == f"Logs is a class ({at_line('logs')}); add an instance of it, Logs()"
    assert rejection(NotACallbackError, int).startswith("int is a class")


def function(ctx: Context) -> None: ...  # line: function


def test_a_function_is_rejected_with_a_hint() -> None:
    message = rejection(NotACallbackError, function)
    assert message.endswith(f"is a function ({at_line('function')}); give it an event with manager.register(event, function)")


@pytest.mark.parametrize("given", [None, 3, object(), "on_log", b"x", {"a": 1}])
def test_anything_else_is_rejected(given: Any) -> None:
    message = rejection(NotACallbackError, given)
    assert repr(given) in message
    assert "is not a callback" in message


def test_errors_derive_from_the_usual_built_in_errors() -> None:
    assert issubclass(NotACallbackError, TypeError)
    assert issubclass(UnknownEventError, ValueError)
    assert issubclass(RegistrationError, ValueError)


# --- lanes ---


def test_an_async_handler_is_rejected_inline() -> None:
    message = rejection(RegistrationError, Async())
    assert "the handler is async, and nothing awaits it on the training thread: make it a plain function, or set `lane" in message
    assert message.endswith(f"(callback Async, {at_line('async')})")


def test_an_async_handler_in_a_lane_is_accepted() -> None:
    callback = Async()
    callback.lane = "background"
    manager = CallbackManager([callback])
    assert manager.list_callbacks("on_log") == [callback]
    assert manager.has_callbacks("on_log")


def test_an_async_handler_with_a_rank_gate_is_detected() -> None:
    class Gated(Callback):
        @rank_zero_only
        async def on_log(self, ctx: Context) -> None: ...

    assert "the handler is async" in rejection(RegistrationError, Gated())


def test_an_async_function_is_rejected_inline() -> None:
    async def recorded(ctx: Context) -> None: ...

    manager = CallbackManager()
    for given in (recorded, functools.partial(recorded)):
        with pytest.raises(RegistrationError, match="the handler is async"):
            manager.register("on_log", given)
    manager.register("on_log", recorded, lane="background")
    assert manager.has_callbacks("on_log")


def test_an_object_with_an_async_call_is_rejected_inline() -> None:
    class Recorded:
        async def __call__(self, ctx: Context) -> None: ...

    with pytest.raises(RegistrationError, match="the handler is async"):
        CallbackManager().register("on_log", Recorded())


# --- register ---


def test_register_rejects_an_unknown_event_before_it_has_a_function() -> None:
    with pytest.raises(UnknownEventError, match=r"unknown event 'on_lgo'; did you mean 'on_log'\?"):
        CallbackManager().register("on_lgo")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"phase": "reprot"}, "unknown phase 'reprot'; did you mean 'report'?"),
        ({"ranks": "zeros"}, "unknown ranks 'zeros'; did you mean 'zero'?"),
        ({"lane": "proces"}, "unknown lane 'proces'; did you mean 'process'?"),
        ({"on_error": "rise"}, "unknown on_error 'rise'; did you mean 'raise'?"),
        ({"lane": "process", "on_error": "raise"}, "errors in the lane 'process' are always isolated; leave on_error out"),
        ({"every": "10bananas"}, "unknown unit 'bananas'"),
        ({"every": 0}, "an interval must be more than 0"),
    ],
)
def test_register_with_invalid_settings_names_the_function_and_its_line(settings: dict[str, Any], expected: str) -> None:
    manager = CallbackManager()
    with pytest.raises(RegistrationError) as caught:
        manager.register("on_log", function, **settings)
    assert expected in str(caught.value)
    assert str(caught.value).endswith(f"(callback function, {at_line('function')})")
    assert manager.call_sheet().rows() == []


def test_register_accepts_only_functions_that_take_the_context() -> None:
    manager = CallbackManager()
    things: list[Any] = [Logs(), Logs, 3, "print"]
    for given in things:
        with pytest.raises(NotACallbackError, match=re.escape(f"register takes a function of the context, not {given!r}")):
            manager.register("on_log", given)
    with pytest.raises(RegistrationError, match="cannot be called with the context alone"):
        manager.register("on_log", lambda: None)


def test_registering_a_function_twice_for_an_event_is_an_error() -> None:
    manager = CallbackManager()
    manager.register("on_log", function)
    with pytest.raises(RegistrationError, match=rf"function \({at_line('function')}\) is registered for on_log already"):
        manager.register("on_log", function)
    with pytest.raises(RegistrationError, match=r"registered for \* already"):
        manager.register("*", function)
    manager.register("on_train_end", function)
    assert len(manager.call_sheet().rows()) == 2


def test_registering_a_gated_function_twice_for_an_event_is_an_error() -> None:
    gated = rank_zero_only(function)
    manager = CallbackManager()
    manager.register("on_log", gated)
    with pytest.raises(RegistrationError, match="registered for on_log already"):
        manager.register("on_log", gated)
    manager.register("on_log", function)  # without the gate, it is another function
    assert len(manager.call_sheet().rows()) == 2


def test_registering_a_bound_method_twice_for_an_event_is_an_error() -> None:
    class Thing:
        def recorded(self, ctx: Context) -> None: ...

    thing = Thing()
    manager = CallbackManager()
    manager.register("on_log", thing.recorded)
    with pytest.raises(RegistrationError, match="registered for on_log already"):
        manager.register("on_log", thing.recorded)
    manager.register("on_log", Thing().recorded)  # a method of another object
    assert len(manager.call_sheet().rows()) == 2


# --- further cases ---


def test_an_empty_set_of_ranks_is_rejected() -> None:
    with pytest.raises(RegistrationError, match="unknown ranks"):
        CallbackManager().register("on_log", function, ranks=set())


def test_adding_a_callback_does_not_compute_its_cached_properties() -> None:
    read: list[str] = []

    class Lazy(Callback):
        @cached_property
        def size(self) -> int:
            read.append("size")
            return 1

        def on_log(self, ctx: Context) -> None: ...

    CallbackManager([Lazy()])
    assert read == []


def test_adding_a_callback_does_not_read_its_properties() -> None:
    class Lazy(Callback):
        @property
        def size(self) -> int:
            raise RuntimeError("too early")

        def on_log(self, ctx: Context) -> None: ...

    CallbackManager([Lazy()])


def test_a_handler_that_is_not_a_function_is_rejected() -> None:
    callback: Any = Logs()
    callback.on_train_end = None
    message = rejection(RegistrationError, callback)
    assert message == f"on_train_end should be a method, not None (callback Logs, {at_line('logs')})"


@pytest.mark.parametrize("settings", [{"phase": "reprot"}, {"ranks": "zeros"}, {"lane": "backgroud"}, {"on_error": "isolated"}])
def test_settings_of_a_callback_without_handlers_are_checked(settings: dict[str, str]) -> None:
    class Tables(Callback):
        def log_table(self, ctx: Context, name: str, columns: list[str], rows: list[list[Any]]) -> None: ...

    CallbackManager([Tables()])
    callback = Tables()
    for name, value in settings.items():
        setattr(callback, name, value)
    ((name, value),) = settings.items()
    assert f"unknown {name} {value!r}" in rejection(RegistrationError, callback)


def test_register_names_the_function_and_its_line_for_an_unknown_event() -> None:
    with pytest.raises(
        UnknownEventError, match=r"unknown event 'on_lgo'; did you mean 'on_log'\? \(callback .*, test_registration.py:\d+\)"
    ):
        CallbackManager().register("on_lgo", lambda ctx: None)


def test_a_handler_that_is_a_generator_is_rejected() -> None:
    class Yields(Callback):
        def on_log(self, ctx: Context) -> Any:
            yield ctx

    with pytest.raises(RegistrationError, match=r"the handler is a generator.*Yields, test_registration.py:\d+"):
        CallbackManager([Yields()])
