"""Tables: which events of callsheet are fired at each event of Megatron Bridge, and which events are never fired there."""

from __future__ import annotations

from collections.abc import Mapping

from callsheet.core.lifecycle import events_within

FIRED_AT: Mapping[str, tuple[str, ...]] = {
    "on_data_init_start": ("on_run_start", "on_checkpoint_load_start", "on_checkpoint_load_end", "on_data_init_start"),
    "on_train_start": ("on_data_init_end", "on_train_start", "on_round_start"),
    "on_train_step_start": ("on_epoch_start", "on_fetch_start", "on_fetch_end", "on_train_step_start"),
    "on_train_step_end": ("on_train_step_end", "on_log", "on_checkpoint_due"),
    "on_eval_start": ("on_eval_all_start", "on_eval_start"),
    "on_eval_step_start": ("on_eval_step_start",),
    "on_eval_step_end": ("on_eval_forward_start", "on_eval_forward_end", "on_eval_step_end"),
    "on_eval_end": ("on_eval_end", "on_eval_all_end", "on_log", "on_checkpoint_due"),
    "on_checkpoint_save": ("on_checkpoint_save_start", "on_checkpoint_save_end", "on_checkpoint_published"),
    "on_train_end": ("on_epoch_end", "on_round_end", "on_train_end"),
    "on_test_start": ("on_test_start",),
    "on_test_step_start": ("on_test_step_start",),
    "on_test_step_end": ("on_test_forward_start", "on_test_forward_end", "on_test_step_end"),
    "on_test_end": ("on_test_end", "on_log", "on_run_end"),
}
"""For each event of Megatron Bridge, the events of callsheet that the host fires there.

PyTorch hooks fire the events between the start and the end of a step. The first forward pass fires the events of `on_train_step_start`,
unless the host cannot observe it, as with pipeline parallelism. The end of the run is fired with the last event of Megatron Bridge.
"""

NOT_FIRED = (*events_within("predict"), "on_preempt")
"""Events that are never fired, because Megatron Bridge has nothing that corresponds to them."""
