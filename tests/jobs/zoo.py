"""Kinds of files that people give to jobs, and what is to become of each: its rows as they came, or
an error that names what is wrong.

    python -m tests.jobs.zoo FOLDER

writes all of them, for a look. Nothing of it is committed: it is made where it is needed.
"""

import bz2
import codecs
import gzip
import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pyarrow.parquet.encryption as pe
from PIL import Image

from tests.jobs.picture_files import encoded

COMPLETE = 0
JOB_ERROR = 1
WITH_BAD_ROWS = 3


@dataclass(frozen=True)
class Kind:
    """Some files, and what a job over them is to give."""

    write: Callable[[Path], None]
    """Writes the files into a folder."""
    good: pa.Table | None = None
    """The good rows, in their order, with the types that a part of Parquet is to have."""
    bad: dict[int, str] = field(default_factory=dict)
    """Index in its file -> what the error says, as a pattern."""
    raw: dict[int, Any] = field(default_factory=dict)
    """Index of a bad row -> what was read of it."""
    error: str | None = None
    """Of the job, if it cannot run at all, as a pattern."""
    settings: dict[str, Any] = field(default_factory=dict)
    has_bad_file: bool = False
    """Whether one of the files cannot be read, which does not keep the job from the others."""
    file: str = ""
    """The input below the folder, if it is not the folder itself."""

    @property
    def status(self) -> int:
        """The exit status of the command."""
        if self.error is not None:
            return JOB_ERROR
        return WITH_BAD_ROWS if self.bad or self.has_bad_file else COMPLETE


def of_bytes(name: str, data: bytes, **expected: Any) -> Kind:
    """One file."""

    def write(folder: Path) -> None:
        (folder / name).write_bytes(data)

    return Kind(write, **expected)


def text_table(**columns: list[str | None]) -> pa.Table:
    return pa.table({name: pa.array(values, pa.string()) for name, values in columns.items()})


NUMBERS = pa.table({"n": [1, 2, 3]})

# ------------------------------------------------------------------ types of Parquet and Arrow

NOON = datetime(2026, 3, 29, 12, 30, 15, 123456, tzinfo=UTC)
TYPES: dict[str, pa.Array] = {
    "dictionary": pa.array(["a", None, "b", "a"]).dictionary_encode(),
    "decimal": pa.array([Decimal("1.10"), None, Decimal("-99999999.99")], pa.decimal128(12, 2)),
    "decimal of 60 digits": pa.array([Decimal(10) ** 50, None], pa.decimal256(60, 3)),
    "large string": pa.array(["a", None, "Zürich"], pa.large_string()),
    "binary": pa.array([b"\0\xff", None, b""], pa.binary()),
    "large binary": pa.array([b"\0\xff", None], pa.large_binary()),
    "binary of fixed size": pa.array([b"abcd", None], pa.binary(4)),
    "list of structs": pa.array(
        [[{"a": 1, "b": "x"}, None], [], None],
        pa.list_(pa.struct({"a": pa.int32(), "b": pa.string()})),
    ),
    "large list": pa.array([[1], None, []], pa.large_list(pa.int16())),
    "list of fixed size": pa.array([[1.5, None], [2, 3]], pa.list_(pa.float32(), 2)),
    "list of lists": pa.array([[[1], []], None], pa.list_(pa.list_(pa.int64()))),
    "map": pa.array([[("a", 1), ("b", None)], None, []], pa.map_(pa.string(), pa.int64())),
    "struct": pa.array([{"a": {"b": 1}}, None, {"a": None}]),
    "struct with a null child": pa.array(
        [{"a": 1, "b": None}, None], pa.struct({"a": pa.int64(), "b": pa.null()})
    ),
    "list of nulls": pa.array([[None], None, []], pa.list_(pa.null())),
    "null": pa.nulls(3),
    "time64[ns]": pa.array([1_000_000_001, None], pa.time64("ns")),
    "time32[ms]": pa.array([1_001, None], pa.time32("ms")),
    "timestamp[ns]": pa.array([1_700_000_000_123_456_789, None], pa.timestamp("ns")),
    "timestamp with a zone": pa.array([NOON, None], pa.timestamp("us", "Europe/Zurich")),
    "timestamp with an offset": pa.array([NOON, None], pa.timestamp("ms", "+05:30")),
    "date32": pa.array([date(2026, 2, 28), None], pa.date32()),
    "duration[ns]": pa.array([1, None], pa.duration("ns")),
    "duration": pa.array([timedelta(days=1), None]),
    "float16": pa.array([np.float16(0.5), None], pa.float16()),
    "uint64": pa.array([2**64 - 1, None], pa.uint64()),
    "int8": pa.array([-128, None], pa.int8()),
    "nan": pa.array([float("nan"), float("-inf"), None]),
    "bool": pa.array([True, None, False]),
    "uuid": pa.array([bytes(range(16)), None], pa.uuid()),
    "bool of 8 bits": pa.ExtensionArray.from_storage(pa.bool8(), pa.array([1, None], pa.int8())),
    "tensor of fixed shape": pa.ExtensionArray.from_storage(
        pa.fixed_shape_tensor(pa.float32(), [2, 1]),
        pa.array([[1, 2], [3, 4]], pa.list_(pa.float32(), 2)),
    ),
}
NOT_IN_PYTHON: dict[str, pa.Array] = {
    "timestamp of no year in Python": pa.array([10**17, -(10**17)], pa.timestamp("ms")),
    "date of no year in Python": pa.array([10**8, 10**8], pa.int32()).cast(pa.date32()),
}
"""Whose values Python does not have. A function that does not ask for them does not meet them."""
AS_OTHERS: dict[str, tuple[pa.Array, pa.DataType]] = {
    "dictionary of numbers": (pa.array([7, None, 8, 7]).dictionary_encode(), pa.int64()),
    "string view": (pa.array(["a", None, "b" * 40], pa.string_view()), pa.string()),
    "binary view": (pa.array([b"\0", None], pa.binary_view()), pa.binary()),
}
"""Types that a part of Parquet has as a simpler one of the same values."""
NOT_IN_PARQUET: dict[str, pa.Array] = {
    "union": pa.UnionArray.from_sparse(
        pa.array([0, 1], pa.int8()), [pa.array([1, 2]), pa.array(["a", "b"])]
    ),
    "interval": pa.array([(1, 2, 3), None], pa.month_day_nano_interval()),
}


def parquet_of(name: str, table: pa.Table, **options: Any) -> Callable[[Path], None]:
    return lambda folder: pq.write_table(table, folder / name, **options)


def arrow_of(name: str, table: pa.Table, is_stream: bool = False) -> Callable[[Path], None]:
    open_writer = pa.ipc.new_stream if is_stream else pa.ipc.new_file

    def write(folder: Path) -> None:
        with open_writer(str(folder / name), table.schema) as sink:
            sink.write_table(table, max_chunksize=2)

    return write


def kinds_of_types() -> Iterator[tuple[str, Kind]]:
    for name, array in TYPES.items():
        table = pa.table({"v": array})
        yield f"parquet: {name}", Kind(parquet_of("a.parquet", table), good=table)
        yield f"arrow: {name}", Kind(arrow_of("a.arrow", table), good=table)
    for name, array in NOT_IN_PYTHON.items():
        table = pa.table({"n": [1, 2], "v": array})
        settings = {"map_column": ["n"]}
        write = parquet_of("a.parquet", table)
        yield f"parquet: {name}", Kind(write, good=table, settings=settings)
        asked = dict.fromkeys(range(2), "")
        yield f"parquet: {name}, asked for", Kind(write, bad=asked)
    for name, (array, kind) in AS_OTHERS.items():
        table = pa.table({"v": array})
        good = pa.table({"v": array.cast(kind)})
        yield f"parquet: {name}", Kind(parquet_of("a.parquet", table), good=good)
        yield f"arrow stream: {name}", Kind(arrow_of("a.arrow", table, is_stream=True), good=good)
    for name, array in NOT_IN_PARQUET.items():
        write = arrow_of("a.arrow", pa.table({"v": array}))
        yield f"arrow: {name}", Kind(write, error="Parquet cannot hold the columns")


# ------------------------------------------------------------------ files of Parquet and Arrow


def bytes_of(table: pa.Table, **options: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, **options)
    return sink.getvalue()


def changed(data: bytes, at: int, to: bytes) -> bytes:
    return data[:at] + to + data[at + len(to) :]


def with_wrong_checksum() -> bytes:
    """A bit of a value has changed since the file was written."""
    options = {"use_dictionary": False, "compression": "none", "write_page_checksum": True}
    data = bytes_of(NUMBERS, **options)
    values = b"".join(number.to_bytes(8, "little") for number in (1, 2, 3))
    return changed(data, at=data.index(values), to=b"\x09")


class _Keys(pe.KmsClient):
    """Keeps no secret at all."""

    def __init__(self, connection: Any) -> None:
        pe.KmsClient.__init__(self)

    def wrap_key(self, key: bytes, name: str) -> bytes:
        return key

    def unwrap_key(self, key: bytes, name: str) -> bytes:
        return key


def encrypted(folder: Path) -> None:
    factory = pe.CryptoFactory(_Keys)
    settings = pe.EncryptionConfiguration(footer_key="k", column_keys={"k": ["n"]})
    properties = factory.file_encryption_properties(pe.KmsConnectionConfig(), settings)
    with pq.ParquetWriter(
        folder / "a.parquet", NUMBERS.schema, encryption_properties=properties
    ) as sink:
        sink.write_table(NUMBERS)


def with_metadata() -> pa.Table:
    fields = [pa.field("n", pa.int64(), metadata={"unit": "m"})]
    return NUMBERS.cast(pa.schema(fields, metadata={"made": "by hand"}))


def drift(folder: Path) -> None:
    """A column is of whole numbers in one file and of floats in the next; a third lacks it."""
    pq.write_table(pa.table({"n": [1, 2], "v": [1, 2]}), folder / "a.parquet")
    pq.write_table(pa.table({"n": [3], "v": [0.5]}), folder / "b.parquet")
    pq.write_table(pa.table({"n": [4]}), folder / "c.parquet")


def one_damaged(folder: Path) -> None:
    pq.write_table(NUMBERS, folder / "a.parquet")
    (folder / "b.parquet").write_bytes(bytes_of(NUMBERS)[:-20])


def two_files(first: pa.Array, second: pa.Array, together: list[Any] | pa.Array) -> Kind:
    """A column that has another type in each of two files."""

    def write(folder: Path) -> None:
        pq.write_table(pa.table({"v": first}), folder / "a.parquet")
        pq.write_table(pa.table({"v": second}), folder / "b.parquet")

    return Kind(write, good=pa.table({"v": together}))


def runs_and_views() -> pa.Array:
    runs = pa.RunEndEncodedArray.from_arrays([2, 3], ["a", None])
    views = pa.array([["x"], None, []], pa.list_view(pa.string()))
    return pa.StructArray.from_arrays([runs, views], ["r", "v"])


def runs_in_a_map() -> pa.Array:
    runs = pa.RunEndEncodedArray.from_arrays([2], ["a"])
    return pa.MapArray.from_arrays([0, 2], pa.array(["x", "y"]), runs)


DAMAGED_PARQUET = r"a\.parquet cannot be read"
TABLES: dict[str, Kind] = {
    "parquet: no bytes": of_bytes("a.parquet", b"", error=DAMAGED_PARQUET),
    "parquet: no rows": Kind(
        parquet_of("a.parquet", NUMBERS.slice(0, 0)), good=NUMBERS.slice(0, 0)
    ),
    "parquet: no columns": of_bytes("a.parquet", bytes_of(pa.table({})), good=None),
    "parquet: row groups of one row": Kind(
        parquet_of("a.parquet", pa.table({"n": range(200)}), row_group_size=1),
        good=pa.table({"n": range(200)}),
    ),
    "parquet: metadata": Kind(parquet_of("a.parquet", with_metadata()), good=with_metadata()),
    "parquet: compressed by brotli": Kind(
        parquet_of("a.parquet", NUMBERS, compression="brotli"), good=NUMBERS
    ),
    "parquet: version 1": Kind(parquet_of("a.parquet", NUMBERS, version="1.0"), good=NUMBERS),
    "parquet: encrypted": Kind(encrypted, error=r"a\.parquet cannot be read: .*ncrypt"),
    "parquet: cut": of_bytes("a.parquet", bytes_of(NUMBERS)[:-20], error=DAMAGED_PARQUET),
    "parquet: text": of_bytes("a.parquet", b"n\n1\n2\n", error=DAMAGED_PARQUET),
    "parquet: a page's header is damaged": of_bytes(
        "a.parquet", changed(bytes_of(NUMBERS), at=4, to=b"\xff" * 16), error=DAMAGED_PARQUET
    ),
    "parquet: a page's checksum is another": of_bytes(
        "a.parquet", with_wrong_checksum(), error=DAMAGED_PARQUET
    ),
    "parquet: two columns of one name": Kind(
        parquet_of("a.parquet", pa.Table.from_arrays([[1], [2]], names=["n", "n"])),
        error=r"a\.parquet has two columns 'n'",
    ),
    "parquet: types that drift": Kind(
        drift, good=pa.table({"n": [1, 2, 3, 4], "v": [1.0, 2.0, 0.5, None]})
    ),
    "parquet: a name with a dot": Kind(
        parquet_of("a.parquet", pa.table({"a.b": [1], "": [2]})),
        good=pa.table({"a.b": [1], "": [2]}),
    ),
    "arrow: a file": Kind(arrow_of("a.arrow", NUMBERS), good=NUMBERS),
    "arrow: a stream": Kind(arrow_of("a.arrow", NUMBERS, is_stream=True), good=NUMBERS),
    "arrow: a stream, .arrows": Kind(arrow_of("a.arrows", NUMBERS, is_stream=True), good=NUMBERS),
    "arrow: no batches": Kind(arrow_of("a.arrow", NUMBERS.slice(0, 0)), good=NUMBERS.slice(0, 0)),
    "arrow: metadata": Kind(arrow_of("a.arrow", with_metadata()), good=with_metadata()),
    "arrow: no bytes": of_bytes("a.arrow", b"", error=r"a\.arrow cannot be read"),
    "arrow: a Parquet file": of_bytes(
        "a.arrow", bytes_of(NUMBERS), error=r"a\.arrow is a file of another kind, Parquet"
    ),
    "parquet: an Arrow file": Kind(
        arrow_of("a.parquet", NUMBERS), error=r"a\.parquet is a file of another kind, Arrow"
    ),
    "parquet: decimals beside doubles": two_files(
        pa.array([Decimal("12345678901234567890.12")], pa.decimal128(30, 2)),
        pa.array([0.5]),
        ["12345678901234567890.12", "0.5"],
    ),
    "parquet: short decimals beside doubles": two_files(
        pa.array([Decimal("1.12")], pa.decimal128(15, 2)), pa.array([0.5]), [1.12, 0.5]
    ),
    "parquet: times of two zones": two_files(
        pa.array([NOON], pa.timestamp("ms", "Asia/Tokyo")),
        pa.array([NOON], pa.timestamp("us", "Europe/Zurich")),
        pa.array([NOON.replace(microsecond=123000), NOON], pa.timestamp("us", "UTC")),
    ),
    "parquet: times that a finer unit does not hold": two_files(
        pa.array([253402300800], pa.timestamp("s", "UTC")),
        pa.array([1], pa.timestamp("ns", "UTC")),
        ["10000-01-01 00:00:00Z", "1970-01-01 00:00:00.000000001Z"],
    ),
    "parquet: objects with times beside texts": two_files(
        pa.array([{"a": 1, "t": NOON.replace(tzinfo=None)}]),
        pa.array(["x"]),
        ['{"a":1,"t":"2026-03-29T12:30:15.123456"}', "x"],
    ),
    "arrow: runs and views in a struct": Kind(
        arrow_of("a.arrow", pa.table({"v": runs_and_views()})),
        good=pa.table(
            {
                "v": pa.array(
                    [{"r": "a", "v": ["x"]}, {"r": "a", "v": None}, {"r": None, "v": []}],
                    pa.struct({"r": pa.string(), "v": pa.list_(pa.string())}),
                )
            }
        ),
    ),
    "arrow: runs in a map": Kind(
        arrow_of("a.arrow", pa.table({"v": runs_in_a_map()})), error="runs or views of lists in"
    ),
    "arrow: text": of_bytes("a.arrow", b"n\n1\n2\n", error=r"a\.arrow cannot be read"),
    "feather": Kind(
        lambda folder: pyarrow.feather.write_feather(NUMBERS, str(folder / "a.feather"), "zstd"),
        good=NUMBERS,
    ),
    "feather: version 1": Kind(
        lambda folder: pyarrow.feather.write_feather(NUMBERS, str(folder / "a.feather"), version=1),
        error=r"a\.feather cannot be read",
    ),
}

# ------------------------------------------------------------------ lines of JSON

LINES = b'{"n": 1}\n{"n": 2}\n{"n": 3}\n'


def wrapped(data: bytes, codec: str) -> bytes:
    """Compressed by one of Arrow's codecs."""
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, codec) as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


def lines_of(rows: list[Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def late_numbers() -> list[dict[str, Any]]:
    """A column that is null for longer than a part, and then has numbers."""
    return [{"n": i, "v": None if i < 80 else i / 2} for i in range(100)]


JSON_LINES: dict[str, Kind] = {
    "jsonl": of_bytes("a.jsonl", LINES, good=NUMBERS),
    "jsonl: byte order mark": of_bytes("a.jsonl", codecs.BOM_UTF8 + LINES, good=NUMBERS),
    "jsonl: utf-16": of_bytes("a.jsonl", LINES.decode().encode("utf-16"), good=NUMBERS),
    "jsonl: utf-16 without a mark": of_bytes(
        "a.jsonl", LINES.decode().encode("utf-16-le"), error=r"a\.jsonl.* looks like UTF-16"
    ),
    "jsonl: latin-1": of_bytes(
        "a.jsonl",
        '{"v": "Zürich"}\n'.encode("latin-1"),
        good=text_table(v=["Zürich"]),
        settings={"encoding": "latin-1"},
    ),
    "jsonl: bytes that are no text": of_bytes(
        "a.jsonl",
        b'{"v": "a"}\n{"v": "Z\xfcrich"}\n',
        good=text_table(v=["a"]),
        bad={1: "(?i)utf-8"},
        raw={1: {"base64": "eyJ2IjogIlr8cmljaCJ9Cg=="}},
    ),
    "jsonl: bytes that are no text, replaced": of_bytes(
        "a.jsonl",
        b'{"v": "Z\xfcrich"}\n',
        good=text_table(v=["Z\ufffdrich"]),
        settings={"decode_errors": "replace"},
    ),
    "jsonl: crlf": of_bytes("a.jsonl", LINES.replace(b"\n", b"\r\n"), good=NUMBERS),
    "jsonl: no last newline": of_bytes("a.jsonl", LINES.rstrip(), good=NUMBERS),
    "jsonl: blank lines": of_bytes("a.jsonl", LINES.replace(b"\n", b"\n\n \t\n"), good=NUMBERS),
    "jsonl: no lines": of_bytes("a.jsonl", b"", good=None),
    "jsonl: duplicate keys": of_bytes(
        "a.jsonl", b'{"n": 1, "n": 2}\n{"n": 2}\n', good=pa.table({"n": [2, 2]})
    ),
    "jsonl: big integers": of_bytes(
        "a.jsonl",
        b'{"n": 9223372036854775807}\n{"n": -9223372036854775808}\n',
        good=pa.table({"n": [2**63 - 1, -(2**63)]}),
    ),
    "jsonl: integers of 64 bits without a sign": of_bytes(
        "a.jsonl",
        b'{"n": 18446744073709551615}\n{"n": 1}\n',
        good=text_table(n=[str(2**64 - 1), "1"]),
    ),
    "jsonl: bare nan and infinities": of_bytes(
        "a.jsonl",
        b'{"n": 1, "v": "a NaN, \\"Infinity"}\n{"n": NaN}\n{"n": [Infinity, {"m": -Infinity}]}\n',
        good=text_table(
            n=["1", "NaN", '["Infinity",{"m":"-Infinity"}]'],
            v=['a NaN, "Infinity', None, None],
        ),
    ),
    "jsonl: bare nan among floats": of_bytes(
        "a.jsonl",
        b'{"n": 1}\n{"n": NaN}\n{"n": -Infinity}\n{"n": [NaN]\n{"n": nan}\n',
        good=pa.table({"n": [1.0, float("nan"), float("-inf")]}),
        bad={3: "malformed|truncated", 4: "malformed|invalid"},
        raw={4: '{"n": nan}\n'},
    ),
    "json: a bare nan in an object over lines": of_bytes(
        "a.json", b'{"n": NaN,\n "m": 1}\n', good=pa.table({"n": [float("nan")], "m": [1]})
    ),
    "jsonl: carriage returns alone": of_bytes("a.jsonl", LINES.replace(b"\n", b"\r"), good=NUMBERS),
    "jsonl: whole numbers, then a float": of_bytes(
        "a.jsonl", b'{"n": 1}\n{"n": 0.5}\n', good=pa.table({"n": [1.0, 0.5]})
    ),
    "jsonl: null, then numbers": of_bytes(
        "a.jsonl",
        lines_of(late_numbers()),
        good=pa.Table.from_pylist(late_numbers()),
        settings={"part_rows": 10},
    ),
    "jsonl: a key that comes late": of_bytes(
        "a.jsonl",
        b'{"n": 1}\n{"n": 2, "v": true}\n',
        good=pa.table({"n": [1, 2], "v": [None, True]}),
        settings={"part_rows": 1},
    ),
    "jsonl: nested": of_bytes(
        "a.jsonl",
        b'{"d": {"t": "x", "p": [1, 2]}}\n{"d": {"t": null, "p": []}}\n{"d": null}\n',
        good=pa.table({"d": [{"t": "x", "p": [1, 2]}, {"t": None, "p": []}, None]}),
    ),
    "jsonl: a text that looks like a time": of_bytes(
        "a.jsonl", b'{"v": "2026-01-02 03:04:05"}\n', good=text_table(v=["2026-01-02 03:04:05"])
    ),
    "jsonl: lines that are no objects": of_bytes(
        "a.jsonl",
        b'{"n": 1}\n[1]\n7\nnull\n"x"\n{"n": \n',
        good=pa.table({"n": [1]}),
        bad={1: "object", 2: "object", 3: "object", 4: "object", 5: "truncated|malformed"},
        raw={1: "[1]\n", 5: '{"n": \n'},
    ),
    "jsonl: .ndjson": of_bytes("a.ndjson", LINES, good=NUMBERS),
    "json: lines": of_bytes("a.json", LINES, good=NUMBERS),
    "json: an array": of_bytes("a.json", b'[{"n": 1}, {"n": 2},\n {"n": 3}]\n', good=NUMBERS),
    "json: an indented array": of_bytes(
        "a.json",
        json.dumps([{"n": 1}, {"n": 2}, {"n": 3}], indent=2).encode(),
        good=NUMBERS,
    ),
    "json: an indented object": of_bytes(
        "a.json",
        json.dumps({"rows": [{"n": 1}]}, indent=2).encode(),
        good=pa.table({"rows": [[{"n": 1}]]}),
    ),
    "json: objects in one line": of_bytes("a.json", b'{"n": 1}{"n": 2} {"n": 3}', good=NUMBERS),
    "jsonl: gzip that is not named so": of_bytes(
        "a.jsonl", gzip.compress(LINES), error=r"a\.jsonl is a file of another kind, gzip"
    ),
    "jsonl.gz: compressed twice": of_bytes(
        "a.jsonl.gz",
        gzip.compress(gzip.compress(LINES)),
        error=r"a\.jsonl\.gz holds, compressed, a file of another kind, gzip",
    ),
    "jsonl.gz": of_bytes("a.jsonl.gz", gzip.compress(LINES), good=NUMBERS),
    "jsonl.gz: two members": of_bytes(
        "a.jsonl.gz", gzip.compress(LINES[:9]) + gzip.compress(LINES[9:]), good=NUMBERS
    ),
    "jsonl.gz: cut": of_bytes(
        "a.jsonl.gz", gzip.compress(LINES)[:-12], error=r"a\.jsonl\.gz cannot be read"
    ),
    "jsonl.gz: not compressed": of_bytes("a.jsonl.gz", LINES, error=r"a\.jsonl\.gz cannot be read"),
    "jsonl.bz2": of_bytes("a.jsonl.bz2", bz2.compress(LINES), good=NUMBERS),
    "jsonl.zst": of_bytes("a.jsonl.zst", wrapped(LINES, "zstd"), good=NUMBERS),
    "jsonl.lz4": of_bytes("a.jsonl.lz4", wrapped(LINES, "lz4"), good=NUMBERS),
}

# ------------------------------------------------------------------ CSV

MEGABYTE = 1 << 20
TWO = text_table(a=["1", "3"], b=["2", "4"])
CSV: dict[str, Kind] = {
    "csv": of_bytes("a.csv", b"a,b\n1,2\n3,4\n", good=TWO),
    "csv: semicolons": of_bytes("a.csv", b"a;b\n1;2\n3;4\n", good=TWO),
    "csv: tabs, .tsv": of_bytes("a.tsv", b"a\tb\n1\t2\n3\t4\n", good=TWO),
    "csv: tabs": of_bytes("a.csv", b"a\tb\n1\t2\n3\t4\n", good=TWO),
    "csv: another delimiter": of_bytes(
        "a.csv", b"a:b\n1:2\n3:4\n", good=TWO, settings={"delimiter": ":"}
    ),
    "csv: quotes": of_bytes(
        "a.csv",
        b'a,b\n"x, ""y""","line\nbreak"\n"",2\n',
        good=text_table(a=['x, "y"', ""], b=["line\nbreak", "2"]),
    ),
    "csv: crlf": of_bytes("a.csv", b"a,b\r\n1,2\r\n3,4\r\n", good=TWO),
    "csv: carriage returns alone": of_bytes(
        "a.csv",
        b'a,b\r1,"x\ry"\r5\r3,4\r',
        good=text_table(a=["1", "3"], b=["x\ry", "4"]),
        bad={1: "1 fields, but the header has 2"},
    ),
    "csv: carriage returns alone, utf-16": of_bytes(
        "a.csv", "a;b\r1;2\r3;4".encode("utf-16"), good=TWO
    ),
    "csv: a carriage return in a field": of_bytes(
        "a.csv",
        b"a,b\n1,2\nx\ry,5\n3,4\n",
        good=TWO,
        bad={1: "a carriage return stands in a field without quotes"},
    ),
    "csv: a zip file": of_bytes(
        "a.csv", b"PK\x03\x04\x14\0\xff\xfe", error=r"a\.csv is a file of another kind, zip \(Excel"
    ),
    "csv: a Parquet file": of_bytes("a.csv", bytes_of(NUMBERS), error="another kind, Parquet"),
    "csv: a header that is no text": of_bytes(
        "a.csv",
        "gr\u00fc\u00df,b\n1,2\n".encode("latin-1"),
        error="its header: it has bytes that are no",
    ),
    "csv: Excel's line with the delimiter": of_bytes(
        "a.csv", b"sep=|\r\na|b\r\n1|2\r\n3|4\r\n", good=TWO
    ),
    "csv: no last newline": of_bytes("a.csv", b"a,b\n1,2\n3,4", good=TWO),
    "csv: a quote that is not closed": of_bytes(
        "a.csv",
        b'a,b\n1,2\n"x,5\n3,4\n',
        good=TWO,
        bad={1: "quote"},
        raw={1: '"x,5\n'},
    ),
    "csv: ragged": of_bytes(
        "a.csv",
        b"a,b\n1,2\n5\n6,7,8\n3,4\n",
        good=TWO,
        bad={1: "1 fields, but the header has 2", 2: "3 fields, but the header has 2"},
        raw={1: "5\n", 2: "6,7,8\n"},
    ),
    "csv: two columns of one name": of_bytes(
        "a.csv", b"a,a\n1,2\n", error=r"a\.csv has two columns 'a'"
    ),
    "csv: latin-1": of_bytes(
        "a.csv",
        "a\nZürich\n".encode("latin-1"),
        good=text_table(a=["Zürich"]),
        settings={"encoding": "latin-1"},
    ),
    "csv: latin-1, not said": of_bytes(
        "a.csv", "a\nx\nZürich\n".encode("latin-1"), good=text_table(a=["x"]), bad={1: "(?i)utf-8"}
    ),
    "csv: utf-16": of_bytes("a.csv", "a,b\n1,2\n3,4\n".encode("utf-16"), good=TWO),
    "csv: byte order mark": of_bytes("a.csv", codecs.BOM_UTF8 + b"a,b\n1,2\n3,4\n", good=TWO),
    "csv: a mark before a quoted name": of_bytes(
        "a.csv", codecs.BOM_UTF8 + b'"a","b"\n1,2\n3,4\n', good=TWO
    ),
    "csv: no bytes": of_bytes("a.csv", b"", good=None),
    "csv: header only": of_bytes("a.csv", b"a,b\n", good=TWO.slice(0, 0)),
    "csv: empty lines": of_bytes("a.csv", b"a,b\n\n1,2\n\n3,4\n\n", good=TWO),
    "csv: one column": of_bytes("a.csv", b"a\n1; 2, 3\n", bad={0: "2 fields, but the header"}),
    "csv.gz": of_bytes("a.csv.gz", gzip.compress(b"a,b\n1,2\n3,4\n"), good=TWO),
    "csv: a field of a megabyte": of_bytes(
        "a.csv",
        b"a,b\n" + b"x" * (1 << 20) + b",2\n",
        good=text_table(a=["x" * (1 << 20)], b=["2"]),
    ),
}

# ------------------------------------------------------------------ files as rows, and folders


def files(**contents: bytes) -> Callable[[Path], None]:
    """Name -> data; in a name, ``__`` stands for a dot."""

    def write(folder: Path) -> None:
        for name, data in contents.items():
            path = folder / name.replace("__", ".")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)

    return write


def texts(folder: Path) -> None:
    (folder / "a.txt").write_text("Zürich\n")
    (folder / "b.txt").write_bytes(codecs.BOM_UTF8 + b"with a mark")
    (folder / "c.txt").write_text("sixteen", encoding="utf-16")
    (folder / "d.md").write_text("# title")
    (folder / "e.txt.gz").write_bytes(gzip.compress(b"compressed"))
    (folder / "f.txt").write_bytes(b"")


def pictures(folder: Path) -> None:
    """One of each mode: its lowest values, or what is transparent or has no ink."""
    for mode in ("1", "L", "P", "LA", "RGB", "RGBA", "I;16"):
        name = mode.replace(";", "-")
        (folder / f"{name}.png").write_bytes(encoded(Image.new(mode, (4, 4)), "PNG"))
    for mode in ("CMYK", "F", "I"):
        (folder / f"{mode}.tif").write_bytes(encoded(Image.new(mode, (4, 4)), "TIFF"))


def hive(folder: Path) -> None:
    for year, month in (("2025", "1"), ("2026", "__HIVE_DEFAULT_PARTITION__")):
        below = folder / f"year={year}" / f"month={month}"
        below.mkdir(parents=True)
        pq.write_table(pa.table({"n": [int(year)]}), below / "a.parquet")


def odd_names(folder: Path) -> None:
    below = folder / "in den Süden" / "b c%20d"
    below.mkdir(parents=True)
    (below / "a ü#?.jsonl").write_bytes(LINES)


def upper_case(folder: Path) -> None:
    (folder / "A.JSONL").write_bytes(LINES)


def hidden(folder: Path) -> None:
    (folder / "a.jsonl").write_bytes(LINES)
    (folder / "_SUCCESS").write_bytes(b"")
    (folder / ".a.jsonl.crc").write_bytes(b"x")
    (folder / "_delta_log").mkdir()
    (folder / "_delta_log" / "0.json").write_bytes(LINES)


def pipe_beside_file(folder: Path) -> None:
    (folder / "a.jsonl").write_bytes(LINES)
    os.mkfifo(folder / "b.jsonl")


def folder_named_as_file(folder: Path) -> None:
    """As Spark names what it writes."""
    below = folder / "a.parquet"
    below.mkdir()
    pq.write_table(NUMBERS, below / "part-0.snappy.parquet")
    (below / "_SUCCESS").touch()
    (below / "_metadata").write_bytes(b"PAR1")


def one_unknown(folder: Path) -> None:
    (folder / "a.jsonl").write_bytes(LINES)
    (folder / "b.xlsx").write_bytes(b"PK")


def several_formats(folder: Path) -> None:
    (folder / "a.jsonl").write_bytes(LINES)
    (folder / "b.csv").write_bytes(b"n\n1\n")


FOLDERS: dict[str, Kind] = {
    "texts": Kind(
        texts,
        good=text_table(text=["Zürich\n", "with a mark", "sixteen", "# title", "compressed", ""]),
        settings={"map": "tests.jobs.zoo:text_of", "keep": []},
    ),
    "text: bytes that are no text": of_bytes(
        "a.txt", b"Z\xfcrich", bad={0: "(?i)utf-8"}, settings={"map": "tests.jobs.zoo:text_of"}
    ),
    "text: latin-1": of_bytes(
        "a.txt",
        b"Z\xfcrich",
        good=text_table(text=["Zürich"]),
        settings={"map": "tests.jobs.zoo:text_of", "keep": [], "encoding": "latin-1"},
    ),
    "pictures": Kind(
        pictures,
        good=pa.table({"grey": [0, 255, 0, 0, 0, 0, 255, 0, 0, 255]}),
        settings={"map": "tests.jobs.zoo:grey_of", "keep": []},
    ),
    "folders that are columns": Kind(
        hive,
        good=pa.table(
            {
                "n": [2025, 2026],
                "year": pa.array([2025, 2026], pa.int32()),
                "month": pa.array([1, None], pa.int32()),
            }
        ),
    ),
    "names with spaces and umlauts": Kind(odd_names, good=NUMBERS),
    "a name in capitals": Kind(upper_case, good=NUMBERS),
    "hidden files": Kind(hidden, good=NUMBERS),
    "hidden files alone": of_bytes("_a.jsonl", LINES, error=r"passed over: 1 hidden"),
    "a pipe beside a file": Kind(pipe_beside_file, good=NUMBERS),
    "a pipe": Kind(pipe_beside_file, error="and no pipe or device", file="b.jsonl"),
    "a folder named as a file": Kind(folder_named_as_file, good=NUMBERS),
    "a file of an unknown kind beside others": Kind(one_unknown, good=NUMBERS),
    "files of an unknown kind": of_bytes("a.xlsx", b"PK", error="xlsx"),
    "several formats": Kind(several_formats, error="csv, jsonl: name input_format"),
    "an empty folder": Kind(lambda folder: None, error="no (known kind|files)"),
    "a file that is not there": Kind(
        lambda folder: None, error="is not there", file="nothing.jsonl"
    ),
    "one damaged file of two": Kind(one_damaged, good=NUMBERS, has_bad_file=True),
}

KINDS: dict[str, Kind] = {**dict(kinds_of_types()), **TABLES, **JSON_LINES, **CSV, **FOLDERS}


# ------------------------------------------------------------------ functions that jobs call


def text_of(row: dict[str, Any]) -> dict[str, Any]:
    return {"text": row["text"]}


def grey_of(row: dict[str, Any]) -> dict[str, Any]:
    """The grey of a picture's first pixel."""
    from jitney_jobs.pictures import pixels_of

    pixels = pixels_of(Path(row["path"]).read_bytes(), width=4, height=4, channels=1)
    return {"grey": int(pixels[0, 0, 0])}


def nothing(row: dict[str, Any]) -> dict[str, Any]:
    return {}


def main() -> None:
    for name, kind in KINDS.items():
        folder = Path(sys.argv[1]) / name.replace("/", "-")
        folder.mkdir(parents=True)
        kind.write(folder)


if __name__ == "__main__":
    main()
