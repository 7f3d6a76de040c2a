"""Which files are the input of a job: those that are there now, and those of the journal's list,
which are read whatever else is there."""

from collections import Counter

from jitney.errors import InvalidArgumentError

from jitney_jobs.arrow import pafs
from jitney_jobs.input_changes import InputChange, input_changes, with_digests
from jitney_jobs.input_files import (
    Found,
    common_format,
    find_files,
    folder_of_glob,
    format_of,
    kinds_of,
    kinds_text,
)
from jitney_jobs.job import InputFormat, Job
from jitney_jobs.journal import InputFile
from jitney_jobs.storage import file_system, read_error

_LINE_FORMATS = ("jsonl", "csv", "openai")
"""Formats of files that lines may be appended to."""


class InputListing:
    """The files of one job's input, on one file system."""

    def __init__(
        self, job: Job, fs: pafs.FileSystem, paths: list[str], listed: list[InputFile] | None
    ) -> None:
        """Find the files of these paths: files, folders or globs, but for those in the output.
        ``listed``: those that a journal has. Raises InvalidArgumentError, and UnavailableError if
        the storage fails."""
        self._job = job
        self._fs = fs
        self._paths = paths
        self.format: InputFormat = job.input_format
        self.bases: list[str] = []
        """The folders that were searched."""
        self.passed_over: dict[str, int] = {}
        """Kinds of files below the input that are not read, with counts."""
        self.found = self._find(listed)
        """The files that are there now, sorted."""
        self.files = listed or with_digests(fs, self.found)
        """The files that are read."""

    def _find(self, listed: list[InputFile] | None) -> list[InputFile]:
        """The files that are there now, sorted. Sets the format, by the files that are read, and
        notes what is passed over."""
        there = self._files_there(is_listed=listed is not None)
        if self.format == "auto":
            self.format = common_format(self._job.input, listed or there, self.passed_over)
        read = there
        if self._job.input_format == "auto":
            unknown = [info for info in there if format_of(info.path) != self.format]
            self.passed_over = {**kinds_of(unknown), **self.passed_over}
            read = [info for info in there if format_of(info.path) == self.format]
        if not read and not listed:
            raise InvalidArgumentError(f"input {self._job.input} has no files")
        files = [InputFile(info.path, info.size, info.mtime_ns or 0) for info in read]
        return sorted(files, key=lambda file: file.path)

    def _files_there(self, is_listed: bool) -> list[pafs.FileInfo]:
        """All files that the paths lead to, each once. If the journal has a list (``is_listed``),
        some paths may lead to nothing."""
        _, output = file_system(self._job.output)
        bases: list[str] = []
        passed_over: Counter[str] = Counter()
        by_path: dict[str, pafs.FileInfo] = {}
        missing: InvalidArgumentError | None = None
        for path in self._paths:
            try:
                search = find_files(self._fs, path)
            except OSError as error:
                raise read_error(path, error) from error
            except InvalidArgumentError as error:
                if not is_listed:
                    raise
                missing = missing or error
                search = Found(folder_of_glob(path), [])
            bases.append(search.base)
            by_path |= {info.path: info for info in search.files}
            passed_over.update(search.passed_over)
        if missing is not None and not by_path:
            raise missing
        self.bases = bases
        self.passed_over = dict(passed_over)
        there = [info for info in by_path.values() if not info.path.startswith(f"{output}/")]
        if by_path and not there and not is_listed:
            raise InvalidArgumentError.of("input", self._job.input, "outside of the output")
        return there

    @property
    def summary(self) -> str:
        """What was found, for the user: kinds of files with counts, bytes, and what is passed
        over."""
        size = sum(file.size for file in self.files)
        text = f"{kinds_text(kinds_of(self.files))} as {self.format}, {size:,} bytes"
        if self.passed_over:
            text += f"; passed over: {kinds_text(self.passed_over)}"
        return text

    def changes(self) -> list[InputChange]:
        """How the input differs from the files that are read. Raises InvalidArgumentError if
        nothing of it is there, and UnavailableError if the storage fails."""
        try:
            return input_changes(self._fs, self.files, self.found, self.format in _LINE_FORMATS)
        except OSError as error:
            raise read_error(self._job.input, error) from error

    def changes_meanwhile(self) -> list[InputChange]:
        """As :meth:`changes`, after another look at the input."""
        self.found = self._find(self.files)
        return self.changes()
