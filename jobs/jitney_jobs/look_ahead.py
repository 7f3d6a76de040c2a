"""The columns that all files of a job's input have in common, found before the first row is run."""

import contextlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from jitney.errors import InvalidArgumentError, JitneyError

from jitney_jobs.arrow import pa
from jitney_jobs.file_reader import FileReader, bad_file_or
from jitney_jobs.journal import InputFile, Ranges
from jitney_jobs.json_lines import decoded
from jitney_jobs.rows import LINE
from jitney_jobs.schemas import SeenTypes, may_round, plain, unified, with_texts

_FOOTERS_AT_ONCE = 16
_HEAD_BYTES = 16 << 20
"""How much of each file of JSON lines is read on object storage. Local files are read to their
end."""
_ROWS = 1024
"""So many lines are looked at together."""


def schema_of_files(reader: FileReader, files: Sequence[InputFile]) -> pa.Schema:
    """Of files that state their columns: Parquet, Arrow and CSV. A file that cannot be read is left
    out, and named when its rows are read. Raises InvalidArgumentError if none can, and
    UnavailableError if the storage fails."""
    readable: list[InputFile] = []
    schemas: list[pa.Schema] = []
    first_error: JitneyError | None = None
    with ThreadPoolExecutor(_FOOTERS_AT_ONCE) as pool:
        found_of_files = pool.map(lambda file: bad_file_or(partial(reader.schema, file)), files)
        for file, schema in zip(files, found_of_files, strict=True):
            if isinstance(schema, JitneyError):
                first_error = first_error or schema
            else:
                readable.append(file)
                schemas.append(schema)
    if not schemas and first_error is not None:
        raise first_error
    found = unified(schemas)
    fields = [field.with_type(plain(field.type)) for field in found]
    for file, schema in zip(readable, schemas, strict=True):
        fields = [_exact_field(reader, file, schema, field) for field in fields]
    return pa.schema(fields, found.metadata)


def _exact_field(
    reader: FileReader, file: InputFile, schema: pa.Schema, field: pa.Field
) -> pa.Field:
    """The field of all files, with text as its type if that type does not hold the values of this
    file: an id of 19 digits, where another file has doubles."""
    index = schema.get_field_index(field.name)
    if index < 0:
        return field
    own = schema.field(index).type
    if not may_round(own, field.type):
        return field
    holds = bad_file_or(partial(reader.holds_all, file, field.name, field.type))
    # A damaged file is named when its rows are read.
    if isinstance(holds, JitneyError) or holds:
        return field
    return field.with_type(with_texts(own, field.type))


def schema_of_lines(reader: FileReader, files: Sequence[InputFile], is_local: bool) -> pa.Schema:
    """Of lines of JSON. Local files are read to their end, others as far as ``_HEAD_BYTES``. Raises
    UnavailableError if the storage fails."""
    seen = SeenTypes()
    most_bytes = None if is_local else _HEAD_BYTES
    for index, file in enumerate(files):
        # A file that cannot be read is named when its rows are.
        with contextlib.suppress(InvalidArgumentError):
            _look_at_lines(reader, file, index, most_bytes, seen)
    return seen.schema()


def _look_at_lines(
    reader: FileReader, file: InputFile, index: int, most_bytes: int | None, seen: SeenTypes
) -> None:
    """Of one file. Raises InvalidArgumentError if it is damaged."""
    nbytes = 0
    for batch in reader.batches(file, index, Ranges(), _ROWS):
        assert batch.data is not None, "no row is committed"
        seen.add(_decodable(batch.data.column(LINE).to_pylist()))
        nbytes += batch.nbytes
        if most_bytes is not None and nbytes >= most_bytes:
            return


def _decodable(lines: list[bytes]) -> list[dict[str, Any]]:
    """The lines that are objects of JSON. The others will be bad rows."""
    rows = []
    for line in lines:
        with contextlib.suppress(Exception):  # a line may be anything
            rows.append(decoded(line))
    return rows
