"""Logs a run as an OpenTelemetry trace."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

from callsheet.core.callback import one_of
from callsheet.core.context import Context
from callsheet.core.costs import Window
from callsheet.core.lifecycle import SPANS
from callsheet.core.optional import load
from callsheet.core.run_state import Outcome
from callsheet.errors import ConfigError, text_of
from callsheet.loggers.support.opentelemetry_facts import about, attribute, instrument
from callsheet.loggers.support.tracker import Opened, Tracker, check_no_secret

Steps = Literal["none", "sampled", "all"]
STEP_CHOICES: tuple[Steps, ...] = get_args(Steps)

_ALWAYS_LOGGED_SPANS = ("data_init", "train", "epoch", "eval_all", "eval", "test", "predict", "checkpoint_save")
_STEP_SPANS = tuple(name for name in SPANS if name not in {*_ALWAYS_LOGGED_SPANS, "run", "checkpoint_load", "round"})
_MAX_SLICES = 1000  # log at most this many spans of a timeline, because the SDK's queue holds only 2048
_PACKAGES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")


class OpenTelemetryLogger(Tracker):
    """Log a run as an OpenTelemetry trace with nested spans: `run`, `train`, `epoch`, `eval_all`, `checkpoint_save` and others.

    A metrics record is logged as a span `log` of zero length, with the values as attributes. If the application has set a
    `MeterProvider`, each value is also a gauge. A span becomes visible when it has ended, so `run` is visible last.
    Hyperparameters are attributes of `run` with names `callsheet.config.<name>`. The outcome is the attribute `callsheet.outcome`
    and the status; an exception is an event of the span in which it was raised. Images and tables are not logged.

    A resume continues the same trace: the new process's `run` is a child of the first process's `run`. Only the first rank logs
    spans.

    If the application has set a `TracerProvider` and no endpoint is given, the logger uses that provider and leaves it open.
    Otherwise a thread sends spans as OTLP over HTTP. Training does not wait for the collector, except for up to `timeout` seconds
    when the run ends. The OpenTelemetry package itself reads headers, certificates and other settings from
    `OTEL_EXPORTER_OTLP_...`.

    Args:
        endpoint: the URL of the collector, such as `http://localhost:4318`; None uses the application's provider or, if there is
            none, `OTEL_EXPORTER_OTLP_ENDPOINT`.
        service_name: the program's name; None uses `OTEL_SERVICE_NAME`, or `callsheet`. The application's provider ignores this
            name.
        steps: which steps are logged. `sampled`: some groups of consecutive steps, with all spans and callbacks inside them, at
            no cost for other steps. `all`: every step, with all spans inside it, which costs time at each step. `none`: no steps.
        timeout: the limit in seconds for one request, and for the wait at the run's end.

    Raises:
        ConfigError: `steps` is unknown, the endpoint has a password, or the timeout is not above zero.
        MissingPackage: the SDK or its OTLP exporter is not installed.
    """

    # Run the handlers on the training thread, because spans need the times and the current span of the training thread.
    lane = "inline"
    package = "opentelemetry"
    extra = "opentelemetry"

    def __init__(
        self, *, endpoint: str | None = None, service_name: str | None = None, steps: Steps = "sampled", timeout: float = 5.0
    ) -> None:
        one_of("value of steps", steps, STEP_CHOICES)
        check_no_secret("endpoint", endpoint, "OTEL_EXPORTER_OTLP_HEADERS in the environment")
        if not timeout > 0:
            raise ConfigError(f"timeout={timeout!r} must be above zero")
        super().__init__()
        for package in _PACKAGES:
            if not _is_there(package):
                load(package, extra=self.extra, wanted_by=type(self).__name__)
        self.endpoint = endpoint
        self.service_name = service_name
        self.steps = steps
        self.timeout = timeout
        self._tracer: Any = None
        self._own: Any = None  # the provider that this logger made; None if it uses the application's provider
        self._open_spans: list[tuple[str, Any]] = []  # the OpenTelemetry spans that have not ended, outermost first
        self._gauges: dict[str, Any] = {}
        self._run_began = self._load_began = 0
        # Handle the events of steps only if all steps are logged.
        for name in (*_ALWAYS_LOGGED_SPANS, *(_STEP_SPANS if steps == "all" else ())):
            setattr(self, SPANS[name].start_event, partial(self._begin, name))
            setattr(self, SPANS[name].end_event, partial(self._end, name))

    def on_run_start(self, ctx: Context) -> None:
        """Store the run's start time. The trace begins later, because the checkpoint may name an earlier trace to continue."""
        self._run_began = time.time_ns()

    def on_checkpoint_load_start(self, ctx: Context) -> None:
        self._load_began = time.time_ns()

    def on_checkpoint_load_end(self, ctx: Context) -> None:
        """Begin a new trace or, in a resumed run, continue the trace whose id is in the checkpoint."""
        super().on_checkpoint_load_end(ctx)
        self._span("checkpoint_load", about(ctx), self._load_began).end()

    def on_checkpoint_published(self, ctx: Context) -> None:
        """Log that a checkpoint is complete on the disk. If it is written in the background, that may be long after the save began."""
        self._point("checkpoint_published", about(ctx))

    def on_preempt(self, ctx: Context) -> None:
        self._point("preempt", about(ctx))

    def on_exception(self, ctx: Context) -> None:
        """Log the exception in the span in which it was raised, and set the status of all open spans to ERROR."""
        if self.is_open and (error := ctx.exception) is not None:
            self._open_spans[-1][1].record_exception(error, attributes={"callsheet.span": ctx.span})
            self._status("ERROR", f"{type(error).__name__}: {text_of(error)}"[:5000])

    def log_file(self, ctx: Context, name: str, path: Path) -> None:
        self._point("file", {**about(ctx), "callsheet.file": name, "callsheet.path": str(path)})

    def log_timeline(self, ctx: Context, window: Window) -> None:
        """Log a timeline of a few consecutive steps as nested spans."""
        if not self.is_open or self.steps != "sampled":
            return
        began, ended = round(window.began * 1e9), round((window.began + window.seconds) * 1e9)
        facts = {"callsheet.first_step": window.first_step, "callsheet.last_step": window.last_step}
        steps = self._span("steps", facts, began)
        steps.end(ended)
        around = [(ended, steps)]
        for each in [part for part in window.slices if part.callback or part.name in _STEP_SPANS][:_MAX_SLICES]:
            start = began + round(each.begin * 1e9)
            end = start + round(each.seconds * 1e9)
            while len(around) > 1 and start >= around[-1][0]:
                around.pop()
            name = f"{each.callback}.{each.name}" if each.callback else each.name
            span = self._span(name, {"callsheet.step": each.step}, start, within=around[-1][1])
            span.end(end)
            around.append((end, span))

    # --- methods of the base class `Tracker` that a logger must implement ---

    def _open(self, ctx: Context, run_id: str | None) -> Opened:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        from callsheet.loggers.support.opentelemetry_provider import provider_for, tracer_of

        provider, self._own = provider_for(self.endpoint, self.service_name, self.timeout)
        self._tracer, self._open_spans, self._gauges = tracer_of(provider), [], {}
        before = TraceContextTextMapPropagator().extract({"traceparent": run_id}) if run_id is not None else None
        outside = trace.get_current_span().get_span_context()
        run = self._tracer.start_span(
            "run",
            context=before,
            start_time=self._run_began,
            links=[trace.Link(outside)] if before is not None and outside.is_valid else None,
            attributes={
                "callsheet.run": ctx.run.name,
                "callsheet.world_size": ctx.run.world_size,
                "callsheet.restart_count": ctx.run.restart_count,
                "callsheet.device": ctx.run.device,
            },
        )
        self._open_spans.append(("run", run))
        own = run.get_span_context()
        return Opened(run_id or f"00-{own.trace_id:032x}-{own.span_id:016x}-{own.trace_flags:02x}")

    def _write(self, ctx: Context, values: Mapping[str, float]) -> None:
        from opentelemetry.metrics import get_meter

        rates = {name: getattr(ctx.record, name) for name in ("samples_per_second", "tokens_per_second")}
        facts = {f"callsheet.{name}": value for name, value in rates.items() if value}
        self._point("log", {**about(ctx), **facts, **values, "callsheet.step": ctx.record.step})
        for name, value in values.items():  # gauges have no effect unless the application has set a MeterProvider
            if name not in self._gauges:
                self._gauges[name] = get_meter("callsheet").create_gauge(instrument(name))
            self._gauges[name].set(value, {"callsheet.run": ctx.run.name})

    def _settings(self, ctx: Context, values: Mapping[str, Any]) -> None:
        self._open_spans[0][1].set_attributes({f"callsheet.config.{name}": attribute(value) for name, value in values.items()})

    def _close(self, ctx: Context, outcome: Outcome) -> None:
        self._open_spans[0][1].set_attributes({"callsheet.outcome": outcome.value, **about(ctx)})
        if outcome in (Outcome.FINISHED, Outcome.STOPPED):
            self._status("OK")
        while self._open_spans:
            self._open_spans.pop()[1].end()
        own, self._own, self._tracer, self._gauges = self._own, None, None, {}
        if own is not None:
            own.close()

    # --- creating and ending spans ---

    def _begin(self, name: str, ctx: Context) -> None:
        if self.is_open:
            self._open_spans.append((name, self._span(name, about(ctx))))

    def _end(self, name: str, ctx: Context) -> None:
        names = [each for each, _ in self._open_spans]
        if name in names:
            place = len(names) - 1 - names[::-1].index(name)
            self._open_spans[place][1].set_attributes(about(ctx))
            while len(self._open_spans) > place:  # also end inner spans that an exception left open
                self._open_spans.pop()[1].end()

    def _span(self, name: str, facts: Mapping[str, Any], start: int | None = None, within: Any = None) -> Any:
        from opentelemetry.trace import set_span_in_context

        around = set_span_in_context(within or self._open_spans[-1][1])
        return self._tracer.start_span(name, context=around, attributes=facts, start_time=start)

    def _point(self, name: str, facts: Mapping[str, Any]) -> None:
        if self.is_open:
            now = time.time_ns()
            self._span(name, facts, now).end(now)

    def _status(self, code: str, why: str | None = None) -> None:
        from opentelemetry.trace import Status, StatusCode

        for _, span in self._open_spans:
            span.set_status(Status(StatusCode[code], why))


def _is_there(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # `find_spec` raises if the parent package is not installed
        return False
