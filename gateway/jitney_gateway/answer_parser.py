"""Picks the parser for an answer in a model's formats. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from jitney_gateway.formats import AnswerFormats
from jitney_gateway.harmony import HarmonyParser
from jitney_gateway.parsers import Parser
from jitney_gateway.pieces import AnswerParser


def make_parser(formats: AnswerFormats, tools: Sequence[Mapping[str, Any]]) -> AnswerParser:
    """The parser of a sequence whose model writes in these formats. ``tools``: the request's."""
    if "harmony" in (formats.tool, formats.reasoning):
        return HarmonyParser(None if formats.tool is None else tools)
    return Parser(formats.tool, formats.reasoning, tools)
