"""Tables: which events of callsheet are fired at each hook of AutoModel, and which events are never fired in AutoModel."""

from __future__ import annotations

from collections.abc import Mapping

from callsheet.core.lifecycle import events_within

FIRED_AT: Mapping[str, tuple[str, ...]] = {
    "on_train_start": (
        *("on_run_start", "on_checkpoint_load_start", "on_checkpoint_load_end", "on_data_init_start"),
        *("on_data_init_end", "on_train_start", "on_round_start"),
    ),
    "_run_train_optim_step": (
        *("on_epoch_start", "on_fetch_start", "on_fetch_end", "on_train_step_start", "on_forward_backward_start"),
        *("on_microbatch_start", "on_forward_start", "on_forward_end", "on_loss_start", "on_loss_end"),
        *("on_backward_start", "on_backward_end", "on_microbatch_end", "on_forward_backward_end", "on_clip_gradients_start"),
        *("on_clip_gradients_end", "on_optimizer_step_start", "on_optimizer_step_end"),
    ),
    "on_train_batch_end": ("on_train_step_end", "on_epoch_end", "on_log", "on_checkpoint_due"),
    "_run_validation_epoch": (
        *("on_eval_all_start", "on_eval_start", "on_eval_step_start"),
        *("on_eval_forward_start", "on_eval_forward_end", "on_eval_step_end"),
    ),
    "on_validation_end": ("on_eval_step_end", "on_eval_end", "on_eval_all_end", "on_log", "on_checkpoint_due"),
    "on_save_checkpoint": ("on_checkpoint_save_start", "on_checkpoint_save_end", "on_checkpoint_published"),
    "on_train_end": ("on_round_end", "on_train_end", "on_run_end"),
}
"""For each hook of AutoModel, and each method of the recipe that the host wraps, the events of callsheet that are fired there.

The host fires `on_exception` and ends the run at AutoModel's `on_exception`, which AutoModel calls only in its own `main`.
"""

NOT_FIRED = events_within("test", "predict")
"""Events that are never fired, because an AutoModel recipe has nothing that corresponds to them."""

NOT_FIRED_FOR_SEVERAL = events_within("eval_step")
"""Further events that are not fired if a recipe has several validation sets.

A recipe does not report where one validation set ends and the next begins.
"""
