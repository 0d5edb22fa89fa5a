"""Traces that a collector receives over HTTP, and that the SDK's in-memory exporter stores."""

from __future__ import annotations

import http.server
import math
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from opentelemetry import metrics, trace
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from torch import nn

from callsheet import Callback, CallbackManager, Context, Trainer
from callsheet.core.registration import handlers_of
from callsheet.errors import ConfigError
from callsheet.loggers.opentelemetry_logger import OpenTelemetryLogger, Steps
from callsheet.testing import run_ranks

DATA = [(torch.ones(2, 2), torch.ones(2, 1))] * 3


class Acts(Callback):
    """Calls the given functions at the ends of steps."""

    def __init__(self, **acts: Callable[[Context], Any]) -> None:
        self.acts = acts

    def on_train_step_end(self, ctx: Context) -> None:
        if act := self.acts.get(f"at_{ctx.step}"):
            act(ctx)


class KeepsLosses(Callback):
    """Records the metrics records."""

    phase = "report"

    def __init__(self) -> None:
        self.losses: list[tuple[int, float]] = []

    def on_log(self, ctx: Context) -> None:
        if "train/loss" in ctx.record.values:
            self.losses.append((ctx.record.step, ctx.record.values["train/loss"]))


def save(ctx: Context) -> None:
    ctx.control.save("asked for", replicated=True)


def stop(ctx: Context) -> None:
    ctx.control.stop("asked for", replicated=True)


def raises(error: BaseException) -> Callable[[Context], None]:
    def act(ctx: Context) -> None:
        raise error

    return act


def fit(folder: Path, logger: OpenTelemetryLogger, *callbacks: Callback, **options: Any) -> None:
    options = {"max_duration": "2ep", "log_interval": "1ba", "run_name": "run", **options}
    torch.manual_seed(1)
    with Trainer(
        nn.Linear(2, 1),
        nn.functional.mse_loss,
        DATA,
        DATA[:1],
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        callbacks=callbacks,
        loggers=[logger],
        runs_folder=folder,
        device="cpu",
        **options,
    ) as trainer:
        trainer.fit()


class Collector:
    """Receives OTLP over HTTP. If `silent`, it does not answer."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.services: set[str] = set()
        self.paths: set[str] = set()
        self.keys: set[str | None] = set()
        self.is_silent = False
        self.received, self.awake = threading.Event(), threading.Event()
        collector = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def log_message(self, *args: Any) -> None: ...

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.received.set()
                if collector.is_silent:
                    collector.awake.wait()
                    return
                collector.paths.add(self.path)
                collector.keys.add(self.headers["x-key"])
                for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    attributes = {each.key: each.value.string_value for each in resource.resource.attributes}
                    collector.services.add(attributes["service.name"])
                    for scope in resource.scope_spans:
                        collector.spans += scope.spans
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def named(self, name: str) -> list[Any]:
        return sorted((span for span in self.spans if span.name == name), key=lambda span: int(span.start_time_unix_nano))

    def parent(self, span: Any) -> Any:
        (found,) = [each for each in self.spans if each.span_id == span.parent_span_id]
        return found

    def close(self) -> None:
        self.awake.set()
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _isolated_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", None)


@pytest.fixture
def application(monkeypatch: pytest.MonkeyPatch) -> tuple[TracerProvider, InMemorySpanExporter]:
    """Install a tracer provider, as an application does.

    OpenTelemetry allows this once per process, so this patches its private variable.
    """
    provider, kept = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    return provider, kept


def attributes_of(span: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}


# --- the trace ---


def test_a_run_is_exported_as_one_trace(tmp_path: Path, collector: Collector) -> None:
    keeps = KeepsLosses()
    odd = Acts(at_2=lambda ctx: ctx.log({"odd/nan": math.nan}, across="same"), at_4=save)
    config = {"lr": 0.1, "model": {"sizes": [1, 2], "seed": 2**70}}
    fit(tmp_path, OpenTelemetryLogger(endpoint=collector.url), odd, keeps, config=config)
    assert (collector.paths, collector.services) == ({"/v1/traces"}, {"callsheet"})
    assert len({span.trace_id for span in collector.spans}) == 1
    assert len({span.span_id for span in collector.spans}) == len(collector.spans)
    (run,), (train,) = collector.named("run"), collector.named("train")
    assert run.parent_span_id == b""
    assert collector.parent(train) is run
    assert [attributes_of(span)["callsheet.epoch"] for span in collector.named("epoch")] == [1, 2]
    assert all(collector.parent(span) is train for span in collector.named("epoch"))
    recorded = attributes_of(run)
    assert (recorded["callsheet.run"], recorded["callsheet.outcome"], recorded["callsheet.step"]) == ("run", "finished", 6)
    assert (recorded["callsheet.config.lr"], recorded["callsheet.config.model.sizes"]) == (0.1, "[1, 2]")
    assert recorded["callsheet.config.model.seed"] == str(2**70)
    assert run.status.code == run.status.STATUS_CODE_OK
    evaluations = collector.named("eval_all")
    assert len(evaluations) == 2
    assert all("validation/loss" in attributes_of(span) for span in evaluations)
    assert [attributes_of(span)["callsheet.dataset"] for span in collector.named("eval")] == ["validation", "validation"]
    saves = [attributes_of(span) for span in collector.named("checkpoint_save")]
    assert (saves[0]["callsheet.step"], saves[0]["callsheet.kind"]) == (4, "requested")
    assert str(saves[0]["callsheet.checkpoint"]).endswith("ba4")
    (load,) = collector.named("checkpoint_load")
    assert collector.parent(load) is run
    records = [attributes_of(span) for span in collector.named("log")]
    assert [(each["callsheet.step"], each["train/loss"]) for each in records if "train/loss" in each] == keeps.losses
    assert len(keeps.losses) == 6
    assert math.isnan(next(each["odd/nan"] for each in records if "odd/nan" in each))
    for span in collector.spans:  # a nested span ends before its parent
        if span is not run and span.name != "log":
            parent = collector.parent(span)
            assert parent.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
            assert span.end_time_unix_nano <= parent.end_time_unix_nano or parent.name == "steps"


def test_a_resume_continues_the_trace(tmp_path: Path, collector: Collector) -> None:
    random.seed(1)
    with pytest.raises(ValueError, match="a bad step"):
        fit(
            tmp_path,
            OpenTelemetryLogger(endpoint=collector.url),
            Acts(at_2=save, at_5=raises(ValueError("a bad step"))),
        )
    (first,) = collector.named("run")
    assert (first.status.code, attributes_of(first)["callsheet.outcome"]) == (first.status.STATUS_CODE_ERROR, "failed")
    random.seed(1)  # identifiers must not repeat with the seed
    second = OpenTelemetryLogger(endpoint=collector.url)
    fit(tmp_path, second, resume="auto")
    _, again = collector.named("run")
    assert again.trace_id == first.trace_id
    assert collector.parent(again) is first
    assert len({span.span_id for span in collector.spans}) == len(collector.spans)
    assert attributes_of(again)["callsheet.outcome"] == "finished"
    assert again.status.code == again.status.STATUS_CODE_OK
    fit(tmp_path, OpenTelemetryLogger(endpoint=collector.url), Acts(at_7=stop), resume="auto", max_duration="3ep")
    assert collector.parent(collector.named("run")[2]) is first
    fit(
        tmp_path,
        OpenTelemetryLogger(endpoint=collector.url),
        run_name="fork",
        resume=tmp_path / "run" / "checkpoints" / "ep0-ba2",
    )
    fork = collector.named("run")[3]
    assert fork.trace_id != first.trace_id


def test_an_exception_is_recorded_in_the_span_that_raised_it(tmp_path: Path, collector: Collector) -> None:
    with pytest.raises(ValueError, match="a bad step"):
        fit(tmp_path, OpenTelemetryLogger(endpoint=collector.url), Acts(at_5=raises(ValueError("a bad step"))))
    epoch = collector.named("epoch")[1]
    (event,) = epoch.events
    recorded = {each.key: each.value.string_value for each in event.attributes}
    assert (event.name, recorded["exception.type"], recorded["exception.message"]) == ("exception", "ValueError", "a bad step")
    assert recorded["callsheet.span"] == "train_step"
    for name in ("run", "train", "epoch"):
        span = collector.named(name)[-1]
        assert (span.status.code, span.status.message) == (span.status.STATUS_CODE_ERROR, "ValueError: a bad step")
    assert collector.named("epoch")[0].status.code == epoch.status.STATUS_CODE_UNSET


@pytest.mark.parametrize(
    ("act", "outcome"),
    [(stop, "stopped"), (raises(KeyboardInterrupt()), "interrupted"), (lambda ctx: os.kill(os.getpid(), 15), "preempted")],
)
def test_the_outcome_is_reported(tmp_path: Path, collector: Collector, act: Callable[[Context], None], outcome: str) -> None:
    try:
        fit(tmp_path, OpenTelemetryLogger(endpoint=collector.url), Acts(at_2=act), max_duration="100ep")
    except KeyboardInterrupt:
        pass
    (run,) = collector.named("run")
    assert attributes_of(run)["callsheet.outcome"] == outcome
    assert len(collector.named("preempt")) == (outcome == "preempted")


# --- steps ---


@pytest.mark.parametrize(("steps", "each"), [("none", 0), ("all", 6)])
def test_steps_are_traced_as_requested(tmp_path: Path, collector: Collector, steps: Steps, each: int) -> None:
    fit(tmp_path, OpenTelemetryLogger(endpoint=collector.url, steps=steps))
    for name in ("train_step", "forward", "backward", "optimizer_step"):
        assert len(collector.named(name)) == each
    assert collector.named("steps") == []
    if each:
        chain = [collector.parent(collector.named("forward")[0])]
        while chain[-1].name != "run":
            chain.append(collector.parent(chain[-1]))
        assert [span.name for span in chain] == ["microbatch", "forward_backward", "train_step", "epoch", "train", "run"]


def test_steps_are_not_listened_to_unless_requested() -> None:
    assert not {"on_train_step_end", "on_forward_start", "on_fetch_end"} & handlers_of(OpenTelemetryLogger()).keys()
    assert "on_train_step_end" in handlers_of(OpenTelemetryLogger(steps="all"))


def test_a_few_steps_are_sampled(tmp_path: Path, collector: Collector) -> None:
    fit(tmp_path, OpenTelemetryLogger(endpoint=collector.url), Acts(), max_duration="20ep")
    window = collector.named("steps")[0]
    recorded = attributes_of(window)
    count = recorded["callsheet.last_step"] - recorded["callsheet.first_step"] + 1
    inside = [span for span in collector.named("train_step") if collector.parent(span) is window]
    assert 1 <= len(inside) == count <= 8
    forward = next(
        span for span in collector.named("forward") if collector.parent(collector.parent(span)).name == "forward_backward"
    )
    assert collector.parent(collector.parent(collector.parent(forward))) in inside
    ours = collector.named("Acts.on_train_step_end")
    assert {attributes_of(span)["callsheet.step"] for span in ours} <= set(range(1, 61))
    assert len(ours) >= count
    for span in inside:
        assert window.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano <= window.end_time_unix_nano


# --- the tracer provider ---


def test_the_applications_provider_is_used_and_left_open(
    tmp_path: Path, application: tuple[TracerProvider, InMemorySpanExporter], monkeypatch: pytest.MonkeyPatch
) -> None:
    provider, kept = application
    reader = InMemoryMetricReader()
    monkeypatch.setattr(metrics._internal, "_METER_PROVIDER", MeterProvider([reader]))
    with provider.get_tracer("theirs").start_as_current_span("job") as job:
        fit(tmp_path, OpenTelemetryLogger(), Acts(at_2=lambda ctx: ctx.log({"odd/name (x)": 2.5}, across="same"), at_3=save))
    spans = {span.name: span for span in kept.get_finished_spans()}
    assert spans["run"].parent is not None
    assert spans["run"].parent.span_id == job.get_span_context().span_id
    data: Any = reader.get_metrics_data()
    values = {
        metric.name: [(point.value, dict(point.attributes)) for point in metric.data.data_points]
        for metric in data.resource_metrics[0].scope_metrics[0].metrics
    }
    assert values["odd/name__x_"] == [(2.5, {"callsheet.run": "run"})]
    assert "train/loss" in values
    provider.get_tracer("theirs").start_span("after").end()
    assert kept.get_finished_spans()[-1].name == "after"
    with provider.get_tracer("theirs").start_as_current_span("another job") as job:
        fit(tmp_path, OpenTelemetryLogger(), resume="auto", max_duration="3ep")
    first, second = (span for span in kept.get_finished_spans() if span.name == "run")
    assert (second.parent.span_id, second.context.trace_id) == (first.context.span_id, first.context.trace_id)
    assert [link.context.span_id for link in second.links] == [job.get_span_context().span_id]


def test_the_endpoint_is_an_argument_or_an_environment_variable(
    tmp_path: Path,
    collector: Collector,
    application: tuple[TracerProvider, InMemorySpanExporter],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=hunter2")
    fit(tmp_path, OpenTelemetryLogger(endpoint=f"{collector.url}/v1/traces"))
    assert application[1].get_finished_spans() == ()
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", None)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    monkeypatch.setenv("OTEL_SERVICE_NAME", "ours")
    fit(tmp_path, OpenTelemetryLogger(), run_name="other")
    fit(tmp_path, OpenTelemetryLogger(service_name="mine"), run_name="third")
    assert [attributes_of(span)["callsheet.run"] for span in collector.named("run")] == ["run", "other", "third"]
    assert (collector.paths, collector.keys) == ({"/v1/traces"}, {"hunter2"})
    assert collector.services == {"callsheet", "ours", "mine"}
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or b"hunter2" not in path.read_bytes()


def test_two_loggers_have_a_trace_each(tmp_path: Path, collector: Collector) -> None:
    other = OpenTelemetryLogger(endpoint=collector.url)
    other.name = "other"
    fit(tmp_path, OpenTelemetryLogger(endpoint=collector.url), other)
    assert len({span.trace_id for span in collector.named("run")}) == 2


# --- failures ---


@pytest.mark.parametrize("state", ["unreachable", "silent"])
def test_an_unreachable_collector_does_not_end_or_delay_the_run(tmp_path: Path, collector: Collector, state: str) -> None:
    collector.is_silent = True
    url = collector.url if state == "silent" else "http://127.0.0.1:9"
    logger = OpenTelemetryLogger(endpoint=url, timeout=1.0)
    ends: list[float] = []
    steps: list[int] = []

    class Last(Callback):
        phase = "decide"

        def on_run_end(self, ctx: Context) -> None:
            ends.append(time.monotonic())

    fit(tmp_path, logger, Last(), Acts(at_6=lambda ctx: steps.append(ctx.step)))
    assert time.monotonic() - ends[0] < 10  # the exporter's own retries take half a minute
    assert steps == [6]
    assert collector.received.is_set() == (state == "silent")


def test_no_thread_is_left_running(tmp_path: Path, collector: Collector) -> None:
    before, during = set(threading.enumerate()), set()
    fit(tmp_path, OpenTelemetryLogger(endpoint=collector.url), Acts(at_6=lambda ctx: during.update(threading.enumerate())))
    for thread in during - before:
        thread.join(10)
    assert any("Otel" in thread.name for thread in during - before)
    assert not any(thread.is_alive() for thread in during - before)


@pytest.mark.parametrize("missing", ["opentelemetry", "opentelemetry.sdk", "opentelemetry.exporter"])
def test_a_missing_package_is_reported_when_the_logger_is_created(missing: str) -> None:
    program = (
        f"import sys; sys.modules[{missing!r}] = None\n"
        "from callsheet.loggers.opentelemetry_logger import OpenTelemetryLogger as it\n"
        "from callsheet.errors import MissingPackage\n"
        "try: it()\n"
        "except MissingPackage as error: assert \"pip install 'callsheet[opentelemetry]'\" in str(error), error\n"
        "else: raise SystemExit('nothing was raised')"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_nothing_is_imported_before_a_run_is_opened() -> None:
    program = (
        "import sys, callsheet.loggers.opentelemetry_logger as it; it.OpenTelemetryLogger()\n"
        "assert not [each for each in ('opentelemetry.sdk', 'opentelemetry.trace', 'requests') if each in sys.modules]"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"timeout": 0}, "above zero"),
        ({"steps": "al"}, "did you mean 'all'"),
        ({"endpoint": "https://me:word@host"}, "OTEL_EXPORTER_OTLP_HEADERS"),
    ],
)
def test_bad_options_are_rejected(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match) as found:
        OpenTelemetryLogger(**options)
    assert "word@" not in str(found.value)


# --- ranks and neutrality ---


def rank_fits(folder: str, url: str) -> None:
    fit(Path(folder), OpenTelemetryLogger(endpoint=url), Acts(at_2=save), max_duration="1ep")


def test_two_ranks_make_one_trace(tmp_path: Path, collector: Collector) -> None:
    run_ranks(rank_fits, 2, str(tmp_path), collector.url)
    (run,) = collector.named("run")
    assert attributes_of(run)["callsheet.world_size"] == 2


@pytest.mark.parametrize("owner", ["own", "silent", "application"])
def test_training_is_not_affected(
    tmp_path: Path, collector: Collector, owner: str, application: tuple[TracerProvider, InMemorySpanExporter]
) -> None:
    def weights(*loggers: OpenTelemetryLogger) -> tuple[list[torch.Tensor], object]:
        torch.manual_seed(1)
        random.seed(1)
        numpy.random.seed(1)
        model = nn.Sequential(nn.Linear(2, 4), nn.Dropout(), nn.Linear(4, 1))
        with Trainer(
            model,
            nn.functional.mse_loss,
            DATA,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
            callbacks=CallbackManager(loggers, checking=True),
            runs_folder=tmp_path,
            device="cpu",
            max_duration="2ep",
            log_interval="1ba",
        ) as trainer:
            trainer.fit()
        return list(model.parameters()), (random.getstate(), str(numpy.random.get_state()))

    collector.is_silent = owner == "silent"
    logger = OpenTelemetryLogger(endpoint=None if owner == "application" else collector.url, steps="all", timeout=1.0)
    (bare, before), (watched, after) = weights(), weights(logger)
    found = collector.named("log") if owner == "own" else application[1].get_finished_spans()
    assert bool(found) == (owner != "silent")
    assert all(torch.equal(one, other) for one, other in zip(bare, watched, strict=True))
    assert before == after
