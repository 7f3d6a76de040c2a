"""What may change between two tries of a job, and what may not: settings, the model's files, map's
code, and the input.
"""

import codecs
import gzip
import json
import os
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from jitney.errors import InvalidArgumentError, UnavailableError
from jitney_jobs.fingerprints import fingerprints_of, print_differences
from jitney_jobs.job_differences import differences
from jitney_jobs.job_making import make_job
from jitney_jobs.job_record import read_record
from jitney_jobs.run import run_job
from jitney_jobs.status import status_of

from tests.jobs.job_rows import fail_at_part, ids, job_of, read, run, write_lines

# ------------------------------------------------------------------ settings


def job_with(engine: dict[str, Any]) -> Any:
    return make_job({"input": "in", "output": "out", "model": "m", "engine": engine})


def test_engine_options_of_memory_and_speed_may_change() -> None:
    before = job_with({"dtype": "float32"})
    now = job_with(
        {
            "dtype": "float32",
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
            "kv_cache_bytes": 1 << 20,
            "threads": 1,
            "eviction": "never",
            "watermark": 0.1,
        }
    )
    assert differences(before, now) == []


def test_other_engine_options_are_named() -> None:
    before = job_with({"dtype": "float32", "max_num_seqs": 8})
    now = job_with({"dtype": "bfloat16", "kv_cache_dtype": "int8"})
    assert differences(before, now) == [
        "engine.dtype was 'float32', is 'bfloat16'",
        "engine.kv_cache_dtype was None, is 'int8'",
    ]


def stop(monkeypatch: pytest.MonkeyPatch, source: Path, output: Path, **settings: Any) -> None:
    """Run a job until it has 2 parts of 10 rows."""
    with monkeypatch.context() as patched:
        fail_at_part(patched, 2)
        with pytest.raises(UnavailableError):
            run(source, output, part_rows=10, **settings)


def test_a_job_is_resumed_with_the_settings_of_its_last_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_lines(tmp_path / "in.jsonl", ids(20, 60))
    stop(monkeypatch, source, tmp_path / "out", in_flight=64)
    stop(monkeypatch, source, tmp_path / "out", in_flight=32)
    begin = read_record(str(tmp_path / "out"), None).begin
    assert begin is not None
    assert begin.job.in_flight == 32


# ------------------------------------------------------------------ model and code


def test_code_of_map_that_changed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also that of a module beside it, which it imports; not that of one that it does not."""
    monkeypatch.syspath_prepend(tmp_path)
    package = tmp_path / "the_users"
    package.mkdir()
    (package / "__init__.py").touch()
    function = (
        "from .beside import times\n\ndef twice(row):\n    return {'twice': times(row['id'])}\n"
    )
    (package / "functions.py").write_text(function)
    (package / "beside.py").write_text("def times(x):\n    return 2 * x\n")
    (package / "other.py").write_text("")
    source = write_lines(tmp_path / "in.jsonl", ids(20, 60))
    output = tmp_path / "out"
    settings = {"map": "the_users.functions:twice"}
    stop(monkeypatch, source, output, **settings)
    (package / "other.py").write_text("# changed\n")
    stop(monkeypatch, source, output, **settings)
    (package / "beside.py").write_text("def times(x):\n    return 3 * x\n")
    changed = (
        r"holds another job: .* \(put it back, or go on with accept_changes\): "
        r"map the_users/beside\.py has changed"
    )
    with pytest.raises(InvalidArgumentError, match=changed):
        run(source, output, **settings)
    stop(monkeypatch, source, output, accept_changes=True, **settings)
    (package / "functions.py").write_text(function + "# changed\n")
    with pytest.raises(InvalidArgumentError, match=r"functions\.py has changed$"):
        run(source, output, **settings)
    (package / "functions.py").write_text(function)
    assert run(source, output, **settings), "what was accepted once is the job's from then on"
    assert sorted(row["id"] for row in read(output)) == list(range(20, 60))


def prints_of(model: Path, **settings: Any) -> dict[str, str]:
    given = {"input": "in", "output": "out", "model": str(model), **settings}
    return fingerprints_of(make_job(given))


def test_a_models_files_that_changed_are_named(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "tokenizer.json", "README.md", "chat_template.jinja"):
        (model / name).write_text("{}")
    weights = model / "model.safetensors"
    weights.write_bytes(b"\1" * 10_000_000)
    before = prints_of(model)
    assert not print_differences(before, before)
    (model / "README.md").write_text("more")
    os.utime(weights, (0, 0))
    assert prints_of(model) == before, "what is touched, or not read, is no change"
    weights.write_bytes(b"\1" * 5_000_000 + b"\2" + b"\1" * 4_999_999)
    (model / "tokenizer.json").write_text("[]")
    (model / "chat_template.jinja").unlink()
    (model / "added.json").write_text("{}")
    named = "; ".join(print_differences(before, prints_of(model)))
    for text in (
        "model chat_template.jinja is gone",
        "model added.json is new",
        "model tokenizer.json has changed",
        "model model.safetensors has changed",
    ):
        assert text in named
    assert "config.json" not in named


def test_of_a_large_file_one_changed_tensor_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundredth of the bytes, anywhere in the file, is a tensor of most models."""
    size = 64 << 20
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(size))
    before = prints_of(path)
    for start in range(0, size, 7 << 20):
        with path.open("r+b") as file:
            file.seek(start)
            file.write(b"\1" * (size // 100))
        now = prints_of(path)
        assert now != before
        before = now
    began = time.process_time()
    prints_of(path)
    assert time.process_time() - began < 0.2


def test_a_tokenizer_beside_an_exported_model_counts(tmp_path: Path) -> None:
    for name in ("m/1/model.onnx", "m/config.pbtxt", "m_tokenizer/1/tokenizer.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    assert list(prints_of(tmp_path / "m", task="embed")) == [
        "model config.pbtxt",
        "model 1/model.onnx",
        "m_tokenizer 1/tokenizer.json",
    ]
    (tmp_path / "m/1/all").symlink_to(tmp_path / "m")
    assert len(prints_of(tmp_path / "m", task="embed")) == 3
    other = tmp_path / "other.json"
    other.touch()
    named = prints_of(tmp_path / "m", task="embed", tokenizer=str(other))
    assert list(named)[-1] == "tokenizer other.json"


# ------------------------------------------------------------------ input


def test_the_job_goes_on_with_its_list_of_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Files came, were touched and have grown while it was down."""
    folder = tmp_path / "in"
    output = tmp_path / "out"
    folder.mkdir()
    write_lines(folder / "b.jsonl", ids(20, 50))
    write_lines(folder / "c.jsonl", ids(50, 60))
    stop(monkeypatch, folder, output)
    write_lines(folder / "a.jsonl", ids(100, 110))
    with (folder / "b.jsonl").open("a") as file:
        file.write('{"id": 200}\n')
    os.utime(folder / "c.jsonl", (0, 0))
    assert run(folder, output, part_rows=10)
    assert sorted(row["id"] for row in read(output)) == list(range(20, 60))
    record = read_record(str(output), None)
    assert record.begin is not None
    assert record.total == 40
    for said in (capsys.readouterr().err, status_of(record, record.begin.job)):
        assert "a.jsonl has come since, and is not read" in said
        assert "b.jsonl was 330 bytes, is 342: rows beyond these are not done" in said
        assert "c.jsonl was touched at 1970-01-01" in said
    assert run(folder, output), "a job that is complete stays so"


def test_one_of_several_inputs_is_gone_once_its_rows_are_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done = tmp_path / "a=1" / "a.jsonl"
    left = tmp_path / "b.jsonl"
    done.parent.mkdir()
    write_lines(done, ids(20, 40))
    write_lines(left, ids(40, 80))
    more = [str(done.parent)]
    with monkeypatch.context() as patched:
        fail_at_part(patched, 3)
        with pytest.raises(UnavailableError):
            run(left, tmp_path / "out", part_rows=10, more_inputs=more)
    done.unlink()
    done.parent.rmdir()
    assert run(left, tmp_path / "out", part_rows=10, more_inputs=more)
    assert sorted(row["id"] for row in read(tmp_path / "out")) == list(range(20, 80))
    assert "a.jsonl is gone" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("encoding", "settings", "cut"),
    [
        ("utf-8", {}, 8),
        ("utf-16", {}, 17),
        ("utf-16-be", {"encoding": "utf-16-be"}, 22),
        ("utf-32-le", {"encoding": "utf-32-le"}, 3),
    ],
)
def test_a_file_that_grows_while_the_job_runs_is_read_as_far_as_it_went(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    encoding: str,
    settings: dict[str, Any],
    cut: int,
) -> None:
    """The last line is not yet written to its end, nor is its last character. The text has bytes of
    a line's end in the midst of characters."""
    source = tmp_path / "in.jsonl"
    output = tmp_path / "out"
    text = "".join(f'{{"id": {i}}}\n' for i in range(20, 50))
    whole = (text + '{"id": 50, "x": "\u0a0a\u0a00\u0d0a"}\n').encode(encoding)
    listed = len(text.encode(encoding)) + cut
    source.write_bytes(whole[:listed])
    from jitney_jobs.journal import JobJournal

    begin = JobJournal.begin_or_resume

    def growing(self: JobJournal, *arguments: Any, **options: Any) -> None:
        begin(self, *arguments, **options)
        with source.open("ab") as file:
            file.write(whole[listed:])
            file.write('{"id": 51}\n'.encode(encoding).removeprefix(codecs.BOM_UTF16_LE))

    monkeypatch.setattr(JobJournal, "begin_or_resume", growing)
    assert run(source, output, **settings)
    assert sorted(row["id"] for row in read(output)) == list(range(20, 51))
    said = f"in.jsonl was {listed:,} bytes, is {source.stat().st_size:,}: rows beyond"
    assert said in capsys.readouterr().err


def test_a_file_that_was_replaced_is_refused_once_some_of_its_rows_are_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "in"
    output = tmp_path / "out"
    folder.mkdir()
    write_lines(folder / "a.jsonl", ids(20, 45))
    write_lines(folder / "b.jsonl", ids(45, 60))
    stop(monkeypatch, folder, output)
    before = (folder / "a.jsonl").read_bytes()
    for other in (ids(21, 46), ids(20, 44), [{"id": "x"}, *ids(20, 60)]):
        write_lines(folder / "a.jsonl", other)
        with pytest.raises(InvalidArgumentError, match=r"a\.jsonl was replaced .*put it back"):
            run(folder, output)
    (folder / "a.jsonl").write_bytes(before)
    # None of the rows of the other file is done: it is read as it is now.
    write_lines(folder / "b.jsonl", ids(300, 340))
    stop_at_next_part(monkeypatch, folder, output)
    assert run(folder, output, part_rows=10)
    assert sorted(row["id"] for row in read(output)) == [*range(20, 45), *range(300, 340)]


def stop_at_next_part(monkeypatch: pytest.MonkeyPatch, source: Path, output: Path) -> None:
    with monkeypatch.context() as patched:
        fail_at_part(patched, 4)
        with pytest.raises(UnavailableError):
            run(source, output, part_rows=10, in_flight=16)


def test_a_table_of_another_size_was_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parquet is not appended to."""
    source = tmp_path / "in.parquet"
    pq.write_table(pa.Table.from_pylist(ids(20, 60)), source)
    stop(monkeypatch, source, tmp_path / "out")
    pq.write_table(pa.Table.from_pylist(ids(20, 90)), source)
    with pytest.raises(InvalidArgumentError, match=r"in\.parquet was replaced"):
        run(source, tmp_path / "out")


def test_a_file_that_is_gone_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But not missed, if all of it is done."""
    folder = tmp_path / "in"
    output = tmp_path / "out"
    folder.mkdir()
    write_lines(folder / "a.jsonl", ids(20, 30))
    write_lines(folder / "b.jsonl", ids(30, 60))
    stop(monkeypatch, folder, output)
    (folder / "a.jsonl").unlink()
    (folder / "b.jsonl").rename(tmp_path / "b.jsonl")
    write_lines(folder / "c.jsonl", ids(70, 80))
    with pytest.raises(InvalidArgumentError, match=r"b\.jsonl cannot be read"):
        run(folder, output, skip_bad_files=False)
    (tmp_path / "b.jsonl").rename(folder / "b.jsonl")
    assert run(folder, output)
    assert sorted(row["id"] for row in read(output)) == list(range(20, 60))


def test_a_file_that_is_gone_is_bad_until_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job goes on with the others. Some rows of the file are done, and stay so."""
    folder = tmp_path / "in"
    output = tmp_path / "out"
    folder.mkdir()
    write_lines(folder / "a.jsonl", ids(20, 60))
    write_lines(folder / "b.jsonl", ids(60, 70))
    stop(monkeypatch, folder, output)
    (folder / "a.jsonl").rename(tmp_path / "a.jsonl")
    assert run(folder, output)
    record = read_record(str(output), None)
    assert "a.jsonl cannot be read" in record.bad_files[0]
    assert record.end is not None
    (tmp_path / "a.jsonl").rename(folder / "a.jsonl")
    assert run(folder, output)
    assert len(read(output)) < 50, "it was complete"
    assert run_job(job_of(folder, output), retry_bad=True)
    assert sorted(row["id"] for row in read(output)) == list(range(20, 70))
    assert not read_record(str(output), None).has_bad


def test_a_damaged_file_may_be_put_right(tmp_path: Path) -> None:
    """Also one of which some rows are done."""
    folder = tmp_path / "in"
    output = tmp_path / "out"
    folder.mkdir()
    rows = [{"id": number, "x": f"{hash(str(number))}"} for number in range(20, 20_000)]
    whole = gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode())
    (folder / "a.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    write_lines(folder / "b.jsonl", ids(0, 10))
    assert run(folder, output)
    assert 10 < len(read(output)) < len(rows)
    (folder / "a.jsonl.gz").write_bytes(whole)
    assert run_job(job_of(folder, output), retry_bad=True)
    assert sorted(row["id"] for row in read(output)) == [*range(10), *range(20, 20_000)]
