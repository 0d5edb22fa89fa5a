"""The base class, the decorators, and callbacks as data."""

import asyncio
import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from callsheet import Callback, CallbackSpec, Context, RunInfo, at, every, local_rank_zero_only, rank_zero_only
from callsheet.callbacks import CheckpointSaver, EarlyStopper
from callsheet.core.callback import Marks, label_of, marks, remove_gate
from callsheet.core.spec import import_path
from callsheet.core.time import Interval, Time
from callsheet.errors import ConfigError, NotACallbackError, RegistrationError, UnknownArgument


class Plain(Callback):
    pass


class Counter(Callback):
    def __init__(self, start: int = 0, *, by: int = 1) -> None:
        self.count = start
        self.by = by

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.count = state["count"]


class Open(Callback):
    def __init__(self, first: int, **rest: int) -> None:
        self.all = {"first": first, **rest}


class Many(Callback):
    def __init__(self, *names: str) -> None:
        self.names = names


class Strict(Callback):
    def __init__(self, size: int = 0, /) -> None:
        self.size = size


class Named(Callback):
    def __init__(self, name: str = "") -> None:
        self.name = name


class Outer:
    class Inner(Callback):
        pass


NotOne = int


def context() -> Context:
    return Context(RunInfo("test"))


# --- the base class ---


def test_the_label_is_the_name_or_the_class() -> None:
    callback = Plain()
    assert label_of(callback) == "Plain"
    callback.name = "other"
    assert label_of(callback) == "other"
    assert label_of(Plain()) == "Plain"


def test_a_callback_may_use_the_attribute_label_for_anything() -> None:
    class Digits(Callback):
        def __init__(self, label: int) -> None:
            self.label = label

    assert Digits(3).label == 3
    assert label_of(Digits(3)) == "Digits"


def test_a_callback_has_no_state_by_default() -> None:
    assert Plain().state_dict() == {}
    Plain().load_state_dict({"x": 1})


def test_the_settings_of_a_callback_have_neutral_defaults() -> None:
    plain = Plain()
    assert (plain.phase, plain.ranks, plain.lane, plain.on_error) == ("measure", "all", "inline", None)
    assert (plain.collective, plain.draws_random, plain.keep_fields, plain.snapshot_fields) == (False, False, (), ())


# --- decorators ---


def test_decorators_can_be_applied_in_any_order() -> None:
    @every("10ba")
    @at("decide")
    @rank_zero_only
    def one(ctx: Context) -> None: ...

    @rank_zero_only
    @at("decide")
    @every("10ba")
    def other(ctx: Context) -> None: ...

    expected = Marks(Interval("10ba"), "decide", "zero")
    assert marks(one) == marks(other) == expected
    assert marks(print) == Marks()


def test_a_bare_number_in_every_means_batches() -> None:
    @every(100, at_end=True)
    def method(ctx: Context) -> None: ...

    interval = marks(method).every
    assert interval is not None
    assert (interval.every, interval.at_end) == (Time("100ba"), True)


@pytest.mark.parametrize("given", ["", "often", 0, "-1ba"])
def test_an_invalid_interval_is_rejected_by_the_decorator(given: str | int) -> None:
    def on_log(ctx: Context) -> None: ...

    with pytest.raises(RegistrationError, match=r"on_log, test_callback.py:\d+\)"):
        every(given)(on_log)


def test_an_unknown_phase_is_rejected_by_the_decorator() -> None:
    def on_log(ctx: Context) -> None: ...

    with pytest.raises(
        RegistrationError, match=r"unknown phase 'mesure'; did you mean 'measure'\? .*on_log, test_callback.py:\d+\)"
    ):
        at("mesure")(on_log)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("decorate", "variable"), [(rank_zero_only, "RANK"), (local_rank_zero_only, "LOCAL_RANK")], ids=["zero", "local_zero"]
)
def test_a_rank_gate_reads_the_rank_when_the_function_is_called(
    monkeypatch: pytest.MonkeyPatch, decorate: Any, variable: str
) -> None:
    monkeypatch.setenv("RANK", "4")
    monkeypatch.setenv("LOCAL_RANK", "4")

    def plain(x: int, *, plus: int = 0) -> int:
        """Twice."""
        return 2 * x + plus

    double = decorate(plain)
    assert double(3) is None
    monkeypatch.setenv(variable, "0")
    assert double(3, plus=1) == 7
    assert (double.__name__, double.__doc__) == ("plain", "Twice.")


def test_ungated_removes_the_gate_of_a_method_which_stays_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")

    class Gated(Callback):
        @rank_zero_only
        def on_log(self, ctx: Context) -> None:
            recorded.append(self)

    recorded: list[Callback] = []
    callback = Gated()
    callback.on_log(context())
    assert recorded == []
    remove_gate(callback.on_log)(context())
    assert recorded == [callback]


def test_ungated_keeps_other_wrappers() -> None:
    handler = Plain().on_log
    assert remove_gate(handler) is handler
    assert remove_gate(print) is print


# --- as data ---


def test_building_a_spec_gives_an_equal_callback() -> None:
    callback = Counter(3, by=2)
    callback.count, callback.name = 9, "mine"
    spec = CallbackSpec.of(callback)
    assert spec == CallbackSpec(f"{__name__}.Counter", {"start": 3, "by": 2}, "mine", {"count": 9})
    made = spec.build()
    assert isinstance(made, Counter)
    assert (made.count, made.by, made.name, label_of(made)) == (9, 2, "mine", "mine")
    assert CallbackSpec.of(made) == spec


def test_positional_and_named_arguments_give_equal_specs() -> None:
    assert CallbackSpec.of(Counter(3)) == CallbackSpec.of(Counter(start=3))


def test_a_spec_leaves_out_arguments_that_equal_their_default() -> None:
    assert CallbackSpec.of(Plain()).to_dict() == {"class_path": f"{__name__}.Plain"}


def test_a_spec_survives_json() -> None:
    spec = CallbackSpec.of(Counter(3, by=2))
    assert CallbackSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec


def test_additional_named_arguments_are_passed_to_the_constructor() -> None:
    spec = CallbackSpec.of(Open(1, x=2, y=3))
    assert spec.init_args == {"first": 1, "x": 2, "y": 3}
    made = spec.build()
    assert isinstance(made, Open)
    assert made.all == {"first": 1, "x": 2, "y": 3}


def test_additional_positional_arguments_are_rejected() -> None:
    with pytest.raises(
        ConfigError, match=r"Many takes \*names, which a CallbackSpec cannot hold by name; make it one argument, a list"
    ):
        CallbackSpec.of(Many("a", "b"))
    assert CallbackSpec.of(Many()).init_args == {}


def test_a_name_that_is_a_constructor_argument_is_in_the_spec_once() -> None:
    spec = CallbackSpec.of(Named("mine"))
    assert (spec.name, spec.init_args) == ("", {"name": "mine"})
    assert label_of(spec.build()) == "mine"


def test_a_spec_of_a_nested_class_can_be_built() -> None:
    spec = CallbackSpec.of(Outer.Inner())
    assert spec.class_path == f"{__name__}.Outer.Inner"
    assert type(spec.build()) is Outer.Inner


def test_a_spec_has_the_state_at_the_time_it_was_made() -> None:
    callback = Counter()
    spec = CallbackSpec.of(callback)
    callback.count = 5
    assert spec.state == {"count": 0}


def test_building_without_a_state_loads_none() -> None:
    made = CallbackSpec(f"{__name__}.Counter", {"start": 4}).build()
    assert isinstance(made, Counter)
    assert made.count == 4


def test_from_dict_rejects_unknown_keys() -> None:
    with pytest.raises(ConfigError, match=r"unknown key of a callback spec 'init_arg'; did you mean 'init_args'\?"):
        CallbackSpec.from_dict({"class_path": "a.B", "init_arg": {}})


@pytest.mark.parametrize("data", [{}, {"class_path": None}, {"class_path": 3, "name": "x"}])
def test_from_dict_needs_a_class_path(data: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"a callback spec needs a class_path, such as"):
        CallbackSpec.from_dict(data)


def test_from_dict_accepts_empty_values_of_yaml() -> None:
    assert CallbackSpec.from_dict({"class_path": "a.B", "init_args": None, "state": None, "name": None}) == CallbackSpec("a.B")


def test_build_rejects_arguments_that_the_class_does_not_take() -> None:
    with pytest.raises(ConfigError, match=r"test_callback\.Counter: .*'bye'.*; it takes start, by"):
        CallbackSpec(f"{__name__}.Counter", {"bye": 1}).build()


def test_build_rejects_arguments_for_a_class_that_takes_none() -> None:
    with pytest.raises(ConfigError, match=r"test_callback\.Plain: .*'x'; it takes nothing$"):
        CallbackSpec(f"{__name__}.Plain", {"x": 1}).build()


def test_a_callback_without_a_constructor_takes_no_arguments() -> None:
    with pytest.raises(TypeError, match=r"Plain\(\) takes no arguments"):
        Plain(every=10)
    with pytest.raises(TypeError, match=r"Plain\(\) takes no arguments"):
        Plain(10)


@pytest.mark.parametrize("name", ["NotOne", "context"])
def test_build_rejects_a_class_path_that_is_not_a_callback_class(name: str) -> None:
    with pytest.raises(NotACallbackError, match=rf"test_callback\.{name} is not a subclass of callsheet.Callback"):
        CallbackSpec(f"{__name__}.{name}").build()


def test_an_error_of_the_constructor_is_raised_unchanged() -> None:
    class Local(Callback):
        def __init__(self) -> None:
            raise TypeError("its own")

    with pytest.raises(TypeError, match="its own"):
        Local()


def test_positional_only_arguments_are_rejected() -> None:
    with pytest.raises(
        ConfigError, match="Strict takes size by position only, which a CallbackSpec cannot hold; make it a named argument"
    ):
        CallbackSpec.of(Strict(3))
    assert CallbackSpec.of(Strict()).init_args == {}


# --- import paths ---


def test_import_path_finds_classes_functions_and_nested_attributes() -> None:
    assert import_path("callsheet.core.callback.Callback") is Callback
    assert import_path("asyncio.run") is asyncio.run
    assert import_path("callsheet.Callback.on_log") is Callback.on_log


def test_import_path_names_the_missing_part_and_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"^callsheet has no 'Calback'; did you mean 'Callback'\? \(in 'callsheet.Calback'\)$"):
        import_path("callsheet.Calback")
    with pytest.raises(ConfigError, match=r"^callsheet.core.callback.Callback has no 'on_lgo'"):
        import_path("callsheet.core.callback.Callback.on_lgo")


@pytest.mark.parametrize("path", ["nowhere_at_all.Thing", "Thing"])
def test_import_path_reports_a_module_that_does_not_exist(path: str) -> None:
    with pytest.raises(ConfigError, match=rf"cannot import '{path}'"):
        import_path(path)


@pytest.mark.parametrize("path", ["", ".Thing", "callsheet.", "callsheet..Callback"])
def test_import_path_rejects_text_that_is_not_a_dotted_path(path: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"{path!r} is not an import path; write one like 'package.module.Name'")):
        import_path(path)


def test_import_path_raises_the_import_error_of_the_imported_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "needs_another.py").write_text("import not_installed_here\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="not_installed_here"):
        import_path("needs_another.Thing")
    assert "needs_another" not in sys.modules


@pytest.mark.parametrize("name", ["on_init_end", "on_train_batch_end", "state_key", "set_params"])
def test_an_attribute_that_another_framework_looks_up_raises_an_error_that_mentions_hosts(name: str) -> None:
    """Hugging Face, Lightning and Keras look these up in the callbacks that they are given."""
    with pytest.raises(
        AttributeError, match=rf"'Callback' has no attribute '{name}', because it is a callback of callsheet.*host"
    ):
        getattr(Callback(), name)


def test_an_attribute_error_in_a_property_keeps_its_message() -> None:
    class Broken(Callback):
        @property
        def value(self) -> int:
            return self.missing  # type: ignore[attr-defined, no-any-return]

    with pytest.raises(AttributeError, match="'Broken' object has no attribute 'missing'"):
        Broken().value  # noqa: B018


def test_an_attribute_error_in_a_property_named_like_another_framework_s_method_keeps_its_message() -> None:
    class Broken(Callback):
        @property
        def setup(self) -> int:
            return self.missing  # type: ignore[attr-defined, no-any-return]

    with pytest.raises(AttributeError, match="'Broken' object has no attribute 'missing'"):
        Broken().setup  # noqa: B018


@pytest.mark.parametrize(
    ("kind", "args", "options", "message"),
    [
        (CheckpointSaver, (), {"every": "1ep"}, "^CheckpointSaver has no argument 'every'; give save_interval=...$"),
        (CheckpointSaver, (), {"save_intervall": "1ep"}, "has no argument 'save_intervall'; did you mean 'save_interval'[?]$"),
        (
            CheckpointSaver,
            ("1ep",),
            {},
            r"^CheckpointSaver takes no argument without its name: write CheckpointSaver\(save_interval=",
        ),
        (EarlyStopper, (), {"metric": "loss"}, "^EarlyStopper has no argument 'metric'; give monitor=...$"),
    ],
)
def test_an_unknown_argument_of_a_built_in_is_named_with_the_right_one(
    kind: Callable[..., Callback], args: tuple[str, ...], options: dict[str, str], message: str
) -> None:
    with pytest.raises(UnknownArgument, match=message):
        kind(*args, **options)


def test_a_constructor_with_args_and_kwargs_receives_all_arguments() -> None:
    assert Open(1, every=3).all == {"first": 1, "every": 3}
