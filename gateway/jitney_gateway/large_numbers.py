"""Finds the number of a body that is too large to be read. msgspec tells the fault, but not where
it is. ``wire.py`` asks, to name the field."""

import json
import math
from typing import Any, NamedTuple

_MOST_DIGITS = 4300
"""Of an integer that Python reads, and msgspec."""


class LargeNumber(NamedTuple):
    """A number that is too large."""

    path: str
    """Where it stands, such as ``tools[0].function.parameters.maximum``."""
    text: str
    """How it is written, shortened."""


def find_large_number(data: bytes) -> LargeNumber | None:
    """The first number of a body that no double holds, or that has too many digits; None if there
    is none, or if the body is no JSON that Python reads."""
    try:
        body = json.loads(data, parse_float=_float, parse_int=_integer)
        return _find(body, "")
    except (ValueError, RecursionError):
        return None


def _float(text: str) -> Any:
    return LargeNumber("", text[:32]) if math.isinf(float(text)) else 0.0


def _integer(text: str) -> Any:
    return LargeNumber("", text[:32] + "…") if len(text) > _MOST_DIGITS else 0


def _find(value: Any, path: str) -> LargeNumber | None:
    if isinstance(value, LargeNumber):
        return value._replace(path=path[:200])
    parts: list[tuple[str, Any]] = []
    if isinstance(value, dict):
        parts = [(f"{path}.{name}" if path else name, part) for name, part in value.items()]
    elif isinstance(value, list):
        parts = [(f"{path}[{index}]", part) for index, part in enumerate(value)]
    for inner, part in parts:
        found = _find(part, inner)
        if found is not None:
            return found
    return None
