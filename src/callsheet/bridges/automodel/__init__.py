"""The AutoModel bridge: callsheet callbacks in NeMo AutoModel's recipes (`host`), and AutoModel's callbacks in callsheet's loop (`guest`)."""

from callsheet.core.optional import needed_by

with needed_by(__name__):
    from callsheet.bridges.automodel.events import HOST_EVENTS, NOT_FIRED
    from callsheet.bridges.automodel.guests import EVENTS, AutoModelGuest, guest
    from callsheet.bridges.automodel.hosts import AutoModelHost, host

__all__ = ["EVENTS", "HOST_EVENTS", "NOT_FIRED", "AutoModelGuest", "AutoModelHost", "guest", "host"]
