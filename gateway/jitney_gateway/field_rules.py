"""Which fields of a body are honoured, which are refused, and which are left out.

Clients send many fields that only the servers of their own maker know. If the gateway cannot honour
a field, there are two cases. Without some fields the answer would mean something else: they are
refused. All others are ignored: they are left out, and a header of the answer names them. A strict
gateway refuses those, too.

``gateway.py`` makes an ``IgnoredFields`` for each request, and writes the header. ``wire.py`` calls
``honoured_part``, which leaves fields out of a body before a record is made of it.
``without_effect.py`` leaves out later what has no effect on the model. Pure.
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
"""Fields that any object may have, and that the header does not name. ``cache_control`` marks what
a prefix cache should keep: ours needs no marks."""
_UNLESS_PARAMS: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "logprobs": (False,),
    "stop": ([], ""),
}
"""Refused sampling parameter -> its values that change nothing. They are not refused."""


class Refused(NamedTuple):
    """A refused field: which of its values are not refused, and why the others are."""

    unless: tuple[Any, ...] = ()
    """Values that change nothing. With them, the field is left out, and not named."""
    because: str = "this is not supported"


class FieldRules(NamedTuple):
    """What is done with fields of an object that have no field in its record, or whose values the
    record does not all honour.

    A field that the record lacks is ignored, unless a rule says otherwise.
    """

    refused: Mapping[str, Refused] = {}
    """Fields without which the answer would mean something else."""
    only: Mapping[str, tuple[Any, ...]] = {}
    """Field -> the values that are honoured, or that change nothing. With any other value it is
    ignored."""
    items: Mapping[str, tuple[Any, ...]] = {}
    """Field that is a list of strings -> the items that are honoured. Other items are ignored."""
    silent: frozenset[str] = frozenset()
    """Fields that are left out, and not named. They repeat what another field says, or come from an
    earlier answer of some server."""
    texts: frozenset[str] = frozenset()
    """Fields that are ignored if they hold something else than a text."""
    types: frozenset[str] | None = None
    """The values of the object's field ``type`` that the record takes. In a list, objects of other
    types are ignored. None: the record takes any type."""
    ignored_types: frozenset[str] | None = None
    """If it is set, only objects of these types are ignored, and those that are neither here nor in
    ``types`` are refused. None: all that are not in ``types`` are ignored."""
    comes_back: bool = False
    """Whether clients send such objects as they got them in an answer, of this server or another.
    Then even a strict gateway ignores unknown fields."""


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
        even_if_strict: bool = False,
    ) -> None:
        """Note that a field is ignored. A strict gateway raises FieldError instead, whose text is
        the name of the field and ``fault``.

        - ``field``: the path, as the header names it.
        - ``at``: the path for the error, if it differs.
        - ``even_if_strict``: a strict gateway ignores the field, too.
        """
        if self._strict and not even_if_strict:
            faulty = at or field
            raise FieldError(faulty, f"{faulty} {fault}")
        self._names[re.sub(r"\[\d+\]", "[]", field)] = None

    def header(self) -> str:
        """The names, for a header; empty if nothing was ignored."""
        names = []
        for name in list(self._names)[:_MOST_NAMES]:
            plain = re.sub(r"[^\w.\[\]:/-]", "?", name, flags=re.ASCII)
            # An empty name would leave the space of the separator at the end of the header, where
            # no header may have one.
            names.append(plain[:_LONGEST_NAME] or "?")
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
        alternatives: list[inspect.Type] = []
        for part in info.types:
            alternatives += _alternatives(part)
        return tuple(alternatives)
    return (info,)


def allowed_texts(type_: type[RuledRecord], path: str) -> list[str]:
    """The texts that a field may hold to which ``path`` leads in a body of ``type_``."""
    types: list[inspect.Type] = [inspect.type_info(type_)]
    for step in re.findall(r"\w+|\[[^]]*\]", path):
        inner: list[inspect.Type] = []
        for info in types:
            if isinstance(info, inspect.StructType):
                named = [field.type for field in info.fields if field.encode_name == step]
                for field_type in named:
                    inner += _alternatives(field_type)
            elif isinstance(info, inspect.ListType) and step.startswith("["):
                inner += _alternatives(info.item_type)
        types = inner
    texts = []
    for info in types:
        if isinstance(info, inspect.LiteralType):
            texts += [value for value in info.values if isinstance(value, str)]
    return texts


class _Reader:
    """Walks through a body and the types of its records together. Values of a wrong type are kept:
    the record refuses them."""

    def __init__(self, ignored: IgnoredFields) -> None:
        self._ignored = ignored

    def object(
        self, fields: Mapping[str, Any], type_: type[RuledRecord], path: str
    ) -> dict[str, Any]:
        """The honoured part of an object to which ``path`` leads. Raises FieldError."""
        known = _types_of_fields(type_)
        kept = {}
        for name, value in fields.items():
            field = f"{path}.{name}" if path else name
            is_known = name in known
            if value is None and not is_known:
                continue  # null stands for an absent field
            refused = _refusal_of(type_, name)
            if refused is not None:
                _check_changes_nothing(value, refused, field)
                continue
            if name in _SILENT or name in type_.rules.silent:
                continue
            if self._ignore(type_.rules, name, value, field, is_known=is_known):
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

    def _ignore(
        self, rules: FieldRules, name: str, value: Any, field: str, *, is_known: bool
    ) -> bool:
        """Add a field to what is ignored, if it is not honoured. Returns whether to leave it out:
        also if its value changes nothing, and the record does not know it. Raises FieldError in a
        strict gateway."""
        if name in rules.only:
            changes_nothing = value is None or value in rules.only[name]
            if changes_nothing:
                return not is_known  # a record may want to see it
            self._ignored.add(field, fault=f"is {show(value)}, but this is not supported")
            return True
        is_no_text = name in rules.texts and not isinstance(value, str | None)
        if not is_known or is_no_text:
            self._ignored.add(field, even_if_strict=rules.comes_back)
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
            if self._ignore_by_type(value, item_type, item_path):
                continue
            kept.append(self._value(value, item_type, item_path))
        return kept

    def _ignore_by_type(self, value: Any, item_type: inspect.Type, path: str) -> bool:
        """Add an object of a list to what is ignored, if its ``type`` says so. Returns whether it
        does. Raises FieldError in a strict gateway."""
        given = value.get("type") if isinstance(value, dict) else None
        rules = _rules_of_items(item_type)
        if not isinstance(given, str) or rules is None:
            return False
        if rules.types is None or given in rules.types:
            return False
        if rules.ignored_types is not None and given not in rules.ignored_types:
            return False
        bound = " or ".join(sorted(rules.types))
        self._ignored.add(
            f"{path}:{given}",
            at=f"{path}.type",
            fault=f"is {show(given)}, but must be {bound}",
            even_if_strict=rules.comes_back,
        )
        return True


def _refusal_of(type_: type[RuledRecord], name: str) -> Refused | None:
    """How a field is refused in a record of ``type_``; None if it is not."""
    if name in type_.refused_params:
        return Refused(_UNLESS_PARAMS.get(name, ()))
    return type_.rules.refused.get(name)


def _check_changes_nothing(value: Any, refused: Refused, field: str) -> None:
    """Raises FieldError for a value with which the refused field would change the answer."""
    if value not in refused.unless:
        raise FieldError(field, f"{field} is {show(value)}, but {refused.because}")


def _rules_of_items(item_type: inspect.Type) -> FieldRules | None:
    """The rules of the records in a list; None if its items are no such records."""
    for type_ in _alternatives(item_type):
        if isinstance(type_, inspect.StructType) and issubclass(type_.cls, RuledRecord):
            return type_.cls.rules
    return None
