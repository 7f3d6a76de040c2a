"""Surveys the lines of a job for OpenAI's API before any is run: which of them repeat the
``custom_id`` of an earlier line, and which models they name."""

import codecs
import contextlib
from array import array
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import numpy as np
from jitney.errors import InvalidArgumentError, show

from jitney_jobs.dataset import Dataset
from jitney_jobs.job import Job
from jitney_jobs.journal import Record
from jitney_jobs.rows import Chunk, RowId

_CHUNK_ROWS = 1024
_MOST_MODELS_NAMED = 5


class Survey(NamedTuple):
    """Of all lines of a job."""

    repeated: frozenset[RowId]
    """The lines with the ``custom_id`` of an earlier one."""
    models: Counter[str]
    """Name of a model -> how many lines name it."""


class SurveyedJob(NamedTuple):
    """A job, and what the survey of its lines added to it."""

    job: Job
    """With the model that all lines name, unless it names one itself, or asks a server."""
    repeated: frozenset[RowId]
    """As in :class:`Survey`."""


class _Line(msgspec.Struct):
    custom_id: Any = None
    body: msgspec.Raw = msgspec.Raw()


class _Body(msgspec.Struct):
    model: Any = None


def survey_job(job: Job, dataset: Dataset) -> SurveyedJob:
    """Only lines for OpenAI's API are surveyed; any other job comes back as it is. Raises
    InvalidArgumentError if the lines name no model, or several, and the job names none."""
    if job.input_format != "openai" or job.task == "map":
        return SurveyedJob(job, frozenset())
    survey = survey_lines(dataset)
    if job.model is None and job.server is None:
        job = msgspec.structs.replace(job, model=model_of_lines(survey.models))
    return SurveyedJob(job, survey.repeated)


def survey_lines(dataset: Dataset) -> Survey:
    """Reads the whole input, and keeps 8 bytes of each line."""
    hashes = array("q")
    models: Counter[str] = Counter()
    for _, line in _lines(dataset):
        if isinstance(line.custom_id, str):
            hashes.append(hash(line.custom_id))
        name = _model_of(line)
        if name is not None:
            models[name] += 1
    in_order = np.sort(np.array(hashes, np.int64))
    is_repeated = in_order[1:] == in_order[:-1]
    suspects = set(in_order[1:][is_repeated].tolist())
    return Survey(_repeated(dataset, suspects), models)


def model_of_lines(models: Counter[str]) -> str:
    """The model that all lines name. Raises InvalidArgumentError if there is no such model."""
    if len(models) == 1:
        return next(iter(models))
    if not models:
        raise InvalidArgumentError("the lines name no model: name it with the setting model")
    named = [f"{show(name)} ({count:,})" for name, count in models.most_common(_MOST_MODELS_NAMED)]
    if len(models) > _MOST_MODELS_NAMED:
        named.append(f"{len(models) - _MOST_MODELS_NAMED:,} more")
    raise InvalidArgumentError(
        f"the lines name {len(models):,} models: {', '.join(named)}; a job runs one: name it with "
        "the setting model"
    )


def _repeated(dataset: Dataset, suspects: set[int]) -> frozenset[RowId]:
    """The lines that repeat a ``custom_id`` whose hash is among ``suspects``."""
    if not suspects:
        return frozenset()
    seen: set[str] = set()
    repeated: set[RowId] = set()
    for id_, line in _lines(dataset):
        custom_id = line.custom_id
        if not isinstance(custom_id, str) or hash(custom_id) not in suspects:
            continue
        if custom_id in seen:
            repeated.add(id_)
        seen.add(custom_id)
    return frozenset(repeated)


def _lines(dataset: Dataset) -> Iterator[tuple[RowId, _Line]]:
    """All lines that are JSON objects. A bad file is left out here, and named when its rows are
    read."""
    for chunk in dataset.chunks(Record.empty(), _CHUNK_ROWS, skips_bad_files=True):
        if not isinstance(chunk, Chunk):
            continue
        for index, data in zip(chunk.indices, chunk.lines(), strict=True):
            with contextlib.suppress(msgspec.DecodeError, RecursionError, UnicodeDecodeError):
                line = msgspec.json.decode(data.removeprefix(codecs.BOM_UTF8), type=_Line)
                yield RowId(chunk.file, index), line


def _model_of(line: _Line) -> str | None:
    try:
        name = msgspec.json.decode(line.body, type=_Body).model
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None
    return name if isinstance(name, str) else None
