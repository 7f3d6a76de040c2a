"""Each kind of file (``zoo.py``) is read right, values and types as they came, or an error names
what is wrong; and the command's exit status says which."""

import json
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.jobs.job_rows import bad
from tests.jobs.job_status import run_command
from tests.jobs.zoo import KINDS, Kind


def columns_of(output: Path) -> pa.Table:
    """Of all parts, in their order."""
    parts = sorted(output.glob("part-*.parquet"))
    return pa.concat_tables([pq.read_table(part) for part in parts])


def check_bad_rows(kind: Kind, output: Path) -> None:
    found = {row["row"]: row for row in bad(output)}
    assert found.keys() == kind.bad.keys()
    for index, message in kind.bad.items():
        assert re.search(message, found[index]["error"])
    for index, raw in kind.raw.items():
        assert found[index]["input"] == raw


@pytest.mark.parametrize("name", KINDS)
def test_each_kind_of_file(tmp_path: Path, name: str) -> None:
    kind = KINDS[name]
    source = tmp_path / "in"
    source.mkdir()
    kind.write(source)
    output = tmp_path / "out"
    settings = {
        "task": "map",
        "map": "tests.jobs.zoo:nothing",
        "output_format": "parquet",
        "max_errors": "100%",
        "workers": 0,
        "retries": 0,
        **kind.settings,
    }
    settings |= {"input": str(source / kind.file), "output": str(output), "ordered": True}
    (tmp_path / "job.yaml").write_text(json.dumps(settings))
    done = run_command(["batch", "run", str(tmp_path / "job.yaml")])
    if kind.error is not None:
        assert re.search(kind.error, done.error), done.error
        assert not list(output.glob("part-*"))
    else:
        assert done.error == ""
        check_bad_rows(kind, output)
        if kind.good is not None and len(kind.good):
            made = columns_of(output)
            assert made.schema.equals(
                kind.good.schema, check_metadata=bool(kind.good.schema.metadata)
            )
            assert same_values(made, kind.good)
        else:
            assert not list(output.glob("part-*"))
    assert done.status == kind.status


def same_values(one: pa.Table, other: pa.Table) -> bool:
    """Also where NaN stands beside NaN."""
    for name in one.column_names:
        left = one[name].combine_chunks()
        right = other[name].combine_chunks()
        if not left.equals(right) and left.to_string() != right.to_string():
            return False
    return len(one) == len(other)
