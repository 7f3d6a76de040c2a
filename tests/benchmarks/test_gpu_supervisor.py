"""The GPU benchmark's supervisor: failing, dying and hanging parts cost themselves alone."""

import json
from pathlib import Path

from benchmarks.device.report import Report
from benchmarks.device.supervise import Part, supervise

WHERE = "tests.benchmarks.parts_of_a_run"


def run(names: dict[str, str], path: Path, *, seconds: float = 600) -> Report:
    """Run parts name -> function and return the report. One that hangs has 1.5 s."""
    report = Report(list(names), path)
    parts = [
        Part(name, f"{WHERE}:{what}", 1.5 if what == "hangs" else 300, least=0.5)
        for name, what in names.items()
    ]
    supervise(parts, report, seconds)
    return report


def test_every_part_has_its_turn_whatever_the_others_do(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    names = {
        "a": "fine", "b": "raises", "c": "dies", "d": "reads_facts", "e": "cases", "f": "nothing",
    }  # fmt: skip
    report = run(names, path)
    assert {name: state.status for name, state in report.parts.items()} == {
        "a": "done", "b": "failed", "c": "died", "d": "done", "e": "done", "f": "failed",
    }  # fmt: skip
    assert report.parts["b"].error == "ValueError: a bound was broken"
    assert "-9" in str(report.parts["c"].error)
    rows = {(row.part, row.name): row for row in report.rows}
    assert ("b", "before") in rows
    assert ("c", "last words") in rows
    told, process = rows["d", "told"].value, rows["d", "process"].value
    assert told == report.facts["seen by"], "facts outlive the process that found them"
    assert told != process, "a fresh process took over"
    assert "ZeroDivisionError" in str(rows["e", "bad"].error)
    assert "skipped" in rows["e", "long"].note
    assert rows["e", "after"].value == 2.0
    assert not report.ok
    stored = json.loads(path.read_text(encoding="utf-8"))
    assert [row["name"] for row in stored["rows"]] == [row.name for row in report.rows]
    assert stored["parts"]["c"]["status"] == "died"
    assert [row["met"] for row in stored["rows"][:2]] == [True, False]


def test_a_part_that_hangs_is_killed_and_a_late_one_is_not_begun(tmp_path: Path) -> None:
    report = run({"a": "hangs", "b": "fine"}, tmp_path / "x.json")
    assert report.parts["a"].status == "late"
    assert report.parts["b"].status == "done"
    report = run({"a": "hangs", "b": "fine"}, tmp_path / "y.json", seconds=1.5)
    assert [state.status for state in report.parts.values()] == ["late", "skipped"]
    assert not report.ok
