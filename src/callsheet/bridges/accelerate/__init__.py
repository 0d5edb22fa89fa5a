"""The Accelerate bridge: `host` runs callsheet's callbacks in an Accelerate loop, and `guest` turns trackers into loggers."""

from callsheet.core.optional import needed_by

with needed_by(__name__):
    from callsheet.bridges.accelerate.events import FIRED_AT, NOT_FIRED
    from callsheet.bridges.accelerate.guests import TrackerGuest, guest
    from callsheet.bridges.accelerate.hosts import AcceleratedRun, host

__all__ = ["FIRED_AT", "NOT_FIRED", "AcceleratedRun", "TrackerGuest", "guest", "host"]
