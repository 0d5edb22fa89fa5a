"""The AutoModel bridge: `host` runs callsheet's callbacks in AutoModel, and `guest` runs AutoModel's callbacks in callsheet."""

from callsheet.core.optional import needed_by

with needed_by(__name__):
    from callsheet.bridges.automodel.events import HOST_EVENTS, NOT_FIRED
    from callsheet.bridges.automodel.guests import EVENTS, AutoModelGuest, guest
    from callsheet.bridges.automodel.hosts import AutoModelHost, host

__all__ = ["EVENTS", "HOST_EVENTS", "NOT_FIRED", "AutoModelGuest", "AutoModelHost", "guest", "host"]
