"""The attributes of Lightning that the host needs. If the installed version lacks one, the host raises `NotSupported`."""

PACKAGE = "lightning"

HOST = (
    *("loops.fit_loop._FitLoop._should_accumulate", "Trainer.fit_loop"),
    *("Trainer.enable_validation", "Trainer.lr_scheduler_configs", "Trainer.precision_plugin"),
)
"""They are relative to `lightning.pytorch`, or to `pytorch_lightning` if only that is installed."""
