"""Sends notifications, with retries and a time limit.

`apprise` is not used, for the reasons in `destinations`. `longest` must agree with `why_not_delivered`: it determines the
deadline of the background thread (lane) that sends, so it must be the sum of all attempts and pauses.
"""

from __future__ import annotations

import time

from callsheet.callbacks.support.destinations import Destination, NotDelivered, Notification


def why_not_delivered(notification: Notification, destination: Destination, *, timeout: float, retries: int) -> str:
    """Send a notification, with retries after temporary errors. Return an empty string, or the reason why it was not delivered.

    Args:
        timeout: seconds for each attempt.
        retries: the number of further attempts after errors that may be temporary.
    """
    why = ""
    for attempt in range(retries + 1):
        try:
            destination.send(notification, timeout)
            return ""
        except NotDelivered as error:
            why = str(error)
            if error.is_final or attempt == retries:
                break
        time.sleep(_pause(attempt))
    return why


def longest(timeout: float, retries: int) -> float:
    """Return how many seconds all attempts to send one notification may take together."""
    return sum(timeout + _pause(attempt) for attempt in range(retries + 1))


def _pause(attempt: int) -> float:
    """Return the seconds to wait after attempt number `attempt` before the next one."""
    return min(5.0, 0.2 * 4.0**attempt)
