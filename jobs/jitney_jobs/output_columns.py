"""The columns of a job's output: those of the input that are kept, and the result's.

All parts of a table have the same columns. They are known before the first part, except the columns
that ``map`` makes: its first results set those.
"""

from collections.abc import Iterable, Sequence

import msgspec
from jitney.errors import InvalidArgumentError

from jitney_jobs.arrow import pa
from jitney_jobs.dataset import Dataset
from jitney_jobs.ended_rows import Ended, in_order
from jitney_jobs.job import Job, OutputFormat
from jitney_jobs.json_lines import check_no_common_name
from jitney_jobs.rows import LINES, RowValues
from jitney_jobs.schemas import SeenTypes, check_storable, is_text
from jitney_jobs.tasks import Context, MapResult

_SAMPLE_ROWS = 256
"""So many results of ``map`` set the types of the columns that it makes."""
_SAMPLE_BYTES = 16 << 20


class OutputColumns:
    """Of the parts of one run, or of one actor."""

    def __init__(self, job: Job, dataset: Dataset) -> None:
        """Raises InvalidArgumentError for settings that exclude each other."""
        self.format = output_format_of(job, dataset)
        self.is_table = self.format != "jsonl"
        """Whether parts have columns with types, and not lines of JSON."""
        self._job = job
        self._dataset = dataset
        self.known: pa.Schema | None = pa.schema([])
        """The columns. None as long as they are not known: the first results of ``map`` set
        them."""
        self._of_input = pa.schema([])
        """The columns of the input that are written, so far as they are known before its rows."""
        self.schema: bytes | None = None
        """The columns of a table, for the journal, as Arrow serializes them. None until they are
        known."""
        self.are_final = True
        """Whether later runs keep to these columns. They do not if the setting ``limit`` left too
        few results of ``map`` to set them."""

    def set_result(self, of_result: pa.Schema | None, stated: bytes | None = None) -> None:
        """Set the columns of the result with their types; None if they are known only once there
        are rows. ``stated``: the columns of the parts that are there, as the journal has them. Call
        it before the first part is written. Raises InvalidArgumentError if a column is both of the
        input and of the result, and for a column to keep or divide by that is not there."""
        of_input = self._dataset.schema or pa.schema([])
        keep = self._job.keep
        if of_input.names and keep is not None:  # else the input does not state its columns
            for name in keep:
                if name not in of_input.names:
                    bound = f"one of {', '.join(of_input.names)}"
                    raise InvalidArgumentError.of("keep", name, bound)
        columns = [field for field in of_input if keep is None or field.name in keep]
        self._of_input = pa.schema(columns, of_input.metadata)
        fields = [] if of_result is None else list(of_result)
        self._check_written_schema(is_whole=of_result is not None)
        check_no_common_name(self._of_input.names, [field.name for field in fields])
        if self.is_table:
            self._set_table(fields, of_result is not None, stated)

    def _check_written_schema(self, is_whole: bool) -> None:
        """Raises InvalidArgumentError if the setting ``schema`` names a column that is not there.
        ``is_whole``: all columns of the result are known."""
        schema = self._dataset.schema
        for name in self._dataset.written_schema.names:
            if schema is None:
                bound = "unset: values of JSON lines are written as they came"
                raise InvalidArgumentError.of("schema", name, bound)
            if is_whole and name not in schema.names:
                bound = f"of {', '.join(schema.names)}"
                raise InvalidArgumentError.of("schema", name, bound)

    def _set_table(self, fields: list[pa.Field], is_whole: bool, stated: bytes | None) -> None:
        """``fields``: of the result; empty unless ``is_whole``, which says that they are known."""
        self.known = pa.schema([*self._of_input, *fields], self._of_input.metadata)
        if self.format == "parquet":
            check_storable(self.known)
        if stated is not None:
            self.schema = stated
            self.known = pa.ipc.read_schema(pa.py_buffer(stated))
        elif is_whole:
            self.schema = self.known.serialize().to_pybytes()
        else:
            self.known = None
        if self.known is not None:
            self._check_partition_by(self.known)

    def _check_partition_by(self, schema: pa.Schema) -> None:
        for name in self._job.partition_by:
            if name not in schema.names:
                bound = f"one of {', '.join(schema.names)}"
                raise InvalidArgumentError.of("partition_by", name, bound)
            kind = schema.field(name).type
            if not _can_name_folder(kind):
                bound = f"a column of texts, numbers or times: it is of type {kind}"
                raise InvalidArgumentError.of("partition_by", name, bound)
        if set(schema.names) <= set(self._job.partition_by):
            names = ", ".join(self._job.partition_by)
            raise InvalidArgumentError.of("partition_by", names, "some of the columns, not all")

    def completed(self, context: Context) -> Context:
        """The context, with what the workers must know of the output. Call it once the input has
        its schema."""
        # Texts and lines become columns of Arrow in the workers.
        makes_columns = self._dataset.format == "text"
        if self._dataset.format in LINES and self.is_table:
            makes_columns = True
        schema = self._dataset.schema
        keep = self._job.keep
        kept = None
        if schema is not None:
            kept = [name for name in schema.names if keep is None or name in keep]
        columns = None
        if makes_columns:
            assert schema is not None, "the input was looked at"
            columns = pa.schema([schema.field(name) for name in kept or []])
        return msgspec.structs.replace(
            context, writes_table=self.is_table, kept=kept, columns=columns
        )

    def to_read(self, of_task: Sequence[str] | None) -> list[str] | None:
        """The columns of the input that are needed: those that the task reads, and those that are
        written. None: all."""
        keep = self._job.keep
        if of_task is None or keep is None:
            return None
        return list(dict.fromkeys([*keep, *of_task]))

    def are_known(self, part: Sequence[Ended]) -> bool:
        """Whether the columns are known, or this part has enough results to set them. It must be
        as many however long they take: otherwise the columns would depend on the time. A part of
        bad rows alone needs no columns."""
        if self.known is not None:
            return True
        row_count = sum(len(ended.results) for ended in part)
        if not row_count:
            return True
        nbytes = sum(ended.result_bytes for ended in part)
        return row_count >= _SAMPLE_ROWS or nbytes >= _SAMPLE_BYTES

    def learn(self, part: Sequence[Ended]) -> None:
        """Have the first results of ``map`` set the types of its columns, unless they are known."""
        if self.known is not None:
            return
        rows = sample_of(result for ended in in_order(part) for result in ended.results)
        if rows:
            self.learn_from(rows)

    def learn_from(self, rows: Sequence[RowValues]) -> None:
        """Have these first results of ``map`` set the types of its columns. Raises
        InvalidArgumentError for types that the output cannot have."""
        seen = SeenTypes()
        seen.add(rows)
        written = self._dataset.written_schema
        fields = []
        for field in seen.schema():
            if field.name in self._of_input.names:
                continue
            if field.name in written.names:
                field = field.with_type(written.field(field.name).type)
            fields.append(field)
        there = {*self._of_input.names, *seen.schema().names}
        # Columns that the job names and that the first results lack: later ones may have them.
        missing = [field for field in written if field.name not in there]
        known = pa.schema([*self._of_input, *fields, *missing], self._of_input.metadata)
        if self.format == "parquet":
            check_storable(known)
        self._check_partition_by(known)
        self.known = known
        self.schema = known.serialize().to_pybytes()


def _can_name_folder(kind: pa.DataType) -> bool:
    """Whether values of a type can stand in the names of folders."""
    types = pa.types
    if types.is_dictionary(kind):
        return _can_name_folder(kind.value_type)
    return is_text(kind) or types.is_decimal(kind) or types.is_primitive(kind)


def output_format_of(job: Job, dataset: Dataset) -> OutputFormat:
    """Of the parts. Raises InvalidArgumentError if they cannot be divided as the job says."""
    output_format = job.output_format
    if output_format == "auto":
        output_format = "jsonl" if dataset.format in LINES else "parquet"
    if job.partition_by and output_format != "parquet":
        bound = "unset, or output_format must be parquet"
        raise InvalidArgumentError.of("partition_by", ", ".join(job.partition_by), bound)
    return output_format


def sample_of(results: Iterable[RowValues | MapResult]) -> list[RowValues]:
    """The values of as many of the first results as set the types of columns."""
    rows: list[RowValues] = []
    nbytes = 0
    for result in results:
        if isinstance(result, MapResult):
            nbytes += len(result.data)
            rows.append(result.values())
        else:
            rows.append(result)
        if len(rows) == _SAMPLE_ROWS or nbytes >= _SAMPLE_BYTES:
            break
    return rows
