"""What a job would read and write, found out before anything runs: ``--dry-run`` prints it, and the
names of columns are checked with it."""

from collections.abc import Sequence

from jitney.errors import show

from jitney_jobs.column_names import check_columns, check_there, needed_columns
from jitney_jobs.dataset import Dataset
from jitney_jobs.generate import check_settings
from jitney_jobs.job import Job
from jitney_jobs.journal import Record
from jitney_jobs.rows import Chunk, RowValues
from jitney_jobs.storage import Storage

_SAMPLE_ROWS = 1000
"""So many rows show the columns of files that state none."""
_SHOWN_ROWS = 3


class Preview:
    """Of one job. Reads the beginning of its input."""

    def __init__(self, job: Job, dataset: Dataset) -> None:
        """Raises UnavailableError if the storage fails."""
        self._job = job
        self._dataset = dataset
        self._schema = dataset.read_schema()
        self._rows: list[RowValues] | None = None

    def check_named(self) -> None:
        """The columns that the job names, and its other settings. Raises InvalidArgumentError if
        one is not there or cannot be."""
        check_settings(self._job)
        if self._job.input_format == "openai":
            return
        there = self.columns
        if there:  # else there are no rows
            check_columns(self._job, there)

    def check_needed(self, columns: Sequence[str]) -> None:
        """Those that the model needs, once that is known. Raises InvalidArgumentError."""
        there = self.columns
        if there and "path" not in there:  # a file can stand for any of them
            check_there(dict.fromkeys(columns, "the model"), there)

    @property
    def columns(self) -> list[str]:
        """Those of the input that are known: all, or those of the first rows."""
        if self._schema is not None:
            return self._schema.names
        if self._dataset.files_are_rows:
            return ["path", "text"] if self._dataset.format == "text" else ["path"]
        return list(dict.fromkeys(name for row in self._first_rows() for name in row))

    def _first_rows(self) -> list[RowValues]:
        """The first rows that are good."""
        if self._rows is not None:
            return self._rows
        storage = Storage(self._job)
        rows: list[RowValues] = []
        chunks = self._dataset.chunks(Record.empty(), _SAMPLE_ROWS)
        chunk = next((each for each in chunks if isinstance(each, Chunk)), None)
        for raw in [] if chunk is None else chunk.raw_rows():
            assert chunk is not None, "it has rows"
            try:
                rows.append(chunk.row(raw, storage))
            except Exception:  # the job will say why it is bad
                continue
        self._rows = rows
        return rows

    def text(self) -> str:
        """Some lines for the user."""
        job = self._job
        lines = [f"input   {job.input}: {self._dataset.found}"]
        if self._schema is not None:
            columns = [f"{field.name} {field.type}" for field in self._schema]
        else:
            columns = self.columns
        lines.append(f"columns {', '.join(columns) or 'none'}")
        needed = ", ".join(needed_columns(job))
        if needed:
            lines.append(f"uses    {needed}")
        lines.append(f"output  {job.output}")
        for number, row in enumerate(self._shown_rows()):
            lines.append(f"row {number:<3} {_row_text(row)}")
        return "\n".join(lines)

    def _shown_rows(self) -> list[RowValues]:
        most = _SHOWN_ROWS if self._job.limit is None else min(_SHOWN_ROWS, self._job.limit)
        return self._first_rows()[:most]


def _row_text(row: RowValues) -> str:
    return ", ".join(f"{name}: {show(value)}" for name, value in row.items())
