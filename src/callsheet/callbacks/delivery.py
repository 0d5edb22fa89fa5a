"""Notifications are sent, again where that may help, and given up in time."""

from __future__ import annotations

import time

from callsheet.callbacks.destinations import Destination, NotDelivered, Notification


def why_not_delivered(notification: Notification, destination: Destination, *, timeout: float, retries: int) -> str:
    """Send it, again after failures that may pass; why it did not arrive, or nothing where it did.

    Args:
        timeout: seconds for each try.
        retries: how many more there are where they may help.
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
    """Seconds that all tries of one notification may take."""
    return sum(timeout + _pause(attempt) for attempt in range(retries + 1))


def _pause(attempt: int) -> float:
    """Seconds between a try and the next."""
    return min(5.0, 0.2 * 4.0**attempt)
