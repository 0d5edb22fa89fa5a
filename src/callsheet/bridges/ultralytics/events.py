"""Tables: which events of callsheet are fired at each event or method of Ultralytics, and which are never fired."""

from __future__ import annotations

from collections.abc import Mapping

from callsheet.core.lifecycle import events_within

NOT_FIRED = (*events_within("test"), *events_within("predict"))
"""Events of callsheet that the Ultralytics host never fires, because the host observes only training."""

FIRED_AT: Mapping[str, tuple[str, ...]] = {
    "on_train_start": (
        *("on_run_start", "on_checkpoint_load_start", "on_checkpoint_load_end", "on_data_init_start"),
        *("on_data_init_end", "on_train_start", "on_round_start"),
    ),
    "on_train_epoch_start": ("on_epoch_start", "on_fetch_start"),
    "preprocess_batch": ("on_fetch_end", "on_train_step_start", "on_forward_backward_start", "on_microbatch_start"),
    "unscale_": ("on_microbatch_end", "on_forward_backward_end", "on_clip_gradients_start"),
    "on_train_batch_end": ("on_fetch_start", "on_train_step_end", "on_log", "on_checkpoint_due"),
    "on_train_epoch_end": ("on_epoch_end",),
    "validate": (
        *("on_eval_all_start", "on_eval_start", "on_eval_forward_start", "on_eval_forward_end"),
        *("on_eval_end", "on_eval_all_end", "on_log"),
    ),
    "preprocess": ("on_eval_step_start",),
    "on_val_batch_end": ("on_eval_forward_start", "on_eval_forward_end", "on_eval_step_end"),
    "on_fit_epoch_end": ("on_checkpoint_due", "on_checkpoint_save_start", "on_checkpoint_save_end", "on_checkpoint_published"),
    "final_eval": ("on_eval_all_start", "on_eval_start", "on_eval_end", "on_eval_all_end", "on_log", "on_round_end"),
    "teardown": ("on_train_end", "on_run_end"),
}
"""For each event or method of Ultralytics, the events of callsheet that are fired there. `on_exception` is fired at `teardown` too.

The other events come from hooks in the model, `backward` and the optimizer.
"""

HANDLED = (
    *("on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_train_batch_end", "on_train_epoch_end"),
    *("on_val_batch_end", "on_model_save", "on_fit_epoch_end", "teardown"),
)
"""The events of Ultralytics that the host handles, in methods of the same names."""
