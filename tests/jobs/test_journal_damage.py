"""A journal that was damaged is refused, or the job is exact: no row is lost or doubled."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from jitney.errors import InvalidArgumentError, UnavailableError
from jitney_jobs import journal_entries
from jitney_jobs.journal import Record
from jitney_jobs.run import run_job

from tests.jobs.job_rows import fail_at_part, ids, job_of, read, run, write_lines

ROWS = 60


@pytest.fixture
def stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The output of a job of 60 rows, of which 40 are in 4 parts."""
    write_lines(tmp_path / "in.jsonl", ids(20, 20 + ROWS))
    with monkeypatch.context() as patched:
        fail_at_part(patched, 4)
        with pytest.raises(UnavailableError):
            run(tmp_path / "in.jsonl", tmp_path / "out", part_rows=10)
    return tmp_path / "out"


def go_on(output: Path) -> None:
    assert run(output.parent / "in.jsonl", output, part_rows=10)


def is_exact(output: Path) -> bool:
    return sorted(row["id"] for row in read(output)) == list(range(20, 20 + ROWS))


def journal_of(output: Path) -> Path:
    return output / "_job" / "journal.jsonl"


def changed(line: bytes, **members: Any) -> bytes:
    """The line with other members, and without a checksum."""
    entry = {**json.loads(line), **members}
    entry.pop("crc", None)
    return json.dumps(entry).encode() + b"\n"


def signed(line: bytes) -> bytes:
    """With a checksum that is right."""
    return journal_entries.encode(journal_entries._DECODER.decode(line))


def test_any_digit_that_changes_is_noticed(stopped: Path) -> None:
    journal = journal_of(stopped)
    good = journal.read_bytes()
    digits = [index for index, byte in enumerate(good) if chr(byte).isdigit()]
    chance = random.Random(3)
    for index in chance.sample(digits, 60):
        digit = chance.choice([other for other in b"0123456789" if other != good[index]])
        journal.write_bytes(good[:index] + bytes([digit]) + good[index + 1 :])
        line = good[:index].count(b"\n") + 1
        with pytest.raises(InvalidArgumentError, match=rf"^line {line} of .* its checksum differs"):
            Record.read(journal)
    journal.write_bytes(good)
    go_on(stopped)
    assert is_exact(stopped)


def test_a_damaged_line_that_is_deleted_is_done_again(stopped: Path) -> None:
    """What the error says to do."""
    journal = journal_of(stopped)
    lines = journal.read_bytes().splitlines(keepends=True)
    numbers = [number for number, line in enumerate(lines) if b'"part"' in line]
    lines[numbers[1]] = lines[numbers[1]].replace(b'"written":10', b'"written":11')
    journal.write_bytes(b"".join(lines))
    with pytest.raises(InvalidArgumentError, match=r"put back a copy .*; or delete this line"):
        go_on(stopped)
    del lines[numbers[1]]
    journal.write_bytes(b"".join(lines))
    go_on(stopped)
    assert is_exact(stopped)


def test_a_complete_job_that_lost_a_line_is_completed_again(stopped: Path) -> None:
    go_on(stopped)
    journal = journal_of(stopped)
    lines = journal.read_bytes().splitlines(keepends=True)
    del lines[[index for index, line in enumerate(lines) if b'"part"' in line][2]]
    for end in (lines, [*map(old, lines)]):
        journal.write_bytes(b"".join(end))
        go_on(stopped)
        assert is_exact(stopped)


def test_without_the_job_nothing_is_done(stopped: Path) -> None:
    journal = journal_of(stopped)
    lines = journal.read_bytes().splitlines(keepends=True)
    for rest in (lines[1:], [lines[0].replace(b'"map"', b'"mop"'), *lines[1:]], [b"x\n"]):
        journal.write_bytes(b"".join(rest))
        with pytest.raises(InvalidArgumentError, match=r"line 1 of .* do the job anew"):
            go_on(stopped)


@pytest.mark.parametrize(
    "tail", [b'{"type":"part","number":4,"fil', b'{"type":"end"\0\0\0}\n', b"\0" * 9]
)
def test_a_torn_last_line_is_cut(stopped: Path, tail: bytes) -> None:
    with journal_of(stopped).open("ab") as file:
        file.write(tail)
    go_on(stopped)
    assert is_exact(stopped)


def test_a_last_line_that_lacks_its_end_is_done_again(stopped: Path) -> None:
    journal = journal_of(stopped)
    journal.write_bytes(journal.read_bytes()[:-1])
    go_on(stopped)
    assert is_exact(stopped)


@pytest.mark.parametrize(
    ("members", "why"),
    [
        ({"rows": [[0, 10, 19]]}, "10 written and 0 bad rows, but ranges of 9 rows"),
        ({"rows": [[0, 10, 30]], "written": 20}, "rows 20 to 29 of .* are in two parts"),
        ({"rows": [[0, 10, 15], [0, 14, 19]]}, "rows 14 to 14 of .* are in two parts"),
        ({"rows": [[0, 20, 10]]}, "rows 20 to 9 are no range"),
        ({"rows": [[0, 60, 70]]}, "it has rows 60 to 69 of .*, which has 60 rows"),
        ({"rows": [[3, 10, 20]]}, "there is no file 3"),
        ({"written": 30, "failed": -20}, "30 written and -20 bad rows"),
        ({"number": 0}, "part 0 comes after part 0"),
    ],
)
def test_parts_that_do_not_fit_together_are_refused(
    stopped: Path, members: dict[str, Any], why: str
) -> None:
    """Although each line is whole: a journal may have been put together by hand."""
    journal = journal_of(stopped)
    lines = journal.read_bytes().splitlines(keepends=True)
    number = [index for index, line in enumerate(lines) if b'"part"' in line][1]
    lines[number] = signed(changed(lines[number], **members))
    journal.write_bytes(b"".join(lines))
    with pytest.raises(InvalidArgumentError, match=f"is damaged: .*{why}"):
        go_on(stopped)


def test_a_line_that_is_there_twice_is_refused(stopped: Path) -> None:
    journal = journal_of(stopped)
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join([*lines, lines[-1]]))
    with pytest.raises(InvalidArgumentError, match="part 3 comes after part 3"):
        go_on(stopped)


def old(line: bytes) -> bytes:
    """As version 2 wrote it: without checksum, fingerprints and digests."""
    entry = json.loads(line)
    if entry["type"] == "begin":
        entry["version"] = 2
        for name in ("prints", "id"):
            del entry[name]
        del entry["job"]["accept_changes"]
        entry["files"] = [file[:3] for file in entry["files"]]
    if entry["type"] == "end":
        del entry["rows"], entry["input_changes"]
    return changed(json.dumps(entry).encode())


def test_a_journal_of_version_2_is_gone_on_with(stopped: Path) -> None:
    """Its lines have no checksums, but its parts are held against each other, too."""
    journal = journal_of(stopped)
    lines = list(map(old, journal.read_bytes().splitlines(keepends=True)))
    twice = changed(lines[-1], rows=[[0, 0, 10]])
    journal.write_bytes(b"".join([*lines[:-1], twice]))
    with pytest.raises(InvalidArgumentError, match=r"rows 0 to 9 of .* are in two parts"):
        go_on(stopped)
    journal.write_bytes(b"".join(lines))
    go_on(stopped)
    assert is_exact(stopped)
    assert b'"crc"' in journal.read_bytes().splitlines()[-1]
    go_on(stopped)


def test_lines_without_a_checksum_are_refused_where_they_have_one(stopped: Path) -> None:
    journal = journal_of(stopped)
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join([*lines[:-1], changed(lines[-1])]))
    with pytest.raises(InvalidArgumentError, match="it has no checksum"):
        go_on(stopped)


def test_a_journal_of_a_later_version_is_refused(stopped: Path) -> None:
    journal = journal_of(stopped)
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join([signed(changed(lines[0], version=4)), *lines[1:]]))
    with pytest.raises(
        InvalidArgumentError, match="is of version 4, not 3: go on with the version"
    ):
        go_on(stopped)


def test_a_damaged_line_of_rows_done_again_is_not_to_be_deleted(tmp_path: Path) -> None:
    """Without it the rows that were bad, and are good now, would be in two parts."""
    source = write_lines(tmp_path / "in.jsonl", ids(0, 20))
    output = tmp_path / "out"
    assert run(source, output)
    assert run_job(job_of(source, output), retry_bad=True)
    journal = journal_of(output)
    lines = journal.read_bytes().splitlines(keepends=True)
    (number,) = [index for index, line in enumerate(lines) if b'"reopened"' in line]
    before = lines[number]
    lines[number] = before.replace(b"[0,13,14]", b"[0,12,13]")
    assert lines[number] != before
    journal.write_bytes(b"".join(lines))
    with pytest.raises(InvalidArgumentError, match=r"its checksum differs; .* without one, do the"):
        Record.read(journal)
    del lines[number]
    journal.write_bytes(b"".join(lines))
    with pytest.raises(InvalidArgumentError, match=r"rows 13 to 13 .* two parts; .* anew"):
        run(source, output)
