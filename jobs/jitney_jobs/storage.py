"""The file system of a job's input or output, local or on object storage, and what to do when a
read from it fails: try again, or say whose fault it is.
"""

import posixpath
import time
from typing import TYPE_CHECKING

from jitney.errors import InvalidArgumentError, JitneyError, UnavailableError

from jitney_jobs.addresses import text_without_keys
from jitney_jobs.arrow import pa, pafs
from jitney_jobs.job import Job

if TYPE_CHECKING:
    from jitney_jobs.object_storage import Objects

_OS_ERRORS_OF_A_FILE = (FileNotFoundError, PermissionError, IsADirectoryError)
"""The file is at fault, not the storage: another try would meet the same error."""


def file_system(path: str) -> tuple[pafs.FileSystem, str]:
    """The file system of a path or address, and the path on it. Raises InvalidArgumentError."""
    if "://" not in path:
        return pafs.LocalFileSystem(), posixpath.abspath(path)
    try:
        return pafs.FileSystem.from_uri(path)
    except (OSError, pa.ArrowInvalid) as error:
        text = text_without_keys(f"{path} cannot be opened: {error}")
        raise InvalidArgumentError(text) from None


def objects_of(job: Job) -> "Objects | None":
    """The objects below a job's output on S3. None for an output elsewhere."""
    if not job.output.startswith("s3://"):
        return None
    from jitney_jobs.object_storage import Objects  # boto3 may be missing

    return Objects(job.output, job.retries)


class Storage:
    """The file system of an input. Files that are rows are read from it as a whole."""

    def __init__(self, job: Job) -> None:
        self._fs, _ = file_system(job.input)
        self._retries = job.retries

    def read(self, path: str) -> bytes:
        """Raises InvalidArgumentError if the file is at fault, and UnavailableError if the storage
        fails although it was tried again."""
        tries = 0
        while True:
            try:
                with self._fs.open_input_stream(path, compression=None) as source:
                    return bytes(source.read())
            except OSError as error:
                wait_for_retry(tries, self._retries, path, error)
                tries += 1


def read_error(path: str, error: Exception) -> JitneyError:
    """What an error in reading a file means: InvalidArgumentError if the file is at fault,
    UnavailableError if the storage is.

    For damaged compressed bytes Arrow raises an OSError, as for a storage that fails. It counts as
    the storage's fault.
    """
    text = f"input {path} cannot be read: {error}"
    if isinstance(error, OSError) and not isinstance(error, _OS_ERRORS_OF_A_FILE):
        return UnavailableError(text)
    return InvalidArgumentError(text)


def wait_for_retry(tries: int, retries: int, path: str, error: Exception) -> None:
    """After an error in reading, wait before the next try, longer each time. Raises what
    :func:`read_error` says if the file is at fault, or if that was the last try."""
    meaning = read_error(path, error)
    if isinstance(meaning, InvalidArgumentError) or tries >= retries:
        raise meaning from error
    time.sleep(pause(tries))


def pause(tries: int) -> float:
    """Seconds before the next try of what was tried again ``tries`` times."""
    return float(2**tries)
