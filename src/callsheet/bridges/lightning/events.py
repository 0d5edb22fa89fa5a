"""A table: the hook of Lightning's callbacks at which each event of callsheet is fired."""

from __future__ import annotations

from collections.abc import Mapping

NOT_FIRED: tuple[str, ...] = ()
"""Events of callsheet that the Lightning host never fires: there are none."""

FIRED_AT: Mapping[str, str] = {
    "on_run_start": "on_train_start",
    "on_train_start": "on_train_start",
    "on_epoch_start": "on_train_epoch_start",
    "on_fetch_end": "on_train_batch_start",
    "on_train_step_start": "on_train_batch_start",
    "on_microbatch_start": "on_train_batch_start",
    "on_microbatch_end": "on_train_batch_end",
    "on_clip_gradients_start": "on_before_optimizer_step",
    "on_train_step_end": "on_train_batch_end",
    "on_eval_all_start": "on_validation_start",
    "on_eval_step_start": "on_validation_batch_start",
    "on_eval_step_end": "on_validation_batch_end",
    "on_eval_all_end": "on_validation_end",
    "on_epoch_end": "on_train_epoch_end",
    "on_train_end": "on_train_end",
    "on_test_start": "on_test_start",
    "on_test_step_start": "on_test_batch_start",
    "on_test_step_end": "on_test_batch_end",
    "on_test_end": "on_test_end",
    "on_predict_start": "on_predict_start",
    "on_predict_step_start": "on_predict_batch_start",
    "on_predict_step_end": "on_predict_batch_end",
    "on_predict_end": "on_predict_end",
    "on_preempt": "on_exception",
    "on_exception": "on_exception",
    "on_run_end": "on_train_end",
}
"""For each event of callsheet, the Lightning hook at which the event is fired.

The other events come from hooks in the model, `backward`, the optimizer and `save_checkpoint`, or the lifecycle driver
synthesizes them: it fires them to keep the order of events, although Lightning did not report them.
"""
