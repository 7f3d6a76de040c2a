"""What the OpenAPI document says of each endpoint besides its body: the forms of its answers."""

import re
from typing import Any

from jitney_gateway.batch_records import BatchRecord, FileRecord

Schema = dict[str, Any]

_GENERATED = (
    "POST /v1/chat/completions",
    "POST /v1/completions",
    "POST /v1/responses",
    "POST /v1/messages",
)
"""They also stream."""
_FILE = tuple(name for name in FileRecord.__struct_fields__ if name != "owner")
_BATCH = tuple(name for name in BatchRecord.__struct_fields__ if name != "owner")
_LIST = ("object", "data", "has_more", "first_id", "last_id")
_ALWAYS = {
    "POST /v1/chat/completions": ("id", "object", "created", "model", "choices", "usage"),
    "POST /v1/completions": ("id", "object", "created", "model", "choices", "usage"),
    "POST /v1/responses": ("id", "object", "created_at", "model", "status", "output", "usage"),
    "POST /v1/messages": ("id", "type", "role", "model", "content", "stop_reason", "usage"),
    "POST /v1/messages/count_tokens": ("input_tokens",),
    "POST /v1/embeddings": ("object", "data", "model", "usage"),
    "POST /v1/classify": ("object", "data", "model", "usage"),
    "POST /v1/rerank": ("model", "results", "usage"),
    "POST /tokenize": ("count", "max_model_len", "tokens"),
    "POST /detokenize": ("prompt",),
    "GET /v1/models": ("object", "data"),
    "GET /v1/models/{name:path}": ("id", "object", "created", "owned_by"),
    "POST /v1/files": _FILE,
    "GET /v1/files": _LIST,
    "GET /v1/files/{id}": _FILE,
    "DELETE /v1/files/{id}": ("id", "object", "deleted"),
    "POST /v1/batches": _BATCH,
    "GET /v1/batches": _LIST,
    "GET /v1/batches/{id}": _BATCH,
    "POST /v1/batches/{id}/cancel": _BATCH,
}
"""The fields that an answer of JSON has in any case."""
_QUERIES: dict[str, dict[str, Schema]] = {
    "GET /v1/files": {
        "limit": {"type": "integer", "minimum": 1, "maximum": 10_000},
        "after": {"type": "string"},
        "purpose": {"type": "string"},
    },
    "GET /v1/batches": {
        "limit": {"type": "integer", "minimum": 1, "maximum": 100},
        "after": {"type": "string"},
    },
}
"""The parameters that may stand after a path."""
_TEXT: Schema = {"type": "string"}
_NULLABLE: Schema = {"type": ["string", "null"]}


def _record(**properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": list(properties)}


ERRORS = {
    "Error": _record(
        error=_record(message=_TEXT, type=_TEXT, param=_NULLABLE, code=_TEXT),
    ),
    "MessagesError": _record(type={"const": "error"}, error=_record(type=_TEXT, message=_TEXT)),
}
"""Components: the objects of refusals, OpenAI's and Anthropic's."""


FORMS = {
    "/v1/files": _record(
        file={"type": "string", "contentMediaType": "application/octet-stream"},
        purpose={"const": "batch"},
    )
}
"""Bodies that are forms: the path -> their fields."""


def operation(method: str, path: str, body: Schema | None = None) -> Schema:
    """The part of the document that a route does not say itself; ``body``: the schema of what is
    sent."""
    error = "MessagesError" if path.startswith("/v1/messages") else "Error"
    refused = {"application/json": {"schema": {"$ref": f"#/components/schemas/{error}"}}}
    made: Schema = {
        "responses": {
            "200": {"description": "The answer", "content": _answer(f"{method} {path}")},
            "default": {"description": "A refusal", "content": refused},
        },
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": _TEXT}
            for name in re.findall(r"{(\w+)", path)
        ],
    }
    for name, schema in _QUERIES.get(f"{method} {path}", {}).items():
        made["parameters"].append({"name": name, "in": "query", "schema": schema})
    if method == "POST" and body is not None:
        kind = "multipart/form-data" if path in FORMS else "application/json"
        made["requestBody"] = {"required": True, "content": {kind: {"schema": body}}}
    return made


def _answer(operation: str) -> Schema:
    if operation == "GET /metrics":
        return {"text/plain": {"schema": _TEXT}}
    if operation.endswith("/content"):
        return {"application/octet-stream": {}}
    if operation not in _ALWAYS:
        return {}
    record = {"type": "object", "required": [*_ALWAYS[operation]]}
    content: Schema = {"application/json": {"schema": record}}
    if operation in _GENERATED:
        content["text/event-stream"] = {"schema": _TEXT}
    return content
