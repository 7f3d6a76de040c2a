"""Kinds of columns that have other types in other files, and of types that are read as others."""

from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.jobs.zoo_kind import Kind, arrow_of

NOON = datetime(2026, 3, 29, 12, 30, 15, 123456, tzinfo=UTC)


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


DRIFT: dict[str, Kind] = {
    "parquet: decimals beside doubles": two_files(
        pa.array([Decimal("12345678901234567890.12")], pa.decimal128(30, 2)),
        pa.array([0.5]),
        ["12345678901234567890.12", "0.5"],
    ),
    "parquet: short decimals beside doubles": two_files(
        pa.array([Decimal("1.12")], pa.decimal128(15, 2)), pa.array([0.5]), [1.12, 0.5]
    ),
    "parquet: times of two zones": two_files(
        pa.array([NOON.replace(microsecond=123000)], pa.timestamp("ms", "Asia/Tokyo")),
        pa.array([NOON], pa.timestamp("us", "Europe/Zurich")),
        pa.array([NOON.replace(microsecond=123000), NOON], pa.timestamp("us", "UTC")),
    ),
    "parquet: times that a finer unit does not hold": two_files(
        pa.array([253402300800], pa.timestamp("s", "UTC")),
        pa.array([1], pa.timestamp("ns", "UTC")),
        ["10000-01-01 00:00:00.000Z", "1970-01-01 00:00:00.000000001Z"],
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
}
