"""Pictures as bytes of files, for the tests of jobs."""

import io
import struct
from typing import Any

from PIL import Image


def encoded(image: Image.Image, format: str, **options: Any) -> bytes:
    sink = io.BytesIO()
    image.save(sink, format, **options)
    return sink.getvalue()


def turned(image: Image.Image, format: str, orientation: int, **options: Any) -> bytes:
    """With an orientation in its EXIF."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(image, format, exif=exif, **options)


def with_tag(tiff: bytes, tag: int, value: int) -> bytes:
    """A TIFF file of Pillow's, little-endian, with another value of a tag of 16 bits."""
    entry = struct.pack("<HHL", tag, 3, 1)
    start = tiff.index(entry) + len(entry)
    return tiff[:start] + struct.pack("<H", value) + tiff[start + 2 :]


def profile_of_four_colours() -> bytes:
    """An ICC profile, after ICC.1:2001-04, for CMYK: without black ink all is a certain red, with
    black ink all is black."""
    identity = bytes(range(256))
    red = bytes([136, 208, 195])  # L*, a* and b* of 8 bits: 53, 80 and 67
    black = bytes([0, 128, 128])
    grid = b"".join([red, black] * 8)  # black ink, the last of the four, changes fastest
    matrix = struct.pack(">9i", 65536, 0, 0, 0, 65536, 0, 0, 0, 65536)
    head_of_table = b"mft1" + bytes(4) + bytes([4, 3, 2, 0])
    table = head_of_table + matrix + 4 * identity + grid + 3 * identity
    tags = struct.pack(">L4sLL", 1, b"A2B0", 128 + 16, len(table))
    white = struct.pack(">3l", 63190, 65536, 54061)  # of D50
    fields = [
        struct.pack(">L4sL", 128 + len(tags) + len(table), b"lcms", 0x02400000),
        b"prtr" + b"CMYK" + b"Lab ",
        struct.pack(">6H", 2026, 1, 1, 0, 0, 0),
        b"acsp" + bytes(4) + bytes(4) + bytes(8) + bytes(8) + bytes(4),
        white,
    ]
    header = b"".join(fields)
    return header.ljust(128, b"\0") + tags + table
