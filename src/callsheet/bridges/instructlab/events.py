"""Tables: which event of callsheet corresponds to each hook of InstructLab, and for which events InstructLab has no hook."""

from collections.abc import Mapping

from callsheet.core.lifecycle import events_within

EVENT_MAP: Mapping[str, str] = {
    "on_train_begin": "on_train_start",
    "on_epoch_begin": "on_epoch_start",
    "on_step_begin": "on_train_step_start",
    "on_before_forward": "on_forward_start",
    "on_after_backward": "on_backward_end",
    "on_pre_optimizer_step": "on_clip_gradients_start",
    "on_optimizer_step": "on_optimizer_step_end",
    "on_log": "on_log",
    "on_evaluate": "on_eval_all_end",
    "on_save": "on_checkpoint_published",
    "on_step_end": "on_train_step_end",
    "on_epoch_end": "on_epoch_end",
    "on_train_end": "on_run_end",
}
"""For each hook of an InstructLab callback, the event of callsheet at which a guest calls the hook.

`on_step_end` and `on_epoch_end` are called after the evaluations and saves at the end of the step or epoch.
"""

NOT_FIRED = ("on_checkpoint_due", "on_preempt", "on_exception", *events_within("eval_step", "test", "predict"))
"""Events for which InstructLab has no hook. They are never fired; a callback may listen to them if it also listens to another event."""

NOT_SEEN: tuple[str, ...] = (
    *("on_fetch_start", "on_fetch_end", "on_forward_end", "on_loss_start", "on_loss_end", "on_backward_start"),
    *("on_clip_gradients_end", "on_optimizer_step_start"),
)
"""Events of every step for which InstructLab has no hook. A callback that listens to one of them is rejected."""
