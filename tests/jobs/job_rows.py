"""What the tests of jobs run and read: functions that workers import too."""

import errno
import json
import os
import signal
import struct
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from jitney_jobs.job import Job
from jitney_jobs.job_making import make_job
from jitney_jobs.journal import JobJournal, OutputPart
from jitney_jobs.run import run_job
from jitney_jobs.worker import cancel


def twice(row: dict[str, Any]) -> dict[str, Any]:
    if row["id"] == 13:
        raise ValueError("unlucky")
    return {"twice": 2 * int(row["id"])}


def marked(row: dict[str, Any]) -> dict[str, Any]:
    return {"mark": True}


def names_of(row: dict[str, Any]) -> dict[str, Any]:
    return {"names": list(row)}


def deadly(row: dict[str, Any]) -> dict[str, Any]:
    """Ends the process that prepares row 150, and that of row 3500 in the midst of its answer;
    stops the job at row 210, where it ends the process twice."""
    if row["id"] == 150:
        os._exit(1)
    if row["id"] == 210:
        with open(row["flag"], "a") as flag:
            times = flag.tell()
            flag.write("x")
        if times == 0:
            os.kill(os.getppid(), signal.SIGTERM)
        if times < 2:
            os._exit(1)
    if row["id"] == 3500:

        def send_half(pipe: Any, data: bytes) -> None:
            os.write(pipe.fileno(), struct.pack("!i", len(data)) + bytes(data[:-1]))
            os._exit(1)

        Connection._send_bytes = send_half  # type: ignore[attr-defined]
    return {"twice": 2 * row["id"]}


def unruly(row: dict[str, Any]) -> dict[str, Any]:
    if row["id"] == 1:
        sys.exit(0)
    return {"value": (i for i in ()) if row["id"] == 0 else "text"}


def odd(row: dict[str, Any]) -> dict[str, Any]:
    """Values that JSON or Arrow cannot hold, but for rows 0, 6 and 7."""
    odd = {1: "\ud800", 2: {None: 1}, 3: Path("/"), 4: {1: 2}, 5: pa.int64()}
    return {"value": odd.get(row["id"], "text")}


def stuck(row: dict[str, Any]) -> dict[str, Any]:
    """Never ends at row 50."""
    if row["id"] == 50:
        time.sleep(3600)
    return {"twice": 2 * row["id"]}


def killing(row: dict[str, Any]) -> dict[str, Any]:
    """Kills the process at row 50, once."""
    if row["id"] == 50 and not Path(row["flag"]).exists():
        Path(row["flag"]).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return {"twice": 2 * row["id"]}


def deadly_at_50(row: dict[str, Any]) -> dict[str, Any]:
    """Ends the process at row 50, always."""
    if row["id"] == 50:
        os._exit(1)
    return {"twice": 2 * row["id"]}


def until_fixed(row: dict[str, Any]) -> dict[str, Any]:
    """Row 13 is bad until there is a file ``flag``."""
    if row["id"] == 13 and not Path(row["flag"]).exists():
        raise ValueError("unlucky")
    return {"twice": 2 * row["id"]}


def ending(row: dict[str, Any]) -> dict[str, Any]:
    """At row 50, stops the process, or cancels the job ``a`` that the row is of."""
    if row["id"] == 50 and row["how"] == "stop":
        os.kill(os.getpid(), signal.SIGTERM)
    if row["id"] == 50 and row["how"] == "cancel":
        cancel(Path(row["folder"]), "a")
    return {"twice": 2 * row["id"]}


def noted(row: dict[str, Any]) -> dict[str, Any]:
    """Notes in the row's log that it is done; stops the job at rows that are to, the first time.
    The values of the first 20 rows are numbers, and those of all others texts."""
    log = Path(row["log"])
    is_first = not log.exists() or str(row["id"]) not in log.read_text().split()
    with log.open("a") as file:
        file.write(f"{row['id']} ")
    if row["stops"] and is_first:
        os.kill(os.getpid(), signal.SIGTERM)
    return {"made": row["id"] if row["id"] < 20 else f"text {row['id']}"}


def noted_otherwise(row: dict[str, Any]) -> dict[str, Any]:
    return {"made": -row["id"]}


def slowly(row: dict[str, Any]) -> dict[str, Any]:
    time.sleep(0.002)
    return {"twice": 2 * row["id"]}


def in_20_ms(row: dict[str, Any]) -> dict[str, Any]:
    time.sleep(0.02)
    return twice(row)


def of_id(row: dict[str, Any]) -> dict[str, Any]:
    """What the test put there: the values of the rows, by their ids."""
    values = json.loads(Path(row["values"]).read_text())
    return {"made": values[row["id"]]}


def infinite(row: dict[str, Any]) -> dict[str, Any]:
    return {"score": float(row["x"]), "list": [1.0, float("inf")]}


def large(row: dict[str, Any]) -> dict[str, Any]:
    """1 MB."""
    return {"large": chr(97 + int(row["id"]) % 26) * 1_000_000}


def job_of(source: Path | str, output: Path | str, **settings: Any) -> Job:
    function = "tests.jobs.job_rows:twice"
    given = {"task": "map", "map": function, "workers": 0, "max_errors": "100%", **settings}
    return make_job({"input": str(source), "output": str(output), **given})


def run(source: Path | str, output: Path | str, **settings: Any) -> bool:
    return run_job(job_of(source, output, **settings))


def write_lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def ids(first: int, end: int) -> list[dict[str, int]]:
    return [{"id": i} for i in range(first, end)]


def read(output: Path) -> list[dict[str, Any]]:
    """Every row of the output's parts, in the order of their numbers."""
    rows: list[dict[str, Any]] = []
    for part in sorted(output.glob("part-*")):
        if part.suffix == ".parquet":
            rows += pq.read_table(part).to_pylist()
        else:
            rows += map(json.loads, part.read_text().splitlines())
    return rows


def bad(output: Path) -> list[dict[str, Any]]:
    found = sorted((output / "_errors").glob("part-*"))
    return [json.loads(line) for part in found for line in part.read_text().splitlines()]


def fail_at_part(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """The disk is full when that part is noted: its files are there, but do not count."""
    append = JobJournal.append

    def failing(self: JobJournal, line: Any) -> None:
        if isinstance(line, OutputPart) and line.number == number:
            raise OSError(errno.ENOSPC, "No space left on device")
        append(self, line)

    monkeypatch.setattr(JobJournal, "append", failing)


def note_row_groups(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that gets the row groups of Parquet files as they are read from now on."""
    groups: list[int] = []
    real = pq.ParquetFile.iter_batches

    def noted(self: Any, size: int, row_groups: list[int], columns: list[str]) -> Any:
        groups.extend(row_groups)
        return real(self, size, row_groups=row_groups, columns=columns)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", noted)
    return groups
