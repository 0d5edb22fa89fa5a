"""MosaicML Composer's names, over callsheet: code in Composer's style runs here when its import line is changed.

`from composer import Callback, State, Logger, Trainer` becomes `from callsheet.compat.composer import ...`, and so do
`composer.callbacks`, `composer.loggers`, `composer.core` and `composer.models`. Composer itself need not be installed.
"""

from callsheet.extras import needed_by

with needed_by(__name__):
    from callsheet.bridges.composer.names import Callback, Event, LoggerDestination
    from callsheet.bridges.composer.state import Logger, State
    from callsheet.bridges.composer.time import Time, Timestamp, TimeUnit
    from callsheet.compat.composer.models import ComposerModel
    from callsheet.compat.composer.trainer import Evaluator, Trainer

__all__ = [
    "Callback",
    "ComposerModel",
    "Evaluator",
    "Event",
    "Logger",
    "LoggerDestination",
    "State",
    "Time",
    "TimeUnit",
    "Timestamp",
    "Trainer",
]
