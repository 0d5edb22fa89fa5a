"""The attributes of Composer that the host needs. If the installed version lacks one, the host raises `NotSupported`."""

PACKAGE = "mosaicml"

HOST = (
    *("composer.callbacks.CheckpointSaver.last_checkpoint_batch", "composer.callbacks.CheckpointSaver.save_interval"),
    *("composer.callbacks.CheckpointSaver.batch_checkpoint", "composer.core.Evaluator.eval_interval"),
    *("composer.callbacks.CheckpointSaver.all_saved_checkpoints_to_timestamp", "composer.Callback.run_event"),
)
