"""Kinds of files with a column of each type that Parquet and Arrow have."""

from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal

import numpy as np
import pyarrow as pa

from tests.jobs.zoo_kind import Kind, arrow_of, parquet_of

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
