"""The events of callsheet that the torchtnt host never fires."""

from callsheet.core.lifecycle import events_within

NOT_FIRED = events_within("test")
"""Events that are never fired, because torchtnt has nothing that corresponds to them."""
