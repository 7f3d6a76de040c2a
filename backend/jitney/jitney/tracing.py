"""Spans of requests, for a collector that speaks OpenTelemetry's protocol (extra ``otel``).

The gateway and the front make them. A span goes into a bounded queue, from which a thread exports;
what the collector does not take in time is dropped, so no request waits for it or fails by it.
"""

import re
import time
from collections.abc import Mapping
from threading import Timer
from typing import Any

from jitney.errors import ConfigError

HEADERS = ("traceparent", "tracestate")
"""What carries a trace from one process to the next (W3C Trace Context)."""
_MAX_WAITING = 8192
_BATCH = 512
_PAUSE_S = 1.0
_EXPORT_S = 5.0
_CLOSE_S = 2.0

Attributes = Mapping[str, str | int | float | list[str]]


class Span:
    """One that has begun. Times are seconds of the monotonic clock."""

    def __init__(self, tracer: Any, span: Any, offset_ns: int) -> None:
        """``offset_ns``: from the monotonic clock to that of spans."""
        self._tracer, self._span, self._offset_ns = tracer, span, offset_ns

    def headers(self) -> dict[str, str]:
        """What makes a span elsewhere its child."""
        from opentelemetry.trace.propagation import set_span_in_context, tracecontext

        made: dict[str, str] = {}
        propagator = tracecontext.TraceContextTextMapPropagator()
        propagator.inject(made, set_span_in_context(self._span))
        return made

    def child(self, name: str, began: float, ended: float, attributes: Attributes) -> None:
        """A part of it that has ended."""
        from opentelemetry.trace import set_span_in_context

        made = self._tracer.start_span(
            name,
            set_span_in_context(self._span),
            attributes=attributes,
            start_time=self._wall(began),
        )
        made.end(self._wall(ended))

    def event(self, name: str, at: float, attributes: Attributes | None = None) -> None:
        """Something that happened in it."""
        self._span.add_event(name, attributes, self._wall(at))

    def end(self, at: float, attributes: Attributes, name: str = "", error: str = "") -> None:
        """``name`` replaces the first one; ``error`` says why it failed."""
        from opentelemetry.trace import StatusCode

        if name:
            self._span.update_name(name)
        self._span.set_attributes(attributes)
        if error:
            self._span.set_status(StatusCode.ERROR, error)
        self._span.end(self._wall(at))

    def _wall(self, at: float) -> int:
        return int(at * 1e9) + self._offset_ns


class Tracing:
    """What makes spans and sends them to one collector."""

    def __init__(self, endpoint: str, service: str) -> None:
        """``endpoint``: ``http://HOST:PORT``, or https. Raises ConfigError."""
        if not re.fullmatch(r"https?://[^/\s]+:\d+", endpoint):
            raise ConfigError(f"the endpoint of traces is {endpoint!r}, not http://HOST:PORT")
        try:
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider, sampling
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation import tracecontext
        except ImportError:
            raise ConfigError("traces need OpenTelemetry: install triton-jitney[otel]") from None
        self._exporter = OTLPSpanExporter(endpoint, timeout=_EXPORT_S)
        self._provider = TracerProvider(
            sampling.ParentBased(sampling.ALWAYS_ON),
            Resource({"service.name": service}),
            shutdown_on_exit=False,  # it could delay the exit by half a minute
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(self._exporter, _MAX_WAITING, _PAUSE_S * 1e3, _BATCH)
        )
        self._tracer = self._provider.get_tracer("jitney")
        self._propagator = tracecontext.TraceContextTextMapPropagator()

    def begin(self, name: str, headers: Mapping[str, str], at: float) -> Span:
        """A span of a request that came with ``headers``: of their trace, or the first of one."""
        from opentelemetry.trace import SpanKind

        offset_ns = time.time_ns() - time.monotonic_ns()
        context = self._propagator.extract(headers)
        start = int(at * 1e9) + offset_ns
        made = self._tracer.start_span(name, context, SpanKind.SERVER, start_time=start)
        return Span(self._tracer, made, offset_ns)

    def close(self) -> None:
        """Export what waits, for ``_CLOSE_S`` at most."""
        timer = Timer(_CLOSE_S, self._exporter.shutdown)
        timer.daemon = True
        timer.start()
        self._provider.shutdown()
        timer.cancel()
