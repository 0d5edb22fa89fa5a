"""The enumeration of events."""

import pytest

from callsheet import Callback, CallbackManager
from callsheet.core import familiar_names
from callsheet.core.events import Event, as_event
from callsheet.core.lifecycle import EVENTS
from callsheet.errors import CallsheetError, UnknownEventError


def test_the_members_are_the_events_of_the_lifecycle_in_its_order() -> None:
    assert [event.value for event in Event] == list(EVENTS)
    assert [event.name for event in Event] == [name.removeprefix("on_").upper() for name in EVENTS]


def test_a_member_equals_its_string() -> None:
    assert str.__eq__(Event.TRAIN_STEP_END, "on_train_step_end")
    assert f"{Event.LOG}" == "on_log"
    assert {"on_log": 1}[Event.LOG] == 1


@pytest.mark.parametrize("given", ["on_log", Event.LOG])
def test_as_event_takes_a_name_or_a_member(given: str) -> None:
    assert as_event(given) is Event.LOG


def test_an_unknown_event_names_the_nearest_event() -> None:
    with pytest.raises(
        UnknownEventError, match=r"^unknown event 'on_train_stepend'; did you mean 'on_train_step_end'\?$"
    ) as caught:
        as_event("on_train_stepend")
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, CallsheetError)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("on_step_end", "on_train_step_end"),  # Hugging Face
        ("on_train_begin", "on_train_start"),
        ("on_validation_end", "on_eval_all_end"),  # Lightning
        ("on_pre_optimizer_step", "on_clip_gradients_start"),  # InstructLab
    ],
)
def test_an_event_of_another_framework_names_the_callsheet_event(name: str, meant: str) -> None:
    with pytest.raises(UnknownEventError, match=f"did you mean '{meant}'"):
        as_event(name)
    with pytest.raises(UnknownEventError, match=f"did you mean '{meant}'"):
        CallbackManager([type("Theirs", (Callback,), {name: lambda self, ctx: None})()])


def test_familiar_events_of_other_frameworks_map_to_callsheet_events() -> None:
    assert not set(familiar_names.EVENTS) & set(EVENTS)
    assert set(familiar_names.EVENTS.values()) <= set(EVENTS)


def test_an_unknown_event_without_a_similar_one_has_no_suggestion() -> None:
    with pytest.raises(UnknownEventError, match=r"^unknown event 'zzz'$"):
        as_event("zzz")
