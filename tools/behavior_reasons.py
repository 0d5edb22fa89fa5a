"""What `behavior.py` knows about the differences from commit 218f8947, the last one before the redesign: new names, and reasons."""

from __future__ import annotations

import re
from dataclasses import dataclass

RENAMED: dict[str, str] = {
    "FieldNotTold": "FieldNotAvailable",
    "NotCarried": "NotSupported",
    "RequestRefused": "RequestRejected",
    "LogRecord": "MetricsRecord",
    "Told": "RecordedEvent",
    "accumulate": "gradient_accumulation_steps",
    "refuse": "reject",
    "refused": "rejected",
    "hears": "listens",
}
"""Maps the old name of a field, metric, option or public name to the new one."""

RENAMED_IN_TESTS = RENAMED | {"accumulate": "set_gradient_accumulation"}
"""The same for the tests of rejected input, where `accumulate` is a method of `Control`."""


@dataclass(frozen=True)
class Reason:
    """Why values differ. `part` and `key` are regular expressions, which must match at the start of the title of a part and of a key.

    `change` limits the reason to values that were "added", "removed" or "changed"; empty for all.
    """

    text: str
    part: str
    key: str = ""
    change: str = ""

    def explains(self, part: str, key: str, change: str) -> bool:
        return bool(re.match(self.part, part) and re.match(self.key, key)) and self.change in ("", change)


REWORDED = "The message is in plain English now (STYLE.md). The test, the rejected input and the class of the error are the same."

REASONS: tuple[Reason, ...] = ()
"""The first reason that explains a difference is the one that is reported."""


def reason(part: str, key: str, change: str) -> str:
    """Return why a value differs, or an empty string if nobody has written it down."""
    return next((each.text for each in REASONS if each.explains(part, key, change)), "")
