"""Arrow types of a job's columns: the schema that many files have in common, the types that lines
of JSON need.

Types that differ are promoted, so that no value is lost: int64 and double become double, a null
takes the other's type. If two types have nothing in common, the column is text.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from jitney.errors import InvalidArgumentError

from jitney_jobs.arrow import pa, pq

_MOST_FIELDS = 1000
"""An object of JSON with more fields becomes text: its names are rather data than columns."""
_MOST_DEEP = 64
"""A value with more lists and objects within one another becomes text: Arrow stores no such
types."""
MOST_EXACT = 1 << 53
"""A double holds every integer up to this number."""
_UNITS = ("ns", "us", "ms", "s")
"""Of times, the finest first."""
_DIGITS = {8: 3, 16: 5, 32: 10, 64: 20}
"""Bits of an integer -> most digits that it has."""
_DIGITS_OF_DOUBLE = 15
"""Every decimal of no more digits comes back from a double as it was."""
_MOST_DIGITS = 38
"""Of a decimal of 128 bits."""


# ------------------------------------------------------------------ promotion


def merged_type(one: pa.DataType, other: pa.DataType) -> pa.DataType:
    """A type for the values of both. Text if they have none in common."""
    if one.equals(other):
        return one
    if pa.types.is_null(one):
        return other
    if pa.types.is_null(other):
        return one
    if pa.types.is_struct(one) and pa.types.is_struct(other):
        return _merged_struct(one, other)
    if is_list(one) and is_list(other):
        return pa.list_(merged_type(one.value_type, other.value_type))
    if pa.types.is_dictionary(one) or pa.types.is_dictionary(other):
        return merged_type(_values(one), _values(other))
    for kind, less in ((one, other), (other, one)):
        if pa.types.is_timestamp(kind) and kind.tz is None and pa.types.is_date(less):
            return kind
        if _are_of_two_zones(kind, less):
            return pa.timestamp(min(kind.unit, less.unit, key=_UNITS.index), "UTC")
        if pa.types.is_decimal(kind) and pa.types.is_integer(less):
            return _decimal_for(kind, less)
    if is_binary(one) != is_binary(other):
        # Arrow would make bytes of a text, also of one that stands for a number and a text.
        return pa.string()
    schemas = [pa.schema({"column": one}), pa.schema({"column": other})]
    try:
        return pa.unify_schemas(schemas, promote_options="permissive").field(0).type
    except pa.ArrowException:  # such as of a number and a text
        return pa.string()


def _are_of_two_zones(one: pa.DataType, other: pa.DataType) -> bool:
    """Whether both are times of zones: the same times are those of UTC."""
    are_times = pa.types.is_timestamp(one) and pa.types.is_timestamp(other)
    return bool(are_times and one.tz and other.tz and one.tz != other.tz)


def _decimal_for(kind: pa.DataType, whole: pa.DataType) -> pa.DataType:
    """A decimal type with the decimal places of ``kind`` and room for all digits of integers of
    type ``whole``. Text if it would have more than ``_MOST_DIGITS``."""
    digits = max(kind.precision - kind.scale, _DIGITS[whole.bit_width])
    precision = digits + kind.scale
    return pa.string() if precision > _MOST_DIGITS else pa.decimal128(precision, kind.scale)


def _merged_struct(one: pa.StructType, other: pa.StructType) -> pa.DataType:
    fields = {field.name: field.type for field in one}
    for field in other:
        known = fields.get(field.name, pa.null())
        fields[field.name] = merged_type(known, field.type)
    if len(fields) > _MOST_FIELDS:
        return pa.string()
    return pa.struct(list(fields.items()))


def _values(kind: pa.DataType) -> pa.DataType:
    """Of a dictionary the type of its values; any other type itself."""
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def is_binary(kind: pa.DataType) -> bool:
    """Whether it is of bytes that need be no text."""
    types = pa.types
    if types.is_binary(kind) or types.is_large_binary(kind):
        return True
    return bool(types.is_fixed_size_binary(kind) or types.is_binary_view(kind))


def is_list(kind: pa.DataType) -> bool:
    types = pa.types
    return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)


def is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def unified(schemas: Iterable[pa.Schema]) -> pa.Schema:
    """The columns of all schemas, in the order in which they come first. Metadata of the schema and
    of each column is the first that there is."""
    fields: dict[str, pa.Field] = {}
    metadata = None
    for schema in schemas:
        metadata = metadata or schema.metadata
        for field in schema:
            known = fields.get(field.name)
            if known is None:
                fields[field.name] = field.with_nullable(True)
                continue
            kind = merged_type(known.type, field.type)
            both = known.metadata or field.metadata
            fields[field.name] = pa.field(field.name, kind, metadata=both)
    return pa.schema(list(fields.values()), metadata)


def may_round(own: pa.DataType, of_all: pa.DataType) -> bool:
    """Whether ``own`` may have values that ``of_all``, a type for several files, does not hold:
    integers of 64 bits and long decimals become doubles, or times get a finer unit. Types inside of
    both are compared in the same way."""
    for mine, common in _children(own, of_all):
        if may_round(mine, common):
            return True
    types = pa.types
    own = plain(_values(own))
    if types.is_timestamp(own) and types.is_timestamp(of_all):
        return bool(own.unit != of_all.unit)  # a finer one has fewer years
    if types.is_decimal(own):
        return bool(types.is_floating(of_all) and own.precision > _DIGITS_OF_DOUBLE)
    if not types.is_integer(own) or own.bit_width < 64:
        return False
    if types.is_floating(of_all):
        return True
    return bool(types.is_uint64(own) and types.is_int64(of_all))


def with_texts(own: pa.DataType, of_all: pa.DataType) -> pa.DataType:
    """``of_all`` with text in place of what :func:`may_round`."""
    if not may_round(own, of_all):
        return of_all
    types = pa.types
    if types.is_struct(of_all):
        fields = []
        for field in of_all:
            index = own.get_field_index(field.name)
            if index >= 0:
                field = field.with_type(with_texts(own.field(index).type, field.type))
            fields.append(field)
        return pa.struct(fields)
    if is_list(of_all):
        return pa.list_(with_texts(own.value_type, of_all.value_type))
    return pa.string()


def _children(own: pa.DataType, of_all: pa.DataType) -> list[tuple[pa.DataType, pa.DataType]]:
    """The pairs of types inside of two nested types: of their elements, or of fields of the same
    name."""
    if is_list(own) and is_list(of_all):
        return [(own.value_type, of_all.value_type)]
    pairs = []
    if pa.types.is_struct(own) and pa.types.is_struct(of_all):
        for field in of_all:
            index = own.get_field_index(field.name)
            if index >= 0:
                pairs.append((own.field(index).type, field.type))
    return pairs


# ------------------------------------------------------------------ types that can be written


def plain(kind: pa.DataType) -> pa.DataType:
    """The type without views and runs, of which Arrow cannot take single rows."""
    types = pa.types
    if types.is_string_view(kind):
        return pa.string()
    if types.is_binary_view(kind):
        return pa.binary()
    if types.is_run_end_encoded(kind):
        return plain(kind.value_type)
    if types.is_list_view(kind):
        return pa.list_(plain(kind.value_type))
    if types.is_large_list_view(kind):
        return pa.large_list(plain(kind.value_type))
    return _with_children(kind, plain)


def _with_children(kind: pa.DataType, change: Any) -> pa.DataType:
    """A nested type with changed types in it."""
    types = pa.types
    if types.is_struct(kind):
        return pa.struct([field.with_type(change(field.type)) for field in kind])
    if types.is_fixed_size_list(kind):
        item = kind.value_field.with_type(change(kind.value_type))
        return pa.list_(item, kind.list_size)
    if types.is_large_list(kind):
        return pa.large_list(kind.value_field.with_type(change(kind.value_type)))
    if types.is_list(kind):
        return pa.list_(kind.value_field.with_type(change(kind.value_type)))
    if types.is_map(kind):
        return pa.map_(change(kind.key_type), change(kind.item_type))
    return kind


def in_microseconds(kind: pa.DataType) -> pa.DataType:
    """The type with times in microseconds, the finest that Python has."""
    types = pa.types
    if types.is_timestamp(kind) and kind.unit == "ns":
        return pa.timestamp("us", kind.tz)
    if types.is_time64(kind):
        return pa.time64("us")
    if types.is_duration(kind) and kind.unit == "ns":
        return pa.duration("us")
    return _with_children(kind, in_microseconds)


def known(kind: pa.DataType) -> pa.DataType:
    """The type with text where only nulls, or only empty objects, were seen. (Parquet cannot hold
    empty objects.)"""
    if pa.types.is_null(kind):
        return pa.string()
    if pa.types.is_struct(kind) and kind.num_fields == 0:
        return pa.string()
    return _with_children(kind, known)


def check_storable(schema: pa.Schema) -> None:
    """Raises InvalidArgumentError if Parquet has no form for a column."""
    try:
        pq.write_metadata(schema, pa.BufferOutputStream())
    except pa.ArrowException as error:
        raise InvalidArgumentError(f"Parquet cannot hold the columns: {error}") from None


# ------------------------------------------------------------------ types of Python's values


class SeenTypes:
    """The types that the values of columns need, as rows come."""

    def __init__(self) -> None:
        self._types: dict[str, pa.DataType] = {}
        """In the order in which the columns came first."""
        self._large: dict[str, pa.DataType] = {}
        """Where columns have integers that no double holds: the type of these alone."""

    def add(self, rows: Sequence[dict[str, Any]]) -> None:
        names: dict[str, None] = {}
        for row in rows:
            names |= dict.fromkeys(row)
        for name in names:
            if not _is_name(name):
                continue  # its rows will be bad
            known_type = self._types.get(name, pa.null())
            if is_text(known_type):
                self._types[name] = known_type
                continue  # text holds whatever comes
            values = [row.get(name) for row in rows]
            kind = _storable_type(values)
            large = self._large.get(name, pa.null())
            for value in values:
                large = merged_type(large, large_type(value))
            self._large[name] = large
            # As a double such an integer would be rounded.
            self._types[name] = with_texts(large, merged_type(known_type, kind))

    def schema(self) -> pa.Schema:
        return pa.schema([(name, known(kind)) for name, kind in self._types.items()])


def large_type(value: Any) -> pa.DataType:
    """The type of those integers in a value that no double holds, and of nothing else. Null if it
    has none."""
    if isinstance(value, int):
        return pa.int64() if abs(value) > MOST_EXACT else pa.null()
    if isinstance(value, list | tuple):
        if set(map(type, value)) <= {float}:  # the usual long lists
            return pa.null()
        of_items = pa.null()
        for item in value:
            of_items = merged_type(of_items, large_type(item))
        return of_items if pa.types.is_null(of_items) else pa.list_(of_items)
    if isinstance(value, dict):
        fields = []
        for name, item in value.items():
            kind = large_type(item)
            if not pa.types.is_null(kind):
                fields.append((name, kind))
        return pa.struct(fields) if fields else pa.null()
    return pa.null()


def holds_floats(kind: pa.DataType) -> bool:
    """Whether a type is one of floats, or has some in it."""
    if pa.types.is_floating(kind):
        return True
    return any(holds_floats(kind.field(index).type) for index in range(kind.num_fields))


def _is_name(name: Any) -> bool:
    try:
        pa.field(name, pa.string())
    except Exception:  # it is no text, or none that UTF-8 can hold
        return False
    return True


def _storable_type(values: list[Any]) -> pa.DataType:
    """As :func:`type_of`, but text for what is too deep."""
    try:
        kind = type_of(values)
    except RecursionError:
        return pa.string()
    level = [kind]
    for _ in range(_MOST_DEEP):
        level = [each.field(index).type for each in level for index in range(each.num_fields)]
        if not level:
            return kind
    return pa.string()


def type_of(values: list[Any]) -> pa.DataType:
    """The type of all values: by Arrow, or if that finds none, value by value."""
    try:
        kind = pa.array(values).type
        if not _holds_large_integers(kind):
            return kind
    except Exception:  # a value may be anything, and they may have no type in common
        pass
    kind = pa.null()
    for value in values:
        kind = merged_type(kind, _type_of_one(value))
    large = pa.null()
    for value in values:
        large = merged_type(large, large_type(value))
    return with_texts(large, kind)  # as a double such an integer would be rounded


def _holds_large_integers(kind: pa.DataType) -> bool:
    """Arrow takes unsigned integers where one of them is too large for int64."""
    return pa.types.is_uint64(kind)


def _type_of_one(value: Any) -> pa.DataType:
    """Null for a value that Arrow has no type for: it makes its row a bad one."""
    if isinstance(value, bool):
        return pa.bool_()
    if isinstance(value, int):
        if -(1 << 63) <= value < 1 << 63:
            return pa.int64()
        return pa.string()
    if isinstance(value, dict):
        if not all(isinstance(name, str) for name in value):
            return pa.null()
        if len(value) > _MOST_FIELDS:
            return pa.string()
        return pa.struct([(name, _type_of_one(item)) for name, item in value.items()])
    if isinstance(value, list | tuple):
        return pa.list_(type_of(list(value)))
    try:
        kind = pa.array([value]).type
        check_storable(pa.schema({"value": kind}))
    except Exception:
        return pa.null()
    return kind
