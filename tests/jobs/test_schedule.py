"""Jobs within a time: until when, whether they will be late, and what the status says."""

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from jitney import cli
from jitney.errors import InvalidArgumentError
from jitney.progress import Deadline
from jitney_jobs.job_making import make_job, read_job
from jitney_jobs.job_record import read_record
from jitney_jobs.status import status_of
from jitney_jobs.times import due_at
from typer.testing import CliRunner

from tests.jobs.job_rows import ids, job_of, run, write_lines

NOON = datetime(2026, 11, 23, 12).timestamp()


@pytest.mark.parametrize(
    ("setting", "value", "hours"),
    [
        ("finish_by", "18:30", 6.5),
        ("finish_by", "06:00", 18),
        ("finish_by", "12:00", 24),
        ("finish_by", 16 * 60, 4),  # 16:00 in a journal of an earlier version
        ("finish_by", f"18:30 {datetime.fromtimestamp(NOON).astimezone():%z}", 6.5),
        ("within", "4h", 4),
        ("within", "1h30m", 1.5),
        ("within", "1.5d", 36),
    ],
)
def test_until_when(setting: str, value: str | int, hours: float) -> None:
    given: dict[str, Any] = {"finish_by": None, "within": None, setting: value}
    due = due_at(**given, now=NOON)
    assert due is not None
    assert due - NOON == hours * 3600


def test_a_clock_time_in_a_job_file(tmp_path: Path) -> None:
    for text in ("16:00", "06:00", "'16:00'"):
        (tmp_path / "job.yaml").write_text(
            f"input: a\noutput: b\ntask: map\nmap: c:d\nfinish_by: {text}"
        )
        job = make_job(read_job(tmp_path / "job.yaml"))
        due = due_at(job.finish_by, None, NOON)
        assert due is not None
        assert datetime.fromtimestamp(due).strftime("%H:%M") == text.strip("'")


@pytest.mark.parametrize(
    ("finish_by", "hours"),
    [
        ("06:00 Europe/Zurich", 17),  # it is 13:00 there
        ("06:00 UTC", 18),
        ("06:00+02:00", 16),
        ("06:00 -0500", 23),
        ("13:30 Europe/Zurich", 0.5),
    ],
)
def test_a_clock_time_of_another_zone(finish_by: str, hours: float) -> None:
    noon = datetime(2026, 11, 23, 12, tzinfo=UTC).timestamp()
    due = due_at(finish_by, None, noon)
    assert due is not None
    assert due - noon == hours * 3600


def test_a_clock_time_keeps_the_zone_of_the_machine_that_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_lines(tmp_path / "in.jsonl", ids(20, 40))
    zone = "Asia/Shanghai"
    try:
        monkeypatch.setenv("TZ", zone)
        time.tzset()
        assert run(source, tmp_path / "out", finish_by="06:00")
        monkeypatch.setenv("TZ", "UTC")
        time.tzset()
        record = read_record(str(tmp_path / "out"), None)
        assert record.begin is not None
        due = record.due(record.begin.job)
    finally:
        monkeypatch.undo()
        time.tzset()
    assert due is not None
    assert datetime.fromtimestamp(due, ZoneInfo(zone)).strftime("%H:%M") == "06:00"


def test_it_warns_when_its_mind_changes() -> None:
    deadline = Deadline(1000.0)
    states: list[tuple[float, float, float | None, str | None]] = [
        (0, 5, 9999, None),  # too early to tell
        (10, 15, None, None),
        (100, 100, 900, None),
        (101, 101, 900, "late: it will end about"),
        (110, 110, 2000, None),  # once
        (200, 200, 799, None),  # not sure enough
        (201, 201, 700, "in time again: it will end about"),
        (300, 300, 400, None),
        (400, 400, 601, "late: it will end about"),
        (1001, 900, None, None),
    ]
    for now, seconds, left, said in states:
        got = deadline.judge(now, seconds, left)
        assert (got is None) == (said is None), (now, got)
        assert got is None or got.startswith(str(said))
    assert deadline.late
    assert Deadline(1000.0).judge(1000.0, 1, None) is not None, "the time is over"
    assert Deadline(None).judge(1e12, 1e9, 1e9) is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"finish_by": "6 am"}, "finish_by is '6 am', but must be a clock time of this machine"),
        ({"finish_by": "06:00 Europe/Zurick"}, "finish_by is '06:00 Europe/Zurick', but must be"),
        ({"patience": "4"}, "patience is '4', but must be a time such as 4h, 90m or 1h30m"),
        ({"watchdog": "0"}, "watchdog is '0', but must be a time"),
        ({"finish_by": "24:00"}, "finish_by is '24:00', but must be"),
        ({"finish_by": 930}, "finish_by is 930, but must be a clock time of this machine"),
        ({"within": "4"}, "within is '4', but must be a time such as 4h, 90m or 1h30m"),
        ({"within": "0h"}, "within is '0h', but must be"),
        ({"within": "1h", "finish_by": "06:00"}, "finish_by and within exclude each other"),
    ],
)
def test_times_that_cannot_be(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        job_of(tmp_path / "in", tmp_path / "out", **settings)


def test_a_late_job_ends_and_says_so_by_its_status(tmp_path: Path) -> None:
    """Also of a job that is complete already."""
    source = write_lines(tmp_path / "in.jsonl", ids(20, 40))
    options = ["--task", "map", "--map", "tests.jobs.job_rows:twice", "--workers", "0"]
    command = ["batch", "run", str(source), str(tmp_path / "out"), *options]
    for _ in range(2):  # the second finds it complete
        late = CliRunner().invoke(cli.make_app(), [*command, "--within", "0.000001s"])
        assert late.exit_code == 4
        assert ": complete\n" in late.output
        assert ", late\n" in late.output
    command[3] = str(tmp_path / "out2")
    in_time = CliRunner().invoke(cli.make_app(), [*command, "--within", "1000d"])
    assert in_time.exit_code == 0
    assert "due     " in in_time.output
    assert ", late" not in in_time.output


def test_a_run_within_a_longer_time_is_not_late(tmp_path: Path) -> None:
    """Neither by its status nor by what it prints."""
    source = write_lines(tmp_path / "in.jsonl", ids(20, 40))
    options = ["--task", "map", "--map", "tests.jobs.job_rows:twice", "--workers", "0"]
    command = ["batch", "run", str(source), str(tmp_path / "out"), *options, "--within"]
    CliRunner().invoke(cli.make_app(), [*command, "0.000001s"])
    longer = CliRunner().invoke(cli.make_app(), [*command, "1000d"])
    assert longer.exit_code == 0
    assert "due     " in longer.output
    assert ", late" not in longer.output


def test_the_time_counts_from_the_first_run(tmp_path: Path, monkeypatch: Any) -> None:
    source = write_lines(tmp_path / "in.jsonl", [*ids(20, 40), {"id": 13}])
    output = tmp_path / "out"
    with pytest.raises(InvalidArgumentError, match="more than max_errors"):
        run(source, output, max_errors=0, within="1h")
    record = read_record(str(output), None)
    job = job_of(source, output, within="1h")
    due = record.due(job)
    assert due is not None
    assert due > time.time()
    monkeypatch.setattr(time, "time", lambda: due + 60)
    assert run(source, output, within="1h")
    record = read_record(str(output), None)
    assert record.due(job) == due
    assert record.is_late(job)
    assert status_of(record, job).endswith(", late")
