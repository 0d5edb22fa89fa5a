"""The parts of Ignite that the bridge needs and that are not public API. Without them, a host or guest raises `NotSupported`."""

PACKAGE = "pytorch-ignite"

HOST = (
    *("ignite.engine.Engine._event_handlers", "ignite.handlers.checkpoint.CheckpointEvents.SAVED_CHECKPOINT"),
    "ignite.handlers.Checkpoint._saved",
)

GUEST = ("ignite.engine.Engine._event_handlers", "ignite.engine.Engine._fire_event")
