"""The attributes of Ignite that the bridge needs. If the installed version lacks one, the bridge raises `NotSupported`."""

PACKAGE = "pytorch-ignite"

HOST = (
    *("ignite.engine.Engine._event_handlers", "ignite.handlers.checkpoint.CheckpointEvents.SAVED_CHECKPOINT"),
    "ignite.handlers.Checkpoint._saved",
)

GUEST = ("ignite.engine.Engine._event_handlers", "ignite.engine.Engine._fire_event")
