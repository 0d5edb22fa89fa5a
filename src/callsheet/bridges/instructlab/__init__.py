"""The InstructLab bridge: callsheet callbacks in InstructLab Training (`host`), and its callbacks in callsheet's loop (`guest`)."""

from callsheet.bridges.instructlab.events import EVENT_MAP, NOT_FIRED, NOT_SEEN
from callsheet.bridges.instructlab.guests import InstructLabGuest, guest
from callsheet.bridges.instructlab.hosts import host

__all__ = ["EVENT_MAP", "NOT_FIRED", "NOT_SEEN", "InstructLabGuest", "guest", "host"]
