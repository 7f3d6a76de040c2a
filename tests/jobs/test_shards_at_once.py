"""Shards as processes that run at the same time; one is killed, and started again by the same
command."""

import re
import subprocess
import time
from pathlib import Path

import pytest
from jitney_jobs import planning_claim
from jitney_jobs.job_record import read_record
from jitney_jobs.merging import merge_shards
from jitney_jobs.output_files import output_files

from tests.jobs.bucket import Bucket
from tests.jobs.job_rows import bad, ids, read, run, write_lines
from tests.jobs.test_job_once import start

SHARDS = 3
ROWS = 600

SCRIPT = """
import sys
from pathlib import Path
from tests.jobs.job_rows import run
run(Path(sys.argv[1]), sys.argv[2], map="tests.jobs.job_rows:in_20_ms", ordered=True,
    shard="{shard}", part_rows=20, part_seconds=0.03, workers=1, in_flight=64)
"""


def begin(source: Path, output: str, index: int) -> subprocess.Popen[str]:
    script = SCRIPT.replace("{shard}", f"{index}/{SHARDS}")
    process: subprocess.Popen[str] = start(source, output, script)
    return process


def parts_of(folder: Path, index: int) -> list[Path]:
    return list(folder.glob(f"part-{index}-of-{SHARDS}-*"))


def kill_one_of(source: Path, output: str, folder: Path) -> None:
    """All shards at once, and one of them twice: one of these does it. Another is killed once it
    has some parts, and run again."""
    twins = [begin(source, output, 0), begin(source, output, 0)]
    killed = begin(source, output, 1)
    other = begin(source, output, 2)
    while len(parts_of(folder, 1)) < 3:
        assert killed.poll() is None, killed.communicate()
        time.sleep(0.005)
    killed.kill()
    killed.communicate(timeout=300)
    assert killed.returncode == -9
    again = begin(source, output, 1)
    for process in (other, again):
        said = process.communicate(timeout=300)
        assert process.returncode == 0, said
    errors = [twin.communicate(timeout=300)[1] for twin in twins]
    codes = [twin.returncode for twin in twins]
    assert 0 in codes, errors
    for code, error in zip(codes, errors, strict=True):
        # One that began after the end of the other finds nothing to do.
        assert code == 0 or re.search(r"another run .*shard 0/3 of", error), error


def check_merged(tmp_path: Path, source: Path, output: str, folder: Path) -> None:
    """The same text as that of a job without shards; nothing else is left."""
    assert run(source, tmp_path / "whole", ordered=True)
    merge_shards(output)
    texts = [path.read_text() for path in sorted(folder.glob("part-*"))]
    whole = [path.read_text() for path in sorted((tmp_path / "whole").glob("part-*"))]
    assert "".join(texts) == "".join(whole)
    assert sorted(row["id"] for row in read(folder)) == list(range(20, 20 + ROWS))
    assert bad(folder) == []
    record = read_record(output, None)
    assert (record.written, record.total) == (ROWS, ROWS)
    named = {name for part in record.parts for name in part.files}
    assert named == {path.name for path in folder.glob("*part-*")}


def test_one_shard_counts_the_input_and_the_others_wait(tmp_path: Path) -> None:
    source = lines(tmp_path)
    output = tmp_path / "out"
    count = "Path(sys.argv[1], '../counts').open('a').write('x'); "
    script = SCRIPT.replace(
        "run(Path",
        "import time\n"
        "from jitney_jobs import shard_planning\n"
        "real = shard_planning._counted\n"
        "def counted(*given):\n"
        f"    {count}time.sleep(1)\n"
        "    return real(*given)\n"
        "shard_planning._counted = counted\n"
        "run(Path",
        1,
    )
    shards = [start(source, output, script.replace("{shard}", f"{i}/{SHARDS}")) for i in range(3)]
    for shard in shards:
        said = shard.communicate(timeout=300)
        assert shard.returncode == 0, said
    assert (tmp_path / "counts").read_text() == "xx", "each of the two files once"
    check_merged(tmp_path, source, str(output), output)
    assert not (output / "_job/planning").exists()


def test_a_shard_that_died_while_it_planned_holds_up_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning_claim, "_STALE_S", 1.0)
    output = tmp_path / "out"
    assert planning_claim.PlanningClaim(output_files(str(output))).take()
    assert run(lines(tmp_path), output, shard="0/1")
    assert len(read(output)) == ROWS


def lines(tmp_path: Path) -> Path:
    source = tmp_path / "in"
    source.mkdir()
    write_lines(source / "a.jsonl", ids(20, 250))
    write_lines(source / "b.jsonl", ids(250, 20 + ROWS))
    return source


def test_a_shard_is_killed_and_goes_on(tmp_path: Path) -> None:
    source = lines(tmp_path)
    output = tmp_path / "out"
    kill_one_of(source, str(output), output)
    check_merged(tmp_path, source, str(output), output)


def test_a_shard_is_killed_and_goes_on_in_a_bucket(tmp_path: Path, bucket: Bucket) -> None:
    source = lines(tmp_path)
    output = bucket.place("out")
    folder = bucket.folder / "out"
    kill_one_of(source, output, folder)
    check_merged(tmp_path, source, output, folder)
