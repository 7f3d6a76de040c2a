"""Files of an output that several runs know by their names: the plan of a job that is divided into
shards, and what a merge makes of it.

A file is there as a whole or not at all, whenever its writer is killed, and of two runs that create
the same one, one does.
"""

import contextlib
import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from jitney.errors import InvalidArgumentError

from jitney_jobs.addresses import without_keys
from jitney_jobs.whole_files import sync, write_beside, write_whole

if TYPE_CHECKING:
    from jitney_jobs.object_storage import Objects

_REQUEST_RETRIES = 3
"""How often a request to object storage is sent again where no job says how often."""
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


class OutputFiles(Protocol):
    """By names below the output, with ``/`` between folders. Everything raises OSError."""

    def read(self, name: str) -> bytes:
        """Raises FileNotFoundError if it is not there."""

    def create(self, name: str, data: bytes) -> bool:
        """Write a file if there is none of that name. Returns False if there is one. On object
        storage that may be this file: if a request arrived whose answer was lost."""

    def put(self, name: str, data: bytes) -> None:
        """Write a file, or write it anew."""

    def delete(self, name: str) -> None:
        """Also if it is not there."""


class LocalFiles:
    """In a folder on this machine, or one that several machines have mounted."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, name: str) -> bytes:
        return (self._folder / name).read_bytes()

    def create(self, name: str, data: bytes) -> bool:
        """Raises InvalidArgumentError if the file system has no hard links."""
        path = self._folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = write_beside(path, [data])
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            raise InvalidArgumentError(
                f"output {self._folder} is on a file system without hard links, which shards need "
                f"to agree on a plan ({error}): name another one, or s3://"
            ) from None
        finally:
            temporary.unlink()
        sync(path.parent)
        return True

    def put(self, name: str, data: bytes) -> None:
        path = self._folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, [data])

    def delete(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            (self._folder / name).unlink()


def output_files(output: str, retries: int = _REQUEST_RETRIES) -> OutputFiles:
    """Raises InvalidArgumentError for storages on which two runs cannot be told apart."""
    if "://" not in output:
        return LocalFiles(Path(output))
    if output.startswith("s3://"):
        return objects_at(output, retries)
    raise InvalidArgumentError.of("output", without_keys(output), "local or s3:// with shards")


def objects_at(address: str, retries: int = _REQUEST_RETRIES) -> "Objects":
    """The objects below an address on S3. A request that fails is sent again ``retries`` times.
    Raises InvalidArgumentError, and InstallationError if boto3 is missing."""
    from jitney_jobs.object_storage import Objects

    return Objects(address, retries)
