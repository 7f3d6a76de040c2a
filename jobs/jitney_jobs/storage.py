"""The file system of a job's input or output, local or on object storage, and what to do when a
read from it fails: try again, or say whose fault it is.
"""

import posixpath
import re

from jitney.errors import InvalidArgumentError, JitneyError, UnavailableError

from jitney_jobs.arrow import pa, pafs
from jitney_jobs.input_files import compression_of
from jitney_jobs.job import Job
from jitney_jobs.outcome import Trouble

_OS_ERRORS_OF_A_FILE = (FileNotFoundError, PermissionError, IsADirectoryError)
"""The file is at fault, not the storage: another try would meet the same error."""
_SERVICES = re.compile(
    r"AWS|S3|google|GCS|Azure|HDFS|HTTP|curl|[Cc]onnect|[Nn]etwork|[Tt]imed? ?out"
)
"""What Arrow's error of a storage that is no local one has in its text."""


def file_system(path: str) -> tuple[pafs.FileSystem, str]:
    """The file system of a path or address, and the path on it. Raises InvalidArgumentError."""
    if "://" not in path:
        return pafs.LocalFileSystem(), posixpath.abspath(path)
    try:
        return pafs.FileSystem.from_uri(path)
    except (OSError, pa.ArrowInvalid) as error:
        raise InvalidArgumentError(f"{path} cannot be opened: {error}") from None


class Storage:
    """The file system of an input. Files that are rows are read from it as a whole."""

    def __init__(self, job: Job) -> None:
        self._fs, _ = file_system(job.input)
        self._retry_policy = job.make_retry_policy()

    def read(self, path: str) -> bytes:
        """Raises InvalidArgumentError if the file is at fault, and UnavailableError if the storage
        fails although it was tried again."""
        trouble = Trouble()
        while True:
            try:
                with self._fs.open_input_stream(path, compression=compression_of(path)) as source:
                    return bytes(source.read())
            except OSError as error:
                trouble.wait(self._retry_policy, read_error(path, error))


def read_error(path: str, error: Exception) -> JitneyError:
    """What an error in reading a file means: InvalidArgumentError if the file is at fault,
    UnavailableError if the storage is."""
    text = f"input {path} cannot be read: {error}"
    if isinstance(error, OSError) and _is_of_storage(error):
        return UnavailableError(text)
    return InvalidArgumentError(text)


def _is_of_storage(error: OSError) -> bool:
    """For damaged bytes Arrow raises an OSError too, but without a number of the system, and
    without the name of a storage's service."""
    if isinstance(error, _OS_ERRORS_OF_A_FILE):
        return False
    return error.errno is not None or _SERVICES.search(str(error)) is not None
