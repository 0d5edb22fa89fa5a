"""Tools to test callbacks: a loop that fires events without training, small runs, and checks that every callback must pass.

The tools check that a callback does what all callbacks must do, record the events of a loop, check the events against the lifecycle's
grammar, fire the events of a whole run without training (`FakeLoop`), and run a function on several ranks.
"""

from callsheet.core.optional import needed_by

with needed_by(__name__):
    from callsheet.testing.conformance import CONFORMANCE, Check, check_callback
    from callsheet.testing.conformance_on_ranks import check_on_ranks, find_on_ranks
    from callsheet.testing.fake_loop import FakeLoop
    from callsheet.testing.grammar import GrammarChecker, GrammarError, check_events
    from callsheet.testing.ranks import RankEnd, RankProcesses, RanksFailed, run_ranks
    from callsheet.testing.recorder import RecordedEvent, Recorder
    from callsheet.testing.scene import ConformanceError, Subject
    from callsheet.testing.small_run import SmallModel, small_batches, small_trainer

__all__ = [
    "CONFORMANCE",
    "Check",
    "ConformanceError",
    "FakeLoop",
    "GrammarChecker",
    "GrammarError",
    "RankEnd",
    "RankProcesses",
    "RanksFailed",
    "RecordedEvent",
    "Recorder",
    "SmallModel",
    "Subject",
    "check_callback",
    "check_events",
    "check_on_ranks",
    "find_on_ranks",
    "run_ranks",
    "small_batches",
    "small_trainer",
]
