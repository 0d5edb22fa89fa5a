"""The events of callsheet that the Keras host never fires."""

from callsheet.core.lifecycle import events_within

NOT_FIRED = events_within("test")
"""Events that are never fired, because Keras has nothing that corresponds to them.

What Keras calls a test is an evaluation in callsheet.
"""
