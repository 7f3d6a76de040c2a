"""Lines that end with a carriage return alone, as spreadsheets of old Macs write them, and as
"CSV (Macintosh)" still is."""

import io
from collections.abc import Iterator

_CR = b"\r"
_LF = b"\n"
LINE_ENDS = (_LF, _CR)
_READ_BYTES = 1 << 16


def has_cr_lines(head: bytes) -> bool:
    """Whether the lines of a file that begins with ``head`` end with CR alone. A CR at the end of
    ``head`` does not count: an LF may follow it in the file."""
    return _LF not in head and _CR in head[:-1]


class CrLines:
    """The lines of what is read from ``source``, with their ends."""

    def __init__(self, source: io.BufferedReader) -> None:
        self._lines = _lines_of(source)

    def __iter__(self) -> Iterator[bytes]:
        return self._lines

    def readline(self) -> bytes:
        """Empty at the end."""
        return next(self._lines, b"")


def _lines_of(source: io.BufferedReader) -> Iterator[bytes]:
    begun: list[bytes] = []  # the pieces of a line whose end has not come
    while True:
        block = source.read1(_READ_BYTES)
        if not block:
            break
        *ended, rest = block.split(_CR)
        for line in ended:
            yield b"".join([*begun, line, _CR])
            begun = []
        begun.append(rest)
    last = b"".join(begun)
    if last:
        yield last
