"""What becomes of rows, files and jobs when something is wrong: statuses, limits, and what is said
before anything runs."""

import gzip
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from jitney import cli
from jitney.errors import InternalError, InvalidArgumentError, LoadError, UnavailableError
from jitney_jobs import executors, feeder
from jitney_jobs.feeder import Feeder
from jitney_jobs.job import make_job
from jitney_jobs.journal import Interval, Ranges, Record
from jitney_jobs.outcome import ExitStatus, RetryPolicy, error_limit
from jitney_jobs.prepare import Item
from jitney_jobs.rows import RowId
from jitney_jobs.run import preview_of, read_record, run_job
from typer.testing import CliRunner, Result

from tests.jobs.job_rows import bad, ids, job_of, read, run, write_lines

ROOT = Path(__file__).resolve().parents[2]
MARKED = "tests.jobs.job_rows:marked"


def batch(*words: str | Path) -> Result:
    """`jitney batch` with these words."""
    return CliRunner().invoke(cli.make_app(), ["batch", *map(str, words)])


def run_twice(source: Path, output: Path, *options: str) -> Result:
    map_options = ["--task", "map", "--map", "tests.jobs.job_rows:twice", "--workers", "0"]
    return batch("run", source, output, *map_options, *options)


# ------------------------------------------------------------------ statuses and limits


def test_a_jobs_exit_status_says_how_complete_it_is(tmp_path: Path) -> None:
    clean = write_lines(tmp_path / "clean.jsonl", ids(20, 40))
    soiled = write_lines(tmp_path / "soiled.jsonl", ids(10, 40))
    late = ["--within", "0.000001s"]
    assert run_twice(clean, tmp_path / "a").exit_code == ExitStatus.COMPLETE
    for _ in range(2):  # the second finds it complete
        assert run_twice(soiled, tmp_path / "b").exit_code == ExitStatus.BAD_ROWS
    assert run_twice(clean, tmp_path / "c", *late).exit_code == ExitStatus.LATE
    assert run_twice(soiled, tmp_path / "d", *late).exit_code == ExitStatus.BAD_ROWS
    too_many = run_twice(soiled, tmp_path / "e", "--max-errors", "0")
    assert too_many.exit_code == ExitStatus.TOO_MANY_BAD
    assert "error: 1 of" in too_many.stderr
    assert "1 bad" in too_many.stdout


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (["run", "in.jsonl", "out", "--task", "map"], ExitStatus.COMMAND_LINE),
        (["run", "job.yaml"], ExitStatus.COMMAND_LINE),
        (["run", "nowhere.jsonl", "out", "--task", "map", "--map", "a:b"], ExitStatus.JOB_ERROR),
    ],
)
def test_a_wrong_command_line_has_a_status_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], status: ExitStatus
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text("input: a\noutput: b\nmodle: c\n")
    monkeypatch.setattr(sys, "argv", ["jitney", "batch", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == status


@pytest.mark.parametrize(
    ("bad_count", "known", "all_known", "exceeded"),
    [
        (1, 1, False, False),  # nothing is known yet
        (10, 20, False, False),
        (11, 20, False, True),
        (60, 60, True, True),
        (1, 9, True, True),
        (1, 10, True, False),
        (11, 100_000, False, False),
        (10_001, 100_000, False, True),
    ],
)
def test_a_share_of_bad_rows_is_one_of_all_that_are_known(
    bad_count: int, known: int, all_known: bool, exceeded: bool
) -> None:
    assert error_limit("10%").is_exceeded(bad_count, known, all_known) is exceeded


def test_a_small_job_of_bad_rows_alone_is_not_complete(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [{"id": 13}] * 60)
    with pytest.raises(InvalidArgumentError, match="60 of 60 rows are bad"):
        run(source, tmp_path / "out", max_errors="10%")
    assert read_record(str(tmp_path / "out"), None).end is None


def test_bad_rows_at_the_beginning_end_no_long_job(tmp_path: Path) -> None:
    """11 of the first 12, and none of those that follow."""
    source = write_lines(tmp_path / "in.jsonl", [*[{"id": 13}] * 110, *ids(20, 2000)])
    assert run(source, tmp_path / "out", max_errors="10%", in_flight=64)
    assert len(bad(tmp_path / "out")) == 110


def test_what_failed_alone_is_done_again(tmp_path: Path) -> None:
    """Bad rows and bad files; killed after it has begun, it goes on. What was good stays."""
    folder = tmp_path / "in"
    output = tmp_path / "out"
    folder.mkdir()
    for number in range(3):
        table = pa.table({"id": list(range(10 * number, 10 * number + 10))})
        pq.write_table(table, folder / f"{number}.parquet")
    whole = (folder / "2.parquet").read_bytes()
    (folder / "2.parquet").write_bytes(b"damaged " * (len(whole) // 8) + b"x" * (len(whole) % 8))
    assert run_twice(folder, output, "--part-rows", "5").exit_code == ExitStatus.BAD_ROWS
    before = {path.name: path.read_bytes() for path in output.glob("part-*")}
    journal = (output / "_job/journal.jsonl").read_text()
    assert len(bad(output)) == 1
    again = batch("resume", output, "--retry-bad")
    assert again.exit_code == ExitStatus.BAD_ROWS, "neither is put right"
    assert "1 of 3 cannot be read" in again.stdout
    assert [each["row"] for each in bad(output)] == [3]
    for name, data in before.items():
        assert (output / name).read_bytes() == data
    assert sorted(row["id"] for row in read(output)) == [*range(13), *range(14, 20)]
    assert (output / "_job/journal.jsonl").read_text().startswith(journal), "it only grows"
    nothing = batch("resume", output)
    assert nothing.exit_code == ExitStatus.BAD_ROWS
    assert "nothing is done" in nothing.stderr


def test_a_bad_file_that_was_replaced_is_read_anew(tmp_path: Path) -> None:
    """Not as it was listed when the job began."""
    folder = tmp_path / "in"
    folder.mkdir()
    pq.write_table(pa.table({"id": [20, 21]}), folder / "0.parquet")
    (folder / "1.parquet").write_bytes(b"damaged")
    assert run(folder, tmp_path / "out")
    pq.write_table(pa.table({"id": list(range(30, 60))}), folder / "1.parquet")
    assert run_job(job_of(folder, tmp_path / "out"), retry_bad=True)
    assert sorted(row["id"] for row in read(tmp_path / "out")) == [20, 21, *range(30, 60)]
    record = Record.read(tmp_path / "out/_job/journal.jsonl")
    assert not record.bad_files
    assert record.total == 32


def test_bad_rows_are_good_when_their_cause_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_lines(tmp_path / "in.jsonl", ids(10, 20))
    run_twice(source, tmp_path / "out")
    monkeypatch.setattr("tests.jobs.job_rows.twice", lambda row: {"twice": 0})
    assert batch("resume", tmp_path / "out", "--retry-bad").exit_code == ExitStatus.COMPLETE
    assert bad(tmp_path / "out") == []
    assert {row["id"]: row["twice"] for row in read(tmp_path / "out")}[13] == 0
    assert len(read(tmp_path / "out")) == 10


@pytest.mark.parametrize(
    ("taken", "left"),
    [
        ([], [(0, 0, 10), (1, 5, 9)]),
        ([(0, 3, 4)], [(0, 0, 3), (0, 4, 10), (1, 5, 9)]),
        ([(0, 0, 1), (0, 9, 10), (1, 5, 9)], [(0, 1, 9)]),
        ([(0, 0, 20), (2, 0, 5)], [(1, 5, 9)]),
        ([(1, 0, 7)], [(0, 0, 10), (1, 7, 9)]),
    ],
)
def test_ranges_without_others(
    taken: list[tuple[int, int, int]], left: list[tuple[int, int, int]]
) -> None:
    rows = Ranges([Interval(0, 0, 10), Interval(1, 5, 9)])
    assert rows.without(Interval(*each) for each in taken).intervals == left


# ------------------------------------------------------------------ columns


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    lines = [",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]
    path.write_text("\n".join(lines))


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    pq.write_table(pa.Table.from_pylist(rows), path)


@pytest.mark.parametrize(
    ("name", "write"),
    [("a.parquet", write_parquet), ("a.csv", write_csv), ("a.jsonl", write_lines)],
)
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prompt": "{txet}"}, r"prompt names column 'txet', which .* \(did you mean 'text'\?\)"),
        ({"template": "{{ txet }}"}, r"template names column 'txet'.*'text'"),
        ({"column": "txet"}, "column names column 'txet'"),
        ({"sampling_column": ["sede"]}, r"sampling_column names column 'sede'.*did you mean"),
        ({"output_column": "text"}, "column 'text' is both of the input and of the result"),
        ({"keep": ["txet"]}, "keep.*'?txet'?"),
        ({"prompt": "{text"}, "prompt is '{text', but must be with the name of a column"),
        ({"prompt": "{text.title}"}, "prompt names 'text.title', which leads to nothing"),
    ],
)
def test_columns_are_checked_before_the_model_is_loaded(
    tmp_path: Path,
    name: str,
    write: Callable[[Path, list[dict[str, Any]]], Any],
    settings: dict[str, Any],
    message: str,
) -> None:
    """There is no model. And the job can be put right, as nothing is written."""
    write(tmp_path / name, [{"text": "a", "seed": 1}] * 60)
    given = {"task": "generate", "map": None, "model": str(tmp_path / "no-model")}
    with pytest.raises(InvalidArgumentError, match=message):
        run(tmp_path / name, tmp_path / "out", **given, **settings)
    with pytest.raises(LoadError):
        run(tmp_path / name, tmp_path / "out", **given, prompt="{text}")
    assert run(tmp_path / name, tmp_path / "out", map=MARKED)


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl"])
def test_map_gets_the_columns_that_the_job_names(tmp_path: Path, name: str) -> None:
    write = write_parquet if name == "a.parquet" else write_lines
    write(tmp_path / name, [{"id": 1, "text": "a"}])
    settings = {"map": "tests.jobs.job_rows:names_of", "output_format": "jsonl"}
    with pytest.raises(InvalidArgumentError, match="map_column names column 'di'"):
        run(tmp_path / name, tmp_path / "out", map_column=["di"], **settings)
    assert run(tmp_path / name, tmp_path / "out", map_column=["id"], **settings)
    assert read(tmp_path / "out") == [{"id": 1, "text": "a", "names": ["id"]}]


def test_a_template_may_do_without_a_column(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [{"text": "a"}])
    template = "{% if title is defined %}{{ title }}{% endif %}{{ end | default('') }}{{ text }}"
    given = {"task": "generate", "map": None, "model": str(tmp_path / "no-model")}
    with pytest.raises(LoadError):
        run(source, tmp_path / "out", **given, template=template)


def test_the_results_column_of_a_chains_second_job(tmp_path: Path) -> None:
    """Its input has every column that a job's result has."""
    names = ["output", "finish_reason", "prompt_tokens", "output_tokens"]
    source = write_lines(tmp_path / "in.jsonl", [{"text": "a", **dict.fromkeys(names, 1)}])
    given = {"task": "generate", "map": None, "model": str(tmp_path / "no-model")}
    with pytest.raises(InvalidArgumentError, match=r"is both of the .* with output_column, or"):
        run(source, tmp_path / "out", **given)
    with pytest.raises(LoadError):
        run(source, tmp_path / "out", **given, output_column="second")
    with pytest.raises(InvalidArgumentError, match="output_column is not for task map"):
        job_of(source, tmp_path / "out", output_column="second")


def test_a_job_whose_rows_were_all_bad_can_be_changed(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [{"id": 13}] * 60)
    with pytest.raises(InvalidArgumentError, match="60 of 60 rows"):
        run(source, tmp_path / "out", max_errors="10%")
    assert run(source, tmp_path / "out", map=MARKED)
    assert bad(tmp_path / "out") == []
    assert len(read(tmp_path / "out")) == 60


# ------------------------------------------------------------------ files


def parquet_files(folder: Path, count: int) -> None:
    folder.mkdir()
    for number in range(count):
        pq.write_table(pa.table({"id": [100 + number]}), folder / f"{number:02}.parquet")


@pytest.mark.parametrize("damaged", ["00", "07", "19"])
def test_a_damaged_file_of_twenty_is_listed_and_the_others_are_done(
    tmp_path: Path, damaged: str
) -> None:
    parquet_files(tmp_path / "in", 20)
    (tmp_path / f"in/{damaged}.parquet").write_bytes(b"PAR1 no more")
    ended = run_twice(tmp_path / "in", tmp_path / "out")
    assert ended.exit_code == ExitStatus.BAD_ROWS
    assert "files   1 of 20 cannot be read to their end:\n" in ended.stdout
    assert f"in/{damaged}.parquet cannot be read: " in ended.stdout
    assert len(read(tmp_path / "out")) == 19
    with pytest.raises(InvalidArgumentError, match=rf"in/{damaged}.parquet cannot be read"):
        run(tmp_path / "in", tmp_path / "strict", skip_bad_files=False)


def test_what_can_be_read_of_a_damaged_file_is_done(tmp_path: Path) -> None:
    """Compressed lines that break off, and a CSV file that does not exist any more when it is its
    turn."""
    (tmp_path / "in").mkdir()
    lines = b"".join(b'{"id": %d, "x": "%d"}\n' % (i, hash(str(i))) for i in range(20, 20_000))
    whole = gzip.compress(lines)
    (tmp_path / "in/a.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 255
    (tmp_path / "in/b.jsonl.gz").write_bytes(flipped)
    write_lines(tmp_path / "in/c.jsonl", ids(20, 30))
    began = time.monotonic()
    assert run(tmp_path / "in", tmp_path / "out")
    assert time.monotonic() - began < 60, "damage is no storage that is away"
    record = read_record(str(tmp_path / "out"), None)
    assert record.bad_files.keys() >= {0, 1}
    assert len(read(tmp_path / "out")) > 10


def test_an_input_of_which_nothing_can_be_read_is_the_jobs_error(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name in "ab":
        (tmp_path / f"in/{name}.parquet").write_bytes(b"no parquet")
    with pytest.raises(InvalidArgumentError, match=r"in/a.parquet cannot be read"):
        run(tmp_path / "in", tmp_path / "out")


ROWS: list[dict[str, Any]] = [{"id": "20", "t": 'a"},{\\ ü'}, {"id": "21", "t": "b"}]


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("array.json", json.dumps(ROWS).encode()),
        ("lines.json", "\n".join(map(json.dumps, ROWS)).encode()),
        ("pretty.json", json.dumps(ROWS, indent=2).encode()),
        ("objects.json", "\n".join(json.dumps(row, indent=2) for row in ROWS).encode()),
        ("bom.json", b"\xef\xbb\xbf \n" + json.dumps(ROWS).encode()),
        ("array.jsonl", json.dumps(ROWS).encode()),
        ("array.json.gz", gzip.compress(json.dumps(ROWS).encode(), mtime=0)),
        ("semicolons.csv", 'id;t\n20;"a""},{\\ ü"\n21;b\n'.encode()),
        ("tabs.csv", 'id\tt\n20\t"a""},{\\ ü"\n21\tb\n'.encode()),
        ("bars.csv", '"id"|"t"\n20|"a""},{\\ ü"\n21|b\n'.encode()),
        ("commas.csv", 'id,t\n20,"a""},{\\ ü"\n21,b\n'.encode()),
    ],
)
def test_arrays_and_other_delimiters_are_read(tmp_path: Path, name: str, data: bytes) -> None:
    (tmp_path / name).write_bytes(data)
    assert run(tmp_path / name, tmp_path / "out", map=MARKED, ordered=True)
    assert bad(tmp_path / "out") == []
    assert read(tmp_path / "out") == [{**row, "mark": True} for row in ROWS]


def test_an_array_that_breaks_off_is_a_bad_file(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.json").write_bytes(json.dumps(ROWS).encode()[:-20])
    write_lines(tmp_path / "in/b.json", ids(30, 31))
    assert run_twice(tmp_path / "in", tmp_path / "out").exit_code == ExitStatus.BAD_ROWS
    assert read_record(str(tmp_path / "out"), None).bad_files.keys() == {0}
    assert [row["id"] for row in read(tmp_path / "out")][-1] == 30


def test_compressed_texts_are_rows(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.txt.gz").write_bytes(gzip.compress("Zürich".encode()))
    (tmp_path / "in/b.txt").write_text("Bern")
    assert run(tmp_path / "in", tmp_path / "out", map="builtins:dict", keep=[], ordered=True)
    assert [row["text"] for row in read(tmp_path / "out")] == ["Zürich", "Bern"]


def test_what_was_found_and_passed_over_is_said(tmp_path: Path) -> None:
    """Before anything runs, with `--dry-run` alone, and in the summary."""
    parquet_files(tmp_path / "in", 3)
    for name in ("a.log", "b.log", "c", ".hidden.parquet"):
        (tmp_path / "in" / name).touch()
    dry = run_twice(tmp_path / "in", tmp_path / "out", "--dry-run")
    assert dry.exit_code == 0
    found = "3 .parquet as parquet"
    passed = "passed over: 2 .log, 1 without a suffix, 1 hidden (_ or .)"
    assert found in dry.stdout
    assert passed in dry.stdout
    assert "columns id int64" in dry.stdout
    assert "id: 100" in dry.stdout
    assert not (tmp_path / "out").exists()
    ran = run_twice(tmp_path / "in", tmp_path / "out")
    assert f"{found}, " in ran.stderr
    assert passed in ran.stdout
    mixed = write_lines(tmp_path / "in/d.jsonl", ids(0, 1))
    with pytest.raises(InvalidArgumentError, match=r"there are 3 .parquet, 2 .log, 1 w"):
        preview_of(job_of(tmp_path / "in", tmp_path / "out"))
    assert mixed.exists()


def test_the_first_rows_alone(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", ids(20, 2000))
    some = run_twice(source, tmp_path / "out", "--limit", "300")
    assert some.exit_code == ExitStatus.COMPLETE
    assert "limit   300 rows; without it the job goes on" in some.stdout
    assert sorted(row["id"] for row in read(tmp_path / "out")) == [*range(20, 320)]
    assert run_twice(source, tmp_path / "out", "--limit", "300").exit_code == 0
    assert len(read(tmp_path / "out")) == 300
    assert run_twice(source, tmp_path / "out").exit_code == ExitStatus.COMPLETE
    assert sorted(row["id"] for row in read(tmp_path / "out")) == [*range(20, 2000)]


@pytest.mark.parametrize("first", [300, 512], ids=["in a chunk", "between two chunks"])
def test_first_rows_that_are_all_rows_are_the_whole_job(tmp_path: Path, first: int) -> None:
    source = write_lines(tmp_path / "in.jsonl", ids(20, 1044))
    for limit, is_complete in ((first, False), (1024, True)):
        assert run(source, tmp_path / "out", limit=limit)
        assert len(read(tmp_path / "out")) == limit
        record = read_record(str(tmp_path / "out"), None)
        assert (record.end is not None) == is_complete


# ------------------------------------------------------------------ errors that pass


class Failing(executors.PassThrough):
    """Each row fails for as long as ``errors`` has something for it."""

    def __init__(self, errors: dict[int, list[Exception]]) -> None:
        super().__init__()
        self.errors = errors
        self.asked: list[int] = []

    def step(self) -> list[executors.Outcome]:
        ended = []
        for key, result in super().step():
            self.asked.append(key)
            errors = self.errors.get(key)
            ended.append((key, errors.pop(0) if errors else result))
        return ended


class Clock:
    """Time that passes when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def fed(
    monkeypatch: pytest.MonkeyPatch, executor: Failing, rows: int, seconds: float
) -> tuple[dict[int, Any], float]:
    """What becomes of the rows, and how long that takes."""
    clock = Clock()
    monkeypatch.setattr(feeder, "time", clock)
    feeding = Feeder(executor, RetryPolicy(seconds, 3))
    for key in range(rows):
        feeding.add(Item(RowId(0, key), prepared=key, key=key))
    ended: dict[int, Any] = {}
    while len(feeding):
        ended |= {item.key: result for item, result in feeding.step(has_input_ended=True)}
    return ended, clock.now - 1000.0


def test_an_error_is_waited_for_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = Failing({0: [UnavailableError("away")] * 8})
    ended, took = fed(monkeypatch, executor, 1, 600)
    assert ended == {0: 0}
    assert 127 <= took < 400


def test_a_row_that_fails_while_others_do_not_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = Failing({1: [UnavailableError("503 {}")] * 10_000})
    ended, took = fed(monkeypatch, executor, 3, 60)
    assert isinstance(ended[1], InvalidArgumentError)
    assert str(ended[1]) == "503 {}"
    assert took == pytest.approx(60, abs=5)
    assert executor.asked.count(0) == 1


def test_a_server_that_is_away_ends_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    away: dict[int, list[Exception]] = {
        key: [UnavailableError("away")] * 10_000 for key in range(3)
    }
    ended, took = fed(monkeypatch, Failing(away), 3, 60)
    assert all(isinstance(error, UnavailableError) for error in ended.values())
    assert took == pytest.approx(60, abs=5)


def test_a_fault_may_be_the_rows_and_is_tried_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = Failing({0: [InternalError("fault")] * 10_000})
    ended, _ = fed(monkeypatch, executor, 1, 600)
    assert isinstance(ended[0], InternalError)
    assert len(executor.asked) == 4


# ------------------------------------------------------------------ what does not end


@pytest.mark.parametrize("workers", [0, 1])
def test_a_row_that_never_ends_is_bad(tmp_path: Path, workers: int) -> None:
    """Without the setting the watchdog ends the job, which goes on with the setting."""
    source = write_lines(tmp_path / "in.jsonl", ids(0, 100))
    settings = {"map": "tests.jobs.job_rows:stuck", "workers": workers, "part_rows": 10}
    with pytest.raises(UnavailableError, match="nothing has moved for 2 s"):
        run(source, tmp_path / "out", watchdog="2s", **settings)
    assert run(source, tmp_path / "out", row_timeout=1, **settings)
    assert [each["row"] for each in bad(tmp_path / "out")] == [50]
    assert "row_timeout (1 s)" in bad(tmp_path / "out")[0]["error"]
    assert len(read(tmp_path / "out")) == 99


def test_a_call_that_does_not_return_ends_the_process(tmp_path: Path) -> None:
    code = (
        "import time; from jitney_jobs import watchdog; watchdog._GRACE_S = 0.5; "
        "watchdog.Watchdog(1.0); time.sleep(60)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=40)
    assert ended.returncode == ExitStatus.JOB_ERROR
    assert "nothing has moved for 1 s" in ended.stderr


# ------------------------------------------------------------------ the next night


def test_paths_have_the_run_and_the_date(tmp_path: Path) -> None:
    settings = {"task": "map", "map": "a:b", "run": "nightly-7"}
    paths = {"input": "/in/{date}/*", "output": "/out/{run}", "journal": "/jobs/{run}-{date}"}
    job = make_job({**settings, **paths})
    today = time.strftime("%Y-%m-%d")
    assert job.input == f"/in/{today}/*"
    assert job.output == "/out/nightly-7"
    assert job.journal == f"/jobs/nightly-7-{today}"
    with pytest.raises(InvalidArgumentError, match=r"output has \{run\}: name this run"):
        make_job({**settings, **paths, "run": None})
    with pytest.raises(InvalidArgumentError, match=r"run is 'a/b', but must be a name"):
        make_job({**settings, **paths, "run": "a/b"})


def test_a_job_that_was_complete_before_says_so(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", ids(20, 40))
    assert "nothing is done" not in run_twice(source, tmp_path / "out").stderr
    again = run_twice(source, tmp_path / "out")
    assert again.exit_code == ExitStatus.COMPLETE
    assert "is complete since" in again.stderr
    assert "nothing is done" in again.stderr


def test_a_run_says_at_once_what_it_does_and_loads_nothing_for_a_report(tmp_path: Path) -> None:
    """The first line comes before the imports that take long."""
    source = write_lines(tmp_path / "in.jsonl", ids(20, 40))
    options = ["--task", "map", "--map", "tests.jobs.job_rows:twice", "--workers", "0"]
    words = ["jitney", "batch", "run", str(source), str(tmp_path / "out"), *options]
    code = (
        "import builtins, sys\n"
        "from jitney import cli, cli as _\n"
        "from jitney_jobs import command\n"
        "say = command._say\n"
        "def checked(text):\n"
        "    print('pyarrow' in sys.modules, text)\n"
        "command._say = checked\n"
        f"sys.argv = {words!r}\n"
        "try:\n"
        "    cli.main()\n"
        "finally:\n"
        "    print('plots', 'matplotlib' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False
    )
    lines = done.stdout.splitlines()
    assert lines[0] == f"False {source} to {tmp_path}/out", done
    assert lines[-1] == "plots False"
    assert not (tmp_path / "out/_job/report.html").exists()
