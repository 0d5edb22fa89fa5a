"""Tables: which events of callsheet are fired at each call that an Accelerate loop makes, and which are never fired there."""

from __future__ import annotations

from collections.abc import Mapping

from callsheet.core.lifecycle import events_within

FIRED_AT: Mapping[str, tuple[str, ...]] = {
    "with": (
        "on_run_start",
        "on_checkpoint_load_start",
        "on_checkpoint_load_end",
        "on_data_init_start",
        "on_data_init_end",
        "on_run_end",
    ),
    "run.steps": ("on_train_start", "on_round_start", "on_epoch_start", "on_fetch_start", "on_fetch_end", "on_microbatch_start"),
    "Accelerator.sync_gradients": ("on_train_step_start", "on_train_step_end", "on_log", "on_checkpoint_due"),
    "the model": ("on_forward_start", "on_forward_end"),
    "Accelerator.backward": ("on_loss_end", "on_backward_start", "on_backward_end"),
    "Accelerator.clip_grad_norm_": ("on_clip_gradients_start", "on_clip_gradients_end"),
    "AcceleratedOptimizer.step": ("on_optimizer_step_start", "on_optimizer_step_end"),
    "run.evaluated": ("on_eval_all_start", "on_eval_start", "on_eval_end", "on_eval_all_end"),
    "Accelerator.save_state": ("on_checkpoint_save_start", "on_checkpoint_save_end", "on_checkpoint_published"),
}
"""The events of callsheet that each call in the loop fires.

A step ends, and the next one begins, when the accelerator synchronizes gradients.
"""

NOT_FIRED = events_within("eval_step", "test", "predict")
"""Events that this host never fires."""
