"""Reads a field that may have texts or token ids. Pure."""

from typing import Any

from jitney_gateway.refusals import FieldError


def texts_or_ids(field: str, given: Any) -> list[Any]:
    """The value of a ``field`` as a list of texts, or of lists of token ids, with at least one.
    Raises FieldError."""
    if isinstance(given, str):
        return [given]
    kinds = {type(item) for item in given}
    if kinds == {int}:
        return [given]
    has_empty_list = [] in given
    if kinds not in ({str}, {list}) or has_empty_list:
        bound = "a text, a list of texts, token ids, or a list of lists of token ids"
        raise FieldError(field, f"{field} must be {bound}, and not empty")
    return list(given)
