"""The file that a server and its models print to.

The user names it, or it is a temporary file: that one is removed when the server has stopped well.
Called by ``server``.
"""

from pathlib import Path
from typing import BinaryIO


class LogFile:
    """The log of one server, over all its starts."""

    def __init__(self, path: Path | None) -> None:
        """``path``: the file that the user named. None: each start makes a temporary one."""
        self.path = path
        """None: there is no temporary file now."""
        self.is_temporary = path is None
        self._last_start = 0
        """The offset in bytes at which the log of the last start begins."""

    def name_temporary(self, path: Path) -> None:
        """Use this path for the temporary file. :meth:`open` makes it."""
        assert self.is_temporary
        self.path = path

    def forget_temporary(self) -> None:
        """The next start makes a new temporary file. This one stays."""
        if self.is_temporary:
            self.path = None

    def open(self, *, append: bool) -> BinaryIO:
        """Open the file for a start. ``append``: keep what earlier starts have written."""
        assert self.path is not None
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.is_temporary and not append:
            # Only this user may read it, and a link that somebody else has put there is refused.
            self.path.touch(mode=0o600, exist_ok=False)
        file = self.path.open("ab" if append else "wb")
        self._last_start = file.tell()
        return file

    def remove_temporary(self) -> None:
        """Remove the file, unless the user has named it."""
        if self.is_temporary and self.path is not None:
            self.path.unlink(missing_ok=True)
            self.path = None

    def tail(self, lines: int) -> str:
        """The last lines. Empty if there is no file."""
        if self.path is None or not self.path.exists():
            return ""
        text = self.path.read_text(encoding="utf-8", errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def of_last_start(self) -> str:
        """What was written since the last start. Empty if there is no file."""
        if self.path is None or not self.path.exists():
            return ""
        with self.path.open("rb") as file:
            file.seek(self._last_start)
            return file.read().decode(errors="replace")
