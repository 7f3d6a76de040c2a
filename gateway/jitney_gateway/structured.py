"""The constraint that a client puts on an answer.

Several fields of a body can set one: OpenAI's ``response_format``, and vLLM's
``structured_outputs`` and ``guided_…``. All become the sampling parameter ``structured_outputs``.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from jitney_gateway.refusals import FieldError
from jitney_gateway.wire import Generation, JsonSchema, ResponseFormat, StructuredChoice


class OutputConstraint(NamedTuple):
    """What an answer must be."""

    field: str
    """The field of the body that asks for it: errors name it."""
    structured_outputs: Mapping[str, Any]
    """The sampling parameter of that name, such as ``{"regex": "a+"}``."""


def constraint_of_body(body: Generation) -> OutputConstraint | None:
    """The constraint that the body asks for. Raises FieldError for two that differ."""
    found: list[OutputConstraint] = []
    if body.response_format is not None:
        parameter = _parameter_of_response_format(body.response_format)
        if parameter is not None:
            found.append(OutputConstraint("response_format", parameter))
    if body.structured_outputs is not None:
        parameter = _parameter_of_choice(body.structured_outputs)
        found.append(OutputConstraint("structured_outputs", parameter))
    guided = {
        "json": body.guided_json,
        "regex": body.guided_regex,
        "choice": body.guided_choice,
        "grammar": body.guided_grammar,
    }
    for kind, value in guided.items():
        if value is not None:
            found.append(OutputConstraint(f"guided_{kind}", {kind: value}))

    if not found:
        return None
    first = found[0]
    for other in found[1:]:
        # Clients of vLLM may say the same in its old and its new field: each version knows one.
        if other.structured_outputs != first.structured_outputs:
            names = " and ".join(constraint.field for constraint in found)
            raise FieldError(other.field, f"{names} exclude one another")
    return first


def _parameter_of_response_format(response_format: ResponseFormat) -> dict[str, Any] | None:
    """None for the type ``text``, which allows any answer. Raises FieldError."""
    type_ = response_format.type
    json_schema = response_format.json_schema
    needs_schema = type_ == "json_schema"
    has_schema = json_schema is not None
    if needs_schema != has_schema:
        raise FieldError(
            "response_format.json_schema",
            "response_format.json_schema must be given with the type json_schema, and no other",
        )
    if response_format.schema is not None and type_ != "json_object":
        field = "response_format.schema"
        raise FieldError(field, f"{field} goes with the type json_object only")

    if json_schema is not None:
        return {"json": _schema_with_title(json_schema)}
    if response_format.schema is not None:
        return {"json": response_format.schema}
    if type_ == "json_object":
        return {"json_object": True}
    return None


def _schema_with_title(json_schema: JsonSchema) -> dict[str, Any]:
    """The schema, with the name and the description that stand beside it."""
    schema: dict[str, Any] = {"title": json_schema.name}
    if json_schema.description is not None:
        schema["description"] = json_schema.description
    return schema | (json_schema.schema or {})


def _parameter_of_choice(choice: StructuredChoice) -> dict[str, Any]:
    """The one field of vLLM's object that is set. Raises FieldError if not exactly one is."""
    fields = msgspec.structs.asdict(choice)
    given = {name: value for name, value in fields.items() if value not in (None, False)}
    if len(given) != 1:
        text = f"structured_outputs must have exactly one of {', '.join(fields)}"
        raise FieldError("structured_outputs", text)
    return given
