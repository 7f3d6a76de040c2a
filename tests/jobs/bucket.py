"""A bucket on a small S3 server, which may have faults."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any

import localbucket

from tests.http_server import listening


class Bucket:
    """The bucket ``bucket``, which is a folder, and what its server is asked."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = root / "bucket"
        self.folder.mkdir()
        self.address = ""
        """``host:port`` of the server."""
        self.puts: list[str] = []
        """Names of the objects that were put, in order, also of those that were refused."""
        self.uploads = 0
        """Uploads in pieces that were begun."""
        self.loses_answer_to = ""
        """The answer to the next PUT whose name contains this is lost."""
        self.heeds_conditions = True
        """Whether If-None-Match is heeded."""
        self.knows_conditions = True
        """Whether If-None-Match is taken at all."""
        self.is_read_only = False

    def place(self, path: str, keys: str = "") -> str:
        """The address of a path in the bucket, as pyarrow takes it."""
        options = f"scheme=http&region=us-east-1&endpoint_override={self.address}"
        return f"s3://{keys}bucket/{path}?{options}"

    def names(self, folder: str) -> list[str]:
        return sorted(path.name for path in (self.folder / folder).glob("*") if path.is_file())

    def left_uploads(self) -> list[Path]:
        """Uploads that were begun, and neither ended nor aborted."""
        return list(self.root.glob(".localbucket-uploads/*"))


class _Handler(localbucket.S3Handler):
    bucket: Bucket

    def _object_path(self, bucket: str, key: str) -> Path:
        """Takes the empty objects that stand for folders."""
        path: Path = super()._object_path(bucket, f"{key}.folder" if key.endswith("/") else key)
        return path

    def do_PUT(self) -> None:
        bucket = self.bucket
        name = self.path.partition("?")[0]
        bucket.puts.append(name)
        if not bucket.heeds_conditions:
            del self.headers["If-None-Match"]
        if bucket.is_read_only:
            self._refuse(HTTPStatus.FORBIDDEN, "AccessDenied", "Access Denied")
        elif "If-None-Match" in self.headers and not bucket.knows_conditions:
            self._refuse(HTTPStatus.NOT_IMPLEMENTED, "NotImplemented", "A header is not known.")
        elif bucket.loses_answer_to and bucket.loses_answer_to in name:
            bucket.loses_answer_to = ""
            answer = self.wfile
            with open(os.devnull, "wb") as self.wfile:  # type: ignore[assignment]
                super().do_PUT()
            self.wfile = answer
            self.close_connection = True
        else:
            super().do_PUT()

    def do_POST(self) -> None:
        self.bucket.uploads += self.path.endswith("?uploads")
        super().do_POST()

    def _refuse(self, status: HTTPStatus, code: str, text: str) -> None:
        self._read_body()
        self._send_error(localbucket.S3Error(status, code, text))

    def log_message(self, *args: object) -> None:
        """Nothing: the test says what is wrong."""


@contextmanager
def bucket_in(root: Path, monkeypatch: Any) -> Iterator[Bucket]:
    """``root``: an empty folder."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "any")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    bucket = Bucket(root)
    handler = type("OfThisTest", (_Handler,), {"data_root": root, "bucket": bucket})
    with listening(handler) as bucket.address:
        yield bucket
