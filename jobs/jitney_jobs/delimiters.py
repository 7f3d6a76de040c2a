"""What divides the fields of a CSV file: as its first records show, unless the job says it."""

import csv
import io
import posixpath
import re
from itertools import islice

from jitney.errors import InvalidArgumentError

_CANDIDATES = (",", ";", "\t", "|")
"""The first of those that divide the records equally well is taken."""
_MOST_RECORDS = 20
SAMPLE_BYTES = 1 << 16
"""How much of a file is looked at."""
_SEP_LINE = re.compile(rb'(?:\xef\xbb\xbf)?"?sep=([,;|\t:])"?(?:\r\n?|\n)')
_NAMES = {"tab": "\t", "\\t": "\t"}
"""How a delimiter may be called that is hard to type."""


def check_delimiter(given: str) -> str:
    """The setting ``delimiter``. Raises InvalidArgumentError."""
    delimiter = _NAMES.get(given, given)
    if len(delimiter) != 1 or delimiter in '"\r\n' or not delimiter.isascii():
        raise InvalidArgumentError.of("delimiter", given, "one ASCII character, or tab")
    return delimiter


def delimiter_of(path: str, sample: bytes) -> str:
    """By a line that states it, by the file's name (``.tsv``), or by its beginning, ``sample``:
    what divides the header into the most fields, and the records under it into as many. A comma if
    nothing does."""
    stated = delimiter_stated(sample)
    if stated is not None:
        return stated
    if ".tsv" in posixpath.basename(path).lower():
        return "\t"
    text = sample.decode("utf-8", "replace").removeprefix("\ufeff")
    text = text[: text.rfind("\n") + 1] or text  # the last record may be cut
    best = ","
    most_fields = 1
    for delimiter in _CANDIDATES:
        fields = _common_fields(text, delimiter)
        if fields > most_fields:
            best = delimiter
            most_fields = fields
    return best


def delimiter_stated(sample: bytes) -> str | None:
    """What a first line ``sep=;`` says, which Excel writes and heeds. None: there is no such
    line."""
    found = _SEP_LINE.match(sample)
    return None if found is None else found[1].decode()


def _common_fields(text: str, delimiter: str) -> int:
    """The fields of the header, if most records have as many; else 0."""
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    try:
        counts = [len(record) for record in islice(reader, _MOST_RECORDS) if record]
    except csv.Error:
        return 0
    if not counts:
        return 0
    alike = counts.count(counts[0])
    return counts[0] if 2 * alike > len(counts) else 0
