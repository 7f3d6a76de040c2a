"""What an answer must be, by whichever of a body's fields asks for it: OpenAI's
``response_format``, and vLLM's ``structured_outputs`` and ``guided_…``."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from jitney_gateway.refusals import FieldError
from jitney_gateway.wire import Generation, ResponseFormat, StructuredChoice


class Wanted(NamedTuple):
    """One constraint on the answer."""

    field: str
    """Of the body: errors name it."""
    constraint: Mapping[str, Any]
    """The sampling parameter ``structured_outputs``."""


def wanted_by(body: Generation) -> Wanted | None:
    """The constraint that the body asks for. Raises FieldError for more than one."""
    found: list[Wanted] = []
    if body.response_format is not None:
        constraint = _of_response_format(body.response_format)
        if constraint is not None:
            found.append(Wanted("response_format", constraint))
    if body.structured_outputs is not None:
        found.append(Wanted("structured_outputs", _only_one(body.structured_outputs)))
    guided = {
        "json": body.guided_json,
        "regex": body.guided_regex,
        "choice": body.guided_choice,
        "grammar": body.guided_grammar,
    }
    for kind, value in guided.items():
        if value is not None:
            found.append(Wanted(f"guided_{kind}", {kind: value}))

    if len(found) > 1:
        names = " and ".join(wanted.field for wanted in found)
        raise FieldError(found[1].field, f"{names} exclude one another")
    return found[0] if found else None


def _of_response_format(given: ResponseFormat) -> dict[str, Any] | None:
    """None: any text will do."""
    if (given.json_schema is None) == (given.type == "json_schema"):
        raise FieldError(
            "response_format.json_schema",
            "response_format.json_schema must be given with the type json_schema, and no other",
        )
    if given.type == "json_object":
        return {"json_object": True}
    if given.json_schema is None:
        return None
    schema: dict[str, Any] = {"title": given.json_schema.name}
    if given.json_schema.description is not None:
        schema["description"] = given.json_schema.description
    schema |= given.json_schema.schema or {}
    return {"json": schema}


def _only_one(given: StructuredChoice) -> dict[str, Any]:
    """What is set of it."""
    fields = msgspec.structs.asdict(given)
    made = {name: value for name, value in fields.items() if value not in (None, False)}
    if len(made) != 1:
        said = f"structured_outputs must have exactly one of {', '.join(fields)}"
        raise FieldError("structured_outputs", said)
    return made
