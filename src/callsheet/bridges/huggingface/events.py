"""Tables: which events of callsheet are fired at each event or call of the Hugging Face Trainer, and which are never fired."""

from __future__ import annotations

from collections.abc import Mapping

from callsheet.core.lifecycle import events_within

NOT_FIRED = (*events_within("test", "predict"), "on_preempt")
"""Events of callsheet that are never fired in the Hugging Face Trainer."""

FIRED_AT: Mapping[str, tuple[str, ...]] = {
    "on_train_begin": (
        *("on_run_start", "on_checkpoint_load_start", "on_checkpoint_load_end", "on_data_init_start"),
        *("on_data_init_end", "on_train_start", "on_round_start"),
    ),
    "on_epoch_begin": ("on_epoch_start",),
    "compute_loss": (
        *("on_fetch_start", "on_fetch_end", "on_train_step_start", "on_forward_backward_start"),
        *("on_microbatch_start", "on_forward_start", "on_forward_end", "on_loss_start"),
        *("on_eval_start", "on_eval_step_start", "on_eval_forward_start", "on_eval_forward_end"),
    ),
    "Accelerator.backward": ("on_loss_end", "on_backward_start", "on_backward_end"),
    "on_substep_end": ("on_microbatch_end",),
    "on_pre_optimizer_step": (
        *("on_microbatch_end", "on_forward_backward_end", "on_clip_gradients_start"),
        *("on_clip_gradients_end", "on_optimizer_step_start"),
    ),
    "on_optimizer_step": ("on_optimizer_step_end", "on_train_step_end"),
    "on_step_end": ("on_log", "on_checkpoint_due"),
    "on_epoch_end": ("on_epoch_end", "on_log", "on_checkpoint_due"),
    "evaluate": ("on_eval_all_start", "on_eval_all_end", "on_log", "on_checkpoint_due"),
    "on_prediction_step": ("on_eval_step_end",),
    "on_evaluate": ("on_eval_end",),
    "on_save": ("on_checkpoint_save_start", "on_checkpoint_save_end", "on_checkpoint_published"),
    "on_train_end": ("on_log", "on_round_end", "on_train_end", "on_run_end"),
}
"""For each event or method of the Trainer, the events of callsheet that are fired there.

The last microbatch of a step ends at `on_pre_optimizer_step`, not at `on_substep_end`. `on_exception` is not in the table: it is fired
after an error of a callback, and, if the host is passed to the constructor of the Trainer, after an error that leaves `train`.
"""
