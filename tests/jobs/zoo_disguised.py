"""Kinds of files that are something else than their names say, and of things that are no files."""

import gzip
import os
from pathlib import Path

import pyarrow.parquet as pq

from tests.jobs.zoo_kind import LINES, NUMBERS, Kind, arrow_of, bytes_of, of_bytes


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


DISGUISED: dict[str, Kind] = {
    "jsonl: gzip that is not named so": of_bytes(
        "a.jsonl", gzip.compress(LINES), error=r"a\.jsonl is a file of another kind, gzip"
    ),
    "jsonl.gz: compressed twice": of_bytes(
        "a.jsonl.gz",
        gzip.compress(gzip.compress(LINES)),
        error=r"a\.jsonl\.gz holds, compressed, a file of another kind, gzip",
    ),
    "csv: a zip file": of_bytes(
        "a.csv",
        b"PK\x03\x04\x14\0\xff\xfe",
        error=r"a\.csv is a file of another kind, zip \(Excel",
    ),
    "csv: a Parquet file": of_bytes("a.csv", bytes_of(NUMBERS), error="another kind, Parquet"),
    "csv: a header that is no text": of_bytes(
        "a.csv", "grüß,b\n1,2\n".encode("latin-1"), error="its header: it has bytes that are no"
    ),
    "arrow: a Parquet file": of_bytes(
        "a.arrow", bytes_of(NUMBERS), error=r"a\.arrow is a file of another kind, Parquet"
    ),
    "parquet: an Arrow file": Kind(
        arrow_of("a.parquet", NUMBERS), error=r"a\.parquet is a file of another kind, Arrow"
    ),
    "hidden files alone": of_bytes("_a.jsonl", LINES, error=r"passed over: 1 hidden"),
    "a pipe beside a file": Kind(pipe_beside_file, good=NUMBERS),
    "a pipe": Kind(pipe_beside_file, error="and no pipe or device", file="b.jsonl"),
    "a folder named as a file": Kind(folder_named_as_file, good=NUMBERS),
}
