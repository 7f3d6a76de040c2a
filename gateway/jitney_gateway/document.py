"""The record of an endpoint, and what the OpenAPI document says of it.

``app.py`` collects the endpoints and makes a route of each. FastAPI makes the document from the
routes, but does not know their bodies, answers and refusals: those parts are made here.
"""

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fastapi import Response
from jitney.sampling_params import SamplingParams
from msgspec.json import schema_components

from jitney_gateway.wire import WireRecord

Schema = dict[str, Any]
Handler = Callable[..., Awaitable[Response]]
"""Called with the request and, if the endpoint has a body, with the decoded body."""

TEXT: Schema = {"type": "string"}
_TEXT_OR_NULL: Schema = {"type": ["string", "null"]}


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """One method of one path.

    A request has a JSON ``body``, an HTML ``form`` or neither. A response is a JSON object that has
    at least ``fields``. If ``fields`` is empty, it is of one of the media types in ``content``.
    """

    method: str
    path: str
    answer: Handler
    text: str | None
    """What the endpoint does, in a sentence."""
    body: type[WireRecord] | None = None
    """The record that a request's JSON is decoded into."""
    form: Schema | None = None
    """The schema of a request's multipart form."""
    query: Mapping[str, Schema] = field(default_factory=dict)
    """The parameters that the URL may have after its path: name -> schema."""
    fields: tuple[str, ...] = ()
    """The fields that every JSON object of a response has. Empty if a response is no JSON."""
    streams: bool = False
    """Whether a response can also be a stream of server-sent events."""
    content: Mapping[str, Schema] = field(default_factory=dict)
    """Of a response that is no JSON: media type -> what the document says of it."""


def record(**properties: Schema) -> Schema:
    """The schema of an object that has all of these properties."""
    return {"type": "object", "properties": properties, "required": list(properties)}


ERRORS = {
    "Error": record(
        error=record(message=TEXT, type=TEXT, param=_TEXT_OR_NULL, code=TEXT),
    ),
    "MessagesError": record(type={"const": "error"}, error=record(type=TEXT, message=TEXT)),
}
"""The schemas of error objects, OpenAI's and Anthropic's, by their names in the document."""


def operation(endpoint: Endpoint, body_schema: Schema | None = None) -> Schema:
    """What FastAPI must add to the document for an endpoint. ``body_schema`` is the schema of the
    record ``endpoint.body``."""
    error = "MessagesError" if endpoint.path.startswith("/v1/messages") else "Error"
    error_content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{error}"}}}
    description: Schema = {
        "responses": {
            "200": {"description": "The answer", "content": _response_content(endpoint)},
            "default": {"description": "A refusal", "content": error_content},
        },
        "parameters": _parameters(endpoint),
    }
    if body_schema is not None:
        description["requestBody"] = _request_body("application/json", body_schema)
    elif endpoint.form is not None:
        description["requestBody"] = _request_body("multipart/form-data", endpoint.form)
    return description


def _parameters(endpoint: Endpoint) -> list[Schema]:
    """Those in the path, such as ``{id}``, and those of the query."""
    parameters: list[Schema] = []
    for name in re.findall(r"{(\w+)", endpoint.path):
        parameters.append({"name": name, "in": "path", "required": True, "schema": TEXT})
    for name, schema in endpoint.query.items():
        parameters.append({"name": name, "in": "query", "schema": schema})
    return parameters


def _request_body(media_type: str, schema: Schema) -> Schema:
    return {"required": True, "content": {media_type: {"schema": schema}}}


def _response_content(endpoint: Endpoint) -> Mapping[str, Schema]:
    """Media type -> what the document says of such a response."""
    if not endpoint.fields:
        return endpoint.content
    answer = {"type": "object", "required": [*endpoint.fields]}
    content: dict[str, Schema] = {"application/json": {"schema": answer}}
    if endpoint.streams:
        content["text/event-stream"] = {"schema": TEXT}
    return content


class BodySchemas(NamedTuple):
    """JSON schemas for an OpenAPI document."""

    of_type: dict[type[WireRecord], Schema]
    components: Schema
    """The schemas that the others refer to, by name."""


def body_schemas(types: Sequence[type[WireRecord]]) -> BodySchemas:
    """The schemas of bodies. Sampling parameters that a body takes in ``params`` stand among its
    properties, as clients send them."""
    # The schemas of sampling parameters come from the record that the engine checks them with.
    schemas, components = schema_components(
        [SamplingParams, *types], ref_template="#/components/schemas/{name}"
    )
    schemas_of_bodies = schemas[1:]  # the first is that of SamplingParams
    of_params = components.pop("SamplingParams")["properties"]
    for type_ in types:
        if "params" not in type_.__struct_fields__:
            continue
        component = components[type_.__name__]
        properties = of_params | component["properties"]
        for name in ("params", *type_.refused_params):
            properties.pop(name, None)
        component["properties"] = properties
    of_type = dict(zip(types, schemas_of_bodies, strict=True))
    return BodySchemas(of_type, components)
