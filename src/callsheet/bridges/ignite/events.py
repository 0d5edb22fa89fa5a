"""Tables: which events of callsheet are fired at each event of Ignite's trainer and evaluators, and which are never fired."""

from __future__ import annotations

from collections.abc import Mapping

from ignite.engine import Events

from callsheet.core.lifecycle import events_within

FIRED_AT: Mapping[Events, tuple[str, ...]] = {
    Events.STARTED: (
        "on_run_start",
        "on_checkpoint_load_start",
        "on_checkpoint_load_end",
        "on_data_init_start",
        "on_data_init_end",
    ),
    Events.EPOCH_STARTED: ("on_train_start", "on_round_start", "on_epoch_start"),
    Events.GET_BATCH_STARTED: ("on_fetch_start",),
    Events.GET_BATCH_COMPLETED: ("on_fetch_end",),
    Events.ITERATION_STARTED: ("on_train_step_start", "on_microbatch_start"),
    Events.ITERATION_COMPLETED: ("on_microbatch_end", "on_train_step_end", "on_log", "on_checkpoint_due"),
    Events.TERMINATE_SINGLE_EPOCH: ("on_epoch_end",),
    Events.EPOCH_COMPLETED: ("on_epoch_end", "on_log", "on_checkpoint_due"),
    Events.INTERRUPT: (),
    Events.TERMINATE: (),
    Events.COMPLETED: ("on_round_end", "on_train_end", "on_run_end"),
    Events.EXCEPTION_RAISED: ("on_exception", "on_run_end"),
}
"""For each event of Ignite's trainer, the events of callsheet that are fired there.

The other events of a step, such as those of the forward pass, are not listed, because PyTorch hooks fire them.
"""

FIRED_AT_EVALUATION: Mapping[Events, tuple[str, ...]] = {
    Events.STARTED: ("on_eval_all_start", "on_eval_start"),
    Events.ITERATION_STARTED: ("on_eval_step_start",),
    Events.ITERATION_COMPLETED: ("on_eval_step_end",),
    Events.COMPLETED: ("on_eval_end", "on_eval_all_end"),
}
"""For each event of an Ignite evaluator, the events of callsheet that are fired there."""

NOT_FIRED = events_within("test", "predict")
"""Events of callsheet that the Ignite host never fires."""

EVALUATION_EVENTS = events_within("eval_all")
"""Events of callsheet that the Ignite host fires only if it has evaluators."""

CHECKPOINT_EVENTS = (*events_within("checkpoint_save"), "on_checkpoint_published")
"""Events of callsheet that the Ignite host fires only if it has a handler that writes checkpoints."""
