"""The Ultralytics bridge: callsheet's callbacks in the training of YOLO and Ultralytics' other models, also in its DDP workers."""

from callsheet.core.optional import needed_by

with needed_by(__name__):
    from callsheet.bridges.ultralytics.events import FIRED_AT, NOT_FIRED
    from callsheet.bridges.ultralytics.hosts import UltralyticsHost, host

__all__ = ["FIRED_AT", "NOT_FIRED", "UltralyticsHost", "host"]
