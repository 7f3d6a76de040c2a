"""What a merge of shards waits for, and what it finds wrong."""

from pathlib import Path

import msgspec
import pytest
from jitney.errors import InvalidArgumentError
from jitney_jobs import merging
from jitney_jobs.journal import FileRows, Interval, OutputPart
from jitney_jobs.journal_entries import decode, encode
from jitney_jobs.merging import merge_shards
from jitney_jobs.outcome import ExitStatus, ShardsMissingError, TooManyBadRows
from jitney_jobs.shard_plan import plan_of

from tests.jobs.job_rows import ids, write_lines
from tests.jobs.job_status import batch, run_command
from tests.jobs.shard_runs import ids_of, lines, run_shards

# ------------------------------------------------------------------ waits and limits


def test_a_merge_waits_for_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = lines(tmp_path, 20, 60)
    run_shards(source, tmp_path / "out", 0, 1)
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            run_shards(source, tmp_path / "out", 2)

    monkeypatch.setattr(merging.time, "sleep", pause)
    said: list[str] = []
    merge_shards(str(tmp_path / "out"), wait_s=100, say=said.append)
    assert said == ["waits for 1 of 3 shards"]
    assert pauses[0] < pauses[1]
    assert ids_of(tmp_path / "out") == list(range(20, 60))


def test_bad_rows_of_all_shards_are_held_against_the_limit(tmp_path: Path) -> None:
    """Each shard was held against its own rows."""
    rows = [{"id": 13 if i % 10 == 0 else i} for i in range(20, 80)]
    source = write_lines(tmp_path / "in.jsonl", rows)
    run_shards(source, tmp_path / "out", max_errors=4)
    with pytest.raises(TooManyBadRows, match=r"6 of 60 rows of all shards .*max_errors \(4\)"):
        merge_shards(str(tmp_path / "out"))
    merge = ["batch", "merge", str(tmp_path / "out")]
    assert run_command(merge).status == ExitStatus.TOO_MANY_BAD
    merged = batch("merge", tmp_path / "out", "--max-errors", "10%")
    assert merged.exit_code == ExitStatus.BAD_ROWS


# ------------------------------------------------------------------ what is lost or exchanged


def test_a_merge_finds_what_is_lost_or_exchanged(tmp_path: Path) -> None:
    source = lines(tmp_path, 20, 80)
    output = tmp_path / "out"
    run_shards(source, output, part_rows=5)
    (part, *_) = sorted(output.glob("part-1-of-3-*"))
    data = part.read_bytes()
    part.unlink()
    with pytest.raises(InvalidArgumentError, match=rf"part {part.name} of .* has 0 bytes, but had"):
        merge_shards(str(output))
    part.write_bytes(data)
    journal = output / "_job/shard-1-of-3/journal.jsonl"
    kept = journal.read_text()
    journal.write_text((output / "_job/shard-0-of-3/journal.jsonl").read_text())
    with pytest.raises(InvalidArgumentError, match=r"shard 1/3 of .* belongs to another plan"):
        merge_shards(str(output))
    without_part = [each for each in kept.splitlines() if '"number":1,' not in each]
    journal.write_text("\n".join(without_part) + "\n")
    with pytest.raises(ShardsMissingError, match="shard 1/3: 15 of 20 rows, last"):
        merge_shards(str(output))
    journal.write_text(kept)
    plan = output / "_job/plan.json"
    plan.write_text(plan.read_text().replace("0.jsonl", "9.jsonl"))
    with pytest.raises(InvalidArgumentError, match=r"plan.json .* is damaged: its checksum"):
        merge_shards(str(output))


def move_shard(output: Path, first: int) -> None:
    """Have the plan say that shard 1 begins at that row."""
    plan = plan_of(str(output))
    assert plan is not None
    (rows,) = plan.shards[1]
    shards = [plan.shards[0], [rows._replace(first=first)], plan.shards[2]]
    moved = msgspec.structs.replace(plan, shards=shards)
    (output / "_job/plan.json").write_bytes(encode(moved))


@pytest.mark.parametrize("first", [15, 25])
def test_ranges_that_overlap_or_leave_a_gap_are_not_merged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    source = write_lines(tmp_path / "in.jsonl", ids(20, 80))
    output = tmp_path / "out"
    run_shards(source, output, 0)
    move_shard(output, first)
    run_shards(source, output, 1, 2)
    with pytest.raises(InvalidArgumentError, match=f"row {first} of file 0 does not follow"):
        merge_shards(str(output))
    if first < 20:  # the rows that are done are looked at, too
        monkeypatch.setattr(merging, "_check_plan", lambda plan: None)
        with pytest.raises(InvalidArgumentError, match=r"rows 15 to 19 of .* are in two shards"):
            merge_shards(str(output))


@pytest.mark.parametrize(
    ("shift", "said"),
    [
        (-3, r"shard 1/3 of .* lacks rows 37 to 39 of .*in.jsonl"),
        (3, r"shard 1/3 of .* lacks rows 20 to 22 of .*in.jsonl"),
    ],
)
def test_a_shard_that_did_other_rows_is_not_merged(tmp_path: Path, shift: int, said: str) -> None:
    source = write_lines(tmp_path / "in.jsonl", ids(20, 80))
    output = tmp_path / "out"
    run_shards(source, output)
    journal = output / "_job/shard-1-of-3/journal.jsonl"
    moved = []
    for data in journal.read_bytes().splitlines(keepends=True):
        entry, _ = decode(data)
        if isinstance(entry, OutputPart):
            intervals = [Interval(f, a + shift, b + shift) for f, a, b in entry.intervals]
            entry = msgspec.structs.replace(entry, intervals=intervals)
        if not isinstance(entry, FileRows):  # it would tell that the file has no more rows
            moved.append(encode(entry))
    journal.write_bytes(b"".join(moved))
    with pytest.raises(InvalidArgumentError, match=said):
        merge_shards(str(output))
