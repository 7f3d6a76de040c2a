"""The best setting, what came nearest, and what is said beside it."""

import io
from pathlib import Path

import pytest
from jitney_measure import choose, record
from jitney_measure.choose import conclusion, print_end, shown, trial_line
from jitney_measure.record import Trial, Tuning
from jitney_measure.report import write_tuning
from rich.console import Console

from tests.measure.trials import SLO, failed, point, trial, unmeasured

NOW = {"batch_size": 64}
OTHER = {"batch_size": 8}
THIRD = {"batch_size": 1}


def tuning(*trials: Trial, ending: record.Ending = "complete") -> Tuning:
    choice = choose.choose_setting(trials)
    return Tuning(
        "m", False, SLO, "2026", 9.0, 60.0, (), {"batch_size": (1, 8, 64)}, {}, tuple(trials),
        ending, choice,
    )  # fmt: skip


def test_the_highest_throughput_within_the_bounds() -> None:
    trials = (
        trial(NOW, "current", point(1, 100, 0.005), point(4, 300, 0.015), point(16, 900, 0.05)),
        trial(OTHER, "search", point(4, 400, 0.01), point(8, 900, 0.01, "unstable")),
        trial(THIRD, "search", point(4, 800, 0.03)),
    )
    choice = choose.choose_setting(trials)
    assert choice is not None
    assert (choice.values, choice.throughput, str(choice.load)) == (OTHER, 400, "4 at once")
    assert (choice.before, choice.is_current) == (300, False)
    assert choice.cautions == (
        "8 at once gave more (900.0/s), but not steadily",
        "it and the current setting were not measured again",
    )
    assert "batch 8: 400.0 rows/s at 4 at once; the current setting 300.0 (+33%)" in conclusion(
        tuning(*trials)
    )


def now(throughput: float, *, again: bool = False) -> Trial:
    """The current setting, measured first or once more at the end."""
    return trial(NOW, "final" if again else "current", point(4, throughput, 0.01))


def other(throughput: float, *, again: bool = False, cut: bool = False) -> Trial:
    """Another setting, found by the search or measured once more at the end."""
    return trial(OTHER, "final" if again else "search", point(4, throughput, 0.01), cut=cut)


@pytest.mark.parametrize(
    ("trials", "values", "throughput", "cautions"),
    [
        # What was measured again counts: the first figure of the best of many is too high by
        # chance.
        (
            [now(300), other(330), other(305, again=True), now(310, again=True)],
            NOW,
            310,
            [],
        ),
        (
            [now(300), other(330), other(305, again=True)],
            NOW,
            300,
            ["batch 8 gave +2%, but two runs of one setting may differ by 8%"],
        ),
        ([now(300), other(330), other(290, again=True)], NOW, 300, None),
        # A gain is nothing better if two runs of either setting differed by more.
        (
            [now(140), other(330), other(336, again=True), now(316, again=True)],
            NOW,
            316,
            ["batch 8 gave +6%, but two runs of one setting may differ by 126%"],
        ),
        # The current setting gave more itself.
        (
            [now(400), other(300), other(310, again=True), now(200, again=True)],
            NOW,
            200,
            ["batch 8 gave +55%, but two runs of one setting may differ by 100%"],
        ),
        ([now(200), now(400), other(310), other(310, again=True), now(205)], NOW, 205, None),
        # Without two runs of one setting, they may differ by 5 %.
        ([now(300), other(314)], NOW, 300, None),
        ([now(300), other(317)], OTHER, 317, None),
        # The best setting alone was not measured again.
        ([now(300), other(400), now(300, again=True)], OTHER, 400, ["it was not measured again"]),
        # A measurement that was cut short has climbed from below the best load: its figures are not
        # those of the setting.
        ([now(300), other(500), other(390, again=True, cut=True)], OTHER, 500, None),
        # A setting that fails at last keeps its figures.
        (
            [
                now(300),
                other(400),
                Trial(OTHER, "final", failure="out of memory"),
                now(300, again=True),
            ],
            OTHER,
            400,
            ["batch 8 did not load when it was to be measured again"],
        ),
    ],
)
def test_which_setting_is_chosen(
    trials: list[Trial],
    values: dict[str, int],
    throughput: float,
    cautions: list[str] | None,
) -> None:
    made = tuning(*trials)
    choice = made.choice
    assert choice is not None
    assert (choice.values, choice.throughput) == (values, throughput)
    assert choice.is_current == (values == NOW)
    if cautions is not None:
        assert list(choice.cautions) == cautions
    is_none_better = "Nothing better than the current setting" in conclusion(made)
    assert is_none_better == choice.is_current


def test_the_leader_is_confirmed_although_its_gain_is_noise() -> None:
    trials = [now(140), other(330), other(336, again=True), now(316, again=True)]
    leader = choose.find_leader(trials)
    assert leader is not None
    assert leader.values == OTHER


def test_a_measurement_that_was_cut_short_is_not_shown() -> None:
    first = other(500)
    made = tuning(now(300), first, other(390, again=True, cut=True))
    assert shown(made)["best"] == first.result


def test_no_setting_meets_the_bounds() -> None:
    trials = (
        trial(NOW, "current", point(1, 100, 0.1), point(4, 300, 0.3)),
        trial(OTHER, "search", point(1, 90, 0.03), point(4, 90, 0.001, "behind")),
        failed(THIRD),
    )
    assert choose.choose_setting(trials) is None
    said = conclusion(tuning(*trials))
    assert "No setting meets latency-p95=20ms. Nearest: batch 8 at 1 at once" in said
    assert "where latency-p95 is 30 ms: 1.5 times its bound at worst" in said
    found = shown(tuning(*trials))
    assert {name: result.points[0].measured.throughput for name, result in found.items()} == {
        "current": 100, "nearest": 90,
    }  # fmt: skip


def test_why_there_is_no_figure_is_said() -> None:
    """Bounds that are broken are one thing, loads without figures another."""
    good = trial(THIRD, "search", point(4, 400, 0.01))
    for current, said in (
        (trial(NOW, "current", point(1, 9, 0.1)), "meets the bounds at no load"),
        (trial(NOW, "current", unmeasured(1, "x")), "could be measured at no load"),
        (Trial(NOW, "current", failure="no such file"), "did not load"),
    ):
        assert said in trial_line(current)
        assert f"the current setting {said}" in conclusion(tuning(current, good))
    assert list(shown(tuning(current, good))) == ["best"]
    assert conclusion(tuning(failed(NOW))).startswith("No setting could be measured")


def test_reasons_stand_in_the_report_as_they_are(tmp_path: Path) -> None:
    """What the terminal would take for its markup, and the browser for its own."""
    reason = "no [kernel] for <this>"
    made = tuning(trial(NOW, "current", point(4, 300, 0.01)), failed(OTHER, reason))
    page = write_tuning(made, tmp_path).read_text(encoding="utf-8")
    assert "did not load, no [kernel] for &lt;this&gt;" in page
    terminal = Console(file=io.StringIO(), width=200)
    terminal.print(trial_line(made.trials[1]))
    print_end(made, terminal, "config.pbtxt")
    said = terminal.file.getvalue()
    assert f"did not load  {reason}" in said
    assert "Nothing better than the current setting" in said


def test_the_results_are_those_of_one_run(tmp_path: Path) -> None:
    """What an earlier run left in the folder is not compared with those of this one."""
    current = trial(NOW, "current", point(4, 300, 0.01))
    write_tuning(tuning(current, trial(OTHER, "search", point(4, 400, 0.01))), tmp_path)
    assert {path.name for path in tmp_path.glob("*.json")} == {"current.json", "best.json"}
    write_tuning(tuning(current), tmp_path)
    assert {path.name for path in tmp_path.glob("*.json")} == {"current.json"}


def test_the_order_of_scores() -> None:
    """Met by throughput, above missed by nearness, above what did not load."""
    ascending = [
        failed(NOW),
        trial(NOW, "search", point(1, 900, 0.2)),
        trial(NOW, "search", point(1, 10, 0.021)),
        trial(NOW, "search", point(1, 10, 0.001)),
        trial(NOW, "search", point(1, 20, 0.001)),
    ]
    scores = [choose.score(each) for each in ascending]
    assert scores == sorted(scores)
    assert len(set(scores)) == len(scores)
