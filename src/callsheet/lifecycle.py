"""The lifecycle: the one table of what a training run tells, in which order, and what can be read meanwhile.

Nothing else lists event names or fields by hand: the `Callback` methods, `Event`, the spans, the docs' tables, the bridges' maps
and the tests' oracles are made from this table (`make generate`) or checked against it.

A span is a named stretch of a run, told by two events, `on_<span>_start` and `on_<span>_end`. A point is one event. A span's
`order` says what may stand directly inside it, in the notation of regular expressions over the names of spans and points:
`a b` is a then b, `a | b` either, `a?` at most one, `a*` any number, `a+` at least one. Points in `ANYWHERE` may stand in any span.
"""

from __future__ import annotations

import re
from typing import NamedTuple

VERSION = "1.0"  # the major number moves when an event, a field or an order is taken away or changes its meaning


class Span(NamedTuple):
    """A stretch of a run; `start` and `end` say when its two events are told, `order` what stands inside."""

    name: str
    start: str
    end: str
    order: str = ""

    @property
    def start_event(self) -> str:
        """The event that opens the span."""
        return f"on_{self.name}_start"

    @property
    def end_event(self) -> str:
        """The event that closes the span."""
        return f"on_{self.name}_end"


class Point(NamedTuple):
    """A single event, told between others."""

    name: str
    told: str


class Field(NamedTuple):
    """A field of the context.

    `windows` are pairs of events, both included, between which it can be read; none means always. `kind` says how the ranks'
    values relate: `replicated` (the same everywhere), `local`, `reduced` (computed over the ranks) or `agreed`. `writable` names
    the events at which a callback may replace it. `kept_until` is how far the window reaches when a listener declares `keep_fields`.
    """

    name: str
    type: str
    meaning: str
    kind: str
    windows: tuple[tuple[str, str], ...] = ()
    writable: tuple[str, ...] = ()
    kept_until: str = ""


_SAVE = "(on_checkpoint_due checkpoint_save?)?"
BOUNDARY = f"(on_log? (eval_all on_log?)? {_SAVE} | on_log? {_SAVE} eval_all on_log? {_SAVE})"
"""What may stand after a step, an epoch or a round: the record first; saving after the evaluation, so that "best" is not stale, and,
for a resume checkpoint that should not wait for a risky evaluation, before it as well.

It may also come first in a part: a resumed run finishes the boundary whose evaluation was still due in its checkpoint."""

SPANS: dict[str, Span] = {
    span.name: span
    for span in (
        Span(
            "run",
            "First of all, told by the trainer's constructor: the run's name, folder and ranks are known.",
            "Last of all, exactly once, on every way out; `ctx.run.outcome` says how the run ended, and `ctx.run.outcome_reason` why.",
            "checkpoint_load? data_init? (train | test | predict | eval_all | on_log | on_checkpoint_due | checkpoint_save)*",
        ),
        Span(
            "checkpoint_load",
            "Before a checkpoint is looked for; `ctx.control.load(path)` may name one.",
            "All but the random states is restored, or there was nothing to load (`ctx.checkpoint` is None).",
        ),
        Span(
            "data_init",
            "Model, optimizer and checkpoint are ready; dataset input may begin from here, not before.",
            "The dataloaders exist.",
        ),
        Span(
            "train",
            "The model is in training mode; the first round follows.",
            "Training has finished, was stopped, or was preempted; not told when it failed.",
            f"((round {BOUNDARY})* | {BOUNDARY} (round {BOUNDARY})*)",
        ),
        Span(
            "round",
            "Before a group of epochs; most runs have one round.",
            "After the group's last epoch, or when training stops in the midst of it.",
            f"((epoch {BOUNDARY})* | {BOUNDARY} (epoch {BOUNDARY})*)",
        ),
        Span(
            "epoch",
            "Before a pass over the training data; told again when a resumed run enters the middle of one.",
            "After the pass, or when training stops in the midst of it.",
            f"((fetch+ train_step {BOUNDARY})* fetch* | {BOUNDARY} (fetch+ train_step {BOUNDARY})* fetch*)",
        ),
        Span(
            "fetch",
            "Before the next batch is asked for; a step may take several.",
            "The batch is on the device and may be replaced; at exhaustion `ctx.batch` is None.",
        ),
        Span(
            "train_step",
            "Before one optimizer step over one global batch.",
            "The parameters and the scheduler have moved; gradients are still there, and zeroed afterwards.",
            "forward_backward clip_gradients optimizer_step",
        ),
        Span(
            "forward_backward",
            "Before the step's first microbatch.",
            "All microbatches are through; gradients are complete and unscaled; `ctx.loss` is the step's mean.",
            "microbatch+",
        ),
        Span(
            "microbatch",
            "Before a microbatch's forward; it may be replaced.",
            "After its backward.",
            "forward loss backward",
        ),
        Span("forward", "Before the model is called.", "The model's outputs are there and may be replaced."),
        Span("loss", "Before the loss is computed.", "The microbatch's loss is there and may be replaced."),
        Span("backward", "Before the backward pass.", "The microbatch's gradients have been added."),
        Span(
            "clip_gradients",
            "Before gradients are clipped, whether or not they will be.",
            "Gradients are clipped; their total norm before it is known, where it was computed.",
        ),
        Span(
            "optimizer_step",
            "Before `optimizer.step()`; the learning rate of this step is known.",
            "After `optimizer.step()` and before the scheduler moves; whether the step was skipped is known.",
        ),
        Span(
            "eval_all",
            "The model is in evaluation mode; the evaluators that are due follow.",
            "All evaluators are through; the model is still in evaluation mode.",
            "eval+",
        ),
        Span("eval", "Before one named dataset is evaluated.", "Its losses and metrics are aggregated.", "eval_step*"),
        Span("eval_step", "Before an evaluation batch.", "After an evaluation batch.", "eval_forward"),
        Span("eval_forward", "Before the model is called.", "The model's outputs are there and may be replaced."),
        Span("test", "The model is in evaluation mode.", "The test losses are aggregated.", "test_step*"),
        Span("test_step", "Before a test batch.", "After a test batch.", "test_forward"),
        Span("test_forward", "Before the model is called.", "The model's outputs are there."),
        Span("predict", "The model is in evaluation mode.", "All predictions are made.", "predict_step*"),
        Span("predict_step", "Before a prediction batch.", "After a prediction batch.", "predict_forward"),
        Span("predict_forward", "Before the model is called.", "The model's outputs are there."),
        Span(
            "checkpoint_save",
            "Before a checkpoint is written; its kind and path are known.",
            "The training thread goes on: everything is written, or, when saving is asynchronous, copied.",
        ),
    )
}

POINTS: dict[str, Point] = {
    point.name: point
    for point in (
        Point(
            "on_log",
            "At a log boundary, and before and after an evaluation: `ctx.record` holds what was logged since the last one.",
        ),
        Point("on_checkpoint_due", "At a boundary where a checkpoint may be asked for; `ctx.boundary` says which."),
        Point("on_checkpoint_published", "A checkpoint is durable and visible, perhaps many steps after it was saved."),
        Point("on_preempt", "A signal asked the run to make way: a checkpoint follows, then the end."),
        Point("on_exception", "Once, when an exception leaves the trainer, in the span that was open."),
    )
}

ANYWHERE = frozenset({"on_checkpoint_published", "on_preempt", "on_exception"})
"""Points that may stand in any span."""

_STEP_ENDS = {"eval": "on_eval_step_end", "test": "on_test_step_end", "predict": "on_predict_step_end"}
_EVALUATION = tuple((f"on_{loop}_step_start", end) for loop, end in _STEP_ENDS.items())
_EVAL_OUTPUTS = tuple((f"on_{loop}_forward_end", end) for loop, end in _STEP_ENDS.items())
_CHECKPOINT = tuple((event, event) for event in ("on_checkpoint_load_end", "on_checkpoint_save_start", "on_checkpoint_save_end"))

FIELDS: dict[str, Field] = {
    field.name: field
    for field in (
        Field("event", "Event | None", "the event being told, restored after a nested one; None between events", "replicated"),
        Field(
            "run",
            "RunInfo",
            "name, folder, config, restart count, outcome and its reason; ranks and device, which are this process's",
            "local",
        ),
        Field("state", "TrainState", "timestamps of what is completed, `max_duration`, elapsed fraction", "replicated"),
        Field("step", "int", "the optimizer step in hand, from 1; between steps the last one; 0 before the first", "replicated"),
        Field("epoch", "int", "the epoch in hand, from 1; 0 before the first", "replicated"),
        Field("model", "Any", "the model; a list of chunks where the host has several", "local"),
        Field("user_state", "dict[str, Any]", "shared between callbacks for the run; saved in checkpoints", "local"),
        Field("control", "Control", "what callbacks may ask of the loop", "agreed"),
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
            "this rank's batch as the dataloader gives it, on the device; where a step takes several, the one in hand; None when the data "
            "has run out",
            "local",
            (("on_fetch_end", "on_train_step_end"), *_EVALUATION),
            ("on_fetch_end",),
        ),
        Field(
            "microbatch",
            "Any",
            "the part of the batch in hand",
            "local",
            (("on_microbatch_start", "on_microbatch_end"),),
            ("on_microbatch_start",),
        ),
        Field(
            "outputs",
            "Any",
            'what the model returned; to the step\'s end where a listener declares `keep_fields = ("outputs",)`',
            "local",
            (("on_forward_end", "on_loss_end"), *_EVAL_OUTPUTS),
            ("on_forward_end", "on_eval_forward_end"),
            kept_until="on_train_step_end",
        ),
        Field(
            "loss",
            "Any",
            "scalar tensor on the device: the microbatch's; from `on_forward_backward_end` the step's mean, detached",
            "local",
            (("on_loss_end", "on_microbatch_end"), ("on_forward_backward_end", "on_train_step_end")),
            ("on_loss_end",),
        ),
        Field(
            "loss_dict",
            "dict[str, Any]",
            "the step's losses by name, scalar tensors",
            "local",
            (("on_train_step_end", "on_train_step_end"),),
        ),
        Field(
            "grad_norm",
            "Any",
            "total gradient norm before clipping, a scalar tensor; None where it was not computed",
            "replicated",
            (("on_clip_gradients_end", "on_train_step_end"),),
        ),
        Field(
            "learning_rate",
            "float",
            "the first parameter group's, as the step uses it; a scalar tensor where the optimizer keeps one",
            "replicated",
            (("on_optimizer_step_start", "on_train_step_end"),),
        ),
        Field(
            "step_skipped",
            "bool",
            "the optimizer step was skipped (inf or NaN gradients under loss scaling)",
            "replicated",
            (("on_optimizer_step_end", "on_train_step_end"),),
        ),
        Field(
            "record",
            "MetricsRecord",
            "step and floats: what was logged since the last boundary, with speeds and memory",
            "reduced",
            (("on_log", "on_log"),),
        ),
        Field(
            "boundary",
            "str",
            "which boundary: `step`, `epoch`, `round` or `before_eval`",
            "replicated",
            (("on_checkpoint_due", "on_checkpoint_due"),),
        ),
        Field(
            "eval_name",
            "str",
            "the evaluator's name; `validation` where nobody named it",
            "replicated",
            (("on_eval_start", "on_eval_end"),),
        ),
        Field(
            "standalone",
            "bool",
            "the evaluation was called by hand, not by the training loop",
            "replicated",
            (("on_eval_all_start", "on_eval_all_end"),),
        ),
        Field(
            "eval_losses",
            "dict[str, Any]",
            "aggregated losses of the dataset, scalar tensors",
            "reduced",
            (("on_eval_end", "on_eval_end"), ("on_test_end", "on_test_end")),
        ),
        Field(
            "eval_results",
            "dict[str, dict[str, float]]",
            "metrics by dataset name",
            "reduced",
            (("on_eval_all_end", "on_eval_all_end"),),
        ),
        Field(
            "checkpoint",
            "CheckpointInfo | None",
            "path, step, epoch, kind, losses and size of the checkpoint, and who asked for it; None when nothing was loaded",
            "replicated",
            (*_CHECKPOINT, ("on_checkpoint_published", "on_checkpoint_published")),
        ),
        Field("exception", "BaseException", "what was raised", "local", (("on_exception", "on_exception"),)),
        Field("span", "str", "the innermost span that was open when it was raised", "local", (("on_exception", "on_exception"),)),
    )
}


def names_in(order: str) -> list[str]:
    """The names of spans and points that an `order` mentions, each once, as they first appear."""
    return list(dict.fromkeys(re.findall(r"[a-z_]+", order)))


def canonical_order() -> tuple[str, ...]:
    """Every event once, as a run with one of everything tells them; the points of `ANYWHERE` stand last but one."""
    told: dict[str, None] = {}

    def walk(span: Span) -> None:
        told[span.start_event] = None
        for name in names_in(span.order):
            if name in POINTS:
                told.setdefault(name)
            elif SPANS[name].start_event not in told:
                walk(SPANS[name])
        told[span.end_event] = None

    walk(SPANS["run"])
    end = SPANS["run"].end_event
    del told[end]
    return (*told, *(name for name in POINTS if name not in told), end)


EVENTS: tuple[str, ...] = canonical_order()
"""Every event, in canonical order."""

SPAN_OF: dict[str, str] = {event: s.name for s in SPANS.values() for event in (s.start_event, s.end_event)}
"""The span that a start or end event belongs to; points are not in it."""


def description(event: str) -> str:
    """When `event` is told, in a sentence."""
    if event in POINTS:
        return POINTS[event].told
    span = SPANS[SPAN_OF[event]]
    return span.start if event == span.start_event else span.end


def fields_available(event: str) -> tuple[str, ...]:
    """The fields that can be read at `event`, those of every event left out, in the table's order.

    The points of `ANYWHERE` add what was already readable where they stand.
    """
    at = EVENTS.index(event)
    return tuple(
        field.name
        for field in FIELDS.values()
        if any(
            (event in (opens, closes)) if event in ANYWHERE else (EVENTS.index(opens) <= at <= EVENTS.index(closes))
            for opens, closes in field.windows
        )
    )


ALWAYS: tuple[str, ...] = tuple(field.name for field in FIELDS.values() if not field.windows)
"""The fields that every event tells."""


def tree() -> str:
    """The lifecycle drawn as a tree, one span or point a line; what stands at several boundaries is drawn once."""
    lines: list[str] = []
    drawn: set[str] = set()

    def draw(name: str, depth: int) -> None:
        drawn.add(name)
        lines.append("   " * depth + name)
        for child in names_in(SPANS[name].order) if name in SPANS else ():
            if child not in drawn:
                draw(child, depth + 1)

    draw("run", 0)
    return "\n".join([*lines, "anywhere: " + ", ".join(name for name in POINTS if name in ANYWHERE)])


_PLACE = {event: place for place, event in enumerate(EVENTS)}


def is_available(field: str, event: str) -> bool:
    """Whether the lifecycle says that the field can be read at the event."""
    windows = FIELDS[field].windows
    return not windows or any(_PLACE[opens] <= _PLACE[event] <= _PLACE[closes] for opens, closes in windows)
