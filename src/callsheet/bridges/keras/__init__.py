"""The Keras bridge (torch backend): `host` runs callsheet's callbacks in Keras, `guest` runs Keras's callbacks in callsheet."""

from callsheet.core.optional import needed_by

with needed_by(__name__):
    from callsheet.bridges.keras.events import NOT_FIRED
    from callsheet.bridges.keras.hosts import KerasHost, host  # import `hosts` first: torch must be imported before Keras

    # isort: split
    from callsheet.bridges.keras.guests import KerasGuest, guest

__all__ = ["NOT_FIRED", "KerasGuest", "KerasHost", "guest", "host"]
