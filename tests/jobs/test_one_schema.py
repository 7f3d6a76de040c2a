"""One schema for all of a job's rows: fixed before the first row, whatever comes first and however
long it takes. Values and types of the input are written as they came."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from jitney.errors import CancelledError, InvalidArgumentError, UnavailableError
from jitney_jobs.dataset import Dataset
from jitney_jobs.job_record import read_record
from jitney_jobs.run import run_job

from tests.jobs.job_rows import bad, fail_at_part, ids, job_of, read, run, write_lines

MARKED = "tests.jobs.job_rows:marked"


def table_of(source: Path, output: Path, **settings: Any) -> pa.Table:
    """The output of a job over all rows, in their order; none may be bad."""
    given = {"map": MARKED, "output_format": "parquet", "ordered": True, **settings}
    assert run(source, output, **given)
    assert bad(output) == []
    parts = sorted(output.glob("part-*.parquet"))
    schemas = {pq.read_schema(part).to_string() for part in parts}
    assert len(schemas) == 1, "all parts have one schema"
    return pa.concat_tables(map(pq.read_table, parts))


# ------------------------------------------------------------------ types that fit all rows


@pytest.mark.parametrize("part_rows", [1000, 12_000])
def test_a_column_that_is_null_for_long_and_then_has_numbers(
    tmp_path: Path, part_rows: int
) -> None:
    rows = [{"id": i, "v": i / 4 if i >= 11_500 else None} for i in range(12_000)]
    source = write_lines(tmp_path / "in.jsonl", rows)
    table = table_of(source, tmp_path / "out", part_rows=part_rows)
    assert table.schema.field("v").type == pa.float64()
    assert table["v"].to_pylist() == [row["v"] for row in rows]


def test_a_column_that_comes_late(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    write_lines(tmp_path / "in/a.jsonl", ids(0, 300))
    write_lines(tmp_path / "in/b.jsonl", [{"id": 300, "late": {"a": [1]}}])
    table = table_of(tmp_path / "in", tmp_path / "out", part_rows=50)
    assert table["late"].to_pylist() == [None] * 300 + [{"a": [1]}]


@pytest.mark.parametrize(
    ("values", "kind", "written"),
    [
        ([1, "one", [1]], pa.string(), ["1", "one", "[1]"]),
        ([{"c": "a"}, {"c": [{"d": 1}]}], None, [{"c": "a"}, {"c": '[{"d":1}]'}]),
        ([1, 2**53 + 1, 0.5], pa.string(), ["1", str(2**53 + 1), "0.5"]),
        ([1, 2**64], pa.string(), ["1", str(2**64)]),
        ([True, 1], pa.string(), ["true", "1"]),
        ([{}, {}], pa.string(), ["{}", "{}"]),
        ([[], [None]], pa.list_(pa.string()), [[], [None]]),
        (["2026-01-01", "x"], pa.string(), ["2026-01-01", "x"]),
    ],
)
def test_values_without_a_common_type_are_text(
    tmp_path: Path, values: list[Any], kind: Any, written: list[Any]
) -> None:
    source = write_lines(tmp_path / "in.jsonl", [{"v": value} for value in values])
    table = table_of(source, tmp_path / "out")
    assert kind is None or table.schema.field("v").type == kind
    assert table["v"].to_pylist() == written


DAYS = pa.array([1, 20_000], pa.date32())
CENTS = pa.array([150, 1]).cast(pa.decimal128(19, 0)).cast(pa.decimal128(21, 2))


@pytest.mark.parametrize(
    ("first", "second", "kind"),
    [
        (pa.array([1, 2]), pa.array([0.5, 1.5]), pa.float64()),
        (pa.array([1, 2], pa.int8()), pa.array([300, 400], pa.int32()), pa.int32()),
        (pa.array([None, None], pa.null()), pa.array(["a", "b"]), pa.string()),
        (pa.array([[1], [2]]), pa.array([[0.5], []]), pa.list_(pa.float64())),
        (pa.array([1, 2]), pa.array(["a", "b"]), pa.string()),
        (pa.array(["a", "b"]).dictionary_encode(), pa.array(["a", "c"]), pa.string()),
        (DAYS.cast(pa.timestamp("ms")), DAYS, pa.timestamp("ms")),
        (pa.array([1, -2]).cast(pa.decimal128(19, 0)), pa.array([3, 4]), pa.decimal128(20, 0)),
        (CENTS, pa.array([3, 2**62]), pa.decimal128(22, 2)),
        (pa.array([1, 2**60 + 1]), pa.array([0.5, 1.5]), pa.string()),
        (pa.array([1, 2**63], pa.uint64()), pa.array([-1, 1]), pa.string()),
        (pa.array([1, 2], pa.uint64()), pa.array([-1, 1]), pa.int64()),
    ],
)
def test_types_that_drift_between_files(
    tmp_path: Path, first: pa.Array, second: pa.Array, kind: pa.DataType
) -> None:
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table({"id": [0, 1], "v": first}), tmp_path / "in/a.parquet")
    pq.write_table(pa.table({"id": [2, 3], "v": second}), tmp_path / "in/b.parquet")
    table = table_of(tmp_path / "in", tmp_path / "out")
    assert table.schema.field("v").type == kind
    both = pa.concat_arrays([first.cast(kind), second.cast(kind)])
    assert table["v"].combine_chunks().equals(both)


@pytest.mark.parametrize("order", ["abc", "cab", "bca"])
def test_numbers_texts_and_bytes_are_texts_together(tmp_path: Path, order: str) -> None:
    """Whichever file comes first. Bytes are in base64."""
    columns = {"a": pa.array([7]), "b": pa.array(["x"]), "c": pa.array([b"\xff\x00"])}
    (tmp_path / "in").mkdir()
    for number, name in enumerate(order):
        table = pa.table({"id": [name], "v": columns[name]})
        pq.write_table(table, tmp_path / f"in/{number}.parquet")
    table = table_of(tmp_path / "in", tmp_path / "out")
    found = dict(zip(table["id"].to_pylist(), table["v"].to_pylist(), strict=True))
    assert found == {"a": "7", "b": "x", "c": "/wA="}


@pytest.mark.parametrize("bound", [{"part_seconds": 0.001}, {"part_rows": 40}])
def test_results_of_map_have_one_schema(tmp_path: Path, bound: dict[str, Any]) -> None:
    """The first 256 rows set it, however small the parts are."""
    values: list[Any] = [None] * 100 + [1] * 100 + [0.5] * 100 + [{"a": 1}]
    (tmp_path / "values.json").write_text(json.dumps(values))
    rows = [{"id": i, "values": str(tmp_path / "values.json")} for i in range(len(values))]
    source = write_lines(tmp_path / "in.jsonl", rows)
    settings: dict[str, Any] = {"map": "tests.jobs.job_rows:of_id", "keep": ["id"], **bound}
    settings["output_format"] = "parquet"
    assert run(source, tmp_path / "out", **settings)
    counts = [pq.read_metadata(part).num_rows for part in (tmp_path / "out").glob("part-*")]
    assert max(counts) <= bound.get("part_rows", 10_000)
    (bad_row,) = bad(tmp_path / "out")
    assert (bad_row["row"], bad_row["error"]) == (
        300,
        "column 'made': {'a': 1} is no value of type double",
    )
    made = {row["id"]: row["made"] for row in read(tmp_path / "out")}
    assert made == dict(enumerate(values[:300]))
    settings["schema"] = '{"made": "string"}'
    table = table_of(source, tmp_path / "text", **settings)
    assert table["made"].to_pylist()[-2:] == ["0.5", '{"a":1}']


def test_a_stop_among_the_first_results_sets_no_columns(tmp_path: Path) -> None:
    """They would be those of the few rows that happen to be done."""
    values: list[Any] = [1] * 100 + [0.5] * 200
    (tmp_path / "values.json").write_text(json.dumps(values))
    rows = [{"id": i, "values": str(tmp_path / "values.json")} for i in range(len(values))]
    del rows[3]["values"]
    source = write_lines(tmp_path / "in.jsonl", rows)
    settings: dict[str, Any] = {"map": "tests.jobs.job_rows:of_id", "output_format": "parquet"}
    job = job_of(source, tmp_path / "out", **settings, in_flight=16)
    answers = iter([True, True, True, True, False])
    with pytest.raises(CancelledError):
        run_job(job, wanted=lambda: next(answers))
    record = read_record(job.output, None)
    assert record.written == 0
    assert run_job(job)
    made = {row["id"]: row["made"] for row in read(tmp_path / "out")}
    assert made == {i: float(value) for i, value in enumerate(values) if i != 3}


@pytest.mark.parametrize("nested", ["[{}]", '{{"a":{}}}'])
def test_values_too_deep_for_a_type_are_text(tmp_path: Path, nested: str) -> None:
    value = "1"
    for _ in range(200):
        value = nested.format(value)
    (tmp_path / "in.jsonl").write_text(f'{{"id": 1, "v": {value}}}\n{{"id": 2}}\n')
    table = table_of(tmp_path / "in.jsonl", tmp_path / "out", output_format="parquet")
    assert table["v"].to_pylist() == [value, None]


def test_types_that_the_job_names(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("id,at,price,n\n1,2026-01-02 03:04:05Z,1.50,\n")
    types = {"id": "int32", "at": "timestamp[ns, tz=UTC]", "price": "decimal128(9, 2)"}
    (tmp_path / "types.json").write_text(json.dumps({**types, "n": "double"}))
    table = table_of(tmp_path / "in.csv", tmp_path / "out", schema=str(tmp_path / "types.json"))
    kinds = [pa.int32(), pa.timestamp("ns", "UTC"), pa.decimal128(9, 2), pa.float64(), pa.bool_()]
    assert table.schema.types == kinds
    assert [str(value) for value in table["price"].to_pylist()] == ["1.50"]
    for schema, message in (
        ('{"id": "int23"}', "schema.id is 'int23', but must be a type of Arrow's"),
        ('{"id": 1}', "schema is no object of names and types"),
        ("nowhere.json", "schema is 'nowhere.json', but must be a file that is there"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            run(tmp_path / "in.csv", tmp_path / "out2", map=MARKED, schema=schema)


def test_the_schema_is_in_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that goes on does not look at the input again."""
    source = write_lines(tmp_path / "in.jsonl", [{"id": 0, "v": 1}, {"id": 1, "v": "one"}])
    settings = {"map": MARKED, "output_format": "parquet", "part_rows": 1}
    with monkeypatch.context() as patched:
        fail_at_part(patched, 1)
        with pytest.raises(UnavailableError, match="No space left"):
            run(source, tmp_path / "out", **settings)
    begin = read_record(str(tmp_path / "out"), None).begin
    assert begin is not None
    assert begin.schema is not None
    assert pa.ipc.read_schema(pa.py_buffer(begin.schema)).types == [pa.int64(), pa.string()]

    def look_ahead(*_: Any) -> None:
        raise AssertionError("it is known")

    monkeypatch.setattr(Dataset, "look_ahead", look_ahead)
    assert run(source, tmp_path / "out", **settings)
    assert [row["v"] for row in read(tmp_path / "out")] == ["1", "one"]


# ------------------------------------------------------------------ values and types as they came


AS_THEY_CAME = """
import sys
class NoPandas:
    def find_spec(self, name, path=None, target=None):
        if name == "pandas":
            raise ImportError(name)
sys.meta_path.insert(0, NoPandas())
from pathlib import Path
from tests.jobs.job_rows import run
source, output, form = sys.argv[1:]
print(run(Path(source), Path(output), map="tests.jobs.job_rows:marked", output_format=form))
"""


def test_nanoseconds_without_pandas(tmp_path: Path) -> None:
    nanoseconds = [1_700_000_000_000_000_001, None]
    fields = [
        pa.field("ts", pa.timestamp("ns"), metadata={"unit": "mine"}),
        pa.field("zoned", pa.timestamp("ns", "Europe/Berlin")),
        pa.field("time", pa.time64("ns")),
        pa.field("many", pa.list_(pa.timestamp("ns"))),
    ]
    columns = [
        pa.array(nanoseconds, pa.int64()).cast(fields[0].type),
        pa.array(nanoseconds, pa.int64()).cast(fields[1].type),
        pa.array([1, None], pa.time64("ns")),
        pa.array([[nanoseconds[0]], []], pa.list_(pa.int64())).cast(fields[3].type),
    ]
    table = pa.Table.from_arrays(columns, schema=pa.schema(fields, {"made": "by hand"}))
    pq.write_table(table, tmp_path / "in.parquet")
    for form in ("parquet", "jsonl"):
        words = [sys.executable, "-c", AS_THEY_CAME, str(tmp_path / "in.parquet")]
        words += [str(tmp_path / form), form]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert done.stdout == "True\n", done.stderr
        assert bad(tmp_path / form) == []
    (part,) = (tmp_path / "parquet").glob("part-*")
    written = pq.read_table(part)
    assert written.drop_columns(["mark"]).equals(table)
    assert written.schema.metadata[b"made"] == b"by hand"
    assert written.schema.field("ts").metadata[b"unit"] == b"mine"
    text = "2023-11-14T22:13:20.000000001"
    row = {"ts": text, "zoned": "2023-11-14T23:13:20.000000001+01:00"}
    row |= {"time": "00:00:00.000000001", "many": [text], "mark": True}  # type: ignore[dict-item]
    assert read(tmp_path / "jsonl")[0] == row


@pytest.mark.parametrize("form", ["parquet", "arrow", "stream"])
def test_columns_that_have_no_values_or_few_readers(tmp_path: Path, form: str) -> None:
    """A struct with a child of nulls, views, and a stream of Arrow's."""
    kind = pa.struct([("a", pa.null()), ("b", pa.int64())])
    table = pa.table(
        {
            "of": pa.array([{"b": 1}, None, {"b": 3}], kind),
            "nothing": pa.nulls(3),
            "view": pa.array([["a"], None, []], pa.list_(pa.string_view())),
        }
    )
    source = tmp_path / f"in.{'parquet' if form == 'parquet' else 'arrow'}"
    if form == "parquet":
        pq.write_table(table, source)
    else:
        new = pa.ipc.new_file if form == "arrow" else pa.ipc.new_stream
        with new(str(source), table.schema) as file:
            file.write_table(table, max_chunksize=2)
    written = table_of(source, tmp_path / "out")
    assert written["of"].type == kind
    assert written.drop_columns(["mark"]).to_pylist() == table.to_pylist()


def test_lines_are_written_as_they_came(tmp_path: Path) -> None:
    lines = ['{"id": 1.0, "big":123456789012345678901234567890 , "e": 1E5, "u": "\\u00fc"}', "{ }"]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    assert run(tmp_path / "in.jsonl", tmp_path / "out", map=MARKED)
    (part,) = (tmp_path / "out").glob("part-*")
    first, second = part.read_text().splitlines()
    assert first == lines[0][:-1] + ',"mark":true}'
    assert json.loads(second) == {"mark": True}
    assert run(tmp_path / "in.jsonl", tmp_path / "kept", map=MARKED, keep=["e", "id"])
    (part,) = (tmp_path / "kept").glob("part-*")
    assert part.read_text().splitlines()[0] == '{"e":1E5,"id":1.0,"mark":true}'


def test_only_the_columns_that_are_needed_become_values(tmp_path: Path) -> None:
    """Python has no date after the year 9999; the columns of the output have."""
    days = pa.array([10**8, 0], pa.int32()).cast(pa.date32())
    pq.write_table(pa.table({"id": [20, 21], "day": days}), tmp_path / "in.parquet")
    settings = {"map": "tests.jobs.job_rows:twice", "map_column": ["id"]}
    table = table_of(tmp_path / "in.parquet", tmp_path / "out", **settings)
    assert table["day"].combine_chunks().equals(days)
    assert table["twice"].to_pylist() == [40, 42]


def test_columns_of_folders_have_types(tmp_path: Path) -> None:
    for year, name in (("2025", "b"), ("__HIVE_DEFAULT_PARTITION__", "1")):
        folder = tmp_path / f"in/year={year}/name={name}"
        folder.mkdir(parents=True)
        write_lines(folder / "a.jsonl", [{"id": 1}])
    for form in ("parquet", "jsonl"):
        assert run(tmp_path / "in", tmp_path / form, map=MARKED, output_format=form)
        rows = sorted(read(tmp_path / form), key=lambda row: row["name"])
        assert [(row["year"], row["name"]) for row in rows] == [(None, "1"), (2025, "b")]


ID = 2**60 + 1
"""No double holds it."""


def write_table(path: Path, table: pa.Table, form: str) -> None:
    if form == "arrow":
        with pa.ipc.new_file(str(path.with_suffix(".arrow")), table.schema) as sink:
            sink.write_table(table)
    else:
        has_ranges = form == "parquet"
        pq.write_table(table, path.with_suffix(".parquet"), write_statistics=has_ranges)


@pytest.mark.parametrize("form", ["parquet", "parquet without ranges", "arrow"])
def test_integers_that_no_double_holds_beside_doubles(tmp_path: Path, form: str) -> None:
    """As text, wherever they are; smaller ones become doubles."""
    large = {"v": [7, ID], "s": [{"id": ID, "x": "a"}, None], "l": [[1, -ID], []], "small": [7, 8]}
    doubles = {"v": [0.5, None], "s": [{"id": 0.5}, {"x": "b"}], "l": [[0.5], None]}
    doubles["small"] = [0.5, None]
    (tmp_path / "in").mkdir()
    write_table(tmp_path / "in/a", pa.table(large), form)
    write_table(tmp_path / "in/b", pa.table(doubles), form)
    table = table_of(tmp_path / "in", tmp_path / "out")
    assert table.schema.field("small").type == pa.float64()
    assert table["v"].to_pylist() == ["7", str(ID), "0.5", None]
    assert [row and row["id"] for row in table["s"].to_pylist()] == [str(ID), None, "0.5", None]
    assert table["l"].to_pylist() == [["1", str(-ID)], [], ["0.5"], None]


# ------------------------------------------------------------------ NaN and infinities


def test_bare_nan_in_lines_is_written_as_the_job_says(tmp_path: Path) -> None:
    """Of columns that are kept; the rest of each line stays as it came."""
    source = tmp_path / "in.jsonl"
    source.write_text('{"a": 1.50, "b": "NaN", "c": NaN}\n{"a": -Infinity, "b": "\\"Infinity"}\n')
    whole: dict[str, Any] = {"map": MARKED, "ordered": True}
    for choice, line in (
        ("null", '{"a": 1.50, "b": "NaN", "c": null,"mark":true}'),
        ("text", '{"a": 1.50, "b": "NaN", "c": "NaN","mark":true}'),
    ):
        output = tmp_path / choice
        assert run(source, output, non_finite=choice, **whole)
        assert (output / "part-00000.jsonl").read_text().splitlines()[0] == line
        assert read_record(str(output), None).parts[-1].figures["non_finite"] == 2
    assert run(source, tmp_path / "kept", non_finite="error", keep=["a", "b"], **whole)
    assert read(tmp_path / "kept") == [{"a": 1.5, "b": "NaN", "mark": True}]
    (error,) = bad(tmp_path / "kept")
    assert "JSON has no -Infinity" in error["error"]
    assert error["input"] == {"a": "-Infinity", "b": '"Infinity'}


@pytest.mark.parametrize("source", ["map", "input"])
def test_values_that_json_does_not_have(tmp_path: Path, source: str) -> None:
    x = [0.5, math.nan, math.inf, -math.inf]
    pq.write_table(pa.table({"x": x, "of": [[value] for value in x]}), tmp_path / "in.parquet")
    settings: dict[str, Any] = {"map": MARKED, "output_format": "jsonl", "ordered": True}
    column = "x"
    if source == "map":
        settings |= {"map": "tests.jobs.job_rows:infinite", "keep": []}
        column = "score"
    for choice, values in (
        ("null", [0.5, None, None, None]),
        ("text", [0.5, "NaN", "Infinity", "-Infinity"]),
    ):
        output = tmp_path / choice
        assert run(tmp_path / "in.parquet", output, non_finite=choice, **settings)
        assert [row[column] for row in read(output)] == values
        figures = read_record(str(output), None).parts[-1].figures
        assert figures["non_finite"] == (6 if source == "input" else 7)
    assert run(tmp_path / "in.parquet", tmp_path / "error", non_finite="error", **settings)
    errors = [each["error"] for each in bad(tmp_path / "error")]
    assert len(errors) == (3 if source == "input" else 4)
    assert "JSON has no Infinity" in errors[-2]


# ------------------------------------------------------------------ CSV


def test_a_quote_that_is_not_closed(tmp_path: Path) -> None:
    lines = [f'{i},"text {i}",{i}' for i in range(1000)]
    lines[10] = '10,"open,10'
    lines[20] = '20,"of two\nlines",20'
    (tmp_path / "in.csv").write_text("id,text,n\n" + "\n".join(lines) + "\n")
    assert run(tmp_path / "in.csv", tmp_path / "out", map=MARKED)
    (bad_row,) = bad(tmp_path / "out")
    assert bad_row["input"] == '10,"open,10\n'
    assert bad_row["row"] == 10
    assert bad_row["offset"] == (tmp_path / "in.csv").read_bytes().index(b"10,")
    assert "quote" in bad_row["error"]
    assert [row["id"] for row in read(tmp_path / "out")] == [str(i) for i in range(1000) if i != 10]


def test_a_quote_that_is_not_closed_before_text_without_quotes(tmp_path: Path) -> None:
    lines = [f"{i},text {i}" for i in range(50)]
    lines[10] = '10,"open'
    (tmp_path / "in.csv").write_text("id,text\n" + "\n".join(lines))
    assert run(tmp_path / "in.csv", tmp_path / "out", map=MARKED)
    assert [each["input"] for each in bad(tmp_path / "out")] == ['10,"open\n']
    assert len(read(tmp_path / "out")) == 49
    (tmp_path / "head.csv").write_text('id,"text\n1,2\n')
    with pytest.raises(InvalidArgumentError, match=r"head\.csv cannot be read: its header: unexp"):
        run(tmp_path / "head.csv", tmp_path / "out2", map=MARKED)


def test_files_of_csv_with_other_columns(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.csv").write_text("id,a\n1,x\n")
    (tmp_path / "in/b.csv").write_text("b,id\ny,2\n")
    table = table_of(tmp_path / "in", tmp_path / "out", part_rows=1)
    assert table.drop_columns(["mark"]).to_pylist() == [
        {"id": "1", "a": "x", "b": None},
        {"id": "2", "a": None, "b": "y"},
    ]


def test_an_output_of_csv(tmp_path: Path) -> None:
    rows = [{"id": i, "text": 'a "b",\nc', "of": {"x": [i]}, "n": None} for i in range(5)]
    source = write_lines(tmp_path / "in.jsonl", rows)
    assert run(source, tmp_path / "out", map=MARKED, output_format="csv", part_rows=3)
    parts = sorted((tmp_path / "out").glob("part-*.csv"))
    assert len(parts) == 2
    text = parts[0].read_text()
    assert text.startswith('"id","text","of","n","mark"\n0,"a ""b"",\nc","{""x"":[0]}",,true\n')


# ------------------------------------------------------------------ parts


@pytest.mark.parametrize(
    ("names", "bound"),
    [
        (["list"], r"partition_by is 'list', but must be a column of texts.*list<element: int64>"),
        (["bytes"], "it is of type binary"),
        (["id", "list", "bytes", "mark"], "some of the columns, not all"),
        (["nothing"], "one of id, list, bytes, mark"),
    ],
)
def test_columns_that_cannot_divide_a_part(tmp_path: Path, names: list[str], bound: str) -> None:
    table = pa.table({"id": [1], "list": [[1]], "bytes": [b"x"]})
    pq.write_table(table, tmp_path / "in.parquet")
    settings = {"map": MARKED, "schema": None, "partition_by": names}
    if "mark" in names:
        pq.write_table(table.select(["id"]), tmp_path / "in.parquet")
        settings["partition_by"] = ["id", "mark"]
    with pytest.raises(InvalidArgumentError, match=bound):
        run(tmp_path / "in.parquet", tmp_path / "out", **settings)


def test_parts_that_are_divided_by_columns(tmp_path: Path) -> None:
    rows = [{"id": i, "day": ["a/b", "c d", None][i % 3], "of": {"n": i % 2}} for i in range(60)]
    source = write_lines(tmp_path / "in.jsonl", rows)
    settings = {"output_format": "parquet", "partition_by": ["day"], "part_rows": 25}
    for _ in range(2):  # a job that is complete finds its parts
        assert run(source, tmp_path / "out", map=MARKED, **settings)
    folders = sorted(path.name for path in (tmp_path / "out").glob("day=*"))
    assert folders == ["day=__HIVE_DEFAULT_PARTITION__", "day=a%2Fb", "day=c d"]
    table = pq.read_table(tmp_path / "out")
    found = {row["id"]: row["day"] for row in table.to_pylist()}
    assert found == {row["id"]: row["day"] for row in rows}
    with pytest.raises(InvalidArgumentError, match="partition_by is 'dya', but must be one of id"):
        run(source, tmp_path / "out2", map=MARKED, **settings | {"partition_by": ["dya"]})


def test_parts_are_bounded_by_what_is_in_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results of 1 MB for rows of 10 bytes."""
    monkeypatch.setattr("jitney_jobs.part_filler._PART_BYTES", 10_000_000)
    source = write_lines(tmp_path / "in.jsonl", ids(0, 60))
    assert run(source, tmp_path / "out", map="tests.jobs.job_rows:large", workers=1)
    parts = read_record(str(tmp_path / "out"), None).parts
    assert {part.written for part in parts[:-1]} == {10}
    assert sorted(row["id"] for row in read(tmp_path / "out")) == list(range(60))
