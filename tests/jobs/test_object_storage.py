"""A job from a bucket into a bucket: pyarrow's S3 client against a small S3 server."""

import os
from collections.abc import Iterator
from pathlib import Path

import localbucket
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from jitney.errors import JitneyError
from jitney_jobs.storage import file_system

from tests.http_server import listening
from tests.jobs.job_rows import bad, read, run

ROWS = 300


class Handler(localbucket.S3Handler):
    """Takes the empty objects that stand for folders, and counts uploads of several pieces."""

    pieces = 0

    def _object_path(self, bucket: str, key: str) -> Path:
        path: Path = super()._object_path(bucket, f"{key}.folder" if key.endswith("/") else key)
        return path

    def do_PUT(self) -> None:
        type(self).pieces += "partNumber=2&" in self.path
        super().do_PUT()

    def log_message(self, *args: object) -> None:
        """Nothing: the test says what is wrong."""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a path in a bucket, but for ``{}``; the bucket is a folder of ``tmp_path``."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "any")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    handler = type("OfThisTest", (Handler,), {"data_root": tmp_path})
    with listening(handler) as address:
        yield f"s3://bucket/{{}}?scheme=http&region=us-east-1&endpoint_override={address}"
    assert handler.pieces, "the large part was uploaded in pieces"


def test_a_job_on_object_storage_goes_on(tmp_path: Path, place: str) -> None:
    """Partitioned Parquet in and out; a part that is not in the journal is removed."""
    bucket, journal = tmp_path / "bucket", str(tmp_path / "journal")
    for year in (2025, 2026):
        folder = bucket / f"in/year={year}"
        folder.mkdir(parents=True)
        rows = [{"id": i, "noise": b""} for i in range(ROWS) if i % 2 == year % 2]
        rows[-1]["noise"] = os.urandom(12 << 20)
        pq.write_table(pa.Table.from_pylist(rows), folder / "a.parquet", row_group_size=40)
    settings = {"journal": journal, "part_rows": 50, "in_flight": 100}
    with pytest.raises(JitneyError, match="bad"):
        run(place.format("in"), place.format("out"), max_errors=0, **settings)
    fs, folder = file_system(place.format("out"))
    with fs.open_output_stream(f"{folder}/part-77777.parquet") as stray:
        stray.write(b"of a run that was killed before it noted this part")
    assert run(place.format("in"), place.format("out"), **settings)
    assert not (bucket / "out/part-77777.parquet").exists()
    assert [row["input"]["id"] for row in bad(bucket / "out")] == [13]
    done = sorted((row["id"], row["year"], row["twice"]) for row in read(bucket / "out"))
    assert done == [(i, 2026 - i % 2, 2 * i) for i in range(ROWS) if i != 13]
