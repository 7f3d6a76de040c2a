"""Arrow's columns of rows: cast to the types of a job, made of Python's values, and made values of.

A value that cannot become one of its column's type makes its row a bad one, and no other. No value
is rounded or cut. A column of text takes any value of JSON: numbers, lists and objects as their
JSON.
"""

import base64
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from jitney.errors import InvalidArgumentError

from jitney_jobs.arrow import pa, pc
from jitney_jobs.non_finite import NAMES, NonFinite
from jitney_jobs.schemas import in_microseconds, is_list, is_text, plain

Errors = dict[int, str]
"""Index of a row in its batch -> why it is bad."""
_MOST_SHOWN = 80
"""Characters of a value in an error."""


class Columns(NamedTuple):
    """Rows as columns. A row that has an error has a null in the column at fault."""

    data: pa.RecordBatch
    errors: Errors


# ------------------------------------------------------------------ from Arrow


def in_schema(batch: pa.RecordBatch, schema: pa.Schema) -> Columns:
    """The columns of ``schema``, with its types. A column that the batch lacks is null."""
    if batch.schema.equals(schema, check_metadata=True):
        return Columns(batch, {})
    there = set(batch.schema.names)
    errors: Errors = {}
    arrays = []
    for field in schema:
        if field.name in there:
            array = batch.column(field.name)
            arrays.append(_cast(array, field.name, field.type, errors))
        else:
            arrays.append(pa.nulls(len(batch), field.type))
    return Columns(pa.RecordBatch.from_arrays(arrays, schema=schema), errors)


def _cast(array: pa.Array, name: str, kind: pa.DataType, errors: Errors) -> pa.Array:
    """The column ``name`` as one of type ``kind``. If the whole cannot be cast, each row is cast
    alone: one that fails is null, and ``errors`` says why."""
    if array.type.equals(kind):
        return array
    array = _plain_array(array)
    try:
        return array.cast(kind)
    except pa.ArrowException:
        pass
    rows = []
    for index in range(len(array)):
        row = array.slice(index, 1)
        try:
            rows.append(_cast_one(row, kind))
        except Exception:  # whatever the value is
            errors[index] = f"column {name!r}: {_shown(row)} is no value of type {kind}"
            rows.append(pa.nulls(1, kind))
    return pa.concat_arrays(rows) if rows else pa.nulls(0, kind)


def _plain_array(array: pa.Array) -> pa.Array:
    """The same values in a type without views and runs, also inside of lists and structs. Arrow's
    own casts are wrong there: runs in structs become nulls, and views of lists lose their last
    offset."""
    kind = array.type
    types = pa.types
    if types.is_run_end_encoded(kind):
        return _plain_array(pc.run_end_decode(array))
    if types.is_list_view(kind) or types.is_large_list_view(kind):
        return _plain_array(_list_of_view(array))
    plain_kind = plain(kind)
    if kind.equals(plain_kind):
        return array
    if types.is_struct(kind):
        children = [_plain_array(array.field(index)) for index in range(kind.num_fields)]
        fields = [field.with_type(child.type) for field, child in zip(kind, children, strict=True)]
        return pa.StructArray.from_arrays(children, fields=fields, mask=array.is_null())
    if types.is_list(kind) or types.is_large_list(kind):
        lengths = pc.fill_null(pc.list_value_length(array), 0)
        return _list_of(array, lengths, is_large=types.is_large_list(kind))
    if _has_runs(kind):
        raise InvalidArgumentError(f"runs or views of lists in type {kind} cannot be read")
    return array.cast(plain_kind)


def _has_runs(kind: pa.DataType) -> bool:
    """Whether a type has runs or views of lists in it."""
    types = pa.types
    if types.is_run_end_encoded(kind) or types.is_list_view(kind):
        return True
    if types.is_large_list_view(kind):
        return True
    return any(_has_runs(kind.field(index).type) for index in range(kind.num_fields))


def _cast_one(row: pa.Array, kind: pa.DataType) -> pa.Array:
    """An array of one row as one of type ``kind``. Raises whatever says why it cannot be."""
    try:
        return row.cast(kind)
    except pa.ArrowException:
        is_empty_text = is_text(row.type) and row[0].as_py() == ""
        if is_empty_text and not is_text(kind):
            return pa.nulls(1, kind)  # an empty field of CSV
        # Python would cut nanoseconds: such a value cannot become JSON without loss.
        fits_python = row.type.equals(in_microseconds(row.type))
        if not is_text(kind) or not fits_python:
            raise
        (value,) = values_of(row)
        return pa.array([_text_of(value)], kind)


def _text_of(value: Any) -> str:
    """Bytes in base64; a list or an object as JSON, in which times and decimals are texts and bytes
    are in base64."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    value = NonFinite("text").replaced(value)
    return msgspec.json.encode(value).decode()


def _list_of_view(views: pa.Array) -> pa.Array:
    """Lists of the same values. Arrow's own cast makes an array without its last offset."""
    lengths = pc.fill_null(pc.list_value_length(views), 0)
    return _list_of(views, lengths, is_large=pa.types.is_large_list_view(views.type))


def _list_of(lists: pa.Array, lengths: pa.Array, is_large: bool) -> pa.Array:
    """Lists of the same values, in a plain type. ``lengths``: of each list, 0 for a null."""
    offset_type = np.int64 if is_large else np.int32
    ends = np.cumsum(lengths.to_numpy(zero_copy_only=False))
    offsets = pa.array(np.concatenate(([0], ends)).astype(offset_type))
    make = pa.LargeListArray if is_large else pa.ListArray
    return make.from_arrays(offsets, _plain_array(lists.flatten()), mask=pc.is_null(lists))


def is_exact(array: pa.Array, kind: pa.DataType) -> bool:
    """Whether each of the values can become one of that type without loss."""
    array = _plain_array(array)
    types = pa.types
    if types.is_struct(array.type) and types.is_struct(kind):
        return all(
            is_exact(child, kind.field(field.name).type)
            for field, child in zip(array.type, array.flatten(), strict=True)
        )
    if is_list(array.type) and is_list(kind):
        return is_exact(array.flatten(), kind.value_type)
    try:
        return bool(array.cast(kind).cast(array.type).equals(array))
    except pa.ArrowException:
        return False


def _shown(row: pa.Array) -> str:
    """The value of an array of one row, for an error."""
    try:
        text = str(row[0])
    except Exception:  # Python does not have it, such as a date after the year 9999
        text = " ".join(str(row).split())
    return _shortened(text)


def _shortened(text: str) -> str:
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"


def without_views(batch: pa.RecordBatch) -> pa.RecordBatch:
    """With types that Arrow can take single rows from."""
    arrays = []
    fields = []
    for field, array in zip(batch.schema, batch.columns, strict=True):
        kind = plain(field.type)
        if not kind.equals(field.type):
            array = _cast(array, field.name, kind, {})
        arrays.append(array)
        fields.append(field.with_type(kind))
    schema = pa.schema(fields, batch.schema.metadata)
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def compact(batch: pa.RecordBatch) -> pa.RecordBatch:
    """A copy that holds nothing of the batch that it is a slice of."""
    return from_bytes(to_bytes(batch))


def to_bytes(batch: pa.RecordBatch) -> pa.Buffer:
    """A slice without the rest of its batch."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    return sink.getvalue()


def from_bytes(data: pa.Buffer | bytes) -> pa.RecordBatch:
    return pa.ipc.open_stream(data).read_next_batch()


def taken(batch: pa.RecordBatch, rows: Sequence[int]) -> pa.RecordBatch:
    """The rows with these indices. If they are all rows in their order, the batch itself."""
    are_all = len(rows) == len(batch) and list(rows) == list(range(len(batch)))
    if are_all:
        return batch
    if not batch.num_columns:
        return without_columns(len(rows))
    return batch.take(pa.array(rows, pa.int64()))


def without_columns(row_count: int) -> pa.RecordBatch:
    """Rows that have no columns."""
    return pa.RecordBatch.from_struct_array(pa.array([{}] * row_count, pa.struct([])))


# ------------------------------------------------------------------ to Python


def values_of(array: pa.Array) -> list[Any]:
    """As Python's values. Times are cut to microseconds, the finest that Python has."""
    kind = in_microseconds(array.type)
    if not kind.equals(array.type):
        array = array.cast(kind, safe=False)
    return array.to_pylist()


def rows_of(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """As :func:`values_of`."""
    names = batch.schema.names
    columns = [values_of(array) for array in batch.columns]
    if not columns:
        return [{} for _ in range(batch.num_rows)]
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def shown_row(batch: pa.RecordBatch, index: int) -> dict[str, Any]:
    """A row for an error file. A value that Python does not have is a text."""
    row = {}
    for name, array in zip(batch.schema.names, batch.columns, strict=True):
        one = array.slice(index, 1)
        try:
            (row[name],) = values_of(one)
        except Exception:  # such as a date after the year 9999
            row[name] = str(one)
    return row


# ------------------------------------------------------------------ from Python


def of_values(rows: Sequence[Mapping[str, Any]], schema: pa.Schema) -> Columns:
    """Rows of Python's values as columns with the types of ``schema``. A row may lack columns; one
    that has others is bad."""
    errors: Errors = {}
    known = set(schema.names)
    for index, row in enumerate(rows):
        unknown = row.keys() - known
        if unknown:
            name = min(unknown, key=str)
            errors[index] = f"column {name!r} is not in the output, whose columns are fixed"
    arrays = []
    for field in schema:
        values = [row.get(field.name) for row in rows]
        arrays.append(_array_of(values, field, errors))
    return Columns(_batch_of(arrays, schema, len(rows)), errors)


def _batch_of(arrays: list[pa.Array], schema: pa.Schema, row_count: int) -> pa.RecordBatch:
    if not arrays:  # `from_arrays` would make a batch without rows
        return without_columns(row_count)
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _array_of(values: list[Any], field: pa.Field, errors: Errors) -> pa.Array:
    fitting = []
    for index, value in enumerate(values):
        try:
            fitting.append(fitted(value, field.type))
        except Exception as error:  # a value may be anything
            errors.setdefault(index, f"column {field.name!r}: {error}")
            fitting.append(None)
    try:
        return _made_array(fitting, field.type)
    except Exception:  # it is one of the values: find it
        pass
    rows = []
    for index, value in enumerate(fitting):
        try:
            rows.append(_made_array([value], field.type))
        except Exception as error:
            errors.setdefault(index, f"column {field.name!r}: {error}")
            rows.append(pa.nulls(1, field.type))
    return pa.concat_arrays(rows)


def _made_array(values: list[Any], kind: pa.DataType) -> pa.Array:
    try:
        return pa.array(values, kind)
    except (pa.ArrowException, TypeError):
        if not all(value is None or isinstance(value, str) for value in values):
            raise
        return pa.array(values, pa.string()).cast(kind)  # times and decimals in JSON are texts


def fitted(value: Any, kind: pa.DataType) -> Any:
    """A value that Arrow can make one of that type, without loss. Raises InvalidArgumentError if
    there is none."""
    if value is None:
        return None
    types = pa.types
    if is_text(kind):
        return value if isinstance(value, str) else json_text(value)
    if types.is_integer(kind):
        return _integer(value, kind)
    if types.is_floating(kind):
        return _float(value, kind)
    if types.is_boolean(kind) and not isinstance(value, bool | np.bool_):
        raise _misfit(value, kind)
    if types.is_struct(kind):
        return _struct(value, kind)
    if is_list(kind):
        return _list(value, kind.value_type)
    return value  # Arrow checks it


def _integer(value: Any, kind: pa.DataType) -> int:
    if not _is_number(value):
        raise _misfit(value, kind)
    is_finite = not isinstance(value, float | np.floating) or math.isfinite(value)
    if not is_finite or value != int(value):
        raise _misfit(value, kind)
    return int(value)


def _float(value: Any, kind: pa.DataType) -> float:
    if not _is_number(value):
        raise _misfit(value, kind)
    if isinstance(value, int) and int(float(value)) != value:
        raise _misfit(value, kind)  # no double holds it
    return float(value)


def _is_number(value: Any) -> bool:
    """To Python a bool is an int; here it is none."""
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def _struct(value: Any, kind: pa.StructType) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise _misfit(value, kind)
    types = {field.name: field.type for field in kind}
    if not value.keys() <= types.keys():
        raise _misfit(value, kind)
    return {name: fitted(item, types[name]) for name, item in value.items()}


def _list(value: Any, kind: pa.DataType) -> Any:
    if isinstance(value, np.ndarray):
        return value if value.ndim == 1 else _list(list(value), kind)
    if not isinstance(value, list | tuple):
        raise _misfit(value, kind)
    # Lists of numbers are long: one look at their types is enough if they are all alike.
    alike = set(map(type, value))
    if alike == {int} and pa.types.is_integer(kind):
        return value
    if alike == {float} and pa.types.is_floating(kind):
        return value
    return [fitted(item, kind) for item in value]


def _misfit(value: Any, kind: pa.DataType) -> InvalidArgumentError:
    return InvalidArgumentError(f"{_shortened(repr(value))} is no value of type {kind}")


def json_text(value: Any) -> str:
    """A value of JSON as its text. Raises InvalidArgumentError for any other."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if not _is_json(value):
        raise InvalidArgumentError(f"{value!r:.80} is no text, and no value of JSON")
    if isinstance(value, float) and not math.isfinite(value):
        return NAMES.get(value, "NaN")
    value = NonFinite("text").replaced(value)
    return msgspec.json.encode(value).decode()


def _is_json(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(name, str) and _is_json(item) for name, item in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_json, value))
    return value is None or isinstance(value, bool | int | float | str)
