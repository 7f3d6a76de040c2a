"""Values inside of a row's values: ``doc.text`` is the field ``text`` of the column ``doc``."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jitney.errors import InvalidArgumentError


def source_column(name: str, there: Collection[str]) -> str | None:
    """The column that a name leads to: one of that very name, or else the longest one that the name
    begins with, before a dot. None if none is there."""
    column = name
    while column not in there:
        column, dot, _ = column.rpartition(".")
        if not dot:
            return None
    return column


def value_at(row: Mapping[str, Any], name: str) -> Any:
    """The value that a name leads to, through fields of objects and indices of lists. Raises
    InvalidArgumentError if there is none, or if it is null."""
    column = source_column(name, row)
    if column is None:
        raise InvalidArgumentError(f"column {name!r} is missing")
    value = row[column]
    steps = name[len(column) + 1 :].split(".") if column != name else []
    for step in steps:
        if value is None:
            break
        value = _step(value, step, name)
    if value is None:
        raise InvalidArgumentError(f"column {name!r} is empty")
    return value


def has_value_at(row: Mapping[str, Any], name: str) -> bool:
    """Whether :func:`value_at` has one."""
    try:
        value_at(row, name)
    except InvalidArgumentError:
        return False
    return True


def _step(value: Any, step: str, name: str) -> Any:
    if isinstance(value, Mapping) and step in value:
        return value[step]
    is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    if is_list and step.isdecimal() and int(step) < len(value):
        return value[int(step)]
    raise InvalidArgumentError(f"column {name!r} is missing: there is no {step!r}")
