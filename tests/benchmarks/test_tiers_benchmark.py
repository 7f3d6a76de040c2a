"""The benchmark of latency tiers, by simulation: its table, and that tiers do what they promise."""

import numpy as np
from msgspec.structs import replace

from benchmarks.tiers import (
    WAYS,
    Served,
    SimulatedMachine,
    figures_of,
    find_scale,
    measure,
    show,
    show_loads,
)


def test_tiers_keep_the_gap_and_cost_bulk_little(capsys) -> None:
    machine = SimulatedMachine()
    scale = find_scale(machine)
    figures = measure(machine, scale, WAYS, load=0.9, seconds=20.0, ttft=0.3)
    first_come, tiers, _ = (figures[way] for way in WAYS)
    assert np.quantile(tiers.gaps, 0.98) <= 1e3 * scale.gap < np.quantile(first_come.gaps, 0.95)
    assert tiers.first_p99 < 300.0
    assert tiers.bulk > 0.85 * first_come.bulk
    assert tiers.good > 0.9 > 0.5 > first_come.good
    show(figures, scale.gap)
    rows = capsys.readouterr().out.splitlines()[-3:]
    assert [row.split(" | ")[0] for row in rows] == [f"| {way}" for way in WAYS]


def test_tiers_keep_the_gap_where_a_block_of_a_prompt_takes_longer() -> None:
    """A token takes 0.72 ms there, so a step with a block of 16 takes longer than the target."""
    machine = SimulatedMachine("avx2")
    figures = measure(machine, find_scale(machine), WAYS[:2], load=0.9, seconds=240.0, ttft=0.3)
    first_come, tiers = (figures[way] for way in WAYS[:2])
    assert tiers.good >= 0.97 > 0.5 > first_come.good
    assert tiers.bulk >= 0.95 * first_come.bulk


def test_goodput_is_the_highest_load_that_nine_of_ten_stand(capsys) -> None:
    tokens = [0.1, 0.2]
    figures = figures_of([Served("interactive", 0.0, tokens), Served("bulk", 0.0, tokens)], 1, 1)

    def of_shares(*shares: float) -> dict:
        return {way: replace(figures, good=share) for way, share in zip(WAYS, shares, strict=True)}

    show_loads({0.3: of_shares(1.0, 0.9, 0.5), 0.6: of_shares(0.89, 0.91, 0.5)})
    rows = capsys.readouterr().out.splitlines()[-3:]
    assert [row.rsplit("| ", 1)[1] for row in rows] == ["0.3 |", "0.6 |", "none |"]


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
