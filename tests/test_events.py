"""The enumeration of events."""

import pytest

from callsheet.core.events import Event, as_event
from callsheet.core.lifecycle import EVENTS
from callsheet.errors import CallsheetError, UnknownEventError


def test_the_members_are_the_lifecycles_events_in_its_order() -> None:
    assert [event.value for event in Event] == list(EVENTS)
    assert [event.name for event in Event] == [name.removeprefix("on_").upper() for name in EVENTS]


def test_a_member_is_the_plain_string() -> None:
    assert str.__eq__(Event.TRAIN_STEP_END, "on_train_step_end")
    assert f"{Event.LOG}" == "on_log"
    assert {"on_log": 1}[Event.LOG] == 1


@pytest.mark.parametrize("given", ["on_log", Event.LOG])
def test_as_event_takes_a_name_or_a_member(given: str) -> None:
    assert as_event(given) is Event.LOG


def test_an_unknown_event_names_the_nearest() -> None:
    with pytest.raises(
        UnknownEventError, match=r"^unknown event 'on_train_stepend'; did you mean 'on_train_step_end'\?$"
    ) as caught:
        as_event("on_train_stepend")
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, CallsheetError)


def test_an_unknown_event_that_is_near_to_none_names_none() -> None:
    with pytest.raises(UnknownEventError, match=r"^unknown event 'zzz'$"):
        as_event("zzz")
