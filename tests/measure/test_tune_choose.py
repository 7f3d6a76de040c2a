"""The best setting, what came nearest, and what is said beside it."""

import io
from pathlib import Path

from jitney_measure import choose, record
from jitney_measure.choose import conclusion, print_end, shown, trial_line
from jitney_measure.record import Trial, Tuning
from jitney_measure.report import write_tuning
from rich.console import Console

from tests.measure.trials import SLO, failed, point, trial, unmeasured

NOW, OTHER, THIRD = {"batch_size": 64}, {"batch_size": 8}, {"batch_size": 1}


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


def test_what_was_measured_again_counts() -> None:
    """The first figure of the best one of many is too great by chance."""
    first = (
        trial(NOW, "current", point(4, 300, 0.01)),
        trial(OTHER, "search", point(4, 330, 0.01)),
    )
    again = (
        trial(OTHER, "final", point(4, 305, 0.01)),
        trial(NOW, "final", point(4, 310, 0.01)),
    )
    choice = choose.choose_setting(first + again)
    assert choice is not None
    assert choice.is_current
    assert choice.throughput == 310
    assert "Nothing better than the current setting" in conclusion(tuning(*first, *again))
    kept = choose.choose_setting((*first, again[0]))
    assert kept is not None
    assert (kept.values, kept.throughput, kept.is_current) == (NOW, 300, True)
    assert kept.cautions == ("batch 8 gave +2%, but two runs of one setting may differ by 8%",)
    low = choose.choose_setting((*first, trial(OTHER, "final", point(4, 290, 0.01))))
    assert low is not None
    assert (low.is_current, low.throughput) == (True, 300)


def test_a_gain_below_its_own_noise_is_nothing_better() -> None:
    """Whatever the current setting was measured as before, and however great the gain looks."""
    first = (
        trial(NOW, "current", point(4, 140, 0.01)),
        trial(OTHER, "search", point(4, 330, 0.01)),
    )
    again = (
        trial(OTHER, "final", point(4, 336, 0.01)),
        trial(NOW, "final", point(4, 316, 0.01)),
    )
    made = tuning(*first, *again)
    assert made.choice is not None
    assert (made.choice.values, made.choice.throughput) == (NOW, 316)
    assert made.choice.cautions == (
        "batch 8 gave +6%, but two runs of one setting may differ by 126%",
    )
    assert "Nothing better than the current setting" in conclusion(made)
    leader = choose.find_leader(first + again)
    assert leader is not None
    assert leader.values == OTHER
    # Without noise of its own: 5 %.
    for throughput, values in ((314, NOW), (317, OTHER)):
        close = (
            trial(NOW, "current", point(4, 300, 0.01)),
            trial(OTHER, "search", point(4, throughput, 0.01)),
        )
        choice = choose.choose_setting(close)
        assert choice is not None
        assert choice.values == values


def test_a_best_setting_alone_that_was_not_measured_again_is_named() -> None:
    trials = (
        trial(NOW, "current", point(4, 300, 0.01)),
        trial(OTHER, "search", point(4, 400, 0.01)),
        trial(NOW, "final", point(4, 300, 0.01)),
    )
    choice = choose.choose_setting(trials)
    assert choice is not None
    assert choice.cautions == ("it was not measured again",)


def test_a_last_measurement_that_was_cut_short_does_not_count() -> None:
    """It climbs from below the best load: what it has is no figure of the setting."""
    first = (
        trial(NOW, "current", point(1, 80, 0.01), point(4, 300, 0.01)),
        trial(OTHER, "search", point(4, 400, 0.01), point(8, 500, 0.01)),
    )
    short = trial(OTHER, "final", point(4, 390, 0.01), cut=True)
    choice = choose.choose_setting((*first, short))
    assert choice is not None
    assert (choice.values, choice.throughput) == (OTHER, 500)
    assert shown(tuning(*first, short))["best"].best == first[1].result.best


def test_a_best_setting_that_fails_at_last_keeps_its_figures_and_a_caution() -> None:
    first = (
        trial(NOW, "current", point(4, 300, 0.01)),
        trial(OTHER, "search", point(4, 400, 0.01)),
    )
    again = (
        Trial(OTHER, "final", failure="out of memory"),
        trial(NOW, "final", point(4, 300, 0.01)),
    )
    choice = choose.choose_setting((*first, *again))
    assert choice is not None
    assert (choice.values, choice.throughput) == (OTHER, 400)
    assert choice.cautions == ("batch 8 did not load when it was to be measured again",)


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
