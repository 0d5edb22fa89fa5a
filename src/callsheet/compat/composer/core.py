"""`composer.core`: events, times and base classes."""

from callsheet.bridges.composer.names import Callback, Event
from callsheet.bridges.composer.state import State
from callsheet.bridges.composer.time import Time, Timestamp, TimeUnit
from callsheet.compat.composer.trainer import Evaluator

__all__ = ["Callback", "Evaluator", "Event", "State", "Time", "TimeUnit", "Timestamp"]
