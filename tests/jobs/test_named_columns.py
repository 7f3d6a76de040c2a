"""The columns that a job names are checked before anything runs, and those that ``map`` gets."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from jitney.errors import InvalidArgumentError, LoadError

from tests.jobs.job_rows import job_of, read, run, write_lines

MARKED = "tests.jobs.job_rows:marked"


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    lines = [",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]
    path.write_text("\n".join(lines))


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    pq.write_table(pa.Table.from_pylist(rows), path)


@pytest.mark.parametrize(
    ("name", "write"),
    [("a.parquet", write_parquet), ("a.csv", write_csv), ("a.jsonl", write_lines)],
)
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prompt": "{txet}"}, r"prompt names column 'txet', which .* \(did you mean 'text'\?\)"),
        ({"template": "{{ txet }}"}, r"template names column 'txet'.*'text'"),
        ({"column": "txet"}, "column names column 'txet'"),
        ({"sampling_column": ["sede"]}, r"sampling_column names column 'sede'.*did you mean"),
        ({"output_column": "text"}, "column 'text' is both of the input and of the result"),
        ({"keep": ["txet"]}, "keep.*'?txet'?"),
        ({"prompt": "{text"}, "prompt is '{text', but must be with the name of a column"),
        ({"prompt": "{text.title}"}, "prompt names 'text.title', which leads to nothing"),
    ],
)
def test_columns_are_checked_before_the_model_is_loaded(
    tmp_path: Path,
    name: str,
    write: Callable[[Path, list[dict[str, Any]]], Any],
    settings: dict[str, Any],
    message: str,
) -> None:
    """There is no model. And the job can be put right, as nothing is written."""
    write(tmp_path / name, [{"text": "a", "seed": 1}] * 60)
    given = {"task": "generate", "map": None, "model": str(tmp_path / "no-model")}
    with pytest.raises(InvalidArgumentError, match=message):
        run(tmp_path / name, tmp_path / "out", **given, **settings)
    with pytest.raises(LoadError):
        run(tmp_path / name, tmp_path / "out", **given, prompt="{text}")
    assert run(tmp_path / name, tmp_path / "out", map=MARKED)


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl"])
def test_map_gets_the_columns_that_the_job_names(tmp_path: Path, name: str) -> None:
    write = write_parquet if name == "a.parquet" else write_lines
    write(tmp_path / name, [{"id": 1, "text": "a"}])
    settings = {"map": "tests.jobs.job_rows:names_of", "output_format": "jsonl"}
    with pytest.raises(InvalidArgumentError, match="map_column names column 'di'"):
        run(tmp_path / name, tmp_path / "out", map_column=["di"], **settings)
    assert run(tmp_path / name, tmp_path / "out", map_column=["id"], **settings)
    assert read(tmp_path / "out") == [{"id": 1, "text": "a", "names": ["id"]}]


def test_a_template_may_do_without_a_column(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [{"text": "a"}])
    template = "{% if title is defined %}{{ title }}{% endif %}{{ end | default('') }}{{ text }}"
    given = {"task": "generate", "map": None, "model": str(tmp_path / "no-model")}
    with pytest.raises(LoadError):
        run(source, tmp_path / "out", **given, template=template)


def test_the_results_column_of_a_chains_second_job(tmp_path: Path) -> None:
    """Its input has every column that a job's result has."""
    names = ["output", "finish_reason", "prompt_tokens", "output_tokens"]
    source = write_lines(tmp_path / "in.jsonl", [{"text": "a", **dict.fromkeys(names, 1)}])
    given = {"task": "generate", "map": None, "model": str(tmp_path / "no-model")}
    with pytest.raises(InvalidArgumentError, match=r"is both of the .* with output_column, or"):
        run(source, tmp_path / "out", **given)
    with pytest.raises(LoadError):
        run(source, tmp_path / "out", **given, output_column="second")
    with pytest.raises(InvalidArgumentError, match="output_column is not for task map"):
        job_of(source, tmp_path / "out", output_column="second")
