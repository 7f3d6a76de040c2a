"""Every error that Jitney raises on purpose, and its one mapping to the server's error codes.

    JitneyError
    ├── InvalidArgumentError    the client's mistake: names the field, the value and the bound
    ├── UnavailableError        the queue is full, the model is unloading: try again later
    ├── DeadlineExceededError   the request's deadline passed before its first token
    ├── CancelledError          the client went away or asked to stop
    ├── InternalError           our bug or a fault of the machine; its text names no internals
    │   └── DeviceLostError     the device computes nothing any more: the engine ends
    └── LoadError               the model cannot be served; readiness stays false
        ├── ConfigError         an impossible option: names the key, the value and the bound
        ├── CheckpointError     a missing, truncated or corrupt file: names the file
        ├── UnsupportedModelError  a kind of model that cannot be served: says why
        └── InstallationError   a part of the installation is missing: says how to repair it

Errors cross from the engine to the front as a code and a message (``messages.Failed``); the front
rebuilds them with :func:`from_code`.
"""

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import Self

MOST_OF_PATH = 4096
"""Characters of a path that a message shows. No path is longer (Linux's PATH_MAX), so it is shown
whole: what is wrong is mostly at its end."""


class JitneyError(Exception):
    """Base of all errors raised on purpose. ``code`` opens every message that a client sees."""

    code = "INTERNAL"
    exit_status = 1
    """Of a command that it ends."""
    prefix = ""
    """What :meth:`of` puts before the field's name."""

    @property
    def server_code(self) -> str:
        """The name of this code in the server's class ``TritonError``."""
        return _SERVER_CODES.get(self.code, self.code)

    @property
    def client_message(self) -> str:
        """The text a client sees: the code's name, because a stream's error is text alone."""
        return f"{self.code}: {self}"

    def detached(self) -> Self:
        """This error without the frames that it came through.

        For an error that outlives its ``except`` block, as an answer or a message does. Its frames
        hold whatever the request brought, the server's tensors included. If one of them refers to
        the error, all of that stays until the garbage collector runs.
        """
        self.__context__ = None
        self.__cause__ = None
        return self.with_traceback(None)

    @classmethod
    def of(cls, field: str, value: object, bound: str) -> Self:
        """Name the field, show the value (shortened) and state what it must be."""
        return cls(f"{cls.prefix}{field} is {show(value)}, but must be {bound}")


class InvalidArgumentError(JitneyError):
    """The request cannot be served as it is."""

    code = "INVALID_ARGUMENT"


class UnavailableError(JitneyError):
    """The request was not accepted and may be sent again later."""

    code = "UNAVAILABLE"

    @classmethod
    def of_queue(cls, waiting: int, most: int) -> Self:
        """The queue is full."""
        queue = f"{waiting:,} requests wait, and at most {most:,} may (max_queued)"
        return cls(f"the queue is full: {queue}")


class DeadlineExceededError(JitneyError):
    """The deadline passed before the first token. The server has no code of that name."""

    code = "DEADLINE_EXCEEDED"

    @classmethod
    def of_request(cls, arrival: float, deadline: float, state: str) -> Self:
        """``state``: where the request was then, such as "the request was still in the queue"."""
        after = f"{deadline - arrival:.3f} s after arrival"
        return cls(f"the deadline, {after}, passed before the first token: {state}")


class CancelledError(JitneyError):
    """The client cancelled or disconnected."""

    code = "CANCELLED"


class InternalError(JitneyError):
    """A fault on our side. Carries no path, type name or traceback; the log does."""


class DeviceLostError(InternalError):
    """The device failed for good: only a new process helps. The engine does not look for a
    request at fault, because every request would fail."""


class LoadError(JitneyError):
    """The model cannot be loaded."""


class ConfigError(LoadError):
    """An option in ``model.json`` is unknown or impossible."""

    code = "INVALID_ARGUMENT"
    prefix = "option "


class CheckpointError(LoadError):
    """A file of the checkpoint is missing, truncated, corrupt or of a kind that is not read."""


class UnsupportedModelError(LoadError):
    """A kind of model, tokenizer or GGUF file that cannot be served, or not yet."""

    code = "UNSUPPORTED"
    reason: str = ""
    """Of a model: the text without the model's type."""


class InstallationError(LoadError):
    """Something that Jitney needs on this machine is missing or of a wrong version."""


# Our code -> the server's, where the names differ.
_SERVER_CODES = {"INVALID_ARGUMENT": "INVALID_ARG", "DEADLINE_EXCEEDED": "UNAVAILABLE"}
_BY_CODE: dict[str, type[JitneyError]] = {
    cls.code: cls
    for cls in (InvalidArgumentError, UnavailableError, DeadlineExceededError, CancelledError)
}


def from_code(code: str, message: str) -> JitneyError:
    """Rebuild an error that crossed from the engine as a code and a message."""
    return _BY_CODE.get(code, InternalError)(message)


def install_extra(*names: str) -> str:
    """How to install packages that Jitney can do without, for the text of an error. It is done from
    a checkout: no package index has the distribution, and anybody could take its name there."""
    return f"`pip install -e '.[{','.join(names)}]'` in Jitney's checkout"


def show(value: object, limit: int = 60) -> str:
    """A value for an error message: its repr, cut so that a 64 MB prompt is never echoed."""
    if isinstance(value, (str, bytes)) and len(value) > limit:
        return f"{value[:limit]!r}… ({len(value):,} long)"
    if isinstance(value, (list, tuple, dict)) and len(value) > 16:
        return f"a {type(value).__name__} of {len(value):,}"
    text = repr(value)
    # Long strings were cut above. A short list or dict may show more, because it has several
    # values.
    most = 4 * limit
    return text if len(text) <= most else text[:most] + "…"


def nearest(name: str, known: Iterable[str]) -> str:
    """`` (did you mean 'x'?)`` for a misspelled name, or an empty string."""
    matches = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {matches[0]!r}?)" if matches else ""


def first_line(error: Exception, folder: Path | None = None) -> str:
    """The class and the first line of a foreign error, without the folder's path."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    message = lines[0] if lines else "no message"
    text = f"{type(error).__name__}: {message}"
    if folder is not None:
        text = text.replace(str(folder), "the checkpoint")
    return text if len(text) <= 200 else text[:200] + "…"
