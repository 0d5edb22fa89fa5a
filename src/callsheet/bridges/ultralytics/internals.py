"""The attributes of Ultralytics that the host needs. If the installed version lacks one, the host raises `NotSupported`."""

PACKAGE = "ultralytics"

_TRAINER_CLASS, _VALIDATOR_CLASS = "ultralytics.engine.trainer.BaseTrainer", "ultralytics.engine.validator.BaseValidator"

HOST = (
    *(f"{_TRAINER_CLASS}.{name}" for name in ("preprocess_batch", "validate", "final_eval", "save_model", "train")),
    *(f"{_TRAINER_CLASS}.{name}" for name in ("model", "optimizer", "scheduler", "scaler", "ema", "train_loader", "validator")),
    *(f"{_TRAINER_CLASS}.{name}" for name in ("callbacks", "stop", "start_epoch", "epochs", "epoch", "last", "wdir", "ddp")),
    *(f"{_TRAINER_CLASS}.{name}" for name in ("args", "device", "best", "loss_items", "loss_names", "metrics")),
    f"{_TRAINER_CLASS}._build_train_pipeline",
    f"{_VALIDATOR_CLASS}.preprocess",
    *("ultralytics.engine.trainer.generate_ddp_command", "ultralytics.engine.trainer.ddp_cleanup"),
)
"""The host wraps methods of this list, reads or sets the attributes, and replaces the two functions for DDP workers.

The host does not use `_build_train_pipeline`. Releases without it, before 8.4.14, do not end an epoch early if the host sets `stop`.
"""

_EPOCH_IS_REPEATED = "a repeated start of an epoch counts as the start of a repeated epoch"
WITHOUT = {f"{_TRAINER_CLASS}._oom_retries": _EPOCH_IS_REPEATED, f"{_TRAINER_CLASS}.nan_recovery_attempts": _EPOCH_IS_REPEATED}
"""For each attribute that the host can do without: what happens if the installed version lacks the attribute."""
