"""The Megatron Bridge bridge: `host` runs callsheet's callbacks in Megatron Bridge, `guest` runs Megatron Bridge's callbacks in callsheet.

Megatron-LM's own callbacks have the same methods, but their context has no `state`. In Megatron-LM, the host fires events but
supports no requests.
"""

from callsheet.core.optional import needed_by

with needed_by(__name__):
    from callsheet.bridges.megatron_bridge.events import FIRED_AT, NOT_FIRED
    from callsheet.bridges.megatron_bridge.guests import GUEST_EVENTS, NEVER, guest
    from callsheet.bridges.megatron_bridge.hosts import MegatronBridgeHost, host

__all__ = ["FIRED_AT", "GUEST_EVENTS", "NEVER", "NOT_FIRED", "MegatronBridgeHost", "guest", "host"]
