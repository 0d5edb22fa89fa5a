"""The events of the lifecycle as an enumeration. Each member equals the event's name, such as `"on_log"`, as a string."""

from __future__ import annotations

from enum import StrEnum

from callsheet.core.lifecycle import EVENTS
from callsheet.errors import UnknownEventError, did_you_mean


class Event(StrEnum):
    """The names of the events. Each member equals a string: `Event.TRAIN_STEP_END == "on_train_step_end"`."""

    # generated: events
    RUN_START = "on_run_start"
    CHECKPOINT_LOAD_START = "on_checkpoint_load_start"
    CHECKPOINT_LOAD_END = "on_checkpoint_load_end"
    DATA_INIT_START = "on_data_init_start"
    DATA_INIT_END = "on_data_init_end"
    TRAIN_START = "on_train_start"
    ROUND_START = "on_round_start"
    EPOCH_START = "on_epoch_start"
    FETCH_START = "on_fetch_start"
    FETCH_END = "on_fetch_end"
    TRAIN_STEP_START = "on_train_step_start"
    FORWARD_BACKWARD_START = "on_forward_backward_start"
    MICROBATCH_START = "on_microbatch_start"
    FORWARD_START = "on_forward_start"
    FORWARD_END = "on_forward_end"
    LOSS_START = "on_loss_start"
    LOSS_END = "on_loss_end"
    BACKWARD_START = "on_backward_start"
    BACKWARD_END = "on_backward_end"
    MICROBATCH_END = "on_microbatch_end"
    FORWARD_BACKWARD_END = "on_forward_backward_end"
    CLIP_GRADIENTS_START = "on_clip_gradients_start"
    CLIP_GRADIENTS_END = "on_clip_gradients_end"
    OPTIMIZER_STEP_START = "on_optimizer_step_start"
    OPTIMIZER_STEP_END = "on_optimizer_step_end"
    TRAIN_STEP_END = "on_train_step_end"
    LOG = "on_log"
    EVAL_ALL_START = "on_eval_all_start"
    EVAL_START = "on_eval_start"
    EVAL_STEP_START = "on_eval_step_start"
    EVAL_FORWARD_START = "on_eval_forward_start"
    EVAL_FORWARD_END = "on_eval_forward_end"
    EVAL_STEP_END = "on_eval_step_end"
    EVAL_END = "on_eval_end"
    EVAL_ALL_END = "on_eval_all_end"
    CHECKPOINT_DUE = "on_checkpoint_due"
    CHECKPOINT_SAVE_START = "on_checkpoint_save_start"
    CHECKPOINT_SAVE_END = "on_checkpoint_save_end"
    EPOCH_END = "on_epoch_end"
    ROUND_END = "on_round_end"
    TRAIN_END = "on_train_end"
    TEST_START = "on_test_start"
    TEST_STEP_START = "on_test_step_start"
    TEST_FORWARD_START = "on_test_forward_start"
    TEST_FORWARD_END = "on_test_forward_end"
    TEST_STEP_END = "on_test_step_end"
    TEST_END = "on_test_end"
    PREDICT_START = "on_predict_start"
    PREDICT_STEP_START = "on_predict_step_start"
    PREDICT_FORWARD_START = "on_predict_forward_start"
    PREDICT_FORWARD_END = "on_predict_forward_end"
    PREDICT_STEP_END = "on_predict_step_end"
    PREDICT_END = "on_predict_end"
    CHECKPOINT_PUBLISHED = "on_checkpoint_published"
    PREEMPT = "on_preempt"
    EXCEPTION = "on_exception"
    RUN_END = "on_run_end"
    # end of generated: events


_EVENT_OF_NAME = {event.value: event for event in Event}


def as_event(name: str) -> Event:
    """Return the member of `Event` for an event's name, such as `"on_log"`.

    Raises:
        UnknownEventError: there is no such event; the message suggests a similar name.
    """
    try:
        return _EVENT_OF_NAME[name]
    except KeyError:
        raise UnknownEventError(f"unknown event {name!r}{event_hint(name)}") from None


def event_hint(name: str) -> str:
    """Return `; did you mean 'on_x'?` for a name that is misspelled or from another framework; `""` if no event is similar."""
    from callsheet.core import familiar_names  # imported here, because only error messages need this module

    meant = familiar_names.EVENTS.get(name)
    return f"; did you mean {meant!r}?" if meant else did_you_mean(name, EVENTS)
