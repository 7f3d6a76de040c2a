"""Rows that are lines of JSON: decoded, made columns, and written with the result's columns behind
their own.

Lines are found and decoded here rather than by ``pyarrow.json``: a line that is no JSON is one bad
row, whose bytes and offset are told, and a text that looks like a time stays a text. Where all
lines of a chunk fit the job's schema, ``pyarrow.json`` makes the columns of them.

A number may be a bare ``NaN``, ``Infinity`` or ``-Infinity``. JSON has none of these, but Python,
pandas and Spark write and read them.
"""

import codecs
import io
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from jitney.errors import InvalidArgumentError

from jitney_jobs.arrow import pa, pa_json
from jitney_jobs.columns import Columns, of_values
from jitney_jobs.non_finite import NonFinite
from jitney_jobs.schemas import holds_floats, large_type

_STRING_OR_BARE = re.compile(rb'"(?:[^"\\]|\\.)*"|-?Infinity|NaN', re.DOTALL)
"""A whole string, or a number that JSON does not have."""


def decoded(line: bytes) -> dict[str, Any]:
    """Raises what msgspec raises for a line that is no object of JSON."""
    try:
        return strictly_decoded(line)
    except msgspec.DecodeError:
        if not _may_have_bare(line):
            raise
    strictly_decoded(with_nulls(line))  # whatever else is wrong with the line
    row: dict[str, Any] = json.loads(line.removeprefix(codecs.BOM_UTF8))
    return row


def strictly_decoded(line: bytes) -> dict[str, Any]:
    """As :func:`decoded`, but a bare NaN or Infinity is no JSON."""
    return msgspec.json.decode(line.removeprefix(codecs.BOM_UTF8), type=dict)


def _may_have_bare(text: bytes) -> bool:
    """Whether a text may have a bare NaN or Infinity. They may stand in a string, too."""
    return b"NaN" in text or b"Infinity" in text


def with_nulls(text: bytes) -> bytes:
    """JSON with null in place of each bare NaN and Infinity."""
    return _with_finite(text, NonFinite("null"))


def _with_finite(text: bytes, non_finite: NonFinite) -> bytes:
    """JSON with what the job says in place of each bare NaN and Infinity. Raises
    InvalidArgumentError if they are errors."""
    if not _may_have_bare(text):
        return text

    def replaced(found: re.Match[bytes]) -> bytes:
        token = found[0]
        if token.startswith(b'"'):
            return token
        return encoded(non_finite.replaced(float(token)))

    return _STRING_OR_BARE.sub(replaced, text)


def columns_of_lines(
    lines: Sequence[bytes], rows: Sequence[dict[str, Any]], schema: pa.Schema, is_whole: bool
) -> Columns:
    """The columns of ``schema``. ``rows``: the decoded lines, with the columns of their folders
    and without those that are not kept. ``is_whole``: the lines have exactly the columns of
    ``rows``."""
    if is_whole and not _has_large(rows, schema):
        try:
            return Columns(_read(b"\n".join(lines), len(lines), schema), {})
        except pa.ArrowInvalid:
            pass  # a line does not fit: find out which, and whether it can be made to fit
    return of_values(rows, schema)


def _has_large(rows: Sequence[dict[str, Any]], schema: pa.Schema) -> bool:
    """Whether any row has an integer that no double holds where the schema has floats.
    ``pyarrow.json`` would round it."""
    for field in schema:
        if not holds_floats(field.type):
            continue
        for row in rows:
            large = large_type(row.get(field.name))
            if not pa.types.is_null(large):
                return True
    return False


def _read(data: bytes, row_count: int, schema: pa.Schema) -> pa.RecordBatch:
    table = pa_json.read_json(
        io.BytesIO(data),
        read_options=pa_json.ReadOptions(use_threads=False, block_size=len(data) + 1),
        parse_options=pa_json.ParseOptions(
            explicit_schema=schema, unexpected_field_behavior="error"
        ),
    )
    (batch,) = table.combine_chunks().to_batches()
    if len(batch) != row_count:
        raise pa.ArrowInvalid("a line is not one row")
    return batch.select(schema.names).cast(schema)


# ------------------------------------------------------------------ writing


def _for_json(value: Any) -> Any:
    """What is written of a value that JSON does not have."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    return str(value)


_ENCODER = msgspec.json.Encoder(enc_hook=_for_json)


def encoded(row: Any) -> bytes:
    """As JSON. Raises whatever its values raise."""
    return _ENCODER.encode(row)


def joined(row: bytes, result: bytes) -> bytes:
    """One object of JSON with the fields of two, which are not decoded."""
    head = row[: row.rindex(b"}")].rstrip()
    tail = result[result.index(b"{") + 1 :].lstrip()
    comma = b"" if head.endswith(b"{") or tail.startswith(b"}") else b","
    return head + comma + tail


def kept(
    line: bytes, keep: Sequence[str] | None, further: Mapping[str, Any], non_finite: NonFinite
) -> bytes:
    """An object of JSON with the line's fields, or those of them in ``keep``, and the ``further``
    columns. Values stay as they are written in the line, but for NaN and infinities. Raises
    InvalidArgumentError if these are errors."""
    line = line.strip().removeprefix(codecs.BOM_UTF8)
    if keep is None:
        line = _with_finite(line, non_finite)
        if not further:
            return line
    fields = msgspec.json.decode(with_nulls(line), type=dict[str, msgspec.Raw])
    fields |= {name: msgspec.Raw(encoded(value)) for name, value in further.items()}
    if keep is None:
        return encoded(fields)
    if _may_have_bare(line):  # only those of columns that are kept count
        values = decoded(line)
        for name in keep:
            if name in values:
                fields[name] = msgspec.Raw(encoded(non_finite.replaced(values[name])))
    return encoded({name: fields.get(name) for name in keep})


def check_no_common_name(of_input: Sequence[str], of_result: Sequence[str]) -> None:
    """Raises InvalidArgumentError."""
    common = set(of_input) & set(of_result)
    if common:
        raise InvalidArgumentError(
            f"column {min(common)!r} is both of the input and of the result: name the result's "
            "with output_column, or choose the input's columns with keep"
        )
