"""What a job would read and write, found out before anything runs: ``--dry-run`` prints it, and the
names of columns are checked with it."""

from collections.abc import Sequence

from jitney.errors import InvalidArgumentError, show

from jitney_jobs.addresses import errors_without_keys, without_keys
from jitney_jobs.column_names import check_any_there, check_columns, needed_columns
from jitney_jobs.dataset import Dataset
from jitney_jobs.generate import check_settings
from jitney_jobs.job import Job
from jitney_jobs.journal import Record
from jitney_jobs.nested import has_value_at
from jitney_jobs.rows import Chunk, RowValues
from jitney_jobs.storage import Storage

_SAMPLE_ROWS = 1000
"""So many rows show the columns of lines, which state none."""
_SHOWN_ROWS = 3


class Preview:
    """Of one job, whose dataset has its schema."""

    def __init__(self, job: Job, dataset: Dataset) -> None:
        self._job = job
        self._dataset = dataset
        self._rows: list[RowValues] | None = None

    def check_named(self) -> None:
        """Check the columns that the job names, and its other settings. Raises
        InvalidArgumentError if one is not there or cannot be, and UnavailableError if the storage
        fails."""
        check_settings(self._job)
        if self._job.input_format == "openai":
            return
        there = self.columns
        if there:  # else there are no rows
            check_columns(self._job, there)
            self._check_fields(there)

    def _check_fields(self, there: Sequence[str]) -> None:
        """Check names of what is inside of columns, such as ``doc.text``. Raises
        InvalidArgumentError for one that leads to nothing in any of the first rows."""
        for name, setting in needed_columns(self._job).items():
            if name in there:
                continue
            rows = self._first_rows()
            if rows and not any(has_value_at(row, name) for row in rows):
                raise InvalidArgumentError(
                    f"{setting} names {name!r}, which leads to nothing in the first "
                    f"{len(rows):,} rows"
                )

    def check_needed(self, columns: Sequence[str] | None) -> None:
        """``columns``: those that the task may read, None for all. Raises InvalidArgumentError if
        none of them is there."""
        there = self.columns
        if there and columns and self._job.task != "map":
            check_any_there(columns, there)

    @property
    def columns(self) -> list[str]:
        """Those of the input that are known: all, or those of the first rows."""
        if self._dataset.schema is not None:
            return list(self._dataset.schema.names)
        return list(dict.fromkeys(name for row in self._first_rows() for name in row))

    def _first_rows(self) -> list[RowValues]:
        """The first rows that are good. Raises UnavailableError if the storage fails."""
        if self._rows is None:
            self._rows = self._read_rows()
        return self._rows

    def _read_rows(self) -> list[RowValues]:
        # A bad file is named when its rows are read, unless they are done.
        chunks = self._dataset.chunks(Record.empty(), _SAMPLE_ROWS, skips_bad_files=True)
        chunk = next((each for each in chunks if isinstance(each, Chunk)), None)
        if chunk is None:
            return []
        rows = chunk.rows(Storage(self._job))
        return [row for row in rows if not isinstance(row, Exception)]

    def text(self) -> str:
        """Some lines for the user."""
        job = self._job
        schema = self._dataset.schema
        if schema is None:
            columns = self.columns
        else:
            columns = [f"{field.name} {field.type}" for field in schema]
        lines = [
            f"input   {without_keys(job.input)}: {self._dataset.summary}",
            f"columns {', '.join(columns) or 'none'}",
        ]
        needed = ", ".join(needed_columns(job))
        if needed:
            lines.append(f"uses    {needed}")
        lines.append(f"output  {without_keys(job.output)}")
        most = _SHOWN_ROWS if job.limit is None else min(_SHOWN_ROWS, job.limit)
        for number, row in enumerate(self._first_rows()[:most]):
            lines.append(f"row {number:<3} {_row_text(row)}")
        return "\n".join(lines)


@errors_without_keys()
def preview_of(job: Job) -> str:
    """What a job would read and write. Nothing is written. Raises as
    :func:`~jitney_jobs.run.run_job` does before the model is loaded."""
    dataset = Dataset(job)
    dataset.set_schema(dataset.look_ahead(is_typed=False))
    preview = Preview(job, dataset)
    preview.check_named()
    return preview.text()


def _row_text(row: RowValues) -> str:
    return ", ".join(f"{name}: {show(value)}" for name, value in row.items())
