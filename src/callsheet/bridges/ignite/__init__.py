"""The Ignite bridge: `host` attaches callsheet's callbacks to an Engine, and `guest` runs Ignite's handlers in callsheet."""

from callsheet.core.optional import needed_by

with needed_by(__name__):
    from callsheet.bridges.ignite.engine import GuestEngine
    from callsheet.bridges.ignite.events import FIRED_AT, FIRED_AT_EVALUATION, NOT_FIRED
    from callsheet.bridges.ignite.guests import IgniteGuest, guest
    from callsheet.bridges.ignite.hosts import IgniteHost, host

__all__ = ["FIRED_AT", "FIRED_AT_EVALUATION", "NOT_FIRED", "GuestEngine", "IgniteGuest", "IgniteHost", "guest", "host"]
