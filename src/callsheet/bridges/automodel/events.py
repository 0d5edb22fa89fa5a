"""Tables: which events of callsheet are fired at each hook of AutoModel, and which events are never fired in AutoModel."""

from __future__ import annotations

from collections.abc import Mapping

from callsheet.core.lifecycle import events_within

HOST_EVENTS: Mapping[str, tuple[str, ...]] = {
    "on_train_start": (
        *("on_run_start", "on_checkpoint_load_start", "on_checkpoint_load_end", "on_data_init_start", "on_data_init_end"),
        *("on_train_start", "on_round_start"),
    ),
    "on_train_batch_end": ("on_train_step_end", "on_log", "on_epoch_end", "on_checkpoint_due"),
    "on_validation_end": ("on_eval_end", "on_eval_all_end", "on_log"),
    "on_save_checkpoint": ("on_checkpoint_due", "on_checkpoint_save_start", "on_checkpoint_save_end", "on_checkpoint_published"),
    "on_exception": ("on_exception", "on_run_end"),
    "on_train_end": ("on_round_end", "on_train_end", "on_run_end"),
}
"""The events that the host fires at each hook of AutoModel. PyTorch hooks on model, loss and optimizer fire the other events."""

NOT_FIRED = events_within("test", "predict")
"""Events that are never fired, because an AutoModel recipe has nothing that corresponds to them."""

NOT_FIRED_FOR_SEVERAL = events_within("eval_step")
"""Further events that are not fired if a recipe has several validation sets.

A recipe does not report where one validation set ends and the next begins.
"""
