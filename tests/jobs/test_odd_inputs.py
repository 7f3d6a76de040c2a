"""Inputs and settings that are easy to get wrong: none of them may lose or change a value without
a word."""

import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from jitney.errors import InvalidArgumentError, UnavailableError
from jitney_jobs import executors, file_batches, part_filler, row_runner
from jitney_jobs.command import resume, status
from jitney_jobs.dataset import Dataset
from jitney_jobs.generate import GenerateOnServer, columns_of_prompt
from jitney_jobs.job_making import make_job
from jitney_jobs.job_record import read_record
from jitney_jobs.report import write_report

from tests.jobs.job_rows import bad, fail_at_part, ids, job_of, read, run, write_lines

MARKED = "tests.jobs.job_rows:marked"


def write_table(path: Path, **columns: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)
    return path


def read_job_of(source: Path | str, output: Path, **settings: Any) -> list[dict[str, Any]]:
    """The output's rows; none may be bad."""
    assert run(Path(source), output, map=MARKED, **settings)
    assert bad(output) == []
    return read(output)


def test_folders_that_look_like_columns(tmp_path: Path) -> None:
    """A column of the folders is taken for one of the same name in the file; folders above a
    glob are none, and a name may hold what a variable's may not."""
    folder = tmp_path / "run=3" / "in"
    write_table(folder / "année-1=20%2F26" / "x=1" / "a.parquet", id=[7, 8], x=["a", "b"])
    row = {"x": 1, "année-1": "20/26", "mark": True}
    for number, source in enumerate((folder, f"{folder}/**")):
        rows = read_job_of(source, tmp_path / f"out-{number}")
        assert rows == [{"id": 7, **row}, {"id": 8, **row}]


def test_a_folder_with_a_globs_characters(tmp_path: Path) -> None:
    folder = tmp_path / "in [1]*"
    folder.mkdir()
    write_lines(folder / "a.jsonl", ids(0, 1))
    assert read_job_of(folder, tmp_path / "out") == [{"id": 0, "mark": True}]


def test_two_columns_of_one_name(tmp_path: Path) -> None:
    arrays = [pa.array([1]), pa.array([2])]
    pq.write_table(pa.Table.from_arrays(arrays, names=["a", "a"]), tmp_path / "a.parquet")
    (tmp_path / "b.csv").write_text("a,b,a\n1,2,3\n")
    for name in ("a.parquet", "b.csv"):
        with pytest.raises(InvalidArgumentError, match=f"{name} has two columns 'a'"):
            run(tmp_path / name, tmp_path / f"out-{name}", map=MARKED)


def test_a_table_without_rows(tmp_path: Path) -> None:
    source = write_table(tmp_path / "in.parquet", id=pa.array([], pa.int64()))
    assert read_job_of(source, tmp_path / "out") == []


def test_columns_of_views(tmp_path: Path) -> None:
    """Which other libraries write by default."""
    columns = {"id": [1, 2], "text": pa.array(["a", None], pa.string_view())}
    source = write_table(tmp_path / "in.parquet", **columns)
    assert [row["text"] for row in read_job_of(source, tmp_path / "out")] == ["a", None]


@pytest.mark.parametrize("view", [pa.list_view, pa.large_list_view])
def test_lists_as_views(tmp_path: Path, view: Any) -> None:
    """In several batches, of which the last has one row."""
    values = [["a", "b"], None, [], ["c"], ["d"]]
    table = pa.table({"id": range(5), "v": pa.array(values, view(pa.string_view()))})
    with pa.ipc.new_stream(str(tmp_path / "in.arrows"), table.schema) as stream:
        stream.write_table(table, max_chunksize=4)
    rows = read_job_of(tmp_path / "in.arrows", tmp_path / "out")
    assert [row["v"] for row in rows] == values


def test_lines_with_a_byte_order_mark(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(b'\xef\xbb\xbf{"id": 1}\r\n{"id": 2}')
    assert [row["id"] for row in read_job_of(source, tmp_path / "out")] == [1, 2]


def test_nothing_is_rounded_or_dropped(tmp_path: Path) -> None:
    """The first row has whole numbers, and an object of one field."""
    values: list[dict[str, Any]] = [
        {"n": 1, "many": [1], "of": {"a": 1}},
        {"n": 2.0, "many": [3, None], "of": {}},
        {"n": 1.5},
        {"many": [1, 2, 2.5]},
        {"of": {"a": 0.5}},
        {"of": {"a": 1, "b": 2}},
    ]
    rows = [{"id": i, **row} for i, row in enumerate(values)]
    source = write_lines(tmp_path / "in.jsonl", rows)
    output = tmp_path / "out"
    assert run(source, output, map=MARKED, output_format="parquet", part_rows=1, ordered=True)
    found = read(output)
    assert [row["n"] for row in found] == [1, 2, 1.5, None, None, None]
    assert [row["many"] for row in found][:4] == [[1], [3, None], None, [1, 2, 2.5]]
    of = [row["of"] for row in found]
    assert of[4:] == [{"a": 0.5, "b": None}, {"a": 1, "b": 2}]


def test_a_column_to_keep_that_is_not_there(tmp_path: Path) -> None:
    source = write_table(tmp_path / "in.parquet", id=[1])
    with pytest.raises(InvalidArgumentError, match=r"keep names column 'idd', .* it has id"):
        run(source, tmp_path / "out", map=MARKED, keep=["idd"])


def test_fields_of_columns_in_a_prompt() -> None:
    """A column whose name has a dot goes before a field."""
    prompt = "{doc.text} {doc.pages.0}: {a.b} {{x}}"
    job = make_job({"input": "in", "output": "out", "model": "m", "prompt": prompt})
    columns = ["doc.text", "doc", "doc.pages.0", "doc.pages", "a.b", "a"]
    assert columns_of_prompt(job) == columns
    row = {"doc": {"text": "T", "pages": ["P"]}, "a.b": "exact", "a": {"b": "field"}}
    assert GenerateOnServer(job).prepare(row)["text_input"].tolist() == [b"T P: exact {x}"]
    with pytest.raises(InvalidArgumentError, match=r"column 'doc\.text' is missing"):
        GenerateOnServer(job).prepare({"doc": {"txt": "T"}})
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ name }}"
    job = make_job({"input": "in", "output": "out", "model": "m", "template": template})
    assert sorted(columns_of_prompt(job)) == ["messages", "name"]


def test_a_template_longer_than_a_files_name() -> None:
    template = "{{ text }}" + 300 * "x"
    job = make_job({"input": "in", "output": "out", "model": "m", "template": template})
    assert job.template == template


@pytest.mark.parametrize("name", ["template", "labels"])
def test_a_file_of_text_that_cannot_be_read(tmp_path: Path, name: str) -> None:
    path = tmp_path / "text"
    path.write_text("Z\u00fcrich {{ text }}", encoding="latin-1")
    settings = {"input": "in", "output": "out", "model": "m", name: str(path)}
    with pytest.raises(InvalidArgumentError, match=f"{name} is .*, but must be a UTF-8 file that"):
        make_job(settings)


def test_an_output_inside_of_the_input_by_another_way() -> None:
    with pytest.raises(InvalidArgumentError, match="outside of the input"):
        make_job({"input": "in", "output": "other/../in/out", "model": "m"})


def test_an_output_that_leads_into_the_input_by_a_link(tmp_path: Path) -> None:
    """The next job would read it."""
    folder = tmp_path / "in"
    folder.mkdir()
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(InvalidArgumentError, match="outside of the input"):
        job_of(folder, tmp_path / "link" / "out")


def test_an_input_inside_of_the_output(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", ids(0, 5))
    with pytest.raises(InvalidArgumentError, match="must be outside of the output"):
        run(source, tmp_path)


def test_a_row_whose_value_does_not_fit_is_shown(tmp_path: Path) -> None:
    source = tmp_path / "in.csv"
    source.write_text("id,name\n20,a\nx,b\n")
    assert run(source, tmp_path / "out", schema='{"id": "int64"}', map=MARKED)
    (error,) = bad(tmp_path / "out")
    assert error["error"] == "column 'id': x is no value of type int64"
    assert error["input"] == {"id": "x", "name": "b"}


def test_settings_may_be_put_right_before_anything_is_committed(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", ids(0, 5))
    output = tmp_path / "out"
    with pytest.raises(InvalidArgumentError, match="cannot be imported"):
        run(source, output, map="tests.jobs.job_rows:marks")
    assert len(read_job_of(source, output)) == 5
    with pytest.raises(InvalidArgumentError, match="map was"):
        run(source, output, map="tests.jobs.job_rows:marks")


def test_the_newest_tokenizer_beside_a_model(tmp_path: Path) -> None:
    for version in ("9", "10"):
        place = tmp_path / "text_tokenizer" / version / "tokenizer.json"
        place.parent.mkdir(parents=True)
        place.touch()
    assert executors._tokenizer_of(str(tmp_path / "text")) == str(place)


def test_resume_where_the_output_is_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_lines(tmp_path / "in.jsonl", ids(0, 50))
    with monkeypatch.context() as patch:
        fail_at_part(patch, 1)
        with pytest.raises(UnavailableError, match="No space left"):
            run(source, tmp_path / "out", map=MARKED, part_rows=20)
    (tmp_path / "out").rename(tmp_path / "moved")
    resume(str(tmp_path / "moved"))
    assert sorted(row["id"] for row in read(tmp_path / "moved")) == list(range(50))
    assert not (tmp_path / "out").exists()
    capsys.readouterr()
    monkeypatch.chdir(tmp_path)
    status("moved")
    assert capsys.readouterr().out.startswith(f"{tmp_path}/moved: complete\n")
    page = write_report(read_record("moved", None)).read_text(encoding="utf-8")
    assert "Job moved" in page


@pytest.mark.parametrize("suffix", ["parquet", "arrow", "jsonl", "csv"])
def test_rows_that_are_large_are_few_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    """Rows of 10 KB: a chunk has 2 of them, 10 and one more chunk are on their way, a part has
    20."""
    monkeypatch.setattr(file_batches, "_BATCH_BYTES", 20_000)
    monkeypatch.setattr(row_runner, "_IN_FLIGHT_BYTES", 100_000)
    monkeypatch.setattr(part_filler, "_PART_BYTES", 200_000)
    rows = [{"id": i, "text": chr(97 + i % 26) * 10_000} for i in range(100)]
    source = tmp_path / f"in.{suffix}"
    table = pa.Table.from_pylist(rows)
    if suffix == "jsonl":
        write_lines(source, rows)
    elif suffix == "csv":
        pa.csv.write_csv(table, source)
    elif suffix == "arrow":
        with pa.ipc.new_file(source, table.schema) as file:
            file.write_table(table)
    else:
        pq.write_table(table, source, use_dictionary=False)
    found = [int(row["id"]) for row in read_job_of(source, tmp_path / "out")]
    assert sorted(found) == [*range(100)]
    parts = read_record(str(tmp_path / "out"), None).parts
    assert max(part.written for part in parts) <= 20
    assert parts[-1].figures["most_in_flight"] <= 12


def test_what_is_no_file_is_passed_over_and_said(tmp_path: Path) -> None:
    """Above all links that lead back: their files would be read many times, or for ever."""
    folder = tmp_path / "in"
    folder.mkdir()
    write_lines(folder / "a.jsonl", ids(0, 2))
    (folder / "loop").symlink_to(folder)
    (folder / "up").symlink_to(tmp_path)
    (folder / "gone.jsonl").symlink_to(tmp_path / "nowhere")
    (tmp_path / "elsewhere").mkdir()
    write_lines(tmp_path / "elsewhere/b.jsonl", ids(2, 4))
    (folder / "linked").symlink_to(tmp_path / "elsewhere")
    with open(os.fsencode(folder) + b"/\xff.jsonl", "wb") as file:
        file.write(b'{"id": 9}\n')
    dataset = Dataset(job_of(folder, tmp_path / "out"))
    names = [os.path.relpath(file.path, folder) for file in dataset.files]
    assert names == ["a.jsonl", "linked/b.jsonl", "up/elsewhere/b.jsonl"]
    assert "1 with a name that is no UTF-8" in dataset.summary
    assert "1 link to nothing" in dataset.summary
    assert "2 link to a folder above it" in dataset.summary
