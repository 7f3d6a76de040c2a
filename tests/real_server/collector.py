"""An OpenTelemetry collector for tests: a gRPC server made from opentelemetry-proto."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as messages
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as service


@dataclass
class Span:
    """One that came, its ids in hexadecimal."""

    service: str
    trace: str
    id: str
    parent: str
    name: str
    began: int
    ended: int
    failed: bool
    attributes: dict[str, Any]
    events: list[tuple[str, int, dict[str, Any]]] = field(default_factory=list)


class Collector(service.TraceServiceServicer):
    """Keeps all spans; ``endpoint`` is where it listens."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._server = grpc.server(ThreadPoolExecutor(2))
        service.add_TraceServiceServicer_to_server(self, self._server)
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def Export(self, request: Any, context: Any) -> Any:
        for resource in request.resource_spans:
            name = _values(resource.resource.attributes)["service.name"]
            for scope in resource.scope_spans:
                self.spans += [_span(name, span) for span in scope.spans]
        return messages.ExportTraceServiceResponse()

    def trace(self, trace: str) -> list[Span]:
        return [span for span in self.spans if span.trace == trace]

    def close(self) -> None:
        self._server.stop(0)


def _span(service: str, span: Any) -> Span:
    return Span(
        service,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.name,
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        span.status.code == span.status.STATUS_CODE_ERROR,
        _values(span.attributes),
        [(one.name, one.time_unix_nano, _values(one.attributes)) for one in span.events],
    )


def _values(attributes: Any) -> dict[str, Any]:
    made = {}
    for pair in attributes:
        kind = pair.value.WhichOneof("value")
        value = getattr(pair.value, kind)
        made[pair.key] = (
            [one.string_value for one in value.values] if kind == "array_value" else value
        )
    return made
