"""The AutoModel bridge: `host` runs callsheet's callbacks in AutoModel, and `guest` runs AutoModel's callbacks in callsheet."""

from callsheet.core.optional import needed_by

with needed_by(__name__):
    from callsheet.bridges.automodel.events import FIRED_AT, NOT_FIRED
    from callsheet.bridges.automodel.guests import EVENTS, AutoModelGuest, guest
    from callsheet.bridges.automodel.hosts import AutoModelHost, host

__all__ = ["EVENTS", "FIRED_AT", "NOT_FIRED", "AutoModelGuest", "AutoModelHost", "guest", "host"]
