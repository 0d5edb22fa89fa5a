"""Tables: which events of callsheet are fired at each event of Ignite's trainer and evaluators, and which are never fired."""

from __future__ import annotations

from collections.abc import Mapping

from callsheet.core.lifecycle import events_within

FIRED_AT: Mapping[str, tuple[str, ...]] = {
    "started": ("on_run_start", "on_checkpoint_load_start", "on_checkpoint_load_end", "on_data_init_start", "on_data_init_end"),
    "epoch_started": ("on_train_start", "on_round_start", "on_epoch_start"),
    "get_batch_started": ("on_fetch_start",),
    "get_batch_completed": ("on_fetch_end",),
    "iteration_started": ("on_train_step_start", "on_forward_backward_start", "on_microbatch_start"),
    "iteration_completed": ("on_train_step_end", "on_log", "on_checkpoint_due"),
    "terminate_single_epoch": ("on_epoch_end", "on_checkpoint_due"),
    "epoch_completed": ("on_epoch_end", "on_log", "on_checkpoint_due"),
    "interrupt": (),
    "terminate": (),
    "completed": ("on_round_end", "on_train_end", "on_run_end"),
    "exception_raised": ("on_exception", "on_run_end"),
}
"""For each event of Ignite's trainer that the host handles, the events of callsheet that are fired there.

The other events of a step, such as those of the forward pass, are not listed, because PyTorch hooks fire them.
"""

FIRED_AT_EVALUATION: Mapping[str, tuple[str, ...]] = {
    "started": ("on_eval_all_start", "on_eval_start"),
    "iteration_started": ("on_eval_step_start",),
    "iteration_completed": ("on_eval_step_end",),
    "completed": ("on_eval_end", "on_eval_all_end", "on_log", "on_checkpoint_due"),
}
"""For each event of an Ignite evaluator that the host handles, the events of callsheet that are fired there."""

NOT_FIRED = events_within("test", "predict")
"""Events of callsheet that the Ignite host never fires."""

EVALUATION_EVENTS = events_within("eval_all")
"""Events of callsheet that the Ignite host fires only if it has evaluators."""

CHECKPOINT_EVENTS = (*events_within("checkpoint_save"), "on_checkpoint_published")
"""Events of callsheet that the Ignite host fires only if it has a handler that writes checkpoints.

They are fired at Ignite's `saved_checkpoint`.
"""
