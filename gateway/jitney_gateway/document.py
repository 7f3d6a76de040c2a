"""An endpoint of the gateway, and what the OpenAPI document says of it.

``app.py`` collects the endpoints and makes a route of each. Here stand the record and the parts of
the document that FastAPI cannot know: the bodies, the forms of answers, and refusals.
"""

import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fastapi import Response

from jitney_gateway.wire import WireRecord

Schema = dict[str, Any]
Handler = Callable[..., Awaitable[Response]]
"""Takes the request, and after it the body where the endpoint has one."""

TEXT: Schema = {"type": "string"}
_NULLABLE: Schema = {"type": ["string", "null"]}


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """One method of one path."""

    method: str
    path: str
    answer: Handler
    text: str | None
    """What it does, in a sentence."""
    body: type[WireRecord] | None = None
    """The JSON that it takes."""
    form: Schema | None = None
    """The fields of a form, where it takes one instead."""
    query: Mapping[str, Schema] = field(default_factory=dict)
    """The parameters that may stand after the path."""
    fields: tuple[str, ...] = ()
    """The fields that an answer of JSON has in any case. Empty: the answer is no JSON."""
    streams: bool = False
    """It also answers with server-sent events."""
    content: Schema = field(default_factory=dict)
    """Media type -> schema of an answer that is no JSON."""


def record(**properties: Schema) -> Schema:
    """The schema of an object that has these properties."""
    return {"type": "object", "properties": properties, "required": list(properties)}


ERRORS = {
    "Error": record(
        error=record(message=TEXT, type=TEXT, param=_NULLABLE, code=TEXT),
    ),
    "MessagesError": record(type={"const": "error"}, error=record(type=TEXT, message=TEXT)),
}
"""Components: the objects of refusals, OpenAI's and Anthropic's."""


def operation(endpoint: Endpoint, body: Schema | None = None) -> Schema:
    """The part of the document that a route does not say itself. ``body``: the schema of the JSON
    that the endpoint takes."""
    error = "MessagesError" if endpoint.path.startswith("/v1/messages") else "Error"
    refused = {"application/json": {"schema": {"$ref": f"#/components/schemas/{error}"}}}
    made: Schema = {
        "responses": {
            "200": {"description": "The answer", "content": _content(endpoint)},
            "default": {"description": "A refusal", "content": refused},
        },
        "parameters": _parameters(endpoint),
    }
    if body is not None:
        made["requestBody"] = _request_body("application/json", body)
    elif endpoint.form is not None:
        made["requestBody"] = _request_body("multipart/form-data", endpoint.form)
    return made


def _parameters(endpoint: Endpoint) -> list[Schema]:
    made: list[Schema] = []
    for name in re.findall(r"{(\w+)", endpoint.path):
        made.append({"name": name, "in": "path", "required": True, "schema": TEXT})
    for name, schema in endpoint.query.items():
        made.append({"name": name, "in": "query", "schema": schema})
    return made


def _request_body(media_type: str, schema: Schema) -> Schema:
    return {"required": True, "content": {media_type: {"schema": schema}}}


def _content(endpoint: Endpoint) -> Schema:
    """Media type -> schema of an answer."""
    if not endpoint.fields:
        return endpoint.content
    answer = {"type": "object", "required": [*endpoint.fields]}
    content: Schema = {"application/json": {"schema": answer}}
    if endpoint.streams:
        content["text/event-stream"] = {"schema": TEXT}
    return content
