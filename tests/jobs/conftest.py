"""What tests of jobs share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.jobs.bucket import Bucket, bucket_in
from tests.jobs.shard_runs import Place


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """An empty bucket, to which no part may be uploaded in pieces."""
    root = tmp_path / "storage"
    root.mkdir()
    with bucket_in(root, monkeypatch) as bucket:
        yield bucket
        assert bucket.uploads == 0, "a part is one PUT"


@pytest.fixture(params=["local", pytest.param("s3", marks=pytest.mark.slow)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """An output that is local, and one in a bucket."""
    if request.param == "local":
        return Place(str(tmp_path / "out"), tmp_path / "out")
    bucket = request.getfixturevalue("bucket")
    return Place(bucket.place("out"), bucket.folder / "out")
