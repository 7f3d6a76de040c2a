"""Kinds of files of lines: JSON and CSV."""

import bz2
import codecs
import gzip
import json
from typing import Any

import pyarrow as pa

from tests.jobs.zoo_kind import LINES, NUMBERS, Kind, of_bytes, text_table

# ------------------------------------------------------------------ lines of JSON


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
    "jsonl: integers that no double holds, in objects beside floats": of_bytes(
        "a.jsonl",
        b'{"s": {"id": 1152921504606846977}, "l": [0.5]}\n'
        b'{"s": {"id": 0.5}, "l": [1, -1152921504606846977]}\n',
        good=pa.table(
            {
                "s": [{"id": "1152921504606846977"}, {"id": "0.5"}],
                "l": [["0.5"], ["1", "-1152921504606846977"]],
            }
        ),
    ),
    "jsonl: an integer that no double holds, where the job names a double": of_bytes(
        "a.jsonl",
        b'{"n": 1}\n{"n": 1152921504606846977}\n',
        good=pa.table({"n": [1.0]}),
        bad={1: "1152921504606846977 is no value of type double"},
        settings={"schema": '{"n": "double"}'},
    ),
    "json: objects in one line": of_bytes("a.json", b'{"n": 1}{"n": 2} {"n": 3}', good=NUMBERS),
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
        b"a,b\n" + b"x" * MEGABYTE + b",2\n",
        good=text_table(a=["x" * MEGABYTE], b=["2"]),
    ),
}
