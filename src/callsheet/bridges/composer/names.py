"""A copy of Composer's callback interface, which can be used without Composer: events, and base classes of callbacks and loggers.

The members of `Event` are in the order in which a run of Composer fires them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum
from typing import Any


class Event(StrEnum):
    """The events of Composer's loop. `Event.INIT` equals the string `"init"`, and also equals `INIT` of Composer's own `Event`."""

    INIT = "init"
    BEFORE_LOAD = "before_load"
    AFTER_LOAD = "after_load"
    FIT_START = "fit_start"
    ITERATION_START = "iteration_start"
    EPOCH_START = "epoch_start"
    BEFORE_DATALOADER = "before_dataloader"
    AFTER_DATALOADER = "after_dataloader"
    BATCH_START = "batch_start"
    BEFORE_TRAIN_BATCH = "before_train_batch"
    BEFORE_FORWARD = "before_forward"
    AFTER_FORWARD = "after_forward"
    BEFORE_LOSS = "before_loss"
    AFTER_LOSS = "after_loss"
    BEFORE_BACKWARD = "before_backward"
    AFTER_BACKWARD = "after_backward"
    AFTER_TRAIN_BATCH = "after_train_batch"
    BATCH_END = "batch_end"
    BATCH_CHECKPOINT = "batch_checkpoint"
    EPOCH_END = "epoch_end"
    EPOCH_CHECKPOINT = "epoch_checkpoint"
    ITERATION_END = "iteration_end"
    ITERATION_CHECKPOINT = "iteration_checkpoint"
    FIT_END = "fit_end"
    EVAL_BEFORE_ALL = "eval_before_all"
    EVAL_START = "eval_start"
    EVAL_BATCH_START = "eval_batch_start"
    EVAL_BEFORE_FORWARD = "eval_before_forward"
    EVAL_AFTER_FORWARD = "eval_after_forward"
    EVAL_BATCH_END = "eval_batch_end"
    EVAL_END = "eval_end"
    EVAL_AFTER_ALL = "eval_after_all"
    EVAL_STANDALONE_START = "eval_standalone_start"
    EVAL_STANDALONE_END = "eval_standalone_end"
    PREDICT_START = "predict_start"
    PREDICT_BATCH_START = "predict_batch_start"
    PREDICT_BEFORE_FORWARD = "predict_before_forward"
    PREDICT_AFTER_FORWARD = "predict_after_forward"
    PREDICT_BATCH_END = "predict_batch_end"
    PREDICT_END = "predict_end"

    @classmethod
    def _missing_(cls, value: object) -> Event | None:
        return cls._value2member_map_.get(str(value).lower()) if isinstance(value, str) else None  # type: ignore[return-value]

    @property
    def is_before_event(self) -> bool:
        """Whether the event is a start, such as `BATCH_START` or `BEFORE_LOSS`."""
        return self.value.startswith("before_") or "_before_" in self.value or self.value.endswith("_start")

    @property
    def is_after_event(self) -> bool:
        """Whether the event is an end, such as `BATCH_END` or `AFTER_LOSS`."""
        return self.value.startswith("after_") or "_after_" in self.value or self.value.endswith("_end")

    @property
    def is_eval(self) -> bool:
        """Whether the event belongs to an evaluation."""
        return self.value.startswith("eval")

    @property
    def is_predict(self) -> bool:
        """Whether the event belongs to a prediction."""
        return self.value.startswith("predict")


COMPOSER_EVENTS: Mapping[str, tuple[str, ...]] = {
    "on_run_start": ("init",),
    "on_checkpoint_load_start": ("before_load",),
    "on_checkpoint_load_end": ("after_load",),
    "on_train_start": ("fit_start",),
    "on_round_start": ("iteration_start",),
    "on_epoch_start": ("epoch_start",),
    "on_fetch_start": ("before_dataloader",),
    "on_fetch_end": ("after_dataloader",),
    "on_train_step_start": ("batch_start",),
    "on_forward_backward_start": ("before_train_batch",),
    "on_forward_start": ("before_forward",),
    "on_forward_end": ("after_forward",),
    "on_loss_start": ("before_loss",),
    "on_loss_end": ("after_loss",),
    "on_backward_start": ("before_backward",),
    "on_backward_end": ("after_backward",),
    "on_forward_backward_end": ("after_train_batch",),
    "on_train_step_end": ("batch_end",),
    "on_checkpoint_due": ("batch_checkpoint", "epoch_checkpoint", "iteration_checkpoint"),
    "on_epoch_end": ("epoch_end",),
    "on_round_end": ("iteration_end",),
    "on_train_end": ("fit_end",),
    "on_eval_all_start": ("eval_before_all", "eval_standalone_start"),
    "on_eval_start": ("eval_start",),
    "on_eval_step_start": ("eval_batch_start",),
    "on_eval_forward_start": ("eval_before_forward",),
    "on_eval_forward_end": ("eval_after_forward",),
    "on_eval_step_end": ("eval_batch_end",),
    "on_eval_end": ("eval_end",),
    "on_eval_all_end": ("eval_after_all", "eval_standalone_end"),
    "on_predict_start": ("predict_start",),
    "on_predict_step_start": ("predict_batch_start",),
    "on_predict_forward_start": ("predict_before_forward",),
    "on_predict_forward_end": ("predict_after_forward",),
    "on_predict_step_end": ("predict_batch_end",),
    "on_predict_end": ("predict_end",),
}
"""The events of Composer that correspond to each event of callsheet.

If several are listed for an event, only the one that fits the current boundary or kind of evaluation is fired. No event of
Composer is fired for `on_fetch_end` at the end of the data, for the end of an epoch or round that was left early, or for the
start of an epoch or round that is resumed after its first batch.
"""


class Callback:
    """The base class of Composer's callbacks. Override the methods of single events, or `run_event`, which is called for all events."""

    def run_event(self, event: Event, state: Any, logger: Any) -> None:
        """Called for every event. This implementation calls the method that has the event's name.

        Args:
            event: the event that is fired.
            state: Composer's State.
            logger: Composer's Logger.
        """
        getattr(self, event.value)(state, logger)

    def close(self, state: Any, logger: Any) -> None:
        """Called when the run is over, even if it failed.

        Args:
            state: Composer's State.
            logger: Composer's Logger.
        """

    def post_close(self) -> None:
        """Called when all callbacks have been closed."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this callback, for a checkpoint."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""


def _event_method(event: Event) -> Any:
    def method(self: Any, state: Any, logger: Any) -> None: ...

    method.__name__, method.__qualname__ = event.value, f"Callback.{event.value}"
    method.__doc__ = f"Called at `Event.{event.name}`."
    return method


for _event in Event:
    setattr(Callback, _event.value, _event_method(_event))


class LoggerDestination(Callback):
    """The base class of Composer's loggers: a callback that also receives what is logged."""

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        """Log the settings of the run.

        Args:
            hyperparameters: the settings by name.
        """

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Log metrics.

        Args:
            metrics: the values by name.
            step: the step at which they were measured; None: it is not known.
        """

    def log_table(self, columns: list[str], rows: list[list[Any]], name: str = "Table", step: int | None = None) -> None:
        """Log a table.

        Args:
            columns: the titles of the columns.
            rows: the rows, each a list of cells.
            name: the name of the table.
            step: the step at which it was logged; None: it is not known.
        """

    def log_images(
        self, images: Any, name: str = "Images", channels_last: bool = False, step: int | None = None, masks: Any = None,
        mask_class_labels: dict[int, str] | None = None, use_table: bool = True,
    ) -> None:  # fmt: skip
        """Log images.

        Args:
            images: one array or tensor, or a sequence of them.
            name: the name under which they are logged.
            channels_last: whether the last dimension of an image has the channels; otherwise it is the first.
            step: the step at which they were logged; None: it is not known.
            masks: masks over the images, by name; None: no masks.
            mask_class_labels: the names of the classes in the masks, by number.
            use_table: whether the images are logged as a table.
        """

    def upload_file(self, state: Any, remote_file_name: str, file_path: Any, *, overwrite: bool) -> None:
        """Upload a file.

        Args:
            state: Composer's State.
            remote_file_name: the name of the file in the destination.
            file_path: where the file is.
            overwrite: whether to replace a file of this name.
        """

    def can_upload_files(self) -> bool:
        """Return whether this logger can upload files with `upload_file`."""
        return False


def to_their_names(
    values: Mapping[str, float], evaluated: Sequence[str], train_metrics: Collection[str], losses: Collection[str]
) -> dict[str, float]:
    """Return the values of a metrics record under Composer's names.

    Args:
        values: the values by callsheet's names.
        evaluated: the names of the evaluated datasets.
        train_metrics: the names of the model's training metrics.
        losses: the names of the losses of a step, if there are several.
    """
    found = {}
    for name, value in values.items():
        family, _, rest = name.partition("/")
        if name == "train/loss":
            name = "loss/train/total"
        elif family == "train" and rest in train_metrics:
            name = f"metrics/{name}"
        elif family == "train" and rest in losses:
            name = f"loss/{name}"
        elif family in evaluated:
            name = f"metrics/{label_of_dataset(family)}/{rest}"
        elif family == "lr":
            name = "lr-" + rest.replace("/", "/group", 1)
        found[name] = value
    return found


def label_of_dataset(name: str) -> str:
    """Return Composer's label for an evaluated dataset: `eval` for callsheet's default name `validation`, otherwise `name`."""
    return "eval" if name == "validation" else name
