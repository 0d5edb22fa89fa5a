"""A table: the event of Ultralytics at which each event of callsheet is fired."""

from __future__ import annotations

from collections.abc import Mapping

from callsheet.core.lifecycle import events_within

NOT_FIRED = (*events_within("test"), *events_within("predict"))
"""Events of callsheet that the Ultralytics host never fires, because the host observes only training."""

FIRED_AT: Mapping[str, str] = {
    "on_run_start": "on_train_start",
    "on_train_start": "on_train_start",
    "on_epoch_start": "on_train_epoch_start",
    "on_fetch_start": "on_train_epoch_start and on_train_batch_end",
    "on_microbatch_end": "on_train_batch_end",
    "on_train_step_end": "on_train_batch_end",
    "on_epoch_end": "on_train_epoch_end",
    "on_eval_step_end": "on_val_batch_end",
    "on_checkpoint_due": "on_fit_epoch_end",
    "on_checkpoint_save_start": "on_fit_epoch_end",
    "on_checkpoint_save_end": "on_fit_epoch_end",
    "on_checkpoint_published": "on_fit_epoch_end",
    "on_train_end": "teardown",
    "on_exception": "teardown",
    "on_run_end": "teardown",
}
"""For each event of callsheet, the Ultralytics event at which callsheet's event is fired.

The other events come from hooks in the model, `backward`, the optimizer, and wrapped methods of the trainer and validator, or the
lifecycle driver synthesizes them: it fires them to keep the order of events, although Ultralytics did not report them.
"""

HANDLED = (
    *("on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_train_batch_end", "on_train_epoch_end"),
    *("on_val_batch_end", "on_model_save", "on_fit_epoch_end", "teardown"),
)
"""The events of Ultralytics that the host handles, in methods of the same names."""
