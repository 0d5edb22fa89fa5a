"""The events of callsheet that the Composer host never fires."""

from callsheet.core.lifecycle import events_within

NOT_FIRED = (*events_within("test"), "on_preempt")
"""Events that are never fired, because Composer's Trainer has nothing that corresponds to them."""
