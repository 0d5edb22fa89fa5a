"""For tests: record what a loop tells, and hold it against the lifecycle."""

from callsheet.testing.grammar import GrammarChecker, GrammarError, check_events
from callsheet.testing.recorder import Recorder, Told

__all__ = ["GrammarChecker", "GrammarError", "Recorder", "Told", "check_events"]
