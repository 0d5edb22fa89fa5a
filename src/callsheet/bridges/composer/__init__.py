"""The Composer bridge: `host` runs callsheet's callbacks in Composer, and `guest` runs Composer's callbacks in callsheet.

Only the host needs Composer itself. Composer is imported when a host is created.
"""

from callsheet.core.optional import needed_by

with needed_by(__name__):
    from callsheet.bridges.composer.events import NOT_FIRED
    from callsheet.bridges.composer.guests import ComposerGuest, guest
    from callsheet.bridges.composer.hosts import host

__all__ = ["NOT_FIRED", "ComposerGuest", "guest", "host"]
