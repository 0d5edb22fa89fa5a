"""Tables: which events of callsheet are fired at each hook of InstructLab, and for which events InstructLab has no hook."""

from collections.abc import Mapping

from callsheet.core.lifecycle import events_within

FIRED_AT: Mapping[str, tuple[str, ...]] = {
    "on_train_begin": (
        *("on_run_start", "on_checkpoint_load_start", "on_checkpoint_load_end", "on_data_init_start"),
        *("on_data_init_end", "on_train_start", "on_round_start"),
    ),
    "on_epoch_begin": ("on_epoch_start",),
    "on_step_begin": ("on_fetch_start", "on_fetch_end", "on_train_step_start"),
    "on_before_forward": ("on_forward_backward_start", "on_microbatch_start", "on_forward_start"),
    "on_after_backward": (
        *("on_forward_end", "on_loss_start", "on_loss_end", "on_backward_start", "on_backward_end", "on_microbatch_end"),
    ),
    "on_pre_optimizer_step": ("on_forward_backward_end", "on_clip_gradients_start"),
    "on_optimizer_step": ("on_clip_gradients_end", "on_optimizer_step_start", "on_optimizer_step_end"),
    "on_log": ("on_train_step_end", "on_log"),
    "on_evaluate": ("on_eval_all_start", "on_eval_start", "on_eval_end", "on_eval_all_end", "on_log"),
    "on_save": (
        *("on_checkpoint_due", "on_checkpoint_save_start", "on_checkpoint_save_end"),
        *("on_checkpoint_published", "on_round_end"),
    ),
    "on_epoch_end": (
        *("on_epoch_end", "on_checkpoint_due", "on_checkpoint_save_start"),
        *("on_checkpoint_save_end", "on_checkpoint_published"),
    ),
    "on_train_end": ("on_round_end", "on_train_end", "on_run_end"),
}
"""For each hook of InstructLab, the events of callsheet that the host fires there.

InstructLab has no hooks for some of these events, see `NOT_SEEN`. The lifecycle driver fires them between two hooks, to keep the order.
"""

NOT_FIRED = ("on_preempt", "on_exception", *events_within("eval_step", "test", "predict"))
"""Events for which InstructLab has no hook. They are never fired; a callback may listen to them if it also listens to another event."""

NOT_SEEN: tuple[str, ...] = (
    *("on_fetch_start", "on_fetch_end", "on_forward_end", "on_loss_start", "on_loss_end", "on_backward_start"),
    *("on_clip_gradients_end", "on_optimizer_step_start"),
)
"""Events of every step for which InstructLab has no hook. A callback that listens to one of them is rejected."""
