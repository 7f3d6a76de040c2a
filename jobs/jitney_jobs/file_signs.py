"""What a file is by its first bytes, whatever its name says."""

from jitney.errors import InvalidArgumentError

SIGN_BYTES = 32
"""How much of a file is looked at."""
_SIGNS = (
    (b"\x1f\x8b", "gzip"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
    (b"\x04\x22\x4d\x18", "lz4"),
    (b"BZh91AY&SY", "bzip2"),
    (b"\xfd7zXZ\0", "xz"),
    (b"PK\x03\x04", "zip (Excel's .xlsx is one)"),
    (b"PAR1", "Parquet"),
    (b"ARROW1\0", "Arrow"),
    (b"ORC", "ORC"),
    (b"Obj\x01", "Avro"),
    (b"SQLite format 3\0", "SQLite"),
    (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "an old Excel's (.xls)"),
    (b"%PDF-", "PDF"),
    (b"\x89HDF\r\n\x1a\n", "HDF5"),
)
_TEXT_CONTROLS = b"\t\n\r\f"


def kind_of(head: bytes) -> str | None:
    """The kind of a file that begins with ``head``. None: it is not known; it may be a text."""
    # A text may begin with the letters of a sign, such as ORC.
    is_binary = any(byte < 32 and byte not in _TEXT_CONTROLS for byte in head)
    if not is_binary:
        return None
    for sign, kind in _SIGNS:
        if head.startswith(sign):
            return kind
    return None


def check_is_text(head: bytes, path: str, is_unpacked: bool) -> None:
    """Raises InvalidArgumentError if a file that should hold lines or CSV holds something else.
    ``head``: its first bytes; ``is_unpacked`` says that they were compressed in the file."""
    kind = kind_of(head[:SIGN_BYTES])
    if kind is not None:
        what = "holds, compressed," if is_unpacked else "is"
        raise InvalidArgumentError(
            f"input {path} {what} a file of another kind, {kind}: name it so, or convert it"
        )


def kind_error(head: bytes, path: str, expected: str) -> InvalidArgumentError | None:
    """The error for a file that could not be read as ``expected``, Parquet or Arrow, because it is
    of another kind. None: its kind is not known, or is the one that was expected."""
    kind = kind_of(head[:SIGN_BYTES])
    if kind is None or kind == expected:
        return None
    return InvalidArgumentError(
        f"input {path} is a file of another kind, {kind}: name it so, or convert it"
    )
