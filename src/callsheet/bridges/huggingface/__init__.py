"""The Hugging Face bridge: `host` runs callsheet's callbacks in a transformers Trainer, `guest` runs transformers callbacks in callsheet."""

from callsheet.core.optional import needed_by

with needed_by(__name__):
    from callsheet.bridges.host_states import STATE
    from callsheet.bridges.huggingface.events import FIRED_AT, NOT_FIRED
    from callsheet.bridges.huggingface.guests import GUEST_EVENTS, guest
    from callsheet.bridges.huggingface.hosts import HuggingFaceHost, host

__all__ = ["FIRED_AT", "GUEST_EVENTS", "NOT_FIRED", "STATE", "HuggingFaceHost", "guest", "host"]
