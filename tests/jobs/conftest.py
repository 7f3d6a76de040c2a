"""What tests of jobs share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.jobs.bucket import Bucket, bucket_in


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """An empty bucket, to which no part may be uploaded in pieces."""
    root = tmp_path / "storage"
    root.mkdir()
    with bucket_in(root, monkeypatch) as bucket:
        yield bucket
        assert bucket.uploads == 0, "a part is one PUT"
