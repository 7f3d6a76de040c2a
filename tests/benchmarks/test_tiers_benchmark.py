"""The benchmark of latency tiers, by simulation: its table, and that tiers do what they promise."""

import numpy as np

from benchmarks.tiers import WAYS, Served, SimulatedMachine, figures_of, measure, show


def test_tiers_keep_the_gap_and_cost_bulk_little(capsys) -> None:
    figures, gap = measure(SimulatedMachine(), load=0.9, seconds=20.0, ttft=0.3)
    first_come, tiers, _ = (figures[way] for way in WAYS)
    assert np.quantile(tiers.gaps, 0.98) <= 1e3 * gap < np.quantile(first_come.gaps, 0.95)
    assert tiers.first_p99 < 300.0
    assert tiers.bulk > 0.85 * first_come.bulk
    assert tiers.good > 0.9 > 0.5 > first_come.good
    show(figures, gap)
    rows = capsys.readouterr().out.splitlines()[-3:]
    assert [row.split(" | ")[0] for row in rows] == [f"| {way}" for way in WAYS]


def test_a_request_is_good_if_it_met_its_targets() -> None:
    def served(first: float, *gaps: float) -> Served:
        return Served("interactive", 1.0, np.cumsum([1.0 + first, *gaps]).tolist())

    assert served(0.1, *[0.02] * 20).is_good(0.2, 0.03)
    assert not served(0.3, *[0.02] * 20).is_good(0.2, 0.03), "its first token came late"
    assert served(0.1, 0.09, *[0.02] * 19).is_good(0.2, 0.03), "one gap in twenty may exceed it"
    assert not served(0.1, 0.09, 0.09, *[0.02] * 18).is_good(0.2, 0.03)
    bulk = Served("bulk", 0.0, [5.0, 9.0])
    sums = figures_of([served(0.1, 0.02, 0.02), served(0.3, 0.04, 0.04), bulk], 0.2, 0.03)
    assert (sums.good, sums.goodput, sums.bulk) == (0.5, 2 / 9, 2 / 9)
