"""Objects of a bucket on S3, or on what speaks its language: put, put if absent, read and delete.

pyarrow reads and lists objects too, but it uploads in pieces, which a killed process leaves behind,
and it has no conditional put. boto3 has both: an object here is one PUT, so it is there as a whole
or not at all. Errors are OSErrors, as those of pyarrow.
"""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from jitney.errors import InstallationError, InvalidArgumentError, install_extra

from jitney_jobs.addresses import text_without_keys, without_keys
from jitney_jobs.arrow import pa, pafs

try:
    import boto3
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError
except ImportError:
    raise InstallationError(
        f"an output on s3:// needs boto3, which is not installed: {install_extra('jobs')}"
    ) from None

_MOST_BYTES = 5 << 30
"""S3 takes no more in one PUT."""
_HOSTS_OF_AWS = (".amazonaws.com", ".amazonaws.com.cn")
_READERS = 16
"""Objects that are read at a time."""
_READ_AHEAD = 64
"""Most objects that are in memory then."""
_CONFLICT_TRIES = 5
NO_CONDITIONS = (
    "is on a storage that does not heed If-None-Match: two runs could not be told apart there; "
    "name a local folder as journal"
)
_TIMEOUT_S = 60.0


class NoConditionsError(InvalidArgumentError):
    """The storage does not take If-None-Match."""


class Objects:
    """The objects below one folder of a bucket. For any thread."""

    def __init__(self, address: str, retries: int) -> None:
        """``address``: of the folder, as pyarrow takes it: ``s3://bucket/folder``, with keys, and
        with ``region``, ``scheme`` and ``endpoint_override``, if need be. A request that fails is
        sent again ``retries`` times. Raises InvalidArgumentError."""
        self.address = without_keys(address)
        """For errors."""
        url = urlsplit(address)
        self._bucket = url.netloc.rpartition("@")[2]
        self._prefix = unquote(url.path).strip("/")
        options = {name: values[0] for name, values in parse_qs(url.query).items()}
        endpoint = options.get("endpoint_override")
        if endpoint is not None and "://" not in endpoint:
            endpoint = f"{options.get('scheme', 'https')}://{endpoint}"
        client = partial(
            boto3.session.Session().client,
            "s3",
            region_name=options.get("region") or _region_of(address),
            endpoint_url=endpoint,
            aws_access_key_id=unquote(url.username) if url.username else None,
            aws_secret_access_key=unquote(url.password) if url.password else None,
        )
        config = Config(
            retries={"mode": "standard", "total_max_attempts": retries + 1},
            connect_timeout=_TIMEOUT_S,
            read_timeout=_TIMEOUT_S,
            max_pool_connections=_READERS,
            # Stores that only speak S3's language do not know the newer checksums.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        )
        self._client: Any = client(config=config)
        # As pyarrow does: of other stores the bucket is no part of the host's name. Their address
        # may also come from the environment (AWS_ENDPOINT_URL).
        if not urlsplit(self._client.meta.endpoint_url).netloc.endswith(_HOSTS_OF_AWS):
            config = config.merge(Config(s3={"addressing_style": "path"}))
            self._client = client(config=config)

    def address_of(self, name: str) -> str:
        """For errors and reports: without keys."""
        place, question_mark, query = self.address.partition("?")
        return f"{place.rstrip('/')}/{name}{question_mark}{query}"

    def put(self, name: str, data: bytes | pa.Buffer) -> None:
        """Write an object, or write it anew. Raises OSError."""
        self._put(name, data)

    def create(self, name: str, data: bytes) -> bool:
        """Write an object if there is none of that name. Returns False if there is one: it may be
        that of a request whose answer was lost. Raises OSError."""
        for number in range(_CONFLICT_TRIES):
            try:
                self._put(name, data, IfNoneMatch="*")
            except ClientError as error:
                code = _code_of(error)
                if code in ("PreconditionFailed", "412"):
                    return False
                if code in ("NotImplemented", "501"):
                    raise NoConditionsError(f"{self.address} {NO_CONDITIONS}") from None
                is_conflict = code in ("ConditionalRequestConflict", "409")
                if not is_conflict or number + 1 == _CONFLICT_TRIES:
                    raise _as_os_error(error) from error
                time.sleep(0.1 * 2**number)  # another request for this name is under way
            else:
                return True
        raise AssertionError("the last try returns or raises")

    def read(self, name: str) -> bytes:
        """Raises FileNotFoundError and other OSErrors."""
        with _os_errors():
            answer = self._client.get_object(Bucket=self._bucket, Key=self._key(name))
            return bytes(answer["Body"].read())

    def read_each(self, names: list[str]) -> Iterator[bytes]:
        """In the order of the names; a few of them are in memory at a time. Raises OSError."""
        with ThreadPoolExecutor(_READERS) as pool:
            for first in range(0, len(names), _READ_AHEAD):
                yield from pool.map(self.read, names[first : first + _READ_AHEAD])

    def names(self, folder: str) -> list[str]:
        """The names of all objects in a folder here, without the folder's. Raises OSError."""
        prefix = f"{self._key(folder)}/"
        found = []
        with _os_errors():
            pages = self._client.get_paginator("list_objects_v2")
            for page in pages.paginate(Bucket=self._bucket, Prefix=prefix):
                for item in page.get("Contents", []):
                    found.append(item["Key"].removeprefix(prefix))
        return found

    def delete(self, name: str) -> None:
        """Also if it is not there. Raises OSError."""
        with _os_errors():
            self._client.delete_object(Bucket=self._bucket, Key=self._key(name))

    def _put(self, name: str, data: bytes | pa.Buffer, **condition: str) -> None:
        """Raises ClientError if there is a condition, else OSError."""
        size = len(data)
        if size > _MOST_BYTES:
            bound = f"at most {_MOST_BYTES:,} bytes, which is what S3 takes at once"
            raise InvalidArgumentError.of(f"the size of {name}", f"{size:,} bytes", bound)
        body = data if isinstance(data, bytes) else pa.BufferReader(data)
        try:
            self._client.put_object(
                Bucket=self._bucket, Key=self._key(name), Body=body, **condition
            )
        except ClientError as error:
            if condition:
                raise
            raise _as_os_error(error) from error
        except BotoCoreError as error:
            raise OSError(text_without_keys(str(error))) from error

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}" if self._prefix else name


def _region_of(address: str) -> str | None:
    """Where pyarrow has found the bucket."""
    try:
        fs, _ = pafs.FileSystem.from_uri(address)
    except (OSError, pa.ArrowInvalid) as error:
        text = text_without_keys(f"{address} cannot be opened: {error}")
        raise InvalidArgumentError(text) from None
    return fs.region if isinstance(fs, pafs.S3FileSystem) else None


@contextmanager
def _os_errors() -> Iterator[None]:
    try:
        yield
    except (ClientError, BotoCoreError) as error:
        raise _as_os_error(error) from error


def _code_of(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def _as_os_error(error: Exception) -> OSError:
    text = text_without_keys(str(error))
    code = _code_of(error) if isinstance(error, ClientError) else ""
    if code in ("NoSuchKey", "404"):
        return FileNotFoundError(text)
    if code in ("AccessDenied", "403"):
        return PermissionError(text)
    return OSError(text)
