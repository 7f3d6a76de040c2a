"""Picks the reader for the arguments of a call in a model's format. Pure."""

from typing import Any

from jitney_gateway.call_arguments import ArgumentsReader
from jitney_gateway.formats import ToolFormat
from jitney_gateway.gemma_notation import GemmaNotation
from jitney_gateway.json_arguments import ArgumentsLikeJson, PlainJson
from jitney_gateway.python_arguments import PythonArguments
from jitney_gateway.tagged_arguments import TaggedArguments


def make_reader(tool_format: ToolFormat, schema: Any) -> ArgumentsReader:
    """What reads the arguments of a function. ``schema``: the JSON schema of its parameters."""
    match tool_format.body:
        case "json":
            return ArgumentsLikeJson(PlainJson(), tool_format.markers)
        case "gemma":
            notation = GemmaNotation()
            return ArgumentsLikeJson(notation, notation.without_quotes(tool_format.markers))
        case "xml":
            return TaggedArguments(schema)
        case _:
            return PythonArguments()
