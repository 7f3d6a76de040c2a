"""Kinds of files of Parquet, Arrow and Feather: forms, and damage."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pyarrow.parquet.encryption as pe

from tests.jobs.zoo_kind import NUMBERS, Kind, arrow_of, bytes_of, of_bytes, parquet_of


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
