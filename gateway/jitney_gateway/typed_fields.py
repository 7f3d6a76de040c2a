"""Checks the fields of records in which the field ``type`` decides what others there may be. Pure.

``responses_request.py`` and ``messages_request.py`` have such records.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from jitney_gateway.refusals import FieldError


class FieldsOfType(NamedTuple):
    """The fields of a record that go with one value of its field ``type``."""

    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()


def check_fields(path: str, record: Any, types: Mapping[str, FieldsOfType]) -> None:
    """Check that a record has the fields that its type requires, and none of other types. In what
    comes back from earlier answers, the latter are allowed. Raises FieldError.

    ``path`` leads to the record in the body. ``types``: type -> its fields. A field that belongs to
    no type is always allowed.
    """
    own = types.get(record.type)
    if own is None:
        bound = " or ".join(types)
        raise FieldError(f"{path}.type", f"{path}.type is {record.type!r}, but must be {bound}")
    names_of_all_types = set[str]()
    for fields in types.values():
        names_of_all_types.update(fields.required, fields.optional)
    for name in sorted(names_of_all_types):
        field = f"{path}.{name}"
        is_given = getattr(record, name) is not None
        if name in own.required:
            if not is_given:
                raise FieldError(field, f"{field} is missing")
            continue
        is_foreign = name not in own.optional
        if is_given and is_foreign and not record.rules.comes_back:
            raise FieldError(field, f"{field} does not go with the type {record.type}")
