"""What the soak makes of its samples."""

from pathlib import Path

from benchmarks.soak import STOP_S, Sample, grown, plot, stopped_well

BEFORE = Sample(5.0, 30.0, 2.0, 500.0, 60.0, 90.0, 20, 16, 1.0, 0.0)


def test_memory_may_differ_by_a_twentieth_and_nothing_else_at_all() -> None:
    fine = Sample(60.0, 31.0, 26.0, 520.0, 62.0, 94.0, 20, 15, 1.0, 0.0)
    assert not list(grown(BEFORE, fine))
    worse = Sample(60.0, 32.0, 2.0, 526.0, 64.0, 95.0, 21, 17, 1.06, 1.0)
    assert [each.split(":")[0] for each in grown(BEFORE, worse)] == [
        "front_mb", "engine_mb", "gateway_mb", "threads", "handles", "shared_mb",
        "used_blocks",
    ]  # fmt: skip


def test_the_plot_shows_memory_and_counts(tmp_path: Path) -> None:
    plot([BEFORE, BEFORE], tmp_path / "soak.svg")
    assert all(f"<!-- {name} -->" in (tmp_path / "soak.svg").read_text()
               for name in ("front", "engine", "threads", "handles"))  # fmt: skip


def test_the_launcher_must_end_in_time_and_with_status_0() -> None:
    assert stopped_well(0, STOP_S)
    assert not stopped_well(3, 1.0)
    assert not stopped_well(0, STOP_S + 0.1)
