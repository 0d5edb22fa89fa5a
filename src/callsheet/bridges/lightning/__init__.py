"""The Lightning bridge: `host` and `fabric` run callsheet's callbacks in Lightning, `guest` runs Lightning's callbacks in callsheet."""

from callsheet.core.optional import needed_by

with needed_by(__name__):
    from callsheet.bridges.lightning.events import FIRED_AT, NOT_FIRED
    from callsheet.bridges.lightning.fabric_run import fabric
    from callsheet.bridges.lightning.guests import LightningGuest, guest
    from callsheet.bridges.lightning.hosts import LightningHost, host

__all__ = ["FIRED_AT", "NOT_FIRED", "LightningGuest", "LightningHost", "fabric", "guest", "host"]
