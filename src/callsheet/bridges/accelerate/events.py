"""Tables: which events of callsheet are fired at each call that an Accelerate loop makes, and which are never fired there."""

from __future__ import annotations

from collections.abc import Mapping

from callsheet.core.lifecycle import events_within

FIRED_AT: Mapping[str, tuple[str, ...]] = {
    "run.__enter__": (
        *("on_run_start", "on_checkpoint_load_start", "on_checkpoint_load_end", "on_data_init_start", "on_data_init_end"),
    ),
    "run.steps": (
        *("on_train_start", "on_round_start", "on_epoch_start", "on_fetch_start", "on_fetch_end", "on_train_step_start"),
        *(
            "on_forward_backward_start",
            "on_microbatch_start",
            "on_train_step_end",
            "on_eval_all_start",
            "on_eval_start",
            "on_eval_end",
        ),
        *("on_eval_all_end", "on_epoch_end", "on_log", "on_checkpoint_due"),
    ),
    "Accelerator.backward": ("on_loss_end", "on_backward_start", "on_backward_end"),
    "AcceleratedOptimizer.step": (
        *("on_microbatch_end", "on_forward_backward_end", "on_clip_gradients_start"),
        *("on_clip_gradients_end", "on_optimizer_step_start", "on_optimizer_step_end"),
    ),
    "run.evaluated": ("on_eval_all_start", "on_eval_start", "on_eval_end", "on_eval_all_end", "on_log"),
    "Accelerator.save_state": ("on_checkpoint_save_start", "on_checkpoint_save_end", "on_checkpoint_published"),
    "run.__exit__": ("on_round_end", "on_train_end", "on_exception", "on_run_end"),
}
"""For each method that a loop with Accelerate calls, the events of callsheet that are fired during the call.

`run` is the object that `host` returns. A step ends, and the next one begins, when the accelerator synchronizes gradients. If the
loop calls `Accelerator.clip_grad_norm_`, the events of clipping are fired there. A hook of the model fires `on_forward_start`,
`on_forward_end` and `on_loss_start`.
"""

NOT_FIRED = events_within("eval_step", "test", "predict")
"""Events that this host never fires."""
