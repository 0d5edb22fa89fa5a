"""The attributes of Accelerate that the host needs. If the installed version lacks one, the host raises `NotSupported`."""

PACKAGE = "accelerate"

HOST = (
    *("accelerate.Accelerator.trackers", "accelerate.Accelerator.scaler", "accelerate.Accelerator.dataloader_config"),
    *("accelerate.Accelerator.project_configuration", "accelerate.Accelerator.clip_grad_norm_"),
    *("accelerate.Accelerator.save_state", "accelerate.Accelerator.sync_gradients"),
)
"""The host wraps `clip_grad_norm_` and `save_state`, and reads or changes the other attributes."""
