"""The InstructLab bridge: `host` runs callsheet's callbacks in InstructLab, and `guest` runs InstructLab's callbacks in callsheet."""

from callsheet.bridges.instructlab.events import FIRED_AT, NOT_FIRED, NOT_SEEN
from callsheet.bridges.instructlab.guests import InstructLabGuest, guest
from callsheet.bridges.instructlab.hosts import host

__all__ = ["FIRED_AT", "NOT_FIRED", "NOT_SEEN", "InstructLabGuest", "guest", "host"]
