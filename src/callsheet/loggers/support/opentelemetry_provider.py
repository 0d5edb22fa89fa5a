"""The OpenTelemetry provider that receives the spans: the application's, or a new one. Closing the new one has a time limit.

This module is imported only when a run is opened, because it needs the package `opentelemetry`. Nothing here draws from Python's
`random`, because that would change the random numbers that training gets.
"""

from __future__ import annotations

import logging
import os
import random
import sys
import threading
from typing import Any

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

logger = logging.getLogger("callsheet")

_SCOPE = "callsheet"
_TRACES_PATH = "/v1/traces"
_DRAWING_MODULES = ("opentelemetry.exporter.otlp.common.http", "opentelemetry.exporter.otlp.proto.http.trace_exporter")
"""Modules of OpenTelemetry that draw a random delay from Python's `random`, in a thread, whenever they export spans."""


class _Ids(RandomIdGenerator):  # type: ignore[misc]  # the package has no type annotations here
    """Generates identifiers that do not depend on the program's seed, so that runs with the same seed get different traces."""

    def generate_span_id(self) -> int:
        return int.from_bytes(os.urandom(8), "big") or 1

    def generate_trace_id(self) -> int:
        return int.from_bytes(os.urandom(16), "big") or 1


class OwnProvider:
    """An OpenTelemetry provider that sends spans to one collector from a thread. `close` takes at most `timeout` seconds."""

    def __init__(self, endpoint: str | None, service_name: str | None, timeout: float) -> None:
        for name in _DRAWING_MODULES:
            if getattr(sys.modules.get(name), "random", None) is random:
                sys.modules[name].random = random.Random()  # type: ignore[attr-defined]  # a Random object has the module's functions
        if endpoint is not None and not endpoint.endswith(_TRACES_PATH):
            endpoint = endpoint.rstrip("/") + _TRACES_PATH
        named = service_name or (None if _is_named() else _SCOPE)
        self._timeout = timeout
        self._exporter = OTLPSpanExporter(endpoint=endpoint, timeout=timeout)
        self.provider = TracerProvider(
            resource=Resource.create({"service.name": named} if named else {}),
            # No limit for attributes, since a metrics record may have hundreds of values.
            span_limits=SpanLimits(max_span_attributes=SpanLimits.UNSET),
            shutdown_on_exit=False,
        )
        self.provider.add_span_processor(BatchSpanProcessor(self._exporter))

    def close(self) -> None:
        """Send the remaining spans, and drop the spans that cannot be sent in time."""
        closing = threading.Thread(target=self.provider.shutdown, name="callsheet-opentelemetry-close", daemon=True)
        closing.start()
        closing.join(self._timeout)
        if closing.is_alive():
            logger.warning(
                "OpenTelemetry: the collector did not take all spans within %g seconds; the rest is lost", self._timeout
            )
            self._exporter.shutdown()  # this also ends the exporter's pauses between attempts to send


def provider_for(endpoint: str | None, service_name: str | None, timeout: float) -> tuple[Any, OwnProvider | None]:
    """Return the application's OpenTelemetry provider, or a new one if an `endpoint` is given or the application has none.

    Also return the `OwnProvider` to close if the provider is new, else None.
    """
    theirs = trace.get_tracer_provider()
    if endpoint is None and not isinstance(theirs, trace.ProxyTracerProvider):
        return theirs, None
    own = OwnProvider(endpoint, service_name, timeout)
    return own.provider, own


def tracer_of(provider: Any) -> Any:
    """Return a tracer of `provider` that does not draw its identifiers from Python's global random generator."""
    tracer = provider.get_tracer(_SCOPE)
    if type(getattr(tracer, "id_generator", None)) is RandomIdGenerator:
        tracer.id_generator = _Ids()
    return tracer


def _is_named() -> bool:
    return bool(os.environ.get("OTEL_SERVICE_NAME")) or "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
