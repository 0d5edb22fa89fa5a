"""Tables: which events of Composer correspond to each event of callsheet, and which events are never fired in Composer."""

from collections.abc import Mapping

from callsheet.bridges.composer.names import COMPOSER_EVENTS
from callsheet.core.lifecycle import events_within

EVENT_MAP: Mapping[str, tuple[str, ...]] = COMPOSER_EVENTS
"""The events of Composer that correspond to each event of callsheet."""

NOT_FIRED = (*events_within("test"), "on_preempt")
"""Events that are never fired, because Composer's Trainer has nothing that corresponds to them."""
