"""A table: which events of callsheet are fired at each hook or method of Lightning."""

from __future__ import annotations

from collections.abc import Mapping

NOT_FIRED: tuple[str, ...] = ()
"""Events of callsheet that the Lightning host never fires: there are none."""

FIRED_AT: Mapping[str, tuple[str, ...]] = {
    "on_train_start": (
        *("on_run_start", "on_checkpoint_load_start", "on_checkpoint_load_end", "on_data_init_start"),
        *("on_data_init_end", "on_train_start", "on_round_start"),
    ),
    "on_train_epoch_start": ("on_epoch_start",),
    "on_train_batch_start": (
        *("on_fetch_start", "on_fetch_end", "on_train_step_start", "on_forward_backward_start", "on_microbatch_start"),
    ),
    "training_step": ("on_forward_start", "on_forward_end", "on_loss_start"),
    "on_before_optimizer_step": ("on_microbatch_end", "on_forward_backward_end", "on_clip_gradients_start"),
    "configure_gradient_clipping": ("on_clip_gradients_end", "on_optimizer_step_start"),
    "on_train_batch_end": ("on_train_step_end", "on_log", "on_checkpoint_due"),
    "on_validation_start": ("on_eval_all_start", "on_eval_start"),
    "on_validation_batch_start": ("on_eval_step_start",),
    "validation_step": ("on_eval_forward_start", "on_eval_forward_end"),
    "on_validation_batch_end": ("on_eval_step_end",),
    "on_validation_end": ("on_eval_end", "on_eval_all_end", "on_log", "on_checkpoint_due"),
    "on_train_epoch_end": ("on_epoch_end", "on_checkpoint_due"),
    "save_checkpoint": ("on_checkpoint_save_start", "on_checkpoint_save_end", "on_checkpoint_published"),
    "on_train_end": ("on_round_end", "on_train_end", "on_run_end"),
    "on_test_start": (
        *("on_run_start", "on_checkpoint_load_start", "on_checkpoint_load_end"),
        *("on_data_init_start", "on_data_init_end", "on_test_start"),
    ),
    "on_test_batch_start": ("on_test_step_start",),
    "test_step": ("on_test_forward_start", "on_test_forward_end"),
    "on_test_batch_end": ("on_test_step_end",),
    "on_test_end": ("on_test_end", "on_log", "on_run_end"),
    "on_predict_start": (
        *("on_run_start", "on_checkpoint_load_start", "on_checkpoint_load_end"),
        *("on_data_init_start", "on_data_init_end", "on_predict_start"),
    ),
    "on_predict_batch_start": ("on_predict_step_start",),
    "predict_step": ("on_predict_forward_start", "on_predict_forward_end"),
    "on_predict_batch_end": ("on_predict_step_end",),
    "on_predict_end": ("on_predict_end", "on_run_end"),
    "on_exception": ("on_epoch_end", "on_round_end", "on_train_end", "on_preempt", "on_exception", "on_run_end"),
}
"""For each hook or method of Lightning, the events of callsheet that are fired there.

The other events come from `backward` and the optimizer. At `on_exception`, the lifecycle driver first ends the open spans.
"""
