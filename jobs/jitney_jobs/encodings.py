"""Text in any encoding, as UTF-8: of files in lines, of CSV, and of files that are texts.

Without the setting ``encoding`` a file is UTF-8, unless it begins with the byte order mark of
UTF-16 or UTF-32. Bytes that are no text in its encoding make a bad row, or with ``decode_errors:
replace`` become U+FFFD, each of which is counted.
"""

import codecs
import io
import re
from typing import Any, Literal, NamedTuple

from jitney.errors import InvalidArgumentError

DecodeErrors = Literal["error", "replace"]
_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),  # begins as the mark of UTF-16 does
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_READ_BYTES = 1 << 18
_ESCAPED = re.compile("[\udc00-\udcff]")
"""A character that stands for a byte that is no text. Text itself has none of these."""
_ESCAPED_BYTES = re.compile(rb"\xed[\xb0-\xb3][\x80-\xbf]")
"""The same in bytes that are UTF-8 otherwise."""
_REPLACEMENT = "\ufffd"


class Replaced(NamedTuple):
    """A text, and how many U+FFFD were put in place of what is none."""

    text: str
    num_replaced: int


class Encoding(NamedTuple):
    """How the bytes of a job's texts become text: the settings ``encoding`` and
    ``decode_errors``."""

    name: str | None = None
    errors: DecodeErrors = "error"

    def check(self) -> None:
        """Raises InvalidArgumentError for a name that Python does not know."""
        try:
            "a".encode(self.name or "utf-8")
        except LookupError:
            bound = "a text encoding, such as utf-8, cp1252, utf-16 or shift_jis"
            raise InvalidArgumentError.of("encoding", self.name, bound) from None

    def open(self, source: io.BufferedReader) -> io.BufferedReader:
        """A file's bytes as UTF-8, with a byte order mark if it has one. Bytes that are no text
        come as bytes that are no UTF-8: :meth:`replace` finds them. Raises InvalidArgumentError for
        what looks like UTF-16, but does not say so."""
        name = self.name or _encoding_of(source.peek(4)[:4]) or "utf-8"
        if codecs.lookup(name).name == "utf-8" and self.errors == "error":
            return source
        return io.BufferedReader(_Utf8(source, name), _READ_BYTES)

    def replace(self, line: bytes) -> tuple[bytes, int]:
        """A line of what :meth:`open` gives, and how many U+FFFD were put into it: none with
        ``decode_errors: error``."""
        if self.errors == "error" or b"\xed" not in line:
            return line, 0
        return _ESCAPED_BYTES.subn(_REPLACEMENT.encode(), line)

    def decode(self, data: bytes) -> Replaced:
        """The text of a file, without its byte order mark. Raises InvalidArgumentError."""
        name = self.name or _encoding_of(data[:4]) or "utf-8"
        text = data.decode(name, _escape_handler()).removeprefix("\ufeff")
        found = _ESCAPED.search(text)
        if found is None:
            return Replaced(text, 0)
        if self.errors == "error":
            before = text[: found.start()].encode(name)
            raise InvalidArgumentError(f"it is no text in {name}: byte {len(before):,} or near it")
        return Replaced(*_ESCAPED.subn(_REPLACEMENT, text))


def _encoding_of(head: bytes) -> str | None:
    """By the first four bytes. None: UTF-8, with or without a mark."""
    for mark, name in _MARKS:
        if head.startswith(mark):
            return name
    if len(head) >= 2 and (head[0] == 0) != (head[1] == 0):
        raise InvalidArgumentError(
            "it looks like UTF-16 without a byte order mark: name its encoding, such as utf-16-le"
        )
    return None


class _Utf8(io.RawIOBase):
    """Decodes what it reads, and encodes it again."""

    def __init__(self, source: io.BufferedReader, name: str) -> None:
        self._source = source
        self._decoder = codecs.getincrementaldecoder(name)(_escape_handler())
        self._ready = b""
        self._has_ended = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready and not self._has_ended:
            data = self._source.read1(_READ_BYTES)
            self._has_ended = not data
            text = self._decoder.decode(data, final=self._has_ended)
            self._ready = text.encode("utf-8", "surrogatepass")
        size = min(len(buffer), len(self._ready))
        buffer[:size] = self._ready[:size]
        self._ready = self._ready[size:]
        return size


def _escape_handler() -> str:
    """The name of a handler for errors in decoding: each byte that is no text becomes a character
    of U+DC00 to U+DCFF. Python's own ``surrogateescape`` serves encodings like ASCII only."""
    name = "jitney_escape"
    codecs.register_error(name, _escaped)
    return name


def _escaped(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError), "it is for decoding"
    wrong = error.object[error.start : error.end]
    return "".join(chr(0xDC00 + byte) for byte in wrong), error.end
