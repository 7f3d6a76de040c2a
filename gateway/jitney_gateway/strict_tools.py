"""Whether a grammar can keep the schema of a tool. Pure.

``without_effect.py`` asks this of each strict tool, before ``strict_grammar.py`` makes the grammar.
"""

import copy
import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from jitney.errors import InvalidArgumentError
from jitney.text.json_schema import prepare_schema

from jitney_gateway.argument_grammar import arguments_of_function, schema_of_function
from jitney_gateway.formats import TOOL_FORMATS
from jitney_gateway.lark import WRONG_SCHEMA, spelt

_LOOKS_AROUND = re.compile(r"\(\?<?[=!]")


def why_not_kept(
    function: Mapping[str, Any], tool_format: str, token_ids: Mapping[str, int]
) -> str | None:
    """Why the arguments of a function cannot follow its schema; None if they can."""
    row = TOOL_FORMATS[tool_format]
    spell = partial(spelt, token_ids=token_ids)
    try:
        arguments_of_function(function, row, "call", spell)  # this raises if it cannot
        schema = schema_of_function(function)
        for pattern in _patterns_of(schema):
            if _LOOKS_AROUND.search(pattern):
                return f"pattern {pattern[:64]!r} looks around, which is not supported"
        if row.body in ("json", "python"):
            # In these formats llguidance itself reads the schema. The engine refuses a schema that
            # llguidance would not enforce.
            prepare_schema(copy.deepcopy(schema), "parameters")
    except InvalidArgumentError as error:
        return str(error)
    except WRONG_SCHEMA:
        return "the parameters are no JSON schema"
    return None


def _patterns_of(schema: Any) -> Iterator[str]:
    """The patterns of a schema, and of all schemas in it."""
    if isinstance(schema, list):
        for part in schema:
            yield from _patterns_of(part)
    if not isinstance(schema, dict):
        return
    for keyword, value in schema.items():
        if keyword == "pattern" and isinstance(value, str):
            yield value
        elif keyword == "patternProperties" and isinstance(value, dict):
            yield from value
        yield from _patterns_of(value)
