"""What the benchmark of kills makes of what it sees, and a short run of it."""

import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks.chaos import census
from benchmarks.chaos.__main__ import main
from benchmarks.chaos.census import Census
from benchmarks.chaos.clients import Heard
from benchmarks.chaos.launcher import MARK
from benchmarks.chaos.verdict import Outcome, Row, judge, longest_pause, table

KILLED_AT = 100.0


@pytest.mark.slow
@pytest.mark.server
def test_each_process_is_killed_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No answer is wrong and no stream ends that must go on. How long errors take depends on what
    else the machine does, as does whether anything of other servers comes meanwhile."""
    processes = ["engine", "fork server", "gateway", "stub", "server", "launcher"]
    monkeypatch.setattr("sys.argv", ["chaos", "--kills=1", "--processes", *processes])
    main()
    said = capsys.readouterr()
    lines = [line.strip("| ").split(" | ") for line in said.out.splitlines()]
    rows = {cells[0]: cells for cells in lines if len(cells) == 8}
    assert set(processes) <= set(rows)
    for process in processes:
        assert rows[process][1:3] == ["1", "32"]
        assert rows[process][7] == "0", said.err
    assert "a stream that must go on" not in said.err, said.err


def heard(
    *texts: str, reasons: list[str] | None = None, ids: list[int] | None = None, **more: Any
) -> Heard:
    """An answer; whole unless its reasons say otherwise."""
    return Heard(list(texts), reasons or ["length"] * len(texts), ids or [], **more)


ALONE = heard("one two", "three", reasons=["length", "stop"])


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (heard("one two", "three", reasons=["length", "stop"]), Outcome.WENT_ON),
        (heard("one two", "three", reasons=["length", "stop"], error="late"), Outcome.WENT_ON),
        (heard("", "", reasons=["", ""], error="gone"), Outcome.ERROR),
        (heard("one", "three", reasons=["", "stop"], error="gone"), Outcome.ERROR),
        # It ended in good order, but without a finish reason: its client sees the cut.
        (heard("one", "th", reasons=["", ""]), Outcome.ERROR),
        # Cut short, and it looks whole; the first one in one sequence only.
        (heard("one", "thr", reasons=["", "stop"], error="gone"), Outcome.WRONG),
        (heard("one", "three", reasons=["length", "stop"]), Outcome.WRONG),
        # Another text or reason.
        (heard("one 2", "", reasons=["", ""], error="gone"), Outcome.WRONG),
        (heard("one two", "three", reasons=["stop", "stop"]), Outcome.WRONG),
    ],
)
def test_an_answer_is_judged(answer: Heard, outcome: Outcome) -> None:
    assert judge(answer, ALONE) == outcome


def test_other_tokens_of_the_same_text_are_wrong() -> None:
    alone = heard("ab", ids=[1, 2])
    assert judge(heard("ab", ids=[3]), alone) == Outcome.WRONG
    assert judge(heard("a", reasons=[""], ids=[1]), alone) == Outcome.ERROR


def row_of(process: str, way: str, answer: Heard) -> Row:
    """What is noted of one stream at the first kill."""
    row = Row(process, kills=1)
    row.note_stream(way, answer, ALONE, KILLED_AT)
    return row


CUT = {"reasons": ["", ""], "error": "gone"}


@pytest.mark.parametrize(
    ("process", "way", "ended_at", "defect"),
    [
        ("stub", "generate", 104.9, ""),
        ("stub", "generate", 105.1, "an error only after 5.1 s, generate: gone"),
        ("launcher", "gRPC", 105.1, "an error only after 5.1 s, gRPC: gone"),
        ("gateway", "gateway", 104.9, ""),
        ("gateway", "gRPC", 100.1, "a stream that must go on has ended, gRPC: gone"),
        ("engine", "gRPC", 100.1, "a stream that must go on has ended, gRPC: gone"),
        ("fork server", "gateway", 100.1, "a stream that must go on has ended, gateway: gone"),
    ],
)
def test_who_may_have_an_error_and_when(
    process: str, way: str, ended_at: float, defect: str
) -> None:
    row = row_of(process, way, heard("one", "", ended_at=ended_at, **CUT))
    assert row.defects == ([f"{process}, kill 1: {defect}"] if defect else [])
    assert row.longest_s == pytest.approx(ended_at - KILLED_AT)
    assert row.outcomes == {Outcome.ERROR: 1}


def test_a_wrong_answer_is_a_defect_after_any_kill_and_later() -> None:
    row = row_of("stub", "generate", heard("one", "th", reasons=["length", "stop"]))
    row.note_later("gRPC", heard("", "", **CUT), ALONE)
    row.note_later("gRPC", ALONE, ALONE)
    assert len(row.defects) == 2
    assert table([row]).splitlines()[-1] == "| stub | 1 | 1 | 0 | 0 |  | 0 | 2 |"


def test_what_is_left_stands_in_the_table() -> None:
    row = row_of("server", "generate", heard("one", "", ended_at=102.5, **CUT))
    row.note_left(["process stub", "process stub"])
    assert table([row]).splitlines()[-1] == "| server | 1 | 1 | 0 | 1 | 2.5 | 2 | 0 |"
    assert row.defects == ["server, kill 1: left behind: process stub"] * 2


def test_the_pause_of_a_stream_begins_at_the_kill() -> None:
    assert longest_pause([90.0, 99.0, 101.5, 103.0, 103.5], KILLED_AT) == 1.5
    answer = heard("one two", "three", reasons=["length", "stop"], came=[99.0, 103.0])
    assert row_of("engine", "gRPC", answer).pauses_s == [3.0]


def test_what_is_left_behind_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process with the mark, a zombie of it, a folder, and shared memory of a run folder that is
    gone; no file, and no process without the mark."""
    monkeypatch.setattr(census, "_LEFT_S", 0.3)
    monkeypatch.setattr(census, "_count_environments", lambda: 0)
    counts = Census("m1", tmp_path)
    run_folder = tmp_path / f"jitney-server-{tmp_path.name}"
    run_folder.mkdir()
    region = Path("/dev/shm", f"{run_folder.name}-region")
    before = counts.take()
    run_folder.rmdir()
    region.touch()
    (tmp_path / "a.log").touch()
    (tmp_path / "folder").mkdir()
    child = "import os, time; os.fork() or os._exit(0); print(flush=True); time.sleep(60)"
    marked = subprocess.Popen(
        [sys.executable, "-c", child], env={MARK: "m1"}, stdout=subprocess.PIPE
    )
    other = subprocess.Popen(
        [sys.executable, "-c", "input()"], env={MARK: "m2"}, stdin=subprocess.PIPE
    )
    try:
        assert marked.stdout is not None
        marked.stdout.readline()
        name = Path(sys.executable).name
        left = counts.left(before - Counter({"folder for temporary files": 1}))
        assert left == [
            "folder for temporary files", f"process {name}", "shared memory", f"zombie {name}",
        ]  # fmt: skip
    finally:
        for process in (marked, other):
            process.kill()
            process.communicate()
        region.unlink()
    assert counts.left(before) == []
