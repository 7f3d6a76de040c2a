"""The file system of a job's input or output, local or on object storage, and what to do when a
read from it fails: try again, or say whose fault it is.
"""

import os
import posixpath
import re
from typing import TYPE_CHECKING

from jitney.errors import InvalidArgumentError, JitneyError, UnavailableError

from jitney_jobs.addresses import text_without_keys
from jitney_jobs.arrow import pa, pafs
from jitney_jobs.encodings import Encoding
from jitney_jobs.input_files import compression_of
from jitney_jobs.job import LIST, Job
from jitney_jobs.outcome import Trouble
from jitney_jobs.output_files import objects_at

if TYPE_CHECKING:
    from jitney_jobs.object_storage import Objects

_OS_ERRORS_OF_A_FILE = (FileNotFoundError, PermissionError, IsADirectoryError)
"""The file is at fault, not the storage: another try would meet the same error."""
_SERVICES = re.compile(
    r"AWS|S3|google|GCS|Azure|HDFS|HTTP|curl|[Cc]onnect|[Nn]etwork|[Tt]imed? ?out"
)
"""What Arrow's errors have in their text if a storage on the network fails."""


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
    return objects_at(job.output, job.retries)


def open_inputs(job: Job) -> tuple[pafs.FileSystem, list[str]]:
    """The file system of a job's input, and the paths on it, each once. Raises InvalidArgumentError
    for a list that cannot be read or is empty, and for paths on different file systems.

    A list is a text file, named as ``@list.txt``, with a path on each line: of a file, a folder or
    a glob. A relative path in it starts at the list's own folder, so that it means the same from
    everywhere.
    """
    opened: pafs.FileSystem | None = None
    paths: dict[str, None] = {}
    first = ""
    for name in (job.input, *job.more_inputs):
        for given in _listed(name) if name.startswith(LIST) else [name]:
            system, path = file_system(given)
            if opened is None:
                opened = system
                first = given
            elif not opened.equals(system):
                bound = f"on the same storage as {first}"
                raise InvalidArgumentError.of("input", given, bound)
            paths[path] = None
    if opened is None:
        raise InvalidArgumentError(f"input {job.input} names no file")
    return opened, list(paths)


def _listed(name: str) -> list[str]:
    """The paths in a list."""
    address = name.removeprefix(LIST)
    system, path = file_system(address)
    try:
        with system.open_input_stream(path) as source:
            text = source.read().decode("utf-8-sig")
    except OSError as error:
        raise read_error(address, error) from error
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(f"the list {address} is no UTF-8: {error}") from None
    folder = posixpath.dirname(address)
    lines = [line.strip() for line in text.splitlines()]
    return [_absolute(line, folder) for line in lines if line]


def _absolute(line: str, folder: str) -> str:
    if "://" in line or os.path.isabs(line):
        return line
    return posixpath.join(folder, line)


class Storage:
    """The file system of an input. Files that are rows are read from it as a whole."""

    def __init__(self, job: Job) -> None:
        self._fs, _ = open_inputs(job)
        self._retry_policy = job.make_retry_policy()
        self._encoding = Encoding(job.encoding, job.decode_errors)
        self.replaced = 0
        """How many U+FFFD were put into texts."""

    def read_text(self, path: str) -> str:
        """Raises what :meth:`read` raises, and InvalidArgumentError for bytes that are no text."""
        replaced = self._encoding.decode(self.read(path))
        self.replaced += replaced.num_replaced
        return replaced.text

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
    """Whether the storage has failed, and not the file. For damaged bytes Arrow raises an OSError
    too: one without ``errno`` and without the name of a service."""
    if isinstance(error, _OS_ERRORS_OF_A_FILE):
        return False
    return error.errno is not None or _SERVICES.search(str(error)) is not None
