"""The Ultralytics bridge: `host` runs callsheet's callbacks in the training of YOLO and other models, also with DDP."""

from callsheet.core.optional import needed_by

with needed_by(__name__):
    from callsheet.bridges.ultralytics.events import FIRED_AT, NOT_FIRED
    from callsheet.bridges.ultralytics.hosts import UltralyticsHost, host

__all__ = ["FIRED_AT", "NOT_FIRED", "UltralyticsHost", "host"]
