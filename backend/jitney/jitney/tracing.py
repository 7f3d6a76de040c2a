"""Spans of requests, for a collector that speaks OpenTelemetry's protocol (extra ``otel``).

The gateway and the front make them. A span goes into a bounded queue, from which a thread exports.
What the collector does not take in time is dropped, so no request waits for it or fails by it.
"""

import re
import time
from collections.abc import Mapping
from threading import Timer
from typing import Any

from jitney.errors import ConfigError, install_extra

HEADERS = ("traceparent", "tracestate")
"""What carries a trace from one process to the next (W3C Trace Context)."""
_MOST_WAITING = 8192
"""Most spans in the queue; what comes then is dropped."""
_BATCH = 512
"""Most spans in one export."""
_PAUSE_S = 1.0
"""Between two exports."""
_EXPORT_S = 5.0
"""Longest time of one export."""
_CLOSE_S = 2.0
"""Longest time of the last export, when the process ends."""

Attributes = Mapping[str, str | int | float | list[str]]


class Span:
    """A part of a request's time that has begun. All times are seconds of the monotonic clock."""

    def __init__(self, tracer: Any, span: Any, offset_ns: int) -> None:
        """``tracer`` and ``span`` are OpenTelemetry's. ``offset_ns`` is by how much their clock
        is ahead of the monotonic one, in nanoseconds."""
        self._tracer = tracer
        self._span = span
        self._offset_ns = offset_ns

    def headers(self) -> dict[str, str]:
        """Headers that make a span in another process this one's child."""
        from opentelemetry.trace.propagation import set_span_in_context, tracecontext

        made: dict[str, str] = {}
        propagator = tracecontext.TraceContextTextMapPropagator()
        propagator.inject(made, set_span_in_context(self._span))
        return made

    def child(self, name: str, began: float, ended: float, attributes: Attributes) -> None:
        """Add a part of this span that has ended."""
        from opentelemetry.trace import set_span_in_context

        child = self._tracer.start_span(
            name,
            set_span_in_context(self._span),
            attributes=attributes,
            start_time=self._span_time(began),
        )
        child.end(self._span_time(ended))

    def event(self, name: str, at: float, attributes: Attributes | None = None) -> None:
        """Add something that happened at a moment within this span."""
        self._span.add_event(name, attributes, self._span_time(at))

    def end(self, at: float, attributes: Attributes, name: str = "", error: str = "") -> None:
        """End this span. ``name`` replaces the one that it began with; ``error`` says why it
        failed."""
        from opentelemetry.trace import StatusCode

        if name:
            self._span.update_name(name)
        self._span.set_attributes(attributes)
        if error:
            self._span.set_status(StatusCode.ERROR, error)
        self._span.end(self._span_time(at))

    def _span_time(self, at: float) -> int:
        return _nanoseconds(at) + self._offset_ns


class Tracing:
    """Makes spans and sends them to one collector."""

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
            raise ConfigError(f"traces need OpenTelemetry: {install_extra('otel')}") from None
        self._exporter = OTLPSpanExporter(endpoint, timeout=_EXPORT_S)
        self._provider = TracerProvider(
            # A trace that begins elsewhere is recorded here if it is recorded there. A trace that
            # begins here is always recorded.
            sampling.ParentBased(sampling.ALWAYS_ON),
            Resource({"service.name": service}),
            shutdown_on_exit=False,  # it could delay the exit by half a minute
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(
                self._exporter,
                max_queue_size=_MOST_WAITING,
                schedule_delay_millis=_PAUSE_S * 1e3,
                max_export_batch_size=_BATCH,
            )
        )
        self._tracer = self._provider.get_tracer("jitney")
        self._propagator = tracecontext.TraceContextTextMapPropagator()

    def begin(self, name: str, headers: Mapping[str, str], at: float) -> Span:
        """Begin a span. If the request's ``headers`` name a trace, it belongs to that one; else it
        begins a trace."""
        from opentelemetry.trace import SpanKind

        offset_ns = time.time_ns() - time.monotonic_ns()
        span = self._tracer.start_span(
            name,
            self._propagator.extract(headers),
            SpanKind.SERVER,
            start_time=_nanoseconds(at) + offset_ns,
        )
        return Span(self._tracer, span, offset_ns)

    def close(self) -> None:
        """Export what waits, for ``_CLOSE_S`` seconds at most."""
        timer = Timer(_CLOSE_S, self._exporter.shutdown)  # which ends an export under way
        timer.daemon = True
        timer.start()
        self._provider.shutdown()
        timer.cancel()


def _nanoseconds(at: float) -> int:
    return int(at * 1e9)
