"""The parts of Composer that the host needs and that are not public API. Without them, it raises `NotSupported`."""

PACKAGE = "mosaicml"

HOST = (
    *("composer.callbacks.CheckpointSaver.last_checkpoint_batch", "composer.callbacks.CheckpointSaver.save_interval"),
    *("composer.callbacks.CheckpointSaver.batch_checkpoint", "composer.core.Evaluator.eval_interval"),
    "composer.Callback.run_event",
)
