"""How a launcher tells the models' processes that it stops their server.

The launcher writes a :class:`Note` into a file, and then sends LOOK to each process. It has named
the file to the server in the environment variable VARIABLE, which the models' processes inherit.

A signal alone does not close a model for good, because anybody may send one. Something else than
our launcher may stop a server, such as systemd or ``docker stop``. Then there is no note, but the
models' processes may get SIGTERM: that closes them for a while.

``jitney_server.stopping`` writes and sends, ``frontend.termination`` reads. A process that does not
know LOOK ignores it by default.
"""

import enum
import os
import signal
from pathlib import Path

STOPS = signal.SIGTERM
"""The server stops, as far as its sender knows. Our launcher sends it too, after LOOK."""
LOOK = signal.SIGURG
"""There may be a new note."""
VARIABLE = "JITNEY_STOP_NOTE"
"""Environment variable: the path of the note."""


class Note(enum.Enum):
    """What the launcher tells the models."""

    WAIT = "wait"
    """The server stops. Refuse new requests, and let those that run go on."""
    END = "end"
    """The time for running requests is over: end them with an error."""


def write_note(file: Path, note: Note) -> None:
    """Write the note, in place of an earlier one. Raises OSError."""
    # A reader sees the old note or the new one, never a part.
    written = file.with_name(f"{file.name}.new")
    written.write_text(note.value, encoding="ascii")
    written.replace(file)


def read_note() -> Note | None:
    """The note of the launcher that has started this process's server. None: it has written none,
    or there is no such launcher."""
    file = os.environ.get(VARIABLE)
    if not file:
        return None
    try:
        return Note(Path(file).read_text(encoding="ascii"))
    except (OSError, ValueError):  # there is no file, or it holds something else
        return None
