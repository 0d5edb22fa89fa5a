"""The torchtnt bridge: `host` runs callsheet's callbacks in torchtnt, and `guest` runs torchtnt's callbacks in callsheet."""

from callsheet.core.optional import needed_by

with needed_by(__name__):
    from callsheet.bridges.torchtnt.events import NOT_FIRED
    from callsheet.bridges.torchtnt.guests import TorchTNTGuest, guest
    from callsheet.bridges.torchtnt.hosts import TorchTNTHost, host

__all__ = ["NOT_FIRED", "TorchTNTGuest", "TorchTNTHost", "guest", "host"]
