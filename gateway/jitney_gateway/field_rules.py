"""Which fields of a body are honoured, which are refused, and which are left out.

A field is refused only if the answer would mean something else without it. Any other field that the
gateway cannot honour is left out, and the answer's header names it: clients send many fields that
only the servers of their own maker know. A strict gateway refuses those fields too.

``wire.py`` takes what is left out from the JSON of a body (``honoured_part``) before it makes a
record of it. What only the model can tell, ``server_request.py`` adds later. ``app.py`` makes an
``IgnoredFields`` for each request, and writes the header. Pure.
"""

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import msgspec
from jitney.errors import show
from msgspec import inspect

from jitney_gateway.refusals import FieldError

_MOST_NAMES = 32
"""Most fields that the header names."""
_LONGEST_NAME = 64
_UNKNOWN = "is unknown or not supported"
_SILENT = frozenset(["cache_control"])
"""Fields that any object may have, and that are left out without a word: whatever can be found in
the prefix cache is found."""
_UNLESS_PARAMS: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "logprobs": (False,),
    "stop": ([], ""),
}
"""Refused sampling parameters -> the values that ask for what is done without them."""


class Refused(NamedTuple):
    """Why a field is refused, which no record has."""

    unless: tuple[Any, ...] = ()
    """The values that ask for what is done anyway."""
    because: str = "this is not supported"


class FieldRules(NamedTuple):
    """What is done with the fields of an object that its record does not have, or not every value
    of which is honoured."""

    refused: Mapping[str, Refused] = {}
    """Fields that would change what the answer means."""
    only: Mapping[str, tuple[Any, ...]] = {}
    """Fields that change no answer -> the values that are honoured, or that ask for what is done
    anyway. The field is ignored if it has another value."""
    items: Mapping[str, tuple[Any, ...]] = {}
    """Fields that are lists -> the items that are honoured. Other items are ignored."""
    silent: frozenset[str] = frozenset()
    """Fields that are left out without a word: a second form of what another field says, or what a
    server has said of an earlier answer."""
    types: frozenset[str] | None = None
    """The types that an object in a list may have: values of its field ``type``. Objects of other
    types are ignored. None: any."""
    ignored_types: frozenset[str] | None = None
    """The only other types that are ignored; the record refuses those that are in neither. None:
    all."""
    comes_back: bool = False
    """Whether clients send such objects as they got them, from this server or from another. Then
    unknown fields are ignored by a strict gateway too."""


class RuledRecord(msgspec.Struct):
    """A record with rules for what it does not hold."""

    rules: ClassVar[FieldRules] = FieldRules()
    refused_params: ClassVar[tuple[str, ...]] = ()
    """Sampling parameters that the record refuses."""


class IgnoredFields:
    """The fields of one request that have no effect."""

    def __init__(self, *, strict: bool = False) -> None:
        """``strict``: such fields are refused."""
        self._strict = strict
        self._names: dict[str, None] = {}
        """In the order in which they were found. The same field of several messages is one."""

    def add(
        self,
        field: str,
        *,
        fault: str = _UNKNOWN,
        at: str | None = None,
        always: bool = False,
    ) -> None:
        """Note that the field of that path is ignored. If the gateway is strict, raises FieldError
        instead: about ``at``, or else ``field``, with ``fault`` behind its name. ``always``: a
        strict gateway ignores it too."""
        if self._strict and not always:
            faulty = at or field
            raise FieldError(faulty, f"{faulty} {fault}")
        self._names[re.sub(r"\[\d+\]", "[]", field)] = None

    def header(self) -> str:
        """The names, for a header; empty if nothing was ignored."""
        names = []
        for name in list(self._names)[:_MOST_NAMES]:
            plain = re.sub(r"[^\w.\[\]:/-]", "?", name, flags=re.ASCII)
            names.append(plain[:_LONGEST_NAME] or "?")  # no header may end with a space
        if len(self._names) > _MOST_NAMES:
            names.append(f"and {len(self._names) - _MOST_NAMES} more")
        return ", ".join(names)


def honoured_part(
    fields: Mapping[str, Any], type_: type[RuledRecord], ignored: IgnoredFields
) -> dict[str, Any]:
    """The part of a decoded body that a record of ``type_`` can be made of; the rest is added to
    ``ignored``. Raises FieldError for a field that would change the answer, and in a strict gateway
    for any field that is not honoured."""
    return _Reader(ignored).object(fields, type_, "")


@lru_cache(256)
def _types_of_fields(type_: type[RuledRecord]) -> Mapping[str, inspect.Type]:
    """Name of a field in JSON -> its type."""
    info = inspect.type_info(type_)
    assert isinstance(info, inspect.StructType)
    return {field.encode_name: field.type for field in info.fields}


def _alternatives(info: inspect.Type) -> tuple[inspect.Type, ...]:
    """The types that a value may have, without their bounds."""
    if isinstance(info, inspect.Metadata):
        return _alternatives(info.type)
    if isinstance(info, inspect.UnionType):
        return tuple(part for each in info.types for part in _alternatives(each))
    return (info,)


class _Reader:
    """Goes through a body beside the types of its records. Values of a wrong type are kept as they
    are: the record refuses them."""

    def __init__(self, ignored: IgnoredFields) -> None:
        self._ignored = ignored

    def object(
        self, fields: Mapping[str, Any], type_: type[RuledRecord], path: str
    ) -> dict[str, Any]:
        known = _types_of_fields(type_)
        kept = {}
        for name, value in fields.items():
            field = f"{path}.{name}" if path else name
            if self._is_left_out(type_, name, value, field, is_known=name in known):
                continue
            if name in type_.rules.items and isinstance(value, list):
                value = self._honoured_items(value, type_.rules.items[name], field)
            kept[name] = self._value(value, known[name], field)
        return kept

    def _honoured_items(
        self, values: list[Any], honoured: tuple[Any, ...], field: str
    ) -> list[Any]:
        kept = []
        for index, value in enumerate(values):
            if value in honoured or not isinstance(value, str):
                kept.append(value)
                continue
            bound = " or ".join(map(repr, honoured))
            self._ignored.add(
                f"{field}:{value}",
                at=f"{field}[{index}]",
                fault=f"is {show(value)}, but must be {bound}",
            )
        return kept

    def _is_left_out(
        self, type_: type[RuledRecord], name: str, value: Any, field: str, *, is_known: bool
    ) -> bool:
        """Whether a field is left out. Raises FieldError."""
        rules = type_.rules
        if value is None and not is_known:
            return True  # null stands for an absent field
        if name in type_.refused_params:
            refused: Refused | None = Refused(_UNLESS_PARAMS.get(name, ()))
        else:
            refused = rules.refused.get(name)
        if refused is not None:
            if value not in refused.unless:
                reason = f"{field} is {show(value)}, but {refused.because}"
                raise FieldError(field, reason)
            return True
        if name in _SILENT or name in rules.silent:
            return True
        if name in rules.only:
            if value is None or value in rules.only[name]:
                return not is_known
            self._ignored.add(field, fault=f"is {show(value)}, but this is not supported")
            return True
        if not is_known:
            self._ignored.add(field, always=rules.comes_back)
            return True
        return False

    def _value(self, value: Any, info: inspect.Type, path: str) -> Any:
        for type_ in _alternatives(info):
            if isinstance(type_, inspect.StructType) and isinstance(value, dict):
                if issubclass(type_.cls, RuledRecord):
                    return self.object(value, type_.cls, path)
            elif isinstance(type_, inspect.ListType) and isinstance(value, list):
                return self._list(value, type_.item_type, path)
        return value

    def _list(self, values: list[Any], item_type: inspect.Type, path: str) -> list[Any]:
        kept = []
        for index, value in enumerate(values):
            item_path = f"{path}[{index}]"
            if not self._is_of_another_type(value, item_type, item_path):
                kept.append(self._value(value, item_type, item_path))
        return kept

    def _is_of_another_type(self, value: Any, item_type: inspect.Type, path: str) -> bool:
        """Whether an object of a list is left out, because nobody here knows its ``type``."""
        given = value.get("type") if isinstance(value, dict) else None
        if not isinstance(given, str):
            return False
        for type_ in _alternatives(item_type):
            if not isinstance(type_, inspect.StructType) or not issubclass(type_.cls, RuledRecord):
                continue
            rules = type_.cls.rules
            if rules.types is None or given in rules.types:
                return False
            if rules.ignored_types is not None and given not in rules.ignored_types:
                return False
            bound = " or ".join(sorted(rules.types))
            self._ignored.add(
                f"{path}:{given}",
                at=f"{path}.type",
                fault=f"is {show(given)}, but must be {bound}",
                always=rules.comes_back,
            )
            return True
        return False
