"""The non-public parts of Lightning that the host uses. If a part that is listed in `HOST` is missing, the host raises `NotSupported`.

Their names are relative to `lightning.pytorch`, or to `pytorch_lightning` if only that is installed.
"""

PACKAGE = "lightning"

HOST = (
    *("loops.fit_loop._FitLoop._should_accumulate", "Trainer.fit_loop"),
    *("loops.fit_loop._FitLoop.epoch_loop", "loops.fit_loop._FitLoop.epoch_progress"),
    "loops.training_epoch_loop._TrainingEpochLoop.batch_progress",
    *("Trainer.enable_validation", "Trainer.lr_scheduler_configs", "Trainer.precision_plugin"),
)

WITHOUT = {"Trainer.val_check_batch": "callbacks that request an evaluation are rejected"}
"""For each part that the host can do without: what happens if the installed version lacks the part."""
