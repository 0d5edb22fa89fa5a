"""The lifecycle: one table of all events of a run, their order, and the context fields that are available at each event.

No other file lists event names or fields by hand. The `Callback` methods, `Event`, the spans, the tables in the docs, the bridges'
maps of event names and the expected results in the tests are generated from this table (`make generate`) or checked against it.

A span is a named part of a run with two events, `on_<span>_start` and `on_<span>_end`. A point is a single event, without a start
and an end. A span's `order` says what may occur directly inside it, as a regular expression over the names of spans and points:
`a b` is a then b, `a | b` either, `a?` at most one, `a*` any number, `a+` at least one. Points in `ANYWHERE_EVENTS` may occur
in any span.
"""

from __future__ import annotations

import re
from typing import NamedTuple

VERSION = "1.0"  # the major number changes if an event or field is removed or gets another meaning, or if the order changes


class Span(NamedTuple):
    """A named part of a run. `start` and `end` are the docstrings of the events that open and close the span.

    `order` is a regular expression over the names of the spans and points that may occur inside the span.
    """

    name: str
    start: str
    end: str
    order: str = ""

    @property
    def start_event(self) -> str:
        """The name of the event that opens the span."""
        return f"on_{self.name}_start"

    @property
    def end_event(self) -> str:
        """The name of the event that closes the span."""
        return f"on_{self.name}_end"


class Point(NamedTuple):
    """A single event that neither starts nor ends a span. `fired` is the docstring of the event."""

    name: str
    fired: str


class Field(NamedTuple):
    """A field of the context, which is the object that handlers receive.

    `windows` are pairs of events, both included, between which the field is available; no pairs mean that it is always available.
    `kind` says how the values on different ranks are related: `replicated` (the same on all), `local`, `reduced` (computed over
    the ranks) or `agreed` (agreed by the ranks). `writable` names the events at which a callback may replace the field's value.
    `kept_until` is the end of the window if a callback names the field in `keep_fields`.
    """

    name: str
    type: str
    meaning: str
    kind: str
    windows: tuple[tuple[str, str], ...] = ()
    writable: tuple[str, ...] = ()
    kept_until: str = ""


_SAVE_ORDER = "(on_checkpoint_due checkpoint_save?)?"
BOUNDARY_ORDER = f"(on_log? (eval_all on_log?)? {_SAVE_ORDER} | on_log? {_SAVE_ORDER} eval_all on_log? {_SAVE_ORDER})"
"""The spans and events that may occur after a step, an epoch or a round, as a regular expression. `on_log` comes first.

A checkpoint is saved after the evaluation, so that "best" includes its result. A checkpoint for resuming may also be saved before
the evaluation, so that it exists even if the evaluation fails.

A span may also begin with a boundary: a resumed run finishes the boundary at which its checkpoint was saved, if the evaluation
was still due there.
"""

SPANS: dict[str, Span] = {
    span.name: span
    for span in (
        Span(
            "run",
            "Called first, by the trainer's constructor. The run's name, folder and ranks are known.",
            "Called last, and exactly once, however the run ends. `ctx.run.outcome` says how it ended, and `ctx.run.outcome_reason` why.",
            "checkpoint_load? data_init? (train | test | predict | eval_all | on_log | on_checkpoint_due | checkpoint_save)*",
        ),
        Span(
            "checkpoint_load",
            "Called before the loop looks for a checkpoint to load. A callback may choose the checkpoint with `ctx.control.load(path)`.",
            "Called when the checkpoint has been loaded, except for the random states. `ctx.checkpoint` is None if there was none to load.",
        ),
        Span(
            "data_init",
            "Called when model and optimizer are ready and the checkpoint has been loaded. No data has been read yet.",
            "Called when the dataloaders have been made.",
        ),
        Span(
            "train",
            "Called when training begins. The model is in training mode.",
            "Called when training has finished, was stopped, or was preempted, but not when it failed.",
            f"((round {BOUNDARY_ORDER})* | {BOUNDARY_ORDER} (round {BOUNDARY_ORDER})*)",
        ),
        Span(
            "round",
            "Called before a round (a group of epochs). Most runs have one round.",
            "Called after the last epoch of a round, or when training stops within the round.",
            f"((epoch {BOUNDARY_ORDER})* | {BOUNDARY_ORDER} (epoch {BOUNDARY_ORDER})*)",
        ),
        Span(
            "epoch",
            "Called before an epoch (a pass over the training data), and again when a run resumes in the middle of an epoch.",
            "Called after an epoch (a pass over the training data), or when training stops within the epoch.",
            f"((fetch+ train_step {BOUNDARY_ORDER})* fetch* | {BOUNDARY_ORDER} (fetch+ train_step {BOUNDARY_ORDER})* fetch*)",
        ),
        Span(
            "fetch",
            "Called before the next batch is requested from the dataloader. A step may take several batches.",
            "Called when the batch is on the device. `ctx.batch` may be replaced; it is None when the data has run out.",
        ),
        Span(
            "train_step",
            "Called before one optimizer step over one global batch.",
            "Called when the optimizer and the scheduler have stepped. The gradients are still available, and are zeroed afterwards.",
            "forward_backward clip_gradients optimizer_step",
        ),
        Span(
            "forward_backward",
            "Called before the step's first microbatch.",
            "Called after the step's last microbatch. The gradients are complete and unscaled, and `ctx.loss` is the step's mean loss.",
            "microbatch+",
        ),
        Span(
            "microbatch",
            "Called before a microbatch's forward pass. `ctx.microbatch` may be replaced.",
            "Called after the microbatch's backward pass.",
            "forward loss backward",
        ),
        Span(
            "forward",
            "Called before the model is called on a microbatch.",
            "Called when the model has returned its outputs, which may be replaced.",
        ),
        Span(
            "loss",
            "Called before the loss is computed.",
            "Called when the microbatch's loss has been computed. `ctx.loss` may be replaced.",
        ),
        Span(
            "backward",
            "Called before the backward pass.",
            "Called when the microbatch's gradients have been added to each parameter's `.grad`.",
        ),
        Span(
            "clip_gradients",
            "Called before gradients are clipped, and also if clipping is off.",
            "Called when gradients have been clipped. `ctx.grad_norm` is their total norm before clipping, or None if it was not computed.",
        ),
        Span(
            "optimizer_step",
            "Called before `optimizer.step()`. `ctx.learning_rate` is the rate that this step uses.",
            "Called after `optimizer.step()` and before the scheduler steps. `ctx.step_skipped` says whether the step was skipped.",
        ),
        Span(
            "eval_all",
            "Called before the evaluations that are due. The model is in evaluation mode.",
            "Called after all evaluations that were due. The model is still in evaluation mode.",
            "eval+",
        ),
        Span(
            "eval",
            "Called before one named dataset is evaluated.",
            "Called after one named dataset has been evaluated and its losses and metrics have been aggregated.",
            "eval_step*",
        ),
        Span("eval_step", "Called before an evaluation batch.", "Called after an evaluation batch.", "eval_forward"),
        Span(
            "eval_forward",
            "Called before the model is called on an evaluation batch.",
            "Called when the model has returned its outputs, which may be replaced.",
        ),
        Span(
            "test",
            "Called before the first test batch. The model is in evaluation mode.",
            "Called after the last test batch, when the test losses have been aggregated.",
            "test_step*",
        ),
        Span("test_step", "Called before a test batch.", "Called after a test batch.", "test_forward"),
        Span(
            "test_forward",
            "Called before the model is called on a test batch.",
            "Called when the model has returned its outputs.",
        ),
        Span(
            "predict",
            "Called before the first prediction batch. The model is in evaluation mode.",
            "Called after the last prediction batch.",
            "predict_step*",
        ),
        Span("predict_step", "Called before a prediction batch.", "Called after a prediction batch.", "predict_forward"),
        Span(
            "predict_forward",
            "Called before the model is called on a prediction batch.",
            "Called when the model has returned its outputs.",
        ),
        Span(
            "checkpoint_save",
            "Called before a checkpoint is written. Its kind and path are known.",
            "Called when the checkpoint has been written. If saves run in the background, called when the state was copied, before it is written.",
        ),
    )
}

POINTS: dict[str, Point] = {
    point.name: point
    for point in (
        Point(
            "on_log",
            "Called every `log_interval`, and before and after an evaluation. `ctx.record` holds what was logged since the last `on_log`.",
        ),
        Point(
            "on_checkpoint_due",
            "Called after a step, epoch or round, and before an evaluation (`ctx.boundary` says which). Callbacks may request a checkpoint.",
        ),
        Point(
            "on_checkpoint_published", "Called when a checkpoint is durable and visible, perhaps many steps after it was saved."
        ),
        Point("on_preempt", "Called when a signal has preempted the run. A checkpoint is saved next, and then the run ends."),
        Point(
            "on_exception",
            "Called once, when an exception leaves the trainer. `ctx.span` names the innermost span that was open.",
        ),
    )
}

ANYWHERE_EVENTS = frozenset({"on_checkpoint_published", "on_preempt", "on_exception"})
"""The single events (events that neither start nor end a span) that may occur inside any span."""

_STEP_ENDS = {"eval": "on_eval_step_end", "test": "on_test_step_end", "predict": "on_predict_step_end"}
_EVALUATION_WINDOWS = tuple((f"on_{loop}_step_start", end) for loop, end in _STEP_ENDS.items())
_EVAL_OUTPUT_WINDOWS = tuple((f"on_{loop}_forward_end", end) for loop, end in _STEP_ENDS.items())
_CHECKPOINT_WINDOWS = tuple(
    (event, event) for event in ("on_checkpoint_load_end", "on_checkpoint_save_start", "on_checkpoint_save_end")
)

FIELDS: dict[str, Field] = {
    field.name: field
    for field in (
        Field("event", "Event | None", "the event that is being fired; None between events", "replicated"),
        Field(
            "run",
            "RunInfo",
            "the run's name, folder, config, number of restarts, outcome and reason; the ranks and the device of this process",
            "local",
        ),
        Field(
            "state",
            "TrainState",
            "how much training is completed (steps, epochs, samples, tokens, seconds), `max_duration`, and the completed fraction of it",
            "replicated",
        ),
        Field(
            "step",
            "int",
            "the number of the current optimizer step, from 1; between two steps, the number of the last step; 0 before the first step",
            "replicated",
        ),
        Field("epoch", "int", "the number of the current epoch, from 1; 0 before the first epoch", "replicated"),
        Field("model", "Any", "the model; a list of chunks if the loop has several", "local"),
        Field("user_state", "dict[str, Any]", "a dictionary that all callbacks of the run share; saved in checkpoints", "local"),
        Field("control", "Control", "the object with which callbacks request a stop, a save, an evaluation and so on", "agreed"),
        Field(
            "optimizer",
            "Any",
            "the optimizer",
            "local",
            (("on_data_init_start", "on_run_end"),),
        ),
        Field(
            "scheduler",
            "Any",
            "the learning-rate scheduler, or None",
            "local",
            (("on_data_init_start", "on_run_end"),),
        ),
        Field(
            "batch",
            "Any",
            "this rank's batch as the dataloader returns it, on the device; if a step uses several batches, the current batch; None when the data "
            "has run out",
            "local",
            (("on_fetch_end", "on_train_step_end"), *_EVALUATION_WINDOWS),
            ("on_fetch_end",),
        ),
        Field(
            "microbatch",
            "Any",
            "the current part of the batch",
            "local",
            (("on_microbatch_start", "on_microbatch_end"),),
            ("on_microbatch_start",),
        ),
        Field(
            "outputs",
            "Any",
            'what the model returned; available to the step\'s end if a callback declares `keep_fields = ("outputs",)`',
            "local",
            (("on_forward_end", "on_loss_end"), *_EVAL_OUTPUT_WINDOWS),
            ("on_forward_end", "on_eval_forward_end"),
            kept_until="on_train_step_end",
        ),
        Field(
            "loss",
            "Tensor",
            "the loss, a scalar tensor on the device: until `on_microbatch_end` that of the microbatch; from `on_forward_backward_end` the mean over the step, detached",
            "local",
            (("on_loss_end", "on_microbatch_end"), ("on_forward_backward_end", "on_train_step_end")),
            ("on_loss_end",),
        ),
        Field(
            "loss_dict",
            "dict[str, Tensor]",
            "the step's losses by name, scalar tensors",
            "local",
            (("on_train_step_end", "on_train_step_end"),),
        ),
        Field(
            "grad_norm",
            "Tensor | None",
            "total gradient norm before clipping, a scalar tensor; None if it was not computed",
            "replicated",
            (("on_clip_gradients_end", "on_train_step_end"),),
        ),
        Field(
            "learning_rate",
            "float",
            "the learning rate of the first parameter group in this step; a scalar tensor if the optimizer keeps one, None if the optimizer has no learning rate",
            "replicated",
            (("on_optimizer_step_start", "on_train_step_end"),),
        ),
        Field(
            "step_skipped",
            "bool",
            "whether the optimizer step was skipped (inf or NaN gradients under loss scaling)",
            "replicated",
            (("on_optimizer_step_end", "on_train_step_end"),),
        ),
        Field(
            "record",
            "MetricsRecord",
            "the metrics record: what was logged since the last log boundary, as floats, with speeds and memory",
            "reduced",
            (("on_log", "on_log"),),
        ),
        Field(
            "boundary",
            "Boundary",
            "the boundary at which a checkpoint may be requested: `step`, `epoch`, `round` or `before_eval`",
            "replicated",
            (("on_checkpoint_due", "on_checkpoint_due"),),
        ),
        Field(
            "eval_name",
            "str",
            "the evaluator's name; `validation` by default",
            "replicated",
            (("on_eval_start", "on_eval_end"),),
        ),
        Field(
            "standalone",
            "bool",
            "whether your program called the evaluation (`trainer.evaluate()`), not the training loop",
            "replicated",
            (("on_eval_all_start", "on_eval_all_end"),),
        ),
        Field(
            "eval_losses",
            "dict[str, Tensor]",
            "the mean losses on the dataset by name, scalar tensors",
            "reduced",
            (("on_eval_end", "on_eval_end"), ("on_test_end", "on_test_end")),
        ),
        Field(
            "eval_results",
            "dict[str, dict[str, float]]",
            "the losses and metrics by dataset name",
            "reduced",
            (("on_eval_all_end", "on_eval_all_end"),),
        ),
        Field(
            "checkpoint",
            "CheckpointInfo | None",
            "path, step, epoch, kind, losses and size of the checkpoint, and who requested it; None when nothing was loaded",
            "replicated",
            (*_CHECKPOINT_WINDOWS, ("on_checkpoint_published", "on_checkpoint_published")),
        ),
        Field("exception", "BaseException", "the exception that was raised", "local", (("on_exception", "on_exception"),)),
        Field(
            "span",
            "str",
            "the innermost span that was open when the exception was raised",
            "local",
            (("on_exception", "on_exception"),),
        ),
    )
}


def names_in(order: str) -> list[str]:
    """Return the names of spans and single events in the regular expression `order`, each once, in the order of first occurrence."""
    return list(dict.fromkeys(re.findall(r"[a-z_]+", order)))


def canonical_order() -> tuple[str, ...]:
    """Return all events, each once, in the order in which they occur in a run.

    The points of `ANYWHERE_EVENTS`, which may occur at any time, come just before `on_run_end`.
    """
    events: dict[str, None] = {}

    def walk(span: Span) -> None:
        events[span.start_event] = None
        for name in names_in(span.order):
            if name in POINTS:
                events.setdefault(name)
            elif SPANS[name].start_event not in events:
                walk(SPANS[name])
        events[span.end_event] = None

    walk(SPANS["run"])
    end = SPANS["run"].end_event
    del events[end]
    return (*events, *(name for name in POINTS if name not in events), end)


EVENTS: tuple[str, ...] = canonical_order()
"""The names of all events, in the order in which they occur in a run."""


def events_within(*spans: str) -> tuple[str, ...]:
    """Return the events of these spans and of all spans inside them, in the order in which the events occur in a run."""
    found: set[str] = set()
    for name in spans:
        if name in POINTS:
            found.add(name)
        else:
            found |= {SPANS[name].start_event, SPANS[name].end_event, *events_within(*names_in(SPANS[name].order))}
    return tuple(event for event in EVENTS if event in found)


SPAN_OF: dict[str, str] = {event: s.name for s in SPANS.values() for event in (s.start_event, s.end_event)}
"""For each start event or end event, the name of its span. Events that neither start nor end a span are left out."""


def description(event: str) -> str:
    """Return a sentence that says when `event` is fired."""
    if event in POINTS:
        return POINTS[event].fired
    span = SPANS[SPAN_OF[event]]
    return span.start if event == span.start_event else span.end


def fields_available(event: str) -> tuple[str, ...]:
    """Return the names of the fields that are available at `event` but not at every event, in the order of `FIELDS`.

    At a point of `ANYWHERE_EVENTS`, the fields of the surrounding span are available too, but are not in the result.
    """
    return tuple(
        field.name
        for field in FIELDS.values()
        if field.windows
        and (any(event in window for window in field.windows) if event in ANYWHERE_EVENTS else is_available(field.name, event))
    )


ALWAYS_AVAILABLE: tuple[str, ...] = tuple(field.name for field in FIELDS.values() if not field.windows)
"""The fields that are available at every event."""


def tree() -> str:
    """Return the lifecycle drawn as a tree, with one line for each span and each event that belongs to no span.

    A span or event that may occur at several boundaries is drawn only once.
    """
    lines: list[str] = []
    drawn: set[str] = set()

    def draw(name: str, depth: int) -> None:
        drawn.add(name)
        lines.append("   " * depth + name)
        for child in names_in(SPANS[name].order) if name in SPANS else ():
            if child not in drawn:
                draw(child, depth + 1)

    draw("run", 0)
    return "\n".join([*lines, "anywhere: " + ", ".join(name for name in POINTS if name in ANYWHERE_EVENTS)])


_PLACE_OF_EVENT = {event: place for place, event in enumerate(EVENTS)}


def is_available(field: str, event: str) -> bool:
    """Return whether the context's field `field` is available when `event` is fired, according to the lifecycle table."""
    windows = FIELDS[field].windows
    return not windows or any(
        _PLACE_OF_EVENT[opens] <= _PLACE_OF_EVENT[event] <= _PLACE_OF_EVENT[closes] for opens, closes in windows
    )
