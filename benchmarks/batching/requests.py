"""The requests of the batching benchmarks as files that perf_analyzer reads. It sends the entries
of a file in turn."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.batching.subjects import Subject


def write_rows(path: Path, subject: Subject) -> Path:
    """The subject's rows as tensors."""
    return write_tensors(path, _rows(subject))


def write_payloads(path: Path, subject: Subject) -> Path:
    """The subject's rows as bodies of JSON, for the naive server."""
    bodies = []
    for row in _rows(subject):
        body = {name: value.tolist() for name, value in row.items()}
        bodies.append({"payload": [body]})
    return write_entries(path, bodies)


def write_texts(path: Path, name: str, texts: Sequence[str]) -> Path:
    """Texts for a model whose input ``name`` is STRING [1]."""
    return write_entries(path, [{name: [text]} for text in texts])


def write_tensors(path: Path, entries: Sequence[dict[str, np.ndarray]]) -> Path:
    """Tensors, for each request."""
    return write_entries(path, [_tensors(entry) for entry in entries])


def _rows(subject: Subject) -> list[dict[str, np.ndarray]]:
    rows = range(len(subject.expected))
    return [{name: values[row] for name, values in subject.rows.items()} for row in rows]


def _tensors(entry: dict[str, np.ndarray]) -> dict[str, Any]:
    return {
        name: {"content": value.ravel().tolist(), "shape": list(value.shape)}
        for name, value in entry.items()
    }


def write_entries(path: Path, entries: Sequence[dict[str, Any]]) -> Path:
    """Requests as they stand in the file."""
    path.write_text(json.dumps({"data": [*entries]}), encoding="utf-8")
    return path
