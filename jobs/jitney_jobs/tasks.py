"""What a job does with each row: the tasks, and what they are made of.

A task is made in every process from the same :class:`Context`. Worker processes prepare rows with
it (``prepare``), and the job's process makes columns of the results (``finished_rows``). ``map`` is
here; language models are in ``generate``, exported ones in ``tensors``, OpenAI's lines in
``openai_lines``.
"""

import pickle
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
from jitney.errors import InvalidArgumentError
from jitney_server.standins.signature import Signature

from jitney_jobs.arrow import pa
from jitney_jobs.generate import Encoder, Generate, GenerateOnServer, LanguageModel
from jitney_jobs.job import Job
from jitney_jobs.json_lines import check_no_common_name, encoded
from jitney_jobs.non_finite import NonFinite
from jitney_jobs.rows import RowValues
from jitney_jobs.tensors import Tensors


class Context(msgspec.Struct, frozen=True):
    """All that a task is made of. It is sent to the workers."""

    job: Job
    language_model: LanguageModel | None = None
    signature: Signature | None = None
    tokenizer: str | None = None
    takes_blocks: bool = False
    """Whether the executor takes arrays of many rows."""
    writes_table: bool = False
    """Whether the output has typed columns, and not lines of JSON."""
    kept: list[str] | None = None
    """The input's columns that are written, if they are known."""
    columns: Any = None
    """A pa.Schema, of what the workers make of lines or texts, to be written. None if they make
    nothing."""


class Task(Protocol):
    """What is done with each row."""

    @property
    def fields(self) -> pa.Schema | None:
        """The result's columns. None if they are known only once there are rows."""

    @property
    def columns(self) -> Sequence[str] | None:
        """The columns of the input that it reads. None: all."""

    def prepare(self, row: RowValues) -> Any:
        """What the executor takes. Raises for a bad row, UnavailableError if the storage fails."""

    def finish(self, row: RowValues, result: Any) -> RowValues:
        """The result's columns. ``row`` has values only if the input is lines of OpenAI's
        service."""


class MapResult(NamedTuple):
    """The new columns of a row, as bytes: their size is known, and the job's process makes values
    of them only when it writes them."""

    data: bytes
    """JSON if the output is lines, else a pickled dict."""
    non_finite: int
    """How many values of JSON were NaN or infinite."""

    def values(self) -> RowValues:
        """Only if the output is a table."""
        row: RowValues = pickle.loads(self.data)
        return row


class Map:
    """A function of the user's: the whole of the work is done in the workers."""

    fields = None

    def __init__(self, context: Context) -> None:
        job = context.job
        name = str(job.map)
        self.columns = job.map_column or None
        self._is_table = context.writes_table
        self._kept = context.kept if job.keep is None else job.keep
        self._non_finite = job.non_finite
        try:
            self._function: Callable[[RowValues], Any] = pkgutil.resolve_name(name)
        except Exception as error:  # the user's module may raise anything
            raise InvalidArgumentError(f"map {name!r} cannot be imported: {error}") from error
        if not callable(self._function):
            raise InvalidArgumentError.of("map", name, "a function")

    def prepare(self, row: RowValues) -> MapResult:
        names = list(row) if self._kept is None else self._kept
        if self.columns is not None:  # of lines, all columns come
            row = {name: value for name, value in row.items() if name in self.columns}
        result = self._function(row)
        if not isinstance(result, Mapping):
            raise InvalidArgumentError.of("the result of map", result, "a dict of new columns")
        values = dict(result)
        check_no_common_name(names, list(values))
        if self._is_table:
            return MapResult(pickle.dumps(values, pickle.HIGHEST_PROTOCOL), 0)
        non_finite = NonFinite(self._non_finite)
        return MapResult(encoded(non_finite.replaced(values)), non_finite.count)

    def finish(self, row: RowValues, result: Any) -> RowValues:
        raise AssertionError("results of map are written as they are")


def make_task(context: Context) -> Task:
    """Raises InvalidArgumentError for a template, function or parameter that cannot be used."""
    job = context.job
    if job.task == "map":
        return Map(context)
    if job.input_format == "openai":
        return _make_line_task(context)
    if job.server is not None and job.task == "generate":
        return GenerateOnServer(job)
    if context.signature is not None:
        return Tensors(job, context.signature, context.tokenizer)
    assert context.language_model is not None, "a job that generates has a language model"
    return Generate(job, Encoder(context.language_model))


def _make_line_task(context: Context) -> Task:
    """The task of lines for OpenAI's API."""
    from jitney_jobs import openai_lines  # imports much of the gateway

    if context.job.server is not None:
        return openai_lines.OpenAiLinesOnServer(context.job)
    if context.signature is not None:
        return openai_lines.OpenAiEmbeddings(context.job, context.signature, context.tokenizer)
    assert context.language_model is not None, "a job that generates has a language model"
    return openai_lines.OpenAiLines(context.job, context.language_model)
